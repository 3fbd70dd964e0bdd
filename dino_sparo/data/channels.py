"""An array or a Pillow image of any number of channels -> `ChannelImage`, in the depth of the file; and its picture.

Photographs are 8-bit RGB and stay Pillow images. Everything else that a model with --in_chans takes comes from here:
16-bit grey, `.npy` arrays, TIFFs with several pages, RGB with an infrared band.
"""

import contextlib
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped, UInt8
from PIL import Image, ImageSequence

from dino_sparo.runtime.faults import UserError

WHITE = 255.0  # levels are those of 8-bit pixels, with fractions
NUMPY_MAGIC = b"\x93NUMPY"
DEEPEST = 65535  # the largest integer that a file may hold
PICTURE_PERCENTILES = (2, 98)  # of a channel, which a picture shows black and white


class ChannelImage(Image.Image):
    """An image of C channels whose levels, 0 for black to 255 for white, have fractions.

    It is a Pillow image for the functions that crop, resize and mirror; each channel is one of Pillow's float images.
    """

    def __init__(self, planes: Sequence[Image.Image]) -> None:
        super().__init__()
        self.planes = list(planes)
        self._size, self._mode = planes[0].size, "F"

    @classmethod
    def from_levels(cls, levels: Float[np.ndarray, "C H W"]) -> "ChannelImage":
        """The image of an array."""
        return cls([Image.fromarray(np.asarray(plane, np.float32)) for plane in levels])

    def getbands(self) -> tuple[str, ...]:
        """One name per channel."""
        return tuple(map(str, range(len(self.planes))))

    def crop(self, box: Any = None) -> "ChannelImage":
        """The pixels of a box."""
        return ChannelImage([plane.crop(box) for plane in self.planes])

    def transpose(self, method: Any) -> "ChannelImage":
        """The image mirrored or rotated."""
        return ChannelImage([plane.transpose(method) for plane in self.planes])

    def resize(self, size: Any, resample: int | None = None, box: Any = None, *_: Any) -> "ChannelImage":
        """The image resampled; levels stay within black and white, as in 8-bit images."""
        resized = [np.asarray(plane.resize(size, resample, box)) for plane in self.planes]
        return self.from_levels(np.clip(resized, 0, WHITE))

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """(H, W, C) floats, as Pillow's images with several bands are (H, W, C) integers."""
        levels = np.stack([np.asarray(plane) for plane in self.planes], axis=-1)
        return {"version": 3, "shape": levels.shape, "typestr": "<f4", "data": levels.astype("<f4").tobytes()}


def planes_of_array(values: Shaped[np.ndarray, "..."], in_chans: int) -> Shaped[np.ndarray, "C H W"]:
    """An array (H, W), (H, W, C) or (C, H, W) as (C, H, W); ValueError for other axes or another number of channels.

    The axis whose length is `in_chans` holds the channels; if both axes have this length, the last one does. For three
    channels an array of one channel is grey.
    """
    if values.ndim == 2:
        values = values[None]
    if values.ndim != 3 or not values.size:
        raise UserError(f"has shape {values.shape}; save (H, W), (H, W, C) or (C, H, W)")
    for count in (in_chans, 1) if in_chans == 3 else (in_chans,):
        if values.shape[-1] == count:
            return np.moveaxis(values, -1, 0)
        if values.shape[0] == count:
            return values
    raise wrong_channels(min(values.shape[0], values.shape[-1]), in_chans)


def planes_of_image(image: Image.Image, in_chans: int) -> list[np.ndarray]:
    """Channels of a Pillow image as they are stored: the pages of a TIFF with several, else the bands.

    Palettes become RGB. Transparency is dropped if the image has one channel too many. Another number of channels, and
    pages of different sizes, are a ValueError.
    """
    if image.format == "TIFF" and getattr(image, "is_animated", False):
        return _planes_of_pages(image, in_chans)
    if image.mode in ("P", "1"):
        image = image.convert("RGB" if image.mode == "P" else "L")
    bands = image.getbands()
    if len(bands) == in_chans + 1 and bands[-1] in ("A", "a"):
        bands = bands[:-1]
    if len(bands) != in_chans:
        raise wrong_channels(len(bands), in_chans)
    values = np.asarray(image)
    return [values] if values.ndim == 2 else [values[..., band] for band in range(in_chans)]


def _planes_of_pages(image: Image.Image, in_chans: int) -> list[np.ndarray]:
    """The pages of a TIFF, each of which has one channel; further pages are not counted, since there may be many."""
    size, planes = image.size, list[np.ndarray]()
    for page in islice(ImageSequence.Iterator(image), in_chans):
        if page.size != size or len(page.getbands()) != 1:
            raise UserError(
                f"page {len(planes)} has mode {page.mode} and size {page.size}; save one channel of size {size}"
            )
        planes.append(np.array(page))
    with contextlib.suppress(EOFError):
        image.seek(in_chans)
        raise UserError(f"has more pages than the {in_chans} channels of the model; save one page per channel")
    if len(planes) < in_chans:
        raise wrong_channels(len(planes), in_chans)
    return planes


def wrong_channels(found: int, in_chans: int) -> ValueError:
    """The error of an image with another number of channels than the model takes."""
    return ValueError(
        f"has {found} channel{'s' * (found != 1)}, the model takes {in_chans}; give images of {in_chans}, or a model "
        f"that was trained with --in_chans {found}"
    )


def levels_of(values: Shaped[np.ndarray, "*size"], max_value: int) -> Float[np.ndarray, "*size"]:
    """Pixels as stored -> levels from 0 to 255: 8-bit as they are, deeper integers by `max_value`, floats from 0 to 1.

    Integers below 0 or of more than 16 bit, floats beyond 0 to 1, and anything but numbers are a UserError.
    """
    if values.dtype == np.uint8:
        return values.astype(np.float32)
    if values.dtype.kind not in "iuf":
        raise UserError(f"holds {values.dtype}; save integers or floats")
    low, high = values.min(), values.max()
    is_float = values.dtype.kind == "f"
    if not (low >= 0 and high <= (1 if is_float else DEEPEST)):  # NaN is neither
        valid = "floats from 0 to 1" if is_float else f"integers from 0 to {DEEPEST}"
        raise UserError(f"has {values.dtype} pixels from {low} to {high}; save {valid}")
    white = 1.0 if is_float else float(max_value)
    return np.minimum(values, white).astype(np.float32) * np.float32(WHITE) / np.float32(white)


def picture_of(levels: Shaped[np.ndarray, "H W C"], channels: Sequence[int] = ()) -> UInt8[np.ndarray, "H W 3"]:
    """Some channels of an image as 8-bit RGB: one as grey, three as red, green and blue, each with its own contrast.

    The levels have any unit. By default the first three channels are shown, or the first if there are fewer; a channel
    that the image lacks is a UserError.
    """
    number = levels.shape[-1]
    channels = list(channels) or ([0, 1, 2] if number >= 3 else [0])
    if len(channels) not in (1, 3) or max(channels) >= number:
        raise UserError(f"--show_channels {channels}: give one or three numbers from 0 to {number - 1}")
    shown = levels[..., channels].astype(np.float32)
    low, high = np.percentile(shown, PICTURE_PERCENTILES, axis=(0, 1))
    stretched = (shown - low) * (WHITE / np.maximum(high - low, 1e-6)) + 0.5
    return np.broadcast_to(np.clip(stretched, 0, WHITE), (*levels.shape[:2], 3)).astype(np.uint8)

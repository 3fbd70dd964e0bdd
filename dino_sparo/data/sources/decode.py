"""An image file, or a part of a file -> pixels as the model takes them, or a `CorruptImageError` with the reason.

The last step of every source that reads files. Images may come from strangers: Pillow runs PostScript with Ghostscript,
and a file of a few kilobytes may hold more pixels than fit into memory. So formats and sizes are limited.
"""

import io
import logging
import mmap
import os
import warnings
from collections import Counter
from dataclasses import dataclass

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from dino_sparo.data.channels import NUMPY_MAGIC, ChannelImage, levels_of, planes_of_array, planes_of_image
from dino_sparo.data.defaults import EXIF, MAX_IMAGE_MB, MAX_IMAGE_MPIX, MAX_VALUE
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import open_regular

# The first line holds the endings that torchvision's ImageFolder, hence the reference, takes for images.
IMAGE_EXTENSIONS = (
    *(".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"),
    *(".jfif", ".jpe", ".gif", ".pbm", ".pnm"),
)
IMAGE_ENDINGS = tuple(ending.encode() for ending in IMAGE_EXTENSIONS)
ARRAY_EXTENSION = ".npy"  # in folders and shards an image only for a model of other than three channels
# Endings of pictures that are not read; files of other endings need not be pictures.
UNREAD = {*(".heic", ".heif", ".avif", ".jxl", ".jp2", ".dcm", ".npy", ".svg", ".dng", ".cr2", ".nef", ".arw")}
# Formats that Pillow decodes itself; the name of a file does not matter.
IMAGE_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

STORED_SIZE = "stored_size"  # entry of `info` of an image that was turned upright: (width, height) before
_logger = logging.getLogger(__name__)
# 1 after the warning about dark images, and about pages. Forked workers share the memory, so a run warns once, or again
# if several workers see their first such images at the same moment.
_HAS_WARNED = mmap.mmap(-1, 2)
DARK_SHARE = 0.25  # of white; the brightest pixel of a 14-bit image, taken for 16 bits


@dataclass(frozen=True)
class ImageLimits:
    """Images beyond these are not decoded and count as unreadable.

    Attributes:
        max_mb: size of the file, 10^6 bytes.
        max_mpix: width times height, 10^6 pixels. Decoding takes up to 8 bytes per pixel.
        max_value: of images with more than 8 bit, which is white; larger values are white, too.
        in_chans: channels that the model takes. 3: 8-bit RGB; else the depth of the file is kept.
        exif: "apply": images are turned upright by their EXIF orientation; "ignore": they are not.
    """

    max_mb: float = MAX_IMAGE_MB
    max_mpix: float = MAX_IMAGE_MPIX
    max_value: int = MAX_VALUE
    in_chans: int = 3
    exif: str = EXIF[0]

    @property
    def extensions(self) -> tuple[str, ...]:
        """Endings of the files that are images in folders and shards."""
        return IMAGE_EXTENSIONS if self.in_chans == 3 else (*IMAGE_EXTENSIONS, ARRAY_EXTENSION)


DEFAULT_LIMITS = ImageLimits()


def left_out(endings: Counter[str]) -> str:
    """Numbers of files by their ending, and how to make them readable if they are pictures; "" without files."""
    words = ", ".join(f"{number:,} {ending or 'without ending'}" for ending, number in endings.most_common(10))
    remedy = " (convert pictures to JPEG or PNG; HEIC by pillow-heif or heif-convert)" * bool(endings.keys() & UNREAD)
    return f"; left out {words}{remedy}" if endings else ""


class CorruptImageError(UserError):
    """An image that cannot be read.

    Attributes:
        location: where it lies, e.g. `data/a.jpg`, `shard-000.tar!a.jpg`.
        reason: what is wrong with it.
    """

    # The default lets a DataLoader rebuild the error from its message alone when it comes out of a worker.
    def __init__(self, location: str, reason: str = "") -> None:
        super().__init__(location, reason)
        self.location, self.reason = location, reason

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}" if self.reason else self.location


def read_image(
    path: str, location: str, offset: int = 0, size: int | None = None, limits: ImageLimits = DEFAULT_LIMITS
) -> Image.Image:
    """Read and decode an image, which lies in the file at `offset` with `size` bytes (None: up to the file's end).

    Raises:
        CorruptImageError: no regular file, it cannot be read, is too large, or see `decode_image`.
    """
    try:
        # Opening the file each time costs microseconds, and nothing has to survive fork or pickling.
        with open_regular(path) as file:
            length = os.fstat(file.fileno()).st_size if size is None else size
            refuse_large_file(length, location, limits)
            file.seek(offset)
            data = file.read(length)
    except CorruptImageError:
        raise
    except (OSError, ValueError) as error:  # ValueError: the path holds a null byte
        raise CorruptImageError(location, str(getattr(error, "strerror", None) or error)) from error
    return decode_image(data, location, limits)


def refuse_large_file(length: int, location: str, limits: ImageLimits) -> None:
    """CorruptImageError if an image file of `length` bytes is larger than the limit."""
    if length > limits.max_mb * 1e6:
        raise CorruptImageError(
            location, f"has {length:,} bytes; at most {limits.max_mb:g} MB are read (--max_image_mb)"
        )


def decode_image(data: bytes, location: str, limits: ImageLimits = DEFAULT_LIMITS) -> Image.Image:
    """Decode an image file to `limits.in_chans` channels; three channels have the pixels of the reference's loader.

    As there, transparency is dropped rather than composited. 16-bit grayscale is scaled to 8 bit by `limits.max_value`;
    the reference clips it, which turns most such images white. The reference ignores the EXIF orientation.

    Raises:
        CorruptImageError: empty, truncated, neither of `IMAGE_FORMATS` nor a `.npy`, too large, with pixels of
            unknown range, or of another number of channels.
    """
    if not data:
        raise CorruptImageError(location, "the file is empty (0 bytes)")
    try:
        if data.startswith(NUMPY_MAGIC):
            values = np.load(io.BytesIO(data), allow_pickle=False)
            _refuse_large_image(values.size // limits.in_chans, values.shape, limits)
            return to_image(values, limits.in_chans, limits.max_value)
        with warnings.catch_warnings():  # Pillow warns above half of its own limit; ours is checked below
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image: Image.Image = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
        _refuse_large_image(image.width * image.height, image.size, limits)
        image.load()
        # Only palettes with partial transparency use this entry, to warn that RGB drops it; pixels do not depend on it.
        image.info.pop("transparency", None)
        return to_image(image, limits.in_chans, limits.max_value, limits.exif)
    except UnidentifiedImageError as error:
        raise CorruptImageError(location, f"is not one of {', '.join(IMAGE_FORMATS)}; convert it") from error
    except Exception as error:  # decoders of damaged bytes raise anything: OSError, SyntaxError, struct.error, ...
        has_words = isinstance(error, OSError | ValueError | Image.DecompressionBombError)
        raise CorruptImageError(location, str(error) if has_words else repr(error)) from error


def _refuse_large_image(num_pixels: int, sides: tuple[int, ...], limits: ImageLimits) -> None:
    if num_pixels > limits.max_mpix * 1e6:
        raise OSError(
            f"{' x '.join(f'{side:,}' for side in sides)} pixels; at most {limits.max_mpix:g} million are read "
            "(--max_image_mpix)"
        )


def to_image(
    image: Image.Image | np.ndarray, in_chans: int, max_value: int = MAX_VALUE, exif: str = EXIF[0]
) -> Image.Image:
    """An image of any mode, or an array, as a model takes it: 8-bit RGB for three channels, else a `ChannelImage`.

    Args:
        image: as opened by Pillow; or (H, W), (H, W, C) or (C, H, W).
        in_chans: number of the model's channels.
        max_value: value of pixels with more than 8 bit that is white.
        exif: as in `ImageLimits`.

    Raises:
        ValueError: the range of the pixels is unknown, or the image has another number of channels.
    """
    if isinstance(image, ChannelImage):
        return image
    if isinstance(image, np.ndarray):
        planes = list(planes_of_array(image, in_chans))
    else:
        image = _oriented(image, exif)
        if in_chans == 3:
            if image.format == "TIFF" and getattr(image, "is_animated", False) and not _HAS_WARNED[1]:
                _HAS_WARNED[1] = 1
                _logger.warning(
                    "a TIFF has several pages, of which only the first is read, as RGB; if the pages are channels, "
                    "give their number as --in_chans"
                )
            return to_rgb(image, max_value)
        planes = planes_of_image(image, in_chans)
    if planes[0].dtype.itemsize > 1 and planes[0].dtype.kind in "iu":
        low, high = min(plane.min() for plane in planes), max(plane.max() for plane in planes)
        _warn_of_dark(int(low), int(high), max_value)
    levels = np.stack([levels_of(plane, max_value) for plane in planes])
    if in_chans != 3:
        channels = ChannelImage.from_levels(levels)
        channels.info.update(getattr(image, "info", {}))
        return channels
    return Image.fromarray((levels + 0.5).astype(np.uint8).transpose(1, 2, 0).repeat(3 // len(levels), axis=2))


def _oriented(image: Image.Image, exif: str) -> Image.Image:
    """An image turned by its EXIF orientation, or as it is stored; the result has no orientation left."""
    image.load()  # a PNG's orientation may follow its pixels, and Pillow turns a TIFF itself as it loads the pixels
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged EXIF data raise anything; viewers do without them
        orientation = 1
    if orientation == 1:
        return image
    stored = image.copy()
    stored.info.clear()
    if exif == EXIF[1]:
        return stored
    stored.getexif()[ExifTags.Base.Orientation] = orientation
    upright = ImageOps.exif_transpose(stored)
    upright.info[STORED_SIZE] = stored.size
    return upright


def to_rgb(image: Image.Image, max_value: int) -> Image.Image:
    """An image of any mode as 8-bit RGB; `max_value` of 16-bit grayscale is white (Pillow opens some as 32 bit).

    Raises:
        ValueError: the range of the pixels is unknown: floating-point numbers, or integers of more than 16 bit.
    """
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        values = np.asarray(image)
        low, high = values.min(), values.max()
        if image.mode == "F" or low < 0 or high > MAX_VALUE:
            raise UserError(f"{image.mode} pixels from {low} to {high} have no known range; save as 8 bit")
        _warn_of_dark(int(low), int(high), max_value)
        scaled = (np.minimum(values, max_value).astype(np.uint32) * 255 + max_value // 2) // max_value
        image = Image.fromarray(scaled.astype(np.uint8))
    return image if image.mode == "RGB" else image.convert("RGB")  # converting what is RGB already would copy it


def _warn_of_dark(low: int, high: int, max_value: int) -> None:
    """Warn once of an image with more than 8 bit whose brightest pixel is far below white."""
    if 0 < high <= DARK_SHARE * max_value and not _HAS_WARNED[0]:
        _HAS_WARNED[0] = 1
        _logger.warning(
            "a 16-bit image has values from %d to %d, where %d is white: it is nearly black; if all images are like "
            "this, give --max_value %d",
            *(low, high, max_value, (1 << int(high).bit_length()) - 1),
        )

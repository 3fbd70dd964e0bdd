"""An image file, or the part of a file that holds one -> its pixels, 8-bit RGB, or the reason why it has none.

The last step of every source that reads files. What goes wrong with one image is always a `CorruptImageError`, so that
`data/dataset.py` can replace the image and name it.
"""

import io
import os
import warnings

import numpy as np
from PIL import Image, UnidentifiedImageError

from dino_sparo.data.sources.limits import IMAGE_FORMATS, ImageLimits, open_regular

# The endings that torchvision's ImageFolder, hence the reference, takes for images.
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
IMAGE_ENDINGS = tuple(ending.encode() for ending in IMAGE_EXTENSIONS)
DEFAULT_LIMITS = ImageLimits()


class CorruptImageError(ValueError):
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
    """Read and decode one image.

    Args:
        path: the file.
        location: what to call the image in errors.
        offset: where in the file the image begins, bytes.
        size: bytes; None: up to the file's end.
        limits: larger images are refused.

    Raises:
        CorruptImageError: no regular file, it cannot be read, is too large, or see `decode_image`.
    """
    try:
        # Opened anew each time: costs microseconds, and nothing has to survive fork or pickling.
        with open_regular(path) as file:
            length = os.fstat(file.fileno()).st_size if size is None else size
            refuse_large_file(length, location, limits)
            file.seek(offset)
            data = file.read(length)
    except OSError as error:
        raise CorruptImageError(location, str(error.strerror)) from error
    except ValueError as error:
        if isinstance(error, CorruptImageError):
            raise
        raise CorruptImageError(location, str(error)) from error  # the path holds a null byte
    return decode_image(data, location, limits)


def refuse_large_file(length: int, location: str, limits: ImageLimits) -> None:
    """CorruptImageError if an image file of `length` bytes is larger than the limit."""
    if length > limits.max_mb * 1e6:
        raise CorruptImageError(
            location, f"has {length:,} bytes; at most {limits.max_mb:g} MB are read (--max_image_mb)"
        )


def decode_image(data: bytes, location: str, limits: ImageLimits = DEFAULT_LIMITS) -> Image.Image:
    """Decode an image file to 8-bit RGB, the pixels that the reference's loader gives.

    As there, transparency is dropped rather than composited and the EXIF orientation is ignored. 16-bit grayscale is
    scaled to 8 bit; the reference clips it, which turns most such images white.

    Args:
        data: the file's bytes.
        location: what to call it in errors.
        limits: images with more pixels are refused by their header.

    Raises:
        CorruptImageError: empty, truncated, of none of the `IMAGE_FORMATS`, too large, or with pixels of unknown range.
    """
    if not data:
        raise CorruptImageError(location, "the file is empty (0 bytes)")
    try:
        with warnings.catch_warnings():  # Pillow warns above half of its own limit; ours is checked below
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image: Image.Image = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
        if image.width * image.height > limits.max_mpix * 1e6:
            raise OSError(
                f"{image.width:,} x {image.height:,} pixels; at most {limits.max_mpix:g} million are read "
                "(--max_image_mpix)"
            )
        image.load()
        # Only palettes with partial transparency use this entry, to warn that RGB drops it; pixels do not depend on it.
        image.info.pop("transparency", None)
        return to_rgb(image)
    except UnidentifiedImageError as error:
        raise CorruptImageError(location, f"is none of {', '.join(IMAGE_FORMATS)}") from error
    except Exception as error:  # decoders of damaged bytes raise anything: OSError, SyntaxError, struct.error, ...
        reason = str(error) if isinstance(error, OSError | Image.DecompressionBombError) else repr(error)
        raise CorruptImageError(location, reason) from error


def to_rgb(image: Image.Image) -> Image.Image:
    """An image of any mode as 8-bit RGB, as `decode_image` gives it.

    Raises:
        ValueError: pixels whose range is not known: floating-point numbers, or integers of more than 16 bit.
    """
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _scale_deep_gray(image)
    return image if image.mode == "RGB" else image.convert("RGB")  # converting what is RGB already would copy it


def _scale_deep_gray(image: Image.Image) -> Image.Image:
    """16-bit gray -> 8-bit gray, 65535 -> 255; PIL gives some 16-bit files as 32-bit integers."""
    values = np.asarray(image)
    if image.mode == "F" or values.min() < 0 or values.max() > 65535:
        raise ValueError(
            f"{image.mode} pixels from {values.min()} to {values.max()} have no known range; save as 8 bit"
        )
    return Image.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8))

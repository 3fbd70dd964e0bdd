"""An image file, or the part of a file that holds one -> its pixels, 8-bit RGB, or the reason why it has none.

The last step of every source that reads files. What goes wrong with one image is always a `CorruptImageError`, so that
`data.py` can replace the image and name it.
"""

import io
import os
import re

import numpy as np
from PIL import Image

# The endings that torchvision's ImageFolder, hence the reference, takes for images.
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
IMAGE_ENDINGS = tuple(ending.encode() for ending in IMAGE_EXTENSIONS)
MAX_IMAGE_BYTES = 1 << 29


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


def read_image(path: str, location: str, offset: int = 0, size: int | None = None) -> Image.Image:
    """Read and decode one image.

    Args:
        path: the file.
        location: what to call the image in errors.
        offset: where in the file the image begins, bytes.
        size: bytes; None: up to the file's end.

    Raises:
        CorruptImageError: the file cannot be read, the size is absurd, or see `decode_image`.
    """
    try:
        # Opened anew each time: costs microseconds, and nothing has to survive fork or pickling.
        with open(path, "rb") as file:
            length = os.fstat(file.fileno()).st_size if size is None else size
            if length > MAX_IMAGE_BYTES:
                raise CorruptImageError(
                    location, f"{length:,} bytes is no plausible image; at most {MAX_IMAGE_BYTES:,} are read"
                )
            file.seek(offset)
            data = file.read(size)
    except OSError as error:
        raise CorruptImageError(location, str(error.strerror)) from error
    return decode_image(data, location)


def decode_image(data: bytes, location: str) -> Image.Image:
    """Decode an image file to 8-bit RGB, the pixels that the reference's loader gives.

    As there, transparency is dropped rather than composited and the EXIF orientation is ignored. 16-bit grayscale is
    scaled to 8 bit; the reference clips it, which turns most such images white.

    Args:
        data: the file's bytes.
        location: what to call it in errors.

    Raises:
        CorruptImageError: empty, truncated, undecodable, larger than PIL's limit, or with pixels of unknown range.
    """
    if not data:
        raise CorruptImageError(location, "the file is empty (0 bytes)")
    try:
        image: Image.Image = Image.open(io.BytesIO(data))
        image.load()
        # Only palettes with partial transparency use this entry, to warn that RGB drops it; pixels do not depend on it.
        image.info.pop("transparency", None)
        if image.mode in ("I", "F") or image.mode.startswith("I;16"):
            image = _scale_deep_gray(image)
        # Converting what is RGB already would copy it.
        return image if image.mode == "RGB" else image.convert("RGB")
    except Exception as error:  # decoders of damaged bytes raise anything: OSError, SyntaxError, struct.error, ...
        reason = str(error) if isinstance(error, OSError | Image.DecompressionBombError) else repr(error)
        raise CorruptImageError(location, re.sub(r" <_io\.BytesIO.*>", "", reason)) from error


def _scale_deep_gray(image: Image.Image) -> Image.Image:
    """16-bit gray -> 8-bit gray, 65535 -> 255; PIL gives some 16-bit files as 32-bit integers."""
    values = np.asarray(image)
    if image.mode == "F" or values.min() < 0 or values.max() > 65535:
        raise ValueError(
            f"{image.mode} pixels from {values.min()} to {values.max()} have no known range; save as 8 bit"
        )
    return Image.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8))

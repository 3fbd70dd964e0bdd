"""What may be read: regular files, images of a few formats, of bounded size; JSON of bounded depth.

Data may come from strangers. Reading a named pipe may never end. Pillow runs PostScript with Ghostscript. A file of a
few kilobytes may hold more pixels than fit into memory.
"""

import io
import json
import os
import stat
from dataclasses import dataclass
from typing import Any

from dino_sparo.runtime.choices import MAX_IMAGE_MB, MAX_IMAGE_MPIX, MAX_VALUE

# Formats that Pillow decodes itself; the name of a file does not matter. GIF, since web collections name some .jpg.
IMAGE_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
PILLOW_MAX_MPIX = 178.9  # Pillow refuses larger images itself

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


@dataclass(frozen=True)
class ImageLimits:
    """Images beyond these are not decoded and count as unreadable.

    Attributes:
        max_mb: size of the file, 10^6 bytes.
        max_mpix: width times height, 10^6 pixels. Decoding takes up to 8 bytes per pixel.
        max_value: of 16-bit grayscale images, which is shown white; larger values are white, too.

    Raises:
        ValueError: a limit is out of range.
    """

    max_mb: float = MAX_IMAGE_MB
    max_mpix: float = MAX_IMAGE_MPIX
    max_value: int = MAX_VALUE

    def __post_init__(self) -> None:
        if not self.max_mb > 0:
            raise ValueError(f"--max_image_mb {self.max_mb}: give a positive number")
        if not 0 < self.max_mpix <= PILLOW_MAX_MPIX:
            raise ValueError(
                f"--max_image_mpix {self.max_mpix}: give a positive number, at most Pillow's own {PILLOW_MAX_MPIX}"
            )
        if not 0 < self.max_value <= MAX_VALUE:
            raise ValueError(f"--max_value {self.max_value}: give a number from 1 to {MAX_VALUE}")


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a file to read its bytes; anything but a regular file is refused at once.

    Raises:
        OSError: it is a pipe, a device, a folder or a socket; or it cannot be opened.
    """
    # Without O_NONBLOCK opening a pipe waits for a writer. The flag has no effect on regular files.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise OSError(0, f"is {_KINDS.get(kind, 'something else')}, not a regular file", os.fspath(path))
    return open(descriptor, "rb")


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_object(text: str | bytes, location: str) -> dict[str, Any]:
    """The object of a line.

    Raises:
        ValueError: it is none; the message begins with the location.
    """
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{location} is no JSON ({error}); give one object per line") from error
    if not isinstance(value, dict):
        raise ValueError(f"{location} is no JSON object; give one {{...}} per line")
    return value

"""Image files and tar shards, written as bytes."""

import io
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

OLD = (1e9, 1e9)  # a time stamp that no writing process can still be at


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    """The bytes of an image file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def write_images(folder: Path, number: int = 12, broken: int = 0, classes: Sequence[str] = ("",)) -> Path:
    """Images of different widths and colours, of each class in turn; the first ones are empty files."""
    for index in range(number):
        path = folder / classes[index % len(classes)] / f"{index:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20 + index, 24), (9 * index, 80, 200 - 5 * index)).save(path)
        if index < broken:
            path.write_bytes(b"")
    return folder


def write_tar(path: Path, members: Sequence[tuple[str, bytes]], tar_format: int = tarfile.PAX_FORMAT) -> Path:
    """A tar of these files, which is old enough for its list to be cached."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    os.utime(path, OLD)
    return path

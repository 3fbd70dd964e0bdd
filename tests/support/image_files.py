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

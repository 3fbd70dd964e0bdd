"""Records <-> a file with one JSON object per line, which grows line by line and survives being cut off."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dino_sparo.data.sources.limits import open_regular


class JsonLines:
    """A file that lines are appended to, each with one call of the system: a reader sees whole lines.

    A process that is killed, or a full disk, may leave part of a line at the end. Opening the file cuts that part off.

    Args:
        path: created if need be.
    """

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        os.ftruncate(self.descriptor, _whole_bytes(path))

    def write(self, record: dict[str, Any]) -> None:
        """Append a record."""
        line = json.dumps(record).encode() + b"\n"
        while line:
            line = line[os.write(self.descriptor, line) :]

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.descriptor)


def read_lines(path: Path | str) -> Iterator[tuple[int, int, bytes]]:
    """Number from 1, first byte, and bytes of every line that is not blank."""
    offset = 0
    with open_regular(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, offset, line
            offset += len(line)


def _whole_bytes(path: Path) -> int:
    """Bytes up to and including the last line's end."""
    with open_regular(path) as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - (1 << 16))
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0

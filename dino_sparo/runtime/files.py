"""Files from strangers -> bytes and JSON values: regular files only, JSON of bounded depth.

Reading a named pipe may never end, and deeply nested JSON exhausts the stack.
"""

import io
import json
import os
import stat
from typing import Any


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a file to read its bytes; OSError at once for a pipe, a device, a folder or a socket."""
    # Without O_NONBLOCK opening a pipe waits for a writer. The flag has no effect on regular files.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "is a folder, a pipe or a device, not a regular file", os.fspath(path))
    return open(descriptor, "rb")


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError if it is no JSON, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: str | os.PathLike[str]) -> Any:
    """The content of a JSON file; raises ValueError with its path if it is no JSON."""
    with open_regular(path) as file:
        try:
            return parse_json(file.read())
        except ValueError as error:
            raise ValueError(f"{path} is no JSON ({error}); is the download complete?") from error


def parse_object(text: str | bytes, location: str) -> dict[str, Any]:
    """The JSON object of a line; the ValueError for anything else begins with the location."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{location} is no JSON ({error}); give one object per line") from error
    if not isinstance(value, dict):
        raise ValueError(f"{location} is no JSON object; give one {{...}} per line")
    return value

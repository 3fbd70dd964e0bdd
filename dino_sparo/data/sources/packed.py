"""Names and labels of many images -> a few flat arrays, and the source of images that are files.

Flat arrays rather than Python strings: worker processes share arrays with their parent, whereas reading a Python object
writes its reference count and so copies the memory page it lies in.
"""

import hashlib
import os
import re
from collections.abc import Sequence

import numpy as np
from PIL import Image

from dino_sparo.data.sources.decode import DEFAULT_LIMITS, read_image

_MAX_CLASSES = 1 << 20

Arrays = dict[str, np.ndarray]


class PackedStrings:
    """Many strings in two arrays: all bytes one after the other, and where each string ends.

    Args:
        blob: (bytes,) uint8.
        ends: (len,) int64.
    """

    def __init__(self, blob: np.ndarray, ends: np.ndarray) -> None:
        self.blob, self.ends = blob, ends

    @classmethod
    def pack(cls, strings: Sequence[bytes]) -> "PackedStrings":
        """Pack file names given as the bytes that the file system holds."""
        lengths = np.fromiter(map(len, strings), np.int64, len(strings))
        return cls(np.frombuffer(b"".join(strings), np.uint8), lengths.cumsum())

    @classmethod
    def from_arrays(cls, arrays: Arrays, name: str) -> "PackedStrings":
        """The strings that `to_arrays(name)` put into an index."""
        return cls(arrays[f"{name}_blob"], arrays[f"{name}_ends"])

    def to_arrays(self, name: str) -> Arrays:
        """Both arrays, to be stored with others in an index."""
        return {f"{name}_blob": self.blob, f"{name}_ends": self.ends}

    def to_list(self) -> list[str]:
        """All strings; for those that are few."""
        return [self[i] for i in range(len(self))]

    def __len__(self) -> int:
        """Number of strings."""
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self.ends):
            raise IndexError(f"index {index} of {len(self.ends)}")
        start = self.ends[index - 1] if index else 0
        return os.fsdecode(self.blob[start : self.ends[index]].tobytes())


def hash_of(*arrays: np.ndarray) -> str:
    """SHA-256 of what arrays hold, hexadecimal."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()


def encode_labels(labels: Sequence[str | None]) -> tuple[list[str] | None, np.ndarray | None]:
    """Labels as written -> (class names, (len,) int64): whole numbers as they are, words by alphabetical order.

    An empty label, None or -1 means no label and becomes -1.
    """
    classes = sorted({label for label in labels if label and label != "-1"})
    if not classes:
        return None, None
    if all(re.fullmatch("[0-9]{1,9}", label) for label in classes) and max(map(int, classes)) < _MAX_CLASSES:
        number = {label: int(label) for label in classes}
        classes = [str(i) for i in range(max(number.values()) + 1)]
    else:
        number = {label: i for i, label in enumerate(classes)}
    return classes, np.fromiter((number.get(label or "", -1) for label in labels), np.int64, len(labels))


class FileSource:
    """Images that are files: a folder, a list or a table.

    Args:
        name: what the log calls it.
        root: folder that relative paths start from.
        paths: one per image, relative to `root` or absolute.
        classes: as in `ImageSource`.
        labels: as in `ImageSource`.

    Attributes:
        limits: larger images are refused; `open_source` sets it.
    """

    def __init__(
        self, name: str, root: str, paths: PackedStrings, classes: list[str] | None, labels: np.ndarray | None
    ) -> None:
        self.name, self.root, self.paths, self.classes, self.labels = name, root, paths, classes, labels
        self.limits = DEFAULT_LIMITS

    def __len__(self) -> int:
        """Number of images."""
        return len(self.paths)

    def location(self, index: int) -> str:
        """The file's path."""
        return os.path.join(self.root, self.paths[index])

    def read(self, index: int) -> Image.Image:
        """Image `index` as 8-bit RGB; raises CorruptImageError."""
        path = self.location(index)
        return read_image(path, path, limits=self.limits)

    def fingerprint(self) -> str:
        """A hash of all paths as they are written, so that a folder may move."""
        return hash_of(self.paths.blob, self.paths.ends)

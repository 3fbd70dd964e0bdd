"""The interface of a source of images, the source of images that are files, and a subset of a source.

Names and labels of many images are kept in flat arrays rather than Python strings: worker processes share arrays with
their parent, whereas reading a Python object writes its reference count and so copies its memory page.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence, Sized
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64
from PIL import Image

from dino_sparo.data.sources.decode import DEFAULT_LIMITS, ImageLimits, read_image

_MAX_CLASSES = 1 << 20


@runtime_checkable
class ImageSource(Protocol):
    """Any collection of images, by index.

    Attributes:
        name: for the log, such as "folder data/train".
        classes: names of the classes; None without labels.
        labels: (len,) int64, class of each image, -1 where an image has none; None without labels.
    """

    name: str
    classes: list[str] | None
    labels: np.ndarray | None

    def __len__(self) -> int:
        """Number of images."""

    def read(self, index: int) -> Image.Image:
        """Image `index` as RGB, or with the channels of its limits; raises CorruptImageError."""

    def location(self, index: int) -> str:
        """Path or position of image `index`, for logs and errors."""


def fingerprint_of(source: object) -> str | None:
    """Hash of the images' names, if the source has a method `fingerprint`; resuming warns if the hash changed."""
    fingerprint = getattr(source, "fingerprint", None)
    return None if fingerprint is None else fingerprint()


def sizes_and_times(source: object) -> str | None:
    """Hash of the sizes and modification times of the source's files; None if its class has no method `files`."""
    if (files := getattr(source, "files", None)) is None:
        return None
    return hash_of(np.fromiter(map(size_and_time, files()), np.dtype((np.int64, 2))))


def size_and_time(path: str) -> tuple[int, int]:
    """Size of a file in bytes, and its time of change in nanoseconds; 0, 0 if it is unreadable."""
    try:
        state = os.stat(path)
    except OSError:
        return 0, 0
    return state.st_size, state.st_mtime_ns


class PackedStrings:
    """Many strings in two arrays: all their bytes (uint8), and the end of each string (int64)."""

    def __init__(self, blob: np.ndarray, ends: np.ndarray) -> None:
        self.blob, self.ends = blob, ends

    @classmethod
    def pack(cls, strings: Sequence[bytes]) -> "PackedStrings":
        """Pack file names, given as the file system's bytes."""
        lengths = np.fromiter(map(len, strings), np.int64, len(strings))
        return cls(np.frombuffer(b"".join(strings), np.uint8), lengths.cumsum())

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        start = self.ends[index - 1] if index else 0
        return os.fsdecode(self.blob[start : self.ends[index]].tobytes())


class FileSource:
    """Images that are files, by paths that are absolute or relative to `root`.

    Attributes:
        why_unlabelled: the reason for which the files of a folder have no labels.
    """

    why_unlabelled = ""

    chosen_split: str | None = None  # of a table with a column of splits

    def __init__(
        self,
        name: str,
        root: str | os.PathLike[str],
        paths: "PackedStrings | Sequence[str]",
        classes: list[str] | None = None,
        labels: np.ndarray | None = None,
        limits: ImageLimits = DEFAULT_LIMITS,
    ) -> None:
        packed = paths if isinstance(paths, PackedStrings) else PackedStrings.pack(list(map(os.fsencode, paths)))
        self.name, self.root, self.paths, self.classes, self.labels = name, os.fspath(root), packed, classes, labels
        self.limits = limits

    def __len__(self) -> int:
        return len(self.paths)

    def location(self, index: int) -> str:
        """The file's path."""
        return os.path.join(self.root, self.paths[index])

    def files(self) -> Iterator[str]:
        """The path of every image."""
        return map(self.location, range(len(self)))

    def read(self, index: int) -> Image.Image:
        """Image `index` as RGB, or with the channels of its limits; raises CorruptImageError."""
        path = self.location(index)
        return read_image(path, path, limits=self.limits)

    def fingerprint(self) -> str:
        """A hash of all paths as they are written, so that a folder may move."""
        return hash_of(self.paths.blob, self.paths.ends)


class Subset:
    """Some images of a source in a new order, optionally with other labels and classes."""

    def __init__(
        self,
        source: ImageSource,
        indices: Int64[np.ndarray, " images"],
        labels: Int64[np.ndarray, " images"] | None = None,
        classes: list[str] | None = None,
    ) -> None:
        self.source, self.indices = source, indices
        self.name = source.name if len(indices) == len(source) else f"{len(indices)} images of {source.name}"
        self.classes = source.classes if classes is None else classes
        self.labels = labels if labels is not None or source.labels is None else source.labels[indices]

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> Image.Image:
        """Image `index` as RGB, or with the channels of its limits; raises CorruptImageError."""
        return self.source.read(int(self.indices[index]))

    def location(self, index: int) -> str:
        """Path or position of image `index`, for logs and errors."""
        return self.source.location(int(self.indices[index]))

    def fingerprint(self) -> str | None:
        """A hash of the source's fingerprint and the indices; None if the source has no fingerprint."""
        whole = fingerprint_of(self.source)
        return None if whole is None else f"{whole} {hash_of(self.indices)}"


def spread_out(images: Sized, max_images: int) -> list[int]:
    """At most `max_images` indices, evenly spaced: the first images of a folder, sorted by class, are of one class."""
    count = min(max_images, len(images))
    return [i * len(images) // count for i in range(count)]


def of_different_classes(source: ImageSource, max_images: int) -> list[int]:
    """At most `max_images` indices, one per class; evenly spaced indices if there are fewer classes."""
    firsts = [] if source.labels is None else np.unique(source.labels, return_index=True)[1].tolist()
    if len(firsts) < max_images:
        return spread_out(source, max_images)
    return [firsts[index] for index in spread_out(firsts, max_images)]


def hash_of(*arrays: np.ndarray) -> str:
    """SHA-256 of types, shapes and contents of arrays, hexadecimal."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()


def encode_labels(labels: Sequence[str]) -> tuple[list[str] | None, np.ndarray | None]:
    """Labels as written -> (class names, (len,) int64): whole numbers as they are, words in alphabetical order.

    An empty label or -1 means no label and becomes -1.
    """
    classes = sorted({*labels} - {"", "-1"})
    if not classes:
        return None, None
    if all(re.fullmatch("[0-9]{1,9}", label) for label in classes) and max(map(int, classes)) < _MAX_CLASSES:
        number = {label: int(label) for label in classes}
        classes = [str(i) for i in range(max(number.values()) + 1)]
    else:
        number = {label: i for i, label in enumerate(classes)}
    return classes, np.fromiter((number.get(label, -1) for label in labels), np.int64, len(labels))

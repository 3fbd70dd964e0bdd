"""Tar shards, webdataset's way -> the source of the images in them, read at their offsets.

A shard's headers are walked once (`tar_headers.py`) and the places of its images cached; nothing is ever extracted to
disk. Members whose names are equal up to the file name's first dot belong together: `a.jpg` and its label `a.cls`.
"""

import glob
import itertools
import math
import os
import re
from collections.abc import Iterator, Sequence

import numpy as np
from PIL import Image

from dino_sparo.sources.cache import load_or_index
from dino_sparo.sources.decode import DEFAULT_LIMITS, IMAGE_EXTENSIONS, read_image
from dino_sparo.sources.packed import Arrays, PackedStrings, encode_labels
from dino_sparo.sources.tar_headers import tar_members

MAX_SHARDS = 1 << 20  # that braces may mean


class TarSource:
    """Images within tar shards, read at their offsets; nothing is ever extracted to disk.

    Args:
        name: what the log calls it.
        shards: paths of the tar files.
        arrays: the index, see `_index_shards`.

    Attributes:
        limits: larger images are refused; `open_source` sets it.
    """

    def __init__(self, name: str, shards: list[str], arrays: Arrays) -> None:
        self.name, self.shards = name, shards
        self.members = PackedStrings.from_arrays(arrays, "names")
        self.shard, self.offset, self.size = arrays["shard"], arrays["offset"], arrays["size"]
        self.classes = PackedStrings.from_arrays(arrays, "classes").to_list() or None
        self.labels = arrays["labels"] if self.classes else None
        self.limits = DEFAULT_LIMITS

    def __len__(self) -> int:
        """Number of images."""
        return len(self.members)

    def location(self, index: int) -> str:
        """`shard!member`."""
        return f"{self.shards[self.shard[index]]}!{self.members[index]}"

    def read(self, index: int) -> Image.Image:
        """Image `index` as 8-bit RGB; raises CorruptImageError."""
        shard = self.shards[self.shard[index]]
        return read_image(shard, self.location(index), int(self.offset[index]), int(self.size[index]), self.limits)


def open_shards(shards: list[str], name: str) -> tuple[TarSource, str]:
    """Tar shards, and the log's words for how they were opened.

    Args:
        shards: paths.
        name: what the log calls them.

    Raises:
        ValueError: one is damaged or compressed, or none holds an image.
    """
    statuses = [os.stat(shard) for shard in shards]
    stamps = np.array([[status.st_mtime_ns for status in statuses], [status.st_size for status in statuses]])
    arrays, how = load_or_index(
        "shards " + "\n".join(map(os.path.abspath, shards)),
        build=lambda: {**_index_shards(shards), "stamps": stamps},
        is_current=lambda old: np.array_equal(old["stamps"], stamps),
    )
    if not len(arrays["shard"]):
        raise ValueError(
            f"{name}: no images in {len(shards)} shard(s); looked for members ending in {IMAGE_EXTENSIONS}"
        )
    return TarSource(name, shards, arrays), f"{len(shards)} shard(s) {how}"


def _index_shards(shards: list[str]) -> Arrays:
    """Name, shard, offset, size and label of every image member."""
    names: list[bytes] = []
    places: list[tuple[int, int, int]] = []
    labels: list[str | None] = []
    for number, shard in enumerate(shards):
        keys, label_of = [], {}
        for name, offset, size, text in tar_members(shard):
            folder, slash, base = name.rpartition(b"/")
            key = folder + slash + base.split(b".", 1)[0]  # webdataset's: everything before the file name's first dot
            if text is not None:
                label_of[key] = text
            else:
                keys.append(key)
                names.append(name)
                places.append((number, offset, size))
        labels += [label_of.get(key) for key in keys]
    classes, encoded = encode_labels(labels)
    table = np.array(places, dtype=np.int64).reshape(-1, 3)
    return {
        **PackedStrings.pack(names).to_arrays("names"),
        **PackedStrings.pack([os.fsencode(name) for name in classes or []]).to_arrays("classes"),
        "shard": table[:, 0].astype(np.int32),
        "offset": table[:, 1].copy(),
        "size": table[:, 2].copy(),
        "labels": np.zeros(0, np.int64) if encoded is None else encoded,
    }


def expand_shards(pattern: str) -> list[str]:
    """Shard names: `a-{000..012}.tar`, `{x,y}.tar`, globs, several joined by `::`.

    Names are made one after the other, so that a missing one is reported at once, however many would follow.

    Raises:
        ValueError: a shard is missing, or a glob matches nothing (names the first); the braces mean too many names.
    """
    shards: list[str] = []
    for part in pattern.split("::"):
        for name in _expand_braces(os.path.expanduser(part)):
            matches = [name] if os.path.isfile(name) else sorted(glob.glob(name))
            if not matches:
                raise ValueError(f"data_path={pattern!r}: {name!r} does not exist (in {os.getcwd()})")
            shards += matches
    for shard in shards:
        refuse_compressed(shard)
        if not shard.endswith(".tar"):
            raise ValueError(f"data_path={pattern!r} matches {shard!r}; several files at once must be .tar shards")
        if not os.path.isfile(shard):
            raise ValueError(f"data_path={pattern!r} matches {shard!r}, which is no regular file")
    return shards


def _expand_braces(pattern: str) -> Iterator[str]:
    """`{003..011}` counts, keeping zeros in front; `{a,b}` lists; several multiply, the first varies slowest."""
    parts, end = list[Sequence[str] | range](), 0
    widths = list[int]()
    for match in re.finditer(r"\{(?:(\d{1,18})\.\.(\d{1,18})|([^{}]*,[^{}]*))\}", pattern):
        first, last, words = match.groups()
        parts += [[pattern[end : match.start()]], words.split(",") if words else range(int(first), int(last) + 1)]
        widths += [0, len(first or "")]
        end = match.end()
    count = math.prod(len(part) for part in parts)
    if not 0 < count <= MAX_SHARDS:
        raise ValueError(f"data_path={pattern!r} means {count:,} shards; give 1 to {MAX_SHARDS:,}")
    for choice in itertools.product(*parts):
        # A range gives numbers, which get zeros in front; a list gives words.
        yield (
            "".join(
                word if isinstance(word, str) else f"{word:0{width}d}"
                for word, width in zip(choice, widths, strict=True)
            )
            + pattern[end:]
        )


def refuse_compressed(path: str) -> None:
    """ValueError if a file's ending says that it is compressed."""
    if re.search(r"\.(tar\.\w+|tgz|tbz2?|txz|tzst|zip|7z|rar|gz|xz|bz2|zst)$", path.lower()):
        raise ValueError(
            f"data_path={path!r} is compressed, so its images cannot be read in random order; unpack it (a compressed "
            "tar: decompress it to a plain .tar), which costs little since images are compressed already"
        )

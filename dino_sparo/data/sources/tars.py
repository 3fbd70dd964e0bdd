"""Tar shards in webdataset's layout -> the source of the images in them, read at their offsets.

A shard's headers are walked once, and the places of its images kept (`indexes.py`); nothing is ever extracted to disk.
`a.jpg` and its label `a.cls` belong together, as `indexes.shard_samples` says.
"""

import glob
import itertools
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from PIL import Image

from dino_sparo.data.sources import indexes
from dino_sparo.data.sources.decode import DEFAULT_LIMITS, CorruptImageError, ImageLimits, left_out, read_image
from dino_sparo.data.sources.image_source import encode_labels, hash_of
from dino_sparo.data.sources.indexes import Kind, Notes, Piece, ShardIndex
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import open_regular, read_json

_logger = logging.getLogger(__name__)

_MAX_LABEL_BYTES = 1 << 16

# First header and content of an image in blocks of the tar, bytes of its content, number of its label in the shard's
# list of labels (0 for none). Names are read from the tar when they are asked for.
IMAGE_RECORD = np.dtype([("start", "<u4"), ("block", "<u4"), ("size", "<u4"), ("label", "<u4")])

MAX_HASHED = 1 << 20  # images, spread over all, that a fingerprint looks at
MAX_SHARDS = 1 << 20  # that braces may mean


class TarSource:
    """Images within tar shards, read at their offsets; nothing is extracted to disk.

    Args:
        name: for the log.
        index: records with `start`, `block` and `size` of every image.
        classes: as in `ImageSource`, like `labels`.
        labels: of the images.
        num_left_out: estimated number of images in damaged shards.
        limits: larger images, and those of another number of channels, count as unreadable.
    """

    def __init__(
        self,
        name: str,
        index: ShardIndex,
        classes: list[str] | None = None,
        labels: np.ndarray | None = None,
        num_left_out: int = 0,
        limits: ImageLimits = DEFAULT_LIMITS,
    ) -> None:
        self.name, self.index, self.classes, self.labels = name, index, classes, labels
        self.num_left_out, self.limits = num_left_out, limits

    def __len__(self) -> int:
        return len(self.index)

    def location(self, index: int) -> str:
        """`shard!member`; if the shard has gone, the byte where the member began."""
        shard, start = self.index.shard_of(index), int(self.index.records[index]["start"]) * indexes.BLOCK_BYTES
        try:
            return f"{shard}!{os.fsdecode(indexes.member_name(shard, start))}"
        except (OSError, ValueError, StopIteration):
            return f"{shard}!byte {start:,}"

    def fingerprint(self) -> str:
        """A hash of the shards' names and of where some of their images lie; no shard is read."""
        names = [os.fsencode(os.path.basename(shard)) for shard in self.index.shards]
        step = max(len(self) // MAX_HASHED, 1)
        return hash_of(np.array(names), self.index.counts, self.index.records[::step])

    def files(self) -> Iterator[str]:
        """The path of every shard."""
        return iter(self.index.shards)

    def read(self, index: int) -> Image.Image:
        """Image `index` as 8-bit RGB; raises CorruptImageError."""
        shard, record = self.index.shard_of(index), self.index.records[index]
        offset, size = int(record["block"]) * indexes.BLOCK_BYTES, int(record["size"])
        try:
            return read_image(shard, shard, offset, size, self.limits)
        except CorruptImageError as error:
            raise CorruptImageError(self.location(index), error.reason) from error


def open_shards(
    shards: list[str], name: str, max_lost: float = 0.0, limits: ImageLimits = DEFAULT_LIMITS
) -> tuple[TarSource, str]:
    """Tar shards, and a note for the log about how they were opened.

    Args:
        shards: paths.
        name: for the log.
        max_lost: share of the images that may lie in damaged shards, which are skipped.
        limits: decides which members are images.

    Raises:
        ValueError: too much is damaged or compressed, or there is no image.
    """
    index, notes = indexes.open_index(images_kind(limits), shards)
    lost = lost_samples(shards, notes, index.counts)
    num_lost = sum(lost.values())
    total = num_lost + len(index)
    if num_lost > max_lost * total:
        raise UserError(
            f"{next(note['damage'] for note in notes if 'damage' in note)} ({len(lost)} of {len(shards)} shards, about "
            f"{num_lost:,} of {total:,} images; at most {max_lost:.2%} may be lost)"
        )
    for shard, number in lost.items():
        _logger.warning("%s; about %d images are skipped", notes[shards.index(shard)]["damage"], number)
    others = sum((Counter(note.get("others", {})) for note in notes), Counter[str]())
    if not len(index):
        raise UserError(
            f"{name}: no images in {len(shards)} shard(s); looked for members ending in "
            f"{', '.join(limits.extensions)}{left_out(others)}"
        )
    how = f"{len(shards)} shard(s) indexed{left_out(others)}"
    return TarSource(name, index, *_labels(index, notes), num_lost, limits), how


def lost_samples(shards: list[str], notes: list[Notes], counts: np.ndarray) -> dict[str, int]:
    """The damaged shards and their numbers of samples: from `sizes.json`, else the mean of the other shards.

    Raises:
        ValueError: all shards are damaged, or `sizes.json` has another form.
    """
    damaged = [number for number, note in enumerate(notes) if "damage" in note]
    if not damaged:
        return {}
    if len(damaged) == len(shards):
        raise UserError(notes[0]["damage"])
    sizes, mean = shard_sizes(shards), float(np.delete(counts, damaged).mean())
    return {shards[number]: max(sizes.get(shards[number], round(mean)), 1) for number in damaged}


def shard_sizes(shards: list[str]) -> dict[str, int]:
    """Samples of each shard by `sizes.json` in its folder, if there is one; ValueError for another form."""
    sizes = dict[str, int]()
    for folder in dict.fromkeys(os.path.dirname(shard) for shard in shards):
        path = os.path.join(folder, "sizes.json")
        if os.path.isfile(path):
            try:
                sizes |= {os.path.join(folder, name): int(size) for name, size in read_json(path).items()}
            except (ValueError, TypeError, AttributeError) as error:
                raise UserError(
                    f"{path!r} is not a JSON object of shard names and numbers of samples ({error})"
                ) from error
    return {shard: sizes[shard] for shard in shards if shard in sizes}


def _index_images(shard: str, extensions: tuple[str, ...]) -> Piece:
    """Positions and labels of the images in one shard, in their order."""
    endings = tuple(map(str.encode, extensions))
    keys, positions, others = [], [], Counter[str]()
    label_of_sample, label_of_key = dict[tuple[bytes, int], str](), dict[bytes, str]()
    with open_regular(shard) as file:
        # A key may come again, with another label.
        for group, (key, members) in enumerate(indexes.shard_samples(shard)):
            for ending, member in members.items():
                if ending.endswith(endings):
                    keys.append((key, group))
                    positions.append(indexes.blocks_of(member))
                elif ending.endswith(b".cls"):
                    text = os.pread(file.fileno(), min(member.size, _MAX_LABEL_BYTES), member.offset)
                    label_of_sample[key, group] = label_of_key[key] = text.decode(errors="replace").strip()
            if not any(ending.endswith((*endings, b".cls")) for ending in members):
                others.update(os.fsdecode(b"".join(ending.rpartition(b".")[1:])) for ending in members)
    # The label within the sample, else that of any sample of the same key.
    labels = [label_of_sample.get((key, group), label_of_key.get(key, "")) for key, group in keys]
    words = ["", *dict.fromkeys(filter(None, labels))]
    number_of = {word: number for number, word in enumerate(words)}
    rows = [(*position, number_of[label]) for position, label in zip(positions, labels, strict=True)]
    return Piece(np.array(rows, IMAGE_RECORD), {"labels": words, "others": others})


def images_kind(limits: ImageLimits) -> Kind:
    """The index of the images in shards for a model; models that also read arrays have a separate index."""
    name = "images" if limits.in_chans == DEFAULT_LIMITS.in_chans else "images and arrays"
    return Kind(name, IMAGE_RECORD, partial(_index_images, extensions=limits.extensions))


IMAGES = images_kind(DEFAULT_LIMITS)


def _labels(index: ShardIndex, notes: list[Notes]) -> tuple[list[str] | None, np.ndarray | None]:
    """Names of the classes, and the class of every image; None, None without labels."""
    words = [note.get("labels", [""]) for note in notes]
    classes, numbers = encode_labels([word for listed in words for word in listed])
    if numbers is None:
        return None, None
    labels, start, first = np.empty(len(index), np.int64), 0, 0
    for end, listed in zip(index.ends, words, strict=True):
        labels[start:end] = numbers[first + index.records[start:end]["label"].astype(np.int64)]
        start, first = int(end), first + len(listed)
    return classes, labels


def find_shards(path: str) -> list[str]:
    """The tar shards of a pattern or a folder; empty for other paths."""
    if os.path.isdir(path):
        return sorted(glob.glob(os.path.join(glob.escape(path), "*.tar")))
    is_pattern = not os.path.isfile(path) and re.search(r"::|[*?\[{]", path)
    return expand_shards(path) if is_pattern or path.lower().endswith(".tar") else []


def expand_shards(pattern: str) -> list[str]:
    """Shard names: `a-{000..012}.tar`, `{x,y}.tar`, globs, several joined by `::`.

    Names are made one after the other, so that a missing one is reported at once, however many would follow.

    Raises:
        ValueError: a shard is missing, or a glob matches nothing (names the first); the braces mean too many names.
    """
    shards: list[str] = []
    for part in pattern.split("::"):
        for name in _expand_braces(part):
            matches = [name] if os.path.isfile(name) else sorted(glob.glob(name))
            if not matches:
                raise UserError(
                    f"data_path={pattern!r}: {name!r} does not exist (in {os.getcwd()}); name the shards that exist, "
                    f"for example {os.path.join(os.path.dirname(name), '*.tar')!r} for all of a folder"
                )
            shards += matches
    for shard in shards:
        refuse_compressed(shard)
        if not shard.endswith(".tar") or not os.path.isfile(shard):
            raise UserError(f"data_path={pattern!r} matches {shard!r}; several files at once must be .tar shards")
    return shards


def _expand_braces(pattern: str) -> Iterator[str]:
    """`{003..011}` counts, keeping zeros in front; `{a,b}` lists; several multiply, the first varies slowest."""
    parts = re.split(r"\{(?:(\d{1,18})\.\.(\d{1,18})|([^{}]*,[^{}]*))\}", pattern)
    texts, firsts, lasts, lists = (parts[number::4] for number in range(4))
    options: list[Sequence[str | int]] = [
        words.split(",") if words else range(int(first), int(last) + 1)
        for first, last, words in zip(firsts, lasts, lists, strict=True)
    ]
    count = math.prod(map(len, options))
    if not 0 < count <= MAX_SHARDS:
        raise UserError(f"data_path={pattern!r} expands to {count:,} shards; give 1 to {MAX_SHARDS:,}")
    for choice in itertools.product(*options):
        words = (f"{word:0>{len(first or '')}}" for word, first in zip(choice, firsts, strict=True))
        yield "".join(itertools.chain(*zip(texts, words, strict=False), texts[-1:]))


def refuse_compressed(path: str) -> None:
    """ValueError if a file has the ending of a compressed file."""
    if re.search(r"\.(tar\.\w+|tgz|tbz2?|txz|tzst|zip|7z|rar|gz|xz|bz2|zst)$", path.lower()):
        raise UserError(
            f"data_path={path!r} is compressed, so its images cannot be read in random order; unpack it (a compressed "
            "tar: decompress it to a plain .tar), which costs little since images are compressed already"
        )

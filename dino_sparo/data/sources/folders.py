"""A folder -> its splits, and the source of the images in it and below it; first-level subfolders may be classes.

A name chooses a split; `ALL` is everything. None is the default split (training: `train`, evaluation: `val`) where
splits are recognised, else everything. The log names the split.

Listing a million files takes minutes on a network disk, so folders are listed in parallel.
"""

import logging
import os
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from dino_sparo.data.sources.decode import ARRAY_EXTENSION, DEFAULT_LIMITS, ImageLimits, left_out
from dino_sparo.data.sources.image_source import FileSource, PackedStrings
from dino_sparo.data.sources.tars import TarSource, find_shards, open_shards
from dino_sparo.runtime.faults import UserError

_logger = logging.getLogger(__name__)

ALL = "all"
# In the order of preference: "test" serves as "val" where there is no "val".
SPLIT_NAMES = {"train": ("train", "training"), "val": ("val", "valid", "validation", "test")}
SPLIT_WORDS = {word for words in SPLIT_NAMES.values() for word in words}
LISTING_ENDINGS = (".txt", ".lst", ".csv", ".tsv", ".jsonl")
SHOWN = 10  # names in a folder, in messages
WITHOUT_LABELS = (
    "without labels: train with --split all; look at the encoder with `dino-sparo attention --data_path FOLDER`; "
    "write embeddings with `dino-sparo embed`"
)
FEW_IMAGES = 1000  # next to shards
_SCAN_THREADS = 8  # listing a folder waits for the disk, above all for a network disk


def find_split(root: str, split: str) -> list[str]:
    """The subfolder or file of a split within a folder, or its several shards.

    Raises:
        ValueError: there is none; three lines with the layout needed, the folder's content, and a remedy.
    """
    chosen = _find_split(root, split)
    if not chosen:
        parent, folder = os.path.split(os.path.abspath(root))
        remedy = f" (it is a split itself: give its parent {parent!r})" if folder in SPLIT_WORDS else ""
        names = SPLIT_NAMES.get(split, (split,))
        raise UserError(
            f"data_path={root!r} has no split {split!r}: evaluations need {' or '.join(names)} in it, a folder "
            f"with one subfolder per class, a list or table with labels ({', '.join(LISTING_ENDINGS)}) or *.tar"
            f"{remedy}\nit holds {content_of(root)}\n{WITHOUT_LABELS}"
        )
    return chosen


def _find_split(root: str, split: str) -> list[str]:
    """As `find_split`; empty if there is none."""
    entries = set(os.listdir(root))
    for name in SPLIT_NAMES.get(split, (split,)):
        if name in entries and os.path.isdir(os.path.join(root, name)):
            return [os.path.join(root, name)]
        for ending in (*LISTING_ENDINGS, ".tar"):
            if name + ending in entries:
                return [os.path.join(root, name + ending)]
        word = re.compile(rf"(^|[-_.]){re.escape(name)}[-_.].*\.tar$")
        if shards := sorted(entry for entry in entries if word.search(entry)):
            return [os.path.join(root, shard) for shard in shards]
    return []


def content_of(root: str) -> str:
    """The first names in a folder, for messages."""
    return ", ".join(sorted(os.listdir(root))[:SHOWN]) or "nothing"


def split_of_folder(root: str, default_split: str) -> str:
    """The split that None means in a folder: the default split if it is recognised, else `ALL`.

    `train` is recognised only next to a validation split: a folder of that name alone may be a class of vehicles.
    """
    needed = ("train", "val") if default_split == "train" else (default_split,)
    if not all(_find_split(root, split) for split in needed):
        return ALL
    _logger.info("%s holds splits, %r is used; --split %s uses everything in it", root, default_split, ALL)
    return default_split


def resolve_split(data_path: str, split: str | None, default_split: str) -> tuple[str, list[str], str | None]:
    """The file or folder of a split, its tar shards if any, and the split that is still to be chosen in it."""
    if not os.path.isdir(data_path):
        return data_path, find_shards(data_path), split
    split = split or split_of_folder(data_path, default_split)
    chosen = [data_path] if split == ALL else find_split(data_path, split)
    if not os.path.isdir(chosen[0]):
        return chosen[0], chosen if chosen[0].endswith(".tar") else [], ALL
    shards = find_shards(chosen[0])
    return data_path, shards, ALL if shards else split


def open_folder(
    root: str, max_lost: float = 0.0, limits: ImageLimits = DEFAULT_LIMITS
) -> tuple[FileSource | TarSource, str]:
    """A folder of images, or of tar shards; also a note for the log about how the folder was opened.

    Args:
        root: the folder.
        max_lost: of shards, see `open_shards`.
        limits: decides which files are images.

    Raises:
        ValueError: it holds neither.
    """
    images, others = _images_by_folder(os.fsencode(root), limits.extensions)
    number = sum(map(len, images.values()))
    shards = find_shards(root) if number < FEW_IMAGES else []
    if not number and shards:
        return open_shards(shards, f"shards in {root}", max_lost, limits)
    if not number:
        raise UserError(
            f"data_path={root!r} holds no images: looked for files ending in {', '.join(limits.extensions)} in it and "
            f"its subfolders, and for *.tar in it; it holds {content_of(root)}{left_out(others)}"
            f"{'; to read its .npy files, give --in_chans N, their number of channels' * (ARRAY_EXTENSION in others)}"
        )
    if shards:
        _logger.warning(
            "%s holds %d images and %d tar shards, which are skipped; give '%s/*.tar' to read the shards",
            *(root, number, len(shards), root),
        )
    # ImageFolder's order: by class, then by folder, then by name.
    folders = sorted(filter(images.get, images), key=lambda folder: (folder.split(b"/", 1)[0], folder))
    paths = PackedStrings.pack([os.path.join(folder, name) for folder in folders for name in images[folder]])
    tops = [os.fsdecode(folder.split(b"/", 1)[0]) for folder in folders]
    classes, note = _folder_classes(sorted(set(tops)), [os.fsdecode(name) for name in images[b""]])
    labels = None
    if classes is not None:
        number_of = {name: i for i, name in enumerate(classes)}
        labels = np.repeat([number_of[top] for top in tops], [len(images[folder]) for folder in folders])
    source = FileSource(f"folder {root}", root, paths, classes, labels, limits)
    source.why_unlabelled = note
    return source, f"listed{f' ({note})' if note else ''}{left_out(others)}"


def _folder_classes(names: list[str], loose: list[str]) -> tuple[list[str] | None, str]:
    """The classes of first-level folders, or None and the reason; `loose` are images directly in the folder."""
    if SPLIT_WORDS & set(names) and set(names) <= SPLIT_WORDS | {"unlabeled", "unlabelled"}:
        if len(names) > 1:
            _logger.warning(
                "all of the folders %s are used together; give one of them to use it alone", ", ".join(names)
            )
        return None, "its folders are splits, not classes"
    if len(names) > 1 and loose:
        where = f"{len(loose):,} images lie directly in the folder, the first is {loose[0]!r}"
        return None, f"{where}, so subfolders are not classes; move or delete these images"
    if loose:
        return None, "images lie directly in the folder"
    if len(names) == 1:
        return None, f"all in one subfolder, {names[0]!r}, which is not a class"
    return names, ""


def _images_by_folder(root: bytes, extensions: tuple[str, ...]) -> tuple[dict[bytes, list[bytes]], Counter[str]]:
    """Path of each folder below -> names of its images, links followed once; and the endings of all other files."""
    images, visited, broken = dict[bytes, list[bytes]](), set[tuple[int, int]](), list[bytes]()
    others = Counter[str]()
    list_one = partial(_list_folder, root, tuple(map(str.encode, extensions)))
    level = [b""]
    with ThreadPoolExecutor(_SCAN_THREADS) as pool:
        while level:
            deeper = []
            listings = zip(level, pool.map(list_one, level), strict=True)
            for folder, (identity, names, endings, subfolders, links) in listings:
                if identity not in visited:
                    visited.add(identity)
                    images[folder] = names
                    others += endings
                    deeper += subfolders
                    broken += links
            level = deeper
    if broken:
        _logger.warning(
            "%s: left out %d entries that are not regular files (broken links, pipes, devices), the first is %s",
            *(os.fsdecode(root), len(broken), os.fsdecode(broken[0])),
        )
    return images, others


def _list_folder(
    root: bytes, endings: tuple[bytes, ...], folder: bytes
) -> tuple[tuple[int, int], list[bytes], Counter[str], list[bytes], list[bytes]]:
    """Device and inode of a folder, names of its images, endings of its other files, subfolders, and broken links."""
    path, images, folders, broken = os.path.join(root, folder), list[bytes](), list[bytes](), list[bytes]()
    others = Counter[str]()
    with os.scandir(path) as entries:
        for entry in entries:
            inside = os.path.join(folder, entry.name)
            is_image = entry.name.lower().endswith(endings)
            if entry.name.startswith(b".") or entry.name == b"__MACOSX":
                continue
            if os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir():
                folders.append(inside)
            elif not os.path.isfile(entry.path) if entry.is_symlink() else is_image and not entry.is_file():
                broken.append(inside)
            elif is_image:
                images.append(entry.name)
            else:
                others[os.fsdecode(os.path.splitext(entry.name)[1].lower())] += 1
    status = os.stat(path)
    return (status.st_dev, status.st_ino), sorted(images), others, sorted(folders), broken

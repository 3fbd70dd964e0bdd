"""A folder -> its splits, and the source of the images in it and below it; first-level subfolders may be classes.

A name chooses a split; `ALL` is everything. None is the default split (training: `train`, evaluation: `val`) where
splits are recognised, else everything. The log names the split.

Listing a million files takes minutes on a network disk, so folders are listed in parallel and the list is cached.
"""

import logging
import os
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np

from dino_sparo.data.sources.cache import load_or_index
from dino_sparo.data.sources.decode import DEFAULT_LIMITS, ImageLimits
from dino_sparo.data.sources.image_source import Arrays, FileSource, PackedStrings
from dino_sparo.data.sources.tars import TarSource, find_shards, open_shards

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
# Folders that link to one another are reached in exponentially many ways.
_MAX_VISITS = 100
FEW_IMAGES = 1000  # beside shards
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
        raise ValueError(
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

    `train` is recognised only beside a validation split: a folder of that name alone may be a class of vehicles.
    """
    needed = ("train", "val") if default_split == "train" else (default_split,)
    if not all(_find_split(root, split) for split in needed):
        return ALL
    _logger.info("%s holds splits, %r is used; --split %s uses everything in it", root, default_split, ALL)
    return default_split


def open_folder(
    root: str, max_lost: float = 0.0, limits: ImageLimits = DEFAULT_LIMITS
) -> tuple[FileSource | TarSource, str]:
    """A folder of images, or of tar shards; also the log's words for how it was opened.

    Args:
        root: the folder.
        max_lost: of shards, see `open_shards`.
        limits: decides which files are images.

    Raises:
        ValueError: it holds neither.
    """
    absolute = os.path.abspath(root)
    arrays, how = load_or_index(
        f"folder {absolute}" + " with arrays" * (limits.in_chans != DEFAULT_LIMITS.in_chans),
        build=lambda: _index_folder(os.fsencode(absolute), limits.extensions),
        is_current=lambda old: np.array_equal(old["stamps"], _folder_stamps(absolute, old)),
    )
    if not len(arrays["paths_ends"]):
        if shards := find_shards(root):
            return open_shards(shards, f"shards in {root}", max_lost, limits)
        raise ValueError(
            f"data_path={root!r} holds no images: looked for files ending in {', '.join(limits.extensions)} in it and "
            f"its subfolders, and for *.tar in it; it holds {content_of(root)}"
        )
    if how == "indexed" and len(arrays["paths_ends"]) < FEW_IMAGES and (shards := find_shards(root)):
        _logger.warning(
            "%s holds %d images and, beside them, %d tar shards, which are left out; give '%s/*.tar' to read these",
            *(root, len(arrays["paths_ends"]), len(shards), root),
        )
    paths, folders = (PackedStrings.from_arrays(arrays, name) for name in ("paths", "folders"))
    classes, class_of_folder, note = _folder_classes(folders.to_list(), arrays["counts"])
    labels = None if class_of_folder is None else np.repeat(class_of_folder, arrays["counts"])
    return FileSource(f"folder {root}", root, paths, classes, labels), how + note


def _folder_classes(folders: list[str], counts: np.ndarray) -> tuple[list[str] | None, np.ndarray | None, str]:
    """Decide whether folders are classes.

    Args:
        folders: relative to the root, which is "".
        counts: number of images directly in each.

    Returns:
        Class names, class of each folder (both None without labels), and a note for the log.
    """
    tops = [folder.split("/", 1)[0] for folder in folders]
    names = sorted({top for top, count in zip(tops, counts, strict=True) if count})
    if SPLIT_WORDS & set(names) and set(names) <= SPLIT_WORDS | {"unlabeled", "unlabelled"}:
        if len(names) > 1:
            _logger.warning(
                "all of the folders %s are used together; give one of them to use it alone", ", ".join(names)
            )
        return None, None, " (its folders are splits, not classes)"
    if "" in names:
        return None, None, " (images lie directly in the folder, so subfolders are not classes)"
    if len(names) == 1:
        return None, None, f" (all in one subfolder, {names[0]!r}, which is no class)"
    number = {name: i for i, name in enumerate(names)}
    return names, np.array([number.get(top, -1) for top in tops], dtype=np.int64), ""


class _Listing(NamedTuple):
    identity: tuple[int, int]
    stamp: int
    images: list[bytes]
    folders: list[bytes]
    others: list[bytes]


def _list_folder(path: bytes, endings: tuple[bytes, ...]) -> _Listing:
    """One folder's images and subfolders; the time stamp is taken first, so that later changes are noticed."""
    status = os.stat(path)
    images, folders, others = list[bytes](), list[bytes](), list[bytes]()
    with os.scandir(path) as entries:
        for entry in entries:
            name = entry.name
            if name.startswith(b".") or name == b"__MACOSX":
                continue
            is_image = name.lower().endswith(endings)
            try:
                if entry.is_dir():
                    folders.append(name)
                elif not entry.is_file() and (is_image or entry.is_symlink()):  # perhaps to a disk that is missing now
                    others.append(name)
                elif is_image:
                    images.append(name)
            except OSError:  # a symbolic link to itself
                others.append(name)
    return _Listing((status.st_dev, status.st_ino), status.st_mtime_ns, sorted(images), folders, others)


def _index_folder(root: bytes, extensions: tuple[str, ...]) -> Arrays:
    """List a folder and everything below it, level by level; symbolic links are followed, loops of them are not.

    Raises:
        ValueError: links lead to one folder again and again.
    """
    listed: dict[bytes, _Listing] = {}
    visits: Counter[tuple[int, int]] = Counter()
    level: list[tuple[bytes, tuple[tuple[int, int], ...]]] = [(b"", ())]  # relative path, identities of its ancestors
    with ThreadPoolExecutor(_SCAN_THREADS) as pool:
        while level:
            deeper = []
            list_one = partial(_list_folder, endings=tuple(map(str.encode, extensions)))
            listings = pool.map(list_one, [os.path.join(root, relative) for relative, _ in level])
            for (relative, ancestors), listing in zip(level, listings, strict=True):
                if listing.identity in ancestors:
                    continue
                visits[listing.identity] += 1
                if visits[listing.identity] > _MAX_VISITS:
                    raise ValueError(
                        f"data_path={os.fsdecode(root)!r}: symbolic links lead to one folder in more than "
                        f"{_MAX_VISITS} ways, one is {os.fsdecode(relative)!r}; remove them"
                    )
                listed[relative] = listing
                chain = (*ancestors, listing.identity)
                deeper += [(os.path.join(relative, name), chain) for name in listing.folders]
            level = deeper
    others = [os.path.join(folder, name) for folder, listing in listed.items() for name in listing.others]
    if others:
        _logger.warning(
            "%s: left out %d entries that are no regular files (broken links, pipes, devices), the first is %s",
            *(os.fsdecode(root), len(others), os.fsdecode(others[0])),
        )
    # ImageFolder's order: by class, then by folder, then by name.
    folders = sorted(listed, key=lambda relative: (relative.split(b"/", 1)[0], relative))
    paths = PackedStrings.pack([os.path.join(folder, name) for folder in folders for name in listed[folder].images])
    return {
        **paths.to_arrays("paths"),
        **PackedStrings.pack(folders).to_arrays("folders"),
        "counts": np.array([len(listed[folder].images) for folder in folders]),
        "stamps": np.array([[listed[folder].stamp for folder in folders]]),
        "num_others": np.array(len(others)),
    }


def _folder_stamps(root: str, arrays: Arrays) -> np.ndarray:
    """(1, folders), time of change of each indexed folder (ns); empty if one is gone."""
    folders = PackedStrings.from_arrays(arrays, "folders").to_list()
    try:
        return np.array([[os.stat(os.path.join(root, folder)).st_mtime_ns for folder in folders]])
    except OSError:
        return np.zeros((1, 0))

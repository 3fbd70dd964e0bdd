"""Any collection of images, by index: folders, lists, tables, tar shards, torchvision's sets, the built-in scenes.

`open_source(data_path)` finds out what the path is and returns an `ImageSource`: `len(source)` images, `source.read(i)`
gives image i as 8-bit RGB, `source.labels[i]` its class if there is one.

    data/train                        class folders, or a flat or nested folder without labels
    list.txt                          one path per line, optionally followed by a label
    table.csv, table.tsv, .jsonl      columns found by name, e.g. `path`, `label` and `split`
    shard-{000..099}.tar              webdataset-style tar shards; also globs, `a.tar::b.tar`, a folder of tars
    cifar10:DIR                       a torchvision set that lies in (or is downloaded to) DIR
    scenes, scenes:NUM:SIZE           procedural images, see `scenes.py`
    PREFIX:ANYTHING                   what an entry of `OPENERS` reads, also one from a file of yours; docs/extending.md

A source holds the names and places of its images in a few flat arrays (`packed.py` says why) and reads an image when it
is asked for. The files of this folder, in the order of the data flow:

    __init__.py          data path -> what it is -> its source
    splits.py            split's name -> the subfolder, list, table, shards or rows of that split
    folders.py           folder -> files, classes by subfolder
    rows.py              table -> its rows: columns by name, odd lines by number
    tables.py            list or table -> files, classes by column
    tars.py              tar shards -> members at their offsets, classes by `.cls` members
    shard_index.py       all members of many shards -> one table in the cache, mapped into memory
    tar_headers.py       one tar -> name, offset and size of its members
    torchvision_sets.py  name of a torchvision set -> its images
    cache.py             index of a folder or of shards -> the user's cache, and back
    packed.py            names and labels -> flat arrays; the source of images that are files
    limits.py            what may be read: regular files, a few formats, bounded sizes
    decode.py            bytes -> 8-bit RGB, or a CorruptImageError
"""

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
from PIL import Image

from dino_sparo.data.scenes import Scenes, parse_scenes_spec
from dino_sparo.data.sources.decode import DEFAULT_LIMITS, IMAGE_EXTENSIONS, CorruptImageError, decode_image
from dino_sparo.data.sources.folders import open_folder
from dino_sparo.data.sources.limits import ImageLimits
from dino_sparo.data.sources.packed import FileSource
from dino_sparo.data.sources.rows import TABLE_ENDINGS
from dino_sparo.data.sources.shard_index import index_share
from dino_sparo.data.sources.splits import ALL, find_split, split_of_folder
from dino_sparo.data.sources.tables import USUAL_COLUMNS, TableColumns, open_list, open_table
from dino_sparo.data.sources.tars import IMAGES, TarSource, expand_shards, find_shards, open_shards, refuse_compressed
from dino_sparo.data.sources.torchvision_sets import TORCHVISION_SETS, open_torchvision

__all__ = [
    "IMAGE_EXTENSIONS",
    "OPENERS",
    "TORCHVISION_SETS",
    "CorruptImageError",
    "ImageLimits",
    "ImageSource",
    "TableColumns",
    "decode_image",
    "expand_shards",
    "index_images",
    "open_source",
    "refuse_remote",
]

_logger = logging.getLogger(__name__)


@runtime_checkable
class ImageSource(Protocol):
    """Any collection of images, by index.

    Attributes:
        name: what the log calls it, e.g. "folder data/train".
        classes: the classes' names in the order of their numbers; None without labels.
        labels: (len,) int64, class of each image, -1 where an image has none; None without labels.
    """

    name: str
    classes: list[str] | None
    labels: np.ndarray | None

    def __len__(self) -> int:
        """Number of images."""
        ...

    def read(self, index: int) -> Image.Image:
        """Image `index` as 8-bit RGB; raises CorruptImageError."""
        ...

    def location(self, index: int) -> str:
        """Where image `index` lies, for logs and errors."""
        ...


def fingerprint_of(source: object) -> str | None:
    """What tells the images of a source from as many others, by their names; None for a source that cannot say.

    Args:
        source: with a method `fingerprint`, or without.
    """
    fingerprint = getattr(source, "fingerprint", None)
    return None if fingerprint is None else fingerprint()


def index_images(data_path: str, number: int, count: int, split: str | None = None) -> None:
    """Put a share of what `open_source` will look up into the cache: every `count`-th shard, if there are shards.

    Args:
        data_path: as in `open_source`.
        number: this process among those that share the work, from 0.
        count: how many they are.
        split: as in `open_source`, for training.
    """
    path = os.path.expanduser(data_path)
    with contextlib.suppress(ValueError):  # who opens the shards says what is wrong with them
        is_folder = os.path.isdir(path)
        wanted = (split or split_of_folder(path, "train")) if is_folder else ALL
        chosen = [path] if wanted == ALL else find_split(path, wanted)
        index_share(IMAGES, chosen if len(chosen) > 1 else find_shards(chosen[0]), number, count)


def open_source(
    data_path: str,
    split: str | None = None,
    download: bool = False,
    *,
    max_corrupt: float = 0.0,
    default_split: str = "train",
    columns: TableColumns = USUAL_COLUMNS,
    limits: ImageLimits = DEFAULT_LIMITS,
) -> ImageSource:
    """Open any collection of images; one log line says how many were found in how long.

    Folders follow torchvision's ImageFolder where it applies: when every image lies in a subfolder, the first-level
    subfolder is its class, however deep it lies. There are no labels when images lie directly in the folder (flat, or
    mixed with subfolders), when there is a single subfolder, or when the subfolders are splits; the log says so.
    Names that begin with a dot and empty classes are skipped.

    Args:
        data_path: see the list at the top of this file. An existing path comes before a torchvision set's name.
        split: a name opens that split: a subfolder, list, table or shards of that name in the folder, a table's rows by
            its column of splits, torchvision's training or test images, scenes' held-out images; "test" serves as "val"
            where there is no "val". "all" opens everything that lies there. None opens the default split wherever
            splits are recognised, else everything.
        download: fetch a torchvision set that is not on disk; with several processes, let one of them do it first.
        max_corrupt: share of the images that may lie in damaged tar shards, which are then named and left out.
        default_split: what None means, "train" or "val". Training images of stl10 are those without labels, too.
        columns: of a table, where they have other names than the usual ones; refused for what is no table.
        limits: larger images count as unreadable.

    Raises:
        ValueError: nothing lies there, it holds no images, the split is missing, or its form is not understood.
    """
    start = time.perf_counter()
    source, how = _open(data_path, split, download, max_corrupt, default_split, columns)
    if isinstance(source, FileSource | TarSource):
        source.limits = limits
    classes = f" in {len(source.classes)} classes" if source.classes else " without labels"
    _logger.info(
        "%s: %s images%s, %s in %.2f s", source.name, f"{len(source):,}", classes, how, time.perf_counter() - start
    )
    return source


def _open_scenes(data_path: str, split: str) -> ImageSource:
    """The built-in scenes; all of them are those for training."""
    num_images, image_size = parse_scenes_spec(data_path)
    return Scenes(num_images, image_size=image_size, split="train" if split == ALL else split)


# The data path before its first colon -> data path and split ("train", "val" or `ALL`) to images.
OPENERS: dict[str, Callable[[str, str], ImageSource]] = {"scenes": _open_scenes}


def _open(
    data_path: str, split: str | None, download: bool, max_lost: float, default_split: str, columns: TableColumns
) -> tuple[ImageSource, str]:
    """Find out what a data path is; returns the source and the log's word for how it was opened."""
    prefix = data_path.partition(":")[0]
    if prefix in OPENERS:
        columns.refuse_for(data_path)
        return OPENERS[prefix](data_path, split or default_split), "ready"
    refuse_remote(data_path)
    path = os.path.expanduser(data_path)
    if os.path.isdir(path):
        split = split or split_of_folder(path, default_split)
        chosen = [path] if split == ALL else find_split(path, split)
        if len(chosen) == 1 and not os.path.isdir(chosen[0]):
            return _open_file(chosen[0], None, max_lost, default_split, columns)
        columns.refuse_for(data_path)
        if len(chosen) > 1:
            return open_shards(chosen, f"{split} shards in {path}", max_lost)
        return open_folder(chosen[0], max_lost)
    if os.path.isfile(path):
        return _open_file(path, split, max_lost, default_split, columns)
    if os.path.exists(path):
        raise ValueError(f"data_path={data_path!r} is neither a folder nor a regular file, but a pipe or a device")
    columns.refuse_for(data_path)
    if re.search(r"::|[*?\[{]", path):
        _refuse_split_of_shards(data_path, split)
        return open_shards(expand_shards(path), f"shards {data_path}", max_lost)
    if split is None and default_split != "train":  # None stays for training: stl10 then has its unlabelled images too
        split = default_split
    return _open_named_set(data_path, split, download)


def _open_named_set(data_path: str, split: str | None, download: bool) -> tuple[ImageSource, str]:
    """A torchvision set; ValueError for what is nothing at all."""
    name, _, folder = data_path.partition(":")
    if name in TORCHVISION_SETS:
        return open_torchvision(name, folder or "data", None if split == ALL else split, download), "opened"
    sets = ", ".join(TORCHVISION_SETS)
    if folder and name.isidentifier():
        raise ValueError(
            f"data_path={data_path!r}: unknown data set {name!r}; choose one of {sets}, {', '.join(OPENERS)}, or "
            "give a path"
        )
    raise ValueError(
        f"data_path={data_path!r} does not exist (in {os.getcwd()}); give a folder, a list (.txt), a table (.csv, "
        f".tsv, .jsonl), tar shards, 'scenes', or a torchvision set as NAME:DIR with NAME one of {sets}"
    )


def _open_file(
    path: str, split: str | None, max_lost: float, default_split: str, columns: TableColumns
) -> tuple[ImageSource, str]:
    """Open one file by its ending: tar, table, or (whatever else) a list of paths."""
    refuse_compressed(path)
    lower = path.lower()
    if lower.endswith(IMAGE_EXTENSIONS):
        raise ValueError(f"data_path={path!r} is a single image; give the folder that holds the images")
    if lower.endswith(TABLE_ENDINGS):
        return open_table(path, split, default_split, columns)
    columns.refuse_for(path)
    if lower.endswith(".tar"):
        _refuse_split_of_shards(path, split)
        return open_shards([path], f"shard {path}", max_lost)
    return open_list(path, split)


def _refuse_split_of_shards(data_path: str, split: str | None) -> None:
    if split not in (None, ALL):
        raise ValueError(
            f"data_path={data_path!r} has no split {split!r}: shards given by name have none; put train-*.tar and "
            "val-*.tar into one folder and give that folder"
        )


def refuse_remote(data_path: str) -> None:
    """ValueError for an address, or a command whose output is meant: only local files are read."""
    for part in data_path.split("::"):
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://|pipe:", part) and not os.path.exists(part):
            raise ValueError(
                f"data_path={part!r} is an address; download the files first and give their local path, or let CLIP "
                "stream them by --shards streamed"
            )

"""Any collection of images, by index: folders, lists, tables, tar shards, torchvision's sets, the built-in scenes.

`open_source(data_path)` detects the kind of the path and returns an `ImageSource`: `len(source)` images, of which
`source.read(i)` gives image i, as 8-bit RGB unless the model takes other channels, and `source.labels[i]` its class.

    data/train                        class folders, or a flat or nested folder without labels
    list.txt                          one path per line, optionally followed by a label
    table.csv, table.tsv, .jsonl      columns found by name, e.g. `path`, `label` and `split`
    shard-{000..099}.tar              webdataset-style tar shards; also globs, `a.tar::b.tar`, a folder of tars
    cifar10:DIR                       a torchvision set in DIR; --download fetches the set
    scenes, scenes:NUM:SIZE           procedural images, see `data/scenes/`
    PREFIX:ANYTHING                   any entry of `OPENERS`, also from a file of yours; docs/extending.md

The files of this folder, in the order of the data flow:

    folders.py           folder -> its splits; files, classes by subfolder
    tables.py            list or table -> files, classes by column
    tars.py              tar shards -> members at their offsets, classes by `.cls` members
    indexes.py           all members of many shards -> one table, in the user's cache
    torchvision_sets.py  name of a torchvision set -> its images
    image_source.py      the interface of a source; images that are files; a subset of a source
    decode.py            bytes -> pixels, or a CorruptImageError; limits of what is read
"""

# ruff: noqa: F401
import logging
import os
import re
import time
from collections.abc import Callable

from dino_sparo.data.scenes.images import Scenes, parse_scenes_spec
from dino_sparo.data.sources.decode import (
    ARRAY_EXTENSION,
    DEFAULT_LIMITS,
    IMAGE_EXTENSIONS,
    CorruptImageError,
    ImageLimits,
    decode_image,
    to_image,
)
from dino_sparo.data.sources.folders import ALL, find_split, open_folder, split_of_folder
from dino_sparo.data.sources.image_source import FileSource, ImageSource
from dino_sparo.data.sources.tables import (
    TABLE_ENDINGS,
    USUAL_COLUMNS,
    TableColumns,
    open_image,
    open_list,
    open_table,
)
from dino_sparo.data.sources.tars import TarSource, expand_shards, open_shards, refuse_compressed
from dino_sparo.data.sources.torchvision_sets import TORCHVISION_SETS, TorchvisionSource, open_torchvision
from dino_sparo.runtime.faults import UserError

_logger = logging.getLogger(__name__)


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
    """Open any collection of images; one log line gives their number and the time.

    Folders follow torchvision's ImageFolder: when every image lies in a subfolder, the first-level subfolder is its
    class. There are no labels when images lie directly in the folder, when there is a single subfolder, or when the
    subfolders are splits; the log says so. Names that begin with a dot and empty classes are skipped.

    Args:
        data_path: see the list at the top of this file. An existing path comes before the name of a set or of scenes.
        split: name of a split: a subfolder, list, table or shards of that name, a table's rows by its column of splits,
            torchvision's training or test images, held-out scenes; "test" serves as "val" where there is no "val".
            "all" opens everything. None opens the default split where splits are recognised, else everything.
        download: fetch a torchvision set that is not on disk; with several processes, only one may do so at a time.
        max_corrupt: share of the images that may lie in damaged tar shards, which are then skipped.
        default_split: the split of None, "train" or "val". Training images of stl10 include those without labels.
        columns: of a table with unusual column names.
        limits: larger images, and those of another number of channels, count as unreadable.

    Raises:
        ValueError: nothing lies there, it holds no images, the split is missing, or its form is not understood.
    """
    start = time.perf_counter()
    opened = open_by_kind(data_path, split, download, max_corrupt, default_split, columns, limits)
    source, how = opened if isinstance(opened, tuple) else (opened, "ready")
    require_channels(source, limits)
    classes = f" in {len(source.classes)} classes" if source.classes else " without labels"
    seconds = time.perf_counter() - start
    _logger.info("%s: %s images%s, %s in %.2f s", source.name, f"{len(source):,}", classes, how, seconds)
    return source


def require_channels(source: ImageSource, limits: ImageLimits) -> None:
    """Refuse a set whose images have other channels than the model takes. Files are checked one by one, when read."""
    if isinstance(source, FileSource | TarSource) or limits.in_chans == DEFAULT_LIMITS.in_chans:
        return  # to three channels every image is converted
    try:
        to_image(source.dataset[0][0] if isinstance(source, TorchvisionSource) else source.read(0), limits.in_chans)
    except ValueError as error:
        raise UserError(f"{source.name}: an image {error}") from error


def _open_scenes(data_path: str, split: str) -> ImageSource:
    """The built-in scenes; `ALL` opens the scenes for training."""
    return Scenes(*parse_scenes_spec(data_path), split="train" if split == ALL else split)


# The data path before its first colon -> data path and split ("train", "val" or `ALL`) to images.
OPENERS: dict[str, Callable[[str, str], ImageSource]] = {"scenes": _open_scenes}
Opened = ImageSource | tuple[ImageSource, str]  # with the log's words for how it was opened


def open_by_kind(
    data_path: str,
    split: str | None,
    download: bool,
    max_lost: float,
    default_split: str,
    columns: TableColumns,
    limits: ImageLimits,
) -> Opened:
    """Open a data path by the function for its kind of path; arguments as `open_source`'s."""
    opener = OPENERS.get(data_path.partition(":")[0])
    if opener is not None and not os.path.exists(data_path):
        columns.refuse_for(data_path)
        return opener(data_path, split or default_split)
    refuse_remote(data_path)
    path = data_path
    if os.path.isdir(path):
        split = split or split_of_folder(path, default_split)
        chosen = [path] if split == ALL else find_split(path, split)
        if len(chosen) > 1:
            columns.refuse_for(data_path)
            return open_shards(chosen, f"{split} shards in {path}", max_lost, limits)
        path, split = chosen[0], None
    if os.path.isfile(path) and path.lower().endswith(TABLE_ENDINGS):
        return open_table(path, split, default_split, columns, limits)
    columns.refuse_for(data_path)
    if os.path.isdir(path):
        return open_folder(path, max_lost, limits)
    if os.path.isfile(path):
        refuse_compressed(path)
        if path.lower().endswith((*IMAGE_EXTENSIONS, ARRAY_EXTENSION)):
            return open_image(path, split, limits)
        if not path.lower().endswith(".tar"):
            return open_list(path, split, limits)
    elif os.path.exists(path):
        raise UserError(f"data_path={data_path!r} is neither a folder nor a regular file, but a pipe or a device")
    if os.path.isfile(path) or re.search(r"::|[*?\[{]", path):
        if split not in (None, ALL):
            raise UserError(
                f"data_path={data_path!r} has no split {split!r}: shards given by name have none; put train-*.tar and "
                "val-*.tar into one folder and give that folder"
            )
        shards = [path] if os.path.isfile(path) else expand_shards(path)
        return open_shards(shards, f"shards {data_path}", max_lost, limits)
    return _open_named_set(data_path, split, default_split, download, limits)


def _open_named_set(
    data_path: str, split: str | None, default_split: str, download: bool, limits: ImageLimits
) -> TorchvisionSource:
    """Open a torchvision set; ValueError for any other name."""
    name, _, folder = data_path.partition(":")
    if name not in TORCHVISION_SETS:
        raise UserError(
            f"data_path={data_path!r} does not exist (in {os.getcwd()}); give a folder, a list (.txt), a table (.csv, "
            f".tsv, .jsonl), tar shards, or NAME:DIR with NAME one of {', '.join((*OPENERS, *TORCHVISION_SETS))}"
        )
    if split is None and default_split != "train":  # None stays for training: stl10 then has its unlabelled images too
        split = default_split
    chosen = None if split == ALL else split
    return open_torchvision(name, folder or "data", chosen, download, limits)


def refuse_remote(data_path: str) -> None:
    """ValueError for an address or a command (`pipe:`): only local files are read."""
    for part in data_path.split("::"):
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://|pipe:", part) and not os.path.exists(part):
            raise UserError(
                f"data_path={part!r} is an address; download the files first and give their local path, or let CLIP "
                "stream them by --shards streamed"
            )

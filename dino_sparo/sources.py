"""Any collection of images, by index: folders, lists, tables, tar shards, torchvision's sets, the built-in scenes.

Stage 1 of the map, before `data.py`. `open_source(data_path)` finds out what the path is and returns an `ImageSource`:
`len(source)` images, `source.read(i)` gives image i as 8-bit RGB, `source.labels[i]` its class if there is one.

    data/train                        class folders, or a flat or nested folder without labels
    list.txt                          one path per line, optionally followed by a label
    table.csv, table.tsv              columns found by name, e.g. `path` and `label`
    shard-{000..099}.tar              webdataset-style tar shards; also globs, `a.tar::b.tar`, a folder of tars
    cifar10:DIR                       a torchvision set that lies in (or is downloaded to) DIR
    scenes, scenes:NUM:SIZE           procedural images, see `scenes.py`

Everything is held in a few flat arrays, never in a million Python strings: worker processes share flat arrays with
their parent, whereas reading a Python object writes its reference count and so copies the memory page it lies in.
"""

import contextlib
import csv
import glob
import hashlib
import io
import itertools
import logging
import os
import re
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from PIL import Image
from torchvision import datasets

_logger = logging.getLogger(__name__)

# The endings that torchvision's ImageFolder, hence the reference, takes for images.
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
SPLIT_NAMES = {"train": ("train",), "val": ("val", "valid", "validation", "test")}
PATH_COLUMNS = (
    "path",
    "filepath",
    "file_path",
    "file",
    "filename",
    "file_name",
    "image",
    "image_path",
    "img",
    "img_path",
)
LABEL_COLUMNS = ("label", "class", "class_name", "category", "target")
SPLIT_COLUMNS = ("split", "set", "subset", "partition")
MAX_IMAGE_BYTES = 1 << 29
_MAX_TEXT = 1 << 16  # bytes of a label or a long name
_IMAGE_ENDINGS = tuple(ending.encode() for ending in IMAGE_EXTENSIONS)
_LIST_CHECKED = (
    8  # how many files of a list must exist when it is opened; asking for a million takes minutes on a network disk
)
_MAX_CLASSES = 1 << 20
_SCAN_THREADS = 8  # listing a folder waits for the disk, above all for a network disk
_CACHE_VERSION = 1
_SETTLE_S = 2.0  # a folder or shard changed so recently may still be growing within its time stamp's resolution

Arrays = dict[str, np.ndarray]


class CorruptImageError(ValueError):
    """An image that cannot be read.

    Attributes:
        location: where it lies, e.g. `data/a.jpg`, `shard-000.tar!a.jpg`.
        reason: what is wrong with it.
    """

    # The default lets a DataLoader rebuild the error from its message alone when it comes out of a worker.
    def __init__(self, location: str, reason: str = "") -> None:
        super().__init__(location, reason)
        self.location, self.reason = location, reason

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}" if self.reason else self.location


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


def open_source(data_path: str, split: str | None = None, download: bool = False) -> ImageSource:
    """Open any collection of images; one log line says how many were found in how long.

    Folders follow torchvision's ImageFolder where it applies: when every image lies in a subfolder, the first-level
    subfolder is its class, however deep it lies. There are no labels when images lie directly in the folder (flat, or
    mixed with subfolders), when there is a single subfolder, or when the subfolders are splits; the log says so.
    Names that begin with a dot and empty classes are skipped.

    Args:
        data_path: see the list at the top of this file. An existing path comes before a torchvision set's name.
        split: None opens the path itself (torchvision sets and scenes: their training images; stl10: with its
            unlabelled ones). "train" or "val" open that split: a subfolder, list, table or shards of that name in the
            folder, a table's rows by its `split` column, torchvision's training or test images, scenes' held-out
            images. "test" serves as "val" where there is no "val".
        download: fetch a torchvision set that is not on disk; with several processes, let one of them do it first.

    Raises:
        ValueError: nothing lies there, it holds no images, the split is missing, or its form is not understood.
    """
    if split is not None and split not in SPLIT_NAMES:
        raise ValueError(
            f"split={split!r} is unknown; choose one of {sorted(SPLIT_NAMES)}, or None for the path itself"
        )
    start = time.perf_counter()
    source, how = _open(data_path, split, download)
    classes = f" in {len(source.classes)} classes" if source.classes else " without labels"
    _logger.info(
        "%s: %s images%s, %s in %.2f s", source.name, f"{len(source):,}", classes, how, time.perf_counter() - start
    )
    return source


def _open(data_path: str, split: str | None, download: bool) -> tuple[ImageSource, str]:
    """Find out what a data path is; returns the source and the log's word for how it was opened."""
    if data_path == "scenes" or data_path.startswith("scenes:"):
        return _open_scenes(data_path, split), "ready"
    path = os.path.expanduser(data_path)
    if os.path.isdir(path):
        if split is None:
            return _open_folder(path)
        chosen = _find_split(path, split)
        if len(chosen) > 1:
            return _open_shards(chosen, f"{split} shards in {path}")
        return _open_folder(chosen[0]) if os.path.isdir(chosen[0]) else _open_file(chosen[0], None)
    if os.path.isfile(path):
        return _open_file(path, split)
    if "://" in data_path:
        raise ValueError(f"data_path={data_path!r} is an address; download the files and give their local path")
    if re.search(r"::|[*?\[{]", path):
        if split is not None:
            raise ValueError(
                f"data_path={data_path!r} has no split {split!r}: shards given by name have none; put train-*.tar and "
                "val-*.tar into one folder and give that folder"
            )
        return _open_shards(expand_shards(path), f"shards {data_path}")
    name, _, folder = data_path.partition(":")
    if name in TORCHVISION_SETS:
        return _open_torchvision(name, folder or "data", split, download), "opened"
    sets = ", ".join(TORCHVISION_SETS)
    if folder and name.isidentifier():
        raise ValueError(
            f"data_path={data_path!r}: unknown data set {name!r}; choose one of {sets}, scenes, or give a path"
        )
    raise ValueError(
        f"data_path={data_path!r} does not exist (in {os.getcwd()}); give a folder, a list (.txt), a table (.csv, "
        f".tsv), tar shards, 'scenes', or a torchvision set as NAME:DIR with NAME one of {sets}"
    )


def _open_scenes(spec: str, split: str | None) -> ImageSource:
    from dino_sparo import scenes  # only who draws scenes needs them, and scenes.py may import this file

    num_images, image_size = scenes.parse_scenes_spec(spec)
    return scenes.Scenes(num_images, image_size=image_size, split=split or "train")


def _open_file(path: str, split: str | None) -> tuple[ImageSource, str]:
    """Open one file by its ending: tar, table, or (whatever else) a list of paths."""
    _refuse_compressed(path)
    lower = path.lower()
    if lower.endswith(IMAGE_EXTENSIONS):
        raise ValueError(f"data_path={path!r} is a single image; give the folder that holds the images")
    if lower.endswith(".tar"):
        if split is not None:
            raise ValueError(
                f"data_path={path!r} has no split {split!r}; give the folder that holds train and val shards"
            )
        return _open_shards([path], f"shard {path}")
    return _open_table(path, split) if lower.endswith((".csv", ".tsv")) else _open_list(path, split)


def _refuse_compressed(path: str) -> None:
    if re.search(r"\.(tar\.\w+|tgz|tbz2?|txz|tzst|zip|7z|rar|gz|xz|bz2|zst)$", path.lower()):
        raise ValueError(
            f"data_path={path!r} is compressed, so its images cannot be read in random order; unpack it (a compressed "
            "tar: decompress it to a plain .tar), which costs little since images are compressed already"
        )


def _find_split(root: str, split: str) -> list[str]:
    """The subfolder or file of a split within a folder, or its several shards.

    Raises:
        ValueError: there is none; says what the folder holds.
    """
    entries = sorted(entry.name for entry in os.scandir(root))
    for name in SPLIT_NAMES[split]:
        for candidate in (name, f"{name}.txt", f"{name}.lst", f"{name}.csv", f"{name}.tsv", f"{name}.tar"):
            if candidate in entries and (candidate != name or os.path.isdir(os.path.join(root, name))):
                return [os.path.join(root, candidate)]
        word = re.compile(rf"(^|[-_.]){name}[-_.].*\.tar$")
        shards = [os.path.join(root, entry) for entry in entries if word.search(entry)]
        if shards:
            return shards
    holds = ", ".join(entries[:20]) + (f", ... ({len(entries):,} in all)" if len(entries) > 20 else "")
    own = os.path.basename(os.path.abspath(root))
    remedy = (
        f"it is a split itself, give its parent {os.path.dirname(os.path.abspath(root))!r}"
        if own in itertools.chain(*SPLIT_NAMES.values())
        else "give the folder that holds both splits"
    )
    raise ValueError(
        f"data_path={root!r} has no split {split!r}: looked for {' or '.join(SPLIT_NAMES[split])} as a folder, .txt, "
        f".lst, .csv, .tsv or *.tar; it holds {holds or 'nothing'}; {remedy}"
    )


# ---- reading one image


def decode_image(data: bytes, location: str) -> Image.Image:
    """Decode an image file to 8-bit RGB, the pixels that the reference's loader gives.

    As there, transparency is dropped rather than composited and the EXIF orientation is ignored. 16-bit grayscale is
    scaled to 8 bit; the reference clips it, which turns most such images white.

    Args:
        data: the file's bytes.
        location: what to call it in errors.

    Raises:
        CorruptImageError: empty, truncated, undecodable, larger than PIL's limit, or with pixels of unknown range.
    """
    if not data:
        raise CorruptImageError(location, "the file is empty (0 bytes)")
    try:
        image: Image.Image = Image.open(io.BytesIO(data))
        image.load()
        # Only palettes with partial transparency use this entry, to warn that RGB drops it; pixels do not depend on it.
        image.info.pop("transparency", None)
        if image.mode in ("I", "F") or image.mode.startswith("I;16"):
            image = _scale_deep_gray(image)
        return image.convert("RGB")
    except Exception as error:  # decoders of damaged bytes raise anything: OSError, SyntaxError, struct.error, ...
        reason = str(error) if isinstance(error, OSError | Image.DecompressionBombError) else repr(error)
        raise CorruptImageError(location, re.sub(r" <_io\.BytesIO.*>", "", reason)) from error


def _scale_deep_gray(image: Image.Image) -> Image.Image:
    """16-bit gray -> 8-bit gray, 65535 -> 255; PIL gives some 16-bit files as 32-bit integers."""
    values = np.asarray(image)
    if image.mode == "F" or values.min() < 0 or values.max() > 65535:
        raise ValueError(
            f"{image.mode} pixels from {values.min()} to {values.max()} have no known range; save as 8 bit"
        )
    return Image.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8))


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

    def __len__(self) -> int:
        """Number of strings."""
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self.ends):
            raise IndexError(f"index {index} of {len(self.ends)}")
        start = self.ends[index - 1] if index else 0
        return os.fsdecode(self.blob[start : self.ends[index]].tobytes())


class FileSource:
    """Images that are files: a folder, a list or a table.

    Args:
        name: what the log calls it.
        root: folder that relative paths start from.
        paths: one per image, relative to `root` or absolute.
        classes: as in `ImageSource`.
        labels: as in `ImageSource`.
    """

    def __init__(
        self, name: str, root: str, paths: PackedStrings, classes: list[str] | None, labels: np.ndarray | None
    ) -> None:
        self.name, self.root, self.paths, self.classes, self.labels = name, root, paths, classes, labels

    def __len__(self) -> int:
        """Number of images."""
        return len(self.paths)

    def location(self, index: int) -> str:
        """The file's path."""
        return os.path.join(self.root, self.paths[index])

    def read(self, index: int) -> Image.Image:
        """Image `index` as 8-bit RGB; raises CorruptImageError."""
        path = self.location(index)
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                data = file.read() if size <= MAX_IMAGE_BYTES else None
        except OSError as error:
            raise CorruptImageError(path, str(error.strerror)) from error
        return decode_image(_checked_size(data, size, path), path)


def _checked_size(data: bytes | None, size: int, location: str) -> bytes:
    if data is None:
        raise CorruptImageError(location, f"{size:,} bytes is no plausible image; at most {MAX_IMAGE_BYTES:,} are read")
    return data


# ---- folders


def _open_folder(root: str) -> tuple[ImageSource, str]:
    """A folder of images, or of tar shards."""
    key = os.fsencode(os.path.abspath(root))
    arrays, how = _load_or_index(
        f"folder {os.fsdecode(key)}",
        build=lambda: _index_folder(key),
        is_current=lambda old: np.array_equal(old["stamps"], _folder_stamps(key, old)),
    )
    if not len(arrays["paths_ends"]):
        shards = sorted(glob.glob(os.path.join(glob.escape(root), "*.tar")))
        if shards:
            return _open_shards(shards, f"shards in {root}")
        holds = ", ".join(sorted(os.listdir(root))[:10])
        raise ValueError(
            f"data_path={root!r} holds no images: looked for files ending in {', '.join(IMAGE_EXTENSIONS)} in it and "
            f"its subfolders, and for *.tar in it; it holds {holds or 'nothing'}"
        )
    paths = PackedStrings(arrays["paths_blob"], arrays["paths_ends"])
    folders = PackedStrings(arrays["folders_blob"], arrays["folders_ends"])
    classes, class_of_folder, note = _folder_classes([folders[i] for i in range(len(folders))], arrays["counts"])
    labels = None if class_of_folder is None else np.repeat(class_of_folder, arrays["counts"])
    return FileSource(f"folder {root}", root, paths, classes, labels), how + note


def _folder_classes(folders: list[str], counts: np.ndarray) -> tuple[list[str] | None, np.ndarray | None, str]:
    """Decide whether folders are classes.

    Args:
        folders: every folder below the root, relative to it ("" is the root itself).
        counts: number of images directly in each.

    Returns:
        Class names, class of each folder (both None without labels), and a note for the log.
    """
    tops = [folder.split("/", 1)[0] for folder in folders]
    names = sorted({top for top, count in zip(tops, counts, strict=True) if count})
    splits = set(names) & {*itertools.chain(*SPLIT_NAMES.values())}
    if splits and set(names) <= {*itertools.chain(*SPLIT_NAMES.values()), "unlabeled", "unlabelled"}:
        if len(names) > 1:
            _logger.warning(
                "all of the folders %s are used together; give one of them to use it alone", ", ".join(names)
            )
        return None, None, " (its folders are splits, not classes)"
    if names == [""]:
        return None, None, " (flat folder)"
    if "" in names:
        return None, None, " (images lie both in the folder and in its subfolders, so these are not taken for classes)"
    if len(names) == 1:
        return None, None, f" (all in one subfolder, {names[0]!r}, which is not taken for a class)"
    number = {name: i for i, name in enumerate(names)}
    return names, np.array([number.get(top, -1) for top in tops], dtype=np.int64), ""


class _Listing(NamedTuple):
    identity: tuple[int, int]
    stamp: int
    images: list[bytes]
    folders: list[bytes]


def _list_folder(path: bytes) -> _Listing:
    """One folder's images and subfolders, by name; the stamp is taken first, so later changes are noticed."""
    status = os.stat(path)
    images, folders = [], []
    with os.scandir(path) as entries:
        for entry in entries:
            name = entry.name
            if name.startswith(b".") or name == b"__MACOSX":
                continue
            if entry.is_dir():
                folders.append(name)
            elif name.lower().endswith(_IMAGE_ENDINGS) and entry.is_file():
                images.append(name)
    return _Listing((status.st_dev, status.st_ino), status.st_mtime_ns, sorted(images), folders)


def _index_folder(root: bytes) -> Arrays:
    """List a folder and everything below it, level by level; symbolic links are followed, loops of them are not."""
    found: dict[bytes, _Listing] = {}
    level: list[tuple[bytes, tuple[tuple[int, int], ...]]] = [(b"", ())]  # relative path, identities of its ancestors
    with ThreadPoolExecutor(_SCAN_THREADS) as pool:
        while level:
            deeper = []
            listings = pool.map(_list_folder, [os.path.join(root, relative) for relative, _ in level])
            for (relative, ancestors), listing in zip(level, listings, strict=True):
                if listing.identity in ancestors:
                    continue
                found[relative] = listing
                chain = (*ancestors, listing.identity)
                deeper += [(os.path.join(relative, name), chain) for name in listing.folders]
            level = deeper
    # ImageFolder's order: by class, then by folder, then by name.
    folders = sorted(found, key=lambda relative: (relative.split(b"/", 1)[0], relative))
    paths = PackedStrings.pack([os.path.join(folder, name) for folder in folders for name in found[folder].images])
    packed = PackedStrings.pack(folders)
    return {
        "paths_blob": paths.blob,
        "paths_ends": paths.ends,
        "folders_blob": packed.blob,
        "folders_ends": packed.ends,
        "counts": np.array([len(found[folder].images) for folder in folders]),
        "stamps": np.array([[found[folder].stamp for folder in folders]]),
    }


def _folder_stamps(root: bytes, arrays: Arrays) -> np.ndarray:
    """(1, folders), when each indexed folder was last changed (ns); empty when one has gone."""
    folders = PackedStrings(arrays["folders_blob"], arrays["folders_ends"])
    try:
        base = os.fsdecode(root)
        return np.array([[os.stat(os.path.join(base, folders[i])).st_mtime_ns for i in range(len(folders))]])
    except OSError:
        return np.zeros((1, 0))


# ---- lists and tables


def _encode_labels(labels: Sequence[str | None]) -> tuple[list[str] | None, np.ndarray | None]:
    """Labels as written -> (class names, (len,) int64): whole numbers as they are, words by alphabetical order.

    An empty label, None or -1 means no label and becomes -1.
    """
    given = {label for label in labels if label not in (None, "", "-1")}
    number: dict[str | None, int] = {None: -1, "": -1, "-1": -1}
    if not given:
        return None, None
    if all(re.fullmatch("[0-9]{1,9}", label) for label in given) and max(map(int, given)) < _MAX_CLASSES:
        classes = [str(i) for i in range(max(map(int, given)) + 1)]
        number.update((label, int(label)) for label in given)
    else:
        classes = sorted(given)
        number.update((label, i) for i, label in enumerate(classes))
    return classes, np.fromiter((number[label] for label in labels), np.int64, len(labels))


def _read_text(path: str) -> list[str]:
    """Lines of a text file; ValueError if it is not text or empty."""
    with open(path, "rb") as file:
        if b"\0" in file.read(1 << 12):
            raise ValueError(
                f"data_path={path!r} is not a text file; give a list of paths, a .csv/.tsv table, or a folder"
            )
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        return file.read().split("\n")


def _file_source(kind: str, listing: str, paths: list[str], labels: Sequence[str | None]) -> FileSource:
    """Files named by a list or table, after looking whether the first of them exist."""
    root = os.path.dirname(listing)
    if not paths:
        raise ValueError(f"{kind} {listing!r} names no images")
    for path in paths[:_LIST_CHECKED]:
        if not os.path.isfile(os.path.join(root, path)):
            raise ValueError(
                f"{kind} {listing!r} names {path!r}, but {os.path.join(root, path)!r} does not exist; paths are "
                f"absolute or relative to the {kind}'s folder"
            )
    classes, numbers = _encode_labels(labels)
    return FileSource(f"{kind} {listing}", root, PackedStrings.pack([os.fsencode(p) for p in paths]), classes, numbers)


def _open_list(path: str, split: str | None) -> tuple[ImageSource, str]:
    """One path per line; a label may follow after a tab, or after the last space of a line that ends with no image."""
    if split is not None:
        raise ValueError(f"list {path!r} has no split {split!r}; put train.txt and val.txt into a folder and give that")
    paths, labels = [], []
    for line in _read_text(path):
        line = line.strip()
        if not line:
            continue
        name, label = line, ""
        if "\t" in line:
            name, label = line.rsplit("\t", 1)
        elif not line.lower().endswith(IMAGE_EXTENSIONS) and len(parts := line.rsplit(None, 1)) == 2:
            name, label = parts
        paths.append(name.strip())
        labels.append(label)
    return _file_source("list", path, paths, labels), "read"


def _open_table(path: str, split: str | None) -> tuple[ImageSource, str]:
    """A table with a header; the delimiter is the one whose header has a column of paths."""
    lines = _read_text(path)
    headers = {mark: [c.strip().lower() for c in next(csv.reader(lines[:1], delimiter=mark), [])] for mark in ",\t;|"}
    delimiter = next((mark for mark, header in headers.items() if set(header) & set(PATH_COLUMNS)), None)
    if delimiter is None:
        columns = max(headers.values(), key=len)
        raise ValueError(
            f"table {path!r} has no column of paths: found the columns {columns}; name one of them one of "
            f"{', '.join(PATH_COLUMNS)}"
        )
    header = headers[delimiter]
    path_column, label_column, split_column = (
        next((header.index(name) for name in names if name in header), None)
        for names in (PATH_COLUMNS, LABEL_COLUMNS, SPLIT_COLUMNS)
    )
    rows = [row for row in csv.reader(lines[1:], delimiter=delimiter) if row]
    for row in rows:
        if len(row) != len(header):
            raise ValueError(
                f"table {path!r}: row {row[:5]} has {len(row)} columns, the header has {len(header)}: {header}"
            )
    if split is not None:
        rows = _rows_of_split(rows, split_column, split, path, header)
    elif split_column is not None:
        _logger.warning("table %s: the column %r is not looked at, all rows are used", path, header[split_column])
    assert path_column is not None  # the delimiter was chosen so
    labels = [row[label_column].strip() if label_column is not None else None for row in rows]
    return _file_source("table", path, [row[path_column].strip() for row in rows], labels), "read"


def _rows_of_split(
    rows: list[list[str]], column: int | None, split: str, path: str, header: list[str]
) -> list[list[str]]:
    """The rows whose split column names the split, or the next best name for it."""
    if column is None:
        raise ValueError(
            f"table {path!r} has no split {split!r}: none of its columns {header} is {' or '.join(SPLIT_COLUMNS)}; "
            "add one, or put train.csv and val.csv into a folder and give that"
        )
    for name in SPLIT_NAMES[split]:
        chosen = [row for row in rows if row[column].strip().lower() == name]
        if chosen:
            return chosen
    found = sorted({row[column].strip() for row in rows})[:20]
    raise ValueError(f"table {path!r} has no split {split!r}: its column {header[column]!r} holds {found}")


# ---- tar shards


def expand_shards(pattern: str) -> list[str]:
    """Shard names: `a-{000..012}.tar`, `{x,y}.tar`, globs, several joined by `::`.

    Raises:
        ValueError: a shard is missing, or a glob matches nothing; names the first.
    """
    shards: list[str] = []
    for part in pattern.split("::"):
        for name in _expand_braces(os.path.expanduser(part)):
            matches = [name] if os.path.isfile(name) else sorted(glob.glob(name))
            if not matches:
                raise ValueError(f"data_path={pattern!r}: {name!r} does not exist (in {os.getcwd()})")
            shards += matches
    for shard in shards:
        _refuse_compressed(shard)
        if not shard.endswith(".tar"):
            raise ValueError(f"data_path={pattern!r} matches {shard!r}; several files at once must be .tar shards")
    return shards


def _expand_braces(pattern: str) -> list[str]:
    """`{003..011}` counts, keeping zeros in front; `{a,b}` lists; several multiply, the first varies slowest."""
    match = re.search(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}", pattern)
    if match is None:
        return [pattern]
    first, last, words = match.groups()
    width = len(first) if first else 0
    middles = words.split(",") if words else [f"{i:0{width}d}" for i in range(int(first), int(last) + 1)]
    return [
        pattern[: match.start()] + middle + rest
        for middle in middles
        for rest in _expand_braces(pattern[match.end() :])
    ]


class TarSource:
    """Images within tar shards, read at their offsets; nothing is ever extracted to disk.

    Args:
        name: what the log calls it.
        shards: paths of the tar files.
        arrays: the index, see `_index_shards`.
    """

    def __init__(self, name: str, shards: list[str], arrays: Arrays) -> None:
        self.name, self.shards = name, shards
        self.members = PackedStrings(arrays["names_blob"], arrays["names_ends"])
        self.shard, self.offset, self.size = arrays["shard"], arrays["offset"], arrays["size"]
        classes = PackedStrings(arrays["classes_blob"], arrays["classes_ends"])
        self.classes = [classes[i] for i in range(len(classes))] or None
        self.labels = arrays["labels"] if self.classes else None

    def __len__(self) -> int:
        """Number of images."""
        return len(self.members)

    def location(self, index: int) -> str:
        """`shard!member`."""
        return f"{self.shards[self.shard[index]]}!{self.members[index]}"

    def read(self, index: int) -> Image.Image:
        """Image `index` as 8-bit RGB; raises CorruptImageError."""
        location, size = self.location(index), int(self.size[index])
        data = None
        if size <= MAX_IMAGE_BYTES:
            try:
                # Opened anew each time: costs microseconds, and nothing has to survive fork or pickling.
                with open(self.shards[self.shard[index]], "rb", buffering=0) as file:
                    data = os.pread(file.fileno(), size, int(self.offset[index]))
            except OSError as error:
                raise CorruptImageError(location, str(error.strerror)) from error
        return decode_image(_checked_size(data, size, location), location)


def _open_shards(shards: list[str], name: str) -> tuple[ImageSource, str]:
    """Tar shards; ValueError if one is damaged or compressed, or none holds an image."""
    statuses = [os.stat(shard) for shard in shards]
    stamps = np.array([[status.st_mtime_ns for status in statuses], [status.st_size for status in statuses]])
    arrays, how = _load_or_index(
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
        for name, offset, size, text in _tar_members(shard):
            folder, slash, base = name.rpartition(b"/")
            key = folder + slash + base.split(b".", 1)[0]  # webdataset's: everything before the file name's first dot
            if text is not None:
                label_of[key] = text
            else:
                keys.append(key)
                names.append(name)
                places.append((number, offset, size))
        labels += [label_of.get(key) for key in keys]
    packed = PackedStrings.pack(names)
    classes, encoded = _encode_labels(labels)
    packed_classes = PackedStrings.pack([os.fsencode(name) for name in classes or []])
    table = np.array(places, dtype=np.int64).reshape(-1, 3)
    return {
        "names_blob": packed.blob,
        "names_ends": packed.ends,
        "shard": table[:, 0].astype(np.int32),
        "offset": table[:, 1].copy(),
        "size": table[:, 2].copy(),
        "labels": np.zeros(0, np.int64) if encoded is None else encoded,
        "classes_blob": packed_classes.blob,
        "classes_ends": packed_classes.ends,
    }


def _tar_members(shard: str) -> Iterator[tuple[bytes, int, int, str | None]]:
    """Walk a tar's headers; yields (name, offset, size, None) of images and (name, offset, size, text) of `.cls`.

    Written out because the standard library's `tarfile` takes four times as long. Formats: ustar, GNU long names and
    sizes, pax. Links, folders and devices are passed over.

    Raises:
        ValueError: the file is no plain tar, or is truncated.
    """
    with open(shard, "rb", buffering=0) as file:
        descriptor, total = file.fileno(), os.fstat(file.fileno()).st_size
        position, long_name, pax = 0, b"", dict[bytes, bytes]()
        while True:
            header = os.pread(descriptor, 512, position)
            if not header[:1].strip(b"\0") and position and header.count(0) == len(header):
                return  # the end is marked by zeros, or by nothing
            kind, size, name = _parse_tar_header(header, pax, shard, position)
            start = position = position + 512
            if kind not in b"123456":
                position += -(-size // 512) * 512
                if start + size > total:
                    raise ValueError(
                        f"tar shard {shard!r} is truncated within {os.fsdecode(name)!r}; fetch or write it anew"
                    )
            if kind == b"L":
                long_name = os.pread(descriptor, min(size, _MAX_TEXT), start).rstrip(b"\0")
            elif kind == b"x":
                pax = _parse_pax(os.pread(descriptor, min(size, _MAX_TEXT), start))
            elif kind not in b"gK":
                name = pax.get(b"path", long_name or name)
                if kind == b"S" or any(key.startswith(b"GNU.sparse") for key in pax):
                    raise ValueError(
                        f"tar shard {shard!r} has the sparse member {os.fsdecode(name)!r}; write it without --sparse"
                    )
                long_name, pax = b"", {}
                if kind in b"0\x007" and not name.rpartition(b"/")[2].startswith(b"."):
                    if name.lower().endswith(_IMAGE_ENDINGS):
                        yield name, start, size, None
                    elif name.endswith(b".cls"):
                        text = os.pread(descriptor, min(size, _MAX_TEXT), start)
                        yield name, start, size, text.decode(errors="replace").strip()


def _parse_tar_header(header: bytes, pax: dict[bytes, bytes], shard: str, position: int) -> tuple[bytes, int, bytes]:
    """A 512-byte header and its pax records -> (type, size, name); ValueError if it is none."""
    try:
        # The oldest tars have no magic word, only a checksum; where there is one, summing up would take half the time.
        if len(header) < 512 or (
            header[257:262] != b"ustar" and _tar_checksum(header) != int(header[148:156].strip(b" \0"), 8)
        ):
            raise ValueError
        field = header[124:136]  # octal; larger sizes in base 256, marked by the highest bit, or in a pax record
        size = int.from_bytes(field[1:], "big") if field[0] & 128 else int(field.strip(b" \0") or b"0", 8)
        size = int(pax.get(b"size", size))
        if size < 0:
            raise ValueError
    except ValueError:
        damage = "is damaged" if position else "is no plain tar file (empty, compressed, or of another kind)"
        raise ValueError(f"tar shard {shard!r} {damage}: no valid header at byte {position:,}") from None
    name = header[:100].rstrip(b"\0")
    if header[345] and header[257:263] == b"ustar\0":
        name = header[345:500].rstrip(b"\0") + b"/" + name
    kind = header[156:157]
    return (b"5" if kind in b"0\0" and name.endswith(b"/") else kind), size, name


def _tar_checksum(header: bytes) -> int:
    """The sum of a header's bytes, its own field counted as spaces."""
    return sum(header) - sum(header[148:156]) + 8 * 32


def _parse_pax(payload: bytes) -> dict[bytes, bytes]:
    """Records `LENGTH KEY=VALUE\\n` of a pax extended header."""
    records, start = {}, 0
    while start < len(payload) and (match := re.compile(rb"(\d+) ([^=]+)=").match(payload, start)):
        end = start + int(match[1])
        records[match[2]] = payload[match.end() : end - 1]
        start = max(end, match.end())
    return records


# ---- torchvision's sets


class _TorchvisionSet(NamedTuple):
    """How to build a set: its class, the arguments of each split, and the attribute that holds the labels."""

    build: Callable[..., Any]
    train: dict[str, Any]
    val: dict[str, Any]
    labels: str
    alone: dict[str, Any] | None = None  # arguments when no split is asked for; None: the training split's


_BY_FLAG = {"train": True}, {"train": False}
_BY_NAME = {"split": "train"}, {"split": "test"}
_TRAINVAL = {"split": "trainval"}, {"split": "test"}

TORCHVISION_SETS: dict[str, _TorchvisionSet] = {
    "cifar10": _TorchvisionSet(datasets.CIFAR10, *_BY_FLAG, "targets"),
    "cifar100": _TorchvisionSet(datasets.CIFAR100, *_BY_FLAG, "targets"),
    "stl10": _TorchvisionSet(datasets.STL10, *_BY_NAME, "labels", {"split": "train+unlabeled"}),
    "svhn": _TorchvisionSet(datasets.SVHN, *_BY_NAME, "labels"),
    "mnist": _TorchvisionSet(datasets.MNIST, *_BY_FLAG, "targets"),
    "fashionmnist": _TorchvisionSet(datasets.FashionMNIST, *_BY_FLAG, "targets"),
    "kmnist": _TorchvisionSet(datasets.KMNIST, *_BY_FLAG, "targets"),
    "food101": _TorchvisionSet(datasets.Food101, *_BY_NAME, "_labels"),
    "flowers102": _TorchvisionSet(datasets.Flowers102, *_BY_NAME, "_labels"),
    "oxfordpets": _TorchvisionSet(datasets.OxfordIIITPet, *_TRAINVAL, "_labels"),
    "aircraft": _TorchvisionSet(datasets.FGVCAircraft, *_TRAINVAL, "_labels"),
    "dtd": _TorchvisionSet(datasets.DTD, *_BY_NAME, "_labels"),
    "country211": _TorchvisionSet(datasets.Country211, *_BY_NAME, "targets"),
    "gtsrb": _TorchvisionSet(datasets.GTSRB, *_BY_NAME, "_samples"),
    "imagenette": _TorchvisionSet(datasets.Imagenette, {"split": "train"}, {"split": "val"}, "_samples"),
}


class TorchvisionSource:
    """A torchvision set.

    Args:
        name: what the log calls it.
        dataset: yields (PIL image, label).
        labels: (len,) int64.
    """

    def __init__(self, name: str, dataset: Any, labels: np.ndarray) -> None:
        self.name, self.dataset = name, dataset
        self.labels: np.ndarray | None = labels
        self._length = len(labels)
        classes = getattr(dataset, "classes", None) or range(int(labels.max()) + 1)
        self.classes: list[str] | None = [", ".join(c) if isinstance(c, tuple) else str(c) for c in classes]

    def __len__(self) -> int:
        """Number of images."""
        return self._length

    def location(self, index: int) -> str:
        """`name[index]`."""
        return f"{self.name}[{index}]"

    def read(self, index: int) -> Image.Image:
        """Image `index` as 8-bit RGB; raises CorruptImageError."""
        try:
            return self.dataset[index][0].convert("RGB")
        except Exception as error:  # as in decode_image: damaged files raise anything
            raise CorruptImageError(self.location(index), repr(error)) from error


def _open_torchvision(name: str, folder: str, split: str | None, download: bool) -> ImageSource:
    """Build a set by name; ValueError if it is not on disk and may not be, or cannot be, downloaded."""
    entry = TORCHVISION_SETS[name]
    arguments = {None: entry.alone or entry.train, "train": entry.train, "val": entry.val}[split]
    folder = os.path.expanduser(folder)
    try:
        dataset = entry.build(folder, download=download, **arguments)
    except (RuntimeError, OSError) as error:
        problem = "could not be downloaded" if download else "is not there, or not whole; pass --download to fetch it"
        raise ValueError(f"torchvision set {name!r} in {folder!r} {problem} ({error})") from error
    labels = getattr(dataset, entry.labels)
    if entry.labels == "_samples":
        labels = [label for _, label in labels]
    return TorchvisionSource(f"{name} in {folder} ({split or 'training'})", dataset, np.asarray(labels, dtype=np.int64))


# ---- the cache of indexes


def _load_or_index(key: str, build: Callable[[], Arrays], is_current: Callable[[Arrays], bool]) -> tuple[Arrays, str]:
    """An index from the user's cache while it is current, else built and kept there.

    The cache lies in $DINO_SPARO_CACHE, else $XDG_CACHE_HOME/dino_sparo, else ~/.cache/dino_sparo. Its loss costs time
    only: whatever is wrong with it is logged and the index is built.

    Args:
        key: what is indexed, with absolute paths.
        build: lists the files; `stamps` among its arrays are their times of change (ns).
        is_current: whether a stored index still describes what lies on disk.

    Returns:
        The index, and the log's word for where it comes from.
    """
    folder = os.environ.get("DINO_SPARO_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "dino_sparo"
    )
    version = np.frombuffer(os.fsencode(f"{_CACHE_VERSION} {key}"), np.uint8)
    path = os.path.join(folder, hashlib.sha256(version.tobytes()).hexdigest()[:32] + ".npz")
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        if np.array_equal(arrays["version"], version) and is_current(arrays):
            return arrays, f"index read from {path}"
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        _logger.info("ignoring the damaged index cache %s (%r)", path, error)
    started = time.time()
    arrays = build()
    if arrays["stamps"][0].max() < (started - _SETTLE_S) * 1e9:
        _save_index(path, {**arrays, "version": version})
    return arrays, "indexed"


def _save_index(path: str, arrays: Arrays) -> None:
    """Write an index so that a reader sees all of it or nothing."""
    temporary = None
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=os.path.dirname(path), suffix=".part", delete=False) as file:
            temporary = file.name
            np.savez(file, **arrays)  # type: ignore[arg-type]
        os.replace(temporary, path)
    except OSError as error:
        _logger.info("the index is not cached: %s", error)
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.remove(temporary)

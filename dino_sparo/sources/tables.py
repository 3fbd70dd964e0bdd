"""A list of paths or a table (.csv, .tsv) -> the source of the image files that it names, with their labels."""

import csv
import logging
import os
from collections.abc import Sequence

from dino_sparo.sources.decode import IMAGE_EXTENSIONS
from dino_sparo.sources.packed import FileSource, PackedStrings, encode_labels
from dino_sparo.sources.splits import SPLIT_NAMES

_logger = logging.getLogger(__name__)

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
# How many files of a list must exist when it is opened; asking for a million takes minutes on a network disk.
_LIST_CHECKED = 8


def open_list(path: str, split: str | None) -> tuple[FileSource, str]:
    """One path per line; a label may follow after a tab, or after the last space of a line that ends with no image.

    Raises:
        ValueError: a split is asked for, the file is no text or names no images, or its first images do not exist.
    """
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


def open_table(path: str, split: str | None) -> tuple[FileSource, str]:
    """A table with a header; the delimiter is the one whose header has a column of paths.

    Raises:
        ValueError: as `open_list`; no column of paths, a row of another length, or no row of the split.
    """
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


def _read_text(path: str) -> list[str]:
    """Lines of a text file; ValueError if it is not text."""
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
    classes, numbers = encode_labels(labels)
    return FileSource(f"{kind} {listing}", root, PackedStrings.pack([os.fsencode(p) for p in paths]), classes, numbers)

"""A list of paths or a table (.csv, .tsv, .jsonl) -> the source of the image files that it names, with their labels."""

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from dino_sparo.data.sources.decode import IMAGE_EXTENSIONS
from dino_sparo.data.sources.packed import FileSource, PackedStrings, encode_labels
from dino_sparo.data.sources.rows import LABELS, PATHS, SPLITS, TableRows, open_text
from dino_sparo.data.sources.splits import ALL

_logger = logging.getLogger(__name__)

# How many files of a list must exist when it is opened; asking for a million takes minutes on a network disk.
_LIST_CHECKED = 8
# A label may follow the last image ending of a line after a comma, semicolon or blank.
_NAME_AND_LABEL = re.compile(
    rf"(.*(?:{'|'.join(map(re.escape, IMAGE_EXTENSIONS))}))(?:\s*[,;]\s*|\s+)(.*)", re.IGNORECASE
)
_COMMENT = re.compile(r"(^|\s)#.*")


@dataclass(frozen=True)
class TableColumns:
    """Names of a table's columns; None finds a column by its usual names.

    Attributes:
        path: of the images' files.
        label: of their classes.
        split: of the splits they belong to.
    """

    path: str | None = None
    label: str | None = None
    split: str | None = None

    def refuse_for(self, data_path: str) -> None:
        """ValueError if columns are named of what is no table."""
        named = [f"{holds} {name!r}" for holds, name in vars(self).items() if name is not None]
        if named:
            raise ValueError(
                f"data_path={data_path!r} is no table, so it has no column of that name ({', '.join(named)}); leave "
                "the option out, or give a table (.csv, .tsv, .jsonl)"
            )


USUAL_COLUMNS = TableColumns()


def open_list(path: str, split: str | None) -> tuple[FileSource, str]:
    """One path per line, a label after it if there is one; lines that begin with `#` are comments.

    The label follows after a tab; or after a comma, semicolon or blank behind the last ending of an image, so that
    names may hold all of these; or after the last blank of a line without such an ending. A file whose own name begins
    with `#` is written `./#1.png`.

    Raises:
        ValueError: a split is asked for, the file is no text or names no images, or its first images do not exist.
    """
    if split not in (None, ALL):
        raise ValueError(f"list {path!r} has no split {split!r}; put train.txt and val.txt into a folder and give that")
    paths, labels = [], []
    with open_text(path) as file:
        for line in file:
            line = line.strip()
            if line and not line.startswith("#"):
                name, label = _name_and_label(line)
                paths.append(name)
                labels.append(label)
    return _file_source("list", path, paths, labels), "read"


def _name_and_label(line: str) -> tuple[str, str]:
    """A line of a list -> path and label, "" without one."""
    name, label = line, ""
    if "\t" in line:
        name, label = line.rsplit("\t", 1)
    elif line.lower().endswith(IMAGE_EXTENSIONS):
        return line, ""
    elif match := _NAME_AND_LABEL.fullmatch(line):
        name, label = match[1], match[2]
    elif len(parts := _COMMENT.sub("", line).rsplit(None, 1)) == 2:
        name, label = parts
    return name.strip(), _COMMENT.sub("", label).strip()


def open_table(
    path: str, split: str | None, default_split: str = "train", columns: TableColumns = USUAL_COLUMNS
) -> tuple[FileSource, str]:
    """A table with a header, or one JSON object per line; a column of splits chooses rows as in `splits.choose_rows`.

    Raises:
        ValueError: as `open_list`; no column of paths, a row that cannot be read, or no row of the split.
    """
    rows = TableRows(
        path,
        (PATHS.named(columns.path), LABELS.named(columns.label)),
        SPLITS.named(columns.split),
        split,
        default_split,
    )
    used = [cells for _, cells in rows]
    if rows.missing and rows.num_other_columns:
        _logger.warning(
            "table %s is used without labels: none of its columns %s is called %s; name one with --label_column",
            path,
            rows.header,
            " or ".join(LABELS.names),
        )
    labels = [label.strip() for _, label in used]
    return _file_source("table", path, [name.strip() for name, _ in used], labels), "read"


def _file_source(kind: str, listing: str, paths: list[str], labels: Sequence[str | None]) -> FileSource:
    """Files named by a list or table, after looking whether the first of them exist."""
    root = os.path.dirname(listing)
    if not paths:
        raise ValueError(f"{kind} {listing!r} names no images")
    for path in paths[:_LIST_CHECKED]:
        if not os.path.isfile(os.path.join(root, path)):
            raise ValueError(
                f"{kind} {listing!r} names {path!r}, but {os.path.join(root, path)!r} does not exist or is no regular "
                f"file; paths are absolute or relative to the {kind}'s folder"
            )
    classes, numbers = encode_labels(labels)
    return FileSource(f"{kind} {listing}", root, PackedStrings.pack([os.fsencode(p) for p in paths]), classes, numbers)

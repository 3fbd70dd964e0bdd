"""A list of paths or a table (.csv, .tsv, .jsonl) -> its rows -> the image files that it names, with their labels.

A table is read line by line, so that memory is what the caller keeps. Columns are found by usual names or named by
options. The log warns of what is unusual but may be correct, with the first line where it occurs: rows that span
several lines, texts that are not UTF-8, splits that are not recognised.
"""

import csv
import io
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dino_sparo.data.sources.decode import IMAGE_EXTENSIONS
from dino_sparo.data.sources.image_source import FileSource, PackedStrings, encode_labels
from dino_sparo.data.sources.splits import ALL, choose_rows
from dino_sparo.runtime.files import open_regular, parse_object

_logger = logging.getLogger(__name__)

TABLE_ENDINGS = (".csv", ".tsv", ".jsonl")
_DELIMITERS = ",\t;|"


@dataclass(frozen=True)
class Column:
    """A column to look for.

    Attributes:
        holds: what it holds, for messages.
        option: the option that names it.
        names: its usual names in any case, in the order of preference.
        name: the name that the user gave; None looks for the usual ones.
        is_required: a table without it is refused.
        is_path: cells are file names: their bytes count, not what they spell.
        may_span: a cell may hold line ends.
    """

    holds: str
    option: str
    names: tuple[str, ...]
    name: str | None = None
    is_required: bool = False
    is_path: bool = False
    may_span: bool = False

    def __str__(self) -> str:
        looked_for = "one of " + ", ".join(self.names) if self.name is None else f"{self.option} {self.name!r}"
        return f"of {self.holds} ({looked_for})"

    def named(self, name: str | None) -> "Column":
        """The same column under the name that the user gave."""
        return replace(self, name=name)

    def find(self, header: Sequence[str]) -> int | None:
        """Its number in a header."""
        if self.name is not None:
            return header.index(self.name) if self.name in header else None
        lower = [word.lower() for word in header]
        return next((lower.index(name) for name in self.names if name in lower), None)


PATHS = Column(
    "paths",
    "path_column",
    ("path", "filepath", "file_path", "file", "filename", "file_name", "image", "image_path", "img", "img_path"),
    is_required=True,
    is_path=True,
)
LABELS = Column("labels", "label_column", ("label", "class", "class_name", "category", "target"))
SPLITS = Column("splits", "split_column", ("split", "set", "subset", "partition"))


class TableRows:
    """The rows of a table, or of one of its splits.

    Iterating gives (line, cells): the line that a row begins on, from 1, and its cells in the order of `columns`, ""
    where a column is not there. The file is read anew each time.

    Args:
        path: of the table.
        columns: to look for.
        splits: the column of splits.
        split: rows to use, as in `splits.choose_rows`.
        default_split: likewise.

    Attributes:
        header: names of all columns.
        missing: those of `columns` that are not there.

    Raises:
        ValueError: a column is not there that must be, or that the user named; the file is no text; no row is of the
            split. While iterating: a row that cannot be read, by its line.
    """

    def __init__(
        self,
        path: str,
        columns: Sequence[Column],
        splits: Column = SPLITS,
        split: str | None = None,
        default_split: str = "train",
    ) -> None:
        self.path, self.columns = path, [*columns, splits]
        self.is_jsonl = path.lower().endswith(".jsonl")
        self.header, self.delimiter = self._read_header()
        self.numbers = [column.find(self.header) for column in self.columns]
        self.missing = [column for column, n in zip(columns, self.numbers, strict=False) if n is None]
        self.word: str | None = None
        if self.numbers[-1] is not None and split != ALL:
            counts = Counter(cells[-1].strip().lower() for _, cells in self._rows({}))
            table = f"column {self.header[self.numbers[-1]]!r} of table {path}"
            self.word = choose_rows(counts, split, default_split, table)
        elif split not in (None, ALL):
            raise ValueError(
                f"table {path!r} has no split {split!r}: none of its columns {self.header} is "
                f"{' or '.join(splits.names)}; name one (--split_column, where the command has it), or put "
                "train.csv and val.csv into a folder and give that"
            )

    @property
    def num_other_columns(self) -> int:
        """How many columns are not used."""
        return len(self.header) - sum(number is not None for number in self.numbers)

    def __iter__(self) -> Iterator[tuple[int, list[str]]]:
        odd: dict[str, tuple[int, str]] = {}
        for line, cells in self._rows(odd):
            if self.word is None or cells[-1].strip().lower() == self.word:
                yield line, cells[:-1]
        for what, (number, first) in odd.items():
            _logger.warning("table %s: %s: %d times, the first in %s", self.path, what, number, first)

    def _read_header(self) -> tuple[list[str], str]:
        """Names of the columns, and what is between them: the mark with which all required columns are there."""
        with open_text(self.path) as file:
            if self.is_jsonl:
                first = next((line for line in file if line.strip()), "{}")
                read = {"": list(parse_object(first, f"table {self.path!r}: line 1"))}
            else:
                line = file.readline()
                read = {mark: next(csv.reader([line], delimiter=mark), []) for mark in _DELIMITERS}
        needed = [column for column in self.columns if column.is_required or column.name]
        headers = {mark: [word.strip() for word in words] for mark, words in read.items()}
        for mark, header in headers.items():
            if all(column.find(header) is not None for column in needed):
                return header, mark
        header = max(headers.values(), key=len)
        lacking = [column for column in needed if column.find(header) is None]
        raise ValueError(
            f"table {self.path!r} has no column {' and none '.join(map(str, lacking))}; found the columns {header}; "
            f"name them with {' and '.join(f'--{column.option}' for column in lacking)}"
        )

    def _rows(self, odd: dict[str, tuple[int, str]]) -> Iterator[tuple[int, list[str]]]:
        """Lines and cells of all rows, the split's last; what is odd is noted: what -> (how often, where first)."""
        with open_text(self.path) as file:
            for first, last, row in self._json_rows(file) if self.is_jsonl else self._csv_rows(file):
                lines = f"line {first}" if first == last else f"lines {first} to {last}"
                if first != last:
                    _note(odd, "a row goes over several lines (is a quote missing?)", lines)
                cells = []
                for column, number in zip(self.columns, self.numbers, strict=True):
                    cell = "" if number is None else row[number]
                    if not column.may_span and "\n" in cell.strip():
                        raise ValueError(
                            f"table {self.path!r}: {lines} are one row by their quotes, and its "
                            f"{self.header[number or 0]!r} holds line ends; a quote is missing or too many"
                        )
                    if not (column.is_path or cell.isascii()):
                        text = _as_latin_1(cell)
                        if text is not cell:
                            _note(odd, "a text is not UTF-8 and is read as Latin-1", lines)
                        cell = text
                    cells.append(cell)
                yield first, cells

    def _csv_rows(self, file: io.TextIOWrapper) -> Iterator[tuple[int, int, list[str]]]:
        """First line, last line and cells of each row."""
        file.readline()
        reader = csv.reader(file, delimiter=self.delimiter)
        first = 2
        try:
            for row in reader:
                last = reader.line_num + 1
                if row and len(row) != len(self.header):
                    lines = f"line {first}" if first == last else f"lines {first} to {last}, one row by its quotes,"
                    raise ValueError(
                        f"table {self.path!r}: {lines} has {len(row)} columns, the header has {len(self.header)}: "
                        f"{self.header}; put cells that hold {self.delimiter!r} or line ends in double quotes"
                    )
                if row:
                    yield first, last, row
                first = last + 1
        except csv.Error as error:
            raise ValueError(
                f"table {self.path!r}: line {first} cannot be read ({error}); is a quote missing?"
            ) from error

    def _json_rows(self, file: io.TextIOWrapper) -> Iterator[tuple[int, int, list[str]]]:
        """The same of a file with one JSON object per line; its columns are the keys of the first."""
        header = set(self.header)
        absent = [column for column, number in zip(self.columns, self.numbers, strict=True) if number is None]
        for line, text in enumerate(file, 1):
            if text.strip():
                row = parse_object(text, f"table {self.path!r}: line {line}")
                late = [] if row.keys() <= header else sorted(row.keys() - header)
                if any(column.find(late) is not None for column in absent):
                    raise ValueError(
                        f"table {self.path!r}: line {line} has {late}, which the first line lacks; give all lines the "
                        "same keys, null where there is no value"
                    )
                yield line, line, [self._plain(line, name, row.get(name)) for name in self.header]

    def _plain(self, line: int, name: str, value: Any) -> str:
        """A JSON value as a cell: texts and numbers; anything else only in columns that are not used."""
        if isinstance(value, str):
            return value.encode("utf-8", "replace").decode() if _has_lone_surrogate(value) else value
        if value is None:
            return ""
        if isinstance(value, list | dict):
            asked = [self.header[number] for number in self.numbers if number is not None]
            if name in asked:
                raise ValueError(f"table {self.path!r}: line {line}: {name!r} holds no text but {str(value)[:60]}")
            return ""
        if isinstance(value, float) and (math.isnan(value) or value.is_integer()):  # as pandas writes whole numbers
            return "" if math.isnan(value) else str(int(value))
        return str(value)


def open_text(path: str) -> io.TextIOWrapper:
    """Open a text file; bytes that are no UTF-8 come through as the file names that they may be.

    Raises:
        ValueError: it is not text.
        OSError: it is no regular file.
    """
    file = open_regular(path)
    if b"\0" in file.read(1 << 12):
        file.close()
        raise ValueError(
            f"data_path={path!r} is not a text file; give a list of paths, a .csv/.tsv/.jsonl table, or a folder"
        )
    file.seek(0)
    return io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")


def _note(odd: dict[str, tuple[int, str]], what: str, lines: str) -> None:
    number, first = odd.get(what, (0, lines))
    odd[what] = number + 1, first


def _as_latin_1(cell: str) -> str:
    """The same text; if its bytes are no UTF-8, what they mean in Latin-1."""
    try:
        cell.encode()
    except UnicodeEncodeError:
        return cell.encode("utf-8", "surrogateescape").decode("latin-1")
    return cell


def _has_lone_surrogate(text: str) -> bool:
    """Whether a JSON escape such as \\ud800 stands without its other half; no file can be called so."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return True
    return False


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

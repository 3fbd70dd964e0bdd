"""A list of paths or a table (.csv, .tsv, .jsonl) -> its rows -> the image files that it names, with their labels.

A table is read line by line, so that memory is what the caller keeps. Columns are found by usual names or named by
options. Texts that are not UTF-8 are read as Latin-1, with a warning.
"""

import csv
import io
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dino_sparo.data.sources.decode import ARRAY_EXTENSION, DEFAULT_LIMITS, IMAGE_EXTENSIONS, ImageLimits, read_image
from dino_sparo.data.sources.folders import ALL, SPLIT_NAMES
from dino_sparo.data.sources.image_source import FileSource, PackedStrings, encode_labels
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import open_regular, parse_object

_logger = logging.getLogger(__name__)

TABLE_ENDINGS = (".csv", ".tsv", ".jsonl")
_DELIMITERS = ",\t;|"
# In a TSV, a cell that begins with a quote but is not enclosed in quotes.
_OPEN_QUOTE = re.compile(r'(?:^|(?<=\t))(?!"(?:[^"]|"")*"(?:\t|[\r\n]*$))"[^\t\r\n]*')
_HALF_CHARACTER = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # of a surrogate pair in JSON, without the other half


@dataclass(frozen=True)
class Column:
    """A column of a table, and the names by which it is found.

    Attributes:
        holds: its content, for messages.
        option: the option that names it.
        names: its usual names in any case, in the order of preference.
        name: the name that the user gave; None looks for the usual ones.
        is_required: a table without it is refused.
        is_path: cells are file names, so their bytes count.
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

    def find(self, header: Sequence[str]) -> str | None:
        """The column's name in a header."""
        if self.name is not None:
            return self.name if self.name in header else None
        spellings = {word.lower(): word for word in reversed(header)}
        return next((spellings[name] for name in self.names if name in spellings), None)


PATHS = Column(
    "paths",
    "path_column",
    ("path", "filepath", "file_path", "file", "filename", "file_name", "image", "image_path", "img", "img_path"),
    is_required=True,
    is_path=True,
)
LABELS = Column("labels", "label_column", ("label", "class", "class_name", "category", "target"))
SPLITS = Column("splits", "split_column", ("split", "set", "subset", "partition"))

Row = tuple[int, dict[Any, Any]]  # first line, cells by column


class TableRows:
    """The rows of a table, or of one of its splits.

    Iterating gives (line, cells): the first line of a row, from 1, and its cells in the order of `columns`, "" for a
    missing column. The file is read anew each time.

    Args:
        path: of the table.
        columns: to look for.
        splits: the column of splits.
        split: as in `choose_rows`, or `ALL`.
        default_split: the split of None.

    Attributes:
        header: names of all columns.
        oddities: problem -> number of rows, line of the first.
        names: names of `columns` and of `splits` in the header; None where a column is missing.

    Raises:
        ValueError: a required or named column is missing, or no row is of the split; on iterating: an unreadable row.
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
        self.oddities = dict[str, tuple[int, int]]()
        self.header, self.delimiter = self._read_header()
        self.names = [column.find(self.header) for column in self.columns]
        self.word: str | None = None
        if self.names[-1] is not None and split != ALL:
            counts = Counter(cells[-1].strip().lower() for _, cells in self._rows())
            self.word = choose_rows(counts, split, default_split, f"column {self.names[-1]!r} of table {path}")
        elif split not in (None, ALL):
            raise UserError(
                f"table {path!r} has no split {split!r}: none of its columns {self.header} is "
                f"{' or '.join(splits.names)}; name one (--split_column, where the command has it), or put "
                "train.csv and val.csv into a folder and give that"
            )

    def __iter__(self) -> Iterator[tuple[int, list[str]]]:
        self.oddities.clear()
        for line, cells in self._rows():
            if self.word is None or cells[-1].strip().lower() == self.word:
                yield line, cells[:-1]
        for oddity, (number, line) in self.oddities.items():
            _logger.warning("table %s: %d %s; the first is in line %d", self.path, number, oddity, line)

    def _note(self, oddity: str, line: int) -> None:
        number, first = self.oddities.get(oddity, (0, line))
        self.oddities[oddity] = number + 1, first

    def _read_header(self) -> tuple[list[str], str]:
        """Names of the columns, and the delimiter that gives all required columns."""
        with open_text(self.path) as file:
            if self.is_jsonl:
                first = next((line for line in file if line.strip()), "{}")
                words = {"": list(parse_object(first, f"table {self.path!r}: line 1"))}
            else:
                line = file.readline()
                words = {mark: next(csv.reader([line], delimiter=mark), []) for mark in _DELIMITERS}
        headers = {mark: [word.strip() for word in found] for mark, found in words.items()}
        required = [column for column in self.columns if column.is_required or column.name]
        for mark, header in headers.items():
            if all(column.find(header) is not None for column in required):
                return header, mark
        header = max(headers.values(), key=len)
        lacking = [column for column in required if column.find(header) is None]
        raise UserError(
            f"table {self.path!r} has no column {' and none '.join(map(str, lacking))}; found the columns {header}; "
            f"name them with {' and '.join(f'--{column.option}' for column in lacking)}"
        )

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        """Line number and cells of all rows; the cell of the split is the last."""
        with open_text(self.path) as file:
            for line, row in self._json_rows(file) if self.is_jsonl else self._csv_rows(file):
                cells = zip(self.columns, map(row.get, self.names), strict=True)
                yield line, [self._cell(column, value, line) for column, value in cells]

    def _cell(self, column: Column, value: Any, line: int) -> str:
        """A value as text; ValueError for a list, an object, or line ends that it should not hold."""
        cell = _as_text(value)
        if isinstance(value, list | dict) or (not column.may_span and "\n" in cell.strip()):
            raise UserError(
                f"table {self.path!r}: line {line}: {column.find(self.header)!r} holds no text of one line but "
                f"{cell[:60]!r}; is a quote missing?"
            )
        text = cell if column.is_path else decoded(cell)
        if text != cell:
            self._note("texts are not UTF-8 and are read as Latin-1", line)
        return text

    def _csv_rows(self, file: io.TextIOWrapper) -> Iterator[Row]:
        """The rows of a table with a delimiter; blank lines are skipped."""
        file.readline()
        lines = self._tsv_lines(file) if self.delimiter == "\t" else file
        reader, line = csv.reader(lines, delimiter=self.delimiter, strict=True), 2
        try:
            for cells in reader:
                if cells and len(cells) != len(self.header):
                    raise UserError(
                        f"table {self.path!r}: the row from line {line} has {len(cells)} columns, the header has "
                        f"{len(self.header)}: {self.header}; put cells that hold {self.delimiter!r} or line ends in "
                        "double quotes"
                    )
                if cells:
                    yield line, dict(zip(self.header, cells, strict=True))
                if reader.line_num + 1 > line:
                    self._note("rows span several lines (is a quote missing?)", line)
                line = reader.line_num + 2
        except csv.Error as error:
            raise UserError(
                f"table {self.path!r}: line {line} cannot be read ({error}); is a quote missing?"
            ) from error

    def _tsv_lines(self, file: io.TextIOWrapper) -> Iterator[str]:
        """The lines of a TSV. A quote that begins a cell without enclosing it becomes a character of the cell.

        Such a quote may also begin a cell of several lines. So both the line and the next must have all columns.
        """
        number, line = 1, file.readline()
        while line:
            number, following = number + 1, file.readline()
            rows = [text.count("\t") + 1 == len(self.header) for text in (line, following) if text]
            if '"' in line and all(rows) and _OPEN_QUOTE.search(line):
                self._note("lines have a quote that does not enclose a cell and is read as a character", number)
                line = _OPEN_QUOTE.sub(lambda cell: '"{}"'.format(cell[0].replace('"', '""')), line)
            yield line
            line = following

    def _json_rows(self, file: io.TextIOWrapper) -> Iterator[Row]:
        """The rows of a file with one JSON object per line; the keys of the first are the columns."""
        absent = [column for column, name in zip(self.columns, self.names, strict=True) if name is None]
        for line, text in enumerate(file, 1):
            if text.strip():
                row = parse_object(text, f"table {self.path!r}: line {line}")
                if late := [name for column in absent if (name := column.find(list(row)))]:
                    raise UserError(
                        f"table {self.path!r}: line {line} has {late}, which the first line lacks; give all lines the "
                        "same keys, null where there is no value"
                    )
                yield line, row


def choose_rows(counts: Mapping[str, int], split: str | None, default_split: str, table: str) -> str | None:
    """The word in a table's column of splits whose rows are used; None: all rows.

    Args:
        counts: word in the column, lower case -> number of rows.
        split: a name, or None for the default split if there are such rows; ValueError if no row has the name.
        default_split: the split of None.
        table: name of the table and its column, for messages.
    """
    asked = split or default_split
    word = next((name for name in SPLIT_NAMES.get(asked, (asked.lower(),)) if name in counts), None)
    words = ", ".join(f"{name!r} ({number:,} rows)" for name, number in sorted(counts.items())[:20])
    if word is not None:
        _logger.info("%s: the rows of the split %r are used, of %s; --split %s uses all", table, word, words, ALL)
    elif split is not None:
        raise UserError(f"{table} has no split {split!r}: it holds {words or 'nothing'}")
    else:
        _logger.warning("%s has no split %r, all rows are used: %s; --split NAME chooses", table, default_split, words)
    return word


def open_text(path: str) -> io.TextIOWrapper:
    """Open a text file, or raise UserError; bytes that are not UTF-8 are kept, since file names may hold such bytes."""
    file = open_regular(path)
    if b"\0" in file.peek(1 << 12):
        file.close()
        raise UserError(
            f"data_path={path!r} is not a text file in UTF-8; give a list of paths, a table (.csv, .tsv, .jsonl) or a "
            "folder"
        )
    return io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")


def decoded(text: str) -> str:
    """A text of `open_text` or of JSON in UTF-8 if it is, else in Latin-1; half characters become `?`."""
    if text.isascii():
        return text
    data = _HALF_CHARACTER.sub("?", text).encode("utf-8", "surrogateescape")
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _as_text(value: Any) -> str:
    """A text or number of a table; whole numbers without a point, NaN as nothing."""
    if value is None or value != value:
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)  # pandas writes 3.0


# How many files of a list must exist when it is opened; asking for a million takes minutes on a network disk.
FILES_CHECKED = 8
# A label may follow the last image ending of a line after a comma, semicolon or blank.
_FILE_ENDINGS = (*IMAGE_EXTENSIONS, ARRAY_EXTENSION)
_NAME_AND_LABEL = re.compile(rf"(.*(?:{'|'.join(map(re.escape, _FILE_ENDINGS))}))(?:\s*[,;]\s*|\s+)(.*)", re.IGNORECASE)
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
        """ValueError if columns are named although `data_path` is not a table."""
        words = ", ".join(f"{holds} {name!r}" for holds, name in vars(self).items() if name is not None)
        if words:
            raise UserError(
                f"data_path={data_path!r} is not a table, so it has no column of that name ({words}); leave the option "
                "out, or give a table (.csv, .tsv, .jsonl)"
            )


USUAL_COLUMNS = TableColumns()


def open_list(path: str, split: str | None, limits: ImageLimits = DEFAULT_LIMITS) -> tuple[FileSource, str]:
    """One path per line, a label after it if there is one; lines that begin with `#` are comments.

    The label follows a tab; or a comma, semicolon or blank after the last image ending, so that names may hold these
    characters; or the last blank of a line without an image ending. A file name that begins with `#` is written
    `./#1.png`.

    Raises:
        ValueError: a split is asked for, or the first images do not exist.
    """
    if split not in (None, ALL):
        raise UserError(f"list {path!r} has no split {split!r}; put train.txt and val.txt into a folder and give that")
    with open_text(path) as file:
        lines = map(str.strip, file)
        files = [_name_and_label(line) for line in lines if line and not line.startswith("#")]
    return _file_source("list", path, files, limits), "read"


def open_image(path: str, split: str | None, limits: ImageLimits = DEFAULT_LIMITS) -> tuple[FileSource, str]:
    """A single image, without a label.

    Raises:
        ValueError: a split is asked for.
        CorruptImageError: the image cannot be read.
    """
    if split not in (None, ALL):
        raise UserError(f"image {path!r} has no split {split!r}; put train/ and val/ into a folder and give that")
    read_image(path, path, limits=limits)
    return FileSource(f"image {path}", "", [path], limits=limits), "read"


def _name_and_label(line: str) -> tuple[str, str]:
    """A line of a list -> path and label, "" without one."""
    name, label = line, ""
    if "\t" in line:
        name, label = line.rsplit("\t", 1)
    elif line.lower().endswith(_FILE_ENDINGS):
        return line, ""
    elif match := _NAME_AND_LABEL.fullmatch(line):
        name, label = match[1], match[2]
    elif len(parts := _COMMENT.sub("", line).rsplit(None, 1)) == 2:
        name, label = parts
    return name.strip(), decoded(_COMMENT.sub("", label).strip())


def open_table(
    path: str,
    split: str | None,
    default_split: str = "train",
    columns: TableColumns = USUAL_COLUMNS,
    limits: ImageLimits = DEFAULT_LIMITS,
) -> tuple[FileSource, str]:
    """A table with a header, or one JSON object per line; a column of splits chooses rows as in `choose_rows`.

    Raises:
        ValueError: as `open_list`; no column of paths, a row that cannot be read, or no row of the split.
    """
    wanted = PATHS.named(columns.path), LABELS.named(columns.label)
    rows = TableRows(path, wanted, SPLITS.named(columns.split), split, default_split)
    files = [(path_cell.strip(), label.strip()) for _, (path_cell, label) in rows]
    if rows.names[1] is None and set(rows.header) - set(rows.names):
        _logger.warning(
            "table %s is used without labels: none of its columns %s is called %s; name one with --label_column",
            *(path, rows.header, " or ".join(LABELS.names)),
        )
    source = _file_source("table", path, files, limits)
    source.chosen_split = rows.word
    return source, "read"


def _file_source(kind: str, listing: str, named: list[tuple[str, str]], limits: ImageLimits) -> FileSource:
    """Files that a list or table names, with their labels; the first files must exist."""
    root = os.path.dirname(listing)
    if not named:
        raise UserError(f"{kind} {listing!r} names no images")
    paths, labels = zip(*named, strict=True)
    remedy = f"paths are absolute or relative to the {kind}'s folder"
    require_first_files(f"{kind} {listing!r}", root, paths, remedy)
    classes, numbers = encode_labels(labels)
    return FileSource(f"{kind} {listing}", root, paths, classes, numbers, limits)


def require_first_files(listing: str, root: str, paths: Sequence[str] | PackedStrings, remedy: str) -> None:
    """UserError, which ends with `remedy`, unless the first files that a listing names, from `root` on, exist."""
    for index in range(min(FILES_CHECKED, len(paths))):
        path, whole = paths[index], os.path.join(root, paths[index])
        if not os.path.isfile(whole):
            raise UserError(
                f"{listing} names {path!r}, but {whole!r} does not exist or is not a regular file; {remedy}"
            )

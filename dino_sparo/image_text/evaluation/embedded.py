"""Tables of Hugging Face (.parquet, .arrow) -> rows of texts, and the bytes of the images in their columns.

A published data set may hold its images in the table. An image is read when it is needed, so a table of some GB takes
the memory of one group of rows per process. Needs pyarrow.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from dino_sparo.data.sources import CorruptImageError
from dino_sparo.runtime.faults import UserError, require


@contextmanager
def _damage_explained(path: str) -> Iterator[None]:
    """Turn pyarrow's errors about the content of a table, of which some are OSErrors, into a UserError."""
    try:
        yield
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None):  # the system's: a file that is missing or away
            raise
        raise UserError(f"{path} is not a valid table: {error}; download the file again") from error


@lru_cache(maxsize=8)
def _table(path: str) -> Any:
    """A pyarrow table that is mapped into memory, or an open Parquet file."""
    require("pyarrow", f"images in tables such as {Path(path).name}")
    import pyarrow as pa
    from pyarrow import parquet

    with _damage_explained(path):
        if path.endswith(".parquet"):
            return parquet.ParquetFile(path, memory_map=True)
        return pa.ipc.open_stream(pa.memory_map(path)).read_all()


@lru_cache(maxsize=2)
def _group(path: str, group: int, column: str) -> Any:
    """One column of a group of rows of a Parquet file."""
    with _damage_explained(path):
        return _table(path).read_row_group(group, columns=[column]).column(0)


def columns_of(path: Path) -> set[str]:
    """Names of the columns of a table."""
    table = _table(str(path))
    return set(table.schema_arrow.names if path.suffix == ".parquet" else table.column_names)


def rows_of(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Some columns of every row; images of other columns are not read. A missing column is missing in the row."""
    names = [name for name in columns if name in columns_of(path)]
    table = _table(str(path))
    batches = table.iter_batches(columns=names) if path.suffix == ".parquet" else table.select(names).to_batches()
    with _damage_explained(str(path)):
        for batch in batches:
            yield from batch.to_pylist()


def image_bytes(path: str, column: str, row: int, location: str) -> bytes:
    """The file of the image in a cell; raises CorruptImageError if the cell holds none."""
    cells, position = _table(path), row
    if path.endswith(".parquet"):
        group = 0
        while position >= (count := cells.metadata.row_group(group).num_rows):
            group, position = group + 1, position - count
        try:
            cells = _group(path, group, column)
        except UserError as error:
            raise CorruptImageError(location, str(error)) from error
    else:
        cells = cells.column(column)
    cell = cells[position].as_py()
    data = cell.get("bytes") if isinstance(cell, dict) else cell
    if not data:
        raise CorruptImageError(location, "the cell holds no image")
    return bytes(data)

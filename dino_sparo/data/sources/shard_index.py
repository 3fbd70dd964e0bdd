"""Tar shards -> one table of the places of everything in them, memory-mapped and kept in the user's cache.

A shard's own table is written as soon as the shard is indexed, so an interrupted start continues where it stopped,
several processes share the work, and only a changed shard is indexed again. The tables of a set are joined in one file,
which all processes of a machine map into their memory.

    CACHE/<shard>.npz      records and notes of one shard, with its time of change and size
    CACHE/<set>.records    records of all shards of a set, in its order
    CACHE/<set>.npz        number of records and notes of each shard, and the checksum of the records

The name of a set depends on the paths, times and sizes of its shards, so an existing index is current.
"""

import contextlib
import io
import json
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dino_sparo.data.sources.cache import cache_path, is_settled, load_index, save_index, temporary_path
from dino_sparo.data.sources.tar_headers import BLOCK_BYTES, DamagedShardError, Member
from dino_sparo.runtime.agree import note_progress

_logger = logging.getLogger(__name__)

LOG_SECONDS = 10.0  # between two lines on the progress of the indexing
REPORT_MEMBERS = 1000  # between two reports from within a shard
MAX_SIZE = (1 << 32) - 1
CHECKED_BYTES = 1 << 16  # read at a time; a larger buffer would stay with the process

Notes = dict[str, Any]
Count = Callable[[], None]
Report = Callable[[str], None]


class Piece(NamedTuple):
    """The index of one shard: records of the kind's `dtype`, and notes for JSON, with "damage" if it is damaged."""

    records: np.ndarray
    notes: Notes


@dataclass(frozen=True)
class Kind:
    """A way to index shards.

    Attributes:
        name: distinguishes kinds in the cache.
        dtype: of a record.
        index: indexes one shard; calls its second argument once per member. Raises DamagedShardError.
    """

    name: str
    dtype: np.dtype
    index: Callable[[str, Count], Piece]


def blocks_of(member: Member) -> tuple[int, int, int]:
    """First header and content of a member, in blocks, and its size in bytes."""
    return member.start // BLOCK_BYTES, member.offset // BLOCK_BYTES, min(member.size, MAX_SIZE)


class ShardIndex:
    """The records of all samples in some shards.

    Args:
        shards: paths.
        counts: (shards,) number of records of each.
        dtype: of a record.
        records: all of them; None maps the file `path`, in every process anew.
        path: of the file.
    """

    def __init__(
        self, shards: list[str], counts: Sequence[int], dtype: np.dtype, records: np.ndarray | None, path: str = ""
    ) -> None:
        self.shards, self.dtype, self.path = shards, dtype, path
        self.counts = np.array(counts, np.int64)
        self.ends = self.counts.cumsum()
        self.records = self._map() if records is None else records

    def _map(self) -> np.ndarray:
        return np.memmap(self.path, self.dtype, "r") if self.counts.sum() else np.zeros(0, self.dtype)

    def __len__(self) -> int:
        """Number of records."""
        return len(self.records)

    def shard_of(self, index: int) -> str:
        """Path of the shard that holds record `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} of {len(self)}")
        return self.shards[int(np.searchsorted(self.ends, index, side="right"))]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "records": None if self.path else self.records}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.records is None:
            self.records = self._map()


def index_share(kind: Kind, shards: list[str], number: int, count: int, report: Report = note_progress) -> None:
    """Index every `count`-th shard into the cache, beginning with shard `number`; for `report` see `open_index`."""
    for _ in _pieces(kind, shards[number::count], report):
        pass


def open_index(kind: Kind, shards: list[str], report: Report = note_progress) -> tuple[ShardIndex, list[Notes], str]:
    """The index of some shards, from the cache as far as it is current.

    Args:
        kind: of index.
        shards: paths; a damaged shard has no records, and "damage" in its notes.
        report: called with the progress in words; with an empty text at the end.

    Returns:
        The index, the notes of every shard, and the log's words for the origin of the index.
    """
    started, stamps = time.time(), [_stamp(shard) for shard in shards]
    names = "\n".join(f"{os.path.abspath(shard)} {stamp}" for shard, stamp in zip(shards, stamps, strict=True))
    key = f"{kind.name} of {names}"
    path, temporary = cache_path(key, ".records"), temporary_path()
    if (stored := load_index(key)) is not None:
        if os.path.isfile(path) and stored["crc32"] == _checksum(path):
            index = ShardIndex(shards, stored["counts"].tolist(), kind.dtype, None, path)
            return index, _from_json(stored["notes"]), f"index read from {path}"
        _logger.warning("the cached index %s is damaged; it is built again", path)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(temporary, "xb") as file:
            counts, notes = _join(kind, shards, report, file)
        # A shard that is unreadable now, or has just changed, may be another one at the next start.
        if is_settled(np.array(stamps)[:, 0], started) and not any(note.get("is_unreadable") for note in notes):
            entry = {"counts": np.array(counts), "notes": _as_json(notes), "crc32": np.array(_checksum(temporary))}
            os.replace(temporary, path)
            save_index(key, entry)
            return ShardIndex(shards, counts, kind.dtype, None, path), notes, "indexed"
        records = np.fromfile(temporary, kind.dtype)
    except OSError as error:
        _logger.warning(
            "the index is not cached: every process holds it in its own memory, and the next start indexes again (%s); "
            "DINO_SPARO_CACHE names another folder",
            error,
        )
        memory = io.BytesIO()
        counts, notes = _join(kind, shards, report, memory)
        records = np.frombuffer(memory.getbuffer(), kind.dtype)
    finally:
        with contextlib.suppress(OSError):
            os.remove(temporary)
    return ShardIndex(shards, counts, kind.dtype, records), notes, "indexed"


def _join(kind: Kind, shards: list[str], report: Report, file: io.BufferedIOBase) -> tuple[list[int], list[Notes]]:
    """Write the records of all shards to a file; returns number of records and notes of each."""
    counts, notes = list[int](), list[Notes]()
    for piece in _pieces(kind, shards, report):
        file.write(piece.records.tobytes())
        counts.append(len(piece.records))
        notes.append(piece.notes)
    return counts, notes


def _checksum(path: str) -> int:
    """CRC-32 of a file."""
    checksum = 0
    with open(path, "rb") as file:
        while part := file.read(CHECKED_BYTES):
            checksum = zlib.crc32(part, checksum)
    return checksum


def _as_json(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _from_json(array: np.ndarray) -> Any:
    return json.loads(array.tobytes())


def _pieces(kind: Kind, shards: list[str], report: Report) -> Iterator[Piece]:
    """The index of each shard; the progress goes to the log, and to the processes that wait."""
    members, begin = 0, time.monotonic()
    last_line = begin

    def tell(done: int) -> None:
        nonlocal last_line
        text = f"{done:,} of {len(shards):,} shards, {members:,} new members"
        report(text)
        if (now := time.monotonic()) - last_line >= LOG_SECONDS:
            _logger.info("indexing: %s in %.0f s", text, now - begin)
            last_line = now

    for number, shard in enumerate(shards):

        def count(number: int = number) -> None:
            nonlocal members
            members += 1
            if members % REPORT_MEMBERS == 0:
                tell(number)

        yield _piece(kind, shard, count)
        tell(number + 1)
    report("")


def _piece(kind: Kind, shard: str, count: Count) -> Piece:
    """The index of a shard, from the cache if it is current; else it is built, and cached unless the shard is new."""
    key, started, stamp = f"{kind.name} in {os.path.abspath(shard)}", time.time(), _stamp(shard)
    stored = load_index(key)
    if stored is not None and (*stored["stamp"],) == stamp:
        return Piece(stored["records"], _from_json(stored["notes"]))
    nothing = np.zeros(0, kind.dtype)
    try:
        piece = kind.index(shard, count)
    except DamagedShardError as error:
        piece = Piece(nothing, {"damage": str(error)})
    except OSError as error:
        damage = f"tar shard {shard!r} cannot be read ({error.strerror})"
        return Piece(nothing, {"damage": damage, "is_unreadable": True})
    if is_settled(np.array(stamp[:1]), started):
        save_index(key, {"records": piece.records, "notes": _as_json(piece.notes), "stamp": np.array(stamp)})
    return piece


def _stamp(shard: str) -> tuple[int, int]:
    """A shard's time of change (ns) and size; 0, -1 if it is unreadable."""
    try:
        status = os.stat(shard)
    except OSError:
        return 0, -1
    return status.st_mtime_ns, status.st_size

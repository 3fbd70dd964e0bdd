"""Tar shards -> one table of the places of everything in them, memory-mapped and kept in the user's cache.

A shard's own table is written as soon as the shard is indexed, so an interrupted start continues where it stopped,
several processes share the work, and only a changed shard is indexed again. The tables of a set are joined in one file,
which all processes of a machine map into their memory.

    CACHE/<shard>.npz                       records and notes of one shard, with its time of change and size
    CACHE/<set>.shards/records.bin          records of all shards of a set, in its order
    CACHE/<set>.shards/shards.json          number of records and notes of each shard, and a checksum of both files

The name of a set's folder depends on the shards' paths, times and sizes, so an existing folder is current. It is
written under another name and then renamed: jobs that start together write the same content, the first folder stays.
"""

import contextlib
import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dino_sparo.data.sources.cache import cache_folder, cache_path, is_settled, load_index, save_index, temporary_path
from dino_sparo.data.sources.tar_headers import BLOCK_BYTES, DamagedShardError, Member
from dino_sparo.runtime.agree import note_progress

_logger = logging.getLogger(__name__)

LOG_SECONDS = 10.0  # between two lines on how far the indexing is
REPORT_MEMBERS = 1000  # between two reports from within a shard
MAX_SIZE = (1 << 32) - 1
CHECKED_BYTES = 1 << 16  # read at a time; a larger buffer would stay with the process

Notes = dict[str, Any]
Count = Callable[[], None]
Report = Callable[[str], None]


class Piece(NamedTuple):
    """The index of one shard: records of the kind's `dtype`, and notes as JSON, with "damage" if it is damaged."""

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
    folder = cache_path(f"{kind.name} of {names}", ".shards")
    try:
        return *_open_joined(folder, kind, shards), f"index read from {folder}"
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        _logger.warning("the cached index %s is damaged (%r); it is built again", folder, error)
        shutil.rmtree(folder, ignore_errors=True)
    if is_settled(np.array(stamps)[:, 0], started):
        try:
            return *_join(folder, kind, shards, report), "indexed"
        except OSError as error:
            _logger.warning(
                "the index is not cached: every process holds it in its own memory, and the next start indexes again "
                "(%s); DINO_SPARO_CACHE names another folder",
                error,
            )
    content, counts, notes = bytearray(), [], []
    for piece, _ in _pieces(kind, shards, report):
        content += piece.records.tobytes()
        counts.append(len(piece.records))
        notes.append(piece.notes)
    return ShardIndex(shards, counts, kind.dtype, np.frombuffer(content, kind.dtype)), notes, "indexed"


def _open_joined(folder: str, kind: Kind, shards: list[str]) -> tuple[ShardIndex, list[Notes]]:
    with open(os.path.join(folder, "shards.json"), encoding="utf-8") as file:
        stored = json.load(file)
    content, path = stored["shards"], os.path.join(folder, "records.bin")
    if stored["crc32"] != _checksum(path, content):
        raise ValueError("its checksum is another one")
    return ShardIndex(shards, content["counts"], kind.dtype, None, path), content["notes"]


def _checksum(path: str, content: Notes) -> int:
    """CRC-32 of the records in a file and of the counts and notes of their shards."""
    checksum = zlib.crc32(json.dumps(content).encode())
    with open(path, "rb") as file:
        while part := file.read(CHECKED_BYTES):
            checksum = zlib.crc32(part, checksum)
    return checksum


def _join(folder: str, kind: Kind, shards: list[str], report: Report) -> tuple[ShardIndex, list[Notes]]:
    """Write the folder of a set, and open it; the index stays in memory if a shard was unreadable, since that may pass.

    Raises:
        OSError: the cache cannot be written.
    """
    counts, notes, is_lasting = list[int](), list[Notes](), True
    os.makedirs(cache_folder(), exist_ok=True)
    with _temporary_folder() as temporary:
        path = os.path.join(temporary, "records.bin")
        with open(path, "wb") as file:
            for piece, is_certain in _pieces(kind, shards, report):
                file.write(piece.records.tobytes())
                counts.append(len(piece.records))
                notes.append(piece.notes)
                is_lasting = is_lasting and is_certain
            file.flush()
            os.fsync(file.fileno())
        if not is_lasting:
            return ShardIndex(shards, counts, kind.dtype, np.fromfile(path, kind.dtype)), notes
        with open(os.path.join(temporary, "shards.json"), "w", encoding="utf-8") as texts:
            content = {"counts": counts, "notes": notes}
            json.dump({"crc32": _checksum(path, content), "shards": content}, texts)
            texts.flush()
            os.fsync(texts.fileno())
        with contextlib.suppress(OSError):  # another process was faster; its content is the same
            os.rename(temporary, folder)
    return _open_joined(folder, kind, shards)


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    """A folder in the cache, removed at the end unless it was renamed."""
    path = temporary_path()
    os.mkdir(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _pieces(kind: Kind, shards: list[str], report: Report) -> Iterator[tuple[Piece, bool]]:
    """The index of each shard, and whether it may be cached."""
    progress = _Progress(len(shards), report)
    for shard in shards:
        yield _cached_piece(kind, shard) or _new_piece(kind, shard, progress)
        progress.add_shard()
    report("")


def _piece_key(kind: Kind, shard: str) -> str:
    return f"{kind.name} in {os.path.abspath(shard)}"


def _cached_piece(kind: Kind, shard: str) -> tuple[Piece, bool] | None:
    """A shard's index from the cache, if it is current."""
    arrays = load_index(_piece_key(kind, shard))
    try:
        if arrays is not None and arrays["records"].dtype == kind.dtype and (*arrays["stamp"],) == _stamp(shard):
            return Piece(arrays["records"], json.loads(arrays["notes"].tobytes())), True
    except (KeyError, ValueError) as error:
        _logger.warning("the cached index of %s is damaged (%r); it is built again", shard, error)
    return None


def _new_piece(kind: Kind, shard: str, progress: "_Progress") -> tuple[Piece, bool]:
    """Index a shard, and cache its index unless the shard has just changed."""
    nothing, started, stamp = np.zeros(0, kind.dtype), time.time(), _stamp(shard)
    try:
        piece = kind.index(shard, progress.add_member)
    except DamagedShardError as error:
        piece = Piece(nothing, {"damage": str(error)})
    except OSError as error:
        return Piece(nothing, {"damage": f"tar shard {shard!r} cannot be read ({error.strerror})"}), False
    if is_settled(np.array(stamp[:1]), started):
        notes = np.frombuffer(json.dumps(piece.notes).encode(), np.uint8)
        save_index(_piece_key(kind, shard), {"records": piece.records, "notes": notes, "stamp": np.array(stamp)})
    return piece, True


def _stamp(shard: str) -> tuple[int, int]:
    """A shard's time of change (ns) and size; 0, -1 if it is unreadable."""
    try:
        status = os.stat(shard)
    except OSError:
        return 0, -1
    return status.st_mtime_ns, status.st_size


class _Progress:
    """Progress of the indexing, for the log and for the processes that wait."""

    def __init__(self, num_shards: int, report: Report) -> None:
        self.num_shards, self.report = num_shards, report
        self.shards = self.members = 0
        self.begin = self.last = time.monotonic()

    def add_member(self) -> None:
        """Count a member."""
        self.members += 1
        if self.members % REPORT_MEMBERS == 0:
            self._tell()

    def add_shard(self) -> None:
        """Count a shard."""
        self.shards += 1
        self._tell()

    def _tell(self) -> None:
        now, text = time.monotonic(), f"{self.shards:,} of {self.num_shards:,} shards, {self.members:,} new members"
        self.report(text)
        if now - self.last >= LOG_SECONDS:
            seconds = now - self.begin
            left = f", {seconds / self.shards * (self.num_shards - self.shards):.0f} s left" if self.shards else ""
            _logger.info("indexing: %s in %.0f s%s", text, seconds, left)
            self.last = now

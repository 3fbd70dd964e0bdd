"""Tar shards -> one table of the places of everything in them, kept in the user's cache.

The table of a shard is written as soon as the shard is indexed: `CACHE/<shard>.npz` holds its records and notes, its
time of change and its size. So an interrupted start continues where it stopped, several processes share the work, and
only a changed shard is indexed again.
"""

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dino_sparo.data.sources.cache import load_index, save_index
from dino_sparo.data.sources.tar_headers import BLOCK_BYTES, DamagedShardError, Member
from dino_sparo.runtime.logs import progress

_logger = logging.getLogger(__name__)

MAX_SIZE = (1 << 32) - 1
SETTLE_S = 2.0  # a shard changed so recently may still grow within its time stamp's resolution

Notes = dict[str, Any]


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
        index: indexes one shard. Raises DamagedShardError.
    """

    name: str
    dtype: np.dtype
    index: Callable[[str], Piece]


def blocks_of(member: Member) -> tuple[int, int, int]:
    """First header and content of a member, in blocks, and its size in bytes."""
    return member.start // BLOCK_BYTES, member.offset // BLOCK_BYTES, min(member.size, MAX_SIZE)


class ShardIndex:
    """The records of all samples in some shards.

    Args:
        shards: paths.
        pieces: the records of each.
    """

    def __init__(self, shards: list[str], pieces: list[np.ndarray]) -> None:
        self.shards, self.records = shards, np.concatenate(pieces)
        self.counts = np.array(list(map(len, pieces)), np.int64)
        self.ends = self.counts.cumsum()

    def __len__(self) -> int:
        """Number of records."""
        return len(self.records)

    def shard_of(self, index: int) -> str:
        """Path of the shard that holds record `index`."""
        return self.shards[int(np.searchsorted(self.ends, index, side="right"))]


def open_index(kind: Kind, shards: list[str]) -> tuple[ShardIndex, list[Notes]]:
    """The index of some shards, and the notes of each; a damaged shard has no records, and "damage" in its notes."""
    pieces = index_shards(kind, shards)
    return ShardIndex(shards, [piece.records for piece in pieces]), [piece.notes for piece in pieces]


def index_shards(kind: Kind, shards: list[str]) -> list[Piece]:
    """The index of each shard, from the cache if it is current, else built; that of a new shard is not cached."""
    pieces, problem, nothing = list[Piece](), "", np.zeros(0, kind.dtype)
    for shard in progress(shards, desc="indexing shards"):
        key, started, stamp = f"{kind.name} in {os.path.abspath(shard)}", time.time(), _stamp(shard)
        stored = load_index(key)
        if stored is not None and (*stored["stamp"],) == stamp:
            pieces.append(Piece(stored["records"], json.loads(stored["notes"].tobytes())))
            continue
        try:
            piece = kind.index(shard)
        except DamagedShardError as error:
            piece = Piece(nothing, {"damage": str(error)})
        except OSError as error:  # at the next start it may be readable
            pieces.append(Piece(nothing, {"damage": f"tar shard {shard!r} cannot be read ({error.strerror})"}))
            continue
        pieces.append(piece)
        if stamp[0] < (started - SETTLE_S) * 1e9:
            notes = np.frombuffer(json.dumps(piece.notes).encode(), np.uint8)
            problem = save_index(key, {"records": piece.records, "notes": notes, "stamp": np.array(stamp)})
    if problem:
        _logger.warning("the index is not cached (%s); DINO_SPARO_CACHE names another folder", problem)
    return pieces


def _stamp(shard: str) -> tuple[int, int]:
    """A shard's time of change (ns) and size; 0, -1 if it is unreadable."""
    try:
        status = os.stat(shard)
    except OSError:
        return 0, -1
    return status.st_mtime_ns, status.st_size

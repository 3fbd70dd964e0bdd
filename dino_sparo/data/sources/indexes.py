"""Indexes in the user's cache, and the index of tar shards: the positions of their members.

The cache is $DINO_SPARO_CACHE, else $XDG_CACHE_HOME/dino_sparo, else ~/.cache/dino_sparo. A missing or damaged index is
built again, and the log says so.

A tar's headers give name, offset and size of its members. The index of a shard is written as soon as the shard is read:
`CACHE/<shard>.npz` holds its records and notes, its time of change and its size. So an interrupted start continues
where it stopped, several processes share the work, and only a changed shard is indexed again.
"""

import contextlib
import hashlib
import json
import logging
import os
import secrets
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dino_sparo.data.sources.decode import IMAGE_ENDINGS
from dino_sparo.data.sources.image_source import size_and_time
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import open_regular
from dino_sparo.runtime.logs import progress

_logger = logging.getLogger(__name__)

_CACHE_VERSION = 6
BLOCK_BYTES = tarfile.BLOCKSIZE  # everything in a tar begins at a multiple of it
MAX_TAR_BYTES = BLOCK_BYTES << 32  # an index counts blocks in 32 bits
MAX_END_BYTES = 1 << 20  # of zeros behind the last member; more are a download that stopped
MAX_SIZE = (1 << 32) - 1
SETTLE_S = 2.0  # a shard changed so recently may still grow within its time stamp's resolution

Arrays = dict[str, np.ndarray]
Notes = dict[str, Any]


def cache_folder() -> str:
    """The folder of the cache, which may not exist yet."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.environ.get("DINO_SPARO_CACHE") or os.path.join(caches, "dino_sparo")


def cache_path(key: str) -> str:
    """The path of `key` in the cache."""
    return os.path.join(cache_folder(), hashlib.sha256(_versioned(key)).hexdigest()[:32] + ".npz")


def load_index(key: str) -> Arrays | None:
    """The index in the cache, current or not; None if it is missing or damaged."""
    path = cache_path(key)
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        return arrays if arrays["version"].tobytes() == _versioned(key) else None
    except FileNotFoundError:
        return None
    except Exception as error:  # a flipped bit makes zipfile and numpy raise anything; its checksums find every one
        _logger.warning("the cached index %s is damaged (%s); it is built again", path, type(error).__name__)
        return None


def save_index(key: str, arrays: Arrays) -> str:
    """Write an index atomically; returns the error in words, empty if there is none."""
    path = cache_path(key)
    # A group may share a cache, which the rights of `tempfile`'s files would forbid.
    temporary = f"{path}.{secrets.token_hex(8)}.part"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(temporary, "xb") as file:
            np.savez(file, **arrays, version=np.frombuffer(_versioned(key), np.uint8))  # type: ignore[arg-type]
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        return str(error)
    return ""


def _versioned(key: str) -> bytes:
    return os.fsencode(f"{_CACHE_VERSION} {key}")


class DamagedShardError(UserError):
    """A tar shard that is damaged, truncated or not a tar; the message names the shard."""


class Member(NamedTuple):
    """A regular file in a tar.

    Attributes:
        name: its path there.
        start: where its first header begins, bytes.
        offset: where its content begins, bytes.
        size: of its content, bytes.
    """

    name: bytes
    start: int
    offset: int
    size: int


def tar_members(shard: str, position: int = 0) -> Iterator[Member]:
    """Walk a tar's headers; links, folders and devices are skipped.

    Args:
        shard: the file.
        position: where to begin, bytes; `Member.start` of some member.

    Raises:
        DamagedShardError: the file is not a plain tar, is truncated, or its headers are absurd.
        OSError: it is not a regular file, or cannot be read.
    """
    with open_regular(shard) as file:
        total = os.fstat(file.fileno()).st_size
        file.seek(position)
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                while (info := tar.next()) is not None:
                    tar.members = []  # type: ignore[attr-defined]  # else it would keep all
                    if info.issparse():
                        raise tarfile.TarError(f"{info.name!r} is sparse; write it without --sparse")
                    if info.size < 0 or info.offset_data + info.size > total:
                        raise tarfile.TarError(f"truncated within {info.name!r}")
                    if info.isfile():
                        yield Member(os.fsencode(info.name), info.offset, info.offset_data, info.size)
                end = tar.offset
        except OSError:
            raise
        except Exception as error:  # a damaged header makes tarfile raise anything
            raise DamagedShardError(f"tar shard {shard!r} is damaged ({error}); fetch or write it anew") from error
        # tarfile takes a damaged header for the end.
        file.seek(end)
        most = MAX_END_BYTES if end else tarfile.RECORDSIZE
        if total > MAX_TAR_BYTES or total - end > most or file.read().strip(b"\0"):
            raise DamagedShardError(
                f"tar shard {shard!r} is damaged: the bytes after {end:,} of {total:,} do not end a tar; fetch or "
                "write it anew"
            )


def member_name(shard: str, start: int) -> bytes:
    """Name of the member whose first header begins at byte `start`; for `Raises` see `tar_members`."""
    return next(tar_members(shard, start)).name


def shard_samples(shard: str) -> Iterator[tuple[bytes, dict[bytes, Member]]]:
    """Groups of a shard's members: neighbours of one key, until an ending is repeated.

    Yields:
        The key, which is the name up to the file name's first dot, and the members by ending (lower case with its dot);
        see `_by_stem` for names with several dots.
    """
    last_key, members = b"", dict[bytes, Member]()
    for member in tar_members(shard):
        folder, slash, base = member.name.rpartition(b"/")
        stem, dot, ending = base.partition(b".")
        key, ending = folder + slash + stem, (dot + ending).lower()
        if not stem:
            continue
        if members and (key != last_key or ending in members):
            yield from _by_stem(last_key, members)
            members = {}
        last_key, members[ending] = key, member
    yield from _by_stem(last_key, members)


def _by_stem(key: bytes, members: dict[bytes, Member]) -> Iterator[tuple[bytes, dict[bytes, Member]]]:
    """Neighbours of one key as samples: `a.jpg`, `a.cls` and `a.mask.png` are one, and so are `a.1.jpg` and `a.1.cls`.

    A name with several dots is a separate sample, by all but its last ending, if it is an image with a `.cls` or
    `.txt`, or if none of its neighbours has one dot.
    """
    stems = dict[bytes, dict[bytes, Member]]()
    for ending, member in members.items():
        stem, dot, last = ending.rpartition(b".")
        stems.setdefault(stem, {})[dot + last] = member
    shared = dict(members)
    for stem, stem_members in stems.items():
        is_sample = stem_members.keys() & set(IMAGE_ENDINGS) and stem_members.keys() & {b".cls", b".txt"}
        if stem and (b"" not in stems or is_sample):
            yield key + stem, stem_members
            for ending in stem_members:
                del shared[stem + ending]
    if shared:
        yield key, shared


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
        return len(self.records)

    def shard_of(self, index: int) -> str:
        """Path of the shard that holds record `index`."""
        return self.shards[int(np.searchsorted(self.ends, index, side="right"))]


def open_index(kind: Kind, shards: list[str]) -> tuple[ShardIndex, list[Notes]]:
    """The index of some shards, and the notes of each; a damaged shard has no records, and "damage" in its notes."""
    pieces = index_shards(kind, shards)
    return ShardIndex(shards, [piece.records for piece in pieces]), [piece.notes for piece in pieces]


def index_shards(kind: Kind, shards: list[str]) -> list[Piece]:
    """The index of each shard, from the cache if it is current, else built. A very recent shard is not cached."""
    pieces, problem, nothing = list[Piece](), "", np.zeros(0, kind.dtype)
    for shard in progress(shards, desc="indexing shards"):
        key, started = f"{kind.name} in {os.path.abspath(shard)}", time.time()
        size, changed = size_and_time(shard)
        stored = load_index(key)
        if stored is not None and (*stored["stamp"],) == (changed, size):
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
        if changed < (started - SETTLE_S) * 1e9:
            notes = np.frombuffer(json.dumps(piece.notes).encode(), np.uint8)
            problem = save_index(key, {"records": piece.records, "notes": notes, "stamp": np.array([changed, size])})
    if problem:
        _logger.warning("the index is not cached (%s); DINO_SPARO_CACHE names another folder", problem)
    return pieces

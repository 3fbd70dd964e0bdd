"""The user's cache of indexes: $DINO_SPARO_CACHE, else $XDG_CACHE_HOME/dino_sparo, else ~/.cache/dino_sparo.

A missing or damaged index is built again, and the log says so.
"""

import contextlib
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable

import numpy as np

from dino_sparo.data.sources.image_source import Arrays

_logger = logging.getLogger(__name__)

_CACHE_VERSION = 5
_SETTLE_S = 2.0  # a folder or shard changed so recently may still be growing within its time stamp's resolution


def cache_folder() -> str:
    """The folder of the cache, which may not exist yet."""
    return os.environ.get("DINO_SPARO_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "dino_sparo"
    )


def cache_path(key: str, ending: str) -> str:
    """The path of `key` in the cache."""
    return os.path.join(cache_folder(), hashlib.sha256(_versioned(key)).hexdigest()[:32] + ending)


def is_settled(stamps_ns: np.ndarray, now_s: float) -> bool:
    """Whether the last of these times of change is old enough that a later change would have another time."""
    return bool(stamps_ns.max() < (now_s - _SETTLE_S) * 1e9)


def load_or_index(key: str, build: Callable[[], Arrays], is_current: Callable[[Arrays], bool]) -> tuple[Arrays, str]:
    """An index from the user's cache if it is current, else built and cached; also the log's words for its origin.

    Args:
        key: name of the indexed thing, with absolute paths.
        build: returns the index; its `stamps` are times of change (ns). An index whose `num_others` is not 0 is not
            cached: the missing entries may be there next time.
        is_current: whether a stored index still describes the disk.
    """
    arrays = load_index(key)
    if arrays is not None and is_current(arrays):
        return arrays, f"index read from {cache_path(key, '.npz')}"
    started = time.time()
    arrays = build()
    is_whole = not arrays.pop("num_others", np.array(0))
    if is_whole and is_settled(arrays["stamps"][0], started) and (problem := save_index(key, arrays)):
        _logger.info("the index is not cached: %s", problem)
    return arrays, "indexed"


def load_index(key: str) -> Arrays | None:
    """The index in the cache, current or not; None if it is missing or damaged."""
    path = cache_path(key, ".npz")
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
    path, temporary = cache_path(key, ".npz"), temporary_path()
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


def temporary_path() -> str:
    """A free path in the cache; a group may share a cache, which the rights of `tempfile`'s files would forbid."""
    return os.path.join(cache_folder(), f"{secrets.token_hex(16)}.part")


def _versioned(key: str) -> bytes:
    return os.fsencode(f"{_CACHE_VERSION} {key}")

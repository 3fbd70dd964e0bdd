"""The user's cache of indexes: $DINO_SPARO_CACHE, else $XDG_CACHE_HOME/dino_sparo, else ~/.cache/dino_sparo.

A missing or damaged index is built again, and the log says so.
"""

import contextlib
import hashlib
import logging
import os
import secrets

import numpy as np

_logger = logging.getLogger(__name__)

Arrays = dict[str, np.ndarray]

_CACHE_VERSION = 5


def cache_folder() -> str:
    """The folder of the cache, which may not exist yet."""
    return os.environ.get("DINO_SPARO_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "dino_sparo"
    )


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

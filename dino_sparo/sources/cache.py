"""What is indexed and how -> its index, from the user's cache while it is current, else built and kept there.

The cache lies in $DINO_SPARO_CACHE, else $XDG_CACHE_HOME/dino_sparo, else ~/.cache/dino_sparo. Its loss costs time
only: whatever is wrong with it is logged and the index is built.
"""

import contextlib
import hashlib
import logging
import os
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable

import numpy as np

from dino_sparo.sources.packed import Arrays

_logger = logging.getLogger(__name__)

_CACHE_VERSION = 1
_SETTLE_S = 2.0  # a folder or shard changed so recently may still be growing within its time stamp's resolution


def load_or_index(key: str, build: Callable[[], Arrays], is_current: Callable[[Arrays], bool]) -> tuple[Arrays, str]:
    """An index from the user's cache while it is current, else built and kept there.

    Args:
        key: what is indexed, with absolute paths.
        build: lists the files; `stamps` among its arrays are their times of change (ns).
        is_current: whether a stored index still describes what lies on disk.

    Returns:
        The index, and the log's word for where it comes from.
    """
    folder = os.environ.get("DINO_SPARO_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "dino_sparo"
    )
    version = np.frombuffer(os.fsencode(f"{_CACHE_VERSION} {key}"), np.uint8)
    path = os.path.join(folder, hashlib.sha256(version.tobytes()).hexdigest()[:32] + ".npz")
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        if np.array_equal(arrays["version"], version) and is_current(arrays):
            return arrays, f"index read from {path}"
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        _logger.info("ignoring the damaged index cache %s (%r)", path, error)
    started = time.time()
    arrays = build()
    if arrays["stamps"][0].max() < (started - _SETTLE_S) * 1e9:
        _save_index(path, {**arrays, "version": version})
    return arrays, "indexed"


def _save_index(path: str, arrays: Arrays) -> None:
    """Write an index so that a reader sees all of it or nothing."""
    temporary = None
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=os.path.dirname(path), suffix=".part", delete=False) as file:
            temporary = file.name
            np.savez(file, **arrays)  # type: ignore[arg-type]
        os.replace(temporary, path)
    except OSError as error:
        _logger.info("the index is not cached: %s", error)
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.remove(temporary)

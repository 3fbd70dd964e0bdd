"""Hashes and versions in result files, and strict JSON."""

import contextlib
import functools
import hashlib
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import timm
import torch
import torchvision

from dino_sparo._version import __version__

HASH_BLOCK_BYTES = 1 << 20


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def versions(**more: str) -> dict[str, str]:
    """Versions of the packages that results depend on; `more` are names and distributions of further packages."""
    return {
        "dino_sparo": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torchvision": str(torchvision.__version__),
        "timm": timm.__version__,
        "numpy": np.__version__,
        "pillow": PIL.__version__,
        **{name: version(distribution) for name, distribution in more.items()},
    }


@functools.cache  # a process keeps the code that it began with
def git_hash() -> str | None:
    """The commit this code was checked out from; None if it does not run from a checkout."""
    try:
        folder = Path(__file__).resolve().parents[2]
        answer = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None if (folder / ".git").exists() else None


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within this context a file is written; the OSError of a full disk names the file and the remedy."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(
            f"{path} cannot be written ({reason}); free some space or make the folder writable, then run the same "
            "command again"
        ) from error


def write_text(text: str, path: Path) -> None:
    """Write a file so that `path` always holds a whole one, the old or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def write_json(values: dict[str, Any], path: Path) -> None:
    """Write plain values so that `path` always holds a whole file, the old or the new."""
    write_text(json.dumps(plain(values), indent=2, allow_nan=False) + "\n", path)


def differences(saved: Mapping[str, Any], wanted: Mapping[str, Any], before: str, now: str) -> list[str]:
    """Each wanted value that differs from the saved one, in words; `before` is such as "in the file"."""
    changed = [name for name, value in wanted.items() if saved.get(name) != value]
    return [f"{name} {saved.get(name)!r} {before}, {wanted[name]!r} {now}" for name in changed]


def plain(value: Any) -> Any:
    """The same values with None for numbers that JSON cannot hold (NaN and infinity)."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

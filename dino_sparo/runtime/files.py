"""Files: reads only regular files and JSON of bounded depth, writes strict JSON; checksums and versions.

Files may come from strangers: reading a named pipe may never end, and deeply nested JSON exhausts the stack.
"""

import contextlib
import functools
import io
import itertools
import json
import math
import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dino_sparo._version import __version__
from dino_sparo.runtime.faults import FaultError, UserError, is_passing

HASH_BLOCK_BYTES = 1 << 20
WEIGHTS, WEIGHTS_ENDINGS = ("pretrained_weights", "match", "compare"), (".pth", ".pt", ".bin", ".safetensors")
# Options that name files or folders to read.
INPUTS = (
    *WEIGHTS,
    *("data_path", "data_root", "captions", "graphs", "val_path", "val_graphs", "zero_shot_path", "images", "masks"),
    *("image_folder", "atlas", "exclude_images", "symmetric", "val", "val_masks", "class_names"),
)


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a file to read its bytes; OSError at once for a pipe, a device, a folder or a socket."""
    # Without O_NONBLOCK opening a pipe waits for a writer. The flag has no effect on regular files.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "is a folder, a pipe or a device, not a regular file", os.fspath(path))
    return open(descriptor, "rb")


def require_inputs(options: Mapping[str, Any]) -> None:
    """Refuse options that name a file or folder that does not exist; patterns, addresses and names of sets pass."""
    names = ("load_features",) if options.get("load_features") else INPUTS
    for name in names:
        values = options.get(name) or []
        for text in values if isinstance(values, list) else [values]:
            is_name = Path(text).name == text and not Path(text).suffix
            # The weights of a folder's name may be a repository of the hub, or a model of timm.
            is_name = is_name or (name in WEIGHTS and text.count("/") == 1 and not text.endswith(WEIGHTS_ENDINGS))
            if not is_name and not re.search(r"[:*?\[{]", text) and not os.path.exists(text):
                raise UserError(f"--{name} {text} does not exist (in {os.getcwd()}); give a file or folder that does")


def parse_json(text: str | bytes, hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value of a JSON text; ValueError if it is not valid JSON or nested too deeply. `hook` makes objects."""
    try:
        return json.loads(text, object_pairs_hook=hook)
    except RecursionError:
        raise UserError("nested too deeply") from None


def read_json(path: str | os.PathLike[str], has_unique_keys: bool = False) -> Any:
    """The content of a JSON file; UserError with its path if it is not valid JSON.

    `has_unique_keys` refuses objects with a key twice, of which JSON readers drop the first value.
    """
    with open_regular(path) as file:
        try:
            return parse_json(file.read(), _unique_keys if has_unique_keys else None)
        except ValueError as error:
            raise UserError(f"{path} is not valid JSON ({error}); is the download complete?") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise UserError(f"the key {max(keys, key=keys.count)!r} twice in an object")
    return dict(pairs)


def parse_object(text: str | bytes, location: str) -> dict[str, Any]:
    """The JSON object of a line; the ValueError for anything else begins with the location."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise UserError(f"{location} is not valid JSON ({error}); give one object per line") from error
    if not isinstance(value, dict):
        raise UserError(f"{location} is not a JSON object; give one {{...}} per line")
    return value


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's log.txt, one per epoch; there is none before the first epoch has ended."""
    path = folder / "log.txt"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    import hashlib  # not above, as further modules below: --help would load them

    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def checksum(path: Path) -> dict[str, Any]:
    """Size of a file in bytes, and its CRC-32, hexadecimal."""
    crc = 0
    with open_regular(path) as file:
        while block := file.read(HASH_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
        return {"bytes": file.tell(), "crc32": f"{crc:08x}"}


def versions(**more: str) -> dict[str, str]:
    """Versions of the packages that results depend on; `more` are names and distributions of further packages."""
    import platform
    from importlib.metadata import version

    import torch  # not above: files are read before torch is imported
    import torchvision

    return {
        "dino_sparo": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torchvision": str(torchvision.__version__),
        **{name: version(name) for name in ("timm", "numpy", "pillow")},
        **{name: version(distribution) for name, distribution in more.items()},
    }


@functools.cache  # a process keeps the code that it began with
def git_hash() -> str | None:
    """The commit this code was checked out from; None if it does not run from a checkout."""
    import subprocess

    try:
        folder = Path(__file__).resolve().parents[2]
        answer = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None if (folder / ".git").exists() else None


def refuse_existing(paths: Iterable[Path], overwrite: bool, option: str = "--output_dir") -> list[Path]:
    """The paths that exist; UserError, unless they may be overwritten, with another `option` as a remedy."""
    existing = [path for path in paths if path.exists()]
    if existing and not overwrite:
        raise UserError(f"{existing[0]} exists already; give another {option}, or --overwrite")
    return existing


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within this context a file is written; the UserError of a full disk names the file and the remedy.

    Raises:
        UserError: the disk is full, or the folder is not writable.
        FaultError: the disk or the file server cannot write at the moment.
    """
    try:
        yield
    except OSError as error:
        kind = FaultError if is_passing(error) else UserError
        raise kind(
            f"{path} cannot be written ({error.strerror or error}); free some space or make the folder writable, then "
            "run the same command again"
        ) from error


@contextlib.contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Path of a temporary file that is renamed to `path` at the end: `path` always holds a whole file, old or new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            yield temporary
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def write_text(text: str, path: Path) -> None:
    """Write a text so that `path` always holds a whole file, old or new."""
    with written_beside(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def keep_old(path: Path) -> Path:
    """Copy a file that is about to be replaced to the first free name of PATH.old, PATH.old1, ...; returns the name."""
    names = (path.with_name(f"{path.name}.old{number or ''}") for number in itertools.count())
    copy = next(name for name in names if not name.exists())
    with writing(copy):
        shutil.copyfile(path, copy)
    return copy


def write_json(values: dict[str, Any], path: Path) -> None:
    """Write plain values so that `path` always holds a whole file, old or new."""
    write_text(json.dumps(plain(values), indent=2, allow_nan=False) + "\n", path)


def write_record(record: Mapping[str, Any], path: Path, files: Iterable[str] = ()) -> None:
    """Write a record of files in the same folder: size and CRC-32 of each file, and the CRC-32 of the record."""
    record = plain({**record, "files": {name: checksum(path.with_name(name)) for name in files}})
    write_json({**record, "crc32": _crc32_of(record)}, path)


def read_record(path: Path, verify: bool = True) -> dict[str, Any]:
    """The record that `write_record` wrote. A record of an earlier version has no entry "files" and no checksums.

    Raises:
        UserError: the record is damaged, or with `verify` a file is missing, damaged or of another record.
        FileNotFoundError: there is no record.
    """
    try:
        with open_regular(path) as file:
            record: dict[str, Any] = parse_object(file.read(), str(path))
    except UserError as error:
        raise UserError(f"{path} is damaged ({error.__cause__ or error})") from error
    crc = record.pop("crc32", None)
    if (crc or "files" in record) and crc != _crc32_of(record):
        raise UserError(f"{path} is damaged: its checksum is wrong")
    for name, recorded in record.get("files", {}).items() if verify else ():
        file = path.parent / name
        if not file.is_file() or checksum(file) != recorded:
            raise UserError(f"{file} is missing, damaged or of another run: {path.name} has another size or checksum")
    return record


def _crc32_of(record: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(record).encode()):08x}"


def differences(saved: Mapping[str, Any], wanted: Mapping[str, Any], before: str, now: str) -> list[str]:
    """Each wanted value that differs from the saved value, in words; `before` is for example "in the file"."""
    changed = [name for name, value in wanted.items() if saved.get(name) != value]
    return [f"{name} {_shown(saved.get(name))} {before}, {_shown(wanted[name])} {now}" for name in changed]


def _shown(value: Any) -> str:
    """A value as a message shows it; a SHA-256 is shortened."""
    return f"{value[:8]}..." if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) else repr(value)


def plain(value: Any) -> Any:
    """The same values with None for numbers that JSON cannot hold (NaN and infinity)."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""Files of torch (.pth) and safetensors <-> their content: checksums are verified, and no code in them runs.

`checkpoint.py` describes the content; `folder.py` writes the checkpoints of a run, `export.py` exports. Weights are
loaded strictly: all names and shapes must fit.
"""

import argparse
import contextlib
import filecmp
import json
import os
import pathlib
import pickle
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import parse_object, plain
from dino_sparo.runtime.lock import create_output_dir

# In the metadata of our .safetensors files: `weights_checksum`, and the JSON files that belong to the weights, as the
# JSON of a dict from name or suffix (`document_path`) to content.
CHECKSUM_KEY, DOCUMENTS_KEY = "dino_sparo.crc32", "dino_sparo.documents"

# The reference's checkpoints hold their options as a Namespace, whose output_dir is a Path if they were trained through
# submitit, and numpy numbers in the optimizer. These types only hold values; everything else is refused.
_numpy_scalar = np.float64(0).__reduce__()[0]
PLAIN_TYPES = [
    argparse.Namespace,
    (pathlib.PosixPath, "pathlib.PosixPath"),
    (pathlib.PosixPath, "pathlib._local.PosixPath"),
    np.dtype,
    type(np.dtype(np.float64)),
    (_numpy_scalar, "numpy.core.multiarray.scalar"),
    (_numpy_scalar, "numpy._core.multiarray.scalar"),
]

# The remedy for weights that FSDP has cut into parts.
WHOLE_WEIGHTS = "give whole weights, such as teacher_checkpoint.pth, which DINOv2 writes for its evaluations"
NUM_NAMES_SHOWN = 8  # in messages


class CheckpointError(UserError):
    """A checkpoint that is damaged, unsafe or belongs to another model."""


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Any error of a damaged file becomes a CheckpointError that says whether reading it would run code."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # a damaged archive or pickle may raise any error
        with path.open("rb") as file:
            is_torchs = file.read(2) in (b"\x80\x02", b"PK")  # a pickle or an archive
        unsafe = _unsafe_name(str(error)) if is_torchs and isinstance(error, pickle.UnpicklingError) else None
        if unsafe is not None:
            is_cut = "torch.distributed" in unsafe
            raise CheckpointError(
                f"{path} was refused: reading it would run code ({unsafe}); only plain values and tensors are read"
                + f". FSDP has cut these weights into parts; {WHOLE_WEIGHTS}" * is_cut
            ) from error
        reason = str(error).split("WeightsUnpickler error: ")[-1].partition("\n")[0].partition(". ")[0]
        raise CheckpointError(
            f"{path} is truncated or not a checkpoint ({path.stat().st_size} bytes; {type(error).__name__} {reason}); "
            "give a .pth or .safetensors file"
        ) from error


def verify_checkpoint(path: Path) -> None:
    """Compare a .pth file with the CRC-32 of each of its parts, like `unzip -t`; CheckpointError if they differ."""
    with _reading(path), zipfile.ZipFile(path) as archive:
        _require_stored(archive, path)
        damaged = archive.testzip()
    if damaged is not None:
        raise CheckpointError(
            f"{path} is damaged: the checksum of its part {damaged} is wrong; copy the file again, or take the "
            "checkpoint before it"
        )


def contents_checksum(path: Path) -> int:
    """CRC-32 of the checksums in a .pth file, without reading its weights."""
    with _reading(path), zipfile.ZipFile(path) as archive:
        return zlib.crc32(str([(part.filename, part.CRC) for part in archive.infolist()]).encode())


def _require_stored(archive: zipfile.ZipFile, path: Path) -> None:
    """Refuse an archive that unpacks to more than its size, before memory is allocated."""
    parts = archive.infolist()
    packed = [part.filename for part in parts if part.compress_type != zipfile.ZIP_STORED]
    if packed or sum(part.file_size for part in parts) > path.stat().st_size:
        raise CheckpointError(
            f"{path} is compressed ({packed[0] if packed else 'parts share their bytes'}), so what it holds may be a "
            f"thousand times its size; unpack it and zip it again without compression (zip -0)"
        )


def read_torch_file(path: Path, verify: bool = True, mmap: bool = False) -> Any:
    """Content of a file by `torch.save`, on the CPU, compared with the checksums that the file may have.

    With `mmap` tensors stay in the file until they are used, if its format allows it. A CheckpointError says that the
    file is damaged, compressed or not torch's, or that reading it would run code.
    """
    if _is_torchscript(path):
        raise CheckpointError(
            f"{path} is a TorchScript archive, which holds code and is not read. OpenAI's CLIP comes so; take its "
            f'weights out once: python -c "import open_clip, torch; torch.save(open_clip.load_openai_model('
            f"'{path}', device='cpu').state_dict(), 'weights.pt')\", and give weights.pt with --quick_gelu true"
        )
    with _reading(path):  # a single wrong bit makes `is_zipfile` raise
        is_archive = zipfile.is_zipfile(path)
    if is_archive and verify:
        verify_checkpoint(path)
    with _reading(path), torch.serialization.safe_globals(PLAIN_TYPES):  # type: ignore[arg-type]
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and is_archive)


def weights_checksum(weights: Mapping[str, Tensor], documents: str = "") -> str:
    """CRC-32 of a text, then of weights with names, types and shapes in the order of names; 8 hexadecimal digits."""
    checksum = zlib.crc32(documents.encode())
    for name, value in sorted(weights.items()):
        checksum = zlib.crc32(f"{name} {value.dtype} {tuple(value.shape)}".encode(), checksum)
        data: Any = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        checksum = zlib.crc32(data, checksum)
    return f"{checksum:08x}"


def document_path(path: Path, name: str) -> Path:
    """Path of a JSON file in the folder of weights: `name` is a suffix (".json") or a file name."""
    return path.with_suffix(name) if name.startswith(".") else path.with_name(name)


def _is_torchscript(path: Path) -> bool:
    """Whether a file is an archive by `torch.jit.save`, which contains the constants of its code."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/constants.pkl") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError):
        return False


def read_safetensors(path: Path) -> dict[str, Any]:
    """Weights of a safetensors file, together with the entries of the JSON file of the same name.

    Our exports repeat their JSON files in the metadata of the weights. CheckpointError unless both agree.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(f"{path} is truncated or not a safetensors file ({error})") from error
    checksum, documents = metadata.get(CHECKSUM_KEY), metadata.get(DOCUMENTS_KEY, "")
    actual = weights_checksum(weights, documents)
    if checksum != actual and (checksum or documents):
        raise CheckpointError(
            f"{path} is damaged: its weights have the checksum {actual}, not {checksum}; copy it again"
        )
    document = path.with_suffix(".json")
    if not documents:
        return {**(_read_document(document) if document.is_file() else {}), **weights}
    contents = json.loads(documents)
    for name, values in contents.items():
        document = document_path(path, name)
        if document.is_file() and _read_document(document) != values:
            raise CheckpointError(f"{document} does not belong to {path.name}; export both again, or copy both again")
    return {**contents.get(".json", {}), **weights}


def _read_document(path: Path) -> dict[str, Any]:
    try:
        return parse_object(path.read_bytes(), path.name)
    except UserError as error:
        raise CheckpointError(f"{path} does not describe the weights next to it ({error})") from error


def _unsafe_name(message: str) -> str | None:
    """Name that torch refused to load or call, from its message; None if the message says something else."""
    match = re.search(r"(?:GLOBAL |add_safe_globals`,? but got |unrecognized function )(<[^>]+>|[^\s,;]+)", message)
    return match and match[1]


@dataclass(frozen=True)
class Replacing:
    """Files that an export may replace: equal ones, with `overwrite` all, but never its `source`."""

    overwrite: bool = False
    source: Path | None = None

    def check(self, target: Path, written: Path) -> None:
        """Refuse to replace `target` with `written`."""
        if self.source is not None and target.exists() and target.samefile(self.source):
            raise UserError(f"{target} is the exported file itself; give another path for the result")
        if target.exists() and not self.overwrite and not _are_equal(target, written):
            raise UserError(f"{target} exists and is another file; give another path for the result, or --overwrite")


def _are_equal(first: Path, second: Path) -> bool:
    """Whether two files have the same bytes, or are exports whose metadata, in any order, state the same checksum."""
    try:
        with safe_open(first, framework="pt") as one, safe_open(second, framework="pt") as other:
            return CHECKSUM_KEY in (one.metadata() or {}) and one.metadata() == other.metadata()
    except SafetensorError:
        return filecmp.cmp(first, second, shallow=False)


def write_safetensors(
    weights: Mapping[str, Tensor], path: Path, documents: Mapping[str, Any], replacing: Replacing
) -> Path:
    """Write a safetensors file and the JSON files that its metadata repeats; see `write_together`."""
    # Clones: tensors that share memory cannot be saved.
    weights = {name: value.clone(memory_format=torch.contiguous_format) for name, value in weights.items()}
    text = json.dumps(plain({name: value for name, value in documents.items() if not isinstance(value, str)}))
    # transformers refuses files without "format".
    metadata = {"format": "pt", DOCUMENTS_KEY: text, CHECKSUM_KEY: weights_checksum(weights, text)}
    return write_together(path, documents, partial(save_file, weights, metadata=metadata), replacing)


def write_together(
    path: Path, documents: Mapping[str, Any], write: Callable[[Path], None], replacing: Replacing
) -> Path:
    """Write weights and the files that belong to them; a kill never leaves weights next to files of other weights.

    All files are written under temporary names first. The old weights are deleted before the first other file is
    replaced, and the new weights get their name last.

    Args:
        path: the file of weights.
        documents: texts, and values of JSON files, by name, or by suffix (".json") where they share the name of `path`.
        write: writes the weights to the path that it is given.
        replacing: which files of these names may be replaced; checked before the first one is.
    """
    texts = {
        document_path(path, name): value if isinstance(value, str) else json.dumps(plain(value), indent=2) + "\n"
        for name, value in documents.items()
    }
    temporary = {target: target.with_name(f".{target.name}.tmp") for target in (*texts, path)}
    create_output_dir(path.parent, option="")
    try:
        for target, text in texts.items():
            temporary[target].write_text(text, encoding="utf-8")
        temporary[path].touch()
        mode = temporary[path].stat().st_mode
        write(temporary[path])
        temporary[path].chmod(mode)  # as the umask says; safetensors lets only the owner read its files
        for target, source in temporary.items():
            replacing.check(target, source)
        path.unlink(missing_ok=True)
        for target, source in temporary.items():
            os.replace(source, target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"could not write {path} ({error}); free some space or choose another folder") from error
    finally:
        for source in temporary.values():
            source.unlink(missing_ok=True)
    return path


def load_strictly(
    module: nn.Module, weights: Mapping[str, Tensor], name: str, remedy: str = "", assign: bool = False
) -> None:
    """Load weights whose names and shapes all fit; otherwise the error lists the first that do not fit.

    `assign` puts the weights themselves in the place of the module's, which may be without memory.
    """
    if problems := misfits(module.state_dict(), weights):
        raise CheckpointError(f"the weights of {name} do not fit the model; {problems}{remedy}")
    module.load_state_dict(dict(weights), assign=assign)


def misfits(wanted: Mapping[str, Tensor], weights: Mapping[str, Tensor], most: int = NUM_NAMES_SHOWN) -> str:
    """The first names that are missing, unexpected or of another shape; empty if all fit."""
    kinds = {
        "missing": sorted(wanted.keys() - weights.keys()),
        "unexpected": sorted(weights.keys() - wanted.keys()),
        "of another shape": [
            f"{name} {tuple(weights[name].shape)} instead of {tuple(wanted[name].shape)}"
            for name in sorted(wanted.keys() & weights.keys())
            if weights[name].shape != wanted[name].shape
        ],
    }
    return "; ".join(f"{len(names)} {kind}: {shortened(names, most)}" for kind, names in kinds.items() if names)


def shortened(names: list[str], most: int = NUM_NAMES_SHOWN) -> str:
    """The first names of a list and the number of further names, for messages."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f", ... and {rest} more" if rest > 0 else "")


def require_channels(found: int, in_chans: int, path: str) -> None:
    """Refuse weights of `found` channels that cannot be adapted to an encoder of `in_chans`."""
    if found not in (3, in_chans):
        raise CheckpointError(
            f"{path} has {found} channels, the encoder {in_chans}; only weights of 3 channels can be adapted: choose "
            f"other weights, or --in_chans {found}"
        )

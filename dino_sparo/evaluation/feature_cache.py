"""Features of both splits <-> files, under the names of facebookresearch/dino.

Features are extracted once and evaluated many times. The record holds a checksum of each file and of itself, so that a
folder with files of two dumps is refused.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dino_sparo.evaluation.features import Features, gather_features
from dino_sparo.runtime.agree import all_or_none
from dino_sparo.runtime.files import parse_json
from dino_sparo.runtime.launch import is_main
from dino_sparo.runtime.records import plain, write_json
from dino_sparo.weights.checkpoint import weights_sha256
from dino_sparo.weights.file import CheckpointError, contents_checksum, read_torch_file

# The reference's names.
CACHE_FILES = {
    "train": ("trainfeat.pth", "trainlabels.pth"),
    "val": ("testfeat.pth", "testlabels.pth"),
}
CACHE_RECORD = "features.json"
INCOMING = ".incoming"  # folder of a dump that is not complete


def save_features(folder: Path, train: Features, val: Features, record: dict[str, Any]) -> None:
    """Write both splits under the reference's file names, and beside them how they were made.

    The files are written into a new folder and renamed when they are complete, the record first. After a kill between
    two renames the record's checksums do not fit the files.

    The reference writes features of length one and does not normalise them when it reads them. Give `normalize_`d
    features, so that its script reads the folder too.
    """
    incoming = folder / INCOMING
    try:
        shutil.rmtree(incoming, ignore_errors=True)
        incoming.mkdir(parents=True)
        checksums = {}
        for split, features in (("train", train), ("val", val)):
            for name, tensor in zip(CACHE_FILES[split], (features.features, features.labels), strict=True):
                tensor = tensor.cpu()
                # torch saves the whole storage of a view.
                is_whole = tensor.untyped_storage().nbytes() == tensor.nbytes
                torch.save(tensor if is_whole else tensor.clone(), incoming / name)
                checksums[name] = contents_checksum(incoming / name)
        content = plain({**record, "corrupt": {"train": train.num_corrupt, "val": val.num_corrupt}})
        content["checksums"] = checksums
        write_json({**content, "sha256": _digest(content)}, incoming / CACHE_RECORD)
        for name in (CACHE_RECORD, *checksums):
            os.replace(incoming / name, folder / name)
        incoming.rmdir()
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"could not write the features to {folder} ({error}); free some space or choose another folder"
        ) from error


def _digest(content: dict[str, Any]) -> str:
    """SHA-256 of a record, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def dump_features(folder: Path, train: Features, val: Features, record: dict[str, Any], device: torch.device) -> None:
    """`save_features` where each process holds a share: rank 0 collects the features on the CPU and writes them."""
    train, val = (gather_features(part, device, on_rank_0=True) for part in (train, val))
    with all_or_none("writing the features", patient=True):  # writing may take longer than a collective waits
        if is_main():
            save_features(folder, train, val, record)


def load_features(folder: Path) -> tuple[Features, Features, dict[str, Any]]:
    """Features of both splits and the record that `save_features` wrote; the reference's folders have no record."""
    record = _read_record(folder)
    checksums = record.pop("checksums", {})  # none in the record of an older version
    corrupt = record.pop("corrupt", {})
    splits = []
    for split, names in CACHE_FILES.items():
        features, labels = (_load_tensor(folder / name, checksums.get(name)) for name in names)
        if features.ndim != 2 or labels.shape != features.shape[:1]:
            raise ValueError(
                f"{folder / names[0]} has shape {tuple(features.shape)} and {names[1]} {tuple(labels.shape)}; expected "
                f"(images, F) and (images,); write them again with --dump_features"
            )
        splits.append(Features(features.float(), labels.long(), torch.arange(len(labels)), corrupt.get(split, 0)))
    return splits[0], splits[1], record


def _read_record(folder: Path) -> dict[str, Any]:
    """The record without its own digest; empty if there is none."""
    path = folder / CACHE_RECORD
    if not path.is_file():
        return {}
    try:
        record: dict[str, Any] = parse_json(path.read_bytes())
        digest = record.pop("sha256", None)
        if "checksums" in record and digest != _digest(record):
            raise ValueError("its checksum is wrong")
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}; write it again with --dump_features {folder}") from error
    return record


def _load_tensor(path: Path, checksum: int | None) -> Tensor:
    """The tensor of a file; `checksum` None is not compared."""
    again = f"write the features again with --dump_features {path.parent}"
    if not path.is_file():
        raise ValueError(f"no cached features at {path}; {again}")
    try:
        if checksum is not None and contents_checksum(path) != checksum:
            raise ValueError(f"{path} is not the file that {CACHE_RECORD} describes: its checksum differs; {again}")
        tensor = read_torch_file(path, mmap=True)  # each process copies its share alone
    except CheckpointError as error:
        raise ValueError(f"{error}; {again}") from error
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{path} holds a {type(tensor).__name__}, not a tensor; {again}")
    return tensor


def check_same_weights(sha256: str | None, pretrained_weights: str, folder: str) -> None:
    """Refuse cached features of other weights than `pretrained_weights`, a path; an empty path allows any weights."""
    if pretrained_weights and sha256 != weights_sha256(pretrained_weights):
        raise ValueError(
            f"the features in {folder} were not made with {pretrained_weights} (its SHA-256 is not {sha256}); leave "
            f"out --pretrained_weights to evaluate them anyway, or leave out --load_features"
        )

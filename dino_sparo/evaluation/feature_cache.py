"""Features of both splits <-> files, under the names of facebookresearch/dino.

Features are extracted once and evaluated many times.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dino_sparo.evaluation.features import Features
from dino_sparo.runtime.collectives import all_or_none
from dino_sparo.runtime.files import parse_object, write_json
from dino_sparo.runtime.launch import is_main
from dino_sparo.weights.checkpoint import weights_sha256
from dino_sparo.weights.file import read_torch_file

# The reference's names.
CACHE_FILES = {
    "train": ("trainfeat.pth", "trainlabels.pth"),
    "val": ("testfeat.pth", "testlabels.pth"),
}
CACHE_RECORD = "features.json"


def save_features(folder: Path, train: Features, val: Features, record: dict[str, Any]) -> None:
    """Rank 0 writes both splits under the reference's file names, and beside them how they were made.

    An older dump is removed first, and the record is written last: a kill leaves no mix of two dumps.

    The reference writes features of length one and does not normalise them when it reads them. Give `normalize_`d
    features, so that its script reads the folder too.
    """
    with all_or_none("writing the features"):
        if is_main():
            try:
                _write(folder, {"train": train, "val": val}, record)
            except (OSError, RuntimeError) as error:
                raise ValueError(
                    f"could not write the features to {folder} ({error}); free some space or choose another folder"
                ) from error


def _write(folder: Path, splits: dict[str, Features], record: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for split in CACHE_FILES.values() for name in split]
    for name in (CACHE_RECORD, *names):
        (folder / name).unlink(missing_ok=True)
    for split, part in splits.items():
        for name, tensor in zip(CACHE_FILES[split], (part.features.cpu(), part.labels.cpu()), strict=True):
            # torch saves the whole storage of a view.
            is_whole = tensor.untyped_storage().nbytes() == tensor.nbytes
            torch.save(tensor if is_whole else tensor.clone(), folder / name)
    corrupt = {split: part.num_corrupt for split, part in splits.items()}
    write_json({**record, "corrupt": corrupt}, folder / CACHE_RECORD)


def load_features(folder: Path) -> tuple[Features, Features, dict[str, Any]]:
    """Features of both splits and the record that `save_features` wrote; the reference's folders have no record."""
    path = folder / CACHE_RECORD
    try:
        record = parse_object(path.read_bytes(), str(path)) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; write it again with --dump_features {folder}") from error
    for name in ("sha256", "checksums"):  # of older versions
        record.pop(name, None)
    corrupt = record.pop("corrupt", {})
    splits = []
    for split, names in CACHE_FILES.items():
        features, labels = (_load_tensor(folder / name) for name in names)
        if features.ndim != 2 or labels.shape != features.shape[:1]:
            raise ValueError(
                f"{folder / names[0]} has shape {tuple(features.shape)} and {names[1]} {tuple(labels.shape)}; expected "
                f"(images, F) and (images,); write them again with --dump_features"
            )
        splits.append(Features(features.float(), labels.long(), torch.arange(len(labels)), corrupt.get(split, 0)))
    return splits[0], splits[1], record


def _load_tensor(path: Path) -> Tensor:
    again = f"write the features again with --dump_features {path.parent}"
    if not path.is_file():
        raise ValueError(f"no cached features at {path}; {again}")
    try:
        tensor = read_torch_file(path, mmap=True)  # each process copies its share alone
    except ValueError as error:  # also of a damaged name in the archive
        raise ValueError(f"{error}; {again}") from error
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{path} holds a {type(tensor).__name__}, not a tensor; {again}")
    return tensor


def check_same_weights(sha256: str | None, pretrained_weights: str, folder: str) -> None:
    """Refuse cached features of other weights than `pretrained_weights`, a path; an empty path allows any weights."""
    if pretrained_weights and sha256 != weights_sha256(pretrained_weights):
        raise ValueError(f"the features in {folder} were not made with {pretrained_weights}; leave out one of the two")

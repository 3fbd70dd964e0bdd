"""Features of both splits <-> files, under the names of facebookresearch/dino.

What `features.py` extracts is written once and evaluated many times.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dino_sparo.data.sources.limits import parse_json
from dino_sparo.evaluation.features import Features, gather_features
from dino_sparo.runtime.distributed import all_or_none, is_main
from dino_sparo.runtime.records import file_sha256, write_json
from dino_sparo.weights.checkpoint import read_torch_file

# The reference's names.
CACHE_FILES = {
    "train": ("trainfeat.pth", "trainlabels.pth"),
    "val": ("testfeat.pth", "testlabels.pth"),
}
CACHE_RECORD = "features.json"


def save_features(folder: Path, train: Features, val: Features, record: dict[str, Any]) -> None:
    """Write both splits under the reference's file names, and beside them how they were made.

    The reference writes features of length one and does not normalise them when it reads them, so give it
    `normalize_`d ones and its script reads the folder too.

    Args:
        folder: created if need be.
        train: its features and labels.
        val: likewise.
        record: plain values.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for split, features in (("train", train), ("val", val)):
        for name, tensor in zip(CACHE_FILES[split], (features.features, features.labels), strict=True):
            tensor = tensor.cpu()
            # A view would be saved with all the storage it looks at.
            is_whole = tensor.untyped_storage().nbytes() == tensor.nbytes
            _save_tensor(tensor if is_whole else tensor.clone(), folder / name)
    write_json({**record, "corrupt": {"train": train.num_corrupt, "val": val.num_corrupt}}, folder / CACHE_RECORD)


def dump_features(folder: Path, train: Features, val: Features, record: dict[str, Any], device: torch.device) -> None:
    """`save_features` where each process holds a part: rank 0 collects the features on the CPU and writes them.

    Writing may take longer than a collective waits.

    Args:
        folder: created if need be.
        train: this process' share.
        val: likewise.
        record: plain values.
        device: where the processes talk to each other.
    """
    train, val = (gather_features(part, device, on_rank_0=True) for part in (train, val))
    with all_or_none("writing the features", patient=True):
        if is_main():
            save_features(folder, train, val, record)


def load_features(folder: Path) -> tuple[Features, Features, dict[str, Any]]:
    """Read what `save_features` or the reference wrote.

    Returns:
        Features of both splits and the record, empty for the reference's.

    Raises:
        ValueError: a file is missing, is no tensor, or the files do not belong together.
    """
    path = folder / CACHE_RECORD
    record = parse_json(path.read_bytes()) if path.is_file() else {}
    splits = []
    for split, names in CACHE_FILES.items():
        features, labels = (_load_tensor(folder / name) for name in names)
        if features.ndim != 2 or labels.ndim != 1 or len(features) != len(labels):
            raise ValueError(
                f"{folder / names[0]} has shape {tuple(features.shape)} and {names[1]} {tuple(labels.shape)}; expected "
                f"(images, F) and (images,); write them again with --dump_features"
            )
        corrupt = record.get("corrupt", {}).get(split, 0)
        splits.append(Features(features.float(), labels.long(), torch.arange(len(labels)), corrupt))
    return splits[0], splits[1], {name: value for name, value in record.items() if name != "corrupt"}


def check_same_weights(sha256: str | None, pretrained_weights: str, folder: str) -> None:
    """Refuse cached features of other weights than those named.

    Args:
        sha256: of the weights that made the features, as their record says.
        pretrained_weights: path of the weights; empty for any.
        folder: of the features.

    Raises:
        ValueError: they are not the same.
    """
    if pretrained_weights and sha256 != file_sha256(Path(pretrained_weights)):
        raise ValueError(
            f"the features in {folder} were not made with {pretrained_weights} (its SHA-256 is not {sha256}); leave "
            f"out --pretrained_weights to evaluate them anyway, or leave out --load_features"
        )


def _save_tensor(tensor: Tensor, path: Path) -> None:
    try:
        torch.save(tensor, path)
    except (OSError, RuntimeError) as error:
        raise ValueError(f"could not write {path} ({error}); free some space or choose another folder") from error


def _load_tensor(path: Path) -> Tensor:
    if not path.is_file():
        raise ValueError(f"no cached features at {path}; write them with --dump_features {path.parent}")
    tensor = read_torch_file(path, mmap=True)  # each process copies its share alone
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{path} holds a {type(tensor).__name__}, not a tensor; write it again with --dump_features")
    return tensor

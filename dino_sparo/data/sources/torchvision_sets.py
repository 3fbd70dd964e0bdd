"""The name of one of torchvision's sets and its folder -> the source of its images."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torchvision import datasets

from dino_sparo.data.sources.decode import DEFAULT_LIMITS, CorruptImageError, ImageLimits, to_image
from dino_sparo.runtime.faults import UserError


class _TorchvisionSet(NamedTuple):
    """The parts of a set: its class, the arguments of each split, and the attribute that holds the labels."""

    build: Callable[..., Any]
    train: dict[str, Any]
    val: dict[str, Any]
    labels: str
    alone: dict[str, Any] | None = None  # arguments when no split is asked for; None: the training split's


_BY_FLAG = {"train": True}, {"train": False}
_BY_NAME = {"split": "train"}, {"split": "test"}
_TRAINVAL = {"split": "trainval"}, {"split": "test"}

TORCHVISION_SETS: dict[str, _TorchvisionSet] = {
    "cifar10": _TorchvisionSet(datasets.CIFAR10, *_BY_FLAG, "targets"),
    "cifar100": _TorchvisionSet(datasets.CIFAR100, *_BY_FLAG, "targets"),
    "stl10": _TorchvisionSet(datasets.STL10, *_BY_NAME, "labels", {"split": "train+unlabeled"}),
    "svhn": _TorchvisionSet(datasets.SVHN, *_BY_NAME, "labels"),
    "mnist": _TorchvisionSet(datasets.MNIST, *_BY_FLAG, "targets"),
    "fashionmnist": _TorchvisionSet(datasets.FashionMNIST, *_BY_FLAG, "targets"),
    "kmnist": _TorchvisionSet(datasets.KMNIST, *_BY_FLAG, "targets"),
    "food101": _TorchvisionSet(datasets.Food101, *_BY_NAME, "_labels"),
    "flowers102": _TorchvisionSet(datasets.Flowers102, *_BY_NAME, "_labels"),
    "oxfordpets": _TorchvisionSet(datasets.OxfordIIITPet, *_TRAINVAL, "_labels"),
    "aircraft": _TorchvisionSet(datasets.FGVCAircraft, *_TRAINVAL, "_labels"),
    "dtd": _TorchvisionSet(datasets.DTD, *_BY_NAME, "_labels"),
    "country211": _TorchvisionSet(datasets.Country211, *_BY_NAME, "targets"),
    "gtsrb": _TorchvisionSet(datasets.GTSRB, *_BY_NAME, "_samples"),
    "imagenette": _TorchvisionSet(datasets.Imagenette, {"split": "train"}, {"split": "val"}, "_samples"),
}


class TorchvisionSource:
    """A torchvision set: `dataset` yields (PIL image, label)."""

    def __init__(self, name: str, dataset: Any, labels: np.ndarray, limits: ImageLimits = DEFAULT_LIMITS) -> None:
        self.name, self.dataset, self._length = name, dataset, len(labels)
        self.labels: np.ndarray | None = labels
        self.limits = limits
        classes = getattr(dataset, "classes", None) or range(int(labels.max()) + 1)
        self.classes: list[str] | None = [", ".join(c) if isinstance(c, tuple) else str(c) for c in classes]

    def __len__(self) -> int:
        return self._length

    def location(self, index: int) -> str:
        """`name[index]`."""
        return f"{self.name}[{index}]"

    def read(self, index: int) -> Image.Image:
        """Image `index` as 8-bit RGB; raises CorruptImageError."""
        try:
            return to_image(self.dataset[index][0], self.limits.in_chans, exif=self.limits.exif)
        except Exception as error:  # as in decode_image: damaged files raise anything
            raise CorruptImageError(self.location(index), repr(error)) from error


def open_torchvision(
    name: str, folder: str, split: str | None, download: bool, limits: ImageLimits = DEFAULT_LIMITS
) -> TorchvisionSource:
    """Build a set by name; ValueError if it is not on disk and not downloaded."""
    entry = TORCHVISION_SETS[name]
    by_split = {None: entry.alone or entry.train, "train": entry.train, "val": entry.val, "test": entry.val}
    if split not in by_split:
        raise UserError(f"torchvision set {name!r} has no split {split!r}; choose train or val")
    try:
        dataset = entry.build(folder, download=download, **by_split[split])
    except (RuntimeError, OSError, ImportError) as error:
        problem = "could not be opened" if download else "is missing or incomplete; pass --download to fetch it"
        raise UserError(f"torchvision set {name!r} in {folder!r} {problem} ({error})") from error
    labels = getattr(dataset, entry.labels)
    if entry.labels == "_samples":
        labels = [label for _, label in labels]
    title = f"{name} in {folder} ({split or 'training'})"
    return TorchvisionSource(title, dataset, np.asarray(labels, dtype=np.int64), limits)

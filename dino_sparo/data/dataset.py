"""A source of images -> items of crops -> batches; checks of labels, classes and equal images on all ranks.

In order: a source (`sources/`) -> `ImageDataset` (image -> crops, by `crops.py`) -> the batches of a sampler
(`samplers.py`) -> `create_loader` (`loader.py`) -> `Batch` of S tensors (B, C, H, W).
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int64, Shaped
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from dino_sparo.data.augment import DeferredViews
from dino_sparo.data.samplers import image_rng
from dino_sparo.data.sources import CorruptImageError, ImageSource, index_images, open_source
from dino_sparo.data.sources.decode import DEFAULT_LIMITS
from dino_sparo.data.sources.folders import WITHOUT_LABELS
from dino_sparo.data.sources.image_source import fingerprint_of, hash_of
from dino_sparo.runtime.choices import MIN_CORRUPT
from dino_sparo.runtime.collectives import all_or_none, rank_0_first, require_same
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.launch import rank, world_size

# This many unreadable images in a row mean that a disk or a network does not answer.
MAX_CORRUPT_IN_A_ROW = 64
# After this many neighbours, each try is this share of the source further on, which leaves a damaged region.
NUM_NEIGHBOURS, WIDE_STEP = 8, 0.6180339887

D = TypeVar("D", bound="DeviceBatch")
T = TypeVar("T")
AnySource = TypeVar("AnySource", bound=ImageSource)
Transform = Callable[[Image.Image, np.random.Generator], list[Tensor] | DeferredViews]


def require_labels(source: ImageSource) -> Int64[np.ndarray, " images"]:
    """The labels of a source, (images,) int64; ValueError unless every image has a label."""
    if source.labels is None:
        raise UserError(
            f"{source.name} has no labels: evaluations need one subfolder per class, a list with a label after each "
            "path, a table with a column `label` (or --label_column NAME), or tar shards with .cls members\n"
            f"it holds {len(source):,} images, the first is {source.location(0)}"
            f"{f'; {why}' if (why := getattr(source, 'why_unlabelled', '')) else ''}\n{WITHOUT_LABELS}"
        )
    missing = np.flatnonzero(source.labels < 0)
    if len(missing):
        raise UserError(
            f"{source.name}: {len(missing)} of {len(source)} images have no label, the first is "
            f"{source.location(int(missing[0]))}; label all of them or leave these out"
        )
    return source.labels


def open_together(open_it: Callable[[], AnySource], index: Callable[[int, int], None], what: str) -> AnySource:
    """Open a source on all ranks: they share the indexing, then rank 0 opens, then the others.

    Args:
        open_it: opens the source, with the index in the cache.
        index: (number, count) -> puts this process' share of the index into the cache.
        what: the action, for messages.
    """
    if world_size() > 1:
        with all_or_none(what):
            index(rank(), world_size())
    with rank_0_first(what):
        source = open_it()
    return source


def open_images(data_path: str, split: str | None, download: bool, **options: Any) -> ImageSource:
    """The same images on all ranks, labelled or not; the arguments are those of `open_source`.

    Raises:
        ValueError: there are no such images, or the ranks see different ones.
    """
    source = open_together(
        lambda: open_source(data_path, split, download, **options),
        partial(index_images, data_path, split=split, limits=options.get("limits", DEFAULT_LIMITS)),
        f"opening {data_path}",
    )
    require_same_source(source)
    return source


def require_same_source(source: ImageSource) -> None:
    """ValueError on every rank unless all ranks have opened the same images: number, names, classes and labels."""
    if world_size() > 1:
        require_same(len(source), f"the number of images of {source.name}")
        require_same(fingerprint_of(source), f"the names of the images of {source.name}")
        require_same(str(source.classes), f"the classes of {source.name}")
        require_same(None if source.labels is None else hash_of(source.labels), f"the labels of {source.name}")


def align_classes(source: ImageSource, classes: list[str]) -> ImageSource:
    """The same source with its classes numbered as in `classes`.

    Two folders number their classes independently. If one lacks a class, equal numbers mean different classes.

    Raises:
        ValueError: the source has no labels, or images of a class that is not among `classes`.
    """
    labels = require_labels(source)
    own, number = source.classes or [], {name: i for i, name in enumerate(classes)}
    unknown = [name for i, name in enumerate(own) if name not in number and (labels == i).any()]
    if unknown:
        known = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
        raise UserError(
            f"{source.name} has {len(unknown)} classes that the training images lack, the first is {unknown[0]!r}; "
            f"the training images have {len(classes)}: {known}; give matching splits"
        )
    if own == classes:
        return source
    aligned = copy.copy(source)
    aligned.labels = np.array([number.get(name, -1) for name in own], dtype=np.int64)[labels]
    aligned.classes = classes
    return aligned


def most_corrupt(share: float, total: int) -> float:
    """Number of unreadable images that is tolerated: `share` of `total`, at least `MIN_CORRUPT`; 0 for a share of 0."""
    return max(share * total, float(MIN_CORRUPT)) if share else 0.0


@dataclass(frozen=True)
class Item:
    """One image, ready for a batch; the attributes are those of `Batch`.

    Attributes:
        corrupt: (location, reason) of the requested image if it is unreadable, else empty. An unreadable neighbour is
            not listed, since its own item lists it: an epoch counts each image once.
    """

    views: list[Tensor]
    label: int
    index: int
    corrupt: tuple[tuple[str, str], ...] = ()
    parameters: Float[Tensor, "S _"] | None = None


@dataclass
class DeviceBatch:
    """A batch that can move to a device; only fields that are tensors, or lists of tensors, move."""

    def pin_memory(self: D) -> D:
        """A copy in page-locked memory, tensors within tuples and dataclasses included; the loader calls this."""
        pinned: D = _each_tensor(self, Tensor.pin_memory, nested=True)
        return pinned

    def to(self: D, device: torch.device | str) -> D:
        """The batch on a device; a copy from page-locked memory overlaps with computation."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        names = [member.name for member in fields(self)]
        return replace(self, **{name: _each_tensor(getattr(self, name), move, nested=False) for name in names})

    def tensors(self) -> Iterator[Tensor]:
        """All of its tensors."""
        for member in fields(self):
            value = getattr(self, member.name)
            yield from (item for item in (value if isinstance(value, list) else [value]) if isinstance(item, Tensor))


def _each_tensor(value: Any, change: Callable[[Tensor], Tensor], nested: bool) -> Any:
    """A value with its tensors changed; those in its tuples and dataclasses only if `nested`."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list) or (nested and type(value) is tuple):
        return type(value)(_each_tensor(item, change, nested) for item in value)
    if nested and is_dataclass(value) and not isinstance(value, type):
        names = [member.name for member in fields(value)]
        return replace(value, **{name: _each_tensor(getattr(value, name), change, nested) for name in names})
    return value


@dataclass
class Batch(DeviceBatch):
    """B images.

    Attributes:
        views: S tensors (B, C, H, W), one per crop; H and W differ between crops.
        labels: (B,), classes, -1 where an image has none.
        indices: (B,), places in the source.
        corrupt: (location, reason) of each unreadable image that was replaced.
        parameters: (S, B, numbers), for `augment.Distortions`, of views that are not distorted yet.
    """

    views: list[Shaped[Tensor, "B C _ _"]]
    labels: Int64[Tensor, " B"]
    indices: Int64[Tensor, " B"]
    corrupt: list[tuple[str, str]]
    parameters: Float[Tensor, "S B _"] | None = None


class EpochDataset(Dataset, ABC):
    """Items of a source, by (epoch, index), or by index in epoch 0; a subclass makes an item.

    Args:
        source: images or pairs.
        transform: (PIL image, rng) -> crops.
        seed: any integer.
    """

    def __init__(self, source: Any, transform: Callable[..., Any], seed: int = 0) -> None:
        self.source, self.transform, self.seed = source, transform, seed

    def __len__(self) -> int:
        """Number of items."""
        return len(self.source)

    def __getitem__(self, key: int | tuple[int, int]) -> Any:
        """The item of (epoch, index); ValueError if too many images in a row are unreadable."""
        epoch, index = key if isinstance(key, tuple) else (0, key)
        if not 0 <= index < len(self.source):
            raise IndexError(f"index {index} of {self.source.name}, which has {len(self.source)}")
        return self.item(epoch, index)

    @abstractmethod
    def item(self, epoch: int, start: int) -> Any:
        """The item of an index that exists."""


class ImageDataset(EpochDataset):
    """Images of a source, each turned into S crops by a transform with the image's own random numbers.

    An unreadable image is replaced by a readable one (`read_next`) and reported in `Item.corrupt`. Label and index are
    those of the replacement. The random numbers are those of the requested image, so that the replacement is not
    cropped twice in the same way.
    """

    source: ImageSource
    transform: Transform

    def item(self, epoch: int, start: int) -> Item:
        """The crops of an image in an epoch, with its label."""
        image, index, corrupt = read_next(self.source.read, start, self.source)
        made = self.transform(image, image_rng(self.seed, epoch, start))
        views, parameters = made if isinstance(made, DeferredViews) else (made, None)
        label = -1 if self.source.labels is None else int(self.source.labels[index])
        return Item(views, label, index, tuple(corrupt[:1]), parameters)


def read_next(read: Callable[[int], T], start: int, source: ImageSource) -> tuple[T, int, list[tuple[str, str]]]:
    """`read(start)`, or `read` of another index if that image is unreadable.

    The next neighbours are tried first; after the last index comes the first. An interrupted copy leaves many
    unreadable neighbours, so the steps then become wide: only a disk that does not answer fails that often.

    Returns:
        The result of `read`, its index, and (location, reason) of the unreadable images.

    Raises:
        ValueError: too many images in a row are unreadable.
    """
    corrupt: list[tuple[str, str]] = []
    for step in range(min(MAX_CORRUPT_IN_A_ROW, len(source))):
        is_near = step < NUM_NEIGHBOURS or len(source) <= MAX_CORRUPT_IN_A_ROW
        index = (start + (step if is_near else int(step * WIDE_STEP * len(source)))) % len(source)
        try:
            return read(index), index, corrupt
        except CorruptImageError as error:
            corrupt.append((error.location, error.reason))
    location, reason = corrupt[0]
    raise UserError(
        f"{len(corrupt)} images in a row of {source.name} cannot be read, the first is {location} ({reason}); "
        "is the disk still there, and are these files images?"
    )


def collate_views(items: list[Item]) -> Batch:
    """Stack items; in a worker `default_collate` writes straight into memory shared with the main process."""
    views = [default_collate(list(crops)) for crops in zip(*(item.views for item in items), strict=True)]
    labels, indices = torch.tensor([item.label for item in items]), torch.tensor([item.index for item in items])
    drawn = [item.parameters for item in items if item.parameters is not None]
    parameters = torch.stack(drawn, dim=1) if drawn else None
    return Batch(views, labels, indices, [pair for item in items for pair in item.corrupt], parameters)

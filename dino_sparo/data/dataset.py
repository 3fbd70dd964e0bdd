"""A source of images -> items of crops; an unreadable image is replaced.

In order: a source (`sources/`), the same on all ranks (`ranks.py`) -> `ImageDataset` (image -> crops, by `crops.py`) ->
the batches of a sampler (`samplers.py`) -> `create_loader` (`loader.py`) -> `Batch` (`batch.py`) of S tensors
(B, C, H, W).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from dino_sparo.data.augment import DeferredViews
from dino_sparo.data.batch import Item
from dino_sparo.data.defaults import MIN_CORRUPT
from dino_sparo.data.samplers import image_rng
from dino_sparo.data.sources import CorruptImageError, ImageSource
from dino_sparo.runtime.faults import UserError

# This many unreadable images in a row mean that a disk or a network does not answer.
MAX_CORRUPT_IN_A_ROW = 64
# After this many neighbours, each try is this share of the source further on, which leaves a damaged region.
NUM_NEIGHBOURS, WIDE_STEP = 8, 0.6180339887

T = TypeVar("T")
Transform = Callable[[Image.Image, np.random.Generator], list[Tensor] | DeferredViews]


def most_corrupt(share: float, total: int) -> float:
    """Number of unreadable images that is tolerated: `share` of `total`, at least `MIN_CORRUPT`; 0 for a share of 0."""
    return max(share * total, float(MIN_CORRUPT)) if share else 0.0


class EpochDataset(Dataset, ABC):
    """Items of a source, by (epoch, index), or by index in epoch 0; a subclass defines `item`.

    Args:
        source: images or pairs.
        transform: (PIL image, rng) -> crops.
        seed: any integer.
    """

    def __init__(self, source: Any, transform: Callable[..., Any], seed: int = 0) -> None:
        self.source, self.transform, self.seed = source, transform, seed

    def __len__(self) -> int:
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

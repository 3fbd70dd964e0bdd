"""Items -> a batch, and on to a device."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor
from torch.utils.data import default_collate

from dino_sparo.runtime.faults import UserError

D = TypeVar("D", bound="DeviceBatch")


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
        """All tensors of the batch."""
        for member in fields(self):
            value = getattr(self, member.name)
            yield from (item for item in (value if isinstance(value, list) else [value]) if isinstance(item, Tensor))


def _each_tensor(value: Any, change: Callable[[Tensor], Tensor], nested: bool) -> Any:
    """A value with its tensors changed; tensors within tuples and dataclasses are changed only if `nested`."""
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


def collate_views(items: list[Item]) -> Batch:
    """Stack items; in a worker `default_collate` writes straight into memory shared with the main process."""
    parts = [list(crops) for crops in zip(*(item.views for item in items), strict=True)]
    if different := next((sizes for crops in parts if len(sizes := {tuple(crop.shape) for crop in crops}) > 1), None):
        words = " and ".join(f"{width} x {height}" for *_, height, width in sorted(different)[:2])
        raise UserError(f"images of {words} pixels are in one batch; give --batch_size_per_gpu 1")
    views = [default_collate(crops) for crops in parts]
    labels, indices = torch.tensor([item.label for item in items]), torch.tensor([item.index for item in items])
    drawn = [item.parameters for item in items if item.parameters is not None]
    parameters = torch.stack(drawn, dim=1) if drawn else None
    return Batch(views, labels, indices, [pair for item in items for pair in item.corrupt], parameters)

"""Embeddings, or some of their slots -> vectors of length one on a device, block by block."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dino_sparo.evaluation.embed.store import Embeddings, unit_vectors
from dino_sparo.evaluation.slots.choice import open_selection
from dino_sparo.models.readouts import READOUTS
from dino_sparo.runtime.faults import UserError

ROWS = 2048  # of a block of features; a block of similarities has ROWS x ROWS numbers


class Vectors(NamedTuple):
    """Features of length one, by blocks of rows, on a device.

    Attributes:
        num_rows: number of images.
        read: slice of rows -> (rows, F), fp32.
    """

    num_rows: int
    read: Callable[[slice], Float[Tensor, "rows F"]]

    def blocks(self, start: int = 0) -> Iterator[tuple[slice, Float[Tensor, "rows F"]]]:
        """Blocks of rows from `start` on."""
        for first in range(start, self.num_rows, ROWS):
            rows = slice(first, min(first + ROWS, self.num_rows))
            yield rows, self.read(rows)


def open_vectors(store: Embeddings, kind: str, slots: Sequence[int], device: torch.device) -> Vectors:
    """The features of embeddings, or those of some slots, concatenated."""
    array = store.array(kind)
    num_slots = slots_in(store, kind) if slots else 0

    def read(rows: slice) -> Float[Tensor, "rows F"]:
        features = array[rows]
        if slots:
            features = features.reshape(len(features), num_slots, -1)[:, list(slots)]
        return torch.from_numpy(unit_vectors(features, kind)).to(device)

    return Vectors(len(array), read)


def open_slots(store: Embeddings, kind: str, slots: str | None) -> tuple[Sequence[int], dict[str, Any] | None]:
    """Numbers of the slots of `--slots`, empty for all features, and their entry in a result."""
    if not slots:
        return (), None
    num_slots = slots_in(store, kind)
    if not num_slots:
        raise UserError(f"--slots {slots}: {kind} in {store.folder} has no slots; take --what encoding or slots")
    selection, record = open_selection(slots, store.record["encoder"].get("sha256"), num_slots)
    return selection.indices, record


def slots_in(store: Embeddings, kind: str) -> int:
    """Number of slots in features of a kind, 0 without slots; an encoding has one slot after the other."""
    array, encoder = store.array(kind), store.record["encoder"]
    if kind == "slots":
        return array.shape[1]
    has_slots = kind == "encoding" and encoder.get("readout") in READOUTS and READOUTS[encoder["readout"]].has_slots
    return encoder["num_slots"] if has_slots else 0

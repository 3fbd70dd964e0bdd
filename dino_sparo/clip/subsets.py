"""A choice among a model's slots, hard or soft -> the same model reduced to it, for any evaluation.

`select.py` and `mask.py` find choices and write them; what evaluates a CLIP takes one as --slots.

    selection   k of the L slots, of images and of captions       y = concat(y_l / |y_l|, l kept) / sqrt(k)
    mask        a weight in [0, 1] for each of P parts of images  y = m * y / |m * y|, captions as they are

A selection divides by sqrt(k) where equation 2 divides by sqrt(L), so that a similarity is the mean of the cosines of
the slots that are kept, and a feature has length one. A mask weighs normalised encodings and leaves captions alone, as
the paper does; a part is a slot (P = L), a single dimension (P = M), or, in a model without slots, one of P contiguous
equal partitions. With weights 0 and 1 it orders the captions of an image as the selection of the same slots does.
Source: SPARO, sections 5.1, 5.2 and 0.C.1.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from dino_sparo.clip.config import CLIPConfig
from dino_sparo.clip.model import CLIP, LoadedClip, normalize_slots
from dino_sparo.evaluation.slots.choice import SlotSelection, check_same_checkpoint, keep_slots, origin_of, parse_slots
from dino_sparo.models.readout import ReadoutOutput

FORMS = (
    '{"slots": [0, 3], "num_slots": 128, "weights_sha256": "..."} or '
    '{"mask": [0.1, ...], "encoding_dim": 8192, "weights_sha256": "..."}, all but the first of either optional'
)


@dataclass(frozen=True)
class SlotMask:
    """Weights that multiply the parts of an image's encoding.

    Attributes:
        values: (P,), in [0, 1]; part p are the dimensions p M / P to (p + 1) M / P.
        encoding_dim: M of the model it was learned for; None: not known.
        weights_sha256: of the checkpoint it was learned for; None: not known.
    """

    values: tuple[float, ...]
    encoding_dim: int | None = None
    weights_sha256: str | None = None

    def __post_init__(self) -> None:
        wrong = [value for value in self.values if not 0 <= value <= 1]  # true for NaN, too
        if wrong:
            raise ValueError(f"mask holds {wrong[0]}; give weights in [0, 1]")
        if not any(self.values):
            raise ValueError(f"mask of {len(self.values)} parts has no weight above 0; nothing of an image would stay")
        if self.encoding_dim is not None:
            self.check_parts(self.encoding_dim)

    def check_parts(self, encoding_dim: int) -> None:
        """Refuse an encoding that does not fall into so many equal parts."""
        if encoding_dim % len(self.values):
            raise ValueError(
                f"mask has {len(self.values)} parts, which do not divide an encoding of {encoding_dim} numbers; "
                f"give one weight per slot or per dimension"
            )

    def per_dimension(self, encoding_dim: int) -> Float[Tensor, " encoding_dim"]:
        """The weight of each of M dimensions, fp32."""
        return torch.tensor(self.values).repeat_interleave(encoding_dim // len(self.values))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `parse_slots` takes them."""
        return {"mask": list(self.values), "encoding_dim": self.encoding_dim, "weights_sha256": self.weights_sha256}


class ReducedClip(nn.Module):
    """A model reduced to some of its slots, or with weighed encodings of images; see the top of this file.

    It shares the model's weights and goes where it goes.

    Args:
        model: for a selection with slots that are normalised one by one.
        choice: slots that are kept, or weights.
    """

    kept: Tensor  # numbers of slots, or a weight per dimension

    def __init__(self, model: CLIP, choice: SlotSelection | SlotMask) -> None:
        super().__init__()
        check_fits(choice, model.config)
        self.model, self.config, self.choice = model, model.config, choice
        self.is_selection, self.encoding_dim = isinstance(choice, SlotSelection), self.config.embed_dim
        if isinstance(choice, SlotSelection):
            self.encoding_dim = len(choice.indices) * self.config.image.slot_dim
            kept = torch.tensor(choice.indices)
        else:
            kept = choice.per_dimension(self.encoding_dim)
        self.register_buffer("kept", kept, persistent=False)

    def encode_image(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B M"]:
        """Images -> features of the kept slots, or masked encodings; of length one."""
        if self.is_selection:
            return normalize_slots(self.image_output(images).slots)
        return mask_features(self.model.encode_image(images), self.kept)

    def encode_text(self, token_ids: Int64[Tensor, "B N"]) -> Float[Tensor, "B M"]:
        """Captions -> features of the kept slots, or encodings without mask; of length one."""
        if self.is_selection:
            return normalize_slots(self.text_output(token_ids).slots)
        return self.model.encode_text(token_ids)

    def image_output(self, images: Float[Tensor, "B C H W"]) -> ReadoutOutput:
        """The kept slots (B, k, V), not normalised, and their attention (B, k, N)."""
        return keep_slots(self.model.image_output(images), self.kept)

    def text_output(self, token_ids: Int64[Tensor, "B N"]) -> ReadoutOutput:
        """The kept slots (B, k, V), not normalised, and their attention (B, k, N)."""
        return keep_slots(self.model.text_output(token_ids), self.kept)


def mask_features(features: Float[Tensor, "B M"], weights: Float[Tensor, " M"]) -> Float[Tensor, "B M"]:
    """Normalised encodings of images -> masked ones, of length one."""
    return F.normalize(features * weights, dim=1)


def check_fits(choice: SlotSelection | SlotMask, config: CLIPConfig, weights_sha256: str | None = None) -> None:
    """Refuse a choice that was made in another model, or that this one does not allow."""
    if isinstance(choice, SlotSelection):
        check_has_slots(config)
        choice.check_fits(config.image.num_slots)
    else:
        if choice.encoding_dim not in (None, config.embed_dim):
            raise ValueError(
                f"mask was learned for encodings of {choice.encoding_dim} numbers, the model's have "
                f"{config.embed_dim}; learn one for this model"
            )
        choice.check_parts(config.embed_dim)
    check_same_checkpoint(choice.weights_sha256, weights_sha256)


def check_has_slots(config: CLIPConfig) -> None:
    """Refuse a model without slots that can stand alone."""
    if not config.image.kind.normalized_per_slot:
        raise ValueError(
            f"readout {config.readout!r} has no slots to choose among; that takes a read-out whose slots are "
            f"normalised one by one, such as sparo"
        )


def whole_model(model: object) -> CLIP:
    """The model, where slots are to be chosen among all there are."""
    if not isinstance(model, CLIP):
        raise ValueError("slots are chosen among all slots of a model; leave out --slots")
    return model


def read_slots(text: str | Path) -> SlotSelection | SlotMask:
    """A choice by number, or in a JSON file: `select.py`'s, `mask.py`'s, or written by hand."""

    def mask_in(content: dict[str, Any]) -> SlotMask | None:
        values = content.get("mask")
        if isinstance(values, list) and all(type(value) in (int, float) for value in values):
            return SlotMask(tuple(map(float, values)), content.get("encoding_dim"), content.get("weights_sha256"))
        return None

    return parse_slots(str(text), mask_in, FORMS)


def open_slots(path: str | Path | None, loaded: LoadedClip) -> tuple[CLIP | ReducedClip, dict[str, Any] | None]:
    """A checkpoint's model, reduced if --slots names slots, and the entry of a result file, None if it is whole."""
    if not path:
        return loaded.model, None
    choice = read_slots(path)
    check_fits(choice, loaded.model.config, loaded.record["sha256"])
    record: dict[str, Any] = dict(origin_of(str(path)))
    if isinstance(choice, SlotSelection):
        record |= {"kind": "selection", "slots": list(choice.indices), "num_slots": loaded.model.config.image.num_slots}
        record["rule"] = "equation 2 over the slots that are kept, images and captions"
    else:
        mean = math.fsum(choice.values) / len(choice.values)
        record |= {"kind": "mask", "num_parts": len(choice.values), "mean_weight": mean}
        record["rule"] = "normalised encodings of images times the mask, normalised again; captions as they are"
    return ReducedClip(loaded.model, choice), record

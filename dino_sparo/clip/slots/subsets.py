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

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from dino_sparo.clip.config import CLIPConfig
from dino_sparo.clip.model import CLIP, LoadedClip, normalize_slots
from dino_sparo.evaluation.slots.choice import SlotMask, SlotSelection, open_choice
from dino_sparo.runtime.faults import UserError


class ReducedClip(nn.Module):
    """A model reduced to some of its slots, or with weighed encodings of images; see the top of this file.

    It shares the model's weights and goes where it goes.

    Args:
        model: for a selection with slots that are normalised one by one.
        choice: slots that are kept, or weights.
    """

    kept: Tensor  # numbers of slots, or weights of the parts

    def __init__(self, model: CLIP, choice: SlotSelection | SlotMask) -> None:
        super().__init__()
        self.model, self.config, self.is_selection = model, model.config, isinstance(choice, SlotSelection)
        if isinstance(choice, SlotSelection):
            check_normalized_per_slot(self.config)
            choice.check_fits(self.config.image.num_slots)
            self.encoding_dim, kept = len(choice.indices) * self.config.image.slot_dim, torch.tensor(choice.indices)
        else:
            choice.check_fits(self.config.embed_dim)
            self.encoding_dim, kept = self.config.embed_dim, torch.tensor(choice.values)
        self.register_buffer("kept", kept, persistent=False)

    def encode_image(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B M"]:
        """Images -> features of the kept slots, or masked encodings; of length one."""
        if self.is_selection:
            return normalize_slots(self.model.image_output(images).slots[:, self.kept])
        return mask_features(self.model.encode_image(images), self.kept)

    def encode_text(self, token_ids: Int64[Tensor, "B N"]) -> Float[Tensor, "B M"]:
        """Captions -> features of the kept slots, or encodings without mask; of length one."""
        if self.is_selection:
            return normalize_slots(self.model.text_output(token_ids).slots[:, self.kept])
        return self.model.encode_text(token_ids)


def mask_features(features: Float[Tensor, "B M"], weights: Float[Tensor, " P"]) -> Float[Tensor, "B M"]:
    """Normalised encodings of images -> encodings whose P equal parts are weighed, of length one."""
    return F.normalize(features * weights.repeat_interleave(features.shape[1] // len(weights)), dim=1)


def check_normalized_per_slot(config: CLIPConfig) -> None:
    """Refuse a model without slots that can stand alone."""
    if not config.image.kind.normalized_per_slot:
        raise UserError(
            f"readout {config.readout!r} has no slots to choose among; --slots needs a read-out whose slots are "
            f"normalised one by one, such as sparo"
        )


def open_slots(path: str | Path | None, loaded: LoadedClip) -> tuple[CLIP | ReducedClip, dict[str, Any] | None]:
    """A checkpoint's model, reduced if --slots names slots; and the entry of a result file, None for a whole model."""
    if not path:
        return loaded.model, None
    choice, record = open_choice(str(path), loaded.record["sha256"])
    if isinstance(choice, SlotSelection):
        record["num_slots"] = loaded.model.config.image.num_slots
        record["rule"] = "equation 2 over the slots that are kept, images and captions"
    else:
        record["rule"] = "normalised encodings of images times the mask, normalised again; captions as they are"
    return ReducedClip(loaded.model, choice), record

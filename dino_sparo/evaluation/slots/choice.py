"""A choice of slots, by number or by a file -> an encoder with these slots alone. For a CLIP: `clip/slots/subsets.py`.

    python eval_knn.py --pretrained_weights output/checkpoint.pth --data_path data/imagenet --slots 0,3,7
    python eval_knn.py --pretrained_weights output/checkpoint.pth --data_path data/imagenet --slots slot_study_NAME.json

`dino-sparo slots study` chooses slots of an encoder of images, `dino-sparo slots select` those of a CLIP; both write
the same form of file, which every evaluation takes as --slots. `dino-sparo slots mask` weighs the slots of a CLIP.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dino_sparo.models.encoder import Encoder, EncoderConfig
from dino_sparo.models.readout import ReadoutOutput
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import file_sha256, parse_object

FORM = (
    '{"slots": [0, 3], "num_slots": 128, "weights_sha256": "..."}, or for a CLIP {"mask": [0.1, ...], "encoding_dim": '
    '8192, "weights_sha256": "..."}; all but the first of either are optional'
)


@dataclass(frozen=True)
class SlotSelection:
    """The slots that are kept.

    Attributes:
        indices: numbers of slots, different from each other.
        num_slots: L of the model they were chosen in; None: not known.
        weights_sha256: of the checkpoint they were chosen in; None: not known.
    """

    indices: tuple[int, ...]
    num_slots: int | None = None
    weights_sha256: str | None = None

    def __post_init__(self) -> None:
        if not self.indices:
            raise UserError("slots=[] keeps no slot; give at least one")
        if len(set(self.indices)) < len(self.indices):
            twice = next(index for index in self.indices if self.indices.count(index) > 1)
            raise UserError(f"slots name slot {twice} twice; give different slots")
        if self.num_slots is not None:
            self.check_fits(self.num_slots)

    def check_fits(self, num_slots: int) -> None:
        """Refuse slots that do not exist, or that were chosen among another number of slots."""
        if self.num_slots not in (None, num_slots):
            raise UserError(f"slots were selected among num_slots={self.num_slots}, the model has {num_slots}")
        unknown = [index for index in self.indices if not 0 <= index < num_slots]
        if unknown:
            raise UserError(f"slots name slot {unknown[0]}, which does not exist: the model has num_slots={num_slots}")

    @property
    def record(self) -> dict[str, Any]:
        """The selection in the result of an evaluation."""
        return {"kind": "selection", "slots": list(self.indices)}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `parse_slots` takes them."""
        return {"slots": list(self.indices), "num_slots": self.num_slots, "weights_sha256": self.weights_sha256}


@dataclass(frozen=True)
class SlotMask:
    """Weights that multiply the parts of a CLIP's encodings of images.

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
            raise UserError(f"mask holds {wrong[0]}; give weights in [0, 1]")
        if not any(self.values):
            raise UserError(f"mask of {len(self.values)} parts has no weight above 0; nothing of an image would stay")
        if self.encoding_dim is not None:
            self.check_fits(self.encoding_dim)

    def check_fits(self, encoding_dim: int) -> None:
        """Refuse encodings of another model, or encodings that do not divide into as many equal parts."""
        if self.encoding_dim not in (None, encoding_dim):
            raise UserError(
                f"mask was learned for encodings of {self.encoding_dim} numbers, the model's have {encoding_dim}; "
                "learn one for this model"
            )
        if encoding_dim % len(self.values):
            raise UserError(
                f"mask has {len(self.values)} parts, which do not divide an encoding of {encoding_dim} numbers; "
                "give one weight per slot or per dimension"
            )

    @property
    def record(self) -> dict[str, Any]:
        """The mask in the result of an evaluation."""
        mean = math.fsum(self.values) / len(self.values)
        return {"kind": "mask", "num_parts": len(self.values), "mean_weight": mean}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `parse_slots` takes them."""
        return {"mask": list(self.values), "encoding_dim": self.encoding_dim, "weights_sha256": self.weights_sha256}


def numbers_in(text: str) -> list[str]:
    """The numbers of `0,3,7`; empty for a path."""
    numbers = text.replace(" ", "").split(",")
    return numbers if all(number.isdecimal() for number in numbers) else []


def parse_slots(text: str) -> SlotSelection | SlotMask:
    """The choice of `--slots`: numbers with commas between them, or a file."""
    if numbers := numbers_in(text):
        return SlotSelection(tuple(map(int, numbers)))
    if not Path(text).is_file():
        raise UserError(f"slots={text!r} does not exist; give a file of dino-sparo slots, or numbers such as 0,3,7")
    content = parse_object(Path(text).read_bytes(), f"slots={text!r}")
    slots, values = content.get("slots"), content.get("mask")
    try:
        if isinstance(slots, list) and all(type(index) is int for index in slots):
            return SlotSelection(tuple(slots), content.get("num_slots"), content.get("weights_sha256"))
        if isinstance(values, list) and all(type(value) in (int, float) for value in values):
            return SlotMask(tuple(map(float, values)), content.get("encoding_dim"), content.get("weights_sha256"))
    except (ValueError, TypeError) as error:
        raise UserError(f"{text}: {error}") from error
    raise UserError(f"{text} is not a choice of slots; expected {FORM}")


def open_choice(text: str, weights_sha256: str | None) -> tuple[SlotSelection | SlotMask, dict[str, Any]]:
    """The choice of `--slots`, and its entry in a result: path and hash of a file, and the choice itself.

    Raises:
        UserError: the slots were chosen in a checkpoint with another SHA-256. An unknown SHA-256 (None) is allowed.
    """
    choice = parse_slots(text)
    if None not in (weights_sha256, choice.weights_sha256) and weights_sha256 != choice.weights_sha256:
        raise UserError(
            f"the slots are of a checkpoint with SHA-256 {choice.weights_sha256}: slots of different trainings differ"
        )
    file = {} if numbers_in(text) else {"path": text, "sha256": file_sha256(Path(text))}
    return choice, {**file, **choice.record}


def open_selection(text: str, weights_sha256: str | None, num_slots: int) -> tuple[SlotSelection, dict[str, Any]]:
    """The choice of `--slots` among `num_slots` slots, as `open_choice`; a mask is refused."""
    choice, record = open_choice(text, weights_sha256)
    if isinstance(choice, SlotMask):
        raise UserError(
            f"{text} is a mask; give a file of dino-sparo slots select or slots study, or numbers of slots. Masks are "
            "for evaluations of a CLIP"
        )
    choice.check_fits(num_slots)
    return choice, record


def check_has_slots(config: EncoderConfig) -> None:
    """Refuse an encoder whose encoding does not consist of slots."""
    if not config.kind.has_slots:
        raise UserError(f"readout {config.readout!r} has no slots to choose among; take another one, such as sparo")


class KeptSlots(nn.Module):
    """A read-out reduced to some of its slots.

    Args:
        readout: tokens -> `ReadoutOutput`.
        indices: (k,), numbers of the slots that are kept.
        slot_dim: V.
    """

    kept: Tensor

    def __init__(self, readout: nn.Module, indices: tuple[int, ...], slot_dim: int) -> None:
        super().__init__()
        self.readout, self.encoding_dim = readout, len(indices) * slot_dim
        self.register_buffer("kept", torch.tensor(indices), persistent=False)

    def forward(self, tokens: Float[Tensor, "B N D"]) -> ReadoutOutput:
        """Tokens (B, N, D) -> the kept slots (B, k, V) and their attention (B, k, N)."""
        output = self.readout(tokens)
        return ReadoutOutput(slots=output.slots[:, self.kept], attention=output.attention[:, self.kept])


def keep_encoder_slots(encoder: Encoder, slots: str, weights_sha256: str | None) -> tuple[Encoder, dict[str, Any]]:
    """The encoder reduced to the slots of `--slots`, with shared weights; and the entry of a result."""
    check_has_slots(encoder.config)
    selection, record = open_selection(slots, weights_sha256, encoder.config.num_slots)
    readout = KeptSlots(encoder.readout, selection.indices, encoder.config.slot_dim)
    return Encoder(encoder.backbone, readout, encoder.config).eval(), record

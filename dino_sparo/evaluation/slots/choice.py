"""Some of an encoder's slots, chosen by number or by a file -> the same encoder with these slots alone.

    python eval_knn.py --pretrained_weights output/checkpoint.pth --data_path data/imagenet --slots 0,3,7
    python eval_knn.py --pretrained_weights output/checkpoint.pth --data_path data/imagenet --slots slot_study.json

`study.py` chooses slots of an encoder of images, `dino-sparo select` those of a CLIP; both write the same form of
file, which every evaluation takes as --slots.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from dino_sparo.evaluation.load import Subject
from dino_sparo.models.encoder import Encoder, EncoderConfig
from dino_sparo.models.readout import ReadoutOutput
from dino_sparo.runtime.files import parse_json
from dino_sparo.runtime.records import file_sha256

MAKERS = "dino-sparo slot-study or dino-sparo select"
FORM = '{"slots": [0, 3], "num_slots": 64, "weights_sha256": "..."}, all but the first optional'


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
            raise ValueError("slots=[] keeps no slot; give at least one")
        if len(set(self.indices)) < len(self.indices):
            twice = next(index for index in self.indices if self.indices.count(index) > 1)
            raise ValueError(f"slots name slot {twice} twice; give different slots")
        if self.num_slots is not None:
            self.check_slots(self.num_slots)

    def check_slots(self, num_slots: int) -> None:
        """Refuse slots that a model of `num_slots` does not have."""
        unknown = [index for index in self.indices if not 0 <= index < num_slots]
        if unknown:
            raise ValueError(
                f"slots name slot {unknown[0]}, which does not exist: the model has num_slots={num_slots}, numbered 0 "
                f"to {num_slots - 1}"
            )

    def check_fits(self, num_slots: int) -> None:
        """Refuse slots that were chosen among another number of them, or do not exist."""
        if self.num_slots not in (None, num_slots):
            raise ValueError(
                f"slots were selected among num_slots={self.num_slots}, the model has {num_slots}; select among its own"
            )
        self.check_slots(num_slots)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `selection_in` takes them."""
        return {"slots": list(self.indices), "num_slots": self.num_slots, "weights_sha256": self.weights_sha256}


def selection_in(content: dict[str, Any]) -> SlotSelection | None:
    """The selection that a file holds; None: it holds none."""
    chosen = content.get("slots")
    if not isinstance(chosen, list) or not all(type(index) is int for index in chosen):
        return None
    return SlotSelection(tuple(chosen), content.get("num_slots"), content.get("weights_sha256"))


def read_choice(path: str | Path, makers: str = MAKERS) -> dict[str, Any]:
    """The content of a file that holds a choice of slots; empty if it is no JSON object.

    `makers` are the commands that write such files, for the message.
    """
    if not Path(path).is_file():
        raise ValueError(f"slots={str(path)!r} does not exist; give a file of {makers}")
    try:
        content = parse_json(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"slots={str(path)!r} is no JSON ({error})") from error
    return content if isinstance(content, dict) else {}


def check_same_checkpoint(chosen_in: str | None, weights_sha256: str | None) -> None:
    """Refuse slots that were chosen in a checkpoint with another SHA-256; None is not compared.

    Args:
        chosen_in: SHA-256 of the checkpoint in which they were chosen.
        weights_sha256: of the one that is subject.
    """
    if None not in (weights_sha256, chosen_in) and weights_sha256 != chosen_in:
        raise ValueError(
            f"the slots were chosen in a checkpoint with SHA-256 {chosen_in}, this one has {weights_sha256}; slots of "
            f"different trainings have nothing in common. To apply them nevertheless, remove weights_sha256 from the "
            f"file"
        )


def parse_numbers(text: str) -> SlotSelection | None:
    """The slots of `0,3,7`; None: these are no numbers with commas between them."""
    numbers = text.replace(" ", "").split(",")
    return SlotSelection(tuple(map(int, numbers))) if all(number.isdecimal() for number in numbers) else None


def parse_slots(text: str) -> SlotSelection:
    """The selection that `--slots` gives: numbers with commas between them, or a file."""
    if (numbers := parse_numbers(text)) is not None:
        return numbers
    content = read_choice(text, f"{MAKERS}, or numbers such as 0,3,7")
    try:
        selection = selection_in(content)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{text}: {error}") from error
    if selection is None:
        hint = "masks weigh the encodings of a CLIP; " if "mask" in content else ""
        raise ValueError(f"{text} is no selection of slots; {hint}expected {FORM}")
    return selection


def origin_of(slots: str) -> dict[str, str]:
    """Path and hash of the file that `--slots` names, for a result; empty for numbers."""
    if parse_numbers(slots) is not None:
        return {}
    return {"path": slots, "sha256": file_sha256(Path(slots))}


def check_has_slots(config: EncoderConfig) -> None:
    """Refuse an encoder whose encoding does not consist of slots."""
    if not config.kind.has_slots:
        raise ValueError(
            f"readout {config.readout!r} has no slots to choose among; that takes an encoder whose read-out has slots, "
            f"such as sparo"
        )


def keep_slots(output: ReadoutOutput, kept: Int64[Tensor, " k"]) -> ReadoutOutput:
    """The slots (B, k, V) of the numbers `kept`, and their attention (B, k, N)."""
    return ReadoutOutput(slots=output.slots[:, kept], attention=output.attention[:, kept])


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
        return keep_slots(self.readout(tokens), self.kept)


def with_slots(subject: Subject, slots: str | None) -> Subject:
    """The encoder reduced to the slots that `--slots` names, so that every evaluation sees these alone.

    Args:
        subject: an encoder with all its slots.
        slots: of `parse_slots`; None or empty: all of them.

    Returns:
        An encoder that shares the weights; its record says which slots were kept.
    """
    if not slots:
        return subject
    encoder, selection = subject.encoder, parse_slots(slots)
    check_has_slots(encoder.config)
    selection.check_fits(encoder.config.num_slots)
    check_same_checkpoint(selection.weights_sha256, subject.record["sha256"])
    origin = origin_of(slots)
    readout = KeptSlots(encoder.readout, selection.indices, encoder.config.slot_dim)
    return replace(
        subject,
        encoder=Encoder(encoder.backbone, readout, encoder.config).eval(),
        record={**subject.record, "slots": {**origin, "kind": "selection", "slots": list(selection.indices)}},
    )

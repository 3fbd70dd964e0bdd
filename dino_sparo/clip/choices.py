"""Choices and defaults of CLIP's options as plain values, without torch, so that `--help` is fast.

`TOWERS` names what can be chosen. One name stands for both towers, because an image has no end token and a caption no
class token.
"""

from dataclasses import dataclass
from typing import NamedTuple

from dino_sparo.runtime.choices import CROSS_ATTENTION

PER_SLOT, PER_DIMENSION = "slot", "dimension"  # parts of an encoding that a mask weighs
MASK_SCALES = ("min", "max")  # bounds of the mask's inverse temperature
PRODUCTS = ("fp32", "tf32", "bf16")  # precisions of the products of all images with all captions


class Towers(NamedTuple):
    """The read-outs of both towers, keys of `readout_table.READOUTS`.

    Attributes:
        image: the image tower's.
        text: the text tower's.
        has_bottleneck: the encoding passes a linear bottleneck.
    """

    image: str
    text: str
    has_bottleneck: bool = False


# The paper's CLIP+GAP is `gap_image`: in the authors' code only images are averaged, captions keep the end token.
# A read-out with slots that is not named here serves both towers under its own name; see `config.towers_of`.
TOWERS: dict[str, Towers] = {
    "cls": Towers("cls", "eos"),
    "gap": Towers("gap_then_norm", "gap_then_norm"),
    "gap_image": Towers("gap_then_norm", "eos"),
    "sparo": Towers("sparo", "sparo"),
    "linear": Towers("cls", "eos", has_bottleneck=True),
    "fdt": Towers("fdt_raw", "fdt_raw"),
    **{name: Towers(name, name) for name in CROSS_ATTENTION},
}

# What the same names meant at first, and mean in checkpoints of then: the last LayerNorm of either tower precedes the
# read-out, and `fdt` leaves padding out. The configuration of a checkpoint says which of both it has.
NORM_FIRST: dict[str, Towers] = {
    "gap": Towers("gap", "gap"),
    "gap_image": Towers("gap", "eos"),
    "fdt": Towers("fdt", "fdt"),
}

# What `CLIP.freeze` takes: names begin with one of the first, and with none of the second.
FREEZABLE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "image": (("image.", "image_proj."), ()),
    "image_backbone": (("image.",), ("image.readout.",)),
    "text": (("text.", "text_proj."), ()),
    "text_backbone": (("text.",), ("text.readout.",)),
}


def check_bound(bound: str) -> None:
    """Refuse a bound that is not in `MASK_SCALES`.

    Raises:
        ValueError: names those that are.
    """
    if bound not in MASK_SCALES:
        raise ValueError(
            f"mask_scale={bound!r}; choose min, for min(100, exp(alpha)) as in CLIP, or max, which SPARO's 0.C.1 prints"
        )


@dataclass(frozen=True)
class FitSettings:
    """How a mask is learned: by SGD, without weight decay.

    Attributes:
        epochs: passes over the pairs.
        lr: learning rate, constant.
        momentum: of SGD.
        batch_size: pairs per step.
        seed: of the order of the pairs.
        bound: of the scale, a member of `MASK_SCALES`; see `mask_fit.Mask`.

    Raises:
        ValueError: a number is out of range, or the bound is unknown.
    """

    epochs: int = 100
    lr: float = 0.02
    momentum: float = 0.9
    batch_size: int = 256
    seed: int = 0
    bound: str = "min"

    def __post_init__(self) -> None:
        check_bound(self.bound)
        if self.epochs < 1 or self.batch_size < 1:
            raise ValueError(f"epochs={self.epochs}, mask_batch_size={self.batch_size}; give positive numbers")
        if not (self.lr > 0 and 0 <= self.momentum < 1):
            raise ValueError(f"lr={self.lr}, momentum={self.momentum}; give lr > 0 and a momentum in [0, 1)")


class Criteria(NamedTuple):
    """When a slot of a pair is worth a look.

    Attributes:
        min_cosine: the cosine of image and caption slot is greater. (The paper's 0.75.)
        min_sharpness: one word gets at least this share of the slot's attention. (The paper's "sharp"; the number is
            ours.)
    """

    min_cosine: float = 0.75
    min_sharpness: float = 0.5

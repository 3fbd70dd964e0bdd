"""How a CLIP model is built: the two towers, their common read-out, the width of the encoding.

Every checkpoint holds the configuration, so that no command needs these options again.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from dino_sparo.clip.options import NORM_FIRST, TOWERS, Towers
from dino_sparo.image_text.towers import TextConfig
from dino_sparo.models.encoder import EncoderConfig, refuse_unknown
from dino_sparo.models.readouts import READOUTS
from dino_sparo.runtime.faults import UserError
from dino_sparo.weights.file import CheckpointError
from dino_sparo.weights.foreign import ENDS, infer_config

HEAD_WIDTH = 64  # of all of open_clip's text encoders
SLOT_SIZES = ("num_slots", "slot_dim", "key_dim", "group_size")


@dataclass(frozen=True)
class CLIPConfig:
    """How a CLIP model is built.

    Attributes:
        image: the image encoder; its `readout` is the image side of `TOWERS[readout]`, or of `NORM_FIRST[readout]`.
            What stands below for both towers is copied into it, so that it describes its encoder without the rest.
        text: the text encoder; its `readout` is the text side.
        readout: a key of `options.TOWERS`, one name for both towers.
        embed_dim: M, width of the encoding: that of the projections, L*V for a slotted read-out, of the codes for
            `fdt`.
        bottleneck_dim: m, for `linear`.
        num_codes: number of codes, for `fdt`.
        replace_block: the read-out takes the place of each tower's last block.
        quick_gelu: x sigmoid(1.702 x) instead of GELU, as OpenAI's weights want it.

    Raises:
        ValueError: no block of the text encoder is left before the read-out.
    """

    image: EncoderConfig
    text: TextConfig
    readout: str
    embed_dim: int
    bottleneck_dim: int = 512
    num_codes: int = 16384
    replace_block: bool = False
    quick_gelu: bool = False

    def __post_init__(self) -> None:
        if self.text.layers - self.replace_block < 1:
            raise UserError(f"text layers={self.text.layers} leave no block before the read-out in place of the last")
        codes = (self.num_codes, self.embed_dim) if self.image.kind.needs_codes else (0, 0)
        shared: dict[str, Any] = {"replace_block": self.replace_block, "quick_gelu": self.quick_gelu}
        object.__setattr__(self, "image", replace(self.image, **shared, num_codes=codes[0], code_dim=codes[1]))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "CLIPConfig":
        """The configuration in a checkpoint's entry, which also holds the mean and std of its images.

        Raises:
            ValueError: it says something that this version does not know.
        """
        fields = {name: value for name, value in values.items() if name not in ("mean", "std", "image", "text")}
        refuse_unknown("model", cls, fields)
        refuse_unknown("text encoder", TextConfig, values["text"])
        return cls(image=EncoderConfig.from_dict(values["image"]), text=TextConfig(**values["text"]), **fields)

    @property
    def summary(self) -> str:
        """One line for the log: both towers and the read-out, with the sizes that this read-out has."""
        image, text = self.image, self.text
        slots = f"{image.num_slots} slots of {image.slot_dim}"
        return (
            f"{image.arch}/{image.patch_size} at {image.img_size} px, text of {text.layers} layers {text.width} wide, "
            f"{self.readout} ({slots if image.kind.has_slots else f'{self.embed_dim} numbers'})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for checkpoints and JSON."""
        return asdict(self)


def towers_of(readout: str, norm_first: bool = False) -> Towers:
    """The read-outs of both towers by one name.

    Args:
        readout: a key of `options.TOWERS`, or a read-out with slots, which serves both towers.
        norm_first: as in `model.create_clip`.

    Raises:
        ValueError: lists the names that are known.
    """
    if norm_first and readout in NORM_FIRST:
        return NORM_FIRST[readout]
    slotted = {name: Towers(name, name) for name, kind in READOUTS.items() if kind.has_slots}
    towers = TOWERS | slotted
    if readout not in towers:
        names = [name for name in TOWERS if TOWERS[name].image == readout]
        hint = f"; for images, --readout {names[0]} is {readout}" if names else ""
        raise UserError(f"unknown readout {readout!r}; choose one of {sorted(towers)}{hint}")
    return towers[readout]


def infer_clip_config(
    weights: Mapping[str, Tensor], text_heads: int | None = None, quick_gelu: bool = False
) -> CLIPConfig:
    """How a CLIP of open_clip or sparo-clip is built, from the shapes of its weights under our names.

    Of sparo-clip SPARO (with `sparo_type` "cont:const", which weights do not tell) and the linear bottleneck are known.

    Args:
        weights: of both towers.
        text_heads: by default the text's heads are 64 wide, as in all of open_clip's models.
        quick_gelu: OpenAI's activation, of which weights say nothing.

    Raises:
        CheckpointError: an architecture that is not known, or a text encoder whose heads cannot be told.
    """
    readout = next(name for name, names in ENDS.items() if next(iter(names)) in weights)
    image = infer_config({name.removeprefix("image."): value for name, value in weights.items()})
    context_length, width = weights["text.pos_embed"].shape
    if text_heads is None:
        if width % HEAD_WIDTH:
            raise CheckpointError(
                f"the text encoder is {width} wide, not a multiple of {HEAD_WIDTH}, so its number of "
                "heads is unknown; give text_heads"
            )
        text_heads = width // HEAD_WIDTH
    slots = {name: getattr(image, name) for name in SLOT_SIZES}
    depth = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("text.blocks."))
    text = TextConfig(
        context_length=context_length,
        vocab_size=len(weights["text.token_embed.weight"]),
        width=width,
        heads=text_heads,
        layers=depth + image.replaces_block,
        readout=towers_of(readout).text,
        **(slots if image.kind.has_slots else {}),
    )
    last = {"cls": "text_proj.weight", "linear": "text_proj.1.weight"}.get(readout)
    return CLIPConfig(
        image=replace(image, pre_norm=True),
        text=text,
        readout=readout,
        embed_dim=len(weights[last]) if last else image.num_slots * image.slot_dim,
        bottleneck_dim=len(weights["text_proj.0.weight"]) if "text_proj.0.weight" in weights else 512,
        replace_block=image.replaces_block,
        quick_gelu=quick_gelu,
    )

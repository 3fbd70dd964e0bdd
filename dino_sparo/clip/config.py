"""How a CLIP model is built: the two towers, their common read-out, the width of the encoding.

Every checkpoint holds the configuration, so that no command needs these options again.
"""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from dino_sparo.clip.options import NORM_FIRST, TOWERS, Towers
from dino_sparo.image_text.text import TextConfig
from dino_sparo.image_text.towers import TowerSizes
from dino_sparo.models.encoder import EncoderConfig, refuse_unknown
from dino_sparo.models.readouts import READOUTS, readout_kind
from dino_sparo.runtime.choices import KEY_DIM, NUM_SLOTS, SLOT_DIM


@dataclass(frozen=True)
class CLIPConfig:
    """How a CLIP model is built.

    Attributes:
        image: the image encoder; its `readout` is the image side of `TOWERS[readout]`, or of `NORM_FIRST[readout]`.
            What stands below for both towers is copied into it, so that it describes its encoder without the rest.
        text: the text encoder; its `readout` is the text side.
        readout: a key of `choices.TOWERS`, one name for both towers.
        embed_dim: M, width of the encoding: that of the projections, L*V for a slotted read-out, of the codes for
            `fdt`.
        bottleneck_dim: m, for `linear`.
        num_codes: number of codes, for `fdt`.
        replace_block: the read-out takes the place of each tower's last block.
        quick_gelu: x sigmoid(1.702 x) instead of GELU, as OpenAI's weights want it.

    Raises:
        ValueError: the parts do not fit each other.
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
        asked, towers = towers_of(self.readout), (self.image.readout, self.text.readout)
        if towers not in (asked[:2], NORM_FIRST.get(self.readout, asked)[:2]):
            raise ValueError(
                f"readout {self.readout!r} is {asked[:2]} in image and text tower; these are built with {towers}"
            )
        for name in ("embed_dim", "bottleneck_dim", "num_codes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not a size; give a positive integer")
        if self.text.layers - self.replace_block < 1:
            raise ValueError(
                f"text layers={self.text.layers} leave no block beside the read-out that replaces the last"
            )
        if self.image.kind.has_slots:
            self._check_slots()
        codes = (self.num_codes, self.embed_dim) if self.image.kind.needs_codes else (0, 0)
        image = replace(
            self.image,
            replace_block=self.replace_block,
            quick_gelu=self.quick_gelu,
            num_codes=codes[0],
            code_dim=codes[1],
        )
        object.__setattr__(self, "image", image)

    def _check_slots(self) -> None:
        for letter, name in (("L", "num_slots"), ("V", "slot_dim")):
            image, text = getattr(self.image, name), getattr(self.text, name)
            if image != text:
                raise ValueError(
                    f"{name}={image} in the image tower and {text} in the text tower: slot l of an image is compared "
                    f"with slot l of a caption, so give both the same {letter}"
                )
        if self.embed_dim != self.image.num_slots * self.image.slot_dim:
            raise ValueError(
                f"embed_dim={self.embed_dim} with readout {self.readout!r}, whose encoding has num_slots * slot_dim = "
                f"{self.image.num_slots * self.image.slot_dim} numbers"
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "CLIPConfig":
        """The configuration a checkpoint carries, beside the mean and std of its images.

        Raises:
            ValueError: it says something that this version does not know.
        """
        own = {name: value for name, value in values.items() if name not in ("mean", "std", "image", "text")}
        text = dict(values["text"])
        unknown = own.keys() - {field.name for field in fields(cls)}
        unknown |= {f"text.{name}" for name in text.keys() - {field.name for field in fields(TextConfig)}}
        refuse_unknown("model", unknown)
        return cls(image=EncoderConfig.from_dict(values["image"]), text=TextConfig(**text), **own)

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


@dataclass(frozen=True)
class CLIPSizes(TowerSizes):
    """Sizes of a CLIP, flat: by the names that options and `model.create_clip` have for it.

    Attributes:
        readout: a key of `choices.TOWERS`, or another read-out with slots.
        num_slots: L, of a slotted read-out.
        slot_dim: V, as `num_slots`.
        key_dim: A, as `num_slots`.
        group_size: G, slots that share a key, for `sparo`.
        embed_dim: M, width of the encoding; a slotted read-out's is L*V, whatever is given here.
        bottleneck_dim: m, for `linear`.
        num_codes: number of codes, for `fdt`.
        replace_block: remove the last block of both towers; by default as the read-out declares (`sparo` does).
        norm_first: `gap`, `gap_image` and `fdt` read tokens that passed the tower's last LayerNorm, as in checkpoints
            of earlier versions; False is the authors' code, where gap normalises the average, and fdt nothing.
    """

    readout: str = "sparo"
    num_slots: int = NUM_SLOTS
    slot_dim: int = SLOT_DIM
    key_dim: int = KEY_DIM
    group_size: int = 1
    embed_dim: int = 512
    bottleneck_dim: int = 512
    num_codes: int = 16384
    replace_block: bool | None = None
    norm_first: bool = False

    @property
    def config(self) -> CLIPConfig:
        """The configuration; ValueError if the read-out is not known or a size does not fit."""
        towers = towers_of(self.readout, self.norm_first)
        kind = readout_kind(towers.image)
        image, text = self.configs(
            towers.image,
            towers.text,
            num_slots=self.num_slots,
            slot_dim=self.slot_dim,
            key_dim=self.key_dim,
            group_size=self.group_size,
        )
        return CLIPConfig(
            image,
            text,
            self.readout,
            self.num_slots * self.slot_dim if kind.has_slots else self.embed_dim,
            self.bottleneck_dim,
            self.num_codes,
            kind.replaces_block if self.replace_block is None else self.replace_block,
            self.quick_gelu,
        )


def towers_of(readout: str, norm_first: bool = False) -> Towers:
    """The read-outs of both towers by one name.

    Args:
        readout: a key of `choices.TOWERS`, or a read-out with slots, which serves both towers.
        norm_first: as in `CLIPSizes`.

    Raises:
        ValueError: lists the names that are known.
    """
    if norm_first and readout in NORM_FIRST:
        return NORM_FIRST[readout]
    slotted = {name: Towers(name, name) for name, kind in READOUTS.items() if kind.has_slots}
    towers = TOWERS | slotted
    if readout not in towers:
        raise ValueError(f"unknown readout {readout!r}; choose one of {sorted(towers)}")
    return towers[readout]

"""How an OC-CLIP model is built: two towers, the binding module, the scoring module.

Every checkpoint holds the configuration, so that no command needs these options again.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

from dino_sparo.image_text.text import TextConfig
from dino_sparo.models.encoder import EncoderConfig, refuse_unknown

MIN_COEF = 1e-3  # of entities and of relations in a score


@dataclass(frozen=True)
class BindingConfig:
    """Sizes of the modules between the towers and the scores; the paper's by default (OC-CLIP, table 11).

    Attributes:
        dim: d, width of entities, keys, values and slots.
        num_default: N_d, number of default tokens.
        num_layers: self-attention blocks on the patches.
        num_heads: of these blocks.
        position_std: standard deviation of the patches' positions at the start; the listing's by default.
        competition: a member of `COMPETITIONS`: what the softmax of the binding runs over.
        rel_dim: d_r, width of relations.
        relation: how a relation is scored, a member of `RELATION_SCORES`.
        ent_coef: alpha at the start.
        rel_coef: beta at the start.
        logit_scale: scores are multiplied by a learned inverse temperature; False is the paper's letter.

    Raises:
        ValueError: the heads do not divide `dim`, or default tokens where nothing competes with them.
    """

    dim: int = 256
    num_default: int = 4
    num_layers: int = 2
    num_heads: int = 4
    position_std: float = 1.0
    competition: str = "queries"
    rel_dim: int = 128
    relation: str = "additive"
    ent_coef: float = 1.5
    rel_coef: float = 0.5
    logit_scale: bool = True

    def __post_init__(self) -> None:
        if self.dim % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads} does not divide dim={self.dim}; choose a divisor")
        if self.competition == "keys" and self.num_default:
            raise ValueError(
                f"num_default={self.num_default} with competition='keys': default tokens change nothing where entities "
                "do not compete; give num_default=0"
            )


@dataclass(frozen=True)
class OCCLIPConfig:
    """How an OC-CLIP model is built.

    Attributes:
        image: the image encoder; its patch tokens are bound; its read-out is that of evaluations of the encoder alone.
        text: the text encoder; it reads phrases.
        binding: the rest.
    """

    image: EncoderConfig
    text: TextConfig
    binding: BindingConfig = BindingConfig()

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "OCCLIPConfig":
        """The configuration a checkpoint carries, beside the mean and std of its images.

        Raises:
            ValueError: it says something that this version does not know.
        """
        text, binding = values["text"], values["binding"]
        unknown = {f"text.{name}" for name in text.keys() - {field.name for field in fields(TextConfig)}}
        unknown |= {f"binding.{name}" for name in binding.keys() - {field.name for field in fields(BindingConfig)}}
        unknown |= values.keys() - {"image", "text", "binding", "mean", "std", "graphs"}
        refuse_unknown("model", unknown)
        return cls(EncoderConfig.from_dict(values["image"]), TextConfig(**text), BindingConfig(**binding))

    @property
    def quick_gelu(self) -> bool:
        """OpenAI's activation, in both encoders."""
        return self.image.quick_gelu

    @property
    def num_patches(self) -> int:
        """N."""
        return (self.image.img_size // self.image.patch_size) ** 2

    @property
    def summary(self) -> str:
        """One line for the log."""
        image, text, binding = self.image, self.text, self.binding
        return (
            f"{image.arch}/{image.patch_size} at {image.img_size} px, text of {text.layers} layers {text.width} wide, "
            f"binding {binding.dim} wide with {binding.num_default} default tokens"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for checkpoints and JSON."""
        return asdict(self)

"""The OC-CLIP model: image and text encoder, binding, scoring.

images -> patches -> keys, values                 once per image
phrases -> embeddings -> entities, relations      once per phrase, whether it is an entity or a predicate
keys, values, entities, relations -> scores       `scoring.score_all_pairs`, of all pairs
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from dino_sparo.image_text.step import INITIAL_LOGIT_SCALE
from dino_sparo.image_text.towers import TextConfig, TextEncoder, tower_configs
from dino_sparo.models.backbone import default_patch_size
from dino_sparo.models.encoder import Encoder, EncoderConfig, encoder_from_config, refuse_unknown
from dino_sparo.models.readout import EndTokenReadout
from dino_sparo.oc_clip.binding import Binding, BindingConfig
from dino_sparo.oc_clip.options import TEXT_SIZES
from dino_sparo.oc_clip.scoring import Scoring


@dataclass(frozen=True)
class OCCLIPConfig:
    """How an OC-CLIP model is built; every checkpoint holds this configuration, so other commands do not ask for it.

    Attributes:
        image: the image encoder; its patch tokens are bound; its read-out is that of evaluations of the encoder alone.
        text: the text encoder; it reads phrases.
        binding: the rest.
    """

    image: EncoderConfig
    text: TextConfig
    binding: BindingConfig = field(default_factory=BindingConfig)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "OCCLIPConfig":
        """The configuration in a checkpoint's entry, which also holds the mean and std of its images.

        Raises:
            ValueError: it says something that this version does not know.
        """
        text, binding = values["text"], values["binding"]
        refuse_unknown("model", cls, values.keys() - {"mean", "std", "graphs"})
        refuse_unknown("text encoder", TextConfig, text)
        refuse_unknown("binding", BindingConfig, binding)
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


class OCCLIP(nn.Module):
    """Image encoder, text encoder, and the modules that bind the phrases of a graph to the patches of an image.

        x_1 ... x_N = patch tokens of the last layer after its LayerNorm, without the class token
        e           = the text encoder's token at a phrase's end; each phrase and each predicate alone is encoded
        entity      = W_N e + b,  relation = W_r e + b

    Source: OC-CLIP, section 3 and table 11.

    Attributes:
        binding: patches and entities -> slots.
        scoring: slots, entities, relations -> scores.
        logit_scale: (), logarithm of the inverse temperature; None without temperature.
    """

    def __init__(self, image: Encoder, text: TextEncoder, config: OCCLIPConfig) -> None:
        super().__init__()
        sizes = config.binding
        self.image, self.text, self.config = image, text, config
        self.node_proj = nn.Linear(config.text.width, sizes.dim)
        self.relation_proj = nn.Linear(config.text.width, sizes.rel_dim)
        self.binding = Binding(image.backbone.embed_dim, config.num_patches, sizes)
        self.scoring = Scoring(sizes)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(INITIAL_LOGIT_SCALE))) if sizes.logit_scale else None

    def forward(
        self, images: Float[Tensor, "B C H W"], token_ids: Int64[Tensor, "phrases length"]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`encode_images` of the images and `encode_phrases` of the phrases."""
        return *self.encode_images(images), *self.encode_phrases(token_ids)

    def encode_images(
        self, images: Float[Tensor, "B C H W"]
    ) -> tuple[Float[Tensor, "B N dim"], Float[Tensor, "B N dim"]]:
        """Images -> keys and values (B, N, dim), normalised, not yet projected."""
        return self.binding.encode_patches(self.patches(images))

    def patches(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B N D"]:
        """The patch tokens of images."""
        return self.image.backbone(images)[:, self.image.backbone.num_prefix_tokens :]

    def encode_phrases(
        self, token_ids: Int64[Tensor, "phrases length"]
    ) -> tuple[Float[Tensor, "phrases dim"], Float[Tensor, "phrases rel_dim"]]:
        """Token ids of phrases -> each as an entity and as a relation."""
        embeddings = self.encode_text(token_ids)
        return self.node_proj(embeddings), self.relation_proj(embeddings)

    def encode_text(self, token_ids: Int64[Tensor, "phrases length"]) -> Float[Tensor, "phrases D"]:
        """Token ids of phrases -> the text encoder's token at each phrase's end."""
        return self.text.readout_output(token_ids).slots[:, 0]


def create_oc_clip(
    arch: str = "vit_base",
    patch_size: int | None = None,
    img_size: int = 224,
    binding: BindingConfig | None = None,
    **sizes: Any,
) -> OCCLIP:
    """Build an OC-CLIP model with random weights.

    Both encoders start as OpenCLIP's do; without `pre_norm` the image encoder starts as DINO's.

    Args:
        arch: a key of `ARCHITECTURES`, or `timm/NAME`.
        patch_size: P, pixels; None: 16, or the timm model's own.
        img_size: side of the images in pixels; the binding is built for their number of patches.
        binding: sizes of binding and scoring; by default the paper's.
        sizes: further arguments of `towers.tower_configs`. The text encoder's are by default the paper's for CC12M
            (OC-CLIP, appendix A.8), whose images have patches of 16 pixels: `options.TEXT_SIZES`.
    """
    patch_size = default_patch_size(arch) if patch_size is None else patch_size
    # The losses do not train the class token: evaluations of the image encoder read the mean of the patch tokens.
    towers = tower_configs(("gap", "eos"), arch, patch_size, img_size=img_size, **{**TEXT_SIZES, **sizes})
    return oc_clip_from_config(OCCLIPConfig(*towers, binding or BindingConfig()))


def oc_clip_from_config(config: OCCLIPConfig) -> OCCLIP:
    """The model of a configuration, with random weights."""
    text = TextEncoder(config.text, EndTokenReadout(), quick_gelu=config.quick_gelu)
    return OCCLIP(encoder_from_config(config.image), text, config)

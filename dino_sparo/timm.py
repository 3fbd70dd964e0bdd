"""SPARO encoders as models of timm.

    import dino_sparo.timm, timm

    model = timm.create_model("sparo_vit_small_patch16", checkpoint_path="runs/vits16/checkpoint.pth", num_classes=0)

Keywords of `timm.create_model` may be fields of `EncoderConfig`: `readout`, `num_slots`, `img_size`, ... As in timm,
`num_features` is the width D of the tokens, and `head_hidden_size` the width L*V of the encoding. The checkpoint is
that of a training (of DINO the teacher, of CLIP the image tower) or an export.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from dino_sparo.models.encoder import Encoder, EncoderConfig, encoder_from_config
from dino_sparo.weights.entries import network_weights


class SparoVisionTransformer(Encoder):
    """An encoder with a linear classifier and timm's names.

    Args:
        num_classes: outputs of the classifier; 0: the encoding.
        drop_path_rate: stochastic depth rate.
        global_pool: ignored; the read-out pools.
        settings: fields of `EncoderConfig`.
    """

    def __init__(
        self, num_classes: int = 0, drop_path_rate: float = 0.0, global_pool: str = "", **settings: Any
    ) -> None:
        encoder = encoder_from_config(EncoderConfig(**settings), drop_path_rate)
        super().__init__(encoder.backbone, encoder.readout, encoder.config)
        self.num_features = self.embed_dim = self.backbone.embed_dim
        self.head_hidden_size = self.encoding_dim
        self.reset_classifier(num_classes)

    def get_classifier(self) -> nn.Module:
        """The linear classifier; an identity without classes."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a new one; 0 classes: by none."""
        self.num_classes = num_classes
        self.head = nn.Linear(self.encoding_dim, num_classes) if num_classes else nn.Identity()

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, C, H, W) -> tokens (B, N, D), class token and registers first."""
        return self.backbone(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens (B, N, D) -> logits (B, classes), or with `pre_logits` the encoding (B, L*V)."""
        encoding = self.readout(x).slots.flatten(1)
        return encoding if pre_logits else self.head(encoding)

    def forward(self, x: Any) -> Tensor:
        """Images (B, C, H, W) -> logits (B, classes); without classes the encoding (B, L*V)."""
        return self.forward_head(self.forward_features(x))

    def get_intermediate_layers(
        self,
        images: Tensor,
        n: int | Sequence[int] = 1,
        norm: bool = False,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
    ) -> tuple[Any, ...]:
        """`Encoder.get_intermediate_layers`; as in timm without the final LayerNorm, unless `norm` asks for it."""
        return super().get_intermediate_layers(images, n, norm, reshape, return_prefix_tokens)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the blocks in the backward pass."""
        self.backbone.set_grad_checkpointing(enable)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load this model's own weights, or those of a checkpoint or an export, as `checkpoint_path` holds them.

        The head of a training, which is not a classifier, is left out.
        """
        if set(self.state_dict()) == set(state_dict):
            return super().load_state_dict(state_dict, strict, assign)
        names = {name: value for name, value in state_dict.items() if not name.startswith("text.")}
        prefix = next(
            (p for p in ("image.", "encoder.") if any(name.startswith(f"{p}backbone.") for name in names)), ""
        )
        content = {name.removeprefix(prefix): value for name, value in names.items() if name.startswith(prefix)}
        weights = network_weights(content, "teacher", "the checkpoint")
        weights = {name: value for name, value in weights.items() if not name.startswith("head.")}
        return super().load_state_dict({**weights, **self.head.state_dict(prefix="head.")}, strict, assign)


default_cfgs = generate_default_cfgs(
    {
        f"sparo_vit_{size}": {
            "num_classes": 0,
            "input_size": (3, 224, 224),
            "crop_pct": 224 / 256,
            "interpolation": "bicubic",
            "mean": IMAGENET_DEFAULT_MEAN,
            "std": IMAGENET_DEFAULT_STD,
            "first_conv": "backbone.patch_embed.proj",
            "classifier": "head",
        }
        for size in ("tiny_patch16", "small_patch16", "small_patch8", "base_patch16")
    }
)


def _entry(name: str) -> Callable[..., SparoVisionTransformer]:
    """The function that builds the model of this name; the name says architecture and patch size."""
    arch, _, patch_size = name.removeprefix("sparo_").partition("_patch")

    def create(pretrained: bool = False, **options: Any) -> SparoVisionTransformer:
        settings = {"arch": arch, "patch_size": int(patch_size), **options}
        return build_model_with_cfg(SparoVisionTransformer, name, pretrained, **settings)

    create.__name__ = name  # by which timm registers it
    return create


for _name in default_cfgs:
    globals()[_name] = register_model(_entry(_name))

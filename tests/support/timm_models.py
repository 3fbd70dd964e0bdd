"""Backbones of timm in tiny form, one per family, registered with timm under names of their own.

Each is timm's own builder of a well-known model, called with small sizes, so that registers, rotary positions, SwiGLU
and LayerScale are those of the family.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import timm
from timm.models import register_model
from torch import nn

VIT = {"patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 2}
MAPS = {"patch_size": 32, "has_blocks": False}


@dataclass(frozen=True)
class Family:
    """A tiny model and what is known about its tokens.

    Attributes:
        name: the tiny model's name in timm.
        original: timm's model that it is a small form of.
        settings: arguments of the original that make it small.
        num_prefix_tokens: class token and registers.
        has_class_token: the first token is a class token.
        patch_size: pixels between two tokens.
        has_blocks: it has transformer blocks; otherwise stages.
    """

    name: str
    original: str
    settings: dict[str, Any] = field(repr=False, hash=False)
    num_prefix_tokens: int = 0
    has_class_token: bool = False
    patch_size: int = 8
    has_blocks: bool = True

    @property
    def arch(self) -> str:
        """The value of `--arch`."""
        return f"timm/{self.name}"

    @property
    def side(self) -> int:
        """Pixels of an image of sixteen patches, or of four positions of a map."""
        return 32 if self.has_blocks else 64

    def build(self, **settings: Any) -> nn.Module:
        """timm's own model, without classifier."""
        return timm.create_model(self.name, num_classes=0, **settings)


FAMILIES = {
    family.name: family
    for family in (
        Family("tiny_registers", "vit_small_patch16_224", {**VIT, "reg_tokens": 3}, 4, True),
        Family("tiny_dinov2", "vit_small_patch14_dinov2", {**VIT, "init_values": 0.1}, 1, True),
        Family("tiny_dinov2_registers", "vit_small_patch14_reg4_dinov2", {**VIT, "init_values": 0.1}, 5, True),
        Family("tiny_dinov3", "vit_small_patch16_dinov3", {**VIT, "init_values": 0.1}, 5, True),
        Family("tiny_eva", "eva02_tiny_patch14_224", VIT, 1, True),
        Family("tiny_siglip", "vit_base_patch16_siglip_224", VIT),
        Family("tiny_clip", "vit_base_patch16_clip_224", VIT, 1, True),
        Family("tiny_convnext", "convnext_tiny", {"depths": (1, 1, 1, 1), "dims": (8, 12, 16, 24)}, **MAPS),
        Family("tiny_resnet50", "resnet50", {"layers": (1, 1, 1, 1), "channels": (4, 6, 8, 6)}, **MAPS),
    )
}


def _builder(family: Family) -> Callable[..., nn.Module]:
    def build(pretrained: bool = False, **settings: Any) -> nn.Module:
        given = {name: value for name, value in settings.items() if not name.startswith(("pretrained_", "cache_"))}
        return timm.create_model(family.original, pretrained, **{**family.settings, **given})

    build.__name__ = family.name
    return build


for _family in FAMILIES.values():
    _builder_of_it = register_model(_builder(_family))
    _builder_of_it.__module__ = "timm.models"  # exports for Hugging Face hold timm's own models alone
    setattr(sys.modules[__name__], _family.name, _builder_of_it)

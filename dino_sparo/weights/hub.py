"""Names of facebookresearch/dino's hubconf.py -> modules with the interface of its models.

    model = torch.hub.load("path/to/clone", "dino_vits16", source="local")
    features = model(images)                                      # (B, 384), the class token
    last, *_ = model.get_intermediate_layers(images, n=1)          # [(B, N, 384)], the class token first

Weights have the reference's names, so its state dicts load, too.
"""

from typing import Any

import timm
import torch
from torch import nn

from dino_sparo.models.architectures import TIMM, size_of
from dino_sparo.models.backbone import Backbone
from dino_sparo.weights.encoder import load_encoder
from dino_sparo.weights.released import RELEASES, released_file


class DINOVisionTransformer(Backbone):
    """Our vision transformer with the methods of the reference's."""

    @property
    def num_features(self) -> int:
        """Width D of the class token."""
        return self.embed_dim

    forward = Backbone.class_tokens  # type: ignore[assignment]  # (B, D), after the last LayerNorm
    prepare_tokens = Backbone.embed  # patches and class token with their positions, the input of the first block
    get_last_selfattention = Backbone.last_self_attention
    get_intermediate_layers = Backbone.intermediate_tokens  # of the last n blocks, normalised, class token first


def released_model(name: str, pretrained: bool = True, **settings: Any) -> nn.Module:
    """A model of the reference by the name in its hubconf.py: images (B, C, H, W) -> features (B, D).

    Args:
        name: a key of `RELEASES`.
        pretrained: load the released weights, which are downloaded once; False: random weights.
        settings: further arguments of the model: `img_size`, `in_chans` and `drop_path_rate` of a vision transformer,
            those of `timm.create_model` for ResNet-50 and XCiT.

    Raises:
        UserError: the weights can neither be found nor downloaded.
        CheckpointError: the file does not hold these weights.
    """
    release = RELEASES[name]
    size = size_of(release.arch)
    if size is None:
        model = timm.create_model(release.arch.removeprefix(TIMM), num_classes=0, **settings)
        if pretrained:
            encoder = load_encoder(name)
            model.load_state_dict(encoder.backbone.model.state_dict())  # type: ignore[union-attr]
        return model
    if isinstance(grid := settings.get("img_size"), (list, tuple)):  # as the reference writes it
        settings["img_size"] = grid[0]
    vit = DINOVisionTransformer(size, release.patch_size, **settings)
    if pretrained:
        vit.load_state_dict(torch.load(released_file(name), map_location="cpu", weights_only=True))
    return vit

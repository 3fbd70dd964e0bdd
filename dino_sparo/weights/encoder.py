"""Checkpoint -> encoder, rebuilt from what the checkpoint says, or for foreign weights from their shapes.

Where an encoder is needed, a CLIP (ours, OpenCLIP's or sparo-clip's) gives its image tower.
"""

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dino_sparo.data.views import EvalTransform
from dino_sparo.models.encoder import Encoder, EncoderConfig, encoder_from_config
from dino_sparo.models.foreign_backbone import ForeignBackbone
from dino_sparo.weights import entries
from dino_sparo.weights.checkpoint import load_checkpoint
from dino_sparo.weights.file import CheckpointError, load_strictly
from dino_sparo.weights.foreign import timm_remedy, timm_weights, without_layer_scale

logger = logging.getLogger(__name__)


def load_encoder(
    path: str | Path,
    which: str = "teacher",
    arch: str | None = None,
    patch_size: int | None = None,
    quick_gelu: bool = False,
) -> Encoder:
    """The encoder of a checkpoint in eval mode, on the CPU.

    Its `transform` turns one PIL image or array, or a list, into a batch (B, C, H, W), normalised as in training.

    Args:
        path: one of our checkpoints or exports; a folder or a repository, USER/NAME, of Hugging Face; "demo";
            timm/NAME; or weights of the reference, of timm or OpenCLIP.
        which: `teacher`, `student`, or another entry with weights; ignored for raw weights.
        arch: architecture of foreign weights; None: inferred.
        patch_size: patch side of foreign weights in pixels; None: inferred.
        quick_gelu: foreign weights, which do not say so, were trained with OpenAI's activation.

    Raises:
        CheckpointError: the file cannot be read, has no such entry or another activation, or its weights do not fit.
    """
    return encoder_of(load_checkpoint(path), str(path), which, arch, patch_size, quick_gelu)


def encoder_of(
    checkpoint: Mapping[str, Any],
    path: str,
    which: str,
    arch: str | None = None,
    patch_size: int | None = None,
    quick_gelu: bool = False,
    is_described: bool = False,
) -> Encoder:
    """`load_encoder` for a checkpoint that was read from `path`; with `is_described` it has no weights, only sizes."""
    is_foreign = entries.encoder_entry(checkpoint, path) is None and entries.image_text_entry(checkpoint) is None
    weights = entries.network_weights(checkpoint, which, path)
    weights = {name: value for name, value in weights.items() if not name.startswith("head.")}
    description = entries.describe_encoder(checkpoint, weights, path, arch, patch_size)
    if quick_gelu:
        if entries.activation_of(checkpoint) is False:
            raise CheckpointError(
                f"--quick_gelu is for weights that do not say how they were trained, but {path} says: with GELU"
            )
        description = {**description, "quick_gelu": True}
    config = EncoderConfig.from_dict(description)
    with torch.device("meta") if is_described else contextlib.nullcontext():  # random weights of large models take long
        encoder = encoder_from_config(config)
    if not isinstance(encoder.backbone, ForeignBackbone):
        weights = without_layer_scale(weights)
    elif not any(name.startswith("backbone.model.") for name in weights):
        encoder_state, fitting = encoder.state_dict(), timm_weights(encoder.backbone, weights, path)
        weights = {name: value for name, value in fitting.items() if name in encoder_state}
    network = entries.network_name(checkpoint, which) or "encoder"
    remedy = f"; {timm_remedy(weights)}" if is_foreign else ""
    load_strictly(encoder, weights, f"{path} ({network})", remedy, assign=is_described)
    max_value = entries.max_value_of(checkpoint)
    view = EvalTransform(encoder.config.img_size, *entries.normalization_of(checkpoint), max_value=max_value)
    encoder.transform = view.batch
    logger.info("%s of %s: %s", network, path, encoder.summary)
    if is_foreign:
        entries.say_heads(encoder.config.arch, path)
    return encoder.eval()

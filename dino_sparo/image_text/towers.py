"""Both towers of an image-text model: their sizes, the weights that they start from, and the model of a checkpoint.

`weights/initialize.py` starts an image encoder alone.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from dino_sparo.image_text.text import CONTEXT_LENGTH, VOCAB_SIZE, TextConfig
from dino_sparo.models.encoder import EncoderConfig
from dino_sparo.weights.checkpoint import (
    CheckpointError,
    clip_weights,
    image_text_entry,
    load_checkpoint,
    normalization_of,
    weights_sha256,
)
from dino_sparo.weights.initialize import check_same_activation, initialize_from

logger = logging.getLogger(__name__)

Loaded = TypeVar("Loaded", bound="LoadedModel")


def tower_configs(
    readouts: tuple[str, str],
    arch: str,
    patch_size: int,
    text_width: int = 512,
    text_heads: int = 8,
    text_layers: int = 12,
    context_length: int = CONTEXT_LENGTH,
    vocab_size: int = VOCAB_SIZE,
    pre_norm: bool = True,
    slots: Mapping[str, Any] | None = None,
    **image: Any,
) -> tuple[EncoderConfig, TextConfig]:
    """The configurations of both towers; the defaults are CLIP's for a ViT-B/32.

    Args:
        readouts: of the image and of the text tower, keys of `READOUTS`.
        arch: a key of `choices.ARCHITECTURES`.
        patch_size: P, pixels.
        text_width: D, of the text's tokens.
        text_heads: of each block of the text encoder.
        text_layers: blocks of the text encoder's architecture.
        context_length: the longest text in tokens.
        vocab_size: number of token ids.
        pre_norm: CLIP's vision transformer; False takes DINO's, whose pretrained weights fit then.
        slots: fields that both towers have, such as `num_slots`.
        image: further fields of the image tower.
    """
    slots = slots or {}
    text = TextConfig(context_length, vocab_size, text_width, text_heads, text_layers, readouts[1], **slots)
    return EncoderConfig(arch, patch_size, readouts[0], pre_norm=pre_norm, **slots, **image), text


@dataclass(frozen=True)
class LoadedModel:
    """A trained model and its description for result files.

    Attributes:
        model: in eval mode, on the CPU.
        mean: of its images' pixels in 0..1, per channel.
        std: per channel.
        record: plain values: weights, hash, epoch, configuration.
    """

    model: Any = field(repr=False)
    mean: tuple[float, ...]
    std: tuple[float, ...]
    record: dict[str, Any]

    @classmethod
    def of(cls: type[Loaded], model: Any, checkpoint: Mapping[str, Any], path: str | Path, **more: Any) -> Loaded:
        """A model, which has a `config`, with the weights of a checkpoint; `more` goes into the record."""
        origin = {"pretrained_weights": str(path), "sha256": weights_sha256(path), "epoch": checkpoint.get("epoch")}
        return cls(model.eval(), *normalization_of(checkpoint), {**origin, **model.config.to_dict(), **more})


def refuse_foreign_options(source: str, text_heads: int | None, quick_gelu: bool) -> None:
    """Refuse `--text_heads` and `--quick_gelu` for a checkpoint of ours, which describes its own model."""
    if text_heads is not None or quick_gelu:
        option = "quick_gelu" if text_heads is None else "text_heads"
        raise ValueError(
            f"--{option} is for open_clip's weights, but {source} says how its model is built; leave it out"
        )


def initialize_towers(model: Any, path: str | Path, with_rest: bool = True, with_image: bool = True) -> set[str]:
    """Start both towers of a model from the weights of another, in place; returns the names of weights that were taken.

    Taken are the blocks that both have, a read-out of the same make and sizes and the first positions of a text encoder
    with a longer context; of the rest a projection of the same shape, and the temperature.

    Args:
        model: what to start: a module with `image`, `text` and `config`.
        path: a CLIP of ours, of OpenCLIP or of sparo-clip (.pth, .pt, .safetensors), or an OC-CLIP.
        with_rest: False where scores are not the file's, and projections and temperature have no meaning.
        with_image: False where the image tower starts from other weights, and may be of another make.

    Raises:
        CheckpointError: the file cannot be read, holds no CLIP, or one whose towers have another width or make.
    """
    checkpoint, source = load_checkpoint(path), str(path)
    weights = clip_weights(checkpoint, source)
    if weights is None:
        raise CheckpointError(f"{source} holds no CLIP; --init_from starts the image encoder from other weights")
    check_same_activation(checkpoint, model.config.quick_gelu, source)
    description = image_text_entry(checkpoint)
    if description is not None and description["text"]["heads"] != model.config.text.heads:
        raise CheckpointError(
            f"{source} has a text encoder with {description['text']['heads']} heads, the model "
            f"{model.config.text.heads}; build it alike (--text_heads)"
        )
    own = model.state_dict()
    if "text.norm.weight" not in own:  # the read-out has the last LayerNorm, or there is none
        weights = {name.replace("text.norm.", "text.readout.norm."): value for name, value in weights.items()}
    text = _fitting_text(weights, own, source)
    image = None
    if with_image:
        tower = {name.removeprefix("image."): value for name, value in weights.items() if name.startswith("image.")}
        image = initialize_from(model.image, tower, source)
    ends = {name: weights[name] for name in _fitting_ends(weights, own)} if with_rest else {}
    model.load_state_dict({**model.state_dict(), **text, **ends})
    taken = {f"image.{name}" for name in (image.taken if image else ())} | text.keys() | ends.keys()
    left = (name for name in own if name not in taken and not name.startswith("image."))
    new = ", ".join(dict.fromkeys(".".join(name.split(".")[:2]) for name in left)) or "nothing"
    logger.info("start from %s: image tower: %s; of the rest new: %s", source, image or "not taken", new)
    return taken


def _fitting_text(weights: Mapping[str, Tensor], own: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """The text encoder's weights before its read-out, of the blocks that both have."""
    before_readout = (name for name in own if name.startswith("text.") and not name.startswith("text.readout."))
    text = {name: weights[name] for name in before_readout if name in weights}
    text["text.pos_embed"] = weights["text.pos_embed"][: len(own["text.pos_embed"])]
    if misshapen := [name for name, value in text.items() if value.shape != own[name].shape]:
        shapes = ", ".join(f"{name} {tuple(text[name].shape)}, not {tuple(own[name].shape)}" for name in misshapen[:2])
        raise CheckpointError(
            f"{source} has a text encoder of another make: {shapes}; build it alike (--text_width, --context_length)"
        )
    return text


def _fitting_ends(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    """The text's read-out and both projections, each whole or not at all, and the temperature."""
    fitting = ["logit_scale"]
    for stem in ("text.readout.", "image_proj.", "text_proj."):
        names = {name for name in (*own, *weights) if name.startswith(stem)}
        if all(name in own and name in weights and own[name].shape == weights[name].shape for name in names):
            fitting += sorted(names)
    return fitting

"""Weights of a trained image-text model -> the start of another model, as far as both have the same parts.

`weights/initialize.py` starts an image encoder alone.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from dino_sparo.weights.checkpoint import CheckpointError, clip_weights, image_text_entry, load_checkpoint
from dino_sparo.weights.initialize import InitReport, check_same_activation, initialize_from


class TowersReport(NamedTuple):
    """Weights that `initialize_towers` took from a file and left random, by name.

    Attributes:
        image: of the image tower; None: it was left as it is.
        taken: all weights that come from the file.
        new: all that keep their random values.
    """

    image: InitReport | None
    taken: tuple[str, ...]
    new: tuple[str, ...]

    def __str__(self) -> str:
        parts = (name for name in self.new if not name.startswith("image."))
        ends = dict.fromkeys(".".join(name.split(".")[:2]) if name.startswith("text.") else name for name in parts)
        return f"image tower: {self.image or 'not taken'}; of the rest new: {', '.join(ends) or 'nothing'}"


def initialize_towers(model: Any, path: str | Path, with_rest: bool = True, with_image: bool = True) -> TowersReport:
    """Start both towers of a model from the weights of another, in place.

    Taken are the blocks that both have, a read-out of the same make and sizes and the first positions of a text encoder
    with a longer context; of the rest a projection of the same shape, and the temperature.

    Args:
        model: what to start: a module with `image`, `text` and `config`.
        path: a CLIP of ours, of OpenCLIP or of sparo-clip (.pth, .pt, .safetensors), or an OC-CLIP.
        with_rest: False where scores are not the file's, and projections and temperature have no meaning.
        with_image: False where the image tower starts from other weights, and may be of another make.

    Returns:
        Names of the weights that were taken, and of those that stay random.

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
    taken = {f"image.{name}" for name in (image.taken if image else ())} | text.keys()
    ends = {name: weights[name] for name in _fitting_ends(weights, own)} if with_rest else {}
    model.load_state_dict({**model.state_dict(), **text, **ends})
    taken |= ends.keys()
    return TowersReport(
        image, tuple(name for name in own if name in taken), tuple(name for name in own if name not in taken)
    )


def _fitting_text(weights: Mapping[str, Tensor], own: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """The text encoder's weights before its read-out, of the blocks that both have."""
    theirs, wanted = (weights["text.token_embed.weight"].shape, own["text.token_embed.weight"].shape)
    if theirs != wanted:
        raise CheckpointError(
            f"{source} has a text encoder of {theirs[0]} token ids and width {theirs[1]}, the model one of {wanted[0]} "
            f"and {wanted[1]}; build it alike (--text_width)"
        )
    positions, length = weights["text.pos_embed"], len(own["text.pos_embed"])
    if len(positions) < length:
        raise CheckpointError(
            f"{source} knows captions of {len(positions)} tokens, the model is to read {length}; give --context_length "
            f"{len(positions)} or less"
        )
    text = {
        name: weights[name]
        for name in own
        if name.startswith("text.") and not name.startswith("text.readout.") and name in weights
    }
    text["text.pos_embed"] = positions[:length]
    if misshapen := [name for name, value in text.items() if value.shape != own[name].shape]:
        raise CheckpointError(f"{source} has a text encoder of another make: {', '.join(misshapen[:4])}")
    return text


def _fitting_ends(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    """The text's read-out and both projections, each whole or not at all, and the temperature."""
    fitting = ["logit_scale"]
    for stem in ("text.readout.", "image_proj.", "text_proj."):
        names = {name for name in (*own, *weights) if name.startswith(stem)}
        if all(name in own and name in weights and own[name].shape == weights[name].shape for name in names):
            fitting += sorted(names)
    return fitting

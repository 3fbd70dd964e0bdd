"""Our weights <-> open_clip's: the same plain CLIP (read-out `cls`) under the names of either.

Trained models of open_clip and of sparo-clip are read here, and ours are written for whatever reads theirs.
`dino_sparo.weights.foreign_names` has the names of the weights.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from dino_sparo.clip.config import CLIPConfig, towers_of
from dino_sparo.image_text.text import TextConfig
from dino_sparo.runtime.choices import ARCHITECTURES
from dino_sparo.weights.checkpoint import CheckpointError, infer_config
from dino_sparo.weights.foreign_names import ENDS, from_open_clip_names, open_clip_settings, to_open_clip_names

HEAD_WIDTH = 64  # of all of open_clip's text encoders
# open_clip's activations by how they print: are they OpenAI's?
IS_QUICK = {"GELU(approximate='none')": False, "QuickGELU()": True}


def to_open_clip(config: CLIPConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under open_clip's names and in its layouts.

    Args:
        config: `model.config`.
        weights: `model.state_dict()`.

    Raises:
        ValueError: open_clip has no such model.
    """
    _check_counterpart(config)
    return to_open_clip_names(weights)


def open_clip_config(config: CLIPConfig) -> dict[str, Any]:
    """The content of open_clip's JSON of a model: `open_clip.model.CLIP(**open_clip_config(model.config))` builds it.

    Raises:
        ValueError: open_clip has no such model.
    """
    _check_counterpart(config)
    return open_clip_settings(config.to_dict())


def _check_counterpart(config: CLIPConfig) -> None:
    if config.readout != "cls":
        raise ValueError(f"open_clip has no model with readout={config.readout!r}; it has the one with 'cls'")
    open_clip_settings(config.to_dict())


def from_open_clip(
    weights: Mapping[str, Tensor], text_heads: int | None = None, quick_gelu: bool = False
) -> tuple[CLIPConfig, dict[str, Tensor]]:
    """open_clip's or sparo-clip's weights under our names, and how their model is built, which their shapes tell.

    Of sparo-clip SPARO (with `sparo_type` "cont:const", which weights do not tell) and the linear bottleneck are known.

    Args:
        weights: state dict of a CLIP with a plain vision transformer; a text tower below `text.` is taken too.
        text_heads: by default the text's heads are 64 wide, as in all of open_clip's models.
        quick_gelu: OpenAI's activation, of which weights say nothing.

    Raises:
        CheckpointError: the weights are of another make, or of an architecture that is not known.
    """
    renamed = from_open_clip_names(weights)
    return infer_clip_config(renamed, text_heads, quick_gelu), renamed


def infer_clip_config(
    weights: Mapping[str, Tensor], text_heads: int | None = None, quick_gelu: bool = False
) -> CLIPConfig:
    """How a foreign CLIP is built, from the shapes of its weights under our names.

    Args:
        weights: of both towers.
        text_heads: by default the text's heads are 64 wide.
        quick_gelu: OpenAI's activation.

    Raises:
        CheckpointError: an architecture that is not known, or a text encoder whose heads cannot be told.
    """
    readout = next(name for name, names in ENDS.items() if next(iter(names)) in weights)
    image = infer_config({name.removeprefix("image."): value for name, value in weights.items()})
    context_length, width = weights["text.pos_embed"].shape
    if text_heads is None:
        if width % HEAD_WIDTH:
            raise CheckpointError(
                f"the text encoder is {width} wide, no multiple of {HEAD_WIDTH}, so its heads cannot be told; give "
                f"text_heads"
            )
        text_heads = width // HEAD_WIDTH
    slots = {name: getattr(image, name) for name in ("num_slots", "slot_dim", "key_dim", "group_size")}
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


def read_open_clip_model(model: nn.Module) -> tuple[CLIPConfig, dict[str, Tensor]]:
    """`from_open_clip` for a model that has been built: its heads and its activation can be seen.

    Raises:
        CheckpointError: its parts are not ours: another activation, other heads, no plain vision transformer.
    """
    activations = {str(module) for name, module in model.named_modules() if name.endswith("mlp.gelu")}
    if len(activations) != 1 or not activations <= IS_QUICK.keys():
        raise CheckpointError(
            f"the open_clip model's activations are {sorted(activations)}; only a plain CLIP with one of "
            f"{sorted(IS_QUICK)} throughout can be read"
        )
    blocks: Any = model.get_submodule("transformer.resblocks")
    config, weights = from_open_clip(model.state_dict(), blocks[0].attn.num_heads, IS_QUICK[activations.pop()])
    image_blocks: Any = model.get_submodule("visual.transformer.resblocks")
    heads, ours = image_blocks[0].attn.num_heads, ARCHITECTURES[config.image.arch].num_heads
    if heads != ours:
        raise CheckpointError(
            f"the open_clip model's vision transformer has {heads} heads; {config.image.arch} has {ours}"
        )
    return config, weights

"""Our weights <-> open_clip's: the same plain CLIP (read-out `cls`) under the names of either.

Stage 2 of the folder. Names and layouts are all that differs: open_clip keeps its projections as (D, M) matrices that
tokens are multiplied with, and writes its embeddings without a batch axis. With it trained open_clip models come in,
and ours go to whatever reads open_clip's.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from dino_sparo.checkpoint import CheckpointError, infer_config
from dino_sparo.choices import ARCHITECTURES
from dino_sparo.clip.config import CLIPConfig
from dino_sparo.clip.text import TextConfig

# Ours -> open_clip's. A name that ends in a dot stands for all below it.
NAMES = {
    "image.backbone.patch_embed.proj.weight": "visual.conv1.weight",
    "image.backbone.cls_token": "visual.class_embedding",
    "image.backbone.pos_embed": "visual.positional_embedding",
    "image.backbone.norm_pre.": "visual.ln_pre.",
    "image.backbone.blocks.": "visual.transformer.resblocks.",
    "image.backbone.norm.": "visual.ln_post.",
    "image_proj.weight": "visual.proj",
    "text.token_embed.weight": "token_embedding.weight",
    "text.pos_embed": "positional_embedding",
    "text.blocks.": "transformer.resblocks.",
    "text.norm.": "ln_final.",
    "text_proj.weight": "text_projection",
    "logit_scale": "logit_scale",
}
NAMES_IN_BLOCK = {
    "norm1.": "ln_1.",
    "attn.qkv.": "attn.in_proj_",
    "attn.proj.": "attn.out_proj.",
    "norm2.": "ln_2.",
    "mlp.fc1.": "mlp.c_fc.",
    "mlp.fc2.": "mlp.c_proj.",
}
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
    renamed = {_renamed(name, NAMES, NAMES_IN_BLOCK) or name: value for name, value in weights.items()}
    for name in ("visual.class_embedding", "visual.positional_embedding"):
        renamed[name] = renamed[name].squeeze(0)
    renamed["visual.class_embedding"] = renamed["visual.class_embedding"].squeeze(0)
    for name in ("visual.proj", "text_projection"):
        renamed[name] = renamed[name].t().contiguous()
    return renamed


def open_clip_config(config: CLIPConfig) -> dict[str, Any]:
    """What open_clip's JSON of a model says: `open_clip.model.CLIP(**open_clip_config(model.config))` builds it.

    Raises:
        ValueError: open_clip has no such model.
    """
    _check_counterpart(config)
    size, image, text = ARCHITECTURES[config.image.arch], config.image, config.text
    return {
        "embed_dim": config.embed_dim,
        "quick_gelu": config.quick_gelu,
        "vision_cfg": {
            "image_size": image.img_size,
            "patch_size": image.patch_size,
            "layers": size.depth - config.replace_block,
            "width": size.embed_dim,
            "head_width": size.embed_dim // size.num_heads,
        },
        "text_cfg": {
            "context_length": text.context_length,
            "vocab_size": text.vocab_size,
            "width": text.width,
            "heads": text.heads,
            "layers": text.layers - config.replace_block,
        },
    }


def _check_counterpart(config: CLIPConfig) -> None:
    if config.readout != "cls" or not config.image.pre_norm or config.image.in_chans != 3:
        raise ValueError(
            f"open_clip has no model with readout={config.readout!r}, pre_norm={config.image.pre_norm} and "
            f"in_chans={config.image.in_chans}; it has the one with 'cls', True and 3"
        )


def is_open_clip(weights: Mapping[str, Tensor]) -> bool:
    """Whether these names are those of an open_clip model."""
    return any(name.startswith("visual.") for name in weights)


def from_open_clip(
    weights: Mapping[str, Tensor], text_heads: int | None = None, quick_gelu: bool = False
) -> tuple[CLIPConfig, dict[str, Tensor]]:
    """open_clip's weights under our names, and how their model is built, which their shapes tell.

    Args:
        weights: state dict of an open_clip CLIP with a plain vision transformer; a text tower below `text.` is taken
            too.
        text_heads: by default the text's heads are 64 wide, as in all of open_clip's models.
        quick_gelu: OpenAI's activation, of which weights say nothing.

    Raises:
        CheckpointError: the weights are of another make, or of an architecture that is not known.
    """
    theirs = {name.removeprefix("text."): value for name, value in weights.items() if name not in BUFFERS}
    names = {theirs_name: our_name for our_name, theirs_name in NAMES.items()}
    names_in_block = {theirs_name: our_name for our_name, theirs_name in NAMES_IN_BLOCK.items()}
    translation = {name: _renamed(name, names, names_in_block) for name in theirs}
    foreign = [name for name, our_name in translation.items() if our_name is None]
    missing = [name for name in names if not name.endswith(".") and name not in theirs]
    if foreign or missing:
        raise CheckpointError(
            f"only open_clip's plain CLIP with a vision transformer can be read: of this one's weights {len(foreign)} "
            f"are unknown ({', '.join(foreign[:4])}) and {len(missing)} missing ({', '.join(missing[:4])})"
        )
    ours = {translation[name] or name: value for name, value in theirs.items()}
    ours["image.backbone.cls_token"] = ours["image.backbone.cls_token"][None, None]
    ours["image.backbone.pos_embed"] = ours["image.backbone.pos_embed"][None]
    ours["logit_scale"] = ours["logit_scale"].reshape(())
    for name in ("image_proj.weight", "text_proj.weight"):
        ours[name] = ours[name].t().contiguous()
    return _infer_config(ours, text_heads, quick_gelu), ours


# Constants that OpenAI's and older open_clip's state dicts hold beside their weights.
BUFFERS = frozenset({"attn_mask", "text.attn_mask", "input_resolution", "context_length", "vocab_size"})


def _renamed(name: str, names: Mapping[str, str], names_in_block: Mapping[str, str]) -> str | None:
    """One name translated, None if it is in no table."""
    if name in names:
        return names[name]
    stem = next((stem for stem in names if stem.endswith(".") and name.startswith(stem)), None)
    if stem is None:
        return None
    rest = name.removeprefix(stem)
    if "blocks." not in stem:
        return names[stem] + rest
    index, inner = rest.split(".", 1)
    part = next((part for part in names_in_block if inner.startswith(part)), None)
    return part and f"{names[stem]}{index}.{names_in_block[part]}{inner.removeprefix(part)}"


def _infer_config(weights: Mapping[str, Tensor], text_heads: int | None, quick_gelu: bool) -> CLIPConfig:
    image_weights = {name.removeprefix("image."): value for name, value in weights.items() if name.startswith("image.")}
    context_length, width = weights["text.pos_embed"].shape
    if text_heads is None:
        if width % HEAD_WIDTH:
            raise CheckpointError(
                f"the text encoder is {width} wide, no multiple of {HEAD_WIDTH}, so its heads cannot be told; give "
                f"text_heads"
            )
        text_heads = width // HEAD_WIDTH
    return CLIPConfig(
        image=replace(infer_config(image_weights), pre_norm=True),
        text=TextConfig(
            context_length=context_length,
            vocab_size=len(weights["text.token_embed.weight"]),
            width=width,
            heads=text_heads,
            layers=1 + max(int(name.split(".")[2]) for name in weights if name.startswith("text.blocks.")),
            readout="eos",
        ),
        readout="cls",
        embed_dim=len(weights["text_proj.weight"]),
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

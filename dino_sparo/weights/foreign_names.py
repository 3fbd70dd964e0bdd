"""OpenCLIP's names of a CLIP's weights <-> ours, for whole state dicts.

Only names and layouts differ: OpenCLIP stores projections as (D, M) matrices, to be multiplied from the left, and
embeddings without batch axis. sparo-clip, the code of SPARO's authors, is OpenCLIP with other parts at the end of a
tower; its SPARO and its linear bottleneck are supported. Our names are those of `clip.model.CLIP`: `image.*`, `text.*`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dino_sparo.runtime.choices import ARCHITECTURES
from dino_sparo.weights.file import CheckpointError

# Ours -> OpenCLIP's. A name that ends in a dot is a prefix.
NAMES = {
    "image.backbone.patch_embed.proj.weight": "visual.conv1.weight",
    "image.backbone.cls_token": "visual.class_embedding",
    "image.backbone.pos_embed": "visual.positional_embedding",
    "image.backbone.norm_pre.": "visual.ln_pre.",
    "image.backbone.blocks.": "visual.transformer.resblocks.",
    "image.backbone.norm.": "visual.ln_post.",
    "text.token_embed.weight": "token_embedding.weight",
    "text.pos_embed": "positional_embedding",
    "text.blocks.": "transformer.resblocks.",
    "text.norm.": "ln_final.",
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
# Ends of the towers; `sparo` and `linear` are sparo-clip's.
ENDS = {
    "cls": {"image_proj.weight": "visual.proj", "text_proj.weight": "text_projection"},
    "linear": {
        "image_proj.0.weight": "visual.proj",
        "image_proj.1.": "vision_bottleproj.",
        "text_proj.0.weight": "text_projection",
        "text_proj.1.": "text_bottleproj.",
    },
    "sparo": {
        f"{tower}.readout.{ours}": f"{sparo}.{theirs}"
        for tower, sparo in (("image", "visual.sparo"), ("text", "text_sparo"))
        for ours, theirs in (("queries", "q_emb"), ("key_proj.", "k."), ("value_proj.", "proj."))
    },
}
# Export format of a whole CLIP -> the ends it supports.
CLIP_FORMATS: dict[str, tuple[str, ...]] = {"open_clip": ("cls",), "sparo_clip": tuple(ENDS)}
# Stored as (D, M) by OpenCLIP.
TRANSPOSED = {"visual.proj", "text_projection"}
# Constants in state dicts of OpenAI and of older versions of OpenCLIP.
BUFFERS = frozenset({"attn_mask", "text.attn_mask", "input_resolution", "context_length", "vocab_size"})


def is_open_clip(weights: Mapping[str, Tensor]) -> bool:
    """Whether these are the names of an OpenCLIP model."""
    return any(name.startswith("visual.") for name in weights)


def from_open_clip_names(weights: Mapping[str, Tensor], source: str = "this one") -> dict[str, Tensor]:
    """Weights of an OpenCLIP or sparo-clip model under our names; a text tower below `text.` is taken too.

    Raises:
        CheckpointError: the model has unknown parts, or known ones are missing.
    """
    theirs = {name.removeprefix("text."): value for name, value in weights.items() if name not in BUFFERS}
    for sparo in ("visual.sparo", "text_sparo"):  # its values are a copy of its keys
        for kind in ("weight", "bias"):
            keys, values = (theirs.get(f"{sparo}.{part}.{kind}") for part in "kv")
            if keys is not None and values is not None and torch.equal(keys, values):
                del theirs[f"{sparo}.v.{kind}"]
    readout = "sparo" if "visual.sparo.q_emb" in theirs else "linear" if "vision_bottleproj.weight" in theirs else "cls"
    names = {their_name: name for name, their_name in (NAMES | ENDS[readout]).items()}
    names_in_block = {their_name: name for name, their_name in NAMES_IN_BLOCK.items()}
    ours, unknown = {}, []
    for their_name, value in theirs.items():
        name = _renamed(their_name, names, names_in_block)
        if name is None:
            unknown.append(their_name)
        else:
            ours[name] = _in_our_layout(name, value.t().contiguous() if their_name in TRANSPOSED else value)
    missing = [name for name in names if not name.endswith(".") and name not in theirs]
    if unknown or missing:
        raise CheckpointError(
            f"only open_clip's plain CLIP with a vision transformer can be read, and sparo-clip's with SPARO or a "
            f"linear bottleneck: of the weights of {source} {len(unknown)} are unknown ({', '.join(unknown[:4])}) and "
            f"{len(missing)} missing ({', '.join(missing[:4])})"
        )
    return ours


def to_open_clip_names(weights: Mapping[str, Tensor], readout: str = "cls") -> dict[str, Tensor]:
    """Weights of a `clip.model.CLIP` with `pre_norm`, under OpenCLIP's names and in its layouts.

    `readout` is a key of `ENDS`; all but `cls` give sparo-clip's names.
    """
    names, theirs = NAMES | ENDS[readout], {}
    for name, value in weights.items():
        their_name = _renamed(name, names, NAMES_IN_BLOCK) or name
        theirs[their_name] = value.t().contiguous() if their_name in TRANSPOSED else value
    theirs["visual.class_embedding"] = theirs["visual.class_embedding"].flatten()
    theirs["visual.positional_embedding"] = theirs["visual.positional_embedding"].squeeze(0)
    for sparo in ("visual.sparo", "text_sparo") if readout == "sparo" else ():
        key_dim = theirs[f"{sparo}.q_emb"].shape[1]
        num_keys = len(theirs[f"{sparo}.k.bias"]) // key_dim
        theirs[f"{sparo}.q_emb"] = theirs[f"{sparo}.q_emb"].reshape(1, num_keys, -1, 1, key_dim)
        for kind in ("weight", "bias"):
            theirs[f"{sparo}.v.{kind}"] = theirs[f"{sparo}.k.{kind}"].clone()
    return theirs


def _in_our_layout(name: str, value: Tensor) -> Tensor:
    if name == "image.backbone.cls_token":
        return value.reshape(1, 1, -1)
    if name == "image.backbone.pos_embed":
        return value[None]
    if name == "logit_scale":
        return value.reshape(())
    return value.flatten(0, -2) if name.endswith(".readout.queries") else value


def _renamed(name: str, names: Mapping[str, str], names_in_block: Mapping[str, str]) -> str | None:
    """One name translated, None if no table has it."""
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


def open_clip_settings(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of OpenCLIP's, or sparo-clip's, `CLIP` for the model that a checkpoint's entry `clip` describes.

    Raises:
        ValueError: neither has such a model.
    """
    readout, image, text, replaced = entry["readout"], entry["image"], entry["text"], entry["replace_block"]
    if readout not in ENDS or not image["pre_norm"] or image["in_chans"] != 3:
        raise ValueError(
            f"open_clip has no model with readout={readout!r}, pre_norm={image['pre_norm']} and "
            f"in_chans={image['in_chans']}; it has the one with 'cls', True and 3, and sparo-clip those with 'sparo' "
            f"and 'linear'"
        )
    if image["arch"] not in ARCHITECTURES:
        raise ValueError(f"open_clip has no model with arch={image['arch']}; this CLIP can be exported as safetensors")
    size = ARCHITECTURES[image["arch"]]
    settings = {
        "embed_dim": entry["embed_dim"],
        "quick_gelu": entry["quick_gelu"],
        "vision_cfg": {
            "image_size": image["img_size"],
            "patch_size": image["patch_size"],
            "layers": size.depth - replaced,
            "width": size.embed_dim,
            "head_width": size.embed_dim // size.num_heads,
        },
        "text_cfg": {
            **{name: text[name] for name in ("context_length", "vocab_size", "width", "heads")},
            "layers": text["layers"] - replaced,
        },
    }
    if readout == "linear":
        settings["bottleneck_dim"] = entry["bottleneck_dim"]
    if readout == "sparo":
        num_keys = image["num_slots"] // image["group_size"]
        settings |= {"use_sparo": True, "sparo_type": "cont:const", "share_kv": True, "sparo_heads": num_keys}
        settings |= {"L": image["num_slots"], "V": image["slot_dim"], "sparo_attn_dim": image["key_dim"]}
    return settings

"""Weights of other programs <-> ours: OpenCLIP's whole CLIPs, raw vision transformers, timm's models.

Of OpenCLIP only names and layouts differ: it stores projections as (D, M) matrices, to be multiplied from the left, and
embeddings without batch axis. sparo-clip, the code of SPARO's authors, is OpenCLIP with other parts at the end of a
tower; its SPARO and its linear bottleneck are supported. Our names are those of `clip.model.CLIP`: `image.*`, `text.*`.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from timm.models import is_model
from torch import Tensor

from dino_sparo.models.architectures import ARCHITECTURES, TIMM, size_of
from dino_sparo.models.encoder import EncoderConfig
from dino_sparo.models.foreign_backbone import ForeignBackbone, plan_of
from dino_sparo.runtime.faults import UserError
from dino_sparo.weights.file import WHOLE_WEIGHTS, CheckpointError, misfits, require_channels, shortened

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
# Modules around others, in the names of weights: DDP's, torch.compile's, FSDP's, those of activation checkpoints.
WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Of files that hold both networks under one key: those of DINOv2 and DINOv3, and of MoCo v3.
NETWORK_PREFIXES = {"teacher": ("teacher.", "momentum_encoder."), "student": ("student.", "base_encoder.")}
OTHER_PARTS = ("dino_head.", "ibot_head.", "decoder_")  # of DINOv2, and MAE's decoder
MASK_TOKENS = (".mask_token", ".masked_embed")  # of DINOv2 and MAE; of iBOT
CHUNKED = re.compile(r"^((?:backbone\.)?blocks\.)\d+\.(?=\d+\.)")  # blocks.CHUNK.BLOCK.* of DINOv2's training
# A part that only some vision transformers have -> timm's names of them.
MAKES = {
    "mlp.w1.": "vit_{size}_plus_patch{patch}_dinov3_qkvb",
    "storage_tokens": "vit_{size}_patch{patch}_dinov3_qkvb",
    "rope_embed": "vit_{size}_patch{patch}_dinov3",
    "register_tokens": "vit_{size}_patch{patch}_reg4_dinov2",
    "mlp.w12.": "vit_{size}_patch{patch}_dinov2",
    "dist_token": "deit_{size}_distilled_patch{patch}_224",
    "relative_position": "beit_{size}_patch{patch}_224",
    "gamma_1": "deit3_{size}_patch{patch}_224",
}
SIZES = {192: "tiny", 384: "small", 768: "base", 1024: "large", 1280: "huge", 1536: "giant", 4096: "7b"}  # by width
# Constants in state dicts of OpenAI and of older versions of OpenCLIP.
BUFFERS = frozenset({"attn_mask", "text.attn_mask", "input_resolution", "context_length", "vocab_size"})


def is_open_clip(weights: Mapping[str, Tensor]) -> bool:
    """Whether names of weights are from an OpenCLIP model."""
    return any(name.startswith("visual.") for name in weights)


def from_open_clip_names(weights: Mapping[str, Tensor], path: str = "this one") -> dict[str, Tensor]:
    """Weights of an OpenCLIP or sparo-clip model under our names; a text tower below `text.` is taken too.

    CheckpointError if the model has unknown parts, or known ones are missing.
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
            f"linear bottleneck: of the weights of {path} {len(unknown)} are unknown ({', '.join(unknown[:4])}) and "
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
    """Arguments of OpenCLIP's or sparo-clip's `CLIP` for a checkpoint's entry `clip`; UserError if neither has it."""
    readout, image, text, replaced = entry["readout"], entry["image"], entry["text"], entry["replace_block"]
    if readout not in ENDS or not image["pre_norm"] or image["in_chans"] != 3:
        raise UserError(
            f"open_clip has no model with readout={readout!r}, pre_norm={image['pre_norm']} and "
            f"in_chans={image['in_chans']}; it has the one with 'cls', True and 3, and sparo-clip those with 'sparo' "
            f"and 'linear'"
        )
    size = size_of(image["arch"])
    if size is None:
        raise UserError(f"open_clip has no model with arch={image['arch']}; this CLIP can be exported as safetensors")
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


# Vision transformers, and models of timm.


def flat_weights(weights: Mapping[str, Any], which: str = "teacher") -> dict[str, Tensor]:
    """Weights of one network under our names, whoever saved them.

    Removes names of wrappers and chunks, entries that are not tensors, other networks and heads of other trainings;
    puts a raw ViT's `blocks.*`, `cls_token`, ... below `backbone.`.
    """
    plain = {WRAPPERS.sub("", name): value for name, value in weights.items() if isinstance(value, Tensor)}
    for prefix in NETWORK_PREFIXES.get(which, ()):
        plain = {name.removeprefix(prefix): plain[name] for name in plain if name.startswith(prefix)} or plain
    plain = {name: value for name, value in plain.items() if not name.startswith(OTHER_PARTS)}
    if any(name.endswith("cls_token") for name in plain):
        plain = {CHUNKED.sub(r"\1", name): value for name, value in plain.items()}
    if any(name.startswith("backbone.") for name in plain):
        return plain
    return {name if name.startswith("head.") else f"backbone.{name}": value for name, value in plain.items()}


def timm_remedy(weights: Mapping[str, Tensor]) -> str:
    """The option that reads a network which is not one of ours, for messages."""
    if any("_flat_param" in name for name in weights):
        return WHOLE_WEIGHTS
    width, _, _, patch = getattr(weights.get("backbone.patch_embed.proj.weight"), "shape", [0] * 4)
    makes = [make for part, make in MAKES.items() if any(part in name for name in weights)]
    names = (make.format(size=SIZES.get(width), patch=patch) for make in makes)
    return f"give --arch {TIMM}{next(filter(is_model, names), 'NAME')}, the model of timm that it holds"


def without_layer_scale(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """DINOv2's ViT as our ViT: without mask token and LayerScale, gamma * (W x + b) = (gamma W) x + gamma b."""
    layers = {"ls1.gamma": "attn.proj", "ls2.gamma": "mlp.fc2"}
    folded = {name: value for name, value in weights.items() if not name.endswith(MASK_TOKENS)}
    for ending, layer in layers.items():
        for name in [name for name in folded if name.endswith(f".{ending}")]:
            stem = f"{name.removesuffix(ending)}{layer}"
            if not {f"{stem}.weight", f"{stem}.bias"} <= folded.keys():
                continue
            gamma = folded.pop(name)
            folded[f"{stem}.weight"] = gamma[:, None] * folded[f"{stem}.weight"]
            folded[f"{stem}.bias"] = gamma * folded[f"{stem}.bias"]
    return folded


def infer_config(
    weights: Mapping[str, Tensor], arch: str | None = None, patch_size: int | None = None, path: str = "the file"
) -> EncoderConfig:
    """Configuration of a foreign ViT, inferred from the shapes of its weights under our names.

    `arch` and `patch_size` override the inferred values. A timm model is read by its class token, or by the average.
    CheckpointError if these are not the weights of a ViT, or no known architecture fits.
    """
    if arch is not None and arch.startswith(TIMM):
        plan = plan_of(arch.removeprefix(TIMM))
        readout = "cls" if plan.has_class_token or plan.has_late_class_token else "gap"
        return EncoderConfig(arch, patch_size or plan.stride, readout, img_size=plan.img_size)
    embed_dim, in_chans, kernel, grid_size = patch_sizes(weights, path)
    depth, queries = num_blocks(weights), weights.get("readout.queries")
    # SPARO replaces the last block. If no architecture has that depth, it follows the last block.
    depths = [depth] if queries is None else [depth + 1, depth]
    names = {(size.embed_dim, size.depth): name for name, size in ARCHITECTURES.items()}
    fitting = [names[embed_dim, depth] for depth in depths if (embed_dim, depth) in names]
    if arch is None and not fitting:
        known = ", ".join(f"{name} {size}" for size, name in names.items())
        raise CheckpointError(
            f"{path}: no architecture has width {embed_dim} and {depth} blocks; known are {known}; "
            + timm_remedy(weights)
        )
    patch_size, arch = patch_size or kernel, arch or fitting[0]
    slots: dict[str, Any] = {"readout": "cls"}
    if queries is not None and "readout.key_proj.bias" in weights:
        (num_slots, key_dim), num_keys = queries.shape, len(weights["readout.key_proj.bias"])
        slots = {
            "readout": "sparo",
            "num_slots": num_slots,
            "slot_dim": len(weights["readout.value_proj.bias"]),
            "key_dim": key_dim,
            "group_size": num_slots * key_dim // num_keys,
            "replace_block": (size := size_of(arch)) is not None and size.depth > depth,
        }
    return EncoderConfig(
        arch=arch,
        patch_size=patch_size,
        **slots,
        img_size=grid_size * patch_size,
        in_chans=in_chans,
        pre_norm="backbone.norm_pre.weight" in weights,
    )


def timm_weights(backbone: ForeignBackbone, weights: Mapping[str, Tensor], path: str) -> dict[str, Tensor]:
    """Weights that fit a timm model, under our names: resampled to its grid and channels; optionally further weights.

    The names are timm's or ours, below `backbone.`. Weights of another width, and those that are missing or of another
    shape, are a CheckpointError, which names the file `path`.
    """
    plain = {name.removeprefix("backbone."): value for name, value in weights.items() if name.startswith("backbone.")}
    for stem in backbone.stems:
        convolution = plain.get(stem, plain.get(f"model.{stem}"))
        if convolution is None or convolution.ndim != 4:
            continue
        width = len(backbone.model.get_parameter(stem.removeprefix("model.")))
        if backbone.has_blocks and len(convolution) != width:
            raise CheckpointError(
                f"{path} has width {len(convolution)}, timm/{backbone.name} has {width}; choose other weights, or the "
                "--arch that they were trained with"
            )
        require_channels(convolution.shape[1], backbone.in_chans, path)
    try:
        adapted = backbone.adapt(plain)
    except (AttributeError, KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path} does not hold the weights of timm/{backbone.name}: {error}") from error
    fitting = {f"backbone.{name}": value for name, value in adapted.items()}
    wanted = {f"backbone.{name}": value for name, value in backbone.state_dict().items()}
    # A classifier, a last norm and removed blocks may be left over; any other part would change the tokens.
    part_names = (*wanted, *(name for name in fitting if name.endswith(("_token", "_tokens")) or block_of(name) >= 0))
    depth, is_biased = num_blocks(wanted), any(name.endswith(("qkv.bias", "q_bias", "q_proj.bias")) for name in fitting)
    known = {name: fitting[name] for name in part_names if name in fitting and block_of(name) < depth}
    if not is_biased:  # of DINOv3's weights timm leaves out these biases, which are zero in published files
        known |= {name: value for name, value in plain.items() if name.endswith("qkv.bias") and value.any()}
    if problems := misfits(wanted, known, most=1):
        raise CheckpointError(
            f"{path} does not hold the weights of timm/{backbone.name}; {problems}; choose other weights, or the "
            "--arch that they were trained with"
        )
    return fitting


def patch_sizes(weights: Mapping[str, Tensor], path: str = "the file") -> tuple[int, int, int, int]:
    """Width, channels, patch side in pixels and grid side in patches of a ViT, from its weights."""
    projection, positions = weights.get("backbone.patch_embed.proj.weight"), weights.get("backbone.pos_embed")
    if projection is None or projection.ndim != 4:
        raise CheckpointError(
            f"{path}: these are not the weights of a vision transformer: patch_embed.proj.weight is missing among "
            f"{shortened(sorted(weights))}; {timm_remedy(weights)}"
        )
    if positions is None:
        raise CheckpointError(
            f"{path} has no pos_embed, so its vision transformer is not one of ours (rotary positions?); "
            f"{timm_remedy(weights)}"
        )
    embed_dim, in_chans, _, kernel = projection.shape
    return embed_dim, in_chans, kernel, math.isqrt(positions.shape[1] - 1)


def num_blocks(weights: Iterable[str]) -> int:
    """Number of blocks of a ViT, from the names of its weights."""
    return 1 + max((block_of(name) for name in weights), default=-1)


def block_of(name: str) -> int:
    """Index of the block that a weight belongs to; -1 for all others."""
    path = name.removeprefix("backbone.").removeprefix("model.")  # timm's names stand below model
    return int(path.split(".")[1]) if path.startswith("blocks.") else -1

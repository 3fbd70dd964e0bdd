"""The options of checkpoints, and of the commands that export and publish checkpoints; no torch here."""

import argparse
from typing import Any

from dino_sparo.models.architectures import ARCHITECTURES, arch_name
from dino_sparo.runtime.cli import Group, Option, Parser, positive_int

# The keys of `export.WRITERS` and `foreign.CLIP_FORMATS`, whose files import torch.
EXPORT_FORMATS = ("safetensors", "timm", "huggingface", "onnx", "open_clip", "sparo_clip")
CHECKPOINT: Group = {
    "pretrained_weights": Option(
        "",
        "A checkpoint, an export or released weights; dino_vits16, dino_resnet50, ...: weights of DINO's authors; "
        "timm/NAME: a model of timm with timm's weights; both are downloaded once. demo: the small encoder of this "
        "package. Without weights, the reference's scripts take the weights of its authors.",
    ),
    "checkpoint_key": Option("teacher", "Network in the checkpoint: teacher (usually better) or student.", str),
    "untrained": Option(
        False,
        "Evaluate random weights, as a control. The architecture is the checkpoint's, or without a checkpoint "
        "given by options such as --arch and --patch_size.",
    ),
}
FOREIGN_WEIGHTS: Group = {
    "arch": Option(
        None,
        f"Architecture, one of {', '.join(sorted(ARCHITECTURES))}; needed only if the weights' shapes do not determine "
        "it. vit_small_heads12 has 12 attention heads, as MoCo v3's, a number that files of weights do not contain.",
        arch_name,
    ),
    "patch_size": Option(
        None,
        "Side of a patch in pixels; only for --untrained without weights, because weights determine it.",
        positive_int,
    ),
    "quick_gelu": Option(
        False, "Give true for a CLIP's image tower with OpenAI's activation, unless an open_clip_config.json says so."
    ),
}


def foreign_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that describe foreign weights: architecture, patch size and activation."""
    return {name: getattr(args, name) for name in ("arch", "patch_size", "quick_gelu")}


EXPORTED: Group = {
    "checkpoint": Option(
        None, "A checkpoint of this package or of facebookresearch/dino, or raw ViT weights.", is_positional=True
    ),
    "out": Option(None, "Path of the result without suffix; for huggingface a folder.", is_positional=True),
    "checkpoint_key": CHECKPOINT["checkpoint_key"],
    "format": Option(
        "safetensors",
        "safetensors, huggingface and onnx take any read-out, timm takes cls. safetensors, open_clip (cls) and "
        "sparo_clip (sparo, linear, cls) write both towers of a CLIP.",
        choices=EXPORT_FORMATS,
    ),
    "img_size": Option(
        None,
        "Side of the images in pixels, by default the training size; an ONNX file takes only this size.",
        positive_int,
    ),
    "overwrite": Option(False, "Replace other files that have the names of the result."),
}


def export_parser() -> Parser:
    """The options of `dino_sparo.weights.export`."""
    return Parser({"files": EXPORTED, "foreign weights": FOREIGN_WEIGHTS})


PUSHED: Group = {
    "checkpoint": Option(
        None, "A checkpoint of this package or of facebookresearch/dino, or an export.", is_positional=True
    ),
    "repository": Option(
        None, "USER/NAME on the Hugging Face hub; created if it does not exist.", str, is_positional=True
    ),
    "checkpoint_key": CHECKPOINT["checkpoint_key"],
    "private": Option(False, "Create a private repository."),
}


def push_parser() -> Parser:
    """The options of `dino-sparo push`."""
    return Parser({"files": PUSHED})


def info_parser() -> Parser:
    """The options of `dino_sparo.weights.info`."""
    path = Option(
        None, "A file or folder that dino-sparo wrote, or a checkpoint of another package.", is_positional=True
    )
    return Parser({"file": {"path": path}})

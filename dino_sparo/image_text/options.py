"""The options that the trainings of all image-text objectives share, in the order of the data flow; their checks.

Defaults of towers and optimisation are OpenCLIP's for a ViT-B; patch, batch and warm-up are ours, for some 10^5 pairs
on one machine.
"""

import argparse
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dino_sparo.data.defaults import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from dino_sparo.data.options import IMAGE_LIMITS, NORMALIZATION, SPLIT_COLUMN, TRAINING_DATA
from dino_sparo.models.architectures import ARCHITECTURES, arch_name
from dino_sparo.models.options import PRETRAINED
from dino_sparo.runtime.cli import Group, Option, Parser, number_from_0, positive_int, positive_number, share_below_1
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.options import DEVICE
from dino_sparo.training.options import COMPUTE, LAYER_DECAY, MAX_STEPS, RUN, check_start, check_whole_patches

logger = logging.getLogger(__name__)

# Images are cropped little, since a caption describes all of the image. Source: OpenCLIP's default augmentation.
CROP_SCALE = (0.9, 1.0)
AUTO = "auto"  # class names, or templates, of the set of images itself
FOREIGN_OPTION = "--{name} is for open_clip's weights, but {source} says how its model is built; leave it out"

PAIR_KEYS: Group = {
    "image_key": Option(None, "Column of the images' paths in a table, if its name is not recognised.", str),
    "caption_key": Option(
        None,
        "Column of the captions in a table, if its name is not recognised. For shards: the key of the caption "
        "in the .json members; by default the .txt members are the captions.",
        str,
    ),
    "image_folder": Option(
        None, "Folder to which the paths in a table or in annotations are relative; by default the folder of that file."
    ),
}
PAIRS: Group = {
    "data_path": Option(
        None,
        "The pairs: tar shards in webdataset's form ('shard-{000..099}.tar', a.tar::b.tar, a folder of tars), a table "
        "(.csv, .tsv, .jsonl), COCO's annotations (.json), a folder of images with a .txt of the same name beside "
        "each, the built-in scenes (scenes:NUMBER:SIZE), or labelled images (class folders, cifar10:DIR), whose "
        "captions are made from class names.",
    ),
    "shards": Option(
        "indexed",
        "How tar shards are read. indexed: pair by pair, so that an epoch has each pair once and a resumed run "
        "is exact. streamed: webdataset reads whole shards, drawn at random with replacement. streamed suits "
        "remote shards (https://..., 'pipe:COMMAND') and hundreds of millions of pairs; it needs --epoch_pairs.",
        choices=("indexed", "streamed"),
    ),
    "epoch_pairs": Option(None, "Number of pairs in an epoch of --shards streamed, over all ranks.", positive_int),
    "shard_weights": Option(
        None,
        "Sampling weight of each source of --data_path (separated by ::) in a stream; by default its number of shards.",
        number_from_0,
        nargs="+",
    ),
    **PAIR_KEYS,
    "caption_templates": Option(
        None,
        "How captions are made from class names: sentences with {}, template lists or files, as --templates of "
        "dino-sparo zero-shot. Default for labelled images: auto.",
        nargs="+",
    ),
    "val_path": Option(
        None,
        "Pairs for validation after every epoch, in any format of --data_path. log.txt has their loss and "
        "recall in both directions.",
    ),
    "val_share": Option(
        0.0,
        "Share of the pairs to hold out for validation, instead of --val_path; at most 5000 pairs. 0: none.",
        share_below_1,
    ),
    **TRAINING_DATA,
    "crop_scale": Option(
        CROP_SCALE, "Range of a crop's share of the image's area; large, because a caption describes the whole image."
    ),
    "exact_crops": Option(
        False,
        "Resize crops with Pillow, as OpenCLIP does. By default torch resizes crops, which is faster; at most "
        "one pixel in fifty then differs, by one level of 255.",
    ),
}
IMAGE_ENCODER: Group = {
    "arch": Option(
        "vit_base",
        f"Architecture, one of {', '.join(sorted(ARCHITECTURES))}, or timm/NAME for a model of timm.",
        arch_name,
    ),
    "patch_size": Option(
        None,
        "Side of a patch in pixels. (default: 32 for CLIP, 16 for OC-CLIP; for timm/NAME the model's own)",
        positive_int,
    ),
    "img_size": Option(224, "Side of a crop in pixels.", positive_int),
    "pre_norm": Option(
        True,
        "Use CLIP's vision transformer. Give false for DINO's, as --init_from with a DINO or timm ViT needs. "
        "timm/NAME has its own form.",
    ),
    "quick_gelu": Option(
        False,
        "Use OpenAI's activation in both encoders, to start from OpenAI's weights or from models named -quickgelu.",
    ),
    "pretrained": PRETRAINED,
    "init_from": Option(
        None,
        "Start the image encoder from the weights in this file: a checkpoint of DINO, a DINO or timm ViT, or "
        "the image tower of a CLIP, with the same width and patch size. For timm/NAME, give weights of that "
        "model; a ViT's patch projection is resampled to --patch_size. A read-out of the same sizes is loaded "
        "too; all other parts start at random. A resumed run uses its own weights.",
    ),
    "init_clip": Option(
        None,
        "Start both encoders from a CLIP of this package, OpenCLIP or sparo-clip; parts that it lacks start at "
        "random. If --init_from is given too, its file provides the image encoder.",
    ),
}
TEXT_ENCODER: Group = {
    "text_width": Option(512, "Width of the tokens.", positive_int),
    "text_heads": Option(8, "Attention heads per block; a head is usually 64 wide.", positive_int),
    "text_layers": Option(12, "Number of blocks, including the block that sparo replaces.", positive_int),
    "context_length": Option(
        77,
        "Longest caption in tokens, including start and end; longer captions are truncated and counted.",
        positive_int,
    ),
}
OPTIMIZATION: Group = {
    "epochs": Option(32, "Epochs of the run, which the schedule spans.", positive_int),
    "max_steps": MAX_STEPS,
    "batch_size": Option(
        256, "Pairs per step, over all processes; every image is compared with all captions of the batch.", positive_int
    ),
    "grad_accum_steps": Option(
        1,
        "Number of parts into which a process splits its share of the batch. The gradients are the same, the "
        "memory is that of one part, and every pair is encoded twice.",
        positive_int,
    ),
    "lr": Option(5e-4, "Learning rate after the warm-up."),
    "layer_decay": LAYER_DECAY,
    "weight_decay": Option(0.2, "Weight decay of matrices."),
    "beta1": Option(0.9, "AdamW's decay of the mean gradient.", share_below_1),
    "beta2": Option(0.98, "AdamW's decay of the mean squared gradient.", share_below_1),
    "eps": Option(1e-6, "AdamW's epsilon.", positive_number),
    "min_lr": Option(0.0, "Learning rate at the end."),
    "warmup_steps": Option(
        500, "Steps of linear warm-up of the learning rate; a tenth of the run, if the run is shorter."
    ),
    "clip_grad": Option(0.0, "Largest norm of all gradients together; 0: no limit."),
    **COMPUTE,
}
PAIR_RUN: Group = {
    **RUN,
    "zero_shot_freq": Option(0, "Evaluate zero-shot every N epochs and keep the best checkpoint; 0: never."),
    "zero_shot_path": Option(
        None, "Labelled images for --zero_shot_freq; by default the validation split of --data_path."
    ),
}
PAIR_FILES = {"files of images": SPLIT_COLUMN | IMAGE_LIMITS, "normalisation": NORMALIZATION}
PAIR_DEFAULTS = {"saveckp_freq": 0, "norm_mean": OPENAI_CLIP_MEAN, "norm_std": OPENAI_CLIP_STD}


def training_parser(
    presets: Path,
    model: Mapping[str, Group],
    optimization: Group,
    pairs: Group | None = None,
    captions: Mapping[str, Group] | None = None,
    image: Group | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Parser:
    """The options of a training, in data-flow order.

    `presets` is a folder of recipes, one configuration file each. An objective has groups of the `model` behind both
    encoders and of what becomes of `captions`; it adds options to `OPTIMIZATION`, `PAIRS` and `IMAGE_ENCODER`, and may
    have other defaults.
    """
    files = {path.stem: path for path in presets.glob("*.yaml")}
    recipe = "A paper's recipe: values of the options below, which options on the command line override."
    return Parser(
        {
            "recipe": {"preset": Option(None, recipe, choices=sorted(files))},
            "pairs of images and captions": PAIRS | (pairs or {}),
            **(captions or {}),
            **PAIR_FILES,
            "image encoder: images -> tokens": IMAGE_ENCODER | (image or {}),
            "text encoder: captions -> tokens": TEXT_ENCODER,
            **model,
            "optimisation": OPTIMIZATION | optimization,
            "run": PAIR_RUN,
            "device and processes": DEVICE,
        },
        presets=files,
        defaults={**PAIR_DEFAULTS, **(defaults or {})},
    )


def shorten_warmups(args: argparse.Namespace, total_steps: int) -> None:
    """Replace warm-ups longer than the run by a tenth of the run."""
    for name in ("warmup_steps", "warmup_image", "warmup_text"):
        wanted = getattr(args, name, None)
        if wanted is not None and wanted > total_steps:
            setattr(args, name, total_steps // 10)
            logger.info(
                "--%s %d: the warm-up of %d does not fit a run of %d steps",
                *(name, total_steps // 10, wanted, total_steps),
            )


def check_pair_options(args: argparse.Namespace) -> None:
    """Refuse options that do not fit each other; the UserError names the option and what would fit."""
    if (args.shards == "streamed") != (args.epoch_pairs is not None):
        raise UserError(
            f"--shards {args.shards} with --epoch_pairs {args.epoch_pairs}: a stream has no length, so streamed needs "
            "the number of pairs to call an epoch, and indexed takes none"
        )
    if args.shard_weights is not None and args.shards != "streamed":
        raise UserError("--shard_weights is only for --shards streamed")
    if args.shards == "streamed" and args.caption_templates is not None:
        raise UserError("--caption_templates with --shards streamed: a stream has only written captions")
    if args.shards == "streamed" and args.val_share:
        raise UserError("--val_share with --shards streamed: a stream cannot be split; give --val_path")
    if args.shards == "streamed" and args.zero_shot_freq and not args.zero_shot_path:
        raise UserError("--zero_shot_freq with --shards streamed: give labelled images with --zero_shot_path")
    if args.val_share and args.val_path:
        raise UserError(f"--val_share {args.val_share} with --val_path {args.val_path}: give one of the two")
    check_start(args)
    check_whole_patches(args, "img_size")

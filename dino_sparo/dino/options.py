"""The options of DINO's training, in data-flow order, and their checks.

Names and defaults are those of facebookresearch/dino; `CHANGED` in `tests/runtime/test_cli.py` lists the defaults
that differ. No torch here: `--help` is answered before it is imported.
"""

import argparse
import logging
from typing import Any

from dino_sparo.runtime.choices import OPTIMIZERS
from dino_sparo.runtime.cli import (
    Parser,
    add_architecture_options,
    add_device_options,
    add_normalization_options,
    add_source_options,
    add_training_data_options,
    bool_flag,
)
from dino_sparo.training.options import (
    add_compute_options,
    add_numbers,
    add_run_options,
    check_ranges,
    check_whole_patches,
)

logger = logging.getLogger(__name__)

REFERENCE_BATCH = 256  # images; learning rates are stated for it and scaled with the batch
# Defaults of the reference that do not fit every run; see `fill_in_defaults`.
WARMUP_EPOCHS, FREEZE_LAST_LAYER = 10, 1
POSITIVE_OPTIONS = ("epochs", "max_steps", "batch_size_per_gpu", "grad_accum_steps", "patch_size", "keep_checkpoints")
NON_NEGATIVE_OPTIONS = (
    *("warmup_epochs", "saveckp_freq", "saveckp_minutes", "knn_freq", "num_workers", "freeze_last_layer", "clip_grad"),
    *("lr", "min_lr", "weight_decay", "weight_decay_end", "loss_chunk"),
)


def get_args_parser() -> Parser:
    """The options of training, in data-flow order."""
    parser = Parser()
    _add_data_options(parser)
    add_source_options(parser)
    _add_crop_options(parser)
    add_normalization_options(parser)
    add_architecture_options(parser)
    _add_head_options(parser)
    _add_loss_options(parser)
    _add_optimization_options(parser)
    _add_run_options(parser)
    add_device_options(parser)
    return parser


def _add_data_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("images")
    group.add_argument(
        "--data_path",
        default=None,
        help="Where the images are: a folder, a list (.txt) or table (.csv, .tsv, .jsonl) of paths, tar shards "
        "(shard-{000..099}.tar), a torchvision set (cifar10:DIR), or the built-in scenes (scenes:NUMBER:SIZE).",
    )
    add_training_data_options(group, "unreadable images")
    add_numbers(
        group,
        batch_size_per_gpu=(64, "Images per process and forward pass."),
        grad_accum_steps=(
            1,
            "Forward passes per step; their gradients are averaged, as if the batch were that many times larger.",
        ),
    )


def _add_crop_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("crops")
    add_numbers(
        group,
        global_crops_size=(224, "Side of the global crops in pixels."),
        local_crops_size=(96, "Side of the local crops in pixels."),
    )
    group.add_argument(
        "--global_crops_scale",
        type=float,
        nargs=2,
        default=(0.4, 1.0),
        help="Share of the image's area in a global crop; without local crops a wider range, 0.14 1, works better.",
    )
    group.add_argument("--local_crops_number", type=int, default=8, help="Local crops per image; 0 for none.")
    group.add_argument(
        "--local_crops_scale", type=float, nargs=2, default=(0.05, 0.4), help="Share of the area in a local crop."
    )
    group.add_argument(
        "--distort_on",
        default="auto",
        choices=["auto", "cpu", "device"],
        help="Where crops get colour jitter, blur and solarisation: cpu, in the processes that load images; device, in "
        "batches, so that these processes only decode and cut; auto: device on GPUs, else cpu.",
    )


def _add_head_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("head: encoding -> logits")
    group.add_argument(
        "--out_dim",
        type=int,
        default=65536,
        help="Number of prototypes K. Large for large and varied data; a few thousand for tens of thousands of images.",
    )
    group.add_argument(
        "--norm_last_layer",
        type=bool_flag,
        default=True,
        help="Keep the prototypes' lengths at one. False can be better for a ViT-S, and less stable.",
    )
    group.add_argument(
        "--head_hidden_dim", type=int, default=2048, help="Width of the head's MLP; less saves time with tiny encoders."
    )
    group.add_argument(
        "--use_bn_in_head",
        type=bool_flag,
        default=False,
        help="Batch norm in the head's MLP. On several GPUs it takes the statistics of all, which stalls every step.",
    )


def _add_loss_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("loss and teacher")
    add_numbers(
        group,
        warmup_teacher_temp=(0.04, "Teacher's temperature in the first epoch; lower it if the loss does not fall."),
        teacher_temp=(0.04, "Teacher's temperature after the warm-up; above 0.07 training is usually unstable."),
        warmup_teacher_temp_epochs=(0, "Epochs of linear warm-up from --warmup_teacher_temp to --teacher_temp."),
        momentum_teacher=(
            0.996,
            "Momentum of the moving average in the first step, rising to 1; 0.9995 suits a batch of 256, and lower "
            "values short runs.",
        ),
    )


def _add_optimization_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimisation")
    group.add_argument("--epochs", type=int, default=100, help="Epochs of the run, which the schedules span.")
    group.add_argument(
        "--max_steps",
        type=int,
        default=None,
        help="Stop after this many steps, for trials; the schedules are those of --epochs.",
    )
    group.add_argument("--optimizer", default="adamw", choices=sorted(OPTIMIZERS), help="adamw suits transformers.")
    group.add_argument(
        "--lr",
        type=float,
        default=0.0005,
        help=f"Learning rate after the warm-up, for a batch of {REFERENCE_BATCH} images; scaled with the batch.",
    )
    group.add_argument(
        "--warmup_epochs",
        type=int,
        default=None,
        help=f"Epochs of linear warm-up of the learning rate. (default: {WARMUP_EPOCHS}; in a shorter run "
        "1, in a run of one epoch 0)",
    )
    add_numbers(
        group,
        min_lr=(1e-6, "Learning rate at the end."),
        weight_decay=(0.04, "Weight decay in the first step."),
        weight_decay_end=(0.4, "Weight decay in the last step."),
        clip_grad=(3.0, "Largest norm of a parameter's gradient; 0 for no limit."),
    )
    group.add_argument(
        "--freeze_last_layer",
        type=int,
        default=None,
        help="Epochs during which the prototypes stay as drawn; more if the loss does not fall. (default: "
        f"{FREEZE_LAST_LAYER}; 0 in a run of one epoch)",
    )
    add_compute_options(group, "the student")
    group.add_argument(
        "--loss_chunk",
        type=int,
        default=0,
        help="Prototypes that the loss computes together; 0 for all. Fewer take less memory and more time.",
    )
    group.add_argument(
        "--use_fp16", type=bool_flag, default=None, help="The reference's option: true for fp16, false for fp32."
    )


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    group = add_run_options(parser, saveckp_freq=20)
    group.add_argument(
        "--knn_freq",
        type=int,
        default=0,
        help="Probe the teacher with 20-NN every so many epochs, on a few thousand labelled images, and keep the best "
        "checkpoint; 0: never.",
    )


def check_options(args: argparse.Namespace) -> None:
    """Refuse numbers out of range and crops that the patches do not divide.

    Raises:
        ValueError: names the option and what would fit.
    """
    check_ranges(args, POSITIVE_OPTIONS, NON_NEGATIVE_OPTIONS, ("momentum_teacher", "max_corrupt"))
    if args.warmup_epochs is not None and args.warmup_epochs > args.epochs:
        raise ValueError(
            f"--warmup_epochs {args.warmup_epochs} is longer than the run of {args.epochs} epochs; shorten it"
        )
    check_whole_patches(args, "global_crops_size", *(["local_crops_size"] if args.local_crops_number else []))


def fill_in_defaults(args: argparse.Namespace) -> dict[str, int]:
    """Give options whose default depends on the run's length their values: the reference's, where they fit.

    A warm-up must not be longer than the run, and the prototypes must learn at least in the last epoch. Else one epoch
    is enough, and none in a run of one epoch. The log names what differs from the reference.

    Args:
        args: parsed options; those that are None are changed in place.

    Returns:
        The values that were filled in, by name.
    """
    filled_in = {}
    for name, reference, most in (
        ("warmup_epochs", WARMUP_EPOCHS, args.epochs),
        ("freeze_last_layer", FREEZE_LAST_LAYER, args.epochs - 1),
    ):
        if getattr(args, name) is None:
            filled_in[name] = reference if reference <= most else min(1, args.epochs - 1)
            setattr(args, name, filled_in[name])
            if filled_in[name] != reference:
                logger.info(
                    "--%s %d: the default of %d does not fit a run of %d epochs",
                    *(name, filled_in[name], reference, args.epochs),
                )
    return filled_in


def defaults_of(args: argparse.Namespace) -> dict[str, Any]:
    """Fill in what depends on the run's length; returns all options as they would be by default."""
    return {**vars(get_args_parser().parse_args([])), **fill_in_defaults(args)}

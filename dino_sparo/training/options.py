"""The options of a run that all objectives share, and their checks."""

import argparse

from dino_sparo.models.architectures import TIMM
from dino_sparo.runtime.cli import Group, Option, positive_int, share
from dino_sparo.runtime.faults import INSTALL, UserError, require
from dino_sparo.runtime.options import PRECISIONS

# The keys of `optim.OPTIMIZERS` and `trackers.TRACKERS`, whose files import torch.
OPTIMIZERS = ("adamw", "lars", "sgd")
TRACKERS = ("tensorboard", "wandb", "trackio")
COMPUTE: Group = {
    "precision": Option(
        "auto",
        "Precision of the forward passes; the loss is fp32. auto: bf16 if the device supports bf16, else "
        "fp32. tf32: fp32 with faster matrix products on GPUs, with three correct digits instead of seven.",
        choices=("auto", *PRECISIONS),
    ),
    "compile": Option(
        "auto",
        "Compile networks and loss with torch.compile, which takes a minute or two in the first step; auto: on "
        "GPUs only. regions: DINO and SimDINO compile one block of a vision transformer for all, which takes about "
        "half the time.",
        choices=("auto", "on", "regions", "off"),
    ),
    "grad_checkpointing": Option(
        False, "Recompute the trained encoders' activations in the backward pass: less memory, a third slower."
    ),
}
LAYER_DECAY = Option(
    None,
    "Factor between the learning rates of neighbouring layers of the image backbone: deeper layers learn "
    "faster. 0.65 to 0.9 preserves released weights. By default all layers have the same rate.",
    share,
)
MAX_STEPS = Option(
    None, "Stop after this number of steps in total, for trials; the schedules still follow --epochs.", positive_int
)
RUN: Group = {
    "output_dir": Option(None, "Folder of checkpoints and logs. A run in this folder is resumed."),
    "saveckp_freq": Option(20, "Keep a checkpoint every N epochs; 0: never."),
    "saveckp_minutes": Option(
        30.0, "Also save every N minutes within an epoch; a crash loses at most N minutes. 0: save only after epochs."
    ),
    "keep_checkpoints": Option(
        3,
        "Number of checkpoints to keep. If the newest is damaged, the run resumes from the previous one.",
        positive_int,
    ),
    "allow_rescale": Option(
        False,
        "Resume with another total batch: schedules and the position in the epoch are computed from the number "
        "of images seen. Without this option, another total batch is refused.",
    ),
    "report_to": Option(
        ("tensorboard",),
        "Trackers that receive losses, options and pictures. tensorboard: files in --output_dir. wandb: Weights "
        "& Biases. trackio: Trackio, on this machine. Give several trackers, or none.",
        choices=TRACKERS,
        nargs="*",
    ),
    "run_name": Option(None, "Name of the run in the trackers; by default the name of --output_dir.", str),
    "seed": Option(0, "Random seed of weights, order of the data, crops and all other random choices."),
}


def check_run(args: argparse.Namespace) -> None:
    """Refuse a training without data, without a folder for its checkpoints, or with a tracker that is not installed.

    Raises:
        UserError: names what is missing, and how to try the program without data.
        MissingPackageError: says how to install the tracker.
    """
    missing = [f"--{name}" for name in ("data_path", "output_dir") if not getattr(args, name)]
    if missing:
        raise UserError(
            f"give {' and '.join(missing)}. Without data of your own, `--data_path scenes` trains on the built-in "
            "scenes; `dino-sparo demo` trains, evaluates and draws in minutes"
        )
    for name in args.report_to:
        if name in INSTALL:
            require(name, f"runs with --report_to {name}")


def check_start(args: argparse.Namespace) -> None:
    """Refuse two sources of initial weights, and published weights of an architecture that has none."""
    if args.pretrained and args.init_from:
        raise UserError(f"--pretrained with --init_from {args.init_from}: give one of the two")
    if args.pretrained and not args.arch.startswith(TIMM):
        raise UserError(f"--pretrained with --arch {args.arch}: only timm/NAME has published weights; give --init_from")


def check_whole_patches(args: argparse.Namespace, *sizes: str) -> None:
    """Refuse images, in pixels, that are not cut into whole patches.

    Raises:
        ValueError: names the option and the nearest size that fits.
    """
    patch = args.patch_size
    for name in sizes:
        size = getattr(args, name)
        if patch is not None and (size < patch or size % patch):
            raise UserError(
                f"--{name} {size} px is not a multiple of --patch_size {patch} px; the nearest multiple is "
                f"{max(round(size / patch), 1) * patch}"
            )

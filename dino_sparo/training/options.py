"""The options of a run that all objectives share, and their checks."""

import argparse

from dino_sparo.runtime.choices import PRECISIONS, TIMM, TRACKERS
from dino_sparo.runtime.cli import Group, Option, positive_int, share

COMPUTE: Group = {
    "precision": Option(
        "auto",
        "Precision of the forward passes; auto is bf16 where the device supports it, else fp32. The loss is fp32 in "
        "any case. tf32 is fp32 with rounded factors of matrix products on GPUs: faster, with three digits instead of "
        "seven.",
        choices=("auto", *PRECISIONS),
    ),
    "compile": Option(
        "auto",
        "torch.compile of networks and loss, a minute or two in the first step; auto: on GPUs.",
        choices=("auto", "on", "off"),
    ),
    "grad_checkpointing": Option(
        False, "Compute activations of the trained encoders again for the backward pass: less memory, a third slower."
    ),
    "memory_report": Option(
        False, "Log how much memory weights, gradients, optimizer and activations take in the first step."
    ),
}
LAYER_DECAY = Option(
    None,
    "Factor of the learning rate between two layers of the image backbone: deeper layers learn faster. 0.65 to 0.9 "
    "protects released weights; by default all layers have one rate.",
    share,
)
MAX_STEPS = Option(
    None, "Stop after this many steps in all, for trials; the schedules are those of --epochs.", positive_int
)
RUN: Group = {
    "output_dir": Option(None, "Folder of checkpoints and logs; a run that lies there is resumed."),
    "saveckp_freq": Option(20, "Keep a checkpoint every N epochs; 0: never."),
    "saveckp_minutes": Option(
        30.0, "Also save every N minutes within an epoch; a crash costs at most that time. 0: only after epochs."
    ),
    "keep_checkpoints": Option(
        3, "Number of last checkpoints to keep; if the newest is damaged, the one before is used.", positive_int
    ),
    "allow_rescale": Option(
        False,
        "Resume with another batch (of all processes together): schedules and the position in the epoch follow from "
        "the items seen. Without this option another batch is refused.",
    ),
    "report_to": Option(
        ("tensorboard",),
        "Trackers that get losses, options and pictures. tensorboard: files in --output_dir. wandb: Weights & Biases. "
        "trackio: Trackio, on this machine. Several may be named; without a name none gets anything.",
        choices=TRACKERS,
        nargs="*",
    ),
    "run_name": Option(None, "Name of the run on the trackers' pages; by default that of --output_dir."),
    "seed": Option(0, "Random seed of the weights, the order of the data, the crops and all else that is random."),
}


def require_paths(args: argparse.Namespace) -> None:
    """Refuse a training without data or without a folder for its checkpoints.

    Raises:
        ValueError: names what is missing, and how to try the program without data.
    """
    missing = [f"--{name}" for name in ("data_path", "output_dir") if not getattr(args, name)]
    if missing:
        raise ValueError(
            f"give {' and '.join(missing)}. Without data of your own, `--data_path scenes` trains on the built-in "
            "scenes; `dino-sparo demo` trains, evaluates and draws in minutes"
        )


def check_start(args: argparse.Namespace) -> None:
    """Refuse two sources of initial weights, and published weights of an architecture that has none."""
    if args.pretrained and args.init_from:
        raise ValueError(f"--pretrained with --init_from {args.init_from}: give one of the two")
    if args.pretrained and not args.arch.startswith(TIMM):
        raise ValueError(
            f"--pretrained with --arch {args.arch}: only timm/NAME has published weights; give --init_from"
        )


def check_whole_patches(args: argparse.Namespace, *sizes: str) -> None:
    """Refuse images, in pixels, that are not cut into whole patches.

    Raises:
        ValueError: names the option and the nearest size that fits.
    """
    patch = args.patch_size
    for name in sizes:
        size = getattr(args, name)
        if size < patch or size % patch:
            raise ValueError(
                f"--{name} {size} px is not a multiple of --patch_size {patch} px; the nearest that fits is "
                f"{max(round(size / patch), 1) * patch}"
            )

"""The options of a run that all objectives share."""

import argparse
from collections.abc import Callable, Iterable

from dino_sparo.runtime.choices import PRECISIONS, TRACKERS


def add_numbers(group: argparse._ArgumentGroup, **options: tuple[int | float, str]) -> None:
    """Add options that take a number: name = (default, help); the default's type is the option's."""
    for name, (default, text) in options.items():
        group.add_argument(f"--{name}", type=type(default), default=default, help=text)


def add_compute_options(
    group: argparse._ArgumentGroup, networks: str, precision: str | None = "auto", describe: Callable[[str], str] = str
) -> None:
    """Precision, compiling, memory.

    Args:
        group: to add to.
        networks: what `--grad_checkpointing` is about, for its help.
        precision: default of `--precision`.
        describe: adds to the help of `--precision`.
    """
    group.add_argument(
        "--precision",
        default=precision,
        choices=["auto", *PRECISIONS],
        help=describe(
            "Precision of the forward passes; auto is bf16 where the device supports it, else fp32. The loss is fp32 "
            "in any case. tf32 is fp32 with rounded factors of matrix products on GPUs: faster, with three digits "
            "instead of seven."
        ),
    )
    group.add_argument(
        "--compile",
        default="auto",
        choices=["auto", "on", "off"],
        help="torch.compile of networks and loss, in the first step, which takes a minute or two; auto: on GPUs.",
    )
    group.add_argument(
        "--grad_checkpointing",
        action="store_true",
        help=f"Compute the activations of {networks} again for the backward pass: less memory, a third slower.",
    )
    group.add_argument(
        "--memory_report",
        action="store_true",
        help="Log how much memory weights, gradients, optimizer and activations take in the first step.",
    )


def add_run_options(parser: argparse.ArgumentParser, saveckp_freq: int) -> argparse._ArgumentGroup:
    """Where a run is saved, and how often.

    Args:
        parser: to add to.
        saveckp_freq: default of `--saveckp_freq`.

    Returns:
        The group, for what an objective adds.
    """
    group = parser.add_argument_group("run")
    group.add_argument(
        "--output_dir", default=None, help="Folder of checkpoints and logs; a run that lies there is resumed."
    )
    group.add_argument(
        "--saveckp_freq", type=int, default=saveckp_freq, help="Keep a checkpoint every so many epochs; 0: never."
    )
    add_numbers(
        group,
        saveckp_minutes=(
            30.0,
            "Also save every so many minutes within an epoch; a crash costs at most that time. 0: only after epochs.",
        ),
        keep_checkpoints=(3, "Number of last checkpoints to keep; if the newest is damaged, the one before is used."),
    )
    group.add_argument(
        "--allow_rescale",
        action="store_true",
        help="Resume with another batch (of all processes together): schedules and the position in the epoch follow "
        "from the items seen. Without this option another batch is refused.",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        help="Random seed of the weights, the order of the data, the crops and all else that is random.",
    )
    group.add_argument(
        "--report_to",
        nargs="*",
        default=("tensorboard",),
        choices=TRACKERS,
        help="Trackers that get losses, options and pictures. tensorboard: files in --output_dir. wandb: Weights & "
        "Biases. trackio: Trackio, on this machine. Several may be named.",
    )
    group.add_argument(
        "--run_name", default=None, help="Name of the run on the trackers' pages; by default that of --output_dir."
    )
    return group


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


def check_ranges(
    args: argparse.Namespace, positive: Iterable[str], non_negative: Iterable[str], shares: Iterable[str]
) -> None:
    """Refuse numbers that cannot be; an option that was left open is None.

    Args:
        args: the options.
        positive: names of those above 0.
        non_negative: names of those that may be 0.
        shares: names of those from 0 to 1.

    Raises:
        ValueError: names the option, its value and what would fit.
    """
    rules: list[tuple[Iterable[str], Callable[[float], bool], str]] = [
        (positive, lambda value: value > 0, "a positive number"),
        (non_negative, lambda value: value >= 0, "0 or more"),
        (shares, lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    ]
    for names, fits, words in rules:
        for name in names:
            value = getattr(args, name)
            if value is not None and not fits(value):
                raise ValueError(f"--{name} {value}: give {words}")


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

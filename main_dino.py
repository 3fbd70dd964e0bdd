"""Pretrain a vision transformer with DINO and a SPARO read-out.

    python main_dino.py --data_path scenes --output_dir runs/first                # built-in scenes, this machine
    torchrun --nproc_per_node=8 main_dino.py --data_path imagenet/train --output_dir runs/vits16
    python run_with_submitit.py ...                                               # the same on Slurm

Options stand in the order of the data flow. Those of facebookresearch/dino keep their names and, but for five, their
defaults. `dino_sparo/dino/train.py` builds what they describe, `dino_sparo/training/run.py` trains it. The same command
resumes from the last checkpoint.
"""

import argparse
from collections.abc import Sequence

from dino_sparo.__main__ import command_line
from dino_sparo.dino.options import check_options, fill_in_defaults, get_args_parser

__all__ = ["check_options", "fill_in_defaults", "get_args_parser", "main", "train_dino"]


def train_dino(args: argparse.Namespace) -> None:
    """Train DINO with these options, or resume from the last checkpoint; `training.run.train` lists the errors."""
    from dino_sparo.dino.train import DINOObjective  # not above: it imports torch, and --help need not wait for that
    from dino_sparo.training.run import train

    train(args, DINOObjective)


def main(argv: Sequence[str] | None = None) -> None:
    """Train with these options, as `dino-sparo train`; None: the command line's."""
    with command_line("train", argv, prog="main_dino.py") as args:
        train_dino(args)


if __name__ == "__main__":
    main()

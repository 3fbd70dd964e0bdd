"""Pretrain a vision transformer with DINO and a SPARO read-out.

    python main_dino.py --output_dir runs/first                                   # built-in scenes, this machine
    torchrun --nproc_per_node=8 main_dino.py --data_path imagenet/train --output_dir runs/vits16
    python run_with_submitit.py ...                                               # the same on Slurm

Options stand in the order of the data flow, with the names and defaults of facebookresearch/dino. What they describe
is built in `dino_sparo/dino/train.py`; the run is `dino_sparo/training/run.py`. Starting the same command again goes on
from the last checkpoint.
"""

from dino_sparo.cli import command_parser, errors_in_one_line
from dino_sparo.dino.options import check_options, defaults_of, fill_in_defaults, get_args_parser

if __name__ == "__main__":
    # --help and mistakes are answered before torch is imported.
    command_parser(get_args_parser(), __doc__).parse_args()

import argparse
import logging

from dino_sparo.dino.train import DINOObjective
from dino_sparo.training.loop import MENDABLE_ERRORS
from dino_sparo.training.run import train

__all__ = ["MENDABLE_ERRORS", "check_options", "fill_in_defaults", "get_args_parser", "main", "train_dino"]

logger = logging.getLogger("main_dino")


def train_dino(args: argparse.Namespace) -> None:
    """Train DINO with these options, or go on from the last checkpoint; see `training.run.train` for what is raised."""
    train(args, check_options, defaults_of, DINOObjective)


def main(argv: list[str] | None = None) -> None:
    """Parse the options and train; a mistake in them ends with one line, not a traceback."""
    args = command_parser(get_args_parser(), __doc__).parse_args(argv)
    with errors_in_one_line(logger, *MENDABLE_ERRORS):
        train_dino(args)


if __name__ == "__main__":
    main()

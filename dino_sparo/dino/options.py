"""The options of DINO's training, in data-flow order, and their checks.

`distillation/options.py` has what every objective with a student and a teacher takes.
"""

import argparse

from dino_sparo.distillation import options as shared
from dino_sparo.distillation.options import check_options
from dino_sparo.runtime.cli import Group, Option, Parser

__all__ = ["check_options", "fill_in_defaults", "get_args_parser"]

OPTIMIZATION: Group = {
    **shared.FREEZE_LAST_LAYER,
    "loss_chunk": Option(
        0, "Number of prototypes that the loss computes at a time; 0: all. Fewer take less memory and more time."
    ),
}


def get_args_parser() -> Parser:
    """The options of training, in data-flow order."""
    return shared.parser_of(shared.PROTOTYPES, shared.PROTOTYPE_LOSS, OPTIMIZATION)


def fill_in_defaults(args: argparse.Namespace) -> dict[str, int | float]:
    """`distillation.options.fill_in_defaults`; the prototypes must learn at least in the last epoch."""
    return shared.fill_in_defaults(args, {"freeze_last_layer": (shared.FROZEN_EPOCHS, args.epochs - 1)})

"""The options of DINO's training, in data-flow order, and their checks.

`distillation/options.py` has what every objective with a student and a teacher takes.
"""

import argparse

from dino_sparo.distillation import options as shared
from dino_sparo.distillation.options import check_options
from dino_sparo.runtime.cli import Group, Option, Parser, whole_number

__all__ = ["check_options", "fill_in_defaults", "get_args_parser"]

FREEZE_LAST_LAYER = 1  # the reference's default, which does not fit every run; see `fill_in_defaults`

HEAD: Group = {
    "out_dim": Option(
        65536,
        "Number of prototypes K: many for large and varied data, a few thousand for tens of thousands of images.",
    ),
    "norm_last_layer": Option(
        True, "Keep the prototypes at unit length. False can be more accurate for a ViT-S, but is less stable."
    ),
}
LOSS: Group = {
    "koleo_weight": Option(
        0.0,
        "Weight of the KoLeo loss, which spreads the student's encodings apart; 0: none. DINOv2 uses 0.1. Try "
        "this option if encodings collapse.",
    ),
    "warmup_teacher_temp": Option(
        0.04, "Teacher's temperature in the first epoch; lower it if the loss does not fall."
    ),
    "teacher_temp": Option(0.04, "Teacher's temperature after the warm-up; above 0.07 training is usually unstable."),
    "warmup_teacher_temp_epochs": Option(0, "Epochs of linear warm-up from --warmup_teacher_temp to --teacher_temp."),
}
OPTIMIZATION: Group = {
    "freeze_last_layer": Option(
        None,
        "Epochs at the start during which the prototypes are frozen; more if the loss does not fall. (default: "
        f"{FREEZE_LAST_LAYER}; 0 in a run of one epoch)",
        whole_number,
    ),
    "loss_chunk": Option(
        0, "Number of prototypes that the loss computes at a time; 0: all. Fewer take less memory and more time."
    ),
}


def get_args_parser() -> Parser:
    """The options of training, in data-flow order."""
    return shared.parser_of(HEAD, LOSS, OPTIMIZATION)


def fill_in_defaults(args: argparse.Namespace) -> dict[str, int | float]:
    """`distillation.options.fill_in_defaults`; the prototypes must learn at least in the last epoch."""
    return shared.fill_in_defaults(args, {"freeze_last_layer": (FREEZE_LAST_LAYER, args.epochs - 1)})

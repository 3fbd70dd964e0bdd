"""The options of SimDINO's training, in data-flow order, and their checks; names are RobinWu218/SimDINO's."""

import argparse

from dino_sparo.distillation import options as shared
from dino_sparo.runtime.cli import Group, Option, Parser, positive_int

HEAD: Group = {"z_dim": Option(256, "Width of the features that the loss compares.", positive_int)}
LOSS: Group = {
    "coeff": Option(1.0, "Weight of the cosine between student and teacher, relative to the coding rate."),
    "eps": Option(
        0.05, "Square of the coding rate's precision; the authors' code has 0.5, their published runs have 0.05."
    ),
    "expa_type": Option(
        1,
        "Features whose coding rate is maximised: 1, the mean of student and teacher (smoother); 0, the student's.",
        choices=(0, 1),
    ),
}


def get_args_parser() -> Parser:
    """The options of training, in data-flow order."""
    return shared.parser_of(HEAD, LOSS, {})


def check_options(args: argparse.Namespace) -> None:
    """Refuse options that do not fit, shared ones included; `ValueError` names the option and a remedy."""
    shared.check_options(args)
    if args.eps <= 0:
        raise ValueError(f"--eps {args.eps}: the coding rate needs a positive number, usually 0.05 to 0.5")

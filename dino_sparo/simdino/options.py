"""The options of SimDINO's training in data-flow order; names are RobinWu218/SimDINO's."""

from dino_sparo.distillation import options as shared
from dino_sparo.distillation.options import check_options
from dino_sparo.runtime.cli import Group, Option, Parser, positive_int, positive_number

__all__ = ["check_options", "get_args_parser"]

HEAD: Group = {"z_dim": Option(256, "Width of the features that the loss compares.", positive_int)}
LOSS: Group = {
    "coeff": Option(1.0, "Weight of the cosine between student and teacher, relative to the coding rate."),
    "eps": Option(
        0.05,
        "Square of the coding rate's precision; the authors' code has 0.5, their published runs have 0.05.",
        positive_number,
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

"""The options of `dino-sparo oc-pictures`, without torch."""

from dino_sparo.image_text.evaluation.options import add_graphs_option, add_picture_options, add_picture_result_options
from dino_sparo.runtime.cli import Parser


def get_args_parser() -> Parser:
    """The options, in data-flow order."""
    parser = Parser()
    group = add_picture_options(parser, "Checkpoint of OC-CLIP training.")
    add_graphs_option(group)
    group = parser.add_argument_group("choice of pairs")
    group.add_argument(
        "--pairs",
        type=int,
        nargs="+",
        default=None,
        help="Numbers of the pairs to show, from 0; by default --max_rows, evenly spread over those whose caption has "
        "two relations; where they are too few, one, or none.",
    )
    group.add_argument("--max_rows", type=int, default=4, help="Pairs to show, if they are not named.")
    group.add_argument(
        "--max_pairs",
        type=int,
        default=400,
        help="Look for relations in so many captions, evenly spread over the data.",
    )
    group = parser.add_argument_group("maps")
    group.add_argument(
        "--default_tokens",
        action="store_true",
        help="Draw the map of every default token too, on the scale of the entities. Without it one panel shows what "
        "they take together.",
    )
    add_picture_result_options(parser)
    return parser

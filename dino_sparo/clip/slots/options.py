"""The options of the commands that choose, weigh, count and draw slots, without torch.

Each command imports its parser from here and parses before it imports torch.
"""

from dino_sparo.clip.choices import MASK_SCALES, PER_SLOT, Criteria, FitSettings
from dino_sparo.image_text.evaluation.options import (
    add_class_options,
    add_computation_options,
    add_image_options,
    add_model_options,
    add_picture_options,
    add_picture_result_options,
    add_question_options,
)
from dino_sparo.runtime.cli import Parser, add_download_option, positive_int


def select_parser() -> Parser:
    """The options of `select.py`, in data-flow order."""
    parser = Parser()
    add_model_options(parser, reads_graphs=False)
    group = add_image_options(parser)
    group.add_argument(
        "--max_images", type=int, default=None, help="Most images to take; of more, a random subset. By default all."
    )
    add_class_options(parser)
    group = parser.add_argument_group("selection")
    group.add_argument(
        "--keep",
        type=int,
        default=None,
        help="Slots to keep; the paper keeps 32 of 64 or 128. By default as many as classify these images best.",
    )
    add_computation_options(parser, "slots.json")
    return parser


def mask_parser() -> Parser:
    """The options of `mask.py`, in data-flow order."""
    parser = Parser()
    add_model_options(parser, reads_graphs=False)
    add_question_options(parser)
    group = parser.add_argument_group("mask")
    group.add_argument(
        "--parts",
        default=PER_SLOT,
        help="What has a weight: slot, dimension, or a number of contiguous equal parts for models without slots.",
    )
    group.add_argument("--epochs", type=int, default=FitSettings.epochs, help="Passes over the pairs.")
    group.add_argument("--lr", type=float, default=FitSettings.lr, help="Learning rate of SGD.")
    group.add_argument("--momentum", type=float, default=FitSettings.momentum, help="Momentum of SGD.")
    group.add_argument(
        "--mask_batch_size",
        type=int,
        default=FitSettings.batch_size,
        help="Pairs per step; the paper does not say how many.",
    )
    group.add_argument(
        "--mask_scale",
        choices=MASK_SCALES,
        default=FitSettings.bound,
        help="Bound of the inverse temperature: min is CLIP's min(100, exp(alpha)), which learns; max is the "
        "max(100, exp(alpha)) that SPARO's appendix 0.C.1 prints, which saturates in the first epochs.",
    )
    group.add_argument("--seed", type=int, default=FitSettings.seed, help="Random seed of the order of the pairs.")
    group = parser.add_argument_group("evaluation elsewhere")
    group.add_argument(
        "--evaluate",
        nargs="+",
        default=[],
        metavar="DATA_PATH",
        help="Labelled images to classify with and without the mask, each with its own class names and templates; for "
        "others run dino-sparo zero-shot with and without --slots mask.json.",
    )
    add_download_option(group)
    add_computation_options(parser, "mask.json")
    return parser


def pictures_parser() -> Parser:
    """The options of `clip/pictures/draw.py`, in data-flow order."""
    parser = Parser()
    group = add_picture_options(parser, "Checkpoint of CLIP training, of a model with slots.")
    group.add_argument("--max_pairs", type=int, default=400, help="Most pairs to search, evenly spread over the data.")
    group.add_argument(
        "--image_size",
        type=positive_int,
        default=None,
        help="Side in pixels at which the model sees the central square; by default that of training, for which its "
        "slots were made alike. Twice as much shows finer maps.",
    )
    group = parser.add_argument_group("choice of slots and pairs")
    group.add_argument(
        "--slots",
        nargs="+",
        default=None,
        help="Numbers of the slots to show, or a file of dino-sparo select; by default they are chosen.",
    )
    group.add_argument("--max_slots", type=int, default=3, help="Rows, if they are chosen.")
    group.add_argument("--max_columns", type=int, default=4, help="Pairs to show; of no more pairs all, as they come.")
    group.add_argument(
        "--min_cosine", type=float, default=Criteria().min_cosine, help="Choose slots alike in image and caption."
    )
    group.add_argument(
        "--min_sharpness",
        type=float,
        default=Criteria().min_sharpness,
        help="Choose slots that give at least this share of their attention to one word.",
    )
    add_picture_result_options(parser)
    return parser

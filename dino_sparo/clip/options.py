"""The options of CLIP's training, in the order of the data flow, and the numbers that they may have.

Parsing is pure: it opens no file, touches no device, asks no network.
"""

import argparse

from dino_sparo.clip.choices import FREEZABLE, PRODUCTS, TOWERS
from dino_sparo.clip.presets import RECIPES
from dino_sparo.image_text.options import (
    add_image_options,
    add_optimization_options,
    add_pair_options,
    add_pair_run_options,
    add_preset_option,
    add_text_options,
    check_pair_options,
)
from dino_sparo.runtime.choices import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from dino_sparo.runtime.cli import (
    Parser,
    add_device_options,
    add_normalization_options,
    add_slot_options,
    add_source_options,
    bool_flag,
)

POSITIVE_OPTIONS = ("sparo_slots", "sparo_slot_dim", "sparo_key_dim", "sparo_group_size")


def get_args_parser() -> Parser:
    """The options of training, in data-flow order."""
    parser = Parser()
    add_preset_option(parser, RECIPES)
    group = add_pair_options(parser)
    group.add_argument(
        "--negative_key",
        default=None,
        help="Column of a table with a false caption of each image, which its image is compared with beside all "
        "captions of the batch, as in NegCLIP. Where a cell is empty it is the empty caption.",
    )
    add_source_options(parser, ["split"])
    add_normalization_options(parser, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)
    group = add_image_options(parser, RECIPES)
    group.add_argument(
        "--freeze",
        nargs="+",
        choices=list(FREEZABLE),
        default=None,
        help="Keep these parts as they start. image: the whole image tower, so that captions learn to fit it (LiT); "
        "image_backbone: all but its read-out and projection, to put a read-out on a trained model.",
    )
    add_text_options(parser, RECIPES)
    _add_readout_options(parser)
    group = add_optimization_options(parser, RECIPES)
    group.add_argument(
        "--logits",
        default="fp32",
        choices=PRODUCTS,
        help="Precision of the products of all images with all captions; sums are fp32 in any case. On GPUs tf32 and "
        "bf16 take a fraction of the time at large batches; a cosine then has four or three correct digits.",
    )
    add_pair_run_options(parser)
    add_device_options(parser)
    return parser


def _add_readout_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("read-out: tokens -> encoding, the same for both")
    group.add_argument(
        "--readout",
        default="sparo",
        help=f"How tokens become the encoding, one of {', '.join(sorted(TOWERS))}: sparo replaces the last block by "
        "slots, cls is class token and end token as in CLIP, gap averages all tokens.",
    )
    add_slot_options(group, None, None, None, RECIPES.with_default)
    width = RECIPES.with_default("Width of the encoding of a read-out without slots.", "embed_dim")
    group.add_argument("--embed_dim", type=int, default=None, help=width)
    group.add_argument(
        "--replace_block",
        type=bool_flag,
        default=None,
        help="Remove the last block of both encoders; by default only sparo does.",
    )
    group.add_argument(
        "--norm_first",
        action="store_true",
        help="Let gap, gap_image and fdt read tokens after the last LayerNorm, as earlier versions did; a run that "
        "began with one is resumed with this. By default gap normalises the average and fdt nothing, as in the SPARO "
        "authors' code.",
    )
    group.add_argument("--bottleneck_dim", type=int, default=512, help="Width of the linear bottleneck.")
    group.add_argument("--num_codes", type=int, default=16384, help="Codes of the discrete bottleneck, fdt.")


def check_options(args: argparse.Namespace) -> None:
    """Fill in the preset's values, then refuse numbers that cannot be.

    Raises:
        ValueError: names the option and what would fit.
    """
    RECIPES.apply(args)
    check_pair_options(args, POSITIVE_OPTIONS)
    if args.shards == "streamed" and args.negative_key is not None:
        raise ValueError("--negative_key with --shards streamed: false captions are read from tables alone")

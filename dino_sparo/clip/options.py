"""Options of CLIP: of its training, with presets and checks; of the commands that select, weigh and draw slots.

`TOWERS` names the read-outs that can be chosen. One name stands for both towers, because an image has no end token and
a caption no class token.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

from dino_sparo.data.options import DOWNLOAD
from dino_sparo.image_text.evaluation.options import (
    CLASSES,
    CLIP_MODEL,
    LABELLED_IMAGES,
    QUESTIONS,
    evaluation_parser,
    picture_parser,
)
from dino_sparo.image_text.options import check_pair_options, training_parser
from dino_sparo.models.architectures import CROSS_ATTENTION
from dino_sparo.models.options import SLOT_SIZES
from dino_sparo.runtime.cli import (
    Group,
    Option,
    Parser,
    bool_flag,
    positive_int,
    positive_number,
    share_above_0,
    share_below_1,
)
from dino_sparo.runtime.faults import UserError

PER_SLOT, PER_DIMENSION = "slot", "dimension"  # parts of an encoding that a mask weighs
MASK_SCALES = ("min", "max")  # bounds of the mask's inverse temperature
PRODUCTS = ("fp32", "tf32", "bf16")  # precisions of the products of all images with all captions


class Towers(NamedTuple):
    """The read-outs of both towers, keys of `readouts.READOUTS`.

    Attributes:
        image: the image tower's.
        text: the text tower's.
        has_bottleneck: the encoding passes a linear bottleneck.
    """

    image: str
    text: str
    has_bottleneck: bool = False


# The paper's CLIP+GAP is `gap_image`: in the authors' code only images are averaged, captions keep the end token.
# A read-out with slots that is not named here serves both towers under its own name; see `config.towers_of`.
TOWERS: dict[str, Towers] = {
    "cls": Towers("cls", "eos"),
    "gap": Towers("gap_then_norm", "gap_then_norm"),
    "gap_image": Towers("gap_then_norm", "eos"),
    "sparo": Towers("sparo", "sparo"),
    "linear": Towers("cls", "eos", has_bottleneck=True),
    "fdt": Towers("fdt_raw", "fdt_raw"),
    **{name: Towers(name, name) for name in CROSS_ATTENTION},
}

# What the same names meant at first, and mean in checkpoints of then: the last LayerNorm of either tower precedes the
# read-out, and `fdt` leaves padding out. The configuration of a checkpoint says which of both it has.
NORM_FIRST: dict[str, Towers] = {
    "gap": Towers("gap", "gap"),
    "gap_image": Towers("gap", "eos"),
    "fdt": Towers("fdt", "fdt"),
}

# What `CLIP.freeze` takes: names begin with one of the first, and with none of the second.
FREEZABLE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "image": (("image.", "image_proj."), ()),
    "image_backbone": (("image.",), ("image.readout.",)),
    "text": (("text.", "text_proj."), ()),
    "text_backbone": (("text.",), ("text.readout.",)),
}


class Criteria(NamedTuple):
    """Conditions under which the picture of a slot of a pair is worth showing.

    Attributes:
        min_cosine: the cosine of image and caption slot is greater. (The paper's 0.75.)
        min_sharpness: one word gets at least this share of the slot's attention. (The paper's "sharp"; the number is
            ours.)
    """

    min_cosine: float = 0.75
    min_sharpness: float = 0.5


# SPARO, table 0.C.3 for the optimisation, tables 1 to 3 for the vision transformer (CLIP16 or CLIP32), section 4 for
# the slots; the rest is OpenCLIP's default, as appendix 0.C.1 says.
PRESETS = Path(__file__).parent / "presets"

NEGATIVE_KEY = Option(
    None,
    "Column of a table with one false caption per image. The image is compared with this caption and all "
    "captions of the batch, as in NegCLIP. An empty cell is an empty caption.",
    str,
)
FREEZE = Option(
    None,
    "Freeze these parts. image: the whole image tower, so that only the text tower learns (LiT). "
    "image_backbone: the image tower without read-out and projection, to train a read-out on a trained "
    "model.",
    choices=tuple(FREEZABLE),
    nargs="+",
)
LOGITS = Option(
    "fp32",
    "Precision of the products of all images with all captions; sums are fp32. On GPUs, tf32 and bf16 take "
    "a fraction of the time for large batches, and a cosine has four or three correct digits.",
    choices=PRODUCTS,
)
READOUT: Group = {
    "readout": Option(
        "sparo",
        f"How tokens become the encoding, one of {', '.join(sorted(TOWERS))}: sparo replaces the last block by slots, "
        "cls is class token and end token as in CLIP, gap averages all tokens.",
        str,
    ),
    **SLOT_SIZES,
    "embed_dim": Option(512, "Width of the encoding of a read-out without slots.", positive_int),
    "replace_block": Option(None, "Remove the last block of both encoders; by default only sparo does.", bool_flag),
    "norm_first": Option(
        False,
        "Let gap, gap_image and fdt read tokens after the last LayerNorm, as earlier versions did; needed to "
        "resume a run of such a version. By default gap normalises the average and fdt nothing, as in the SPARO "
        "authors' code.",
    ),
    "bottleneck_dim": Option(512, "Width of the linear bottleneck.", positive_int),
    "num_codes": Option(16384, "Codes of the discrete bottleneck, fdt.", positive_int),
}


def get_args_parser() -> Parser:
    """The options of training, in data-flow order."""
    return training_parser(
        PRESETS,
        {"read-out: tokens -> encoding, the same for both": READOUT},
        {"logits": LOGITS},
        pairs={"negative_key": NEGATIVE_KEY},
        image={"freeze": FREEZE},
    )


def check_options(args: argparse.Namespace) -> None:
    """Refuse options that do not fit each other.

    Raises:
        ValueError: names the option and what would fit.
    """
    check_pair_options(args)
    if args.shards == "streamed" and args.negative_key is not None:
        raise UserError("--negative_key with --shards streamed: false captions are read from tables alone")


def select_parser() -> Parser:
    """The options of `slots/select.py`, in data-flow order."""
    num_images = Option(None, "Largest number of images to use, a random subset; by default all.", positive_int)
    keep = Option(
        None,
        "Number of slots to keep (32 of 64 or 128 in the paper); by default the most accurate number.",
        positive_int,
    )
    images = LABELLED_IMAGES | {"num_images": num_images}
    groups = {"images": images, "classes in words": CLASSES, "selection": {"keep": keep}}
    return evaluation_parser(groups, CLIP_MODEL)


MASK: Group = {
    "parts": Option(
        PER_SLOT,
        "Unit that has a weight: slot, dimension, or for models without slots a number of equal contiguous parts.",
        str,
    ),
    "epochs": Option(100, "Passes over the pairs.", positive_int),
    "lr": Option(0.02, "Learning rate of SGD.", positive_number),
    "momentum": Option(0.9, "Momentum of SGD.", share_below_1),
    "mask_batch_size": Option(256, "Pairs per step; the paper does not say how many.", positive_int),
    "mask_scale": Option(
        "min",
        "Bound of the inverse temperature: min is CLIP's min(100, exp(alpha)), which learns; max is the max(100, "
        "exp(alpha)) that SPARO's appendix 0.C.1 prints, which saturates in the first epochs.",
        choices=MASK_SCALES,
    ),
    "seed": Option(0, "Random seed of the order of the pairs."),
}


def mask_parser() -> Parser:
    """The options of `slots/mask.py`, in data-flow order."""
    evaluate = Option(
        [],
        "Labelled images to classify with and without the mask, each with its class names and templates; for "
        "other sets run dino-sparo zero-shot with and without --slots FILE.",
        metavar="DATA_PATH",
    )
    elsewhere = {"evaluate": evaluate, "download": DOWNLOAD}
    groups = {"questions": QUESTIONS, "mask": MASK, "evaluation elsewhere": elsewhere}
    return evaluation_parser(groups, CLIP_MODEL)


CHOICE: Group = {
    "slots": Option(
        None, "Slots to show: numbers, or a file of dino-sparo slots select; by default, slots are chosen.", nargs="+"
    ),
    "max_slots": Option(3, "Number of slots to show, if --slots is not given.", positive_int),
    "max_columns": Option(4, "Number of pairs to show.", positive_int),
    "min_cosine": Option(
        Criteria().min_cosine, "Choose slots whose cosine between image and caption is at least this.", share_above_0
    ),
    "min_sharpness": Option(
        Criteria().min_sharpness,
        "Choose slots that give at least this share of their attention to one word.",
        share_above_0,
    ),
}


def pictures_parser() -> Parser:
    """The options of `slots/pictures.py`, in data-flow order."""
    size: Group = {
        "max_pairs": Option(400, "Largest number of pairs to search, evenly spread over the data.", positive_int),
        "img_size": Option(
            None,
            "Side of the central square in pixels; by default the training size. Larger sizes show finer maps.",
            positive_int,
        ),
    }
    groups = {"view": size, "choice of slots and pairs": CHOICE}
    return picture_parser("Checkpoint of CLIP training, of a model with slots.", groups)

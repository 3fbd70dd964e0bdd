"""The options of `dino-sparo oc-splits`, and the models that it compares; without torch."""

import argparse
from typing import NamedTuple

from dino_sparo.image_text.scene_recipe import CLIP_READOUTS
from dino_sparo.runtime.cli import Parser

SEEN_SHARES, HARD_SHARES = (20, 50, 80), (0, 25, 50)
TRUE_GRAPHS, PARSED_GRAPHS = "true", "templates"


class Model(NamedTuple):
    """One model of the experiment.

    Attributes:
        command: that trains it.
        options: beside those that all models have.
        graphs: where OC-CLIP's graphs come from: TRUE_GRAPHS or a parser; None: the model takes captions.
    """

    command: str
    options: dict[str, str]
    graphs: str | None = None


_OC_CLIP = {"preset": "oc-scenes"}
MODELS: dict[str, Model] = {
    "clip-cls": Model("train-clip", {"readout": "cls", **CLIP_READOUTS}),
    "clip-swapped": Model("train-clip", {"readout": "cls", **CLIP_READOUTS, "negative_key": "negative_caption"}),
    "clip-sparo": Model("train-clip", {"readout": "sparo", **CLIP_READOUTS}),
    "oc-clip": Model("train-oc-clip", _OC_CLIP, TRUE_GRAPHS),
    "oc-clip-no-rel": Model("train-oc-clip", {**_OC_CLIP, "rel_loss_weight": "0"}, TRUE_GRAPHS),
    "oc-clip-no-competition": Model(
        "train-oc-clip", {**_OC_CLIP, "competition": "keys", "num_default": "0"}, TRUE_GRAPHS
    ),
    "oc-clip-parsed": Model("train-oc-clip", _OC_CLIP, PARSED_GRAPHS),
}


class Amount(NamedTuple):
    """How much is drawn and trained. An epoch goes through all training pictures once."""

    num_images: int
    num_questions: int
    epochs: int
    batch_size: int


FULL = Amount(num_images=12_800, num_questions=1000, epochs=8, batch_size=128)
SHORT = Amount(num_images=960, num_questions=40, epochs=1, batch_size=64)


def get_args_parser() -> Parser:
    """The options of the experiment."""
    parser = Parser()
    group = parser.add_argument_group("splits: what is seen in training")
    group.add_argument(
        "--split",
        choices=["attribute", "spatial"],
        default="attribute",
        help="What the false captions exchange: the colours of two objects, or the objects beside their relation.",
    )
    group.add_argument(
        "--seen", type=int, choices=SEEN_SHARES, default=50, help="Percent of the pairs of shapes seen in training."
    )
    group.add_argument(
        "--hard",
        type=int,
        choices=HARD_SHARES,
        default=0,
        help="Percent of the seen pairs that are also seen with colours, or objects, exchanged.",
    )
    group.add_argument(
        "--grid", action="store_true", help="All shares of both instead of --seen and --hard, and the heat map."
    )
    group.add_argument("--num_images", type=int, default=None, help=_help("Training pictures.", "num_images"))
    group.add_argument("--num_questions", type=int, default=None, help=_help("Per test.", "num_questions"))
    group = parser.add_argument_group("models: what is compared")
    group.add_argument(
        "--models",
        nargs="+",
        choices=list(MODELS),
        default=["clip-cls", "clip-sparo", "oc-clip"],
        help="All have the same towers, pictures, steps and optimiser. Controls: CLIP with each pair's false caption "
        "in the batch; OC-CLIP without the local loss, without competition and default tokens, with graphs that are "
        "parsed instead of the true ones.",
    )
    group.add_argument(
        "--seeds", nargs="+", type=int, default=[0], help="One training run each; sets split, weights and order."
    )
    group.add_argument("--epochs", type=int, default=None, help=_help("Of each training run.", "epochs"))
    group.add_argument("--short", action="store_true", help="Train for seconds only, to see that all parts work.")
    group = parser.add_argument_group("run")
    group.add_argument("--output_dir", default=None, help="Where everything is written; by default in output/.")
    group.add_argument("--device", default="cpu", help="auto, cpu or cuda.")
    group.add_argument("--num_workers", type=int, default=1, help="Processes that load images.")
    return parser


def _help(text: str, name: str) -> str:
    return f"{text} By default {getattr(FULL, name)}, with --short {getattr(SHORT, name)}."


def chosen_amount(args: argparse.Namespace) -> Amount:
    """What the options say, filled up with the defaults.

    Raises:
        ValueError: a number is not positive, or a seed or model is named twice.
    """
    amount = SHORT if args.short else FULL
    given = {name: getattr(args, name) for name in ("num_images", "num_questions", "epochs")}
    for name, value in given.items():
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value}: give a positive number")
    for name in ("seeds", "models"):
        values = getattr(args, name)
        if len(set(values)) < len(values):
            raise ValueError(f"--{name} {' '.join(map(str, values))}: give each once")
    return amount._replace(**{name: value for name, value in given.items() if value is not None})

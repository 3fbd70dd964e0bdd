"""The options of the commands that evaluate a CLIP or an OC-CLIP, without torch.

Each command imports its parser from here and parses before it imports torch.
"""

import argparse
from typing import Any

from dino_sparo.image_text.choices import AUTO, PICTURE_SCENES, PROBE_BATCH_SIZE
from dino_sparo.image_text.options import add_pair_key_options
from dino_sparo.runtime.choices import PRECISIONS, SCENE_SIZE
from dino_sparo.runtime.cli import (
    Parser,
    add_device_options,
    add_download_option,
    add_feature_options,
    add_max_value_option,
    bool_flag,
    positive_int,
)

SPLIT_HELP = "Name of a split of the images; all takes everything. By default val where there is one, else everything."


def add_model_options(parser: argparse.ArgumentParser, several: bool = False, reads_graphs: bool = True) -> None:
    """The model.

    Args:
        parser: to add to.
        several: take more than one model.
        reads_graphs: whether an OC-CLIP, which reads scene graphs, is one of the models that the command takes.
    """
    group = parser.add_argument_group("model: what is evaluated")
    number: dict[str, Any] = {"nargs": "+", "default": []} if several else {"default": ""}
    what = f"Checkpoint of {'CLIP or OC-CLIP' if reads_graphs else 'CLIP'} training, or open_clip's weights"
    group.add_argument("--pretrained_weights", **number, help=what + ("; several." if several else "."))
    group.add_argument(
        "--quick_gelu",
        type=bool_flag,
        default=False,
        help="Activation of open_clip's weights, which do not name it: true for OpenAI's and models named -quickgelu.",
    )
    group.add_argument(
        "--text_heads", type=int, default=None, help="Heads of open_clip's text encoder; by default they are 64 wide."
    )
    if reads_graphs:
        add_graphs_option(group)
        group.add_argument(
            "--max_missing_graphs",
            type=float,
            default=0.01,
            help="Share of the captions that may be without a graph in --graphs; above it the evaluation ends.",
        )
    group.add_argument(
        "--slots",
        default=None,
        help="Evaluate some slots, or masked slots: numbers (0,3,7) or a file of dino-sparo select or mask.",
    )


def add_graphs_option(group: argparse._ArgumentGroup) -> None:
    """The scene graphs of captions."""
    group.add_argument(
        "--graphs",
        default=None,
        help="Scene graphs of the captions, for an OC-CLIP: a .jsonl file that dino-sparo parse wrote, or the parser "
        "templates or spacy; by default templates.",
    )


def add_computation_options(parser: argparse.ArgumentParser, result: str, where: str = "beside the checkpoint") -> None:
    """Computation and result file.

    Args:
        parser: to add to.
        result: name of the result file.
        where: in words, where the result file lies by default.
    """
    group = parser.add_argument_group("computation and result")
    group.add_argument(
        "--img_size",
        type=positive_int,
        default=None,
        help="Side of the view in pixels; by default as in training.",
    )
    group.add_argument("--batch_size_per_gpu", type=int, default=128, help="Images, or captions, per process and step.")
    group.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="fp32",
        help="Of the model; fp32 to report numbers. tf32: fp32 with rounded factors of matrix products on GPUs.",
    )
    group.add_argument("--output", default=None, help=f"Result file; by default {result} {where}.")
    add_device_options(parser)


def add_image_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Labelled images; returns the group, for what a command adds."""
    group = parser.add_argument_group("images")
    group.add_argument(
        "--data_path",
        default="",
        help="Class folders, tar shards with .cls members, a torchvision set (cifar10:DIR), or scenes.",
    )
    group.add_argument("--split", default=None, help=SPLIT_HELP)
    add_download_option(group)
    return group


def add_class_options(parser: argparse.ArgumentParser) -> None:
    """Names of classes, and the captions made of them."""
    group = parser.add_argument_group("classes in words")
    group.add_argument(
        "--classnames",
        default=AUTO,
        help="auto: the set's own names, or ImageNet's where folders are WordNet ids; imagenet: all 1000, for V2; "
        "objectnet:DIR/mappings; folders; or a file: one name per line, or JSON (FILE.json:KEY for one list of many).",
    )
    group.add_argument(
        "--templates",
        default=AUTO,
        help="auto: the set's own, or openai, ImageNet's 80 (of an OC-CLIP the bare name); the name of a list (a wrong "
        "name shows all); or a file with one sentence per line, {} or {c} where the name belongs.",
    )


def add_question_options(
    parser: argparse.ArgumentParser, holds: str = "SugarCrepe's JSON files, or those of scene-pairs"
) -> None:
    """A folder of true and false captions, and their images."""
    group = parser.add_argument_group("questions")
    group.add_argument("--data_path", default="", help=f"Folder with {holds}.")
    group.add_argument("--images", default=None, help="Folder of the images; by default `images` in --data_path.")
    add_image_rules(group)


def add_image_rules(group: argparse._ArgumentGroup) -> None:
    """Which images annotations may name, and how many may be missing."""
    group.add_argument(
        "--max_missing", type=float, default=0.01, help="Share of a benchmark's images that may be missing."
    )
    add_outside_option(group)


def add_outside_option(group: argparse._ArgumentGroup) -> None:
    """Which files annotations may name."""
    group.add_argument(
        "--allow_outside",
        action="store_true",
        help="Read images outside of the folder of the images, which annotations name by absolute paths or ../; only "
        "for annotations that you trust.",
    )


def add_picture_options(parser: argparse.ArgumentParser, weights: str) -> argparse._ArgumentGroup:
    """A model and the pairs to draw; returns the group of the pairs, for what a command adds.

    Args:
        parser: to add to.
        weights: help of `--pretrained_weights`.
    """
    group = parser.add_argument_group("model")
    group.add_argument("--pretrained_weights", default="", help=weights)
    group = parser.add_argument_group("pairs of images and captions")
    group.add_argument(
        "--data_path",
        default=PICTURE_SCENES,
        help="A folder of images with a .txt of the same name beside each, a table (.csv, .tsv), COCO's annotations "
        "(.json), tar shards, or the built-in scenes.",
    )
    add_pair_key_options(group)
    return group


def add_picture_result_options(parser: argparse.ArgumentParser) -> None:
    """The folder of the pictures, and the device."""
    group = parser.add_argument_group("result")
    group.add_argument("--output_dir", default=None, help="Where to write; by default beside the checkpoint.")
    group.add_argument(
        "--figure_format", choices=("png", "pdf", "svg"), default="png", help="File format of figures with words."
    )
    group.add_argument("--device", default="auto", help="auto (cuda where there is one, else cpu), cpu or cuda:N.")


def zero_shot_parser() -> Parser:
    """The options of `zero_shot.py`, in data-flow order."""
    parser = Parser()
    add_model_options(parser)
    group = add_image_options(parser)
    add_max_value_option(group)
    group.add_argument(
        "--crop_border",
        type=int,
        default=0,
        help="Pixels cut off every side of an image. ObjectNet's images have a red frame of 1; published numbers leave "
        "it in.",
    )
    add_class_options(parser)
    add_computation_options(parser, "zero_shot.json")
    return parser


def retrieval_parser() -> Parser:
    """The options of `retrieval.py`, in data-flow order."""
    parser = Parser()
    add_model_options(parser)
    group = parser.add_argument_group("images and captions")
    group.add_argument(
        "--data_path", default="", help="Folder of the images, or pairs without --captions: tables, shards, scenes."
    )
    group.add_argument(
        "--captions", default="", help="Karpathy's or COCO's JSON, or Flickr's lines of image and caption."
    )
    group.add_argument(
        "--split",
        default=None,
        help="Part to evaluate. With Karpathy's JSON in --captions, by default test. Without --captions a part of "
        "--data_path, by default val.",
    )
    group.add_argument("--image_list", default=None, help="File with names of images, to use these alone.")
    add_outside_option(group)
    group = parser.add_argument_group("recall")
    group.add_argument("--k", type=int, nargs="+", default=[1, 5, 10], help="Numbers of candidates to look at.")
    add_computation_options(parser, "retrieval.json")
    return parser


def sugarcrepe_parser() -> Parser:
    """The options of the command `sugarcrepe`."""
    parser = Parser()
    add_model_options(parser)
    add_question_options(parser)
    add_computation_options(parser, "sugarcrepe.json")
    return parser


def winoground_parser() -> Parser:
    """The options of the command `winoground`."""
    parser = Parser()
    add_model_options(parser)
    add_question_options(parser, "Winoground's examples.jsonl")
    add_computation_options(parser, "winoground.json")
    return parser


def compositional_parser() -> Parser:
    """The options of `compositional/command.py`, in data-flow order."""
    parser = Parser()
    add_model_options(parser, several=True)
    group = parser.add_argument_group("benchmarks")
    group.add_argument("--data_root", default="", help="Folder; every benchmark in it or below is evaluated.")
    group.add_argument(
        "--benchmarks", nargs="+", default=None, help="Names of benchmarks, by default all; a wrong name lists them."
    )
    group.add_argument(
        "--images", default=None, help="Folder of the images; by default those that docs/compositional.md lists."
    )
    add_image_rules(group)
    group.add_argument(
        "--write_captions",
        default=None,
        help="Only write all captions to this .txt file, for dino-sparo parse; the images must be there.",
    )
    group = parser.add_argument_group("evaluation")
    group.add_argument(
        "--chunk_images",
        type=int,
        default=2048,
        help="Images encoded at a time; an OC-CLIP keeps up to 0.4 MB of each.",
    )
    group.add_argument(
        "--blind", action="store_true", help="Repeat with the images of other questions: accuracy without seeing."
    )
    group.add_argument("--seed", type=int, default=0, help="Random seed of bootstrap and shuffled images.")
    group.add_argument(
        "--failures",
        type=int,
        default=0,
        metavar="N",
        help="Draw the N clearest errors of each benchmark, and what the model looked at: a page and sheets beside "
        "the result. Typical are 5 to 20.",
    )
    add_computation_options(parser, "compositional.json", where="beside each checkpoint; give a folder")
    return parser


def order_captions_parser() -> Parser:
    """The options of `image_text/evaluation/compositional/sets/aro.py`."""
    parser = Parser()
    group = parser.add_argument_group("captions")
    group.add_argument(
        "--captions",
        required=True,
        help="Images and captions: Karpathy's JSON or Salesforce's copy (coco_karpathy_test.json), COCO's, or Flickr's "
        "lines.",
    )
    group.add_argument("--split", default=None, help="Part of Karpathy's JSON, by default test.")
    group = parser.add_argument_group("result")
    group.add_argument(
        "--output", required=True, help="File to write; dino-sparo compositional looks for coco_order.json."
    )
    group.add_argument("--seed", type=int, default=0, help="Another seed shuffles otherwise.")
    return parser


def probe_parser() -> Parser:
    """The options of `probe.py`, in data-flow order."""
    parser = Parser()
    add_model_options(parser)
    group = parser.add_argument_group("images")
    group.add_argument(
        "--data_path", default="", help="Folder with train/ and val/, torchvision set (cifar10:DIR), or scenes."
    )
    add_download_option(group)
    add_max_value_option(group)
    group = parser.add_argument_group("features")
    add_feature_options(group)
    group = parser.add_argument_group("probe")
    group.add_argument("--epochs", type=int, default=10, help="Passes over the training images.")
    group.add_argument("--lr", type=float, default=0.1, help="Learning rate at the start; it falls to 0 on a cosine.")
    group.add_argument(
        "--probe_batch_size",
        type=int,
        default=PROBE_BATCH_SIZE,
        help="Images per step, over all processes; more is faster, and another protocol than CLIP benchmark's.",
    )
    group.add_argument(
        "--weight_decay", type=float, default=None, help="Use this one; by default the sweep finds the best."
    )
    group.add_argument(
        "--val_share", type=float, default=0.2, help="Share of the training images on which the sweep compares."
    )
    group.add_argument("--seed", type=int, default=0, help="Of the weights, the order and the images that compare.")
    add_computation_options(parser, "probe.json")
    return parser


def scene_pairs_parser() -> Parser:
    """The options of `scene_pairs.py`."""
    parser = Parser()
    group = parser.add_argument_group("scenes")
    group.add_argument("--output_dir", required=True, help="Folder to write to.")
    group.add_argument("--num_pairs", type=int, default=1000, help="Scenes, each with one entry in either file.")
    group.add_argument("--image_size", type=positive_int, default=SCENE_SIZE, help="Side in pixels.")
    group.add_argument("--split", choices=["train", "val"], default="val", help="val was not trained on.")
    group.add_argument("--seed", type=int, default=0, help="Another seed gives other scenes.")
    return parser

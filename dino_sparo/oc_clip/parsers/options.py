"""The options of `dino-sparo parse`, without torch."""

import argparse

from dino_sparo.oc_clip.choices import MAX_NODES, MAX_RELATIONS
from dino_sparo.runtime.cli import Parser

PARSER_NAMES = ("templates", "spacy", "llm", "vg", "gqa")


def parse_parser() -> Parser:
    """The options of `command.py`, in data-flow order."""
    parser = Parser()
    _add_caption_options(parser.add_argument_group("captions"))
    group = parser.add_argument_group("parser")
    group.add_argument(
        "--parser",
        choices=PARSER_NAMES,
        default="templates",
        help="templates: closed word lists, for captions made from templates. spacy: dependency trees. llm: a language "
        "model, the most accurate. vg, gqa: no parser, but the graphs of Visual Genome or GQA.",
    )
    _add_language_model_options(group)
    group.add_argument("--seed", type=int, default=0, help="For vg and gqa: random seed of the captions.")
    group.add_argument("--captions_per_image", type=int, default=1, help="For vg and gqa: captions drawn per image.")
    group.add_argument(
        "--exclude_images", help="For vg and gqa: file of image ids or file names to leave out, one per line."
    )
    group = parser.add_argument_group("result")
    group.add_argument("--output", help="File of graphs, .jsonl; an existing file is resumed.")
    further = "beyond this number count as dropped; the file keeps all."
    group.add_argument("--max_nodes", type=int, default=MAX_NODES, help=f"Entities {further}")
    group.add_argument("--max_relations", type=int, default=MAX_RELATIONS, help=f"Relations {further}")
    return parser


def _add_caption_options(group: argparse._ArgumentGroup) -> None:
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--captions",
        help="Text file with a caption per line; table (.csv, .tsv, .jsonl); JSON of COCO or of a benchmark; or any "
        "pairs that training reads: shards, scenes, class folders. With vg region_graphs.json, with gqa scene graphs.",
    )
    source.add_argument("--caption", metavar="TEXT", help="Show the graph of this one caption, and write nothing.")
    group.add_argument("--caption_key", help="Column or key of the captions, if it has no usual name.")
    group.add_argument("--image_key", help="Column of the images in a table, if it has no usual name.")
    group.add_argument(
        "--image_folder",
        help="Folder that the paths of images start from; by default the table's. With COCO's annotations, vg and gqa "
        "the output names images only with this option.",
    )
    group.add_argument("--split", default="all", help="Part of the pairs: a split's name, or all.")


def _add_language_model_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--server",
        help="For llm: address of a server with OpenAI's protocol, such as http://localhost:8000/v1. All captions are "
        "sent there. The key comes from the environment variable OPENAI_API_KEY.",
    )
    group.add_argument("--model", help="For llm: name of the model on the server; with --local its folder.")
    group.add_argument("--local", action="store_true", help="For llm: run the model here, with transformers.")
    group.add_argument("--concurrency", type=int, default=16, help="For llm: number of requests at the same time.")
    group.add_argument("--timeout_s", type=float, default=120.0, help="For llm: seconds that a request may take.")
    group.add_argument(
        "--cache", help="For llm: database of all answers; by default OUTPUT.cache.sqlite. Runs may share a database."
    )

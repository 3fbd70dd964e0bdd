"""The options of `dino-sparo parse`, without torch."""

import argparse

from dino_sparo.oc_clip.choices import MAX_NODES, MAX_RELATIONS
from dino_sparo.runtime.cli import Parser

PARSER_NAMES = ("templates", "spacy", "llm", "vg", "gqa")


def parse_parser() -> Parser:
    """The options of `command.py`, in data-flow order."""
    parser = Parser()
    group = parser.add_argument_group("captions")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--captions",
        help="Text file, a caption per line; table (.csv, .tsv, .jsonl), JSON of COCO or of a benchmark, or any pairs "
        "that training reads: shards, scenes, class folders. For vg region_graphs.json, for gqa its scene graphs.",
    )
    source.add_argument("--caption", metavar="TEXT", help="Show the graph of this one caption, and write nothing.")
    group.add_argument(
        "--caption_key", default=None, help="Column or key of the captions; by default those with a usual name."
    )
    group.add_argument("--image_key", default=None, help="Column of the images in a table, if it has no usual name.")
    group.add_argument(
        "--image_folder",
        default=None,
        help="Folder that the paths of images start from; by default the table's. With COCO's annotations, vg and gqa "
        "the output names images only if it is given.",
    )
    group.add_argument("--split", default="all", help="Part of the pairs: a split's name, or all.")
    group = parser.add_argument_group("parser")
    group.add_argument(
        "--parser",
        choices=PARSER_NAMES,
        default="templates",
        help="templates: closed word lists, for captions made from templates. spacy: dependency trees. llm: a language "
        "model, the most accurate. vg, gqa: no parser, the graphs that Visual Genome or GQA come with.",
    )
    _add_language_model_options(group)
    group.add_argument("--seed", type=int, default=0, help="Of vg and gqa: another seed draws other captions.")
    group.add_argument(
        "--captions_per_image", type=int, default=1, help="Of vg and gqa: captions drawn for every image."
    )
    group.add_argument(
        "--exclude_images",
        default=None,
        help="Of vg and gqa: file with one image id or file name per line, to leave out.",
    )
    group = parser.add_argument_group("result")
    group.add_argument("--output", default=None, help="File of graphs, .jsonl; if it exists, the run goes on with it.")
    group.add_argument(
        "--max_nodes", type=int, default=MAX_NODES, help="Entities beyond this count as dropped; the file keeps all."
    )
    group.add_argument("--max_relations", type=int, default=MAX_RELATIONS, help="Relations likewise.")
    return parser


def _add_language_model_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--server",
        default=None,
        help="Of llm: address of a server with OpenAI's protocol, such as http://localhost:8000/v1. All captions are "
        "sent there. Its key is taken from the environment variable OPENAI_API_KEY.",
    )
    group.add_argument(
        "--model", default=None, help="Of llm: the model's name on the server, or a folder with --local."
    )
    group.add_argument("--local", action="store_true", help="Of llm: run the model here, by transformers.")
    group.add_argument(
        "--concurrency", type=int, default=16, help="Of llm: captions that the server is asked at a time."
    )
    group.add_argument("--timeout_s", type=float, default=120.0, help="Of llm: seconds that a request may take.")
    group.add_argument(
        "--cache",
        default=None,
        help="Of llm: database of all answers; by default OUTPUT.cache.sqlite. Runs may share it.",
    )

"""The options of OC-CLIP: of its training, with presets and checks; of `parse`; of its pictures."""

import argparse
from pathlib import Path

from dino_sparo.image_text.evaluation.options import GRAPHS, picture_parser
from dino_sparo.image_text.options import check_pair_options, training_parser
from dino_sparo.runtime.cli import Group, Option, Parser, number_from_0, positive_int, positive_number, whole_number
from dino_sparo.runtime.faults import UserError

COMPETITIONS = ("queries", "keys")  # axis of the softmax of the binding
RELATION_SCORES = ("additive", "mlp")
RELATION_NEGATIVES = ("all", "one")  # relations that false graphs alter
MAX_NODES = MAX_RELATIONS = 16  # of a graph
PARSER_NAMES = ("templates", "spacy", "llm", "vg", "gqa")
DEFAULT_GRAPHS = "templates"

# CC12M's numbers (OC-CLIP, appendix A.8), but for a batch and a warm-up for some 10^5 pairs on one machine; betas and
# eps that the paper does not give are OpenCLIP's.
TEXT_SIZES = {"text_width": 256, "text_heads": 4, "text_layers": 6, "context_length": 20}
DEFAULTS = {**TEXT_SIZES, "epochs": 20, "weight_decay": 0.5}
PRESETS = Path(__file__).parent / "presets"

GRAPH_SIZES: Group = {
    "max_nodes": Option(
        MAX_NODES, "Largest number of entities per graph in training; later entities are left out.", positive_int
    ),
    "max_relations": Option(
        MAX_RELATIONS, "Largest number of relations per graph in training; later relations are left out."
    ),
}
CAPTION_GRAPHS: Group = {
    "graphs": Option(
        DEFAULT_GRAPHS,
        "Scene graphs of the captions: a .jsonl file of dino-sparo parse, or a parser. templates parses the "
        "built-in scenes and captions made from templates; spacy must be installed.",
    ),
    "val_graphs": Option(None, "Scene graphs of the captions in --val_path; by default the value of --graphs."),
    "graph_key": Option(None, "For shards, instead of --graphs: the key of the graph in the .json members.", str),
    **GRAPH_SIZES,
}
BINDING: Group = {
    "bind_dim": Option(256, "Width of entities, keys, values and slots.", positive_int),
    "rel_dim": Option(128, "Width of relations.", positive_int),
    "bind_layers": Option(2, "Number of self-attention blocks on the patches."),
    "bind_heads": Option(4, "Attention heads of the blocks of --bind_layers.", positive_int),
    "position_std": Option(1.0, "Standard deviation of the patches' initial position embeddings."),
    "num_default": Option(4, "Number of default tokens, which compete for the patches that belong to no entity."),
    "competition": Option(
        "queries",
        "Dimension of the softmax. queries: entities compete for each patch. keys: ordinary attention (the "
        "paper's ablation, with --num_default 0).",
        choices=COMPETITIONS,
    ),
    "relation": Option(
        "additive",
        "Score of a relation. additive: an MLP for the subject and an MLP for the object. mlp: one MLP for both.",
        choices=RELATION_SCORES,
    ),
    "ent_coef": Option(1.5, "Initial weight of entities in a score.", positive_number),
    "rel_coef": Option(0.5, "Initial weight of relations in a score.", positive_number),
    "score_chunk_mb": Option(
        256.0,
        "Largest tensor while images are scored with graphs, in megabytes. Smaller tensors take less memory. If "
        "the scores of a batch take less than a 32nd of it, the backward pass recomputes nothing and is faster.",
        positive_number,
    ),
}
LOSSES: Group = {
    "logit_scale": Option(
        "learned", "Inverse temperature of both losses; the paper has none.", choices=("learned", "none")
    ),
    "rel_loss_weight": Option(
        1.0,
        "Weight of the local loss, which compares a graph with copies whose relations are altered; 0: no local loss.",
    ),
    "rel_negatives": Option(
        "all", "Relations that are altered in the two false graphs of a graph.", choices=RELATION_NEGATIVES
    ),
    "symmetric": Option(None, "File of symmetric predicates, one per line, which are not altered.", metavar="FILE"),
}
PART_RATES: Group = {
    "lr_image": Option(
        None, "Learning rate of the image encoder, by default --lr; the paper's is 1e-6.", number_from_0
    ),
    "lr_text": Option(None, "Learning rate of the text encoder, by default --lr; the paper's is 2e-5.", number_from_0),
    "warmup_image": Option(None, "Steps of warm-up of the image encoder, by default --warmup_steps.", whole_number),
    "warmup_text": Option(None, "Steps of warm-up of the text encoder, by default --warmup_steps.", whole_number),
}


def get_args_parser() -> Parser:
    """The options of training, in data-flow order."""
    return training_parser(
        PRESETS,
        {"binding and scoring: patches, entities, relations -> scores": BINDING, "losses": LOSSES},
        PART_RATES,
        captions={"captions -> scene graphs": CAPTION_GRAPHS},
        defaults=DEFAULTS,
    )


def check_options(args: argparse.Namespace) -> None:
    """Give both encoders their learning rates; refuse options that do not fit each other.

    Raises:
        ValueError: names the option and what would fit.
    """
    for part in ("image", "text"):
        if getattr(args, f"lr_{part}") is None:
            setattr(args, f"lr_{part}", args.lr)
    if args.shards == "streamed":
        raise UserError(
            "--shards streamed: false graphs are drawn by a pair's number, which a stream does not have; use --shards "
            "indexed"
        )
    check_pair_options(args)
    if args.graph_key is not None:
        _check_graph_key(args)


def _check_graph_key(args: argparse.Namespace) -> None:
    """Refuse --graph_key unless shards hold captions and graphs in `.json` members and validation pairs have graphs."""
    if args.graphs != DEFAULT_GRAPHS:
        raise UserError(f"--graph_key {args.graph_key} with --graphs {args.graphs}: give one of the two")
    if args.caption_key is None:
        raise UserError(
            f"--graph_key {args.graph_key} reads .json members; give --caption_key too, the key of the caption there"
        )
    if args.val_share:
        raise UserError("--graph_key with --val_share: give --val_path and --val_graphs")
    if args.val_path is not None and args.val_graphs is None:
        raise UserError(f"--graph_key with --val_path {args.val_path}: its captions need graphs; give --val_graphs")


CAPTIONS: Group = {
    "captions": Option(
        None,
        "A text file with one caption per line, a table (.csv, .tsv, .jsonl), JSON of COCO or of a benchmark, "
        "or any pairs that training reads: shards, scenes, class folders. For --parser vg: region_graphs.json; "
        "for gqa: GQA's scene graphs.",
    ),
    "caption": Option(None, "Show the graph of this one caption, and write nothing.", str, metavar="TEXT"),
    "caption_key": Option(None, "Column or key of the captions, if its name is not recognised.", str),
    "image_key": Option(None, "Column of the images in a table, if its name is not recognised.", str),
    "image_folder": Option(
        None,
        "Folder to which the images' paths are relative; by default the table's folder. With COCO's "
        "annotations, vg and gqa, the output names images only if this option is given.",
    ),
    "split": Option("all", "Part of the pairs: a split's name, or all.", str),
}
CAPTION_PARSER: Group = {
    "parser": Option(
        "templates",
        "templates: closed word lists, for captions made from templates. spacy: dependency trees. llm: a language "
        "model, the most accurate. vg, gqa: no parser, but the graphs of Visual Genome or GQA.",
        choices=PARSER_NAMES,
    ),
    "server": Option(
        None,
        "For llm: address of a server with OpenAI's protocol, such as http://localhost:8000/v1. All captions are sent "
        "there. The key comes from the environment variable OPENAI_API_KEY.",
        str,
    ),
    "model": Option(None, "For llm: name of the model on the server, or with --local the model's folder."),
    "local": Option(False, "For llm: run the model here, with transformers."),
    "concurrency": Option(16, "For llm: number of requests at the same time.", positive_int),
    "timeout_s": Option(120.0, "For llm: seconds that a whole request may take; then it is repeated.", positive_number),
    "cache": Option(
        None, "For llm: database of all answers; by default OUTPUT.cache.sqlite. Runs may share a database."
    ),
    "seed": Option(0, "For vg and gqa: random seed of the captions."),
    "captions_per_image": Option(1, "For vg and gqa: captions drawn per image.", positive_int),
    "exclude_images": Option(None, "For vg and gqa: file of image ids or file names to leave out, one per line."),
}


def parse_parser() -> Parser:
    """The options of `parsers/command.py`, in data-flow order."""
    output = Option(None, "File of graphs, .jsonl; an existing file is resumed.")
    return Parser({"captions": CAPTIONS, "parser": CAPTION_PARSER, "result": {"output": output, **GRAPH_SIZES}})


def pictures_parser() -> Parser:
    """The options of `pictures.py`, in data-flow order."""
    choice: Group = {
        "pairs": Option(
            None,
            "Numbers of the pairs to show; by default --max_rows pairs, with two relations where possible.",
            whole_number,
            nargs="+",
        ),
        "max_rows": Option(4, "Number of pairs to show, if --pairs is not given.", positive_int),
        "max_pairs": Option(
            400, "Number of captions to search for relations, evenly spread over the data.", positive_int
        ),
    }
    default_tokens = Option(
        False, "Draw one map per default token; by default one panel shows all default tokens together."
    )
    groups = {"graphs": {"graphs": GRAPHS}, "choice of pairs": choice, "maps": {"default_tokens": default_tokens}}
    return picture_parser("Checkpoint of OC-CLIP training.", groups)

"""The options of OC-CLIP's training, in the order of the data flow, and the numbers that they may have.

Parsing is pure: it opens no file, touches no device, asks no network.
"""

import argparse

from dino_sparo.image_text.options import (
    add_image_options,
    add_optimization_options,
    add_pair_options,
    add_pair_run_options,
    add_preset_option,
    add_text_options,
    check_pair_options,
)
from dino_sparo.oc_clip.choices import COMPETITIONS, MAX_NODES, MAX_RELATIONS, RELATION_NEGATIVES, RELATION_SCORES
from dino_sparo.oc_clip.presets import RECIPES
from dino_sparo.runtime.choices import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from dino_sparo.runtime.cli import (
    Parser,
    add_device_options,
    add_normalization_options,
    add_source_options,
)
from dino_sparo.training.options import add_numbers

DEFAULT_GRAPHS = "templates"
POSITIVE_OPTIONS = ("max_nodes", "bind_dim", "bind_heads", "rel_dim", "score_chunk_mb", "ent_coef", "rel_coef")
NON_NEGATIVE_OPTIONS = (
    *("max_relations", "num_default", "bind_layers", "rel_loss_weight"),
    *("lr_image", "lr_text", "warmup_image", "warmup_text", "position_std"),
)


def get_args_parser() -> Parser:
    """The options of training, in data-flow order."""
    parser = Parser()
    add_preset_option(parser, RECIPES)
    add_pair_options(parser)
    add_source_options(parser, ["split"])
    _add_graph_options(parser)
    add_normalization_options(parser, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)
    add_image_options(parser, RECIPES)
    add_text_options(parser, RECIPES)
    _add_binding_options(parser)
    _add_loss_options(parser)
    group = add_optimization_options(parser, RECIPES)
    for name, usual in (("lr_image", "1e-6"), ("lr_text", "2e-5")):
        group.add_argument(
            f"--{name}",
            type=float,
            default=None,
            help="Learning rate of that encoder; by default the preset's, else that of --lr. Small for an encoder that "
            f"is pretrained: the paper's is {usual}.",
        )
    for name in ("warmup_image", "warmup_text"):
        group.add_argument(
            f"--{name}",
            type=int,
            default=None,
            help="Steps of warm-up of that encoder; by default the preset's, else those of --warmup_steps.",
        )
    add_pair_run_options(parser)
    add_device_options(parser)
    return parser


def _add_graph_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("captions -> scene graphs")
    group.add_argument(
        "--graphs",
        default=DEFAULT_GRAPHS,
        help="The captions' graphs: a .jsonl file of dino-sparo parse, or a parser that needs no file: templates, for "
        "the built-in scenes and captions made by a template; spacy, where it is installed.",
    )
    group.add_argument("--val_graphs", default=None, help="The same for --val_path; by default as --graphs.")
    group.add_argument(
        "--graph_key",
        default=None,
        help="For shards: the key of the .json members that holds the graph, instead of --graphs.",
    )
    group.add_argument(
        "--max_nodes", type=int, default=MAX_NODES, help="Most entities of a graph; the first ones are kept."
    )
    group.add_argument(
        "--max_relations", type=int, default=MAX_RELATIONS, help="Most relations of a graph; the first ones are kept."
    )


def _add_binding_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("binding and scoring: patches, entities, relations -> scores")
    for name, text in (("bind_dim", "Width of entities, keys, values and slots."), ("rel_dim", "Width of relations.")):
        group.add_argument(f"--{name}", type=int, default=None, help=RECIPES.with_default(text, name))
    add_numbers(
        group,
        bind_layers=(2, "Self-attention blocks on the patches."),
        bind_heads=(4, "Heads of these blocks."),
        position_std=(1.0, "Standard deviation of the patches' positions at the start."),
        num_default=(4, "Default tokens, which take the patches that no entity names."),
    )
    group.add_argument(
        "--competition",
        choices=COMPETITIONS,
        default="queries",
        help="What the softmax runs over: queries, entities compete for each patch; keys, an ordinary attention (the "
        "paper's ablation, with --num_default 0).",
    )
    group.add_argument(
        "--relation",
        choices=RELATION_SCORES,
        default="additive",
        help="Score of a relation: one MLP each for subject and object, added; or one MLP of both.",
    )
    add_numbers(
        group,
        ent_coef=(1.5, "Weight of entities in a score, at the start."),
        rel_coef=(0.5, "Weight of relations in a score, at the start."),
    )
    group.add_argument(
        "--score_chunk_mb",
        type=float,
        default=256,
        help="Largest tensor while images are scored with graphs, megabytes. Smaller takes less memory; larger is "
        "faster where a batch's scores fit 32 times, since the backward pass then computes nothing again.",
    )


def _add_loss_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("losses")
    group.add_argument(
        "--logit_scale",
        choices=["learned", "none"],
        default="learned",
        help="Inverse temperature of both losses; none follows the paper exactly, which has no temperature.",
    )
    group.add_argument(
        "--rel_loss_weight",
        type=float,
        default=1.0,
        help="Weight of the local loss, which tells a graph from its own with other relations; 0 leaves it out.",
    )
    group.add_argument(
        "--rel_negatives",
        choices=RELATION_NEGATIVES,
        default="all",
        help="Which relations of a graph are altered in its two false graphs.",
    )
    group.add_argument(
        "--symmetric",
        default=None,
        metavar="FILE",
        help="Predicates that hold both ways, such as next to, one per line: relations with them are not altered. The "
        "paper alters all.",
    )


def check_options(args: argparse.Namespace) -> None:
    """Fill in the preset's values, then refuse numbers that cannot be.

    Raises:
        ValueError: names the option and what would fit.
    """
    RECIPES.apply(args)
    for part in ("image", "text"):
        if getattr(args, f"lr_{part}") is None:
            setattr(args, f"lr_{part}", args.lr)
    if args.shards == "streamed":
        raise ValueError(
            "--shards streamed: false graphs are drawn by a pair's number, which a stream does not have; use --shards "
            "indexed"
        )
    check_pair_options(args, POSITIVE_OPTIONS, NON_NEGATIVE_OPTIONS)
    if args.graph_key is not None:
        _check_graph_key(args)
    if args.competition == "keys" and args.num_default:
        raise ValueError(
            f"--competition keys with --num_default {args.num_default}: default tokens change nothing where entities "
            "do not compete; give --num_default 0"
        )
    if args.bind_dim % args.bind_heads:
        raise ValueError(f"--bind_heads {args.bind_heads} does not divide --bind_dim {args.bind_dim}")


def _check_graph_key(args: argparse.Namespace) -> None:
    """The graphs of shards stand beside the captions in `.json` members, and pairs to validate on have none."""
    if args.graphs != DEFAULT_GRAPHS:
        raise ValueError(f"--graph_key {args.graph_key} with --graphs {args.graphs}: give one of the two")
    if args.caption_key is None:
        raise ValueError(
            f"--graph_key {args.graph_key} reads .json members; give --caption_key too, the key of the caption there"
        )
    if args.val_share:
        raise ValueError("--graph_key with --val_share: give --val_path and --val_graphs")
    if args.val_path is not None and args.val_graphs is None:
        raise ValueError(f"--graph_key with --val_path {args.val_path}: its captions need graphs; give --val_graphs")

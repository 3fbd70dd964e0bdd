"""`dino-sparo COMMAND`: all commands under one name. `python -m dino_sparo COMMAND` is the same.

    dino-sparo                                                                        # lists them
    dino-sparo zero-shot --pretrained_weights output/checkpoint.pth --data_path data/imagenet

A command is a function of its parsed options. It imports its code when it is called, so that `--help` and mistakes are
answered before torch is imported. Only this file and `submit.py` know all objectives.
"""

import argparse
import difflib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from dino_sparo._version import __version__
from dino_sparo.clip.choices import TOWERS
from dino_sparo.clip.options import get_args_parser as train_clip_parser
from dino_sparo.clip.slots.options import mask_parser, pictures_parser, select_parser
from dino_sparo.dino.options import get_args_parser as train_parser
from dino_sparo.evaluation.embed.options import cluster_parser, embed_parser, predict_parser
from dino_sparo.evaluation.options import (
    attention_parser,
    export_parser,
    knn_parser,
    linear_parser,
    push_parser,
    slot_score_parser,
    slot_study_parser,
)
from dino_sparo.image_text.evaluation.options import (
    compositional_parser,
    order_captions_parser,
    probe_parser,
    retrieval_parser,
    scene_pairs_parser,
    sugarcrepe_parser,
    winoground_parser,
    zero_shot_parser,
)
from dino_sparo.oc_clip.choices import DEMO_MODELS
from dino_sparo.oc_clip.options import get_args_parser as train_oc_clip_parser
from dino_sparo.oc_clip.parsers.options import parse_parser
from dino_sparo.oc_clip.pictures.options import get_args_parser as oc_pictures_parser
from dino_sparo.runtime.choices import DINO_READOUTS
from dino_sparo.runtime.cli import Parser, say
from dino_sparo.runtime.demos import demo_parser
from dino_sparo.runtime.exits import errors_in_one_line
from dino_sparo.runtime.faults import full_memory_named, require

if TYPE_CHECKING:
    from dino_sparo.image_text.evaluation.embed_captions import CaptionEncoder
    from dino_sparo.image_text.scoring.scorer import Scorer
    from dino_sparo.runtime.launch import Distributed

logger = logging.getLogger("dino_sparo")

# Entry of a checkpoint that says how its image-text model is built -> options that such a model has no use for, unset.
UNUSED_OPTIONS: dict[str, dict[str, Any]] = {
    "clip": {"graphs": None, "quick_gelu": False, "text_heads": None},
    "oc_clip": {"slots": None, "quick_gelu": False, "text_heads": None},
}
FOREIGN_UNUSED_OPTIONS = {"graphs": None}  # open_clip's weights have no such entry


class Command(NamedTuple):
    """One command.

    Attributes:
        parser: makes its options; None: the command parses the words itself.
        function: called with the parsed options, or with the words; its docstring says what it turns into what.
    """

    parser: Callable[[], Parser] | None
    function: Callable[[Any], Any]

    @property
    def summary(self) -> str:
        """Input and output of the command, for the overview."""
        return str(self.function.__doc__)


COMMANDS: dict[str, Command] = {}


def command(parser: Callable[[], Parser] | None) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Enter a function into `COMMANDS`, under its name with hyphens."""

    def enter(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        COMMANDS[function.__name__.replace("_", "-")] = Command(parser, function)
        return function

    return enter


def open_model(
    args: argparse.Namespace, process: "Distributed", border: int = 0, is_one_of_several: bool = False
) -> "Scorer":
    """The image-text model that `--pretrained_weights` names, for an evaluation.

    Args:
        args: the options of `image_text.evaluation.options.add_model_options` and `add_computation_options`.
        process: this process among its peers.
        border: pixels cut off every side of an image.
        is_one_of_several: leave out options that this model has no use for; otherwise they are refused.

    Raises:
        ValueError: no checkpoint is named, it holds no image-text model, or the options do not fit it.
    """
    from dino_sparo.weights.checkpoint import load_checkpoint

    require("open_clip", "captions")
    checkpoint = load_checkpoint(args.pretrained_weights) if args.pretrained_weights else {}
    kind = next((kind for kind in UNUSED_OPTIONS if kind in checkpoint), None)
    if is_one_of_several:
        unused = UNUSED_OPTIONS[kind] if kind else FOREIGN_UNUSED_OPTIONS
        for name, unset in unused.items():
            if getattr(args, name) != unset:
                logger.info("%s: --%s is left out, which this model has no use for", args.pretrained_weights, name)
        args = argparse.Namespace(**{**vars(args), **unused})
    if kind == "oc_clip":
        from dino_sparo.oc_clip.load import open_oc_clip_model

        return open_oc_clip_model(args, process, border, checkpoint)
    from dino_sparo.clip.load import clip_scorer

    return clip_scorer(args, process, border, checkpoint)


def open_caption_encoder(args: argparse.Namespace) -> "CaptionEncoder":
    """The text side of the CLIP or OC-CLIP in `--pretrained_weights`.

    Raises:
        ValueError: no checkpoint is named, or it holds an encoder of images alone.
    """
    from dino_sparo.clip.model import load_clip
    from dino_sparo.image_text.evaluation.embed_captions import CaptionEncoder
    from dino_sparo.weights.checkpoint import clip_weights, load_checkpoint

    require("open_clip", "captions")
    path = args.pretrained_weights
    checkpoint = load_checkpoint(path) if path else {}
    loaded: Any
    if "oc_clip" in checkpoint:
        from dino_sparo.oc_clip.load import load_oc_clip

        loaded = load_oc_clip(path, checkpoint)
    elif path and clip_weights(checkpoint, path) is not None:
        loaded = load_clip(path, quick_gelu=args.quick_gelu, checkpoint=checkpoint)
    else:
        raise ValueError(
            f"--what captions: --pretrained_weights {path or 'is empty and'} holds no text encoder; give a checkpoint "
            "of train-clip or train-oc-clip"
        )
    return CaptionEncoder(loaded.model, loaded.model.config.text.context_length, loaded.record)


@command(train_parser)
def train(args: argparse.Namespace) -> Any:
    """Images -> an encoder, trained with DINO."""
    from dino_sparo.dino.train import train

    return train(args)


@command(train_clip_parser)
def train_clip(args: argparse.Namespace) -> Any:
    """Images with captions -> an encoder of both, trained with CLIP."""
    from dino_sparo.clip.train import train

    return train(args)


@command(train_oc_clip_parser)
def train_oc_clip(args: argparse.Namespace) -> Any:
    """Images with captions and their scene graphs -> a model that binds graphs to images, trained with OC-CLIP."""
    from dino_sparo.oc_clip.train import train

    return train(args)


@command(None)
def submit(words: Sequence[str] | None) -> Any:
    """A training -> a Slurm job, requeued when it is preempted, at its time limit and after faults."""
    from dino_sparo.submit import main

    return main(words)


@command(knn_parser)
def knn(args: argparse.Namespace) -> Any:
    """A checkpoint and labelled images -> weighted k-NN accuracy."""
    from dino_sparo.evaluation.knn.command import evaluate_checkpoint

    return evaluate_checkpoint(args)


@command(linear_parser)
def linear(args: argparse.Namespace) -> Any:
    """A checkpoint and labelled images -> linear probes, one per learning rate, and their accuracy."""
    from dino_sparo.evaluation.linear.command import probe_checkpoint

    return probe_checkpoint(args)


@command(embed_parser)
def embed(args: argparse.Namespace) -> Any:
    """A checkpoint and any images -> embeddings on disk: encodings, slots, tokens; of a CLIP also captions."""
    if not args.data_path or not args.output_dir:
        raise ValueError("embed needs --data_path, the images, and --output_dir, the folder of the embeddings")
    if "captions" in args.what:
        from dino_sparo.image_text.evaluation.embed_captions import embed_captions

        return embed_captions(args, open_caption_encoder)
    from dino_sparo.evaluation.embed.command import embed_images

    return embed_images(args)


@command(cluster_parser)
def cluster(args: argparse.Namespace) -> Any:
    """Embeddings -> clusters of similar images, examples of each, a map."""
    from dino_sparo.evaluation.embed.cluster import cluster_embeddings

    return cluster_embeddings(args)


@command(predict_parser)
def predict(args: argparse.Namespace) -> Any:
    """Labelled embeddings and new ones -> a classifier, its accuracy, and a table of predictions."""
    from dino_sparo.evaluation.embed.predict import predict

    return predict(args)


@command(slot_study_parser)
def slot_study(args: argparse.Namespace) -> Any:
    """A checkpoint and labelled images -> what each slot alone knows, and accuracy against the number of slots."""
    from dino_sparo.evaluation.slots.command import study_slots

    return study_slots(args)


@command(attention_parser)
def attention(args: argparse.Namespace) -> Any:
    """A checkpoint and images -> one attention map per slot or head; the slot atlas."""
    from dino_sparo.evaluation.attention.command import visualize

    return visualize(args)


@command(slot_score_parser)
def slot_score(args: argparse.Namespace) -> Any:
    """A checkpoint and images with masks -> how well its slots or heads find objects, beside controls."""
    from dino_sparo.evaluation.objects.command import score_slots

    return score_slots(args)


@command(export_parser)
def export(args: argparse.Namespace) -> Any:
    """A checkpoint -> safetensors, timm, Hugging Face, ONNX, OpenCLIP."""
    from dino_sparo.weights.export import export_checkpoint

    return export_checkpoint(args)


@command(push_parser)
def push(args: argparse.Namespace) -> Any:
    """A checkpoint -> a repository of the Hugging Face hub."""
    from dino_sparo.weights.export import push_checkpoint

    return push_checkpoint(args)


@command(zero_shot_parser)
def zero_shot(args: argparse.Namespace) -> Any:
    """Images and the names of their classes -> accuracy of classification by captions."""
    from dino_sparo.image_text.evaluation.zero_shot import evaluate_checkpoint

    return evaluate_checkpoint(args, open_model)


@command(retrieval_parser)
def retrieval(args: argparse.Namespace) -> Any:
    """Images with captions -> recall of captions by image and of images by caption."""
    from dino_sparo.image_text.evaluation.retrieval import evaluate_checkpoint

    return evaluate_checkpoint(args, open_model)


@command(sugarcrepe_parser)
def sugarcrepe(args: argparse.Namespace) -> Any:
    """Images with a true and a false caption -> how often the true one is nearer."""
    from dino_sparo.image_text.evaluation.compositional.single import evaluate_single

    return evaluate_single(args, open_model, "sugarcrepe")


@command(winoground_parser)
def winoground(args: argparse.Namespace) -> Any:
    """Two images and two captions of the same words -> how often images and captions are matched correctly."""
    from dino_sparo.image_text.evaluation.compositional.single import evaluate_single

    return evaluate_single(args, open_model, "winoground")


@command(compositional_parser)
def compositional(args: argparse.Namespace) -> Any:
    """All benchmarks of true and false captions in a folder -> accuracies, models side by side."""
    from dino_sparo.image_text.evaluation.compositional.command import compare

    return compare(args, partial(open_model, is_one_of_several=True))


@command(order_captions_parser)
def order_captions(args: argparse.Namespace) -> Any:
    """Images with captions -> captions with shuffled words, ARO's order benchmarks, for compositional."""
    from dino_sparo.image_text.evaluation.compositional.sets.aro import write_order

    return write_order(args)


@command(probe_parser)
def clip_probe(args: argparse.Namespace) -> Any:
    """Frozen image features -> accuracy of a linear probe, its weight decay chosen by a sweep."""
    from dino_sparo.image_text.evaluation.probe import probe_checkpoint

    return probe_checkpoint(args, open_model)  # type: ignore[arg-type]  # all scorers give image features


@command(scene_pairs_parser)
def scene_pairs(args: argparse.Namespace) -> Any:
    """Built-in scenes -> true and hard false captions, in SugarCrepe's format."""
    from dino_sparo.image_text.evaluation.compositional.sets.scene_pairs import write_pairs

    return write_pairs(args)


@command(parse_parser)
def parse(args: argparse.Namespace) -> Any:
    """Captions -> their scene graphs, for OC-CLIP."""
    from dino_sparo.oc_clip.parsers.command import parse

    return parse(args)


@command(select_parser)
def select(args: argparse.Namespace) -> Any:
    """Labelled images -> the slots of a CLIP that tell their classes apart."""
    from dino_sparo.clip.slots.select import select_slots

    return select_slots(args)


@command(mask_parser)
def mask(args: argparse.Namespace) -> Any:
    """True and false captions -> weights of the slots of a CLIP that tell them apart."""
    from dino_sparo.clip.slots.mask import learn_mask

    return learn_mask(args)


@command(pictures_parser)
def pictures(args: argparse.Namespace) -> Any:
    """Images with captions -> what the slots of a CLIP look at in both."""
    from dino_sparo.clip.pictures.draw import draw_pictures

    return draw_pictures(args)


@command(oc_pictures_parser)
def oc_pictures(args: argparse.Namespace) -> Any:
    """Images with captions -> what the entities of the captions' scene graphs look at, by an OC-CLIP."""
    from dino_sparo.oc_clip.pictures.draw import draw_pictures

    return draw_pictures(args)


@command(None)
def clip_benchmark(words: Sequence[str] | None) -> Any:
    """A CLIP -> the numbers of LAION's CLIP benchmark, by its own command; its options follow."""
    from dino_sparo.clip.adapter import main

    return main(words)


@command(lambda: demo_parser(DINO_READOUTS))
def demo(args: argparse.Namespace) -> Any:
    """Built-in scenes -> DINO + SPARO trained, evaluated and drawn, in minutes and without a GPU."""
    from dino_sparo.dino.demo import demo

    return demo(args, run)


@command(lambda: demo_parser(TOWERS))
def demo_clip(args: argparse.Namespace) -> Any:
    """Built-in scenes -> CLIP + SPARO trained, evaluated and drawn, in minutes and without a GPU."""
    from dino_sparo.clip.demo import demo

    return demo(args, run)


@command(lambda: demo_parser(DEMO_MODELS, "models", DEMO_MODELS))
def demo_oc_clip(args: argparse.Namespace) -> Any:
    """Built-in scenes -> OC-CLIP trained beside CLIP, evaluated and drawn, in minutes and without a GPU."""
    from dino_sparo.oc_clip.demo import demo

    return demo(args, run)


def run(name: str, words: Sequence[str] | None = None, prog: str | None = None) -> Any:
    """Parse a command's options and run it; a mistake in them ends with one line, not a traceback.

    Args:
        name: a key of `COMMANDS`.
        words: the options; None: the command line's.
        prog: name of the command in `--help`; by default `dino-sparo NAME`.

    Returns:
        The command's result; an evaluation returns the content of its result file.
    """
    command = COMMANDS[name]
    if command.parser is None:
        return command.function(words)
    parser = command.parser()
    parser.prog, parser.description = prog or f"dino-sparo {name}", command.summary
    args = parser.parse_args(words)
    with errors_in_one_line(logger), full_memory_named(vars(args)):
        return command.function(args)


def parse_keywords(name: str, keywords: Mapping[str, Any]) -> argparse.Namespace:
    """Parse a command's options from Python: `parse_keywords("knn", {"data_path": "scenes", "nb_knn": [10, 20]})`.

    Every value passes the checks of the command line. None leaves an option out. Nothing is printed, and the process
    does not end. `COMMANDS[name].function(args)` then runs the command.

    Args:
        name: a key of `COMMANDS`, such as `train-clip`.
        keywords: option names, without hyphens in front, and their values; options with several values take a list.

    Returns:
        All options of the command, those that are not given with their defaults.

    Raises:
        ValueError: one line; it names the option, and for an unknown option the nearest ones.
    """
    parser = COMMANDS[name].parser
    if parser is None:
        raise ValueError(f"the command {name} takes no options from Python")
    return parser().parse_keywords(keywords)


MOVED = {name: f"python -m studies {name}" for name in ("oc-splits", "sweep")}  # from a clone


def main(argv: Sequence[str] | None = None) -> Any:
    """Run the command that the first word names; None: of the command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        return run(words[0], words[1:])
    if words and words[0] in MOVED:
        raise SystemExit(f"dino-sparo {words[0]} is now {MOVED[words[0]]}, in a clone of the repository")
    width = max(map(len, COMMANDS)) + 2
    overview = "\n".join(f"  {name:<{width}}{command.summary}" for name, command in COMMANDS.items())
    parser = Parser("dino-sparo", description=overview)
    parser.add_argument("--version", action="version", version=f"dino_sparo {__version__}")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="One of the above; COMMAND --help says more.")
    name = parser.parse_known_args(words)[0].command
    if name is not None:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        parser.error(f"there is no command {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
    say(parser.format_help())
    return None


def console() -> None:
    """The console script: its exit status is 0 unless a command ended the process."""
    main()


if __name__ == "__main__":
    main()

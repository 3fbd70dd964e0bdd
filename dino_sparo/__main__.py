"""`dino-sparo COMMAND`: all commands under one name. `python -m dino_sparo COMMAND` is the same.

    dino-sparo                                                                        # lists them
    dino-sparo zero-shot --pretrained_weights output/checkpoint.pth --data_path data/imagenet

Only this file and `submit.py` know all objectives: which commands there are, and which objective reads which
checkpoint. The scripts at the root of a clone are the same commands under the names of facebookresearch/dino.
"""

import argparse
import difflib
import importlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from dino_sparo._version import __version__
from dino_sparo.clip import choices as clip_choices
from dino_sparo.oc_clip.choices import DEMO_MODELS
from dino_sparo.runtime import choices
from dino_sparo.runtime.cli import HelpFormatter, command_parser, errors_in_one_line, mistakes_in_one_line, say
from dino_sparo.runtime.demos import demo_parser
from dino_sparo.runtime.extras import require
from dino_sparo.runtime.memory import full_memory_named

if TYPE_CHECKING:
    from dino_sparo.image_text.scoring.scorer import Scorer
    from dino_sparo.runtime.distributed import Distributed

logger = logging.getLogger(__name__)


class Objective(NamedTuple):
    """How evaluations open the image-text models of one objective.

    Attributes:
        opener: `module:function`, called with the options, the process, the border and what the checkpoint holds.
        unread: options that its models have no use for -> the values that leave them out.
    """

    opener: str
    unread: Mapping[str, Any]


FOREIGN_OPTIONS = {"quick_gelu": False, "text_heads": None}  # what weights of others do not say of themselves
# The entry of a checkpoint that says how its model is built -> its objective.
OBJECTIVES = {
    "clip": Objective("dino_sparo.clip.load:open_clip_model", {"graphs": None, **FOREIGN_OPTIONS}),
    "oc_clip": Objective("dino_sparo.oc_clip.load:open_oc_clip_model", {"slots": None, **FOREIGN_OPTIONS}),
}
FOREIGN = Objective(OBJECTIVES["clip"].opener, {"graphs": None})  # open_clip's weights have no such entry


class Command(NamedTuple):
    """One command.

    Attributes:
        summary: what it turns into what.
        parser: its options, made without torch; None: the body takes the words and parses them itself.
        body: `module:function`, called with the parsed options. The module is imported after the options were parsed,
            so that `--help` and mistakes are answered before torch is imported.
        helper: a function of this file, the body's second argument.
    """

    summary: str
    parser: Callable[[], argparse.ArgumentParser] | None
    body: str
    helper: Callable[..., Any] | None = None


def options_of(module: str, name: str = "get_args_parser") -> Callable[[], argparse.ArgumentParser]:
    """The function of a module that makes a parser; imported when it is called, since `--help` needs one of them."""

    def parser() -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = imported(f"dino_sparo.{module}:{name}")()
        return made if made.add_help else command_parser(made)

    return parser


def imported(path: str) -> Any:
    """What `module:name` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def open_model(
    args: argparse.Namespace, process: "Distributed", border: int = 0, is_one_of_several: bool = False
) -> "Scorer":
    """The image-text model that `--pretrained_weights` names, as evaluations ask it.

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
    objective = next((each for key, each in OBJECTIVES.items() if key in checkpoint), FOREIGN)
    if is_one_of_several:
        for name, unset in objective.unread.items():
            if getattr(args, name) != unset:
                logger.info("%s: --%s is left out, which this model has no use for", args.pretrained_weights, name)
        args = argparse.Namespace(**{**vars(args), **objective.unread})
    scorer: Scorer = imported(objective.opener)(args, process, border, checkpoint)
    return scorer


def run(name: str, words: Sequence[str] | None = None, prog: str | None = None) -> Any:
    """Parse a command's options and run it; a mistake in them ends with one line, not a traceback.

    Args:
        name: a key of `COMMANDS`.
        words: the options; None: the command line's.
        prog: what `--help` calls the command; by default `dino-sparo NAME`.

    Returns:
        What the command returns: of an evaluation the content of its result file.
    """
    command = COMMANDS[name]
    if command.parser is None:
        return imported(command.body)(words)
    parser = command.parser()
    parser.prog, parser.description = prog or f"dino-sparo {name}", command.summary
    mistakes_in_one_line(parser)
    args = parser.parse_args(words)
    with errors_in_one_line(logging.getLogger(command.body.partition(":")[0])), full_memory_named(vars(args)):
        body = imported(command.body)
        return body(args) if command.helper is None else body(args, command.helper)


COMMANDS: dict[str, Command] = {
    "train": Command(
        "Images -> an encoder, trained with DINO.", options_of("dino.options"), "dino_sparo.dino.train:train"
    ),
    "train-clip": Command(
        "Images with captions -> an encoder of both, trained with CLIP.",
        options_of("clip.options"),
        "dino_sparo.clip.train:train",
    ),
    "train-oc-clip": Command(
        "Images with captions and their scene graphs -> a model that binds graphs to images, trained with OC-CLIP.",
        options_of("oc_clip.options"),
        "dino_sparo.oc_clip.train:train",
    ),
    "submit": Command(
        "A training -> a Slurm job, requeued when it is preempted, at its time limit and after faults.",
        None,
        "dino_sparo.submit:main",
    ),
    "knn": Command(
        "A checkpoint and labelled images -> weighted k-NN accuracy.",
        options_of("evaluation.options", "knn_parser"),
        "dino_sparo.evaluation.knn.command:evaluate_checkpoint",
    ),
    "linear": Command(
        "A checkpoint and labelled images -> linear probes, one per learning rate, and their accuracy.",
        options_of("evaluation.options", "linear_parser"),
        "dino_sparo.evaluation.linear.command:probe_checkpoint",
    ),
    "slot-study": Command(
        "A checkpoint and labelled images -> what each slot alone knows, and accuracy against the number of slots.",
        options_of("evaluation.options", "slot_study_parser"),
        "dino_sparo.evaluation.slots.command:study_slots",
    ),
    "attention": Command(
        "A checkpoint and images -> one attention map per slot or head; the slot atlas.",
        options_of("evaluation.options", "attention_parser"),
        "dino_sparo.evaluation.attention.command:visualize",
    ),
    "slot-score": Command(
        "A checkpoint and images with masks -> how well its slots or heads find objects, beside controls.",
        options_of("evaluation.options", "slot_score_parser"),
        "dino_sparo.evaluation.objects.command:score_slots",
    ),
    "export": Command(
        "A checkpoint -> safetensors, timm, Hugging Face, ONNX, OpenCLIP.",
        options_of("evaluation.options", "export_parser"),
        "dino_sparo.weights.export:export_checkpoint",
    ),
    "zero-shot": Command(
        "Images and the names of their classes -> accuracy of classification by captions.",
        options_of("image_text.evaluation.options", "zero_shot_parser"),
        "dino_sparo.image_text.evaluation.zero_shot:evaluate_checkpoint",
        open_model,
    ),
    "retrieval": Command(
        "Images with captions -> recall of captions by image and of images by caption.",
        options_of("image_text.evaluation.options", "retrieval_parser"),
        "dino_sparo.image_text.evaluation.retrieval:evaluate_checkpoint",
        open_model,
    ),
    "sugarcrepe": Command(
        "Images with a true and a false caption -> how often the true one is nearer.",
        options_of("image_text.evaluation.options", "sugarcrepe_parser"),
        "dino_sparo.image_text.evaluation.sugarcrepe:evaluate_checkpoint",
        open_model,
    ),
    "winoground": Command(
        "Two images and two captions of the same words -> how often images and captions are matched correctly.",
        options_of("image_text.evaluation.options", "winoground_parser"),
        "dino_sparo.image_text.evaluation.winoground:evaluate_checkpoint",
        open_model,
    ),
    "compositional": Command(
        "All benchmarks of true and false captions in a folder -> accuracies, models side by side.",
        options_of("image_text.evaluation.options", "compositional_parser"),
        "dino_sparo.image_text.evaluation.compositional.command:compare",
        partial(open_model, is_one_of_several=True),
    ),
    "order-captions": Command(
        "Images with captions -> captions with shuffled words, ARO's order benchmarks, for compositional.",
        options_of("image_text.evaluation.options", "order_captions_parser"),
        "dino_sparo.image_text.evaluation.compositional.sets.word_order:write_order",
    ),
    "clip-probe": Command(
        "Frozen image features -> accuracy of a linear probe, its weight decay chosen by a sweep.",
        options_of("image_text.evaluation.options", "probe_parser"),
        "dino_sparo.image_text.evaluation.probe:probe_checkpoint",
        open_model,
    ),
    "scene-pairs": Command(
        "Built-in scenes -> true and hard false captions, in SugarCrepe's format.",
        options_of("image_text.evaluation.options", "scene_pairs_parser"),
        "dino_sparo.image_text.evaluation.scene_pairs:write_pairs",
    ),
    "parse": Command(
        "Captions -> their scene graphs, for OC-CLIP.",
        options_of("oc_clip.parsers.options", "parse_parser"),
        "dino_sparo.oc_clip.parsers.command:parse",
    ),
    "select": Command(
        "Labelled images -> the slots of a CLIP that tell their classes apart.",
        options_of("clip.slots.options", "select_parser"),
        "dino_sparo.clip.slots.select:select_slots",
    ),
    "mask": Command(
        "True and false captions -> weights of the slots of a CLIP that tell them apart.",
        options_of("clip.slots.options", "mask_parser"),
        "dino_sparo.clip.slots.mask:learn_mask",
    ),
    "sweep": Command(
        "Results of many models -> accuracy and parameters against the number and the width of slots.",
        options_of("clip.slots.options", "sweep_parser"),
        "dino_sparo.clip.slots.sweep:collect",
        open_model,
    ),
    "pictures": Command(
        "Images with captions -> what the slots of a CLIP look at in both.",
        options_of("clip.slots.options", "pictures_parser"),
        "dino_sparo.clip.pictures.draw:draw_pictures",
    ),
    "oc-pictures": Command(
        "Images with captions -> what the entities of the captions' scene graphs look at, by an OC-CLIP.",
        options_of("oc_clip.pictures.options"),
        "dino_sparo.oc_clip.pictures.draw:draw_pictures",
    ),
    "clip-benchmark": Command(
        "A CLIP -> the numbers of LAION's CLIP benchmark, by its own command; its options follow.",
        None,
        "dino_sparo.clip.adapter:main",
    ),
    "demo": Command(
        "Built-in scenes -> DINO + SPARO trained, evaluated and drawn, in minutes and without a GPU.",
        lambda: demo_parser(choices.DINO_READOUTS),
        "dino_sparo.dino.demo:demo",
        run,
    ),
    "demo-clip": Command(
        "Built-in scenes -> CLIP + SPARO trained, evaluated and drawn, in minutes and without a GPU.",
        lambda: demo_parser(clip_choices.TOWERS),
        "dino_sparo.clip.demo:demo",
        run,
    ),
    "oc-splits": Command(
        "Built-in scenes -> how CLIP and OC-CLIP answer about pairs of objects that were seen in training or were not.",
        options_of("oc_clip.splits_options"),
        "dino_sparo.oc_clip.splits:run_splits",
        run,
    ),
    "demo-oc-clip": Command(
        "Built-in scenes -> OC-CLIP trained beside CLIP, evaluated and drawn, in minutes and without a GPU.",
        lambda: demo_parser(DEMO_MODELS, "models", DEMO_MODELS),
        "dino_sparo.oc_clip.demo:demo",
        run,
    ),
}


def main(argv: Sequence[str] | None = None) -> Any:
    """Run the command that the first word names.

    Args:
        argv: a command and its options; None: the command line's.

    Returns:
        What the command returns.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        return run(words[0], words[1:])
    parser = argparse.ArgumentParser("dino-sparo", description=overview(), formatter_class=HelpFormatter)
    parser.add_argument("--version", action="version", version=f"dino_sparo {__version__}")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="One of the above; COMMAND --help says more.")
    name = parser.parse_known_args(words)[0].command
    if name is not None:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        parser.error(f"there is no command {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
    say(parser.format_help())
    return None


def overview() -> str:
    """The list of commands."""
    width = max(map(len, COMMANDS)) + 2
    return "\n".join(f"  {name:<{width}}{command.summary}" for name, command in COMMANDS.items())


def console() -> None:
    """The console script: its exit status is 0 unless a command ended the process."""
    main()


if __name__ == "__main__":
    main()

"""`dino-sparo COMMAND`: all commands under one name. `python -m dino_sparo COMMAND` is the same.

    dino-sparo                                                                        # lists them
    dino-sparo zero-shot --pretrained_weights output/checkpoint.pth --data_path data/imagenet
    dino-sparo train --config run.yaml --epochs 50                                    # options from a file

A command is a function of its parsed options. Its docstring is its help: a summary and two examples. It imports its
code when it is called, so that `--help` and mistakes are answered before torch is imported. Only this file and
`submit.py` know all objectives.
"""

import argparse
import contextlib
import difflib
import logging
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from inspect import getdoc
from typing import TYPE_CHECKING, Any, NamedTuple

from dino_sparo._version import __version__
from dino_sparo.clip import options as clip_options
from dino_sparo.dino import options as dino_options
from dino_sparo.evaluation import options as evaluation_options
from dino_sparo.image_text.evaluation import options as image_text_options
from dino_sparo.image_text.options import FOREIGN_OPTION
from dino_sparo.oc_clip import options as oc_clip_options
from dino_sparo.runtime.choices import ARCHITECTURES, HEADS, READOUTS, TIMM
from dino_sparo.runtime.cli import Parser, path, printable, read_config, say, values_of, with_underscores
from dino_sparo.runtime.demos import demo_parser
from dino_sparo.runtime.exits import errors_in_one_line
from dino_sparo.runtime.faults import MissingPackageError, UserError, explain_full_memory, require
from dino_sparo.runtime.files import require_inputs
from dino_sparo.simdino import options as simdino_options
from dino_sparo.training.options import check_run

if TYPE_CHECKING:
    from dino_sparo.image_text.scorer import Scorer
    from dino_sparo.image_text.towers import LoadedModel
    from dino_sparo.runtime.launch import Distributed

logger = logging.getLogger("dino_sparo")

# Entry of a checkpoint that says how its image-text model is built -> options that such a model has no use for -> why.
OF_CAPTIONS = {"graphs": "--graphs {value} with a CLIP, which reads captions as they are; leave it out"}
OF_FOREIGN_WEIGHTS = dict.fromkeys(("text_heads", "quick_gelu"), FOREIGN_OPTION)
UNUSED_OPTIONS: dict[str, dict[str, str]] = {
    "clip": {**OF_CAPTIONS, **OF_FOREIGN_WEIGHTS},
    "oc_clip": {
        "slots": "--slots with an OC-CLIP: its score is no dot product, so there are no slots to choose from; leave "
        "it out",
        **OF_FOREIGN_WEIGHTS,
    },
}

# Option -> valid names, as far as they are known without torch; the reference calls some architectures deit.
KNOWN_NAMES: dict[str, Collection[str]] = {
    "arch": {*ARCHITECTURES, *(name.replace("vit", "deit") for name in ARCHITECTURES)},
    "readout": {*READOUTS, *clip_options.TOWERS},
    "benchmarks": image_text_options.BENCHMARK_NAMES,
}

# Checks of a training's options that need no torch; the training makes them once more.
CHECKS = {
    **dict.fromkeys(("train", "train-simdino"), dino_options.check_options),
    "train-clip": clip_options.check_options,
    "train-oc-clip": oc_clip_options.check_options,
}

# Sections of the overview.
TRAIN, EVALUATE, SLOTS = "train", "evaluate and use an encoder", "slots"
IMAGE_TEXT, DATA, DEMOS = "image and text", "data", "demos"


class Command(NamedTuple):
    """One command.

    Attributes:
        section: of the overview.
        parser: makes its options; None: the command parses the words itself.
        function: called with the parsed options, or with the words. Its docstring is the help.
    """

    section: str
    parser: Callable[[], Parser] | None
    function: Callable[[Any], Any]

    @property
    def summary(self) -> str:
        """Input and output of the command, for the overview."""
        return (getdoc(self.function) or "").partition("\n")[0]

    @property
    def examples(self) -> list[str]:
        """Command lines."""
        return [line.strip() for line in (getdoc(self.function) or "").splitlines()[1:] if line.strip()]


COMMANDS: dict[str, Command] = {}
# Command -> entry of a checkpoint -> command that does the same for a CLIP or an OC-CLIP, by options of its own.
FOR_OBJECTIVE = {
    "attention": {"clip": "pictures", "oc_clip": "oc-pictures"},
    "linear": {"clip": "clip-probe", "oc_clip": "clip-probe"},
}
HIDDEN = {hidden: name for name, hidden_names in FOR_OBJECTIVE.items() for hidden in hidden_names.values()}
SYNONYMS = {f"train {name}": f"train-{name}" for name in ("simdino", "clip", "oc-clip")} | {"train dino": "train"}


def command(
    section: str, parser: Callable[[], Parser] | None, name: str = ""
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Enter a function into `COMMANDS`, by default under its name with hyphens."""

    def enter(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        COMMANDS[name or function.__name__.replace("_", "-")] = Command(section, parser, function)
        return function

    return enter


def open_model(
    args: argparse.Namespace, process: "Distributed", border: int = 0, is_one_of_several: bool = False
) -> "Scorer":
    """The image-text model that `--pretrained_weights` names, for an evaluation.

    Args:
        args: the options of `MODEL` and `computation` in image_text/evaluation/options.py.
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
    unused = UNUSED_OPTIONS[kind] if kind else OF_CAPTIONS  # open_clip's weights have no such entry
    for name, message in unused.items():
        value, unset = getattr(args, name), image_text_options.MODEL[name].default
        if value == unset:
            continue
        if not is_one_of_several:
            raise UserError(message.format(name=name, value=value, source=args.pretrained_weights))
        logger.info("%s: --%s is left out, which this model has no use for", args.pretrained_weights, name)
        args = argparse.Namespace(**{**vars(args), name: unset})
    if kind == "oc_clip":
        from dino_sparo.oc_clip.load import open_oc_clip_model

        return open_oc_clip_model(args, process, border, checkpoint)
    from dino_sparo.clip.load import clip_scorer

    return clip_scorer(args, process, border, checkpoint)


def open_caption_encoder(args: argparse.Namespace) -> "LoadedModel":
    """The text side of the CLIP or OC-CLIP in `--pretrained_weights`.

    Raises:
        ValueError: no checkpoint is named, or it holds an encoder of images alone.
    """
    from dino_sparo.weights.checkpoint import image_text_kind, load_checkpoint

    require("open_clip", "captions")
    path = args.pretrained_weights
    checkpoint = load_checkpoint(path) if path else {}
    kind = image_text_kind(checkpoint)
    if kind == "oc_clip":
        from dino_sparo.oc_clip.load import load_oc_clip

        return load_oc_clip(path, checkpoint)
    if kind == "clip":
        from dino_sparo.clip.model import load_clip

        return load_clip(path, quick_gelu=args.quick_gelu, checkpoint=checkpoint)
    raise UserError(
        f"--what captions: --pretrained_weights {path or 'is empty and'} holds no text encoder; give a checkpoint of "
        "train-clip or train-oc-clip"
    )


@command(TRAIN, dino_options.get_args_parser)
def train(args: argparse.Namespace) -> Any:
    """Images -> an encoder, trained with DINO.

    dino-sparo train --data_path scenes --output_dir runs/first --arch vit_micro --patch_size 8 --epochs 5
    dino-sparo train --data_path imagenet/train --output_dir runs/vits16 --readout sparo --epochs 100
    """
    from dino_sparo.dino.train import DINOObjective
    from dino_sparo.training.run import train

    return train(args, DINOObjective)


@command(TRAIN, simdino_options.get_args_parser)
def train_simdino(args: argparse.Namespace) -> Any:
    """Images -> an encoder, trained with SimDINO: DINO without prototypes, center and temperatures.

    dino-sparo train-simdino --data_path scenes --output_dir runs/sim --arch vit_micro --patch_size 8 --epochs 5
    dino-sparo train-simdino --data_path imagenet/train --output_dir runs/sim16 --arch vit_base --batch_size_per_gpu 128
    """
    from dino_sparo.simdino.train import SimDINOObjective
    from dino_sparo.training.run import train

    return train(args, SimDINOObjective)


@command(TRAIN, clip_options.get_args_parser)
def train_clip(args: argparse.Namespace) -> Any:
    """Images with captions -> an image encoder and a text encoder, trained with CLIP.

    dino-sparo train-clip --data_path 'cc3m/{00000..00331}.tar' --output_dir runs/clip --preset cc3m
    dino-sparo train-clip --data_path pairs.csv --output_dir runs/pairs --init_clip laion.safetensors --lr 1e-5
    """
    from dino_sparo.clip.train import CLIPObjective
    from dino_sparo.training.run import train

    return train(args, CLIPObjective)


@command(TRAIN, oc_clip_options.get_args_parser)
def train_oc_clip(args: argparse.Namespace) -> Any:
    """Images with captions and their scene graphs -> a model that binds graphs to images, trained with OC-CLIP.

    dino-sparo train-oc-clip --data_path scenes --output_dir runs/oc --preset oc-scenes
    dino-sparo train-oc-clip --data_path coco.json --graphs coco.jsonl --output_dir runs/coco --preset oc-coco
    """
    from dino_sparo.oc_clip.train import OCCLIPObjective
    from dino_sparo.training.run import train

    return train(args, OCCLIPObjective)


@command(TRAIN, None)
def submit(words: Sequence[str] | None) -> Any:
    """A training -> a Slurm job, requeued when it is preempted, at its time limit and after faults."""
    from dino_sparo.submit import main

    return main(words)


@command(EVALUATE, evaluation_options.embed_parser)
def embed(args: argparse.Namespace) -> Any:
    """A checkpoint and any images -> embeddings on disk: encodings, slots, tokens; of a CLIP also captions.

    dino-sparo embed --pretrained_weights checkpoint.pth --data_path photos --output_dir embeddings
    dino-sparo embed --pretrained_weights clip.pth --data_path pairs.csv --what captions --output_dir captions
    """
    if not args.data_path or not args.output_dir:
        raise UserError("embed needs --data_path, the images, and --output_dir, the folder of the embeddings")
    if "captions" in args.what:
        from dino_sparo.image_text.evaluation.embed_captions import embed_captions

        return embed_captions(args, open_caption_encoder)
    from dino_sparo.evaluation.embed.command import embed_images

    return embed_images(args)


@command(EVALUATE, evaluation_options.cluster_parser)
def cluster(args: argparse.Namespace) -> Any:
    """Embeddings -> clusters of similar images, with examples, and a map.

    dino-sparo cluster embeddings
    dino-sparo cluster embeddings --clusters 50 --map pca
    """
    from dino_sparo.evaluation.embed.cluster import cluster_embeddings

    return cluster_embeddings(args)


@command(EVALUATE, evaluation_options.predict_parser)
def predict(args: argparse.Namespace) -> Any:
    """Labelled and new embeddings -> a classifier, its accuracy, and a table of predictions.

    dino-sparo predict embeddings --images new_embeddings
    dino-sparo predict embeddings --images new_embeddings --val other_embeddings --top 5
    """
    from dino_sparo.evaluation.embed.predict import predict

    return predict(args)


@command(EVALUATE, evaluation_options.knn_parser)
def knn(args: argparse.Namespace) -> Any:
    """A checkpoint and labelled images -> weighted k-NN accuracy.

    dino-sparo knn --pretrained_weights checkpoint.pth --data_path imagenet
    dino-sparo knn --pretrained_weights checkpoint.pth --data_path cifar10:data --nb_knn 20
    """
    from dino_sparo.evaluation.knn import evaluate_checkpoint

    return evaluate_checkpoint(args)


@command(EVALUATE, evaluation_options.linear_parser)
def linear(args: argparse.Namespace) -> Any:
    """A checkpoint and labelled images -> linear probes, one per learning rate, and their accuracy.

    dino-sparo linear --pretrained_weights checkpoint.pth --data_path imagenet
    dino-sparo linear --pretrained_weights checkpoint.pth --data_path cifar10:data --fast --lr 0.01 0.1 1
    """
    from dino_sparo.evaluation.linear.command import probe_checkpoint

    return probe_checkpoint(args)


@command(EVALUATE, evaluation_options.attention_parser)
def attention(args: argparse.Namespace) -> Any:
    """A checkpoint and images -> one attention map per slot or head, and the slot atlas.

    dino-sparo attention --pretrained_weights checkpoint.pth --data_path photos --output_dir maps
    dino-sparo attention --pretrained_weights checkpoint.pth --atlas imagenet/val --output_dir maps
    """
    from dino_sparo.evaluation.attention.command import visualize

    return visualize(args)


@command(EVALUATE, evaluation_options.export_parser)
def export(args: argparse.Namespace) -> Any:
    """A checkpoint -> an export as safetensors, timm, Hugging Face, ONNX or OpenCLIP.

    dino-sparo export checkpoint.pth vits16
    dino-sparo export checkpoint.pth vits16-hf --format huggingface
    """
    from dino_sparo.weights.export import export_checkpoint

    return export_checkpoint(args)


@command(EVALUATE, evaluation_options.info_parser)
def info(args: argparse.Namespace) -> Any:
    """A checkpoint, export, embeddings, cached features or result -> a description, and whether it is damaged.

    dino-sparo info checkpoint.pth
    dino-sparo info embeddings
    """
    from dino_sparo.evaluation.info import show

    return show(args, lambda name: vars(parse_keywords(name, {})))


@command(EVALUATE, evaluation_options.push_parser)
def push(args: argparse.Namespace) -> Any:
    """A checkpoint -> a repository of the Hugging Face hub.

    dino-sparo push checkpoint.pth USER/vits16
    dino-sparo push checkpoint.pth USER/vits16 --private
    """
    from dino_sparo.weights.export import push_checkpoint

    return push_checkpoint(args)


@command(SLOTS, evaluation_options.slot_study_parser, "slots study")
def slot_study(args: argparse.Namespace) -> Any:
    """A checkpoint and labelled images -> accuracy of each slot alone, and accuracy against the number of slots.

    dino-sparo slots study --pretrained_weights checkpoint.pth --data_path cifar10:data
    dino-sparo slots study --pretrained_weights checkpoint.pth --data_path imagenet --keep 16 --probe
    """
    from dino_sparo.evaluation.slots.command import study_slots

    return study_slots(args)


@command(SLOTS, evaluation_options.slot_score_parser, "slots score")
def slot_score(args: argparse.Namespace) -> Any:
    """A checkpoint and images with masks -> how well its slots or heads find objects, compared with controls.

    dino-sparo slots score --pretrained_weights checkpoint.pth
    dino-sparo slots score --pretrained_weights checkpoint.pth --data_path VOC2012 --num_images 1000
    """
    from dino_sparo.evaluation.objects.command import score_slots

    return score_slots(args)


@command(SLOTS, clip_options.select_parser, "slots select")
def select(args: argparse.Namespace) -> Any:
    """Labelled images -> the slots of a CLIP that distinguish the classes.

    dino-sparo slots select --pretrained_weights clip.pth --data_path cifar10:data
    dino-sparo slots select --pretrained_weights clip.pth --data_path imagenet/val --keep 32
    """
    from dino_sparo.clip.slots.select import select_slots

    return select_slots(args)


@command(SLOTS, clip_options.mask_parser, "slots mask")
def mask(args: argparse.Namespace) -> Any:
    """True and false captions -> weights for a CLIP's slots that distinguish the captions.

    dino-sparo slots mask --pretrained_weights clip.pth --data_root sugarcrepe --images coco/val2017
    dino-sparo slots mask --pretrained_weights clip.pth --data_root pairs --evaluate cifar10:data
    """
    from dino_sparo.clip.slots.mask import learn_mask

    return learn_mask(args)


@command(IMAGE_TEXT, image_text_options.zero_shot_parser)
def zero_shot(args: argparse.Namespace) -> Any:
    """Labelled images and class names -> accuracy of zero-shot classification.

    dino-sparo zero-shot --pretrained_weights clip.pth --data_path imagenet
    dino-sparo zero-shot --pretrained_weights clip.pth --data_path scenes:1000:48
    """
    from dino_sparo.image_text.evaluation.zero_shot import evaluate_checkpoint

    return evaluate_checkpoint(args, open_model)


@command(IMAGE_TEXT, image_text_options.retrieval_parser)
def retrieval(args: argparse.Namespace) -> Any:
    """Images with captions -> recall of image-to-text and text-to-image retrieval.

    dino-sparo retrieval --pretrained_weights clip.pth --data_path coco/val2014 --captions dataset_coco.json
    dino-sparo retrieval --pretrained_weights clip.pth --data_path pairs.csv --split all
    """
    from dino_sparo.image_text.evaluation.retrieval import evaluate_checkpoint

    return evaluate_checkpoint(args, open_model)


@command(IMAGE_TEXT, image_text_options.compositional_parser)
def compositional(args: argparse.Namespace) -> Any:
    """A folder of benchmarks of true and false captions -> a table of the models' accuracies.

    dino-sparo compositional --pretrained_weights clip.pth oc.pth --data_root benchmarks
    dino-sparo compositional --pretrained_weights clip.pth --data_root benchmarks --benchmarks sugarcrepe --blind
    """
    from dino_sparo.image_text.evaluation.compositional.command import compare

    return compare(args, partial(open_model, is_one_of_several=True))


@command(IMAGE_TEXT, image_text_options.sugarcrepe_parser)
def sugarcrepe(args: argparse.Namespace) -> Any:
    """Images with a true and a false caption -> how often the true caption scores higher.

    dino-sparo sugarcrepe --pretrained_weights clip.pth --data_root sugarcrepe/data --images coco/val2017
    dino-sparo sugarcrepe --pretrained_weights clip.pth --data_root pairs
    """
    from dino_sparo.image_text.evaluation.compositional.command import evaluate_single

    return evaluate_single(args, open_model, "sugarcrepe")


@command(IMAGE_TEXT, image_text_options.winoground_parser)
def winoground(args: argparse.Namespace) -> Any:
    """Two images and two captions of the same words -> how often images and captions are matched correctly.

    dino-sparo winoground --pretrained_weights clip.pth --data_root winoground
    dino-sparo winoground --pretrained_weights oc.pth --data_root winoground --graphs winoground.jsonl
    """
    from dino_sparo.image_text.evaluation.compositional.command import evaluate_single

    return evaluate_single(args, open_model, "winoground")


@command(IMAGE_TEXT, image_text_options.probe_parser)
def clip_probe(args: argparse.Namespace) -> Any:
    """Frozen image features -> accuracy of a linear probe, whose weight decay a sweep chooses.

    dino-sparo linear --pretrained_weights clip.pth --data_path imagenet
    dino-sparo linear --pretrained_weights clip.pth --data_path cifar10:data --weight_decay 0.001
    """
    from dino_sparo.image_text.evaluation.probe import probe_checkpoint

    return probe_checkpoint(args, open_model)


@command(IMAGE_TEXT, clip_options.pictures_parser)
def pictures(args: argparse.Namespace) -> Any:
    """Images with captions -> where the slots of a CLIP attend in both.

    dino-sparo attention --pretrained_weights clip.pth
    dino-sparo attention --pretrained_weights clip.pth --data_path pairs.csv --slots 3 17 --output_dir maps
    """
    from dino_sparo.clip.slots.pictures import draw_pictures

    return draw_pictures(args)


@command(IMAGE_TEXT, oc_clip_options.pictures_parser)
def oc_pictures(args: argparse.Namespace) -> Any:
    """Images with captions -> where the entities of the captions' scene graphs attend, in an OC-CLIP.

    dino-sparo attention --pretrained_weights oc.pth
    dino-sparo attention --pretrained_weights oc.pth --data_path pairs.csv --graphs pairs.jsonl --pairs 0 5
    """
    from dino_sparo.oc_clip.pictures import draw_pictures

    return draw_pictures(args)


@command(IMAGE_TEXT, None)
def clip_benchmark(words: Sequence[str] | None) -> Any:
    """A CLIP -> the results of LAION's CLIP benchmark; the options are those of the benchmark."""
    from dino_sparo.clip.load import run_clip_benchmark

    return run_clip_benchmark(words)


@command(DATA, evaluation_options.statistics_parser)
def statistics(args: argparse.Namespace) -> Any:
    """Any images -> mean and standard deviation of each channel, as options of train.

    dino-sparo statistics --data_path xrays/train --in_chans 1 --max_value 4095
    dino-sparo statistics --data_path stacks --in_chans 5
    """
    from dino_sparo.evaluation.statistics import measure_channels

    return measure_channels(args)


@command(DATA, oc_clip_options.parse_parser)
def parse(args: argparse.Namespace) -> Any:
    """Captions -> their scene graphs, for OC-CLIP.

    dino-sparo parse --caption 'a red star on sand'
    dino-sparo parse --captions captions_train2017.json --parser spacy --output coco.jsonl
    """
    from dino_sparo.oc_clip.parsers.command import parse

    return parse(args)


@command(DATA, image_text_options.order_captions_parser)
def order_captions(args: argparse.Namespace) -> Any:
    """Images with captions -> ARO's order benchmarks (captions with shuffled words), for compositional.

    dino-sparo order-captions --captions coco_karpathy_test.json --output benchmarks/coco_order.json
    dino-sparo order-captions --captions dataset_flickr30k.json --output benchmarks/flickr30k_order.json --seed 1
    """
    from dino_sparo.image_text.evaluation.compositional.sets.aro import write_order

    return write_order(args)


@command(DATA, image_text_options.scene_pairs_parser)
def scene_pairs(args: argparse.Namespace) -> Any:
    """Built-in scenes -> true and hard false captions, in SugarCrepe's format.

    dino-sparo scene-pairs --output_dir pairs
    dino-sparo scene-pairs --output_dir pairs --num_pairs 2000 --img_size 48
    """
    from dino_sparo.image_text.evaluation.compositional.sets.scene_pairs import write_pairs

    return write_pairs(args)


@command(DEMOS, demo_parser)
def demo(args: argparse.Namespace) -> Any:
    """Built-in scenes -> a trained model, its evaluation and its pictures, in minutes, without a GPU.

    dino-sparo demo
    dino-sparo demo --method clip --models sparo cls --seeds 0 1 2
    """
    if args.method == "clip":
        from dino_sparo.clip.demo import demo as demo_clip

        return demo_clip(args, run)
    if args.method == "oc-clip":
        from dino_sparo.oc_clip.demo import demo as demo_oc_clip

        return demo_oc_clip(args, run)
    from dino_sparo.dino.demo import demo as demo_dino

    return demo_dino(args, run)


def parser_of(name: str, prog: str | None = None) -> Parser:
    """The parser of a command, with its help; `name` is a key of `COMMANDS`."""
    command = COMMANDS[name]
    if command.parser is None:
        raise UserError(f"the command {name} takes no options from Python")
    parser = command.parser()
    parser.prog, parser.description = prog or f"dino-sparo {name}", command.summary
    parser.command = HIDDEN.get(name, name)
    parser.epilog = "\n".join(["examples:", *(f"  {example}" for example in command.examples)])
    return parser


@contextlib.contextmanager
def command_line(
    name: str, words: Sequence[str] | None = None, prog: str | None = None
) -> Iterator[argparse.Namespace]:
    """A command's options; within this context a mistake ends with one line, not a traceback. Arguments as `run`'s."""
    args = parser_of(name, prog).parse_args(words)
    if "torch" not in sys.modules:  # else a file of the user's may have added names, and torch costs no more time
        refuse_early(args, name)
    with errors_in_one_line(logger), explain_full_memory(vars(args)):
        yield args


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
    with command_line(name, words, prog) as args:
        return command.function(args)


def refuse_early(args: argparse.Namespace, command: str) -> None:
    """End with one line and status 1 if options are wrong: without torch, which takes seconds to import."""
    try:
        require_inputs(vars(args))
        for option, known in KNOWN_NAMES.items():
            given = getattr(args, option, None) or []
            for name in given if isinstance(given, list) else [given]:
                if name.partition(HEADS)[0] not in known and not name.startswith(TIMM):
                    raise UserError(f"--{option} {name} is unknown; choose one of {', '.join(sorted(known))}")
        if command in CHECKS:
            check_run(args)
            CHECKS[command](argparse.Namespace(**vars(args)))  # a copy, since checks fill in values
    except (UserError, MissingPackageError) as error:
        raise SystemExit(f"{time.strftime('%H:%M:%S')} E {printable(str(error))}") from error


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
    return parser_of(name).parse_keywords(keywords)


def main(argv: Sequence[str] | None = None) -> Any:
    """Run the command that the first words name; None: of the command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    if (found := find_command(words)) is not None:
        name, words = found
        if name in HIDDEN:
            sys.stderr.write(f"dino-sparo {name} is now dino-sparo {HIDDEN[name]}\n")
        return run(command_for(name, words), words, prog=f"dino-sparo {HIDDEN.get(name, name)}")
    parser = Parser(prog="dino-sparo", description=overview())
    parser.add_argument("--version", action="version", version=f"dino_sparo {__version__}")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="One of the above; COMMAND --help says more.")
    if files := values_of(words, "--config"):
        try:
            named = read_config(files[-1]).get("command")
        except ValueError as error:
            parser.error(str(error))
        if named in COMMANDS:
            return run(command_for(named, words), words, prog=f"dino-sparo {named}")
        parser.error(f"--config {files[-1]} names no command; give the command first, or a line like `command: train`")
    name = parser.parse_known_args(words)[0].command
    if name is not None:
        inner = [command for command in COMMANDS if command.startswith(f"{name} ")]
        near = inner or difflib.get_close_matches(name, COMMANDS, n=1)
        parser.error(f"there is no command {name!r}" + (f"; did you mean {' or '.join(near)}?" if near else ""))
    say(parser.format_help())
    return None


def command_for(name: str, words: Sequence[str]) -> str:
    """The command for the checkpoint that the options name: a CLIP and an OC-CLIP have their own `FOR_OBJECTIVE`.

    A file that cannot be read is left to the command, whose message says why.
    """
    words = [with_underscores(word) for word in words]
    if name not in FOR_OBJECTIVE or any(word.partition("=")[0] == "--image_encoder" for word in words):
        return name
    weights, files = values_of(words, "--pretrained_weights"), values_of(words, "--config")
    if not weights and not files:
        return name
    from dino_sparo.weights.checkpoint import image_text_kind, load_checkpoint

    try:
        file = path(weights[-1] if weights else str(read_config(files[-1]).get("pretrained_weights")))
        kind = image_text_kind(load_checkpoint(file, verify=False, mmap=True))  # the command reads the weights
    except Exception:  # a hub or a missing package may raise anything
        return name
    return FOR_OBJECTIVE[name].get(str(kind), name)


def find_command(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """The command that the first words name, and its options; None: none."""
    for count in (2, 1):
        name = " ".join(words[:count]).replace("_", "-")
        if (name := SYNONYMS.get(name, name)) in COMMANDS:
            return name, list(words[count:])
    return None


def overview() -> str:
    """All commands with their summaries, by section."""
    shown = {name: command for name, command in COMMANDS.items() if name not in HIDDEN}
    width = max(map(len, shown)) + 2
    lines: list[str] = []
    for section in dict.fromkeys(command.section for command in shown.values()):
        lines += [*([""] if lines else []), f"{section}:"]
        lines += [
            f"  {name:<{width}}{command.summary}" for name, command in shown.items() if command.section == section
        ]
    return "\n".join(lines)


def console() -> None:
    """The console script: its exit status is 0 unless a command ended the process."""
    main()


if __name__ == "__main__":
    main()

"""The table of commands: name -> summary, code, options and examples.

A new command is one entry. Options are known without torch, so that `--help` and mistakes are answered at once; a
command's code, which imports torch, is imported when the command runs. `__main__.py` runs the commands, `api.py` offers
them as Python calls. Only this file and `submit.py` know all objectives.
"""

import argparse
import logging
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dino_sparo.clip import options as clip_options
from dino_sparo.data import options as data_options
from dino_sparo.demo.options import demo_parser
from dino_sparo.dino import options as dino_options
from dino_sparo.evaluation.attention.options import attention_parser
from dino_sparo.evaluation.embed.options import cluster_parser, embed_parser, predict_parser, search_parser
from dino_sparo.evaluation.linear.options import linear_parser
from dino_sparo.evaluation.objects.options import slot_score_parser
from dino_sparo.evaluation.options import few_labels_parser, knn_parser, report_parser, table_probe_parser
from dino_sparo.evaluation.retrieval.options import copy_detection_parser, image_retrieval_parser
from dino_sparo.evaluation.segment.options import segment_parser
from dino_sparo.evaluation.slots.options import slot_study_parser
from dino_sparo.evaluation.video.options import segmentation_parser, video_parser
from dino_sparo.finetune import options as finetune_options
from dino_sparo.ibot import options as ibot_options
from dino_sparo.image_text.evaluation import options as image_text_options
from dino_sparo.image_text.options import FOREIGN_OPTION
from dino_sparo.oc_clip import options as oc_clip_options
from dino_sparo.runtime.cli import Parser, path, read_config, values_of, with_underscores
from dino_sparo.runtime.faults import UserError, require
from dino_sparo.simdino import options as simdino_options
from dino_sparo.weights import options as weights_options

if TYPE_CHECKING:
    import torch

    from dino_sparo.image_text.scorer import Scorer
    from dino_sparo.image_text.towers import LoadedModel

logger = logging.getLogger("dino_sparo")


class Command:
    """One command.

    Args:
        summary: input and output, for the overview and the help.
        code: `module:function` below `dino_sparo`. The function takes the parsed options.
        parser: makes the options; None: the function takes the words and parses them itself.
        examples: options of example calls, for the help.
        needs: further parameters of the function, such as the class of an objective -> `module:name` of the value.
        check: of the options, without torch; a training makes its check once more.
        instead_of: name of the command whose place this one takes for checkpoints of `kinds`, with options of its own.
        kinds: entries of a checkpoint that says how its image-text model is built.
    """

    def __init__(
        self,
        summary: str,
        code: str,
        parser: Callable[[], Parser] | None,
        *examples: str,
        needs: Mapping[str, str] = {},
        check: Callable[[argparse.Namespace], None] | None = None,
        instead_of: str = "",
        kinds: Sequence[str] = (),
    ) -> None:
        self.summary, self.code, self.parser, self.examples = summary, code, parser, examples
        self.needs, self.check, self.instead_of, self.kinds = needs, check, instead_of, kinds

    @property
    def function(self) -> "partial[Any]":
        """The function, imported now, with what it needs besides the options."""
        needs = {name: pkgutil.resolve_name(f"dino_sparo.{value}") for name, value in self.needs.items()}
        return partial(pkgutil.resolve_name(f"dino_sparo.{self.code}"), **needs)


def _training(objective: str, options: ModuleType, summary: str, *examples: str) -> Command:
    """The command that trains an objective; `options` is the module of its parser and of their check."""
    parser, needs, check = options.get_args_parser, {"objective_class": objective}, options.check_options
    return Command(summary, "training.run:train", parser, *examples, needs=needs, check=check)


TRAIN: dict[str, Command] = {
    "train": _training(
        "dino.train:DINOObjective",
        dino_options,
        "Images -> an encoder, trained with DINO.",
        "--data_path scenes --output_dir runs/first --arch vit_micro --patch_size 8 --epochs 5",
        "--data_path imagenet/train --output_dir runs/vits16 --readout sparo --epochs 100",
    ),
    "train-simdino": _training(
        "simdino.train:SimDINOObjective",
        simdino_options,
        "Images -> an encoder, trained with SimDINO: DINO without prototypes, center and temperatures.",
        "--data_path scenes --output_dir runs/sim --arch vit_micro --patch_size 8 --epochs 5",
        "--data_path imagenet/train --output_dir runs/sim16 --arch vit_base --batch_size_per_gpu 128",
    ),
    "train-ibot": _training(
        "ibot.train:IBOTObjective",
        ibot_options,
        "Images -> an encoder, trained with iBOT, the objective of DINOv2: DINO, and masked patches.",
        "--data_path scenes --output_dir runs/ibot --arch vit_micro --patch_size 8 --epochs 5",
        "--data_path images --output_dir runs/own --arch timm/vit_small_patch16_dinov3 --pretrained",
    ),
    "train-clip": _training(
        "clip.train:CLIPObjective",
        clip_options,
        "Images with captions -> an image encoder and a text encoder, trained with CLIP.",
        "--data_path 'cc3m/{00000..00331}.tar' --output_dir runs/clip --preset cc3m",
        "--data_path pairs.csv --output_dir runs/pairs --init_clip laion.safetensors --lr 1e-5",
    ),
    "train-oc-clip": _training(
        "oc_clip.train:OCCLIPObjective",
        oc_clip_options,
        "Images with captions and their scene graphs -> a model that binds graphs to images, trained with OC-CLIP.",
        "--data_path scenes --output_dir runs/oc --preset oc-scenes",
        "--data_path coco.json --graphs coco.jsonl --output_dir runs/coco --preset oc-coco",
    ),
    "submit": Command(
        "A training -> a Slurm job, requeued when it is preempted, at its time limit and after faults.",
        "submit:main",
        None,
    ),
}
EVALUATE: dict[str, Command] = {
    "embed": Command(
        "A checkpoint and any images -> embeddings on disk: encodings, slots, tokens; of a CLIP also captions.",
        "commands:embed",
        embed_parser,
        "--pretrained_weights checkpoint.pth --data_path photos --output_dir embeddings",
        "--pretrained_weights clip.pth --data_path pairs.csv --what captions --output_dir captions",
    ),
    "cluster": Command(
        "Embeddings -> clusters of similar images, with examples, and a map.",
        "evaluation.embed.cluster:cluster_embeddings",
        cluster_parser,
        "embeddings",
        "embeddings --clusters 50 --map pca",
    ),
    "search": Command(
        "Embeddings and query images -> the most similar images, on a page and as a table; groups of near copies.",
        "evaluation.embed.search:search",
        search_parser,
        "embeddings --images photo.jpg",
        "embeddings --duplicates 0.97",
    ),
    "predict": Command(
        "Labelled and new embeddings -> a classifier, its accuracy, and a table of predictions.",
        "evaluation.embed.predict:predict",
        predict_parser,
        "embeddings --images new_embeddings --val other_embeddings --top 5",
        "labelled_photos --images new_photos --pretrained_weights checkpoint.pth",
    ),
    "knn": Command(
        "A checkpoint and labelled images -> weighted k-NN accuracy.",
        "evaluation.knn:evaluate_checkpoint",
        knn_parser,
        "--pretrained_weights checkpoint.pth --data_path imagenet",
        "--pretrained_weights checkpoint.pth --data_path cifar10:data --nb_knn 20",
    ),
    "linear": Command(
        "A checkpoint and labelled images -> linear probes, one per learning rate, and their accuracy.",
        "evaluation.linear.command:probe_checkpoint",
        linear_parser,
        "--pretrained_weights checkpoint.pth --data_path imagenet",
        "--pretrained_weights checkpoint.pth --data_path cifar10:data --fast --lr 0.01 0.1 1",
    ),
    "finetune": Command(
        "A checkpoint and labelled images -> the whole encoder fine-tuned with a linear head, and its accuracy.",
        "finetune.result:finetune",
        finetune_options.finetune_parser,
        "--pretrained_weights demo --data_path scenes:2000:48 --output_dir runs/fine --epochs 10 --lr 0.004",
        "--pretrained_weights checkpoint.pth --data_path imagenet --output_dir runs/fine",
        needs={"objective_class": "finetune.train:FinetuneObjective"},
        check=finetune_options.check_options,
    ),
    "few-labels": Command(
        "A checkpoint and labelled images -> accuracy of k-NN and of linear classifiers with a share of the labels.",
        "evaluation.few_labels:evaluate_few_labels",
        few_labels_parser,
        "--pretrained_weights checkpoint.pth --data_path cifar10:data",
        "--pretrained_weights checkpoint.pth --data_path imagenet --label_share 1percent.txt --C 10",
    ),
    "table-probe": Command(
        "A checkpoint or embeddings, and a table -> probes of its labels (mAP, AUROC) and numbers (R2, error).",
        "evaluation.table_probe:probe_table",
        table_probe_parser,
        "--pretrained_weights checkpoint.pth --data_path photos.csv --tags tags --numbers age",
        "--embeddings embeddings --data_path photos.csv --binary glasses hat",
    ),
    "image-retrieval": Command(
        "A checkpoint and images of buildings or classes -> mean average precision of image retrieval.",
        "evaluation.retrieval.command:evaluate_retrieval",
        image_retrieval_parser,
        "--data_path revisited --dataset roxford5k --imsize 512 --multiscale true",
        "--pretrained_weights checkpoint.pth --dataset labelled --data_path imagenet",
    ),
    "copy-detection": Command(
        "A checkpoint and Copydays -> mean average precision of searching for the originals of copies.",
        "evaluation.retrieval.command:detect_copies",
        copy_detection_parser,
        "--data_path copydays --whitening_path other_images",
        "--pretrained_weights checkpoint.pth --data_path copydays --parts encoding",
    ),
    "attention": Command(
        "A checkpoint and images -> one attention map per slot or head, and the slot atlas.",
        "evaluation.attention.command:visualize",
        attention_parser,
        "--pretrained_weights checkpoint.pth --data_path photos --output_dir maps",
        "--pretrained_weights checkpoint.pth --atlas imagenet/val --output_dir maps",
    ),
    "video": Command(
        "A checkpoint and a video -> a video of the attention of its slots or heads.",
        "evaluation.video.command:generate",
        video_parser,
        "--pretrained_weights checkpoint.pth --data_path walk.mp4 --output_dir walk",
        "--pretrained_weights checkpoint.pth --data_path frames --video_format gif --fps 10 --img_size 256",
    ),
    "video-segmentation": Command(
        "A checkpoint and DAVIS 2017 -> masks of the objects in its videos by label propagation, and their J&F.",
        "evaluation.video.segmentation:segment_videos",
        segmentation_parser,
        "--pretrained_weights checkpoint.pth --data_path DAVIS --output_dir masks",
        "--pretrained_weights checkpoint.pth --slots 0,3,7 --data_path DAVIS --output_dir masks",
    ),
    "segment": Command(
        "A checkpoint and images with masks -> a segmentation head, its mean IoU, and masks of new images.",
        "evaluation.segment.command:segment",
        segment_parser,
        "--pretrained_weights checkpoint.pth --data_path photos --masks masks --images photos",
        "--pretrained_weights checkpoint.pth --data_path VOC2012 --head conv --slot_masks",
    ),
    "report": Command(
        "Folders with results of evaluations -> one table of all models and scores, and a plot.",
        "evaluation.report:report",
        report_parser,
        "runs",
        "runs/first runs/second --output_dir report",
    ),
    "export": Command(
        "A checkpoint -> an export as safetensors, timm, Hugging Face, ONNX or OpenCLIP.",
        "weights.export:export_checkpoint",
        weights_options.export_parser,
        "checkpoint.pth vits16",
        "checkpoint.pth vits16-hf --format huggingface",
    ),
    "info": Command(
        "A checkpoint, export, embeddings, cached features or result -> a description, and whether it is damaged.",
        "weights.info:show",
        weights_options.info_parser,
        "checkpoint.pth",
        "embeddings",
        needs={"defaults_of": "commands:defaults_of", "folders": "evaluation.folders:FOLDERS"},
    ),
    "push": Command(
        "A checkpoint -> a repository of the Hugging Face hub.",
        "weights.export:push_checkpoint",
        weights_options.push_parser,
        "checkpoint.pth USER/vits16",
        "checkpoint.pth USER/vits16 --private",
    ),
}
SLOTS: dict[str, Command] = {
    "slots study": Command(
        "A checkpoint and labelled images -> accuracy of each slot alone, and accuracy against the number of slots.",
        "evaluation.slots.command:study_slots",
        slot_study_parser,
        "--pretrained_weights checkpoint.pth --data_path cifar10:data",
        "--pretrained_weights checkpoint.pth --data_path imagenet --keep 16 --probe",
    ),
    "slots score": Command(
        "A checkpoint and images with masks -> how well its slots or heads find objects, compared with controls.",
        "evaluation.objects.command:score_slots",
        slot_score_parser,
        "--pretrained_weights checkpoint.pth",
        "--pretrained_weights checkpoint.pth --data_path VOC2012 --num_images 1000",
    ),
    "slots select": Command(
        "Labelled images -> the slots of a CLIP that distinguish the classes.",
        "clip.slots.select:select_slots",
        clip_options.select_parser,
        "--pretrained_weights clip.pth --data_path cifar10:data",
        "--pretrained_weights clip.pth --data_path imagenet/val --keep 32",
    ),
    "slots mask": Command(
        "True and false captions -> weights for a CLIP's slots that distinguish the captions.",
        "clip.slots.mask:learn_mask",
        clip_options.mask_parser,
        "--pretrained_weights clip.pth --data_root sugarcrepe --images coco/val2017",
        "--pretrained_weights clip.pth --data_root pairs --evaluate cifar10:data",
    ),
}
IMAGE_TEXT: dict[str, Command] = {
    "zero-shot": Command(
        "Labelled images and class names -> accuracy of zero-shot classification.",
        "image_text.evaluation.zero_shot:evaluate_checkpoint",
        image_text_options.zero_shot_parser,
        "--pretrained_weights clip.pth --data_path imagenet",
        "--pretrained_weights clip.pth --data_path scenes:1000:48",
        needs={"open_model": "commands:open_model"},
    ),
    "retrieval": Command(
        "Images with captions -> recall of image-to-text and text-to-image retrieval.",
        "image_text.evaluation.retrieval:evaluate_checkpoint",
        image_text_options.retrieval_parser,
        "--pretrained_weights clip.pth --data_path coco/val2014 --captions dataset_coco.json",
        "--pretrained_weights clip.pth --data_path pairs.csv --split all",
        needs={"open_model": "commands:open_model"},
    ),
    "compositional": Command(
        "A folder of benchmarks of true and false captions -> a table of the models' accuracies.",
        "image_text.evaluation.compositional.command:compare",
        image_text_options.compositional_parser,
        "--pretrained_weights clip.pth oc.pth --data_root benchmarks",
        "--model clip.pth open_clip:ViT-B-32/openai --data_root benchmarks --blind --short markdown plot",
        needs={"open_model": "commands:open_model"},
        check=image_text_options.check_models,
    ),
    "clip-probe": Command(
        "Frozen image features -> accuracy of a linear probe, whose weight decay a sweep chooses.",
        "image_text.evaluation.probe:probe_checkpoint",
        image_text_options.probe_parser,
        "--pretrained_weights clip.pth --data_path imagenet",
        "--pretrained_weights clip.pth --data_path cifar10:data --weight_decay 0.001",
        needs={"open_model": "commands:open_model"},
        instead_of="linear",
        kinds=("clip", "oc_clip"),
    ),
    "pictures": Command(
        "Images with captions -> where the slots of a CLIP attend in both.",
        "clip.slots.pictures:draw_pictures",
        clip_options.pictures_parser,
        "--pretrained_weights clip.pth",
        "--pretrained_weights clip.pth --data_path pairs.csv --slots 3 17 --output_dir maps",
        instead_of="attention",
        kinds=("clip",),
    ),
    "oc-pictures": Command(
        "Images with captions -> where the entities of the captions' scene graphs attend, in an OC-CLIP.",
        "oc_clip.pictures:draw_pictures",
        oc_clip_options.pictures_parser,
        "--pretrained_weights oc.pth",
        "--pretrained_weights oc.pth --data_path pairs.csv --graphs pairs.jsonl --pairs 0 5",
        instead_of="attention",
        kinds=("oc_clip",),
    ),
    "clip-benchmark": Command(
        "A CLIP -> the results of LAION's CLIP benchmark; the options are those of the benchmark.",
        "clip.load:run_clip_benchmark",
        None,
    ),
}
DATA: dict[str, Command] = {
    "statistics": Command(
        "Any images -> mean and standard deviation of each channel, as options of train.",
        "data.statistics:measure_channels",
        data_options.statistics_parser,
        "--data_path xrays/train --in_chans 1 --max_value 4095",
        "--data_path stacks --in_chans 5",
    ),
    "parse": Command(
        "Captions -> their scene graphs, for OC-CLIP.",
        "oc_clip.parsers.command:parse",
        oc_clip_options.parse_parser,
        "--caption 'a red star on sand'",
        "--captions captions_train2017.json --parser spacy --output coco.jsonl",
    ),
    "order-captions": Command(
        "Images with captions -> ARO's order benchmarks (captions with shuffled words), for compositional.",
        "image_text.evaluation.compositional.sets.aro:write_order",
        image_text_options.order_captions_parser,
        "--captions coco_karpathy_test.json --output benchmarks/coco_order.json",
        "--captions dataset_flickr30k.json --output benchmarks/flickr30k_order.json --seed 1",
    ),
    "scene-pairs": Command(
        "Built-in scenes -> true and hard false captions, in SugarCrepe's format.",
        "image_text.evaluation.compositional.sets.scene_pairs:write_pairs",
        image_text_options.scene_pairs_parser,
        "--output_dir pairs",
        "--output_dir pairs --num_pairs 2000 --img_size 48",
    ),
}
DEMOS: dict[str, Command] = {
    "demo": Command(
        "Built-in scenes -> a trained model, its evaluation and its pictures, in minutes, without a GPU.",
        "demo.run:demo",
        demo_parser,
        "",
        "--method clip --models sparo cls --seeds 0 1 2",
        needs={"run": "__main__:run"},
    ),
}
# Sections of the overview.
SECTIONS = {
    "train": TRAIN,
    "evaluate and use an encoder": EVALUATE,
    "slots": SLOTS,
    "image and text": IMAGE_TEXT,
    "data": DATA,
    "demos": DEMOS,
}
COMMANDS = {name: command for section in SECTIONS.values() for name, command in section.items()}


def parser_of(name: str, prog: str | None = None) -> Parser:
    """The parser of a command, with its help; `name` is a key of `COMMANDS`."""
    command = COMMANDS[name]
    if command.parser is None:
        raise UserError(f"the command {name} takes no options from Python")
    parser = command.parser()
    parser.command = command.instead_of or name
    parser.prog, parser.description = prog or f"dino-sparo {parser.command}", command.summary
    examples = [f"  dino-sparo {parser.command} {words}".rstrip() for words in command.examples]
    parser.epilog = "\n".join(["examples:", *examples])
    return parser


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


def defaults_of(name: str) -> dict[str, Any]:
    """The options of a command with their defaults."""
    return vars(parse_keywords(name, {}))


def command_for(name: str, words: Sequence[str]) -> str:
    """The key of the command for the checkpoint that the options name; see `Command.instead_of`.

    If the checkpoint is unreadable, it is `name`, whose message says why.
    """
    words = [with_underscores(word) for word in words]
    kinds = {kind: other for other, command in COMMANDS.items() if command.instead_of == name for kind in command.kinds}
    if not kinds or any(word.partition("=")[0] in ("--image_encoder", "--pca") for word in words):
        return name
    weights, files = values_of(words, "--pretrained_weights"), values_of(words, "--config")
    if not weights and not files:
        return name
    from dino_sparo.weights.checkpoint import load_checkpoint
    from dino_sparo.weights.entries import image_text_kind

    try:
        file = path(weights[-1] if weights else str(read_config(files[-1]).get("pretrained_weights")))
        kind = image_text_kind(load_checkpoint(file, verify=False, mmap=True))  # the command reads the weights
    except Exception:  # a hub or a missing package may raise anything
        return name
    return kinds.get(str(kind), name)


# Code of commands that choose among objectives.

# Entry of a checkpoint that says how its image-text model is built -> options that such a model has no use for -> why.
OF_CAPTIONS = {"graphs": "--graphs {value} with a CLIP, which reads captions as they are; leave it out"}
OF_FOREIGN_WEIGHTS = dict.fromkeys(("text_heads", "quick_gelu"), FOREIGN_OPTION)
UNUSED_OPTIONS: dict[str, dict[str, str]] = {
    "clip": {**OF_CAPTIONS, **OF_FOREIGN_WEIGHTS},
    "oc_clip": {
        "slots": "--slots with an OC-CLIP: its score is not a dot product, so there are no slots to choose from; leave "
        "it out",
        **OF_FOREIGN_WEIGHTS,
    },
}


def embed(args: argparse.Namespace) -> Any:
    """Embed images, or the captions of a CLIP or an OC-CLIP."""
    if not args.data_path or not args.output_dir:
        raise UserError("embed needs --data_path, the images, and --output_dir, the folder of the embeddings")
    if "captions" in args.what:
        from dino_sparo.image_text.evaluation.embed_captions import embed_captions

        return embed_captions(args, open_caption_encoder)
    from dino_sparo.evaluation.embed.command import embed_images

    return embed_images(args)


def open_model(args: argparse.Namespace, device: "torch.device", is_one_of_several: bool = False) -> "Scorer":
    """The image-text model that `--pretrained_weights` names, for an evaluation.

    Args:
        args: the options of `MODEL` and `computation` in image_text/evaluation/options.py.
        device: where to compute.
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

        return open_oc_clip_model(args, device, checkpoint)
    from dino_sparo.clip.load import clip_scorer

    return clip_scorer(args, device, checkpoint)


def open_caption_encoder(args: argparse.Namespace) -> "LoadedModel":
    """The text side of the CLIP or OC-CLIP in `--pretrained_weights`.

    Raises:
        ValueError: no checkpoint is named, or it holds an encoder of images alone.
    """
    from dino_sparo.weights.checkpoint import load_checkpoint
    from dino_sparo.weights.entries import image_text_kind

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

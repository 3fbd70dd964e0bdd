"""The options of the commands that evaluate a CLIP or an OC-CLIP; no torch here, so that `--help` is fast."""

import difflib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dino_sparo.data.defaults import SCENE_SIZE
from dino_sparo.data.options import DOWNLOAD
from dino_sparo.draw.options import FIGURE_FORMAT
from dino_sparo.evaluation.options import EVALUATION_LIMITS, FEATURE_FILES, OUTPUT, RESULT
from dino_sparo.image_text.options import AUTO, PAIR_KEYS
from dino_sparo.runtime.cli import (
    Group,
    Option,
    Parser,
    any_number,
    positive_int,
    positive_number,
    share,
    share_below_1,
)
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.options import DEVICE, DEVICE_OPTION

PROBE_BATCH_SIZE = 64  # of CLIP benchmark's linear probe
PICTURE_SCENES = "scenes:400:384"  # held-out ones, large enough to look at

BENCHMARK_NAMES = (
    *("sugarcrepe", "sugarcrepe++", "winoground", "colorswap", "cola", "mmvp-vlm", "bivlc", "vismin"),
    *("aro-relation", "aro-attribution", "coco-order", "flickr-order", "hard-positives", "vl-checklist", "valse"),
    *("whatsup-a", "whatsup-b", "coco-spatial", "gqa-spatial", "spec", "pug-spar", "scene-pairs", "oc-splits"),
)

# Words before the colon of --model.
OPEN_CLIP, HUGGING_FACE = "open_clip", "hf"

GRAPHS = Option(
    None, "For an OC-CLIP: scene graphs of the captions, a .jsonl file of dino-sparo parse, templates or spacy."
)
CLIP_MODEL: Group = {
    "pretrained_weights": Option("", "A checkpoint of CLIP training, or OpenCLIP's weights."),
    "quick_gelu": Option(
        False, "Give true for OpenCLIP's weights with OpenAI's activation: OpenAI's models and models named -quickgelu."
    ),
    "text_heads": Option(
        None, "Attention heads of the text encoder of OpenCLIP's weights; by default a head is 64 wide.", positive_int
    ),
}
MODEL: Group = {
    **CLIP_MODEL,
    "pretrained_weights": Option("", "A checkpoint of CLIP or OC-CLIP training, or OpenCLIP's weights."),
    "slots": Option(
        None,
        "Evaluate only these slots, or masked slots: numbers such as 0,3,7, or a file of dino-sparo slots "
        "select or slots mask.",
    ),
    "graphs": GRAPHS,
    "max_missing_graphs": Option(
        0.01, "Largest share of captions without a graph in --graphs; above it the evaluation ends.", share
    ),
}
SEVERAL_MODELS: Group = {
    **MODEL,
    "pretrained_weights": Option([], "Checkpoints of CLIP or OC-CLIP training, or OpenCLIP's weights."),
    "model": Option(
        [], "Any models, side by side: checkpoints, open_clip:NAME/TAG, hf:NAME, or folders of Hugging Face's files."
    ),
}
SPLIT = Option(None, "Name of a split of the images, or all. By default val, if there is such a split, else all.", str)
LABELLED_IMAGES: Group = {
    "data_path": Option("", "Class folders, tar shards with .cls members, a torchvision set (cifar10:DIR), or scenes."),
    "split": SPLIT,
    "download": DOWNLOAD,
    **EVALUATION_LIMITS,
}
CLASSES: Group = {
    "classnames": Option(
        AUTO,
        "Names of the classes. auto: the data set's, or ImageNet's if folders are WordNet ids. imagenet: all "
        "1000, for ImageNet-V2. objectnet:DIR/mappings. folders: the folders' names. Or a file: lines of class, "
        "tab and name, or JSON from class to name; or one name per line if classes are numbers, or are these "
        "names. FILE.json:KEY takes one of several lists.",
    ),
    "templates": Option(
        AUTO,
        "Sentences for the class names. auto: the data set's, or openai, ImageNet's 80 (for an OC-CLIP the bare "
        "name). Or the name of a list (a wrong name prints all), or a file with one sentence per line, with {} "
        "or {c} in the name's place.",
    ),
}
ANNOTATED_IMAGES: Group = {
    **EVALUATION_LIMITS,
    "allow_outside": Option(
        False,
        "Read images outside the images' folder, which annotations name by absolute paths or ../. Only for "
        "annotations that you trust.",
    ),
}
IMAGE_RULES: Group = {
    "max_missing": Option(0.01, "Largest share of a benchmark's images that may be missing.", share),
    **ANNOTATED_IMAGES,
}
QUESTIONS: Group = {
    "data_root": Option("", "Folder with the JSON files of SugarCrepe or of scene-pairs."),
    "images": Option(None, "Folder of the images; by default `images` in --data_root."),
    **IMAGE_RULES,
}


COMPUTATION: dict[str, Group] = {
    "computation and result": {
        "img_size": Option(None, "Side of the images in pixels; by default the training size.", positive_int),
        "batch_size_per_gpu": Option(128, "Images or captions per process and step.", positive_int),
        **RESULT,
    },
    "device and processes": DEVICE,
}


def picture_parser(weights: str, groups: Mapping[str, Group]) -> Parser:
    """The options of pictures of pairs, in data-flow order; `weights` is the help of `--pretrained_weights`."""
    data_path = Option(
        PICTURE_SCENES,
        "A folder of images with a .txt file of the same name for each, a table (.csv, .tsv), COCO's annotations "
        "(.json), tar shards, or the built-in scenes.",
    )
    return Parser(
        {
            "model": {"pretrained_weights": Option("", weights)},
            "pairs of images and captions": {"data_path": data_path, **PAIR_KEYS, **EVALUATION_LIMITS},
            **groups,
            "result": {**OUTPUT, "figure_format": FIGURE_FORMAT, "device": DEVICE_OPTION},
        }
    )


def evaluation_parser(groups: Mapping[str, Group], model: Group = MODEL) -> Parser:
    """The options of an evaluation, in data-flow order."""
    return Parser({"model: what is evaluated": model, **groups, **COMPUTATION})


def zero_shot_parser() -> Parser:
    """The options of `zero_shot.py`."""
    crop_border = Option(0, "Pixels cut off every side of an image; ObjectNet's images have a red frame of 1.")
    images = LABELLED_IMAGES | {"crop_border": crop_border}
    return evaluation_parser({"images": images, "classes in words": CLASSES})


CAPTIONED_IMAGES: Group = {
    "data_path": Option("", "Folder of the images, or pairs without --captions: tables, shards, scenes."),
    "captions": Option("", "Karpathy's or COCO's JSON, or Flickr's lines of image and caption."),
    "split": Option(None, "Split to evaluate; by default test for Karpathy's JSON, else val.", str),
    **ANNOTATED_IMAGES,
}


def retrieval_parser() -> Parser:
    """The options of `retrieval.py`."""
    recall: Group = {"k": Option([1, 5, 10], "Values of k in recall at k.", positive_int)}
    return evaluation_parser({"images and captions": CAPTIONED_IMAGES, "recall": recall})


BENCHMARKS: Group = {
    "data_root": Option("", "Folder of the benchmarks; every benchmark in it or in its subfolders is evaluated."),
    "benchmarks": Option(None, "Names of benchmarks, by default all; a wrong name prints the list.", str, nargs="+"),
    "images": Option(None, "Folder of the images; docs/compositional.md lists the default folders."),
    **IMAGE_RULES,
    "list": Option(False, "List all benchmarks, with the copies in --data_root, and end."),
    "write_captions": Option(
        None, "Write all captions to this .txt file, for dino-sparo parse, and end. The images must exist."
    ),
}
COMPARISON: Group = {
    "chunk_images": Option(
        2048, "Number of images encoded at a time; an OC-CLIP keeps up to 0.4 MB per image.", positive_int
    ),
    "blind": Option(False, "Also measure the accuracy with the images of other questions, as a control."),
    "seed": Option(0, "Random seed of bootstrap and shuffled images."),
    "failures": Option(
        0,
        "Draw the N clearest errors of each benchmark, and where the model attended, on a page and on sheets "
        "next to the result. Typical values are 5 to 20.",
        metavar="N",
    ),
    "short": Option(
        None,
        "One line per benchmark and model, with the significance of the difference from the first model: a file next "
        "to the first result, per format. plot is a figure for a talk.",
        str,
        choices=("markdown", "latex", "csv", "plot"),
        nargs="+",
    ),
}


def compositional_parser() -> Parser:
    """The options of `compositional/command.py`, in data-flow order."""
    groups = {"models: what is evaluated": SEVERAL_MODELS, "benchmarks": BENCHMARKS, "evaluation": COMPARISON}
    return Parser(groups | COMPUTATION)


def check_models(args: Any) -> None:
    """Refuse unknown models before torch is imported; raises ValueError."""
    for model in args.model:
        word, _, name = model.partition(":")
        package = importlib.util.find_spec(OPEN_CLIP)
        if word == OPEN_CLIP and ":" not in name and package and package.submodule_search_locations:
            known = [path.stem for path in Path(package.submodule_search_locations[0]).glob("model_configs/*.json")]
            if (network := name.partition("/")[0]) not in known:
                close = difflib.get_close_matches(network, known, 5, 0.3)
                raise UserError(
                    f"--model {model}: open_clip has no {network!r}; did you mean one of {', '.join(close)}?"
                )
        elif ":" not in model and not Path(model).exists():
            raise UserError(
                f"--model {model}: there is no such file or folder; a published model is {OPEN_CLIP}:NAME/TAG or "
                f"{HUGGING_FACE}:NAME"
            )


def order_captions_parser() -> Parser:
    """The options of `compositional/sets/aro.py`."""
    captions: Group = {
        "captions": Option(
            None,
            "Karpathy's JSON or Salesforce's copy (coco_karpathy_test.json), COCO's, or Flickr's lines.",
            is_required=True,
        ),
        "split": Option(None, "Split of Karpathy's JSON, by default test.", str),
    }
    result: Group = {
        "output": Option(None, "File to write; dino-sparo compositional looks for coco_order.json.", is_required=True),
        "seed": Option(0, "Random seed of the shuffled captions."),
    }
    return Parser({"captions": captions, "result": result})


PROBE: Group = {
    "epochs": Option(10, "Passes over the training images.", positive_int),
    "lr": Option(0.1, "Learning rate at the start; it falls to 0 on a cosine.", positive_number),
    "probe_batch_size": Option(
        PROBE_BATCH_SIZE, "Images per step, over all processes; CLIP benchmark's protocol has 64.", positive_int
    ),
    "weight_decay": Option(None, "Weight decay of the probe; by default a sweep chooses it.", any_number),
    "val_share": Option(0.2, "Share of the training images on which the sweep compares weight decays.", share_below_1),
    "seed": Option(0, "Random seed of the weights, the order of the images, and the choice of the --val_share."),
}


def probe_parser() -> Parser:
    """The options of `probe.py`."""
    data_path = Option("", "Folder with train/ and val/, torchvision set (cifar10:DIR), or scenes.")
    images: Group = {"data_path": data_path, "download": DOWNLOAD, **EVALUATION_LIMITS}
    return evaluation_parser({"images": images, "features": FEATURE_FILES, "probe": PROBE})


def scene_pairs_parser() -> Parser:
    """The options of `sets/scene_pairs.py`."""
    scenes: Group = {
        "output_dir": Option(None, "Folder to write to.", is_required=True),
        "num_pairs": Option(1000, "Scenes, each with one entry in either file.", positive_int),
        "img_size": Option(SCENE_SIZE, "Side in pixels.", positive_int),
        "split": Option("val", "val was not trained on.", choices=("train", "val")),
        "seed": Option(0, "Another seed gives other scenes."),
        "overwrite": Option(False, "Replace the pairs in --output_dir."),
    }
    return Parser({"scenes": scenes})

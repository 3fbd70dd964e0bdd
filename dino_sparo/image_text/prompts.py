"""Names of classes and templates -> the captions of a zero-shot classifier.

A template is a sentence with `{}` in place of the name of a class. OpenCLIP's two lists for ImageNet come from its
package; the lists for torchvision's sets stand here. Templates that CLIP's paper quotes are taken from the paper
("Learning transferable visual models from natural language supervision", section 3.1.4); the others are ours. Published
accuracies depend on their templates: give the authors' templates as a file to compare with them.
"""

import importlib.util
import math
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from dino_sparo.data.scene_patterns import BACKGROUNDS, COLOURS, TEXTURES
from dino_sparo.data.sources import TORCHVISION_SETS
from dino_sparo.image_text.options import AUTO
from dino_sparo.runtime.faults import require
from dino_sparo.runtime.files import read_json

if importlib.util.find_spec("open_clip") is not None:
    from open_clip import OPENAI_IMAGENET_TEMPLATES, SIMPLE_IMAGENET_TEMPLATES
else:  # options can still be parsed, and `open_templates` says what is missing
    OPENAI_IMAGENET_TEMPLATES = SIMPLE_IMAGENET_TEMPLATES = ()

DEFAULT_TEMPLATES = "openai"

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SMALL_PICTURES = (
    "a photo of a {}.",
    "a photo of the {}.",
    "a small photo of a {}.",
    "a blurry photo of a {}.",
    "a low resolution photo of a {}.",
    "a photo of a large {}.",
    "a photo of a small {}.",
    "a close-up photo of a {}.",
    "a bright photo of a {}.",
    "a dark photo of a {}.",
)


def scene_templates() -> tuple[str, ...]:
    """Captions of the built-in scenes without the shape, in the grammar of `scene_graphs.py`.

    Every colour, texture and background occurs equally often, so that none favours a class.
    """
    # The three lists are gone through side by side, until all of them end together.
    number = math.lcm(len(COLOURS), len(TEXTURES), len(BACKGROUNDS))
    words = islice(zip(cycle(COLOURS), cycle(TEXTURES), cycle(BACKGROUNDS), strict=False), number)
    return tuple(
        f"{'an' if colour[0] in 'aeiou' else 'a'} {colour} {texture} {{}} on {background}"
        for colour, texture, background in words
    )


class PromptSet(NamedTuple):
    """Templates and names of the classes of a set of images.

    Attributes:
        templates: sentences with `{}`.
        names: names of the classes, in the order of their numbers; None: the set has names.
        has_names: False if the names of the set are no words.
    """

    templates: tuple[str, ...]
    names: tuple[str, ...] | None = None
    has_names: bool = True


PROMPT_SETS: dict[str, PromptSet] = {
    "cifar10": PromptSet(SMALL_PICTURES),
    "cifar100": PromptSet(SMALL_PICTURES),
    "stl10": PromptSet(("a photo of a {}.", "a photo of the {}.")),
    "svhn": PromptSet(('a photo of the number "{}".', "a house number with the digit {}."), DIGITS),
    "mnist": PromptSet(('a photo of the number "{}".', "the handwritten digit {}."), DIGITS),
    "fashionmnist": PromptSet(("a photo of a {}, a type of clothing.", "a black and white photo of a {}.")),
    "kmnist": PromptSet(('a photo of the handwritten hiragana character "{}".',)),
    "food101": PromptSet(("a photo of {}, a type of food.",)),
    "flowers102": PromptSet(("a photo of a {}, a type of flower.",)),
    "oxfordpets": PromptSet(("a photo of a {}, a type of pet.",)),
    "aircraft": PromptSet(("a photo of a {}, a type of aircraft.",)),
    "dtd": PromptSet(("a photo of a {} texture.", "a photo of a {} pattern.", "a photo of something {}.")),
    "country211": PromptSet(("a photo taken in {}.", "a photo showing the country of {}."), has_names=False),
    "gtsrb": PromptSet(('a photo of a "{}" traffic sign.', 'a close-up photo of a "{}" traffic sign.'), None, False),
    "imagenette": PromptSet(tuple(template("{}") for template in OPENAI_IMAGENET_TEMPLATES)),
    "scenes": PromptSet(scene_templates()),
}

TEMPLATES: dict[str, tuple[str, ...]] = {
    "openai": tuple(template("{}") for template in OPENAI_IMAGENET_TEMPLATES),
    "simple": tuple(template("{}") for template in SIMPLE_IMAGENET_TEMPLATES),
    "plain": ("a photo of a {}.",),
    **{name: prompts.templates for name, prompts in PROMPT_SETS.items()},
}


def set_name(data_path: str) -> str | None:
    """The key of `PROMPT_SETS` for a data path: `scenes`, or the name of a torchvision set; else None."""
    name = data_path.partition(":")[0]
    is_known = name == "scenes" or (name in TORCHVISION_SETS and not Path(data_path).exists())
    return name if is_known else None


def open_templates(templates: str, data_path: str = "") -> tuple[str, ...]:
    """The templates of `--templates`.

    Args:
        templates: a key of `TEMPLATES`; a file, see `read_words`, whose templates have `{}` or `{c}` in place of the
            name; or `auto`: the templates of the set of images, OpenCLIP's 80 for an unknown set.
        data_path: value of `--data_path`.

    Raises:
        ValueError: there is no such list or file, or a template has no place for the name.
    """
    require("open_clip", "prompts")
    if templates == AUTO:
        return TEMPLATES[set_name(data_path) or DEFAULT_TEMPLATES]
    if templates in TEMPLATES:
        return TEMPLATES[templates]
    if not is_file(templates):
        raise ValueError(
            f"templates={templates!r} is neither a file nor a known list; choose one of {', '.join(sorted(TEMPLATES))}"
        )
    sentences = tuple(str(text).replace("{c}", "{}") for text in read_words(templates))
    for text in sentences:
        if "{}" not in text:
            raise ValueError(f"template {text!r} in {templates} has no place for the class name; write {{}} there")
    return sentences


def prompts(templates: tuple[str, ...], name: str) -> list[str]:
    """Captions of a class, one per template."""
    return [template.replace("{}", name) for template in templates]


def is_file(text: str) -> bool:
    """Whether a text is the path of a file, or `FILE.json:KEY`."""
    return Path(text).is_file() or (".json:" in text and Path(text.rpartition(":")[0]).is_file())


def read_words(where: str) -> Any:
    """Names or templates in a file: a list, or an object from class to name.

    Args:
        where: a text file with one name per line, a JSON file, or `FILE.json:KEY` for the value of a key.

    Raises:
        ValueError: the file is no JSON, has no such key, or is empty.
    """
    path, _, key = (where, "", "") if Path(where).is_file() else where.rpartition(":")
    if not path.endswith(".json"):
        words: Any = list(filter(None, map(str.strip, Path(path).read_text(encoding="utf-8-sig").splitlines())))
    else:
        words = read_json(path)
        lists = words if isinstance(words, dict) else {}
        if key and key not in lists:
            raise ValueError(f"{path} has no key {key!r}; its keys are {', '.join(sorted(lists)) or 'none'}")
        if not key and any(isinstance(value, list) for value in lists.values()):
            raise ValueError(f"{path} holds several lists; say which with {path}:KEY of {', '.join(sorted(lists))}")
        words = words[key] if key else words
    if not words:
        raise ValueError(f"{where} is empty; give a list of texts")
    return words

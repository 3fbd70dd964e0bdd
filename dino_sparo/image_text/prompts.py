"""Names of classes and templates -> the captions a zero-shot classifier is made of.

A template is a sentence with `{}` where the name of a class belongs. OpenCLIP's two lists for ImageNet are taken from
it; the sets that torchvision carries have their own here. Where CLIP quotes a template ("Learning transferable visual
models from natural language supervision", section 3.1.4) it is that one, the rest are ours. Published numbers depend on
the templates they were made with: give those as a file to compare with them.
"""

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dino_sparo.data.scene_patterns import BACKGROUNDS, COLOURS, TEXTURES
from dino_sparo.data.sources import TORCHVISION_SETS
from dino_sparo.image_text.options import AUTO
from dino_sparo.runtime.faults import require
from dino_sparo.runtime.files import parse_json

if importlib.util.find_spec("open_clip") is not None:
    from open_clip import OPENAI_IMAGENET_TEMPLATES, SIMPLE_IMAGENET_TEMPLATES
else:  # options can still be parsed, and `open_templates` says what is missing
    OPENAI_IMAGENET_TEMPLATES = SIMPLE_IMAGENET_TEMPLATES = ()

DEFAULT_TEMPLATES = "openai"
# The three lists are gone through side by side, until all of them end together.
NUM_SCENE_TEMPLATES = math.lcm(len(COLOURS), len(TEXTURES), len(BACKGROUNDS))

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
    """Captions of the built-in scenes with the shape left open, in the grammar of `scene_graphs.py`.

    Every colour, texture and background stands in equally many, so that none speaks for a class.
    """
    templates = []
    for number in range(NUM_SCENE_TEMPLATES):
        colour, texture = COLOURS[number % len(COLOURS)], TEXTURES[number % len(TEXTURES)]
        article = "an" if colour[0] in "aeiou" else "a"
        templates.append(f"{article} {colour} {texture} {{}} on {BACKGROUNDS[number % len(BACKGROUNDS)]}")
    return tuple(templates)


@dataclass(frozen=True)
class PromptSet:
    """How the classes of one set of images are put into words.

    Attributes:
        templates: sentences with `{}`.
        names: of the classes in the order of their numbers; None: those that the set brings along.
        has_names: whether the set's own names are words.
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
    """The name under which a data path's prompts are kept here: a torchvision set's, or `scenes`; else None."""
    name = data_path.partition(":")[0]
    is_known = name == "scenes" or (name in TORCHVISION_SETS and not Path(data_path).exists())
    return name if is_known else None


def open_templates(templates: str, data_path: str = "") -> tuple[str, ...]:
    """The templates that `--templates` asks for.

    Args:
        templates: a name of `TEMPLATES`; a file, see `read_words`, whose templates mark the place of the name by `{}`
            or `{c}`; or `auto`: those of the set of images, OpenCLIP's 80 for any other.
        data_path: the images.

    Raises:
        ValueError: no such name or file, no templates, or one without a place for the name.
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
    """Whether a text names a file, or a key in a JSON file as `FILE.json:KEY`."""
    return Path(text).is_file() or (".json:" in text and Path(text.rpartition(":")[0]).is_file())


def read_json(path: Path) -> Any:
    """The content of a JSON file; ValueError, with its path, for any other."""
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error})") from error


def read_words(where: str) -> Any:
    """Names or templates in a file.

    Args:
        where: a text file, one per line; or JSON, a list or an object. `FILE.json:KEY` takes what stands under a key,
            so that files which hold the lists of many sets can be read.

    Returns:
        What the JSON holds, else the lines that are not empty.

    Raises:
        ValueError: the file is no JSON, has no such key, or is empty.
    """
    path, key = (where, None) if Path(where).is_file() else where.rsplit(":", 1)
    if not path.endswith(".json"):
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8-sig").splitlines()]
        words: Any = [line for line in lines if line]
    else:
        words = read_json(Path(path))
        if key is not None:
            if not isinstance(words, dict) or key not in words:
                keys = ", ".join(sorted(words)) if isinstance(words, dict) else "none"
                raise ValueError(f"{path} has no key {key!r}; its keys are {keys}")
            words = words[key]
        elif isinstance(words, dict) and any(isinstance(value, list) for value in words.values()):
            raise ValueError(
                f"{path} holds several lists; say which with {path}:KEY, one of {', '.join(sorted(words))}"
            )
    if not words:
        raise ValueError(f"{where} is empty; give a list of texts")
    return words

"""Labelled images -> names of their classes; names and templates -> the captions of a zero-shot classifier.

ImageNet and its relatives name their folders by WordNet id (V1, Sketch, A, R) or by number (V2). timm lists the 1000
ids, OpenCLIP the 1000 names in the same order. Images in folders of 200 ids (A, R) are classified among 200 names.
ObjectNet has its own names, and lists the 113 of its 313 classes that ImageNet has too.

A template is a sentence with `{}` in place of the name of a class. OpenCLIP's two lists for ImageNet come from its
package; `prompts.yaml` has the lists for torchvision's sets, and says where they are from. Published accuracies depend
on their templates: give the authors' templates as a file to compare with them.
"""

import importlib.util
import logging
import math
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from jaxtyping import Int64
from timm.data import ImageNetInfo

from dino_sparo.data.labels import require_labels
from dino_sparo.data.scenes.graphs import with_article
from dino_sparo.data.scenes.patterns import BACKGROUNDS, COLOURS, TEXTURES
from dino_sparo.data.sources import TORCHVISION_SETS, ImageSource
from dino_sparo.data.sources.image_source import Subset
from dino_sparo.image_text.options import AUTO
from dino_sparo.runtime.faults import UserError, require
from dino_sparo.runtime.files import read_json

if importlib.util.find_spec("open_clip") is not None:
    from open_clip import IMAGENET_CLASSNAMES, OPENAI_IMAGENET_TEMPLATES, SIMPLE_IMAGENET_TEMPLATES
else:  # options can still be parsed, and `open_templates` says what is missing
    IMAGENET_CLASSNAMES = OPENAI_IMAGENET_TEMPLATES = SIMPLE_IMAGENET_TEMPLATES = ()

logger = logging.getLogger(__name__)

DEFAULT_TEMPLATES = "openai"
# Files in ObjectNet's folder `mappings`: folder -> name, and name -> ImageNet's names.
OBJECTNET_NAMES = "folder_to_objectnet_label.json"
OBJECTNET_OVERLAP = "objectnet_to_imagenet_1k.json"


def scene_templates() -> tuple[str, ...]:
    """Captions of the built-in scenes without the shape, in the grammar of `data/scenes/graphs.py`.

    Every colour, texture and background occurs equally often, so that none favours a class.
    """
    # The three lists are gone through side by side, until all of them end together.
    number = math.lcm(len(COLOURS), len(TEXTURES), len(BACKGROUNDS))
    words = islice(zip(cycle(COLOURS), cycle(TEXTURES), cycle(BACKGROUNDS), strict=False), number)
    return tuple(f"{with_article(colour)} {texture} {{}} on {background}" for colour, texture, background in words)


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


def read_prompt_sets() -> dict[str, PromptSet]:
    """The prompts of torchvision's sets, from `prompts.yaml`."""
    text = Path(__file__).with_name("prompts.yaml").read_text(encoding="utf-8")
    return {
        name: PromptSet(tuple(one["templates"]), tuple(one.get("names", ())) or None, one.get("has_names", True))
        for name, one in yaml.safe_load(text).items()
    }


PROMPT_SETS: dict[str, PromptSet] = {
    **read_prompt_sets(),
    "imagenette": PromptSet(tuple(template("{}") for template in OPENAI_IMAGENET_TEMPLATES)),
    "scenes": PromptSet(scene_templates()),
}

TEMPLATES: dict[str, tuple[str, ...]] = {
    "openai": tuple(template("{}") for template in OPENAI_IMAGENET_TEMPLATES),
    "simple": tuple(template("{}") for template in SIMPLE_IMAGENET_TEMPLATES),
    "plain": ("a photo of a {}.",),
    # OC-CLIP takes a class as one entity; an entity of the scenes has no background.
    "scene-entities": tuple(template.rpartition(" on ")[0] for template in scene_templates()),
    **{name: prompts.templates for name, prompts in PROMPT_SETS.items()},
}


def set_name(data_path: str) -> str | None:
    """The key of `PROMPT_SETS` for a data path: `scenes`, or the name of a torchvision set; else None."""
    name = data_path.partition(":")[0]
    return name if name in ("scenes", *TORCHVISION_SETS) and not Path(data_path).exists() else None


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
        raise UserError(
            f"templates={templates!r} is neither a file nor a known list; choose one of {', '.join(sorted(TEMPLATES))}"
        )
    sentences = tuple(str(text).replace("{c}", "{}") for text in read_words(templates))
    for text in sentences:
        if "{}" not in text:
            raise UserError(f"template {text!r} in {templates} has no place for the class name; write {{}} there")
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
        ValueError: the file is not valid JSON, has no such key, or is empty.
    """
    path, _, key = (where, "", "") if Path(where).is_file() else where.rpartition(":")
    if not path.endswith(".json"):
        words: Any = list(filter(None, map(str.strip, Path(path).read_text(encoding="utf-8-sig").splitlines())))
    else:
        words = read_json(path, has_unique_keys=True)
        lists = words if isinstance(words, dict) else {}
        if key and key not in lists:
            raise UserError(f"{path} has no key {key!r}; its keys are {', '.join(sorted(lists)) or 'none'}")
        if not key and any(isinstance(value, list) for value in lists.values()):
            raise UserError(f"{path} holds several lists; say which with {path}:KEY of {', '.join(sorted(lists))}")
        words = words[key] if key else words
    if not words:
        raise UserError(f"{where} is empty; give a list of texts")
    return words


# Names of classes.


@dataclass(frozen=True)
class ClassList:
    """Classes of a zero-shot classifier.

    Attributes:
        names: one per class.
        class_of: (classes of the images,), index of each class in `names`; -1: images of this class are left out.
        origin: where the names come from.
    """

    names: list[str]
    class_of: Int64[np.ndarray, " _"]
    origin: str


def open_classes(source: ImageSource, classnames: str = AUTO, data_path: str = "") -> ClassList:
    """The classes of `--classnames`.

    Args:
        source: labelled images.
        classnames: `auto`: the names of a known set, ImageNet's names if all folders are WordNet ids, else the names of
            the folders. `imagenet`: all 1000 names, even if there are fewer folders. `objectnet:MAPPINGS`: the 113
            classes that ObjectNet shares with ImageNet. `folders`: the names of the folders. Else a file, see
            `_from_file`.
        data_path: value of `--data_path`.

    Raises:
        ValueError: the images have no labels, or the names cannot be found or do not fit the images.
    """
    require_labels(source)
    folders = source.classes or []
    kind, _, folder = classnames.partition(":")
    if classnames == AUTO:
        return _automatic(folders, set_name(data_path))
    if classnames == "imagenet":
        return _all_of_imagenet(folders)
    if classnames == "folders":
        return _in_words(folders)
    if kind == "objectnet":
        return _objectnet(folders, folder)
    if is_file(classnames):
        return _distinct(_from_file(folders, classnames))
    raise UserError(
        f"classnames={classnames!r} is neither a file nor one of auto, imagenet, objectnet:MAPPINGS, folders"
    )


def apply_classes(source: ImageSource, classes: ClassList) -> ImageSource:
    """The images that belong to one of the classes, labelled by their places in `classes.names`; ValueError if none."""
    labels = classes.class_of[require_labels(source)]
    kept = np.flatnonzero(labels >= 0)
    if not len(kept):
        raise UserError(f"{source.name}: no image belongs to any of the {len(classes.names)} classes")
    if len(kept) < len(labels):
        logger.info("%s: %d of %d images belong to the classes to choose among", source.name, len(kept), len(labels))
    return Subset(source, kept, labels[kept], classes.names)


def open_labelled(
    source: ImageSource, data_path: str, classnames: str = AUTO, templates: str = AUTO
) -> tuple[ImageSource, ClassList, tuple[str, ...]]:
    """The images of the classes of `open_classes`, the classes, and the templates of `open_templates`."""
    classes = open_classes(source, classnames, data_path)
    return apply_classes(source, classes), classes, open_templates(templates, data_path)


def imagenet_names() -> list[str]:
    """ImageNet's 1000 classes in the order of their numbers, in OpenCLIP's words; MissingPackageError without it."""
    require("open_clip", "ImageNet's class names")
    return list(IMAGENET_CLASSNAMES)


def _one_each(names: Iterable[Any], origin: str) -> ClassList:
    """A name for each class of the images."""
    words = [str(name) for name in names]
    return ClassList(words, np.arange(len(words)), origin)


def _distinct(classes: ClassList) -> ClassList:
    """Refuse two classes of one name; ImageNet's own list has two such pairs and is not checked."""
    words = [" ".join(name.lower().split()) for name in classes.names]
    if twice := [name for name in words if words.count(name) > 1]:
        raise UserError(f"{classes.origin}: two classes are called {twice[0]!r}; give each class a name of its own")
    return classes


def _automatic(folders: list[str], name: str | None) -> ClassList:
    if name is not None:
        words = PROMPT_SETS[name]
        if not words.has_names:
            raise UserError(
                f"{name} brings no names in words for its {len(folders)} classes; give a file with --classnames: per "
                "line a class, a tab and its name"
            )
        return _in_words(folders) if words.names is None else _one_each(words.names, f"names of {name}")
    ids = ImageNetInfo().label_names()
    if not set(folders) <= set(ids):
        return _in_words(folders)
    words_of = dict(zip(ids, imagenet_names(), strict=True))
    return _one_each((words_of[folder] for folder in folders), f"ImageNet's names of {len(folders)} WordNet ids")


def _in_words(folders: list[str]) -> ClassList:
    """Names of the folders, with spaces; a comma begins a synonym, which is dropped."""
    if all(folder.isdecimal() for folder in folders) or all(re.fullmatch(r"n\d{8}", folder) for folder in folders):
        raise UserError(
            f"the {len(folders)} classes are called {', '.join(folders[:3])}, ..., which says nothing to a model; give "
            f"their names with --classnames: imagenet for ImageNet V2 (folders 0 to 999), or a FILE"
        )
    names = (folder.replace("_", " ").split(", ")[0].strip() for folder in folders)
    return _distinct(_one_each(names, "the images' own class names"))


def _all_of_imagenet(folders: list[str]) -> ClassList:
    ids = ImageNetInfo().label_names()  # in the order of their numbers
    number = {name: i for i, wordnet_id in enumerate(ids) for name in (wordnet_id, str(i))}
    unknown = [folder for folder in folders if folder not in number]
    if unknown:
        raise UserError(
            f"classnames=imagenet, but {len(unknown)} of the {len(folders)} classes are neither WordNet ids of "
            f"ImageNet nor numbers up to {len(ids) - 1}, the first is {unknown[0]!r}; give --classnames FILE"
        )
    class_of = np.array([number[folder] for folder in folders], dtype=np.int64)
    return ClassList(imagenet_names(), class_of, "ImageNet's 1000 names")


def _objectnet(folders: list[str], mappings: str) -> ClassList:
    """The classes that ObjectNet shares with ImageNet, under ObjectNet's names, as in LAION's CLIP benchmark."""
    files = [Path(mappings) / name for name in (OBJECTNET_NAMES, OBJECTNET_OVERLAP)]
    if not mappings or not all(file.is_file() for file in files):
        raise UserError(
            f"classnames=objectnet:{mappings} needs {OBJECTNET_NAMES} and {OBJECTNET_OVERLAP}, which come with "
            f"ObjectNet in its folder `mappings`; give that folder, as objectnet:DIR/mappings"
        )
    name_of, shared = map(read_json, files)
    chosen = [folder for folder in folders if name_of.get(folder) in shared]
    class_of = np.array([chosen.index(folder) if folder in chosen else -1 for folder in folders], dtype=np.int64)
    names = [name_of[folder].lower() for folder in chosen]
    return ClassList(names, class_of, f"ObjectNet's names of {len(chosen)} classes")


def _from_file(folders: list[str], where: str) -> ClassList:
    """Names in a file: an object from class to name, lines of class, tab and name, or a list.

    Classes that are numbers, as in tar shards with `.cls` members, are places in the list, from 0 or from 1. Classes
    that are words are found in the list by name.
    """
    words: Any = read_words(where)
    if not isinstance(words, dict) and all("\t" in str(word) for word in words):
        words = dict(word.split("\t", 1) for word in words)
    if isinstance(words, dict):
        if missing := [folder for folder in folders if folder not in words]:
            raise UserError(f"{where} names no class {missing[0]!r}, and {len(missing)} classes in all")
        return _one_each((words[folder] for folder in folders), where)
    names = [str(word) for word in words]
    if all(folder.isdecimal() for folder in folders):
        numbers = set(map(int, folders))
        first, is_clear = int(0 not in numbers), bool(numbers & {0, len(names)})
        place_of = {name: int(name) - first for name in folders if is_clear and int(name) - first < len(names)}
    else:
        place_of = {_plain(name): place for place, name in enumerate(names)}
        folders = [_plain(folder) for folder in folders]
    if missing := [folder for folder in folders if folder not in place_of]:
        raise UserError(
            f"{where} has {len(names)} names, and none for {len(missing)} of the {len(folders)} classes, the first is "
            f"{missing[0]!r}; write a class, a tab and its name per line, or an object from class to name as JSON"
        )
    return ClassList(names, np.array([place_of[folder] for folder in folders], dtype=np.int64), where)


def _plain(name: str) -> str:
    """A name for comparisons: without case and underscores."""
    return unicodedata.normalize("NFC", name).casefold().replace("_", " ").strip()

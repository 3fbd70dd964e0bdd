"""Labelled images -> names of the classes of a zero-shot classifier, and the class of each image.

ImageNet and its relatives name their folders by WordNet id (V1, Sketch, A, R) or by number (V2). timm lists the 1000
ids, OpenCLIP the 1000 names in the same order. Images in folders of 200 ids (A, R) are classified among 200 names.
ObjectNet has its own names, and lists the 113 of its 313 classes that ImageNet has too.
"""

import copy
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64
from timm.data import ImageNetInfo

from dino_sparo.data.dataset import require_labels
from dino_sparo.data.sources import ImageSource
from dino_sparo.data.sources.image_source import Subset
from dino_sparo.image_text.prompts import AUTO, PROMPT_SETS, is_file, read_words, set_name
from dino_sparo.runtime.faults import require
from dino_sparo.runtime.files import read_json

logger = logging.getLogger(__name__)

# Files in ObjectNet's folder `mappings`: folder -> name, and name -> ImageNet's names.
OBJECTNET_NAMES = "folder_to_objectnet_label.json"
OBJECTNET_OVERLAP = "objectnet_to_imagenet_1k.json"


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
        classes = _automatic(folders, set_name(data_path))
    elif classnames == "imagenet":
        classes = _all_of_imagenet(folders)
    elif classnames == "folders":
        classes = _in_words(folders)
    elif kind == "objectnet":
        classes = _objectnet(folders, folder)
    elif is_file(classnames):
        classes = _from_file(folders, classnames)
    else:
        raise ValueError(
            f"classnames={classnames!r} is neither a file nor one of auto, imagenet, objectnet:MAPPINGS, folders"
        )
    return classes


def apply_classes(source: ImageSource, classes: ClassList) -> ImageSource:
    """The images that belong to one of the classes, labelled by their places in `classes.names`; ValueError if none."""
    labels = classes.class_of[require_labels(source)]
    kept = np.flatnonzero(labels >= 0)
    if not len(kept):
        raise ValueError(f"{source.name}: no image belongs to any of the {len(classes.names)} classes")
    if len(kept) < len(labels):
        logger.info("%s: %d of %d images belong to the classes to choose among", source.name, len(kept), len(labels))
        return Subset(source, kept, labels[kept], classes.names)
    relabelled = copy.copy(source)
    relabelled.labels, relabelled.classes = labels, classes.names
    return relabelled


def wordnet_ids() -> list[str]:
    """The WordNet ids of ImageNet's 1000 classes, in the order of their numbers."""
    return ImageNetInfo().label_names()


def imagenet_names() -> list[str]:
    """ImageNet's 1000 classes in the order of their numbers, in OpenCLIP's words; MissingPackageError without it."""
    require("open_clip", "ImageNet's class names")
    from open_clip import IMAGENET_CLASSNAMES

    return list(IMAGENET_CLASSNAMES)


def _one_each(names: Iterable[Any], origin: str) -> ClassList:
    """A name for each class of the images."""
    words = [str(name) for name in names]
    return ClassList(words, np.arange(len(words)), origin)


def _automatic(folders: list[str], name: str | None) -> ClassList:
    if name is not None:
        words = PROMPT_SETS[name]
        if not words.has_names:
            raise ValueError(
                f"{name} brings no names in words for its {len(folders)} classes; give them, one per line in the order "
                f"of their numbers, with --classnames FILE"
            )
        return _in_words(folders) if words.names is None else _one_each(words.names, f"names of {name}")
    ids = wordnet_ids()
    if not set(folders) <= set(ids):
        return _in_words(folders)
    words_of = dict(zip(ids, imagenet_names(), strict=True))
    return _one_each((words_of[folder] for folder in folders), f"ImageNet's names of {len(folders)} WordNet ids")


def _in_words(folders: list[str]) -> ClassList:
    """Names of the folders, with spaces; a comma begins a synonym, which is dropped."""
    if all(folder.isdecimal() for folder in folders) or all(re.fullmatch(r"n\d{8}", folder) for folder in folders):
        raise ValueError(
            f"the {len(folders)} classes are called {', '.join(folders[:3])}, ..., which says nothing to a model; give "
            f"their names with --classnames: imagenet for ImageNet V2 (folders 0 to 999), or a FILE"
        )
    names = (folder.replace("_", " ").split(", ")[0].strip() for folder in folders)
    return _one_each(names, "the images' own class names")


def _all_of_imagenet(folders: list[str]) -> ClassList:
    ids = wordnet_ids()
    number = {name: i for i, wordnet_id in enumerate(ids) for name in (wordnet_id, str(i))}
    unknown = [folder for folder in folders if folder not in number]
    if unknown:
        raise ValueError(
            f"classnames=imagenet, but {len(unknown)} of the {len(folders)} classes are neither WordNet ids of "
            f"ImageNet nor numbers up to {len(ids) - 1}, the first is {unknown[0]!r}; give --classnames FILE"
        )
    class_of = np.array([number[folder] for folder in folders], dtype=np.int64)
    return ClassList(imagenet_names(), class_of, "ImageNet's 1000 names")


def _objectnet(folders: list[str], mappings: str) -> ClassList:
    """The classes that ObjectNet shares with ImageNet, under ObjectNet's names, as in LAION's CLIP benchmark."""
    files = [Path(mappings) / name for name in (OBJECTNET_NAMES, OBJECTNET_OVERLAP)]
    if not mappings or not all(file.is_file() for file in files):
        raise ValueError(
            f"classnames=objectnet:{mappings} needs {OBJECTNET_NAMES} and {OBJECTNET_OVERLAP}, which come with "
            f"ObjectNet in its folder `mappings`; give that folder, as objectnet:DIR/mappings"
        )
    name_of, shared = map(read_json, files)
    chosen = [folder for folder in folders if name_of.get(folder) in shared]
    class_of = np.array([chosen.index(folder) if folder in chosen else -1 for folder in folders], dtype=np.int64)
    names = [name_of[folder].lower() for folder in chosen]
    return ClassList(names, class_of, f"ObjectNet's names of {len(chosen)} classes")


def _from_file(folders: list[str], where: str) -> ClassList:
    """Names in a file: an object from class to name, or a list in the order of the classes.

    If the classes are numbers, as in tar shards with `.cls` members, a class is an index of the list. Otherwise the
    list has the order of the sorted names of the folders.
    """
    words: Any = read_words(where)
    if isinstance(words, dict):
        if missing := [folder for folder in folders if folder not in words]:
            raise ValueError(f"{where} names no class {missing[0]!r}, and {len(missing)} classes in all")
        return _one_each((words[folder] for folder in folders), where)
    if all(folder.isdecimal() for folder in folders) and max(map(int, folders)) < len(words):
        return ClassList([str(word) for word in words], np.array([int(folder) for folder in folders]), where)
    if len(words) != len(folders):
        raise ValueError(
            f"{where} has {len(words)} names, the images have {len(folders)} classes: {', '.join(folders[:3])}, ...; "
            f"give one name per class in this order, or an object from class to name as JSON"
        )
    return _one_each(words, where)

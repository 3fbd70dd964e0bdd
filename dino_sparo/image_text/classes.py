"""Labelled images -> the names to choose among, and which of them is right for each image.

ImageNet and its relatives name their folders by WordNet id (V1, Sketch, A, R) or by number (V2). The 1000 ids in order
come from timm, the 1000 names in the same order from OpenCLIP, so that a folder with 200 of the ids (A, R) is a choice
among those 200 names. ObjectNet brings its own names, and says itself which 113 of its 313 classes ImageNet knows.
"""

import copy
import logging
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64
from timm.data import ImageNetInfo

from dino_sparo.data.dataset import require_labels
from dino_sparo.data.sources import ImageSource
from dino_sparo.data.sources.image_source import Subset
from dino_sparo.image_text.prompts import AUTO, PROMPT_SETS, is_file, read_json, read_words, set_name
from dino_sparo.runtime.faults import require

logger = logging.getLogger(__name__)

# Two of the files in the folder `mappings` that comes with ObjectNet: folder -> name, name -> ImageNet's names.
OBJECTNET_NAMES = "folder_to_objectnet_label.json"
OBJECTNET_OVERLAP = "objectnet_to_imagenet_1k.json"


@dataclass(frozen=True)
class ClassList:
    """Classes of a zero-shot classifier.

    Attributes:
        names: of the classes to choose among.
        class_of: (classes of the images,), which of the names each class of the images is; -1: none of them, its
            images are left out.
        origin: where the names come from.
    """

    names: list[str]
    class_of: Int64[np.ndarray, " _"]
    origin: str


def open_classes(source: ImageSource, classnames: str = AUTO, data_path: str = "") -> ClassList:
    """The classes that `--classnames` asks for.

    Args:
        source: labelled images.
        classnames: `auto`: the names that go with a set; ImageNet's names of the folders that are WordNet ids; else the
            folders' names in words. `imagenet`: all 1000 names, whatever part of them the folders show.
            `objectnet:MAPPINGS`: the 113 classes that ObjectNet shares with ImageNet. `folders`: the folders' names.
            Else a file, see `_from_file`.
        data_path: the images, as they were asked for.

    Raises:
        ValueError: no labels; names that cannot be found, or that do not belong to the images.
    """
    require_labels(source)
    folders = source.classes or []
    if classnames == AUTO:
        classes = _automatic(folders, set_name(data_path))
    elif classnames == "imagenet":
        classes = _all_of_imagenet(folders)
    elif classnames == "folders":
        classes = _in_words(folders)
    elif classnames.startswith("objectnet"):
        classes = _objectnet(folders, classnames.partition(":")[2])
    elif is_file(classnames):
        classes = _from_file(folders, classnames)
    else:
        raise ValueError(
            f"classnames={classnames!r} is neither a file nor one of auto, imagenet, objectnet:MAPPINGS, folders"
        )
    repeated = [name for name, number in Counter(classes.names).items() if number > 1]
    if repeated:
        # ImageNet itself has two of each of `missile` and `sunglasses`.
        logger.warning("several classes are called %s; the first of them is always preferred", ", ".join(repeated))
    return classes


def apply_classes(source: ImageSource, classes: ClassList) -> ImageSource:
    """The images whose class is to be chosen, labelled by their places in `classes.names`.

    Raises:
        ValueError: none of the images belongs to any of the classes.
    """
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
    """ImageNet's 1000 classes in the order of their numbers, in OpenCLIP's words.

    Raises:
        MissingPackageError: the package `open_clip_torch` is missing.
    """
    require("open_clip", "ImageNet's class names")
    from open_clip import IMAGENET_CLASSNAMES

    return list(IMAGENET_CLASSNAMES)


def _automatic(folders: list[str], name: str | None) -> ClassList:
    if name is not None:
        words = PROMPT_SETS[name]
        if not words.has_names:
            raise ValueError(
                f"{name} brings no names in words for its {len(folders)} classes; give them, one per line in the order "
                f"of their numbers, with --classnames FILE"
            )
        if words.names is not None:
            return ClassList(list(words.names), np.arange(len(folders)), f"names of {name}")
        return _in_words(folders)
    number = {wordnet_id: i for i, wordnet_id in enumerate(wordnet_ids())}
    if all(folder in number for folder in folders):
        words_of = imagenet_names()
        names = [words_of[number[folder]] for folder in folders]
        return ClassList(names, np.arange(len(folders)), f"ImageNet's names of {len(folders)} WordNet ids")
    return _in_words(folders)


def _in_words(folders: list[str]) -> ClassList:
    """Folders' names, with spaces, up to a comma that another name for the same follows."""
    if all(folder.isdecimal() for folder in folders) or all(re.fullmatch(r"n\d{8}", folder) for folder in folders):
        raise ValueError(
            f"the {len(folders)} classes are called {', '.join(folders[:3])}, ..., which says nothing to a model; give "
            f"their names with --classnames: imagenet for ImageNet V2 (folders 0 to 999), or a FILE"
        )
    names = [folder.replace("_", " ").split(", ")[0].strip() for folder in folders]
    return ClassList(names, np.arange(len(folders)), "the images' own class names")


def _all_of_imagenet(folders: list[str]) -> ClassList:
    ids = wordnet_ids()
    number = {wordnet_id: i for i, wordnet_id in enumerate(ids)} | {str(i): i for i in range(len(ids))}
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
    for file in (OBJECTNET_NAMES, OBJECTNET_OVERLAP):
        if not mappings or not (Path(mappings) / file).is_file():
            raise ValueError(
                f"classnames=objectnet:{mappings} needs {OBJECTNET_NAMES} and {OBJECTNET_OVERLAP}, which come with "
                f"ObjectNet in its folder `mappings`; give that folder, as objectnet:DIR/mappings"
            )
    name_of, shared = (read_json(Path(mappings) / file) for file in (OBJECTNET_NAMES, OBJECTNET_OVERLAP))
    chosen = [folder for folder in folders if name_of.get(folder) in shared]
    if len(chosen) < len(shared):
        missing = sorted(set(shared) - {name_of[folder] for folder in chosen})
        raise ValueError(
            f"{len(missing)} of the {len(shared)} classes that ObjectNet shares with ImageNet have no folder, the "
            f"first is {missing[0]!r}; give the folder `images` of ObjectNet as --data_path"
        )
    number_of = {folder: i for i, folder in enumerate(chosen)}
    class_of = np.array([number_of.get(folder, -1) for folder in folders], dtype=np.int64)
    names = [name_of[folder].lower() for folder in chosen]
    return ClassList(names, class_of, f"ObjectNet's names of {len(chosen)} classes")


def _from_file(folders: list[str], where: str) -> ClassList:
    """Names in a file: a list in the order of the classes' numbers, or an object from class to name.

    Where the classes are numbers themselves, as in tar shards with `.cls` members, each is its place in the list.
    Otherwise their numbers are their places in the order of the folders' names.
    """
    words: Any = read_words(where)
    if isinstance(words, dict):
        missing = [folder for folder in folders if folder not in words]
        if missing:
            raise ValueError(f"{where} names no class {missing[0]!r}, and {len(missing)} classes in all")
        return ClassList([str(words[folder]) for folder in folders], np.arange(len(folders)), where)
    if all(folder.isdecimal() for folder in folders) and max(map(int, folders)) < len(words):
        return ClassList([str(word) for word in words], np.array([int(folder) for folder in folders]), where)
    if len(words) != len(folders):
        raise ValueError(
            f"{where} has {len(words)} names, the images have {len(folders)} classes: {', '.join(folders[:3])}, ...; "
            f"give one name per class in this order, or an object from class to name as JSON"
        )
    return ClassList([str(word) for word in words], np.arange(len(folders)), where)

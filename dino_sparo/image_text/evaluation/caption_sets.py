"""Annotations in any common layout -> images and all of their captions, for retrieval.

    dataset_flickr30k.json, dataset_coco.json    Karpathy's splits: images with a `split` and `sentences`
    coco_karpathy_test.json                      Salesforce's copies: a list of `image` and `caption`, one or many
    captions_val2017.json                        COCO: `images` and `annotations`
    results_20130124.token, captions.txt         Flickr: lines `7.jpg#0<TAB>words`, `7.jpg| 0| words` or `7.jpg,words`
    shards, tables, scenes, class folders        all that `pairs.sources.open_pairs` opens

Training draws one caption of an image; here each counts. Rows with the same image are put together.
"""

import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dino_sparo.data.sources import IMAGE_EXTENSIONS, CorruptImageError, ImageSource
from dino_sparo.data.sources.image_source import Subset
from dino_sparo.image_text.evaluation.compositional.questions import read_json
from dino_sparo.image_text.pairs.batches import LeftOut, PairSource
from dino_sparo.image_text.pairs.sources import open_pairs
from dino_sparo.image_text.pairs.tables import coco_captions
from dino_sparo.image_text.pairs.tars import TarCaptions
from dino_sparo.image_text.scoring.image_files import (
    check_file_name,
    image_path,
    named_source,
    require_few_missing,
)

logger = logging.getLogger(__name__)

KARPATHY_SPLIT = "test"
ENDINGS = "|".join(ending[1:] for ending in IMAGE_EXTENSIONS)
# An image (`7.jpg`; Flickr8k has `7.jpg.1`, too), an unused number after `#` or between bars, a caption.
IMAGE_NAME = rf"(?P<image>[^\t|]+?\.(?:{ENDINGS})(?:\.\d+(?=#))?)"
CAPTION_LINE = re.compile(IMAGE_NAME + r"(?:#\d+)?\s*[\t,|](?:\s*\d+\s*\|)?(?P<caption>.*)", re.I)


@dataclass(frozen=True)
class CaptionSet:
    """Images and their captions.

    Attributes:
        images: the images.
        captions: those of image 0, then those of image 1, ...
        image_of: (captions,), the image of each caption.
        left_out: reason -> number of images, or captions, that are not among these.
        split: of Karpathy's; None: the captions have no splits, or `--split` says which.
    """

    images: ImageSource
    captions: list[str]
    image_of: np.ndarray
    left_out: dict[str, int]
    split: str | None = None


class CaptionFile(NamedTuple):
    """Content of a file of captions.

    Attributes:
        captions_of: captions of every image, by its file name.
        left_out: captions of no image.
        split: the split that was read, in Karpathy's layout; None in others.
    """

    captions_of: dict[str, list[str]]
    left_out: LeftOut
    split: str | None = None


def open_caption_set(
    data_path: str,
    captions: str = "",
    split: str | None = None,
    image_list: str | None = None,
    allow_outside: bool = False,
) -> CaptionSet:
    """Open images with their captions.

    Args:
        data_path: the folder that the file names of `captions` start from; or, without `captions`, pairs as
            `open_pairs` opens them, or scenes.
        captions: file of captions, in one of the layouts above.
        split: of Karpathy's, by default `KARPATHY_SPLIT`; or, without `captions`, of the pairs, by default val.
        image_list: file with one image's name per line: use these alone.
        allow_outside: whether `captions` may name images outside of `data_path`.

    Raises:
        ValueError: the file cannot be read, or has no captions of the images; more than 1 % of the images are missing.
    """
    if not data_path:
        raise ValueError("--data_path is empty; give the folder of the images (with --captions), tar shards, or scenes")
    if captions:
        file = read_captions(Path(captions), split)
        captions_of = _only_listed(file.captions_of, image_list)
        chosen = _in_folder(captions_of, Path(data_path), file.left_out, allow_outside)
        return replace(chosen, split=file.split)
    if image_list is not None:
        raise ValueError(f"image_list={image_list!r} chooses among the images of --captions, which is not given")
    return _together(open_pairs(data_path, split=split, default_split="val"))


def read_captions(path: Path, split: str | None = None) -> CaptionFile:
    """Read a file of captions.

    Args:
        path: file in one of the layouts above that have a file.
        split: of Karpathy's, by default `KARPATHY_SPLIT`.

    Raises:
        ValueError: the file is missing or has another layout; or `split` is given and the file has no splits.
    """
    if not path.is_file():
        raise ValueError(f"captions={str(path)!r} does not exist (in {os.getcwd()})")
    file = _read_json(path, split) if path.suffix == ".json" else _read_lines(path)
    if split is not None and file.split is None:
        raise ValueError(f"--split {split}, but {str(path)!r} has no splits; only Karpathy's files have; leave it out")
    for name, captions in file.captions_of.items():
        try:
            check_file_name(name)
            if not isinstance(captions, list) or not all(isinstance(text, str) for text in captions):
                raise ValueError(f"its captions {captions!r:.80} are no list of texts")
        except ValueError as error:
            raise ValueError(f"captions={str(path)!r}: image {name!r:.80}: {error}") from error
    return file


def _read_lines(path: Path) -> CaptionFile:
    """Flickr's layouts."""
    captions_of: dict[str, list[str]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8-sig", errors="replace").splitlines()):
        match = CAPTION_LINE.fullmatch(line.strip())
        if match:
            captions_of.setdefault(match["image"].strip(), []).append(_unquoted(match["caption"].strip()))
        elif line.strip() and number:  # the first line may be a header
            raise ValueError(
                f"captions={str(path)!r}: line {number + 1} is {line[:60]!r}; expected an image's file name, a tab, "
                "comma or bar, and a caption"
            )
    return CaptionFile(captions_of, LeftOut())


def _unquoted(caption: str) -> str:
    """A caption without the quotes that CSV files put around it; quotes within it are written twice there."""
    inner = caption[1:-1]
    is_quoted = len(caption) > 1 and caption[0] == caption[-1] == '"' and '"' not in inner.replace('""', "")
    return inner.replace('""', '"').strip() if is_quoted else caption


def _read_json(path: Path, split: str | None) -> CaptionFile:
    """COCO's layout, Karpathy's, or Salesforce's."""
    content = read_json(path)
    if isinstance(content, dict) and "annotations" in content:
        return _coco(content, path)
    try:
        return _karpathy(content, split or KARPATHY_SPLIT) if isinstance(content, dict) else _salesforce(content)
    except (AttributeError, KeyError, TypeError) as error:
        keys = sorted(content) if isinstance(content, dict) else []
        raise ValueError(
            f"captions={str(path)!r} is neither COCO's (images, annotations) nor Karpathy's (images with split and "
            f"sentences, or a list of image and caption): its keys are {keys}, missing is {error}"
        ) from error
    except ValueError as error:
        raise ValueError(f"captions={str(path)!r} {error}") from error


def _coco(content: dict[str, Any], path: Path) -> CaptionFile:
    files, captions_by_id, left_out = coco_captions(content, str(path))
    if left_out.total:
        logger.warning("%s: left out captions %s", path, left_out)
    captions_of: dict[str, list[str]] = {}
    for number, name in files.items():
        captions_of.setdefault(name, []).extend(captions_by_id[number])
    return CaptionFile(captions_of, left_out)


def _salesforce(content: Any) -> CaptionFile:
    captions_of: dict[str, list[str]] = {}
    for entry in content:
        captions = entry["caption"]
        if not isinstance(captions, str | list):
            raise TypeError(f"a caption that is text; found {captions!r:.80}")
        captions_of.setdefault(entry["image"], []).extend([captions] if isinstance(captions, str) else captions)
    return CaptionFile(captions_of, LeftOut())


def _karpathy(content: dict[str, Any], split: str) -> CaptionFile:
    splits = {image["split"] for image in content["images"]}
    captions_of = {
        os.path.join(image.get("filepath", ""), image["filename"]): [each["raw"] for each in image["sentences"]]
        for image in content["images"]
        if image["split"] == split
    }
    if not captions_of:
        raise ValueError(f"has no split {split!r}; its splits are {sorted(splits)}")
    return CaptionFile(captions_of, LeftOut(), split)


def _only_listed(captions_of: dict[str, list[str]], image_list: str | None) -> dict[str, list[str]]:
    """The images that a list names, with or without their endings."""
    if image_list is None:
        return captions_of
    lines = Path(image_list).read_text(encoding="utf-8-sig", errors="replace").splitlines()
    wanted = {line.strip() for line in lines} - {""}
    stem = {name: {name, os.path.basename(name), os.path.splitext(os.path.basename(name))[0]} for name in captions_of}
    chosen = {name: captions for name, captions in captions_of.items() if stem[name] & wanted}
    if len(chosen) < len(wanted):
        raise ValueError(f"image_list={image_list!r} names {len(wanted)} images, {len(chosen)} of which have captions")
    return chosen


def _in_folder(captions_of: dict[str, list[str]], folder: Path, left_out: LeftOut, allow_outside: bool) -> CaptionSet:
    """The images of a folder, with their captions in the annotations."""
    roots = None if allow_outside else (folder,)
    paths = {name: image_path(folder, name, roots) for name in captions_of}
    there = {name: path for name, path in paths.items() if path is not None}
    missing = [name for name in paths if name not in there]
    if missing:
        kind = f"images in {folder}, such as {missing[0]!r},"
        require_few_missing(len(missing), len(paths), kind)
        logger.warning("%d of %d %s are missing", len(missing), len(paths), kind)
    counts = {f"captions {reason}": number for reason, number in left_out.counts.items()}
    images = named_source(folder, list(there), list(there.values()))
    return _flat(images, [captions_of[name] for name in there], {"missing images": len(missing), **counts})


def _together(pairs: PairSource) -> CaptionSet:
    """Pairs with the captions of one image put together.

    A text member of a shard holds a caption per line, as in CLIP benchmark's shards.
    """
    captions_of: dict[str, list[str]] = {}
    first: list[int] = []  # pair of each image
    unreadable = 0
    has_lines = isinstance(pairs.captions, TarCaptions) and pairs.captions.key is None
    for index in range(len(pairs)):
        try:
            texts = list(pairs.captions(index))
        except CorruptImageError as error:
            unreadable += 1
            logger.warning("%s: captions cannot be read: %s", pairs.name, error)
            texts = []
        if has_lines:
            texts = [line for text in texts for line in text.splitlines() if line.strip()]
        location = pairs.location(index)
        if location not in captions_of:
            captions_of[location] = []
            first.append(index)
        captions_of[location] += texts
    require_few_missing(unreadable, len(pairs), f"captions of {pairs.name}")
    images: ImageSource = pairs.images
    if len(first) < len(pairs):
        images = Subset(pairs.images, np.array(first, dtype=np.int64))
    return _flat(images, captions_of.values(), {"samples that are no pairs": pairs.left_out.total})


def _flat(images: ImageSource, captions: Iterable[list[str]], left_out: dict[str, int]) -> CaptionSet:
    """Captions one after the other, without empty ones, and without images that have none."""
    all_captions = list(captions)
    worded = [[text for text in texts if text.strip()] for texts in all_captions]
    chosen = [index for index, texts in enumerate(worded) if texts]
    if not chosen:
        raise ValueError(f"{images.name} has no captions")
    empty = sum(map(len, all_captions)) - sum(map(len, worded))
    without = len(images) - len(chosen)
    if empty or without:
        logger.warning("%s: left out %d empty captions and %d images without any", images.name, empty, without)
        images = Subset(images, np.array(chosen, dtype=np.int64)) if without else images
    image_of = np.repeat(np.arange(len(chosen)), [len(worded[index]) for index in chosen])
    counts = {**left_out, "empty captions": empty, "images without caption": without}
    return CaptionSet(images, [text for texts in worded for text in texts], image_of, counts)

"""Annotations of any common layout -> images and all of their captions: what retrieval searches in.

    dataset_flickr30k.json, dataset_coco.json    Karpathy's splits: images with a `split` and `sentences`
    coco_karpathy_test.json                      Salesforce's copies: a list of `image` and `caption`, one or many
    captions_val2017.json                        COCO: `images` and `annotations`
    results_20130124.token, captions.txt         Flickr: lines `7.jpg#0<TAB>words`, `7.jpg| 0| words` or `7.jpg,words`
    shards, tables, scenes, class folders        whatever `pairs.sources.open_pairs` opens

Training draws one caption of an image; here each counts. Rows that name the same image are put together.
"""

import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dino_sparo.data.dataset import CorruptImageError, ImageSource
from dino_sparo.data.sources import IMAGE_EXTENSIONS
from dino_sparo.data.sources.limits import parse_json
from dino_sparo.data.sources.subset import Subset
from dino_sparo.image_text.pairs.batches import LeftOut, PairSource
from dino_sparo.image_text.pairs.captions import TarCaptions
from dino_sparo.image_text.pairs.sources import open_pairs
from dino_sparo.image_text.pairs.tables import coco_captions
from dino_sparo.image_text.scoring.image_files import file_of, open_named_images, require_few_missing

logger = logging.getLogger(__name__)

KARPATHY_SPLIT = "test"
ENDINGS = "|".join(ending[1:] for ending in IMAGE_EXTENSIONS)
# An image (`7.jpg`; Flickr8k has `7.jpg.1`, too), a number after `#` or between bars that nobody looks at, a caption.
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
    """What a file of captions says.

    Attributes:
        captions_of: captions of every image, by its file name.
        left_out: captions of no image.
        split: the one that was read, of Karpathy's; None of the other layouts.
    """

    captions_of: dict[str, list[str]]
    left_out: LeftOut
    split: str | None = None


def open_caption_set(
    data_path: str, captions: str = "", split: str | None = None, image_list: str | None = None
) -> CaptionSet:
    """Open images with their captions.

    Args:
        data_path: the folder that the file names of `captions` start from; or, without `captions`, pairs as
            `open_pairs` opens them, or scenes.
        captions: file of captions, in one of the layouts above.
        split: of Karpathy's, by default `KARPATHY_SPLIT`; or, without `captions`, of the pairs, by default val.
        image_list: file with one image's name per line: use these alone.

    Raises:
        ValueError: the file is not understood, or says nothing about the images asked for; more than 1 % of the images
            are missing.
    """
    if not data_path:
        raise ValueError("--data_path is empty; give the folder of the images (with --captions), tar shards, or scenes")
    if captions:
        file = read_captions(Path(captions), split)
        chosen = _in_folder(_only_listed(file.captions_of, image_list), data_path, file.left_out)
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
        ValueError: the file is not there, is not understood, or has no splits though one is asked for.
    """
    if not path.is_file():
        raise ValueError(f"captions={str(path)!r} does not exist (in {os.getcwd()})")
    captions_of: dict[str, list[str]] = {}
    if path.suffix == ".json":
        try:
            content = parse_json(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"captions={str(path)!r} is no JSON ({error})") from error
        if isinstance(content, dict) and "annotations" in content:
            files, captions_by_id, left_out = coco_captions(content, str(path))
            if left_out.total:
                logger.warning("%s: left out captions %s", path, left_out)
            for number, name in files.items():
                captions_of.setdefault(name, []).extend(captions_by_id[number])
            _refuse_split(path, split)
            return CaptionFile(captions_of, left_out)
        return _read_json(content, path, split)
    _refuse_split(path, split)
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


def _refuse_split(path: Path, split: str | None) -> None:
    """Of the layouts without splits."""
    if split is not None:
        raise ValueError(f"--split {split}, but {str(path)!r} has no splits; only Karpathy's files have; leave it out")


def _unquoted(caption: str) -> str:
    """A caption without the quotes that CSV files put around it; quotes within it are written twice there."""
    inner = caption[1:-1]
    is_quoted = len(caption) > 1 and caption[0] == caption[-1] == '"' and '"' not in inner.replace('""', "")
    return inner.replace('""', '"').strip() if is_quoted else caption


def _read_json(content: Any, path: Path, split: str | None) -> CaptionFile:
    """Karpathy's layout, or Salesforce's."""
    keys = sorted(content) if isinstance(content, dict) else []
    captions_of: dict[str, list[str]] = {}
    try:
        if isinstance(content, list):
            _refuse_split(path, split)
            for entry in content:
                captions = entry["caption"]
                captions_of.setdefault(entry["image"], []).extend([captions] if isinstance(captions, str) else captions)
            return CaptionFile(captions_of, LeftOut())
        split = split or KARPATHY_SPLIT
        splits = {image["split"] for image in content["images"]}
        for image in content["images"]:
            if image["split"] == split:
                name = os.path.join(image.get("filepath", ""), image["filename"])
                captions_of[name] = [sentence["raw"] for sentence in image["sentences"]]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"captions={str(path)!r} is neither COCO's (images, annotations) nor Karpathy's (images with split and "
            f"sentences, or a list of image and caption): its keys are {keys}, missing is {error}"
        ) from error
    if not captions_of:
        raise ValueError(f"captions={str(path)!r} has no split {split!r}; its splits are {sorted(splits)}")
    return CaptionFile(captions_of, LeftOut(), split)


def _only_listed(captions_of: dict[str, list[str]], image_list: str | None) -> dict[str, list[str]]:
    """The images that a list names, whether or not it names their endings."""
    if image_list is None:
        return captions_of
    wanted = {line.strip() for line in Path(image_list).read_text(encoding="utf-8-sig").splitlines()} - {""}
    stem = {name: {name, os.path.basename(name), os.path.splitext(os.path.basename(name))[0]} for name in captions_of}
    chosen = {name: captions for name, captions in captions_of.items() if stem[name] & wanted}
    if len(chosen) < len(wanted):
        raise ValueError(f"image_list={image_list!r} names {len(wanted)} images, {len(chosen)} of which have captions")
    return chosen


def _in_folder(captions_of: dict[str, list[str]], folder: str, left_out: LeftOut) -> CaptionSet:
    """The images of a folder with what the annotations say about them."""
    named = open_named_images(Path(folder), list(captions_of))
    counts = {f"captions {reason}": number for reason, number in left_out.counts.items()}
    own = [captions_of[file_of(name)] for name in named.names]
    return _flat(named.source, own, {"missing images": len(named.missing), **counts})


def _together(pairs: PairSource) -> CaptionSet:
    """Pairs with the captions of one image put together.

    A text member of a shard holds a caption per line, as CLIP benchmark's shards do.
    """
    captions_of: dict[str, list[str]] = {}
    first: list[int] = []  # of each image's pairs
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
    texts: list[str] = []
    image_of: list[int] = []
    kept: list[int] = []
    empty = 0
    for index, own in enumerate(captions):
        words = [text for text in own if text.strip()]
        empty += len(own) - len(words)
        if words:
            texts += words
            image_of += [len(kept)] * len(words)
            kept.append(index)
    if not kept:
        raise ValueError(f"{images.name} has no captions")
    without = len(images) - len(kept)
    if empty or without:
        logger.warning("%s: left out %d empty captions and %d images without any", images.name, empty, without)
    chosen = images if not without else Subset(images, np.array(kept, dtype=np.int64))
    counts = {**left_out, "empty captions": empty, "images without caption": without}
    return CaptionSet(chosen, texts, np.array(image_of, dtype=np.int64), counts)

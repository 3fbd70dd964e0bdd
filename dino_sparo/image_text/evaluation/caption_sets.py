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
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dino_sparo.data.sources import IMAGE_EXTENSIONS, CorruptImageError, ImageSource
from dino_sparo.data.sources.decode import DEFAULT_LIMITS, ImageLimits
from dino_sparo.data.sources.image_source import Subset
from dino_sparo.image_text.evaluation.protocol import find_images, named_source, require_few_missing
from dino_sparo.image_text.pairs.batches import LeftOut, PairSource
from dino_sparo.image_text.pairs.sources import open_pairs
from dino_sparo.image_text.pairs.tables import coco_captions
from dino_sparo.image_text.pairs.tars import TarCaptions
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import read_json

logger = logging.getLogger(__name__)

KARPATHY_SPLIT = "test"
ENDINGS = "|".join(ending[1:] for ending in IMAGE_EXTENSIONS)
# An image (`7.jpg`; Flickr8k has `7.jpg.1`, too), an unused number after `#` or between bars, a caption.
IMAGE_NAME = rf"(?P<image>[^\t|]+?\.(?:{ENDINGS})(?:\.\d+(?=#))?)"
CAPTION_LINE = re.compile(IMAGE_NAME + r"(?:#\d+)?\s*[\t,|](?:\s*\d+\s*\|)?(?P<caption>.*)", re.I)

Rows = Iterable[tuple[str, list[str]]]  # file names, each with some of its captions


@dataclass(frozen=True)
class CaptionSet:
    """Images and their captions: those of image 0, then those of image 1, ...

    `image_of` has the index of the image of each caption. `left_out` has numbers of images or captions by reason.
    `split` is Karpathy's; None: the captions have no splits, or `--split` names the split.
    """

    images: ImageSource
    captions: list[str]
    image_of: np.ndarray
    left_out: dict[str, int]
    split: str | None = None


def open_caption_set(
    data_path: str,
    captions: str = "",
    split: str | None = None,
    allow_outside: bool = False,
    limits: ImageLimits = DEFAULT_LIMITS,
) -> CaptionSet:
    """Open images with their captions.

    Args:
        data_path: the folder that the file names of `captions` start from; or, without `captions`, pairs as
            `open_pairs` opens them, or scenes.
        captions: file of captions, in one of the layouts above.
        split: of Karpathy's, by default `KARPATHY_SPLIT`; or, without `captions`, of the pairs, by default val.
        allow_outside: whether `captions` may name images outside of `data_path`.
        limits: larger images count as unreadable.
    """
    if not data_path:
        raise UserError("--data_path is empty; give the folder of the images (with --captions), tar shards, or scenes")
    if not captions:
        return _together(open_pairs(data_path, split=split, default_split="val", limits=limits))
    captions_of, unused, file_split = read_captions(Path(captions), split)
    names, folder = list(captions_of), Path(data_path)
    paths = find_images(folder, names, None if allow_outside else (folder,))
    missing = [name for name in names if name not in paths]
    if missing:
        problem = f"images in {folder}, such as {missing[0]!r}, are missing"
        require_few_missing(len(missing), len(names), problem)
        logger.warning("%d of %d %s", len(missing), len(names), problem)
    left_out = {f"captions {reason}": number for reason, number in unused.counts.items()}
    images = named_source(folder, list(paths), list(paths.values()), limits)
    chosen = _flat(images, [captions_of[name] for name in paths], {"missing images": len(missing), **left_out})
    return replace(chosen, split=file_split)


def read_captions(path: Path, split: str | None = None) -> tuple[dict[str, list[str]], LeftOut, str | None]:
    """Read a file of captions; `split` is one of Karpathy's, by default `KARPATHY_SPLIT`.

    Returns also the captions without image, and the split; None where there are no splits.
    """
    where = f"captions={str(path)!r}"
    left_out, file_split, content = LeftOut(), None, None
    rows: Rows
    if path.suffix != ".json":
        rows = _lines(path)
    elif isinstance(content := read_json(path), dict) and "annotations" in content:
        files, captions_by_id, left_out = coco_captions(content, str(path))
        rows = [(name, captions_by_id[number]) for number, name in files.items()]
        if left_out.total:
            logger.warning("%s: left out captions %s", path, left_out)
    elif isinstance(content, dict):
        file_split = split or KARPATHY_SPLIT
        rows = _karpathy(content, file_split)
    else:
        rows = _salesforce(content)
    captions_of: dict[str, list[str]] = defaultdict(list)
    try:
        for name, captions in rows:
            if not isinstance(captions, list) or not all(isinstance(text, str) for text in (name, *captions)):
                raise UserError(f"the captions of image {name!r:.80}, {captions!r:.80}, are not a list of texts")
            captions_of[name] += captions
    except (AttributeError, KeyError, TypeError) as error:
        keys = sorted(content) if isinstance(content, dict) else []
        raise UserError(
            f"{where} is neither COCO's (images, annotations) nor Karpathy's (images with split and sentences, or a "
            f"list of image and caption): its keys are {keys}, missing is {error}"
        ) from error
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
    if split is not None and file_split is None:
        raise UserError(f"--split {split}, but {str(path)!r} has no splits; only Karpathy's files have; leave it out")
    return captions_of, left_out, file_split


def _lines(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Flickr's layouts."""
    for number, line in enumerate(path.read_text(encoding="utf-8-sig", errors="replace").splitlines()):
        match = CAPTION_LINE.fullmatch(line.strip())
        if match:
            yield match["image"].strip(), [_unquoted(match["caption"].strip())]
        elif line.strip() and number:  # the first line may be a header
            raise UserError(
                f"line {number + 1} is {line[:60]!r}; expected an image's file name, a tab, comma or bar, and a caption"
            )


def _unquoted(caption: str) -> str:
    """A caption without the quotes that CSV files put around it; quotes within it are written twice there."""
    inner = caption[1:-1]
    is_quoted = len(caption) > 1 and caption[0] == caption[-1] == '"' and '"' not in inner.replace('""', "")
    return inner.replace('""', '"').strip() if is_quoted else caption


def _salesforce(content: Any) -> Rows:
    for entry in content:
        captions = entry["caption"]
        yield entry["image"], [captions] if isinstance(captions, str) else captions


def _karpathy(content: dict[str, Any], split: str) -> Rows:
    images = [image for image in content["images"] if image["split"] == split]
    if not images:
        splits = sorted({image["split"] for image in content["images"]})
        raise UserError(f"has no split {split!r}; its splits are {splits}")
    for image in images:
        name = os.path.join(image.get("filepath", ""), image["filename"])
        yield name, [sentence["raw"] for sentence in image["sentences"]]


def _together(pairs: PairSource) -> CaptionSet:
    """Pairs -> images, each with all of its captions.

    A text member of a shard holds a caption per line, as in CLIP benchmark's shards.
    """
    captions_of: dict[str, list[str]] = defaultdict(list)
    first: dict[str, int] = {}  # pair of each image
    unreadable = 0
    has_lines = isinstance(pairs.captions, TarCaptions) and pairs.captions.key is None
    for index in range(len(pairs)):
        location = pairs.location(index)
        first.setdefault(location, index)
        try:
            texts = list(pairs.captions(index))
        except CorruptImageError as error:
            unreadable += 1
            logger.warning("%s: captions cannot be read: %s", pairs.name, error)
            texts = []
        if has_lines:
            texts = [line for text in texts for line in text.splitlines() if line.strip()]
        captions_of[location] += texts
    require_few_missing(unreadable, len(pairs), f"captions of {pairs.name} are missing or cannot be read")
    images = pairs.images if len(first) == len(pairs) else Subset(pairs.images, np.array(list(first.values())))
    return _flat(images, captions_of.values(), {"samples that are no pairs": pairs.left_out.total})


def _flat(images: ImageSource, captions: Iterable[list[str]], left_out: dict[str, int]) -> CaptionSet:
    """All captions in one list, without empty captions and without images that have no caption."""
    all_captions = list(captions)
    worded = [[text for text in texts if text.strip()] for texts in all_captions]
    chosen = [index for index, texts in enumerate(worded) if texts]
    if not chosen:
        raise UserError(f"{images.name} has no captions")
    empty = sum(map(len, all_captions)) - sum(map(len, worded))
    without = len(images) - len(chosen)
    if empty or without:
        logger.warning("%s: left out %d empty captions and %d images without captions", images.name, empty, without)
        images = Subset(images, np.array(chosen, dtype=np.int64)) if without else images
    image_of = np.repeat(np.arange(len(chosen)), [len(worded[index]) for index in chosen])
    counts = {**left_out, "empty captions": empty, "images without caption": without}
    return CaptionSet(images, [text for texts in worded for text in texts], image_of, counts)

"""COCO's annotations of instances -> images with objects; polygons and run lengths -> masks.

An annotation is a list of polygons, or run lengths, as numbers or compressed to a string. Annotations with `iscrowd`
mark groups: their pixels are void where no object is. Format: cocodataset.org/#format-data.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

from dino_sparo.data.dataset import CorruptImageError, ImageSource
from dino_sparo.data.sources.decode import DEFAULT_LIMITS
from dino_sparo.evaluation.objects.masks import ObjectMasks, ObjectSource, image_files
from dino_sparo.runtime.files import open_regular, parse_json


def polygon_mask(polygons: Sequence[Sequence[float | int]], height: int, width: int) -> Bool[np.ndarray, "H W"]:
    """The pixels whose centres lie inside any polygon, by the even-odd rule.

    COCO's own tool rounds outlines otherwise: masks may differ from it in pixels on the outline.

    Args:
        polygons: each x1, y1, x2, y2, ... in pixels from the image's upper left corner.
        height: of the image, pixels.
        width: likewise.
    """
    mask = np.zeros((height, width), dtype=bool)
    for values in polygons:
        points = np.array(values, dtype=np.float64).reshape(-1, 2)
        crossings = np.zeros((height, width + 1), dtype=np.int64)  # of the outline, left of each pixel's centre
        for (x0, y0), (x1, y1) in zip(points, np.roll(points, -1, axis=0), strict=True):
            first, last = (min(max(math.ceil(y - 0.5), 0), height) for y in sorted((y0, y1)))
            rows = np.arange(first, last)
            if len(rows):
                x = x0 + (rows + 0.5 - y0) * (x1 - x0) / (y1 - y0)
                crossings[rows, np.clip(np.ceil(x - 0.5), 0, width).astype(np.int64)] += 1
        mask |= crossings[:, :width].cumsum(axis=1) % 2 == 1
    return mask


def run_length_mask(counts: list[int] | str, height: int, width: int) -> Bool[np.ndarray, "H W"]:
    """Lengths of runs outside and inside in turn, down the columns -> mask.

    Args:
        counts: the lengths, or COCO's string of them.
        height: of the image, pixels.
        width: likewise.

    Raises:
        ValueError: the lengths do not sum to the number of pixels.
    """
    lengths = _decompressed(counts) if isinstance(counts, str) else counts
    if min(lengths, default=0) < 0 or sum(lengths) != height * width:
        raise ValueError(f"run lengths sum to {sum(lengths)}, but the image has {height} x {width} pixels")
    inside = np.arange(len(lengths)) % 2 == 1
    return np.repeat(inside, lengths).reshape(width, height).T


def _decompressed(text: str) -> list[int]:
    """COCO's string -> run lengths.

    A number is written in groups of five bits, lowest first, each plus 48 as a character; bit 5 says that more follow,
    bit 4 of the last group is the sign. From the fourth number on it is the difference to the last but one.
    """
    numbers: list[int] = []
    value = shift = 0
    for character in text:
        group = ord(character) - 48
        value |= (group & 31) << shift
        shift += 5
        if not group & 32:
            value -= (group >> 4 & 1) << shift
            numbers.append(value + (numbers[-2] if len(numbers) > 2 else 0))
            value = shift = 0
    return numbers


@dataclass(frozen=True)
class CocoMasks:
    """The objects of COCO's annotations.

    Attributes:
        files: the image files.
        entries: of the images, as in the annotations.
        annotations: of each image, by its id.
        number: of each class, by its id.
    """

    files: ImageSource
    entries: list[dict[str, Any]]
    annotations: dict[int, list[dict]]
    number: dict[int, int]

    def objects(self, index: int) -> ObjectMasks:
        """The objects of an image; groups are void."""
        image = self.entries[index]
        try:
            height, width = int(image["height"]), int(image["width"])
            if height * width > DEFAULT_LIMITS.max_mpix * 1e6:
                raise ValueError(f"{height} x {width} pixels")
            own = self.annotations.get(image["id"], [])
            masks = np.zeros((len(own), height, width), dtype=bool)
            for mask, annotation in zip(masks, own, strict=True):
                mask[:] = segmentation_mask(annotation["segmentation"], height, width)
            crowd = np.array([bool(annotation.get("iscrowd")) for annotation in own], dtype=bool)
            classes = [self.number[annotation["category_id"]] for annotation in own]
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            reason = f"annotations cannot be read ({type(error).__name__}: {error})"
            raise CorruptImageError(self.files.location(index), reason) from error
        things = masks[~crowd]
        void = masks[crowd].any(axis=0) & ~things.any(axis=0)
        return ObjectMasks(things, np.array(classes, dtype=np.int64)[~crowd], void)


def segmentation_mask(segmentation: Any, height: int, width: int) -> Bool[np.ndarray, "H W"]:
    """The entry `segmentation` of an annotation -> its mask."""
    if isinstance(segmentation, dict):
        if list(segmentation["size"]) != [height, width]:
            raise ValueError(f"mask of {segmentation['size']} pixels for an image of {[height, width]}")
        return run_length_mask(segmentation["counts"], height, width)
    return polygon_mask(segmentation, height, width)


def open_coco(folder: Path, path: Path) -> ObjectSource:
    """The images that COCO's annotations describe.

    Args:
        folder: of the image files.
        path: instances_val2017.json or alike: `images`, `annotations` with `segmentation`, `categories`.

    Raises:
        ValueError: it cannot be read, is another kind of JSON, or lists no images.
    """
    try:
        with open_regular(path) as file:
            content = parse_json(file.read())
    except (OSError, ValueError) as error:
        raise ValueError(f"--masks {str(path)!r} cannot be read as JSON ({error})") from error
    try:
        classes = {category["id"]: str(category["name"]) for category in content["categories"]}
        annotations: dict[int, list[dict]] = {}
        for annotation in content["annotations"]:
            annotations.setdefault(annotation["image_id"], []).append(annotation)
        entries = [{name: image[name] for name in ("id", "height", "width")} for image in content["images"]]
        files = image_files(f"COCO {folder}", folder, [image["file_name"] for image in content["images"]])
    except (KeyError, TypeError) as error:
        keys = ", ".join(content) if isinstance(content, dict) else type(content).__name__
        raise ValueError(
            f"--masks {str(path)!r} has not the form of COCO's instances (images, annotations, categories; missing "
            f"{error}); it holds {keys}"
        ) from error
    if not entries:
        raise ValueError(f"--masks {str(path)!r} lists no images")
    number = {identity: number for number, identity in enumerate(sorted(classes))}
    masks = CocoMasks(files, entries, annotations, number)
    return ObjectSource(files, [classes[identity] for identity in number], masks.objects)

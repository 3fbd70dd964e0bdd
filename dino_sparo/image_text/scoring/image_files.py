"""Names of image files in annotations -> the images in a folder, encoded; what is missing is counted.

Between a benchmark's annotations and a scorer. A benchmark without some of its images is another benchmark, so more
than a few missing ones are an error.
"""

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from dino_sparo.data.dataset import CorruptImageError, ImageSource
from dino_sparo.data.sources import IMAGE_EXTENSIONS
from dino_sparo.data.sources.packed import FileSource, PackedStrings
from dino_sparo.image_text.scoring.scorer import EncodedImages, Scorer

logger = logging.getLogger(__name__)

# If a larger share of images or captions is missing, the folder or the download is wrong.
MAX_MISSING = 0.01


class Crop(NamedTuple):
    """Part of an image, as annotations name it.

    Attributes:
        name: of the image file.
        box: left, top, right, bottom; pixels. What lies outside of the image is black.
    """

    name: str
    box: tuple[float, float, float, float]


ImageName = str | Crop


def file_of(image: ImageName) -> str:
    """The name of the image's file."""
    return image.name if isinstance(image, Crop) else image


class CroppedSource:
    """Parts of images.

    Args:
        source: whole images.
        boxes: of each the part to take; None: all of it.
    """

    def __init__(self, source: FileSource, boxes: Sequence[tuple[float, float, float, float] | None]) -> None:
        self.source, self.boxes = source, boxes
        self.name, self.classes, self.labels = source.name, source.classes, source.labels

    def __len__(self) -> int:
        """Number of images."""
        return len(self.source)

    def location(self, index: int) -> str:
        """The file's path."""
        return self.source.location(index)

    def read(self, index: int) -> Image.Image:
        """Image `index` as 8-bit RGB; raises CorruptImageError, also for a box that shows nothing of it."""
        image, box = self.source.read(index), self.boxes[index]
        if box is None:
            return image
        if not all(map(math.isfinite, box)):
            raise CorruptImageError(self.location(index), f"the box {box} is not finite")
        left, top, right, bottom = map(round, box)
        if left >= right or top >= bottom:
            raise CorruptImageError(self.location(index), f"the box {box} has no area")
        if right <= 0 or bottom <= 0 or left >= image.width or top >= image.height:
            size = f"{image.width} x {image.height} pixels"
            raise CorruptImageError(self.location(index), f"the box {box} lies outside of the image, {size}")
        return image.crop((left, top, right, bottom))


@dataclass(frozen=True)
class NamedImages:
    """Images of a folder that annotations name.

    Attributes:
        source: the images that are there.
        names: what the annotations call them, in the source's order.
        missing: names of those that are not there.
    """

    source: ImageSource
    names: list[ImageName]
    missing: list[ImageName]


def image_path(folder: Path, name: str) -> str | None:
    """Where an image lies, seen from the folder: as named, without the folders in its name, or with an ending added."""
    base = os.path.basename(name)
    tries = (name, base, *(base + ending for ending in IMAGE_EXTENSIONS))
    return next((path for path in tries if (folder / path).is_file()), None)


def open_named_images(folder: Path, names: Sequence[ImageName]) -> NamedImages:
    """Look for images in a folder, as they are named, without the folders in their names, or with an ending added.

    Args:
        folder: where they should be.
        names: different names.

    Raises:
        ValueError: more than 1 % are missing.
    """
    paths = {name: image_path(folder, file_of(name)) for name in names}
    existing = {name: path for name, path in paths.items() if path is not None}
    missing = [name for name in names if name not in existing]
    first = str(folder / file_of(missing[0])) if missing else ""
    require_few_missing(len(missing), len(names), f"images in {folder}", first)
    if missing:
        logger.warning("%d of %d images are not in %s, the first is %s", len(missing), len(names), folder, first)
    return NamedImages(named_source(folder, list(existing), list(existing.values())), list(existing), missing)


def named_source(folder: Path, names: Sequence[ImageName], paths: Sequence[str]) -> ImageSource:
    """Images, or parts of them, as a source.

    Args:
        folder: what paths start from.
        names: as annotations name them.
        paths: where each lies.
    """
    packed = PackedStrings.pack([os.fsencode(path) for path in paths])
    files = FileSource(f"images in {folder}", str(folder), packed, None, None)
    boxes = [name.box if isinstance(name, Crop) else None for name in names]
    return CroppedSource(files, boxes) if any(boxes) else files


def encode_named_images(
    scorer: Scorer, folder: Path, names: Sequence[ImageName]
) -> tuple[EncodedImages, dict[ImageName, int]]:
    """The images of a folder, encoded, on every process.

    Args:
        scorer: the model.
        folder: where they should be.
        names: different names.

    Returns:
        The images, and the row of each image that could be read, by its name.

    Raises:
        ValueError: more than 1 % are missing or cannot be read.
    """
    named = open_named_images(folder, names)
    encoded = scorer.encode_images(named.source)
    require_few_missing(len(named.missing) + encoded.num_corrupt, len(names), f"images in {folder}")
    return encoded, {named.names[index]: row for row, index in enumerate(encoded.indices.tolist())}


def require_few_missing(missing: int, total: int, what: str, example: str = "") -> None:
    """Refuse a benchmark of which too much is not there.

    Args:
        missing: how many cannot be used.
        total: how many there should be.
        what: in words, what they are and where they should be.
        example: the first of those missing.

    Raises:
        ValueError: more than 1 % are missing.
    """
    if missing > MAX_MISSING * total:
        first = f", the first is {example}" if example else ""
        raise ValueError(
            f"{missing} of {total} {what} are missing or cannot be read{first}; at most {MAX_MISSING:.0%} may be. Is "
            f"this the right folder, and the whole of it?"
        )

"""Names of image files in annotations -> the images in a folder, encoded; what is missing is counted.

Between a benchmark's annotations and a scorer. A benchmark without some of its images is another benchmark, so more
than a few missing ones are an error.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dino_sparo.image_text.evaluation.scorer import EncodedImages, Scorer
from dino_sparo.sources import IMAGE_EXTENSIONS
from dino_sparo.sources.packed import FileSource, PackedStrings

logger = logging.getLogger(__name__)

# More images or captions that are missing are no accident.
MAX_MISSING = 0.01


@dataclass(frozen=True)
class NamedImages:
    """Images of a folder that annotations name.

    Attributes:
        source: the images that are there.
        names: what the annotations call them, in the source's order.
        missing: names of those that are not there.
    """

    source: FileSource
    names: list[str]
    missing: list[str]


def open_named_images(folder: Path, names: Sequence[str]) -> NamedImages:
    """Look for images in a folder, as they are named, without the folders in their names, or with an ending added.

    Args:
        folder: where they should be.
        names: different names.

    Raises:
        ValueError: more than 1 % are missing.
    """
    found: dict[str, str] = {}
    for name in names:
        base = os.path.basename(name)
        tries = (name, base, *(base + ending for ending in IMAGE_EXTENSIONS))
        path = next((path for path in tries if (folder / path).is_file()), None)
        if path is not None:
            found[name] = path
    missing = [name for name in names if name not in found]
    first = str(folder / missing[0]) if missing else ""
    require_few_missing(len(missing), len(names), f"images in {folder}", first)
    if missing:
        logger.warning("%d of %d images are not in %s, the first is %s", len(missing), len(names), folder, first)
    paths = PackedStrings.pack([os.fsencode(path) for path in found.values()])
    return NamedImages(FileSource(f"images in {folder}", str(folder), paths, None, None), list(found), missing)


def encode_named_images(scorer: Scorer, folder: Path, names: Sequence[str]) -> tuple[EncodedImages, dict[str, int]]:
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
    found = scorer.encode_images(named.source)
    require_few_missing(len(named.missing) + found.num_corrupt, len(names), f"images in {folder}")
    return found, {named.names[index]: row for row, index in enumerate(found.indices.tolist())}


def require_few_missing(missing: int, total: int, what: str, example: str = "") -> None:
    """Refuse a benchmark of which too much is not there.

    Args:
        missing: how many cannot be used.
        total: how many there should be.
        what: they are, and where they should be.
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

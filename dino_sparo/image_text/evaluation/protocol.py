"""Images of an evaluation of an image-text model, by data path or named in annotations.

A benchmark without some of its images is another benchmark, so more than a few missing ones are an error.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from dino_sparo.data.defaults import EXIF
from dino_sparo.data.ranks import open_images
from dino_sparo.data.scenes.graphs import INDEPENDENT
from dino_sparo.data.scenes.images import Scenes, names_scenes, parse_scenes_spec
from dino_sparo.data.sources import IMAGE_EXTENSIONS, CorruptImageError, ImageSource
from dino_sparo.data.sources.decode import DEFAULT_LIMITS, ImageLimits, decode_image, read_image
from dino_sparo.data.sources.image_source import FileSource
from dino_sparo.image_text.evaluation.embedded import image_bytes
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import file_sha256

ROOT = Path("/")  # start of absolute paths
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


class Cell(NamedTuple):
    """An image in a table of Hugging Face.

    Attributes:
        name: of the table's file, .parquet or .arrow.
        column: of the images.
        row: in this file, from 0.
    """

    name: str
    column: str
    row: int


ImageName = str | Crop | Cell


def file_of(image: ImageName) -> str:
    """The name of the image's file."""
    return image if isinstance(image, str) else image.name


class NamedSource(FileSource):
    """Image files, parts of them, or images in tables.

    Attributes:
        names: of the images.
    """

    names: Sequence[ImageName]

    def read(self, index: int) -> Image.Image:
        """Image `index` as 8-bit RGB; raises CorruptImageError, also for a box outside of the image."""
        name = self.names[index]
        if isinstance(name, Cell):
            location = f"{self.location(index)}, {name.column} of row {name.row}"
            data = image_bytes(self.location(index), name.column, name.row, location)
            return decode_image(data, location, self.limits)
        if isinstance(name, str):
            return super().read(index)
        box = name.box
        # Boxes count stored pixels, as the benchmarks' own loaders do.
        image = read_image(path := self.location(index), path, limits=replace(self.limits, exif=EXIF[1]))
        left, top, right, bottom = map(round, box)
        if left >= right or top >= bottom:
            raise CorruptImageError(self.location(index), f"the box {box} has no area")
        if right <= 0 or bottom <= 0 or left >= image.width or top >= image.height:
            size = f"{image.width} x {image.height} pixels"
            raise CorruptImageError(self.location(index), f"the box {box} lies outside of the image, {size}")
        return image.crop((left, top, right, bottom))


def image_path(folder: Path, name: str, roots: Sequence[Path] | None = None) -> str | None:
    """Path of an image in a folder: as named, without the folders in its name, or with an ending added.

    Raises ValueError if the file lies below none of the folders `roots` (links in them are the user's own).
    """
    base = os.path.basename(name)
    tries = (name, base, *(base + ending for ending in IMAGE_EXTENSIONS))
    found = next((path for path in tries if os.path.isfile(folder / path)), None)
    if found is not None and roots is not None:
        path = Path(os.path.abspath(folder / found))
        if not any(path.is_relative_to(os.path.abspath(root)) for root in roots):
            raise UserError(
                f"the image {name!r} lies outside of {' and '.join(map(str, roots))}; other people's annotations "
                "may name any file. Give --allow_outside if you trust them"
            )
    return found


def find_images(folder: Path, names: Iterable[str], roots: Sequence[Path] | None = None) -> dict[str, str]:
    """Name -> path for the images that a folder holds; otherwise as `image_path`."""
    paths = {name: image_path(folder, name, roots) for name in names}
    return {name: path for name, path in paths.items() if path is not None}


def named_source(
    folder: Path, names: Sequence[ImageName], paths: Sequence[str], limits: ImageLimits = DEFAULT_LIMITS
) -> ImageSource:
    """Images, or parts of images, as a source: names in annotations, and paths of the files relative to a folder."""
    files = NamedSource("the images" if folder == ROOT else f"images in {folder}", folder, paths, limits=limits)
    files.names = names
    return files


def require_few_missing(
    missing: int,
    total: int,
    problem: str,
    share: float | None = None,
    data: str = "",
    remedy: str = "Is this the right folder, and the whole of it?",
) -> None:
    """UserError if more than a share of the data, by default `MAX_MISSING`, is missing.

    `problem` says in words what is missing, and where; `data` opens the message.
    """
    allowed = MAX_MISSING if share is None else share
    if missing > allowed * total:
        raise UserError(f"{data}{missing} of {total} {problem}; at most {100 * allowed:g} % of them may be. {remedy}")


# By data path.


def open_evaluation_images(
    data_path: str, split: str | None = None, download: bool = False, limits: ImageLimits = DEFAULT_LIMITS
) -> ImageSource:
    """The images of a data path: the named split, else the split `val` if there is one, else all images.

    The built-in scenes are those of CLIP training, with independent attributes.
    """
    if not data_path:
        raise UserError("--data_path is empty; give class folders, tar shards, a set such as cifar10:DIR, or scenes")
    if names_scenes(data_path):
        return Scenes(*parse_scenes_spec(data_path), split=split or "val", ties=INDEPENDENT)
    return open_images(data_path, split, download, default_split="val", limits=limits)


def file_record(path: Path) -> dict[str, str]:
    """Path and hash of a file, for a result file."""
    return {"path": str(path), "sha256": file_sha256(path)}

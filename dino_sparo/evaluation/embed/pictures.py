"""Embeddings -> the pictures of their images, read again, and a page with pictures."""

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dino_sparo.data.sources import CorruptImageError, ImageLimits, ImageSource, TableColumns, open_source
from dino_sparo.data.views import rgb_pixels
from dino_sparo.draw.figure import Band, Figure, Layout, Section, Tile, short_name
from dino_sparo.draw.html import save_page
from dino_sparo.draw.pixels import fit
from dino_sparo.evaluation.embed.store import Embeddings

logger = logging.getLogger(__name__)

PICTURE_HEIGHT, PICTURE_WIDTH = 160, 240  # pixels, at most
SHOWN_PARTS, SHOWN_IMAGES, PER_LINE = 50, 12, 6  # queries or groups on a page, images of a group, images in a line


@dataclass(frozen=True)
class Pictures:
    """The images of embeddings, on disk.

    Attributes:
        source: the images.
        embeddings: whose rows are shown.
        channels: that pictures show, as in `rgb_pixels`.
        has_moved: whether only the names of the files are those of the embeddings.
    """

    source: ImageSource
    embeddings: Embeddings
    channels: Sequence[int] = ()
    has_moved: bool = False

    def band(self, pairs: Iterable[tuple[int, float]]) -> Band:
        """The readable images of some rows, each with its similarity."""
        tiles = (self.tile(row, f"{similarity:.3f}") for row, similarity in pairs)
        return Band(tiles=[tile for tile in tiles if tile is not None])

    def tile(self, row: int, number: str = "") -> Tile | None:
        """The image of a row, with a number below it; None if the image is missing or unreadable.

        Unreadable images have no row, so the image's index in the source is the row or slightly more.
        """
        path, num_unreadable = self.embeddings.index["path"][row], self.embeddings.record["num_unreadable"]
        for place in range(row, min(row + num_unreadable + 1, len(self.source))):
            location = self.source.location(place)
            if location == path or (self.has_moved and Path(location).name == Path(path).name):
                with contextlib.suppress(CorruptImageError):
                    pixels = rgb_pixels(self.source.read(place), self.channels)
                    name = short_name(path)
                    notes = (number, name) if number else (name, "")
                    return Tile(fit(pixels, PICTURE_HEIGHT, PICTURE_WIDTH), path, notes=notes)
        return None


def open_pictures(
    embeddings: Embeddings, page: Path, data_path: str | None, channels: Sequence[int]
) -> Pictures | None:
    """The images of embeddings, by default at their old path; None, with a warning about `page`, if they are gone."""
    images = embeddings.record["images"]
    columns = TableColumns(*images.get("columns", ()))
    try:
        limits = ImageLimits(**embeddings.record["settings"].get("limits", {}))
        source = open_source(data_path or images["data_path"], images["split"], columns=columns, limits=limits)
    except ValueError as error:
        logger.warning("%s is not written: the images are gone (%s); --data_path says where they are now", page, error)
        return None
    return Pictures(source, embeddings, channels, has_moved=data_path is not None)


def save_found(
    title: str,
    explanation: str,
    sections: Sequence[Section],
    path: Path,
    record: Mapping[str, Any],
    per_line: int = PER_LINE,
) -> None:
    """Write a page of images that were found in embeddings, which the record describes."""
    embeddings = record["embeddings"]
    slots = f", slots {', '.join(map(str, embeddings['slots']['slots']))}" if embeddings.get("slots") else ""
    about = f"{embeddings['num_images']:,} images in {embeddings['folder']}; features: {embeddings['what']}{slots}"
    layout = Layout((PICTURE_HEIGHT, PICTURE_WIDTH), per_line=per_line)
    save_page(Figure(title, about, sections, layout, explanation=explanation, ends=None), path)

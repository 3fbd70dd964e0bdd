"""Looks at pairs -> one sheet: a row per pair, its image first, then a map per entity and per default token.

It looks like `evaluation/pictures.py`; `page.py` shows the same as a page.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from dino_sparo.evaluation.page import GAP, LINE, MARGIN, SOFT, Heading, Page, resized, wrap
from dino_sparo.image_text.map_tiles import draw_tiles, tiles_height, title_height
from dino_sparo.oc_clip.pictures.looks import GraphLook

TITLE = "What the entities of a caption look at"
TILE = 176  # pixels, side of a map
MAPS_PER_LINE = 8
CAPTION_SIZE = 18.0
ROW_GAP = 30  # pixels between rows
MIN_WIDTH = 900


@dataclass(frozen=True)
class Gallery:
    """What is shown.

    Attributes:
        model: a line about the model.
        source: a line about the pairs.
        weights: how a score is put together, a sentence.
        looks: pairs, one row each.
        pictures: (H, W, 3), the views of their images, square.
    """

    model: str
    source: str
    weights: str
    looks: list[GraphLook]
    pictures: list[UInt8[np.ndarray, "H W 3"]]


def draw_sheet(gallery: Gallery, path: Path) -> None:
    """Draw the sheet.

    Args:
        gallery: what to show.
        path: the PNG to write.

    Raises:
        ImportError: matplotlib is not installed.
    """
    columns = 1 + min(MAPS_PER_LINE, max(len(look.maps) for look in gallery.looks))
    width = max(MIN_WIDTH, columns * (TILE + GAP) - GAP)
    # The sentence on reading is the page's; here its first two are enough.
    reading = gallery.looks[0].reading
    paragraphs = [f"{gallery.model}  ·  {gallery.source}", ". ".join(reading.explanation.split(". ")[:2]) + "."]
    heading = Heading(width, TITLE, [*paragraphs, gallery.weights], ends=reading.ends)
    texts = [
        (wrap(look.pair.caption, width, CAPTION_SIZE, "bold"), wrap(numbers_of(look), width)) for look in gallery.looks
    ]
    heights = [
        _text_height(*text) + tiles_height(look.tiles, TILE, MAPS_PER_LINE)
        for text, look in zip(texts, gallery.looks, strict=True)
    ]
    page = Page(width + 2 * MARGIN, 2 * MARGIN + heading.height + sum(heights) + ROW_GAP * len(heights))
    heading.draw(page, MARGIN, MARGIN)
    y = MARGIN + heading.height + ROW_GAP
    for picture, text, look, height in zip(gallery.pictures, texts, gallery.looks, heights, strict=True):
        _draw_row(page, y, picture, *text, look)
        y += height + ROW_GAP
    page.save(path)


def numbers_of(look: GraphLook) -> str:
    """The score and those of the relations, a line."""
    return "  ·  ".join([f"score {look.score:.2f}", *look.relations_in_words])


def _text_height(caption: Sequence[str], numbers: Sequence[str]) -> int:
    """Of the caption and of the scores above a row's pictures."""
    return (LINE + 4) * len(caption) + LINE * len(numbers) + 6


def _draw_row(
    page: Page,
    y: int,
    picture: UInt8[np.ndarray, "H W 3"],
    caption: Sequence[str],
    numbers: Sequence[str],
    look: GraphLook,
) -> None:
    """One pair, its upper edge at y."""
    for number, line in enumerate(caption):
        page.text(MARGIN, y + 18 + (LINE + 4) * number, line, CAPTION_SIZE, weight="bold")
    for number, line in enumerate(numbers):
        page.text(MARGIN, y + (LINE + 4) * len(caption) + 14 + LINE * number, line, colour=SOFT)
    top = y + _text_height(caption, numbers)
    page.picture(MARGIN, top + title_height(look.tiles, TILE), resized(picture, TILE))
    draw_tiles(page, MARGIN + TILE + GAP, top, picture, look.tiles, TILE, MAPS_PER_LINE)

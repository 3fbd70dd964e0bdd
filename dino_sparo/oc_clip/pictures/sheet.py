"""Looks at pairs -> one sheet: a row per pair, its image first, then the tiles of `tiles.py`.

It looks like `draw/grids.py`; `page.py` shows the same as a page.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from dino_sparo.draw.sheet import GAP, LINE, MARGIN, NO_LETTER, SOFT, Heading, Page, drawable, resized, wrap
from dino_sparo.draw.tiles import Tile, draw_tiles, tiles_height, title_height
from dino_sparo.oc_clip.pictures.explain import RELATIONS_LEGEND, GraphLook
from dino_sparo.oc_clip.pictures.tiles import tiles_of, without_map

logger = logging.getLogger(__name__)

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
        default_tokens: whether the maps of the default tokens are shown.
    """

    model: str
    source: str
    weights: str
    looks: list[GraphLook]
    pictures: list[UInt8[np.ndarray, "H W 3"]]
    default_tokens: bool = False


def draw_sheet(gallery: Gallery, path: Path) -> None:
    """Draw the sheet.

    Args:
        gallery: what to show.
        path: the PNG to write.

    Raises:
        ImportError: matplotlib is not installed.
    """
    rows = [tiles_of(look, gallery.default_tokens) for look in gallery.looks]
    columns = 1 + min(MAPS_PER_LINE, max(map(len, rows)))
    width = max(MIN_WIDTH, columns * (TILE + GAP) - GAP)
    reading = gallery.looks[0].reading
    paragraphs = [f"{gallery.model}  ·  {gallery.source}", reading.summary]
    paragraphs += [RELATIONS_LEGEND] if any(look.sentences for look in gallery.looks) else []
    heading = Heading(width, TITLE, [*map(drawable, paragraphs), gallery.weights], ends=reading.ends)
    texts = [
        (wrap(drawable(look.pair.caption), width, CAPTION_SIZE, "bold"), wrap(drawable(numbers_of(look)), width))
        for look in gallery.looks
    ]
    captions = " ".join(look.pair.caption for look in gallery.looks)
    if lacking := sorted({letter for letter in captions if not letter.isspace() and drawable(letter) == NO_LETTER}):
        logger.info("the font of the sheet has no %s; the page shows such letters", " ".join(lacking))
    heights = [
        _text_height(*text) + tiles_height(tiles, TILE, MAPS_PER_LINE) for text, tiles in zip(texts, rows, strict=True)
    ]
    page = Page(width + 2 * MARGIN, 2 * MARGIN + heading.height + sum(heights) + ROW_GAP * len(rows))
    heading.draw(page, MARGIN, MARGIN)
    y = MARGIN + heading.height + ROW_GAP
    for picture, (caption, numbers), tiles, height in zip(gallery.pictures, texts, rows, heights, strict=True):
        _draw_row(page, y, picture, caption, numbers, tiles)
        y += height + ROW_GAP
    page.save(path)


def numbers_of(look: GraphLook) -> str:
    """The score and those of the relations, a line, and how many entities have no map."""
    relations = zip(look.sentences, look.relation_scores, look.turned_scores, strict=True)
    words = [f"{sentence}: {score:.2f}\u00a0({turned:.2f})" for sentence, score, turned in relations]
    return "  ·  ".join(filter(None, [f"score {look.score:.2f}", *words, without_map(look)]))


def _text_height(caption: Sequence[str], numbers: Sequence[str]) -> int:
    """Of the caption and of the scores above a row's pictures."""
    return (LINE + 4) * len(caption) + LINE * len(numbers) + 6


def _draw_row(
    page: Page,
    y: int,
    picture: UInt8[np.ndarray, "H W 3"],
    caption: Sequence[str],
    numbers: Sequence[str],
    tiles: Sequence[Tile],
) -> None:
    """One pair, its upper edge at y."""
    for number, line in enumerate(caption):
        page.text(MARGIN, y + 18 + (LINE + 4) * number, line, CAPTION_SIZE, weight="bold")
    for number, line in enumerate(numbers):
        page.text(MARGIN, y + (LINE + 4) * len(caption) + 14 + LINE * number, line, colour=SOFT)
    top = y + _text_height(caption, numbers)
    page.picture(MARGIN, top + title_height(tiles, TILE), resized(picture, TILE))
    draw_tiles(page, MARGIN + TILE + GAP, top, picture, tiles, TILE, MAPS_PER_LINE)

"""Looks at pairs -> one sheet: a row per pair, its image first, then a map per entity and per default token.

It looks like `evaluation/pictures.py`; `page.py` shows the same as a page.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from dino_sparo.evaluation.attention import overlay_levels
from dino_sparo.evaluation.page import (
    GAP,
    INK,
    LABEL_SIZE,
    MARGIN,
    SOFT,
    TEXT_SIZE,
    Heading,
    Page,
    resized,
    shorten,
    wrap,
)
from dino_sparo.oc_clip.pictures.looks import GraphLook

TITLE = "What the entities of a caption look at"
TILE = 176  # pixels, side of a map
MAPS_PER_LINE = 8
CAPTION_SIZE = 18.0
LINE = 20  # pixels between baselines
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


@dataclass(frozen=True)
class Tile:
    """A map and what stands around it.

    Attributes:
        title: above it.
        colour: of the title.
        notes: below it, left and right.
        picture: the map over its image.
    """

    title: str
    colour: str
    notes: tuple[str, str]
    picture: UInt8[np.ndarray, "H W 3"]


def draw_sheet(gallery: Gallery, path: Path) -> None:
    """Draw the sheet.

    Args:
        gallery: what to show.
        path: the PNG to write.

    Raises:
        ImportError: matplotlib is not installed.
    """
    rows = [tiles_of(look, picture) for look, picture in zip(gallery.looks, gallery.pictures, strict=True)]
    columns = 1 + min(MAPS_PER_LINE, max(len(tiles) for tiles in rows))
    width = max(MIN_WIDTH, columns * (TILE + GAP) - GAP)
    # The sentence on reading is the page's; here its first two are enough.
    reading = gallery.looks[0].reading
    paragraphs = [f"{gallery.model}  ·  {gallery.source}", ". ".join(reading.explanation.split(". ")[:2]) + "."]
    heading = Heading(width, TITLE, [*paragraphs, gallery.weights], ends=reading.ends)
    texts = [
        (wrap(look.pair.caption, width, CAPTION_SIZE, "bold"), wrap(numbers_of(look), width)) for look in gallery.looks
    ]
    heights = [_row_height(*text, tiles) for text, tiles in zip(texts, rows, strict=True)]
    page = Page(width + 2 * MARGIN, 2 * MARGIN + heading.height + sum(heights) + ROW_GAP * len(rows))
    heading.draw(page, MARGIN, MARGIN)
    y = MARGIN + heading.height + ROW_GAP
    for picture, (caption, numbers), tiles, height in zip(gallery.pictures, texts, rows, heights, strict=True):
        _draw_row(page, y, picture, caption, numbers, tiles)
        y += height + ROW_GAP
    page.save(path)


def tiles_of(look: GraphLook, picture: UInt8[np.ndarray, "H W 3"]) -> list[Tile]:
    """The maps of a look: of the entities, then of the default tokens."""
    shown = resized(picture, TILE)
    titles = [*look.graph.entities, *(f"default token {i + 1}" for i in range(len(look.default_shares)))]
    cosines = [f"cosine {cosine:.2f}" for cosine in look.cosines]
    return [
        Tile(
            title,
            INK if number < len(cosines) else SOFT,
            (cosines[number] if number < len(cosines) else "", look.reading.size(look.maps[number])),
            overlay_levels(shown, look.levels[number]),
        )
        for number, title in enumerate(titles)
    ]


def numbers_of(look: GraphLook) -> str:
    """The score and those of the relations, a line."""
    relations = zip(look.sentences, look.relation_scores, look.turned_scores, strict=True)
    words = [f"{sentence}: {score:.2f}, turned round {turned:.2f}" for sentence, score, turned in relations]
    return "  ·  ".join([f"score {look.score:.2f}", *words])


def _row_height(caption: Sequence[str], numbers: Sequence[str], tiles: Sequence[Tile]) -> int:
    num_lines = -(-len(tiles) // MAPS_PER_LINE)
    return _text_height(caption, numbers) + num_lines * _line_height(tiles) - GAP


def _text_height(caption: Sequence[str], numbers: Sequence[str]) -> int:
    """Of the caption and of the scores above a row's pictures."""
    return (LINE + 4) * len(caption) + LINE * len(numbers) + 6


def _titles(tiles: Sequence[Tile]) -> list[list[str]]:
    return [wrap(tile.title, TILE, TEXT_SIZE, "bold") for tile in tiles]


def _line_height(tiles: Sequence[Tile]) -> int:
    """Of a line of maps: titles, maps, numbers, and the gap below."""
    return LINE * max(map(len, _titles(tiles))) + TILE + 22 + GAP


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
    titles = _titles(tiles)
    title_height = LINE * max(map(len, titles))
    page.picture(MARGIN, top + title_height, resized(picture, TILE))
    for number, (tile, lines) in enumerate(zip(tiles, titles, strict=True)):
        row, column = divmod(number, MAPS_PER_LINE)
        x, above = MARGIN + (1 + column) * (TILE + GAP), top + row * _line_height(tiles) + title_height
        for above_last, line in enumerate(reversed(lines)):
            page.text(x, above - 7 - LINE * above_last, line, TEXT_SIZE, tile.colour, weight="bold")
        page.picture(x, above, tile.picture)
        left, right = tile.notes
        page.text(x, above + TILE + 16, left, LABEL_SIZE, SOFT)
        page.text(x + TILE, above + TILE + 16, shorten(right, TILE, LABEL_SIZE), LABEL_SIZE, SOFT, ha="right")

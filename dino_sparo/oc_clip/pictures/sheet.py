"""Looks at pairs -> one sheet: a row per pair, its image first, then the panels of `panels.py`.

It looks like `evaluation/pictures.py`; `page.py` shows the same as a page.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

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
from dino_sparo.oc_clip.pictures.looks import RELATIONS_LEGEND, GraphLook
from dino_sparo.oc_clip.pictures.panels import Panel, framed, panels_of, without_map

logger = logging.getLogger(__name__)

TITLE = "What the entities of a caption look at"
TILE = 176  # pixels, side of a map
MAPS_PER_LINE = 8
CAPTION_SIZE = 18.0
LINE = 20  # pixels between baselines
ROW_GAP = 30  # pixels between rows
MIN_WIDTH = 900
FRAME = 4  # pixels
NO_LETTER = "\u25af"  # for a letter that the font lacks


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
    rows = [
        panels_of(look, resized(picture, TILE), gallery.default_tokens)
        for look, picture in zip(gallery.looks, gallery.pictures, strict=True)
    ]
    columns = 1 + min(MAPS_PER_LINE, max(len(panels) for panels in rows))
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
    heights = [_row_height(*text, panels) for text, panels in zip(texts, rows, strict=True)]
    page = Page(width + 2 * MARGIN, 2 * MARGIN + heading.height + sum(heights) + ROW_GAP * len(rows))
    heading.draw(page, MARGIN, MARGIN)
    y = MARGIN + heading.height + ROW_GAP
    for picture, (caption, numbers), panels, height in zip(gallery.pictures, texts, rows, heights, strict=True):
        _draw_row(page, y, picture, caption, numbers, panels)
        y += height + ROW_GAP
    page.save(path)


def numbers_of(look: GraphLook) -> str:
    """The score and those of the relations, a line, and how many entities have no map."""
    relations = zip(look.sentences, look.relation_scores, look.turned_scores, strict=True)
    words = [f"{sentence}: {score:.2f}\u00a0({turned:.2f})" for sentence, score, turned in relations]
    return "  ·  ".join(filter(None, [f"score {look.score:.2f}", *words, without_map(look)]))


def drawable(words: str) -> str:
    """Words on one line, with `NO_LETTER` for every letter that the sheet's font lacks; the page shows them all."""
    one_line = re.sub(r"[\t\n\v\f\r]+", " ", words)
    return "".join(letter if ord(letter) in _letters() else NO_LETTER for letter in one_line)


@lru_cache(maxsize=1)
def _letters() -> frozenset[int]:
    """Code points of the font that `Page.text` draws with."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return frozenset(get_font(findfont(FontProperties())).get_charmap())


def _row_height(caption: Sequence[str], numbers: Sequence[str], panels: Sequence[Panel]) -> int:
    num_lines = -(-len(panels) // MAPS_PER_LINE)
    return _text_height(caption, numbers) + num_lines * _line_height(panels) - GAP


def _text_height(caption: Sequence[str], numbers: Sequence[str]) -> int:
    """Of the caption and of the scores above a row's pictures."""
    return (LINE + 4) * len(caption) + LINE * len(numbers) + 6


def _titles(panels: Sequence[Panel]) -> list[list[str]]:
    return [wrap(drawable(panel.title), TILE, TEXT_SIZE, "bold") for panel in panels]


def _line_height(panels: Sequence[Panel]) -> int:
    """Of a line of maps: titles, maps, numbers, and the gap below."""
    return LINE * max(map(len, _titles(panels))) + TILE + 22 + GAP


def _draw_row(
    page: Page,
    y: int,
    picture: UInt8[np.ndarray, "H W 3"],
    caption: Sequence[str],
    numbers: Sequence[str],
    panels: Sequence[Panel],
) -> None:
    """One pair, its upper edge at y."""
    for number, line in enumerate(caption):
        page.text(MARGIN, y + 18 + (LINE + 4) * number, line, CAPTION_SIZE, weight="bold")
    for number, line in enumerate(numbers):
        page.text(MARGIN, y + (LINE + 4) * len(caption) + 14 + LINE * number, line, colour=SOFT)
    top = y + _text_height(caption, numbers)
    titles = _titles(panels)
    title_height = LINE * max(map(len, titles))
    page.picture(MARGIN, top + title_height, resized(picture, TILE))
    for number, (panel, lines) in enumerate(zip(panels, titles, strict=True)):
        row, column = divmod(number, MAPS_PER_LINE)
        x, above = MARGIN + (1 + column) * (TILE + GAP), top + row * _line_height(panels) + title_height
        for place, line in enumerate(reversed(lines)):
            colour = INK if panel.kind in ("entity", "winner") else SOFT
            page.text(x, above - 7 - LINE * place, line, TEXT_SIZE, colour, weight="bold")
        page.picture(x, above, framed(panel, FRAME))
        left, right = panel.notes
        page.text(x, above + TILE + 16, left, LABEL_SIZE, SOFT)
        page.text(x + TILE, above + TILE + 16, shorten(right, TILE, LABEL_SIZE), LABEL_SIZE, SOFT, ha="right")

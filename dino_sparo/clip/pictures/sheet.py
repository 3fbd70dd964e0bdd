"""Looks of chosen slots at chosen pairs -> one sheet: a row per slot, a column per pair, words marked in each caption.

It looks like `draw/grids.py`; `page.py` shows the same as a page.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from dino_sparo.clip.pictures.concepts import Criteria, PairLook
from dino_sparo.clip.pictures.words import Word
from dino_sparo.draw.sheet import (
    GAP,
    LABEL_SIZE,
    MARGIN,
    PAPER,
    SOFT,
    TEXT_SIZE,
    Heading,
    Page,
    resized,
    text_width,
)
from dino_sparo.evaluation.attention.maps import overlay

MARK = (252, 176, 78)  # behind a word that gets all of a slot's attention; the maps' bright orange
# Rising quickly, as the maps' colours do: weak attention is to be seen too.
MARK_POWER = 0.6
ROW_LABEL = 136  # pixels, left of the pictures
COLUMN_WIDTH, LARGEST_HEIGHT = 280, 280  # pixels, of a picture
LINE, WORD_SIZE, WORD_PAD = 25, 15.0, 2  # pixels: between lines of a caption, size of its letters, mark around a word
TITLE = "Where slots look, in images and in captions"


@dataclass(frozen=True)
class Gallery:
    """What is shown.

    Attributes:
        model: a line about the model.
        source: a line about the pairs.
        rule: how slots and pairs were chosen, one sentence.
        criteria: the numbers in it.
        slots: numbers of slots, one row each.
        looks: pairs, one column each.
        pictures: (H, W, 3), the views of their images, of one size.
    """

    model: str
    source: str
    rule: str
    criteria: Criteria
    slots: list[int]
    looks: list[PairLook]
    pictures: list[UInt8[np.ndarray, "H W 3"]]


def mark_level(share: float) -> float:
    """How strongly a word is marked that gets a share of the attention, both in [0, 1]."""
    return float(np.clip(share, 0, 1) ** MARK_POWER)


def draw_sheet(gallery: Gallery, path: Path) -> None:
    """Draw the sheet.

    Args:
        gallery: what to show.
        path: the PNG to write.

    Raises:
        ImportError: matplotlib is not installed.
    """
    height = min(LARGEST_HEIGHT, round(COLUMN_WIDTH * gallery.pictures[0].shape[0] / gallery.pictures[0].shape[1]))
    shown = [resized(picture, height) for picture in gallery.pictures]
    width = max(picture.shape[1] for picture in shown)
    measure = partial(text_width, size=WORD_SIZE)
    layouts = [wrap_words(look.words, width, measure) for look in gallery.looks]
    text_height = LINE * max(len(lines) for lines in layouts)
    step_x, step_y = width + 2 * GAP, height + text_height + 20 + 3 * GAP
    page_width = max(2 * MARGIN + ROW_LABEL + step_x * len(shown) - 2 * GAP, 2 * MARGIN + 860)
    heading = Heading(page_width - 2 * MARGIN, TITLE, [f"{gallery.model}  ·  {gallery.source}"])
    top = MARGIN + heading.height + 14
    page = Page(page_width, top + height + 2 * GAP + step_y * len(gallery.slots) - 3 * GAP + MARGIN)
    heading.draw(page, MARGIN, MARGIN)
    _draw_marks(page, MARGIN + 530, MARGIN + heading.height - 10)
    page.text(MARGIN, top + height // 2 + 6, "image", 18.0, weight="bold")
    for column, picture in enumerate(shown):
        page.picture(MARGIN + ROW_LABEL + column * step_x, top, picture)
    for row, slot in enumerate(gallery.slots):
        y = top + height + 2 * GAP + row * step_y
        _draw_row_label(page, y + height // 2, slot, gallery.looks)
        for column, (look, picture, lines) in enumerate(zip(gallery.looks, shown, layouts, strict=True)):
            x = MARGIN + ROW_LABEL + column * step_x
            page.picture(x, y, overlay(picture, look.maps[slot]))
            _draw_caption(page, x, y + height + 7, look, slot, lines)
            _draw_numbers(page, x, y + height + 7 + text_height + 18, width, look, slot)
    page.save(path)


def wrap_words(
    words: Sequence[Word], width: int, measure: Callable[[str], float]
) -> list[list[tuple[int, float, float]]]:
    """Break a caption into lines: where there is a space, and within what is longer than a line.

    Args:
        words: of the caption.
        width: of a line, pixels.
        measure: text -> pixels.

    Returns:
        For every line its words: number, left end and width, pixels.
    """
    space = measure("a a") - measure("aa")
    widths = [measure(word.text) for word in words]
    lines: list[list[tuple[int, float, float]]] = [[]]
    x = 0.0
    for number, word in enumerate(words):
        ahead = widths[number]
        if word.has_space and lines[-1]:
            x += space
            # What follows without a space, such as a comma, goes to the same line.
            end = next((i for i in range(number + 1, len(words)) if words[i].has_space), len(words))
            ahead = sum(widths[number:end])
        if x + ahead > width and lines[-1]:
            lines.append([])
            x = 0.0
        lines[-1].append((number, x, widths[number]))
        x += widths[number]
    return lines


def _draw_marks(page: Page, x: int, y: int) -> None:
    """What the colours behind words say."""
    for share in (0.1, 0.25, 0.5, 1.0):
        page.panel(x, y - 4, 44, 19, _mark_colour(share))
        page.text(x + 22, y + 10, f"{100 * share:.0f}%", LABEL_SIZE, ha="center")
        x += 50
    page.text(x + 4, y + 10, "of the attention to a word", LABEL_SIZE, SOFT)


def _draw_row_label(page: Page, y: int, slot: int, looks: Sequence[PairLook]) -> None:
    """The slot's number, beside the middle of its pictures, and its mean cosine."""
    page.text(MARGIN, y - 2, f"slot {slot}", 18.0, weight="bold")
    cosine = float(np.mean([look.cosines[slot] for look in looks]))
    page.text(MARGIN, y + 22, f"mean cosine {cosine:.2f}", TEXT_SIZE, SOFT)


def _draw_caption(
    page: Page, x: int, y: int, look: PairLook, slot: int, lines: Sequence[Sequence[tuple[int, float, float]]]
) -> None:
    """A caption with its words marked; its upper left corner at (x, y)."""
    for number, line in enumerate(lines):
        base = y + LINE * number + 18
        for word, left, width in line:
            share = float(look.text.words[slot, word])
            colour = _mark_colour(share)
            if colour != PAPER:
                page.panel(round(x + left) - WORD_PAD, base - 16, round(width) + 2 * WORD_PAD, 22, colour)
            page.text(round(x + left), base, look.words[word].text, WORD_SIZE)


def _draw_numbers(page: Page, x: int, y: int, width: int, look: PairLook, slot: int) -> None:
    """The cosine of the pair's slots, and what the caption's start and end get of the attention."""
    page.text(x, y, f"cosine {look.cosines[slot]:.2f}", LABEL_SIZE, SOFT)
    ends = f"start {100 * look.text.start[slot]:.0f}%  ·  end {100 * look.text.end[slot]:.0f}%"
    page.text(x + width, y, ends, LABEL_SIZE, SOFT, ha="right")


def _mark_colour(share: float) -> str:
    """The colour behind a word, from the paper's to MARK."""
    level = mark_level(share)
    paper = [int(PAPER[i : i + 2], 16) for i in (1, 3, 5)]
    mixed = [round(white + level * (full - white)) for white, full in zip(paper, MARK, strict=True)]
    return "#{:02x}{:02x}{:02x}".format(*mixed)

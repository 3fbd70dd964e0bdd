"""Maps over an image with words around them, as tiles of a sheet and as figures of a page.

What every picture of pairs shows of a model with several maps: `oc_clip/pictures/`, and the errors of
`evaluation/compositional/`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from jaxtyping import Float, UInt8

from dino_sparo.evaluation.attention import overlay_levels
from dino_sparo.evaluation.html_page import switchable_image
from dino_sparo.evaluation.page import (
    GAP,
    INK,
    LABEL_SIZE,
    LINE,
    SOFT,
    TEXT_SIZE,
    Page,
    fitted,
    shorten,
    text_width,
    wrap,
)

NOTES, NOTE_GAP = 22, 8  # pixels, height of the notes below a map, and what lies between them

# Of pages with these figures, after `FIGURES_STYLE`: titles of several lines stand on the maps.
TILE_STYLE = """
figcaption { font-weight: 600; margin: 0 0 6px; min-height: 3em; display: flex; align-items: flex-end; }
.soft figcaption { color: var(--soft); font-weight: 400; }
"""


@dataclass(frozen=True)
class MapTile:
    """A map and what stands around it.

    Attributes:
        title: above it: whose map it is.
        levels: (h, w), on the scale of colours: 0 no colour, 1 the strongest.
        notes: below it, left and right.
        is_soft: whether it matters less than others.
        smooth: whether levels are interpolated between patches.
    """

    title: str
    levels: Float[np.ndarray, "h w"]
    notes: tuple[str, str]
    is_soft: bool = False
    smooth: bool = True


def title_height(tiles: Sequence[MapTile], side: int) -> int:
    """Height of the titles above maps that are `side` pixels wide."""
    return LINE * max(len(_title(tile, side)) for tile in tiles)


def tiles_height(tiles: Sequence[MapTile], side: int, per_line: int) -> int:
    """Height of a block of tiles; 0 where there are none.

    Args:
        tiles: in their order.
        side: pixels, of a map.
        per_line: tiles beside one another.
    """
    return -(-len(tiles) // per_line) * _line_height(tiles, side) - GAP if tiles else 0


def draw_tiles(
    page: Page, x: int, y: int, picture: UInt8[np.ndarray, "H W 3"], tiles: Sequence[MapTile], side: int, per_line: int
) -> None:
    """A block of tiles with its upper left corner at (x, y).

    Args:
        page: to draw on.
        x: pixels.
        y: likewise.
        picture: what the maps lie over.
        tiles: in their order.
        side: pixels, of a map.
        per_line: tiles beside one another.
    """
    shown = fitted(picture, side, side)
    for number, tile in enumerate(tiles):
        row, column = divmod(number, per_line)
        left = x + column * (side + GAP)
        top = y + row * _line_height(tiles, side) + title_height(tiles, side)
        for above, line in enumerate(reversed(_title(tile, side))):
            page.text(left, top - 7 - LINE * above, line, TEXT_SIZE, SOFT if tile.is_soft else INK, weight="bold")
        page.picture(left, top, overlay_levels(shown, tile.levels, tile.smooth))
        first, second = tile.notes
        page.text(left, top + side + 16, first, LABEL_SIZE, SOFT)
        room = side - math.ceil(text_width(first, LABEL_SIZE) + NOTE_GAP if first else 0)
        page.text(left + side, top + side + 16, shorten(second, room, LABEL_SIZE), LABEL_SIZE, SOFT, ha="right")


def tile_figure(picture: UInt8[np.ndarray, "H W 3"], tile: MapTile, name: str) -> str:
    """A tile as HTML: an image that a click switches between itself and the map.

    Args:
        picture: what the map lies over.
        tile: the map.
        name: of the image.
    """
    title = escape(tile.title, quote=True)
    notes = "".join(f"<div><dd>{escape(note)}</dd></div>" for note in tile.notes if note)
    image = switchable_image(picture, overlay_levels(picture, tile.levels, tile.smooth), name, title)
    return (
        f'<figure class="{"soft" if tile.is_soft else "main"}"><figcaption>{title}</figcaption>{image}\n'
        f"<dl>{notes}</dl></figure>"
    )


def _title(tile: MapTile, side: int) -> list[str]:
    return wrap(tile.title, side, TEXT_SIZE, "bold")


def _line_height(tiles: Sequence[MapTile], side: int) -> int:
    """Of a line of tiles: titles, maps, notes, and the gap below."""
    return title_height(tiles, side) + side + NOTES + GAP

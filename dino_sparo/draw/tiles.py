"""Maps over an image with words around them, as tiles of a sheet and as figures of a page.

What every picture of pairs shows of a model with several maps: `oc_clip/pictures/`, and the errors of
`evaluation/compositional/`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape

import numpy as np
from jaxtyping import Float, UInt8
from PIL import ImageColor

from dino_sparo.draw.html import switchable_image
from dino_sparo.draw.sheet import (
    GAP,
    INK,
    LABEL_SIZE,
    LINE,
    SOFT,
    TEXT_SIZE,
    Page,
    drawable,
    fitted,
    shorten,
    text_width,
    wrap,
)
from dino_sparo.evaluation.attention.maps import overlay_levels

NOTES, NOTE_GAP = 22, 8  # pixels, height of the notes below a map, and what lies between them
FRAME = 4  # pixels

# Of pages with these figures, after `FIGURES_STYLE`: titles of several lines stand on the maps.
TILE_STYLE = """
figcaption { font-weight: 600; margin: 0 0 6px; min-height: 3em; display: flex; align-items: flex-end; }
.soft figcaption { color: var(--soft); font-weight: 400; }
.framed .shot { border: 3px solid var(--frame); }
"""

Picture = UInt8[np.ndarray, "H W 3"]


@dataclass(frozen=True)
class Tile:
    """What is painted on an image, and what stands around it.

    Attributes:
        title: above it: whose map it is.
        paint: the image at the size to show -> the same with the map on it.
        notes: below it, left and right.
        is_soft: whether it matters less than others.
        frame: its colour; None: without one.
    """

    title: str
    paint: Callable[[Picture], Picture]
    notes: tuple[str, str]
    is_soft: bool = False
    frame: str | None = None


def map_tile(
    title: str,
    levels: Float[np.ndarray, "h w"],
    notes: tuple[str, str],
    is_soft: bool = False,
    frame: str | None = None,
    smooth: bool = True,
) -> Tile:
    """The tile of a map.

    Args:
        title: as of `Tile`.
        levels: (h, w), on the scale of colours: 0 no colour, 1 the strongest.
        notes: as of `Tile`.
        is_soft: likewise.
        frame: likewise.
        smooth: whether levels are interpolated between patches.
    """
    return Tile(title, partial(overlay_levels, levels=levels, smooth=smooth), notes, is_soft, frame)


def framed(picture: Picture, colour: str | None) -> Picture:
    """A picture with a frame of a colour inside its edges, `FRAME` pixels wide; None: without one."""
    if colour is None:
        return picture
    shown = np.empty_like(picture)
    shown[:] = ImageColor.getrgb(colour)
    shown[FRAME:-FRAME, FRAME:-FRAME] = picture[FRAME:-FRAME, FRAME:-FRAME]
    return shown


def title_height(tiles: Sequence[Tile], side: int) -> int:
    """Height of the titles above maps that are `side` pixels wide."""
    return LINE * max(len(_title(tile, side)) for tile in tiles)


def tiles_height(tiles: Sequence[Tile], side: int, per_line: int) -> int:
    """Height of a block of tiles; 0 where there are none.

    Args:
        tiles: in their order.
        side: pixels, of a map.
        per_line: tiles beside one another.
    """
    return -(-len(tiles) // per_line) * _line_height(tiles, side) - GAP if tiles else 0


def draw_tiles(page: Page, x: int, y: int, picture: Picture, tiles: Sequence[Tile], side: int, per_line: int) -> None:
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
        page.picture(left, top, framed(tile.paint(shown), tile.frame))
        first, second = tile.notes
        page.text(left, top + side + 16, first, LABEL_SIZE, SOFT)
        room = side - math.ceil(text_width(first, LABEL_SIZE) + NOTE_GAP if first else 0)
        page.text(left + side, top + side + 16, shorten(second, room, LABEL_SIZE), LABEL_SIZE, SOFT, ha="right")


def tile_figure(picture: Picture, tile: Tile, name: str) -> str:
    """A tile as HTML: an image that a click switches between itself and the map.

    Args:
        picture: what the map lies over.
        tile: the map.
        name: of the image.
    """
    title = escape(tile.title, quote=True)
    notes = "".join(f"<div><dd>{escape(note)}</dd></div>" for note in tile.notes if note)
    image = switchable_image(picture, tile.paint(picture), name, title)
    kinds = " ".join(kind for kind, holds in (("soft", tile.is_soft), ("framed", tile.frame)) if holds)
    frame = f' style="--frame: {tile.frame}"' if tile.frame else ""
    return f'<figure class="{kinds}"{frame}><figcaption>{title}</figcaption>{image}\n<dl>{notes}</dl></figure>'


def _title(tile: Tile, side: int) -> list[str]:
    return wrap(drawable(tile.title), side, TEXT_SIZE, "bold")


def _line_height(tiles: Sequence[Tile], side: int) -> int:
    """Of a line of tiles: titles, maps, notes, and the gap below."""
    return title_height(tiles, side) + side + NOTES + GAP

"""Words, pictures and panels -> one sheet in pixels, saved as PNG: what every figure of maps is drawn on.

`draw/grids.py` draws with it. Every picture keeps its pixels as they are; matplotlib (the extra `plots`) writes the
words. Widths of words are measured, so that a figure can make room before it is drawn.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from dino_sparo.evaluation.attention.maps import ramp
from dino_sparo.runtime.extras import require

DPI = 100
INK, SOFT, PAPER = "#16161d", "#74747f", "#ffffff"
PANEL = "#ece8f6"  # behind near-duplicates
MARGIN, GAP = 36, 12  # pixels: around the page, between tiles
TITLE_SIZE, TEXT_SIZE, LABEL_SIZE = 21.0, 13.0, 11.5  # pixels
LABEL = 19  # pixels, height of a line of a tile's label
PAGE_WIDTH = 1600  # pixels, about
TILE_HEIGHTS = (96, 320)  # pixels, smallest and largest
ASPECT = 1.7  # of a page's block of tiles, width to height, as a slide's
LINE = 20  # pixels between the baselines of a paragraph
RAMP_WIDTH, RAMP_HEIGHT = 150, 10  # pixels
RAMP_ENDS = ("even share of attention or less", "most")
ELLIPSIS = "…"
NO_LETTER = "\u25af"  # for a letter that the font lacks


def require_matplotlib() -> None:
    """Refuse to go on without matplotlib, before anything has been computed.

    Raises:
        MissingPackageError: it is not installed.
    """
    require("matplotlib", "figures")


class Page:
    """A sheet of paper in pixels, x to the right, y downwards.

    Raises:
        ImportError: matplotlib is not installed.
    """

    def __init__(self, width: int, height: int) -> None:
        require_matplotlib()
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import FancyBboxPatch
        from matplotlib.transforms import IdentityTransform

        self.width, self.height = width, height
        self.figure: Any = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor=PAPER)
        FigureCanvasAgg(self.figure)
        self._box, self._pixels = FancyBboxPatch, IdentityTransform()

    def text(
        self,
        x: int,
        y: int,
        words: str,
        size: float = TEXT_SIZE,
        colour: str = INK,
        weight: str = "normal",
        **where: Any,
    ) -> None:
        """Words with their left end (or as `where` says) at x and their baseline at y; `size` in pixels."""
        # Names of files may hold dollar signs, which would start mathematics.
        where = {"transform": self._pixels, "parse_math": False, **where}
        self.figure.text(x, self.height - y, words, fontsize=size * 72 / DPI, color=colour, weight=weight, **where)

    def picture(self, x: int, y: int, pixels: UInt8[np.ndarray, "H W 3"]) -> None:
        """A picture with its upper left corner at (x, y)."""
        self.figure.figimage(pixels, x, self.height - y - pixels.shape[0], origin="upper")

    def panel(self, x: int, y: int, width: int, height: int, colour: str = PANEL) -> None:
        """A rounded rectangle, behind all pictures."""
        style: dict[str, Any] = {"boxstyle": "round,pad=0,rounding_size=7", "facecolor": colour, "edgecolor": "none"}
        style |= {"transform": self._pixels, "zorder": -1}
        self.figure.add_artist(self._box((x, self.height - y - height), width, height, **style))

    def legend(self, x: int, y: int, ends: tuple[str, str] = RAMP_ENDS) -> int:
        """The colours of the maps as a bar between the words for its ends; the bar's upper edge is at y.

        Returns:
            Its width, pixels.
        """
        low, high = (math.ceil(text_width(words, LABEL_SIZE)) for words in ends)
        self.text(x, y + RAMP_HEIGHT, ends[0], LABEL_SIZE, SOFT)
        self.picture(x + low + 10, y, ramp_picture())
        self.text(x + low + RAMP_WIDTH + 20, y + RAMP_HEIGHT, ends[1], LABEL_SIZE, SOFT)
        return low + RAMP_WIDTH + 20 + high

    def save(self, path: Path) -> None:
        """Write a PNG of exactly the page's size."""
        self.figure.savefig(path, dpi=DPI, facecolor=PAPER)


def ramp_picture() -> UInt8[np.ndarray, "height width 3"]:
    """The colours of a map over grey, from an even share of attention to the most."""
    level = np.linspace(0, 1, RAMP_WIDTH, dtype=np.float32)
    cover = np.sqrt(level)[None, :, None]
    grey = np.full((RAMP_HEIGHT, RAMP_WIDTH, 3), 128, dtype=np.float32)
    return (grey * (1 - cover) + ramp(level)[None] * cover).astype(np.uint8)


class Heading:
    """A title, paragraphs in smaller letters and perhaps the colours' legend, broken into lines of a width.

    Args:
        width: of the lines, pixels; a title that is longer loses its middle.
        title: one line.
        paragraphs: of any length.
        has_legend: whether the legend stands below.
        ends: the words beside its colours.

    Attributes:
        height: pixels.
    """

    def __init__(
        self,
        width: int,
        title: str,
        paragraphs: Sequence[str],
        has_legend: bool = True,
        ends: tuple[str, str] = RAMP_ENDS,
    ) -> None:
        self.ends = ends
        self.title = shorten(title, width, TITLE_SIZE, "bold")
        self.lines: list[tuple[int, str]] = []  # baseline, words
        base = 20
        for paragraph in paragraphs:
            base += 6
            for line in wrap(paragraph, width):
                base += LINE
                self.lines.append((base, line))
        self.legend_top = base + 16 if has_legend else None
        self.height = base + 26 if has_legend else base + 4

    def draw(self, page: Page, x: int, y: int) -> None:
        """Draw it with its upper left corner at (x, y)."""
        page.text(x, y + 20, self.title, TITLE_SIZE, weight="bold")
        for base, line in self.lines:
            page.text(x, y + base, line, colour=SOFT)
        if self.legend_top is not None:
            page.legend(x, y + self.legend_top, self.ends)


@dataclass(frozen=True)
class Tiles:
    """How a block of equal tiles with labels is laid out.

    Attributes:
        columns: tiles per row.
        rows: rows.
        height: of a tile's picture.
        width: likewise.
        lines: of a label: 1 where its two parts stand side by side, 2 where one stands below the other.
        cell: width of a tile, its label included.
    """

    columns: int
    rows: int
    height: int
    width: int
    lines: int
    cell: int

    @classmethod
    def fit(cls, labels: Sequence[tuple[str, str]], aspect: float) -> "Tiles":
        """Tiles for pictures of width / height `aspect`, so that the block has about a slide's shape."""
        count = len(labels)
        # Near to a slide's shape, and few places left empty in the last row.
        columns = min(
            range(1, count + 1),
            key=lambda n: abs(math.log(n * aspect / -(-count // n) / ASPECT)) + (-count % n) / count,
        )
        width = (PAGE_WIDTH - 2 * MARGIN + GAP) / columns - GAP
        height = min(max(round(width / aspect), TILE_HEIGHTS[0]), TILE_HEIGHTS[1])
        return cls.with_room(labels, columns, height, max(1, round(height * aspect)))

    @classmethod
    def with_room(cls, labels: Sequence[tuple[str, str]], columns: int, height: int, width: int) -> "Tiles":
        """Tiles of a given size and number per row, wide enough for their labels."""
        sizes = [(text_width(name, LABEL_SIZE, "bold"), text_width(numbers, LABEL_SIZE)) for name, numbers in labels]
        side_by_side = max(name + numbers + GAP for name, numbers in sizes)
        lines = 1 if side_by_side <= width else 2
        cell = width if lines == 1 else max(width, math.ceil(max(map(max, sizes))))
        return cls(columns, -(-len(labels) // columns), height, width, lines, cell)

    @property
    def label(self) -> int:
        """Height of a label."""
        return self.lines * LABEL - 4 * (self.lines - 1)

    @property
    def block_width(self) -> int:
        """Without margins."""
        return self.columns * (self.cell + GAP) - GAP

    @property
    def block_height(self) -> int:
        """Without margins."""
        return self.rows * (self.height + self.label + GAP) - GAP

    def corner(self, index: int) -> tuple[int, int]:
        """Where the label of a tile begins, relative to the block."""
        row, column = divmod(index, self.columns)
        return column * (self.cell + GAP), row * (self.height + self.label + GAP)

    def draw_label(self, page: Page, x: int, y: int, name: str, numbers: str) -> None:
        """A tile's label with its upper left corner at (x, y)."""
        page.text(x, y + LABEL - 6, name, LABEL_SIZE, weight="bold")
        if self.lines == 1:
            page.text(x + self.width, y + LABEL - 6, numbers, LABEL_SIZE, SOFT, ha="right")
        else:
            page.text(x, y + self.label - 6, numbers, LABEL_SIZE, SOFT)


@lru_cache(maxsize=4096)
def text_width(words: str, size: float = TEXT_SIZE, weight: str = "normal") -> float:
    """How wide words are on a `Page`, pixels; arguments as of `Page.text`."""
    from matplotlib.font_manager import FontProperties

    font = FontProperties(size=size * 72 / DPI, weight=weight)
    return float(_renderer().get_text_width_height_descent(words, font, False)[0])


@lru_cache(maxsize=1)
def _renderer() -> Any:
    # The font at hand decides, so the renderer is asked that will draw.
    return Page(1, 1).figure.canvas.get_renderer()


def drawable(words: str) -> str:
    """Words on one line, with `NO_LETTER` for every letter that the font of a `Page` lacks."""
    one_line = re.sub(r"[\t\n\v\f\r]+", " ", words)
    return "".join(letter if ord(letter) in _letters() else NO_LETTER for letter in one_line)


@lru_cache(maxsize=1)
def _letters() -> frozenset[int]:
    """Code points of the font that `Page.text` draws with."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return frozenset(get_font(findfont(FontProperties())).get_charmap())


def shorten(words: str, width: int, size: float = TEXT_SIZE, weight: str = "normal") -> str:
    """Words that fit a width: where they are too long, an ellipsis stands for their middle."""
    if text_width(words, size, weight) <= width:
        return words
    # Bisected: a word of thousands of letters is measured a dozen times, not once per letter.
    fits, too_many = 1, len(words)
    while too_many - fits > 1:
        letters = (fits + too_many) // 2
        if text_width(_without_middle(words, letters), size, weight) <= width:
            fits = letters
        else:
            too_many = letters
    return _without_middle(words, fits)


def _without_middle(words: str, letters: int) -> str:
    """The first and last letters of words, `letters` in all, around an ellipsis."""
    return words[: letters - letters // 2] + ELLIPSIS + words[len(words) - letters // 2 :]


def wrap(words: str, width: int, size: float = TEXT_SIZE, weight: str = "normal") -> list[str]:
    """Break words into lines of a width at their spaces; what is longer than a line loses its middle."""
    lines: list[str] = []
    for word in words.split(" "):
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, size, weight) <= width:
            lines[-1] = longer
        else:
            lines.append(shorten(word, width, size, weight))
    return lines


def resized(picture: UInt8[np.ndarray, "_ _ 3"], height: int) -> UInt8[np.ndarray, "_ _ 3"]:
    """A picture at another height, its aspect ratio kept."""
    width = max(1, round(picture.shape[1] * height / picture.shape[0]))
    return np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.LANCZOS))


def fitted(picture: UInt8[np.ndarray, "_ _ 3"], height: int, width: int) -> UInt8[np.ndarray, "_ _ 3"]:
    """A picture as large as it can be within a height and a width, its aspect ratio kept."""
    return resized(picture, max(1, min(height, round(width * picture.shape[0] / picture.shape[1]))))

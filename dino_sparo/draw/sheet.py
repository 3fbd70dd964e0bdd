"""Figure -> one sheet: PNG, PDF or SVG, as the ending of the file says.

matplotlib (the extra `plots`) writes the words; a PNG keeps every picture's pixels as they are. Words are measured
before they get their place, so that pictures of any shape leave room for them. Sizes are in pixels.
"""

import logging
import math
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from dino_sparo.draw.figure import Band, Figure, Layout, Section, Tile, Word, runs_of_words
from dino_sparo.draw.pixels import fitted, framed, ramp
from dino_sparo.runtime.faults import require

logger = logging.getLogger(__name__)

DPI = 100
INK, SOFT, PAPER = "#16161d", "#74747f", "#ffffff"
PANEL = "#ece8f6"  # behind near-duplicates
LABEL_COLOURS = {"": INK, "true": "#1a7f37", "false": "#c0322b"}
MARGIN, GAP = 36, 12  # around the sheet, between tiles and words
ASPECT = 1.7  # of a flowing sheet, width to height, as a slide's
MIN_WIDTH = 860  # of headings, so that sentences are not broken into many lines
TITLE_SIZE, HEADING_SIZE, WORD_SIZE, TEXT_SIZE, LABEL_SIZE = 21.0, 17.0, 15.0, 13.0, 11.5
LINE, HEADING_LINE, NOTES = 20, 25, 22  # between baselines of paragraphs and of headings; height of notes
LABEL_WIDTH = 124  # of a band's label, before its heading
MIN_CELL, MAX_CELL = 76, 130  # of a tile with its words, where its picture is narrower
ABOUT, BAND_GAP, SECTION_GAP = 26, 20, 34  # height of a line above bands; between bands and between sections
RAMP_WIDTH, RAMP_HEIGHT = 150, 10
ELLIPSIS = "…"
NO_LETTER = "\u25af"  # for a letter that the font lacks


def require_matplotlib() -> None:
    """Refuse to start without matplotlib, before anything has been computed; raises MissingPackageError."""
    require("matplotlib", "figures")


def save_sheet(figure: Figure, path: Path) -> None:
    """Draw a figure; the ending of `path` says in which format. Raises ImportError if matplotlib is not installed."""
    layout = figure.layout
    parts = [_SectionLayout(section, layout) for section in figure.sections]
    tiles_width = max(part.tiles_width for part in parts)
    columns = _num_columns(parts, layout.side + tiles_width) if layout.is_flowing else 1
    has_words = any(part.has_words for part in parts)
    content = max(tiles_width, (MIN_WIDTH if has_words or columns == 1 else 0) - layout.side)
    step = layout.side + content + MARGIN
    heading = _Heading(figure, max(columns * step - MARGIN, MIN_WIDTH))
    rows = -(-len(parts) // columns)
    stacks = [parts[start : start + rows] for start in range(0, len(parts), rows)]
    heights = [[part.measure(content) for part in stack] for stack in stacks]
    gap = GAP if layout.is_flowing else SECTION_GAP
    top = MARGIN + heading.height + SECTION_GAP
    bottom = top + max(sum(stack) + gap * (len(stack) - 1) for stack in heights)
    sheet = Sheet(heading.width + 2 * MARGIN, bottom + MARGIN)
    heading.draw(sheet, MARGIN, MARGIN)
    for column, (stack, stack_heights) in enumerate(zip(stacks, heights, strict=True)):
        y = top
        for part, height in zip(stack, stack_heights, strict=True):
            part.draw(sheet, MARGIN + column * step, y, content)
            y += height + gap
    sheet.save(path)


def _num_columns(parts: Sequence["_SectionLayout"], width: int) -> int:
    """Columns of sections that give about a slide's shape."""
    height = sum(part.measure(width) + GAP for part in parts)
    columns = max(1, round(math.sqrt(height * ASPECT / (width + MARGIN))))
    rows = -(-len(parts) // columns)
    return -(-len(parts) // rows)


class Sheet:
    """A sheet of paper in pixels, x to the right, y downwards. Raises ImportError if matplotlib is not installed."""

    def __init__(self, width: int, height: int) -> None:
        require_matplotlib()
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import FancyBboxPatch
        from matplotlib.transforms import Affine2D

        self.width, self.height = width, height
        self.figure: Any = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor=PAPER)
        FigureCanvasAgg(self.figure)
        # A pixel stays a hundredth of an inch in formats that have no pixels.
        self._box, self._pixels = FancyBboxPatch, Affine2D().scale(1 / DPI) + self.figure.dpi_scale_trans
        self._missing: set[str] = set()

    def text(
        self,
        x: int,
        y: int,
        words: str,
        size: float = TEXT_SIZE,
        colour: str = INK,
        weight: str = "normal",
        align: str = "left",
    ) -> None:
        """Words with their left end (or as `align` says) at x and their baseline at y; `size` in pixels."""
        shown = drawable(words)
        self._missing |= {letter for letter in words if not letter.isspace() and ord(letter) not in _letters()}
        # Names of files may hold dollar signs, which would start mathematics.
        where = {"transform": self._pixels, "parse_math": False, "ha": align}
        self.figure.text(x, self.height - y, shown, fontsize=size * 72 / DPI, color=colour, weight=weight, **where)

    def words(self, x: int, y: int, words: Sequence[Word], size: float = WORD_SIZE, weight: str = "normal") -> int:
        """Words side by side, their colours behind them; returns where they end."""
        space = text_width("a a", size, weight) - text_width("aa", size, weight)
        left = float(x)
        for number, run in enumerate(runs_of_words(words)):
            text = "".join(" " * (word.has_space and i > 0) + word.text for i, word in enumerate(run))
            left += space * (run[0].has_space and number > 0)
            width = text_width(text, size, weight)
            if run[0].level > 0:
                self.panel(round(left) - 2, y - round(size) - 1, round(width) + 4, round(1.5 * size), _mixed(run[0]))
            self.text(round(left), y, text, size, weight=weight)
            left += width
        return math.ceil(left)

    def picture(self, x: int, y: int, pixels: UInt8[np.ndarray, "H W 3"]) -> None:
        """A picture with its upper left corner at (x, y)."""
        self.figure.figimage(pixels, x, self.height - y - pixels.shape[0], origin="upper")

    def panel(self, x: int, y: int, width: int, height: int, colour: str = PANEL) -> None:
        """A rounded rectangle, behind all pictures."""
        style: dict[str, Any] = {"boxstyle": "round,pad=0,rounding_size=7", "facecolor": colour, "edgecolor": "none"}
        style |= {"transform": self._pixels, "zorder": -1}
        self.figure.add_artist(self._box((x, self.height - y - height), width, height, **style))

    def save(self, path: Path) -> None:
        """Write the file; the same figure gives the same bytes."""
        if self._missing:
            logger.info("the font of the sheet has no %s; the page shows such letters", " ".join(sorted(self._missing)))
        save_figure(self.figure, path)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib, without the date and without random names."""
    from matplotlib import rc_context

    undated = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
    with rc_context({"svg.hashsalt": "dino_sparo"}):
        figure.savefig(path, dpi=figure.dpi, facecolor=PAPER, metadata=undated.get(path.suffix))


def _mixed(word: Word) -> str:
    """The colour behind a word on paper."""
    return "#{:02x}{:02x}{:02x}".format(*(round(255 + word.level * (channel - 255)) for channel in word.colour))


class _Heading:
    """Title, paragraphs in smaller letters and the legend of colours, broken into lines of a width."""

    def __init__(self, figure: Figure, width: int) -> None:
        self.figure, self.width = figure, width
        self.title = shorten(figure.title, width, TITLE_SIZE, "bold")
        self.lines: list[tuple[int, str]] = []  # baseline, words
        base = 20
        for paragraph in filter(None, (figure.about, *figure.summary)):
            base += 6
            for line in wrap(paragraph, width):
                base += LINE
                self.lines.append((base, line))
        self.legend_top = base + 16
        self.height = base + (4 if figure.ends is None else 26)

    def draw(self, sheet: Sheet, x: int, y: int) -> None:
        """Draw it with its upper left corner at (x, y)."""
        sheet.text(x, y + 20, self.title, TITLE_SIZE, weight="bold")
        for base, line in self.lines:
            sheet.text(x, y + base, line, colour=SOFT)
        if self.figure.ends is not None:
            self._draw_legend(sheet, x, y + self.legend_top, self.figure.ends)

    def _draw_legend(self, sheet: Sheet, x: int, y: int, ends: tuple[str, str]) -> None:
        """The colours of the maps as a bar between the words for its ends, then the colours of words."""
        low, high = (math.ceil(text_width(words, LABEL_SIZE)) for words in ends)
        sheet.text(x, y + RAMP_HEIGHT, ends[0], LABEL_SIZE, SOFT)
        sheet.picture(x + low + 10, y, _ramp_picture())
        sheet.text(x + low + RAMP_WIDTH + 20, y + RAMP_HEIGHT, ends[1], LABEL_SIZE, SOFT)
        end = x + low + RAMP_WIDTH + 20 + high
        for word in self.figure.legend:
            end = sheet.words(end + 2 * GAP - 6, y + RAMP_HEIGHT, [word], LABEL_SIZE)


def _ramp_picture() -> UInt8[np.ndarray, "height width 3"]:
    """The colours of a map over grey, from an even share of attention to the most."""
    level = np.linspace(0, 1, RAMP_WIDTH, dtype=np.float32)
    cover = np.sqrt(level)[None, :, None]
    grey = np.full((RAMP_HEIGHT, RAMP_WIDTH, 3), 128, dtype=np.float32)
    return (grey * (1 - cover) + ramp(level)[None] * cover).astype(np.uint8)


class _SectionLayout:
    """A section with its tiles laid out: how wide and how high it is, and how it is drawn."""

    def __init__(self, section: Section, layout: Layout) -> None:
        self.section, self.layout = section, layout
        self.blocks = [_Block(band.tiles, layout) for band in section.bands]
        self.tiles_width = max((block.width for block in self.blocks), default=0)
        self.has_words = bool(section.about) or any(band.heading or band.lines for band in section.bands)
        picture, side = section.picture, layout.side - 2 * GAP
        self.picture = None if picture is None else fitted(picture.picture, side, side)

    def measure(self, width: int) -> int:
        """Height where lines have a width."""
        bands = zip(self.section.bands, self.blocks, strict=True)
        heights = [self._above(band, width) + block.height for band, block in bands]
        height = ABOUT * bool(self.section.about) + sum(heights) + BAND_GAP * (len(heights) - 1)
        name = LINE * (1 + len(self.section.facts)) if self.section.name else 0
        return max(height, name, 0 if self.picture is None else self.picture.shape[0])

    def _above(self, band: Band, width: int) -> int:
        """Height of a band's words."""
        heading = HEADING_LINE * len(_heading_lines(band, width)) if band.heading else 0
        lines = LINE * len(_lines(band, width))
        return heading + lines + 6 * bool((heading or lines) and band.tiles)

    def draw(self, sheet: Sheet, x: int, y: int, width: int) -> None:
        """Draw it with its upper left corner at (x, y)."""
        if self.picture is not None:
            sheet.picture(x, y, self.picture)
        if self.section.name:
            self._draw_name(sheet, x, y)
        left = x + self.layout.side
        if self.section.about:
            sheet.text(left, y + 13, shorten(self.section.about, width), colour=SOFT)
            y += ABOUT
        for band, block in zip(self.section.bands, self.blocks, strict=True):
            above = self._above(band, width)
            _draw_words(sheet, left, y, band, width)
            block.draw(sheet, left, y + above)
            y += above + block.height + BAND_GAP

    def _draw_name(self, sheet: Sheet, x: int, y: int) -> None:
        """The name and the facts, in the middle of the first tiles' height."""
        letter = f"  ·  {self.section.group[1]}" if self.section.group else ""
        facts = [self.section.facts[0] + letter, *self.section.facts[1:]] if self.section.facts else []
        base = y + max(18, self.blocks[0].middle - (LINE * len(facts)) // 2 + 6)
        sheet.text(x, base, self.section.name, HEADING_SIZE, weight="bold")
        for number, fact in enumerate(facts, 1):
            sheet.text(x, base + LINE * number, fact, colour=SOFT)


def _heading_lines(band: Band, width: int) -> list[list[Word]]:
    return flow(band.heading, width - (LABEL_WIDTH if band.label else 0), HEADING_SIZE, "bold")


def _lines(band: Band, width: int) -> list[str]:
    return wrap("  ·  ".join(band.lines), width) if band.lines else []


def _draw_words(sheet: Sheet, x: int, y: int, band: Band, width: int) -> None:
    """A band's label, heading and line, upper edge at y."""
    if band.heading:
        sheet.text(x, y + 18, band.label, HEADING_SIZE, LABEL_COLOURS[band.kind], weight="bold")
        for words in _heading_lines(band, width):
            sheet.words(x + (LABEL_WIDTH if band.label else 0), y + 18, words, HEADING_SIZE, "bold")
            y += HEADING_LINE
    for line in _lines(band, width):
        sheet.text(x, y + 14, line, colour=SOFT)
        y += LINE


class _Block:
    """Tiles in lines: titles above their pictures, captions and notes below."""

    def __init__(self, tiles: Sequence[Tile], layout: Layout) -> None:
        self.gap = layout.gap
        self.pictures = [fitted(tile.picture, *layout.tile) for tile in tiles]
        self.height_of_picture = max((picture.shape[0] for picture in self.pictures), default=0)
        width = max((picture.shape[1] for picture in self.pictures), default=0)
        titles = [word for tile in tiles for word in tile.title.split()]
        needed = [min(text_width(word, TEXT_SIZE, "bold"), MAX_CELL) for word in titles]
        needed += [text_width(tile.numbers, LABEL_SIZE) for tile in tiles]
        needed += [MIN_CELL for tile in tiles if tile.notes != ("", "")]
        self.cell = max(width, math.ceil(max(needed, default=0)))
        per_line = max(1, layout.per_line)
        self.lines = [
            _TileLine(tiles[start : start + per_line], self.cell, width) for start in range(0, len(tiles), per_line)
        ]
        self.width = min(len(tiles), per_line) * (self.cell + self.gap) - self.gap if tiles else 0
        heights = [line.head + self.height_of_picture + line.foot for line in self.lines]
        self.tops = [sum(heights[:number]) + self.gap * number for number in range(len(heights))]
        self.height = sum(heights) + self.gap * (len(heights) - 1) if heights else 0

    @property
    def middle(self) -> int:
        """Middle of the first line's pictures, below the upper edge."""
        return (self.lines[0].head if self.lines else 0) + self.height_of_picture // 2

    def draw(self, sheet: Sheet, x: int, y: int) -> None:
        """Draw the tiles with their upper left corner at (x, y)."""
        pictures = iter(self.pictures)
        for line, top in zip(self.lines, self.tops, strict=True):
            self._draw_panels(sheet, x, y + top, line)
            below = y + top + line.head
            for number, tile in enumerate(line.tiles):
                left = x + number * (self.cell + self.gap)
                line.draw_title(sheet, left, below, number)
                picture = next(pictures)
                shown = picture if tile.paint is None else tile.paint(picture)
                sheet.picture(left, below, framed(shown, tile.frame) if tile.frame else shown)
                line.draw_foot(sheet, left, below + self.height_of_picture, number)

    def _draw_panels(self, sheet: Sheet, x: int, y: int, line: "_TileLine") -> None:
        """A panel behind neighbouring tiles of one group."""
        pad, step = self.gap // 2 - 1, self.cell + self.gap
        numbers = groupby(range(len(line.tiles)), key=lambda number: line.tiles[number].group)
        for group, (first, *others) in ((group, tuple(run)) for group, run in numbers):
            if group is not None:
                size = (len(others) + 1) * step - self.gap + 2 * pad, line.head + self.height_of_picture + 2 * pad
                sheet.panel(x + first * step - pad, y - pad, *size)


class _TileLine:
    """Words of tiles that stand side by side."""

    def __init__(self, tiles: Sequence[Tile], cell: int, width: int) -> None:
        self.tiles, self.cell, self.width = tiles, cell, width
        self.titles = [wrap(tile.title, cell, TEXT_SIZE, "bold") if tile.title else [] for tile in tiles]
        self.captions = [flow(tile.caption, cell, WORD_SIZE) for tile in tiles]
        lines = max(map(len, self.titles))
        numbered = [number for number, tile in enumerate(tiles) if tile.numbers]
        self.is_beside = lines == 1 and all(
            text_width(tiles[number].title, TEXT_SIZE, "bold") + text_width(tiles[number].numbers, LABEL_SIZE) + GAP
            <= width
            for number in numbered
        )
        self.head = LINE * lines + (LINE - 4 if numbered and not self.is_beside else 0)
        self.caption_height = HEADING_LINE * max(map(len, self.captions))
        self.foot = self.caption_height + (7 if self.caption_height else 0)
        self.foot += NOTES if any(tile.notes != ("", "") for tile in tiles) else 0

    def draw_title(self, sheet: Sheet, x: int, y: int, number: int) -> None:
        """Title and numbers above a picture whose upper left corner is at (x, y)."""
        tile = self.tiles[number]
        base = y - 7
        if tile.numbers and self.is_beside:
            sheet.text(x + self.width, base, tile.numbers, LABEL_SIZE, SOFT, align="right")
        elif tile.numbers:
            sheet.text(x, base, tile.numbers, LABEL_SIZE, SOFT)
            base -= LINE - 4
        for above, line in enumerate(reversed(self.titles[number])):
            sheet.text(x, base - LINE * above, line, TEXT_SIZE, SOFT if tile.is_soft else INK, weight="bold")

    def draw_foot(self, sheet: Sheet, x: int, y: int, number: int) -> None:
        """Caption and notes below a picture whose lower left corner is at (x, y)."""
        for line, words in enumerate(self.captions[number]):
            sheet.words(x, y + 25 + HEADING_LINE * line, words)
        first, second = self.tiles[number].notes
        base = y + self.foot - 6
        sheet.text(x, base, first, LABEL_SIZE, SOFT)
        room = self.cell - math.ceil(text_width(first, LABEL_SIZE) + GAP if first else 0)
        sheet.text(x + self.cell, base, shorten(second, room, LABEL_SIZE), LABEL_SIZE, SOFT, align="right")


# Measured words.


@lru_cache(maxsize=4096)
def text_width(words: str, size: float = TEXT_SIZE, weight: str = "normal") -> float:
    """How wide words are on a `Sheet`, pixels; arguments as of `Sheet.text`."""
    from matplotlib.font_manager import FontProperties

    font = FontProperties(size=size * 72 / DPI, weight=weight)
    return float(_renderer().get_text_width_height_descent(drawable(words), font, False)[0])


@lru_cache(maxsize=1)
def _renderer() -> Any:
    # The renderer that draws knows the installed font.
    return Sheet(1, 1).figure.canvas.get_renderer()


def drawable(words: str) -> str:
    """Words on one line, with `NO_LETTER` for every letter that the font of a `Sheet` lacks."""
    one_line = re.sub(r"[\t\n\v\f\r]+", " ", words)
    return "".join(letter if ord(letter) in _letters() else NO_LETTER for letter in one_line)


@lru_cache(maxsize=1)
def _letters() -> frozenset[int]:
    """Code points of the font that `Sheet.text` draws with."""
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
    for word in drawable(words).split(" "):
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, size, weight) <= width:
            lines[-1] = longer
        else:
            lines.append(shorten(word, width, size, weight))
    return lines


def flow(words: Sequence[Word], width: int, size: float = WORD_SIZE, weight: str = "normal") -> list[list[Word]]:
    """Break words into lines of a width: where there is a space, and within what is longer than a line."""
    space = text_width("a a", size, weight) - text_width("aa", size, weight)
    lines: list[list[Word]] = []
    x = 0.0
    for number, word in enumerate(words):
        # What follows without a space, such as a comma, goes to the same line.
        end = next((i for i in range(number + 1, len(words)) if words[i].has_space), len(words))
        ahead = sum(text_width(each.text, size, weight) for each in (words[number:end] if word.has_space else [word]))
        x += space * word.has_space
        if not lines or (x + ahead > width and lines[-1]):
            lines.append([])
            x = 0.0
        lines[-1].append(word._replace(text=shorten(word.text, width, size, weight)))
        x += text_width(lines[-1][-1].text, size, weight)
    return lines

"""Figure -> one sheet: PNG, PDF or SVG, as the ending of the file says.

matplotlib (the extra `plots`) writes the words; a PNG keeps every picture's pixels as they are. Words are measured
before they get their place, so that pictures of any shape leave room for them. Sizes are in pixels.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from dino_sparo.draw.figure import Band, Figure, Layout, Section, Tile, Word, merge_words
from dino_sparo.draw.pixels import add_frame, fit, ramp
from dino_sparo.runtime.faults import require
from dino_sparo.runtime.files import written_beside

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


class Drawing:
    """Words, pictures and panels with their positions; x to the right, y downwards.

    Attributes:
        items: x, y, what is there (words, pixels, or width and height of a panel), and its style.
        width: as the drawing's maker says.
        height: as the drawing's maker says.
        middle: of the first line's pictures, below the upper edge.
    """

    def __init__(self) -> None:
        self.items: list[tuple[int, int, Any, dict[str, Any]]] = []
        self.width = self.height = self.middle = 0

    def place(self, other: "Drawing", x: int, y: int) -> None:
        """Add another drawing with its upper left corner at (x, y)."""
        self.items += [(x + left, y + top, item, style) for left, top, item, style in other.items]

    def text(self, x: int, y: int, words: str, size: float = TEXT_SIZE, colour: str = INK, **style: str) -> None:
        """Words with their left end (or as `ha` says) at x and their baseline at y; `size` in pixels."""
        self.items.append((x, y, words, {"fontsize": size * 72 / DPI, "color": colour, **style}))

    def words(self, x: int, y: int, words: Sequence[Word], size: float = WORD_SIZE, weight: str = "normal") -> int:
        """Words side by side, their colours behind them; returns where they end."""
        space = text_width("a a", size, weight) - text_width("aa", size, weight)
        left = float(x)
        for number, word in enumerate(merge_words(words)):
            left += space * (word.has_space and number > 0)
            width = text_width(word.text, size, weight)
            if word.level > 0:
                mixed = (round(255 + word.level * (channel - 255)) for channel in word.colour)
                box = round(width) + 4, round(1.5 * size)
                self.panel(round(left) - 2, y - round(size) - 1, box, "#{:02x}{:02x}{:02x}".format(*mixed))
            self.text(round(left), y, word.text, size, weight=weight)
            left += width
        return math.ceil(left)

    def picture(self, x: int, y: int, pixels: UInt8[np.ndarray, "H W 3"]) -> None:
        """A picture with its upper left corner at (x, y)."""
        self.items.append((x, y, pixels, {"origin": "upper"}))

    def panel(self, x: int, y: int, size: tuple[int, int], colour: str = PANEL) -> None:
        """A rounded rectangle of some width and height, behind all pictures."""
        style = {"boxstyle": "round,pad=0,rounding_size=7", "facecolor": colour, "edgecolor": "none", "zorder": -1}
        self.items.append((x, y, size, style))

    def render(self, width: int, height: int) -> Any:
        """The drawing as a figure of matplotlib."""
        from matplotlib.figure import Figure
        from matplotlib.patches import FancyBboxPatch
        from matplotlib.transforms import Affine2D

        figure: Any = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor=PAPER)
        # A pixel stays a hundredth of an inch in formats that have no pixels.
        pixels = Affine2D().scale(1 / DPI) + figure.dpi_scale_trans
        for x, y, item, style in self.items:
            if isinstance(item, str):
                # Names of files may hold dollar signs, which would start mathematics.
                figure.text(x, height - y, drawable(item), transform=pixels, parse_math=False, **style)
            elif isinstance(item, tuple):
                figure.add_artist(FancyBboxPatch((x, height - y - item[1]), *item, transform=pixels, **style))
            else:
                figure.figimage(item, x, height - y - item.shape[0], **style)
        return figure


def save_sheet(figure: Figure, path: Path) -> None:
    """Draw a figure; the ending of `path` says in which format. Commands `require_matplotlib` before they compute."""
    layout = figure.layout
    blocks = [[draw_tiles(band.tiles, layout) for band in section.bands] for section in figure.sections]
    tiles_width = max((block.width for own in blocks for block in own), default=0)
    has_words = any(
        section.about or any(band.heading or band.lines for band in section.bands) for section in figure.sections
    )
    content = max(tiles_width, MIN_WIDTH - layout.side if has_words else 0)
    parts = [_section(*both, layout, content) for both in zip(figure.sections, blocks, strict=True)]
    columns, gap = 1, SECTION_GAP
    if layout.is_flowing:  # the number of columns gives the sheet about the shape of a slide
        gap = GAP
        height = sum(part.height + gap for part in parts)
        columns = max(1, round(math.sqrt(height * ASPECT / (layout.side + tiles_width + MARGIN))))
    rows = -(-len(parts) // columns)
    columns = -(-len(parts) // rows)
    step = layout.side + content + MARGIN
    width = max(columns * step - MARGIN, MIN_WIDTH)
    heading = _heading(figure, width)
    sheet, bottom = Drawing(), 0
    sheet.place(heading, MARGIN, MARGIN)
    for column in range(columns):
        y = MARGIN + heading.height + SECTION_GAP
        for part in parts[column * rows : (column + 1) * rows]:
            sheet.place(part, MARGIN + column * step, y)
            y += part.height + gap
        bottom = max(bottom, y - gap)
    save_figure(sheet.render(width + 2 * MARGIN, bottom + MARGIN), path)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib, without the date and without random names: the same figure gives the same bytes."""
    from matplotlib import rc_context

    undated = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
    with rc_context({"svg.hashsalt": "dino_sparo"}):
        kind = path.suffix.removeprefix(".")
        with written_beside(path) as file:
            figure.savefig(file, format=kind, dpi=figure.dpi, facecolor=PAPER, metadata=undated.get(path.suffix))


def _heading(figure: Figure, width: int) -> Drawing:
    """Title, paragraphs in smaller letters, and the legend of colours."""
    drawing, y = Drawing(), 20
    drawing.text(0, y, shorten(figure.title, width, TITLE_SIZE, "bold"), TITLE_SIZE, weight="bold")
    for paragraph in filter(None, (figure.about, *figure.summary)):
        y += 6
        for line in wrap(paragraph, width):
            y += LINE
            drawing.text(0, y, line, colour=SOFT)
    drawing.height = y + 4
    if figure.ends is not None:
        low, high = figure.ends
        left, base = math.ceil(text_width(low, LABEL_SIZE)) + 10, y + 16 + RAMP_HEIGHT
        drawing.text(0, base, low, LABEL_SIZE, SOFT)
        drawing.picture(left, y + 16, _ramp_picture())
        drawing.text(left + RAMP_WIDTH + 10, base, high, LABEL_SIZE, SOFT)
        end = left + RAMP_WIDTH + 10 + math.ceil(text_width(high, LABEL_SIZE))
        for word in figure.legend:
            end = drawing.words(end + 2 * GAP - 6, base, [word], LABEL_SIZE)
        drawing.height = base
    return drawing


def _ramp_picture() -> UInt8[np.ndarray, "height width 3"]:
    """The colours of a map over grey, from an even share of attention to the most."""
    level = np.linspace(0, 1, RAMP_WIDTH, dtype=np.float32)
    cover = np.sqrt(level)[None, :, None]
    grey = np.full((RAMP_HEIGHT, RAMP_WIDTH, 3), 128, dtype=np.float32)
    return (grey * (1 - cover) + ramp(level)[None] * cover).astype(np.uint8)


def _section(section: Section, blocks: Sequence[Drawing], layout: Layout, width: int) -> Drawing:
    """A section: its name or picture at the left, its bands beside it, whose lines have a width."""
    drawing, y = Drawing(), 0
    if section.about:
        drawing.text(layout.side, 13, shorten(section.about, width), colour=SOFT)
        y = ABOUT
    for band, block in zip(section.bands, blocks, strict=True):
        y = _band_words(drawing, layout.side, y, band, width)
        drawing.place(block, layout.side, y)
        y += block.height + BAND_GAP
    drawing.height = y - BAND_GAP
    if section.picture is not None:
        side = layout.side - 2 * GAP
        picture = fit(section.picture.picture, side, side)
        drawing.picture(0, 0, picture)
        drawing.height = max(drawing.height, picture.shape[0])
    if section.name:  # in the middle of the first tiles' height
        letter = f"  ·  {section.group[1]}" if section.group else ""
        facts = [fact + letter * (number == 0) for number, fact in enumerate(section.facts)]
        base = max(18, blocks[0].middle - (LINE * len(facts)) // 2 + 6)
        drawing.text(0, base, section.name, HEADING_SIZE, weight="bold")
        for number, fact in enumerate(facts, 1):
            drawing.text(0, base + LINE * number, fact, colour=SOFT)
        drawing.height = max(drawing.height, LINE * (1 + len(facts)))
    return drawing


def _band_words(drawing: Drawing, x: int, top: int, band: Band, width: int) -> int:
    """A band's label, heading and lines, upper edge at `top`; returns the upper edge of its tiles."""
    y = top
    if band.heading:
        indent = LABEL_WIDTH if band.label else 0
        drawing.text(x, y + 18, band.label, HEADING_SIZE, LABEL_COLOURS[band.kind], weight="bold")
        for words in flow(band.heading, width - indent, HEADING_SIZE, "bold"):
            drawing.words(x + indent, y + 18, words, HEADING_SIZE, "bold")
            y += HEADING_LINE
    for line in wrap("  ·  ".join(band.lines), width) if band.lines else ():
        drawing.text(x, y + 14, line, colour=SOFT)
        y += LINE
    return y + 6 * (y > top and bool(band.tiles))


def draw_tiles(tiles: Sequence[Tile], layout: Layout) -> Drawing:
    """Tiles in lines: titles above their pictures, captions and notes below."""
    block, y = Drawing(), 0
    if not tiles:
        return block
    pictures = [fit(tile.picture, *layout.tile) for tile in tiles]
    height, width = (max(picture.shape[axis] for picture in pictures) for axis in (0, 1))
    needed = [min(text_width(word, TEXT_SIZE, "bold"), MAX_CELL) for tile in tiles for word in tile.title.split()]
    needed += [text_width(tile.numbers, LABEL_SIZE) for tile in tiles]
    needed += [MIN_CELL for tile in tiles if tile.notes != ("", "")]
    cell, per_line = max(width, math.ceil(max(needed))), max(1, layout.per_line)
    step = cell + layout.gap
    for start in range(0, len(tiles), per_line):
        line = tiles[start : start + per_line]
        head, is_beside = _head_of_line(line, cell, width)
        captions = [flow(tile.caption, cell) for tile in line]
        foot = HEADING_LINE * max(map(len, captions))
        foot += 7 * (foot > 0) + NOTES * any(tile.notes != ("", "") for tile in line)
        pad = layout.gap // 2 - 1
        for group, members in groupby(range(len(line)), key=lambda number: line[number].group):
            first, *others = members
            if group is not None:
                size = (len(others) + 1) * step - layout.gap + 2 * pad, head + height + 2 * pad
                block.panel(first * step - pad, y - pad, size)
        for number, (tile, picture) in enumerate(zip(line, pictures[start:], strict=False)):
            x, shown = number * step, picture if tile.paint is None else tile.paint(picture)
            _title(block, x, y + head - 7, tile, cell, width if is_beside else 0)
            block.picture(x, y + head, add_frame(shown, tile.frame) if tile.frame else shown)
            for below, words in enumerate(captions[number]):
                block.words(x, y + head + height + 25 + HEADING_LINE * below, words)
            _notes(block, x, y + head + height + foot - 6, tile, cell)
        block.middle = block.middle or head + height // 2
        y += head + height + foot + layout.gap
    block.width, block.height = min(len(tiles), per_line) * step - layout.gap, y - layout.gap
    return block


def _head_of_line(tiles: Sequence[Tile], cell: int, width: int) -> tuple[int, bool]:
    """Height above the pictures of a line, and whether its numbers stand beside their titles."""
    lines = max(len(_title_lines(tile, cell)) for tile in tiles)
    numbered = [tile for tile in tiles if tile.numbers]
    is_beside = lines == 1 and all(
        text_width(tile.title, TEXT_SIZE, "bold") + text_width(tile.numbers, LABEL_SIZE) + GAP <= width
        for tile in numbered
    )
    return LINE * lines + (LINE - 4 if numbered and not is_beside else 0), is_beside


def _title_lines(tile: Tile, cell: int) -> list[str]:
    return wrap(tile.title, cell, TEXT_SIZE, "bold") if tile.title else []


def _title(block: Drawing, x: int, base: int, tile: Tile, cell: int, right: int) -> None:
    """Title, and numbers ending `right` pixels from x, or below the title if `right` is 0."""
    if tile.numbers and right:
        block.text(x + right, base, tile.numbers, LABEL_SIZE, SOFT, ha="right")
    elif tile.numbers:
        block.text(x, base, tile.numbers, LABEL_SIZE, SOFT)
        base -= LINE - 4
    for above, line in enumerate(reversed(_title_lines(tile, cell))):
        block.text(x, base - LINE * above, line, colour=SOFT if tile.is_soft else INK, weight="bold")


def _notes(block: Drawing, x: int, base: int, tile: Tile, cell: int) -> None:
    """Notes at the left and right ends of a cell."""
    first, second = tile.notes
    room = cell - math.ceil(text_width(first, LABEL_SIZE) + GAP if first else 0)
    for place, words, side in ((x, first, "left"), (x + cell, shorten(second, room, LABEL_SIZE), "right")):
        if words:
            block.text(place, base, words, LABEL_SIZE, SOFT, ha=side)


# Measured words.


@lru_cache(maxsize=4096)
def text_width(words: str, size: float = TEXT_SIZE, weight: str = "normal") -> float:
    """Width of words, pixels; arguments as for `Drawing.text`."""
    from matplotlib.font_manager import FontProperties

    font = FontProperties(size=size * 72 / DPI, weight=weight)
    return float(_renderer().get_text_width_height_descent(drawable(words), font, False)[0])


@lru_cache(maxsize=1)
def _renderer() -> Any:
    from matplotlib.backends.backend_agg import RendererAgg

    return RendererAgg(1, 1, DPI)  # the renderer that draws knows the installed font


def drawable(words: str) -> str:
    """Words on one line, with `NO_LETTER` for every letter that the font of a sheet lacks."""
    one_line = re.sub(r"[\t\n\v\f\r]+", " ", words)
    return "".join(letter if ord(letter) in _letters() else NO_LETTER for letter in one_line)


@lru_cache(maxsize=1)
def _letters() -> frozenset[int]:
    """Code points of the font that `Drawing.text` draws with."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return frozenset(get_font(findfont(FontProperties())).get_charmap())


def shorten(words: str, width: int, size: float = TEXT_SIZE, weight: str = "normal") -> str:
    """Words that fit a width: where they are too long, an ellipsis stands for their middle."""
    if text_width(words, size, weight) <= width:
        return words
    # Bisected: a word of thousands of letters is measured a dozen times, not once per letter.
    letters = bisect_right(
        range(1, len(words)), float(width), key=lambda n: text_width(_without_middle(words, n), size, weight)
    )
    return _without_middle(words, max(letters, 1))


def _without_middle(words: str, letters: int) -> str:
    """The first and last letters of words, `letters` in all, around an ellipsis."""
    return words[: letters - letters // 2] + ELLIPSIS + words[len(words) - letters // 2 :]


def wrap(words: str, width: int, size: float = TEXT_SIZE, weight: str = "normal") -> list[str]:
    """Break words into lines of a width at their spaces; what is longer than a line loses its middle."""
    parts = [Word(part) for part in drawable(words).split(" ")]
    return [" ".join(word.text for word in line) for line in flow(parts, width, size, weight)]


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

"""Figure -> one sheet: PNG, PDF or SVG.

matplotlib (the extra `plots`) measures words and packs words and pictures into columns and rows, so that nothing
overlaps. Sizes are in pixels; a PNG has 72 pixels per inch.
"""

import math
import re
import textwrap
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt8

from dino_sparo.draw.figure import Band, Figure, Layout, Section, Tile, Word, merge_words
from dino_sparo.draw.pixels import Picture, add_frame, fit, ramp
from dino_sparo.runtime.faults import require
from dino_sparo.runtime.files import written_beside

INK, SOFT, PAPER = "#16161d", "#74747f", "#ffffff"
PANEL = "#ece8f6"  # behind near-duplicates
LABEL_COLOURS = {"": INK, "true": "#1a7f37", "false": "#c0322b"}
MARGIN, GAP = 36, 12  # around the sheet, between tiles and words
ASPECT = 1.7  # of a flowing sheet, width to height, as a slide's
MIN_WIDTH = 860  # of headings, so that a sentence has few lines
TITLE_SIZE, HEADING_SIZE, WORD_SIZE, TEXT_SIZE, LABEL_SIZE = 21.0, 17.0, 15.0, 13.0, 11.5
LETTER = 0.54  # average width of a letter, as a share of its size
LINE_GAP, BAND_GAP, SECTION_GAP = 5, 20, 34
LABEL_WIDTH = 124  # of a band's label, before its heading
MIN_CELL, MAX_CELL = 76, 130  # of a tile whose words are wider than its picture
RAMP_WIDTH, RAMP_HEIGHT = 150, 10
ELLIPSIS = "…"
NO_LETTER = "\u25af"  # for a letter that the font lacks

Align = Literal["top", "center", "baseline"]


def require_matplotlib() -> None:
    """Raise MissingPackageError without matplotlib; commands call this function before they compute."""
    require("matplotlib", "figures")


def save_sheet(figure: Figure, path: Path) -> None:
    """Draw a figure; the ending of `path` is the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Sheet

    drawn = Sheet(dpi=72, facecolor=PAPER)  # a pixel is a point, the unit in which matplotlib packs
    renderer = FigureCanvasAgg(drawn).get_renderer()

    def size(box: Any) -> Any:
        box.set_figure(drawn)
        return box.get_bbox(renderer)

    layout = figure.layout
    blocks = [[_tiles(band.tiles, layout) for band in section.bands] for section in figure.sections]
    widths = (size(block).width for bands in blocks for block in bands if block is not None)
    content = max(round(max(widths, default=0)), 0 if layout.is_flowing else MIN_WIDTH - layout.side)
    parts = [_section(*both, layout, content) for both in zip(figure.sections, blocks, strict=True)]
    columns, gap = 1, SECTION_GAP
    if layout.is_flowing:  # as many columns as give the sheet about the shape of a slide
        gap = GAP
        height = sum(size(part).height + gap for part in parts)
        columns = max(1, round(math.sqrt(height * ASPECT / (layout.side + content + MARGIN))))
    rows = -(-len(parts) // columns)
    body = _row([_column(parts[i : i + rows], gap) for i in range(0, len(parts), rows)], MARGIN)
    sheet = _column([_heading(figure, max(round(size(body).width), MIN_WIDTH)), body], SECTION_GAP)
    box = size(sheet)
    drawn.set_size_inches((math.ceil(box.width) + 2 * MARGIN) / 72, (math.ceil(box.height) + 2 * MARGIN) / 72)
    sheet.set_offset((MARGIN - box.x0, MARGIN - box.y0))
    drawn.add_artist(sheet)
    save_figure(drawn, path)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib without date and random names, so that equal figures give equal files."""
    from matplotlib import rc_context

    undated = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
    with rc_context({"svg.hashsalt": "dino_sparo"}):
        kind = path.suffix.removeprefix(".")
        with written_beside(path) as file:
            figure.savefig(file, format=kind, dpi=figure.dpi, facecolor=PAPER, metadata=undated.get(path.suffix))


# Parts of a sheet, from matplotlib's boxes.


def _column(children: Sequence[Any], gap: int, width: int = 0) -> Any:
    """Boxes below one another, at least `width` wide."""
    from matplotlib.offsetbox import DrawingArea, VPacker

    column = VPacker(children=list(children), sep=gap, pad=0, align="left") if children else DrawingArea(0, 0)
    return VPacker(children=[column, DrawingArea(width, 0)], pad=0, align="left") if width else column


def _row(children: Sequence[Any], gap: int, align: Align = "top", width: int | None = None) -> Any:
    """Boxes beside one another; with `width`, spread over this width."""
    from matplotlib.offsetbox import HPacker

    mode: Literal["fixed", "expand"] = "fixed" if width is None else "expand"
    return HPacker(children=list(children), sep=gap, pad=0, align=align, mode=mode, width=width)


def _picture(pixels: UInt8[np.ndarray, "H W 3"]) -> Any:
    from matplotlib.offsetbox import OffsetImage

    return OffsetImage(pixels, interpolation="nearest", origin="upper")


def _text(words: str, size: float = TEXT_SIZE, colour: str = INK, weight: str = "normal", **style: Any) -> Any:
    """One line of words."""
    from matplotlib.offsetbox import TextArea

    # Names of files may hold dollar signs, which would start mathematics.
    properties = {"fontsize": size, "color": colour, "fontweight": weight, "parse_math": False, **style}
    line: Any = TextArea(drawable(words) or " ", textprops=properties)
    line.get_bbox = cache(line.get_bbox)  # else matplotlib measures a line several times per box around it
    return line


def _words(words: Sequence[Word], width: int, size: float = WORD_SIZE, weight: str = "normal") -> list[Any]:
    """Lines of words with their colours behind them."""
    from matplotlib.offsetbox import DrawingArea

    lines = []
    for line in flow(words, letters_in(width, size, weight)):
        boxes: list[Any] = []
        for word in merge_words(line):
            boxes += [DrawingArea(0.32 * size, 0)] * (word.has_space and bool(boxes))
            mixed = [(255 + word.level * (channel - 255)) / 255 for channel in word.colour]
            box = {"boxstyle": "round,pad=0,rounding_size=0.25", "facecolor": mixed, "edgecolor": "none"}
            colour: dict[str, Any] = {"bbox": box} if word.level > 0 else {}
            boxes.append(_text(word.text, size, weight=weight, **colour))
        lines.append(_row(boxes, 0, "baseline"))
    return lines


def _heading(figure: Figure, width: int) -> Any:
    """Title, paragraphs in smaller letters, and the legend of colours."""
    title = shorten(figure.title, letters_in(width, TITLE_SIZE, "bold"))
    parts = [_text(title, TITLE_SIZE, weight="bold")]
    for paragraph in filter(None, (figure.about, *figure.summary)):
        lines = wrap(paragraph, letters_in(width, TEXT_SIZE))
        parts.append(_column([_text(line, colour=SOFT) for line in lines], LINE_GAP))
    if figure.ends is not None:
        low, high = (_text(end, LABEL_SIZE, SOFT) for end in figure.ends)
        legend = [_row(_words([word], width, LABEL_SIZE), 0) for word in figure.legend]
        parts.append(_row([low, _picture(_ramp_picture()), high, *legend], GAP, "center"))
    return _column(parts, GAP)


def _ramp_picture() -> UInt8[np.ndarray, "height width 3"]:
    """The colours of a map over grey, from an even share of attention to the most."""
    level = np.linspace(0, 1, RAMP_WIDTH, dtype=np.float32)
    cover = np.sqrt(level)[None, :, None]
    grey = np.full((RAMP_HEIGHT, RAMP_WIDTH, 3), 128, dtype=np.float32)
    return (grey * (1 - cover) + ramp(level)[None] * cover).astype(np.uint8)


def _section(section: Section, blocks: Sequence[Any], layout: Layout, width: int) -> Any:
    """A section: its name or picture at the left, its bands beside them; lines are at most `width` wide."""
    side: list[Any] = []
    if section.picture is not None:
        side.append(_picture(fit(section.picture.picture, layout.side - 2 * GAP, layout.side - 2 * GAP)))
    if section.name:
        letter = f"  ·  {section.group[1]}" if section.group else ""
        facts = [fact + letter * (number == 0) for number, fact in enumerate(section.facts)]
        side += [_text(section.name, HEADING_SIZE, weight="bold"), *(_text(fact, colour=SOFT) for fact in facts)]
    about = [_text(shorten(section.about, letters_in(width, TEXT_SIZE)), colour=SOFT)] if section.about else []
    bands = [_band(band, block, width) for band, block in zip(section.bands, blocks, strict=True)]
    content = _column([*about, _column(bands, BAND_GAP)], GAP)
    align: Align = "center" if section.name else "top"
    return _row([_column(side, LINE_GAP, layout.side), content], 0, align) if layout.side else content


def _band(band: Band, tiles: Any, width: int) -> Any:
    """A band's label and heading, its lines, its tiles."""
    parts: list[Any] = []
    if band.heading:
        indent = LABEL_WIDTH if band.label else 0
        lines = _column(_words(band.heading, width - indent, HEADING_SIZE, "bold"), LINE_GAP)
        label = [_text(band.label, HEADING_SIZE, LABEL_COLOURS[band.kind], "bold")] if band.label else []
        parts.append(_row([_column(label, 0, indent), lines], 0) if label else lines)
    if band.lines:
        lines = wrap("  ·  ".join(band.lines), letters_in(width, TEXT_SIZE))
        parts.append(_column([_text(line, colour=SOFT) for line in lines], LINE_GAP))
    return _column([*parts, *([] if tiles is None else [tiles])], 8)


def _tiles(tiles: Sequence[Tile], layout: Layout) -> Any:
    """Lines of tiles, with titles above the pictures and captions and notes below; None without tiles."""
    from matplotlib.offsetbox import DrawingArea

    if not tiles:
        return None
    pictures = [fit(tile.picture, *layout.tile) for tile in tiles]
    width = max(picture.shape[1] for picture in pictures)
    words = [len(word) for tile in tiles for word in (tile.numbers, *tile.title.split())]
    wanted = min(round(max(words) * LETTER * TEXT_SIZE), MAX_CELL)
    cell = max(width, wanted, MIN_CELL if any(tile.notes != ("", "") for tile in tiles) else 0)
    lines = []
    for start in range(0, len(tiles), max(1, layout.per_line)):
        line = tiles[start : start + max(1, layout.per_line)]
        is_beside = all(_has_room(tile, cell) for tile in line)
        heads = [_head(tile, cell, is_beside) for tile in line]
        height = max(map(len, heads))
        boxes = [
            _tile(tile, picture, [*[_text(" ")] * (height - len(head)), *head], cell, layout.gap)
            for tile, picture, head in zip(line, pictures[start:], heads, strict=False)
        ]
        lines.append(_row(boxes, 0))
    # Panels reach half a gap beyond the pictures, so the tiles begin half a gap further left.
    return _row([DrawingArea(-layout.gap / 2, 0), _column(lines, 0)], 0)


def _has_room(tile: Tile, cell: int) -> bool:
    """Whether the numbers of a tile, if it has any, fit beside its title."""
    needed = LETTER * (1.2 * TEXT_SIZE * len(tile.title) + LABEL_SIZE * len(tile.numbers)) + GAP
    return not tile.numbers or needed <= cell


def _head(tile: Tile, cell: int, is_beside: bool) -> list[Any]:
    """Title, and numbers beside or below it."""
    colour = SOFT if tile.is_soft else INK
    lines = wrap(tile.title, letters_in(cell, TEXT_SIZE, "bold")) if tile.title else []
    boxes = [_text(line, colour=colour, weight="bold") for line in lines]
    if tile.numbers:
        numbers = _text(tile.numbers, LABEL_SIZE, SOFT)
        if is_beside:
            return [_row([*boxes, numbers], 0, "baseline", cell)]
        boxes.append(numbers)
    return boxes


def _tile(tile: Tile, picture: Picture, head: Sequence[Any], cell: int, gap: int) -> Any:
    """A picture with its words; a panel behind it if it belongs to a group."""
    from matplotlib.offsetbox import PaddedBox

    shown = picture if tile.paint is None else tile.paint(picture)
    below = _words(tile.caption, round(0.92 * cell))
    first, second = tile.notes
    if first or second:
        room = max(4, round(0.7 * (letters_in(cell, LABEL_SIZE) - len(first))))
        notes = [_text(note, LABEL_SIZE, SOFT) for note in (first, shorten(second, room))]
        below.append(_row(notes, GAP, "baseline", cell if len(second) <= room else None))
    column = _column([*head, _picture(add_frame(shown, tile.frame) if tile.frame else shown), *below], LINE_GAP, cell)
    panel = {"facecolor": PANEL, "edgecolor": "none"}
    return PaddedBox(column, gap / 2, draw_frame=tile.group is not None, patch_attrs=panel)


# Words of a length.


def letters_in(width: int, size: float, weight: str = "normal") -> int:
    """About the number of letters that fill a width; slightly longer words widen the sheet."""
    return max(4, int(width / (size * LETTER * (1.2 if weight == "bold" else 1.0))))


def drawable(words: str) -> str:
    """Words on one line, with `NO_LETTER` for every letter that the font of a sheet lacks."""
    one_line = re.sub(r"[\t\n\v\f\r]+", " ", words)
    return "".join(letter if ord(letter) in _letters() else NO_LETTER for letter in one_line)


@lru_cache(maxsize=1)
def _letters() -> frozenset[int]:
    """Code points of the font that the words of a sheet have."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return frozenset(get_font(findfont(FontProperties())).get_charmap())


def shorten(words: str, letters: int) -> str:
    """Words of at most `letters` letters; an ellipsis replaces the middle of longer words."""
    if len(words) <= letters:
        return words
    end = (letters - 1) // 2
    return words[: letters - 1 - end] + ELLIPSIS + words[len(words) - end :]


def wrap(words: str, letters: int) -> list[str]:
    """Break words into lines at their spaces; a longer word loses its middle."""
    return textwrap.wrap(" ".join(shorten(word, letters) for word in words.split(" ")), letters)


def flow(words: Sequence[Word], letters: int) -> list[list[Word]]:
    """Break words into lines, at spaces if possible; a word that is longer than a line loses its middle."""
    lines: list[list[Word]] = []
    length = 0
    for number, word in enumerate(words):
        word = word._replace(text=shorten(word.text, letters))
        # Words without a space before them, such as a comma, stay on the line.
        joined = takewhile(lambda each: not each.has_space, words[number + 1 :])
        ahead = sum(len(each.text) for each in (chain([word], joined) if word.has_space else [word]))
        if not lines or length + word.has_space + ahead > letters:
            lines.append([])
            length = 0
        lines[-1].append(word)
        length += word.has_space + len(word.text)
    return lines

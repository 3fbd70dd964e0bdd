"""Errors -> what the model looked at in them: one HTML page that opens from disk, and a sheet per benchmark.

A row is an image, beside it the true and the false caption with their scores, and below each caption the maps that the
model has for it (`LookingScorer`). Where it has none the captions stand alone.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from dino_sparo.data.views import view_pixels
from dino_sparo.draw.html import FIGURES_STYLE, data_uri, html_page
from dino_sparo.draw.labels import file_names, short_name
from dino_sparo.draw.sheet import (
    GAP,
    LINE,
    MARGIN,
    RAMP_ENDS,
    SOFT,
    Heading,
    Page,
    fitted,
    resized,
    shorten,
    text_width,
    wrap,
)
from dino_sparo.draw.tiles import TILE_STYLE, Tile, draw_tiles, tile_figure, tiles_height
from dino_sparo.image_text.evaluation.compositional.failures import Failure, Failures
from dino_sparo.image_text.picture_pairs import PICTURE_HEIGHT
from dino_sparo.image_text.scoring.explaining import CaptionLook, LookingScorer
from dino_sparo.image_text.scoring.image_files import ROOT, named_source
from dino_sparo.image_text.scoring.scorer import Scorer
from dino_sparo.runtime.records import write_text

TITLE = "The clearest errors"
SHEET_ROWS = 6  # errors on a sheet; the page has all
PICTURE, TILE, TILES_PER_LINE = 264, 160, 5  # pixels, of the image and of a map
CAPTION_SIZE, CAPTION_LINE, SCORE_WIDTH = 17.0, 25, 124  # pixels
COLUMN = TILES_PER_LINE * (TILE + GAP) - GAP  # width beside the image
SIDE_GAP, BAND_GAP, ROW_GAP = 28, 20, 36
WHERE = 26  # pixels, height of the line above the captions
COLOURS = {"true": "#1a7f37", "false": "#c0322b"}  # of the scores
MARKS = {"true": "#d7f2de", "false": "#fde0dc"}  # behind words that differ

OWN_STYLE = f"""
main > h2 {{ margin: 22px 0 0; }}
section {{ grid-template-columns: minmax(160px, 280px) minmax(0, 1fr); gap: 26px; content-visibility: visible; }}
section > img {{ width: 100%; border-radius: 8px; }}
.band + .band {{ margin-top: 20px; padding-top: 16px; border-top: 1px solid var(--line); }}
h3 {{ margin: 0 0 4px; font-size: 17px; line-height: 1.5; display: grid; grid-template-columns: 7.2em 1fr; }}
h3 b {{ font-variant-numeric: tabular-nums; }}
mark {{ color: inherit; padding: 1px 3px; margin: 0 -3px; border-radius: 5px; }}
.true b {{ color: {COLOURS["true"]}; }} .false b {{ color: {COLOURS["false"]}; }}
.true mark {{ background: rgb(60 190 100 / 22%); }} .false mark {{ background: rgb(240 90 75 / 22%); }}
@media (prefers-color-scheme: dark) {{ .true b {{ color: #4cc267; }} .false b {{ color: #ff7b72; }} }}
.where {{ font-size: 13px; margin-bottom: 10px; }}
.figures {{ margin-top: 12px; gap: 12px; }}
@media (max-width: 800px) {{ section {{ grid-template-columns: 1fr; }} }}
"""

RULE = (
    "Shown are the questions in which a false caption scores most above the true one, one per image. Of several false "
    "captions it is the one with the greatest score. Words that the other caption does not have there are marked."
)


@dataclass(frozen=True)
class Shown:
    """An error as it is drawn.

    Attributes:
        failure: the error.
        picture: (H, W, 3), the image or the part of it that the maps cover.
        looks: of the true and of the false caption; empty where the scorer has no maps.
    """

    failure: Failure
    picture: UInt8[np.ndarray, "H W 3"]
    looks: Sequence[CaptionLook]

    @property
    def where(self) -> str:
        """Split, image and margin."""
        failure = self.failure
        margin = failure.false_score - failure.true_score
        return f"{failure.split}  ·  {short_name(failure.image)}  ·  false above true by {margin:.3f}"

    @property
    def bands(self) -> list["Band"]:
        """The true and the false caption."""
        failure = self.failure
        captions = failure.true_caption.split(), failure.false_caption.split()
        looks = self.looks or [CaptionLook("", ())] * 2
        scores = failure.true_score, failure.false_score
        marks = differing(*captions)
        return [Band(*each) for each in zip(COLOURS, scores, captions, marks, looks, strict=True)]


class Band(NamedTuple):
    """A caption of an error.

    Attributes:
        kind: `true` or `false`.
        score: of image and caption.
        words: of the caption.
        marks: whether the other caption does not have the word there.
        look: what the model looks at.
    """

    kind: str
    score: float
    words: list[str]
    marks: list[bool]
    look: CaptionLook


@dataclass(frozen=True)
class Gallery:
    """What is shown.

    Attributes:
        model: what to call it.
        measure: what a score is.
        explanation: how to read maps; empty where there are none.
        ends: words for the lowest and the highest colour; None where there are no maps.
        groups: benchmark and numbers of errors -> its clearest errors.
    """

    model: str
    measure: str
    explanation: str
    ends: tuple[str, str] | None
    groups: Mapping[str, list[Shown]]


def differing(first: Sequence[str], second: Sequence[str]) -> tuple[list[bool], list[bool]]:
    """Which words of each of two captions do not stand in the other one, in a longest common order."""
    marks = [True] * len(first), [True] * len(second)
    for block in difflib.SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks():
        marks[0][block.a : block.a + block.size] = [False] * block.size
        marks[1][block.b : block.b + block.size] = [False] * block.size
    return marks


def runs_of(words: Sequence[str], marks: Sequence[bool]) -> list[tuple[str, bool]]:
    """Neighbouring words that are all marked, or all not, together."""
    groups = groupby(zip(words, marks, strict=True), key=lambda pair: pair[1])
    return [(" ".join(word for word, _ in pairs), is_marked) for is_marked, pairs in groups]


def write_failures(scorer: Scorer, model: str, failures: Mapping[str, Failures], stem: Path) -> list[Path]:
    """Write a page of all benchmarks and, of each that has errors, a sheet.

    Args:
        scorer: the model.
        model: what to call it.
        failures: benchmark -> its errors.
        stem: path that the files' names begin with.

    Returns:
        The files.
    """
    explanation, ends = "", None
    groups: dict[str, list[Shown]] = {}
    for title, own in failures.items():
        heading = f"{title}: {own}"
        groups[heading] = []
        for failure in own.clearest:
            image = named_source(ROOT, [failure.name], [failure.image]).read(0)
            looks: Sequence[CaptionLook] = ()
            if isinstance(scorer, LookingScorer):
                look = scorer.look_at(image, (failure.true_caption, failure.false_caption))
                looks, explanation, ends = look.captions, look.explanation, look.ends
                picture = view_pixels(image, look.view, PICTURE_HEIGHT)
            else:
                picture = resized(np.asarray(image), PICTURE_HEIGHT)
            groups[heading].append(Shown(failure, picture, looks))
    gallery = Gallery(model, scorer.measure, explanation, ends, groups)
    paths = [stem.with_name(f"{stem.name}.html")]
    write_page(gallery, paths[0])
    for name, (heading, shown) in zip(
        file_names([title.replace("/", "_") for title in failures]), groups.items(), strict=True
    ):
        if shown:
            paths.append(stem.with_name(f"{stem.name}_{name}.png"))
            draw_sheet(gallery, heading, paths[-1])
    return paths


# The page.


def write_page(gallery: Gallery, path: Path) -> None:
    """Write the gallery as one self-contained page.

    Args:
        gallery: what to show.
        path: the .html file to write.
    """
    sections = [
        f"<h2>{escape(heading)}</h2>" + "\n".join(map(_section, shown)) for heading, shown in gallery.groups.items()
    ]
    page = html_page(
        TITLE,
        f"{gallery.model} · scores: {gallery.measure}",
        f"{escape(RULE)} {escape(gallery.explanation)}",
        "\n".join(sections),
        "Click an image to switch its map on and off." if gallery.ends else "",
        more_style=FIGURES_STYLE + TILE_STYLE + OWN_STYLE,
        ends=gallery.ends,
    )
    write_text(page, path)


def _section(shown: Shown) -> str:
    """One error."""
    name = escape(short_name(shown.failure.image), quote=True)
    bands = "\n".join(_band(shown, band) for band in shown.bands)
    return (
        f'<section><img alt="{name}" src="{data_uri(shown.picture)}">\n'
        f'<div><p class="where">{escape(shown.where)}</p>\n{bands}\n</div></section>'
    )


def _band(shown: Shown, band: Band) -> str:
    runs = runs_of(band.words, band.marks)
    caption = " ".join(f"<mark>{escape(words)}</mark>" if is_marked else escape(words) for words, is_marked in runs)
    figures = "\n".join(tile_figure(shown.picture, tile, shown.failure.image) for tile in band.look.tiles)
    shots = f'<div class="figures" style="--count: {TILES_PER_LINE}">\n{figures}\n</div>' if figures else ""
    line = f"<p>{escape(band.look.line)}</p>" if band.look.line else ""
    return (
        f'<div class="band {band.kind}"><h3><b>{band.kind} {band.score:.3f}</b><span>{caption}</span></h3>'
        f"{line}{shots}</div>"
    )


# The sheet.


def draw_sheet(gallery: Gallery, heading: str, path: Path) -> None:
    """Draw the first errors of a benchmark.

    Args:
        gallery: what to show.
        heading: of the benchmark, a key of `groups`.
        path: the PNG to write.

    Raises:
        ImportError: matplotlib is not installed.
    """
    rows = gallery.groups[heading][:SHEET_ROWS]
    width = PICTURE + SIDE_GAP + COLUMN
    about = f"{gallery.model}  ·  scores: {gallery.measure}"
    # The sentences on reading are the page's; here the first two are enough.
    explanation = [". ".join(gallery.explanation.split(". ")[:2]).rstrip(".") + "."] if gallery.explanation else []
    legend = gallery.ends is not None, gallery.ends or RAMP_ENDS
    top = Heading(width, f"{TITLE}  ·  {heading}", [about, *explanation], *legend)
    heights = [max(PICTURE, WHERE + sum(map(_band_height, row.bands)) + BAND_GAP) for row in rows]
    page = Page(width + 2 * MARGIN, 2 * MARGIN + top.height + sum(heights) + ROW_GAP * len(rows))
    top.draw(page, MARGIN, MARGIN)
    y = MARGIN + top.height + ROW_GAP
    for row, height in zip(rows, heights, strict=True):
        _draw_row(page, y, row)
        y += height + ROW_GAP
    page.save(path)


def _lines(band: Band) -> list[str]:
    """Its caption in lines."""
    return wrap(" ".join(band.words), COLUMN - SCORE_WIDTH, CAPTION_SIZE, "bold")


def _band_height(band: Band) -> int:
    tiles: Sequence[Tile] = band.look.tiles
    notes = LINE * len(wrap(band.look.line, COLUMN)) if band.look.line else 0
    return CAPTION_LINE * len(_lines(band)) + notes + (8 + tiles_height(tiles, TILE, TILES_PER_LINE) if tiles else 0)


def _draw_row(page: Page, y: int, row: Shown) -> None:
    """One error, its upper edge at y."""
    x = MARGIN + PICTURE + SIDE_GAP
    page.picture(MARGIN, y, fitted(row.picture, PICTURE, PICTURE))
    page.text(x, y + 13, shorten(row.where, COLUMN), colour=SOFT)
    y += WHERE
    for band in row.bands:
        _draw_caption(page, x, y, band)
        below = y + CAPTION_LINE * len(_lines(band))
        for line in wrap(band.look.line, COLUMN) if band.look.line else ():
            page.text(x, below + 14, line, colour=SOFT)
            below += LINE
        draw_tiles(page, x, below + 8, row.picture, band.look.tiles, TILE, TILES_PER_LINE)
        y += _band_height(band) + BAND_GAP


def _draw_caption(page: Page, x: int, y: int, band: Band) -> None:
    """A caption and its score, upper edge at y; a colour behind words that differ."""
    page.text(x, y + 18, f"{band.kind} {band.score:.3f}", CAPTION_SIZE, COLOURS[band.kind], weight="bold")
    space = text_width("a a", CAPTION_SIZE, "bold") - text_width("aa", CAPTION_SIZE, "bold")
    start = 0
    for number, line in enumerate(_lines(band)):
        left, base = float(x + SCORE_WIDTH), y + 18 + CAPTION_LINE * number
        words = line.split()
        for run, is_marked in runs_of(words, band.marks[start : start + len(words)]):
            width = text_width(run, CAPTION_SIZE, "bold")
            if is_marked:
                page.panel(round(left) - 3, base - 17, round(width) + 6, 23, MARKS[band.kind])
            page.text(round(left), base, run, CAPTION_SIZE, weight="bold")
            left += width + space
        start += len(words)

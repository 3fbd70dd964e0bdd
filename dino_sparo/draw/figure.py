"""The description of a figure: sections of bands of labelled tiles; names of images and models in figures and files.

`sheet.py` draws the description as PNG, PDF or SVG; `html.py` makes a page of it.

    Figure -> Section (a slot, an image, an error) -> Band (a caption, a model) -> Tile (an image and a map on it)
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from dino_sparo.draw.pixels import Picture, overlay
from dino_sparo.models.encoder import EncoderConfig
from dino_sparo.runtime.cli import printable

ORANGE = (252, 176, 78)  # behind words; the maps' bright orange
RAMP_ENDS = ("even share of attention or less", "most")
MAX_FILE_NAME = 80  # characters; file systems take 255 bytes, and endings and numbers are added
PICTURE_HEIGHT = 480  # pixels, of the views that tiles hold; sheets make them smaller


class Word(NamedTuple):
    """A word, with a colour behind it.

    Attributes:
        text: the word.
        level: strength of the colour, from 0 (none) to 1.
        colour: red, green and blue, 0 to 255.
        note: shown on a page when the pointer rests on the word.
        has_space: whether a space precedes it.
    """

    text: str
    level: float = 0.0
    colour: tuple[int, int, int] = ORANGE
    note: str = ""
    has_space: bool = True


@dataclass(frozen=True)
class Tile:
    """An image, a map painted on it, and the words around.

    Attributes:
        picture: (H, W, 3), the image.
        name: where the image lies.
        paint: the image at any size -> the same with the map on it; None: the image alone.
        title: above it: whose map it is.
        numbers: beside the title.
        caption: below it.
        notes: below that, left and right.
        tooltip: shown on a page when the pointer rests on the image.
        is_soft: whether it matters less than others.
        frame: its colour; None: without one.
        group: neighbouring tiles of one group share a panel on a sheet; None: in no group.
    """

    picture: Picture
    name: str
    paint: Callable[[Picture], Picture] | None = None
    title: str = ""
    numbers: str = ""
    caption: Sequence[Word] = ()
    notes: tuple[str, str] = ("", "")
    tooltip: str = ""
    is_soft: bool = False
    frame: str | None = None
    group: int | None = None


@dataclass(frozen=True)
class Band:
    """Tiles that belong together, under words.

    Attributes:
        heading: words in bold.
        label: a number before the heading, in the colour of `kind`.
        kind: "true" or "false" caption, where a label says so.
        lines: further numbers in words; a sheet shows them side by side.
        tiles: in their order.
    """

    heading: Sequence[Word] = ()
    label: str = ""
    kind: Literal["", "true", "false"] = ""
    lines: Sequence[str] = ()
    tiles: Sequence[Tile] = ()


@dataclass(frozen=True)
class Section:
    """A part of a figure: a name or a picture at the left, bands beside it.

    Attributes:
        bands: below one another.
        name: at the left.
        facts: lines below the name.
        picture: at the left, in place of a name.
        about: a line above the bands.
        group: number and letter of the group that the section belongs to; None: of none.
        keys: names -> numbers that a page can sort sections by.
    """

    bands: Sequence[Band]
    name: str = ""
    facts: Sequence[str] = ()
    picture: Tile | None = None
    about: str = ""
    group: tuple[int, str] | None = None
    keys: dict[str, int] = field(default_factory=dict)


class Layout(NamedTuple):
    """Sizes on a sheet, pixels.

    Attributes:
        tile: largest height and width of a tile's picture.
        per_line: tiles beside one another, at most.
        side: width of the column for names and pictures; 0: without one.
        gap: between tiles.
        is_flowing: whether sections fill several columns, so that the sheet has about a slide's shape.
    """

    tile: tuple[int, int]
    per_line: int
    side: int = 0
    gap: int = 12
    is_flowing: bool = False


@dataclass(frozen=True)
class Figure:
    """All that a sheet and a page show.

    Attributes:
        title: one line.
        about: a line about model and images.
        summary: paragraphs of a sheet: how to read it.
        explanation: the same for a page, at any length.
        sections: in their order.
        layout: of a sheet.
        ends: words for the lowest and the highest colour of the maps; None where there are no maps.
        legend: words with the colours that words may have, and what these mean.
    """

    title: str
    about: str
    sections: Sequence[Section]
    layout: Layout
    summary: Sequence[str] = ()
    explanation: str = ""
    ends: tuple[str, str] | None = RAMP_ENDS
    legend: Sequence[Word] = ()


def map_painter(levels: Float[np.ndarray, "h w"], smooth: bool = True) -> Callable[[Picture], Picture]:
    """A painter of a map on its image; levels are on the scale of colours: 0 no colour, 1 the strongest."""
    return partial(overlay, levels=levels, smooth=smooth)


def plain_words(text: str) -> list[Word]:
    """Words of a text, without colours."""
    return [Word(text) for text in text.split()]


def merge_words(words: Sequence[Word]) -> list[Word]:
    """Neighbouring words of one colour as one, so that one panel lies behind them; a word with a note starts anew."""
    merged: list[Word] = []
    for word in words:
        is_same = bool(merged) and (merged[-1].level, merged[-1].colour) == (word.level, word.colour)
        if is_same and word.has_space and not word.note:
            merged[-1] = merged[-1]._replace(text=f"{merged[-1].text} {word.text}")
        else:
            merged.append(word)
    return merged


def short_name(location: str) -> str:
    """A location without the folders that all images share: the last two parts of its path, printable."""
    return printable("/".join(PurePath(location).parts[-2:]))


def run_names(weights: Sequence[str]) -> list[str]:
    """Short names of checkpoints: folder and file, and as many folders above as make the names differ."""
    if all(path == "demo" and not Path(path).exists() for path in weights):  # the encoder in this package
        return list(weights)
    paths = [Path(path).absolute().parts[1:] for path in weights]
    depth = 2
    while len({path[-depth:] for path in paths}) < len(set(paths)):
        depth += 1
    return [printable("/".join(path[-depth:])) for path in paths]


def describe_model(record: Mapping[str, Any], encoder: EncoderConfig, run: str | None, *words: str) -> str:
    """A line about a model, for figures: run (None: named elsewhere), architecture, `words`, epoch."""
    epoch = f"epoch {record['epoch']}" if isinstance(record["epoch"], int) else None
    parts = (run, f"{encoder.arch}/{encoder.patch_size}", *words, epoch)
    return "  ·  ".join(part for part in parts if part is not None)


def file_names(locations: Sequence[str]) -> list[str]:
    """File names that show which images they were made of, without folder and ending; images of one name are numbered.

    Letters, digits, dots, dashes and underscores stay, all else becomes an underscore.
    """
    names: dict[str, str] = {}  # by small letters, which some file systems do not tell from capitals
    for location in locations:
        stem = re.sub(r"[^\w.-]+", "_", PurePath(location).stem).strip("_.")[:MAX_FILE_NAME] or "image"
        numbered = (stem, *(f"{stem}-{number}" for number in range(2, len(names) + 3)))
        name = next(name for name in numbered if name.lower() not in names)
        names[name.lower()] = name
    return list(names.values())

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
        level: strength of the colour, from 0 (none) to 1.
        colour: red, green and blue, 0 to 255.
        note: shown on a page when the pointer rests on the word.
        has_space: whether a space precedes the word.
    """

    text: str
    level: float = 0.0
    colour: tuple[int, int, int] = ORANGE
    note: str = ""
    has_space: bool = True


@dataclass(frozen=True)
class Tile:
    """An image, a map painted on it, and the words around it.

    Attributes:
        name: location of the image.
        paint: the image at any size -> the image with the map on it; None: the image alone.
        title: above the image: whose map it is.
        numbers: beside the title.
        caption: below the image.
        notes: below the caption, left and right.
        tooltip: shown on a page when the pointer rests on the image.
        is_soft: whether the title is grey, as that of a less important tile.
        frame: colour of the frame; None: no frame.
        group: neighbouring tiles of one group share a panel on a sheet; None: no group.
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
        kind: "true" or "false" for the label of a true or false caption.
        lines: numbers in words, below the heading; a sheet shows them side by side.
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
        facts: lines below the name.
        picture: at the left, in place of a name.
        about: a line above the bands.
        group: number and letter of the section's group; None: no group.
        keys: numbers by which a page can sort sections, by their names.
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
        per_line: largest number of tiles in a line.
        side: width of the column for names and pictures; 0: no column.
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
        about: a line about model and images.
        summary: how to read a sheet, in paragraphs.
        explanation: how to read a page, at any length.
        ends: words for the lowest and the highest colour of the maps; None: there are no maps.
        legend: the meaning of the colours behind words.
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
    """Join neighbouring words of one colour, so that one panel lies behind them; a word with a note begins a panel."""
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
    """Short names of checkpoints: folder and file, with more folders above them until the names differ."""
    if all(path == "demo" and not Path(path).exists() for path in weights):  # the encoder in this package
        return list(weights)
    paths = [Path(path).absolute().parts[1:] for path in weights]
    depth = 2
    while len({path[-depth:] for path in paths}) < len(set(paths)):
        depth += 1
    return [printable("/".join(path[-depth:])) for path in paths]


def run_name(record: Mapping[str, Any]) -> str:
    """Short name of a model, whose record in a result is given."""
    return "untrained" if record.get("untrained") else run_names([record["pretrained_weights"]])[0]


def describe_model(record: Mapping[str, Any], encoder: EncoderConfig, *words: str, has_run: bool = True) -> str:
    """A line about a model, for figures: run (unless the figure names it elsewhere), architecture, `words`, epoch."""
    run = [run_name(record)] if has_run else []
    epoch = [f"epoch {record['epoch']}"] if isinstance(record["epoch"], int) else []
    return "  ·  ".join([*run, f"{encoder.arch}/{encoder.patch_size}", *words, *epoch])


def file_names(locations: Sequence[str]) -> list[str]:
    """The names of images without folder and ending, as names of new files; images of one name are numbered.

    Letters, digits, dots, dashes and underscores stay. Other characters become underscores.
    """
    names: dict[str, str] = {}  # by small letters, since some file systems do not distinguish capitals
    for location in locations:
        stem = re.sub(r"[^\w.-]+", "_", PurePath(location).stem).strip("_.")[:MAX_FILE_NAME] or "image"
        numbered = (stem, *(f"{stem}-{number}" for number in range(2, len(names) + 3)))
        name = next(name for name in numbered if name.lower() not in names)
        names[name.lower()] = name
    return list(names.values())

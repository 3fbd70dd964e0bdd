"""Labels of pixels -> PNG masks with a palette, and sheets: image, truth, prediction, errors, slots."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Shaped, UInt8
from PIL import Image

from dino_sparo.data.views import rgb_pixels
from dino_sparo.draw.figure import PICTURE_HEIGHT, Band, Figure, Layout, Section, Tile, Word, short_name
from dino_sparo.draw.pixels import Picture, fit, save_picture
from dino_sparo.evaluation.segment.data import VOID

COVER = 0.65  # of the image by the colours of classes
WRONG, RIGHT = (230, 30, 30), (245, 245, 245)
TILE = 190  # pixels, of a picture on a sheet


class SegmentedImage(NamedTuple):
    """An image with its labels, all (H, W).

    Attributes:
        location: where the image lies.
        image: the image.
        predicted: numbers of classes, from 0 in their order.
        truth: the same, or VOID; None for new images.
        slots: number of the slot at each pixel; None where slots are not shown.
        miou: mean IoU of this image, percent.
    """

    location: str
    image: Image.Image
    predicted: Int[np.ndarray, "H W"]
    truth: UInt8[np.ndarray, "H W"] | None = None
    slots: Int[np.ndarray, "H W"] | None = None
    miou: float | None = None


def palette() -> UInt8[np.ndarray, "256 3"]:
    """VOC's colours: bits 3k, 3k + 1, 3k + 2 of a number are bits 7 - k of red, green, blue."""
    bits = np.arange(256)[:, None] >> np.arange(24) & 1
    return (bits.reshape(256, 8, 3) << np.arange(7, -1, -1)[:, None]).sum(axis=1).astype(np.uint8)


PALETTE = palette()


def save_mask(labels: Int[np.ndarray, "H W"], numbers: Sequence[int], path: Path) -> None:
    """Write a PNG whose pixels are class numbers, with VOC's colours as its palette."""
    save_picture(np.asarray(numbers, dtype=np.uint8)[labels], path, PALETTE.flatten().tolist())


def paint(picture: Picture, colours: Shaped[np.ndarray, "h w"], table: UInt8[np.ndarray, "256 3"]) -> Picture:
    """Lay colours of a table over a picture, except number 0."""
    size = picture.shape[1], picture.shape[0]
    shown = np.asarray(Image.fromarray(colours.astype(np.uint8)).resize(size, Image.Resampling.NEAREST))
    cover = COVER * (shown > 0)[..., None]
    return (picture * (1 - cover) + table[shown] * cover + 0.5).astype(np.uint8)


def segmentation_figure(images: Sequence[SegmentedImage], classes: Mapping[int, str], title: str, about: str) -> Figure:
    """A row per image; above the row the names of its classes, with their colours."""
    numbers = np.array([*classes, *[0] * (VOID - len(classes)), VOID])  # label -> class number
    names = list(classes.values())
    errors = np.array([RIGHT, WRONG, *[RIGHT] * 254], dtype=np.uint8)
    sections = []
    for item in images:
        layers = {"prediction": (numbers[item.predicted], PALETTE)}  # name -> numbers of colours, and their table
        seen = set(np.unique(item.predicted).tolist())
        if item.truth is not None:
            seen |= set(np.unique(item.truth).tolist()) - {VOID}
            wrong = (item.predicted != item.truth) & (item.truth != VOID)
            layers = {"truth": (numbers[item.truth], PALETTE), **layers, "errors": (wrong, errors)}
        if item.slots is not None:
            layers["slots (own colours)"] = (item.slots % VOID + 1, PALETTE)
        picture = fit(rgb_pixels(item.image), PICTURE_HEIGHT, 2 * PICTURE_HEIGHT)
        tiles = [Tile(picture, item.location, title="image")]
        for name, (colours, table) in layers.items():
            tiles.append(Tile(picture, item.location, partial(paint, colours=colours, table=table), name))
        words = [
            Word(names[label], COVER * bool(numbers[label]), tuple(PALETTE[numbers[label]].tolist()))
            for label in sorted(seen)
        ]
        score = [] if item.miou is None else [f"mean IoU {item.miou:.1f} %"]
        sections.append(Section([Band(words, lines=[short_name(item.location), *score], tiles=tiles)]))
    return Figure(title, about, sections, Layout((TILE, 2 * TILE), 5), ends=None)

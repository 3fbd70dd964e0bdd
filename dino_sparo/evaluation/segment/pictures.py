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
from dino_sparo.draw.pixels import Picture, fit, save_indexed
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
    """Write a PNG whose pixels are class numbers; viewers show them in VOC's colours."""
    save_indexed(np.asarray(numbers, dtype=np.uint8)[labels], PALETTE.flatten().tolist(), path)


def paint(picture: Picture, colours: Shaped[np.ndarray, "h w"], table: UInt8[np.ndarray, "256 3"]) -> Picture:
    """Lay colours of a table over a picture; number 0 stays as it is."""
    size = picture.shape[1], picture.shape[0]
    shown = np.asarray(Image.fromarray(colours.astype(np.uint8)).resize(size, Image.Resampling.NEAREST))
    cover = COVER * (shown > 0)[..., None]
    return (picture * (1 - cover) + table[shown] * cover + 0.5).astype(np.uint8)


def segmentation_figure(images: Sequence[SegmentedImage], classes: Mapping[int, str], title: str, about: str) -> Figure:
    """A row for each image; above it the names of its classes in their colours."""
    numbers = np.array([*classes, *[0] * (VOID - len(classes)), VOID])  # label -> class number
    names = list(classes.values())
    errors = np.array([RIGHT, WRONG, *[RIGHT] * 254], dtype=np.uint8)
    sections = []
    for item in images:
        picture = fit(rgb_pixels(item.image), PICTURE_HEIGHT, 2 * PICTURE_HEIGHT)
        layers = {"image": None, "truth": item.truth, "prediction": item.predicted}
        tiles = [
            Tile(
                picture,
                item.location,
                None if labels is None else partial(paint, colours=numbers[labels], table=PALETTE),
                name,
            )
            for name, labels in layers.items()
            if labels is not None or name == "image"
        ]
        seen = set(np.unique(item.predicted).tolist())
        if item.truth is not None:
            seen |= set(np.unique(item.truth).tolist()) - {VOID}
            wrong = (item.predicted != item.truth) & (item.truth != VOID)
            tiles.append(Tile(picture, item.location, partial(paint, colours=wrong, table=errors), "errors"))
        if item.slots is not None:
            slots = item.slots % VOID + 1
            tiles.append(
                Tile(picture, item.location, partial(paint, colours=slots, table=PALETTE), "slots (own colours)")
            )
        words = [
            Word(names[label], COVER * bool(numbers[label]), tuple(PALETTE[numbers[label]].tolist()))
            for label in sorted(seen)
        ]
        score = [] if item.miou is None else [f"mean IoU {item.miou:.1f} %"]
        sections.append(Section([Band(words, lines=[short_name(item.location), *score], tiles=tiles)]))
    return Figure(title, about, sections, Layout((TILE, 2 * TILE), 5), ends=None)

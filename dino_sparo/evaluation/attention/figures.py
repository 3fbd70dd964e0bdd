"""Attention maps of one or two encoders -> a figure with the maps of each image."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from dino_sparo.draw.figure import RAMP_ENDS, Band, Figure, Layout, Section, Tile, map_painter, plain_words, short_name
from dino_sparo.draw.pixels import Picture, heat, mask_overlay
from dino_sparo.evaluation.attention.maps import (
    class_token_share,
    display_order,
    effective_patches,
    group_near_duplicates,
    letters_of_groups,
    mass_mask,
    rank_by_peakedness,
)

SHEET_WIDTH, GAP = 1528, 12  # pixels: of a sheet, about, and between tiles
TILE_HEIGHTS = (96, 320)  # pixels, smallest and largest
ASPECT = 1.7  # of a block of tiles, width to height, as a slide's
SEVERAL_IMAGES_MAPS, TWO_ENCODERS_MAPS = 12, 24  # default numbers of maps per image
NUMBERS_IN_WORDS = "Beside each: its effective patches, and the share of its attention to class token and registers."


@dataclass(frozen=True)
class MapSet:
    """The maps of some images by one encoder, with what a figure says about them.

    Attributes:
        run: what the encoder is called.
        model: how it is built and how long it was trained, one line.
        kind: "slot", "head" or "average": what one map is.
        patch_size: of the encoder, pixels.
        maps: (B, maps, h, w), raw.
        names: where the images lie.
        pictures: their views, large.
    """

    run: str
    model: str
    kind: str
    patch_size: int
    maps: Float[np.ndarray, "B maps h w"]
    names: Sequence[str]
    pictures: Sequence[Picture]

    @cached_property
    def groups(self) -> Int[np.ndarray, " maps"]:
        """Number of each map's group of near-duplicates."""
        return group_near_duplicates(self.maps)

    def record(self) -> dict[str, Any]:
        """The images, and the numbers of each map on them."""
        patches, prefix = effective_patches(self.maps), class_token_share(self.maps)
        ranking = rank_by_peakedness(self.maps).tolist()
        described = [
            {
                "map": number,
                "rank": ranking.index(number),
                "group": int(self.groups[number]),
                "effective_patches": patches[:, number].tolist(),
                "class_token_share": prefix[:, number].tolist(),
            }
            for number in range(self.maps.shape[1])
        ]
        return {
            "kind": self.kind,
            "images": list(self.names),
            "image_size": [self.patch_size * side for side in self.maps.shape[-2:]],
            "grid": list(self.maps.shape[-2:]),
            "maps": described,
        }

    def about(self, order: Int[np.ndarray, " _"]) -> str:
        """Run, model and number of maps, one line."""
        number = self.maps.shape[1]
        words = f"{number} {self.kind}{'s' if number > 1 else ''}"
        return f"{self.model}  ·  {words if len(order) == number else f'{len(order)} of {words}'}"

    def summary(self) -> list[str]:
        """Sentences about the labels of maps."""
        if self.kind == "average":
            return ["This model averages all tokens: its attention is the same everywhere, on every image."]
        rows, columns = self.maps.shape[-2:]
        return [
            f"Effective patches, of {rows} x {columns}: exp(entropy) of the attention, 1 for a single patch and "
            f"{rows * columns} for an even spread. Maps with the same letter and panel are similar."
        ]

    def tiles(self, order: Int[np.ndarray, " _"], image: int, threshold: float | None) -> list[Tile]:
        """An image, and its maps with number, effective patches and class-token share."""
        maps = self.maps[image]
        patches, prefix = effective_patches(maps), class_token_share(maps)
        return [Tile(self.pictures[image], self.names[image], title="image")] + [
            Tile(
                self.pictures[image],
                self.names[image],
                painter(maps[number], threshold),
                f"{self.kind} {number}",
                f"{patches[number]:.0f} · {100 * prefix[number]:.0f}%{f' · {letter}' if letter else ''}",
                group=int(self.groups[number]) if letter else None,
            )
            for number, letter in zip(order, letters_of_groups(self.groups[order]), strict=True)
        ]


def painter(heatmap: Float[np.ndarray, "h w"], threshold: float | None = None) -> Callable[[Picture], Picture]:
    """A painter of a map, or of the fewest patches with a share of the map's mass, on its image."""
    if threshold is None:
        return map_painter(heat(heatmap))
    return partial(mask_overlay, mask=mass_mask(heatmap, threshold))


def maps_figure(
    sides: Sequence[MapSet], images: Sequence[int], max_maps: int | None = None, threshold: float | None = None
) -> Figure:
    """Maps by peakedness, near-duplicates side by side: a section per image, a band per encoder.

    Args:
        sides: the maps of one encoder, or of two for the same images.
        images: numbers of the images to show.
        max_maps: per encoder and image, see `display_order`; None: all maps of a single image, fewer of several.
        threshold: show the patches that hold this share of a map's mass instead of the map.
    """
    if max_maps is None and (len(sides) > 1 or len(images) > 1):
        max_maps = TWO_ENCODERS_MAPS if len(sides) > 1 else SEVERAL_IMAGES_MAPS
    orders = [display_order(side.maps, side.groups, max_maps) for side in sides]
    first, sections = sides[0], []
    for image in images:
        bands = [
            Band(
                plain_words(side.run) if len(sides) > 1 else (),
                lines=[side.about(order)] if len(sides) > 1 else (),
                tiles=side.tiles(order, image, threshold),
            )
            for side, order in zip(sides, orders, strict=True)
        ]
        sections.append(Section(bands, about=short_name(first.names[image]) if len(images) > 1 else ""))
    words = dict.fromkeys(words for side in sides for words in side.summary())
    first_map = f"most peaked {first.kind}"
    if (number := len(first.maps)) > 1:
        first_map = f"{first.kind} that is most peaked on average over {number} images"
    summary = [" ".join([f"From the {first_map} to the most spread. {NUMBERS_IN_WORDS}", *words])]
    if threshold is not None:
        summary.append(f"Shown are the fewest patches with {100 * threshold:g}% of a {first.kind}'s attention.")
    lengths = [1 + len(order) for order in orders]  # an image and its maps
    longest = max(lengths)
    is_aligned = len(images) > 1 and longest <= 1 + SEVERAL_IMAGES_MAPS  # a column for each map
    count = longest if is_aligned else len(images) * sum(lengths)
    return Figure(
        short_name(first.names[images[0]]) if len(images) == 1 else f"{len(images)} images",
        f"{first.run}  ·  {first.about(orders[0])}" if len(sides) == 1 else "",
        sections,
        tile_layout(first.pictures[images[0]], count, longest, longest if is_aligned else 1),
        summary,
        ends=RAMP_ENDS if threshold is None else None,
    )


def tile_layout(picture: Picture, count: int, longest: int, least: int) -> Layout:
    """The layout of a sheet of about a slide's shape, with few empty places in a band's last line."""
    aspect = picture.shape[1] / picture.shape[0]
    columns = min(
        range(least, longest + 1),
        key=lambda n: abs(math.log(n * aspect / math.ceil(count / n) / ASPECT)) + (-longest % n) / longest,
    )
    width = (SHEET_WIDTH + GAP) / columns - GAP
    height = min(max(round(width / aspect), TILE_HEIGHTS[0]), TILE_HEIGHTS[1])
    return Layout((height, max(1, round(height * aspect))), columns, gap=GAP)

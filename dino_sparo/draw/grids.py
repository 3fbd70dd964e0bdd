"""Attention maps -> labelled figures: all maps of an image, the same maps for many images, two models side by side.

The maps come from `evaluation/attention/maps.py`; `sheet.py` does the layout. Sizes are in pixels. Words are measured
before they get their place, so that pictures of any shape leave room for them.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int, UInt8

from dino_sparo.draw.plots import panels
from dino_sparo.draw.sheet import (
    ASPECT,
    GAP,
    INK,
    LABEL,
    LINE,
    MARGIN,
    SOFT,
    Heading,
    Page,
    Tiles,
    fitted,
    resized,
    shorten,
    wrap,
)
from dino_sparo.evaluation.attention.maps import (
    class_token_share,
    display_order,
    effective_patches,
    group_near_duplicates,
    mask_overlay,
    mass_mask,
    overlay,
)

HEADING_WIDTH = 600  # the least, so that sentences are not broken into many lines
LEAD_HEIGHT, LEAD_WIDTH = 150, 320  # of the view beside a grid's heading, at most
COMPARE_HEIGHTS, COMPARE_WIDTH = (140, 240), 360  # of a tile where two models are compared, at most
LABEL_WIDTH = 76  # about, of a tile's label in two lines
COMPARE_LEAD, GUTTER = 320, 44  # height of the view beside the two, and space between the parts
SIDE_WIDTH = 320  # the least, of a model's block
SIDE_SIZE, SIDE_NAME = 16.0, 16  # of the letters of a model's name, and their height
MATRIX_HEIGHT, MATRIX_WIDTH = 120, 240  # of a tile where several images are shown, at most
MATRIX_MAPS, COMPARE_MAPS = 12, 24  # shown, if nobody asks for another number
LABELS_IN_WORDS = "Beside each: patches it looks at, and the share of its attention that the class token gets."


@dataclass(frozen=True)
class MapSet:
    """The maps of some images by one encoder, with what a figure says about them.

    Attributes:
        run: what the encoder is called.
        model: how it is built and how long it was trained, one line.
        kind: "slot", "head" or "average": what one map is.
        maps: (B, maps, h, w), raw.
    """

    run: str
    model: str
    kind: str
    maps: Float[np.ndarray, "B maps h w"]

    @cached_property
    def groups(self) -> Int[np.ndarray, " maps"]:
        """(maps,), near-duplicates share a number."""
        return group_near_duplicates(self.maps)

    def count(self, order: Int[np.ndarray, " _"]) -> str:
        """How many of the maps are shown, in words."""
        number = self.maps.shape[1]
        words = f"{number} {self.kind}{'s' if number > 1 else ''}"
        return words if len(order) == number else f"{len(order)} of {words}"

    def letters(self, order: Int[np.ndarray, " _"]) -> list[str]:
        """What a label says of each shown map's group; nothing where no near-duplicate is shown."""
        return [f" · {letter}" if letter else "" for letter in letters_of_groups(self.groups[order])]

    def about(self, order: Int[np.ndarray, " _"]) -> list[str]:
        """Sentences about the labels: what the number of patches is, and what a letter means."""
        if self.kind == "average":
            return ["This model averages all tokens: its attention is the same everywhere, on every image."]
        rows, columns = self.maps.shape[-2:]
        words = [
            f"Patches, of {rows} x {columns}: exp(entropy) of the attention, which is 1 for a single patch and "
            f"{rows * columns} for an even spread."
        ]
        if any(self.letters(order)):
            words.append("A letter and a panel mark maps that look alike.")
        elif len(np.unique(self.groups)) < len(self.groups):
            words.append(f"Of {self.kind}s that look alike one is shown.")
        return words


def grid_page(
    path: Path,
    title: str,
    picture: UInt8[np.ndarray, "H W 3"],
    map_set: MapSet,
    image: int = 0,
    max_maps: int | None = None,
    threshold: float | None = None,
) -> None:
    """All maps of one image, labelled, by peakedness, near-duplicates on a common panel.

    Args:
        path: the PNG to write.
        title: what the image is called.
        picture: (H, W, 3), the view, large.
        map_set: the maps.
        image: which of the maps' images.
        max_maps: show at most so many; see `attention.display_order`.
        threshold: show the patches that hold this share of a map's mass instead of the map.
    """
    order = display_order(map_set.maps, map_set.groups, max_maps)
    aspect = picture.shape[1] / picture.shape[0]
    tiles = Tiles.fit(tile_labels(map_set, image, order), aspect)
    lead = fitted(picture, LEAD_HEIGHT, LEAD_WIDTH)
    beside = MARGIN + lead.shape[1] + 24
    width = MARGIN + max(MARGIN + tiles.block_width, beside + HEADING_WIDTH)
    lines = [
        f"{map_set.run}  ·  {map_set.model}  ·  {map_set.count(order)}",
        " ".join([_order_in_words(map_set), *map_set.about(order)]),
    ]
    if threshold is not None:
        lines.append(f"Shown are the fewest patches that hold {100 * threshold:g}% of a {map_set.kind}'s attention.")
    heading = Heading(width - MARGIN - beside, title, lines, has_legend=threshold is None)
    top = MARGIN + max(lead.shape[0], heading.height) + 28
    page = Page(width, top + tiles.block_height + MARGIN)
    page.picture(MARGIN, MARGIN, lead)
    heading.draw(page, beside, MARGIN)
    draw_tiles(page, (MARGIN, top), tiles, picture, map_set, image, order, threshold)
    page.save(path)


def _order_in_words(map_set: MapSet) -> str:
    """In which order the maps of one image stand, and what their labels hold."""
    number = len(map_set.maps)
    average = f"{map_set.kind} that is most peaked on average over {number} images"
    return f"From the {average if number > 1 else f'most peaked {map_set.kind}'} to the most spread. {LABELS_IN_WORDS}"


def tile_labels(map_set: MapSet, image: int, order: Int[np.ndarray, " _"]) -> list[tuple[str, str]]:
    """Of each shown map its name, and its numbers on one image."""
    patches, prefix = effective_patches(map_set.maps[image]), class_token_share(map_set.maps[image])
    return [
        (f"{map_set.kind} {index}", f"{patches[index]:.0f} · {100 * prefix[index]:.0f}%" + letter)
        for index, letter in zip(order, map_set.letters(order), strict=True)
    ]


def draw_tiles(
    page: Page,
    corner: tuple[int, int],
    tiles: Tiles,
    picture: UInt8[np.ndarray, "H W 3"],
    map_set: MapSet,
    image: int,
    order: Int[np.ndarray, " _"],
    threshold: float | None = None,
) -> None:
    """A block of labelled maps of one image with its upper left corner at `corner`; see `grid_page`."""
    x, y = corner
    shown = resized(picture, tiles.height)
    _draw_panels(page, x, y, tiles, map_set.groups[order])
    labels = tile_labels(map_set, image, order)
    for position, (index, label) in enumerate(zip(order, labels, strict=True)):
        left, top = tiles.corner(position)
        tiles.draw_label(page, x + left, y + top, *label)
        page.picture(x + left, y + top + tiles.label, tile_picture(shown, map_set.maps[image, index], threshold))


def tile_picture(
    picture: UInt8[np.ndarray, "H W 3"], heatmap: Float[np.ndarray, "h w"], threshold: float | None = None
) -> UInt8[np.ndarray, "H W 3"]:
    """A map over its image, or the mask of the patches that hold a share of its mass."""
    if threshold is None:
        return overlay(picture, heatmap)
    return mask_overlay(picture, mass_mask(heatmap, threshold))


def _draw_panels(page: Page, x: int, y: int, tiles: Tiles, groups: Int[np.ndarray, " _"]) -> None:
    """A panel behind each run of tiles that share a group and a row."""
    pad = GAP // 2 - 1
    start = 0
    for position in range(1, len(groups) + 1):
        if position < len(groups) and groups[position] == groups[start] and position % tiles.columns:
            continue
        if np.count_nonzero(groups == groups[start]) > 1:
            left, top = tiles.corner(start)
            right, _ = tiles.corner(position - 1)
            size = right - left + tiles.cell + 2 * pad, tiles.height + tiles.label + 2 * pad
            page.panel(x + left - pad, y + top - pad, *size)
        start = position


def matrix_page(
    path: Path, title: str, pictures: Sequence[UInt8[np.ndarray, "H W 3"]], map_set: MapSet, max_maps: int | None = None
) -> None:
    """The same maps for several images: a row per image, a column per map, most peaked first.

    Args:
        path: the PNG to write.
        title: what the images are called.
        pictures: one per image, of one size.
        map_set: their maps.
        max_maps: columns, at most; None: `MATRIX_MAPS`.
    """
    order = display_order(map_set.maps, map_set.groups, max_maps or MATRIX_MAPS)
    shown = [fitted(picture, MATRIX_HEIGHT, MATRIX_WIDTH) for picture in pictures]
    height, width = shown[0].shape[:2]
    patches = np.exp(np.log(effective_patches(map_set.maps)).mean(axis=0))
    labels = [
        (f"{map_set.kind} {index}", f"{patches[index]:.0f}{letter}")
        for index, letter in zip(order, map_set.letters(order), strict=True)
    ]
    tiles = Tiles.with_room(labels, len(order), height, width)
    left, step = MARGIN + width + GAP + GAP // 2, height + GAP // 2
    page_width = MARGIN + max(left + tiles.block_width, MARGIN + HEADING_WIDTH)
    lines = [
        f"{map_set.run}  ·  {map_set.model}  ·  {map_set.count(order)}, the same for all images",
        f"From the {map_set.kind} that is most peaked on average over these images to the most spread. Beside each: "
        f"patches it looks at, their geometric mean. {' '.join(map_set.about(order))}",
    ]
    heading = Heading(page_width - 2 * MARGIN, title, lines)
    top = MARGIN + heading.height + 22
    page = Page(page_width, top + tiles.label + len(shown) * step - GAP // 2 + MARGIN)
    heading.draw(page, MARGIN, MARGIN)
    for column, label in enumerate(labels):
        tiles.draw_label(page, left + tiles.corner(column)[0], top, *label)
    for row, picture in enumerate(shown):
        y = top + tiles.label + row * step
        page.picture(MARGIN, y, picture)
        for column, index in enumerate(order):
            page.picture(left + tiles.corner(column)[0], y, overlay(picture, map_set.maps[row, index]))
    page.save(path)


def compare_page(
    path: Path,
    title: str,
    pictures: Sequence[tuple[UInt8[np.ndarray, "H W 3"], UInt8[np.ndarray, "H2 W2 3"]]],
    sides: tuple[MapSet, MapSet],
    max_maps: int | None = None,
) -> None:
    """Two encoders side by side on the same images, e.g. the heads of `cls` against the slots of `sparo`.

    Args:
        path: the PNG to write.
        title: what the images are called.
        pictures: per image its view by either encoder; they differ by less than a patch.
        sides: the maps of either encoder.
        max_maps: maps per encoder and image, at most, near-duplicates left out where there are more; None:
            `COMPARE_MAPS`.
    """
    orders = [display_order(side.maps, side.groups, max_maps or COMPARE_MAPS) for side in sides]
    aspect = pictures[0][0].shape[1] / pictures[0][0].shape[0]
    # A narrow picture may be higher, so that it is about as wide as its label.
    height = min(max(COMPARE_HEIGHTS[0], round(LABEL_WIDTH / aspect)), COMPARE_HEIGHTS[1])
    tiles = [fitted(view, height, COMPARE_WIDTH).shape[:2] for view in pictures[0]]  # of either encoder's own view
    tile_height, tile_width = np.max(tiles, axis=0).tolist()
    # Two blocks side by side are to have about a slide's shape.
    rows = max(1, round(math.sqrt(max(map(len, orders)) * tile_width / tile_height / ASPECT)))
    blocks = [
        _compare_block(side, order, rows, len(pictures), *size)
        for side, order, size in zip(sides, orders, tiles, strict=True)
    ]
    widths = [max(block.block_width, SIDE_WIDTH) for block in blocks]
    models = [
        wrap(f"{side.model}  ·  {side.count(order)}", width)
        for side, order, width in zip(sides, orders, widths, strict=True)
    ]
    block_height = max(block.block_height for block in blocks)
    lead = fitted(pictures[0][0], min(block_height - LABEL, COMPARE_LEAD), COMPARE_WIDTH)
    page_width = 2 * MARGIN + lead.shape[1] + 2 * GUTTER + sum(widths)
    abouts = [words for side, order in zip(sides, orders, strict=True) for words in side.about(order)]
    heading = Heading(page_width - 2 * MARGIN, title, [" ".join([LABELS_IN_WORDS, *dict.fromkeys(abouts)])])
    side_top = MARGIN + heading.height + 24
    top = side_top + SIDE_NAME + LINE * max(map(len, models)) + 14
    page = Page(page_width, top + len(pictures) * (block_height + GUTTER) - GUTTER + MARGIN)
    heading.draw(page, MARGIN, MARGIN)
    for row, views in enumerate(pictures):
        y = top + row * (block_height + GUTTER)
        page.picture(MARGIN, y + blocks[0].label, resized(views[0], lead.shape[0]))
    x = MARGIN + lead.shape[1] + GUTTER
    for number, (side, order, block, width) in enumerate(zip(sides, orders, blocks, widths, strict=True)):
        page.text(x, side_top + SIDE_NAME, shorten(side.run, width, SIDE_SIZE, "bold"), SIDE_SIZE, weight="bold")
        for line, words in enumerate(models[number], 1):
            page.text(x, side_top + SIDE_NAME + LINE * line, words, colour=SOFT)
        for row, views in enumerate(pictures):
            draw_tiles(page, (x, top + row * (block_height + GUTTER)), block, views[number], side, row, order)
        x += width + GUTTER
    page.save(path)


def _compare_block(
    side: MapSet, order: Int[np.ndarray, " _"], rows: int, num_images: int, height: int, width: int
) -> Tiles:
    """Tiles of one model, in about so many rows, with room for the labels of all images."""
    labels = [tile_labels(side, image, order) for image in range(num_images)]
    columns = -(-len(order) // rows)
    tiles = Tiles.with_room([label for image in labels for label in image], columns, height, width)
    return replace(tiles, rows=-(-len(order) // columns))


def letters_of_groups(groups: Int[np.ndarray, " maps"]) -> list[str]:
    """A letter for each member of a group of two or more, in the order of the groups; empty for the others."""
    shared = {int(group): _letter(i) for i, group in enumerate(np.flatnonzero(np.bincount(groups) > 1))}
    return [shared.get(int(group), "") for group in groups]


def _letter(index: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    letters = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        letters = chr(ord("A") + rest) + letters
    return letters


def draw_training_curve(log: Path, path: Path) -> None:
    """log.txt -> how a run went: loss and teacher's entropy, and 20-NN where it was probed, against steps.

    Args:
        log: one JSON line per epoch.
        path: of the PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    epochs = [json.loads(line) for line in log.read_text().splitlines()]
    probed = [epoch for epoch in epochs if "knn_20" in epoch]
    curves = {"train_loss": ("loss", INK), "train_teacher_entropy": ("teacher's entropy", SOFT)}
    with panels(path, 1, 2 if probed else 1) as ((losses, *others),):
        for name, (label, colour) in curves.items():
            shown = [epoch for epoch in epochs if name in epoch]
            losses.plot([e["step"] for e in shown], [e[name] for e in shown], ".-", color=colour, label=label)
        losses.set(xlabel="step", ylabel="nats")
        losses.legend(frameon=False)
        for accuracy in others:
            accuracy.plot([e["step"] for e in probed], [e["knn_20"] for e in probed], ".-", color=INK)
            accuracy.set(xlabel="step", ylabel="20-NN accuracy of the teacher, %")

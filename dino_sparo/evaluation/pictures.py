"""Attention maps -> labelled figures: all maps of an image, the same maps for many images, two models side by side.

Stage 5 of the map, after `attention.py`. Pages are laid out in pixels: every picture keeps its pixels as they are, and
matplotlib (the extra `plots`) adds the words.
"""

import importlib.util
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt8
from PIL import Image

from dino_sparo.evaluation.attention import (
    class_token_share,
    display_order,
    effective_patches,
    group_near_duplicates,
    mask_overlay,
    mass_mask,
    overlay,
    ramp,
)

DPI = 100
INK, SOFT, PAPER = "#16161d", "#74747f", "#ffffff"
PANEL = "#ece8f6"  # behind near-duplicates
MARGIN, GAP, LABEL = 36, 12, 19  # pixels: page margin, between tiles, height of a tile's label
TITLE_SIZE, TEXT_SIZE, LABEL_SIZE = 21.0, 13.0, 11.5  # pixels
PAGE_WIDTH = 1600  # about, pixels
TILE_HEIGHTS = (96, 320)  # pixels, smallest and largest
ASPECT = 1.7  # of a page's block of tiles, width to height, as a slide's


@dataclass(frozen=True)
class MapSet:
    """The maps of some images by one encoder, with what a figure says about them.

    Attributes:
        model: a line about the encoder.
        kind: "slot", "head" or "average": what one map is.
        maps: (B, M, h, w), raw.
        groups: (M,), near-duplicates share a number.
    """

    model: str
    kind: str
    maps: Float[np.ndarray, "B M h w"]
    groups: Int[np.ndarray, " M"]

    @classmethod
    def of(cls, model: str, readout: str, maps: Float[np.ndarray, "B M h w"]) -> "MapSet":
        """Group the maps of an encoder with the read-out `readout`."""
        kinds = {"sparo": "slot", "cls": "head", "gap": "average"}
        return cls(model, kinds[readout], maps, group_near_duplicates(maps))

    @property
    def count(self) -> str:
        """How many maps there are, in words."""
        number = self.maps.shape[1]
        return f"{number} {self.kind}{'s' if number > 1 else ''}"

    def letters(self) -> list[str]:
        """The letter of each map's group; empty for maps without near-duplicates."""
        return letters_of_groups(self.groups)


def require_matplotlib() -> None:
    """Refuse to go on without matplotlib, before anything has been computed.

    Raises:
        ImportError: it is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("figures need matplotlib; install it with: pip install 'dino_sparo[plots]'")


class Page:
    """A sheet of paper in pixels, x to the right, y downwards.

    Raises:
        ImportError: matplotlib is not installed.
    """

    def __init__(self, width: int, height: int) -> None:
        require_matplotlib()
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import FancyBboxPatch
        from matplotlib.transforms import IdentityTransform

        self.width, self.height = width, height
        self.figure: Any = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor=PAPER)
        FigureCanvasAgg(self.figure)
        self._box, self._pixels = FancyBboxPatch, IdentityTransform()

    def text(
        self,
        x: int,
        y: int,
        words: str,
        size: float = TEXT_SIZE,
        colour: str = INK,
        weight: str = "normal",
        **where: Any,
    ) -> None:
        """Words with their left end (or as `where` says) at x and their baseline at y; `size` in pixels."""
        # Names of files may hold dollar signs, which would start mathematics.
        place = {"transform": self._pixels, "parse_math": False, **where}
        self.figure.text(x, self.height - y, words, fontsize=size * 72 / DPI, color=colour, weight=weight, **place)

    def picture(self, x: int, y: int, pixels: UInt8[np.ndarray, "H W 3"]) -> None:
        """A picture with its upper left corner at (x, y)."""
        self.figure.figimage(pixels, x, self.height - y - pixels.shape[0], origin="upper")

    def panel(self, x: int, y: int, width: int, height: int, colour: str = PANEL) -> None:
        """A rounded rectangle, behind all pictures."""
        place: dict[str, Any] = {"transform": self._pixels, "zorder": -1}
        style: dict[str, Any] = {"boxstyle": "round,pad=0,rounding_size=7", "facecolor": colour, "edgecolor": "none"}
        self.figure.add_artist(self._box((x, self.height - y - height), width, height, **style, **place))

    def legend(self, x: int, y: int, width: int = 150, height: int = 10) -> None:
        """The colours of the maps, in words and as a ramp with its upper left corner at (x, y)."""
        blank = np.full((height, width, 3), 128, dtype=np.uint8)
        level = np.linspace(0, 1, width, dtype=np.float32)
        cover = np.sqrt(level)[None, :, None]
        colours = (blank * 0.5 * (1 - cover) + ramp(level)[None] * cover).astype(np.uint8)
        self.picture(x, y, colours)
        self.text(
            x + width + 10, y + height, "from no more than an even share of attention to the most", LABEL_SIZE, SOFT
        )

    def save(self, path: Path) -> None:
        """Write a PNG of exactly the page's size."""
        self.figure.savefig(path, dpi=DPI, facecolor=PAPER)


@dataclass(frozen=True)
class Tiles:
    """How a block of equal tiles is laid out.

    Attributes:
        columns: tiles per row.
        rows: rows.
        height: of a tile's picture, pixels.
        width: likewise.
    """

    columns: int
    rows: int
    height: int
    width: int

    @classmethod
    def fit(cls, count: int, aspect: float, page_width: int = PAGE_WIDTH) -> "Tiles":
        """Tiles for `count` pictures of width / height `aspect`, so that the block has about a slide's shape."""
        # Near to a slide's shape, and few places left empty in the last row.
        columns = min(
            range(1, count + 1),
            key=lambda n: abs(math.log(n * aspect / -(-count // n) / ASPECT)) + (-count % n) / count,
        )
        rows = -(-count // columns)
        width = (page_width - 2 * MARGIN + GAP) / columns - GAP
        height = min(max(round(width / aspect), TILE_HEIGHTS[0]), TILE_HEIGHTS[1])
        return cls(columns, rows, height, max(1, round(height * aspect)))

    @property
    def block_width(self) -> int:
        """Pixels, without margins."""
        return self.columns * (self.width + GAP) - GAP

    @property
    def block_height(self) -> int:
        """Pixels, without margins."""
        return self.rows * (self.height + LABEL + GAP) - GAP

    def corner(self, place: int) -> tuple[int, int]:
        """Where the label of tile `place` begins, relative to the block."""
        row, column = divmod(place, self.columns)
        return column * (self.width + GAP), row * (self.height + LABEL + GAP)


def grid_page(
    path: Path,
    title: str,
    picture: UInt8[np.ndarray, "H W 3"],
    found: MapSet,
    image: int = 0,
    max_maps: int | None = None,
    threshold: float | None = None,
) -> None:
    """All maps of one image, labelled, by peakedness, near-duplicates on a common panel.

    Args:
        path: the PNG to write.
        title: what the image is called.
        picture: (H, W, 3), the view, large.
        found: the maps.
        image: which of the maps' images.
        max_maps: show at most so many; see `attention.display_order`.
        threshold: show the patches that hold this share of a map's mass instead of the map.
    """
    order = display_order(found.maps, found.groups, max_maps)
    aspect = picture.shape[1] / picture.shape[0]
    tiles = Tiles.fit(len(order), aspect)
    lead_height = 150
    lead = resized(picture, lead_height)
    width = 2 * MARGIN + max(tiles.block_width, lead.shape[1] + 640)
    top = MARGIN + lead_height + 28
    page = Page(width, top + tiles.block_height + MARGIN)
    page.picture(MARGIN, MARGIN, lead)
    x = MARGIN + lead.shape[1] + 24
    page.text(x, MARGIN + 20, title, TITLE_SIZE, weight="bold")
    page.text(x, MARGIN + 46, f"{found.model}  ·  {_shown(found, order)}", colour=SOFT)
    for line, words in enumerate(_explanation(found, threshold)):
        page.text(x, MARGIN + 78 + 20 * line, words, colour=SOFT)
    if threshold is None:
        page.legend(x, MARGIN + lead_height - 10)
    draw_tiles(page, MARGIN, top, tiles, picture, found, image, order, threshold)
    page.save(path)


def draw_tiles(
    page: Page,
    x: int,
    y: int,
    tiles: Tiles,
    picture: UInt8[np.ndarray, "H W 3"],
    found: MapSet,
    image: int,
    order: Int[np.ndarray, " _"],
    threshold: float | None = None,
) -> None:
    """A block of labelled maps of one image with its upper left corner at (x, y); see `grid_page`."""
    shown = resized(picture, tiles.height)
    letters = found.letters()
    patches, prefix = effective_patches(found.maps[image]), class_token_share(found.maps[image])
    _draw_panels(page, x, y, tiles, found.groups[order])
    for place, index in enumerate(order):
        left, top = tiles.corner(place)
        base = y + top + LABEL - 6
        page.text(x + left, base, f"{found.kind} {index}", LABEL_SIZE, weight="bold")
        numbers = f"{patches[index]:.0f} · {100 * prefix[index]:.0f}%" + (
            f" · {letters[index]}" if letters[index] else ""
        )
        page.text(x + left + tiles.width, base, numbers, LABEL_SIZE, SOFT, ha="right")
        page.picture(x + left, y + top + LABEL, tile_picture(shown, found.maps[image, index], threshold))


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
    for place in range(1, len(groups) + 1):
        if place < len(groups) and groups[place] == groups[start] and place % tiles.columns:
            continue
        if np.count_nonzero(groups == groups[start]) > 1:
            left, top = tiles.corner(start)
            right, _ = tiles.corner(place - 1)
            size = right - left + tiles.width + 2 * pad, tiles.height + LABEL + 2 * pad
            page.panel(x + left - pad, y + top - pad, *size)
        start = place


def matrix_page(
    path: Path, title: str, pictures: Sequence[UInt8[np.ndarray, "H W 3"]], found: MapSet, max_maps: int | None = None
) -> None:
    """The same maps for several images: a row per image, a column per map, most peaked first.

    Args:
        path: the PNG to write.
        title: what the images are called.
        pictures: one per image, of one size.
        found: their maps.
        max_maps: columns, at most; None: twelve.
    """
    order = display_order(found.maps, found.groups, max_maps or 12)
    height = 120
    shown = [resized(picture, height) for picture in pictures]
    step_x, step_y = shown[0].shape[1] + GAP // 2, height + GAP // 2
    letters = found.letters()
    patches = np.exp(np.log(effective_patches(found.maps)).mean(axis=0))
    top = MARGIN + 104
    page = Page(
        2 * MARGIN + max((len(order) + 1) * step_x + GAP, 900), top + LABEL + len(shown) * step_y - GAP // 2 + MARGIN
    )
    page.text(MARGIN, MARGIN + 20, title, TITLE_SIZE, weight="bold")
    page.text(MARGIN, MARGIN + 46, f"{found.model}  ·  {_shown(found, order)}, the same for all images", colour=SOFT)
    page.legend(MARGIN, MARGIN + 66)
    for column, index in enumerate(order):
        x = MARGIN + (column + 1) * step_x + GAP
        page.text(x, top + LABEL - 6, f"{found.kind} {index}", LABEL_SIZE, weight="bold")
        numbers = f"{patches[index]:.0f}" + (f" · {letters[index]}" if letters[index] else "")
        page.text(x + shown[0].shape[1], top + LABEL - 6, numbers, LABEL_SIZE, SOFT, ha="right")
    for row, picture in enumerate(shown):
        y = top + LABEL + row * step_y
        page.picture(MARGIN, y, picture)
        for column, index in enumerate(order):
            page.picture(MARGIN + (column + 1) * step_x + GAP, y, overlay(picture, found.maps[row, index]))
    page.save(path)


def compare_page(
    path: Path,
    title: str,
    pictures: Sequence[tuple[UInt8[np.ndarray, "H W 3"], UInt8[np.ndarray, "H W 3"]]],
    found: tuple[MapSet, MapSet],
    max_maps: int = 24,
) -> None:
    """Two encoders side by side on the same images, e.g. the heads of `cls` against the slots of `sparo`.

    Args:
        path: the PNG to write.
        title: what the images are called.
        pictures: per image its view by either encoder; they differ by less than a patch.
        found: the maps of either encoder.
        max_maps: maps per encoder and image, at most, near-duplicates left out where there are more.
    """
    orders = [display_order(side.maps, side.groups, max_maps) for side in found]
    aspect = pictures[0][0].shape[1] / pictures[0][0].shape[0]
    rows = max(1, round(math.sqrt(max(map(len, orders)) / (2.2 * aspect))))
    blocks = []
    for order in orders:
        columns = -(-len(order) // rows)
        blocks.append(Tiles(columns, -(-len(order) // columns), 140, round(140 * aspect)))
    block_height = max(block.block_height for block in blocks)
    lead_height = min(block_height - LABEL, 320)
    lead_width, gutter = round(lead_height * aspect), 44
    block_widths = [max(block.block_width, 340) for block in blocks]  # wide enough for its heading
    top = MARGIN + 118
    width = 2 * MARGIN + lead_width + 2 * gutter + sum(block_widths)
    page = Page(width, top + len(pictures) * (block_height + gutter) - gutter + MARGIN)
    page.text(MARGIN, MARGIN + 20, title, TITLE_SIZE, weight="bold")
    page.legend(MARGIN, MARGIN + 38)
    for row, views in enumerate(pictures):
        y = top + row * (block_height + gutter)
        page.picture(MARGIN, y + LABEL, resized(views[0], lead_height))
        x = MARGIN + lead_width + gutter
        sides = zip(found, orders, blocks, block_widths, views, strict=True)
        for side, order, block, block_width, picture in sides:
            if row == 0:
                page.text(x, top - 38, _shown(side, order), 16.0, weight="bold")
                page.text(x, top - 18, side.model, colour=SOFT)
            draw_tiles(page, x, y, block, picture, side, row, order)
            x += block_width + gutter
    page.save(path)


def _shown(found: MapSet, order: Int[np.ndarray, " _"]) -> str:
    """How many of the maps are shown."""
    return found.count if len(order) == found.maps.shape[1] else f"{len(order)} of {found.count}"


def _explanation(found: MapSet, threshold: float | None) -> list[str]:
    """What the reader of a grid has to know."""
    lines = [
        f"From the most peaked {found.kind} to the most spread. Right of each number: how many patches it looks at,",
        "exp(entropy), and the attention it leaves to the class token.",
    ]
    if threshold is not None:
        lines.append(f"Shown are the fewest patches that hold {100 * threshold:g}% of a {found.kind}'s attention.")
    if any(found.letters()):
        lines[1] += " A letter and a panel: maps that look alike."
    if found.kind == "average":
        lines = ["This model averages all tokens: its attention is the same everywhere, on every image."]
    return lines


def letters_of_groups(groups: Int[np.ndarray, " M"]) -> list[str]:
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


def resized(picture: UInt8[np.ndarray, "_ _ 3"], height: int) -> UInt8[np.ndarray, "_ _ 3"]:
    """A picture at another height, its aspect ratio kept."""
    width = max(1, round(picture.shape[1] * height / picture.shape[0]))
    return np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.LANCZOS))


def draw_training_curve(log: Path, path: Path) -> None:
    """log.txt -> how a run went: loss and teacher's entropy, and 20-NN where it was probed, against steps.

    Args:
        log: one JSON line per epoch.
        path: of the PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    epochs = [json.loads(line) for line in log.read_text().splitlines()]
    probed = [epoch for epoch in epochs if "knn_20" in epoch]
    figure = Figure(figsize=(9, 3.4), dpi=2 * DPI, layout="constrained", facecolor=PAPER)
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 if probed else 1, squeeze=False)[0]
    curves = {"train_loss": ("loss", INK), "train_teacher_entropy": ("teacher's entropy", SOFT)}
    for name, (label, colour) in curves.items():
        shown = [epoch for epoch in epochs if name in epoch]
        axes[0].plot([e["step"] for e in shown], [e[name] for e in shown], ".-", color=colour, label=label)
    axes[0].set(xlabel="step", ylabel="nats")
    axes[0].legend(frameon=False)
    if probed:
        axes[1].plot([e["step"] for e in probed], [e["knn_20"] for e in probed], ".-", color=INK)
        axes[1].set(xlabel="step", ylabel="20-NN accuracy of the teacher, %")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)

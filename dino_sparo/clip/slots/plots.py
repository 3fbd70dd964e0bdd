"""Numbers -> curves and bars in the look of the other figures: what the interventions on slots draw.

The same numbers give the same bytes.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dino_sparo.evaluation.attention import RAMP_COLOURS

ACCENT = "#8a3fb5"
FAINT = "#dcdbe4"
# One per curve, dark to light as the maps' colours are, so that their order can be seen.
CURVE_COLOURS = tuple("#{:02x}{:02x}{:02x}".format(*colour) for colour in RAMP_COLOURS[:4])
MAX_NUMBERS, MAX_GAPS = 20, 40  # bars with numbers under them, and with gaps between them
LABEL_SHARE = 0.13  # of a plot's width: room for a number of five digits under it


def colour_of(position: int, count: int) -> str:
    """The colour of curve `position` of `count`, dark to light."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    shades = LinearSegmentedColormap.from_list("curves", CURVE_COLOURS)
    return to_hex(shades(position / max(1, count - 1)))


def count_ticks(axis: Any) -> None:
    """Whole numbers along x, for what is counted."""
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def spaced(ticks: Sequence[int]) -> list[int]:
    """Those of some positive numbers, from the smallest, that have room for their labels on a logarithmic axis."""
    shown: list[int] = []
    gap = LABEL_SHARE * math.log(max(ticks) / min(ticks))
    for tick in sorted(ticks):
        if not shown or math.log(tick / shown[-1]) >= gap:
            shown.append(tick)
    return shown


def ranked_bars(axis: Any, numbers: Sequence[int], heights: Sequence[float], marked: int) -> None:
    """A bar for each of some parts, in the order given, under their numbers if these can be read.

    Args:
        axis: to draw on.
        numbers: of the parts.
        heights: of the bars.
        marked: how many, from the first, are in colour.
    """
    positions = range(1, len(numbers) + 1)
    colours = [ACCENT if position <= marked else FAINT for position in positions]
    axis.bar(positions, heights, width=0.8 if len(numbers) <= MAX_GAPS else 1.0, color=colours)
    if len(numbers) <= MAX_NUMBERS:
        axis.set_xticks(positions, [str(number) for number in numbers])
    else:
        count_ticks(axis)


def result_paths(args: argparse.Namespace, name: str) -> tuple[Path, Path]:
    """Where the result goes, as `protocol.report` decides it, and where the plot beside it goes.

    Raises:
        ValueError: the result would be overwritten by the plot.
    """
    path = Path(args.output) if args.output else Path(args.pretrained_weights).parent / name
    if path.suffix == ".png":
        raise ValueError(f"output={args.output!r} names a picture; give the JSON file, the plot is put beside it")
    return path, path.with_suffix(".png")

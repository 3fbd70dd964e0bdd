"""Numbers -> curves and bars in the look of the other figures: what the interventions on slots draw.

The same numbers give the same bytes.
"""

import argparse
from pathlib import Path

from dino_sparo.evaluation.attention import RAMP_COLOURS

# One per curve, dark to light as the maps' colours are, so that their order can be seen.
CURVE_COLOURS = tuple("#{:02x}{:02x}{:02x}".format(*colour) for colour in RAMP_COLOURS[:4])


def colour_of(position: int, count: int) -> str:
    """The colour of curve `position` of `count`, dark to light."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    shades = LinearSegmentedColormap.from_list("curves", CURVE_COLOURS)
    return to_hex(shades(position / max(1, count - 1)))


def result_paths(args: argparse.Namespace, name: str) -> tuple[Path, Path]:
    """Where the result goes, as `protocol.report` decides it, and where the plot beside it goes.

    Raises:
        ValueError: the result would be overwritten by the plot.
    """
    path = Path(args.output) if args.output else Path(args.pretrained_weights).parent / name
    if path.suffix == ".png":
        raise ValueError(f"output={args.output!r} names a picture; give the JSON file, the plot is put beside it")
    return path, path.with_suffix(".png")

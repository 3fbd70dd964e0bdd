"""Where the interventions on slots write their result and its plot."""

import argparse
from pathlib import Path


def result_paths(args: argparse.Namespace, name: str) -> tuple[Path, Path]:
    """Where the result goes, as `protocol.report` decides it, and where the plot beside it goes.

    Raises:
        ValueError: the result would be overwritten by the plot.
    """
    path = Path(args.output) if args.output else Path(args.pretrained_weights).parent / name
    if path.suffix == ".png":
        raise ValueError(f"output={args.output!r} names a picture; give the JSON file, the plot is put beside it")
    return path, path.with_suffix(".png")

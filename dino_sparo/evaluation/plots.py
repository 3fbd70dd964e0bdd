"""A sheet of plots in the look of the other figures.

Who has numbers to draw opens one with `panels`; the same numbers give the same bytes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dino_sparo.evaluation.page import DPI, INK, PAPER, SOFT, require_matplotlib

PANEL_WIDTH, PANEL_HEIGHT = 4.6, 3.5  # inches


@contextmanager
def panels(path: Path, rows: int, columns: int) -> Iterator[Any]:
    """Plots side by side, saved at the end.

    Args:
        path: the PNG to write.
        rows: of plots.
        columns: likewise.

    Yields:
        The plots' axes, an array (rows, columns).

    Raises:
        ImportError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size = (PANEL_WIDTH * columns, PANEL_HEIGHT * rows)
    figure = Figure(figsize=size, dpi=2 * DPI, layout="constrained", facecolor=PAPER)
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(SOFT)
        axis.tick_params(colors=SOFT, labelcolor=INK)
        axis.title.set(color=INK)
    yield axes
    figure.savefig(path)

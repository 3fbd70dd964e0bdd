"""Plots of numbers in one style; equal numbers give equal files."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dino_sparo.draw.pixels import RAMP_COLOURS
from dino_sparo.draw.sheet import INK, PAPER, SOFT, require_matplotlib, save_figure
from dino_sparo.runtime.files import read_log

DPI = 200
PANEL_WIDTH, PANEL_HEIGHT = 4.6, 3.5  # inches
ACCENT = "#8a3fb5"
FAINT = "#dcdbe4"
MAX_NUMBERS, MAX_GAPS = 20, 40  # bars with numbers under them, and with gaps between them
# Dark to light like the colours of maps, so that the order of curves is visible.
CURVE_COLOURS = tuple("#{:02x}{:02x}{:02x}".format(*colour) for colour in RAMP_COLOURS[:4])


def colour_of(position: int, count: int) -> str:
    """The colour of curve `position` of `count`, dark to light."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    shades = LinearSegmentedColormap.from_list("curves", CURVE_COLOURS)
    return to_hex(shades(position / max(1, count - 1)))


@contextmanager
def panels(
    path: Path, rows: int, columns: int, title: str = "", size: tuple[float, float] | None = None
) -> Iterator[Any]:
    """Axes of plots, an array (rows, columns), saved to `path` at the end; `size` is in inches."""
    require_matplotlib()
    from matplotlib.figure import Figure

    size = size or (PANEL_WIDTH * columns, PANEL_HEIGHT * rows)
    figure = Figure(figsize=size, dpi=DPI, layout="constrained", facecolor=PAPER)
    if title:
        figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=11)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(SOFT)
        axis.tick_params(colors=SOFT, labelcolor=INK)
        axis.title.set(color=INK)
    yield axes
    save_figure(figure, path)


def ranked_bars(axis: Any, numbers: Sequence[int], heights: Sequence[float], marked: int) -> None:
    """Bars in the order given, the first `marked` in colour, with numbers below if there are few bars."""
    positions = range(1, len(numbers) + 1)
    colours = [ACCENT if position <= marked else FAINT for position in positions]
    axis.bar(positions, heights, width=0.8 if len(numbers) <= MAX_GAPS else 1.0, color=colours)
    if len(numbers) <= MAX_NUMBERS:
        axis.set_xticks(positions, [str(number) for number in numbers])
    else:
        axis.locator_params(axis="x", integer=True)


def draw_training_curve(folder: Path, path: Path) -> None:
    """Plot loss, teacher's entropy and 20-NN accuracy, if there is one, against the steps of the run in a folder."""
    epochs = read_log(folder)
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

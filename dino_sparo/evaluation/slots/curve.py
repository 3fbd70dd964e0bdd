"""Accuracy against the number of slots kept: the best number, the lines of a table, the panels of a plot.

For `slots study` of an encoder and `slots select` of a CLIP. Their results have the same entries: `ranking`, a row per
slot, best first; and `curve`, a row per number of slots with `num_kept`, `top1_choosing` (on the images that rank the
slots) and `top1_held_out`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dino_sparo.draw.plots import ACCENT, panels, ranked_bars
from dino_sparo.draw.sheet import INK, SOFT
from dino_sparo.draw.tables import text_table
from dino_sparo.evaluation.slots.choice import SlotSelection
from dino_sparo.runtime.faults import UserError

TABLE_SLOTS = 10  # best slots in the table
DOTTED = (0, (1, 2))
TITLE: dict[str, Any] = {"loc": "left", "fontweight": "bold", "fontsize": 11}  # of a panel
Rows = Sequence[Mapping[str, Any]]


def check_number(name: str, number: int, num_slots: int) -> None:
    """Refuse a number of slots that the model does not have."""
    if not 1 <= number <= num_slots:
        raise UserError(f"{name}={number} of num_slots={num_slots} slots; give a number from 1 to {num_slots}")


def describe_selection(ranking: Rows, curve: Rows, keep: int | None, weights_sha256: str | None) -> dict[str, Any]:
    """The selection, as --slots takes it, and its accuracy on held-out images.

    The number of slots is `keep`, by default the smallest number with the highest accuracy on the choosing images.
    """
    number = keep or max(curve, key=lambda row: (row["top1_choosing"], -row["num_kept"]))["num_kept"]
    slots = tuple(sorted(int(row["slot"]) for row in ranking[:number]))
    return {
        **SlotSelection(slots, len(ranking), weights_sha256).to_dict(),
        "top1_selected": next(row["top1_held_out"] for row in curve if row["num_kept"] == number),
        "top1_all": curve[-1]["top1_held_out"],
    }


def number_rule(keep: int | None) -> str:
    """The rule for the number of slots, for the result."""
    return "asked for" if keep else "the smallest with the highest accuracy on the choosing images"


def best_slots(columns: Mapping[str, Sequence[float]], slots: Sequence[int]) -> list[str]:
    """Lines of a table: rank and number of the best slots, and columns of percentages."""
    rows = [("rank", "slot", *columns)]
    for rank, (slot, *values) in enumerate(zip(slots[:TABLE_SLOTS], *columns.values(), strict=False), 1):
        rows.append((f"{rank}", f"{slot}", *(f"{value:.2f}" for value in values)))
    return [text_table(rows)] + ["..."] * (len(slots) > TABLE_SLOTS)


class Curve(NamedTuple):
    """A panel: held-out accuracy of the best slots against their number, beside another curve.

    Attributes:
        title: of the panel.
        score: what the axis shows, percent.
        rows: accuracies.
        label: of the best slots' curve.
        other_label: of the other curve.
        others: values of the other curve.
        deviations: their standard deviations.
        chance: percent, drawn as a line.
    """

    title: str
    score: str
    rows: Rows
    label: str
    other_label: str
    others: Sequence[float]
    deviations: Sequence[float] | None = None
    chance: float | None = None


def draw_slots(
    path: Path, result: Mapping[str, Any], curves: Sequence[Curve], alone: str, chance: float, label: str
) -> None:
    """Draw the curves, and bars of each slot's accuracy alone with the kept slots marked.

    `alone` is the entry of the ranking that bars show, `label` the label of their axis.
    """
    ranking, kept = result["ranking"], len(result["slots"])
    with panels(path, 1, len(curves) + 1) as (axes,):
        for axis, curve in zip(axes, curves, strict=False):
            _draw_curve(axis, curve, kept)
        bars = axes[-1]
        ranked_bars(bars, [row["slot"] for row in ranking], [row[alone] for row in ranking], kept)
        bars.axhline(chance, color=SOFT, linestyle=DOTTED, linewidth=1, label=f"chance: {chance:.2g} %")
        # Above the plot, since bars may have any height.
        bars.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.0), borderpad=0)
        bars.set_title("Each slot alone", **TITLE)
        bars.set(xlabel=label, ylabel=f"{curves[0].score}, %")


def _draw_curve(axis: Any, curve: Curve, kept: int) -> None:
    numbers = [row["num_kept"] for row in curve.rows]
    ranked = [row["top1_held_out"] for row in curve.rows]
    axis.axhline(ranked[-1], color=SOFT, linestyle=(0, (4, 3)), linewidth=1, label="all slots")
    if curve.deviations is not None:
        low, high = (np.add(curve.others, np.multiply(sign, curve.deviations)) for sign in (-1, 1))
        axis.fill_between(numbers, low, high, color=SOFT, alpha=0.25, linewidth=0)
    is_sparse = len(numbers) < numbers[-1]
    marker = "." if is_sparse else None
    axis.plot(numbers, curve.others, color=SOFT, linewidth=1.2, marker=marker, label=curve.other_label)
    axis.plot(numbers, ranked, color=INK, linewidth=1.6, marker=marker, label=curve.label)
    at_kept = ranked[numbers.index(kept)]
    axis.plot([kept], [at_kept], "o", color=ACCENT, markersize=7, label=f"{kept} kept: {at_kept:.1f} %")
    if curve.chance is not None:
        axis.axhline(curve.chance, color=SOFT, linestyle=DOTTED, linewidth=1, label="chance")
    if is_sparse and len(numbers) > 1:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
    else:
        axis.locator_params(axis="x", integer=True)
    axis.set(xlabel="slots kept, best first", ylabel=f"{curve.score}, %")
    axis.legend(frameon=False, loc="best")
    axis.set_title(curve.title, **TITLE)

"""Results of all cells -> heat maps of accuracy against the shares of seen and hard pairs (OC-CLIP, figures 2, 7).

One row of maps per test of unseen combinations, one column per model.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dino_sparo.draw.plots import panels
from dino_sparo.draw.sheet import INK, PANEL, PAPER
from studies.oc_splits.design import TESTS

# Always wrong, guessing, always right.
SHADES = ("#e8a33d", "#ffffff", "#46147a")
DARK = 75  # percent from which the number on a cell is light
TESTS_SHOWN = ("seen_pair", "unseen_order", "unseen_pair")


def draw_heat_maps(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw accuracy in percent, mean over seeds, as a PNG.

    Args:
        results: of one kind of split; cells may be missing.
        path: the PNG.
    """
    tests = [test for test in TESTS[results[0]["split"]] if test in TESTS_SHOWN]
    models = list(dict.fromkeys(result["model"] for result in results))
    shares = {name: sorted({result[name] for result in results}) for name in ("seen", "hard")}
    with panels(path, len(tests), len(models)) as axes:
        for row, test in zip(axes, tests, strict=True):
            for axis, model in zip(row, models, strict=True):
                own = [result for result in results if result["model"] == model]
                _draw_map(axis, own, test, shares)
                axis.set_title(f"{model}: {test.replace('_', ' ')}", fontsize=11)
            row[0].set_ylabel("pairs seen in training, %")
        seeds = sorted({result["seed"] for result in results})
        words = f"Accuracy in %, mean over seeds {', '.join(map(str, seeds))}. White is guessing, 50 %."
        axes[0, 0].figure.suptitle(words, x=0.01, ha="left", color=INK, fontsize=12)
        for axis in axes[-1]:
            axis.set_xlabel("of these with hard negatives, %")


def _draw_map(axis: Any, results: Sequence[Mapping[str, Any]], test: str, shares: Mapping[str, Sequence[int]]) -> None:
    """One map; the smallest shares at the lower left."""
    from matplotlib.colors import LinearSegmentedColormap

    cells = np.full((len(shares["seen"]), len(shares["hard"])), np.nan)
    for i, seen in enumerate(shares["seen"]):
        for j, hard in enumerate(shares["hard"]):
            own = [r["tests"][test]["accuracy"] for r in results if (r["seen"], r["hard"]) == (seen, hard)]
            if own:
                cells[i, j] = np.mean(own)
                colour = PAPER if cells[i, j] >= DARK else INK
                axis.text(j, i, f"{cells[i, j]:.1f}", ha="center", va="center", color=colour, fontsize=12)
    shades = LinearSegmentedColormap.from_list("accuracy", SHADES)
    axis.set_facecolor(PANEL)  # seen where a cell is missing
    axis.imshow(cells, cmap=shades, vmin=0, vmax=100, origin="lower", aspect="auto")
    axis.set_xticks(range(len(shares["hard"])), [str(share) for share in shares["hard"]])
    axis.set_yticks(range(len(shares["seen"])), [str(share) for share in shares["seen"]])
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)

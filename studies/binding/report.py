"""Results of the probes -> tables in Markdown, and a plot."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dino_sparo.draw.plots import FAINT, colour_of, panels
from studies.binding.probes import CAPACITIES, MAIN, Information
from studies.binding.scenes import NUM_COLOURS, NUM_SHAPES
from studies.report import differences, interval_table, markdown, mean_and_deviation

MEASURES = ("shapes", "colours", "binding", "shuffled", "true - shuffled")
# Width, capacity and labels of a probe -> column of the tables.
COLUMNS = {
    **{("equal", capacity, "true"): capacity for capacity in CAPACITIES},
    ("native", "linear", "true"): "linear, own width",
    ("equal", MAIN, "true"): "binding",
    ("equal", MAIN, "shuffled"): "shuffled",
}
# Model and reading, minus another model and reading, both trained.
COMPARED = (
    ("DINO sparo, all slots", "DINO cls, class token"),
    ("DINO sparo, all slots", "DINO cls, patches"),
    ("CLIP sparo, all slots", "CLIP cls, class token"),
    ("CLIP sparo, all slots", "CLIP cls, patches"),
    ("DINO sparo, one slot", "DINO sparo, all slots"),
    ("CLIP sparo, one slot", "CLIP sparo, all slots"),
    ("OC-CLIP, entity slots", "OC-CLIP, mean of patches"),
    ("OC-CLIP, entity slots", "OC-CLIP, patches"),
    ("OC-CLIP, entity slots", "CLIP cls, class token"),
    ("OC-CLIP, entity slots", "CLIP sparo, all slots"),
)
ENTROPY_SHAPES, ENTROPY_COLOURS = (math.log2(math.comb(number, 2)) for number in (NUM_SHAPES, NUM_COLOURS))

Results = Sequence[Mapping[str, Any]]
# Model with reading, state of the weights -> column -> seed -> percent.
Values = dict[tuple[str, str], dict[str, dict[int, float]]]


def values_of(results: Results, entropy: float) -> Values:
    """All measures in percent of what there is to know."""
    found: Values = {}
    for result in results:
        for name, losses in result["probes"].items():
            state, reading, width, capacity, labels = name.split(", ")
            column, seed = COLUMNS[width, capacity, labels], result["seed"]
            row = reading if reading == result["model"] else f"{result['model']}, {reading}"
            own = found.setdefault((row, state), {})
            information = Information(losses["loss_y"], losses["loss_shapes"] + losses["loss_colours"], entropy)
            own.setdefault(column, {})[seed] = 100 * information.ratio
            if column == "binding":
                own.setdefault("shapes", {})[seed] = 100 * (1 - losses["loss_shapes"] / ENTROPY_SHAPES)
                own.setdefault("colours", {})[seed] = 100 * (1 - losses["loss_colours"] / ENTROPY_COLOURS)
    for own in found.values():
        own["true - shuffled"] = differences(own.get("binding", {}), own.get("shuffled", {}))
    return found


def tables(results: Results, entropy: float) -> str:
    """All tables."""
    values = values_of(results, entropy)

    def table(columns: Sequence[str]) -> str:
        head = ["", "weights", "seeds", *columns]
        cells = {row: [own.get(column, {}) for column in columns] for row, own in values.items()}
        return markdown(
            head, [[*row, str(len(own["binding"])), *map(_cell, cells[row])] for row, own in values.items()]
        )

    parts = {
        "The demos' scores, %:": score_table(results),
        f"Information in % of the entropy, {MAIN}, equal width:": table(MEASURES),
        f"Binding ratio in % by capacity, equal width; binding: {MAIN}:": table(
            [column for column in COLUMNS.values() if column != "shuffled"]
        ),
        "Differences of these percentages, paired by seed:": interval_table("difference", MEASURES, _pairs(values)),
    }
    return "\n\n".join(text for part in parts.items() for text in part)


def _cell(values: Mapping[int, float]) -> str:
    return mean_and_deviation([*values.values()]) if values else ""


def _pairs(values: Values) -> dict[str, list[dict[int, float]]]:
    """Trained minus untrained of each reading, and `COMPARED`."""
    pairs = {f"{row}: trained - untrained": ((row, "trained"), (row, "untrained")) for row, _ in values}
    pairs |= {f"{one} - {other}": ((one, "trained"), (other, "trained")) for one, other in COMPARED}
    return {
        name: [differences(values[one].get(column, {}), values[other].get(column, {})) for column in MEASURES]
        for name, (one, other) in pairs.items()
        if one in values and other in values
    }


def score_table(results: Results) -> str:
    """The demos' scores of each model: mean and deviation over seeds."""
    found: dict[tuple[str, str], list[float]] = {}
    for result in results:
        for score, value in result.get("scores", {}).items():
            found.setdefault((result["model"], score), []).append(value)
    return markdown(["model", "score", "%"], [[*key, mean_and_deviation(each)] for key, each in found.items()])


def draw(results: Results, entropy: float, path: Path) -> None:
    """Draw information about shapes, colours and binding of every reading; a mark per seed, a line at the mean."""
    values, shown = values_of(results, entropy), ("shapes", "colours", "binding", "true - shuffled")
    rows = list(dict.fromkeys(row for row, _ in values))[::-1]
    models = list(dict.fromkeys(row.split(", ")[0] for row in rows))
    title = f"Information in % of the entropy. Hollow: untrained, filled: trained. {MAIN}, equal width."
    with panels(path, 1, len(shown), title, (15.0, 1.6 + 0.32 * len(rows))) as (axes,):
        for axis, measure in zip(axes, shown, strict=True):
            for (row, state), own in values.items():
                colour, marks = (
                    colour_of(models.index(row.split(", ")[0]), len(models)),
                    [*own.get(measure, {}).values()],
                )
                face, height = colour if state == "trained" else "none", rows.index(row)
                if marks:
                    axis.plot(marks, [height] * len(marks), "o", color=colour, markerfacecolor=face, markersize=5)
                    axis.plot([statistics.mean(marks)] * 2, [height - 0.3, height + 0.3], color=colour)
            axis.set(xlabel=f"{measure}, %", ylim=(-0.6, len(rows) - 0.4))
            axis.set_yticks(range(len(rows)), rows if axis is axes[0] else [], fontsize=8)
            axis.axvline(0, color=FAINT, zorder=0)
            axis.grid(axis="y", color=FAINT)
            axis.set_axisbelow(True)

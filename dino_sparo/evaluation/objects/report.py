"""Results of `slots score` -> a table for the terminal, and plots of measures, classes and matched slots."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dino_sparo.draw.plots import ACCENT, PANEL_HEIGHT, panels
from dino_sparo.draw.sheet import INK, SOFT
from dino_sparo.draw.tables import text_table
from dino_sparo.evaluation.objects.measures import MEASURES
from dino_sparo.evaluation.objects.survey import MODEL, ROWS, UNTRAINED
from dino_sparo.runtime.logs import printable

ROW_NAMES = dict(
    zip(ROWS, ("this encoder", "untrained", "maps of another image", "moved maps", "patch grid"), strict=True)
)
MEASURE_NAMES = dict(zip(MEASURES, ("Jaccard", "mBO", "FG-ARI", "pointing", "pointing, one map"), strict=True))
AXIS_END = 116  # percent: a bar of 100 % and its number
CONTROL, BOUND = "#b9b7c6", "#e8a33d"
SHADES = ("#e8a33d", "#ffffff", "#46147a")  # from worse over equal to better than on other classes
COLUMN_WIDTH, ROW_HEIGHT = 0.22, 0.3  # inches, of a cell of the table of classes
MEASURES_SIZE, MATCHING_SIZE = (13.3, 6.6), (7.0, 4.2)  # inches


def table(result: Mapping[str, Any]) -> str:
    """Measures in percent with half the width of their 95 % interval; then single maps and slots."""
    data, kind, measures = result["data"], result["kind"], result["measures"]
    rows = [["%", *MEASURE_NAMES.values()], ["images", *(str(measures[MODEL][m]["num_images"]) for m in MEASURES)]]
    rows += [[ROW_NAMES[row], *(percent(scores[m]) for m in MEASURES)] for row, scores in measures.items()]
    for row, scores in result["differences"].items():
        rows.append([f"minus {ROW_NAMES[row]}", *(percent(scores[m], "+") for m in MEASURES)])
    lines = [
        f"{data['num_objects']} objects in {data['num_images']} images of {data['name']}; "
        f"{scored_maps(result)}, share {result['share']:g} of the mass; {data['objects_out_of_view']} objects out of "
        f"view, {data['without_objects']} images without objects, {data['unreadable']} unreadable",
        "",
        text_table(rows, num_words=1),
        "",
        f"mean absolute cosine of two {kind}s: {redundancy_words(result['redundancy'])}",
    ]
    if "selectivity" in result:
        selectivity = result["selectivity"]
        chance = selectivity["shuffled"]
        lines.append(
            f"selectivity (mean best lift): {100 * selectivity['mean_best_lift']:.1f} Jaccard points; untrained "
            f"{100 * selectivity['untrained']:.1f}; with shuffled classes {100 * np.mean(chance):.1f}, at most "
            f"{100 * max(chance):.1f}"
        )
        best = sorted(result["maps"], key=lambda entry: -entry["lift"])[:5]
        named = ", ".join(f"{kind} {entry['map']} {entry['class']} (+{100 * entry['lift']:.1f})" for entry in best)
        lines.append(
            f"most selective: {named} (of classes with at least {selectivity['min_objects']} objects; "
            f"{selectivity['rare_classes']} are rarer)"
        )
    if "match" in result:
        match = result["match"]
        matched, untrained, shuffled = (match[name]["mean"] for name in ("matched", "untrained", "shuffled_images"))
        lines.append(
            f"matched slots, mean linear CKA: {matched:.3f}; all pairs {match['mean_of_all_pairs']:.3f}, matched to an "
            f"untrained encoder {untrained:.3f}, to shuffled images {shuffled:.3f} ({match['matching_images']} images "
            f"chose the matching, {match['num_images']} others are compared)"
        )
    return "\n".join(lines)


def scored_maps(result: Mapping[str, Any]) -> str:
    """The number of maps, and the number of maps per score, in words."""
    count, together = result["num_maps"], result["maps_per_score"]
    subsets = f", {together} at a time (mean over {result['subsets_per_image']} random subsets of each image)"
    return f"{count} {result['kind']}s" + subsets * (together < count)


def percent(summary: dict[str, Any], sign: str = "") -> str:
    """A mean in percent with half the width of its interval."""
    if summary["mean"] is None:
        return "-"
    low, high = summary["interval_95"]
    return f"{100 * summary['mean']:{sign}.1f} ± {50 * (high - low):.1f}"


def redundancy_words(redundancy: dict[str, dict[str, float]]) -> str:
    """Mean absolute cosines of maps and of values, for the encoder and untrained; "-" for a single map."""
    return "; ".join(
        f"{ROW_NAMES[row]} "
        + ", ".join(f"{what} {'-' if math.isnan(value) else f'{value:.2f}'}" for what, value in cosines.items())
        for row, cosines in redundancy.items()
    )


def draw_measures(result: Mapping[str, Any], model: str, path: Path) -> None:
    """Bars of each measure for encoder, controls and bound, with 95 % intervals; and bars of redundancy."""
    data = result["data"]
    objects = f"{data['num_objects']:,} objects in {data['num_images']:,} images of {printable(data['name'])}"
    words = f"{model}\n{scored_maps(result)}  ·  {objects}  ·  means over images, 95 % intervals"
    colours = [ACCENT, *[CONTROL] * (len(ROWS) - 2), BOUND]
    with panels(path, 2, 3, words, MEASURES_SIZE) as axes:
        *plots, last = axes.flat
        for axis, (measure, name) in zip(plots, MEASURE_NAMES.items(), strict=True):
            draw_bars(axis, [result["measures"][row][measure] for row in ROWS], colours, 100.0, ".1f")
            count = result["measures"][MODEL][measure]["num_images"]
            axis.set_title(name if count == data["num_images"] else f"{name} ({count:,} images)", fontsize=13)
            axis.set_yticks(range(len(ROWS)), list(ROW_NAMES.values()) if axis in axes[:, 0] else [""] * len(ROWS))
            axis.set_xlabel("%", color=SOFT)
            if not count:
                place = {"transform": axis.transAxes, "ha": "center"}
                axis.text(0.5, 0.5, "no image has two objects", color=SOFT, fontsize=11, **place)
        draw_redundancy(last, result["redundancy"])
        last.set_title(f"similarity of two {result['kind']}s", fontsize=13)


def draw_redundancy(axis: Any, redundancy: Mapping[str, Mapping[str, float]]) -> None:
    """Bars of the mean absolute cosine of two maps and, with slots, of two slots' values."""
    parts = list(redundancy[MODEL])
    values = [redundancy[row][what] for what in parts for row in redundancy]
    scores = [{"mean": None if math.isnan(value) else value, "interval_95": [value] * 2} for value in values]
    draw_bars(axis, scores, [ACCENT, CONTROL] * len(parts), 1.0, ".2f")
    axis.set_yticks([2 * number + 0.5 for number in range(len(parts))], parts)
    axis.set_xlabel(f"mean absolute cosine; grey: {ROW_NAMES[UNTRAINED]}", color=SOFT)


def draw_bars(
    axis: Any, scores: Sequence[Mapping[str, Any]], colours: list[str], scale: float, number_format: str
) -> None:
    """Horizontal bars with their numbers and intervals; `scale` 100 shows percent."""
    means = scale * np.array([score["mean"] for score in scores], dtype=float)  # NaN for None: no bar
    ends = scale * np.array([score["interval_95"] or (None, None) for score in scores], dtype=float).T
    line = {"ecolor": INK, "elinewidth": 1.2}
    bars = axis.barh(range(len(scores)), means, xerr=abs(ends - means), color=colours, height=0.7, error_kw=line)
    axis.bar_label(bars, fmt=f"{{:{number_format}}}", padding=3, color=INK, fontsize=10)
    axis.set_ylim(len(colours) - 0.5, -0.5)
    axis.set_xlim(min(0, axis.get_xlim()[0]), AXIS_END / 100 * scale)
    ticks = [scale * quarter / 4 for quarter in range(5)]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)


def draw_classes(result: Mapping[str, Any], model: str, path: Path) -> None:
    """Heat map of lift: rows are classes, columns are maps, grouped by the class that they find best."""
    from matplotlib.colors import LinearSegmentedColormap

    names = [f"{entry['class']}  ({entry['num_objects']})" for entry in result["classes"]]
    lift = 100 * np.array([entry["lift"] for entry in result["classes"]])  # (classes, maps)
    order = np.lexsort((-lift.max(axis=0), lift.argmax(axis=0)))
    limit = max(float(np.abs(lift).max()), 1e-6)
    names_of_lifts = ("mean_best_lift", "untrained", "shuffled")
    trained, untrained, chance = (100 * float(np.mean(result["selectivity"][name])) for name in names_of_lifts)
    words = (
        f"{model}\nWhich {result['kind']} finds which class: mean best lift {trained:.1f} (untrained {untrained:.1f}, "
        f"shuffled classes {chance:.1f})"
    )
    size = max(7.0, 2.6 + COLUMN_WIDTH * len(order)), max(PANEL_HEIGHT, 1.4 + ROW_HEIGHT * len(names))
    with panels(path, 1, 1, words, size) as ((axis,),):
        shades = LinearSegmentedColormap.from_list("lift", SHADES)
        image = axis.imshow(lift[:, order], cmap=shades, vmin=-limit, vmax=limit, aspect="auto")
        axis.set_yticks(range(len(names)), names)
        axis.set_xticks(range(len(order)), order.tolist(), fontsize=7 if len(order) > 20 else 9)
        axis.tick_params(length=0)
        axis.set_xlabel(f"{result['kind']}, grouped by the class it finds best", color=INK)
        axis.spines[:].set_visible(False)
        bar = axis.figure.colorbar(image, ax=axis, fraction=0.03, pad=0.02)
        bar.outline.set_visible(False)
        bar.set_label("lift, Jaccard points", color=INK)


def draw_matching(result: Mapping[str, Any], model: str, path: Path) -> None:
    """Similarities of matched slots, of the other checkpoint and of the controls, largest first."""
    curves = {
        "matched": ("the other checkpoint", ACCENT, "-"),
        "untrained": ("an untrained encoder", SOFT, "--"),
        "shuffled_images": ("the other checkpoint, images shuffled", BOUND, ":"),
    }
    match = result["match"]
    words = f"Its slots matched with those of ...  ·  {match['num_images']:,} images that did not choose the pairs"
    with panels(path, 1, 1, f"{model}\n{words}", MATCHING_SIZE) as ((axis,),):
        for key, (name, colour, style) in curves.items():
            pairs, label = match[key]["pairs"], f"... {name}: mean {match[key]['mean']:.2f}"
            axis.plot(range(1, len(pairs) + 1), pairs, style, color=colour, label=label, linewidth=2)
        axis.set_ylim(0, 1)
        axis.set_xlabel("pair of slots, most similar first", color=INK)
        axis.set_ylabel("linear CKA of their values", color=INK)
        axis.legend(frameon=False, fontsize=9, labelcolor=INK)

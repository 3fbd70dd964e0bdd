"""Results of `slot-score` -> a table for people, and plots of measures, classes and matched slots."""

import itertools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dino_sparo.draw.plots import ACCENT, PANEL_HEIGHT, panels
from dino_sparo.draw.sheet import INK, SOFT
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
MEASURES_SIZE, MATCHING_SIZE = (13.3, 6.6), (7, 4.2)  # inches


def table(result: Mapping[str, Any]) -> str:
    """The result for people: measures in percent with half the width of their 95 % interval; then maps and slots."""
    data = result["data"]
    lines = [
        f"{data['num_objects']} objects in {data['num_images']} images of {data['name']}; "
        f"{scored_maps(result)}, share {result['share']:g} of the mass; {data['objects_out_of_view']} objects out of "
        f"view, {data['without_objects']} images without objects, {data['unreadable']} unreadable",
        "",
        f"{'%':<28}" + _cells(MEASURE_NAMES.values()),
        f"{'images':<28}" + _cells(str(result["measures"][MODEL][measure]["num_images"]) for measure in MEASURES),
    ]
    for row, scores in result["measures"].items():
        lines.append(f"{ROW_NAMES[row]:<28}" + _cells(percent(scores[measure]) for measure in MEASURES))
    for row, scores in result["differences"].items():
        name = f"minus {ROW_NAMES[row]}"
        lines.append(f"{name:<28}" + _cells(percent(scores[measure], "+") for measure in MEASURES))
    lines += ["", f"mean absolute cosine of two {result['kind']}s: {redundancy_words(result['redundancy'])}"]
    if "selectivity" in result:
        own, untrained, chance = (result["selectivity"][name] for name in ("mean_best_lift", "untrained", "shuffled"))
        lines.append(
            f"selectivity (mean best lift): {100 * own:.1f} Jaccard points; untrained {100 * untrained:.1f}; with "
            f"shuffled classes {100 * float(np.mean(chance)):.1f}, at most {100 * max(chance):.1f}"
        )
        best = sorted(result["maps"], key=lambda entry: -entry["lift"])[:5]
        named = ", ".join(f"{result['kind']} {e['map']} {e['class']} (+{100 * e['lift']:.1f})" for e in best)
        rare = result["selectivity"]["rare_classes"]
        at_least = f"of classes with at least {result['selectivity']['min_objects']} objects; {rare} are rarer"
        lines.append(f"most selective: {named} ({at_least})")
    if "match" in result:
        match = result["match"]
        own, untrained, shuffled = (match[name]["mean"] for name in ("matched", "untrained", "shuffled_images"))
        lines.append(
            f"matched slots, mean linear CKA: {own:.3f}; all pairs {match['mean_of_all_pairs']:.3f}, matched to an "
            f"untrained encoder {untrained:.3f}, to shuffled images {shuffled:.3f} ({match['matching_images']} images "
            f"chose the matching, {match['num_images']} others are compared)"
        )
    return "\n".join(lines)


def scored_maps(result: Mapping[str, Any]) -> str:
    """The number of maps, and the number that are scored together, in words."""
    count, together = result["num_maps"], result["maps_per_score"]
    subsets = f", {together} at a time (mean over {result['subsets_per_image']} random subsets of each image)"
    return f"{count} {result['kind']}s" + (subsets if together < count else "")


def _cells(words: Iterable[str]) -> str:
    widths = (max(14, len(name) + 2) for name in MEASURE_NAMES.values())
    return "".join(f"{word:>{width}}" for word, width in zip(words, widths, strict=True))


def percent(summary: dict[str, Any], sign: str = "") -> str:
    """A mean in percent with half the width of its interval."""
    if summary["mean"] is None:
        return "-"
    low, high = summary["interval_95"]
    return f"{100 * summary['mean']:{sign}.1f} ± {50 * (high - low):.1f}"


def redundancy_words(redundancy: dict[str, dict[str, float]]) -> str:
    """Mean absolute cosines of maps and of values, of the model and untrained; "-" for a single map."""

    def words(value: float) -> str:
        return "-" if math.isnan(value) else f"{value:.2f}"

    return "; ".join(
        f"{ROW_NAMES[row]} " + ", ".join(f"{what} {words(value)}" for what, value in own.items())
        for row, own in redundancy.items()
    )


def draw_measures(result: Mapping[str, Any], model: str, path: Path) -> None:
    """Bars of each measure for the encoder, its controls and the bound, with 95 % intervals; bars of redundancy."""
    with panels(path, 2, 3) as axes:
        *plots, last = axes.flat
        for axis, (measure, name) in zip(plots, MEASURE_NAMES.items(), strict=True):
            _draw_bars(axis, {row: result["measures"][row][measure] for row in ROW_NAMES})
            count = result["measures"][MODEL][measure]["num_images"]
            axis.set_title(name if count == result["data"]["num_images"] else f"{name} ({count:,} images)", fontsize=13)
            labels = ROW_NAMES.values() if axis in axes[:, 0] else [""] * len(ROW_NAMES)
            axis.set_yticks(range(len(ROW_NAMES)), list(labels))
        draw_redundancy(last, result["redundancy"])
        last.set_title(f"likeness of two {result['kind']}s", fontsize=13)
        data = result["data"]
        objects = f"{data['num_objects']:,} objects in {data['num_images']:,} images of {printable(data['name'])}"
        words = f"{scored_maps(result)}  ·  {objects}  ·  means over images, 95 % intervals"
        figure = axes[0, 0].figure
        figure.set_size_inches(*MEASURES_SIZE)
        _write_title(figure, f"{model}\n{words}")


def draw_redundancy(axis: Any, redundancy: Mapping[str, Mapping[str, float]]) -> None:
    """Bars of the mean absolute cosine of two maps, and of two slots' values where there are any."""
    parts = list(redundancy[MODEL])
    for position, (what, row) in enumerate(itertools.product(parts, redundancy)):
        value = redundancy[row][what]
        if math.isnan(value):  # of a single map
            continue
        axis.barh(position, value, color=ACCENT if row == MODEL else CONTROL, height=0.7)
        axis.text(value + 0.02, position, f"{value:.2f}", va="center", color=INK, fontsize=10)
    axis.set_yticks([2 * number + 0.5 for number in range(len(parts))], parts)
    axis.set_ylim(2 * len(parts) - 0.5, -0.5)
    axis.set_xlim(0, AXIS_END / 100)
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    axis.set_xlabel(f"mean absolute cosine; grey: {ROW_NAMES[UNTRAINED]}", color=SOFT)
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)


def _draw_bars(axis: Any, scores: Mapping[str, Mapping[str, Any]]) -> None:
    colours = [ACCENT, *[CONTROL] * (len(scores) - 2), BOUND]
    for position, (score, colour) in enumerate(zip(scores.values(), colours, strict=True)):
        if score["mean"] is None:
            continue
        mean, (low, high) = 100 * score["mean"], (100 * end for end in score["interval_95"])
        axis.barh(position, mean, color=colour, height=0.7)
        axis.plot([low, high], [position, position], color=INK, linewidth=1.2)
        axis.text(max(high, mean, 0) + 2, position, f"{mean:.1f}", va="center", color=INK, fontsize=10)
    if all(score["mean"] is None for score in scores.values()):
        words = "no image has two objects"
        axis.text(0.5, 0.5, words, transform=axis.transAxes, ha="center", color=SOFT, fontsize=11)
    axis.set_ylim(len(scores) - 0.5, -0.5)
    axis.set_xlim(min(0, axis.get_xlim()[0]), AXIS_END)
    axis.set_xticks([0, 25, 50, 75, 100])
    axis.set_xlabel("%", color=SOFT)
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)


def draw_classes(result: Mapping[str, Any], model: str, path: Path) -> None:
    """Heat map of lift, classes down and maps across, maps grouped by the class they find best."""
    from matplotlib.colors import LinearSegmentedColormap

    names = [entry["class"] for entry in result["classes"]]
    lift = 100 * np.array([entry["lift"] for entry in result["classes"]])  # (classes, maps)
    best = lift.argmax(axis=0)
    order = np.lexsort((-lift.max(axis=0), best))
    limit = max(float(np.abs(lift).max()), 1e-6)
    with panels(path, 1, 1) as axes:
        axis = axes[0, 0]
        shades = LinearSegmentedColormap.from_list("lift", SHADES)
        image = axis.imshow(lift[:, order], cmap=shades, vmin=-limit, vmax=limit, aspect="auto")
        axis.set_yticks(range(len(names)), [f"{e['class']}  ({e['num_objects']})" for e in result["classes"]])
        axis.set_xticks(range(len(order)), order.tolist(), fontsize=7 if len(order) > 20 else 9)
        axis.tick_params(length=0)
        axis.set_xlabel(f"{result['kind']}, grouped by the class it finds best", color=INK)
        for side in axis.spines.values():
            side.set_visible(False)
        figure = axis.figure
        width, height = max(7.0, 2.6 + COLUMN_WIDTH * len(order)), max(PANEL_HEIGHT, 1.4 + ROW_HEIGHT * len(names))
        figure.set_size_inches(width, height)
        bar = figure.colorbar(image, ax=axis, fraction=0.03, pad=0.02)
        bar.outline.set_visible(False)
        bar.set_label("lift, Jaccard points", color=INK)
        own, untrained, chance = (
            100 * float(np.mean(result["selectivity"][name])) for name in ("mean_best_lift", "untrained", "shuffled")
        )
        words = (
            f"Which {result['kind']} finds which class: mean best lift {own:.1f} (untrained {untrained:.1f}, "
            f"shuffled classes {chance:.1f})"
        )
        _write_title(figure, f"{model}\n{words}")


def draw_matching(match: Mapping[str, Any], model: str, path: Path) -> None:
    """Similarity of matched slots, largest first, beside what an untrained encoder and shuffled images give."""
    curves = {
        "matched": ("the other checkpoint", ACCENT, "-"),
        "untrained": ("an untrained encoder", SOFT, "--"),
        "shuffled_images": ("the other checkpoint, images shuffled", BOUND, ":"),
    }
    with panels(path, 1, 1) as axes:
        axis = axes[0, 0]
        for key, (name, colour, style) in curves.items():
            pairs = match[key]["pairs"]
            label = f"... {name}: mean {match[key]['mean']:.2f}"
            axis.plot(range(1, len(pairs) + 1), pairs, style, color=colour, label=label, linewidth=2)
        axis.set_ylim(0, 1)
        axis.set_xlabel("pair of slots, most similar first", color=INK)
        axis.set_ylabel("linear CKA of their values", color=INK)
        axis.legend(frameon=False, fontsize=9, labelcolor=INK)
        axis.figure.set_size_inches(*MATCHING_SIZE)
        words = f"Its slots matched with those of ...  ·  {match['num_images']:,} images that did not choose the pairs"
        _write_title(axis.figure, f"{model}\n{words}")


def _write_title(figure: Any, words: str) -> None:
    figure.suptitle(words, x=0.01, ha="left", color=INK, fontsize=11)

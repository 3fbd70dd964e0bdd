"""Results of `slot-score` -> a table for people."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dino_sparo.evaluation.objects.measures import MEASURES
from dino_sparo.evaluation.objects.survey import MODEL, ROWS

ROW_NAMES = dict(
    zip(ROWS, ("this encoder", "untrained", "maps of another image", "moved maps", "patch grid"), strict=True)
)
MEASURE_NAMES = dict(zip(MEASURES, ("Jaccard", "mBO", "FG-ARI", "pointing", "pointing, one map"), strict=True))


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
    """How many maps there are, and how many are scored together."""
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
    """How alike maps and values are, of the model and untrained; a single map is not alike to another."""

    def words(value: float) -> str:
        return "-" if math.isnan(value) else f"{value:.2f}"

    return "; ".join(
        f"{ROW_NAMES[row]} " + ", ".join(f"{what} {words(value)}" for what, value in own.items())
        for row, own in redundancy.items()
    )

"""Results of several models -> one line per benchmark and model: Markdown, LaTeX, CSV and a plot for a talk.

A benchmark's line has its headline, the number that its paper reports first. With two models or more, each is compared
with the first one:

    difference   of the headlines, with a 95 % interval: a paired bootstrap within splits
    p            McNemar's exact test of the questions that exactly one of the two models answers correctly

With b questions that only the first model answers, c that only the second does, and n in a split, a draw of the
questions with replacement has Multinomial(n, b/n, c/n, rest) such questions.
"""

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dino_sparo.draw.tables import latex_table, markdown_table
from dino_sparo.image_text.evaluation.compositional.benchmark import Benchmark, Outcome, Weights
from dino_sparo.runtime.faults import require
from dino_sparo.runtime.files import write_text

NUM_RESAMPLES = 10_000
MAX_ROWS = 14  # benchmarks in a column of the plot
LEGEND_LETTERS = 10  # per inch


class Difference(NamedTuple):
    """How much the headline of a model is above that of the first model, in percent; p of no difference."""

    value: float
    low: float
    high: float
    p: float


class Line(NamedTuple):
    """The headline of a benchmark for one model, in percent.

    Attributes:
        title: of the benchmark, with an asterisk if it is not complete.
        blind: accuracy with shuffled images; None: not measured.
        difference: from the first model; None for the first model.
    """

    title: str
    model: str
    num_questions: int
    accuracy: float
    low: float
    high: float
    chance: float
    blind: float | None
    difference: Difference | None


def headline_weights(benchmark: Benchmark, counts: Mapping[str, int]) -> Weights:
    """Weight of each split in the headline of a benchmark, as `main_entry` chooses it; `counts` are per split."""
    if weights := benchmark.means(counts).get(benchmark.headline):
        return weights
    if benchmark.headline in counts:
        return {benchmark.headline: 1.0}
    return {split: count / sum(counts.values()) for split, count in counts.items()}


def compare_pairs(benchmark: Benchmark, first: Sequence[Outcome], second: Sequence[Outcome], seed: int) -> Difference:
    """The difference between two models' outcomes of the same questions."""
    require("scipy", "the significance of a difference")
    from scipy.stats import binomtest

    rights = {(outcome.split, outcome.question): outcome.right for outcome in first}
    pairs = [(o.split, rights[o.split, o.question], o.right) for o in second if (o.split, o.question) in rights]
    counts, weights = Counter(pairs), headline_weights(benchmark, Counter(split for split, *_ in pairs))
    rng, draws, value, losses, wins = np.random.default_rng(seed), np.zeros(NUM_RESAMPLES), 0.0, 0, 0
    for split, weight in weights.items():
        loss, win = counts[split, True, False], counts[split, False, True]
        total = loss + win + counts[split, True, True] + counts[split, False, False]
        resampled = rng.multinomial(total, np.array([loss, win, total - loss - win]) / total, NUM_RESAMPLES)
        draws += weight * (resampled[:, 1] - resampled[:, 0]) / total
        value, losses, wins = value + weight * (win - loss) / total, losses + loss, wins + win
    p = binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    low, high = np.quantile(draws, (0.025, 0.975)).tolist()
    return Difference(100 * value, 100 * low, 100 * high, float(p))


def short_lines(
    results: Mapping[str, Mapping[str, Any]],
    outcomes: Mapping[str, Mapping[str, Sequence[Outcome]]],
    benchmarks: Mapping[str, Benchmark],
    seed: int,
) -> list[Line]:
    """The lines of all benchmarks, models side by side.

    Args:
        results: model -> content of its result file.
        outcomes: model -> title of a benchmark -> its outcomes.
        benchmarks: by title.
        seed: of the bootstrap.
    """
    lines = []
    (first, *_) = results
    for title, benchmark in benchmarks.items():
        for model, result in results.items():
            if title not in result["benchmarks"] or title not in outcomes[first]:
                continue
            found = result["benchmarks"][title]
            entry = main_entry(benchmark, found)
            difference = None
            if model != first:
                difference = compare_pairs(benchmark, outcomes[first][title], outcomes[model][title], seed)
            name = title + " *" * (not found["complete"])
            low, high = entry["interval_95"]
            numbers = entry["accuracy"], low, high, entry["chance"], entry.get("blind")
            lines.append(Line(name, model, found["num_questions"], *numbers, difference))
    return lines


def main_entry(benchmark: Benchmark, result: Mapping[str, Any]) -> dict[str, Any]:
    """The mean or the split of a benchmark's result that stands for the whole."""
    entry: dict[str, Any] = (result["means"] | result["splits"]).get(benchmark.headline) or result["means"]["micro"]
    return entry


HEAD = ("benchmark", "model", "questions", "accuracy, %", "95 % interval", "chance", "shuffled images")
COMPARED = ("difference", "95 % interval of the difference", "p")


def table_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Head and rows of the table; columns that no line needs are left out."""
    rows = [list(HEAD + COMPARED)]
    for line in lines:
        row = [line.title, line.model, f"{line.num_questions:,}", f"{line.accuracy:.1f}"]
        row += [f"{line.low:.1f} to {line.high:.1f}", f"{line.chance:.1f}"]
        row.append("" if line.blind is None else f"{line.blind:.1f}")
        each = line.difference
        p = "" if each is None else "< 0.001" if each.p < 0.001 else f"{each.p:.3f}"
        row += ["", "", ""] if each is None else [f"{each.value:+.1f}", f"{each.low:+.1f} to {each.high:+.1f}", p]
        rows.append(row)
    is_needed = [any(row[column] for row in rows[1:]) for column in range(len(rows[0]))]
    return [[cell for cell, is_used in zip(row, is_needed, strict=True) if is_used] for row in rows]


def to_csv(lines: Sequence[Line]) -> str:
    """Comma-separated values, numbers in full."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow((*Line._fields[:-1], "difference", "difference_low", "difference_high", "p"))
    writer.writerows((*line[:-1], *(line.difference or ("",) * 4)) for line in lines)
    return file.getvalue()


def draw(lines: Sequence[Line], path: Path) -> None:
    """The headlines of all benchmarks with their intervals; chance as a tick, shuffled images as rings.

    More than `MAX_ROWS` benchmarks stand in two columns, so that the plot fits on a slide.
    """
    from dino_sparo.draw.plots import panels

    titles = list(dict.fromkeys(line.title for line in lines))
    models = list(dict.fromkeys(line.model for line in lines))
    count = 1 if len(titles) <= MAX_ROWS else 2
    height = math.ceil(len(titles) / count)
    row = max(0.42, 0.24 * len(models))  # inches; rings of two models do not touch
    size = (9.0 if count == 1 else 15.0, 1.4 + height * row)
    with panels(path, 1, count, size=size) as (axes,):
        for number, axis in enumerate(axes):
            draw_column(axis, lines, titles[number * height : (number + 1) * height], models)
            axis.set_ylim(height - 0.4, -0.6)  # the first title above; columns have equal rows
        known = dict(zip(*axes[0].get_legend_handles_labels()[::-1], strict=True))
        labels = sorted(known, key=lambda label: label not in models)  # the models first
        letters = sorted(len(label) + 8 for label in labels)  # 8: marker and gap
        fits = (count for count in range(len(labels), 1, -1) if sum(letters[-count:]) <= LEGEND_LETTERS * size[0])
        style = {"loc": "outside upper center", "ncols": next(fits, 1), "frameon": False, "fontsize": 13}
        axes[0].figure.legend([known[label] for label in labels], labels, **style)


def draw_column(axis: Any, lines: Sequence[Line], titles: Sequence[str], models: Sequence[str]) -> None:
    """The lines of some benchmarks, a row of points each."""
    from dino_sparo.draw.plots import colour_of
    from dino_sparo.draw.sheet import INK, SOFT

    step = 0.7 / len(models)
    for number, model in enumerate(models):
        model_lines = [line for line in lines if line.model == model and line.title in titles]
        rows = [titles.index(line.title) + step * (number - (len(models) - 1) / 2) for line in model_lines]
        accuracy = np.array([line.accuracy for line in model_lines])
        reach = np.abs(np.array([(line.low, line.high) for line in model_lines]).reshape(-1, 2).T - accuracy)
        style = {"color": colour_of(number, len(models)), "markersize": 7, "elinewidth": 2, "zorder": 3}
        axis.errorbar(accuracy, rows, xerr=reach, fmt="osD^v"[number % 5], label=model, clip_on=False, **style)
        blind = [(line.blind, row) for line, row in zip(model_lines, rows, strict=True) if line.blind is not None]
        if blind:  # wider than the marker of the accuracy, so that it is seen if both are equal
            style = {"mfc": "none", "mec": SOFT, "markersize": 11, "clip_on": False}
            axis.plot(*zip(*blind, strict=True), "o", label="with shuffled images", **style)
    chance = {line.title: line.chance for line in lines if line.title in titles}
    ticks = np.array([titles.index(title) for title in chance])
    axis.vlines(list(chance.values()), ticks - 0.42, ticks + 0.42, color=INK, linewidth=1.6, zorder=2)
    axis.plot([], [], "|", color=INK, markersize=14, mew=1.6, label="chance")
    axis.set_yticks(range(len(titles)), titles, fontsize=13)
    axis.tick_params(axis="x", labelsize=12)
    axis.set_xlim(0, 100.5)
    axis.set_xlabel("accuracy, %" + "   (* incomplete)" * any("*" in line.title for line in lines), fontsize=13)
    axis.grid(axis="x", color=SOFT, alpha=0.25)


# Format -> ending of its file, and the function that writes the file.
FORMATS: dict[str, tuple[str, Callable[[Sequence[Line], Path], None]]] = {
    "markdown": (".md", lambda lines, path: write_text(markdown_table(table_rows(lines)), path)),
    "latex": (".tex", lambda lines, path: write_text(latex_table(table_rows(lines), num_words=2), path)),
    "csv": (".csv", lambda lines, path: write_text(to_csv(lines), path)),
    "plot": (".png", draw),
}


def write_short(lines: Sequence[Line], formats: Sequence[str], stem: Path) -> list[Path]:
    """Write the formats; returns the files, whose names begin with `stem`."""
    paths = []
    for name in formats:
        ending, write = FORMATS[name]
        paths.append(stem.with_name(stem.name + ending))
        write(lines, paths[-1])
    return paths

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
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dino_sparo.draw.tables import latex_table, markdown_table
from dino_sparo.image_text.evaluation.compositional.benchmark import Benchmark, Outcome, Weights
from dino_sparo.runtime.faults import require

NUM_RESAMPLES = 10_000


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


def headline_weights(benchmark: Benchmark, outcomes: Sequence[Outcome]) -> Weights:
    """Weight of each split in the headline of a benchmark."""
    counts = Counter(outcome.split for outcome in outcomes)
    return benchmark.means(counts).get(benchmark.headline) or {benchmark.headline: 1.0}


def compare_pairs(benchmark: Benchmark, first: Sequence[Outcome], second: Sequence[Outcome], seed: int) -> Difference:
    """The difference between two models' outcomes of the same questions."""
    require("scipy", "the significance of a difference")
    from scipy.stats import binomtest

    weights = headline_weights(benchmark, first)
    rights = {(outcome.split, outcome.question): outcome.right for outcome in first}
    pairs = [(o.split, rights[o.split, o.question], o.right) for o in second if (o.split, o.question) in rights]
    counts = Counter(pairs)
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


def cells(lines: Sequence[Line]) -> list[list[str]]:
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


def to_markdown(lines: Sequence[Line]) -> str:
    """A table of Markdown."""
    return markdown_table(cells(lines))


def to_latex(lines: Sequence[Line]) -> str:
    """A table of LaTeX with the rules of booktabs."""
    return latex_table(cells(lines), num_words=2)


def to_csv(lines: Sequence[Line]) -> str:
    """Comma-separated values, numbers in full."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow((*Line._fields[:-1], "difference", "difference_low", "difference_high", "p"))
    writer.writerows((*line[:-1], *(line.difference or ("",) * 4)) for line in lines)
    return file.getvalue()


FORMATS = {"markdown": (".md", to_markdown), "latex": (".tex", to_latex), "csv": (".csv", to_csv)}


def draw(lines: Sequence[Line], path: Path) -> None:
    """The headlines of all benchmarks with their intervals; chance as a tick, shuffled images as rings."""
    from dino_sparo.draw.plots import colour_of, panels
    from dino_sparo.draw.sheet import INK, SOFT

    titles, models = (list(dict.fromkeys(line[column] for line in lines))[::-1] for column in (0, 1))
    models = models[::-1]
    step = 0.7 / len(models)
    with panels(path, 1, 1, size=(9.0, 1.3 + len(titles) * max(0.42, 0.2 * len(models)))) as ((axis,),):
        for number, model in enumerate(models):
            model_lines = [line for line in lines if line.model == model]
            rows = [titles.index(line.title) + step * ((len(models) - 1) / 2 - number) for line in model_lines]
            colour = colour_of(number, len(models))
            accuracy = np.array([line.accuracy for line in model_lines])
            reach = np.abs(np.array([(line.low, line.high) for line in model_lines]).T - accuracy)
            style = {"color": colour, "markersize": 7, "elinewidth": 2, "zorder": 3, "clip_on": False}
            axis.errorbar(accuracy, rows, xerr=reach, fmt="osD^v"[number % 5], label=model, **style)
            blind = [(line.blind, row) for line, row in zip(model_lines, rows, strict=True) if line.blind is not None]
            if blind:
                label = "with shuffled images" if number == len(models) - 1 else None
                # Wider than the marker of the accuracy, so that it is seen if both are equal.
                axis.plot(
                    *zip(*blind, strict=True), "o", mfc="none", mec=SOFT, markersize=11, label=label, clip_on=False
                )
        chance = {line.title: line.chance for line in lines}
        rows = [titles.index(title) for title in chance]
        axis.plot(list(chance.values()), rows, "|", color=INK, markersize=22, mew=1.6, label="chance", zorder=2)
        axis.set_yticks(range(len(titles)), titles, fontsize=12)
        axis.set(xlim=(0, 100.5), ylim=(-0.6, len(titles) - 0.4))
        axis.set_xlabel("accuracy, %" + "   (* incomplete)" * any("*" in line.title for line in lines), fontsize=12)
        axis.grid(axis="x", color=SOFT, alpha=0.25)
        handles, labels = axis.get_legend_handles_labels()
        order = sorted(range(len(labels)), key=lambda index: labels[index] not in models)  # the models first
        handles, labels = ([each[index] for index in order] for each in (handles, labels))
        axis.legend(handles, labels, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False, fontsize=11)


def write_short(lines: Sequence[Line], formats: Sequence[str], stem: Path) -> list[Path]:
    """Write the formats, including the plot; returns the files, whose names begin with `stem`."""
    paths = []
    for name in formats:
        ending, render = FORMATS.get(name, (".png", None))
        path = stem.with_name(stem.name + ending)
        if render is None:
            draw(lines, path)
        else:
            path.write_text(render(lines), encoding="utf-8")
        paths.append(path)
    return paths

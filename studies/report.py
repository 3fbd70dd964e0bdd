"""Results of a study -> tables in Markdown, and one plot."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dino_sparo.clip.slots.plots import colour_of
from dino_sparo.evaluation.plots import panels
from studies.plans import STUDIES
from studies.runs import Run, choosing_runs, chosen_rates, reported_runs

# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

Results = Mapping[str, Mapping[int, dict[str, Any]]]  # variant -> seed -> result


def finished(name: str, results: Path) -> Results:
    """The reported runs that are finished.

    Args:
        name: of the study.
        results: folder of all studies' results.
    """
    found: dict[str, dict[int, dict[str, Any]]] = {variant: {} for variant in STUDIES[name].variants}
    for run in reported_runs(name, results):
        result = run.result(results)
        if result is not None:
            found[run.variant][run.seed] = result
    return found


def mean_and_deviation(values: Sequence[float]) -> str:
    """Mean ± standard deviation over seeds; the mean alone of one."""
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{deviation}"


def t_interval(differences: Sequence[float]) -> str:
    """Mean difference d and its 95 % interval d ± t s / sqrt(n), by Student's t with n - 1 degrees of freedom.

    Args:
        differences: one per seed.
    """
    mean = statistics.mean(differences)
    if len(differences) < 2:
        return f"{mean:+.1f} (one seed)"
    half = T_QUANTILES[len(differences) - 2] * statistics.stdev(differences) / math.sqrt(len(differences))
    return f"{mean:+.1f} [{mean - half:+.1f}, {mean + half:+.1f}]"


def report(name: str, results: Path) -> str:
    """All tables of a study.

    Args:
        name: of the study.
        results: folder of all studies' results.
    """
    found = finished(name, results)
    parts = [f"**{STUDIES[name].question}**", choice_table(name, results)]
    if any(found.values()):
        parts += [summary_table(found), difference_table(STUDIES[name].baseline, found), seed_table(found)]
    return "\n\n".join(part for part in parts if part)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def choice_table(name: str, results: Path) -> str:
    """What each learning rate gave in the runs that choose it; the chosen one is bold."""
    study, chosen = STUDIES[name], chosen_rates(name, results)
    values: dict[Run, str] = {}
    for run in choosing_runs(name):
        result = run.result(results)
        shown = "-" if result is None else f"{abs(study.choose(result['epochs'][-1])):.2f}"
        values[run] = f"**{shown}**" if chosen.get(run.variant) == run.lr else shown
    if not values:
        return ""
    rows = [
        [variant, *(value for run, value in values.items() if run.variant == variant)] for variant in study.variants
    ]
    return markdown(["learning rate", *(f"{lr:g}" for lr in study.learning_rates)], rows)


Column = tuple[str, str]  # state of the weights, score


def _columns(found: Results) -> list[Column]:
    """All scores of all runs: one after the other, each with its states."""
    columns = [
        (state, score)
        for by_seed in found.values()
        for result in by_seed.values()
        for state, scores in result["scores"].items()
        for score in scores
    ]
    order = list(dict.fromkeys(score for _, score in columns))
    return sorted(dict.fromkeys(columns), key=lambda column: order.index(column[1]))


def _values(by_seed: Mapping[int, dict[str, Any]], column: Column) -> dict[int, float]:
    """Seed -> score, of the runs that have it."""
    state, score = column
    scores = {seed: result["scores"].get(state, {}) for seed, result in by_seed.items()}
    return {seed: values[score] for seed, values in scores.items() if score in values}


def _titles(columns: Sequence[Column]) -> list[str]:
    """Heads of columns; the state is named where there are several."""
    one_state = len({state for state, _ in columns}) == 1
    return [score if one_state else f"{score}, {state}" for state, score in columns]


def summary_table(found: Results) -> str:
    """Mean ± standard deviation of every score; parameters of the encoder, minutes of training.

    Args:
        found: the runs that are finished.
    """
    columns = _columns(found)
    rows = []
    for variant, by_seed in found.items():
        runs = list(by_seed.values())
        if runs:
            cells = [list(_values(by_seed, column).values()) for column in columns]
            minutes = mean_and_deviation([run["training_s"] / 60 for run in runs])
            scores = [mean_and_deviation(cell) if cell else "" for cell in cells]
            rows.append([variant, str(len(runs)), *scores, f"{runs[0]['encoder_parameters']:,}", minutes])
    return markdown(["", "seeds", *_titles(columns), "encoder's parameters", "training, minutes"], rows)


def difference_table(baseline: str, found: Results) -> str:
    """Differences to the baseline, seed by seed: mean and 95 % interval.

    Args:
        baseline: the variant that is subtracted.
        found: the runs that are finished.
    """
    columns, rows = _columns(found), []
    for variant, by_seed in found.items():
        cells = []
        for column in columns:
            theirs = _values(found[baseline], column)
            cells.append([value - theirs[seed] for seed, value in _values(by_seed, column).items() if seed in theirs])
        if variant != baseline and any(cells):
            rows.append([f"{variant} - {baseline}", *(t_interval(cell) if cell else "" for cell in cells)])
    return markdown(["difference [95 % interval]", *_titles(columns)], rows) if rows else ""


def seed_table(found: Results) -> str:
    """Every run.

    Args:
        found: the runs that are finished.
    """
    columns, rows = _columns(found), []
    for variant, by_seed in found.items():
        cells = [_values(by_seed, column) for column in columns]
        rows += [
            [variant, str(seed), *(f"{cell[seed]:.1f}" if seed in cell else "" for cell in cells)] for seed in by_seed
        ]
    return markdown(["", "seed", *_titles(columns)], rows)


# Keys of log.txt -> what they show; those that were logged are drawn.
CURVES = {
    "train_loss": "training loss, nats",
    "knn_20": "20-NN on training images, %",
    "val_loss": "loss on held-out pairs, nats",
}


def draw(name: str, results: Path, path: Path) -> None:
    """Curves of all runs during training, and their final scores.

    Args:
        name: of the study.
        results: folder of all studies' results.
        path: the PNG to write.

    Raises:
        ImportError: matplotlib is not installed.
    """
    found = {variant: by_seed for variant, by_seed in finished(name, results).items() if by_seed}
    logged = {key for by_seed in found.values() for run in by_seed.values() for epoch in run["epochs"] for key in epoch}
    curves = [key for key in CURVES if key in logged]
    scores = [score for state, score in _columns(found) if state == "trained"]
    with panels(path, 1, len(curves) + 1) as (axes,):
        for number, (variant, by_seed) in enumerate(found.items()):
            colour = colour_of(number, len(found))
            for axis, key in zip(axes, curves, strict=False):
                _draw_curves(axis, by_seed, key, colour, variant)
            for at, score in enumerate(scores):
                where = at + (number - (len(found) - 1) / 2) * 0.8 / len(found)
                _draw_score(axes[-1], by_seed, score, colour, where)
        axes[0].legend(frameon=False)
        axes[-1].set_xticks(range(len(scores)), [score.replace(" ", "\n", 1) for score in scores])
        axes[-1].set(ylabel="accuracy, %")
        axes[-1].set_title("hollow: untrained, filled: trained", fontsize=9, loc="left")


def _draw_curves(axis: Any, by_seed: Mapping[int, dict[str, Any]], key: str, colour: str, variant: str) -> None:
    """One line per seed."""
    for number, run in enumerate(by_seed.values()):
        points = [(epoch["step"], epoch[key]) for epoch in run["epochs"] if key in epoch]
        axis.plot(*zip(*points, strict=True), color=colour, alpha=0.7, label=None if number else variant)
    axis.set(xlabel="step", ylabel=CURVES[key])


def _draw_score(axis: Any, by_seed: Mapping[int, dict[str, Any]], score: str, colour: str, where: float) -> None:
    """One dot per seed, and a short line at their mean."""
    for state, face in (("untrained", "none"), ("trained", colour)):
        values = list(_values(by_seed, (state, score)).values())
        if values:
            axis.plot([where] * len(values), values, "o", color=colour, markerfacecolor=face, markersize=4, alpha=0.8)
            axis.plot([where - 0.06, where + 0.06], [statistics.mean(values)] * 2, color=colour, linewidth=2)

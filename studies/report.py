"""Results of a study -> tables in Markdown, and one plot."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dino_sparo.demo.run import spread
from dino_sparo.draw.plots import FAINT, colour_of, panels
from studies.plans import STUDIES, Study
from studies.runs import Run, choosing_runs, chosen_rates, reported_rows, reported_runs

SIZES = ("encoder_parameters", "trained_parameters")
Results = Mapping[str, Mapping[int, dict[str, Any]]]  # variant or control -> seed -> result
Column = tuple[str, str]  # state of the weights, score
BySeed = Mapping[int, float]


def finished(name: str, results: Path) -> Results:
    """Reported runs that finished and did not diverge; each control follows its variant."""
    study = STUDIES[name]
    rows, found = reported_rows(name, results), {}
    for row in [*study.variants, *study.also]:
        runs_of_row = [Run(name, *rows[row], seed) for seed in study.seeds] if row in rows else []
        results_of_row = {run.seed: run.result(results) for run in runs_of_row}
        by_seed = {seed: result for seed, result in results_of_row.items() if result and "diverged" not in result}
        found[row] = {seed: _with_scores(result, _main_scores(study, result)) for seed, result in by_seed.items()}
        # Encoders of a control have other sizes, and were not trained again.
        unknown = dict.fromkeys((*SIZES, "training_processor_s"))
        for control, (controlled, other_scores) in study.controls.items():
            if controlled == row:
                runs = {seed: {**_with_scores(result, other_scores), **unknown} for seed, result in by_seed.items()}
                found[control] = {seed: run for seed, run in runs.items() if any(run["scores"].values())}
    return found


def _main_scores(study: Study, result: Mapping[str, Any]) -> dict[str, str]:
    """All scores of a run except the scores that only controls show, each in the column of its name."""
    names = dict.fromkeys(score for scores in result["scores"].values() for score in scores)
    return {score: score for score in names if score not in study.control_scores}


def _with_scores(result: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The same run with scores chosen for columns of the tables."""
    scores = {
        state: {column: values[score] for column, score in columns.items() if score in values}
        for state, values in result["scores"].items()
    }
    return {**result, "scores": scores}


def mean_and_deviation(values: Sequence[float]) -> str:
    """Mean ± standard deviation over seeds; empty without values."""
    return spread(values, unit="") if values else ""


def t_interval(differences: Sequence[float]) -> str:
    """Mean difference d and its 95 % interval d ± t s / sqrt(n), by Student's t with n - 1 degrees of freedom.

    Empty without differences.
    """
    from scipy import stats

    if not differences:
        return ""
    mean = statistics.mean(differences)
    if len(differences) < 2:
        return f"{mean:+.1f} (one seed)"
    quantile = float(stats.t.ppf(0.975, len(differences) - 1))
    half = quantile * statistics.stdev(differences) / math.sqrt(len(differences))
    return f"{mean:+.1f} [{mean - half:+.1f}, {mean + half:+.1f}]"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def differences(one: BySeed, other: BySeed) -> dict[int, float]:
    """Differences paired by seed, for seeds that both have."""
    return {seed: value - other[seed] for seed, value in one.items() if seed in other}


def interval_table(title: str, columns: Sequence[str], rows: Mapping[str, Iterable[BySeed]]) -> str:
    """Mean and 95 % interval of each cell's differences; rows without any difference are left out."""
    cells = {name: [t_interval([*cell.values()]) for cell in row] for name, row in rows.items()}
    shown = [[name, *row] for name, row in cells.items() if any(row)]
    return markdown([f"{title} [95 % interval]", *columns], shown) if shown else ""


def report(name: str, results: Path) -> str:
    """All tables of a study; `results` is the folder of all studies' results."""
    study, found = STUDIES[name], finished(name, results)
    parts = [f"**{study.question}**", choice_table(name, results), choice_note(name, results)]
    if any(found.values()):
        pairs = study.differences or [(row, study.baseline) for row in found if row != study.baseline]
        columns = _columns(found)
        scores = {row: {column: _values(by_seed, column) for column in columns} for row, by_seed in found.items()}
        untrained = [score for state, score in columns if state == "untrained"]
        # Trained minus untrained encoder of the same initialisation.
        gains = {
            row: {score: differences(by_column["trained", score], by_column["untrained", score]) for score in untrained}
            for row, by_column in scores.items()
        }

        def between(values: Mapping[str, Mapping[Any, BySeed]]) -> dict[str, list[dict[int, float]]]:
            return {
                f"{one} - {other}": [differences(value, values[other][key]) for key, value in values[one].items()]
                for one, other in pairs
            }

        added = {row: by_column.values() for row, by_column in gains.items()}
        parts += [summary_table(found), interval_table("difference", _titles(columns), between(scores))]
        parts += [interval_table("trained - untrained", untrained, added)]
        parts += [interval_table("difference of the gains", untrained, between(gains)), seed_table(found)]
        parts.append(origin(name, results))
    return "\n\n".join(part for part in parts if part)


def origin(name: str, results: Path) -> str:
    """Commit and torch version of the runs, CPU time of all trainings, and diverged runs."""
    study, choosing = STUDIES[name], choosing_runs(name)
    rows = reported_rows(name, results)
    num_rows = len(set(rows.values())) + len(study.variants.keys() - rows)  # those whose rate is not chosen yet
    planned = len(choosing) + num_rows * len(study.seeds)
    runs = choosing + reported_runs(name, results)
    made = [result for run in runs if (result := run.result(results)) is not None]
    seconds = [result["training_processor_s"] for result in made if result["training_processor_s"] is not None]
    hashes = {hash for result in made for hash in (result["commit"], *result.get("scores_added_with", []))}
    commits = ", ".join(sorted(str(commit)[:7] for commit in hashes if commit is not None))
    versions = ", ".join(sorted({result["torch"] for result in made}))
    diverged = [f"{result['run']} ({result['diverged'].partition(';')[0]})" for result in made if "diverged" in result]
    no_scores = f" These runs diverged and are in no other table: {'; '.join(diverged)}." if diverged else ""
    with_choosing = ", including the runs that choose a learning rate" if choosing else ""
    return (
        f"{len(made)} of {planned} runs are finished{with_choosing}. Commits: {commits}; torch {versions}. "
        f"Training time was recorded for {len(seconds)} runs: {sum(seconds) / 3600:.1f} CPU hours in total.{no_scores}"
    )


def choice_table(name: str, results: Path) -> str:
    """Result of each learning rate in the runs that choose it; the chosen one is bold."""
    study, chosen = STUDIES[name], chosen_rates(name, results)
    values: dict[Run, str] = {}
    for run in choosing_runs(name):
        result = run.result(results)
        shown = "-" if result is None else f"{abs(study.quality(result)):.2f}".replace("inf", "diverged")
        values[run] = f"**{shown}**" if chosen.get(run.variant) == run.lr else shown
    if not values:
        return ""
    rows = [
        [variant, *(value for run, value in values.items() if run.variant == variant)] for variant in study.variants
    ]
    return markdown(["learning rate", *(f"{lr:g}" for lr in study.learning_rates)], rows)


def choice_note(name: str, results: Path) -> str:
    """Chosen learning rates at an end of the grid, beyond which a better rate may exist, and ties."""
    study, notes = STUDIES[name], []
    for variant, lr in chosen_rates(name, results).items() if len(study.learning_rates) > 1 else ():
        values = [
            study.quality(result)
            for run in choosing_runs(name)
            if run.variant == variant and (result := run.result(results)) is not None
        ]
        if values.count(max(values)) > 1:
            notes.append(f"`{variant}`: a tie; the smaller rate was chosen.")
        if lr in (min(study.learning_rates), max(study.learning_rates)):
            end, beyond = ("smallest", "smaller") if lr == min(study.learning_rates) else ("largest", "larger")
            notes.append(f"`{variant}`: the {end} rate was chosen; a {beyond} rate may be better.")
    return " ".join(notes)


def _columns(found: Results) -> list[Column]:
    """All columns, score by score, each with its states."""
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
    """Seed -> score, for runs that have it."""
    state, score = column
    scores = {seed: result["scores"].get(state, {}) for seed, result in by_seed.items()}
    return {seed: values[score] for seed, values in scores.items() if score in values}


def _titles(columns: Sequence[Column]) -> list[str]:
    """Titles of columns; the state is named if there are several."""
    one_state = len({state for state, _ in columns}) == 1
    return [score if one_state else f"{score}, {state}" for state, score in columns]


def summary_table(found: Results) -> str:
    """Mean ± standard deviation of every score; parameters; CPU minutes of the training."""
    columns, rows = _columns(found), []
    for variant, runs in ((variant, list(by_seed.values())) for variant, by_seed in found.items() if by_seed):
        scores = [mean_and_deviation([*_values(found[variant], column).values()]) for column in columns]
        sizes = [f"{runs[0][key]:,}" if runs[0][key] else "" for key in SIZES]
        seconds = [run["training_processor_s"] for run in runs]
        minutes = [one / 60 for one in seconds if one is not None]  # a run that was cut off has none
        of = f" ({len(minutes)} run{'s' * (len(minutes) > 1)})" if 0 < len(minutes) < len(runs) else ""
        rows.append([variant, str(len(runs)), *scores, *sizes, mean_and_deviation(minutes) + of])
    costs = ["encoder parameters", "trained parameters", "training, CPU minutes"]
    return markdown(["", "seeds", *_titles(columns), *costs], rows)


def seed_table(found: Results) -> str:
    """Scores of every run."""
    columns, rows = _columns(found), []
    for variant, by_seed in found.items():
        cells = [_values(by_seed, column) for column in columns]
        rows += [
            [variant, str(seed), *(f"{cell[seed]:.2f}" if seed in cell else "" for cell in cells)] for seed in by_seed
        ]
    return markdown(["", "seed", *_titles(columns)], rows)


TALK_SIZE = 14  # points, of a plot's words: they can be read on a slide


@contextmanager
def talk_panels(path: Path, rows: int, columns: int, size: tuple[float, float]) -> Iterator[Any]:
    """`panels` with words large enough for a talk."""
    from matplotlib import rc_context

    with rc_context({"font.size": TALK_SIZE}), panels(path, rows, columns, size=size) as axes:
        yield axes


# Keys of log.txt -> what they show; those that were logged are drawn.
CURVES = {
    "train_loss": "training loss, nats",
    "knn_20": "20-NN on training images, %",
    "val_loss": "loss on held-out pairs, nats",
}


def draw(name: str, results: Path, path: Path) -> None:
    """Draw final scores of all runs and, below, training curves as a PNG.

    A curve has the colour of its row's name, and controls have the colour of their row. Scores that some rows lack
    stand in the tables only.
    """
    found = {row: by_seed for row, by_seed in finished(name, results).items() if by_seed}
    controlled = {control: row for control, (row, _) in STUDIES[name].controls.items()}
    trained = [row for row in found if row not in controlled]
    colours = {row: colour_of(number, len(trained)) for number, row in enumerate(trained)}
    colours |= {control: colours[row] for control, row in controlled.items() if row in colours}
    logged = {key for by_seed in found.values() for run in by_seed.values() for epoch in run["epochs"] for key in epoch}
    curves = [key for key in CURVES if key in logged]
    scores = [
        score
        for state, score in _columns(found)
        if state == "trained" and all(_values(by_seed, (state, score)) for by_seed in found.values())
    ]
    columns, rows = max(len(curves), len(scores), 1), list(reversed(found))
    with talk_panels(path, 2, columns, (6.5 * columns, 4.5 + max(3.0, 0.4 * len(rows)))) as (above, below):
        for axis, score in zip(above, scores, strict=False):
            for height, row in enumerate(rows):
                for state in ("untrained", "trained"):
                    draw_marks(axis, [*_values(found[row], (state, score)).values()], state, colours[row], height)
            label_rows(axis, rows if axis is above[0] else [""] * len(rows), [colours[row] for row in rows])
            axis.set_xlabel(f"{score}, %")
        if any(state == "untrained" for state, _ in _columns(found)):
            above[0].set_title("hollow: untrained, filled: trained", loc="left")
        for axis, key in zip(below, curves, strict=False):
            for row in trained:
                _draw_curves(axis, found[row], key, colours[row])
        for axis in (*above[len(scores) :], *below[len(curves) :]):
            axis.set_axis_off()


def label_rows(axis: Any, rows: Sequence[str], colours: Sequence[str]) -> None:
    """Names of rows, from the lowest, in their colours, and a faint line along each row."""
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.set_yticks(range(len(rows)), rows)
    for label, colour in zip(axis.get_yticklabels(), colours, strict=True):
        label.set_color(colour)
    axis.grid(axis="y", color=FAINT)
    axis.set_axisbelow(True)


def _draw_curves(axis: Any, by_seed: Mapping[int, dict[str, Any]], key: str, colour: str) -> None:
    """One line per seed."""
    for run in by_seed.values():
        points = [(epoch["step"], epoch[key]) for epoch in run["epochs"] if key in epoch]
        axis.plot(*zip(*points, strict=True), color=colour, alpha=0.7, linewidth=2)
    axis.set(xlabel="step", ylabel=CURVES[key])


def draw_marks(axis: Any, values: Sequence[float], state: str, colour: str, height: int) -> None:
    """One mark per seed, hollow for untrained weights, and a short line at the mean."""
    if values:
        face = "none" if state == "untrained" else colour
        axis.plot(values, [height] * len(values), "o", color=colour, markerfacecolor=face, markersize=7, alpha=0.8)
        axis.plot([statistics.mean(values)] * 2, [height - 0.3, height + 0.3], color=colour, linewidth=2)

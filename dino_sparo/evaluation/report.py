"""Folders with result files -> one table of all models and scores, as Markdown, LaTeX and CSV, and one plot.

    dino-sparo report runs/first runs/second --output_dir report

The scores are the entries `headline` of the results. Scores stand in one row only if they were measured with the same
options on equally many images. With two models, the table has a column of differences.
"""

import argparse
import csv
import io
import logging
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dino_sparo.draw.figure import run_names
from dino_sparo.draw.sheet import INK, SOFT, require_matplotlib
from dino_sparo.draw.tables import latex_table, markdown_table
from dino_sparo.evaluation.options import ENCODER, REPORT_FORMATS
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import parse_json, refuse_existing, write_text
from dino_sparo.runtime.lock import create_output_dir
from dino_sparo.runtime.logs import setup_logging
from dino_sparo.weights.options import FOREIGN_WEIGHTS
from dino_sparo.weights.results import Score, data_name, evaluated_data, scores_of, subject_of

logger = logging.getLogger(__name__)

# Options that name the model (a column of the table), the data, or features on disk.
NOT_SETTINGS = {*ENCODER, *FOREIGN_WEIGHTS, "weights", "model", "slots", "image_encoder", "data_path", "data_root"}
NOT_SETTINGS |= {"embeddings", "store"}
NOT_SETTINGS -= {"seed"}
LABEL_LETTERS = 60  # in a line of a label of the plot; longer lines would leave no width to the axis
SMALL_UNIT = 1.0  # scores without a unit from -1 to 1, such as shares and R2, share an axis


class Row(NamedTuple):
    """The key of a row of scores; `settings` are the options in which results of the same data differ."""

    evaluation: str
    settings: str
    data: str
    score: str
    unit: str

    @property
    def words(self) -> list[str]:
        """The cells before the numbers."""
        unit = f", {self.unit}" if self.unit else ""
        settings = f" ({self.settings})" if self.settings else ""
        return [self.evaluation + settings, self.data, self.score + unit]


class Result(NamedTuple):
    """A result file."""

    path: Path
    content: dict[str, Any]

    @property
    def kind(self) -> tuple[str, str]:
        """Names of the evaluation and of the data."""
        return self.content.get("evaluation", self.path.stem), data_name(evaluated_data(self.content) or "")

    @property
    def settings(self) -> dict[str, Any]:
        """Options that do not name model or data, and numbers of images."""
        options = {name: v for name, v in self.content.get("options", {}).items() if name not in NOT_SETTINGS}
        counts = {name: v for name, v in self.content.get("images", {}).items() if name.startswith("num_")}
        return options | counts

    @property
    def model(self) -> tuple[str, str]:
        """Path or name of the weights, and the marks of models whose weights have the same name."""
        subject = subject_of(self.content)
        slots = (subject.get("slots") or self.content.get("slots") or {}) if "best" not in self.content else {}
        marks = [] if subject.get("checkpoint_key") in (None, "teacher") else [subject["checkpoint_key"]]
        marks += [f"{len(slots['slots'])} slots {slots['slots']}"] if isinstance(slots, dict) and slots else []
        name = subject.get("pretrained_weights") or subject.get("name")
        if not name:
            name, marks = f"untrained {subject.get('arch', '')}".strip(), [*marks, f"seed {subject.get('seed', 0)}"]
        return str(name), " ".join([*marks, (subject.get("sha256") or "")[:8]])


Table = dict[Row, dict[str, tuple[Score, Path]]]  # row -> model -> its score, and the file


def report(args: argparse.Namespace) -> Table:
    """Write and print the table of all results in the folders; returns the rows."""
    setup_logging()
    results = list(read_results(args.runs))
    if not results:
        raise UserError(
            f"{', '.join(args.runs)}: no result files; knn, linear and the other evaluations write them beside the "
            "weights, or into --output_dir"
        )
    table, models = tabulate(results)
    rows, num_words = cells(table, models)
    written = {"markdown": markdown_table(rows), "latex": latex_table(rows, num_words), "csv": to_csv(table)}
    say(written[args.format])
    if args.output_dir:
        require_matplotlib()
        create_output_dir(folder := Path(args.output_dir))
        paths = [folder / f"report.{ending}" for ending in (*REPORT_FORMATS.values(), "png")]
        refuse_existing(paths, args.overwrite)
        for path, text in zip(paths, written.values(), strict=False):
            write_text(text, path)
        draw(table, models, paths[-1])
        say("\n".join(map(str, paths)))
    return table


def read_results(runs: Sequence[str]) -> Iterator[Result]:
    """The result files at and below some paths, each once, in the order of the paths; other JSON is skipped."""
    paths: dict[Path, None] = {}
    for run in map(Path, runs):
        if not run.exists():
            raise UserError(f"{run} does not exist; give folders with result files")
        found = sorted(run.rglob("*.json")) if run.is_dir() else [run]
        paths |= dict.fromkeys(path.resolve() for path in found)
    for path in paths:
        try:
            content = parse_json(path.read_bytes())
            is_result = isinstance(content, dict) and bool(subject_of(content)) and bool(scores_of(content))
        except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s is left out, because it is unreadable or not a result: %r", path, error)
            continue
        if is_result:
            yield Result(path, content)


def tabulate(results: Sequence[Result]) -> tuple[Table, list[str]]:
    """The table, and the names of the models in their order."""
    names = name_models([result.model for result in results])
    same_kind: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        same_kind[result.kind].append(result)
    table: Table = defaultdict(dict)
    for (evaluation, data), group in same_kind.items():
        for result in group:
            settings = differing_settings(result, group)
            for score in scores_of(result.content):
                found = table[Row(evaluation, settings, data, score.name, score.unit)]
                model = names[result.model]
                if model in found and found[model][0].number_and_interval != score.number_and_interval:
                    logger.warning("%s is left out: %s has another %s", result.path, found[model][1], score.name)
                found.setdefault(model, (score, result.path))
    return dict(table), list(dict.fromkeys(names.values()))


def name_models(models: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """A short name for each model; models of equal names also get their marks."""
    distinct = list(dict.fromkeys(models))
    files = list(dict.fromkeys(path for path, _ in distinct if Path(path).suffix))
    short = dict(zip(files, run_names(files), strict=True)) if files else {}
    names = {model: short.get(model[0], model[0]) for model in distinct}
    counts = Counter(names.values())
    return {model: f"{name} {model[1]}".strip() if counts[name] > 1 else name for model, name in names.items()}


def differing_settings(result: Result, group: Sequence[Result]) -> str:
    """The settings of a result that differ within its group, in words."""
    others = [other.settings for other in group]
    shown = []
    for name, value in result.settings.items():
        if any(other.get(name) != value for other in others):
            is_file = isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)
            words = Path(value[0]).name if is_file else " ".join(map(str, value)) if isinstance(value, list) else value
            shown.append(f"{name} {words}")
    return ", ".join(shown)


def cells(table: Table, models: Sequence[str]) -> tuple[list[list[str]], int]:
    """Head and rows, and the number of columns of words; models are the rows if there are more models than scores."""
    numbers = {
        row: [found[model][0].number_and_interval if model in found else "" for model in models]
        for row, found in table.items()
    }
    if len(models) > max(len(table), 2):
        columns = [[": ".join(filter(None, row.words)), *cells] for row, cells in numbers.items()]
        return [list(row) for row in zip(["model", *models], *columns, strict=True)], 1
    head = ["evaluation", "data", "score", *models]
    rows = [[*row.words, *cells] for row, cells in numbers.items()]
    if len(models) == 2:
        head.append("difference")
        for row, found in zip(rows, table.values(), strict=True):
            row.append(difference([found[model][0] for model in models if model in found]))
    return [head, *rows], 3


def difference(scores: Sequence[Score]) -> str:
    """The second score minus the first, with its sign; empty if one is missing."""
    values = [score.value for score in scores if score.value is not None]
    if len(values) < 2:
        return ""
    change = scores[0]._replace(value=values[1] - values[0])
    return ("+" if values[1] >= values[0] else "") + change.number


def to_csv(table: Table) -> str:
    """One line per score, numbers in full."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("model", "evaluation", "settings", "data", "score", "value", "unit", "low", "high", "file"))
    for row, found in table.items():
        for model, (score, path) in found.items():
            numbers = (score.value, score.unit, score.low, score.high)
            writer.writerow((model, row.evaluation, row.settings, row.data, row.score, *numbers, path))
    return file.getvalue()


def draw(table: Table, models: Sequence[str], path: Path) -> None:
    """Plot all scores with their intervals, with a marker for each model; scores of one unit share an axis."""
    from dino_sparo.draw.plots import colour_of, panels

    axes_rows: dict[str, list[Row]] = defaultdict(list)
    for row, found in table.items():
        if values := [score.value for score, _ in found.values() if score.value is not None]:
            is_small = not row.unit and max(map(abs, values)) <= SMALL_UNIT
            axes_rows[row.unit if row.unit or is_small else f"{row.score}, {row.data}"].append(row)
    step = 0.6 / len(models)
    sizes = [max(1.6, len(rows) * max(0.45, 0.16 * len(models))) for rows in axes_rows.values()]
    with panels(path, len(axes_rows), 1, size=(9.0, sum(sizes) + 0.6 * len(sizes) + 0.6)) as axes:
        axes[0, 0].get_gridspec().set_height_ratios(sizes)
        for axis, (unit, rows) in zip(axes[:, 0], axes_rows.items(), strict=True):
            for position, model in enumerate(models):
                scored = [(index, table[row][model][0]) for index, row in enumerate(rows) if model in table[row]]
                places = [len(rows) - 1 - index + step * ((len(models) - 1) / 2 - position) for index, _ in scored]
                # NaN for None: no marker, or no interval.
                values, *ends = np.array([(s.value, s.low, s.high) for _, s in scored], float).reshape(-1, 3).T
                style: Mapping[str, Any] = {"color": colour_of(position, len(models)), "markersize": 6, "zorder": 3}
                reach = np.abs(ends - values)
                axis.errorbar(values, places, xerr=reach, fmt="osD^v"[position % 5], label=model, **style)
            labels = [textwrap.fill(" · ".join(filter(None, row.words)), LABEL_LETTERS) for row in rows[::-1]]
            axis.set_yticks(range(len(rows)), labels, fontsize=8)
            axis.set(ylim=(-0.6, len(rows) - 0.4))
            axis.set_xlabel(unit, color=INK)
            axis.grid(axis="x", color=SOFT, alpha=0.25)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        axes[0, 0].legend(handles, labels, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)

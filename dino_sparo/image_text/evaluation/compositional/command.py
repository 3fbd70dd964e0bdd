"""Models and a folder of benchmarks -> accuracies, models side by side: `dino-sparo compositional`.

    dino-sparo compositional --pretrained_weights clip/checkpoint.pth oc/checkpoint.pth --data_root data

All benchmarks below the folder are evaluated (docs/compositional.md lists their files). The command prints one table
and writes one compositional_WEIGHTS_DATA.json per model: accuracies with intervals, what was left out, and the whole
protocol.
"""

import argparse
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import compress, islice
from pathlib import Path
from typing import Any, NamedTuple

from dino_sparo.data.sources.decode import DEFAULT_LIMITS, ImageLimits
from dino_sparo.draw.sheet import require_matplotlib
from dino_sparo.draw.tables import markdown_table
from dino_sparo.evaluation.features import WARNINGS
from dino_sparo.image_text.evaluation.compositional.benchmark import Outcome, summarize
from dino_sparo.image_text.evaluation.compositional.discover import (
    ImageRules,
    LocalBenchmark,
    find_benchmarks,
    list_benchmarks,
)
from dino_sparo.image_text.evaluation.compositional.failures import Failures, clearest_failures, write_failures
from dino_sparo.image_text.evaluation.compositional.journal import Journal
from dino_sparo.image_text.evaluation.compositional.questions import (
    Answer,
    Question,
    answer_questions,
    captions_of,
    with_shuffled_images,
)
from dino_sparo.image_text.evaluation.compositional.sets import BENCHMARKS
from dino_sparo.image_text.evaluation.compositional.short import main_entry, short_lines, table_rows, write_short
from dino_sparo.image_text.evaluation.published import PublishedTask, is_published
from dino_sparo.image_text.evaluation.task import OpenScorer, ScorerTask
from dino_sparo.image_text.scorer import Scorer
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import write_text
from dino_sparo.runtime.launch import is_main
from dino_sparo.weights.results import Score

logger = logging.getLogger(__name__)

MAX_SHOWN = 8  # splits in the table; the result file has all
RESULT, UNRECORDED = "compositional", ("chunk_images", "failures", "write_captions", "model", "short", "list")

Result = dict[str, Any]
# The answer to each question of a benchmark, None where an image cannot be read.
Answers = Sequence[Answer | None]


def tasks_of(task: ScorerTask) -> list[ScorerTask]:
    """One task per model of the options; raises ValueError if a model is missing."""
    names = [*task.args.pretrained_weights, *task.args.model]
    if not names:
        raise UserError("--model is empty: there is nothing to evaluate; give one model or more")
    for name in names:
        if not is_published(name) and not Path(name).is_file():
            raise UserError(f"--model {name}: there is no such file")
    task.args.pretrained_weights = names
    return [PublishedTask.of(task, name) if is_published(name) else task.for_weights(name) for name in names]


def compare(args: argparse.Namespace, open_model: OpenScorer) -> list[Result]:
    """Evaluate the models of the options, write a result for each, show the table; returns the content of the files."""
    task = ScorerTask.start(args, open_model)
    rules, names = ImageRules.of(args, Path(args.data_root)), args.benchmarks or list(BENCHMARKS)
    if args.list:
        say(list_benchmarks(names, rules))
        return []
    if not args.data_root:
        raise UserError("--data_root is empty; give the folder that holds the benchmarks")
    if args.failures or "plot" in (args.short or ()):
        require_matplotlib()
    benchmarks = find_benchmarks(names, rules)
    if args.write_captions:
        return write_captions(benchmarks, Path(args.write_captions))
    tasks = tasks_of(task)
    files = [each.open_result(RESULT, unrecorded=UNRECORDED) for each in tasks]
    if len({file.path for file in files}) < len(files):
        raise UserError("two results would have the same name; rename the folders of the checkpoints")
    for each in tasks[1:]:  # a model that cannot be opened ends the command now, not after hours
        logger.info("%s can be opened; its score is a %s", each.args.pretrained_weights, each.scorer.measure)
        del each.scorer
    evaluations: dict[str, Evaluation] = {}
    settings, journals, written = (args.chunk_images, args.seed, args.blind, args.failures), [], []
    labels = labels_of(args.pretrained_weights)
    for number, (label, task, file) in enumerate(zip(labels, tasks, files, strict=True), start=1):
        logger.info("model %d of %d, %s: %s", number, len(tasks), label, task.args.pretrained_weights)
        WARNINGS.clear()  # about the model before
        journals.append(Journal.of(file.path, file.options, all_questions(benchmarks, args.seed, args.blind)))
        evaluation = evaluate(task.scorer, benchmarks, *settings, task.limits, journals[-1])
        headlines = headline(evaluation.result, benchmarks)
        evaluations[label] = evaluation._replace(result=file.write(evaluation.result, headline=headlines))
        written.append(file.path)
        if is_main() and args.failures:
            stem = file.path.with_name(f"{file.path.stem}_failures")
            written += write_failures(task.scorer, label, evaluation.failures, stem, task.limits)
        del task.scorer  # the next model needs the memory
    results = {label: each.result for label, each in evaluations.items()}
    if args.graphs and not any("graphs" in result for result in results.values()):
        logger.warning("--graphs %s: none of the models is an OC-CLIP, so it was not used", args.graphs)
    if is_main():
        report(args, evaluations, benchmarks, written)
    for journal in journals:
        journal.remove()
    return list(results.values())


def headline(result: Result, benchmarks: Sequence[LocalBenchmark]) -> list[Score]:
    """The accuracy that stands for each benchmark, with its interval; a star marks an incomplete benchmark."""
    found = [(local, result["benchmarks"][local.title]) for local in benchmarks if local.title in result["benchmarks"]]
    entries = {local.title + " *" * (not each["complete"]): main_entry(local.benchmark, each) for local, each in found}
    return [Score(title, entry["accuracy"], "%", *entry["interval_95"]) for title, entry in entries.items()]


def report(
    args: argparse.Namespace,
    evaluations: Mapping[str, "Evaluation"],
    benchmarks: Sequence[LocalBenchmark],
    written: list[Path],
) -> None:
    """Show the table, or with --short one line per benchmark and model, and the names of all files."""
    results = {label: each.result for label, each in evaluations.items()}
    if args.short:
        outcomes = {label: each.outcomes for label, each in evaluations.items()}
        by_title = {local.title: local.benchmark for local in benchmarks}
        lines = short_lines(results, outcomes, by_title, args.seed)
        written += write_short(lines, args.short, written[0].with_name(f"{written[0].stem}_short"))
        marked = any(line.title.endswith("*") for line in lines)
        say(markdown_table(table_rows(lines)) + "\n* incomplete: the result files list what is missing\n" * marked)
    else:
        say(table(results))
    say("\n" + "\n".join(map(str, written)))


def write_captions(benchmarks: Sequence[LocalBenchmark], path: Path) -> list[Result]:
    """Write all captions, one per line, for `dino-sparo parse`; there are no results."""
    # Blanks within a caption stay: its graph is looked up by its text.
    texts = captions_of([question for local in benchmarks for question in local.questions])
    captions = dict.fromkeys(" ".join(text.splitlines()) for text in texts)
    if is_main():
        write_text("".join(f"{caption}\n" for caption in captions), path)
        say(f"{len(captions)} captions: {path}")
    return []


def labels_of(weights: Sequence[str]) -> list[str]:
    """Names of models in the table: the folder of checkpoint.pth, else the name of the file; numbered if equal."""
    names = [path.partition(":")[2] or _label(Path(path)) for path in weights]
    times = Counter(names)
    return [name if times[name] == 1 else f"{number} {name}" for number, name in enumerate(names, start=1)]


def _label(path: Path) -> str:
    return path.parent.name if path.stem == "checkpoint" else path.name if path.is_dir() else path.stem


class Evaluation(NamedTuple):
    """The result of one model, and by title of the benchmark its errors and outcomes."""

    result: Result
    failures: dict[str, Failures]
    outcomes: dict[str, list[Outcome]]


def all_questions(benchmarks: Sequence[LocalBenchmark], seed: int, blind: bool) -> list[Question]:
    """The questions of all benchmarks; with `blind` followed by these questions with the images of other questions."""
    questions = [question for local in benchmarks for question in local.questions]
    for local in benchmarks if blind else ():
        questions += with_shuffled_images(local.questions, seed, local.benchmark.blind_group)
    return questions


def evaluate(
    scorer: Scorer,
    benchmarks: Sequence[LocalBenchmark],
    chunk_images: int,
    seed: int,
    blind: bool,
    num_failures: int,
    limits: ImageLimits = DEFAULT_LIMITS,
    journal: Journal | None = None,
) -> Evaluation:
    """Evaluate one model on all benchmarks.

    With `blind` the evaluation is repeated with the images of other questions. Questions that the journal holds are not
    asked again.
    """
    questions = all_questions(benchmarks, seed, blind)
    remaining = iter(answer_questions(scorer, questions, chunk_images, limits, journal))
    answer_lists = [list(islice(remaining, len(local.questions))) for local in [*benchmarks] * (1 + blind)]
    results, failures, outcomes, left_out = {}, {}, {}, {}
    for number, local in enumerate(benchmarks):
        answers = answer_lists[number]
        if not any(answers):
            left_out[local.title] = f"left out: none of the images in {local.images} can be read"
            logger.error("%s: %s", local.title, left_out[local.title])
            continue
        result, outcomes[local.title] = describe(local, answers)
        if blind:
            add_blind(result, describe(local, answer_lists[len(benchmarks) + number])[0])
        if num_failures:
            failures[local.title] = clearest_failures(local.questions, answers, num_failures)
            result["failures"] = failures[local.title].to_json()
        results[local.title] = result
    if not results:
        raise UserError("; ".join(f"{title}: {sentence}" for title, sentence in left_out.items()))
    whole = {
        "evaluation": "compositional benchmarks",
        "benchmarks": results,
        "left_out": left_out,
        "rule": f"accuracy: the true caption's {scorer.measure} is strictly greater, in fp32, and ties are wrong; "
        "official: ties as in the benchmark's own code",
        "intervals": "95 %: Wilson's for a split and for micro; for other means Wilson's of the splits combined",
        "seed": seed,
    }
    return Evaluation(whole, failures, outcomes)


def describe(local: LocalBenchmark, all_answers: Answers) -> tuple[Result, list[Outcome]]:
    """The result of one benchmark, and the comparisons that count in it."""
    benchmark = local.benchmark
    questions, answers = list(compress(local.questions, all_answers)), list(filter(None, all_answers))
    unreadable = Counter(each.split for each in local.questions) - Counter(each.split for each in questions)
    left_out = {
        "num_without_image": local.with_missing_image + unreadable,
        "num_with_empty_caption": local.with_empty_caption,
    }
    outcomes = benchmark.outcomes(questions, answers)
    is_one_each = len(outcomes) == len(questions)  # else the splits are scores, each of all questions
    result = summarize(benchmark, outcomes)
    for split, entry in result["splits"].items():
        marks = [answers[outcome.question].marks for outcome in outcomes if outcome.split == split]
        entry |= {f"num_{name}": sum(answer_marks[name] for answer_marks in marks) for name in marks[0]}
        entry |= {name: counts[split] if is_one_each else counts.total() for name, counts in left_out.items()}
    if is_one_each:
        official = benchmark.more(questions, [outcome.worth(benchmark.tie_credit) for outcome in outcomes])
        ours = benchmark.more(questions, [float(outcome.right) for outcome in outcomes])
        result["means"] |= {name: {"accuracy": ours[name], "official": official[name]} for name in ours}
    missing = [*local.missing]
    if unreadable:
        missing.append(f"left out {unreadable.total()} questions whose images cannot be read")
    if lost := {split for counts in left_out.values() for split in counts} - {each.split for each in questions}:
        missing.append(f"nothing is left of {', '.join(sorted(lost))}")
    content = {
        "benchmark": benchmark.name,
        **result,
        "num_questions": len(questions),
        **{name: counts.total() for name, counts in left_out.items()},
        "complete": not missing,
        "lacks": missing,
        "official_tie": benchmark.tie_credit,
        "images": str(local.images),
        "files": local.file_records(),
    }
    return content, outcomes


def add_blind(result: Result, shuffled: Result) -> None:
    """Add to a benchmark's result the accuracies with shuffled images."""
    for part in ("splits", "means"):
        for name in result[part].keys() & shuffled[part].keys():
            result[part][name]["blind"] = shuffled[part][name]["accuracy"]


def table(results: Mapping[str, Result]) -> str:
    """The accuracies as a table to print: a row per split or mean, a column per model."""

    def row(label: str, count: object, chance: str, cells: Sequence[str]) -> str:
        aligned = (f"{cell:>{max(8, len(name)) + 2}}" for cell, name in zip(cells, results, strict=True))
        return f"{label:<34}{count:>10}{chance:>8}" + "".join(aligned)

    lines = [row("accuracy, %", "questions", "chance", list(results))]
    result = next(iter(results.values()))
    for title, benchmark in result["benchmarks"].items():
        of_models = [model["benchmarks"][title] for model in results.values()]
        lines.append(title + " *" * (not all(model["complete"] for model in of_models)))
        splits = benchmark["splits"] if len(benchmark["splits"]) <= MAX_SHOWN else {}
        for part, name in [("splits", name) for name in splits] + [("means", name) for name in benchmark["means"]]:
            entry = benchmark[part][name]
            official = "official" if part == "means" and benchmark["official_tie"] else ""
            chance = f"{entry['chance']:.1f}" if "chance" in entry else ""
            for kind, words in (("accuracy", ""), (official, ", official ties"), ("blind", ", shuffled images")):
                if kind in entry:
                    cells = [f"{model[part][name][kind]:.2f}" for model in of_models]
                    lines.append(row(f"  {name}{words}", entry.get("num_questions", ""), chance, cells).rstrip())
    missing = [(title, sentence) for title, each in result["benchmarks"].items() for sentence in each["lacks"]]
    lines += [f"* {title}: {sentence}" for title, sentence in (*missing, *result["left_out"].items())]
    return "\n".join(lines)

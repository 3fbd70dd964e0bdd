"""Models and a folder of benchmarks -> accuracies, models side by side: `dino-sparo compositional`.

    dino-sparo compositional --pretrained_weights clip/checkpoint.pth oc/checkpoint.pth --data_root data

All benchmarks below the folder are evaluated (docs/compositional.md lists their files). The command prints one table
and writes one compositional.json per model: accuracies with intervals, what was left out, and the whole protocol.
"""

import argparse
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from dino_sparo.data.sources.decode import DEFAULT_LIMITS, ImageLimits
from dino_sparo.draw.sheet import require_matplotlib
from dino_sparo.evaluation.task import result_folder, start_evaluation
from dino_sparo.image_text.evaluation.compositional.benchmark import summarize
from dino_sparo.image_text.evaluation.compositional.discover import ImageRules, LocalBenchmark, find_benchmarks
from dino_sparo.image_text.evaluation.compositional.failures import (
    Failures,
    clearest_failures,
    write_failures,
)
from dino_sparo.image_text.evaluation.compositional.questions import (
    Answer,
    answer_questions,
    captions_of,
    with_shuffled_images,
)
from dino_sparo.image_text.evaluation.compositional.sets import BENCHMARKS
from dino_sparo.image_text.evaluation.protocol import OpenModel, file_record, limits_of
from dino_sparo.image_text.scoring.scorer import Scorer
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.launch import is_main
from dino_sparo.runtime.records import write_json

logger = logging.getLogger(__name__)

MAX_SHOWN = 8  # splits in the table; the result file has all
RESULT = "compositional"

Result = dict[str, Any]


def compare(args: argparse.Namespace, open_model: OpenModel) -> list[Result]:
    """Evaluate what the options say, write one result per model, show the table; returns the content of the files."""
    process = start_evaluation(args, several_results=True)
    if not args.data_root:
        raise ValueError("--data_root is empty; give the folder that holds the benchmarks")
    if args.failures:
        require_matplotlib()
    rules = ImageRules.of(args, Path(args.data_root))
    benchmarks = find_benchmarks(args.benchmarks or list(BENCHMARKS), rules)
    if args.write_captions:
        return write_captions(benchmarks, Path(args.write_captions))
    if not args.pretrained_weights:
        raise ValueError("--pretrained_weights is empty: there is nothing to evaluate; give one checkpoint or more")
    for weights in args.pretrained_weights:
        if not Path(weights).is_file():
            raise ValueError(f"--pretrained_weights {weights}: there is no such file")
    if args.output_dir:
        result_folder(args.output_dir, "")
    results, written = {}, []
    for label, weights in zip(labels_of(args.pretrained_weights), args.pretrained_weights, strict=True):
        logger.info("%s: %s", label, weights)
        of_model = argparse.Namespace(**{**vars(args), "pretrained_weights": weights})
        scorer, limits = open_model(of_model, process), limits_of(of_model)
        result, failures = evaluate(scorer, benchmarks, args.chunk_images, args.seed, args.blind, args.failures, limits)
        results[label] = result
        if is_main():
            path = result_path(weights, label, args.output_dir)
            write_json(result, path)
            written.append(path)
            if args.failures:
                stem = path.with_name(f"{path.stem}_failures")
                written += write_failures(scorer, label, failures, stem, limits)
    if args.graphs and not any("graphs" in result for result in results.values()):
        logger.warning("--graphs %s: none of the models is an OC-CLIP, so it was not used", args.graphs)
    if is_main():
        say(table(results))
        say("\n" + "\n".join(map(str, written)))
    return list(results.values())


def write_captions(benchmarks: Sequence[LocalBenchmark], path: Path) -> list[Result]:
    """Write all captions, one per line, for `dino-sparo parse`; there are no results."""
    # Blanks within a caption stay: its graph is looked up by its text.
    texts = captions_of([question for each in benchmarks for question in each.questions])
    captions = dict.fromkeys(" ".join(text.splitlines()) for text in texts)
    if is_main():
        path.write_text("".join(f"{caption}\n" for caption in captions), encoding="utf-8")
        say(f"{len(captions)} captions: {path}")
    return []


def labels_of(weights: Sequence[str]) -> list[str]:
    """Names of models in the table: the folder of checkpoint.pth, else the name of the file; numbered if equal."""
    names = [Path(path).parent.name if Path(path).stem == "checkpoint" else Path(path).stem for path in weights]
    times = Counter(names)
    return [name if times[name] == 1 else f"{number} {name}" for number, name in enumerate(names, start=1)]


def result_path(weights: str, label: str, output: str | None) -> Path:
    """Path of a model's result: in the folder `output`, by default beside the weights."""
    if output is not None:
        return result_folder(output, weights) / f"{RESULT}_{label.replace(' ', '_')}.json"
    stem = Path(weights).stem
    return Path(weights).with_name(f"{RESULT}.json" if stem == "checkpoint" else f"{RESULT}_{stem}.json")


def evaluate(
    scorer: Scorer,
    benchmarks: Sequence[LocalBenchmark],
    chunk_images: int,
    seed: int,
    blind: bool,
    num_failures: int,
    limits: ImageLimits = DEFAULT_LIMITS,
) -> tuple[Result, dict[str, Failures]]:
    """Evaluate one model on all benchmarks; returns the result, and its errors of each benchmark.

    With `blind` the evaluation is repeated with the images of other questions.
    """
    own = [each.questions for each in benchmarks]
    for each in benchmarks if blind else ():
        own.append(with_shuffled_images(each.questions, seed, each.benchmark.blind_group))
    every, _ = answer_questions(scorer, list(chain(*own)), chunk_images, limits)
    remaining = iter(every)
    answers = [list(islice(remaining, len(questions))) for questions in own]
    results, failures, left_out = {}, {}, {}
    for number, each in enumerate(benchmarks):
        if not any(answers[number]):
            left_out[each.title] = f"left out: none of the images in {each.images} can be read"
            logger.error("%s: %s", each.title, left_out[each.title])
            continue
        result = describe(each, answers[number], seed)
        if blind:
            add_blind(result, describe(each, answers[len(benchmarks) + number], seed))
        if num_failures:
            failures[each.title] = clearest_failures(each.questions, answers[number], num_failures)
            result["failures"] = failures[each.title].to_json()
        results[each.title] = result
    if not results:
        raise ValueError("; ".join(f"{title}: {sentence}" for title, sentence in left_out.items()))
    whole = {
        "evaluation": "compositional benchmarks",
        "benchmarks": results,
        "left_out": left_out,
        "rule": f"accuracy: the true caption's {scorer.measure} is strictly greater, in fp32, and ties are wrong; "
        "official: ties as in the benchmark's own code",
        "intervals": "95 %: Wilson's for a split and for micro, bootstrap within splits for other means",
        "seed": seed,
        **scorer.record,
    }
    return whole, failures


def describe(local: LocalBenchmark, every: Sequence[Answer | None], seed: int) -> Result:
    """The result of one benchmark; `every` holds an answer, or None, for each of its questions."""
    benchmark = local.benchmark
    pairs = [(question, answer) for question, answer in zip(local.questions, every, strict=True) if answer]
    questions, answers = [question for question, _ in pairs], [answer for _, answer in pairs]
    unreadable = Counter(each.split for each in local.questions) - Counter(each.split for each in questions)
    left_out = {
        "num_without_image": local.without_image + unreadable,
        "num_with_empty_caption": local.with_empty_caption,
    }
    outcomes = benchmark.outcomes(questions, answers)
    is_one_each = len(outcomes) == len(questions)  # else the splits are scores, each of all questions
    result = summarize(benchmark, outcomes, seed)
    for split, entry in result["splits"].items():
        marks = [answers[outcome.question].marks for outcome in outcomes if outcome.split == split]
        entry |= {f"num_{name}": sum(each[name] for each in marks) for name in marks[0]}
        entry |= {name: counts[split] if is_one_each else counts.total() for name, counts in left_out.items()}
    if is_one_each:
        ours, official = (
            benchmark.more(questions, [outcome.worth(credit) for outcome in outcomes])
            for credit in (0.0, benchmark.tie_credit)
        )
        result["means"] |= {name: {"accuracy": ours[name], "official": official[name]} for name in ours}
    lacks = local.lacks + [f"left out {unreadable.total()} questions whose images cannot be read"] * bool(unreadable)
    lost = {split for counts in left_out.values() for split in counts} - {each.split for each in questions}
    lacks += [f"nothing is left of {', '.join(sorted(lost))}"] * bool(lost)
    return {
        "benchmark": benchmark.name,
        **result,
        "num_questions": len(questions),
        **{name: counts.total() for name, counts in left_out.items()},
        "complete": not lacks,
        "lacks": lacks,
        "official_tie": benchmark.tie_credit,
        "images": str(local.images),
        "files": {name: file_record(local.folder / name) for name in benchmark.own_files(local.folder)},
    }


def add_blind(result: Result, shuffled: Result) -> None:
    """Add to a benchmark's result the accuracies with shuffled images."""
    for part in ("splits", "means"):
        for name in result[part].keys() & shuffled[part].keys():
            result[part][name]["blind"] = shuffled[part][name]["accuracy"]


def table(results: Mapping[str, Result]) -> str:
    """Accuracies for people: a row per split or mean, a column per model."""

    def row(label: str, count: object, chance: str, cells: Sequence[str]) -> str:
        aligned = (f"{cell:>{max(8, len(name)) + 2}}" for cell, name in zip(cells, results, strict=True))
        return f"{label:<34}{count:>10}{chance:>8}" + "".join(aligned)

    lines = [row("accuracy, %", "questions", "chance", list(results))]
    result = next(iter(results.values()))
    for title, benchmark in result["benchmarks"].items():
        every = [each["benchmarks"][title] for each in results.values()]
        lines.append(title + " *" * (not all(each["complete"] for each in every)))
        splits = benchmark["splits"] if len(benchmark["splits"]) <= MAX_SHOWN else {}
        for part, name in [("splits", name) for name in splits] + [("means", name) for name in benchmark["means"]]:
            entry = benchmark[part][name]
            official = "official" if part == "means" and benchmark["official_tie"] else ""
            chance = f"{entry['chance']:.1f}" if "chance" in entry else ""
            for kind, words in (("accuracy", ""), (official, ", official ties"), ("blind", ", shuffled images")):
                if kind in entry:
                    cells = [f"{each[part][name][kind]:.2f}" for each in every]
                    lines.append(row(f"  {name}{words}", entry.get("num_questions", ""), chance, cells).rstrip())
    lacks = [(title, lack) for title, each in result["benchmarks"].items() for lack in each["lacks"]]
    lines += [f"* {title}: {lack}" for title, lack in (*lacks, *result["left_out"].items())]
    return "\n".join(lines)

"""One benchmark in one folder: `dino-sparo sugarcrepe` and `winoground`, the old names of two benchmarks.

    dino-sparo sugarcrepe --pretrained_weights output/checkpoint.pth --data_root data/sugar-crepe/data \
        --images data/coco/val2017
    dino-sparo winoground --pretrained_weights output/checkpoint.pth --data_root data/winoground

The answers and the table are those of `dino-sparo compositional --benchmarks sugarcrepe winoground`; the result files,
sugarcrepe.json and winoground.json, have their own format.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dino_sparo.data.sources.decode import DEFAULT_LIMITS, ImageLimits
from dino_sparo.evaluation.task import start_evaluation
from dino_sparo.image_text.evaluation.compositional.benchmark import summarize
from dino_sparo.image_text.evaluation.compositional.command import Result, describe, labels_of, table
from dino_sparo.image_text.evaluation.compositional.discover import ImageRules, LocalBenchmark, open_benchmark
from dino_sparo.image_text.evaluation.compositional.questions import (
    Answer,
    EncodedQuestions,
    answer_questions,
    encode_questions,
)
from dino_sparo.image_text.evaluation.compositional.sets import BENCHMARKS
from dino_sparo.image_text.evaluation.compositional.sets.sugarcrepe import GROUPS
from dino_sparo.image_text.evaluation.protocol import OpenModel, file_record, limits_of, report
from dino_sparo.image_text.scoring.image_files import require_few_missing
from dino_sparo.image_text.scoring.scorer import Scorer
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.launch import is_main

Answers = Sequence[Answer | None]


def open_folder(args: argparse.Namespace, name: str) -> LocalBenchmark:
    """The benchmark of that name in `--data_root`; its images lie in `--images`, by default in `images` there."""
    benchmark = BENCHMARKS[name]
    if not args.data_root:
        raise ValueError(f"--data_root is empty; give the folder with {benchmark.title}'s {benchmark.files[0]}")
    folder = Path(args.data_root)
    local = open_benchmark(benchmark, folder, ImageRules.of(args, folder, default_images=folder / "images"))
    if not local.questions:
        raise ValueError(f"{local.title}: {local.lacks[-1]}")
    return local


def require_readable(local: LocalBenchmark, num_readable: int, max_missing: float) -> None:
    """Refuse a benchmark if too many of its questions have a missing or unreadable image; raises ValueError."""
    if not num_readable:
        raise ValueError(f"{local.title}: none of the images in {local.images} can be read")
    total = len(local.questions) + local.without_image.total()
    require_few_missing(total - num_readable, total, f"questions' images in {local.images}", share=max_missing)


def encode_folder(
    scorer: Scorer, local: LocalBenchmark, max_missing: float, limits: ImageLimits = DEFAULT_LIMITS
) -> EncodedQuestions:
    """Its questions, encoded once for several uses; raises ValueError if too many images cannot be read."""
    encoded = encode_questions(scorer, local.questions, limits)
    require_readable(local, 0 if encoded is None else len(encoded.questions), max_missing)
    assert encoded is not None
    return encoded


def evaluate_single(args: argparse.Namespace, open_model: OpenModel, name: str) -> Result:
    """Evaluate a model on `sugarcrepe` or `winoground`, write the result, show the table."""
    process = start_evaluation(args)
    local = open_folder(args, name)
    if is_main():
        say(f"This is `dino-sparo compositional --benchmarks {name} --data_root {local.folder}` under its old name.")
    scorer = open_model(args, process)
    answers, truncated = answer_questions(scorer, local.questions, limits=limits_of(args))
    require_readable(local, len(answers) - answers.count(None), args.max_missing)
    entry = describe(local, answers, seed=0)
    result = {**FORMATS[name](entry, local, answers, len(truncated), scorer.measure), **scorer.record}
    (label,) = labels_of([args.pretrained_weights])
    return report(result, table({label: {"benchmarks": {local.title: entry}, "left_out": {}}}), args, f"{name}.json")


def _sugarcrepe(
    entry: Result, local: LocalBenchmark, answers: Sequence[Answer | None], num_truncated: int, measure: str
) -> Result:
    """The content of sugarcrepe.json."""
    means = {name: mean["accuracy"] for name, mean in entry["means"].items()}
    groups = {group: means[group] for group in GROUPS if group in means}
    pairs = zip(local.questions, answers, strict=True)
    num_images = len({image for question, answer in pairs if answer for image in question.images})
    return {
        "evaluation": "SugarCrepe",
        "splits": {
            split: {"accuracy": each["accuracy"], "num_pairs": each["num_questions"], "num_ties": each["num_ties"]}
            for split, each in entry["splits"].items()
        },
        "groups": groups,
        **({"macro_groups": sum(groups.values()) / len(groups)} if groups else {}),
        "macro_splits": means["macro"],
        "micro": means["micro"],
        "rule": f"right if the true caption's {measure} is strictly greater, in fp32; ties count as wrong",
        "pairs": pairs_record(local, entry["num_questions"], num_truncated, num_images=num_images),
    }


def pairs_record(local: LocalBenchmark, num_pairs: int, num_truncated: int, **counts: int) -> dict[str, Any]:
    """SugarCrepe's questions in a result file; `counts` are further numbers."""
    splits = dict.fromkeys(question.split for question in local.questions)
    return {
        "images": str(local.images),
        "files": {split: file_record(local.folder / f"{split}.json") for split in splits},
        "num_pairs": num_pairs,
        **counts,
        "num_without_image": local.without_image.total() + len(local.questions) - num_pairs,
        "num_with_empty_caption": local.with_empty_caption.total(),
        "num_truncated_captions": num_truncated,
    }


def _winoground(
    entry: Result, local: LocalBenchmark, answers: Sequence[Answer | None], num_truncated: int, measure: str
) -> Result:
    """The content of winoground.json."""
    tags = [question.split for question, answer in zip(local.questions, answers, strict=True) if answer]
    outcomes = local.benchmark.outcomes(local.questions, [answer for answer in answers if answer])

    def scores(chosen: set[str]) -> dict[str, float]:
        own = [outcome for outcome in outcomes if tags[outcome.question] in chosen]
        splits = summarize(local.benchmark, own, 0)["splits"]
        return {score: each["accuracy"] for score, each in splits.items()} | {"num_examples": len(own) // len(splits)}

    return {
        "evaluation": "Winoground",
        **scores({*tags}),
        "by_tag": {tag: scores({tag}) for tag in sorted({*tags} - {""})},
        "rule": f"strictly greater {measure}s, in fp32",
        "examples": {
            **file_record(local.folder / local.benchmark.files[0]),
            "images": str(local.images),
            "num_ties": entry["splits"]["group"]["num_ties"],
            "num_left_out": entry["num_without_image"] + entry["num_with_empty_caption"],
            "num_truncated_captions": num_truncated,
        },
    }


FORMATS = {"sugarcrepe": _sugarcrepe, "winoground": _winoground}

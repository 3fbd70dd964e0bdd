"""SugarCrepe or Winoground alone, in the format of their own result files: the old names of two benchmarks.

    dino-sparo sugarcrepe --pretrained_weights output/checkpoint.pth --data_path data/sugar-crepe/data \
        --images data/coco/val2017
    dino-sparo winoground --pretrained_weights output/checkpoint.pth --data_path data/winoground

`dino-sparo compositional --benchmarks sugarcrepe winoground` asks the same questions of several models, with intervals.
Both commands write a result file with the numbers and all that they depend on, sugarcrepe.json or winoground.json.
"""

import argparse
from pathlib import Path
from typing import Any

from jaxtyping import Bool
from torch import Tensor

from dino_sparo.evaluation.task import start_evaluation
from dino_sparo.image_text.evaluation.compositional.discover import ImageRules, LocalBenchmark, open_benchmark
from dino_sparo.image_text.evaluation.compositional.run import (
    AnswerTable,
    EncodedQuestions,
    answer_questions,
    encode_questions,
)
from dino_sparo.image_text.evaluation.compositional.sets import BENCHMARKS
from dino_sparo.image_text.evaluation.compositional.sets.sugarcrepe import averages
from dino_sparo.image_text.evaluation.compositional.sets.winoground import SCORES, scores_of
from dino_sparo.image_text.evaluation.protocol import OpenModel, file_record, report
from dino_sparo.image_text.evaluation.questions import SplitResult, by_split
from dino_sparo.image_text.scoring.image_files import require_few_missing
from dino_sparo.image_text.scoring.scorer import Scorer
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.launch import is_main


def open_folder(args: argparse.Namespace, name: str) -> LocalBenchmark:
    """The benchmark of that name in `--data_path`, its images in `--images`, by default in the folder `images` there.

    Raises:
        ValueError: no folder is named; its annotations cannot be read; too many images are missing.
    """
    benchmark = BENCHMARKS[name]
    if not args.data_path:
        raise ValueError(f"--data_path is empty; give the folder with {benchmark.title}'s {benchmark.files[0]}")
    folder = Path(args.data_path)
    images = Path(args.images or folder / "images")
    local = open_benchmark(benchmark, folder, ImageRules(folder, images, args.max_missing, args.allow_outside))
    if not local.questions:
        raise ValueError(f"{local.title}: {local.lacks[-1]}")
    return local


def _answers_of(
    args: argparse.Namespace, open_model: OpenModel, name: str
) -> tuple[LocalBenchmark, Scorer, AnswerTable]:
    process = start_evaluation(args)
    local = open_folder(args, name)
    if is_main():
        say(f"This is `dino-sparo compositional --benchmarks {name} --data_root {local.folder}` under its old name.")
    scorer = open_model(args, process)
    table = answer_questions(scorer, local.questions)
    require_readable(local, int(table.is_answered.sum()), args.max_missing)
    return local, scorer, table


def require_readable(local: LocalBenchmark, num_readable: int, max_missing: float) -> None:
    """Refuse a benchmark if too many of its questions have a missing or unreadable image; raises ValueError."""
    if not num_readable:
        raise ValueError(f"{local.title}: none of the images in {local.images} can be read")
    total = len(local.questions) + local.without_image.total()
    require_few_missing(total - num_readable, total, f"questions' images in {local.images}", share=max_missing)


def encode_folder(scorer: Scorer, local: LocalBenchmark, max_missing: float) -> EncodedQuestions:
    """Its questions, encoded once for several uses; raises ValueError if too many images cannot be read."""
    encoded = encode_questions(scorer, local.questions)
    require_readable(local, 0 if encoded is None else len(encoded.questions), max_missing)
    assert encoded is not None
    return encoded


def evaluate_sugarcrepe(args: argparse.Namespace, open_model: OpenModel) -> dict[str, Any]:
    """Evaluate what the options say, write sugarcrepe.json, show the table."""
    local, scorer, table = _answers_of(args, open_model, "sugarcrepe")
    numbers, answers = table.answers_to(slice(None))
    questions = [local.questions[number] for number in numbers]
    results = by_split(questions, answers.text, answers.text_tied)
    num_images = len({name for question in questions for name in question.images})
    result = {
        "evaluation": "SugarCrepe",
        "splits": {
            split: {"accuracy": result.accuracy, "num_pairs": result.num_questions, "num_ties": result.num_ties}
            for split, result in results.items()
        },
        **averages(results),
        "rule": f"right if the true caption's {scorer.measure} is strictly greater, in fp32; ties count as wrong",
        **scorer.record,
        "pairs": pairs_record(local, results, len(table.truncated), num_images=num_images),
    }
    return report(result, _sugarcrepe_table(results), args, "sugarcrepe.json")


def pairs_record(
    local: LocalBenchmark, results: dict[str, SplitResult], num_truncated: int, **counts: int
) -> dict[str, Any]:
    """Description of SugarCrepe's questions in a result file; `counts` are further numbers."""
    num_pairs = sum(result.num_questions for result in results.values())
    return {
        "images": str(local.images),
        "files": {split: file_record(local.folder / f"{split}.json") for split in results},
        "num_pairs": num_pairs,
        **counts,
        "num_without_image": local.without_image.total() + len(local.questions) - num_pairs,
        "num_with_empty_caption": local.with_empty_caption.total(),
        "num_truncated_captions": num_truncated,
    }


def _sugarcrepe_table(results: dict[str, SplitResult]) -> str:
    lines = [f"{'split':<14}  {'accuracy %':>10}  {'pairs':>6}  {'ties':>5}"]
    lines += [
        f"{split:<14}  {r.accuracy:>10.2f}  {r.num_questions:>6}  {r.num_ties:>5}" for split, r in results.items()
    ]
    means = averages(results)
    lines += [f"{name:<14}  {value:>10.2f}" for name, value in {**means.pop("groups"), **means}.items()]
    return "\n".join(lines)


def evaluate_winoground(args: argparse.Namespace, open_model: OpenModel) -> dict[str, Any]:
    """Evaluate what the options say, write winoground.json, show the table."""
    local, scorer, table = _answers_of(args, open_model, "winoground")
    numbers, answers = table.answers_to(slice(None))
    right, tags = scores_of(answers), [local.questions[number].split for number in numbers]
    num_left_out = local.with_empty_caption.total() + local.without_image.total() + len(local.questions) - len(numbers)
    result = {
        "evaluation": "Winoground",
        **_means(right),
        "by_tag": {tag: _means(right[[own == tag for own in tags]]) for tag in sorted({*tags} - {""})},
        "rule": f"strictly greater {scorer.measure}s, in fp32",
        **scorer.record,
        "examples": {
            **file_record(local.folder / local.benchmark.files[0]),
            "images": str(local.images),
            "num_ties": int((answers.text_tied | answers.image_tied).sum()),
            "num_left_out": num_left_out,
            "num_truncated_captions": len(table.truncated),
        },
    }
    head = f"{'':<10}" + "".join(f"  {name + ' %':>8}" for name in SCORES) + f"  {'examples':>8}"
    lines = [
        f"{name:<10}" + "".join(f"  {row[score]:>8.2f}" for score in SCORES) + f"  {row['num_examples']:>8}"
        for name, row in {"all": result, **result["by_tag"]}.items()
    ]
    return report(result, "\n".join([head, *lines]), args, "winoground.json")


def _means(right: Bool[Tensor, "examples 3"]) -> dict[str, float]:
    """The three scores in percent, and the number of examples."""
    means = (100 * right.double().mean(dim=0)).tolist()
    return {**dict(zip(SCORES, means, strict=True)), "num_examples": len(right)}

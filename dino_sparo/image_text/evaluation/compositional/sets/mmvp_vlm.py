"""MMVP-VLM: pairs of photographs with similar encodings by CLIP, in nine visual patterns.

    Questions.csv                    Question ID,Type,Statement; two lines are a pair
    MLLM_VLM Images/TYPE/ID.jpg

A caption is "a photo of " and the statement. A pair is right if each caption prefers its image. In the authors' code a
tie counts as the second image, so a tie is right for the second caption of a pair. Source: Tong et al., "Eyes wide
shut? Exploring the visual shortcomings of multimodal LLMs"; scripts/evaluate_vlm.py of their repository.
"""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dino_sparo.image_text.evaluation.compositional.benchmark import Benchmark, Outcome
from dino_sparo.image_text.evaluation.compositional.questions import Answer, Question, questions_of

FILE, IMAGES = "Questions.csv", "MLLM_VLM Images"
HEADER = ["Question ID", "Type", "Statement"]


def rows_of(folder: Path) -> list[list[str]]:
    """Header and rows of the table."""
    with (folder / FILE).open(encoding="utf-8-sig", errors="replace", newline="") as file:
        return [row for row in csv.reader(file) if row]


def read(folder: Path) -> Iterator[Question]:
    """A question per two rows."""
    rows = rows_of(folder)[1:]
    pairs = ((f"row {start + 2}", rows[start : start + 2]) for start in range(0, len(rows), 2))
    return questions_of(folder / FILE, pairs, question, "two rows of number, type and statement")


def question(pair: Any) -> Question:
    """The first row's image and caption, and the second row's."""
    (first, kind, statement), (second, _, other) = pair
    images = (f"{kind}/{first}.jpg", f"{kind}/{second}.jpg")
    return Question(kind, images, (f"a photo of {statement}", f"a photo of {other}"), (0, 1))


def outcomes(questions: Sequence[Question], answers: Sequence[Answer]) -> list[Outcome]:
    """Whether each caption prefers its image; the authors take a tie as the second image."""
    return [
        Outcome(
            *(question.split, number, answer.image, answer.image_tied),
            official=float(scores[0][0] > scores[1][0] and scores[1][1] >= scores[0][1]),
        )
        for number, (question, answer) in enumerate(zip(questions, answers, strict=True))
        for scores in [answer.scores]
    ]


BENCHMARKS = (
    Benchmark(
        "mmvp-vlm",
        "MMVP-VLM",
        (FILE,),
        read,
        (IMAGES, "MMVP_VLM_Images"),
        "https://huggingface.co/datasets/MMVP/MMVP_VLM",
        licence="MIT",
        size="40 MB",
        chance=25.0,
        total=135,
        outcomes=outcomes,
        accepts=lambda folder: rows_of(folder)[:1] == [HEADER],
    ),
)

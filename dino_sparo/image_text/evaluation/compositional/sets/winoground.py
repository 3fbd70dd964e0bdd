"""Winoground: two images and two captions of the same words.

    examples.jsonl   {"image_0", "image_1", "caption_0", "caption_1"} per line, optionally a tag; images in `images`

Source: Thrush et al., "Winoground: probing vision and language models for visio-linguistic compositionality", section
3.2.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dino_sparo.image_text.evaluation.compositional.benchmark import Benchmark, Outcome
from dino_sparo.image_text.evaluation.compositional.questions import Answer, Question, questions_of
from dino_sparo.runtime.files import parse_json

EXAMPLES = "examples.jsonl"
TAG = "collapsed_tag"  # Object, Relation or Both: the words that are exchanged


def read(folder: Path) -> Iterator[Question]:
    """Image 0 with caption 0, image 1 with caption 1; the split is the tag, "" without one."""
    path = folder / EXAMPLES
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    rows = ((f"line {number}", line) for number, line in enumerate(lines, start=1) if line.strip())
    return questions_of(path, rows, _question, "an object with image_0, image_1, caption_0 and caption_1")


def _question(line: str) -> Question:
    row: Any = parse_json(line)
    images, captions = ((row[f"{kind}_0"], row[f"{kind}_1"]) for kind in ("image", "caption"))
    tag = row.get(TAG)
    return Question("" if tag is None else tag, images, captions, (0, 1))


def outcomes(questions: Sequence[Question], answers: Sequence[Answer]) -> list[Outcome]:
    """Text, image and group score of every example.

        text   s(C0, I0) > s(C1, I0)  and  s(C1, I1) > s(C0, I1)     each image prefers its caption
        image  s(C0, I0) > s(C0, I1)  and  s(C1, I1) > s(C1, I0)     each caption prefers its image
        group  both

    Strictly greater: a model that cannot distinguish captions scores nothing. By chance 25, 25 and 16.7 % are right. A
    score is tied if two that it compares are equal.
    """
    return [outcome for number, answer in enumerate(answers) for outcome in three_scores("", number, answer)]


def three_scores(prefix: str, number: int, answer: Answer) -> list[Outcome]:
    """The scores of one example; their splits begin with `prefix`."""
    return [
        Outcome(prefix + score, number, right, tied)
        for score, right, tied in (
            ("text", answer.text, answer.text_tied),
            ("image", answer.image, answer.image_tied),
            ("group", answer.text and answer.image, answer.text_tied or answer.image_tied),
        )
    ]


CHANCE = {"text": 25.0, "image": 25.0, "group": 100 / 6}  # of two images with two captions, in percent
PAIR_RULES: dict[str, Any] = {
    "headline": "group",
    "chance": CHANCE,
    "means": lambda counts: {},  # the splits are scores of the same questions
    "outcomes": outcomes,
}

BENCHMARKS = (
    Benchmark(
        "winoground",
        "Winoground",
        (EXAMPLES,),
        read,
        ("images",),
        "https://huggingface.co/datasets/facebook/winoground, after its licence is accepted; unpack images.zip",
        licence="Meta's own, for research; accepted on Hugging Face",
        size="0.4 GB",
        total=400,
        **PAIR_RULES,
    ),
)

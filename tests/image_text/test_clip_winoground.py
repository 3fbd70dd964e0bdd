"""Winoground: text, image and group score, its files, the command."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("open_clip")

from clip_fakes import colour_encoder, evaluate, paint, small_checkpoint

from dino_sparo.image_text.evaluation.compositional.discover import ImageRules, LocalBenchmark, open_benchmark
from dino_sparo.image_text.evaluation.compositional.questions import Answer, answer_questions, judge
from dino_sparo.image_text.evaluation.compositional.sets import BENCHMARKS
from dino_sparo.image_text.evaluation.compositional.sets.winoground import outcomes, read


def write(folder: Path, rows: list[tuple[str, str, str, str, str]]) -> Path:
    """Rows of image 0, image 1, caption 0, caption 1 and tag."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("image_0", "image_1", "caption_0", "caption_1", "collapsed_tag")
    lines = [json.dumps({"id": number, **dict(zip(names, row, strict=True))}) for number, row in enumerate(rows)]
    (folder / "examples.jsonl").write_text("\n".join(lines) + "\n\n")
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for colour in ("red", "green", "yellow"):
        paint(tmp_path / "images" / f"{colour}.png", colour)
    rows = [
        ("red", "green", "a red thing", "a green thing", "Object"),  # all right
        ("red", "green", "a green thing", "a red thing", "Object"),  # all wrong
        ("red", "yellow", "red", "yellow red", "Relation"),  # see below
        ("red", "green", "green and red", "red and green", "Relation"),  # captions that are tied
    ]
    return write(tmp_path, rows)


def local(folder: Path, max_missing: float = 0.01) -> LocalBenchmark:
    return open_benchmark(BENCHMARKS["winoground"], folder, ImageRules(folder, folder / "images", max_missing))


def run(*options: object) -> dict:
    (result,) = evaluate("compositional", "--benchmarks", "winoground", *options)
    return result["benchmarks"]["Winoground"]


def scores_of(answers: Sequence[Answer | None]) -> list[list[bool]]:
    """Text, image and group score of each example."""
    return [[outcome.right for outcome in outcomes([], [answer])] for answer in answers if answer]


def test_scores_by_hand():
    """Entry [i, c] is the similarity of image i and caption c."""
    scores = torch.tensor(
        [
            [[0.9, 0.1], [0.2, 0.8]],  # everything right
            [[0.9, 0.8], [0.1, 0.2]],  # each image prefers its caption, caption 1 prefers image 0
            [[0.9, 0.1], [0.8, 0.2]],  # image 1 prefers caption 0, each caption prefers its image
            [[0.1, 0.9], [0.8, 0.2]],  # everything wrong
            [[0.5, 0.5], [0.1, 0.8]],  # image 0 cannot tell its captions: a tie is no win
            [[0.5, 0.1], [0.5, 0.8]],  # caption 0 cannot tell its images
            [[0.5, 0.1], [0.1, 0.5]],  # equal numbers that are not compared are no tie
        ]
    )
    answers = judge(scores, torch.tensor([[0, 1]] * 7))
    assert scores_of(answers) == [
        [True, True, True], [True, False, False], [False, True, False], [False, False, False],
        [False, True, False], [True, False, False], [True, True, True],
    ]  # fmt: skip
    assert [sum(a.text_tied for a in answers), sum(a.image_tied for a in answers)] == [1, 1]


def test_a_model_with_random_scores_is_at_the_papers_chance():
    scores = torch.rand(60_000, 2, 2, generator=torch.Generator().manual_seed(0))
    answers = judge(scores, torch.tensor([0, 1]).expand(60_000, 2))
    assert np.mean(scores_of(answers), axis=0).tolist() == pytest.approx([1 / 4, 1 / 4, 1 / 6], abs=0.006)
    assert sum(answer.text_tied or answer.image_tied for answer in answers) < 60


def test_examples_are_scored(data):
    """In the third, cosines are 1 and 2/sqrt 5 for red, 1/sqrt 2 and 3/sqrt 10 for yellow: all as it should be."""
    questions = local(data).questions
    answers, _ = answer_questions(colour_encoder(), questions)
    assert scores_of(answers) == [[True] * 3, [False] * 3, [True] * 3, [False] * 3]
    assert [each.text_tied or each.image_tied for each in answers if each] == [False, False, False, True]
    assert [question.split for question in questions] == ["Object", "Object", "Relation", "Relation"]


def test_examples_without_image_or_caption_are_left_out_and_many_missing_images_are_an_error(tmp_path):
    for colour in ("red", "green", "blue"):
        paint(tmp_path / "images" / f"{colour}.png", colour)
    paint(tmp_path / "images" / "bad.png", "broken")
    rows = [("red", "green", "red", "green", ""), ("red", "blue", "red", " ", ""), ("red", "bad", "red", "blue", "")]
    write(tmp_path, [*rows, ("red", "gone", "red", "blue", "")])
    with pytest.raises(ValueError, match=r"1 of 5 files, such as 'gone', are missing"):
        local(tmp_path)
    found = local(tmp_path, 0.4)
    assert (found.with_empty_caption.total(), found.with_missing_image.total()) == (1, 1)
    answers, _ = answer_questions(colour_encoder(), found.questions)
    assert answers[1] is None
    assert scores_of(answers[:1]) == [[True] * 3]
    weights = small_checkpoint(tmp_path / "run" / "checkpoint.pth", "cls")
    result = run("--pretrained_weights", weights, "--data_root", tmp_path, "--max_missing", 0.7)
    assert (result["num_questions"], result["num_without_image"], result["num_with_empty_caption"]) == (1, 2, 1)
    assert result["means"] == {}  # the splits are scores of the same questions
    write(tmp_path, rows[1:2])
    with pytest.raises(ValueError, match="none of 1 questions is left"):
        run("--pretrained_weights", weights, "--data_root", tmp_path)


def test_a_file_that_is_missing_or_empty_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"examples\.jsonl"):
        list(read(tmp_path))
    (tmp_path / "examples.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="none of 0 questions is left"):
        run("--data_root", tmp_path)

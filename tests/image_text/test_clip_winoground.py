"""Winoground: what is left out of its files. Its scores equal a loop in test_clip_scorer.py."""

import json
from pathlib import Path

import pytest

pytest.importorskip("open_clip")

from clip_fakes import colour_encoder, evaluate, paint, small_checkpoint

from dino_sparo.image_text.evaluation.compositional.discover import ImageRules, LocalBenchmark, open_benchmark
from dino_sparo.image_text.evaluation.compositional.questions import answer_questions
from dino_sparo.image_text.evaluation.compositional.sets import BENCHMARKS
from dino_sparo.image_text.evaluation.compositional.sets.winoground import outcomes


def write(folder: Path, rows: list[tuple[str, str, str, str, str]]) -> Path:
    """Rows of image 0, image 1, caption 0, caption 1 and tag."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("image_0", "image_1", "caption_0", "caption_1", "collapsed_tag")
    lines = [json.dumps({"id": number, **dict(zip(names, row, strict=True))}) for number, row in enumerate(rows)]
    (folder / "examples.jsonl").write_text("\n".join(lines) + "\n\n")
    return folder


def local(folder: Path, max_missing: float = 0.01) -> LocalBenchmark:
    return open_benchmark(BENCHMARKS["winoground"], folder, ImageRules(folder, folder / "images", max_missing))


def run(*options: object) -> dict:
    (result,) = evaluate("compositional", "--benchmarks", "winoground", *options)
    return result["benchmarks"]["Winoground"]


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
    answers = answer_questions(colour_encoder(), found.questions)
    assert answers[1] is None
    assert [outcome.right for outcome in outcomes([], answers[:1])] == [True] * 3  # text, image and group score
    weights = small_checkpoint(tmp_path / "run" / "checkpoint.pth", "cls")
    result = run("--pretrained_weights", weights, "--data_root", tmp_path, "--max_missing", 0.7)
    assert (result["num_questions"], result["num_without_image"], result["num_with_empty_caption"]) == (1, 2, 1)
    assert result["means"] == {}  # the splits are scores of the same questions
    write(tmp_path, rows[1:2])
    with pytest.raises(ValueError, match="none of 1 questions is left"):
        run("--pretrained_weights", weights, "--data_root", tmp_path)

"""Result files -> one table of models and scores, and what evaluations declare."""

import csv
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from small_models import command

from dino_sparo.evaluation.report import Row, draw
from dino_sparo.weights.results import Score

ON_CPU = ("--device", "cpu", "--num_workers", 0, "--pretrained_weights", "demo")
SCORES = {"first": 61.25, "second": 58.0}


def write(path: Path, model: str, scores: list[Score], **changed: Any) -> None:
    """A result file of `model`; `changed` are further entries."""
    encoder = {"pretrained_weights": f"runs/{model}/checkpoint.pth", "sha256": 8 * model, "checkpoint_key": "teacher"}
    content = {
        "evaluation": "weighted k-NN",
        "headline": [score._asdict() for score in scores],
        "encoder": encoder,
        "options": {"temperature": 0.07, "weights": 8 * model, "arch": model, "data_path": f"/{model}/cifar10"},
        "images": {"data_path": f"/{model}/cifar10", "num_val": 100},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content | changed))


def report(folder: Path, *words: object) -> tuple[list[list[str]], list[dict[str, str]]]:
    """The cells of the Markdown table, and the lines of the CSV file."""
    command("report", folder, "--output_dir", folder / "report", *words)
    lines = (folder / "report" / "report.md").read_text().splitlines()
    with open(folder / "report" / "report.csv", newline="") as file:
        found = list(csv.DictReader(file))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line], found


def test_two_runs_stand_side_by_side_with_their_difference_and_the_csv_has_numbers_in_full(tmp_path: Path) -> None:
    for model, value in SCORES.items():
        write(tmp_path / model / "knn.json", model, [Score("20-NN", value, "%", value - 2, value + 2)])
    write(tmp_path / "first" / "r2.json", "first", [Score("R2", 0.5, "")], evaluation="table")
    head, *rows = report(tmp_path)[0]
    assert head == ["evaluation", "data", "score", "first/checkpoint.pth", "second/checkpoint.pth", "difference"]
    assert rows[0] == [
        *("weighted k-NN", "cifar10", "20-NN, %", "61.25 [59.25, 63.25]", "58.00 [56.00, 60.00]", "-3.25")
    ]
    assert rows[1] == ["table", "cifar10", "R2", "0.5", "", ""]
    assert {line["model"]: float(line["value"]) for line in report(tmp_path, "--overwrite")[1][:2]} == {
        f"{model}/checkpoint.pth": value for model, value in SCORES.items()
    }
    latex = (tmp_path / "report" / "report.tex").read_text()
    assert r"20-NN, \% & 61.25 [59.25, 63.25] & 58.00" in latex
    assert latex.count(r"\\") == 3
    assert (tmp_path / "report" / "report.png").stat().st_size > 10_000
    with refused("exists already; give another --output_dir, or --overwrite"):
        command("report", tmp_path, "--output_dir", tmp_path / "report")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"options": {"temperature": 0.1}}, "temperature 0.1"),
        ({"images": {"data_path": "cifar10", "num_val": 99}}, "num_val 99"),
    ],
)
def test_scores_of_other_options_or_images_are_not_compared(changed: dict, words: str, tmp_path: Path) -> None:
    write(tmp_path / "a.json", "first", [Score("20-NN", 61.25)])
    write(tmp_path / "b.json", "second", [Score("20-NN", 58.0)], **changed)
    _, *rows = report(tmp_path)[0]
    assert [row[-1] for row in rows] == ["", ""]
    assert any(words in row[0] for row in rows)


def test_more_models_than_scores_have_a_row_each_and_names_that_differ(tmp_path: Path) -> None:
    encoder = {"pretrained_weights": "runs/first/checkpoint.pth", "sha256": "f", "checkpoint_key": "student"}
    write(tmp_path / "a.json", "first", [Score("20-NN", 1.0)])
    write(tmp_path / "b.json", "first", [Score("20-NN", 2.0)], encoder=encoder)
    write(tmp_path / "c.json", "second", [Score("20-NN", 3.0)], encoder={"untrained": True, "arch": "vit_micro"})
    head, *rows = report(tmp_path)[0]
    assert head == ["model", "weighted k-NN: cifar10: 20-NN, %"]
    assert rows == [
        ["first/checkpoint.pth firstfir", "1.00"],
        ["first/checkpoint.pth student f", "2.00"],
        ["untrained vit_micro", "3.00"],
    ]


def test_other_files_are_left_out_and_a_folder_without_results_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "torn.json").write_text("{")
    (tmp_path / "list.json").write_text("[1]")
    write(tmp_path / "attention.json", "first", [])
    for folder, message in ((tmp_path, ": no result files; "), (tmp_path / "missing", "missing does not exist")):
        with refused(message):
            command("report", folder)
    write(tmp_path / "knn.json", "first", [Score("20-NN", 61.25)])
    with caplog.at_level(logging.WARNING):
        assert len(report(tmp_path)[1]) == 1
    assert "torn.json is left out" in caplog.text


def test_a_score_without_a_value_is_named_so() -> None:
    assert (Score("pointing", None).number_and_interval, Score("R2", 0.12345, "").number_and_interval) == (
        "none",
        "0.1235",
    )


def test_long_settings_leave_room_for_the_plot(tmp_path: Path) -> None:
    """Matplotlib warned of an axis without width, and warnings are errors here."""
    row = Row("segmentation", "masks /a/long/path/of/a/folder " * 6, "photos", "mIoU", "%")
    draw({row: {"model": (Score("mIoU", 71.5), tmp_path / "a.json")}}, ["model"], tmp_path / "report.png")
    assert (tmp_path / "report.png").is_file()

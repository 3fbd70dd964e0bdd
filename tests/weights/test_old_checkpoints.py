"""Checkpoints of commit 7f0d669, before objectives shared one trainer: they load, evaluate and resume as they did then.

`reference/record_checkpoints.py` trained them with that commit's code, stopped both runs within their second epoch, and
recorded what that code made of them. The tests give today's code the same files and the same command lines.
"""

import json
import logging
import shlex
from pathlib import Path

import pytest
from small_models import CLIP_RUN, DINO_RUN, SMALL_ARCH, SMALL_SIZE, command, record_of, unpack, words_of

from dino_sparo.models.architectures import ARCHITECTURES, ViTSize
from dino_sparo.weights.checkpoint import load_checkpoint

# Another processor and another torch lead to losses that differ by 2e-5; a learning rate of 1 % more, by 2e-4.
TOLERANCE = 5e-5
RUNS = {"dino": DINO_RUN, "clip": CLIP_RUN}


@pytest.fixture(autouse=True)
def small_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, SMALL_ARCH, ViTSize(**SMALL_SIZE))


@pytest.fixture(params=["dino", "clip"])
def name(request: pytest.FixtureRequest) -> str:
    if request.param == "clip":
        pytest.importorskip("open_clip")
    return request.param


def test_an_old_checkpoint_has_the_accuracy_that_it_had(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within one of the images: another CPU may round a tie the other way."""
    path, record = unpack(name, tmp_path), record_of("checkpoints", name)
    monkeypatch.chdir(tmp_path)
    evaluation, *words = shlex.split(record["evaluation"])
    command(evaluation, "--pretrained_weights", path, *words)
    (result_file,) = tmp_path.glob(f"{evaluation.replace('-', '_')}_*.json")
    result = json.loads(result_file.read_text())
    (found,) = result["results"] if name == "dino" else [result]
    assert found["top1"] == pytest.approx(record["top1"], abs=100 / 60)


@pytest.mark.slow
def test_an_old_run_goes_on_as_it_would_have_then(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same command line again, from the middle of the second epoch to the end of the fourth."""
    unpack(name, tmp_path)
    monkeypatch.chdir(tmp_path)
    record = record_of("checkpoints", name)
    words = ["train" if name == "dino" else "train-clip", *words_of(RUNS[name]), "--output_dir", "."]
    assert sorted(words) == sorted(shlex.split(record["run"]))
    with caplog.at_level(logging.INFO):
        command(*words, "--exif", "ignore")  # as every version before the option; otherwise a warning
    assert "1 epochs, 12 steps done" in caplog.text
    warnings = [line.getMessage() for line in caplog.records if line.levelno >= logging.WARNING]
    assert [line for line in warnings if not line.endswith("if only by rounding")] == []  # of Python, torch
    epochs = [json.loads(line) for line in (tmp_path / "log.txt").read_text().splitlines()]
    found = {str(epoch["epoch"]): epoch["train_loss"] for epoch in epochs}
    assert found == pytest.approx(record["losses"], rel=TOLERANCE)
    assert list(found) == ["1", "2", "3"]
    assert load_checkpoint(tmp_path / "checkpoint.pth")["epoch"] == 4

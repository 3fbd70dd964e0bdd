"""training/loop.py: what happens between two steps, and when."""

import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import options

from dino_sparo.__main__ import run as run_command
from dino_sparo.dino.options import get_args_parser
from dino_sparo.dino.train import DINOObjective
from dino_sparo.runtime import preemption
from dino_sparo.runtime.logs import RunLog
from dino_sparo.training import run
from dino_sparo.training.resume import Run
from dino_sparo.training.updater import Updater
from dino_sparo.weights.checkpoint import load_checkpoint


@pytest.mark.parametrize("minutes", [0.0, pytest.param(1e-6, marks=pytest.mark.slow)])
def test_the_log_is_written_while_the_device_computes_the_next_step_but_before_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: float
) -> None:
    """The bug: it was written when the ranks had just agreed and the device had nothing to do."""
    events: list[str] = []
    take_step, write, save = DINOObjective.step, RunLog.scalars, Run.save

    def scalars(log: RunLog, values: Any, step: int) -> None:
        if "train/loss" in values:
            events.append(f"log {step}")
        write(log, values, step)

    def step(training: Any, *args: Any, **kwargs: Any) -> Any:
        events.append(f"step {training.updater.step + 1}")
        return take_step(training, *args, **kwargs)

    monkeypatch.setattr(DINOObjective, "step", step)
    monkeypatch.setattr(RunLog, "scalars", scalars)
    monkeypatch.setattr(Run, "save", lambda *args: (events.append("save"), save(*args)))
    monkeypatch.setattr(preemption, "MAX_STEPS_BETWEEN", 1)
    changes = {"batch_size_per_gpu": 12, "epochs": 1, "warmup_epochs": 0, "saveckp_minutes": minutes}
    run.train(get_args_parser().parse_args(options(tmp_path, **changes)), DINOObjective)
    if minutes:
        assert events == ["step 1", "log 1", "save", "step 2", "log 2", "save", "step 3", "log 3", "save"]
    else:
        assert events == ["step 1", "step 2", "log 1", "step 3", "log 2", "log 3", "save"]


@pytest.mark.parametrize("command", ["train", pytest.param("train-clip", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stops", [False, True])
def test_the_last_step_of_max_steps_is_saved_also_when_a_signal_comes_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, stops: bool
) -> None:
    """The bug: the loop and the run each left the save to the other, and the message said that it was made."""
    update, save, saves = Updater.update, Run.save, []

    def signal_then_update(updater: Updater) -> None:
        if stops and updater.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        update(updater)

    monkeypatch.setattr(Updater, "update", signal_then_update)
    monkeypatch.setattr(Run, "save", lambda *args: (saves.append(args), save(*args)))
    words = options(tmp_path, command, max_steps=2, saveckp_minutes=0)
    if stops:
        with pytest.raises(SystemExit) as stopped:
            run_command(command, words)
        assert stopped.value.code == 128 + signal.SIGTERM
    else:
        run_command(command, words)
    assert load_checkpoint(tmp_path / "checkpoint.pth")["step"] == 2
    assert len(saves) == 1


@pytest.fixture
def _tf32_as_before() -> Generator[None, None, None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.usefixtures("_tf32_as_before")
@pytest.mark.parametrize("allowed", [False, True])
def test_a_run_sets_tf32_itself_whatever_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    """The bug: it stayed as it was found, which is rounded for convolutions."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not allowed
    monkeypatch.setattr(run, "Run", lambda *_: pytest.exit("ready"))
    words = options(tmp_path, precision="tf32" if allowed else "fp32")
    with pytest.raises(pytest.exit.Exception, match="ready"):
        run.train(get_args_parser().parse_args(words), DINOObjective)
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (allowed, allowed)

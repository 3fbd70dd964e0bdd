"""runtime/watchdog.py: a run in which nothing moves ends itself."""

import os
import threading
import time
from pathlib import Path

import pytest
from runs import options

from dino_sparo.dino.options import get_args_parser
from dino_sparo.dino.train import DINOObjective
from dino_sparo.runtime import watchdog as watchdog_file
from dino_sparo.runtime.faults import FAULT_STATUS
from dino_sparo.runtime.logs import progress
from dino_sparo.runtime.watchdog import Watchdog
from dino_sparo.training import run as training_run
from dino_sparo.training.run import train
from dino_sparo.weights.checkpoint import load_checkpoint


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a watchdog ends the process, which lives on."""
    over = threading.Event()

    def leave(status: int) -> None:
        assert status == FAULT_STATUS
        for watchdog in watchdog_file._watching:
            watchdog.over.set()  # what the process' end does, too
        over.set()

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(watchdog_file, "WATCHDOG_MARGIN_S", 0.1)
    monkeypatch.setattr(watchdog_file.logging, "shutdown", lambda: None)
    return over


def test_a_run_in_which_nothing_moves_ends_itself(
    ended: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdog_file, "WATCHDOG_MARGIN_S", 0.2)
    with Watchdog(timeout_min=0.0) as watchdog:
        for _ in range(4):
            time.sleep(0.1)
            watchdog.beat()
        assert not ended.is_set()
        assert ended.wait(10)
    assert "no progress for 0 s" in caplog.text


def test_a_watchdog_waits_longer_while_one_rank_saves_for_all(
    ended: threading.Event,
) -> None:
    with Watchdog(timeout_min=0.0) as watchdog:
        with watchdog.patient():
            time.sleep(0.25)
        assert watchdog.seconds == 0.1
    time.sleep(0.25)  # a watchdog that is dismissed ends nobody
    assert not ended.is_set()


def test_every_item_of_a_progress_is_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal in (False, True):
        monkeypatch.setattr("sys.stderr.isatty", lambda is_terminal=is_terminal: is_terminal)
        with Watchdog(timeout_min=1.0) as outer, Watchdog(timeout_min=1.0) as watchdog:
            for _ in progress(range(3)):
                assert outer.last_beat > 0
                assert watchdog.last_beat > 0
                outer.last_beat = watchdog.last_beat = 0.0


def test_a_watchdog_ends_a_process_whose_log_hangs(ended: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: it waited for the log itself, whose disk did not answer."""
    answers = threading.Event()
    monkeypatch.setattr(watchdog_file, "LAST_WORDS_S", 0.1)
    monkeypatch.setattr(watchdog_file.logger, "error", lambda *_: answers.wait(60))
    with Watchdog(timeout_min=0.0):
        assert ended.wait(30)
    answers.set()


@pytest.mark.slow
def test_an_evaluation_that_hangs_ends_the_run_and_its_training_is_saved(
    ended: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The bug: nobody watched what comes after an epoch's last step."""

    class EndedError(BaseException):
        pass

    def hang(*_: object) -> None:
        assert ended.wait(120)
        raise EndedError

    monkeypatch.setattr(watchdog_file, "WATCHDOG_MARGIN_S", 0.2)
    monkeypatch.setattr(DINOObjective, "after_epoch", hang)
    monkeypatch.setattr(training_run, "MUCH_TO_LOSE_S", 0.0)
    words = options(tmp_path, knn_freq=1, epochs=2, dist_timeout_min=0.02)
    with pytest.raises(EndedError):
        train(get_args_parser().parse_args(words), DINOObjective)
    assert "no progress for" in caplog.text
    checkpoint = load_checkpoint(tmp_path / "checkpoint.pth")
    assert (checkpoint["step"], checkpoint["epoch"]) == (36, 1)
    assert checkpoint["unlogged_epoch"]["loss"] > 0

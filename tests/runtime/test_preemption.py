"""Signals, the clock, and what the ranks agree on."""

import logging
import multiprocessing
import os
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from submitit.core.utils import UncompletedJobError
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dino_sparo.data.loader import TERM_GRACE_SECONDS, init_worker
from dino_sparo.runtime import preemption
from dino_sparo.runtime.exits import errors_in_one_line
from dino_sparo.runtime.faults import FAULT_STATUS, UserError
from dino_sparo.runtime.preemption import Agreement, RunStopped, StopSignals, hand_over

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """As in a terminal: what a script starts in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_is_noted_and_stops_nothing(signum: signal.Signals) -> None:
    before = signal.getsignal(signum)
    with StopSignals() as signals:
        signals.begin_training()
        os.kill(os.getpid(), signum)
        assert signals.received == {signum}
        assert Agreement(signals, 0.0, CPU).decide().stop is signum
    assert signal.getsignal(signum) == before


def test_before_training_only_the_signal_of_a_job_that_runs_again_is_noted() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert signals.received == {signal.SIGUSR2}
        assert signal.getsignal(signal.SIGTERM) == before
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_says_at_once_what_it_does(capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignals() as signals:
        signals.begin_training()
        os.kill(os.getpid(), signal.SIGTERM)
        assert not capfd.readouterr().err
        os.kill(os.getpid(), signal.SIGINT)
        told = capfd.readouterr().err
    assert "saving after the next few steps" in told
    assert "again ends it without saving" in told


def test_the_second_ctrl_c_is_one_line_and_a_status_not_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def train() -> None:
        with errors_in_one_line(logging.getLogger("test")), StopSignals() as signals:
            signals.begin_training()
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(SystemExit) as ended:
        train()
    assert ended.value.code == 130
    assert [record.getMessage() for record in caplog.records] == ["ended by Ctrl-C"]


class Unfit(Dataset):
    """One image, which its view refuses."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        try:
            raise KeyError("inner: cause")
        except KeyError as error:
            raise UserError(f"image {index}: too small;\n  its neighbour: too") from error


def test_an_error_in_a_process_that_loads_images_is_its_message_alone(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SystemExit, match="1"), errors_in_one_line(logging.getLogger("test")):
        next(iter(DataLoader(Unfit(), num_workers=1)))
    assert [record.getMessage() for record in caplog.records] == ["image 0: too small;\n  its neighbour: too"]


def test_an_error_waits_for_no_process_that_loads_images(capfd: pytest.CaptureFixture[str]) -> None:
    """They answer SIGTERM after half a minute, so that a run can save meanwhile."""
    images = TensorDataset(torch.zeros(64, 1))

    def train() -> None:
        with errors_in_one_line(logging.getLogger("test")):
            batches = iter(DataLoader(images, num_workers=1, worker_init_fn=init_worker))
            next(batches)
            raise ValueError("32 of 32 captions have no graph")

    begin = time.monotonic()
    with pytest.raises(SystemExit):
        train()
    # Ranks that other tests share are no daemons, as the processes that load images are.
    assert not [child for child in multiprocessing.active_children() if child.daemon]
    assert time.monotonic() - begin < TERM_GRACE_SECONDS / 2
    assert "Traceback" not in capfd.readouterr().err


def test_the_signal_that_says_the_job_will_run_again_wins() -> None:
    with StopSignals() as signals:
        signals.begin_training()
        for signum in (signal.SIGUSR2, signal.SIGTERM):
            os.kill(os.getpid(), signum)
        assert Agreement(signals, 0.0, CPU).decide().stop is signal.SIGUSR2


def test_counts_are_handed_through() -> None:
    decision = Agreement(StopSignals(), 0.0, CPU).decide({"a": torch.tensor(3.0), "b": 5.0, "c": 0.25})
    assert decision == preemption.Decision(stop=None, save=False, counts={"a": 3.0, "b": 5.0, "c": 0.25})


def test_a_checkpoint_is_due_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def wants_save(now: float) -> bool:
        clock[0] = now
        return agreement.decide().save

    agreement = Agreement(StopSignals(), save_minutes=2.0, device=CPU)
    assert [wants_save(now) for now in (1119.0, 1120.0, 1121.0)] == [False, True, True]
    agreement.saved()
    assert [wants_save(now) for now in (1240.0, 1241.0)] == [False, True]
    clock[0] = 9e9
    assert not Agreement(StopSignals(), save_minutes=0.0, device=CPU).decide().save


@pytest.mark.parametrize(("step_seconds", "expected"), [(0.001, 16), (0.3, 6), (7.0, 1)])
def test_ranks_agree_after_the_first_step_and_then_every_two_seconds_or_sixteen_steps(
    monkeypatch: pytest.MonkeyPatch, step_seconds: float, expected: int
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    agreement, agreed = Agreement(StopSignals(), 0.0, CPU), []
    for step in range(40):
        now += step_seconds
        if agreement.is_due():
            agreement.decide()
            agreed.append(step)
    assert agreed == list(range(0, 40, expected))


def test_a_run_that_nobody_starts_again_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        told = f"{signum.name} after step 7, which is saved"
        with StopSignals() as signals, pytest.raises(RunStopped, match=told) as ended:
            hand_over(signals, signum, 7)
        assert ended.value.status == 128 + signum


@contextmanager
def submitits_handler(*answers: BaseException) -> Iterator[list[int]]:
    """The handler of SIGUSR2 that was there before: it raises these errors in turn, and notes its calls."""
    called, left = list[int](), iter(answers)

    def requeue(number: int, frame: object) -> None:
        called.append(number)
        raise next(left)

    before = signal.signal(signal.SIGUSR2, requeue)
    try:
        yield called
    finally:
        signal.signal(signal.SIGUSR2, before)


BUSY = subprocess.CalledProcessError(1, "scontrol")


@pytest.mark.parametrize("errors", [[], [RuntimeError("can't start new thread")], [BUSY, BUSY]], ids=len)
def test_what_was_there_before_hands_the_run_over_and_is_asked_again_after_an_error(
    errors: list[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The bug: an error of `scontrol` ended the run for good, with a traceback."""
    monkeypatch.setattr(preemption, "REQUEUE_PAUSE_S", 0)
    with (
        submitits_handler(*errors, SystemExit(255)) as called,
        StopSignals() as signals,
        pytest.raises(SystemExit, match="255"),
    ):
        hand_over(signals, signal.SIGUSR2, 7)
    assert called == [signal.SIGUSR2] * (len(errors) + 1)
    assert caplog.text.count("could not be requeued") == len(errors)


def fake_scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch, preempt_time: str, status: int = 0) -> Path:
    """A command that answers as Slurm's and writes down how it was called."""
    calls = folder / "calls"
    program = folder / "scontrol"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {calls}\n'
        f'case "$*" in *show*) echo "JobId=12 PreemptEligibleTime=x PreemptTime={preempt_time}";; '
        f'*) echo "slurm says no" >&2; exit {status};; esac\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setattr(preemption, "REQUEUE_SECONDS", 0)
    monkeypatch.setattr(preemption, "REQUEUE_PAUSE_S", 0)
    return calls


@pytest.mark.parametrize(
    ("signum", "preempt_time", "requeued"),
    [(signal.SIGUSR2, "None", True), (signal.SIGTERM, "2026-01-02T03:04:05", True), (signal.SIGTERM, "None", False)],
)
def test_under_slurm_a_job_is_requeued_unless_it_was_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals, preempt_time: str, requeued: bool
) -> None:
    calls = fake_scontrol(tmp_path, monkeypatch, preempt_time)
    with StopSignals() as signals, pytest.raises((SystemExit, RunStopped)) as ended:
        hand_over(signals, signum, 7)
    assert ("requeue 12" in calls.read_text().splitlines() if calls.exists() else False) == requeued
    assert isinstance(ended.value, SystemExit) == requeued
    if requeued:
        assert ended.value.code == FAULT_STATUS


def test_a_job_that_cannot_be_requeued_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = fake_scontrol(tmp_path, monkeypatch, "None", status=1)
    with StopSignals() as signals, pytest.raises(SystemExit) as ended:
        hand_over(signals, signal.SIGUSR2, 7)
    assert ended.value.code == FAULT_STATUS
    assert "this job could not be requeued (slurm says no), try 4 of 4" in caplog.text
    assert calls.read_text().count("requeue 12") == 4


def test_a_job_that_submitit_requeues_no_more_ends_for_good_with_its_steps_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The bug: a traceback, and the batch script took it for a fault and requeued the job all the same."""
    note = tmp_path / "do_not_requeue"
    with (
        submitits_handler(UncompletedJobError("Job not requeued because: timed-out too many times.")),
        pytest.raises(SystemExit) as ended,
        errors_in_one_line(logging.getLogger("run"), note_final=note.touch),
        StopSignals() as signals,
    ):
        hand_over(signals, signal.SIGUSR2, 7)
    assert ended.value.code == 128 + signal.SIGUSR2
    assert note.exists()
    assert "Job not requeued because: timed-out too many times." in caplog.text

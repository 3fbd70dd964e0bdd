"""Signals and clocks -> a decision that all ranks share: go on, save, or save and stop.

A cluster may take its machines back at any moment. A signal only sets a flag here. Every few steps the ranks exchange
their flags, with one small all-reduce, so that all of them stop after the same step. The trainer then saves, and
submitit, Slurm, torchrun or a person starts the run again.
"""

import contextlib
import logging
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from dino_sparo.runtime.agree import barrier
from dino_sparo.runtime.collectives import all_reduce_sum
from dino_sparo.runtime.faults import FAULT_STATUS
from dino_sparo.runtime.launch import is_main, world_size

logger = logging.getLogger(__name__)

# Signals that ask a run to stop. If several came, the last of these decides: after SIGUSR2 the job runs again.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
# The ranks agree about this often, and after at most so many steps.
AGREE_SECONDS, MAX_STEPS_BETWEEN = 2.0, 16
# The other ranks wait this long for Slurm to end them, after rank 0 has requeued the job.
REQUEUE_SECONDS = 60
REQUEUE_TRIES, REQUEUE_PAUSE_S = 4, 5.0  # Slurm's controller is busy when many jobs end at once

# Written to standard error at once.
CTRL_C_ANSWER = b"\nCtrl-C: saving after the next few steps, then the run ends; Ctrl-C again ends it without saving\n"

Handler = Callable[[int, FrameType | None], Any] | int | None


class RunStopped(Exception):
    """The run was asked to stop, and has saved.

    Attributes:
        status: exit status of the process: 128 + the signal's number, as a shell would report it.
        is_interrupt: the signal was Ctrl-C's.
    """

    def __init__(self, signum: signal.Signals, step: int) -> None:
        super().__init__(f"stopped by {signum.name} after step {step}, which is saved; run the same command to resume")
        self.status, self.is_interrupt = 128 + signum, signum is signal.SIGINT


class StopSignals:
    """While this context is open, signals are noted instead of ending the process.

    SIGUSR2 is noted from the beginning, since the job will run again. SIGTERM and Ctrl-C are noted after
    `begin_training`; before, there is nothing to save and they end the process at once. A second Ctrl-C always ends it.
    Python allows handlers in the main thread only; elsewhere nothing is noted.
    """

    def __init__(self) -> None:
        self.received: set[signal.Signals] = set()
        self.parent = os.getppid()
        self.previous: dict[signal.Signals, Handler] = {}

    def __enter__(self) -> "StopSignals":
        self._take_over(signal.SIGUSR2)
        return self

    def begin_training(self) -> None:
        """From now on note all of `STOP_SIGNALS`."""
        for signum in STOP_SIGNALS:
            if signum not in self.previous:
                self._take_over(signum)

    def heard(self) -> set[signal.Signals]:
        """The signals so far. If torchrun itself has ended, that counts as SIGTERM."""
        if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self.parent:
            self.received.add(signal.SIGTERM)
        return self.received

    def _take_over(self, signum: signal.Signals) -> None:
        try:
            self.previous[signum] = signal.signal(signum, self._note)
        except ValueError:
            logger.warning("not in the main thread: %s ends this run without saving it", signum.name)

    def __exit__(self, *_: object) -> None:
        for signum, handler in self.previous.items():
            signal.signal(signum, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        signum = signal.Signals(number)
        if signum is signal.SIGINT:
            if signum in self.received:
                raise KeyboardInterrupt
            if is_main():  # not through the logger, which this handler may have interrupted
                with contextlib.suppress(OSError):
                    os.write(2, CTRL_C_ANSWER)
        self.received.add(signum)


@dataclass(frozen=True)
class Decision:
    """Decision of all ranks after a step.

    Attributes:
        stop: the signal that ends the run, or None.
        save: whether it is time for a checkpoint.
        counts: what was given to `Agreement.decide`, summed over the ranks.
    """

    stop: signal.Signals | None
    save: bool
    counts: tuple[float, ...]


class Agreement:
    """The ranks' common decision, every few steps.

    Between two decisions the ranks exchange only what a step of the objective needs: gradients, and perhaps features or
    a centre. The trainer reads the device only for a line of the log (`EpochClock.tick`). The first step always ends
    with a decision; afterwards rank 0's clock says how many steps make up `AGREE_SECONDS`.

    Args:
        signals: what this process has received.
        save_minutes: minutes between two checkpoints; 0 for none by the clock.
        device: where the ranks exchange numbers.
    """

    def __init__(self, signals: StopSignals, save_minutes: float, device: torch.device) -> None:
        self.signals, self.save_seconds, self.device = signals, 60 * save_minutes, device
        self.steps_since, self.interval = 0, 1
        self.last_time = self.last_save = time.monotonic()

    def is_due(self) -> bool:
        """Count a step, and say whether the ranks agree after it; the same answer on all of them."""
        self.steps_since += 1
        return self.steps_since >= self.interval

    def decide(self, counts: Sequence[Tensor | float] = ()) -> Decision:
        """Exchange signals, the clock and counts; every rank calls this after the same step.

        Args:
            counts: numbers to be summed over the ranks; tensors are read here, together.
        """
        now = time.monotonic()
        wants_save = bool(self.save_seconds) and now - self.last_save >= self.save_seconds
        step_seconds = (now - self.last_time) / max(self.steps_since, 1)
        interval = min(max(math.floor(AGREE_SECONDS / max(step_seconds, 1e-6)), 1), MAX_STEPS_BETWEEN)
        received = self.signals.heard()
        own = [
            *(float(signum in received) for signum in STOP_SIGNALS),
            *((float(wants_save), float(interval)) if is_main() else (0.0, 0.0)),
        ]
        values = [torch.as_tensor(value, dtype=torch.float64, device=self.device) for value in (*own, *counts)]
        *heard, save, agreed_interval = (summed := all_reduce_sum(torch.stack(values)).tolist())[: len(own)]
        self.interval, self.steps_since, self.last_time = int(agreed_interval), 0, time.monotonic()
        stop = next((signum for signum, count in zip(STOP_SIGNALS[::-1], heard[::-1], strict=True) if count), None)
        return Decision(stop, save > 0, tuple(summed[len(own) :]))

    def stop_between_steps(self) -> signal.Signals | None:
        """The signal that ends the run, asked where something else than steps took time; the next step asks again."""
        stop = self.decide().stop
        self.interval = 1
        return stop

    def saved(self) -> None:
        """A checkpoint was written: the clock starts anew."""
        self.last_save = time.monotonic()


def hand_over(signals: StopSignals, stop: signal.Signals, step: int) -> NoReturn:
    """End a run that was asked to stop and has saved; under Slurm requeue the job if it was preempted.

    SIGUSR2 under submitit calls submitit's own handler on all ranks, which requeues the job with what is left to do.
    Under Slurm alone rank 0 requeues it. SIGTERM does the same if Slurm sent it because another job needs the machines,
    and only then: `scancel` sends it too.

    Args:
        signals: still open, with the handlers that were there before.
        stop: the signal all ranks agreed on.
        step: the last step that was taken, for messages.

    Raises:
        RunStopped: the run does not start again by itself.
        SystemExit: the job is requeued.
    """
    stopped = RunStopped(stop, step)
    job = os.environ.get("SLURM_JOB_ID")
    if stop is signal.SIGTERM and job is not None and _is_being_preempted(job):
        stop = signal.SIGUSR2
    others = signals.previous.get(signal.SIGUSR2)
    if stop is not signal.SIGUSR2 or (job is None and not callable(others)):
        raise stopped
    barrier()  # wait for all ranks: when one task ends, srun ends the others
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if is_main():
        logger.info("saved at step %d; the job is requeued", step)
        ask = partial(others, signal.SIGUSR2, None) if callable(others) else partial(_scontrol_requeue, str(job))
        _requeue(ask, stopped)
    if world_size() > 1 or not callable(others):
        time.sleep(REQUEUE_SECONDS)
    raise SystemExit(FAULT_STATUS)


def _is_being_preempted(job: str) -> bool:
    try:
        job_record = subprocess.run(["scontrol", "-o", "show", "job", job], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return False
    words = job_record.stdout.split()
    times = [word.removeprefix("PreemptTime=") for word in words if word.startswith("PreemptTime=")]
    return any(value not in ("None", "Unknown") for value in times)


def _scontrol_requeue(job: str) -> None:
    subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True, timeout=10)


def _requeue(ask: Callable[[], object], stopped: RunStopped) -> None:
    """Ask Slurm to requeue this job, again after a pause if it does not answer; all within the time that others wait.

    Raises:
        RunStopped: submitit does not requeue it, since it has been at its time limit too often.
        SystemExit: it never did. The batch script of `run_with_submitit.py` then tries, too.
    """
    for number in range(1, REQUEUE_TRIES + 1):
        try:
            ask()
            return
        except Exception as error:  # also of what submitit does before, such as writing the job's file
            if type(error).__name__ == "UncompletedJobError":
                logger.error("%s", error)
                raise stopped from error
            reason = str(getattr(error, "stderr", None) or error).strip()
        logger.error("this job could not be requeued (%s), try %d of %d", reason, number, REQUEUE_TRIES)
        if number < REQUEUE_TRIES:
            time.sleep(REQUEUE_PAUSE_S)
    logger.error("run the same command to resume, if the job does not start again")
    raise SystemExit(FAULT_STATUS)

"""Signals and clocks -> a common decision of all ranks: continue, save, or save and stop.

A cluster may reclaim its machines at any moment. A signal only sets a flag. Every few steps the ranks exchange their
flags in one small all-reduce, so that all ranks stop after the same step. The trainer then saves the run, and submitit,
Slurm, torchrun or the user starts it again.
"""

import contextlib
import logging
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from dino_sparo.runtime.collectives import all_reduce_sum, barrier
from dino_sparo.runtime.faults import FAULT_STATUS
from dino_sparo.runtime.launch import is_main, world_size

logger = logging.getLogger(__name__)

# Signals that ask a run to stop. If several came, the last in this list counts: after SIGUSR2 the job is requeued.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
# Seconds and largest number of steps between two agreements of the ranks.
AGREE_SECONDS, MAX_STEPS_BETWEEN = 2.0, 16
# After rank 0 has requeued the job, the other ranks wait this long for Slurm to end them.
REQUEUE_SECONDS = 60
REQUEUE_TRIES, REQUEUE_PAUSE_S = 4, 5.0  # Slurm's controller is busy when many jobs end at once

CTRL_C_ANSWER = b"\nCtrl-C: saving after the next few steps, then the run ends; Ctrl-C again ends it without saving\n"

Handler = Callable[[int, FrameType | None], Any] | int | None


class RunStopped(Exception):
    """The run was asked to stop, and has saved a checkpoint.

    Attributes:
        status: exit status of the process: 128 + the signal's number, as a shell would report it.
        is_interrupt: the signal was Ctrl-C's.
    """

    def __init__(self, signum: signal.Signals, step: int) -> None:
        super().__init__(f"stopped by {signum.name} after step {step}, which is saved; run the same command to resume")
        self.status, self.is_interrupt = 128 + signum, signum is signal.SIGINT


class StopSignals:
    """Within this context signals are recorded instead of ending the process.

    SIGUSR2 is recorded from the beginning, since the job is requeued. SIGTERM and Ctrl-C are recorded after
    `begin_training`; before, there is nothing to save and they end the process at once. A second Ctrl-C always ends the
    process. Python allows handlers in the main thread only; in other threads no signal is recorded.
    """

    def __init__(self) -> None:
        self.received: set[signal.Signals] = set()
        self.parent = os.getppid()
        self.previous: dict[signal.Signals, Handler] = {}

    def __enter__(self) -> "StopSignals":
        self._take_over(signal.SIGUSR2)
        return self

    def begin_training(self) -> None:
        """Record all of `STOP_SIGNALS` from now on."""
        for signum in STOP_SIGNALS:
            if signum not in self.previous:
                self._take_over(signum)

    def so_far(self) -> set[signal.Signals]:
        """All signals received until now; the end of torchrun counts as SIGTERM."""
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
        save: whether a checkpoint is due.
        counts: the argument of `Agreement.decide`, summed over the ranks, by name.
    """

    stop: signal.Signals | None
    save: bool
    counts: dict[str, float]


class Agreement:
    """The common decision of all ranks, every few steps.

    Between two decisions the ranks exchange only what a step of the objective needs, such as gradients, features or the
    center. The trainer reads the device only for a line of the log (`EpochClock.tick`). A decision follows the first
    step; afterwards rank 0 computes from its clock how many steps take `AGREE_SECONDS`. With `save_minutes` of 0 no
    checkpoint is due by the clock.
    """

    def __init__(self, signals: StopSignals, save_minutes: float, device: torch.device) -> None:
        self.signals, self.save_seconds, self.device = signals, 60 * save_minutes, device
        self.steps_since, self.interval = 0, 1
        self.last_time = self.last_save = time.monotonic()

    def is_due(self) -> bool:
        """Count a step; whether a decision follows it, equal on all ranks."""
        self.steps_since += 1
        return self.steps_since >= self.interval

    def decide(self, counts: Mapping[str, Tensor | float] | None = None) -> Decision:
        """Exchange signals, the clock and `counts`, which are summed; every rank calls this after the same step."""
        counts = counts or {}
        now = time.monotonic()
        wants_save = bool(self.save_seconds) and now - self.last_save >= self.save_seconds
        step_seconds = (now - self.last_time) / max(self.steps_since, 1)
        interval = min(max(math.floor(AGREE_SECONDS / max(step_seconds, 1e-6)), 1), MAX_STEPS_BETWEEN)
        received = self.signals.so_far()
        votes: dict[Any, Tensor | float] = {signum: float(signum in received) for signum in STOP_SIGNALS}
        votes |= {"save": float(wants_save and is_main()), "interval": float(interval * is_main()), **counts}
        values = [torch.as_tensor(value, dtype=torch.float64, device=self.device) for value in votes.values()]
        summed = dict(zip(votes, all_reduce_sum(torch.stack(values)).tolist(), strict=True))
        self.interval, self.steps_since, self.last_time = int(summed["interval"]), 0, time.monotonic()
        stop = next((signum for signum in reversed(STOP_SIGNALS) if summed[signum]), None)
        return Decision(stop, summed["save"] > 0, {name: summed[name] for name in counts})

    def stop_between_steps(self) -> signal.Signals | None:
        """A decision between steps, for instance before an evaluation; another decision follows the next step."""
        stop = self.decide().stop
        self.interval = 1
        return stop

    def saved(self) -> None:
        """Restart the clock after a checkpoint."""
        self.last_save = time.monotonic()


def hand_over(signals: StopSignals, stop: signal.Signals, step: int) -> NoReturn:
    """End a saved run after the signal `stop`; under Slurm requeue the job if it was preempted.

    After SIGUSR2 rank 0 requeues the job: under submitit by submitit's own handler, under Slurm alone by `scontrol`.
    After SIGTERM it does so only if Slurm is preempting the job, since `scancel` sends SIGTERM too.

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
    """Ask Slurm to requeue this job, several times if it does not answer, while the other ranks wait.

    Raises:
        RunStopped: submitit does not requeue the job, which has reached its time limit too often.
        SystemExit: all tries failed. The batch script of `run_with_submitit.py` then tries too.
    """
    for number in range(1, REQUEUE_TRIES + 1):
        try:
            ask()
            return
        except Exception as error:  # submitit also writes the job's file
            if type(error).__name__ == "UncompletedJobError":
                logger.error("%s", error)
                raise stopped from error
            reason = str(getattr(error, "stderr", None) or error).strip()
        logger.error("this job could not be requeued (%s), try %d of %d", reason, number, REQUEUE_TRIES)
        if number < REQUEUE_TRIES:
            time.sleep(REQUEUE_PAUSE_S)
    logger.error("run the same command to resume, if the job does not start again")
    raise SystemExit(FAULT_STATUS)

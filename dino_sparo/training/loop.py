"""One epoch of any objective: fetch, step, agree, log.

for batches of the epoch:
    report = objective.step(batches)           nothing is read from the device
    every few steps, all ranks together:       one all-reduce
        read the reports, log them
        stop on a loss that is not finite, on too many unreadable files, on a signal; save when it is time

CONTRIBUTING.md lists every call from here to the optimizer.
"""

import contextlib
import gc
import logging
import math
from collections.abc import Iterator
from signal import Signals
from typing import Any

import torch
from torch import Tensor

from dino_sparo.data.dataset import most_corrupt
from dino_sparo.data.loader import to_device
from dino_sparo.runtime.collectives import all_gather_object
from dino_sparo.runtime.faults import MendableError
from dino_sparo.runtime.launch import rank, world_size
from dino_sparo.runtime.logs import EpochClock, RunLog
from dino_sparo.runtime.watchdog import Watchdog
from dino_sparo.training.objective import UNREADABLE, Objective, StepReport, TrainingBatch
from dino_sparo.training.resume import Run

logger = logging.getLogger(__name__)

NUM_FILES_SHOWN = 5  # of the batch that gave a non-finite loss


class NonFiniteLossError(MendableError):
    """The loss or the gradients became infinite or NaN; the optimizer has changed no weights since that step."""


class TooManyCorruptError(MendableError):
    """More images or pairs are unreadable than the run tolerates."""


def train_one_epoch(
    run: Run, end_step: int, log: RunLog, watchdog: Watchdog
) -> tuple[dict[str, float], Signals | None]:
    """Train until the end of the epoch under way or of the run (`end_step`), or until the ranks agree to stop.

    The run is saved when a checkpoint is due, and when it ends within the epoch. The caller saves a whole epoch.

    Returns:
        Means over the epoch's steps and all ranks, with speed and counts; the signal that ended the epoch early.

    Raises:
        NonFiniteLossError: on every rank, if the loss or the gradients of any rank are not finite.
        TooManyCorruptError: on every rank, if more items are unreadable than `--max_corrupt` allows.
    """
    objective, sampler, updater = run.objective, run.objective.sampler, run.objective.updater
    for network in objective.networks.values():
        network.train()
    epoch, num_done = divmod(updater.step, sampler.steps_per_epoch)
    sampler.set_epoch(epoch, num_done)
    last_step = min((epoch + 1) * sampler.steps_per_epoch, end_step)
    batches_on_device = to_device(objective.loader, updater.device)
    clock = EpochClock(sampler.steps_per_epoch, end_step, updater.device)
    unread, stop = UnreadReports(objective), None
    with no_garbage_collection():
        while updater.step < last_step and stop is None:
            watchdog.beat()
            batches = clock.fetch(batches_on_device, updater.accum_steps)
            report = objective.step(batches, epoch, is_last=updater.step == last_step - 1)
            unread.log_numbers(log)  # of the steps before: meanwhile the device computes this one
            run.meters.update(loss=report.loss, **report.scalars)
            unread.add(updater.step, report, batches)
            num_items = world_size() * sum(len(batch.indices) for batch in batches)
            clock.tick(updater.step, epoch, num_items, report.loss)
            is_end = updater.step == last_step
            if run.agreement.is_due() or is_end:
                stop = agree(run, unread, epoch, is_end, log, watchdog)
    counts_by_name = {objective.counters[name]: count for name, count in run.counts.items()}
    means = {**run.meters.means(), **clock.speed(), **counts_by_name}
    if updater.step % sampler.steps_per_epoch == 0:
        run.begin_epoch()
    return means, stop


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Within this context Python's cyclic garbage collector is off: it would pause each rank in another step.

    A step leaves no cycles: 2,000 steps of DINO left none.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def agree(
    run: Run, unread: "UnreadReports", epoch: int, is_end: bool, log: RunLog, watchdog: Watchdog
) -> Signals | None:
    """Exchange the reports since the last agreement with all ranks, and save the run if a checkpoint is due.

    Returns the signal that ends the run, if there is one; `train_one_epoch` lists the errors.
    """
    objective, sampler = run.objective, run.objective.sampler
    decision = run.agreement.decide({"nonfinite": unread.steps[-1][1].nonfinite, **unread.counts})
    if decision.counts["nonfinite"]:
        raise_nonfinite(unread, objective, epoch)
    run.counts = {name: number + int(decision.counts[name]) for name, number in run.counts.items()}
    check_unreadable(run)
    objective.watch_counts(run.counts, (run.step - epoch * sampler.steps_per_epoch) * sampler.global_batch_size)
    unread.read()
    if is_end or decision.save or decision.stop is not None:
        unread.log_numbers(log)  # before the checkpoint that counts these steps
        if run.step % sampler.steps_per_epoch:
            run.save_patiently(watchdog)
    return decision.stop


def check_unreadable(run: Run) -> None:
    """Raise TooManyCorruptError beyond `--max_corrupt`; items skipped when the source was opened count too."""
    objective, max_corrupt, met = run.objective, run.max_corrupt, run.counts[UNREADABLE]
    number, total = met + objective.num_left_out, objective.sampler.num_images + objective.num_left_out
    if met and number > (most := most_corrupt(max_corrupt, total)):
        raise TooManyCorruptError(
            f"{number} of {total} {objective.noun}s are unreadable ({met} in this epoch), more than the {most:.0f} "
            f"that --max_corrupt {max_corrupt} allows; the log names them above. Repair these {objective.noun}s, or "
            f"raise --max_corrupt"
        )


class UnreadReports:
    """Reports of the steps since the last agreement of the ranks; `add` does not wait for the device, `read` does.

    Attributes:
        steps: (steps of the run so far, report, indices of each micro-batch).
        counts: of these steps, by the keys of `Objective.counters`.
        numbers: (steps of the run so far, numbers to log) of the steps that were read and not logged.
    """

    def __init__(self, objective: Objective[Any]) -> None:
        self.objective = objective
        self.steps: list[tuple[int, StepReport, list[Tensor]]] = []
        self.counts = dict.fromkeys(objective.counters, 0)
        self.numbers: list[tuple[int, dict[str, float]]] = []

    def add(self, step: int, report: StepReport, batches: list[TrainingBatch]) -> None:
        """Add a step, and log its unreadable items; only the indices of the batches are kept."""
        for batch in batches:
            for location, reason in batch.corrupt:
                logger.warning("skipped an unreadable %s: %s (%s)", self.objective.noun, location, reason)
            for name, number in self.objective.count(batch).items():
                self.counts[name] += number
        self.steps.append((step, report, [batch.indices for batch in batches]))

    def read(self) -> None:
        """Read the numbers of all steps in one copy, and forget the steps."""
        named = [(step, {"loss": report.loss, **report.scalars}) for step, report, _ in self.steps]
        tensors = [value for _, values in named for value in values.values() if isinstance(value, Tensor)]
        floats = iter(torch.stack(tensors).tolist())
        self.numbers += [
            (step, {name: next(floats) if isinstance(value, Tensor) else value for name, value in values.items()})
            for step, values in named
        ]
        self.steps, self.counts = [], dict.fromkeys(self.counts, 0)

    def log_numbers(self, log: RunLog) -> None:
        """Log the numbers that were read, once."""
        for step, values in self.numbers:
            log.scalars({f"train/{name}": value for name, value in values.items()}, step)
        self.numbers = []


def raise_nonfinite(unread: UnreadReports, objective: Objective[Any], epoch: int) -> None:
    """Raise NonFiniteLossError on all ranks, with the items of the ranks whose loss is not finite."""
    noun, failure = objective.noun, None
    # With fp16 only the rank with the bad loss has the flag: on the other ranks its gradients count as an overflow.
    first = next((each for each in unread.steps if each[1].nonfinite), None)
    if first is not None:
        step, report, indices = first
        numbers = [f"{name.replace('_', ' ')} {float(value):.3g}" for name, value in report.scalars.items()]
        failure = f"at step {step - 1} (epoch {epoch}), {', '.join(numbers)}", ""
        if not math.isfinite(report.loss.item()):
            files = [objective.source.location(index) for index in torch.cat(indices).tolist()]
            logger.error("%ss of the batch whose loss is %s: %s", noun, report.loss.item(), ", ".join(files))
            more = len(files) - NUM_FILES_SHOWN
            shown = ", ".join(files[:NUM_FILES_SHOWN]) + (f" and {more} more, all in the log" if more > 0 else "")
            failure = failure[0], f"rank {rank()}: loss {report.loss.item()}, {noun}s {shown}"
    ranks = list(filter(None, all_gather_object(failure)))
    losses = [text for _, text in ranks if text]
    raise NonFiniteLossError(
        f"the {'loss is' if losses else 'gradients are'} not finite {ranks[0][0]}; "
        f"{'; '.join(losses) or 'the loss was finite on every rank'}. The optimizer changed no weights from this "
        f"step on, and the last checkpoint stays. Try --precision fp32, a lower --lr or --clip_grad, or inspect these "
        f"{noun}s"
    )

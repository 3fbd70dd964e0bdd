"""One epoch of any objective: fetch, step, agree, log.

for batches of the epoch:
    report = objective.step(batches)           nothing is read from the device
    every few steps, all ranks together:       one all-reduce
        read what the reports say, write it to the log
        stop on a loss that is not finite, on too many unreadable files, on a signal; save when it is time
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from signal import Signals
from typing import Any

import torch
from torch import Tensor

from dino_sparo.data.dataset import most_corrupt
from dino_sparo.data.loader import to_device
from dino_sparo.runtime.cli import MendableError
from dino_sparo.runtime.distributed import all_gather_object, rank, world_size
from dino_sparo.runtime.logs import EpochClock, Meters, RunLog
from dino_sparo.runtime.preemption import Agreement
from dino_sparo.runtime.watchdog import Watchdog
from dino_sparo.training.objective import Objective, StepReport, TrainingBatch

logger = logging.getLogger(__name__)

NUM_FILES_SHOWN = 5  # of the batch that gave a non-finite loss


class NonFiniteLossError(MendableError):
    """The loss or the gradients became infinite or NaN; the optimizer has changed no weights since that step."""


class TooManyCorruptError(MendableError):
    """More images or pairs could not be read than the run tolerates."""


@dataclass
class Progress:
    """Counts and means of the epoch under way.

    Attributes:
        counts: a name of `Objective.counters` -> how many so far, over all ranks.
        meters: this rank's means.
    """

    counts: dict[str, int]
    meters: Meters = field(default_factory=Meters)

    def clear(self) -> None:
        """A new epoch begins."""
        self.counts, self.meters = dict.fromkeys(self.counts, 0), Meters()


def train_one_epoch(
    objective: Objective[Any],
    progress: Progress,
    end_step: int,
    log: RunLog,
    agreement: Agreement,
    save: Callable[[], None],
    watchdog: Watchdog,
    max_corrupt: float,
) -> tuple[dict[str, float], Signals | None]:
    """Train until the end of an epoch, from wherever in it the run stands, or until the ranks agree to stop.

    Args:
        objective: takes the steps; its loader gives the epoch's remaining micro-batches.
        progress: changed in place.
        end_step: step at which the run ends, perhaps before the epoch does.
        log: gets the scalars of every step.
        agreement: when the ranks agree on what to do next.
        save: writes a checkpoint; called on all ranks, between two steps, when it is time and when the run ends within
            the epoch. A whole epoch is left to the caller to save.
        watchdog: hears of every step.
        max_corrupt: share of the epoch's items that may be unreadable.

    Returns:
        Means over the epoch's steps and all ranks, with the speed and what was counted; the signal that ended the epoch
        early, or None.

    Raises:
        NonFiniteLossError: on every rank, if the loss or the gradients of any are not finite.
        TooManyCorruptError: on every rank, when more items are unreadable than `max_corrupt` allows.
    """
    objective.training.train()
    updater, sampler = objective.updater, objective.sampler
    epoch = updater.step // sampler.steps_per_epoch
    last_step = min((epoch + 1) * sampler.steps_per_epoch, end_step) - 1
    iterator = to_device(objective.loader, updater.device)
    clock = EpochClock(sampler.steps_per_epoch, end_step, updater.device)
    taken, stop = TakenSteps(objective), None
    while updater.step <= last_step and stop is None:
        watchdog.beat()
        batches = clock.fetch(iterator, updater.accum_steps)
        report = objective.step(batches, epoch, is_last=updater.step == last_step)
        taken.write(log)  # of the steps before: meanwhile the device has this one to compute
        progress.meters.update(loss=report.loss, **report.scalars)
        taken.add(updater.step, report, batches)
        num_seen = world_size() * sum(len(batch.indices) for batch in batches)
        clock.tick(updater.step, epoch, num_seen, report.loss)
        is_end, is_epoch_done = updater.step > last_step, updater.step % sampler.steps_per_epoch == 0
        if not agreement.is_due() and not is_end:
            continue
        decision = agreement.decide(taken.counts())
        num_bad, *numbers = (int(count) for count in decision.counts)
        progress.counts = {
            name: before + number for (name, before), number in zip(progress.counts.items(), numbers, strict=True)
        }
        if num_bad:
            taken.raise_nonfinite(epoch)
        _check_corrupt(objective, progress, max_corrupt)
        steps_done = updater.step - epoch * sampler.steps_per_epoch
        objective.watch_counts(progress.counts, steps_done * sampler.global_batch_size)
        taken.read()
        stop = decision.stop
        if is_end or decision.save or stop is not None:
            taken.write(log)  # before the checkpoint that counts these steps
            if not is_epoch_done:  # a whole epoch is saved by the caller, who has its means
                with watchdog.patient():
                    save()
                agreement.saved()
    counts = {objective.counters[name]: count for name, count in progress.counts.items()}
    means = {**progress.meters.means(), **clock.speed(), **counts}
    if is_epoch_done:
        progress.clear()
    return means, stop


def _check_corrupt(objective: Objective[Any], progress: Progress, max_corrupt: float) -> None:
    met = next(iter(progress.counts.values()))
    number, total = met + objective.num_left_out, objective.sampler.num_images + objective.num_left_out
    if met and number > (most := most_corrupt(max_corrupt, total)):
        raise TooManyCorruptError(
            f"{number} of {total} {objective.noun}s could not be read ({met} were met in this epoch), more than the "
            f"{most:.0f} that --max_corrupt {max_corrupt} allows; they are named above. Repair them, or raise "
            f"--max_corrupt"
        )


class TakenSteps:
    """The steps since the ranks last agreed, with what they reported, unread, so that no step waits for the device.

    Args:
        objective: whose steps they are.
    """

    def __init__(self, objective: Objective[Any]) -> None:
        self.objective = objective
        self.steps: list[tuple[int, StepReport, list[Tensor]]] = []
        self.unwritten: list[tuple[int, str, float]] = []
        self.numbers = [0] * len(objective.counters)

    def add(self, step: int, report: StepReport, batches: list[TrainingBatch]) -> None:
        """Note a step, name the items that had to be replaced; of the batches only the indices are kept.

        Args:
            step: steps taken so far, this one included.
            report: of the step.
            batches: its micro-batches.
        """
        for batch in batches:
            for location, reason in batch.corrupt:
                logger.warning("skipped a corrupt %s: %s (%s)", self.objective.noun, location, reason)
            self.numbers = [a + b for a, b in zip(self.numbers, self.objective.count(batch), strict=True)]
        self.steps.append((step, report, [batch.indices for batch in batches]))

    def counts(self) -> tuple[Tensor | float, ...]:
        """How many steps were skipped, (), and what was counted."""
        skipped = torch.stack([report.skipped for _, report, _ in self.steps]).sum()
        return (skipped, *map(float, self.numbers))

    def read(self) -> None:
        """Read the steps' numbers, all at once, and forget the steps; `write` logs the numbers."""
        named = [
            (step, name, value)
            for step, report, _ in self.steps
            for name, value in {"loss": report.loss, **report.scalars}.items()
        ]
        numbers = iter(torch.stack([value for *_, value in named if isinstance(value, Tensor)]).tolist())
        self.unwritten += [
            (step, name, next(numbers) if isinstance(value, Tensor) else value) for step, name, value in named
        ]
        self.steps.clear()
        self.numbers = [0] * len(self.numbers)

    def write(self, log: RunLog) -> None:
        """Send what was read to the log."""
        for step, name, value in self.unwritten:
            log.scalars({f"train/{name}": value}, step)
        self.unwritten.clear()

    def raise_nonfinite(self, epoch: int) -> None:
        """End all ranks, naming the items of the ranks whose loss is not finite.

        Raises:
            NonFiniteLossError: always.
        """
        noun, own = self.objective.noun, None
        # With fp16's scale a rank knows of its own loss alone: to the others the gradients look like an overflow.
        skipped = next((taken for taken in self.steps if taken[1].skipped), None)
        if skipped is not None:
            step, report, indices = skipped
            numbers = [f"{name.replace('_', ' ')} {float(value):.3g}" for name, value in report.scalars.items()]
            own = f"at step {step - 1} (epoch {epoch}), {', '.join(numbers)}", ""
            if not math.isfinite(report.loss.item()):
                files = [self.objective.source.location(index) for index in torch.cat(indices).tolist()]
                logger.error("%ss of the batch whose loss is %s: %s", noun, report.loss.item(), ", ".join(files))
                more = len(files) - NUM_FILES_SHOWN
                shown = ", ".join(files[:NUM_FILES_SHOWN]) + (f" and {more} more, all in the log" if more > 0 else "")
                own = own[0], f"rank {rank()}: loss {report.loss.item()}, {noun}s {shown}"
        of_ranks = list(filter(None, all_gather_object(own)))
        reports = [words for _, words in of_ranks if words]
        what = "loss is" if reports else "gradients are"
        raise NonFiniteLossError(
            f"the {what} not finite {of_ranks[0][0]}; "
            f"{'; '.join(reports) or 'the loss was finite on every rank'}. The optimizer changed no weights from "
            f"this step on, and the last checkpoint stays. Try --precision fp32, a lower --lr or --clip_grad, or look "
            f"at the {noun}s named"
        )

"""One step and one epoch of contrastive training.

Stage 3 of the folder. Both towers encode a batch of pairs, the loss compares all images with all captions, the
optimizer moves the model. `train.py` builds what goes in here. Nothing in a step is random: the crops and captions of a
batch were drawn by the loader.
"""

import logging
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from signal import Signals
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dino_sparo.clip.loss import feature_gradients
from dino_sparo.clip.model import ClipOutput
from dino_sparo.clip.pairs import PairBatch
from dino_sparo.clip.state import Training
from dino_sparo.distributed import all_gather_object, rank, world_size
from dino_sparo.logs import EpochClock, Meters, RunLog
from dino_sparo.optim import gradient_norms, skip_update_where
from dino_sparo.preemption import Agreement, Watchdog

logger = logging.getLogger(__name__)

MAX_LOGIT_SCALE = math.log(100)  # CLIP, section 2.5: a larger one makes training unstable
MOST_CAPTIONS = 0.5  # share of captions cut off above which the log warns
NUM_PAIRS_SHOWN = 5  # of the batch that gave a non-finite loss


class NonFiniteLossError(RuntimeError):
    """The loss became infinite or not a number; nothing was updated by that step."""


class TooManyDroppedPairsError(RuntimeError):
    """More pairs had no readable image or no caption than the run tolerates."""


class Pairs(NamedTuple):
    """A micro-batch on the device.

    Attributes:
        images: (B, C, H, W), 0 to 255.
        token_ids: (B, N).
    """

    images: UInt8[Tensor, "B C H W"]
    token_ids: Int64[Tensor, "B N"]


class StepReport(NamedTuple):
    """What a step tells; tensors stay on the device, unread.

    Attributes:
        loss: of this rank's pairs against all, nats.
        accuracy: share of this rank's images whose own caption is the most similar among this rank's.
        grad_norm: of all gradients together, before clipping.
        logit_scale: inverse temperature of this step.
        skipped: (), whether loss or gradients were not finite on some rank, so that nothing was updated.
    """

    loss: Tensor
    accuracy: Tensor
    grad_norm: Tensor
    logit_scale: Tensor
    skipped: Tensor


def train_step(training: Training, batches: list[PairBatch]) -> StepReport:
    """Forward, loss, backward, update.

    With several micro-batches the gradients are those of one batch that holds them all: every pair is compared with all
    pairs of the step. Nothing is read from the device. A loss that is not finite on one rank makes the gradients NaN,
    which their mean carries to all ranks; from that step on nothing is updated, until `train_one_epoch` reads the
    report and ends the run.

    Args:
        training: changed in place.
        batches: `accum_steps` micro-batches of this rank.
    """
    for index, group in enumerate(training.optimizer.param_groups):
        group["lr"] = float(training.lr[training.step])
        group["weight_decay"] = 0.0 if index else training.weight_decay
    training.optimizer.zero_grad(set_to_none=True)
    pairs = [
        Pairs(*(tensor.to(training.device, non_blocking=True) for tensor in (batch.images, batch.token_ids)))
        for batch in batches
    ]
    loss, output = _backward_at_once(training, pairs[0]) if len(pairs) == 1 else _backward_in_parts(training, pairs)
    grad_norm = _update(training, loss)
    training.step += 1
    return StepReport(loss, _accuracy(output), grad_norm, output.logit_scale, training.nonfinite.clone())


def _forward(training: Training, model: nn.Module, pairs: Pairs) -> ClipOutput:
    images = (pairs.images.float() / 255 - training.mean) / training.std
    with training.autocast():
        return model(images, pairs.token_ids)


def _backward_at_once(training: Training, pairs: Pairs) -> tuple[Tensor, ClipOutput]:
    """Gradients of a step with one micro-batch; the loss and the features, detached."""
    output = _forward(training, training.model, pairs)
    loss = training.loss(*output)
    _backward(training, loss, loss)
    return loss.detach(), ClipOutput(*(tensor.detach() for tensor in output))


def _backward_in_parts(training: Training, pairs: list[Pairs]) -> tuple[Tensor, ClipOutput]:
    """The same with several: all features first, without gradients, then each part again; see `feature_gradients`."""
    with torch.no_grad():
        outputs = [_forward(training, training.network, part) for part in pairs]
    features = [torch.cat(parts) for parts in list(zip(*outputs, strict=True))[:2]]
    whole = ClipOutput(features[0], features[1], outputs[0].logit_scale)
    gradients = feature_gradients(training.loss, *whole)
    sizes = [len(part.images) for part in pairs]
    parts = zip(pairs, gradients.images.split(sizes), gradients.texts.split(sizes), strict=True)
    for index, (part, image_gradient, text_gradient) in enumerate(parts):
        is_last = index == len(pairs) - 1
        with _gradient_sync(training.model, is_last):
            output = _forward(training, training.model, part)
            # Its gradient is the loss' own: the factors are constants.
            product = (output.image_features * image_gradient).sum() + (output.text_features * text_gradient).sum()
            if is_last:
                product = product + output.logit_scale * gradients.logit_scale
            _backward(training, product, gradients.loss)
    return gradients.loss, whole


def _gradient_sync(model: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    """DDP averages gradients once per step, with the last micro-batch."""
    if isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()
    return nullcontext()


def _backward(training: Training, value: Tensor, loss: Tensor) -> None:
    """Add the gradients of `value`, all NaN if the loss is not finite."""
    scaled = value if training.scaler is None else training.scaler.scale(value)
    (scaled * torch.where(loss.detach().isfinite(), 1.0, math.nan)).backward()


def _update(training: Training, loss: Tensor) -> Tensor:
    """Clip, step unless something is not finite, keep the temperature in its range; the gradients' norm."""
    parameters = list(training.network.parameters())
    if training.scaler is not None:
        training.scaler.unscale_(training.optimizer)
    grad_norm = gradient_norms(parameters).norm()
    # The scaler expects gradients that overflow, skips them and scales less; a loss that does is another matter.
    is_bad = ~(loss if training.scaler is not None else loss + grad_norm).isfinite()
    training.nonfinite.clamp_(min=is_bad.float())
    if training.clip_grad:
        torch.nn.utils.clip_grads_with_norm_(parameters, training.clip_grad, grad_norm)
    if training.scaler is None:
        skip_update_where(training.optimizer, training.nonfinite)
        training.optimizer.step()
    else:
        training.scaler.step(training.optimizer)
        training.scaler.update()
    with torch.no_grad():
        training.network.logit_scale.clamp_(0, MAX_LOGIT_SCALE)
    return grad_norm


def _accuracy(output: ClipOutput) -> Float[Tensor, ""]:
    found = (output.image_features @ output.text_features.T).argmax(dim=1)
    return (found == torch.arange(len(found), device=found.device)).float().mean()


class Epoch(NamedTuple):
    """How an epoch, or the part of it that was left, ended.

    Attributes:
        means: over the epoch's steps and all ranks: loss, accuracy, lr, ...; the speed; and what was counted.
        stop: the signal that ended it early, or None.
    """

    means: dict[str, float]
    stop: Signals | None


def train_one_epoch(
    training: Training,
    batches: Iterable[PairBatch],
    epoch: int,
    steps_per_epoch: int,
    num_pairs: int,
    log: RunLog,
    end_step: int,
    agreement: Agreement,
    save: Callable[[], None],
    watchdog: Watchdog,
) -> Epoch:
    """Train until the end of an epoch, from wherever in it the run stands, or until the ranks agree to stop.

    Args:
        training: changed in place.
        batches: the epoch's remaining micro-batches.
        epoch: counted from 0.
        steps_per_epoch: steps of a whole epoch.
        num_pairs: size of the dataset, which `max_corrupt` is a share of.
        log: gets the scalars of every step.
        end_step: step at which the run ends, perhaps before the epoch does.
        agreement: when the ranks agree on what to do next.
        save: writes a checkpoint; called on all ranks, between two steps, when it is time and before stopping.
        watchdog: hears of every step.

    Raises:
        NonFiniteLossError: on every rank, if the loss or the gradients of any are not finite.
        TooManyDroppedPairsError: on every rank, when more pairs had to be replaced than `max_corrupt` allows.
    """
    training.model.train()
    last_step = min((epoch + 1) * steps_per_epoch, end_step) - 1
    iterator, clock, taken, stop = iter(batches), EpochClock(steps_per_epoch, end_step), TakenSteps(), None
    while training.step <= last_step and stop is None:
        watchdog.beat()
        micro_batches = clock.fetch(iterator, training.accum_steps)
        report = train_step(training, micro_batches)
        scalars = _step_scalars(training, report)
        training.meters.update(**scalars)
        taken.add(training.step, report, scalars, micro_batches)
        num_seen = world_size() * sum(len(batch.indices) for batch in micro_batches)
        clock.tick(training.step, epoch, num_seen, report.loss, training.device)
        is_end = training.step > last_step
        if not agreement.is_due() and not is_end:
            continue
        decision = agreement.decide(taken.counts())
        num_bad, num_corrupt, num_truncated = (int(count) for count in decision.counts)
        training.num_corrupt += num_corrupt
        training.num_truncated += num_truncated
        if num_bad:
            taken.raise_nonfinite(training, epoch)
        _check_corrupt(training, num_pairs)
        _warn_truncated(training, num_seen * (training.step - epoch * steps_per_epoch))
        taken.write(log)
        stop = decision.stop
        if (decision.save or stop is not None) and not is_end:
            save()
            agreement.saved()
    counts = {"corrupt_pairs": training.num_corrupt, "truncated_captions": training.num_truncated}
    means = {**training.meters.means(), **clock.speed(), **counts}
    if training.step % steps_per_epoch == 0:
        training.meters, training.num_corrupt, training.num_truncated = Meters(), 0, 0
    return Epoch(means, stop)


def _step_scalars(training: Training, report: StepReport) -> dict[str, Tensor | float]:
    return {
        "loss": report.loss,
        "batch_accuracy": report.accuracy,
        "grad_norm": report.grad_norm,
        "logit_scale": report.logit_scale,
        "lr": float(training.lr[training.step - 1]),  # the step that was just taken
    }


def _check_corrupt(training: Training, num_pairs: int) -> None:
    number, total = training.num_corrupt + training.num_left_out, num_pairs + training.num_left_out
    if training.num_corrupt and number > training.max_corrupt * total:
        raise TooManyDroppedPairsError(
            f"{number} of {total} samples have no readable image or no caption ({training.num_corrupt} were met in "
            f"this epoch), more than the {training.max_corrupt:.2%} that --max_corrupt allows; they are named above. "
            f"Repair them, or raise --max_corrupt"
        )


def _warn_truncated(training: Training, num_seen: int) -> None:
    """Say once that most captions are cut off: of `num_seen` so far in this epoch."""
    if training.has_warned or training.num_truncated <= MOST_CAPTIONS * num_seen:
        return
    training.has_warned = True
    length = training.network.config.text.context_length
    logger.warning(
        "%d of %d captions (%.0f %%) are longer than --context_length %d and lose their last words; give a longer "
        "context (CLIP's is 77), or shorter captions",
        training.num_truncated, num_seen, 100 * training.num_truncated / num_seen, length,
    )  # fmt: skip


class TakenSteps:
    """The steps since the ranks last agreed. What they told waits here, unread: no step waits for the device."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, StepReport, dict[str, Tensor | float], list[int]]] = []
        self.num_corrupt = self.num_truncated = 0

    def add(self, step: int, report: StepReport, scalars: dict[str, Tensor | float], batches: list[PairBatch]) -> None:
        """Note a step, name the pairs that had to be replaced; of the batches only the indices are kept."""
        for batch in batches:
            for location, reason in batch.corrupt:
                logger.warning("dropped a pair: %s (%s)", location, reason)
            self.num_corrupt += len(batch.corrupt)
            self.num_truncated += batch.num_truncated
        self.steps.append((step, report, scalars, [index for batch in batches for index in batch.indices.tolist()]))

    def counts(self) -> tuple[Tensor, float, float]:
        """How many steps were skipped, (), how many pairs were replaced, and how many captions cut off."""
        skipped = torch.stack([report.skipped for _, report, _, _ in self.steps]).sum()
        return skipped, float(self.num_corrupt), float(self.num_truncated)

    def write(self, log: RunLog) -> None:
        """Read the steps' numbers, all at once, send them to the log, and forget them."""
        named = [(step, name, value) for step, _, scalars, _ in self.steps for name, value in scalars.items()]
        numbers = iter(torch.stack([value for *_, value in named if isinstance(value, Tensor)]).tolist())
        for step, name, value in named:
            log.scalars({f"train/{name}": next(numbers) if isinstance(value, Tensor) else value}, step)
        self.steps.clear()
        self.num_corrupt = self.num_truncated = 0

    def raise_nonfinite(self, training: Training, epoch: int) -> None:
        """End all ranks, naming the pairs of the ranks whose loss is not finite.

        Raises:
            NonFiniteLossError: always.
        """
        step, report, _, indices = next(taken for taken in self.steps if taken[1].skipped)
        own = ""
        if not math.isfinite(report.loss.item()):
            places = [training.locate(index) for index in indices]
            logger.error("images of the batch whose loss is %s: %s", report.loss.item(), ", ".join(places))
            more = len(places) - NUM_PAIRS_SHOWN
            shown = ", ".join(places[:NUM_PAIRS_SHOWN]) + (f" and {more} more, all in the log" if more > 0 else "")
            own = f"rank {rank()}: loss {report.loss.item()}, images {shown}"
        reports = list(filter(None, all_gather_object(own)))
        what = "loss is" if reports else "gradients are"
        raise NonFiniteLossError(
            f"the {what} not finite at step {step - 1} (epoch {epoch}), lr {training.lr[step - 1]:.3g}, logit scale "
            f"{report.logit_scale.item():.3g}; {'; '.join(reports) or 'the loss was finite on every rank'}. Nothing "
            f"was updated from this step on, and the last checkpoint stays. Try --precision fp32, a lower --lr or "
            f"--clip_grad, or look at the images named"
        )

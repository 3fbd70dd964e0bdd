"""One step and one epoch of DINO: the paper's algorithm 1.

Stage 4 of the map. Student and teacher see the crops, the loss compares them, the optimizer moves the student, the
moving average moves the teacher. `main_dino.py` builds what goes in here.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from signal import Signals
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dino_sparo.checkpoint import load_strictly, random_state, restore_random_state
from dino_sparo.data import Batch, to_device
from dino_sparo.distort import Distortions
from dino_sparo.distributed import all_gather_object, rank, world_size
from dino_sparo.head import DINONetwork
from dino_sparo.logs import EpochClock, Meters, RunLog, peak_memory
from dino_sparo.loss import NUM_TEACHER_CROPS, DINOLoss, LossDiagnostics
from dino_sparo.optim import clip_gradients_, drop_gradients, gradient_norms, skip_update_where
from dino_sparo.preemption import Agreement, Watchdog
from dino_sparo.teacher import ema_update_

logger = logging.getLogger(__name__)

DIAGNOSE_EVERY = 10  # steps of an epoch between two looks at the teacher's entropies
NUM_FILES_SHOWN = 5  # of the batch that gave a non-finite loss
# Of one function: every block is a variant (its rate of stochastic depth is a constant), for every size of crop.
MAX_COMPILED_VARIANTS = 256


class NonFiniteLossError(RuntimeError):
    """The loss became infinite or not a number; nothing was updated by that step."""


class TooManyCorruptImagesError(RuntimeError):
    """More images could not be read than the run tolerates."""


@dataclass(frozen=True)
class Schedules:
    """One value per step of the run.

    Attributes:
        lr: learning rate of all parameters.
        weight_decay: of the regularised ones.
        momentum: of the teacher's moving average.
    """

    lr: np.ndarray
    weight_decay: np.ndarray
    momentum: np.ndarray


@dataclass
class Training:
    """Everything a step needs and changes.

    Attributes:
        student: a `DINONetwork`, inside DDP where there are several processes.
        teacher: a `DINONetwork` without gradients.
        loss: with the centre.
        optimizer: over the student's parameter groups.
        schedules: per step.
        device: where to compute.
        dtype: of autocast; float32 switches it off.
        scaler: of fp16's gradients, or None.
        accum_steps: micro-batches per step.
        clip_grad: largest norm of a parameter's gradient; 0 for no limit.
        freeze_last_layer: epochs during which the head's last layer stays as it is.
        max_corrupt: share of an epoch's images that may be unreadable.
        locate: an image's index -> its file, for messages.
        seed: of what is random within a step (stochastic depth).
        step: steps taken so far.
        meters: of the epoch that is under way.
        num_corrupt: unreadable images of this epoch so far, over all ranks.
        distort: distorts 8-bit crops on the device; None where the loader's crops are finished.
        nonfinite: () 1 from the step on whose loss or gradients were not finite on some rank; nothing is updated then.
    """

    student: nn.Module
    teacher: DINONetwork
    loss: DINOLoss
    optimizer: torch.optim.Optimizer
    schedules: Schedules
    device: torch.device
    dtype: torch.dtype = torch.float32
    scaler: torch.amp.GradScaler | None = None
    accum_steps: int = 1
    clip_grad: float = 3.0
    freeze_last_layer: int = 1
    max_corrupt: float = 0.01
    locate: Callable[[int], str] = str
    seed: int = 0
    step: int = 0
    meters: Meters = field(default_factory=Meters)
    num_corrupt: int = 0
    distort: Distortions | None = None
    nonfinite: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.nonfinite = torch.zeros((), device=self.device)

    @property
    def network(self) -> DINONetwork:
        """The student without DDP."""
        return self.student.module if isinstance(self.student, DistributedDataParallel) else self.student  # type: ignore[return-value]

    @torch.no_grad()
    def crops(self, batch: Batch) -> list[Tensor]:
        """The S crops (B, C, H, W) of a batch on the device, distorted and normalised."""
        batch = batch.to(self.device)
        if batch.parameters is None:
            return batch.views
        if self.distort is None:
            raise ValueError("the batch holds crops that have yet to be distorted; give Training a `distort`")
        return self.distort.views(batch.views, batch.parameters)

    def autocast(self) -> AbstractContextManager[None]:
        """The precision of the forward passes."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on, under a checkpoint's names; every rank calls this, rank 0 has use for it.

        `ranks` holds what belongs to one process: its random numbers (which nothing reads between two steps, since a
        step seeds its own) and its part of the epoch's means.
        """
        own = {"rng": random_state(self.device), "meters": self.meters.state_dict()}
        state = {
            "student": self.network.state_dict(),
            "teacher": self.teacher.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "dino_loss": self.loss.state_dict(),
            "step": self.step,
            "num_corrupt": self.num_corrupt,
            "ranks": all_gather_object(own),
        }
        return state if self.scaler is None else {**state, "fp16_scaler": self.scaler.state_dict()}

    def load_state_dict(self, checkpoint: Mapping[str, Any], source: str) -> None:
        """Go on from a checkpoint.

        Args:
            checkpoint: what `state_dict` returned on rank 0.
            source: its file, for messages.

        Raises:
            CheckpointError: weights that do not fit the networks.
        """
        parts = {"student": self.network, "teacher": self.teacher, "dino_loss": self.loss}
        for name, module in parts.items():
            load_strictly(module, checkpoint[name], f"{source} ({name})")
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        if self.scaler is not None and "fp16_scaler" in checkpoint:
            self.scaler.load_state_dict(checkpoint["fp16_scaler"])
        self.step = checkpoint["step"]
        self.num_corrupt = checkpoint.get("num_corrupt", 0)
        ranks = checkpoint.get("ranks", [])
        if len(ranks) == world_size():
            restore_random_state(ranks[rank()]["rng"], self.device)
            self.meters.load_state_dict(ranks[rank()]["meters"])


class StepReport(NamedTuple):
    """What a step tells; tensors stay on the device, unread.

    Attributes:
        loss: mean over this rank's micro-batches, nats.
        skipped: (), whether the loss on this rank or the gradients on any are not finite, so that nothing was updated.
        diagnostics: the teacher's entropies, if they were asked for.
        grad_norm: (), of all gradients together, before clipping.
    """

    loss: Tensor
    skipped: Tensor
    diagnostics: LossDiagnostics | None
    grad_norm: Tensor


def train_step(training: Training, batches: list[Batch], epoch: int, diagnose: bool = False) -> StepReport:
    """One step of algorithm 1: forward, loss, backward, student update, teacher update, centre update.

    With several micro-batches the gradients are those of one batch that holds them all: every part uses the same
    centre, which moves once, at the end. (Batch norm in the head, if asked for, sees each part alone.)

    Nothing is read from the device. A loss that is not finite on one rank makes the gradients NaN, which their mean
    carries to all ranks; from that step on student, optimizer and centre stay as they are, until `train_one_epoch`
    reads the report and ends the run.

    Args:
        training: changed in place.
        batches: `accum_steps` micro-batches of this rank.
        epoch: counted from 0.
        diagnose: also look at the teacher's entropies.
    """
    step = training.step
    _set_hyperparameters(training.optimizer, training.schedules, step)
    _seed_step(training.seed, step)
    training.optimizer.zero_grad(set_to_none=True)
    losses, logits_sum, num_logits = [], torch.zeros_like(training.loss.center), 0
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        crops = training.crops(batch)
        with _gradient_sync(training.student, is_last):
            with training.autocast():
                with torch.no_grad():
                    teacher_logits = training.teacher(crops[:NUM_TEACHER_CROPS])
                logits_sum += teacher_logits.float().sum(dim=0, keepdim=True)
                num_logits += len(teacher_logits)
                if is_last:  # on its way while the student computes
                    finish_center = training.loss.begin_center_update(logits_sum, num_logits)
                student_logits = training.student(crops)
            loss = training.loss(student_logits, teacher_logits, epoch, update_center=False)
            scaled = loss if training.scaler is None else training.scaler.scale(loss)
            (scaled / len(batches) * torch.where(loss.detach().isfinite(), 1.0, math.nan)).backward()
        losses.append(loss.detach())
    diagnostics = None
    if diagnose:
        teacher_probs = training.loss.teacher_probabilities(teacher_logits, epoch)
        diagnostics = training.loss.diagnose(teacher_probs, losses[-1])
    mean_loss = torch.stack(losses).mean()
    grad_norm = _update_student(training, mean_loss, epoch)
    finish_center(training.nonfinite)
    ema_update_(training.teacher, training.network, float(training.schedules.momentum[step]))
    training.step += 1
    return StepReport(mean_loss, training.nonfinite.clone(), diagnostics, grad_norm)


def _set_hyperparameters(optimizer: torch.optim.Optimizer, schedules: Schedules, step: int) -> None:
    for index, group in enumerate(optimizer.param_groups):
        group["lr"] = float(schedules.lr[step])
        if index == 0:  # only the first group is regularised
            group["weight_decay"] = float(schedules.weight_decay[step])


def _seed_step(seed: int, step: int) -> None:
    """Make what is random in a step (stochastic depth) a function of seed, step and rank: resuming needs no more."""
    state = np.random.SeedSequence((seed % 2**64, step, rank())).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0]))


def _gradient_sync(student: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    """DDP averages gradients once per step, with the last micro-batch."""
    if isinstance(student, DistributedDataParallel) and not is_last:
        return student.no_sync()
    return nullcontext()


def _update_student(training: Training, loss: Tensor, epoch: int) -> Tensor:
    """Clip, keep the last layer frozen in the first epochs, step unless something is not finite.

    Returns:
        The norm of all gradients together, (), before clipping.
    """
    parameters = list(training.network.parameters())
    if training.scaler is not None:
        training.scaler.unscale_(training.optimizer)
    norms = gradient_norms(parameters)
    # The scaler expects gradients that overflow, skips them and scales less; a loss that does is another matter.
    is_bad = ~(loss if training.scaler is not None else loss + norms.sum()).isfinite()
    training.nonfinite.clamp_(min=is_bad.float())
    if training.clip_grad:
        clip_gradients_(parameters, training.clip_grad)
    if epoch < training.freeze_last_layer:
        drop_gradients(training.network.head.last_layer)
    if training.scaler is None:
        skip_update_where(training.optimizer, training.nonfinite)
        training.optimizer.step()
    else:
        training.scaler.step(training.optimizer)
        training.scaler.update()
    return norms.norm()


class Epoch(NamedTuple):
    """How an epoch, or the part of it that was left, ended.

    Attributes:
        means: over the epoch's steps and all ranks: loss, lr, wd, momentum, entropies; and the speed.
        stop: the signal that ended it early, or None.
    """

    means: dict[str, float]
    stop: Signals | None


def train_one_epoch(
    training: Training,
    batches: Iterable[Batch],
    epoch: int,
    steps_per_epoch: int,
    num_images: int,
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
        num_images: size of the dataset, which `max_corrupt` is a share of.
        log: gets the scalars of every step.
        end_step: step at which the run ends, perhaps before the epoch does.
        agreement: when the ranks agree on what to do next.
        save: writes a checkpoint; called on all ranks, between two steps, when it is time and before stopping.
        watchdog: hears of every step.

    Raises:
        NonFiniteLossError: on every rank, if the loss or the gradients of any are not finite.
        TooManyCorruptImagesError: on every rank, when more images are unreadable than `max_corrupt` allows.
    """
    training.student.train()
    training.teacher.train()  # as the reference: batch norm in the head, if any, uses the batch's statistics
    last_step = min((epoch + 1) * steps_per_epoch, end_step) - 1
    iterator = to_device(batches, training.device)
    clock, taken, stop = EpochClock(steps_per_epoch, end_step), TakenSteps(), None
    while training.step <= last_step and stop is None:
        watchdog.beat()
        micro_batches = clock.fetch(iterator, training.accum_steps)
        _name_corrupt(micro_batches)
        diagnose = training.step % steps_per_epoch % DIAGNOSE_EVERY == 0 or training.step == last_step
        report = train_step(training, micro_batches, epoch, diagnose)
        scalars = _step_scalars(training, report)
        training.meters.update(**scalars)
        taken.add(training.step, report, scalars, micro_batches)
        num_images_seen = world_size() * sum(len(batch.indices) for batch in micro_batches)
        clock.tick(training.step, epoch, num_images_seen, report.loss, training.device)
        is_end = training.step > last_step
        if not agreement.is_due() and not is_end:
            continue
        decision = agreement.decide(taken.counts())
        num_bad, num_corrupt = decision.counts
        training.num_corrupt += int(num_corrupt)
        if num_bad:
            taken.raise_nonfinite(training, epoch)
        _check_corrupt(training.num_corrupt, num_images, training.max_corrupt)
        taken.write(log)
        stop = decision.stop
        if (decision.save or stop is not None) and not is_end:
            save()
            agreement.saved()
    means = {**training.meters.means(), **clock.speed(), "corrupt_images": training.num_corrupt}
    if training.step % steps_per_epoch == 0:
        training.meters, training.num_corrupt = Meters(), 0
    return Epoch(means, stop)


class TakenSteps:
    """The steps since the ranks last agreed. What they told waits here, unread: no step waits for the device."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, StepReport, dict[str, Tensor | float], list[Batch]]] = []

    def add(self, step: int, report: StepReport, scalars: dict[str, Tensor | float], batches: list[Batch]) -> None:
        """Note a step; of its batches only the indices and names are kept."""
        names = [Batch([], batch.labels, batch.indices, batch.corrupt) for batch in batches]
        self.steps.append((step, report, scalars, names))

    def counts(self) -> tuple[Tensor, float]:
        """How many steps were skipped, (), and how many images were corrupt."""
        skipped = torch.stack([report.skipped for _, report, _, _ in self.steps]).sum()
        return skipped, float(sum(len(batch.corrupt) for *_, batches in self.steps for batch in batches))

    def write(self, log: RunLog) -> None:
        """Read the steps' numbers, all at once, send them to the log, and forget them."""
        named = [(step, name, value) for step, _, scalars, _ in self.steps for name, value in scalars.items()]
        numbers = iter(torch.stack([value for *_, value in named if isinstance(value, Tensor)]).tolist())
        for step, name, value in named:
            log.scalars({f"train/{name}": next(numbers) if isinstance(value, Tensor) else value}, step)
        self.steps.clear()

    def raise_nonfinite(self, training: Training, epoch: int) -> None:
        """End all ranks, naming the images of the ranks whose loss is not finite.

        Raises:
            NonFiniteLossError: always.
        """
        _, report, _, batches = next(taken for taken in self.steps if taken[1].skipped)
        step = next(taken[0] for taken in self.steps if taken[1].skipped) - 1
        files = [training.locate(int(index)) for batch in batches for index in batch.indices]
        own = ""
        if not math.isfinite(report.loss.item()):
            logger.error("images of the batch whose loss is %s: %s", report.loss.item(), ", ".join(files))
            more = len(files) - NUM_FILES_SHOWN
            shown = ", ".join(files[:NUM_FILES_SHOWN]) + (f" and {more} more, all in the log" if more > 0 else "")
            own = f"rank {rank()}: loss {report.loss.item()}, images {shown}"
        reports = list(filter(None, all_gather_object(own)))
        what = "loss is" if reports else "gradients are"
        schedules = training.schedules
        raise NonFiniteLossError(
            f"the {what} not finite at step {step} (epoch {epoch}), lr {schedules.lr[step]:.3g}, weight decay "
            f"{schedules.weight_decay[step]:.3g}; {'; '.join(reports) or 'the loss was finite on every rank'}. Nothing "
            f"was updated from this step on, and the last checkpoint stays. Try --precision fp32, a lower --lr or "
            f"--clip_grad, or look at the images named"
        )


def _step_scalars(training: Training, report: StepReport) -> dict[str, Tensor | float]:
    step = training.step - 1  # the step that was just taken
    scalars: dict[str, Tensor | float] = {
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "lr": float(training.schedules.lr[step]),
        "wd": float(training.schedules.weight_decay[step]),
        "momentum": float(training.schedules.momentum[step]),
    }
    if report.diagnostics is not None:
        scalars.update(report.diagnostics._asdict())
    return scalars


def _name_corrupt(batches: list[Batch]) -> None:
    for batch in batches:
        for location, reason in batch.corrupt:
            logger.warning("skipped a corrupt image: %s (%s)", location, reason)


def _check_corrupt(num_corrupt: int, num_images: int, max_corrupt: float) -> None:
    if num_corrupt > max_corrupt * num_images:
        raise TooManyCorruptImagesError(
            f"{num_corrupt} of {num_images} images could not be read in this epoch, more than the {max_corrupt:.2%} "
            f"that --max_corrupt allows; the files are named above. Repair them, or raise --max_corrupt"
        )


def choose_compile(option: str, device: torch.device) -> bool:
    """Whether `--compile` means to compile on this device: `on`, `off`, or `auto`, which does so on GPUs."""
    return option == "on" or (option == "auto" and device.type == "cuda")


def compile_networks(training: Training, batch: Batch) -> bool:
    """Compile student, teacher and loss for the shapes of a batch, and rehearse a step to see that it works.

    If it does not, all run as they are, after one warning. A later change of shapes is an error, not a silent return to
    uncompiled code.

    Args:
        training: changed in place, but for weights, statistics and gradients.
        batch: as the loader gives them.

    Returns:
        Whether they are compiled now.
    """
    for name in ("recompile_limit", "cache_size_limit"):  # the second is the name of old
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, MAX_COMPILED_VARIANTS)
    if hasattr(torch._dynamo.config, "fail_on_recompile_limit_hit"):
        torch._dynamo.config.fail_on_recompile_limit_hit = True
    networks: list[nn.Module] = [training.network, training.teacher, *([training.distort] if training.distort else [])]
    for network in networks:
        network.compile(dynamic=False)
    training.loss.compile_cross_entropy()
    begin = time.monotonic()
    try:
        rehearse(training, batch)
    except Exception as error:  # compilers fail in ways of their own
        for network in networks:
            network._compiled_call_impl = None
        training.loss.uncompile()
        logger.warning(
            "torch.compile does not work here, so the networks run uncompiled (%s: %s); --compile off says that first",
            type(error).__name__,
            (str(error).strip().splitlines() or [""])[0],
        )
        return False
    logger.info("compiled in %.0f s", time.monotonic() - begin)
    return True


def rehearse(training: Training, batch: Batch) -> int:
    """Take a step without the updates: weights, statistics and gradients are afterwards as they were before.

    Returns:
        Bytes that the forward passes keep for the backward pass, without the parameters.
    """
    buffers = {
        name: value.clone() for network in (training.network, training.teacher) for name, value in _buffers(network)
    }
    kept: dict[int, int] = {}
    owned = {parameter.untyped_storage().data_ptr() for parameter in training.network.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    training.student.train()
    training.teacher.train()
    crops = training.crops(batch)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with training.autocast():
            with torch.no_grad():
                teacher_logits = training.teacher(crops[:NUM_TEACHER_CROPS])
            student_logits = training.student(crops)
        loss = training.loss(student_logits, teacher_logits, epoch=0, update_center=False)
    (0 * loss).backward()
    training.optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for network in (training.network, training.teacher):
            for name, value in _buffers(network):
                value.copy_(buffers[name])
    return sum(kept.values())


def _buffers(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((f"{id(network)}.{name}", value) for name, value in network.named_buffers())


def memory_report(training: Training, batch: Batch) -> dict[str, int]:
    """What a step keeps in memory, bytes, by part; a rehearsal tells.

    Args:
        training: left as it is.
        batch: one micro-batch as the loader gives it.
    """
    weights = sum(parameter.nbytes for parameter in training.network.parameters())
    trained = sum(parameter.nbytes for parameter in training.network.parameters() if parameter.requires_grad)
    activations = rehearse(training, batch)
    states = 2 if isinstance(training.optimizer, torch.optim.AdamW) else 1  # of the size of the weights
    parts = {
        "student": weights,
        "teacher": sum(parameter.nbytes for parameter in training.teacher.parameters()),
        "gradients": trained,
        "optimizer": states * trained,
        "crops": sum(view.nbytes for view in training.crops(batch)),
        "activations": activations,
    }
    return {**parts, "sum": sum(parts.values()), "peak so far": peak_memory(training.device)}


def effective_rank(encodings: Float[Tensor, "B F"]) -> float:
    """How many directions the encodings of a batch use, between 1 and B.

        exp(H(sigma / sum(sigma))),  sigma the singular values of the centred encodings

    Source: Roy and Vetterli, "The effective rank"; Garrido et al., "RankMe", uses it for self-supervised encodings.
    """
    centred = encodings.float() - encodings.float().mean(dim=0)
    singular_values = torch.linalg.svdvals(centred)
    shares = singular_values / singular_values.sum().clamp_min(torch.finfo(torch.float32).tiny)
    return torch.special.entr(shares).sum().exp().item()

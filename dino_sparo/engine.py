"""One step and one epoch of DINO: the paper's algorithm 1.

Stage 4 of the map. Student and teacher see the crops, the loss compares them, the optimizer moves the student, the
moving average moves the teacher. `main_dino.py` builds what goes in here.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dino_sparo.checkpoint import load_strictly
from dino_sparo.data import Batch
from dino_sparo.distributed import all_reduce_sum, rank, world_size
from dino_sparo.head import DINONetwork
from dino_sparo.logs import EpochClock, Meters, RunLog
from dino_sparo.loss import NUM_TEACHER_CROPS, DINOLoss, LossDiagnostics
from dino_sparo.optim import clip_gradients_, drop_gradients
from dino_sparo.teacher import ema_update_

logger = logging.getLogger(__name__)

DIAGNOSE_EVERY = 10  # steps of an epoch between two looks at the teacher's entropies
NUM_FILES_SHOWN = 5  # of the batch that gave a non-finite loss

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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

    @property
    def network(self) -> DINONetwork:
        """The student without DDP."""
        return self.student.module if isinstance(self.student, DistributedDataParallel) else self.student  # type: ignore[return-value]

    def autocast(self) -> AbstractContextManager[None]:
        """The precision of the forward passes."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on, under a checkpoint's names; a step's randomness follows from its number."""
        state = {
            "student": self.network.state_dict(),
            "teacher": self.teacher.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "dino_loss": self.loss.state_dict(),
            "step": self.step,
        }
        return state if self.scaler is None else {**state, "fp16_scaler": self.scaler.state_dict()}

    def load_state_dict(self, checkpoint: Mapping[str, Any], source: str) -> None:
        """Go on from a checkpoint.

        Args:
            checkpoint: what `state_dict` returned.
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


def choose_precision(precision: str, use_fp16: bool | None, device: torch.device) -> torch.dtype:
    """The autocast type that the options mean on this device.

    Args:
        precision: `auto` (bf16 where the device computes in it natively, else fp32), or a key of `PRECISIONS`.
        use_fp16: the reference's word, True for fp16 and False for fp32; None leaves it to `precision`.
        device: where to compute.

    Raises:
        ValueError: an unknown precision, two options that contradict each other, or fp16 on a CPU.
    """
    if precision != "auto" and precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}; choose one of {['auto', *sorted(PRECISIONS)]}")
    if use_fp16 is not None:
        wanted = "fp16" if use_fp16 else "fp32"
        if precision not in ("auto", wanted):
            raise ValueError(f"--use_fp16 {str(use_fp16).lower()} means {wanted}, but --precision says {precision}")
        precision = wanted
    if precision == "auto":
        precision = "bf16" if _has_bf16(device) else "fp32"
    if precision == "fp16" and device.type != "cuda":
        raise ValueError(f"fp16 needs a CUDA device, this run is on {device.type}; use --precision bf16 or fp32")
    return PRECISIONS[precision]


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    checks = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return device.type == "cpu" and any(check() for check in checks if check is not None)


class StepReport(NamedTuple):
    """What a step tells.

    Attributes:
        loss: mean over this rank's micro-batches, nats, on the device.
        diagnostics: the teacher's entropies, if they were asked for.
        num_corrupt: images of the step that could not be read, over all ranks.
    """

    loss: Tensor
    diagnostics: LossDiagnostics | None
    num_corrupt: int


def train_step(training: Training, batches: list[Batch], epoch: int, diagnose: bool = False) -> StepReport:
    """One step of algorithm 1: forward, loss, backward, student update, teacher update, centre update.

    With several micro-batches the gradients are those of one batch that holds them all: every part uses the same
    centre, which moves once, at the end. (Batch norm in the head, if asked for, sees each part alone.)

    Args:
        training: changed in place.
        batches: `accum_steps` micro-batches of this rank.
        epoch: counted from 0.
        diagnose: also look at the teacher's entropies.

    Raises:
        NonFiniteLossError: on every rank, if any rank's loss is not finite; weights, centre and teacher are untouched.
    """
    step = training.step
    _set_hyperparameters(training.optimizer, training.schedules, step)
    _seed_step(training.seed, step)
    training.optimizer.zero_grad(set_to_none=True)
    losses, logits_sum, num_logits = [], torch.zeros_like(training.loss.center), 0
    for index, batch in enumerate(batches):
        crops = [crop.to(training.device, non_blocking=True) for crop in batch.views]
        with _gradient_sync(training.student, is_last=index == len(batches) - 1):
            with training.autocast():
                with torch.no_grad():
                    teacher_logits = training.teacher(crops[:NUM_TEACHER_CROPS])
                student_logits = training.student(crops)
            loss = training.loss(student_logits, teacher_logits, epoch, update_center=False)
            scaled = loss if training.scaler is None else training.scaler.scale(loss)
            (scaled / len(batches)).backward()
        losses.append(loss.detach())
        logits_sum += teacher_logits.float().sum(dim=0, keepdim=True)
        num_logits += len(teacher_logits)
    mean_loss = torch.stack(losses).mean()
    num_corrupt = _agree_to_update(mean_loss, training, batches, epoch)
    diagnostics = None
    if diagnose:
        teacher_probs = training.loss.teacher_probabilities(teacher_logits, epoch)
        diagnostics = training.loss.diagnose(teacher_probs, losses[-1])
    _update_student(training, epoch)
    training.loss.update_center(logits_sum, num_logits)
    ema_update_(training.teacher, training.network, float(training.schedules.momentum[step]))
    training.step += 1
    return StepReport(mean_loss, diagnostics, num_corrupt)


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


def _update_student(training: Training, epoch: int) -> None:
    """Clip, keep the last layer frozen in the first epochs, step."""
    if training.scaler is not None:
        training.scaler.unscale_(training.optimizer)
    if training.clip_grad:
        clip_gradients_(training.network.parameters(), training.clip_grad)
    if epoch < training.freeze_last_layer:
        drop_gradients(training.network.head.last_layer)
    if training.scaler is None:
        training.optimizer.step()
    else:
        training.scaler.step(training.optimizer)
        training.scaler.update()


def _agree_to_update(loss: Tensor, training: Training, batches: list[Batch], epoch: int) -> int:
    """Stop all ranks together if the loss of any is not finite; else the number of corrupt images over all ranks."""
    num_corrupt = sum(len(batch.corrupt) for batch in batches)
    flags = torch.stack([(~torch.isfinite(loss)).float(), torch.full_like(loss, num_corrupt)])
    num_bad, num_corrupt = (int(value) for value in all_reduce_sum(flags).tolist())
    if num_bad == 0:
        return num_corrupt
    files = [training.locate(int(index)) for batch in batches for index in batch.indices]
    report = ""
    if not math.isfinite(loss.item()):
        logger.error("images of the batch whose loss is %s: %s", loss.item(), ", ".join(files))
        more = len(files) - NUM_FILES_SHOWN
        shown = ", ".join(files[:NUM_FILES_SHOWN]) + (f" and {more} more, all in the log" if more > 0 else "")
        report = f"rank {rank()}: loss {loss.item()}, images {shown}"
    reports: list[str] = [report]
    if world_size() > 1:
        reports = [""] * world_size()
        torch.distributed.all_gather_object(reports, report)
    group = training.optimizer.param_groups[0]
    raise NonFiniteLossError(
        f"the loss is not finite at step {training.step} (epoch {epoch}), lr {group['lr']:.3g}, weight decay "
        f"{group['weight_decay']:.3g}; {'; '.join(filter(None, reports))}. Nothing was updated by this step. Try "
        f"--precision fp32, a lower --lr or --clip_grad, or look at the images named"
    )


def train_one_epoch(
    training: Training,
    batches: Iterable[Batch],
    epoch: int,
    steps_per_epoch: int,
    num_images: int,
    log: RunLog,
    end_step: int,
) -> dict[str, float]:
    """Train until the end of an epoch, from wherever in it the run stands.

    Args:
        training: changed in place.
        batches: the epoch's remaining micro-batches.
        epoch: counted from 0.
        steps_per_epoch: steps of a whole epoch.
        num_images: size of the dataset, which `max_corrupt` is a share of.
        log: gets the scalars of every step.
        end_step: step at which the run ends, perhaps before the epoch does.

    Returns:
        Means over the epoch's steps and all ranks: loss, lr, wd, momentum, entropies; and the speed.

    Raises:
        NonFiniteLossError: the loss of any rank is not finite.
        TooManyCorruptImagesError: on every rank, when more images are unreadable than `max_corrupt` allows.
    """
    training.student.train()
    training.teacher.train()  # as the reference: batch norm in the head, if any, uses the batch's statistics
    last_step = min((epoch + 1) * steps_per_epoch, end_step) - 1
    meters, num_corrupt, iterator = Meters(), 0, iter(batches)
    clock = EpochClock(steps_per_epoch, end_step)
    while training.step <= last_step:
        micro_batches = clock.fetch(iterator, training.accum_steps)
        _name_corrupt(micro_batches)
        diagnose = training.step % steps_per_epoch % DIAGNOSE_EVERY == 0 or training.step == last_step
        report = train_step(training, micro_batches, epoch, diagnose)
        num_corrupt += report.num_corrupt
        _check_corrupt(num_corrupt, num_images, training.max_corrupt)
        scalars = _step_scalars(training, report)
        meters.update(**scalars)
        log.scalars({f"train/{name}": value for name, value in scalars.items()}, training.step)
        num_images_seen = world_size() * sum(len(batch.indices) for batch in micro_batches)
        clock.tick(training.step, epoch, num_images_seen, report.loss, training.device)
    _require_finite_weights(training, epoch)
    return {**meters.means(), **clock.speed(), "corrupt_images": num_corrupt}


def _require_finite_weights(training: Training, epoch: int) -> None:
    """A finite loss can have gradients that are not: look at the weights, equal on all ranks, before they are saved."""
    finite = torch.stack([parameter.isfinite().all() for parameter in training.network.parameters()]).all()
    if not finite:
        raise NonFiniteLossError(
            f"the weights are not finite any more after step {training.step} (epoch {epoch}), although the loss was; "
            f"the last checkpoint stays. Try --precision fp32, a lower --lr or --clip_grad"
        )


def _step_scalars(training: Training, report: StepReport) -> dict[str, Tensor | float]:
    step = training.step - 1  # the step that was just taken
    scalars: dict[str, Tensor | float] = {
        "loss": report.loss,
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


def effective_rank(encodings: Float[Tensor, "B F"]) -> float:
    """How many directions the encodings of a batch use, between 1 and B.

        exp(H(sigma / sum(sigma))),  sigma the singular values of the centred encodings

    Source: Roy and Vetterli, "The effective rank"; Garrido et al., "RankMe", uses it for self-supervised encodings.
    """
    centred = encodings.float() - encodings.float().mean(dim=0)
    singular_values = torch.linalg.svdvals(centred)
    shares = singular_values / singular_values.sum().clamp_min(torch.finfo(torch.float32).tiny)
    return torch.special.entr(shares).sum().exp().item()

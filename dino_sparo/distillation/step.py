"""The parts of a step that objectives with a student and a teacher share.

    compute    crops -> gradients of the student, and sums that the ranks exchange     the objective's own
    apply      gradients -> clipped, optimizer; the teacher moves                      `clip_student`, `move_teacher`

`compute` alone may be recorded, see `training/recording.py`; `compute_gradients` calls it for each micro-batch.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dino_sparo.data.augment import Distortions
from dino_sparo.data.batch import Batch
from dino_sparo.runtime.collectives import all_reduce_flat
from dino_sparo.runtime.launch import world_size
from dino_sparo.training.optim import clip_gradients_
from dino_sparo.training.recording import Outputs

if TYPE_CHECKING:
    from dino_sparo.distillation.objective import DistillationObjective

# Crops (S tensors), further tensors of `compute_gradients`, number of micro-batches (by name) -> outputs; adds to the
# student's gradients.
ComputeCrops = Callable[..., Outputs]


def compute_gradients(
    objective: "DistillationObjective",
    compute: ComputeCrops,
    batches: Sequence[Batch],
    key: Hashable,
    extras: Sequence[Sequence[Tensor]] = (),
) -> list[Outputs]:
    """Call `compute` for each micro-batch; the gradients are then this rank's, or with DDP the mean over the ranks.

    Args:
        objective: its student gets the gradients.
        compute: crops, extras, parts=number of micro-batches -> outputs.
        batches: micro-batches of this rank.
        key: changes if `compute` depends on anything that changed, other than crops, extras and weights.
        extras: further tensors for each micro-batch, on the device.
    """
    updater, outputs = objective.updater, []
    for index, batch in enumerate(batches):
        inputs, distort = _inputs_of(batch.to(updater.device), objective.distort)
        extra = list(extras[index]) if extras else []
        call = partial(_on_crops, compute, distort, len(batches), len(inputs))
        with updater.gradient_sync(objective.student, is_last=index == len(batches) - 1):
            whole_key = key, objective.is_backbone_frozen
            outputs.append(objective.recorder(call, [*inputs, *extra], whole_key, is_only_part=len(batches) == 1))
    return outputs


def crops_on_device(batch: Batch, distort: Distortions | None, device: torch.device) -> Sequence[Tensor]:
    """The S crops (B, C, H, W) of a batch on the device, distorted and normalised, for a step that is not recorded."""
    return crops_of(*_inputs_of(batch.to(device), distort))


def _inputs_of(batch: Batch, distort: Distortions | None) -> tuple[list[Tensor], Distortions | None]:
    """The arguments of `crops_of`; the loader left no distortions to the device if the batch has no parameters."""
    if batch.parameters is None:
        return batch.views, None
    return [*batch.views, batch.parameters], distort


def _on_crops(
    compute: ComputeCrops, distort: Distortions | None, parts: int, number: int, inputs: Sequence[Tensor]
) -> Outputs:
    return compute(crops_of(inputs[:number], distort), *inputs[number:], parts=parts)


@torch.no_grad()
def crops_of(inputs: Sequence[Tensor], distort: Distortions | None) -> Sequence[Shaped[Tensor, "B C _ _"]]:
    """The S crops (B, C, H, W) of a batch, distorted and normalised.

    Args:
        inputs: the crops; with `distort` behind them its parameters (S, B, numbers).
        distort: distortions that the loader left to the device; None if the crops are finished.
    """
    return inputs if distort is None else distort.views(inputs[:-1], inputs[-1])


def exchange(objective: "DistillationObjective", sums: Sequence[Tensor] = ()) -> None:
    """Sum tensors over the ranks, in place; without DDP the same all-reduce takes the mean of the gradients."""
    if world_size() == 1:
        return
    has_mean = isinstance(objective.student, DistributedDataParallel)
    parameters = [] if has_mean else objective.updater.parameters
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    all_reduce_flat([*gradients, *sums])
    if gradients:
        torch._foreach_div_(gradients, world_size())


def clip_student(
    objective: "DistillationObjective", loss: Float[Tensor, ""], frozen: Sequence[nn.Module] = ()
) -> Float[Tensor, ""]:
    """Clip the student's gradients, drop the gradients of frozen parts; returns the norm before clipping.

    Args:
        objective: changed in place.
        loss: of the step, detached; one that is not finite stops the optimizer.
        frozen: parts of the student that this step does not train, beside the backbone of the first epochs.
    """
    updater = objective.updater
    norms = updater.finish_gradients(loss)
    if objective.clip_grad:
        clip_gradients_(updater.parameters, objective.clip_grad, norms, updater.scale_gradients)
    for module in (*frozen, *([objective.network.backbone] if objective.is_backbone_frozen else [])):
        module.zero_grad()  # without gradients the optimizer does not change the parameters, not even by decay
    return norms.norm()


def move_teacher(objective: "DistillationObjective") -> dict[str, float]:
    """Move the teacher towards the updated student and count the step; returns the schedules' values, for the log."""
    updater = objective.updater
    momentum = float(objective.momentum[updater.step])
    frozen = ("backbone.",) if objective.is_backbone_frozen else ()
    ema_update_(objective.teacher, objective.network, momentum, frozen)
    values = {"lr": updater.hyperparameter("lr"), "wd": updater.hyperparameter("weight_decay"), "momentum": momentum}
    updater.step += 1
    return values


@torch.no_grad()
def ema_update_(teacher: nn.Module, student: nn.Module, momentum: float, frozen: tuple[str, ...] = ()) -> None:
    """Move the teacher's parameters towards the student's, in place.

        theta_t <- m theta_t + (1 - m) theta_s

    Buffers (batch-norm statistics) do not follow: the teacher's forward passes update its own, as in the reference.
    Parameters stay whose names begin with one of `frozen`. Source: DINO, algorithm 1.
    """
    targets, sources = (
        list[Tensor](weight for name, weight in network.named_parameters() if not name.startswith(frozen))
        for network in (teacher, student)
    )
    torch._foreach_lerp_(targets, sources, 1 - momentum)

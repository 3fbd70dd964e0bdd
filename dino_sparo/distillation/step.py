"""Before and after the optimizer's step: the student's gradients, and the teacher, its moving average.

A step calls `clip_student` before the optimizer's step and `move_teacher` after it, as in `dino/step.py`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dino_sparo.training.optim import clip_gradients_

if TYPE_CHECKING:
    from dino_sparo.distillation.objective import DistillationObjective


def clip_student(
    objective: "DistillationObjective", loss: Float[Tensor, ""], frozen: Sequence[nn.Module] = ()
) -> Float[Tensor, ""]:
    """Clip the student's gradients, drop those of frozen parts; returns their norm before clipping.

    Args:
        objective: changed in place.
        loss: of the step, detached; one that is not finite stops the optimizer.
        frozen: parts of the student that this step does not train, beside the backbone of the first epochs.
    """
    norms = objective.updater.finish_gradients(loss)
    if objective.clip_grad:
        clip_gradients_(objective.updater.parameters, objective.clip_grad, norms)
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

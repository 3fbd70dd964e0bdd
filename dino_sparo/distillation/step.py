"""The end of a step with a student and a teacher: gradients -> student -> teacher, its moving average.

The forward passes and the loss are the objective's own, as in `dino/step.py`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dino_sparo.training.objective import StepReport
from dino_sparo.training.optim import clip_gradients_

if TYPE_CHECKING:
    from dino_sparo.distillation.objective import DistillationObjective


def finish_step(
    objective: "DistillationObjective",
    losses: Sequence[Tensor],
    scalars: Mapping[str, Tensor],
    frozen: Sequence[nn.Module] = (),
) -> StepReport:
    """Clip the gradients, update student and teacher, report the step.

    `objective.momentum`, the teacher's momentum for each step, is built in `distillation/objective.py`.

    Args:
        objective: changed in place.
        losses: of the micro-batches, detached.
        scalars: numbers to log beside the loss.
        frozen: parts of the student that this step does not train, beside the backbone of the first epochs.
    """
    updater = objective.updater
    loss = torch.stack(list(losses)).mean()
    grad_norms = updater.finish_gradients(loss)
    if objective.clip_grad:
        clip_gradients_(updater.parameters, objective.clip_grad, grad_norms)
    is_frozen = updater.step < objective.frozen_steps
    for module in (*frozen, *([objective.network.backbone] if is_frozen else [])):
        module.zero_grad()  # without gradients the optimizer does not change the parameters, not even by decay
    updater.update()
    momentum = float(objective.momentum[updater.step])
    ema_update_(objective.teacher, objective.network, momentum, ("backbone.",) if is_frozen else ())
    rates = {"lr": updater.hyperparameter("lr"), "wd": updater.hyperparameter("weight_decay"), "momentum": momentum}
    updater.step += 1
    return StepReport(loss, updater.nonfinite.clone(), {**rates, "grad_norm": grad_norms.norm(), **scalars})


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

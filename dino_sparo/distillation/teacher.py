"""Student -> teacher: an exponential moving average of the weights, the last line of a step.

The momentum's schedule is made in `objective.py`.
"""

import torch
from torch import Tensor, nn


@torch.no_grad()
def ema_update_(teacher: nn.Module, student: nn.Module, momentum: float, frozen: tuple[str, ...] = ()) -> None:
    """Move the teacher's parameters towards the student's, in place.

        theta_t <- m theta_t + (1 - m) theta_s

    Buffers (batch-norm statistics) do not follow: the teacher's forward passes update its own, as in the reference.
    Parameters stay whose names begin with one of `frozen`. Source: DINO, algorithm 1.
    """
    targets, sources = (_moving(network, frozen) for network in (teacher, student))
    torch._foreach_lerp_(targets, sources, 1 - momentum)


def _moving(network: nn.Module, frozen: tuple[str, ...]) -> list[Tensor]:
    return [parameter for name, parameter in network.named_parameters() if not name.startswith(frozen)]

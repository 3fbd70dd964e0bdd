"""Student -> teacher: an exponential moving average of the weights, the last line of a step."""

import torch
from torch import nn


@torch.no_grad()
def ema_update_(teacher: nn.Module, student: nn.Module, momentum: float) -> None:
    """Move the teacher's parameters towards the student's, in place.

        theta_t <- m theta_t + (1 - m) theta_s

    Buffers (batch-norm statistics) do not follow: the teacher's forward passes update its own, as in the reference.
    Source: DINO, algorithm 1.
    """
    torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 1 - momentum)

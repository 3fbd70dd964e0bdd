"""Gradients -> weights, for every objective: precision, accumulation, schedules, and steps that are skipped.

An objective's step calls these in its own order: `distillation/step.py` and `image_text/step.py`, which also clip the
gradients between `finish_gradients` and `update`. Nothing here reads the device.
"""

import math
import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dino_sparo.runtime.launch import rank
from dino_sparo.training.optim import OPTIMIZERS, ScaleGradients, gradient_norms, scale_, split_by_factor

# Hyperparameter of a parameter group ("lr", "weight_decay") -> its values, one per step of the run.
GroupSchedule = Mapping[str, np.ndarray]
MIN_FP16_SCALE = 1.0  # after 17 steps in a row that overflow, the scale falls below it from 65,536


@dataclass
class Updater:
    """The optimizer and everything around it.

    Attributes:
        optimizer: of the trained network.
        schedules: one per parameter group.
        parameters: of the trained network.
        device: of the trained network.
        dtype: of autocast; float32 switches it off.
        accum_steps: micro-batches per step.
        seed: of stochastic depth, and of what else a step draws.
        step_seed: a number that (seed, step, rank) determine, for what a step draws by a generator of its own.
        step: steps taken so far.
        scaler: of fp16's gradients; None in other precisions.
        scale_gradients: `optim.scale_`, for clipping; may be compiled.
        nonfinite: (), 1 from the first step whose loss is not finite. Without fp16 the gradients count too, and the
            flag is set on every rank. With fp16 it is set on the rank with that loss, and on every rank if gradients
            overflow at a scale below `MIN_FP16_SCALE`. From then on the optimizer changes nothing.
        overflow: (), 1 in a step with fp16 gradients that are not finite. That step is skipped and the scale halved.
    """

    optimizer: torch.optim.Optimizer
    schedules: Sequence[GroupSchedule]
    parameters: list[nn.Parameter]
    device: torch.device
    dtype: torch.dtype = torch.float32
    accum_steps: int = 1
    seed: int = 0
    step: int = 0
    step_seed: int = field(init=False, default=0)
    scaler: torch.amp.GradScaler | None = field(init=False)
    scale_gradients: ScaleGradients = scale_
    nonfinite: Tensor = field(init=False)
    overflow: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.scaler = torch.amp.GradScaler(self.device.type) if self.dtype == torch.float16 else None
        self.nonfinite, self.overflow = (torch.zeros((), device=self.device) for _ in range(2))

    def begin_step(self) -> None:
        """Set the hyperparameters of the step, drop the gradients of the last step, seed all random numbers."""
        for group, schedule in zip(self.optimizer.param_groups, self.schedules, strict=True):
            group.update({name: float(values[self.step]) for name, values in schedule.items()})
        self.optimizer.zero_grad(set_to_none=True)
        # Stochastic depth is a function of (seed, step, rank), so that resuming needs no random state, and equal runs
        # save equal states.
        words = np.random.SeedSequence((self.seed % 2**64, self.step, rank())).generate_state(1, np.uint64)
        self.step_seed = int(words[0])
        torch.manual_seed(self.step_seed)
        np.random.seed(self.step_seed % 2**32)
        random.seed(self.step_seed)

    def autocast(self) -> AbstractContextManager[None]:
        """The precision of the forward passes."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    @staticmethod
    def gradient_sync(model: nn.Module, is_last: bool) -> AbstractContextManager[None]:
        """DDP averages gradients once per step, with the last micro-batch."""
        if isinstance(model, DistributedDataParallel) and not is_last:
            return model.no_sync()
        return nullcontext()

    def backward(self, value: Float[Tensor, ""], loss: Float[Tensor, ""], parts: int = 1) -> None:
        """Add the gradients of `value` / `parts`, where `parts` micro-batches share a step.

        The gradients are NaN if the loss is not finite, or was not in an earlier step. The mean over the ranks is then
        NaN too, so that no rank updates its weights.
        """
        is_fine = loss.detach().isfinite() & (self.nonfinite == 0)
        scaled = value if self.scaler is None else self.scaler.scale(value)
        (scaled / parts * torch.where(is_fine, 1.0, math.nan)).backward()

    def finish_gradients(self, loss: Float[Tensor, ""]) -> Float[Tensor, " parameters"]:
        """Undo fp16's scale, and set the flags if the loss or a gradient is not finite; returns `gradient_norms`."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        norms = gradient_norms(self.parameters)
        is_bad, overflows = (~value.isfinite() for value in (loss, norms.sum()))
        # fp16 gradients may overflow: the step is skipped and the scale halved. A loss that is not finite ends the run.
        # So do gradients that overflow at a scale below 1, because a lower scale would not help.
        if self.scaler is None:
            is_bad = is_bad | overflows
        else:
            self.overflow = overflows.float()
            scale = self.scaler.scale(torch.ones((), device=self.device))
            is_bad = is_bad | (overflows & (scale < MIN_FP16_SCALE))
        self.nonfinite.clamp_(min=is_bad.float())
        return norms

    @torch.no_grad()
    def update(self) -> None:
        """Let the optimizer change the weights, unless something was not finite.

        torch's fused AdamW takes the flag as an overflow of the gradient scaler. (`GradScaler.step` itself reads the
        device for other optimizers, and forgets earlier steps.) The step of SGD and LARS is undone, which takes the
        memory of weights and momenta once more. torch's fused SGD could take the flag too, but fails on parameters
        that join later, as the head's last layer does.
        """
        flag = torch.maximum(self.nonfinite, self.overflow)
        is_adamw = isinstance(self.optimizer, torch.optim.AdamW)
        if is_adamw:
            self.optimizer.grad_scale, self.optimizer.found_inf = None, flag  # type: ignore[attr-defined]
        before = {} if is_adamw else self._copies()
        self.optimizer.step()
        for weight, (old_weight, old_state) in before.items():
            weight.copy_(torch.where(flag > 0, old_weight, weight))
            for name, value in self.optimizer.state[weight].items():
                # Momentum starts from zero.
                old_value = old_state[name] if name in old_state else torch.zeros_like(value)
                value.copy_(torch.where(flag > 0, old_value, value))
        if self.scaler is not None:
            self.scaler.update()

    def _copies(self) -> dict[nn.Parameter, tuple[Tensor, dict[str, Tensor]]]:
        """Copies of the weights that the next step changes, and of the optimizer's state of each."""
        weights = (weight for group in self.optimizer.param_groups for weight in group["params"])
        moving = [weight for weight in weights if weight.grad is not None]
        states = [{name: value.clone() for name, value in self.optimizer.state[weight].items()} for weight in moving]
        return {weight: (weight.clone(), state) for weight, state in zip(moving, states, strict=True)}

    def hyperparameter(self, name: str) -> float:
        """The first group's value of a schedule at this step."""
        return float(self.schedules[0][name][self.step])


def create_updater(
    network: nn.Module,
    groups: Sequence[dict[str, Any]],
    schedules: Sequence[GroupSchedule],
    device: torch.device,
    dtype: torch.dtype,
    *,
    optimizer: str = "adamw",
    layer_factors: Mapping[nn.Parameter, float] = {},
    accum_steps: int = 1,
    seed: int = 0,
) -> Updater:
    """Optimizer, schedules and precision of a network.

    Args:
        network: the trained network.
        groups: of its weights, as torch's optimizers take them.
        schedules: one per group.
        device: of the network.
        dtype: of autocast.
        optimizer: a key of `OPTIMIZERS`.
        layer_factors: of the learning rate; see `optim.layer_factors`.
        accum_steps: micro-batches per step.
        seed: of stochastic depth.
    """
    groups, schedules = split_by_factor(groups, schedules, layer_factors)
    names = {parameter: name for name, parameter in network.named_parameters()}
    for group in groups:  # torch's key for them
        group["param_names"] = [names[parameter] for parameter in group["params"]]
    weights = list(network.parameters())
    return Updater(OPTIMIZERS[optimizer](groups), schedules, weights, device, dtype, accum_steps, seed)

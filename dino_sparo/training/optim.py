"""Gradients -> weights: parameter groups, optimizers, schedules per step, clipping."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from dino_sparo.runtime.faults import UserError

CLIP_EPSILON = 1e-6  # the reference's guard against division by a zero norm


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Split trainable parameters into regularised ones and the rest.

    Biases and one-dimensional parameters (norms) get no weight decay. SPARO's queries (L, A) are regularised, as are
    position embeddings and class token: the reference decides by name and number of dimensions alone.

    Returns:
        Two groups, the second with weight decay 0; only the first follows the weight-decay schedule.
    """
    regularised: list[nn.Parameter] = []
    unregularised: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (unregularised if is_unregularised(name, parameter) else regularised).append(parameter)
    return [{"params": regularised}, {"params": unregularised, "weight_decay": 0.0}]


def is_unregularised(name: str, weight: Tensor) -> bool:
    """Whether a weight belongs to the second group of `param_groups`."""
    return name.endswith(".bias") or weight.ndim == 1


def layer_factors(backbone: Any, decay: float | None) -> dict[nn.Parameter, float]:
    """Factor of the learning rate of each weight in the layers of a backbone; empty without a decay.

        factor = decay^(depth + 1 - layer),  layer 0: embeddings; layer i: block i, counted from 1

    All weights after the last block have the factor 1. Source: the code of BEiT, as in MAE's and DINOv2's.
    """
    if decay is None:
        return {}
    layers, weights = backbone.layers(), dict(backbone.named_parameters())
    depth = max(layers.values())
    return {weights[name]: decay ** (depth + 1 - layer) for name, layer in layers.items()}


def split_by_factor(
    groups: Sequence[dict[str, Any]],
    schedules: Sequence[Mapping[str, np.ndarray]],
    factors: Mapping[nn.Parameter, float],
) -> tuple[list[dict[str, Any]], list[dict[str, np.ndarray]]]:
    """Split groups by the factors of their weights, the highest first, and scale the schedules of the learning rate."""
    split = [
        (
            {**group, "params": [weight for weight in group["params"] if factors.get(weight, 1.0) == factor]},
            {**schedule, "lr": factor * schedule["lr"]},
        )
        for group, schedule in zip(groups, schedules, strict=True)
        for factor in sorted({factors.get(weight, 1.0) for weight in group["params"]} or {1.0}, reverse=True)
    ]
    return [group for group, _ in split], [schedule for _, schedule in split]


class LARS(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling with momentum.

        d = g + lambda w                      (parameters with two or more dimensions)
        d <- d * eta ||w|| / ||d||            (the same, where both norms are positive)
        mu <- momentum mu + d,  w <- w - lr mu

    Source: You, Gitman and Ginsburg, "Large batch training of convolutional networks", algorithm 1, in the variant of
    facebookresearch/dino (`utils.LARS`): the ratio is taken of the decayed gradient.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        weight_decay: lambda.
        momentum: of the update.
        eta: trust coefficient.
    """

    def __init__(
        self, params: Any, lr: float = 0.0, weight_decay: float = 0.0, momentum: float = 0.9, eta: float = 0.001
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "eta": eta})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                update = self._scaled_gradient(parameter, group["weight_decay"], group["eta"])
                state = self.state[parameter]
                if "mu" not in state:
                    state["mu"] = torch.zeros_like(parameter)
                state["mu"].mul_(group["momentum"]).add_(update)
                parameter.add_(state["mu"], alpha=-group["lr"])

    @staticmethod
    def _scaled_gradient(parameter: Tensor, weight_decay: float, eta: float) -> Tensor:
        if parameter.ndim == 1:
            return parameter.grad  # type: ignore[return-value]
        update = parameter.grad.add(parameter, alpha=weight_decay)  # type: ignore[union-attr]
        parameter_norm, update_norm = parameter.norm(), update.norm()
        ratio = eta * parameter_norm / update_norm
        return update * torch.where((parameter_norm > 0) & (update_norm > 0), ratio, torch.ones_like(ratio))


# `--optimizer` -> from the groups of `param_groups` to the optimizer.
OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    # The learning rate of all of them is set at every step by the schedule.
    "adamw": lambda groups: torch.optim.AdamW(groups, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.0, momentum=0.9),
    "lars": lambda groups: LARS(groups),
}


def cosine_schedule(
    base: float, final: float, total_steps: int, warmup_steps: int | float = 0, start: float = 0.0
) -> np.ndarray:
    """One value per step: a linear warm-up, then half a cosine.

        value_i = final + (base - final) (1 + cos(pi i / n)) / 2,   i = 0 .. n - 1 after the warm-up

    The warm-up, rounded to whole steps, runs from `start` to `base` inclusive, so `base` stands twice, as in the
    reference.

    Returns:
        (total_steps,) float64.
    """
    if not 0 <= warmup_steps <= total_steps:
        raise UserError(
            f"a warm-up of {warmup_steps} steps does not fit a schedule of {total_steps} steps; shorten the warm-up "
            f"or train longer"
        )
    warmup = np.linspace(start, base, round(warmup_steps))
    steps = np.arange(total_steps - len(warmup))
    cosine = final + 0.5 * (base - final) * (1 + np.cos(np.pi * steps / len(steps)))
    return np.concatenate((warmup, cosine))


def scale_(tensors: Sequence[Tensor], factors: Sequence[Float[Tensor, ""]]) -> None:
    """Multiply each tensor by its factor, in place. A GPU launches a kernel per tensor; compiled, it launches few."""
    torch._foreach_mul_(list(tensors), list(factors))


ScaleGradients = Callable[[Sequence[Tensor], Sequence[Tensor]], None]


@torch.no_grad()
def clip_gradients_(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norms: Float[Tensor, " parameters"],
    scale: ScaleGradients = scale_,
) -> None:
    """Scale down, in place, every gradient whose norm exceeds `max_norm`.

        g <- g min(1, max_norm / (||g||_2 + 1e-6)),  for each parameter separately

    Source: facebookresearch/dino, `utils.clip_gradients`. Nothing is read from the device, and all factors are computed
    together. `norms` are those of `gradient_norms`; `scale` is `scale_`, which may be compiled.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    factors = (max_norm / (norms + CLIP_EPSILON)).clamp(max=1.0)
    scale(gradients, factors.unbind())


@torch.no_grad()
def gradient_norms(parameters: Iterable[nn.Parameter]) -> Float[Tensor, " parameters"]:
    """The norm of every gradient that exists; not finite where the gradient is not."""
    return torch.stack(torch._foreach_norm([parameter.grad for parameter in parameters if parameter.grad is not None]))

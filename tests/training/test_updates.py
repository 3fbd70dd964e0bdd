"""training/updates.py: what happens to the weights after a loss or gradients that are not finite; fp16's scale."""

import copy
import math
import random

import numpy as np
import pytest
import torch
from runs import assert_same_state

from dino_sparo.training.optim import OPTIMIZERS, param_groups
from dino_sparo.training.resume import random_state
from dino_sparo.training.updater import Updater


class Steps:
    """Steps on the CPU, with a factor of the loss for each."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float16, num_steps: int = 9) -> None:
        torch.manual_seed(0)
        self.model, rates = torch.nn.Linear(3, 2), {"lr": np.full(num_steps, 0.1)}
        self.optimizer = OPTIMIZERS[name](param_groups(self.model))
        parameters = list(self.model.parameters())
        self.updater = Updater(self.optimizer, [rates, rates], parameters, torch.device("cpu"), dtype)

    def take(self, factor: float = 1.0, gradient: float | None = None) -> torch.Tensor:
        """A step; returns the gradients' norms. A `gradient` takes the place of the weights' own."""
        updater = self.updater
        updater.begin_step()
        with updater.autocast():
            output = self.model(torch.linspace(-1, 1, 15).view(5, 3))
        loss = factor * output.float().square().mean()
        updater.backward(loss, loss)
        if gradient is not None:
            self.model.weight.grad.fill_(gradient)
        norms = updater.finish_gradients(loss.detach())
        updater.update()
        updater.step += 1
        return norms

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Weights, and the optimizer's state of them."""
        of_optimizer = enumerate(self.optimizer.state_dict()["state"].values())
        flat = {f"{i}.{k}": torch.as_tensor(v) for i, own in of_optimizer for k, v in own.items() if v is not None}
        return copy.deepcopy({**self.model.state_dict(), **flat})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_after_a_loss_that_is_not_finite_no_later_step_changes_weights_or_optimizer(
    name: str, dtype: torch.dtype
) -> None:
    steps = Steps(name, dtype)
    start = steps.state
    steps.take()
    before = steps.state
    assert not torch.equal(start["weight"], before["weight"])
    for factor in (math.inf, 1.0, 1.0):  # the second and third are finite
        steps.take(factor)
    assert steps.updater.nonfinite == 1
    assert_same_state(before, steps.state, "state")


def test_a_step_seeds_all_random_numbers_so_that_equal_runs_save_equal_states() -> None:
    """The bug: numpy's and Python's states came from the system, and two checkpoints of equal runs differed."""
    updater, states = Steps("sgd").updater, []
    for step in (3, 3, 4):
        updater.step = step
        np.random.seed()
        random.seed()
        updater.begin_step()
        states.append(random_state(torch.device("cpu")))
    assert_same_state(states[0], states[1], "random state")
    assert states[1]["python"] != states[2]["python"]


def test_fp16_gradients_that_are_never_finite_end_the_run() -> None:
    """The bug: the scale fell to 0, no step was taken any more, and the run went on for days."""
    steps = Steps("adamw", num_steps=40)
    ended = []
    for _ in range(20):
        steps.take(gradient=math.nan)
        ended.append(bool(steps.updater.nonfinite))
    assert ended == [False] * 17 + [True] * 3  # 65,536 is halved 17 times before it is less than 1
    weights = steps.model.weight.clone()
    steps.take()
    assert torch.equal(steps.model.weight, weights)


def test_fp16_gradients_are_seen_without_their_scale() -> None:
    """What is clipped and logged is the gradient itself, as in other precisions."""
    steps = Steps("adamw")
    scaler = steps.updater.scaler
    assert scaler is not None
    norm = steps.take(gradient=6.0 * 65536)[0]
    assert scaler.get_scale() == 65536
    assert norm.item() == pytest.approx(6 * math.sqrt(6))


@pytest.mark.parametrize("gradients", [(None, math.nan, None, 3.0, -math.inf, None), (math.inf, None)], ids=len)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_fp16_skips_and_scales_as_torchs_own_scaler_step(
    name: str, gradients: tuple[float | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug: after a first step that overflowed, SGD kept the infinite gradient as its momentum."""
    ours, theirs = Steps(name), Steps(name)

    def update() -> None:
        updater = theirs.updater
        assert updater.scaler is not None
        updater.scaler.step(updater.optimizer)
        updater.scaler.update()

    monkeypatch.setattr(theirs.updater, "update", update)
    for steps in (ours, theirs):
        for gradient in gradients:
            steps.take(gradient=gradient)
    assert ours.updater.nonfinite == 0
    assert_same_state(ours.state, theirs.state, "state")
    scalers = [steps.updater.scaler for steps in (ours, theirs)]
    assert scalers[0].state_dict() == scalers[1].state_dict()

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_after_a_loss_that_is_not_finite_no_later_step_changes_weights_or_optimizer(
    name: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    rates = {"lr": np.full(5, 0.1)}
    optimizer = OPTIMIZERS[name](param_groups(model))
    updater = Updater(optimizer, [rates, rates], list(model.parameters()), torch.device("cpu"), dtype)

    def take_step(factor: float) -> None:
        updater.begin_step()
        loss = factor * model(torch.ones(5, 3)).square().mean()
        updater.backward(loss, loss)
        updater.finish_gradients(loss.detach())
        updater.update()
        updater.step += 1

    start = copy.deepcopy(model.state_dict())
    take_step(1.0)
    assert not torch.equal(start["weight"], model.weight)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    for factor in (math.inf, 1.0, 1.0):  # the second and third are finite
        take_step(factor)
    assert updater.nonfinite == 1
    for old, new in zip(before[0].values(), model.state_dict().values(), strict=True):
        assert torch.equal(old, new)
    for old, new in zip(before[1].values(), optimizer.state_dict()["state"].values(), strict=True):
        assert all(
            value is None or torch.equal(torch.as_tensor(value), torch.as_tensor(new[key]))
            for key, value in old.items()
        )


def test_a_step_seeds_all_random_numbers_so_that_equal_runs_save_equal_states() -> None:
    """The bug: numpy's and Python's states came from the system, and two checkpoints of equal runs differed."""
    model, cpu, states = torch.nn.Linear(3, 2), torch.device("cpu"), []
    rates = {"lr": np.full(5, 0.1)}
    updater = Updater(OPTIMIZERS["sgd"](param_groups(model)), [rates, rates], list(model.parameters()), cpu)
    for step in (3, 3, 4):
        updater.step = step
        np.random.seed()
        random.seed()
        updater.begin_step()
        states.append(random_state(cpu))
    assert_same_state(states[0], states[1], "random state")
    assert states[1]["python"] != states[2]["python"]


class Fp16Steps:
    """Steps in fp16 on the CPU, with a factor of the loss for each."""

    def __init__(self, name: str, num_steps: int = 9) -> None:
        torch.manual_seed(0)
        self.model, rates = torch.nn.Linear(3, 2), {"lr": np.full(num_steps, 0.1)}
        self.optimizer = OPTIMIZERS[name](param_groups(self.model))
        parameters = list(self.model.parameters())
        self.updater = Updater(self.optimizer, [rates, rates], parameters, torch.device("cpu"), torch.float16)

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


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_fp16_gradients_that_overflow_skip_one_step_and_halve_the_scale(name: str) -> None:
    steps = Fp16Steps(name)
    scaler = steps.updater.scaler
    assert scaler is not None
    steps.take()
    before, scale = steps.state, scaler.get_scale()
    steps.take(gradient=math.inf)
    after = steps.state
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert scaler.get_scale() == scale / 2
    assert steps.updater.nonfinite == 0
    steps.take()
    assert not torch.equal(steps.model.weight, before["weight"])


def test_fp16_gradients_that_are_never_finite_end_the_run() -> None:
    """The bug: the scale fell to 0, no step was taken any more, and the run went on for days."""
    steps = Fp16Steps("adamw", num_steps=40)
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
    steps = Fp16Steps("adamw")
    scaler = steps.updater.scaler
    assert scaler is not None
    norm = steps.take(gradient=6.0 * 65536)[0]
    assert scaler.get_scale() == 65536
    assert norm.item() == pytest.approx(6 * math.sqrt(6))


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_first_step_that_overflows_leaves_nothing_in_the_optimizer(name: str) -> None:
    """The bug: SGD kept the infinite gradient as its momentum, and the next good step destroyed the weights."""
    steps = Fp16Steps(name)
    before = steps.model.weight.clone()
    steps.take(gradient=math.inf)
    assert torch.equal(steps.model.weight, before)
    steps.take()
    assert not torch.equal(steps.model.weight, before)
    assert all(value.isfinite().all() for value in steps.state.values())


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_fp16_skips_and_scales_as_torchs_own_scaler_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Fp16Steps(name), Fp16Steps(name)

    def update() -> None:
        updater = theirs.updater
        assert updater.scaler is not None
        updater.scaler.step(updater.optimizer)
        updater.scaler.update()

    monkeypatch.setattr(theirs.updater, "update", update)
    for steps in (ours, theirs):
        for gradient in (None, math.nan, None, 3.0, -math.inf, None):
            steps.take(gradient=gradient)
    first, second = ours.state, theirs.state
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    scalers = [steps.updater.scaler for steps in (ours, theirs)]
    assert scalers[0].state_dict() == scalers[1].state_dict()

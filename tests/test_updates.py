"""training/updates.py: what happens to the weights after a loss that is not finite."""

import copy
import math

import numpy as np
import pytest
import torch

from dino_sparo.training.optim import OPTIMIZERS, create_optimizer, param_groups
from dino_sparo.training.updates import Updater


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_after_a_loss_that_is_not_finite_no_later_step_changes_weights_or_optimizer(
    name: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    rates = {"lr": np.full(5, 0.1)}
    optimizer = create_optimizer(name, param_groups(model))
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

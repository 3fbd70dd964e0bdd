"""The teacher: an exponential moving average of the student's parameters."""

import pytest
import torch
from torch import nn

from dino_sparo.distillation.step import ema_update_


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Matrix, vector and running statistics; one parameter that is not trained."""
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).to(dtype)
    model[2].bias.requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("momentum", [0.0, 0.25, 0.996, 1.0])
def test_every_parameter_moves_by_the_equation(momentum: float) -> None:
    torch.manual_seed(0)
    student, teacher = network(), network()
    expected = []
    for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
        flat = [
            momentum * t + (1 - momentum) * s
            for t, s in zip(old.flatten().tolist(), new.flatten().tolist(), strict=True)
        ]
        expected.append(torch.tensor(flat, dtype=torch.float64).reshape(old.shape))
    kept = [parameter.detach().clone() for parameter in student.parameters()]
    ema_update_(teacher, student, momentum)
    for parameter, wanted in zip(teacher.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-14, atol=1e-15)
    assert all(torch.equal(parameter, before) for parameter, before in zip(student.parameters(), kept, strict=True))


def test_running_statistics_stay_the_teachers_own() -> None:
    student, teacher = network(), network()
    student(torch.randn(7, 3, dtype=torch.float64))
    before = [buffer.clone() for buffer in teacher.buffers()]
    ema_update_(teacher, student, 0.5)
    assert all(torch.equal(buffer, old) for buffer, old in zip(teacher.buffers(), before, strict=True))


def test_no_graph_is_kept() -> None:
    student, teacher = network(), network()
    for parameter in teacher.parameters():
        parameter.requires_grad_(False)
    ema_update_(teacher, student, 0.9)
    assert not any(parameter.requires_grad or parameter.grad_fn for parameter in teacher.parameters())
    student(torch.randn(7, 3, dtype=torch.float64)).sum().backward()


def test_networks_that_do_not_match_are_refused() -> None:
    with pytest.raises((ValueError, RuntimeError)):
        ema_update_(nn.Linear(3, 5), nn.Linear(3, 7), 0.9)

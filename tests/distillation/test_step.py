"""What the steps of several objectives share: micro-batches, crops that the device distorts, the moving teacher."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dino_sparo.data.augment import Distortions
from dino_sparo.data.batch import Batch
from dino_sparo.distillation.step import compute_gradients, crops_on_device, ema_update_

CPU = torch.device("cpu")


def batch(number: int, parameters: torch.Tensor | None = None) -> Batch:
    """Three crops of one number."""
    crops = [torch.full((2, 3, side, side), float(number)) for side in (11, 11, 7)]
    return Batch(crops, torch.full((2,), -1), torch.arange(2), [], parameters=parameters)


@pytest.mark.parametrize("parts", [1, 3])
def test_each_micro_batch_is_computed_with_its_extras_and_the_last_exchanges_the_gradients(parts: int) -> None:
    are_last: list[bool] = []
    are_alone: list[bool] = []

    def gradient_sync(student: nn.Module, is_last: bool) -> contextlib.AbstractContextManager[None]:
        are_last.append(is_last)
        return contextlib.nullcontext()

    def recorder(call: Any, inputs: list[torch.Tensor], key: Any, is_only_part: bool) -> dict[str, torch.Tensor]:
        assert key == ("key", True)
        are_alone.append(is_only_part)
        return call(inputs)

    def compute(crops: list[torch.Tensor], extra: torch.Tensor, parts: int) -> dict[str, torch.Tensor]:
        return {"seen": torch.stack([crop.mean() for crop in crops] + [extra, torch.tensor(float(parts))])}

    updater = SimpleNamespace(device=CPU, gradient_sync=gradient_sync)
    objective: Any = SimpleNamespace(
        updater=updater, distort=None, student=nn.Linear(2, 3), is_backbone_frozen=True, recorder=recorder
    )
    extras = [[torch.tensor(10.0 + number)] for number in range(parts)]
    outputs = compute_gradients(objective, compute, [batch(number) for number in range(parts)], "key", extras)
    assert [output["seen"].tolist() for output in outputs] == [[n, n, n, 10 + n, parts] for n in range(parts)]
    assert are_last == [False] * (parts - 1) + [True]
    assert are_alone == [parts == 1] * parts


def test_the_device_distorts_the_crops_that_come_with_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[torch.Tensor], torch.Tensor]] = []

    def views(crops: list[torch.Tensor], parameters: torch.Tensor) -> list[torch.Tensor]:
        calls.append((crops, parameters))
        return crops[::-1]

    distort = Distortions((0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
    monkeypatch.setattr(distort, "views", views)
    plain, deferred = batch(1), batch(2, parameters=torch.rand(3, 2, 5))
    assert crops_on_device(plain, distort, CPU) == plain.views
    assert crops_on_device(deferred, distort, CPU) == deferred.views[::-1]
    assert calls == [(deferred.views, deferred.parameters)]


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

"""The loss against its definition over pairs of views, in float64, and against recorded numbers."""

import inspect
import re

import numpy as np
import pytest
import torch
from reference import weights as recorded
from torch.nn import functional as F

from dino_sparo import DINOLoss

STUDENT_TEMP = 0.1


def build(num_crops: int, out_dim: int, temp: float = 0.05, **changed: object) -> DINOLoss:
    """A loss without warm-up, in float64."""
    settings = {"warmup_teacher_temp": temp, "teacher_temp": temp, "warmup_teacher_temp_epochs": 0, "num_epochs": 3}
    return DINOLoss(out_dim, num_crops, **{**settings, **changed}).double()


def over_pairs(student: torch.Tensor, teacher: torch.Tensor, center: torch.Tensor, temp: float) -> torch.Tensor:
    """Mean over pairs of different views, and over images, of -sum_k p_t(k) ln p_s(k), in nats.

    Crop s of image b is row s * B + b; the teacher sees the first two crops.
    """
    targets = ((teacher - center) / temp).softmax(dim=1).chunk(2)
    crops = (student / STUDENT_TEMP).split(len(targets[0]))
    pairs = [(crop, target) for t, target in enumerate(targets) for s, crop in enumerate(crops) if s != t]
    return torch.stack([F.cross_entropy(*pair) for pair in pairs]).mean()


@pytest.mark.parametrize("out_dim", [5, 13, 101])
@pytest.mark.parametrize("num_crops", [2, 3, 7, 10])
def test_value_and_gradient_equal_the_definition_over_pairs(num_crops: int, out_dim: int) -> None:
    torch.manual_seed(num_crops)
    batch = 3
    loss = build(num_crops, out_dim)
    center = torch.randn(1, out_dim, dtype=torch.float64)
    loss.center.copy_(center)
    student = torch.randn(num_crops * batch, out_dim, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(2 * batch, out_dim, dtype=torch.float64)
    value = loss(student, teacher, 0)
    expected = over_pairs(student, teacher, center, 0.05)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    (ours,) = torch.autograd.grad(value, student)
    (wanted,) = torch.autograd.grad(expected, student)
    torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("num_crops", list(recorded.LOSS_CALLS))
def test_losses_gradients_and_centers_follow_the_reference_through_the_warm_up(num_crops: int) -> None:
    numbers, settings = recorded.load("loss"), recorded.LOSS
    loss = DINOLoss(
        settings["out_dim"],
        num_crops,
        warmup_teacher_temp=settings["warmup_teacher_temp"],
        teacher_temp=settings["teacher_temp"],
        warmup_teacher_temp_epochs=settings["warmup_epochs"],
        num_epochs=settings["epochs"],
    )
    assert loss.center.shape == (1, settings["out_dim"])
    for call, epoch in enumerate(recorded.LOSS_CALLS[num_crops]):
        student, teacher = map(torch.from_numpy, recorded.loss_logits(num_crops, call))
        student.requires_grad_()
        value = loss(student, teacher, epoch)
        value.backward()
        key = f"crops{num_crops}/call{call}"
        assert value.item() == pytest.approx(float(numbers[f"{key}/loss"]), rel=1e-5)
        torch.testing.assert_close(student.grad, torch.from_numpy(numbers[f"{key}/grad"]), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(loss.center, torch.from_numpy(numbers[f"{key}/center"]), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("warmup_epochs", "num_epochs"), [(0, 3), (1, 3), (3, 5), (5, 5)])
def test_the_teacher_temperature_warms_up_linearly_over_epochs(warmup_epochs: int, num_epochs: int) -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(6, 5).double(), torch.randn(4, 5).double()
    ramp = np.linspace(0.02, 0.08, warmup_epochs).tolist() + [0.08] * (num_epochs - warmup_epochs)
    for epoch, temp in enumerate(ramp):
        loss = build(
            3,
            5,
            warmup_teacher_temp=0.02,
            teacher_temp=0.08,
            warmup_teacher_temp_epochs=warmup_epochs,
            num_epochs=num_epochs,
        )
        assert len(loss.teacher_temp_schedule) == num_epochs
        expected = over_pairs(student, teacher, torch.zeros(1, 5).double(), temp)
        torch.testing.assert_close(loss(student, teacher, epoch), expected)


def test_no_gradient_reaches_the_teacher_or_the_center() -> None:
    loss = build(2, 5)
    teacher = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    student = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    loss(student, teacher, 0).backward()
    assert teacher.grad is None
    assert not loss.center.requires_grad
    assert list(loss.parameters()) == []


def test_the_state_is_the_references_center_alone() -> None:
    assert list(build(2, 5).state_dict()) == ["center"]


def test_large_logits_stay_finite() -> None:
    student = (1e3 * torch.randn(6, 5)).requires_grad_()
    value = build(2, 5).float()(student, 1e3 * torch.randn(6, 5), 0)
    value.backward()
    assert value.isfinite()
    assert student.grad.isfinite().all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_crops": 1}, "num_crops=1, .*DINO needs at least the 2 global crops"),
        ({"out_dim": 1}, "out_dim=1: DINO needs at least .* and 2 prototypes"),
        ({"warmup_teacher_temp_epochs": 4}, "warmup_teacher_temp_epochs=4 does not fit a run of 3 epochs; give 0 to 3"),
        ({"warmup_teacher_temp_epochs": -1}, "warmup_teacher_temp_epochs=-1 does not fit"),
        ({"warmup_teacher_temp": 0.0}, r"^warmup_teacher_temp=0.0 is not a temperature"),
        ({"teacher_temp": 0.0}, r"^teacher_temp=0.0 is not a temperature"),
        ({"student_temp": -0.5}, r"^student_temp=-0.5 is not a temperature"),
    ],
)
def test_settings_without_meaning_are_refused_by_name(changed: dict[str, object], message: str) -> None:
    settings: dict = {"out_dim": 5, "num_crops": 2, "warmup_teacher_temp": 0.04, "teacher_temp": 0.04}
    settings |= {"warmup_teacher_temp_epochs": 0, "num_epochs": 3}
    with pytest.raises(ValueError, match=message):
        DINOLoss(**{**settings, **changed})


@pytest.mark.parametrize(
    "changed", [{"center_momentum": 0.0}, {"center_momentum": 1.0}, {"out_dim": 2}, {"student_temp": 1e-6}]
)
def test_settings_at_the_end_of_their_range_are_taken(changed: dict[str, float]) -> None:
    settings: dict = {"out_dim": 5, "num_crops": 2, "warmup_teacher_temp": 0.04, "teacher_temp": 0.04}
    settings |= {"warmup_teacher_temp_epochs": 0, "num_epochs": 3}
    DINOLoss(**{**settings, **changed})


def test_defaults_are_the_references() -> None:
    loss = DINOLoss(5, 2, 0.04, 0.04, 0, 3)
    assert (loss.student_temp, loss.center_momentum, loss.chunk_size) == (0.1, 0.9, 0)


@pytest.mark.parametrize("chunk_size", [1, 3, 11, 13])
def test_the_loss_in_chunks_of_prototypes_equals_the_whole(chunk_size: int) -> None:
    torch.manual_seed(0)
    student = torch.randn(5 * 3, 11, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(2 * 3, 11, dtype=torch.float64)
    whole = build(5, 11)(student, teacher, 0)
    chunked = build(5, 11, chunk_size=chunk_size)(student, teacher, 0)
    torch.testing.assert_close(chunked, whole, rtol=1e-12, atol=1e-12)
    ours, wanted = (torch.autograd.grad(value, student)[0] for value in (chunked, whole))
    torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(("keep", "moves"), [(None, True), (0.0, True), (1.0, False)])
def test_the_center_stays_where_the_flag_is_set(keep: float | None, moves: bool) -> None:
    loss = build(2, 3, center_momentum=0.75)
    loss.center.fill_(8.0)
    total = torch.tensor([[0.0, 10.0, 40.0]], dtype=torch.float64)
    loss.move_center(total, 5, None if keep is None else torch.tensor(keep))
    expected = [[6.0, 6.5, 8.0]] if moves else [[8.0, 8.0, 8.0]]
    torch.testing.assert_close(loss.center, torch.tensor(expected, dtype=torch.float64))


def test_a_sum_with_a_graph_is_exchanged_and_taken_in_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    exchanged: list[torch.Tensor] = []
    monkeypatch.setattr("dino_sparo.distillation.loss.all_reduce_sum", lambda x: exchanged.append(x) or total)
    loss, total = build(2, 3), torch.ones(1, 3, dtype=torch.float64, requires_grad=True)
    loss.update_center(total, 5)
    assert not exchanged[0].requires_grad
    assert not loss.center.requires_grad


def test_the_center_stays_when_it_shall_be_moved_later() -> None:
    loss = build(2, 5)
    loss(torch.randn(6, 5).double(), torch.randn(6, 5).double(), 0, update_center=False)
    assert not loss.center.any()


@pytest.mark.parametrize("shape", [(8, 5), (9, 4)])
def test_student_logits_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    message = f"student logits have shape {shape}; with 3 crops, 3 images and 5 prototypes they need (9, 5)"
    with pytest.raises(ValueError, match=re.escape(message)):
        inspect.unwrap(DINOLoss.forward)(build(3, 5), torch.zeros(shape), torch.zeros(6, 5).double(), 0)


def test_the_cross_entropy_is_compiled_for_fixed_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, settings = build(2, 5), []
    monkeypatch.setattr(torch, "compile", lambda function, **given: settings.append(given) or (lambda *_: "compiled"))
    loss.compile(dynamic=False)
    assert loss.cross_entropy(None, None) == "compiled"
    assert settings == [{"dynamic": False}]

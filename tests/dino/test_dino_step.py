"""Ten training steps against the reference's own training loop, in fp32."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from objectives import bare
from reference import weights as recorded
from torch import nn

import dino_sparo
from dino_sparo.data.batch import Batch
from dino_sparo.dino.step import train_step
from dino_sparo.dino.train import DINOObjective
from dino_sparo.training import optim
from dino_sparo.training.updater import Updater

S = recorded.STEPS
STEPS = S["epochs"] * S["steps_per_epoch"]


def build_network(norm_last_layer: bool) -> dino_sparo.EncoderWithHead:
    """ViT-Ti/16 with the class token read out, and the generated weights."""
    with recorded.SkipInitialisation():
        encoder = dino_sparo.create_encoder("vit_tiny", patch_size=16, readout="cls", img_size=S["global_size"])
        head = dino_sparo.DINOHead(192, S["out_dim"], norm_last_layer=norm_last_layer)
    network = dino_sparo.EncoderWithHead(encoder, head)
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    network.load_state_dict({name: torch.from_numpy(v) for name, v in recorded.state(shapes, "steps/").items()})
    return network


def step_batch(step: int) -> Batch:
    crops = [torch.from_numpy(crop) for crop in recorded.step_crops(step)]
    number = S["batch_size"]
    return Batch(crops, torch.full((number,), -1), torch.arange(number), [])


def run_ten_steps(
    student: dino_sparo.EncoderWithHead,
    teacher: dino_sparo.EncoderWithHead,
    loss: dino_sparo.DINOLoss,
    clip_grad: float,
    after_epoch: Callable[[], None],
) -> list[float]:
    """Train for two epochs of five steps, call `after_epoch` after each, and return the loss of every step."""
    lr, warmup_steps = S["lr"] * S["batch_size"] / 256, S["warmup_epochs"] * S["steps_per_epoch"]
    rate = optim.cosine_schedule(lr, S["min_lr"], STEPS, warmup_steps=warmup_steps)
    decay = optim.cosine_schedule(S["weight_decay"], S["weight_decay_end"], STEPS)
    dino = bare(
        DINOObjective,
        student=student,
        network=student,
        teacher=teacher,
        loss=loss,
        updater=Updater(
            optim.OPTIMIZERS["adamw"](optim.param_groups(student)),
            [{"lr": rate, "weight_decay": decay}, {"lr": rate}],
            list(student.parameters()),
            torch.device("cpu"),
        ),
        momentum=optim.cosine_schedule(S["momentum_teacher"], 1.0, STEPS),
        clip_grad=clip_grad,
        args=SimpleNamespace(freeze_last_layer=S["freeze_last_layer"], koleo_weight=0.0),
        frozen_steps=0,
        sampler=SimpleNamespace(steps_per_epoch=S["steps_per_epoch"]),
        distort=None,
    )
    losses: list[float] = []
    for epoch in range(S["epochs"]):
        for step in range(epoch * S["steps_per_epoch"], (epoch + 1) * S["steps_per_epoch"]):
            losses.append(float(train_step(dino, [step_batch(step)], epoch).loss))
        after_epoch()
    return losses


def check_parameters(network: nn.Module, names: np.ndarray, rows: np.ndarray) -> None:
    """Norm, sum and five values of every parameter."""
    parameters = dict(network.named_parameters())
    assert set(parameters) == set(names)
    for name, expected in zip(names, rows, strict=True):
        ours = recorded.summary(name, parameters[name].detach().numpy())
        assert ours[0] == pytest.approx(expected[0], rel=1e-4), name
        # A sum adds up the rounding of all its numbers.
        assert ours[1] == pytest.approx(expected[1], rel=1e-4, abs=1e-6 * parameters[name].numel() + 1e-3), name
        np.testing.assert_allclose(ours[2:], expected[2:], rtol=1e-3, atol=2e-5, err_msg=str(name))


@pytest.mark.parametrize(
    "run", ["clip0.3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("clip3.0", "clip3.0_free_norm"))]
)
def test_ten_steps_follow_the_reference(run: str) -> None:
    torch.manual_seed(0)
    numbers = recorded.load("steps")
    clip_grad, norm_last_layer = recorded.STEP_RUNS[run]
    student, teacher = build_network(norm_last_layer), build_network(True)
    for parameter in teacher.parameters():
        parameter.requires_grad_(False)
    loss = dino_sparo.DINOLoss(
        S["out_dim"],
        2 + S["num_local"],
        warmup_teacher_temp=S["warmup_teacher_temp"],
        teacher_temp=S["teacher_temp"],
        warmup_teacher_temp_epochs=S["warmup_teacher_temp_epochs"],
        num_epochs=S["epochs"],
    )
    start = student.state_dict()["head.last_layer.weight_v"].clone()
    last_layers: list[torch.Tensor] = []
    losses = run_ten_steps(
        student,
        teacher,
        loss,
        clip_grad,
        lambda: last_layers.append(student.state_dict()["head.last_layer.weight_v"].clone()),
    )

    np.testing.assert_allclose(losses, numbers[f"{run}/losses"], rtol=0, atol=1e-4)
    torch.testing.assert_close(loss.center, torch.from_numpy(numbers[f"{run}/center"]), rtol=1e-4, atol=1e-5)
    assert torch.equal(last_layers[0], start), "the last layer is frozen for the first epoch"
    for epoch, layer in enumerate(last_layers):
        expected = torch.from_numpy(numbers[f"{run}/epoch{epoch}/last_layer"])
        torch.testing.assert_close(layer[:3, :5], expected, rtol=1e-4, atol=1e-6)
    for which, network in (("student", student), ("teacher", teacher)):
        check_parameters(network, numbers[f"{run}/{which}/names"], numbers[f"{run}/{which}/rows"])

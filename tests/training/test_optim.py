"""Schedules, groups, clipping and optimisers against numbers recorded from the original code."""

import math

import numpy as np
import pytest
import torch
from host_traffic import HostTraffic
from reference import weights as recorded
from torch import nn

import dino_sparo
from dino_sparo.training import optim


def schedule(base: float, final: float, total_steps: int, warmup_steps: int | float, start: float) -> np.ndarray:
    return optim.cosine_schedule(base, final, total_steps, warmup_steps=warmup_steps, start=start)


def clip(parameters: list[nn.Parameter], limit: float) -> object:
    return optim.clip_gradients_(parameters, limit, optim.gradient_norms(parameters))


def build_network(norm_last_layer: bool) -> nn.Module:
    with recorded.SkipInitialisation():
        encoder = dino_sparo.create_encoder("vit_tiny", patch_size=16, readout="cls", img_size=32)
        head = dino_sparo.DINOHead(192, recorded.STEPS["out_dim"], norm_last_layer=norm_last_layer)
    return dino_sparo.EncoderWithHead(encoder, head)


@pytest.mark.parametrize("case", range(len(recorded.SCHEDULES)))
def test_schedules_equal_the_references_at_every_step(case: int) -> None:
    base, final, epochs, steps, warmup_epochs, start = recorded.SCHEDULES[case]
    ours = schedule(base, final, epochs * steps, warmup_epochs * steps, start)
    np.testing.assert_allclose(ours, recorded.load("schedules")[f"schedule{case}"], rtol=1e-12, atol=1e-15)


def test_a_schedule_that_is_all_warm_up_ends_at_its_base_value() -> None:
    np.testing.assert_allclose(schedule(0.5, 0.1, 4, 4, 0.2), [0.2, 0.3, 0.4, 0.5], rtol=1e-12)


def test_a_warm_up_starts_at_zero_unless_told_otherwise() -> None:
    assert optim.cosine_schedule(0.5, 0.1, 5, warmup_steps=3)[0] == 0
    assert optim.cosine_schedule(0.5, 0.1, 5)[0] == 0.5


def test_a_fraction_of_a_step_of_warm_up_is_rounded() -> None:
    np.testing.assert_array_equal(schedule(0.5, 0.1, 11, 0.29 * 100 / 7, 0.2), schedule(0.5, 0.1, 11, 4, 0.2))


@pytest.mark.parametrize(
    ("warmup_steps", "message"), [(-1, "warm-up of -1 steps"), (6, r"warm-up of 6 steps.*5 steps")]
)
def test_a_warm_up_that_does_not_fit_is_refused(warmup_steps: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(1.0, 0.0, 5, warmup_steps, 0.0)


@pytest.mark.parametrize("norm_last_layer", [True, False])
def test_weight_decay_falls_on_the_references_parameters(norm_last_layer: bool) -> None:
    model = build_network(norm_last_layer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = optim.param_groups(model)
    reference = recorded.load_keys()["param_groups"][f"norm{int(norm_last_layer)}"]
    expected = [{name.removeprefix("module.") for name in group} for group in reference]
    assert [{names[id(parameter)] for parameter in group["params"]} for group in groups] == expected
    assert groups[1]["weight_decay"] == 0


def test_sparos_biases_go_without_weight_decay_and_its_queries_do_not() -> None:
    sparo = dino_sparo.Sparo(13, 6, 11, 5)
    names = {id(parameter): name for name, parameter in sparo.named_parameters()}
    decayed, spared = [{names[id(parameter)] for parameter in group["params"]} for group in optim.param_groups(sparo)]
    assert decayed == {"queries", "key_proj.weight", "value_proj.weight"}
    assert spared == {"key_proj.bias", "value_proj.bias"}


@pytest.mark.parametrize("limit", [0.3, 3.0])
def test_each_parameters_own_norm_is_clipped_as_in_the_reference(limit: float) -> None:
    numbers = recorded.load("clipping")
    named = {}
    for name, gradient in recorded.clip_gradients().items():
        named[name] = nn.Parameter(torch.zeros(3, 5))
        named[name].grad = None if gradient is None else torch.from_numpy(gradient)
    clip(list(named.values()), limit)
    assert named["absent"].grad is None
    for name, parameter in named.items():
        if parameter.grad is not None:
            expected = torch.from_numpy(numbers[f"clip{limit}/{name}"])
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-6, atol=0)
    before = torch.from_numpy(recorded.clip_gradients()["below"])
    assert torch.equal(named["below"].grad, before)
    assert named["far_above"].grad.norm().item() == pytest.approx(limit, rel=1e-5)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "lars"])
def test_five_steps_of_each_optimiser_equal_the_references(kind: str) -> None:
    numbers = recorded.load("optimizers")
    model = nn.ParameterDict({name: nn.Parameter(torch.from_numpy(v)) for name, v in recorded.optim_start().items()})
    optimizer = optim.OPTIMIZERS[kind](optim.param_groups(model))
    for step in range(recorded.OPTIM_STEPS):
        lr, weight_decay = recorded.optim_settings(step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.param_groups[0]["weight_decay"] = weight_decay
        for name, gradient in recorded.optim_gradients(step).items():
            model[name].grad = torch.from_numpy(gradient)
        optimizer.step()
        for name, parameter in model.items():
            expected = torch.from_numpy(numbers[f"{kind}/step{step}/{name}"])
            torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "lars"])
def test_a_parameter_without_gradient_stays_where_it_is(kind: str) -> None:
    model = nn.ParameterDict({"moved": nn.Parameter(torch.ones(2, 3)), "kept": nn.Parameter(torch.ones(2, 3))})
    optimizer = optim.OPTIMIZERS[kind](optim.param_groups(model))
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    optimizer.param_groups[0]["weight_decay"] = 0.5
    model["moved"].grad = torch.ones(2, 3)
    optimizer.step()
    assert torch.equal(model["kept"].detach(), torch.ones(2, 3))
    assert not torch.equal(model["moved"].detach(), torch.ones(2, 3))


@pytest.mark.parametrize("start", [0.0, 1.0])
@pytest.mark.parametrize("gradient", [0.0, 1.0])
def test_lars_scales_by_the_norms_only_where_both_are_positive(start: float, gradient: float) -> None:
    parameter = nn.Parameter(torch.full((2, 2), start))
    parameter.grad = torch.full((2, 2), gradient)
    optim.LARS([parameter], lr=0.5, eta=0.25).step()
    ratio = 0.25 if start and gradient else 1.0  # both norms are 2 where they are positive
    assert torch.equal(parameter.detach(), torch.full((2, 2), start - 0.5 * ratio * gradient))


def test_lars_defaults_are_the_references() -> None:
    assert optim.LARS([nn.Parameter(torch.ones(2))]).defaults == {
        "lr": 0.0,
        "weight_decay": 0.0,
        "momentum": 0.9,
        "eta": 0.001,
    }


def test_the_norms_are_those_of_the_gradients_there_are() -> None:
    first, absent, last = (nn.Parameter(torch.zeros(2, 3)) for _ in range(3))
    first.grad, last.grad = torch.full((2, 3), 2.0), torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]])
    first.grad.requires_grad_()  # as with create_graph
    norms = optim.gradient_norms([first, absent, last])
    torch.testing.assert_close(norms, torch.tensor([math.sqrt(24), 5.0]))
    assert not norms.requires_grad


@pytest.mark.parametrize("kind", ["sgd", "lars"])
def test_nothing_moves_before_the_schedule_has_given_a_learning_rate(kind: str) -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    parameter.grad = torch.ones(2, 3)
    optim.OPTIMIZERS[kind]([{"params": [parameter]}]).step()
    assert torch.equal(parameter.detach(), torch.ones(2, 3))


def test_clipping_changes_gradients_that_have_a_graph_of_their_own() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0], requires_grad=True)  # as with create_graph
    clip([parameter], 1.0)
    torch.testing.assert_close(parameter.grad.detach(), torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("limit", [0.3, 3.0])
def test_clipping_with_known_norms_gives_the_same_bits_as_one_parameter_at_a_time(limit: float) -> None:
    torch.manual_seed(0)
    together, alone = ([nn.Parameter(torch.zeros(5, 7)) for _ in range(13)] for _ in range(2))
    for size, (one, other) in enumerate(zip(together, alone, strict=True)):
        one.grad = torch.randn(5, 7) * size / 10
        other.grad = one.grad.clone()
    optim.clip_gradients_(together, limit, optim.gradient_norms(together))
    for one, other in zip(together, alone, strict=True):
        other.grad *= (limit / (other.grad.norm() + 1e-6)).clamp(max=1.0)
        assert torch.equal(one.grad, other.grad)


def test_the_factors_of_clipping_are_computed_together() -> None:
    """The bug: three kernels for every parameter, on numbers alone, and all norms once more.

    A GPU makes one product per parameter of the last call, since the factors lie on the device.
    """
    launches = []
    for number in (3, 30):
        parameters = [nn.Parameter(torch.zeros(2, 3, device="meta")) for _ in range(number)]
        for parameter in parameters:
            parameter.grad = torch.zeros(2, 3, device="meta")
        norms = optim.gradient_norms(parameters)
        with HostTraffic() as traffic:
            optim.clip_gradients_(parameters, 3.0, norms)
        launches.append(traffic.launches)
    assert launches == [5, 5]  # add, divide (two), cut off, multiply


def test_a_zero_gradient_stays_zero_when_clipped_to_zero() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.zeros(2)
    clip([parameter], 0.0)  # the guard of 1e-6 keeps 0 / 0 away
    assert torch.equal(parameter.grad, torch.zeros(2))

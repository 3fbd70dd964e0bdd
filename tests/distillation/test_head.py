"""The head against numbers recorded from the original one."""

import copy
import inspect

import numpy as np
import pytest
import torch
from reference import weights as recorded
from torch import nn

from dino_sparo import DINOHead, EncoderWithHead, create_encoder

CASES = [pytest.param(*case, id=f"bn{case[0]:d}_norm{case[1]:d}_layers{case[2]}") for case in recorded.HEAD_CASES]


@pytest.fixture(scope="module")
def numbers() -> dict[str, np.ndarray]:
    return recorded.load("head")


def build(use_bn: bool, norm_last_layer: bool, layers: int) -> tuple[str, DINOHead]:
    """The case's key and the head with the generated weights."""
    sizes = recorded.HEAD_SIZES
    head = DINOHead(**sizes, use_bn=use_bn, norm_last_layer=norm_last_layer, num_layers=layers)
    shapes = {name: tuple(value.shape) for name, value in head.state_dict().items()}
    own = head.state_dict()
    own.update({name: torch.from_numpy(value) for name, value in recorded.state(shapes, "head/").items()})
    head.load_state_dict(own)
    return f"bn{int(use_bn)}_norm{int(norm_last_layer)}_layers{layers}", head


@pytest.mark.parametrize(("use_bn", "norm_last_layer", "layers"), CASES)
def test_keys_and_shapes_are_the_references(use_bn: bool, norm_last_layer: bool, layers: int) -> None:
    key, head = build(use_bn, norm_last_layer, layers)
    expected = {name: tuple(shape) for name, shape in recorded.load_keys()["heads"][key].items()}
    assert {name: tuple(value.shape) for name, value in head.state_dict().items()} == expected


@pytest.mark.parametrize(("use_bn", "norm_last_layer", "layers"), CASES)
def test_logits_gradients_and_statistics_equal_the_references(
    numbers, use_bn: bool, norm_last_layer: bool, layers: int
) -> None:
    key, head = build(use_bn, norm_last_layer, layers)
    inputs = torch.from_numpy(recorded.normal("head/inputs", (5, 13))).requires_grad_()
    logits = head(inputs)
    torch.testing.assert_close(logits.detach(), torch.from_numpy(numbers[f"{key}/train"]), rtol=1e-4, atol=1e-5)
    (logits * torch.from_numpy(recorded.normal("head/direction", (5, 11)))).sum().backward()
    torch.testing.assert_close(inputs.grad, torch.from_numpy(numbers[f"{key}/grad_inputs"]), rtol=1e-3, atol=1e-4)
    expected = {
        name.removeprefix(f"{key}/grad/"): float(norm) for name, norm in numbers.items() if f"{key}/grad/" in name
    }
    ours = {
        name: parameter.grad.norm().item() for name, parameter in head.named_parameters() if parameter.grad is not None
    }
    assert ours == pytest.approx(expected, rel=1e-3, abs=1e-4)
    for name, buffer in head.named_buffers():
        expected_buffer = torch.from_numpy(numbers[f"{key}/buffer/{name}"])
        torch.testing.assert_close(buffer, expected_buffer, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        evaluated = head.eval()(inputs)
    torch.testing.assert_close(evaluated, torch.from_numpy(numbers[f"{key}/eval"]), rtol=1e-4, atol=1e-5)


def test_initialisation_is_the_references(numbers) -> None:
    torch.manual_seed(1)
    head = DINOHead(67, 1009, hidden_dim=257, bottleneck_dim=101)
    for name, parameter in head.named_parameters():
        spread, largest = numbers[f"init/{name}"]
        assert parameter.std().item() == pytest.approx(spread, rel=0.03), name
        assert parameter.abs().max().item() == pytest.approx(largest, rel=0.3), name


def test_a_head_can_be_copied_after_a_backward_pass() -> None:
    """As the deprecated weight norm of torch could not."""
    head = DINOHead(7, 5, hidden_dim=11, bottleneck_dim=3)
    inputs = torch.randn(2, 7)
    head(inputs).sum().backward()
    twin = copy.deepcopy(head)
    assert torch.equal(twin(inputs), head(inputs))


@pytest.mark.parametrize("name", ["in_dim", "out_dim", "num_layers", "hidden_dim", "bottleneck_dim"])
def test_sizes_that_are_not_positive_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}=0 is not a valid size for the DINO head"):
        DINOHead(**{"in_dim": 7, "out_dim": 5, name: 0})


def test_every_size_may_be_one() -> None:
    head = DINOHead(1, 1, num_layers=1, hidden_dim=1, bottleneck_dim=1)
    assert isinstance(head.mlp, nn.Linear)
    assert head(torch.ones(2, 1)).shape == (2, 1)


def test_the_recommended_settings_are_the_defaults() -> None:
    defaults = {name: given.default for name, given in inspect.signature(DINOHead).parameters.items()}
    del defaults["in_dim"], defaults["out_dim"]
    assert defaults == {
        "use_bn": False,
        "norm_last_layer": True,
        "num_layers": 3,
        "hidden_dim": 2048,
        "bottleneck_dim": 256,
    }


@torch.no_grad()
def test_a_networks_encoder_is_its_own_parts_and_the_head_sees_its_encodings() -> None:
    torch.manual_seed(0)
    encoder = create_encoder("vit_micro", 8, "sparo", num_slots=3, slot_dim=5, key_dim=7, img_size=16)
    network = EncoderWithHead(encoder, DINOHead(15, 11, hidden_dim=13, bottleneck_dim=2)).eval()
    assert network.encoder.backbone is encoder.backbone
    assert network.encoder.readout is encoder.readout
    assert network.encoder.config == encoder.config
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(network(images), network.head(network.encoder(images)))

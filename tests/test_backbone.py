"""The backbone against numbers recorded from the original ViT."""

import math

import numpy as np
import pytest
import torch
from reference import weights as recorded
from torch import nn

import dino_sparo
from dino_sparo.backbone import Backbone, ViTSize

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def small_backbone() -> nn.Module:
    """A backbone of the recorded small ViT's sizes."""
    sizes = dict(recorded.SMALL_VIT)
    size = ViTSize(*(sizes.pop(name) for name in ("embed_dim", "depth", "num_heads")))
    return Backbone(size, **sizes)


def position_embedding(backbone: nn.Module, height: int, width: int) -> torch.Tensor:
    """(1, N, D): the position embedding that images of this size get."""
    return backbone.position_embedding(height, width)


def drop_path_rates(backbone: nn.Module) -> list[float]:
    """One rate per block."""
    rates = []
    for block in backbone.blocks:
        found = {module.drop_prob for module in block.modules() if hasattr(module, "drop_prob")}
        assert len(found) <= 1
        rates.append(float(found.pop()) if found else 0.0)
    return rates


def fill(module: nn.Module, salt: str) -> None:
    """The generated weights, strictly."""
    shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    module.load_state_dict({name: torch.from_numpy(value) for name, value in recorded.state(shapes, salt).items()})


@pytest.fixture(scope="module")
def numbers() -> dict[str, np.ndarray]:
    return recorded.load("vit")


@pytest.fixture(scope="module")
def vit() -> object:
    """Encoders with the class-token read-out and generated weights, built once."""
    built: dict[tuple[str, int], nn.Module] = {}

    def build(arch: str, patch_size: int) -> nn.Module:
        if (arch, patch_size) not in built:
            with recorded.SkipInitialisation():
                encoder = dino_sparo.create_encoder(arch, patch_size=patch_size, readout="cls").eval()
            fill(encoder.backbone, f"{arch}/{patch_size}/")
            built[arch, patch_size] = encoder
        return built[arch, patch_size]

    return build


def case(arch: str, patch_size: int, height: int, width: int) -> tuple[str, torch.Tensor]:
    images = torch.from_numpy(recorded.images(arch, 2, height, width))
    return f"{arch}/{patch_size}/{height}x{width}", images


@torch.no_grad()
@pytest.mark.parametrize(("arch", "patch_size", "height", "width"), recorded.VIT_CASES)
def test_class_token_equals_the_references(vit, numbers, arch: str, patch_size: int, height: int, width: int) -> None:
    key, images = case(arch, patch_size, height, width)
    expected = torch.from_numpy(numbers[f"{key}/forward"])
    torch.testing.assert_close(vit(arch, patch_size)(images), expected, **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize(
    ("arch", "patch_size", "size"), [("vit_tiny", 16, 224), ("vit_tiny", 8, 96), ("vit_small", 16, 96)]
)
def test_the_last_four_blocks_class_tokens_equal_the_references(
    vit, numbers, arch: str, patch_size: int, size: int
) -> None:
    key, images = case(arch, patch_size, size, size)
    ours = vit(arch, patch_size).get_intermediate_layers(images, 4)
    torch.testing.assert_close(torch.stack(list(ours)), torch.from_numpy(numbers[f"{key}/intermediate"]), **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize(
    ("arch", "patch_size", "size"), [("vit_tiny", 16, 224), ("vit_tiny", 8, 96), ("vit_small", 16, 96)]
)
def test_the_last_self_attention_equals_the_references(vit, numbers, arch: str, patch_size: int, size: int) -> None:
    key, images = case(arch, patch_size, size, size)
    attention = vit(arch, patch_size).backbone.last_self_attention(images)
    number = (size // patch_size) ** 2 + 1
    assert attention.shape == (2, {"vit_tiny": 3, "vit_small": 6}[arch], number, number)
    torch.testing.assert_close(attention.sum(dim=-1), torch.ones(attention.shape[:-1]))
    expected = torch.from_numpy(numbers[f"{key}/attention"])
    torch.testing.assert_close(attention[:, :, 0], expected, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_asking_for_the_attention_leaves_the_encoding_as_it_was(vit) -> None:
    encoder = vit("vit_tiny", 16)
    _, images = case("vit_tiny", 16, 96, 96)
    before = encoder(images)
    encoder.backbone.last_self_attention(images)
    assert torch.equal(encoder(images), before)


@pytest.fixture(scope="module")
def small() -> tuple[nn.Module, dict[str, np.ndarray]]:
    backbone = small_backbone()
    fill(backbone, "small_vit/")
    return backbone, recorded.load("small_vit")


@pytest.mark.parametrize(("height", "width"), recorded.SMALL_SIZES)
def test_position_embedding_is_interpolated_as_the_reference_does(small, height: int, width: int) -> None:
    backbone, numbers = small
    ours = position_embedding(backbone, height, width).detach()[0]
    torch.testing.assert_close(ours, torch.from_numpy(numbers[f"{height}x{width}/pos"]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("height", "width"), recorded.SMALL_SIZES)
def test_tokens_and_gradients_equal_the_references(small, height: int, width: int) -> None:
    backbone, numbers = small
    key = f"{height}x{width}"
    backbone.zero_grad()
    tokens = backbone(torch.from_numpy(recorded.images("small_vit", 2, height, width)))
    torch.testing.assert_close(tokens[1].detach(), torch.from_numpy(numbers[f"{key}/tokens"]), **TOLERANCE)
    (tokens[:, 0] * torch.from_numpy(recorded.normal("small_vit/direction", (2, 48)))).sum().backward()
    grad = backbone.pos_embed.grad[0, :, 0]
    torch.testing.assert_close(grad, torch.from_numpy(numbers[f"{key}/grad_pos_embed"]), **TOLERANCE)
    named = dict(backbone.named_parameters())
    assert set(named) == set(numbers["names"])
    for name, norm in zip(numbers["names"], numbers[f"{key}/grad_norms"], strict=True):
        assert named[name].grad.norm().item() == pytest.approx(float(norm), rel=1e-3, abs=1e-4), name


@torch.no_grad()
def test_an_image_of_the_training_size_is_not_interpolated(small) -> None:
    backbone, _ = small
    assert torch.equal(position_embedding(backbone, 32, 32), backbone.pos_embed)


@torch.no_grad()
def test_tokens_are_the_class_token_then_the_patches_row_by_row(small) -> None:
    backbone, _ = small
    assert backbone.num_prefix_tokens == 1
    images = torch.from_numpy(recorded.images("small_vit", 1, 20, 36)).expand(2, -1, -1, -1).clone()
    images[1, :, 8:12, 24:28] += 5  # row 2, column 6 of a 5 x 9 grid
    first_block: list[torch.Tensor] = []
    handle = backbone.blocks[0].register_forward_pre_hook(lambda _module, inputs: first_block.append(inputs[0]))
    assert backbone(images).shape == (2, 1 + 5 * 9, 48)
    handle.remove()
    changed = (first_block[0][0] - first_block[0][1]).abs().amax(dim=-1) > 0
    assert changed.nonzero().flatten().tolist() == [1 + 2 * 9 + 6]


@pytest.mark.parametrize(
    ("arch", "sizes"), [("vit_tiny", (192, 12, 3)), ("vit_small", (384, 12, 6)), ("vit_base", (768, 12, 12))]
)
def test_architectures_have_the_published_sizes(arch: str, sizes: tuple[int, int, int]) -> None:
    with recorded.SkipInitialisation():
        backbone = dino_sparo.create_encoder(arch, patch_size=16, readout="cls").backbone
    assert (backbone.embed_dim, backbone.depth, backbone.num_heads) == sizes
    assert backbone.patch_size == 16
    assert len(backbone.blocks) == 12
    assert backbone.blocks[0].mlp.fc1.out_features == 4 * sizes[0]


def test_layer_norms_use_the_references_epsilon_and_qkv_has_a_bias() -> None:
    backbone = small_backbone()
    norms = [module for module in backbone.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == 2 * 3 + 1
    assert {norm.eps for norm in norms} == {1e-6}
    assert backbone.blocks[0].attn.qkv.bias is not None


def test_initialisation_is_the_references() -> None:
    torch.manual_seed(0)
    backbone = dino_sparo.create_encoder("vit_tiny", patch_size=16, readout="cls").backbone
    for name, parameter in backbone.named_parameters():
        spread = parameter.std().item()
        if name == "patch_embed.proj.weight" or name == "patch_embed.proj.bias":
            # nn.Conv2d's own: uniform within one over the root of its inputs.
            bound = 1 / math.sqrt(3 * 16 * 16)
            assert parameter.abs().max().item() <= bound, name
            assert spread == pytest.approx(bound / math.sqrt(3), rel=0.1), name
        elif name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert spread == pytest.approx(0.02, rel=0.2 if name == "cls_token" else 0.03), name


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3])
def test_stochastic_depth_grows_linearly_over_the_blocks(rate: float) -> None:
    backbone = dino_sparo.create_encoder("vit_tiny", patch_size=16, readout="cls", drop_path_rate=rate).backbone
    assert drop_path_rates(backbone) == pytest.approx(np.linspace(0, rate, 12).tolist(), abs=1e-6)


@torch.no_grad()
def test_stochastic_depth_only_acts_in_training() -> None:
    torch.manual_seed(0)
    encoder = dino_sparo.create_encoder("vit_micro", patch_size=8, readout="cls", img_size=32, drop_path_rate=0.5)
    images = torch.randn(4, 3, 32, 32)
    assert torch.equal(encoder.eval()(images), encoder(images))
    assert not torch.equal(encoder.train()(images), encoder(images))


@torch.no_grad()
@pytest.mark.parametrize("channels", [1, 5])
def test_any_number_of_channels(channels: int) -> None:
    encoder = dino_sparo.create_encoder("vit_micro", patch_size=8, readout="cls", img_size=32, in_chans=channels).eval()
    assert encoder.backbone.patch_embed.proj.weight.shape == (128, channels, 8, 8)
    assert encoder(torch.randn(2, channels, 32, 24)).shape == (2, 128)


@torch.no_grad()
@pytest.mark.parametrize("patch_size", [4, 14, 32])
def test_other_patch_sizes(patch_size: int) -> None:
    encoder = dino_sparo.create_encoder(
        "vit_micro", patch_size=patch_size, readout="cls", img_size=4 * patch_size
    ).eval()
    assert encoder.backbone(torch.randn(2, 3, 3 * patch_size, 5 * patch_size)).shape == (2, 16, 128)

"""The backbone against numbers recorded from the original ViT."""

import math
from collections.abc import Callable

import jaxtyping
import numpy as np
import pytest
import torch
from reference import weights as recorded
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import dino_sparo
from dino_sparo.models.backbone import Backbone, ViTSize
from dino_sparo.runtime.precision import use_fused_attention

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def small_backbone() -> nn.Module:
    """A backbone of the recorded small ViT's sizes."""
    sizes = dict(recorded.SMALL_VIT)
    size = ViTSize(*(sizes.pop(name) for name in ("embed_dim", "depth", "num_heads")))
    return Backbone(size, **sizes)


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


def slow_if_small(cases: list[tuple[object, ...]]) -> list[object]:
    """The cases; those of ViT-S, which differs from ViT-Ti in its width alone, are slow."""
    return [pytest.param(*case, marks=pytest.mark.slow) if case[0] == "vit_small" else case for case in cases]


squares = pytest.mark.parametrize(
    ("arch", "patch_size", "size"), slow_if_small([("vit_tiny", 16, 224), ("vit_tiny", 8, 96), ("vit_small", 16, 96)])
)


@torch.no_grad()
@pytest.mark.parametrize(("arch", "patch_size", "height", "width"), slow_if_small(recorded.VIT_CASES))
def test_class_token_equals_the_references(vit, numbers, arch: str, patch_size: int, height: int, width: int) -> None:
    key, images = case(arch, patch_size, height, width)
    expected = torch.from_numpy(numbers[f"{key}/forward"])
    torch.testing.assert_close(vit(arch, patch_size)(images), expected, **TOLERANCE)


@torch.no_grad()
@squares
def test_the_last_four_blocks_class_tokens_equal_the_references(
    vit, numbers, arch: str, patch_size: int, size: int
) -> None:
    key, images = case(arch, patch_size, size, size)
    ours = vit(arch, patch_size).probe_layers(images, 4)[0]
    torch.testing.assert_close(torch.stack(list(ours)), torch.from_numpy(numbers[f"{key}/intermediate"]), **TOLERANCE)


@torch.no_grad()
@squares
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
def test_positions_tokens_and_gradients_equal_the_references(small, height: int, width: int) -> None:
    backbone, numbers = small
    key = f"{height}x{width}"
    backbone.zero_grad()
    positions = backbone.position_embedding(height, width).detach()[0]
    torch.testing.assert_close(positions, torch.from_numpy(numbers[f"{key}/pos"]), rtol=1e-5, atol=1e-5)
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
    assert torch.equal(backbone.position_embedding(32, 32), backbone.pos_embed)


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
    ("arch", "sizes"),
    [
        ("vit_micro", (128, 4, 4)),
        ("vit_tiny", (192, 12, 3)),
        ("vit_small", (384, 12, 6)),
        ("vit_base", (768, 12, 12)),
    ],
)
def test_architectures_have_the_published_sizes(arch: str, sizes: tuple[int, int, int]) -> None:
    with torch.device("meta"):
        backbone = dino_sparo.create_encoder(arch, patch_size=16, readout="cls").backbone
    assert (backbone.embed_dim, backbone.depth, backbone.num_heads) == sizes
    assert backbone.patch_size == 16
    assert len(backbone.blocks) == backbone.depth
    assert backbone.blocks[0].mlp.fc1.out_features == 4 * sizes[0]


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


# What it takes, and what it refuses.


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"patch_size": 0}, "patch_size=0 px; give a positive number"),
        ({"img_size": 31}, r"img_size=31 px is not a multiple of patch_size=8 px; the nearest multiple is 24$"),
        ({"img_size": 7}, r"img_size=7 px is not a multiple of patch_size=8 px; the nearest multiple is 8$"),
        ({"img_size": 0}, "img_size=0 px is not a multiple"),
        ({"in_chans": 0}, "in_chans=0; an image has at least one channel"),
        ({"drop_path_rate": 1.0}, "drop_path_rate=1.0 is not a rate"),
        ({"drop_path_rate": -0.1}, "drop_path_rate=-0.1 is not a rate"),
    ],
)
def test_sizes_that_cannot_be_built_are_named_with_what_can(changed: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Backbone(ViTSize(12, 2, 3), **{"patch_size": 8, "img_size": 32, **changed})


@torch.no_grad()
def test_an_image_may_be_one_patch_of_one_pixel() -> None:
    backbone = Backbone(ViTSize(12, 2, 3), patch_size=1, img_size=1, in_chans=1)
    assert backbone(torch.randn(2, 1, 1, 1)).shape == (2, 2, 12)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 1, 32, 32), "images have 1 channels; the backbone was built with in_chans=3"),
        ((2, 3, 7, 32), "images of 7x32 px are smaller than one patch of 8 px"),
        ((2, 3, 32, 7), "images of 32x7 px are smaller than one patch of 8 px"),
    ],
)
def test_images_that_do_not_fit_are_refused_with_their_size(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Backbone(ViTSize(12, 2, 3), patch_size=8, img_size=32)(torch.randn(shape))


# CLIP's vision transformer.


def clip_backbone() -> Backbone:
    """A small one with weights that are not their initial values."""
    torch.manual_seed(3)
    backbone = Backbone(ViTSize(48, 3, 6), patch_size=8, img_size=32, in_chans=2, pre_norm=True).eval()
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return backbone


@torch.no_grad()
def test_with_pre_norm_it_is_timms_vit_for_clip() -> None:
    backbone = clip_backbone()
    sizes = {"img_size": 32, "patch_size": 8, "in_chans": 2, "embed_dim": 48, "depth": 3, "num_heads": 6}
    timms = VisionTransformer(**sizes, num_classes=0, pre_norm=True, norm_layer=nn.LayerNorm).eval()
    timms.load_state_dict(backbone.state_dict(), strict=True)
    images = torch.randn(5, 2, 32, 32)
    torch.testing.assert_close(backbone(images), timms.forward_features(images), rtol=0, atol=1e-5)
    # An eps of 1e-6 would be seen where tokens are nearly constant.
    faint = VisionTransformer(**sizes, num_classes=0, pre_norm=True).eval()
    faint.load_state_dict(backbone.state_dict())
    with torch.no_grad():
        for model in (backbone, timms, faint):
            for name in ("cls_token", "pos_embed"):
                getattr(model, name).mul_(1e-3)
            model.patch_embed.proj.weight.mul_(1e-3)
    torch.testing.assert_close(backbone(images), timms.forward_features(images), rtol=0, atol=1e-5)
    assert (backbone(images) - faint.forward_features(images)).abs().max() > 1e-2


def test_pre_norm_adds_one_layer_norm_changes_epsilon_and_takes_the_patch_bias() -> None:
    ours, clips = (
        dino_sparo.create_encoder("vit_micro", 8, readout, img_size=32, pre_norm=pre_norm, num_slots=5)
        for readout, pre_norm in (("sparo", False), ("sparo", True))
    )
    names, clip_names = set(ours.state_dict()), set(clips.state_dict())
    assert clip_names - names == {"backbone.norm_pre.weight", "backbone.norm_pre.bias"}
    assert names - clip_names == {"backbone.patch_embed.proj.bias"}
    norms = [[each.eps for each in encoder.modules() if isinstance(each, nn.LayerNorm)] for encoder in (ours, clips)]
    assert norms == [[1e-6] * (2 * 3 + 1), [1e-5] * (2 * 3 + 2)]  # the reference's epsilon, and OpenAI's
    assert (ours.config.pre_norm, clips.config.pre_norm) == (False, True)
    assert dino_sparo.create_encoder(**vars(clips.config)).state_dict().keys() == clip_names


# The class token alone: equal to that of the whole forward pass.

SIZES = ((8, 12), (12, 12), (4, 8))


def random_backbone(**changed: object) -> Backbone:
    """A double precision backbone in training mode whose every weight matters, with strong stochastic depth."""
    torch.manual_seed(0)
    settings = {"patch_size": 4, "img_size": 12, "drop_path_rate": 0.5, **changed}
    backbone = Backbone(ViTSize(36, 5, 3), **settings).double().train()
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return backbone


def crops_of_several_sizes() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(7 - i, 3, *size, dtype=torch.float64) for i, size in enumerate(SIZES)]


def gradients(backbone: nn.Module, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of every parameter, under a loss that looks at every number."""
    backbone.zero_grad()
    torch.stack(
        [(out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)).sin().sum() for out in outputs]
    ).sum().backward()
    return [parameter.grad.clone() for parameter in backbone.parameters()]


def assert_equal_in_double(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain attention"])
def test_class_tokens_are_those_of_the_whole_forward_pass_with_equal_gradients(
    fused: bool, checkpointing: bool
) -> None:
    backbone, crops = random_backbone(), crops_of_several_sizes()
    torch.manual_seed(5)
    plain = [backbone(images)[:, 0] for images in crops]
    plain_gradients = gradients(backbone, plain)
    state_after = torch.get_rng_state()
    use_fused_attention(backbone, fused)
    backbone.set_grad_checkpointing(checkpointing)
    torch.manual_seed(5)
    ours = [backbone.class_tokens(images) for images in crops]
    assert_equal_in_double(ours, plain)
    assert_equal_in_double(gradients(backbone, ours), plain_gradients)
    assert torch.equal(torch.get_rng_state(), state_after)  # as many random numbers were drawn


def test_only_the_class_token_passes_the_last_blocks_mlp_where_it_is_the_encoding() -> None:
    rows: dict[str, list[int]] = {"cls": [], "gap": []}
    for readout, counted in rows.items():
        encoder = dino_sparo.create_encoder("vit_micro", 8, readout, img_size=32)
        for block in (encoder.backbone.blocks[2], encoder.backbone.blocks[3]):
            block.mlp.fc1.register_forward_pre_hook(
                lambda _module, inputs, counted=counted: counted.append(inputs[0].numel() // 128)
            )
        encoder([torch.randn(5, 3, 16, 24), torch.randn(5, 3, 16, 24)])
    assert rows == {"cls": [10 * 7, 10], "gap": [10 * 7, 10 * 7]}


def test_resampling_matrices_are_kept_and_are_no_weights() -> None:
    backbone = random_backbone()
    names, images = list(backbone.state_dict()), torch.randn(2, 3, 8, 16, dtype=torch.float64)
    with torch.inference_mode():
        backbone(images)
    matrices = dict(backbone._resampling)
    assert {(length, tuple(matrix.shape)) for (length, _), matrix in matrices.items()} == {(2, (2, 3)), (4, (4, 3))}
    backbone(images).sum().backward()  # what inference left behind can be trained through
    assert all(backbone._resampling[key] is matrix for key, matrix in matrices.items())
    assert list(backbone.state_dict()) == names
    # Another grid, as when positions are loaded from elsewhere.
    backbone.pos_embed = nn.Parameter(torch.randn(1, 1 + 25, 36, dtype=torch.float64))
    assert backbone(images).shape == (2, 9, 36)


@torch.no_grad()
def test_autocast_leaves_positions_as_they_are() -> None:
    backbone = random_backbone().float()
    exact = backbone.position_embedding(8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(backbone.position_embedding(8, 16), exact)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_training_on_a_gpu_needs_no_operation_without_a_deterministic_form() -> None:
    backbone = random_backbone().cuda()
    images = torch.randn(5, 3, 8, 16, dtype=torch.float64, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        backbone(images).square().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert backbone.pos_embed.grad.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("run", [Backbone.class_tokens, Backbone.forward], ids=["class token", "all tokens"])
def test_all_of_it_compiles_into_one_graph(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[Backbone, torch.Tensor], torch.Tensor]
) -> None:
    backbone, crops = random_backbone(depth=2), crops_of_several_sizes()
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the checks of shapes are no part of a graph

    def run_all(crops: list[torch.Tensor]) -> list[torch.Tensor]:
        return [run(backbone, images) for images in crops]

    torch.manual_seed(2)
    plain = run_all(crops)
    plain_gradients = gradients(backbone, plain)
    # The matrices are made in the graph when there are none, and are its constants when there are.
    for _ in range(2):
        torch._dynamo.reset()
        compiled = torch.compile(run_all, backend="eager", fullgraph=True, dynamic=False)
        torch.manual_seed(2)
        ours = compiled(crops)
        assert_equal_in_double(ours, plain)
        assert_equal_in_double(gradients(backbone, ours), plain_gradients)
        backbone._resampling.clear()


# Memory.


def outputs_and_gradients(backbone: nn.Module, images: torch.Tensor, seed: int = 7) -> list[torch.Tensor]:
    """Tokens, and the gradient of every parameter under a loss that looks at all of them."""
    torch.manual_seed(seed)
    tokens = backbone(images)
    return [tokens.detach(), *gradients(backbone, [tokens])]


def test_with_gradient_checkpointing_outputs_and_gradients_stay_the_same_bits() -> None:
    backbone, images = random_backbone(), torch.randn(7, 3, 8, 12, dtype=torch.float64)
    plain = outputs_and_gradients(backbone, images)
    assert not torch.equal(plain[0], outputs_and_gradients(backbone, images, seed=8)[0])  # stochastic depth acts
    calls: list[int] = []
    handle = backbone.blocks[2].register_forward_pre_hook(lambda *_: calls.append(1))
    backbone.set_grad_checkpointing()
    checkpointed = outputs_and_gradients(backbone, images)
    assert len(calls) == 2  # once more in the backward pass
    assert all(torch.equal(one, other) for one, other in zip(plain, checkpointed, strict=True))
    with torch.no_grad():
        backbone(images)
    assert len(calls) == 3
    backbone.set_grad_checkpointing(False)
    outputs_and_gradients(backbone, images)
    assert len(calls) == 4
    handle.remove()

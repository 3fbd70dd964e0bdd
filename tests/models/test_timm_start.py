"""Weights that a backbone of timm starts from, and options that do not fit it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import timm_models  # registers small models  # noqa: F401
import torch
from torch import Tensor

from dino_sparo import create_encoder, load_encoder
from dino_sparo.dino import options as dino_options
from dino_sparo.dino.train import DINOObjective
from dino_sparo.simdino import options as simdino_options
from dino_sparo.simdino.train import SimDINOObjective
from dino_sparo.weights.file import CheckpointError
from dino_sparo.weights.initialize import initialize_encoder

GREY = "; patch projection adapted from 3 to 1 channels"
OURS = r"\['vit_base', 'vit_huge', 'vit_large', 'vit_micro', 'vit_small', 'vit_tiny'\]"
NAMES = ("test_vit", "test_vit2", "test_vit3", "test_convnext", "test_resnet")


def saved(name: str, folder: Path, **settings: Any) -> tuple[Any, Path]:
    """A model of timm with a classifier, and the file of its weights."""
    model, path = timm.create_model(name, **settings).eval(), folder / f"{name}.pth"
    torch.save(model.state_dict(), path)
    return model, path


@pytest.mark.parametrize("name", NAMES)
def test_a_state_dict_of_timm_gives_the_tokens_of_its_model(name: str, tmp_path: Path) -> None:
    model, path = saved(name, tmp_path)
    encoder = create_encoder(f"timm/{name}", readout="gap", img_size=160).eval()
    report = initialize_encoder(encoder, path)
    images = torch.randn(2, 3, 160, 160)
    with torch.no_grad():
        features = model.forward_features(images)
        tokens = features.flatten(2).transpose(1, 2) if features.ndim == 4 else features
        assert torch.equal(encoder.backbone(images), tokens)
    assert all(not name.startswith("backbone.") for name in report.new)


def dinov2s_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model of timm's with registers, as DINOv2 names and lays out its weights."""
    positions = weights["cls_token"].flip(-1)  # as small as the class token, so that nothing is rounded
    weights |= {"register_tokens": weights.pop("reg_token"), "cls_token": weights["cls_token"] - positions}
    return weights | {"pos_embed": torch.cat((positions, weights["pos_embed"]), 1), "mask_token": torch.ones(1, 24)}


def dinov3s_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    words = {"reg_token": "storage_tokens", "gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma"}
    for old, new in words.items():
        weights = {name.replace(old, new): value for name, value in weights.items()}
    constants = {"rope_embed.periods": torch.ones(3), "blocks.0.attn.qkv.bias_mask": torch.ones(72)}
    return weights | constants | {"blocks.0.attn.qkv.bias": torch.zeros(72)}


@pytest.mark.parametrize(
    ("name", "renamed"), [("tiny_dinov2_registers", dinov2s_names), ("tiny_dinov3", dinov3s_names)]
)
def test_the_files_of_dinov2_and_dinov3_give_the_tokens_of_their_model(
    name: str, renamed: Callable[..., dict[str, Tensor]], tmp_path: Path
) -> None:
    model = timm.create_model(name, num_classes=0, img_size=32).eval()
    path = tmp_path / "teacher_checkpoint.pth"
    weights = renamed(dict(model.state_dict()))
    chunked = {f"backbone.{name.replace('blocks.2', 'blocks.1.2')}": value for name, value in weights.items()}
    torch.save({"teacher": {**chunked, "dino_head.mlp.0.weight": torch.ones(2)}}, path)
    images = torch.randn(2, 3, 32, 32)
    encoder = create_encoder(f"timm/{name}", readout="cls", img_size=32)
    initialize_encoder(encoder, path)
    with torch.no_grad():
        assert torch.allclose(encoder.eval().backbone(images), model.forward_features(images), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "part"),
    [("tiny_dinov2", "reg_token"), ("tiny_registers", "blocks.0.ls1.gamma"), ("tiny_dinov3", "blocks.0.attn.qkv.bias")],
)
def test_a_part_that_a_model_of_timm_lacks_is_never_left_out(name: str, part: str, tmp_path: Path) -> None:
    weights, path = timm.create_model(name, num_classes=0, img_size=32).state_dict(), tmp_path / "vit.pth"
    if part.endswith("bias"):
        weights |= {"storage_tokens": weights.pop("reg_token")}  # by which timm knows DINOv3's weights
    torch.save({**weights, part: torch.ones(24)}, path)
    message = rf"vit\.pth does not hold the weights of timm/{name}; 1 unexpected: .*{part}"
    with pytest.raises(CheckpointError, match=message):
        initialize_encoder(create_encoder(f"timm/{name}", readout="cls", img_size=32), path)


def test_positions_and_channels_of_a_state_dict_are_fitted_as_timm_fits_them(tmp_path: Path) -> None:
    model, path = saved("test_vit", tmp_path)
    encoder = create_encoder("timm/test_vit", readout="cls", img_size=64, in_chans=1)
    initialize_encoder(encoder, path)
    weights: dict[str, Tensor] = encoder.backbone.state_dict()
    other: Any = timm.create_model("test_vit", img_size=64)
    expected = timm.models.vision_transformer.checkpoint_filter_fn(dict(model.state_dict()), other)
    assert torch.equal(weights["model.pos_embed"], expected["pos_embed"])
    summed = model.patch_embed.proj.weight.sum(dim=1, keepdim=True)
    torch.testing.assert_close(weights["model.patch_embed.proj.weight"], summed)


def test_a_read_out_that_replaces_a_block_drops_it(tmp_path: Path) -> None:
    report = initialize_encoder(create_encoder("timm/test_vit"), saved("test_vit", tmp_path)[1])
    assert "backbone.model.blocks.5.norm1.weight" in report.dropped
    assert all(name.startswith("readout.") for name in report.new)


def test_foreign_weights_are_loaded_by_the_name_of_their_model(tmp_path: Path) -> None:
    model, path = saved("test_vit", tmp_path)
    encoder, images = load_encoder(path, arch="timm/test_vit"), torch.randn(2, 3, 160, 160)
    with torch.no_grad():
        assert torch.equal(encoder(images), model.forward_features(images)[:, 0])


def test_weights_of_another_width_are_refused_with_both_shapes(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"^\S*\.pth has width 96, timm/test_vit2 has 64; choose other weights, or"
    ):
        initialize_encoder(create_encoder("timm/test_vit2"), saved("test_vit3", tmp_path)[1])


def test_weights_of_another_model_are_refused_with_two_names_at_most(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not hold the weights of timm/test_resnet; ") as refusal:
        initialize_encoder(create_encoder("timm/test_resnet"), saved("test_vit", tmp_path)[1])
    assert str(refusal.value).count("backbone.model.") <= 2


def test_weights_of_other_channels_are_refused_as_those_of_our_own_transformer(tmp_path: Path) -> None:
    own = create_encoder("vit_micro", 8, "cls", img_size=32, in_chans=5)
    torch.save(own.backbone.state_dict(), tmp_path / "own.pth")
    _, path = saved("test_vit", tmp_path, in_chans=5)
    for file, arch in ((tmp_path / "own.pth", "vit_micro"), (path, "timm/test_vit")):
        encoder = create_encoder(arch, 8 if file != path else None, "cls", img_size=32, in_chans=1)
        with pytest.raises(
            CheckpointError, match=rf"{file.name} has 5 channels, the encoder 1; .* other weights, or --in_chans 5$"
        ):
            initialize_encoder(encoder, file)


def test_the_report_says_how_the_patch_projection_was_adapted(tmp_path: Path) -> None:
    _, path = saved("test_vit", tmp_path)
    for settings, words in (
        ({}, ""),
        ({"in_chans": 5}, "; patch projection adapted from 3 to 5 channels"),
        ({"patch_size": 8}, "; patch projection resampled from 16 to 8 px"),
        ({"in_chans": 1, "patch_size": 8}, f"{GREY} and resampled from 16 to 8 px"),
    ):
        encoder = create_encoder("timm/test_vit", readout="cls", img_size=32, **settings)
        assert str(initialize_encoder(encoder, path)).endswith(f"new nothing{words}")
    own = create_encoder("vit_micro", 8, "cls", img_size=32)
    torch.save(own.backbone.state_dict(), tmp_path / "own.pth")
    grey = create_encoder("vit_micro", 8, "cls", img_size=32, in_chans=1)
    assert str(initialize_encoder(grey, tmp_path / "own.pth")).endswith(GREY)


@pytest.mark.parametrize(
    ("arch", "settings", "message"),
    [
        (
            "timm/dinov3_small",
            {},
            r"unknown arch 'timm/dinov3_small'; the nearest are .*timm/vit_small_patch16_dinov3,",
        ),
        ("resnet18", {}, rf"unknown arch 'resnet18'; choose one of {OURS}, or timm/NAME; did you mean timm/resnet18\?"),
        ("timm/crossvit_9_240", {}, "gives list for an image of 240x240 px, neither tokens nor a map"),
        ("timm/vgg11", {"drop_path_rate": 0.1}, "--drop_path_rate 0.1: timm/vgg11 has no stochastic depth"),
    ],
)
def test_a_model_or_size_that_does_not_fit_is_refused(arch: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_encoder(arch, **settings)


def test_a_default_drop_path_rate_is_0_without_stochastic_depth_and_another_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    words = ["--arch", "timm/vgg11", "--readout", "gap"]
    args = dino_options.get_args_parser().parse_args(words)
    DINOObjective.check_options(args)
    assert args.drop_path_rate == 0
    assert "--drop_path_rate 0 instead of 0.1: timm/vgg11 has no stochastic depth" in caplog.text
    with pytest.raises(ValueError, match=r"--drop_path_rate 0\.2: timm/vgg11 has no stochastic depth; give 0"):
        DINOObjective.check_options(dino_options.get_args_parser().parse_args([*words, "--drop_path_rate", "0.2"]))


def test_a_model_of_one_image_size_is_refused_before_anything_is_opened_if_local_crops_have_another() -> None:
    words = ["--arch", "timm/mixer_s32_224", "--readout", "gap"]
    with pytest.raises(ValueError, match=r"timm/mixer_s32_224 reads only images of 224x224 px, not of 96x96 px; give"):
        DINOObjective.check_options(dino_options.get_args_parser().parse_args(words))
    DINOObjective.check_options(dino_options.get_args_parser().parse_args([*words, "--local_crops_number", "0"]))


@pytest.mark.parametrize("method", [dino_options, simdino_options], ids=["dino", "simdino"])
def test_codes_are_refused_without_a_clip(method: Any) -> None:
    args = method.get_args_parser().parse_args(["--arch", "timm/test_vit", "--readout", "fdt"])
    kind = DINOObjective if method is dino_options else SimDINOObjective
    with pytest.raises(ValueError, match=r"readout 'fdt' needs codes, which only CLIP has \(train-clip\); choose ano"):
        kind.check_options(args)

"""Starting from other weights: what is taken, dropped and new, and what is refused, by name."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from small_models import SPARO, build, save_encoder

from dino_sparo import CheckpointError, Encoder, create_encoder
from dino_sparo.weights.encoder import load_encoder
from dino_sparo.weights.initialize import initialize_encoder


def raw(folder: Path, encoder: Encoder, **changed: torch.Tensor | None) -> Path:
    """A state dict as DINO and timm save it, without the weights that are changed to None."""
    weights = {**encoder.backbone.state_dict(), **changed}
    torch.save({name: value for name, value in weights.items() if value is not None}, folder / "vit.pth")
    return folder / "vit.pth"


def assert_from(encoder: Encoder, source: Encoder, names: tuple[str, ...]) -> None:
    own, other = encoder.state_dict(), source.state_dict()
    for name in names:
        assert torch.equal(own[name], other[name]), name


# What is taken.


def test_a_vanilla_vit_starts_sparo_without_its_last_block_and_its_head(tmp_path: Path) -> None:
    vanilla, encoder = build(readout="cls"), build(1, **SPARO)
    parameters = list(encoder.parameters())
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    report = initialize_encoder(encoder, raw(tmp_path, vanilla, **{"head.weight": torch.ones(5, 128)}))
    assert set(report.taken) == {name for name in before if name.startswith("backbone.")}
    assert_from(encoder, vanilla, report.taken)
    block = [f"backbone.{name}" for name in vanilla.backbone.state_dict() if name.startswith("blocks.3.")]
    assert set(report.dropped) == {*block, "head.weight"}
    assert set(report.new) == {name for name in before if name.startswith("readout.")}
    assert all(torch.equal(before[name], encoder.state_dict()[name]) for name in report.new)
    assert report.grids == (3, 3)
    images = torch.randn(2, 3, 24, 24)
    expected = vanilla.backbone.intermediate_tokens(images, 2)[0]
    torch.testing.assert_close(encoder.backbone(images), expected, rtol=0, atol=1e-6)
    assert all(old is new for old, new in zip(parameters, encoder.parameters(), strict=True))
    assert str(report) == (
        f"weights of {tmp_path / 'vit.pth'}: taken cls_token, pos_embed, patch_embed.*, blocks 0-2, norm.*; "
        "dropped block 3, head.*; new readout.*"
    )


def test_our_checkpoints_bring_their_read_out_where_its_sizes_are_the_same(tmp_path: Path) -> None:
    source, encoder = build(**SPARO), build(1, **SPARO)
    report = initialize_encoder(encoder, save_encoder(tmp_path, source))
    assert (report.dropped, report.new) == (("head.mlp.0.weight",), ())
    assert_from(encoder, source, tuple(source.state_dict()))
    initialize_encoder(encoder, save_encoder(tmp_path, source), which="student")
    assert all(torch.equal(value, source.state_dict()[name] + 1) for name, value in encoder.state_dict().items())


def test_a_read_out_of_other_sizes_is_new_as_a_whole(tmp_path: Path) -> None:
    source, encoder = build(**SPARO), build(1, **{**SPARO, "num_slots": 8})
    before = {name: value.clone() for name, value in encoder.readout.state_dict().items()}
    report = initialize_encoder(encoder, save_encoder(tmp_path, source))
    # The value projection would fit.
    assert {name for name in report.new if not name.startswith("readout.")} == set()
    assert len(report.new) == len(before)
    assert all(torch.equal(before[name], value) for name, value in encoder.readout.state_dict().items())


def test_the_block_that_sparo_lacks_is_new_in_a_vanilla_encoder(tmp_path: Path) -> None:
    source, encoder = build(**SPARO), build(1, readout="cls")
    report = initialize_encoder(encoder, save_encoder(tmp_path, source))
    assert str(report).endswith("dropped readout.*, head.*; new block 3")
    assert_from(encoder, source, report.taken)


@pytest.mark.parametrize("side", [5, 2])
def test_positions_of_another_image_size_are_resampled_as_the_backbone_does_it(tmp_path: Path, side: int) -> None:
    # A grid of 4, not of 3: that is the number of channels.
    vanilla, encoder = build(readout="cls", img_size=32), build(1, **{**SPARO, "img_size": 8 * side})
    report = initialize_encoder(encoder, raw(tmp_path, vanilla))
    expected = vanilla.backbone.position_embedding(8 * side, 8 * side)
    assert torch.equal(encoder.backbone.pos_embed, expected)
    assert encoder.backbone.pos_embed.shape == (1, 1 + side * side, 128)
    assert report.grids == (4, side)
    assert str(report).endswith(f"; position embedding resampled from 4x4 to {side}x{side} patches")


# What is refused.


@pytest.mark.parametrize(
    ("settings", "changed", "message"),
    [
        (
            {"arch": "vit_tiny"},
            {},
            r"vit\.pth has width, .* patch size \(192, 3, 8\), the encoder \(128, 3, 8\); .*--arch, --patch_size",
        ),
        ({"patch_size": 12}, {}, r"patch size \(128, 3, 12\), the encoder"),
        (
            {},
            {"blocks.0.attn.q_norm.weight": torch.ones(128)},
            r"another kind: 1 unexpected: backbone\.blocks\.0\.attn\.q_norm\.weight; give --arch timm",
        ),
        (
            {},
            {"blocks.2.mlp.fc1.bias": torch.ones(7)},
            r"another kind: 1 of another shape: .*blocks\.2\.mlp\.fc1\.bias",
        ),
        (
            {},
            {"pos_embed": torch.ones(1, 9, 128)},
            r"has positions \(1, 9, 128\); an encoder can only start from a square grid .*; give --arch timm/NAME",
        ),
        ({}, {"pos_embed": None}, r"vit\.pth has no pos_embed, .*rotary.*; give --arch timm/NAME"),
    ],
)
def test_a_vit_of_other_sizes_or_of_another_make_is_refused(
    tmp_path: Path, settings: dict[str, Any], changed: dict[str, torch.Tensor | None], message: str
) -> None:
    encoder = build(1, **SPARO)
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        initialize_encoder(encoder, raw(tmp_path, build(readout="cls", **settings), **changed))
    assert all(torch.equal(before[name], value) for name, value in encoder.state_dict().items())


@pytest.mark.parametrize("is_clips", [True, False])
def test_of_dinos_and_clips_vits_the_option_that_tells_them_apart_is_named(tmp_path: Path, is_clips: bool) -> None:
    path = raw(tmp_path, build(readout="cls", pre_norm=is_clips))
    with pytest.raises(CheckpointError, match=f"build the encoder with --pre_norm {str(is_clips).lower()}$"):
        initialize_encoder(build(1, **SPARO, pre_norm=not is_clips), path)


def test_dinov2_weights_are_read_with_layer_scale_multiplied_in(tmp_path: Path) -> None:
    """A ViT as DINOv2's: LayerScale after each branch, patches of 14 px, a token for masked patches."""
    torch.manual_seed(0)
    theirs = timm.models.VisionTransformer(
        img_size=42, patch_size=14, embed_dim=128, depth=4, num_heads=4, num_classes=0, init_values=1.0, global_pool=""
    )
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("gamma"):
                parameter.uniform_(-1, 1)
    torch.save({**theirs.state_dict(), "mask_token": torch.ones(1, 128)}, tmp_path / "dinov2.pth")
    encoder = create_encoder("vit_micro", 14, "cls", img_size=42)
    report = initialize_encoder(encoder, tmp_path / "dinov2.pth")
    assert str(report).endswith("dropped nothing; new nothing")
    images = torch.randn(2, 3, 42, 42)
    with torch.no_grad():
        expected = theirs.eval().forward_features(images)
        assert torch.allclose(encoder.eval().backbone(images), expected, atol=1e-5)
        assert torch.allclose(load_encoder(tmp_path / "dinov2.pth").backbone(images), expected, atol=1e-5)

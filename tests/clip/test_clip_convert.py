"""The same weights give the same encodings here and in open_clip, whichever way they went."""

import json
from pathlib import Path

import pytest
import torch
from clip_fakes import from_open_clip, open_clip_config, small_clip, to_open_clip
from safetensors.torch import save_file
from torch import nn

from dino_sparo.clip.model import CLIP, clip_from_config, load_clip
from dino_sparo.weights.checkpoint import load_checkpoint
from dino_sparo.weights.encoder import load_encoder
from dino_sparo.weights.file import CheckpointError, load_strictly

open_clip = pytest.importorskip("open_clip")

B, N, VOCAB, M = 3, 9, 53, 11
VISION = {"layers": 4, "width": 128, "head_width": 32, "patch_size": 8, "image_size": 32}
RESNET = {"layers": [1, 1, 1, 1], "width": 16, "image_size": 32}
TEXT = {"context_length": N, "vocab_size": VOCAB, "width": 24, "heads": 2, "layers": 3}


def their_model(**changed: object) -> nn.Module:
    """A small model of open_clip, every parameter away from what it starts with."""
    torch.manual_seed(0)
    model = open_clip.CLIP(**{"embed_dim": M, "vision_cfg": VISION, "text_cfg": TEXT, **changed})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def clip_from_open_clip(theirs: nn.Module, quick_gelu: bool = False) -> CLIP:
    """The same model as one of open_clip's."""
    config, weights = from_open_clip(theirs.state_dict(), theirs.transformer.resblocks[0].attn.num_heads, quick_gelu)
    ours = clip_from_config(config)
    load_strictly(ours, weights, "the open_clip model")
    return ours.eval()


@torch.no_grad()
def assert_equal_encodings(ours: CLIP, theirs: nn.Module) -> None:
    torch.manual_seed(2)
    images = torch.randn(B, 3, 32, 32)
    ids = torch.randint(1, VOCAB - 1, (B, N))
    for caption, end in enumerate((4, N - 1, 2)):
        ids[caption, end:] = 0
        ids[caption, end] = VOCAB - 1
    for normalize in (False, True):
        expected = theirs.encode_image(images, normalize=normalize)
        torch.testing.assert_close(ours.encode_image(images, normalize), expected, rtol=1e-5, atol=1e-5)
        expected = theirs.encode_text(ids, normalize=normalize)
        torch.testing.assert_close(ours.encode_text(ids, normalize), expected, rtol=1e-5, atol=1e-5)
    assert ours(images, ids).logit_scale == theirs.logit_scale.exp()
    assert ours.encode_image(images).std() > 0.1
    assert ours.encode_text(ids).std() > 0.1


@pytest.mark.parametrize("changed", [{}, {"quick_gelu": True}, {"replace_block": True}], ids=str)
def test_our_model_and_open_clips_from_it_encode_alike(changed: dict[str, bool]) -> None:
    ours = small_clip(**{"readout": "cls", "seed": 1, **changed})
    theirs = open_clip.CLIP(**open_clip_config(ours.config)).eval()
    theirs.load_state_dict(to_open_clip(ours.config, ours.state_dict()), strict=True)
    assert_equal_encodings(ours, theirs)


# Files.


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors", "epoch_1.pt"])
def test_files_of_open_clip_are_loaded(name: str, tmp_path: Path) -> None:
    """Also as other versions write them: the text tower by itself; the scale as a vector, and buffers."""
    theirs, path = their_model(), tmp_path / name
    weights = theirs.state_dict()
    if name == "weights.pt":
        torch.save(weights, path)
    elif name == "weights.safetensors":
        save_file({n if n.startswith(("visual", "logit")) else f"text.{n}": v for n, v in weights.items()}, path)
    else:
        weights = {**weights, "logit_scale": weights["logit_scale"][None], "attn_mask": torch.zeros(N, N)}
        named = {f"module.{n}": value for n, value in weights.items()}
        torch.save({"epoch": 7, "name": "run", "state_dict": named, "optimizer": {}}, path)
    loaded = load_clip(path, text_heads=2)
    assert_equal_encodings(loaded.model, theirs)
    assert loaded.mean == pytest.approx((0.48145466, 0.4578275, 0.40821073))
    assert loaded.std == pytest.approx((0.26862954, 0.26130258, 0.27577711))
    assert loaded.record["epoch"] == (7 if name == "epoch_1.pt" else None)
    assert len(loaded.record["sha256"]) == 64


def test_weights_are_read_as_they_were_published(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The bug: ViT-L-14 of LAION-2B, whose images have mean and deviation 0.5, was evaluated with OpenAI's."""
    theirs, path = their_model(quick_gelu=True), tmp_path / "open_clip_model.safetensors"
    save_file(theirs.state_dict(), path)
    images = {"mean": [0.5, 0.25, 0.125], "std": [0.5, 0.5, 0.5], "resize_mode": "squash"}
    config = {"model_cfg": {"quick_gelu": True}, "preprocess_cfg": images}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    loaded = load_clip(path, text_heads=2)
    assert_equal_encodings(loaded.model, theirs)
    assert (loaded.mean, loaded.std) == ((0.5, 0.25, 0.125), (0.5, 0.5, 0.5))
    assert "was trained with images resized by 'squash'" in caplog.text
    encoder = load_encoder(path)  # of the image tower, for k-NN and probes
    assert encoder.config.quick_gelu
    assert load_checkpoint(path)["published"]["quick_gelu"]
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": {}, "preprocess_cfg": {}}))
    with pytest.raises(ValueError, match=r"--quick_gelu is given, but .* was published without"):
        load_clip(path, text_heads=2, quick_gelu=True)
    assert load_clip(path, text_heads=2).mean == pytest.approx((0.48145466, 0.4578275, 0.40821073))
    for text in ("[]", "{", '{"preprocess_cfg": {"mean": 3}}', '{"preprocess_cfg": {"mean": ["a"]}}'):
        (tmp_path / "open_clip_config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"open_clip_config.json does not describe the weights next to it"):
            load_clip(path, text_heads=2)


# What cannot be converted.


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"readout": "gap"}, "open_clip has no model.*'gap'"),
        ({"pre_norm": False}, "pre_norm=False"),
        ({"in_chans": 1}, "in_chans=1"),
    ],
)
def test_models_that_open_clip_does_not_have_are_refused(changed: dict, message: str) -> None:
    ours = small_clip(**{"readout": "cls", "seed": 1, **changed})
    with pytest.raises(ValueError, match=message):
        to_open_clip(ours.config, ours.state_dict())
    with pytest.raises(ValueError, match=message):
        open_clip_config(ours.config)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vision_cfg": {**VISION, "layers": 3}}, "no architecture has width 128 and 3 blocks"),
        ({"vision_cfg": {**VISION, "no_ln_pre": True}}, "do not fit"),
        ({"vision_cfg": {**VISION, "ls_init_value": 0.1}}, r"8 are unknown \(visual.*ls_1"),
        ({"text_cfg": {**TEXT, "proj_type": "none", "width": M * 2}, "embed_dim": M * 2}, "missing .*text_projection"),
        ({"init_logit_bias": -10.0}, r"unknown \(logit_bias"),
        ({"vision_cfg": RESNET}, "plain CLIP with a vision transformer"),
    ],
    ids=["depth", "no norm before", "layer scale", "no projection", "logit bias", "resnet"],
)
def test_open_clip_models_of_another_make_are_refused(changed: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        clip_from_open_clip(their_model(**changed))


def test_text_heads_that_cannot_be_told_are_asked_for() -> None:
    with pytest.raises(CheckpointError, match=r"24 wide.*give text_heads"):
        from_open_clip(their_model().state_dict())

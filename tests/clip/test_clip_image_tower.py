"""The image tower of a CLIP checkpoint as an encoder: what k-NN, the linear probe, pictures and the atlas look at."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("open_clip")

from clip_fakes import clip_description, small_checkpoint, to_open_clip
from PIL import Image

import eval_knn
import eval_linear
import visualize_attention
from dino_sparo import load_encoder
from dino_sparo.clip import create_clip, load_clip
from dino_sparo.clip.options import TOWERS
from dino_sparo.weights.checkpoint import load_checkpoint
from dino_sparo.weights.entries import normalization_of

SIZES = {"num_slots": 5, "slot_dim": 7, "key_dim": 3, "img_size": 32, "embed_dim": 11, "num_codes": 17}
TEXT = {"text_width": 24, "text_heads": 2, "text_layers": 3, "vocab_size": 53, "context_length": 9}


def checkpoint(path: Path, readout: str, **changes: object) -> Path:
    """An untrained CLIP whose weights all differ from what they start with."""
    torch.manual_seed(0)
    model = create_clip("vit_micro", 8, readout, **{**SIZES, **TEXT, **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    torch.save({"model": model.state_dict(), "clip": clip_description(model.config), "epoch": 3}, path)
    return path


CASES = [
    ("sparo", {}), ("cls", {"quick_gelu": True}), ("gap_image", {"pre_norm": False}), ("attpool", {}), ("linear", {}),
    ("separate_slotnorm", {"replace_block": True}), ("fdt", {"quick_gelu": True}),
]  # fmt: skip


@pytest.mark.parametrize(("readout", "changes"), CASES, ids=str)
@torch.no_grad()
def test_the_image_tower_of_a_clip_checkpoint_is_an_encoder(tmp_path: Path, readout: str, changes: dict) -> None:
    path = checkpoint(tmp_path / "clip.pth", readout, **changes)
    model, encoder = load_clip(path).model, load_encoder(path)
    images = torch.randn(3, 3, 32, 32)
    expected = model.image.readout_output(images).slots
    torch.testing.assert_close(encoder(images), expected.flatten(1), rtol=1e-4, atol=1e-5)
    assert encoder.encoding_dim == expected.flatten(1).shape[1]
    torch.testing.assert_close(encoder.probe_layers(images, 2)[0][-1], encoder(images), rtol=1e-4, atol=1e-5)
    assert normalization_of(load_checkpoint(path))[0] == pytest.approx((0.48145466, 0.4578275, 0.40821073))


def test_every_readout_of_clip_has_the_width_it_says() -> None:
    for readout in TOWERS:
        image = create_clip("vit_micro", 8, readout, **SIZES, **TEXT).image
        assert image(torch.zeros(2, 3, 32, 32)).shape[1] == image.encoding_dim, readout


def test_checkpoints_from_before_the_image_tower_described_itself_are_read(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "clip.pth", "attpool", replace_block=True, quick_gelu=True)
    content = load_checkpoint(path)
    for name in ("replace_block", "quick_gelu", "num_codes", "code_dim"):
        del content["clip"]["image"][name]
    torch.save(content, tmp_path / "old.pth")
    assert load_encoder(tmp_path / "old.pth").config == load_encoder(path).config == load_clip(path).model.config.image
    assert load_clip(tmp_path / "old.pth").model.config == load_clip(path).model.config


def test_the_image_tower_of_open_clips_weights_is_an_encoder(tmp_path: Path) -> None:
    model = load_clip(checkpoint(tmp_path / "clip.pth", "cls")).model
    torch.save(to_open_clip(model.config, model.state_dict()), tmp_path / "open_clip.pt")
    images = torch.randn(3, 3, 32, 32)
    encoder = load_encoder(tmp_path / "open_clip.pt")
    torch.testing.assert_close(encoder(images), model.image(images), rtol=0, atol=0)
    assert normalization_of(load_checkpoint(tmp_path / "open_clip.pt"))[1] == pytest.approx(
        (0.26862954, 0.26130258, 0.27577711)
    )


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize("readout", ["sparo", *(pytest.param(name, marks=SLOW) for name in ("cls", "attpool"))])
def test_every_evaluation_of_encoders_takes_a_clip_checkpoint(
    tmp_path: Path, readout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, data = small_checkpoint(tmp_path / "clip.pth", readout), tmp_path / "images"
    for number in range(12):
        path = data / ("val" if number % 3 == 0 else "train") / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((32, 32), 10 + 20 * number).convert("RGB").save(path)
    common = ["--pretrained_weights", str(weights), "--output_dir", str(tmp_path)]
    evaluation = [*common, "--data_path", str(data), "--device", "cpu", "--num_workers", "0"]
    eval_knn.main([*evaluation, "--nb_knn", "2"])
    eval_linear.main([*evaluation, "--image_encoder", "--epochs", "1", "--fast", "--n_last_blocks", "2"])
    pictures = ["--image_path", str(data / "val"), "--device", "cpu", "--atlas", str(data / "train")]
    visualize_attention.main([*common, "--image_encoder", *pictures])
    written = capsys.readouterr().out
    assert all(
        name in written or (tmp_path / name).is_file()
        for name in (
            "atlas.html",
            *(next(tmp_path.glob(f"{kind}_clip_*images.json")).name for kind in ("knn", "linear")),
        )
    )

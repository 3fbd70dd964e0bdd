"""The image tower of a CLIP checkpoint as an encoder: what k-NN, the linear probe, pictures and the atlas look at."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("open_clip")

import oc_clip_fakes
from clip_fakes import save_clip, small_checkpoint, small_clip
from image_files import write_images

import eval_knn
import eval_linear
import visualize_attention
from dino_sparo import load_encoder
from dino_sparo.clip import load_clip
from dino_sparo.weights.checkpoint import load_checkpoint
from dino_sparo.weights.entries import normalization_of

CASES = [
    ("sparo", {}), ("cls", {"quick_gelu": True}), ("gap_image", {"pre_norm": False}), ("attpool", {}), ("linear", {}),
    ("separate_slotnorm", {"replace_block": True}), ("fdt", {"quick_gelu": True}),
]  # fmt: skip


@pytest.mark.parametrize(("readout", "changes"), CASES, ids=str)
@torch.no_grad()
def test_the_image_tower_of_a_clip_checkpoint_is_an_encoder(tmp_path: Path, readout: str, changes: dict) -> None:
    path = save_clip(small_clip(readout, **changes), tmp_path / "clip.pth")
    model, encoder = load_clip(path).model, load_encoder(path)
    images = torch.randn(3, 3, 32, 32)
    expected = model.image.readout_output(images).slots
    torch.testing.assert_close(encoder(images), expected.flatten(1), rtol=1e-4, atol=1e-5)
    assert encoder.encoding_dim == expected.flatten(1).shape[1]
    torch.testing.assert_close(encoder.probe_layers(images, 2)[0][-1], encoder(images), rtol=1e-4, atol=1e-5)
    assert normalization_of(load_checkpoint(path))[0] == pytest.approx((0.48145466, 0.4578275, 0.40821073))


def test_checkpoints_from_before_the_image_tower_described_itself_are_read(tmp_path: Path) -> None:
    path = save_clip(small_clip("attpool", replace_block=True, quick_gelu=True), tmp_path / "clip.pth")
    content = load_checkpoint(path)
    for name in ("replace_block", "quick_gelu", "num_codes", "code_dim"):
        del content["clip"]["image"][name]
    torch.save(content, tmp_path / "old.pth")
    assert load_encoder(tmp_path / "old.pth").config == load_encoder(path).config == load_clip(path).model.config.image
    assert load_clip(tmp_path / "old.pth").model.config == load_clip(path).model.config


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sparo", "cls", "attpool", "OC-CLIP"])
def test_every_evaluation_of_encoders_takes_an_image_text_checkpoint(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, data = tmp_path / "clip.pth", tmp_path / "images"
    weights = oc_clip_fakes.small_checkpoint(path) if kind == "OC-CLIP" else small_checkpoint(path, kind)
    for split, number in (("train", 8), ("val", 4)):
        write_images(data / split, number, classes=("class0", "class1"))
    common = ["--pretrained_weights", str(weights), "--output_dir", str(tmp_path)]
    evaluation = [*common, "--data_path", str(data), "--device", "cpu", "--num_workers", "0"]
    eval_knn.main([*evaluation, "--nb_knn", "2"])
    eval_linear.main([*evaluation, "--image_encoder", "--epochs", "1", "--fast", "--n_last_blocks", "2"])
    pictures = ["--image_path", str(data / "val"), "--device", "cpu"]
    pictures += [] if kind == "OC-CLIP" else ["--atlas", str(data / "train")]  # whose encoder averages all tokens
    visualize_attention.main([*common, "--image_encoder", *pictures])
    assert ("atlas.html" in capsys.readouterr().out) == (kind != "OC-CLIP")
    assert all(list(tmp_path.glob(f"{name}_clip_*images.json")) for name in ("knn", "linear"))

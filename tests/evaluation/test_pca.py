"""Principal components of patches as colours: the mathematics against scikit-learn, the command, its refusals."""

import json
from pathlib import Path

import clip_fakes
import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from sklearn.decomposition import PCA
from small_models import save_small_encoder

from dino_sparo.__main__ import run
from dino_sparo.evaluation.attention import pca
from dino_sparo.weights.encoder import load_encoder

KINDS = {"sparo": ["pca.npy", "pca-slots.npy"], "cls": ["pca.npy"]}


def photographs(folder: Path, number: int) -> Path:
    folder.mkdir()
    for seed in range(number):
        pixels = np.random.default_rng(seed).integers(256, size=(20 + seed, 31, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{seed}.png")
    return folder


def features(images: int = 2, rows: int = 3, columns: int = 5, width: int = 7) -> np.ndarray:
    """Patches with components of very different size."""
    rng = np.random.default_rng(0)
    return (rng.normal(size=(images, rows, columns, width)) * 2.0 ** np.arange(width) + 3).astype(np.float32)


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_components_are_scikit_learns_with_its_signs(share: float) -> None:
    patches = features()
    chosen = np.random.default_rng(1).random(patches.shape[:3]) <= share
    oracle = PCA(3, svd_solver="full").fit(patches[chosen])
    components, shares = pca.principal_components(patches, chosen)
    expected = oracle.transform(patches.reshape(-1, 7)).reshape(*patches.shape[:3], 3)
    np.testing.assert_allclose(components, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(shares, oracle.explained_variance_ratio_, rtol=1e-5)


def test_colours_are_a_sigmoid_with_the_deviation_of_the_chosen_patches() -> None:
    components = features()[..., :3]
    chosen = np.zeros(components.shape[:3], bool)
    chosen[:, 1] = True
    deviation = components[:, 1, :, 2].std()
    value = components[1, 2, 3, 2]
    expected = 255 / (1 + np.exp(-2 * value / deviation))
    assert pca.to_colours(components, chosen)[1, 2, 3, 2] == pytest.approx(expected, abs=0.51)
    equal = np.zeros((1, 2, 3, 3), np.float32)
    assert (pca.to_colours(equal, np.ones((1, 2, 3), bool)) == 128).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_the_foreground_is_the_side_of_the_first_component_that_the_border_has_less_of(sign: int) -> None:
    tokens = np.random.default_rng(0).normal(size=(2, 6, 7, 5)).astype(np.float32)
    objects = np.zeros((2, 6, 7), bool)
    objects[0, 2:5, 1:4] = objects[1, 1:4, 3:7] = True
    tokens[..., 3] += np.where(objects, 50 * sign, -50 * sign)
    np.testing.assert_array_equal(pca.find_foreground(tokens), objects)


def test_pictures_are_black_outside_of_the_foreground() -> None:
    foreground = np.array([[True, False, False]])
    painted = pca.paint_components(
        np.zeros((10, 30, 3), np.uint8), np.full((1, 3, 3), (200, 100, 50), np.uint8), foreground
    )
    assert (painted[:, :8] == (200, 100, 50)).all()
    assert (painted[:, 20:] == 0).all()


@pytest.mark.parametrize("readout", KINDS)
def test_the_command_writes_the_components_of_all_images_in_one_basis(readout: str, tmp_path: Path) -> None:
    weights = save_small_encoder(tmp_path / "checkpoint.pth", readout)
    photos, out = photographs(tmp_path / "photos", 2), tmp_path / "out"
    words = ["--pretrained_weights", weights, "--data_path", photos, "--output_dir", out, "--pca", "--save_each"]
    record = run("attention", [*map(str, words), "--img_size", "24", "--device", "cpu"])
    assert sorted(path.name for path in out.glob("*.npy")) == sorted(KINDS[readout])
    assert not (out / "attention.json").exists()
    components = np.load(out / "pca.npy")
    encoder = load_encoder(weights)
    size = encoder.config.patch_size
    assert components.shape == (2, 24 // size, 24 // size, 3)
    assert record == json.loads((out / "pca.json").read_text())
    assert list(record["explained_variance"]) == [Path(name).stem for name in KINDS[readout]]
    np.testing.assert_allclose(components.mean(axis=(0, 1, 2)), 0, atol=1e-4)
    pictures = {path.name for path in (out / "pca").iterdir()}
    kinds = ("", "-image", "-slots") if readout == "sparo" else ("", "-image")
    assert pictures == {f"{number}{kind}.png" for number in range(2) for kind in kinds}
    with Image.open(out / "pca.png") as sheet:
        assert sheet.width > 2 * 96


def test_features_of_patches_are_tokens_and_shares_of_slots(tmp_path: Path) -> None:
    encoder = load_encoder(save_small_encoder(tmp_path / "checkpoint.pth"))
    images = torch.randn(2, 3, 3 * encoder.config.patch_size, 5 * encoder.config.patch_size)
    found = pca.patch_features(encoder, images)
    with torch.no_grad():
        tokens = encoder.backbone(images)
        attention = encoder.readout_output(images).attention
    row, column = 2, 3
    np.testing.assert_allclose(found[pca.TOKENS][1, row, column], tokens[1, 1 + 5 * row + column], rtol=1e-5)
    patch = attention[1, :, 1 + 5 * row + column]
    np.testing.assert_allclose(found[pca.SLOTS][1, row, column], patch / patch.sum(), rtol=1e-4)


def test_a_single_image_keeps_its_shape_and_patches_of_the_background_are_nan(tmp_path: Path) -> None:
    weights = save_small_encoder(tmp_path / "checkpoint.pth")
    photo = photographs(tmp_path / "photos", 1) / "0.png"
    words = ["--pretrained_weights", weights, "--data_path", photo, "--output_dir", tmp_path, "--img_size", "40"]
    record = run("attention", [*map(str, words), "--pca", "--foreground", "--device", "cpu"])
    components = np.load(tmp_path / "pca.npy")
    assert components.shape[1] < components.shape[2]
    assert record["foreground_share"] == [pytest.approx(1 - np.isnan(components[..., 0]).mean())]
    assert 0 < record["foreground_share"][0] < 1


def test_the_components_of_a_clip_are_those_of_its_image_encoder(tmp_path: Path) -> None:
    weights = clip_fakes.small_checkpoint(tmp_path / "clip.pth")
    photos = photographs(tmp_path / "photos", 1)
    words = ["--pretrained_weights", weights, "--data_path", photos, "--output_dir", tmp_path / "out", "--pca"]
    run("attention", [*map(str, words), "--device", "cpu"])
    assert np.load(tmp_path / "out" / "pca.npy").shape[0] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pca", "--atlas", "scenes"], "--atlas scenes with --pca, which draws no maps; leave out one of the two"),
        (["--pca", "--threshold", "0.6"], "--threshold 0.6 with --pca"),
        (["--foreground"], "--foreground without --pca"),
        (["--pca", "--img_size", "4000"], "give a smaller size"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: list[str], message: str, tmp_path: Path) -> None:
    weights = save_small_encoder(tmp_path / "checkpoint.pth")
    with refused(message):
        run("attention", ["--pretrained_weights", str(weights), "--output_dir", str(tmp_path), *options])

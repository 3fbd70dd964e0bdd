"""Five channels from files to encodings: statistics, training, evaluations, pictures, export."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import dino_sparo
from dino_sparo.__main__ import main
from dino_sparo.api import call
from dino_sparo.data.sources import ImageLimits, open_source, require_channels
from dino_sparo.data.sources.image_source import FileSource
from dino_sparo.data.sources.torchvision_sets import TorchvisionSource
from dino_sparo.weights.export import export
from dino_sparo.weights.initialize import initialize_encoder

TINY = {
    **{"arch": "vit_micro", "patch_size": 8, "global_crops_size": 32, "local_crops_size": 16, "local_crops_number": 1},
    **{"sparo_slots": 3, "sparo_slot_dim": 5, "sparo_key_dim": 7, "out_dim": 16, "head_hidden_dim": 16},
    **{"batch_size_per_gpu": 4, "num_workers": 0, "device": "cpu", "compile": "off", "precision": "fp32"},
}
STACKS = {"in_chans": 5, "max_value": 1000, "norm_mean": [0.1, 0.2, 0.3, 0.4, 0.5], "norm_std": [0.1] * 5}


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of stacks, in train/ and val/."""
    root, rng = tmp_path_factory.mktemp("stacks"), np.random.default_rng(0)
    for split, number in (("train", 8), ("val", 4)):
        for index in range(number):
            folder = root / split / "ab"[index % 2]
            folder.mkdir(parents=True, exist_ok=True)
            np.save(folder / f"{index}.npy", rng.integers(0, 1001, (41, 37, 5)).astype(np.uint16))
    return root


@pytest.fixture(scope="module")
def checkpoint(stacks: Path) -> Path:
    """That of a run which stopped after the first of two steps."""
    dino_sparo.train(data_path=stacks, output_dir=stacks / "run", epochs=1, max_steps=1, **TINY, **STACKS)
    return stacks / "run" / "checkpoint.pth"


def test_statistics_are_those_of_all_pixels(stacks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["statistics", "--data_path", str(stacks), "--in_chans", "5", "--max_value", "1000", "--num_workers", "0"])
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    pixels = np.stack([np.load(path) for path in (stacks / "train").rglob("*.npy")]).reshape(-1, 5) / 1000
    assert words[:2] == [["--max_value", "1000"], ["--in_chans", "5"]]
    for name, expected, line in (("mean", pixels.mean(0), words[2]), ("std", pixels.std(0), words[3])):
        assert line[0] == f"--norm_{name}"
        np.testing.assert_allclose([float(word) for word in line[1:]], expected, atol=6e-5)


@pytest.mark.slow
def test_a_run_on_five_channels_is_resumed_evaluated_drawn_and_exported(
    stacks: Path, checkpoint: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(checkpoint.parent, tmp_path / "run"))
    dino_sparo.train(data_path=stacks, output_dir=run, epochs=1, **TINY, **STACKS)
    checkpoint = run / "checkpoint.pth"
    encoder = dino_sparo.load_encoder(checkpoint)
    assert encoder.config.in_chans == 5
    assert "of 5 channels" in encoder.summary
    file = next((stacks / "val").rglob("*.npy"))
    images = encoder.transform(np.load(file))
    assert images.shape == (1, 5, 32, 32)
    center = np.load(file).transpose(2, 0, 1) / 1000  # the training's --max_value
    expected = (center.mean((1, 2)) - STACKS["norm_mean"]) / 0.1
    np.testing.assert_allclose(images[0].mean((1, 2)), expected, atol=0.3)
    options = {"pretrained_weights": checkpoint, "num_workers": 0, "device": "cpu"}
    embedded = dino_sparo.embed(data_path=stacks / "val", output_dir=tmp_path / "embeddings", **options)
    assert (embedded.results["num_images"], embedded.results["num_unreadable"]) == (4, 0)
    assert dino_sparo.knn(data_path=stacks, nb_knn=[3], output_dir=tmp_path, **options)
    dino_sparo.linear(data_path=stacks, epochs=1, lr=[0.1], output_dir=tmp_path, n_last_blocks=1, **options)
    drawn = tmp_path / "maps"
    drawn.mkdir()
    dino_sparo.attention(data_path=stacks / "val", output_dir=drawn, show_channels=[4], **options)
    assert (drawn / "attention.png").is_file()
    atlas = tmp_path / "atlas"
    atlas.mkdir()
    dino_sparo.attention(atlas=stacks / "val", atlas_images=2, output_dir=atlas, **options)
    assert len(list(atlas.glob("attention-*.png"))) == 4
    assert {"atlas.png", "atlas.html"} <= {path.name for path in atlas.iterdir()}
    written = json.loads((atlas / "atlas.json").read_text())
    assert [len(slot["images"]) for slot in written["slots"]] == [2] * 3
    assert written["encoder"]["num_slots"] == 3
    with pytest.raises(ValueError, match="the built-in scene has 3 channels, the model takes 5; give --data_path"):
        dino_sparo.attention(output_dir=tmp_path, **options)
    exported = dino_sparo.load_encoder(export(checkpoint, tmp_path / "stacks"))
    assert torch.equal(exported(exported.transform(np.load(file))), encoder(images))


def test_evaluations_take_the_range_of_the_training_unless_another_is_given(
    stacks: Path, checkpoint: Path, tmp_path: Path
) -> None:
    exported = export(checkpoint, tmp_path / "stacks")
    cases = {
        "own": (checkpoint, None),
        "same": (checkpoint, 1000),
        "other": (checkpoint, 500),
        "export": (exported, None),
    }
    rows = {}
    for name, (weights, max_value) in cases.items():
        options = {"data_path": stacks / "val", "num_workers": 0, "device": "cpu", "max_value": max_value}
        dino_sparo.embed(pretrained_weights=weights, output_dir=tmp_path / name, **options)
        rows[name] = dino_sparo.load_embeddings(tmp_path / name).arrays["encoding"]
    np.testing.assert_array_equal(rows["own"], rows["same"])
    np.testing.assert_array_equal(rows["own"], rows["export"])
    assert not np.allclose(rows["own"], rows["other"], atol=1e-3)


def test_an_untrained_control_and_a_probe_read_the_images_of_the_training(
    stacks: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    options = {"data_path": stacks, "output_dir": tmp_path, "num_workers": 0, "device": "cpu"}

    def read(source: FileSource, index: int) -> Image.Image:
        seen.append(source.limits.max_value)
        return reading(source, index)

    reading = FileSource.read
    monkeypatch.setattr(FileSource, "read", read)
    dino_sparo.knn(pretrained_weights=checkpoint, untrained=True, nb_knn=[3], **options)
    probe = {"probe": ["ep"], "ep_queries": 2, "fast": True, "epochs": 1, "lr": [0.1], "batch_size_per_gpu": 4}
    dino_sparo.linear(pretrained_weights=checkpoint, **probe, **options)
    dino_sparo.knn(pretrained_weights=next(tmp_path.glob("probe_ep_*.pth")), nb_knn=[3], **options)
    assert set(seen) == {1000}
    assert len(seen) == 3 * 12


def test_weights_of_three_channels_are_adapted_as_timm_does(tmp_path: Path) -> None:
    sizes = {"arch": "vit_micro", "patch_size": 8, "readout": "cls", "img_size": 32}
    rgb = dino_sparo.create_encoder(**sizes)
    torch.save(rgb.backbone.state_dict(), tmp_path / "rgb.pth")
    old = rgb.backbone.patch_embed.proj.weight.detach()
    for channels, expected in ((1, old.sum(1, keepdim=True)), (5, torch.cat([old, old[:, :2]], 1) * (3 / 5))):
        encoder = dino_sparo.create_encoder(**sizes, in_chans=channels)
        initialize_encoder(encoder, tmp_path / "rgb.pth")
        assert torch.allclose(encoder.backbone.patch_embed.proj.weight, expected)
        assert torch.equal(encoder.backbone.pos_embed, rgb.backbone.pos_embed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"norm_mean": [0.5] * 3},
            r"--norm_mean has 3 numbers, but --in_chans is 5; .* dino-sparo statistics .* --max_value 1000",
        ),
        ({"norm_std": [0.5]}, r"--norm_std has 1 numbers, but --in_chans is 5"),
        ({"norm_std": [0.5, 0, 1, 1, 1]}, r"--norm_std: 0: give a positive number"),
    ],
)
def test_each_channel_needs_a_mean_and_a_deviation(stacks: Path, changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        dino_sparo.train(data_path=stacks, output_dir=tmp_path / "run", **TINY, **{**STACKS, **changes})


def test_images_of_other_channels_are_refused_with_file_number_and_remedy(stacks: Path, tmp_path: Path) -> None:
    changes = {"in_chans": 4, "norm_mean": [0.5] * 4, "norm_std": [0.5] * 4}
    with pytest.raises(ValueError, match=r"0\.npy \(has 5 channels, the model takes 4; give images of 4, or a model"):
        dino_sparo.train(data_path=stacks, output_dir=tmp_path / "run", **TINY, **{**STACKS, **changes})
    with pytest.raises(ValueError, match="holds no images"):
        open_source(str(stacks), limits=ImageLimits())


# The built-in scenes and torchvision's sets have three channels, which is said before anything is computed.


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("train", {**TINY, **STACKS, "output_dir": "run"}),
        ("statistics", {"in_chans": 5}),
        ("embed", {"output_dir": "embeddings"}),
        *((evaluation, {}) for evaluation in ("knn", "linear", "slots score", "attention")),
    ],
)
def test_scenes_are_refused_for_a_model_of_five_channels(
    command: str, options: dict, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    weights = {} if command in ("train", "statistics") else {"pretrained_weights": checkpoint, "device": "cpu"}
    message = r"^scenes \w+ \(32 px, seed 0\): an image has 3 channels, the model takes 5; give images of 5[^\n]*$"
    with pytest.raises(ValueError, match=message):
        call(command, data_path="scenes:16:32", **weights, **options)


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "L"), (3, "RGB"), (5, None)])
def test_a_torchvision_set_is_opened_for_the_channels_it_has(channels: int, mode: str | None) -> None:
    limits = ImageLimits(in_chans=channels)
    for other in ("L", "RGB"):
        source = TorchvisionSource("digits", [(Image.new(other, (5, 7)), 0)], np.zeros(1, np.int64), limits)
        if channels == 3 or mode == other:
            require_channels(source, limits)
            assert len(source.read(0).getbands()) == channels
        else:
            with pytest.raises(ValueError, match=f"digits: an image has . channels?, the model takes {channels}; give"):
                require_channels(source, limits)

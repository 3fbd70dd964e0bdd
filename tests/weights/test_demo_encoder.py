"""The encoder that comes with the package: it loads by name everywhere, and its scores are those beside it."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

import dino_sparo
from dino_sparo.__main__ import run
from dino_sparo.runtime.files import file_sha256
from dino_sparo.weights.checkpoint import DEMO, weights_sha256
from dino_sparo.weights.export import export
from dino_sparo.weights.file import CheckpointError


def test_the_demo_encoder_is_small_and_encodes_images() -> None:
    encoder = dino_sparo.load_encoder("demo")
    assert encoder.summary.startswith("vit_micro/8 at 32 px, sparo (16 slots of 32")
    assert sum(parameter.numel() for parameter in encoder.parameters()) == 689_696
    assert {parameter.dtype for parameter in encoder.parameters()} == {torch.float32}
    assert DEMO.stat().st_size < 1.5e6
    images = encoder.transform([Image.new("RGB", (60, 50), "red"), Image.new("RGB", (40, 80), "blue")])
    assert encoder(images).shape == (2, 512)
    with pytest.raises(CheckpointError, match="demo has no 'student'; it has teacher"):
        dino_sparo.load_encoder("demo", "student")


def test_a_file_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").write_bytes(b"no checkpoint")
    with pytest.raises(CheckpointError, match="truncated or not a checkpoint"):
        dino_sparo.load_encoder("demo")


def test_commands_take_it_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    demo = ["--pretrained_weights", "demo", "--device", "cpu", "--num_workers", "0"]
    result = run("knn", [*demo, "--data_path", "scenes:200:48", "--nb_knn", "20", "--dump_features", "features"])
    assert result["encoder"]["sha256"] == file_sha256(DEMO) == weights_sha256("demo")
    assert result["results"][0]["top1"] > 40  # chance is 10
    assert (tmp_path / "knn_demo_scenes-200-48.json").is_file()
    again = run("knn", [*demo, "--load_features", "features", "--nb_knn", "20"])
    assert again["results"] == result["results"]
    assert torch.equal(
        dino_sparo.load_encoder(export("demo", tmp_path / "out")).readout.queries,
        dino_sparo.load_encoder("demo").readout.queries,
    )


def test_scores_recipe_and_command_stand_beside_it() -> None:
    said = json.loads(DEMO.with_suffix(".json").read_text())
    assert (said["command"], said["data"], said["recipe"]["epochs"]) == ("dino-sparo demo", "scenes:10000:48", 7)
    readme = DEMO.with_name("README.md").read_text()
    for words in said["scores"].values():
        assert words.split()[1] in words
        assert f"{float(words.split()[1]):.1f} %" in readme


@pytest.mark.slow
def test_its_scores_are_those_that_stand_beside_it(tmp_path: Path) -> None:
    words = "--pretrained_weights demo --data_path scenes:4000:48 --nb_knn 20 --device cpu --num_workers 2"
    top1 = run("knn", [*words.split(), "--output_dir", str(tmp_path)])["results"][0]["top1"]
    said = json.loads(DEMO.with_suffix(".json").read_text())["scores"]["knn"]
    assert abs(top1 - float(said.split()[1])) < 0.2

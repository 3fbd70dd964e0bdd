"""Limits of every command that reads images with captions or classes: images of 12 bits in files of 16."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import oc_clip_fakes
import pytest
import torch
from clip_fakes import call, evaluate, small_checkpoint
from PIL import Image

from dino_sparo.data.sources import image_source
from dino_sparo.data.sources.decode import read_image

pytest.importorskip("open_clip")
# Command -> where its images are named, and options that make it fast.
DATA: dict[str, tuple[str, ...]] = {
    "zero-shot": ("--data_path", "classes"),
    "clip-probe": ("--data_path", "classes", "--epochs", "1", "--weight_decay", "0.1"),
    "retrieval": ("--data_path", "pairs", "--captions", "captions.txt", "--k", "1"),
    "compositional": ("--data_root", "."),
    "slots select": ("--data_path", "classes"),
    "slots mask": ("--data_root", "crepe", "--epochs", "1", "--evaluate", "classes"),
    "pictures": ("--data_path", "pairs"),
    "oc-pictures": ("--data_path", "pairs"),
}
QUICK = ("zero-shot", "retrieval", "compositional", "oc-pictures")  # classes; pairs; questions; graphs


def write_deep(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((40, 40), 4095, dtype=np.uint16)).save(path)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All files that the commands of `DATA` name."""
    for part in ("train", "val"):
        for name in ("cat/0", "cat/1", "dog/2", "dog/3"):
            write_deep(tmp_path / "classes" / part / f"{name}.png")
    for name in "ab":
        write_deep(tmp_path / "pairs" / f"{name}.png")
        (tmp_path / "pairs" / f"{name}.txt").write_text("a red star on sand")
        write_deep(tmp_path / "crepe" / "images" / f"{name}.png")
    (tmp_path / "captions.txt").write_text("a.png,red\nb.png,blue\n")
    pairs = {str(i): {"filename": f"{n}.png", "caption": "a", "negative_caption": "b"} for i, n in enumerate("ab")}
    (tmp_path / "crepe" / "swap_obj.json").write_text(json.dumps(pairs))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in DATA]
)
@pytest.mark.usefixtures("no_sheets")
def test_the_largest_value_of_16_bit_images_becomes_white(
    name: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug: without --max_value these images were nearly black."""
    checkpoint = oc_clip_fakes.small_checkpoint if name == "oc-pictures" else small_checkpoint
    weights = checkpoint(data / "checkpoint.pth")
    words = (*DATA[name], "--max_value", "4095", "--exif", "ignore", "--max_image_mb", "1", "--max_image_mpix", "2")
    assert levels(name, monkeypatch, "--pretrained_weights", weights, *words) == {255}


def levels(name: str, monkeypatch: pytest.MonkeyPatch, *words: Any) -> set[int]:
    """The highest level of each image that a command reads."""
    seen = set[int]()

    def read(*args: Any, **options: Any) -> Image.Image:
        image = read_image(*args, **options)
        limits = options["limits"]
        assert limits.exif == ("ignore" if "ignore" in words else "apply")
        assert (limits.max_mb, limits.max_mpix) == (1, 2) or "--max_image_mb" not in words
        seen.add(int(np.asarray(image).max()))
        return image

    monkeypatch.setattr(image_source, "read_image", read)
    if "pictures" in name:
        call(name, [*words, "--device", "cpu"])
    else:
        evaluate(name, *words)
    return seen


@pytest.mark.parametrize(
    "name", ["zero-shot", *(pytest.param(name, marks=pytest.mark.slow) for name in ("compositional", "pictures"))]
)
def test_the_range_is_that_of_the_training_unless_another_is_given(
    name: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small_checkpoint(data / "checkpoint.pth")
    torch.save({**torch.load(path), "args": {"max_value": 4095}}, path)
    words = ("--pretrained_weights", path, *DATA[name])
    assert levels(name, monkeypatch, *words) == {255}
    if name == "zero-shot":
        assert levels(name, monkeypatch, *words, "--max_value", "8190") == {128}

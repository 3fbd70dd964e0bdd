"""OC-CLIP's demo: all models get the same, and the short form runs all parts and ends in the table."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("open_clip")

from clip_fakes import parser_of

from dino_sparo.__main__ import run as run_command
from dino_sparo.image_text import demos
from dino_sparo.image_text.demos import CHANCE
from dino_sparo.oc_clip import demo

# What the equal comparison rests on.
EQUAL = (
    *("data_path", "arch", "patch_size", "img_size", "text_width", "text_heads", "text_layers", "context_length"),
    *("epochs", "batch_size", "lr", "warmup_steps", "weight_decay", "clip_grad", "seed", "precision"),
    *("beta1", "beta2", "eps", "crop_scale", "grad_accum_steps"),
)


def test_all_models_of_the_demo_get_equal_towers_images_and_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "NUM_TRAINING", 3)
    commands: dict[str, list[str]] = {}

    def record(name: str, words: Any) -> Any:
        commands[words[words.index("--output_dir") + 1] if "--output_dir" in words else name] = [name, *words]
        splits = {split: {"accuracy": 50.0} for split in ("swap_obj", "swap_att")}
        return {"top1": 10.0, "splits": splits}

    tmp_path.joinpath("pairs").mkdir()
    demo.demo(parser_of("demo").parse_args(["--method", "oc-clip", "--output_dir", str(tmp_path)]), record)
    trainings = [words for words in commands.values() if words[0].startswith("train-")]
    options = [vars(parser_of(name).parse_args(words)) for name, *words in trainings]
    assert len(options) == len(demo.MODELS)
    assert [{name: found[name] for name in EQUAL} for found in options] == [
        {name: options[0][name] for name in EQUAL}
    ] * 3
    assert sum("graphs" in found for found in options) == 1


def test_a_model_that_the_demo_has_not_is_named_with_those_it_has(tmp_path: Path) -> None:
    args = parser_of("demo").parse_args(["--models", "gap", "--output_dir", str(tmp_path)])
    with pytest.raises(ValueError, match="--models gap: choose among cls, oc_clip, sparo"):
        demo.demo(args, lambda name, words: None)


@pytest.mark.slow
def test_the_short_demo_ends_in_its_table_and_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(demo, "SHORT_NUM_TRAINING", 64)
    monkeypatch.setitem(demo.SHARED, "batch_size", "16")
    monkeypatch.setitem(demo.SHARED, "num_workers", "0")
    monkeypatch.setattr(demos, "SHORT_NUM_PAIRS", 6)
    monkeypatch.setattr(demos, "SHORT_NUM_IMAGES", 20)
    words = ["--method", "oc-clip", "--short", "--output_dir", str(tmp_path), "--models", "oc_clip", "cls"]
    runs = run_command("demo", words)
    assert json.loads((tmp_path / "demo.json").read_text()) == runs
    assert [run["model"] for run in runs] == ["oc_clip", "cls"]
    assert all(0 <= run[score] <= 100 for run in runs for score in CHANCE)
    names = {path.name for path in Path(runs[0]["folder"]).iterdir()}
    results = {"zero_shot_checkpoint_scenes-20-48.json", "compositional_checkpoint_pairs.json"}
    assert {"checkpoint.pth", *results, "oc_pictures.png", "oc_pictures.html"} <= names
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split() == ["guessing", "10.0", "%", "50.0", "%", "50.0", "%"]
    assert "accuracy on 20 held-out scenes and 6 pairs of captions" in "\n".join(lines)

"""The demos: recipes that name what exists, equal trainings, and the short forms, which end in table and pictures."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dino_sparo.__main__ import run as run_command
from dino_sparo.clip.options import TOWERS
from dino_sparo.commands import parser_of
from dino_sparo.demo import run as demo
from dino_sparo.models.architectures import DINO_READOUTS

PICTURES = {"dino": "attention", "clip": "pictures", "oc-clip": "oc-pictures"}  # method -> command that draws
# What the equal comparison of OC-CLIP's demo rests on.
EQUAL = (
    *("data_path", "arch", "patch_size", "img_size", "text_width", "text_heads", "text_layers", "context_length"),
    *("epochs", "batch_size", "lr", "warmup_steps", "weight_decay", "clip_grad", "seed", "precision"),
    *("beta1", "beta2", "eps", "crop_scale", "grad_accum_steps"),
)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of demos that write no scenes and draw no curve."""
    monkeypatch.setattr(demo, "write_training_pairs", lambda folder, number: folder.mkdir(exist_ok=True))
    monkeypatch.setattr(demo, "draw_training_curve", lambda folder, path: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    return []


def run_recorded(method: str, folder: Path, commands: list[list[str]], *words: str) -> list[dict[str, Any]]:
    """A demo whose commands are recorded and parsed instead of run."""

    def record(name: str, words: Any) -> Any:
        commands.append([name, *words])
        splits = {split: {"accuracy": 50.0} for split in ("swap_obj", "swap_att")}
        scores = {"top1": 10.0, "results": [{"top1": 20.0}], "best": {"top1": 30.0}}
        folder.mkdir(exist_ok=True)
        return [{"benchmarks": {"scene-pairs": {"splits": splits}}}] if name == "compositional" else scores

    words = ("--method", method, *words, "--output_dir", str(folder))
    return demo.demo(parser_of("demo").parse_args(words), record)


@pytest.mark.parametrize("short", [(), ("--short",)])
@pytest.mark.parametrize("method", PICTURES)
def test_a_demo_calls_commands_that_take_its_options(
    method: str, short: tuple[str, ...], tmp_path: Path, commands: list[list[str]]
) -> None:
    runs = run_recorded(method, tmp_path, commands, *short, "--seeds", "3", "5")
    assert [run["seed"] for run in runs] == [3] * (len(runs) // 2) + [5] * (len(runs) // 2)
    for name, *words in commands:
        parser_of(PICTURES[method] if name == "attention" else name).parse_args(words)
        assert "{" not in " ".join(words)


@pytest.mark.parametrize(("method", "models"), [("dino", DINO_READOUTS), ("clip", TOWERS)])
def test_a_demo_knows_all_read_outs(method: str, models: tuple[str, ...]) -> None:
    assert {*demo.read_recipe(method)["models"]} == {*models}


def test_all_models_of_oc_clips_demo_get_equal_towers_images_and_steps(
    tmp_path: Path, commands: list[list[str]]
) -> None:
    run_recorded("oc-clip", tmp_path, commands)
    options = [vars(parser_of(name).parse_args(words)) for name, *words in commands if name.startswith("train-")]
    assert len(options) == 3
    assert [{name: found[name] for name in EQUAL} for found in options] == [
        {name: options[0][name] for name in EQUAL}
    ] * 3
    assert sum("graphs" in found for found in options) == 1


def test_a_model_that_the_demo_has_not_is_named_with_those_it_has(tmp_path: Path, commands: list[list[str]]) -> None:
    with pytest.raises(ValueError, match="--models gap: choose among cls, oc_clip, sparo"):
        run_recorded("oc-clip", tmp_path, commands, "--models", "gap")


def test_the_table_gives_mean_and_deviation_over_seeds() -> None:
    recipe = demo.read_recipe("clip")

    def run(model: str, *scores: float) -> dict[str, Any]:
        return {"model": model, "trained": dict(zip(recipe["chance"], scores, strict=True))}

    runs = [run("sparo", 30.0, 50.0, 60.0), run("cls", 20.0, 51.0, 52.0), run("sparo", 32.0, 54.0, 60.0)]
    rows = demo.table(runs, recipe).splitlines()
    assert rows[1].split() == ["sparo", "31.0", "%", "±", "1.4", "52.0", "%", "±", "2.8", "60.0", "%", "±", "0.0"]
    assert rows[2].split() == ["cls", "20.0", "%", "51.0", "%", "52.0", "%"]
    assert rows[3].split() == ["guessing", "10.0", "%", "50.0", "%", "50.0", "%"]


# Options for each method that make the short form shorter, and what the first run leaves beside its checkpoint.
TINY = {
    "dino": {"data_path": "scenes:64:48", "num_workers": "0"},
    "clip": {"data_path": "scenes:64:48", "zero_shot_path": "scenes:20:48", "batch_size": "16", "num_workers": "0"},
    "oc-clip": {"batch_size": "16", "num_workers": "0"},
}
PAIR_RESULTS = {"zero_shot_checkpoint_scenes-20-48.json", "compositional_checkpoint_pairs.json"}
LEFT = {
    "dino": {"attention.png", "curve.png", "knn_checkpoint_scenes-60-48.json", "linear_checkpoint_scenes-60-48.json"},
    "clip": PAIR_RESULTS,
    "oc-clip": {*PAIR_RESULTS, "oc_pictures.png", "oc_pictures.html"},
}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "models"), [("dino", ["gap"]), ("clip", ["cls"]), ("oc-clip", ["oc_clip", "cls"])])
def test_the_short_demo_ends_in_its_table_and_pictures(
    method: str, models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make demo-short` draws slots."""
    pytest.importorskip("open_clip")
    short = demo.read_recipe(method, is_short=True)
    images = "scenes:60:48" if method == "dino" else "scenes:20:48"
    sizes = {"num_training_pairs": "64", "num_pairs": "6", "images": images}
    tiny = {**short, **{key: sizes[key] for key in sizes if key in short}, "training": short["training"] | TINY[method]}
    monkeypatch.setattr(demo, "read_recipe", lambda *_: tiny)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    folder = tmp_path / "my demo"
    runs = run_command("demo", ["--method", method, "--short", "--models", *models, "--output_dir", str(folder)])
    assert json.loads((folder / "demo.json").read_text()) == runs
    assert [run["model"] for run in runs] == models
    assert all(0 <= score <= 100 for run in runs for state in tiny["states"] for score in run[state].values())
    names = {path.name for path in Path(runs[0]["folder"]).iterdir()}
    assert {"checkpoint.pth", *LEFT[method]} <= names
    assert not names & {"atlas.html", "pictures.png"}
    printed = capsys.readouterr().out
    assert f"{tiny['images']}" in printed
    assert printed.splitlines()[-1].endswith((".png", ".html")) or method == "clip"

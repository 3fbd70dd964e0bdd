"""CLIP's demo, in its short form: all parts run one after the other and end in the table."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("open_clip")

from dino_sparo.__main__ import run as run_command
from dino_sparo.clip import demo
from dino_sparo.image_text import demos
from dino_sparo.image_text.demos import CHANCE, score_table


@pytest.mark.slow
def test_the_short_demo_ends_in_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setitem(demo.SHORT, "data_path", "scenes:64:48")
    monkeypatch.setitem(demo.SHORT, "zero_shot_path", "scenes:20:48")
    monkeypatch.setitem(demo.SHORT, "batch_size", "16")
    monkeypatch.setitem(demo.TRAINING, "num_workers", "0")
    monkeypatch.setattr(demos, "SHORT_NUM_PAIRS", 6)
    monkeypatch.setattr(demos, "SHORT_NUM_IMAGES", 20)
    folder = tmp_path / "my demo"
    [run] = run_command("demo", ["--method", "clip", "--short", "--models", "cls", "--output_dir", str(folder)])
    assert json.loads((folder / "demo.json").read_text()) == [run]
    assert all(0 <= run[score] <= 100 for score in CHANCE)
    folder = Path(run["folder"])
    results = {"zero_shot_checkpoint_scenes-20-48.json", "compositional_checkpoint_pairs.json"}
    assert {"checkpoint.pth", *results} <= {path.name for path in folder.iterdir()}
    assert not (folder / "pictures.png").exists()  # make demo-short runs sparo and draws its slots
    last = capsys.readouterr().out.splitlines()
    assert last[-1].split() == ["guessing", "10.0", "%", "50.0", "%", "50.0", "%"]


def test_the_table_gives_mean_and_deviation_over_seeds() -> None:
    def run(readout: str, *scores: float) -> dict:
        return {"readout": readout, **dict(zip(CHANCE, scores, strict=True))}

    runs = [run("sparo", 30.0, 50.0, 60.0), run("cls", 20.0, 51.0, 52.0), run("sparo", 32.0, 54.0, 60.0)]
    rows = score_table(runs).splitlines()
    assert rows[1].split() == ["sparo", "31.0", "%", "±", "1.4", "52.0", "%", "±", "2.8", "60.0", "%", "±", "0.0"]
    assert rows[2].split() == ["cls", "20.0", "%", "51.0", "%", "52.0", "%"]

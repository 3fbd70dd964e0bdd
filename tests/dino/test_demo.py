"""The demo, in its short form: all parts run one after the other and end in the table."""

from pathlib import Path

import pytest
import torch

from dino_sparo.__main__ import run as run_command
from dino_sparo.dino import demo


@pytest.mark.slow
def test_the_short_demo_ends_in_its_table_and_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    readout = "gap"  # make demo-short runs sparo
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setitem(demo.SHORT, "data_path", "scenes:64:48")
    monkeypatch.setattr(demo, "SHORT_EVALUATION_DATA", "scenes:60:48")
    monkeypatch.setitem(demo.TRAINING, "num_workers", "0")
    folder = tmp_path / "my demo"
    [run] = run_command("demo", ["--short", "--models", readout, "--output_dir", str(folder)])
    printed = capsys.readouterr().out
    for state in ("untrained", "trained"):
        assert 0 <= run[state]["20-NN"] <= 100
        assert f"{readout:<10}{state:<12}" in printed
    names = {path.name for path in (folder / f"{readout}_seed0").iterdir()}
    results = {f"{name}_checkpoint_scenes-60-48.json" for name in ("knn", "linear")}
    assert {"attention.png", "curve.png", "checkpoint.pth", *results} <= names
    assert "atlas.html" not in names

"""studies/ibot.py: every kind of run, small; tables of the results; labels of patches."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from studies import __main__ as studies
from studies import ibot
from studies.runs import RESULTS

ROOT = Path(__file__).parents[1]
NAMES = ("scenes_dino_sparo", "continued_ibot_sparo", "continued_simdino_sparo", "cifar10_ibot_cls")


def photographs(folder: Path) -> Path:
    """Ten classes of three photographs, in train/ and val/."""
    for index in range(60):
        path = folder / ("train" if index < 30 else "val") / f"class{index % 10}" / f"{index:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (4 * index, 80, 200)).save(path)
    return folder


def test_patches_are_labelled_with_the_object_of_most_of_their_pixels() -> None:
    masks = np.zeros((2, 4, 4), dtype=bool)
    masks[0, :2, :3], masks[1, 2:, 2:] = True, True
    masks[0, 1, 2] = False
    assert ibot.patch_labels(masks, np.array([4, 7]), side=2).tolist() == [5, 0, 0, 8]


@pytest.mark.slow
def test_every_kind_of_run_gives_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"IMAGES": 30, "EVALUATED": 30, "CALIBRATION_STEPS": 1, "tasks": lambda _: NAMES}.items():
        monkeypatch.setattr(ibot, name, value)
    monkeypatch.setitem(ibot.RECIPE, "batch_size_per_gpu", 10)
    monkeypatch.setattr(ibot.patch_miou, "__defaults__", ((30, 10), 64))
    words = ["--seconds", "0.01", "--seeds", "0", "--output_dir", str(tmp_path / "out")]
    words += ["--results", str(tmp_path), "--data_path", str(photographs(tmp_path / "cifar"))]
    tables = studies.main(["ibot", *words])
    for name in NAMES:
        assert name in tables
        found = json.loads((tmp_path / "ibot" / f"{name}_seed0.json").read_text())
        assert len(found["epochs"]) == 5 if name.startswith("continued") else found["scores"]
    scores = json.loads((tmp_path / "ibot" / "scenes_dino_sparo_seed0.json").read_text())["scores"]
    assert set(scores) == {"20-NN", "linear", "slot score", "mIoU of patches"}
    assert tables == studies.main(["ibot", *words, "--report", "true"])


def test_the_page_shows_the_tables_of_the_result_files() -> None:
    page = "\n\n".join((ROOT / name).read_text(encoding="utf-8") for name in ("docs/results.md", "studies/README.md"))
    assert all(table in page for table in ibot.report(RESULTS).split("\n\n"))

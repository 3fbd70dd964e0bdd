"""Slots of a study's encoders: what is asked of which command, and what the tables say."""

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dino_sparo.commands import parser_of
from dino_sparo.evaluation.objects.measures import MEASURES
from studies import runs, slots
from studies.runs import Run

ROOT = Path(__file__).parents[1]
CHOSEN = {"cls": 0.002, "gap": 0.008, "sparo": 0.008}


class Commands:
    """In place of our commands: notes what was asked, answers with numbers that tell seed and row apart."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str], bool]] = []

    def __call__(self, name: str, words: Sequence[str]) -> dict[str, Any]:
        parser_of(name).parse_args(words)  # refuses unknown options
        given = [word for word in words if word != "--untrained"]
        options = dict(zip(given[::2], given[1::2], strict=True))
        self.asked.append((name, options, "--untrained" in words))
        is_sparo, seed = "sparo" in options["--pretrained_weights"], int(options["--seed"])
        is_faster = "cls_lr0.008" in options["--pretrained_weights"]
        if name == "slots study":
            kept = 60 + seed - 10 * ("--untrained" in words)
            curve = [
                {"num_kept": number, "top1_held_out": kept + number, "random": {"mean": kept}} for number in (1, 2)
            ]
            return {"curve": curve}
        own = 0.5 + 0.01 * seed * (1 + is_sparo) + 0.1 * is_faster
        of_row = {"model": own, "untrained": 0.25, "other_image": 0.125, "moved": 0.1}
        rows = {row: {measure: {"mean": mean} for measure in MEASURES} for row, mean in of_row.items()}
        match = {name: {"mean": 0.75} for name in ("matched", "untrained", "shuffled_images")}
        return {"measures": rows, "match": {**match, "mean_of_all_pairs": 0.5}}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Finished runs of seeds 0 to 2 with checkpoints, of `cls` at two rates, and one that is in no table."""
    monkeypatch.setattr(runs, "load_checkpoint", lambda path: {"epoch": json.loads(path.read_text())})
    monkeypatch.setattr(runs, "chosen_rates", lambda *_: CHOSEN)
    rows = [*CHOSEN.items(), ("cls", 0.008)]
    made = [Run("scenes", variant, lr, seed) for variant, lr in rows for seed in range(3)]
    for run in [*made, Run("scenes", "cls", 0.004, 0)]:
        path = tmp_path / "results" / "scenes" / f"{run.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"options": run.options, "epochs": [{}] * int(run.options["epochs"])}))
        (tmp_path / "out" / "scenes" / run.name).mkdir(parents=True)
        (tmp_path / "out" / "scenes" / run.name / "checkpoint.pth").write_text(run.options["epochs"])
    return tmp_path / "results"


def asked_of(results: Path) -> list[tuple[str, dict[str, str], bool]]:
    commands = Commands()
    slots.measure_missing(Namespace(output_dir=results.parent / "out", results=results), commands)
    return commands.asked


def test_the_chosen_encoders_with_maps_are_measured_once(results: Path) -> None:
    asked = asked_of(results)
    scored = [Path(options["--pretrained_weights"]).parent.name for name, options, _ in asked if name == "slots score"]
    rows = ("cls_lr0.002", "cls_lr0.008", "sparo_lr0.008")
    assert sorted(scored) == [f"{row}_seed{seed}" for row in rows for seed in range(3)]
    studied = [(options["--seed"], untrained) for name, options, untrained in asked if name == "slots study"]
    assert sorted(studied) == [(str(seed), state) for seed in range(3) for state in (False, True)]
    data = {(name, own["--data_path"], own.get("--maps"), own.get("--img_size")) for name, own, _ in asked}
    assert data == {("slots score", "scenes:2000:64", "4", None), ("slots study", "scenes:4000:48", None, "32")}
    assert asked_of(results) == []


def test_runs_that_are_under_way_again_are_not_measured(results: Path) -> None:
    for name in ("cls_lr0.002_seed0", "sparo_lr0.008_seed2"):
        (results.parent / "out" / "scenes" / name / "checkpoint.pth").write_text("1")
    asked = asked_of(results)
    scored = {Path(options["--pretrained_weights"]).parent.name for name, options, _ in asked if name == "slots score"}
    others = {"cls_lr0.008_seed0", "cls_lr0.008_seed1", "cls_lr0.008_seed2"}
    assert scored == others | {"cls_lr0.002_seed1", "cls_lr0.002_seed2", "sparo_lr0.008_seed0", "sparo_lr0.008_seed1"}
    assert [options["--seed"] for _, options, _ in asked if "--match" in options] == ["0"]


def test_slots_are_matched_with_those_of_the_next_seed(results: Path) -> None:
    matched = [options for _, options, _ in asked_of(results) if "--match" in options]
    pairs = {options["--seed"]: Path(options["--match"]).parent.name for options in matched}
    assert pairs == {"0": "sparo_lr0.008_seed1", "1": "sparo_lr0.008_seed2"}


def test_the_tables_are_of_the_measured_encoders(results: Path) -> None:
    assert slots.report(results) == ""
    asked_of(results)
    tables = slots.report(results)
    assert "| cls, trained | 3 | 51.0 ± 1.0 |" in tables
    assert "| sparo, trained | 3 | 52.0 ± 2.0 |" in tables
    assert "| sparo, maps of another image | 3 | 12.5 ± 0.0 |" in tables
    # 25, 27, 29: t(2) = 4.303; 4.303 * 2 / sqrt(3) = 4.97
    assert "| sparo, trained - untrained | +27.0 [+22.0, +32.0] |" in tables
    assert "| sparo - cls, trained | +1.0 [-1.5, +3.5] |" in tables
    assert "| sparo - cls, rate 0.008, trained | -9.0 [-11.5, -6.5] |" in tables
    assert "| 2 | 63.0 ± 1.0 | 61.0 ± 1.0 | 53.0 ± 1.0 | 51.0 ± 1.0 |" in tables
    assert "| 1, 2 | 0.75 | 0.50 | 0.75 | 0.75 |" in tables


def test_the_tables_of_the_results_page_are_those_of_the_files() -> None:
    page = "\n\n".join((ROOT / name).read_text() for name in ("docs/results.md", "studies/README.md"))
    for table in filter(None, slots.report(runs.RESULTS).split("\n\n")):
        assert table in page, "python -m studies maps"

"""Studies: which runs are made, and what the tables say of them."""

import csv
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dino_sparo.runtime.faults import MendableError
from dino_sparo.weights.encoder import load_encoder
from studies import __main__ as script
from studies import plans, report, runs
from studies.plans import CHOICE_SEED, STUDIES, with_random_slots
from studies.runs import Run

ROOT = Path(__file__).parents[1]
Scores = Mapping[str, Mapping[str, float]]


def write(results: Path, run: Run, quality: float = 0.0, scores: Scores | None = None, diverged: str = "") -> None:
    path = results / run.study / f"{run.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    epochs = [{"step": 10, "train_loss": 2.0, "knn_20": quality}] * int(run.options["epochs"])
    result = {"options": run.options, "epochs": epochs, "scores": scores or {}, "training_processor_s": 60}
    result |= {"encoder_parameters": 1000, "trained_parameters": 2000, "commit": "0123456789", "torch": "2.15.0"}
    path.write_text(json.dumps(result | ({"run": run.name, "diverged": diverged} if diverged else {})))


def write_all(results: Path, offsets: Mapping[str, float]) -> None:
    for run in runs.choosing_runs("scenes"):
        write(results, run, quality=run.lr * 1000 if run.variant == "cls" else -run.lr)
    for run in runs.reported_runs("scenes", results):
        trained = {"20-NN": 60.0 + run.seed + offsets[run.variant] * (1 + run.seed)}
        wide = {"20-NN, 4 blocks": trained["20-NN"] + 1} if run.variant == "cls" else {}
        random_slots = {"20-NN, random slots": 61.0 + run.seed}
        write(results, run, scores={"untrained": {"20-NN": 50.0}, "trained": trained | wide | random_slots})


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A finished study; cls at the rate 0.008, gap and sparo at 0.002."""
    write_all(tmp_path, {"cls": 0.0, "gap": 0.0, "sparo": 2.0})
    return tmp_path


def test_rates_are_chosen_per_variant_by_runs_that_are_not_reported_and_seeds_come_in_order(results: Path) -> None:
    assert runs.chosen_rates("scenes", results) == {"cls": 0.008, "gap": 0.002, "sparo": 0.002}
    seeds = [run.seed for run in runs.reported_runs("scenes", results)]
    assert seeds == sorted(seeds)
    assert len(seeds) == 3 * 5
    assert CHOICE_SEED not in seeds


def test_no_run_is_reported_before_its_learning_rate_is_chosen(tmp_path: Path) -> None:
    assert "seeds" not in report.report("scenes", tmp_path)
    for run in runs.choosing_runs("scenes")[:4]:  # all of cls, one of gap
        write(tmp_path, run)
    assert {run.variant for run in runs.reported_runs("scenes", tmp_path)} == {"cls"}


def test_tables_pair_the_seeds_and_give_students_interval(results: Path) -> None:
    tables = report.report("scenes", results)
    for line in (
        # sparo - cls: 2, 4, 6, 8, 10; t(4) = 2.776; 2.776 * 3.1623 / sqrt(5) = 3.93
        "| sparo - cls | +0.0 [+0.0, +0.0] | +6.0 [+2.1, +9.9] |",
        "| gap - cls | +0.0 [+0.0, +0.0] | +0.0 [+0.0, +0.0] |",
        f"62.0 ± {statistics.stdev([60, 61, 62, 63, 64]):.1f}",
        "| sparo | 4 | 50.00 | 74.00 |",
        "**8.00**",  # the choice for cls
        # Controls are rows, not columns. sparo is 1, 3, 5, 7, 9 above both.
        "| cls, 4 blocks | 0 |  | 61.00 |",
        "| cls, 4 blocks - cls |  | +1.0 [+1.0, +1.0] |",
        "| sparo - cls, 4 blocks |  | +5.0 [+1.1, +8.9] |",
        "| gap, random slots | 3 |  | 64.00 |",
        "| sparo - gap, random slots |  | +5.0 [+1.1, +8.9] |",
        "|  | 63.0 ± 1.6 |  |  |  |",  # encoders of a control have no sizes
        # What training adds: 12, 15, 18, 21, 24.
        "| sparo | +18.0 [+12.1, +23.9] |",
        "24 of 24 runs are finished, ",
        "Commits: 0123456; torch 2.15.0.",
        " 0.4 CPU hours in total.",
    ):
        assert line in tables
    assert "| sparo - cls | +6.0 [+2.1, +9.9] |" in tables[tables.index("difference of the gains") :]
    assert "20-NN, 4 blocks" not in tables
    assert "20-NN, random slots" not in tables
    report.draw("scenes", results, results / "scenes.png")
    assert (results / "scenes.png").stat().st_size > 10_000


def test_a_row_at_another_rate_than_the_chosen_one_has_its_own_runs(results: Path) -> None:
    for run in runs.choosing_runs("scenes"):
        write(results, run, quality=-run.lr)
    missing = [run for run in runs.reported_runs("scenes", results) if run.result(results) is None]
    assert {(run.variant, run.lr) for run in missing} == {("cls", 0.002)}  # cls at 0.008 was chosen before
    for run in missing:
        write(results, run, scores={"untrained": {"20-NN": 50.0}, "trained": {"20-NN": 55.0}})
    tables = report.report("scenes", results)
    assert "| cls | 4 | 50.00 | 55.00 |" in tables
    assert "| cls, rate 0.008 | 4 | 50.00 | 64.00 |" in tables
    assert "29 of 29 runs are finished" in tables


def test_a_rate_at_an_end_of_the_grid_and_a_tie_are_named(tmp_path: Path) -> None:
    for run in runs.choosing_runs("scenes"):
        write(tmp_path, run, quality={"cls": 1.0, "gap": run.lr, "sparo": run.lr == 0.004}[run.variant])
    note = report.choice_note("scenes", tmp_path)
    assert note == (
        "`cls`: a tie; the smaller rate was chosen. "
        "`cls`: the smallest rate was chosen; a smaller rate may be better. "
        "`gap`: the largest rate was chosen; a larger rate may be better."
    )


def test_a_rate_that_diverged_is_not_chosen_and_is_named(results: Path) -> None:
    too_large, seed_0 = Run("scenes", "cls", 0.008, CHOICE_SEED), Run("scenes", "cls", 0.004, 0)
    why = "the loss is not finite at step 7 (epoch 0), lr 0.5; rank 0: loss nan"
    write(results, too_large, diverged=why)
    assert runs.chosen_rates("scenes", results)["cls"] == 0.004
    assert "| cls | 2.00 | **4.00** | diverged |" in report.choice_table("scenes", results)
    write(results, seed_0, diverged=why)
    assert report.finished("scenes", results)["cls"] == {}
    last = report.report("scenes", results).split("\n\n")[-1]
    assert "diverged and are in no other table: cls_lr0.008_seed100 (the loss is not finite at step 7 (epoch 0)" in last
    assert "cls_lr0.004_seed0" in last
    for run in runs.choosing_runs("scenes"):
        write(results, run, diverged=why)
    assert runs.chosen_rates("scenes", results) == {}


def test_one_seed_has_no_interval_and_one_without_a_partner_is_not_compared(results: Path) -> None:
    assert report.t_interval([1.25]) == "+1.2 (one seed)"
    (results / "scenes" / "cls_lr0.008_seed4.json").unlink()
    assert "| sparo - cls | +0.0 [+0.0, +0.0] | +5.0 [+0.9, +9.1] |" in report.report("scenes", results)


def test_a_study_that_has_begun_shows_its_scores(results: Path) -> None:
    for path in (results / "scenes").glob("*.json"):
        if "seed100" not in path.name and path.name != "sparo_lr0.002_seed1.json":
            path.unlink()
    tables = report.report("scenes", results)
    assert "| sparo | 1 | 50.00 | 65.00 |" in tables
    assert "10 of 24 runs are finished" in tables
    report.draw("scenes", results, results / "scenes.png")


def test_damaged_results_and_those_of_another_recipe_are_named(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: None)
    for _ in range(2):
        runs._start(Run("scenes", "cls", 0.004, 0), "scenes:100:48", tmp_path / "out", "", results)
    path = results / "scenes" / "sparo_lr0.002_seed1.json"
    text = path.read_text()
    path.write_text(text[:200])
    with pytest.raises(ValueError, match=r"sparo_lr0.002_seed1.json is not valid JSON"):
        report.report("scenes", results)
    path.write_text(text)
    monkeypatch.setitem(STUDIES, "scenes", STUDIES["scenes"].with_epochs(1))
    with pytest.raises(ValueError, match=r"made with another recipe \(epochs '4' then, '1' now\); delete it"):
        report.report("scenes", results)
    with pytest.raises(ValueError, match=r"begun with another recipe \(epochs '4' then, '1' now\); delete the folder"):
        runs._start(Run("scenes", "cls", 0.004, 0), "scenes:100:48", tmp_path / "out", "", results)


def test_several_machines_share_a_study(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (results / "scenes").glob("*seed[134].json"):
        path.unlink()
    asked: list[tuple[str, int, int]] = []

    def start(missing: list[Run], *rest: object) -> None:
        asked.extend((run.variant, run.seed, rest[-1]) for run in missing)

    monkeypatch.setattr(runs, "start_runs", start)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    folders = ["--output_dir", str(tmp_path / "out"), "--results", str(results)]
    script.main(["scenes", *folders, "--report"])
    assert not asked
    script.main(["scenes", *folders, "--jobs", "2", "--seeds", "0", "3"])
    assert asked == [(variant, 3, 2) for variant in ("cls", "gap", "sparo")]
    assert (tmp_path / "out" / "scenes.png").is_file()


@pytest.mark.parametrize("name", sorted(path.name for path in runs.RESULTS.glob("*") if path.name in STUDIES))
def test_the_tables_of_the_results_page_are_those_of_the_runs(name: str) -> None:
    page = "\n\n".join((ROOT / name).read_text() for name in ("docs/results.md", "studies/README.md"))
    for table in report.report(name, runs.RESULTS).split("\n\n")[1:]:
        assert table in page, f"python -m studies {name} --report"


def test_photographs_are_trained_on_whole_and_evaluated_in_equal_numbers(tmp_path: Path) -> None:
    for split, count in {"train": 2500, "val": 500}.items():
        for label in ("cat", "dog, wet"):
            (tmp_path / split / label).mkdir(parents=True)
            for number in range(count):
                (tmp_path / split / label / f"{number:04}.png").touch()
    train, table = plans._photographs(str(tmp_path), tmp_path, pytest.fail)
    assert train == str(tmp_path / "train")
    with Path(table).open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    found = Counter((label, split) for _, label, split in rows)
    assert found == {(label, split): 500 for label in ("cat", "dog, wet") for split in ("train", "val")}
    assert all(Path(path).is_file() for path, *_ in rows)
    Path(rows[0][0]).unlink()
    with pytest.raises(ValueError, match=r"train/cat has 2499 files; this study takes 2500 photographs of each class"):
        plans._photographs(str(tmp_path), tmp_path, pytest.fail)
    with pytest.raises(ValueError, match="give --data_path with the class folders"):
        plans._photographs(None, tmp_path, pytest.fail)


def test_a_clip_is_scored_on_held_out_scenes_and_captions_that_are_written_once(tmp_path: Path) -> None:
    asked: list[str] = []

    def run(name: str, words: list[str]) -> Any:
        asked.append(name)
        given = dict(zip(words[::2], words[1::2], strict=True))
        if name == "scene-pairs":
            Path(given["--output_dir"]).mkdir()
        elif name == "zero-shot":
            assert given["--data_path"] == "scenes:4000:48"
        else:
            assert given["--data_root"] == str(tmp_path / "pairs")
        splits = {"swap_obj": {"accuracy": 51.0}, "swap_att": {"accuracy": 60.0}}
        if name == "compositional":
            return [{"benchmarks": {"scene-pairs": {"splits": splits}}}]
        return {"top1": 37.0}

    for _ in range(2):
        train, evaluated = plans._scenes_with_captions(None, tmp_path, run)
    assert train == str(plans.CLIP_DEMO["training"]["data_path"])
    scores = plans.clip_scores(tmp_path, "sparo", 0, evaluated, run)
    assert scores == {"trained": {"zero-shot shape": 37.0, "swapped objects": 51.0, "swapped attributes": 60.0}}
    assert asked == ["scene-pairs", "zero-shot", "compositional"]


def test_every_column_is_measured_by_its_own_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "with_random_slots", lambda *place: Path("shallow" if place[-1] else "random"))
    asked: list[tuple[str, ...]] = []

    def run(name: str, words: list[str]) -> dict:
        path = Path(words[words.index("--pretrained_weights") + 1]).stem
        blocks = words[words.index("--n_last_blocks") + 1] if "--n_last_blocks" in words else "default"
        asked.append((name, path, "untrained" if "--untrained" in words else "trained", blocks))
        row = {"top1": len(asked) - 1}
        return {"results": [row]} if name == "knn" else {"best": row}

    found = plans.dino_scores(tmp_path, "cls", 0, "scenes", run)
    commands = {state: {column: asked[int(number)] for column, number in own.items()} for state, own in found.items()}
    of_both = {
        state: {
            "20-NN": ("knn", "checkpoint", state, "default"),
            "linear probe": ("linear", "checkpoint", state, "default"),
            "linear probe, encoding alone": ("linear", "checkpoint", state, "1"),
            "20-NN, 4 blocks": ("knn", "checkpoint", state, "4"),
        }
        for state in ("untrained", "trained")
    }
    random_slots = {
        "20-NN, random slots": ("knn", "random", "trained", "default"),
        "linear probe, random slots": ("linear", "random", "trained", "1"),
        "20-NN, random slots, one block less": ("knn", "shallow", "trained", "default"),
        "linear probe, random slots, one block less": ("linear", "shallow", "trained", "1"),
    }
    assert commands == of_both | {"trained": of_both["trained"] | random_slots}


@pytest.mark.slow
def test_a_run_trains_evaluates_and_says_with_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STUDIES, "scenes", STUDIES["scenes"].with_epochs(1))
    wanted = [
        Run("scenes", "cls", 0.004, 0),
        Run("scenes", "sparo", 0.004, CHOICE_SEED),
        Run("scenes", "gap", 1e30, CHOICE_SEED),
    ]
    runs.start_runs(wanted, "scenes:320:48", tmp_path / "out", "scenes:100:48", tmp_path / "results", jobs=2)
    reported, choosing, too_large = (run.result(tmp_path / "results") for run in wanted)
    assert reported is not None
    assert set(reported["scores"]) == {"untrained", "trained"}
    probes = {"linear probe", "linear probe, encoding alone"}
    of_trained = {"20-NN", "20-NN, 4 blocks", "20-NN, random slots", "linear probe, random slots"} | probes
    of_trained |= {"20-NN, random slots, one block less", "linear probe, random slots, one block less"}
    assert set(reported["scores"]["trained"]) == of_trained
    assert set(reported["scores"]["untrained"]) == {"20-NN", "20-NN, 4 blocks"} | probes
    assert choosing is not None
    assert choosing["scores"] == {}
    assert "diverged" not in choosing
    assert too_large is not None
    assert "not finite at step" in too_large["diverged"]
    assert reported["epochs"][-1]["step"] == 20
    assert reported["options"]["readout"] == "cls"
    assert reported["training_processor_s"] > 0
    assert reported["evaluation_processor_s"] > 0
    assert reported["trained_parameters"] > reported["encoder_parameters"]
    folder = tmp_path / "out" / wanted[0].name
    weights = folder / "checkpoint.pth"
    deep, shallow = (load_encoder(with_random_slots(weights, folder, 0, less)) for less in (False, True))
    assert (len(deep.backbone.blocks), len(shallow.backbone.blocks)) == (4, 3)
    own = load_encoder(weights).backbone
    for name, value in shallow.backbone.state_dict().items():
        assert torch.equal(value, own.state_dict()[name])


@pytest.mark.slow
def test_a_run_that_fails_ends_the_study_and_names_its_log(tmp_path: Path) -> None:
    wanted = [Run("scenes", "cls", 0.004, 0)]
    with pytest.raises(MendableError, match=r"ended with status 1; see .*console.txt"):
        runs.start_runs(wanted, "nowhere", tmp_path / "out", "", tmp_path / "results", jobs=2)


def group_ends(group: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.2)
    return False


@pytest.mark.slow
def test_a_study_that_is_asked_to_stop_saves_its_run_and_leaves_no_process(tmp_path: Path) -> None:
    words = ["scenes", "--epochs", "1", "--output_dir", str(tmp_path / "out"), "--results", str(tmp_path / "results")]
    study = subprocess.Popen([sys.executable, "-m", "studies", *words], cwd=ROOT, start_new_session=True)
    folder = tmp_path / "out" / "scenes" / "cls_lr0.002_seed100"
    console = folder / "console.txt"
    deadline = time.monotonic() + 240
    while not (console.exists() and "step" in console.read_text()):
        if time.monotonic() > deadline:
            os.killpg(study.pid, signal.SIGKILL)
            pytest.fail("the first run never began")
        time.sleep(0.2)
    os.killpg(study.pid, signal.SIGINT)  # as Ctrl-C in a terminal
    assert study.wait(timeout=60) != 0
    assert group_ends(study.pid, within_s=30)
    assert (folder / "checkpoint.pth").exists()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]

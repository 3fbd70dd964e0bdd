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
from unittest import mock

import pytest
import torch

from dino_sparo.runtime.faults import MendableError
from dino_sparo.weights.checkpoint import load_encoder
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


def test_the_learning_rate_is_chosen_per_variant_and_by_runs_that_are_not_reported(tmp_path: Path) -> None:
    write_all(tmp_path, {"cls": 0.0, "gap": 0.0, "sparo": 0.0})
    assert runs.chosen_rates("scenes", tmp_path) == {"cls": 0.008, "gap": 0.002, "sparo": 0.002}
    assert all(run.seed != CHOICE_SEED for run in runs.reported_runs("scenes", tmp_path))


def test_no_run_is_reported_before_its_learning_rate_is_chosen(tmp_path: Path) -> None:
    for run in runs.choosing_runs("scenes")[:4]:  # all of cls, one of gap
        write(tmp_path, run)
    assert {run.variant for run in runs.reported_runs("scenes", tmp_path)} == {"cls"}


def test_all_variants_of_one_seed_come_before_the_next_seed(tmp_path: Path) -> None:
    write_all(tmp_path, dict.fromkeys(("cls", "gap", "sparo"), 0.0))
    seeds = [run.seed for run in runs.reported_runs("scenes", tmp_path)]
    assert seeds == sorted(seeds)
    assert len(seeds) == 3 * 5


def test_tables_pair_the_seeds_and_give_students_interval(tmp_path: Path) -> None:
    write_all(tmp_path, {"cls": 0.0, "gap": 0.0, "sparo": 2.0})
    tables = report.report("scenes", tmp_path)
    # sparo - cls: 2, 4, 6, 8, 10; t(4) = 2.776; 2.776 * 3.1623 / sqrt(5) = 3.93
    assert "| sparo - cls | +0.0 [+0.0, +0.0] | +6.0 [+2.1, +9.9] |" in tables
    assert "| gap - cls | +0.0 [+0.0, +0.0] | +0.0 [+0.0, +0.0] |" in tables
    assert f"62.0 ± {statistics.stdev([60, 61, 62, 63, 64]):.1f}" in tables
    assert "| sparo | 4 | 50.00 | 74.00 |" in tables
    assert "**8.00**" in tables  # the choice for cls


def test_the_width_control_stands_as_a_row_of_its_own_and_is_compared_with_the_others(tmp_path: Path) -> None:
    write_all(tmp_path, {"cls": 0.0, "gap": 0.0, "sparo": 2.0})
    tables = report.report("scenes", tmp_path)
    assert "| cls, 4 blocks | 0 |  | 61.00 |" in tables
    assert "| cls, 4 blocks - cls |  | +1.0 [+1.0, +1.0] |" in tables
    assert "| sparo - cls, 4 blocks |  | +5.0 [+1.1, +8.9] |" in tables
    assert "20-NN, 4 blocks" not in tables


def test_a_row_at_another_rate_than_the_chosen_one_has_its_own_runs(tmp_path: Path) -> None:
    write_all(tmp_path, {"cls": 0.0, "gap": 0.0, "sparo": 2.0})
    for run in runs.choosing_runs("scenes"):
        write(tmp_path, run, quality=-run.lr)
    missing = [run for run in runs.reported_runs("scenes", tmp_path) if run.result(tmp_path) is None]
    assert {(run.variant, run.lr) for run in missing} == {("cls", 0.002)}  # cls at 0.008 was chosen before
    for run in missing:
        write(tmp_path, run, scores={"untrained": {"20-NN": 50.0}, "trained": {"20-NN": 55.0}})
    tables = report.report("scenes", tmp_path)
    assert "| cls | 4 | 50.00 | 55.00 |" in tables
    assert "| cls, rate 0.008 | 4 | 50.00 | 64.00 |" in tables
    assert "29 of 29 runs are finished" in tables


def test_slots_that_learned_nothing_are_a_row_too(tmp_path: Path) -> None:
    write_all(tmp_path, {"cls": 0.0, "gap": 0.0, "sparo": 2.0})
    tables = report.report("scenes", tmp_path)
    assert "| gap, random slots | 3 |  | 64.00 |" in tables
    # 1, 3, 5, 7, 9 more than the random slots
    assert "| sparo - gap, random slots |  | +5.0 [+1.1, +8.9] |" in tables
    sizes = next(line for line in tables.splitlines() if line.startswith("| sparo, random slots | 5 |"))
    assert sizes.endswith("|  | 63.0 ± 1.6 |  |  |  |")
    assert "20-NN, random slots" not in tables


def test_what_training_adds_is_paired_with_the_same_untrained_encoder(tmp_path: Path) -> None:
    write_all(tmp_path, {"cls": 0.0, "gap": 0.0, "sparo": 2.0})
    tables = report.report("scenes", tmp_path)
    assert "| sparo | +18.0 [+12.1, +23.9] |" in tables  # trained - untrained: 12, 15, 18, 21, 24
    gains = tables[tables.index("difference of the gains") :]
    assert "| sparo - cls | +6.0 [+2.1, +9.9] |" in gains  # 2, 4, 6, 8, 10


def test_a_rate_at_an_end_of_the_grid_and_a_tie_are_named(tmp_path: Path) -> None:
    for run in runs.choosing_runs("scenes"):
        write(tmp_path, run, quality={"cls": 1.0, "gap": run.lr, "sparo": run.lr == 0.004}[run.variant])
    note = report.choice_note("scenes", tmp_path)
    assert note == (
        "`cls`: a tie; the smaller rate was chosen. "
        "`cls`: the smallest rate was chosen; a smaller one may be better. "
        "`gap`: the largest rate was chosen; a larger one may be better."
    )


def test_a_rate_that_diverged_is_not_chosen_and_is_named(tmp_path: Path) -> None:
    write_all(tmp_path, dict.fromkeys(("cls", "gap", "sparo"), 0.0))
    too_large, seed_0 = Run("scenes", "cls", 0.008, CHOICE_SEED), Run("scenes", "cls", 0.004, 0)
    why = "the loss is not finite at step 7 (epoch 0), lr 0.5; rank 0: loss nan"
    write(tmp_path, too_large, diverged=why)
    assert runs.chosen_rates("scenes", tmp_path)["cls"] == 0.004
    assert "| cls | 2.00 | **4.00** | diverged |" in report.choice_table("scenes", tmp_path)
    write(tmp_path, seed_0, diverged=why)
    assert report.finished("scenes", tmp_path)["cls"] == {}
    last = report.report("scenes", tmp_path).split("\n\n")[-1]
    assert "diverged and are in no other table: cls_lr0.008_seed100 (the loss is not finite at step 7 (epoch 0)" in last
    assert "cls_lr0.004_seed0" in last
    for run in runs.choosing_runs("scenes"):
        write(tmp_path, run, diverged=why)
    assert runs.chosen_rates("scenes", tmp_path) == {}


def test_results_of_another_recipe_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all(tmp_path, dict.fromkeys(("cls", "gap", "sparo"), 0.0))
    monkeypatch.setitem(STUDIES, "scenes", STUDIES["scenes"].with_epochs(1))
    with pytest.raises(ValueError, match=r"made with another recipe \(epochs '4' then, '1' now\); delete it"):
        report.report("scenes", tmp_path)


def test_the_report_names_code_and_processor_hours(tmp_path: Path) -> None:
    write_all(tmp_path, dict.fromkeys(("cls", "gap", "sparo"), 0.0))
    last = report.report("scenes", tmp_path).split("\n\n")[-1]
    assert last.startswith("24 of 24 runs are finished, ")
    assert "Commits: 0123456; torch 2.15.0." in last
    assert last.endswith(" 0.4 CPU hours in total.")


def test_one_seed_has_no_interval() -> None:
    assert report.t_interval([1.25]) == "+1.2 (one seed)"


def test_a_seed_without_its_partner_is_not_compared(tmp_path: Path) -> None:
    write_all(tmp_path, {"cls": 0.0, "gap": 0.0, "sparo": 2.0})
    (tmp_path / "scenes" / "cls_lr0.008_seed4.json").unlink()
    assert "| sparo - cls | +0.0 [+0.0, +0.0] | +5.0 [+0.9, +9.1] |" in report.report("scenes", tmp_path)


def test_a_study_that_has_begun_shows_its_scores(tmp_path: Path) -> None:
    write_all(tmp_path, {"cls": 0.0, "gap": 0.0, "sparo": 2.0})
    for path in (tmp_path / "scenes").glob("*.json"):
        if "seed100" not in path.name and path.name != "sparo_lr0.002_seed1.json":
            path.unlink()
    tables = report.report("scenes", tmp_path)
    assert "| sparo | 1 | 50.00 | 65.00 |" in tables
    assert "10 of 24 runs are finished" in tables
    report.draw("scenes", tmp_path, tmp_path / "scenes.png")


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    write_all(tmp_path, {"cls": 0.0, "gap": 0.0, "sparo": 2.0})
    path = tmp_path / "scenes" / "sparo_lr0.002_seed1.json"
    path.write_text(path.read_text()[:200])
    with pytest.raises(ValueError, match=r"sparo_lr0.002_seed1.json is no JSON"):
        report.report("scenes", tmp_path)


def test_several_machines_share_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all(tmp_path, {"cls": 0.0, "gap": 0.0, "sparo": 2.0})
    for path in (tmp_path / "scenes").glob("*seed[134].json"):
        path.unlink()
    asked: list[Run] = []
    monkeypatch.setattr(runs, "start_runs", lambda missing, *args: asked.extend(missing))
    runs.make_runs("scenes", None, tmp_path / "out", tmp_path, jobs=1, seeds=[0, 3])
    assert [(run.variant, run.seed) for run in asked] == [("cls", 3), ("gap", 3), ("sparo", 3)]


@pytest.mark.parametrize(
    ("words", "done", "given"),
    [
        (["--jobs", "2", "--seeds", "0", "3"], "make_runs", (2, [0, 3])),
        (["--report"], None, ()),
    ],
)
def test_the_command_does_what_its_options_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], done: str | None, given: tuple[object, ...]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    commands = {name: mock.Mock() for name in ("make_runs", "draw")}
    for name, function in commands.items():
        monkeypatch.setattr(script, name, function)
    out, results = tmp_path / "out", tmp_path / "results"
    folders = ["--data_path", "photos", "--output_dir", str(out), "--results", str(results)]
    script.main(["cifar10", *folders, *words])
    asked = {name: [call.args for call in function.call_args_list] for name, function in commands.items()}
    expected = {name: [("cifar10", "photos", out, results, *given)] * (name == done) for name in commands}
    assert asked == expected | {"draw": [("cifar10", results, out / "cifar10.png")]}


def test_a_folder_with_a_run_of_another_recipe_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: None)
    one = Run("scenes", "cls", 0.004, 0)
    runs._start(one, "scenes:100:48", tmp_path, "", tmp_path / "results")
    runs._start(one, "scenes:100:48", tmp_path, "", tmp_path / "results")
    monkeypatch.setitem(STUDIES, "scenes", STUDIES["scenes"].with_epochs(1))
    with pytest.raises(ValueError, match=r"begun with another recipe \(epochs '4' then, '1' now\); delete the folder"):
        runs._start(one, "scenes:100:48", tmp_path, "", tmp_path / "results")


def test_nothing_finished_gives_no_tables(tmp_path: Path) -> None:
    assert "seeds" not in report.report("scenes", tmp_path)


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    write_all(tmp_path, {"cls": 0.0, "gap": 1.0, "sparo": 2.0})
    report.draw("scenes", tmp_path, tmp_path / "scenes.png")
    assert (tmp_path / "scenes.png").stat().st_size > 10_000


def test_untrained_encoders_are_drawn_hollow_and_trained_ones_filled() -> None:
    axis, run = mock.Mock(), {"scores": {"untrained": {"20-NN": 50.0}, "trained": {"20-NN": 60.0}}}
    report._draw_score(axis, {0: run}, "20-NN", "red", height=0)
    marks = [call for call in axis.plot.call_args_list if "o" in call.args]
    assert [(call.args[0], call.kwargs["markerfacecolor"]) for call in marks] == [([50.0], "none"), ([60.0], "red")]


def test_a_study_of_photographs_asks_for_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give --data_path"):
        runs.make_runs("cifar10", None, tmp_path / "out", tmp_path / "results", jobs=1)


@pytest.mark.parametrize("name", sorted(path.name for path in runs.RESULTS.glob("*") if path.name in STUDIES))
def test_the_tables_of_the_results_page_are_those_of_the_runs(name: str) -> None:
    page = "\n\n".join((ROOT / name).read_text() for name in ("docs/results.md", "studies/README.md"))
    for table in report.report(name, runs.RESULTS).split("\n\n")[1:]:
        assert table in page, f"python -m studies {name} --report"


@pytest.mark.parametrize("name", sorted(STUDIES))
def test_every_study_has_its_baseline_and_leaves_the_learning_rate_to_the_choice(name: str) -> None:
    study = STUDIES[name]
    assert study.baseline in study.variants
    assert "lr" not in {option for options in study.variants.values() for option in options}


def no_command(name: str, words: list[str]) -> dict:
    pytest.fail(f"{name} {words}")


def test_photographs_are_trained_on_whole_and_evaluated_in_equal_numbers(tmp_path: Path) -> None:
    for split, count in {"train": 2500, "val": 500}.items():
        for label in ("cat", "dog, wet"):
            (tmp_path / split / label).mkdir(parents=True)
            for number in range(count):
                (tmp_path / split / label / f"{number:04}.png").touch()
    train, table = plans._photographs(str(tmp_path), tmp_path, no_command)
    assert train == str(tmp_path / "train")
    with Path(table).open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    found = Counter((label, split) for _, label, split in rows)
    assert found == {(label, split): 500 for label in ("cat", "dog, wet") for split in ("train", "val")}
    assert all(Path(path).is_file() for path, *_ in rows)
    Path(rows[0][0]).unlink()
    with pytest.raises(ValueError, match=r"train/cat has 2499 files; this study takes 2500 photographs of each class"):
        plans._photographs(str(tmp_path), tmp_path, no_command)


def test_photographs_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give --data_path with the class folders"):
        plans._photographs(None, tmp_path, no_command)
    with pytest.raises(FileNotFoundError, match="nowhere/train"):
        plans._photographs(str(tmp_path / "nowhere"), tmp_path, no_command)


def test_a_clip_is_scored_on_held_out_scenes_and_captions_that_are_written_once(tmp_path: Path) -> None:
    asked: list[str] = []

    def run(name: str, words: list[str]) -> dict:
        asked.append(name)
        given = dict(zip(words[::2], words[1::2], strict=True))
        if name == "scene-pairs":
            Path(given["--output_dir"]).mkdir()
        elif name == "zero-shot":
            assert given["--data_path"] == "scenes:4000:48"
        else:
            assert given["--data_root"] == str(tmp_path / "pairs")
        splits = {"swap_obj": {"accuracy": 51.0}, "swap_att": {"accuracy": 60.0}}
        return {"top1": 37.0, "splits": splits}

    for _ in range(2):
        train, evaluated = plans._scenes_with_captions(None, tmp_path, run)
    assert train == str(plans.CLIP_TRAINING["data_path"])
    scores = plans.clip_scores(plans.Trained(tmp_path, "sparo", 0, evaluated), run)
    assert scores == {"trained": {"zero-shot shape": 37.0, "swapped objects": 51.0, "swapped attributes": 60.0}}
    assert asked == ["scene-pairs", "zero-shot", "sugarcrepe"]


def test_every_column_is_measured_by_its_own_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "with_random_slots", lambda trained, less=False: Path("shallow" if less else "random"))
    asked: list[tuple[str, ...]] = []

    def run(name: str, words: list[str]) -> dict:
        path = Path(words[words.index("--pretrained_weights") + 1]).stem
        blocks = words[words.index("--n_last_blocks") + 1] if "--n_last_blocks" in words else "default"
        asked.append((name, path, "untrained" if "--untrained" in words else "trained", blocks))
        row = {"top1": len(asked) - 1}
        return {"results": [row]} if name == "knn" else {"best": row}

    found = plans.dino_scores(plans.Trained(tmp_path, "cls", 0, "scenes"), run)
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
    trained = plans.Trained(tmp_path / "out" / wanted[0].name, "cls", 0, "scenes:100:48")
    deep, shallow = (load_encoder(with_random_slots(trained, less)) for less in (False, True))
    assert (len(deep.backbone.blocks), len(shallow.backbone.blocks)) == (4, 3)
    own = load_encoder(trained.folder / "checkpoint.pth").backbone
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

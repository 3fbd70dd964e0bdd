"""training/run.py, loop.py, resume.py: promises to every objective, listed in `support/recipes.py`."""

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from image_files import write_images
from recipes import RECIPES, Recipe
from runs import (
    ROOT,
    assert_close_weights,
    assert_same_checkpoint,
    assert_same_run,
    checkpoint_of,
    epochs_of,
    small_options,
    train_small,
    train_small_on_two_ranks,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dino_sparo.__main__ import run as run_command
from dino_sparo.runtime.preemption import RunStopped
from dino_sparo.training.loop import NonFiniteLossError, TooManyCorruptError
from dino_sparo.training.updater import Updater
from dino_sparo.weights.file import CheckpointError

pytest.importorskip("open_clip")

# Of the runs that are interrupted: 3 epochs of 3 steps.
FEW: dict[str, object] = {"data_path": "scenes:19:32"}
STEPS_PER_EPOCH = 19 // 6
STOPPED_AT = STEPS_PER_EPOCH + 1


@pytest.fixture(scope="module", params=RECIPES)
def command(request: pytest.FixtureRequest) -> str:
    """The training of an objective."""
    return request.param


def quickly_with(*names: str) -> pytest.MarkDecorator:
    """The trainings of all objectives; those of other names are slow tests."""
    commands = [pytest.param(name, marks=() if name in names else pytest.mark.slow) for name in RECIPES]
    return pytest.mark.parametrize("command", commands, indirect=True, scope="module")


# What the trainer does in the same way for all objectives.
of_the_trainer = quickly_with("train", "train-clip")


@pytest.fixture
def recipe(command: str) -> Recipe:
    return RECIPES[command]


@pytest.fixture(scope="module")
def whole(command: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to its end."""
    return train_small(command, tmp_path_factory.mktemp("whole"), **FEW, saveckp_freq=2)


@pytest.fixture(scope="module")
def first_steps(command: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, stopped in its second epoch."""
    return train_small(command, tmp_path_factory.mktemp("first_steps"), **FEW, max_steps=STOPPED_AT)


def losses_of(output_dir: Path) -> list[float]:
    return [epoch["train_loss"] for epoch in epochs_of(output_dir)]


# What a run leaves.


def test_a_run_leaves_a_log_checkpoints_and_scalars(command: str, recipe: Recipe, whole: Path) -> None:
    epochs = epochs_of(whole)
    assert [(epoch["epoch"], epoch["step"]) for epoch in epochs] == [(0, 3), (1, 6), (2, 9)]
    of_all = {"train_loss", "train_lr", "train_grad_norm", f"train_corrupt_{recipe.noun}s"}
    assert of_all | set(recipe.logged) <= epochs[0].keys()
    names = {path.name for path in whole.glob("checkpoint*")}
    assert names == {"checkpoint.pth", "checkpoint_previous1.pth", "checkpoint_previous2.pth"} | {
        "checkpoint0000.pth",
        "checkpoint0002.pth",
    }
    assert {"log.txt", "run.log", "config.yaml"} <= {path.name for path in whole.iterdir()}
    events = EventAccumulator(str(whole / "tensorboard")).Reload()
    assert len(events.Scalars("train/grad_norm")) == len(events.Scalars("train/loss"))
    assert min(event.value for event in events.Scalars("train/grad_norm")) > 0
    assert "_hparams_/session_start_info" in events.summary_metadata
    assert checkpoint_of(whole)["epoch"] == 3
    assert run_command("info", [str(whole)])["steps"] == 3 * STEPS_PER_EPOCH


def test_a_checkpoint_says_what_is_needed_to_resume(recipe: Recipe, first_steps: Path) -> None:
    checkpoint = checkpoint_of(first_steps)
    assert {*recipe.state, "args"} <= checkpoint.keys()
    assert {"git", "torch", "dino_sparo"} <= checkpoint["versions"].keys()
    assert (checkpoint["epoch"], checkpoint["step"], checkpoint["global_batch"]) == (1, STOPPED_AT, 6)
    (rank,) = checkpoint["ranks"]
    assert {"torch", "numpy", "python"} == rank["rng"].keys()
    assert rank["meters"]["loss"][1] == 1  # steps of the epoch under way


# Interrupted runs.


@pytest.mark.parametrize("step", [STOPPED_AT, pytest.param(STEPS_PER_EPOCH, marks=pytest.mark.slow)])
def test_an_interrupted_run_ends_in_the_same_bits(
    command: str, whole: Path, stopped: Path, tmp_path: Path, step: int
) -> None:
    """In the middle of an epoch, and at its end."""
    folder = stopped if step > STEPS_PER_EPOCH else train_small(command, tmp_path / "epoch", **FEW, max_steps=step)
    assert checkpoint_of(folder)["step"] == step
    train_small(command, folder, **FEW, num_workers=1)
    # Not the log: DINO measures its teacher in the last step of a run too.
    assert_same_checkpoint(whole, folder, command)


@quickly_with("train")
def test_a_signal_ends_the_run_between_two_steps_and_nothing_is_lost(
    command: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in its first step, in an epoch's last one and in the next, it still writes the very same log."""
    begin = Updater.begin_step

    def begin_and_be_stopped(updater: Updater) -> None:
        begin(updater)
        if updater.step + 1 in (1, 3, 4):
            os.kill(os.getpid(), signal.SIGUSR2)

    monkeypatch.setattr(Updater, "begin_step", begin_and_be_stopped)
    steps = []
    for _ in range(3):
        with pytest.raises(RunStopped, match=r"stopped by SIGUSR2 after step \d+, which is saved") as stopped:
            train_small(command, tmp_path, **FEW)
        assert stopped.value.status == 128 + signal.SIGUSR2
        steps.append(checkpoint_of(tmp_path)["step"])
    assert steps == [1, 3, 4]
    train_small(command, tmp_path, **FEW)
    assert_same_run(whole, tmp_path, command)


@of_the_trainer
def test_resuming_a_finished_run_changes_nothing(command: str, whole: Path, tmp_path: Path) -> None:
    finished = Path(shutil.copytree(whole, tmp_path / "finished"))
    train_small(command, finished, **FEW, saveckp_freq=2)
    assert (finished / "checkpoint.pth").read_bytes() == (whole / "checkpoint.pth").read_bytes()
    assert len(epochs_of(finished)) == 3


# Other batches, processes and options.


@quickly_with("train")
@pytest.mark.parametrize(("batch", "step"), [(3, 6 + 2), pytest.param(2, 9 + 3, marks=pytest.mark.slow)])
def test_another_batch_goes_on_from_the_items_seen_if_that_is_allowed(
    command: str, recipe: Recipe, stopped: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, batch: int, step: int
) -> None:
    other = {**FEW, **recipe.batch(batch)}
    with pytest.raises(CheckpointError, match=rf"global_batch was 6 and is now {batch}, .* or --allow_rescale"):
        train_small(command, stopped, **other)
    train_small(command, stopped, **other, allow_rescale="")
    assert f"step {STOPPED_AT} with batches of 6 {recipe.noun}s is step {step} with {batch}" in caplog.text
    steps_per_epoch = 19 // batch
    assert [line["step"] for line in epochs_of(stopped)] == [STEPS_PER_EPOCH, 2 * steps_per_epoch, 3 * steps_per_epoch]
    # The schedules are those of a run that had this batch from the start.
    train_small(command, tmp_path / "from_start", **other)
    assert epochs_of(stopped)[2]["train_lr"] == epochs_of(tmp_path / "from_start")[2]["train_lr"]


@pytest.mark.slow
def test_a_run_in_parts_is_that_of_the_large_batch_and_may_resume_in_others(
    command: str, recipe: Recipe, tmp_path: Path
) -> None:
    if not recipe.networks:
        pytest.skip("each part of a batch has a loss of its own")
    plain = {"drop_path_rate": 0} if "drop_path_rate" in recipe.options else {}
    train_small(command, tmp_path / "large", **plain)
    train_small(command, tmp_path / "parts", **plain, **recipe.batch(6, parts=3), max_steps=5)
    train_small(command, tmp_path / "parts", **plain, **recipe.batch(6, parts=2), grad_checkpointing="")
    assert losses_of(tmp_path / "parts") == pytest.approx(losses_of(tmp_path / "large"), abs=2e-4)
    assert_close_weights(tmp_path / "large", tmp_path / "parts", *recipe.networks)


@pytest.mark.slow
def test_processes_of_any_number_train_as_one_does_and_resume_what_others_began(
    command: str, recipe: Recipe, tmp_path: Path
) -> None:
    """Two processes, then one, then two whose batch is in parts."""
    if recipe.draws_by_rank:
        pytest.skip("tests/ibot compares the ranks, with equal random numbers")
    plain = {"drop_path_rate": 0} if "drop_path_rate" in recipe.options else {}
    one, two = train_small(command, tmp_path / "one", **plain), tmp_path / "two"

    train_small_on_two_ranks(command, two, **plain, **recipe.batch(6, ranks=2), max_steps=5)
    train_small(command, two, **plain, max_steps=7)
    parts = 3 if recipe.networks else 1
    train_small_on_two_ranks(command, two, **plain, **recipe.batch(6, ranks=2, parts=parts))
    # The second epoch was interrupted: its mean is that of the steps after the last change of the number of processes.
    assert losses_of(two)[::2] == pytest.approx(losses_of(one)[::2], abs=2e-4)
    assert_close_weights(one, two, *recipe.networks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "changes"),
    [(command, changes) for command, recipe in RECIPES.items() for changes in recipe.variants],
    ids=str,
)
def test_other_readouts_precisions_and_optimizers_train_and_resume(
    command: str, tmp_path: Path, changes: dict[str, object]
) -> None:
    for steps in (3, 8):
        train_small(command, tmp_path, epochs=2, max_steps=steps, **changes)
    for epoch in epochs_of(tmp_path):
        assert all(torch.tensor(value).isfinite() for value in epoch.values())
    assert [epoch["step"] for epoch in epochs_of(tmp_path)] == [4, 8]


@pytest.mark.slow
def test_a_compiled_run_gives_the_losses_of_a_plain_one(command: str, tmp_path: Path) -> None:
    fewer = {"local_crops_number": 0} if "local_crops_number" in RECIPES[command].options else {}  # shapes to compile
    if command == "train":
        fewer |= {"drop_path_rate": 0}  # regions draw other random numbers
    train_small(command, tmp_path / "plain", epochs=1, **fewer)
    # In another process: here all annotations are checked at run time, which does not compile.
    choice = "regions" if command == "train" else "on"
    words = small_options(tmp_path / "compiled", command, epochs=1, compile=choice, **fewer)
    program = [sys.executable, "-m", "dino_sparo", command, *words]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the first step compiles the networks" in done.stderr
    assert losses_of(tmp_path / "plain") == pytest.approx(losses_of(tmp_path / "compiled"), abs=1e-4)


@of_the_trainer
def test_changed_options_are_named_when_resuming(command: str, stopped: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        train_small(command, stopped, **FEW, max_steps=STOPPED_AT + 1, clip_grad=0.5)
    assert re.search(r"--clip_grad was [03]\.0 and is now 0\.5", caplog.text)
    assert caplog.text.count("the rest of the run differs from its beginning") == 1


def test_another_model_and_other_steps_are_not_resumed(command: str, recipe: Recipe, stopped: Path) -> None:
    before = (stopped / "checkpoint.pth").read_bytes()
    other_steps = [
        (recipe.batch(4), "global_batch was 6 and is now 4, steps_per_epoch was 3 and is now 4"),
        ({"data_path": "scenes:18:32"}, f"num_{recipe.noun}s was 19 and is now 18"),
    ]
    for changes, message in [*recipe.other_models, *other_steps]:
        with pytest.raises(CheckpointError, match=re.escape(message)):
            train_small(command, stopped, **{**FEW, **changes})
        assert (stopped / "checkpoint.pth").read_bytes() == before


def test_a_checkpoint_of_another_objective_is_not_resumed(command: str, stopped: Path) -> None:
    other = {"train": "train-clip", "train-simdino": "train", "train-clip": "train-oc-clip"}.get(command, "train-clip")
    with pytest.raises(
        CheckpointError, match=r"checkpoint.pth .*cannot be resumed(; choose|: .* or) another --output_dir"
    ):
        train_small(other, stopped, **FEW)


# Bad input.


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_items(command: str, stopped: Path) -> None:
    with pytest.raises(
        NonFiniteLossError,
        match=r"not finite at step \d+ \(epoch \d\), lr .*scenes\[\d+\].*The optimizer changed no weights",
    ):
        train_small(command, stopped, **FEW, lr=1e30, clip_grad=0)
    checkpoint = checkpoint_of(stopped)
    assert checkpoint["step"] >= STOPPED_AT
    for network in {"student", "teacher", "model"} & checkpoint.keys():
        assert all(value.isfinite().all() for value in checkpoint[network].values())


@of_the_trainer
def test_items_that_cannot_be_read_are_skipped_counted_and_named(
    command: str, recipe: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A handful never ends a run on few images, whatever share they are."""
    images = write_images(tmp_path / "images", broken=2, classes=("dog", "cat"))
    with caplog.at_level(logging.WARNING):
        train_small(command, tmp_path / "run", data_path=images, max_corrupt=0.01, epochs=1)
    assert re.search(rf"skipped an unreadable {recipe.noun}: .*00\.png", caplog.text)
    assert epochs_of(tmp_path / "run")[0][f"train_corrupt_{recipe.noun}s"] == 2


@of_the_trainer
def test_too_many_unreadable_items_stop_the_run(command: str, recipe: Recipe, tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", broken=6, classes=("dog", "cat"))
    with pytest.raises(TooManyCorruptError, match=rf"6 of 12 {recipe.noun}s .* more than the 5 that --max_corrupt 0.1"):
        train_small(command, tmp_path / "run", data_path=images, epochs=1, max_corrupt=0.1)


BAD_OPTIONS = {
    "data_path": ("nowhere/at/all", "nowhere/at/all"),
    "batch": (27, "26 images are too few for one step"),
    "arch": ("vit_giant", "unknown arch 'vit_giant'; choose one of .*vit_small"),
    "patch_size": (7, r"(global_crops|img)_size 16 px is not a multiple of --patch_size 7 px.*nearest .* 14"),
    "precision": ("fp16", "fp16 needs a CUDA device"),
    "device": ("warp", "unknown device 'warp'"),
}


@of_the_trainer
@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_options_that_fit_no_training_are_refused_in_one_line(
    command: str, recipe: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    value, message = BAD_OPTIONS[name]
    changes = recipe.batch(value) if name == "batch" else {name: value}
    with pytest.raises(SystemExit, match=r"^1$"):
        run_command(command, small_options(tmp_path, command, **changes))
    assert re.search(message, caplog.records[-1].getMessage())
    assert caplog.records[-1].exc_info is None
    assert not (tmp_path / "checkpoint.pth").exists()
    if name == "batch":  # others are refused before there is a log
        assert re.search(r"Traceback .*UserError", (tmp_path / "run.log").read_text(), flags=re.DOTALL)


@of_the_trainer
def test_a_training_without_data_or_folder_is_refused_and_told_how_to_try(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The bug: it trained on the built-in scenes, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for words, missing in (
        ("", "give --data_path and --output_dir."),
        ("--data_path scenes", "give --output_dir."),
        ("--output_dir runs", "give --data_path."),
    ):
        with pytest.raises(SystemExit, match=r"^1$"):
            run_command(command, words.split())
        for part in (missing, "`--data_path scenes`", "`dino-sparo demo`"):
            assert part in caplog.messages[-1]
    assert list(tmp_path.iterdir()) == []

"""main_dino.py from the outside: a run, its files, resuming, and what it says about bad input."""

import copy
import logging
import math
import os
import shutil
import signal
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from image_files import write_images
from PIL import Image
from runs import assert_same_state, checkpoint_of, epochs_of, small_options, train_small

import main_dino
from dino_sparo import load_checkpoint, load_encoder
from dino_sparo.__main__ import run as run_command
from dino_sparo.data.crops import MultiCropAugmentation
from dino_sparo.data.examples import draw_examples
from dino_sparo.data.sources import CorruptImageError, open_source
from dino_sparo.data.views import PatchView
from dino_sparo.dino.train import DINOObjective
from dino_sparo.distillation import objective as distillation
from dino_sparo.draw.pixels import to_pixels
from dino_sparo.evaluation import knn_probe
from dino_sparo.runtime import preemption
from dino_sparo.runtime.launch import Distributed
from dino_sparo.runtime.preemption import RunStopped
from dino_sparo.training import run as training_run
from dino_sparo.training.loop import NonFiniteLossError, TooManyCorruptError
from dino_sparo.training.objective import StepReport
from dino_sparo.training.resume import Run
from dino_sparo.training.updater import Updater
from dino_sparo.weights.export import export
from main_dino import get_args_parser

run = partial(train_small, "train")


def test_a_run_leaves_a_score_student_teacher_and_an_encoder_to_load(tmp_path: Path) -> None:
    run(tmp_path, knn_freq=3)
    assert ["knn_20" in epoch for epoch in epochs_of(tmp_path)] == [False, False, True]
    assert 0 <= epochs_of(tmp_path)[-1]["knn_20"] <= 100
    checkpoint = checkpoint_of(tmp_path)
    assert {name.split(".")[0] for name in checkpoint["student"]} == {"backbone", "readout", "head"}
    assert load_encoder(tmp_path / "checkpoint.pth").encoding_dim == 15
    assert "collapse" not in (tmp_path / "run.log").read_text().splitlines()[-1]
    assert "warning" not in run_command("info", [str(tmp_path)])


def test_the_images_that_tensorboard_shows_are_unaugmented_and_of_different_classes(tmp_path: Path) -> None:
    """The first images of a folder are of one class, and were shown augmented."""
    for label in range(5):
        (tmp_path / "images" / str(label)).mkdir(parents=True)
        for number in range(7):
            Image.new("RGB", (40, 30), (50 * label, 10, 10)).save(tmp_path / "images" / str(label) / f"{number}.png")
    source = open_source(str(tmp_path / "images"))
    args = get_args_parser().parse_args(small_options(tmp_path))
    view = PatchView([args.global_crops_size], args.patch_size, args.norm_mean, args.norm_std)
    examples = draw_examples(source, MultiCropAugmentation(), view, args.seed)
    shown = to_pixels(examples.views, args.norm_mean, args.norm_std)
    assert [int(view[0, 0, 0]) for view in shown] == [0, 50, 100, 150]
    assert (shown == shown[:, :1, :1]).all()


def test_the_teacher_is_the_moving_average_and_the_last_layer_waits(tmp_path: Path) -> None:
    run(tmp_path, max_steps=1, warmup_epochs=0, momentum_teacher=0.9)
    checkpoint = checkpoint_of(tmp_path)
    run(tmp_path / "fresh", max_steps=1, warmup_epochs=0, lr=0, min_lr=0)  # its weights are the initial ones
    initial = checkpoint_of(tmp_path / "fresh")["student"]
    for name, value in checkpoint["student"].items():
        expected = 0.9 * initial[name] + 0.1 * value
        assert torch.allclose(checkpoint["teacher"][name], expected, atol=1e-6), name
    assert torch.equal(checkpoint["student"]["head.last_layer.weight_v"], initial["head.last_layer.weight_v"])
    assert not torch.equal(checkpoint["student"]["head.mlp.0.weight"], initial["head.mlp.0.weight"])


@pytest.mark.slow
def test_an_interrupted_run_in_fp16_ends_in_the_same_bits_and_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands refuse fp16 on a CPU, where it is slow; its scaler works there as on a GPU."""
    monkeypatch.setattr("dino_sparo.distillation.objective.choose_precision", lambda *_: torch.float16)
    init = torch.amp.GradScaler.__init__
    small = {"init_scale": 2.0**7, "growth_interval": 3}
    monkeypatch.setattr(torch.amp.GradScaler, "__init__", lambda self, device: init(self, device, **small))
    run(tmp_path / "whole")
    run(tmp_path / "parts", max_steps=5)
    saved = checkpoint_of(tmp_path / "parts")["fp16_scaler"]
    assert (saved["scale"], saved["_growth_tracker"]) == (2.0**8, 2)  # doubled after three steps, and two since
    run(tmp_path / "parts")
    whole, parts = (checkpoint_of(tmp_path / name) for name in ("whole", "parts"))
    for key in ("student", "teacher", "optimizer", "dino_loss", "fp16_scaler", "step"):
        assert_same_state(whole[key], parts[key], key)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["the last step", "the save", "later"])
def test_an_epoch_that_ends_before_its_evaluation_is_evaluated_when_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The bug: a signal in an epoch's last step waited for the evaluation, and a kill in that lost the epoch's end."""
    monkeypatch.setattr(preemption, "MAX_STEPS_BETWEEN", 1)
    monkeypatch.setattr(training_run, "MUCH_TO_LOSE_S", 0.0)
    take, evaluate, save = DINOObjective.step, knn_probe.classify_shards, Run.save
    steps, evaluations, saves = 0, 0, 0

    def be_stopped(it_is_time: bool) -> None:
        if it_is_time:
            os.kill(os.getpid(), signal.SIGTERM)

    def take_and_be_stopped(*arguments: object, **options: object) -> StepReport:
        nonlocal steps
        steps += 1
        be_stopped(moment == "the last step" and steps == 4)
        return take(*arguments, **options)

    def save_and_be_stopped(*arguments: object) -> None:
        nonlocal saves
        saves += 1
        be_stopped(moment == "the save" and saves == 1)
        save(*arguments)

    def evaluate_and_be_stopped(*arguments: object, **options: object) -> object:
        nonlocal evaluations
        evaluations += 1
        be_stopped(moment == "later" and evaluations == 1)
        return evaluate(*arguments, **options)

    changes = {"knn_freq": 1, "epochs": 2, "data_path": "scenes:104:32", "batch_size_per_gpu": 24, "saveckp_freq": 1}
    run(tmp_path / "whole", **changes)
    monkeypatch.setattr(DINOObjective, "step", take_and_be_stopped)
    monkeypatch.setattr(Run, "save", save_and_be_stopped)
    monkeypatch.setattr(knn_probe, "classify_shards", evaluate_and_be_stopped)
    with pytest.raises(RunStopped):
        run(tmp_path / "parts", **changes)
    saved = checkpoint_of(tmp_path / "parts")
    assert (saved["step"], saved["epoch"], steps) == (4, 1, 4)
    if moment == "later":
        assert saved["unlogged_epoch"] is None
    else:
        assert saved["unlogged_epoch"]["loss"] > 0
        assert not (tmp_path / "parts" / "log.txt").exists()
    run(tmp_path / "parts", **changes)
    assert (steps, evaluations) == (8, 2)  # no step twice
    whole, parts = (checkpoint_of(tmp_path / name) for name in ("whole", "parts"))
    for key in ("student", "teacher", "optimizer", "dino_loss", "step", "epoch", "best_knn", "unlogged_epoch"):
        assert_same_state(whole[key], parts[key], key)
    assert whole["best_knn"] > 0
    assert epochs_of(tmp_path / "parts") == epochs_of(tmp_path / "whole")
    # The save after an evaluation takes the place of the one before it, and the copies are of the same steps.
    kept = [
        {path.name: load_checkpoint(path)["step"] for path in (tmp_path / name).glob("checkpoint*.pth")}
        for name in ("whole", "parts")
    ]
    assert kept[0] == kept[1]
    assert {"checkpoint_best.pth", "checkpoint0000.pth", "checkpoint_previous1.pth"} <= kept[0].keys()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path / "whole")
    run(tmp_path / "parts", max_steps=8)
    path = tmp_path / "parts" / "checkpoint.pth"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # one bit, which torch would read as another weight
    path.write_bytes(content)
    with caplog.at_level(logging.INFO):
        run(tmp_path / "parts")
    assert "checkpoint.pth is damaged: the checksum of its part" in caplog.text
    assert "the run resumes from" in caplog.text
    assert "resumed" in caplog.text
    assert "1 epochs, 4 steps done" in caplog.text
    assert (tmp_path / "parts" / "checkpoint.pth.damaged").read_bytes() == content
    whole, parts = (checkpoint_of(tmp_path / name) for name in ("whole", "parts"))
    assert_same_state(whole["teacher"], parts["teacher"], "teacher")
    assert epochs_of(tmp_path / "parts") == epochs_of(tmp_path / "whole")


def test_other_images_of_the_same_number_and_other_versions_are_named_when_resuming(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_images(tmp_path / "before" / "images")
    run(tmp_path / "out", data_path=str(folder), epochs=1)
    shutil.move(tmp_path / "before", tmp_path / "after")
    folder = tmp_path / "after" / "images"
    run(tmp_path / "out", data_path=str(folder), epochs=2)
    assert "--data_path was" in caplog.text
    assert "differ from those of" not in caplog.text  # they have moved together
    (folder / "03.png").rename(folder / "033.png")
    monkeypatch.setattr("dino_sparo.training.resume.versions", lambda: {"torch": "1.0"})
    run(tmp_path / "out", data_path=str(folder), epochs=3)
    assert "the images, or their order, differ from those of" in caplog.text
    assert "and is now 1.0: the rest of the run differs from its beginning, if only by rounding" in caplog.text


@pytest.mark.slow
def test_an_epoch_cut_short_changes_no_kept_checkpoint_and_is_logged_once(tmp_path: Path) -> None:
    run(tmp_path, max_steps=6, saveckp_freq=1)
    assert load_checkpoint(tmp_path / "checkpoint0000.pth")["step"] == 4
    assert checkpoint_of(tmp_path)["step"] == 6
    run(tmp_path, saveckp_freq=1)
    assert [epoch["epoch"] for epoch in epochs_of(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize(
    "optimizer", ["adamw", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sgd", "lars"))]
)
def test_after_gradients_that_are_not_finite_student_optimizer_and_center_stay_and_the_teacher_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    found: list[DINOObjective] = []

    def note(training: DINOObjective, *arguments: Any, **options: Any) -> StepReport:
        found.append(training)
        return take(training, *arguments, **options)

    def spoil(updater: Updater, loss: torch.Tensor) -> torch.Tensor:
        training = found[-1]
        if updater.step == 6:
            before.update(copy.deepcopy({"student": training.student.state_dict(), "loss": training.loss.state_dict()}))
            before.update(teacher=copy.deepcopy(training.teacher.state_dict()))
            before.update(optimizer=copy.deepcopy(training.updater.optimizer.state_dict()["state"]))
            training.network.head.mlp[0].bias.grad[0] = math.inf
        return finish(updater, loss)

    run(tmp_path, max_steps=4, optimizer=optimizer, momentum_teacher=0.5)
    saved, before = (tmp_path / "checkpoint.pth").read_bytes(), {}
    take, finish = DINOObjective.step, Updater.finish_gradients
    monkeypatch.setattr(DINOObjective, "step", note)
    monkeypatch.setattr(Updater, "finish_gradients", spoil)
    monkeypatch.setattr(preemption, "MAX_STEPS_BETWEEN", 16)
    with pytest.raises(NonFiniteLossError, match=r"gradients are not finite at step 6 .* finite on every rank"):
        run(tmp_path, optimizer=optimizer, momentum_teacher=0.5)
    assert (tmp_path / "checkpoint.pth").read_bytes() == saved
    training = found[-1]
    assert_same_state(before["student"], training.student.state_dict(), "student")
    assert_same_state(before["loss"], training.loss.state_dict(), "loss")
    assert_same_state(before["optimizer"], training.updater.optimizer.state_dict()["state"], "optimizer")
    moved = training.teacher.state_dict()
    assert any(not torch.equal(value, moved[name]) for name, value in before["teacher"].items())


def test_a_run_that_ends_collapsed_says_so_in_its_last_line_and_in_info(tmp_path: Path) -> None:
    """The bug: the only warning was above the last lines, and whoever took the weights did not see it."""
    flat = {"epochs": 1, "warmup_epochs": 0, "teacher_temp": 99, "warmup_teacher_temp": 99}
    for _ in range(2):  # the second run has nothing left to do
        run(tmp_path, **flat)
        last = (tmp_path / "run.log").read_text().splitlines()[-1]
        assert "done: 4 steps" in last
        assert "uniform collapse" in last
    assert "uniform collapse" in run_command("info", [str(tmp_path)])["warning"]
    export(tmp_path / "checkpoint.pth", tmp_path / "hub", format="huggingface")
    assert "| warning | loss 3." in (tmp_path / "hub" / "README.md").read_text()


def test_images_in_damaged_shards_count_as_corrupt(tmp_path: Path) -> None:
    """The bug: --max_corrupt allowed its share twice, once in damaged shards and once among the images left."""
    for number, broken in enumerate((2, 0, 0)):
        folder = write_images(tmp_path / f"{number}", 6, broken)
        with tarfile.open(tmp_path / f"{number}.tar", "w") as tar:
            for path in sorted(folder.iterdir()):
                tar.add(path, arcname=path.name)
    os.truncate(tmp_path / "2.tar", 3100)  # within its second image
    with pytest.raises(TooManyCorruptError, match=r"8 of 18 images .* more than the 7 that --max_corrupt 0.4"):
        run(tmp_path / "run", data_path=tmp_path / "{0..2}.tar", epochs=1, warmup_epochs=0, max_corrupt=0.4)


def test_a_first_trial_of_few_epochs_shortens_the_warm_up_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = small_options(tmp_path, epochs=1, max_steps=1)
    at = arguments.index("--warmup_epochs")
    with caplog.at_level(logging.INFO):
        main_dino.train_dino(main_dino.get_args_parser().parse_args(arguments[:at] + arguments[at + 2 :]))
    assert "--warmup_epochs 0.1: the default of 10 does not fit a run of 1 epochs" in caplog.text
    assert "--freeze_last_layer 0: the default of 1 does not fit a run of 1 epochs" in caplog.text
    assert "sparo (3 slots of 5, keys of 7" in caplog.text
    assert checkpoint_of(tmp_path)["args"]["warmup_epochs"] == 0.1


@pytest.mark.parametrize(
    ("words", "warmup", "freeze"),
    [
        ([], 10, 1),
        (["--epochs", "300"], 10, 1),
        (["--epochs", "99"], 9.9, 1),
        (["--epochs", "10"], 1, 1),
        (["--epochs", "1"], 0.1, 0),
        (["--epochs", "5", "--warmup_epochs", "5", "--freeze_last_layer", "3"], 5, 3),
    ],
)
def test_defaults_are_the_references_wherever_they_fit_the_run(words: list[str], warmup: float, freeze: int) -> None:
    """The bug: a run of ten epochs was all warm-up and never lowered its learning rate."""
    args = main_dino.get_args_parser().parse_args(words)
    main_dino.check_options(args)
    main_dino.fill_in_defaults(args)
    assert (args.warmup_epochs, args.freeze_last_layer) == (warmup, freeze)


def test_the_log_begins_with_the_options_that_differ_from_their_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, max_steps=1, readout="cls", seed=3)
    terminal = capsys.readouterr().err
    (line,) = [line for line in terminal.splitlines() if "options:" in line]
    assert "readout=cls" in line
    assert "seed=3" in line
    assert "vit_micro/8 at 16 px, cls, " in terminal
    assert "slots of" not in terminal
    assert "teacher_temp" not in terminal  # has its default
    assert '"teacher_temp": 0.04' in (tmp_path / "run.log").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_crops_size": 20}, "global_crops_size 20 px is not a multiple of --patch_size 8 px.*nearest .* 16"),
        ({"local_crops_size": 4}, "local_crops_size 4 px is not a multiple"),
        ({"warmup_epochs": 4}, "warmup_epochs 4 is longer than the run of 3 epochs"),
        ({"teacher_temp": 0}, "teacher_temp=0.0 is not a temperature"),
        ({"global_crops_scale": "0.9,0.4"}, r"global_crops_scale=\(0.9, 0.4\) is not a range"),
        ({"use_fp16": "true"}, "means fp16, but --precision says fp32"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(tmp_path, **changes)
    assert not (tmp_path / "checkpoint.pth").exists()


def test_a_probe_needs_labels(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images")
    with pytest.raises(ValueError, match="no labels"):
        run(tmp_path / "run", data_path=images, knn_freq=1)


@pytest.mark.parametrize(
    ("words", "expected"),
    [("", [0, 2]), ("--split val", [1]), ("--split all", [0, 1, 2]), ("--split_column fold", [1])],
)
def test_a_table_with_splits_trains_on_its_train_rows(
    words: str, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(3):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{i}.png")
    (tmp_path / "set.csv").write_text("path,split,fold\n0.png,train,a\n1.png,val,train\n2.png,train,b\n")
    options = ["--data_path", str(tmp_path / "set.csv"), "--max_image_mpix", "5e-5", *words.split()]
    args = main_dino.get_args_parser().parse_args([*options, "--batch_size_per_gpu", "1", "--patch_size", "16"])
    monkeypatch.setattr(distillation, "draw_examples", lambda *_: None)
    source, *_ = distillation.open_crops(args, Distributed(0, 1, torch.device("cpu")))
    assert [int(Path(source.location(i)).stem) for i in range(len(source))] == expected
    with pytest.raises(CorruptImageError, match="8 x 8 pixels; at most 5e-05 million"):
        source.read(0)

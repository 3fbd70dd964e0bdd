"""clip/train.py, step.py: gradients, a run and its files, resuming, and bad input."""

import argparse
import json
import logging
import math
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

pytest.importorskip("open_clip")

from objectives import bare
from runs import ROOT, assert_same_run, epochs_of

from dino_sparo.__main__ import run as run_command
from dino_sparo.clip import CLIP, create_clip, load_clip
from dino_sparo.clip.loss import clip_loss
from dino_sparo.clip.options import PRESETS, get_args_parser
from dino_sparo.clip.train import CLIPObjective
from dino_sparo.image_text.objective import ModelPart, micro_batch_size, param_groups, updater_of_parts
from dino_sparo.image_text.options import shorten_warmups
from dino_sparo.image_text.pairs.batches import PairBatch, PairDataset, PairTransform, collate_pairs
from dino_sparo.image_text.pairs.sources import open_pairs
from dino_sparo.image_text.step import MAX_LOGIT_SCALE, backward_at_once, backward_in_parts, train_step
from dino_sparo.models.encoder import create_encoder
from dino_sparo.runtime.cli import read_config
from dino_sparo.runtime.preemption import RunStopped
from dino_sparo.training.loop import NonFiniteLossError, TooManyCorruptError
from dino_sparo.training.optim import OPTIMIZERS
from dino_sparo.training.run import train
from dino_sparo.training.updater import Updater
from dino_sparo.weights.checkpoint import CheckpointError, load_checkpoint

SMALL = {"num_slots": 5, "slot_dim": 7, "key_dim": 3, "embed_dim": 11, "text_width": 24, "text_heads": 2}
TINY = {
    "data_path": "scenes:26:32",
    "arch": "vit_micro",
    "patch_size": "8",
    "img_size": "16",
    "sparo_slots": "5",
    "sparo_slot_dim": "7",
    "sparo_key_dim": "3",
    "embed_dim": "11",
    "text_width": "24",
    "text_heads": "2",
    "text_layers": "2",
    "context_length": "20",
    "batch_size": "6",
    "epochs": "3",
    "warmup_steps": "2",
    "num_workers": "0",
    "device": "cpu",
    "precision": "fp32",
}


def options(output_dir: Path, **changes: object) -> list[str]:
    values = {**TINY, "output_dir": str(output_dir), **{name: str(value) for name, value in changes.items()}}
    return [word for name, value in values.items() for word in (f"--{name}", *filter(None, value.split(",")))]


def run(output_dir: Path, **changes: object) -> Path:
    train(get_args_parser().parse_args(options(output_dir, **changes)), CLIPObjective)
    return output_dir


def checkpoint_of(output_dir: Path) -> dict[str, Any]:
    return load_checkpoint(output_dir / "checkpoint.pth")


def assert_close_weights(first: Path, second: Path) -> None:
    """Two runs ended with the same weights, up to the rounding of sums in another order."""
    weights, others = checkpoint_of(first)["model"], checkpoint_of(second)["model"]
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        # A key's bias has no gradient but rounding, which Adam turns into noise.
        shown = torch.arange(len(value)) // (len(value) // 3) != 1 if name.endswith("qkv.bias") else ...
        assert torch.allclose(value[shown], others[name][shown], atol=1e-4), name


# ---- gradients


def small_clip(readout: str = "sparo") -> CLIP:
    torch.manual_seed(0)
    return create_clip(
        arch="vit_micro", patch_size=8, readout=readout, img_size=32, text_layers=3, context_length=20, **SMALL
    )


def small_training(model: CLIP, lr: float = 1e-3, clip_grad: float = 0.0, texts_per_image: int = 1) -> CLIPObjective:
    optimizer = OPTIMIZERS["adamw"](param_groups(dict(model.named_parameters()), 0.2, (0.9, 0.98), 1e-6))
    schedules = [{"lr": np.full(100, lr)}] * 2
    return bare(
        CLIPObjective,
        model=model,
        network=model,
        contrast=partial(clip_loss, texts_per_image=texts_per_image),
        updater=Updater(optimizer, schedules, list(model.parameters()), torch.device("cpu")),
        mean=torch.full((1, 3, 1, 1), 0.4, dtype=model.logit_scale.dtype),
        std=torch.full((1, 3, 1, 1), 0.3, dtype=model.logit_scale.dtype),
        clip_grad=clip_grad,
    )


def some_pairs(count: int, size: int = 32, negatives: Callable[[int], list[str]] | None = None) -> PairBatch:
    source = open_pairs(f"scenes:{count}:32")
    source.negatives = negatives
    dataset = PairDataset(source, PairTransform(size))
    return collate_pairs([dataset[0, i] for i in range(count)], context_length=20)


def gradients(
    model: CLIP, sizes: list[int], negatives: Callable[[int], list[str]] | None = None
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of eleven pairs that are computed in parts of these sizes."""
    step = 1 if negatives is None else 2
    training, batch = small_training(model, texts_per_image=step), some_pairs(11, negatives=negatives)
    model.zero_grad()
    texts = batch.token_ids.split([step * size for size in sizes])
    columns = (batch.images.split(sizes), texts, batch.indices.split(sizes))
    parts = [PairBatch(*part, [], 0) for part in zip(*columns, strict=True)]
    loss, _ = (backward_at_once if len(parts) == 1 else backward_in_parts)(training, parts)
    return loss.item(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("readout", ["cls", "gap", "sparo", "attpool"])
def test_gradients_in_parts_are_those_of_the_large_batch_the_temperatures_too(readout: str) -> None:
    model = small_clip(readout).double()
    training = gradients(model, [11])
    in_parts = gradients(model, [5, 4, 2])
    assert in_parts[0] == pytest.approx(training[0], abs=1e-6)
    for name, expected in training[1].items():
        assert torch.allclose(in_parts[1][name], expected, rtol=1e-4, atol=1e-7), name
    # Three parts, and yet not three times as much, as it is when the whole loss is computed for every part.
    assert training[1]["logit_scale"].abs() > 1e-3
    assert in_parts[1]["logit_scale"].item() == pytest.approx(training[1]["logit_scale"].item(), rel=1e-6)


def test_gradients_with_false_captions_in_parts_are_those_of_the_large_batch() -> None:
    def negatives(index: int) -> list[str]:
        return ["" if index % 3 == 0 else f"{index} blue circles"]

    model = small_clip("cls").double()
    (loss, whole), (loss_in_parts, in_parts) = (gradients(model, sizes, negatives) for sizes in ([11], [5, 4, 2]))
    assert loss_in_parts == pytest.approx(loss, abs=1e-6)
    assert loss > gradients(model, [11])[0]
    for name, expected in whole.items():
        assert torch.allclose(in_parts[name], expected, rtol=1e-4, atol=1e-7), name


def test_the_gradients_are_those_of_the_definition() -> None:
    model, batch = small_clip(), some_pairs(11)
    images = (batch.images.float() / 255 - 0.4) / 0.3
    features = model(images, batch.token_ids)
    similarity = features.logit_scale * features.image_features @ features.text_features.T
    right = similarity.diagonal()
    loss = (similarity.logsumexp(0) - right + similarity.logsumexp(1) - right).mean() / 2
    model.zero_grad()
    loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    found_loss, found = gradients(model, [11])
    assert found_loss == pytest.approx(loss.item(), abs=1e-5)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-3, atol=1e-6), name


def test_gradient_checkpointing_changes_no_gradient() -> None:
    model = small_clip()
    plain = gradients(model, [11])[1]
    model.image.backbone.set_grad_checkpointing(True)
    model.text.set_grad_checkpointing(True)
    for name, value in gradients(model, [11])[1].items():
        assert torch.allclose(plain[name], value, rtol=1e-5, atol=1e-8), name


def test_a_resumed_run_takes_the_weight_decay_that_is_asked_for() -> None:
    """The bug: it was said to change and stayed the optimizer's saved one."""
    model = small_clip()

    def updater(weight_decay: float) -> Updater:
        args = parsed("--weight_decay", str(weight_decay), "--epochs", "2")
        parts: list[ModelPart] = [(("",), 0.1, 1)]
        return updater_of_parts(model, parts, args, 3, torch.device("cpu"), torch.float32)

    before, after = updater(0.2), updater(0.01)
    after.optimizer.load_state_dict(before.optimizer.state_dict())
    after.begin_step()
    assert [group["weight_decay"] for group in after.optimizer.param_groups] == [0.01, 0.0]


def test_vectors_and_the_temperature_have_no_weight_decay() -> None:
    model = small_clip()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, spared = (
        {names[id(p)] for p in group["params"]}
        for group in param_groups(dict(model.named_parameters()), 0.3, (0.8, 0.9), 1e-5)
    )
    assert decayed | spared == set(names.values())
    assert not decayed & spared
    assert {"logit_scale", "image.backbone.cls_token", "image.backbone.norm.weight", "text.norm.bias"} <= spared
    assert {"image.backbone.pos_embed", "text.token_embed.weight", "text.pos_embed"} <= decayed
    groups = OPTIMIZERS["adamw"](param_groups(dict(model.named_parameters()), 0.3, (0.8, 0.9), 1e-5)).param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert all((group["betas"], group["eps"]) == ((0.8, 0.9), 1e-5) for group in groups)


def test_the_temperature_stays_in_its_range() -> None:
    for start, sign in ((math.log(MAX_LOGIT_SCALE) - 0.01, -1), (0.01, 1)):
        model = small_clip()
        model.logit_scale.data.fill_(start)
        training = small_training(model, lr=0.5)
        # A gradient that pushes outwards, whatever the loss says.
        model.logit_scale.register_hook(lambda gradient, sign=sign: torch.full_like(gradient, sign))
        train_step(training, [some_pairs(5)])
        assert model.logit_scale.item() == pytest.approx(math.log(MAX_LOGIT_SCALE) if sign < 0 else 0, abs=1e-6)
    assert pytest.approx(100) == MAX_LOGIT_SCALE


def test_all_gradients_together_are_clipped() -> None:
    model = small_clip()
    report = train_step(small_training(model, clip_grad=0.25), [some_pairs(7)])
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    assert report.scalars["grad_norm"] > 1
    assert norm.item() == pytest.approx(0.25, rel=1e-3)


def test_steps_teach_which_caption_belongs_to_which_image() -> None:
    training, batch = small_training(small_clip()), some_pairs(13)
    reports = [train_step(training, [batch]) for _ in range(40)]
    assert reports[0].loss.item() == pytest.approx(math.log(13), abs=1.5)
    assert reports[-1].loss < 0.5
    assert reports[0].scalars["batch_accuracy"] < 0.4
    assert reports[-1].scalars["batch_accuracy"] > 0.9


# ---- runs


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to its end."""
    return run(tmp_path_factory.mktemp("whole"), saveckp_freq=2)


@pytest.fixture(scope="module")
def first_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, stopped in the middle of its second epoch."""
    return run(tmp_path_factory.mktemp("first_steps"), max_steps=6)


def test_a_run_leaves_log_checkpoints_and_a_model_to_load(whole: Path) -> None:
    epochs = epochs_of(whole)
    assert [epoch["epoch"] for epoch in epochs] == [0, 1, 2]
    wanted = {"train_loss", "train_lr", "train_batch_accuracy", "train_logit_scale", "train_grad_norm"}
    assert wanted | {"train_corrupt_pairs", "train_truncated_captions", "loss_over_ln_batch"} <= epochs[0].keys()
    assert epochs[-1]["step"] == 3 * (26 // 6)
    assert epochs[0]["loss_over_ln_batch"] == pytest.approx(epochs[0]["train_loss"] / math.log(6))
    names = {path.name for path in whole.iterdir()}
    assert {"checkpoint.pth", "checkpoint0000.pth", "checkpoint0002.pth", "log.txt", "run.log"} <= names
    assert "checkpoint0001.pth" not in names
    checkpoint = checkpoint_of(whole)
    assert {"model", "clip", "optimizer", "epoch", "step", "args", "versions", "ranks"} <= checkpoint.keys()
    assert checkpoint["epoch"] == 3
    loaded = load_clip(whole / "checkpoint.pth")
    assert loaded.model.config.embed_dim == 35
    assert loaded.mean == pytest.approx((0.48145466, 0.4578275, 0.40821073))
    assert torch.equal(loaded.model.logit_scale, checkpoint["model"]["logit_scale"])


def test_an_interrupted_run_ends_in_the_same_bits(whole: Path, stopped: Path) -> None:
    assert checkpoint_of(stopped)["step"] == 6
    run(stopped, num_workers=1)
    assert_same_run(whole, stopped, "train-clip")


@pytest.mark.slow
def test_a_run_interrupted_at_an_epochs_end_ends_in_the_same_bits(whole: Path, tmp_path: Path) -> None:
    run(tmp_path, max_steps=4)
    assert checkpoint_of(tmp_path)["step"] == 4
    run(tmp_path, num_workers=1)
    assert_same_run(whole, tmp_path, "train-clip")


def test_a_signal_ends_the_run_between_two_steps_and_nothing_is_lost(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step_then_signal(training: CLIPObjective, batches: list[PairBatch], epoch: int, is_last: bool) -> object:
        report = take_step(training, batches, epoch, is_last)
        if training.updater.step == 6:
            os.kill(os.getpid(), signal.SIGUSR2)
        return report

    take_step = CLIPObjective.step
    monkeypatch.setattr(CLIPObjective, "step", step_then_signal)
    with pytest.raises(RunStopped, match="stopped by SIGUSR2 after step") as stopped:
        run(tmp_path / "parts")
    assert stopped.value.status == 128 + signal.SIGUSR2
    assert 6 <= checkpoint_of(tmp_path / "parts")["step"] < 12
    monkeypatch.undo()
    run(tmp_path / "parts")
    assert_same_run(whole, tmp_path / "parts", "train-clip")


def test_resuming_a_finished_run_changes_nothing(whole: Path, tmp_path: Path) -> None:
    finished = Path(shutil.copytree(whole, tmp_path / "finished"))
    run(finished, saveckp_freq=2)
    assert (finished / "checkpoint.pth").read_bytes() == (whole / "checkpoint.pth").read_bytes()
    assert len(epochs_of(finished)) == 3


@pytest.mark.slow
def test_a_run_in_parts_is_that_of_the_large_batch_and_may_go_on_in_others(tmp_path: Path) -> None:
    run(tmp_path / "large")
    run(tmp_path / "parts", grad_accum_steps=3, max_steps=5)
    run(tmp_path / "parts", grad_accum_steps=2, grad_checkpointing="")
    assert_close_weights(tmp_path / "large", tmp_path / "parts")


@pytest.mark.parametrize(("batch", "step"), [(4, 6 + 3), (12, 2 + 1)])
def test_another_batch_goes_on_from_the_pairs_seen_if_that_is_allowed(
    stopped: Path, caplog: pytest.LogCaptureFixture, batch: int, step: int
) -> None:
    """It stopped after one epoch of four steps and two steps, 12 pairs of the second."""
    with pytest.raises(CheckpointError, match=r"global_batch was 6 and is now .* or --allow_rescale"):
        run(stopped, batch_size=batch)
    run(stopped, batch_size=batch, allow_rescale="")
    assert f"step 6 with batches of 6 pairs is step {step} with {batch}" in caplog.text
    assert checkpoint_of(stopped)["step"] == 3 * (26 // batch)


@pytest.mark.slow
def test_a_compiled_run_gives_the_losses_of_a_plain_one(tmp_path: Path) -> None:
    run(tmp_path / "plain", epochs=1)
    # In another process: here all annotations are checked at run time, which does not compile.
    command = [
        sys.executable,
        "-m",
        "dino_sparo",
        "train-clip",
        *options(tmp_path / "compiled", epochs=1, compile="on"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the first step compiles the networks" in done.stderr
    losses = [epochs_of(tmp_path / name)[0]["train_loss"] for name in ("plain", "compiled")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def _rank(number: int, port: int, arguments: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(number), WORLD_SIZE="2", LOCAL_RANK=str(number))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    run_command("train-clip", arguments)


def run_on_two_ranks(output_dir: Path, **changes: object) -> Path:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dino_sparo.clip.train"])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    arguments = options(output_dir, **changes)
    ranks = [context.Process(target=_rank, args=(number, port, arguments)) for number in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=240)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    return output_dir


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    run(tmp_path / "one", epochs=2)
    run_on_two_ranks(tmp_path / "two", epochs=2)
    one, two = epochs_of(tmp_path / "one"), epochs_of(tmp_path / "two")
    assert [epoch["train_loss"] for epoch in two] == pytest.approx([epoch["train_loss"] for epoch in one], abs=1e-4)
    assert_close_weights(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_two_processes_go_on_where_one_stopped(tmp_path: Path) -> None:
    run(tmp_path / "one", epochs=2)
    run(tmp_path / "two", epochs=2, max_steps=3)
    run_on_two_ranks(tmp_path / "two", epochs=2, grad_accum_steps=3)
    assert_close_weights(tmp_path / "one", tmp_path / "two")
    losses = [epochs_of(tmp_path / name)[1]["train_loss"] for name in ("one", "two")]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"readout": "cls"}, {"readout": "gap"}, {"precision": "bf16"}])
def test_other_readouts_and_precisions_train(tmp_path: Path, changes: dict[str, str]) -> None:
    run(tmp_path, epochs=1, **changes)
    assert math.isfinite(epochs_of(tmp_path)[0]["train_loss"])


def test_the_learning_rate_warms_up_per_step_and_falls_as_a_cosine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = []

    def noted(training: CLIPObjective, batches: list[PairBatch], epoch: int, is_last: bool) -> object:
        report = take_step(training, batches, epoch, is_last)
        rates.append(training.updater.optimizer.param_groups[0]["lr"])
        return report

    take_step = CLIPObjective.step
    monkeypatch.setattr(CLIPObjective, "step", noted)
    run(tmp_path, warmup_steps=4, lr=0.01, min_lr=0.002)
    # OpenCLIP's: lr (i + 1) / 4, then the cosine from its top.
    expected = [0.0025, 0.005, 0.0075, 0.01] + [0.002 + 0.008 * (1 + math.cos(math.pi * i / 8)) / 2 for i in range(8)]
    assert rates == pytest.approx(expected)


@pytest.mark.slow
def test_zero_shot_accuracy_is_probed_and_the_best_model_kept(tmp_path: Path) -> None:
    run(tmp_path, zero_shot_freq=2, zero_shot_path="scenes:20:32")
    epochs = epochs_of(tmp_path)
    assert ["zero_shot" in epoch for epoch in epochs] == [False, True, False]
    assert 0 <= epochs[1]["zero_shot"] <= 100
    assert checkpoint_of(tmp_path)["best_zero_shot"] == epochs[1]["zero_shot"]
    assert (tmp_path / "checkpoint_best.pth").is_file() == (epochs[1]["zero_shot"] > 0)


def test_the_image_encoder_can_start_from_dinos(tmp_path: Path) -> None:
    torch.manual_seed(5)
    encoder = create_encoder("vit_micro", 8, "cls", img_size=16)
    torch.save({f"backbone.{k.removeprefix('backbone.')}": v for k, v in encoder.state_dict().items()}, tmp_path / "e")
    run(tmp_path, epochs=1, max_steps=1, lr=0, readout="cls", pre_norm="false", init_from=tmp_path / "e")
    found = checkpoint_of(tmp_path)["model"]
    for name, value in encoder.state_dict().items():
        assert torch.equal(found[f"image.{name}"], value), name
    run(tmp_path, epochs=1, max_steps=2, lr=0, readout="cls", pre_norm="false", init_from="nowhere")  # goes on


# ---- bad input


def image_folders(folder: Path, broken: int) -> Path:
    """Twelve images in two classes, some of which cannot be read."""
    for index in range(12):
        path = folder / ("cat" if index % 2 else "dog") / f"{index:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20 + index, 24), (9 * index, 80, 200 - 5 * index)).save(path)
        if index < broken:
            path.write_bytes(b"")
    return folder


def test_a_pair_that_cannot_be_read_is_named_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    images = image_folders(tmp_path / "images", broken=1)
    with caplog.at_level(logging.WARNING):
        run(tmp_path / "run", data_path=images, epochs=1, max_corrupt=0.1)
    assert "skipped an unreadable pair" in caplog.text
    assert "00.png" in caplog.text
    assert epochs_of(tmp_path / "run")[0]["train_corrupt_pairs"] == 1


def test_too_many_dropped_pairs_stop_the_run(tmp_path: Path) -> None:
    images = image_folders(tmp_path / "images", broken=6)
    with pytest.raises(TooManyCorruptError, match=r"6 of 12 pairs .* more than the 5"):
        run(tmp_path / "run", data_path=images, epochs=1, max_corrupt=0.1)


def test_a_handful_of_dropped_pairs_never_ends_a_run_on_few_pairs(tmp_path: Path) -> None:
    images = image_folders(tmp_path / "images", broken=2)
    run(tmp_path / "run", data_path=images, epochs=1, max_corrupt=0.01)
    assert epochs_of(tmp_path / "run")[0]["train_corrupt_pairs"] == 2


@pytest.mark.parametrize(
    ("words", "total_steps", "expected"),
    [
        ([], 500, 500),
        ([], 499, 49),
        (["--preset", "cc3m"], 3599, 359),
        (["--preset", "cc3m"], 3600, 3600),
        (["--warmup_steps", "7"], 30, 7),
    ],
)
def test_a_warm_up_longer_than_the_run_is_shortened_to_a_tenth_of_it(
    words: list[str], total_steps: int, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    args = parsed(*words)
    with caplog.at_level(logging.INFO):
        shorten_warmups(args, total_steps)
    assert args.warmup_steps == expected
    assert (f"does not fit a run of {total_steps} steps" in caplog.text) == (expected in (49, 359))


def test_samples_left_out_from_the_beginning_count_too(tmp_path: Path) -> None:
    images = image_folders(tmp_path / "images", broken=1)
    rows = [f"{path.relative_to(tmp_path)},words" for path in sorted(images.rglob("*.png"))] + 5 * [",alone"]
    (tmp_path / "t.csv").write_text("\n".join(["path,caption", *rows]))
    with pytest.raises(TooManyCorruptError, match=r"6 of 17 pairs .*\(1 were met in this epoch\), more than"):
        run(tmp_path / "run", data_path=tmp_path / "t.csv", epochs=1, max_corrupt=0.1)


def test_captions_that_are_too_long_are_counted(tmp_path: Path) -> None:
    run(tmp_path, epochs=1, context_length=4)
    assert epochs_of(tmp_path)[0]["train_truncated_captions"] == 18  # six name a lone shape and nothing else


@pytest.mark.slow
def test_a_zero_shot_probe_on_pairs_without_labels_is_refused(tmp_path: Path) -> None:
    images = image_folders(tmp_path / "images", broken=0)
    rows = [f"{path.relative_to(tmp_path)},words" for path in sorted(images.rglob("*.png"))]
    (tmp_path / "t.csv").write_text("\n".join(["path,caption", *rows]))
    with pytest.raises(ValueError, match="no labels"):
        run(tmp_path / "run", data_path=tmp_path / "t.csv", zero_shot_freq=1)


@pytest.mark.parametrize("products", ["tf32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_run_with_rounded_logits_learns_as_one_without(tmp_path: Path, products: str) -> None:
    losses = [epochs_of(run(tmp_path / name, epochs=1, logits=name))[0]["train_loss"] for name in ("fp32", products)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_images(stopped: Path) -> None:
    with pytest.raises(
        NonFiniteLossError,
        match=r"not finite at step \d+ \(epoch \d\), lr .*logit scale .*The optimizer changed no weights",
    ):
        run(stopped, lr=1e30)
    assert checkpoint_of(stopped)["step"] >= 6
    for value in checkpoint_of(stopped)["model"].values():
        assert value.isfinite().all()


def test_changed_options_are_named_when_resuming(stopped: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run(stopped, max_steps=7, clip_grad=0.5)
    assert "--clip_grad was 0.0 and is now 0.5" in caplog.text
    assert caplog.text.count("the rest of the run differs from its beginning") == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparo_slots": 4}, "image.num_slots 5 in the checkpoint, 4 asked for"),
        ({"readout": "gap"}, "readout 'sparo' in the checkpoint, 'gap' asked for"),
        ({"batch_size": 5}, "global_batch was 6 and is now 5"),
        ({"data_path": "scenes:25:32"}, "num_pairs was 26 and is now 25"),
        ({"beta2": 0.9}, "--beta2 was 0.98 and is now 0.9"),
    ],
)
def test_another_model_and_other_steps_are_not_resumed(stopped: Path, changes: dict[str, object], message: str) -> None:
    before = (stopped / "checkpoint.pth").read_bytes()
    with pytest.raises(CheckpointError, match=message):
        run(stopped, **changes)
    assert (stopped / "checkpoint.pth").read_bytes() == before


def test_a_checkpoint_of_something_else_is_not_resumed(stopped: Path) -> None:
    saved = torch.load(stopped / "checkpoint.pth", weights_only=True)
    del saved["clip"]
    torch.save(saved, stopped / "checkpoint.pth")
    with pytest.raises(CheckpointError, match=r"checkpoint.pth holds no CLIP, so it cannot be resumed"):
        run(stopped)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_path": "nowhere/at/all"}, "nowhere/at/all"),
        ({"batch_size": 27}, "26 images are too few for one step"),
        ({"grad_accum_steps": 4}, "batch_size 6 cannot be shared by 1 process.* --grad_accum_steps 4; .* is 8"),
        ({"arch": "vit_giant"}, "unknown arch 'vit_giant'"),
        ({"readout": "max"}, "unknown readout 'max'"),
        ({"img_size": 20}, "img_size 20 px is not a multiple of --patch_size 8 px; the nearest that fits is 16"),
        ({"text_heads": 5}, "text width=24 is not a multiple of heads=5"),
        ({"sparo_group_size": 2}, "group_size=2 does not divide num_slots=5"),
        ({"crop_scale": "0.9,0.4"}, r"crop_scale=\(0.9, 0.4\) is not a range"),
        ({"precision": "fp16"}, "fp16 needs a CUDA device"),
        ({"device": "warp"}, "unknown device 'warp'"),
        ({"context_length": 2}, "context_length=2 has no room"),
        ({"negative_key": "false"}, "negative_key='false' is a column of a table, and data_path='scenes.*' is none"),
        (
            {"negative_key": "false", "shards": "streamed", "epoch_pairs": 9},
            "false captions are read from tables alone",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(tmp_path, **changes)
    assert not (tmp_path / "checkpoint.pth").exists()


def test_a_probe_needs_labels(tmp_path: Path) -> None:
    image_folders(tmp_path / "images", broken=0)
    with pytest.raises(ValueError, match="no labels"):
        run(tmp_path / "run", zero_shot_freq=1, zero_shot_path=tmp_path / "images" / "cat")


def test_a_share_of_the_batch_is_the_same_for_all() -> None:
    assert micro_batch_size(4096, 8, 4) == 128
    with pytest.raises(ValueError, match=r"by 3 process.*the nearest that can is 4098"):
        micro_batch_size(4096, 3, 2)


def test_a_mistake_ends_in_one_line_and_a_failure_status(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_command("train-clip", options(tmp_path, arch="vit_giant"))
    assert stopped.value.code == 1
    assert "unknown arch" in caplog.text


# ---- options and presets


def parsed(*words: str) -> argparse.Namespace:
    args = get_args_parser().parse_args(list(words))
    CLIPObjective.check_options(args)
    return args


# Where the paper (SPARO) or OpenCLIP states it -> option -> values for CC3M, CC12M, CC15M and LAION-400M.
CC_AND_LAION = ("cc3m", "cc12m", "cc15m", "laion400m")
RECIPES: dict[str, dict[str, tuple[Any, Any, Any, Any]]] = {
    "table 0.C.3, row Epochs": {"epochs": (32, 25, 25, 32)},
    "table 0.C.3, row Global batch size": {"batch_size": (4096, 4096, 4096, 32768)},
    "table 0.C.3, row Warmup steps": {"warmup_steps": (3600, 3600, 3600, 2000)},
    "table 0.C.3, row Weight decay": {"weight_decay": (0.5, 0.5, 0.5, 0.2)},
    "table 0.C.3, row Precision": {"precision": ("bf16",) * 4},
    "table 1, column Model: CLIP16 for Conceptual Captions, CLIP32 for L400M; so tables 2, 3 and 0.B.1, figure 2": {
        "patch_size": (16, 16, 16, 32)
    },
    "table 1, row +Sparo": {"readout": ("sparo",) * 4},
    "section 4: ViT-B/16 or ViT-B/32 visual backbone": {"arch": ("vit_base",) * 4, "img_size": (224,) * 4},
    "section 4: L = V = 64 on Conceptual Captions, L = 128 and V = 64 on LAION-400M": {
        "sparo_slots": (64, 64, 64, 128),
        "sparo_slot_dim": (64,) * 4,
    },
    "sparo-clip's ViT-B-16-SPARO.json, sparo_attn_dim null: as wide as an attention head": {"sparo_key_dim": (64,) * 4},
    "sparo-clip's ViT-B-16-SPARO.json: one slot per key": {"sparo_group_size": (1,) * 4},
    "section 4: Sparo replaces the last block, which it does by default": {"replace_block": (None,) * 4},
    "appendix 0.C.1: else OpenCLIP's defaults; its params.py, for ViTs": {
        "lr": (5e-4,) * 4,
        "beta1": (0.9,) * 4,
        "beta2": (0.98,) * 4,
        "eps": (1e-6,) * 4,
        "min_lr": (0.0,) * 4,
        "clip_grad": (0.0,) * 4,
    },
    "OpenCLIP's ViT-B-16.json and ViT-B-32.json": {
        "text_width": (512,) * 4,
        "text_heads": (8,) * 4,
        "text_layers": (12,) * 4,
        "context_length": (77,) * 4,
        "embed_dim": (512,) * 4,
    },
    "OpenCLIP's transform.py, AugmentationCfg": {"crop_scale": ((0.9, 1.0),) * 4},
}


@pytest.mark.parametrize(("column", "name"), list(enumerate(CC_AND_LAION)))
def test_every_value_of_every_preset_is_where_the_paper_states_it(column: int, name: str) -> None:
    args = parsed("--preset", name)
    for source, options_there in RECIPES.items():
        expected = {option: values[column] for option, values in options_there.items()}
        assert {option: getattr(args, option) for option in expected} == expected, source


def test_no_preset_has_a_value_that_the_table_lacks() -> None:
    presets = {path.stem: read_config(path) for path in PRESETS.iterdir()}
    assert set(CC_AND_LAION) == presets.keys()
    in_table = {option for values in RECIPES.values() for option in values}
    for values in presets.values():
        assert values.keys() <= in_table | {"command"}


@pytest.mark.parametrize("words", [["--lr", "0.0005", "--epochs", "3"], []])
def test_a_given_option_wins_wherever_it_stands(words: list[str]) -> None:
    for line in (["--preset", "cc12m", *words], [*words, "--preset", "cc12m"]):
        args = parsed(*line)
        assert args.epochs == (3 if words else 25)
        assert args.batch_size == 4096
    # Given, and equal to the default: still not the preset's.
    assert parsed("--weight_decay", "0.2", "--preset", "cc3m").weight_decay == 0.2


def test_a_preset_that_does_not_exist_is_refused_with_those_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed("--preset", "cc4m")
    assert "invalid choice: 'cc4m' (choose from" in capsys.readouterr().err


def test_the_options_and_their_defaults_are_frozen() -> None:
    found = vars(get_args_parser().parse_args([]))
    assert json.loads(json.dumps(found)) == {
        "arch": "vit_base",
        "patch_size": None,
        "pretrained": False,
        "img_size": 224,
        "sparo_slots": 64,
        "sparo_slot_dim": 64,
        "sparo_key_dim": 64,
        "embed_dim": 512,
        "text_width": 512,
        "text_heads": 8,
        "text_layers": 12,
        "context_length": 77,
        "epochs": 32,
        "batch_size": 256,
        "lr": 5e-4,
        "warmup_steps": 500,
        "weight_decay": 0.2,
        "beta1": 0.9,
        "beta2": 0.98,
        "eps": 1e-6,
        "precision": "auto",
        "preset": None,
        "report_to": ["tensorboard"],
        "run_name": None,
        "data_path": None,
        "shards": "indexed",
        "epoch_pairs": None,
        "shard_weights": None,
        "image_key": None,
        "negative_key": None,
        "caption_key": None,
        "image_folder": None,
        "caption_templates": None,
        "allow_rescale": False,
        "compile": "auto",
        "split": None,
        "split_column": None,
        "max_image_mb": 256.0,
        "max_image_mpix": 64.0,
        "max_value": 65535,
        "exif": "apply",
        "val_path": None,
        "val_share": 0.0,
        "download": False,
        "max_corrupt": 0.01,
        "crop_scale": [0.9, 1.0],
        "exact_crops": False,
        "norm_mean": [0.48145466, 0.4578275, 0.40821073],
        "norm_std": [0.26862954, 0.26130258, 0.27577711],
        "pre_norm": True,
        "init_from": None,
        "init_clip": None,
        "freeze": None,
        "quick_gelu": False,
        "grad_checkpointing": False,
        "readout": "sparo",
        "sparo_group_size": 1,
        "replace_block": None,
        "norm_first": False,
        "bottleneck_dim": 512,
        "num_codes": 16384,
        "max_steps": None,
        "grad_accum_steps": 1,
        "min_lr": 0.0,
        "layer_decay": None,
        "clip_grad": 0.0,
        "logits": "fp32",
        "output_dir": None,
        "saveckp_freq": 0,
        "saveckp_minutes": 30.0,
        "keep_checkpoints": 3,
        "zero_shot_freq": 0,
        "zero_shot_path": None,
        "seed": 0,
        "device": "auto",
        "num_workers": 10,
        "dist_url": "env://",
        "dist_timeout_min": 10.0,
        "local_rank": 0,
    }

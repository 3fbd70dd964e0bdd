"""finetune/: one step against a loop of torch, bits of a resumed run, starts, validation, and the next commands."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from runs import assert_same_run, checkpoint_of, epochs_of
from small_models import save_small_encoder
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing
from timm.loss import SoftTargetCrossEntropy
from torch.nn import functional as F

import dino_sparo
from dino_sparo.__main__ import run as run_command
from dino_sparo.api import call
from dino_sparo.commands import parse_keywords
from dino_sparo.data.batch import Batch
from dino_sparo.data.sources import open_source
from dino_sparo.finetune.train import FinetuneObjective
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.launch import Distributed
from dino_sparo.weights.file import CheckpointError

COMMON: dict[str, Any] = {"data_path": "scenes:26:32", "device": "cpu", "num_workers": 0, "precision": "fp32"}
TINY = {**COMMON, "untrained": True, "arch": "vit_micro", "patch_size": 8, "img_size": 16, "readout": "cls"}
TRAINED = dict.fromkeys(("untrained", "arch", "patch_size", "readout", "img_size"))
# 2 epochs of 3 steps of 2 x 4 images.
RUN = {"epochs": 2, "batch_size_per_gpu": 4, "grad_accum_steps": 2, "lr": 0.01, "warmup_epochs": 1, "saveckp_freq": 0}


def finetune(folder: Path, **changes: object) -> Path:
    call("finetune", **{**TINY, **RUN, "output_dir": folder, **changes})
    return folder


def objective(**changes: object) -> FinetuneObjective:
    args = parse_keywords("finetune", {**TINY, **RUN, **changes})
    FinetuneObjective.check_options(args)
    FinetuneObjective.fill_in_defaults(args)
    return FinetuneObjective(args, Distributed(0, 1, torch.device("cpu")))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to its end."""
    return finetune(tmp_path_factory.mktemp("finetune") / "run")


# One step.


def seed_all(seed: int, step: int, rank: int = 0) -> None:
    """The random numbers of a step, as docs/checkpoints.md says."""
    word = int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0])
    torch.manual_seed(word)
    np.random.seed(word % 2**32)
    random.seed(word)


def test_steps_are_those_of_a_loop_written_with_torch_and_timm() -> None:
    """Layer 0 is the embeddings, layers 1 to 3 the blocks; head and last norm have the whole rate."""
    ours = objective(epochs=10, drop_path_rate=0, seed=3, weight_decay=0.5, random_erasing=0.5)
    with torch.no_grad():
        ours.network.head.weight.normal_(std=0.1)  # it starts near 0
    theirs, average = (objective(epochs=10, drop_path_rate=0, seed=3).network for _ in range(2))
    for network in (theirs, average):
        network.load_state_dict(ours.network.state_dict())
    depth = len(theirs.backbone.blocks)

    def group(name: str, weight: torch.Tensor) -> dict[str, Any]:
        layer = depth + 1
        if name.startswith("backbone.blocks."):
            layer = 1 + int(name.split(".")[2])
        elif name.startswith("backbone.") and ".norm." not in name:
            layer = 0
        decay = 0.5 if weight.ndim > 1 and not name.endswith(".bias") else 0.0
        return {"params": [weight], "factor": 0.75 ** (depth + 1 - layer), "weight_decay": decay}

    optimizer = torch.optim.AdamW([group(*named) for named in theirs.named_parameters()], lr=0.0)
    mix = Mixup(0.8, 1.0, label_smoothing=0.1, num_classes=10)
    erase = RandomErasing(0.5, mode="pixel", device="cpu")
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        images = [torch.randn(4, 3, 16, 16, generator=generator) for _ in range(2)]
        labels = [torch.randint(10, (4,), generator=generator) for _ in range(2)]
        batches = [Batch([i.clone()], y, y, []) for i, y in zip(images, labels, strict=True)]
        report = ours.step(batches, epoch=0, is_last=False)

        seed_all(3, step)
        peak = 0.01 * 8 / 256
        rate = [0, peak / 2, peak, peak][step]  # a warm-up of 3 steps, then the cosine's first value
        losses = []
        for i, y in zip(images, labels, strict=True):
            mixed, targets = mix(erase(i.clone()), y)
            losses.append(SoftTargetCrossEntropy()(theirs(mixed), targets))
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        for part in optimizer.param_groups:
            part["lr"] = part["factor"] * rate
        optimizer.step()
        share = 0.0 if step == 0 else 1 - (1 + step) ** (-2 / 3)
        for kept, weight in zip(average.state_dict().values(), theirs.state_dict().values(), strict=True):
            kept.copy_(share * kept + (1 - share) * weight)
        assert report.loss.item() == pytest.approx(torch.stack(losses).mean().item(), abs=1e-6)
    for network, expected in ((ours.network, theirs), (ours.average.module, average)):
        for name, value in expected.state_dict().items():
            # A key's bias has no gradient but rounding, which Adam turns into noise.
            shown = torch.arange(len(value)) // (len(value) // 3) != 1 if name.endswith("qkv.bias") else ...
            torch.testing.assert_close(network.state_dict()[name][shown], value[shown], atol=2e-6, rtol=1e-5, msg=name)


def test_without_mixing_the_loss_is_that_of_smoothed_labels() -> None:
    ours = objective(mixup=0, cutmix=0, random_erasing=0, label_smoothing=0.3, drop_path_rate=0)
    images, labels = torch.randn(4, 3, 16, 16), torch.tensor([1, 9, 3, 3])
    log_shares = ours.network(images).log_softmax(dim=1)
    targets = 0.7 * F.one_hot(labels, 10) + 0.3 / 10
    batch = Batch([images], labels, labels, [])
    assert ours.step([batch, batch], 0, False).loss.item() == pytest.approx(
        -(targets * log_shares).sum(1).mean().item()
    )


# Resuming.


def test_a_resumed_run_with_all_augmentations_ends_in_the_same_bits(whole: Path, tmp_path: Path) -> None:
    """In the middle of an epoch, twice; mixup, CutMix, erasing and stochastic depth are on."""
    for steps in (2, 4):
        finetune(tmp_path / "parts", max_steps=steps)
    finetune(tmp_path / "parts")
    assert_same_run(whole, tmp_path / "parts", "finetune")
    one, other = (next(folder.glob("*.json")).read_text() for folder in (whole, tmp_path / "parts"))
    assert one.replace(str(whole), "") == other.replace(str(tmp_path / "parts"), "")


def test_ranks_erase_and_mix_in_different_ways() -> None:
    ours, images = objective(), torch.zeros(4, 3, 16, 16)
    drawn = []
    for rank in (0, 1, 0):
        seed_all(0, 5, rank)
        drawn.append(ours.augment(images.clone(), torch.arange(4))[1])
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


def test_a_folder_of_another_training_or_of_other_classes_is_not_resumed(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    checkpoint = checkpoint_of(folder)
    for changed, held in (
        ({"finetune": {**checkpoint["finetune"], "classes": ["a"]}}, "a classifier of 1 other classes"),
        ({"finetune": {}}, "no fine-tuned classifier"),
    ):
        torch.save({**checkpoint, **changed}, folder / "checkpoint.pth")
        with pytest.raises(
            CheckpointError, match=rf"holds {held}, so it cannot be resumed; choose another --output_dir"
        ):
            finetune(folder)


def test_a_folder_of_another_start_is_not_resumed(whole: Path, tmp_path: Path) -> None:
    """A finished run of one encoder was once reported as that of another, and its checkpoint renamed its start."""
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    with pytest.raises(CheckpointError, match=r"started from another encoder \(seed 0 there, 1 now\)"):
        finetune(folder, seed=1)
    checkpoint = checkpoint_of(folder)
    start = {**checkpoint["finetune"]["start"], "sha256": 64 * "a"}
    torch.save({**checkpoint, "finetune": {**checkpoint["finetune"], "start": start}}, folder / "checkpoint.pth")
    with pytest.raises(CheckpointError, match=r"\(sha256 aaaaaaaa... there, None now\), so it cannot be resumed"):
        finetune(folder)


def test_the_result_of_a_finished_run_keeps_the_options_of_the_run(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    before = next(folder.glob("finetune_*.json")).read_text()
    finetune(folder, lr=0.5)
    assert [path.read_text() for path in folder.glob("finetune_*.json")] == [before]


# Validation.


def test_the_accuracy_is_that_of_the_moving_average_on_the_validation_images(whole: Path) -> None:
    checkpoint = checkpoint_of(whole)
    encoder, head = dino_sparo.load_encoder(whole / "checkpoint.pth"), checkpoint["teacher"]
    val = open_source("scenes:26:32", "val")
    with torch.no_grad():
        features = encoder(encoder.transform([val.read(index) for index in range(26)]))
    logits, labels = features @ head["head.weight"].T + head["head.bias"], torch.from_numpy(val.labels)
    best = logits.argsort(dim=1, descending=True)
    expected = [100 * (best[:, :k] == labels[:, None]).any(1).double().mean().item() for k in (1, 5)]
    last = epochs_of(whole)[-1]
    assert [last["val_top1"], last["val_top5"]] == pytest.approx(expected)
    assert checkpoint["finetune"]["classes"] == val.classes


def test_the_result_has_the_last_and_the_best_epoch_and_the_start(whole: Path) -> None:
    (path,) = whole.glob("finetune_*.json")
    assert path.name == "finetune_scenes-26-32_untrained.json"
    result, rows = json.loads(path.read_text()), epochs_of(whole)
    top1 = [row["val_top1"] for row in rows]
    assert result["last"] == {"epoch": 1, "top1": top1[-1], "top5": rows[-1]["val_top5"]}
    assert (result["best"]["top1"], result["best"]["epoch"]) == (max(top1), top1.index(max(top1)))
    assert checkpoint_of(whole)["best_top1"] == max(top1)
    best = dino_sparo.load_checkpoint(whole / "checkpoint_best.pth")
    assert best["epoch"] == top1.index(max(top1)) + 1
    assert (result["encoder"]["untrained"], result["encoder"]["readout"]) == (True, "cls")
    assert result["images"]["num_train"] == 26
    assert result["options"]["global_batch_size"] == 8


# Starts.


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Weights of each kind that need no network."""
    folder = tmp_path_factory.mktemp("starts")
    checkpoint = save_small_encoder(folder / "checkpoint.pth", img_size=32)
    run_command("export", ["demo", str(folder / "demo")])
    return {"demo": "demo", "checkpoint": str(checkpoint), "export": f"{folder / 'demo'}.safetensors"}


@pytest.mark.parametrize("name", ["demo", "checkpoint", "export"])
def test_a_run_starts_from_the_encoder_that_load_encoder_reads(name: str, starts: dict[str, str]) -> None:
    network = objective(**TRAINED, pretrained_weights=starts[name]).network.eval()
    encoder = dino_sparo.load_encoder(starts[name])
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(network.encoder(images), encoder(images))
    assert network.config == encoder.config
    assert network(images).abs().max() < 0.01  # the classes begin equal


@pytest.mark.parametrize("name", ["test_vit", "test_resnet"])
def test_a_model_of_timm_is_fine_tuned(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights from a seed in place of the published ones. A ResNet has no class token."""
    create = timm.create_model
    published = create(name, num_classes=0)
    monkeypatch.setattr(
        timm,
        "create_model",
        lambda name, pretrained=False, **settings: published if pretrained else create(name, **settings),
    )
    weights = {**TRAINED, "pretrained_weights": f"timm/{name}", "img_size": 32}
    run = finetune(tmp_path, **weights, max_steps=2)  # the first has a learning rate of 0
    encoder = dino_sparo.load_encoder(run / "checkpoint.pth")
    assert encoder.config.arch == f"timm/{name}"
    after, before = encoder.backbone.model.state_dict(), published.state_dict()
    changes = [(after[key] - before[key]).abs().max().item() for key in before if key.endswith("weight")]
    assert 0 < max(changes) < 0.01


def test_larger_images_give_an_encoder_of_a_larger_grid(tmp_path: Path) -> None:
    weights = {**TRAINED, "pretrained_weights": "demo"}
    run = finetune(tmp_path, **{**weights, "img_size": 48}, max_steps=1)
    encoder = dino_sparo.load_encoder(run / "checkpoint.pth")
    assert encoder.config.img_size == 48
    assert encoder.transform(open_source("scenes:1:32", "val").read(0)).shape == (1, 3, 48, 48)


# The next commands.


def test_the_next_commands_read_the_fine_tuned_encoder(whole: Path, tmp_path: Path) -> None:
    checkpoint = str(whole / "checkpoint_best.pth")
    shared = ["--device", "cpu"]
    data = ["--data_path", "scenes:26:32", "--num_workers", "0", *shared]
    result = run_command(
        "knn", ["--pretrained_weights", checkpoint, "--nb_knn", "5", *data, "--output_dir", str(tmp_path)]
    )
    assert result["encoder"]["checkpoint_key"] == "teacher"
    run_command("export", [checkpoint, str(tmp_path / "fine")])
    exported = dino_sparo.load_encoder(tmp_path / "fine.safetensors")
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(exported(images), dino_sparo.load_encoder(checkpoint)(images))
    facts = run_command("info", [checkpoint])
    assert facts["objective"] == "fine-tuning"
    assert facts["scores"]["best_top1"].endswith(" %")
    options = {**COMMON, "arch": "vit_micro", "patch_size": 8, "readout": "cls", "batch_size_per_gpu": 4, "epochs": 1}
    sizes = {"global_crops_size": 16, "local_crops_number": 0, "out_dim": 32, "head_hidden_dim": 16, "max_steps": 1}
    dino_sparo.train(output_dir=tmp_path / "dino", init_from=checkpoint, init_head="new", **options, **sizes)
    network = objective(**TRAINED, pretrained_weights=checkpoint).network.eval()
    assert torch.equal(network.encoder(images), exported(images))


# Refusals.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"untrained": False}, r"--pretrained_weights is empty; give the weights to start from, such as demo"),
        ({"batch_size_per_gpu": 5}, r"--batch_size_per_gpu 5 is odd, and --mixup 0.8 --cutmix 1 mix pairs.* --mixup 0"),
        ({"warmup_epochs": 4}, r"--warmup_epochs 4 is longer than the run of 2 epochs; shorten it"),
        ({"img_size": 20}, r"--img_size 20 px is not a multiple of --patch_size 8 px"),
    ],
)
def test_options_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        objective(**changes)

"""clip/train.py, step.py: gradients, a run and its files, resuming, and bad input."""

import argparse
import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("open_clip")

from image_files import write_images
from objectives import bare
from runs import checkpoint_of, epochs_of, train_small

from dino_sparo.clip import CLIP, create_clip, load_clip
from dino_sparo.clip.loss import clip_loss
from dino_sparo.clip.options import PRESETS, get_args_parser
from dino_sparo.clip.train import CLIPObjective
from dino_sparo.image_text.objective import micro_batch_size, param_groups
from dino_sparo.image_text.options import shorten_warmups
from dino_sparo.image_text.pairs.batches import PairBatch, PairDataset, PairTransform, collate_pairs
from dino_sparo.image_text.pairs.sources import open_pairs
from dino_sparo.image_text.step import MAX_LOGIT_SCALE, backward_at_once, backward_in_parts, train_step
from dino_sparo.models.encoder import create_encoder
from dino_sparo.runtime.cli import read_config
from dino_sparo.training.loop import TooManyCorruptError
from dino_sparo.training.optim import OPTIMIZERS
from dino_sparo.training.updater import Updater

SMALL = {"num_slots": 5, "slot_dim": 7, "key_dim": 3, "embed_dim": 11, "text_width": 24, "text_heads": 2}


run = partial(train_small, "train-clip")


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


def false_captions(index: int) -> list[str]:
    return ["" if index % 3 == 0 else f"{index} blue circles"]


@pytest.mark.parametrize(("readout", "negatives"), [("gap", None), ("sparo", None), ("cls", false_captions)])
def test_gradients_in_parts_are_those_of_the_large_batch_the_temperatures_too(
    readout: str, negatives: Callable[[int], list[str]] | None
) -> None:
    model = small_clip(readout).double()
    (loss, whole), (loss_in_parts, in_parts) = (gradients(model, sizes, negatives) for sizes in ([11], [5, 4, 2]))
    assert loss_in_parts == pytest.approx(loss, abs=1e-6)
    for name, expected in whole.items():
        assert torch.allclose(in_parts[name], expected, rtol=1e-4, atol=1e-7), name
    # Three parts, and yet not three times as much, as it is when the whole loss is computed for every part.
    assert whole["logit_scale"].abs() > 1e-3
    assert in_parts["logit_scale"].item() == pytest.approx(whole["logit_scale"].item(), rel=1e-6)


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


def test_a_resumed_run_takes_the_weight_decay_that_is_asked_for() -> None:
    """The bug: it was said to change and stayed the optimizer's saved one."""
    model = small_clip()

    def updater(weight_decay: float) -> Updater:
        args = parsed("--weight_decay", str(weight_decay), "--epochs", "2", "--lr", "0.1", "--warmup_steps", "1")
        objective = bare(CLIPObjective, args=args, network=model, sampler=SimpleNamespace(steps_per_epoch=3))
        return objective.updater_of_parts(torch.device("cpu"), torch.float32)

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
    training, batch = small_training(small_clip(), lr=2e-3), some_pairs(7)
    reports = [train_step(training, [batch]) for _ in range(18)]
    assert reports[0].loss.item() == pytest.approx(math.log(7), abs=1.5)
    assert reports[-1].loss < 0.5
    assert reports[0].scalars["batch_accuracy"] < 0.4
    assert reports[-1].scalars["batch_accuracy"] > 0.9


# ---- runs


def test_a_run_leaves_a_model_to_load_and_counts_captions_that_are_cut_off(tmp_path: Path) -> None:
    run(tmp_path, max_steps=4, context_length=4)
    (epoch,) = epochs_of(tmp_path)
    assert epoch["loss_over_ln_batch"] == pytest.approx(epoch["train_loss"] / math.log(6))
    assert epoch["train_truncated_captions"] == 18  # six name a lone shape and nothing else
    loaded = load_clip(tmp_path / "checkpoint.pth")
    assert loaded.model.config.embed_dim == 15
    assert loaded.mean == pytest.approx((0.48145466, 0.4578275, 0.40821073))
    assert torch.equal(loaded.model.logit_scale, checkpoint_of(tmp_path)["model"]["logit_scale"])


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
    images = write_images(tmp_path / "images", broken=1, classes=("dog", "cat"))
    rows = [f"{path.relative_to(tmp_path)},words" for path in sorted(images.rglob("*.png"))] + 5 * [",alone"]
    (tmp_path / "t.csv").write_text("\n".join(["path,caption", *rows]))
    with pytest.raises(TooManyCorruptError, match=r"6 of 17 pairs are unreadable \(1 in this epoch\), more than"):
        run(tmp_path / "run", data_path=tmp_path / "t.csv", epochs=1, max_corrupt=0.1)


@pytest.mark.parametrize("products", ["tf32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_run_with_rounded_logits_learns_as_one_without(tmp_path: Path, products: str) -> None:
    changes = {"data_path": "scenes:12:32", "epochs": 1}
    runs = [run(tmp_path / name, logits=name, **changes) for name in ("fp32", products)]
    losses = [epochs_of(folder)[0]["train_loss"] for folder in runs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grad_accum_steps": 4}, "batch_size 6 cannot be shared by 1 process.* --grad_accum_steps 4; .* is 8"),
        ({"crop_scale": "0.9,0.4"}, r"crop_scale=\(0.9, 0.4\) is not a range"),
        ({"crop_scale": "0.9,1.1"}, r"crop_scale=\(0.9, 1.1\) is not a range of areas"),
        ({"negative_key": "false"}, "negative_key='false' is a column of a table; data_path='scenes.*' is no table"),
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
    write_images(tmp_path / "images", classes=("dog", "cat"))
    with pytest.raises(ValueError, match="no labels"):
        run(tmp_path / "run", zero_shot_freq=1, zero_shot_path=tmp_path / "images" / "cat")


def test_a_share_of_the_batch_is_the_same_for_all() -> None:
    assert micro_batch_size(4096, 8, 4) == 128
    with pytest.raises(ValueError, match=r"by 3 process.*the nearest possible batch size is 4098"):
        micro_batch_size(4096, 3, 2)


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

"""Continuing from a checkpoint: the next step, heads, center and optimizer; what does not fit, and what is refused."""

import argparse
import copy
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import main_dino
from dino_sparo import CheckpointError, create_encoder, load_checkpoint, load_encoder
from dino_sparo.data.batch import Batch
from dino_sparo.dino import options as dino_options
from dino_sparo.dino.options import check_options, fill_in_defaults
from dino_sparo.dino.train import DINOObjective
from dino_sparo.models.foreign_backbone import ForeignBackbone, plan_of
from dino_sparo.runtime.launch import Distributed
from dino_sparo.runtime.preemption import Agreement, StopSignals
from dino_sparo.simdino import options as simdino_options
from dino_sparo.simdino.train import SimDINOObjective
from dino_sparo.training.optim import layer_factors
from dino_sparo.training.resume import Run
from dino_sparo.weights.folder import CheckpointFolder, save_checkpoint

CPU = torch.device("cpu")
TINY = (
    "--data_path scenes:21:32 --arch vit_micro --patch_size 8 --global_crops_size 24 --local_crops_size 8 "
    "--local_crops_number 1 --out_dim 33 --head_hidden_dim 37 --batch_size_per_gpu 7 --epochs 2 --warmup_epochs 0 "
    "--sparo_slots 3 --sparo_slot_dim 5 --sparo_key_dim 11 --freeze_last_layer 0 --num_workers 0 --device cpu "
    "--precision fp32 --saveckp_freq 0 --lr 0.01"
)


def options(*words: object) -> argparse.Namespace:
    args = main_dino.get_args_parser().parse_args([*TINY.split(), *map(str, words)])
    fill_in_defaults(args)
    check_options(args)
    return args


def build(*words: object) -> DINOObjective:
    return DINOObjective(options(*words), Distributed(0, 1, CPU))


def started(path: Path, *words: object) -> DINOObjective:
    """An objective that starts from a file."""
    dino = build("--init_from", path, *words)
    dino.initialize()
    return dino


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after four of its six steps."""
    folder = tmp_path_factory.mktemp("source")
    main_dino.train_dino(options("--output_dir", folder, "--max_steps", 4))
    return folder / "checkpoint.pth"


def resumed(path: Path, *words: object) -> DINOObjective:
    """The objective of the run whose checkpoint this is, before its next step."""
    dino = build(*words)
    run = Run(dino, vars(options(*words)), CheckpointFolder(path.parent, keep=1), Agreement(StopSignals(), 30.0, CPU))
    run.load(load_checkpoint(path), str(path))
    return dino


def batch(dino: DINOObjective, dtype: torch.dtype = torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(0)
    sides = (24, 24, 8)
    crops = [torch.randn(7, 3, side, side, generator=generator).to(dtype) for side in sides]
    return Batch(crops, torch.full((7,), -1), torch.arange(7), [])


def state(dino: DINOObjective) -> dict[str, torch.Tensor]:
    """All tensors that a step changes, by name."""
    weights = {f"{key}.{name}": value for key, net in dino.networks.items() for name, value in net.state_dict().items()}
    moments = dino.updater.optimizer.state_dict()["state"]
    return copy.deepcopy(
        {**weights, **{f"{index}.{name}": value for index, each in moments.items() for name, value in each.items()}}
    )


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


# The next step.


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        ((), torch.float64),
        (("--optimizer", "lars", "--layer_decay", "0.7"), torch.float32),
        pytest.param(("--optimizer", "sgd"), torch.float64, marks=pytest.mark.slow),
    ],
)
def test_the_first_step_after_continuing_is_the_old_runs_next_step(
    tmp_path: Path, source: Path, words: tuple[str, ...], dtype: torch.dtype
) -> None:
    """Bit-identical, with the same batch at the same step of the same schedules: nothing of the state is lost."""
    if words:
        main_dino.train_dino(options("--output_dir", tmp_path, "--max_steps", 2, *words))
        source = tmp_path / "checkpoint.pth"
    old, new = resumed(source, *words), started(source, "--init_optimizer", "true", *words)
    new.updater.step = old.updater.step
    for dino in (old, new):
        for network in dino.networks.values():
            network.to(dtype).train()
        moments = dino.updater.optimizer.state_dict()
        dino.updater.optimizer.load_state_dict(moments)  # in the weights' precision
    before = state(old)
    assert_same(before, state(new))
    losses = [dino.step([batch(dino, dtype)], epoch=1, is_last=True).loss for dino in (old, new)]
    assert torch.equal(*losses)
    assert_same(state(old), state(new))
    assert any(not torch.equal(value, before[name]) for name, value in state(new).items())


def test_without_its_optimizer_the_loss_of_the_first_step_is_the_same_and_the_step_is_not(source: Path) -> None:
    old, new = resumed(source), started(source)
    assert not new.updater.optimizer.state
    new.updater.step = old.updater.step
    losses = [dino.step([batch(dino)], epoch=1, is_last=True).loss for dino in (old, new)]
    assert torch.equal(*losses)
    assert not torch.equal(old.network.head.mlp[0].weight, new.network.head.mlp[0].weight)


@pytest.mark.parametrize("words", [(), ("--global_crops_size", "40"), ("--out_dim", "35")])
def test_knn_right_after_continuing_is_that_of_the_checkpoint(source: Path, words: tuple[str, ...]) -> None:
    new = started(source, *words)
    expected = load_encoder(source)
    args = options("--batch_size_per_gpu", "5", *words)
    positions = expected.backbone.position_embedding(args.global_crops_size, args.global_crops_size)
    weights = {**expected.state_dict(), "backbone.pos_embed": positions.detach()}
    assert_same(weights, dict(new.teacher.encoder.state_dict()))
    accuracy = new.probe(new.teacher.encoder)
    assert accuracy == new.probe(expected)


# Parts that fit, and the log.


def test_the_log_says_what_was_taken(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        started(source, "--init_optimizer", "true")
    assert (
        f"start from weights of {source}: taken cls_token, pos_embed, patch_embed.*, blocks 0-2, norm.*, readout.*; "
        "dropped nothing; new nothing; heads and center: taken mlp, last_layer, center; optimizer: state of 54 of 54 "
        "weights taken"
    ) in caplog.text


@pytest.mark.parametrize(
    ("words", "taken", "message"),
    [
        (
            ("--out_dim", "35"),
            ["mlp"],
            r"taken mlp; new last_layer, center \(last_layer.weight_g: \(33, 1\) in the file, \(35, 1\) here\)",
        ),
        (
            ("--head_hidden_dim", "41"),
            [],
            r"taken nothing; new mlp, last_layer, center \(mlp.0.weight: \(37, 15\) in the file, \(41, 15\) here\)",
        ),
        (
            ("--use_bn_in_head", "true"),
            [],
            r"new mlp, last_layer, center \(mlp.1.weight: absent in the file, \(37,\) here\)",
        ),
        (("--sparo_key_dim", "13"), [], r"new mlp, last_layer, center \(weights of the encoder are new\)"),
    ],
)
def test_a_head_is_taken_up_to_the_part_that_does_not_fit(
    source: Path, caplog: pytest.LogCaptureFixture, words: tuple[str, ...], taken: list[str], message: str
) -> None:
    with caplog.at_level(logging.INFO):
        new, fresh = started(source, *words), build(*words)
    assert caplog.text.count("start from") == 1
    assert re.search(message, caplog.text)
    checkpoint = load_checkpoint(source)
    for name, network in (("student", new.network), ("teacher", new.teacher)):
        for weight, value in network.head.state_dict().items():
            from_file = weight.split(".")[0] in taken
            expected = checkpoint[name][f"head.{weight}"] if from_file else fresh.network.head.state_dict()[weight]
            assert torch.equal(value, expected), weight
    assert not new.loss.center.any()


def test_student_and_teacher_take_their_own_weights_and_init_head_new_the_teachers(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = load_checkpoint(source)
    name = "backbone.blocks.1.attn.qkv.weight"
    assert not torch.equal(checkpoint["student"][name], checkpoint["teacher"][name])
    new = started(source)
    assert torch.equal(new.network.state_dict()[name], checkpoint["student"][name])
    assert torch.equal(new.teacher.state_dict()[name], checkpoint["teacher"][name])
    with caplog.at_level(logging.INFO):
        new, fresh = started(source, "--init_head", "new"), build()
    assert "the head is new (--init_head new)" in caplog.text
    assert_same(dict(new.network.state_dict()), dict(new.teacher.state_dict()))
    assert torch.equal(new.network.state_dict()[name], checkpoint["teacher"][name])
    assert_same(dict(new.network.head.state_dict()), dict(fresh.network.head.state_dict()))
    assert not new.loss.center.any()


def test_a_second_phase_at_a_higher_resolution_takes_heads_and_moments_but_for_the_positions(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        new = started(source, "--global_crops_size", "40", "--init_optimizer", "true")
    assert "position embedding resampled from 3x3 to 5x5 patches; heads and center: taken mlp, last_layer, center" in (
        caplog.text
    )
    assert "optimizer: state of 53 of 54 weights taken" in caplog.text
    moments = new.updater.optimizer.state
    assert new.network.backbone.pos_embed not in moments
    old = resumed(source)
    for weight, other in zip(new.network.parameters(), old.network.parameters(), strict=True):
        if weight.requires_grad and weight is not new.network.backbone.pos_embed:
            assert torch.equal(moments[weight]["exp_avg_sq"], old.updater.optimizer.state[other]["exp_avg_sq"])
    assert torch.equal(new.loss.center, old.loss.center)


def test_the_scale_of_fp16_gradients_comes_with_the_optimizers_state(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pth"
    dino = build("--init_from", path, "--init_optimizer", "true")
    dino.updater.scaler = torch.amp.GradScaler("cpu")
    saved = torch.amp.GradScaler("cpu", init_scale=128.0).state_dict()
    for extra, scale in (({}, 65536), ({"fp16_scaler": saved}, 128)):  # a run in another precision saved none
        save_checkpoint({**load_checkpoint(source), **extra}, path)
        dino.initialize()
        assert dino.updater.scaler.get_scale() == scale


def as_the_reference_saves(source: Path, folder: Path, **changes: Any) -> Path:
    """`*_full_checkpoint.pth` of facebookresearch/dino: a student in DDP, options as a Namespace, unnamed groups."""
    checkpoint = load_checkpoint(source)
    groups = checkpoint["optimizer"]["param_groups"]
    for group in groups:
        del group["param_names"]
    content = {
        "student": {f"module.{name}": value for name, value in checkpoint["student"].items()},
        "teacher": checkpoint["teacher"],
        "optimizer": checkpoint["optimizer"],
        "epoch": 100,
        "args": argparse.Namespace(arch="vit_small", patch_size=16, optimizer="adamw", output_dir=Path("runs")),
        "dino_loss": checkpoint["dino_loss"],
        **changes,
    }
    save_checkpoint(content, folder / "dino_deitsmall16_pretrain_full_checkpoint.pth")
    return folder / "dino_deitsmall16_pretrain_full_checkpoint.pth"


@pytest.mark.parametrize("words", [(), ("--norm_last_layer", "false", "--use_bn_in_head", "true")])
def test_the_references_full_checkpoint_gives_heads_center_and_moments(tmp_path: Path, words: tuple[str, ...]) -> None:
    words = ("--readout", "cls", *words)
    main_dino.train_dino(options("--output_dir", tmp_path / "run", "--max_steps", 2, *words))
    ours = tmp_path / "run" / "checkpoint.pth"
    theirs = as_the_reference_saves(ours, tmp_path)
    old, new = resumed(ours, *words), started(theirs, "--init_optimizer", "true", *words)
    assert_same(state(old), state(new))


def test_a_file_of_one_network_starts_both_encoders_and_new_heads(
    tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = load_encoder(source)
    torch.save(encoder.state_dict(), tmp_path / "raw.pth")
    with caplog.at_level(logging.INFO):
        new = started(tmp_path / "raw.pth")
    assert "the head is new (the file has none)" in caplog.text
    assert_same(dict(new.network.encoder.state_dict()), dict(encoder.state_dict()))
    assert_same(dict(new.network.state_dict()), dict(new.teacher.state_dict()))


# Frozen epochs, and learning rates by layer.


def test_frozen_epochs_change_no_weight_of_the_backbones_and_the_next_does(source: Path) -> None:
    dino = started(source, "--freeze_backbone_epochs", "1")
    before = copy.deepcopy(dino.networks["student"].state_dict()), copy.deepcopy(dino.teacher.state_dict())
    assert dino.sampler.steps_per_epoch == 3
    for step, is_frozen in ((0, True), (2, True), (3, False)):
        dino.updater.step = step
        dino.step([batch(dino)], epoch=step // 3, is_last=False)
        for old, network in zip(before, (dino.network, dino.teacher), strict=True):
            moved = {name for name, value in network.state_dict().items() if not torch.equal(value, old[name])}
            assert "readout.queries" in moved
            assert "head.mlp.0.weight" in moved
            backbone = {name for name in old if name.startswith("backbone.")}
            assert not moved & backbone if is_frozen else backbone <= moved


@pytest.mark.parametrize("method", [dino_options, simdino_options], ids=["dino", "simdino"])
def test_statistics_of_batch_norm_stay_in_frozen_epochs_and_move_afterwards(method: Any, tmp_path: Path) -> None:
    torch.save(create_encoder("timm/test_resnet", readout="gap").backbone.state_dict(), tmp_path / "raw.pth")
    is_dino = method is dino_options
    words = (TINY if is_dino else TINY.replace("--out_dim 33", "").replace("--freeze_last_layer 0", "")).split()
    words += ["--arch", "timm/test_resnet", "--patch_size", "32", "--readout", "gap", "--global_crops_size", "64"]
    words += ["--local_crops_size", "32", "--freeze_backbone_epochs", "1", "--init_from", str(tmp_path / "raw.pth")]
    args = method.get_args_parser().parse_args(words)
    objective_class = DINOObjective if is_dino else SimDINOObjective
    objective_class.fill_in_defaults(args)
    objective_class.check_options(args)
    dino = objective_class(args, Distributed(0, 1, CPU))
    dino.initialize()
    backbones = dino.network.backbone, dino.teacher.backbone
    before = [copy.deepcopy(dict(backbone.named_buffers())) for backbone in backbones]
    assert any(name.endswith("running_var") for name in before[0])
    for step, is_frozen in ((0, True), (2, True), (3, False)):
        for network in dino.networks.values():
            network.train()  # as every epoch begins
        dino.updater.step = step
        crops = [torch.randn(7, 3, side, side) for side in (64, 64, 32)]
        dino.step([Batch(crops, torch.full((7,), -1), torch.arange(7), [])], epoch=step // 3, is_last=False)
        for old, backbone in zip(before, backbones, strict=True):
            moved = {name for name, value in backbone.named_buffers() if not torch.equal(value, old[name])}
            assert moved == (set() if is_frozen else old.keys())


def test_frozen_random_weights_and_too_many_frozen_epochs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--freeze_backbone_epochs 1 would keep random weights; .*--init_from"):
        build("--freeze_backbone_epochs", "1").initialize()
    with pytest.raises(ValueError, match=r"--freeze_backbone_epochs 3 is longer than the run of 2 epochs; shorten it"):
        options("--freeze_backbone_epochs", "3", "--init_from", "x")


@pytest.mark.parametrize(("readout", "depth"), [("sparo", 3), ("cls", 4)])
def test_layer_decay_scales_the_learning_rate_by_layer(readout: str, depth: int) -> None:
    dino, plain = build("--layer_decay", "0.5", "--readout", readout), build("--readout", readout)
    for updater in (dino.updater, plain.updater):
        updater.step = 3
        updater.begin_step()
    assert dino.updater.hyperparameter("lr") == plain.updater.hyperparameter("lr") > 0
    names = {weight: name for name, weight in dino.network.named_parameters()}
    seen = set()
    decays = {name: group["weight_decay"] for group, name in named_groups(plain)}
    for group, name in named_groups(dino):
        layer = depth + 1
        if name.startswith("backbone.blocks."):
            layer = 1 + int(name.split(".")[2])
        elif name.startswith(("backbone.cls_token", "backbone.pos_embed", "backbone.patch_embed.")):
            layer = 0
        assert group["lr"] == pytest.approx(0.5 ** (depth + 1 - layer) * plain.updater.hyperparameter("lr"), rel=1e-12)
        assert group["weight_decay"] == decays[name]
        seen.add(name)
    assert seen == {name for weight, name in names.items() if weight.requires_grad}


LAYERS = {
    "vit_tiny_patch16_224": {"cls_token": 0, "blocks.0.norm1.bias": 1, "blocks.11.mlp.fc2.bias": 12, "norm.bias": 13},
    "vit_small_patch14_reg4_dinov2": {"reg_token": 0, "pos_embed": 0, "blocks.11.ls2.gamma": 12, "norm.weight": 13},
    "vit_small_patch16_dinov3": {"reg_token": 0, "blocks.0.gamma_1": 1, "blocks.11.norm2.bias": 12, "norm.bias": 13},
    "vit_base_patch32_clip_224": {"norm_pre.weight": 0, "blocks.11.mlp.fc1.bias": 12, "norm.weight": 13},
    "beit_base_patch16_224": {"cls_token": 0, "blocks.11.gamma_2": 12},
    "swin_tiny_patch4_window7_224": {"patch_embed.norm.bias": 0, "layers.3.blocks.1.norm2.bias": 12, "norm.bias": 13},
    "resnet18": {"conv1.weight": 0, "layer4.1.bn2.bias": 8},
}


@pytest.mark.parametrize(("name", "layers"), LAYERS.items(), ids=LAYERS)
def test_layer_decay_knows_the_layers_of_timms_models(name: str, layers: dict[str, int]) -> None:
    """Of all makes the last norm has the factor 1, as in BEiT's and DINOv2's code."""
    with torch.device("meta"):
        backbone = ForeignBackbone(name, plan_of(name).stride, plan_of(name).img_size)
    factors, weights = layer_factors(backbone, 0.5), dict(backbone.named_parameters())
    depth = 8 if name == "resnet18" else 12
    for part, layer in layers.items():
        assert factors.get(weights[f"model.{part}"], 1.0) == 0.5 ** (depth + 1 - layer), part


def named_groups(dino: DINOObjective) -> list[tuple[dict[str, Any], str]]:
    names: dict[nn.Parameter, str] = {weight: name for name, weight in dino.network.named_parameters()}
    return [(group, names[weight]) for group in dino.updater.optimizer.param_groups for weight in group["params"]]


# Bad input.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--init_optimizer", "true"), r"^--init_optimizer true needs --init_from FILE; give it, or leave --init_opt"),
        (("--init_head", "new"), r"^--init_head new needs --init_from FILE; give it, or leave --init_head out$"),
        (
            ("--init_optimizer", "true", "--init_from", "x", "--init_head", "new"),
            r"--init_optimizer true with --init_head new: .* leave one of the two out",
        ),
    ],
)
def test_an_optimizer_or_a_head_without_its_weights_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options(*words)


def test_checkpoints_without_a_fitting_optimizer_are_refused(tmp_path: Path, source: Path) -> None:
    torch.save(load_encoder(source).state_dict(), tmp_path / "raw.pth")
    with pytest.raises(CheckpointError, match=r"raw.pth has no student with an optimizer; give a run's checkpoint.pth"):
        started(tmp_path / "raw.pth", "--init_optimizer", "true")
    with pytest.raises(CheckpointError, match=r"state of adamw, this run has --optimizer sgd; give --optimizer adamw"):
        started(source, "--init_optimizer", "true", "--optimizer", "sgd")
    path = as_the_reference_saves(source, tmp_path, student=load_encoder(source).state_dict())
    with pytest.raises(CheckpointError, match=r"has an optimizer of 54 weights and a student of 47; give another"):
        started(path, "--init_optimizer", "true")


def test_a_checkpoint_of_another_width_is_refused(source: Path) -> None:
    with pytest.raises(CheckpointError, match=r"patch size \(128, 3, 8\), the encoder \(192, 3, 8\); .*--arch"):
        started(source, "--arch", "vit_tiny")


@pytest.mark.slow
def test_a_resumed_run_ignores_the_options_of_the_start(
    tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = ("--output_dir", tmp_path, "--layer_decay", "0.7")
    main_dino.train_dino(options(*words, "--init_from", source, "--init_optimizer", "true", "--max_steps", 1))
    with caplog.at_level(logging.INFO):
        main_dino.train_dino(options(*words, "--init_from", "gone", "--init_head", "new", "--max_steps", 2))
    assert "--init_head new is ignored" in caplog.text
    assert "the rest of the run differs" not in caplog.text
    with pytest.raises(CheckpointError, match=r"--layer_decay was 0.7 and is now 0.8"):
        main_dino.train_dino(options("--output_dir", tmp_path, "--layer_decay", "0.8"))

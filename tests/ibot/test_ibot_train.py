"""train-ibot: backbones whose patches are masked, starts from weights, Gram anchoring, ranks, refusals."""

import random
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from runs import epochs_of, small_options, train_small
from test_ibot_reference import batch_of, build_objective
from timm_models import FAMILIES, Family
from torch import Tensor
from two_ranks import TwoRanks

from dino_sparo import load_encoder
from dino_sparo.__main__ import run
from dino_sparo.ibot import step as ibot_step
from dino_sparo.ibot.mask import pack
from dino_sparo.models.backbone import AnyBackbone
from dino_sparo.models.encoder import EncoderConfig, create_backbone
from dino_sparo.runtime.launch import rank, world_size
from dino_sparo.weights.checkpoint import load_checkpoint
from dino_sparo.weights.file import CheckpointError

VITS = [family for family in FAMILIES.values() if family.has_blocks]
TIMM = {"patch_size": 8, "global_crops_size": 32, "local_crops_size": 16, "readout": "cls"}


def patches_of(backbone: AnyBackbone, *arguments: Tensor) -> Tensor:
    return backbone(*arguments)[:, backbone.num_prefix_tokens :]


@pytest.mark.parametrize("arch", ["vit_micro", *(family.arch for family in VITS)])
def test_a_masked_patch_is_not_seen_and_the_mask_token_learns(arch: str) -> None:
    torch.manual_seed(0)
    backbone = create_backbone(EncoderConfig(arch, 8, "gap", img_size=32)).eval()
    backbone.require_patches()
    images, masked = torch.randn(2, 3, 32, 32), torch.zeros(2, 16, dtype=torch.bool)
    masked[1, 6] = True  # second row, third column
    token = torch.randn(1, backbone.embed_dim, requires_grad=True)
    changed = images.clone()
    changed[1, :, 8:16, 16:24] += 1
    before = patches_of(backbone, images, masked, token)
    assert torch.equal(before, patches_of(backbone, changed, masked, token))
    plain = patches_of(backbone, images)
    torch.testing.assert_close(before[0], plain[0])
    assert not torch.allclose(before[1], plain[1])
    before.sum().backward()
    assert token.grad is not None
    assert token.grad.abs().sum() > 0
    assert not torch.equal(plain[1], patches_of(backbone, changed)[1]), "no mask is left"


@pytest.mark.parametrize("arch", ["timm/tiny_convnext", "timm/tiny_resnet50"])
def test_a_backbone_without_patches_is_refused_with_the_reason(
    arch: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"patch_size": 32, "global_crops_size": 64, "local_crops_size": 32, "readout": "gap"}
    with pytest.raises(SystemExit):
        run("train-ibot", small_options(tmp_path, "train-ibot", **{**TIMM, **sizes, "arch": arch}))
    assert "has stages, which mix neighbouring patches, so patches cannot be masked; choose" in caplog.text


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family.name == "tiny_dinov3" else pytest.mark.slow, id=family.name)
        for family in VITS
        if family.has_class_token
    ],
)
def test_released_weights_start_a_training_whose_first_epoch_is_of_the_heads_alone(
    family: Family, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    weights = tmp_path / "weights.pth"
    torch.save(family.build().state_dict(), weights)
    changes = {**TIMM, "arch": family.arch, "init_from": weights, "drop_path_rate": 0, "epochs": 2}
    train_small("train-ibot", tmp_path / "run", **changes, max_steps=4)
    before, after = torch.load(weights), load_checkpoint(tmp_path / "run" / "checkpoint.pth")["student"]
    assert all(
        torch.equal(value, after[f"backbone.model.{name}"]) for name, value in before.items() if "blocks" in name
    )
    assert after["head.patches.mask_token"].abs().sum() > 0
    train_small("train-ibot", tmp_path / "run", **changes)
    assert epochs_of(tmp_path / "run")[1]["train_loss"] < epochs_of(tmp_path / "run")[0]["train_loss"] + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"), [("vit_small_patch16_dinov3", []), ("vit_small_patch14_dinov2", ["--local_crops_size", "98"])]
)
def test_the_commands_for_dinov3_and_dinov2_reach_their_first_step(
    name: str, sizes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With random weights of the released shape, and all defaults but the batch."""
    torch.manual_seed(0)
    released = timm.create_model(name, num_classes=0).state_dict()
    monkeypatch.setattr("dino_sparo.weights.initialize.pretrained_weights", lambda *_: released)
    words = ["--arch", f"timm/{name}", "--pretrained", "true", "--data_path", "scenes:4:64"]
    words += ["--output_dir", str(tmp_path), "--batch_size_per_gpu", "2", "--max_steps", "1", "--num_workers", "0"]
    words += ["--device", "cpu", "--readout", "cls", "--out_dim", "64", "--local_crops_number", "2", *sizes]
    run("train-ibot", words)
    checkpoint = load_checkpoint(tmp_path / "checkpoint.pth")
    assert checkpoint["step"] == 1
    args = checkpoint["args"]
    assert (args["lr"], args["freeze_backbone_epochs"], args["layer_decay"]) == (0.0001, 1, 0.9)
    weight = "blocks.11.attn.qkv.weight"
    assert torch.equal(checkpoint["student"][f"backbone.model.{weight}"], released[weight])
    assert load_encoder(tmp_path / "checkpoint.pth")(torch.zeros(1, 3, 224, 224)).isfinite().all()


def test_a_checkpoint_of_dino_gives_encoder_head_and_prototypes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    start = train_small("train", tmp_path / "dino", patch_size=4, max_steps=1) / "checkpoint.pth"
    changes = {"init_from": start, "freeze_backbone_epochs": 0, "max_steps": 1}
    train_small("train-ibot", tmp_path / "ibot", **changes)
    assert "heads and center: taken mlp, last_layer; new patches, images, patches (patches." in caplog.text


def test_a_run_of_dino_with_the_same_networks_is_not_resumed(tmp_path: Path) -> None:
    same = {"readout": "cls", "patch_size": 4, "layer_decay": 1, "norm_last_layer": "false", "max_steps": 1}
    train_small("train", tmp_path, **same)
    with pytest.raises(CheckpointError, match="is of another objective: it has no ibot_loss; choose another"):
        train_small("train-ibot", tmp_path, **same)


@pytest.mark.parametrize("scale", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_gram_anchoring_keeps_patches_near_a_fixed_teacher_that_resuming_needs_no_more(
    tmp_path: Path, scale: int
) -> None:
    teacher = train_small("train-ibot", tmp_path / "teacher", max_steps=1) / "checkpoint.pth"
    changes: dict[str, Any] = {"gram_teacher": teacher, "gram_scale": scale, "gram_weight": 3}
    run_ = train_small("train-ibot", tmp_path / "run", **changes, seed=5, max_steps=5)
    saved, expected = load_checkpoint(run_ / "checkpoint.pth"), load_checkpoint(teacher)["teacher"]
    assert all(torch.equal(value, expected[f"backbone.{name}"]) for name, value in saved["gram_teacher"].items())
    assert epochs_of(run_)[0]["train_gram"] > 0
    teacher.rename(tmp_path / "elsewhere.pth")
    teacher.touch()  # an empty file of that name
    train_small("train-ibot", run_, **changes, seed=5)
    assert epochs_of(run_)[2]["train_gram"] < epochs_of(run_)[0]["train_gram"]


REFUSED = [
    ({"image_weight": 0, "patch_weight": 0}, "--image_weight 0 --patch_weight 0 leave no loss"),
    ({"mask_ratio": "0.5,0.1"}, "--mask_ratio 0.5 0.1 is not a range"),
    ({"batch_size_per_gpu": 2, "koleo_weight": 0, "mask_probability": 0.2}, "mask no patch in the 4 global crops"),
    ({"separate_heads": "false"}, "--separate_heads false: an encoding has 15 numbers and a patch token 128"),
    ({"separate_heads": "false", "patch_out_dim": 9}, "--patch_out_dim 9 with --separate_heads false"),
    ({"batch_size_per_gpu": 1}, "--koleo_weight 0.1 with one image per batch"),
    ({"gram_teacher": "nowhere.pth"}, "nowhere.pth"),
    ({"gram_scale": 2}, "--gram_scale 2 needs --gram_teacher FILE"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_options_that_leave_nothing_to_learn_are_refused(
    changes: dict[str, object], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = small_options(tmp_path, "train-ibot", **{"koleo_weight": 0.1, **changes})
    with pytest.raises(SystemExit):
        run("train-ibot", words)
    assert message in caplog.text


def test_the_learning_rate_scales_with_the_root_of_the_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    train_small("train-ibot", tmp_path, max_steps=1, lr=0.1)
    assert f"peak learning rate {0.1 * (6 / 256) ** 0.5:.3g}" in caplog.text


def step_on_a_rank(sinkhorn: bool) -> dict[str, Tensor]:
    """Gradients of a step on this rank's share of four images, whose masks are those of one process."""
    ibot = build_objective(sinkhorn, 11 if sinkhorn else None)
    generator = torch.Generator().manual_seed(0)
    crops = [torch.randn(4, 3, side, side, generator=generator) for side in (32, 32, 16, 16)]
    masks = torch.from_numpy(ibot.mask_recipe.draw(random.Random(0), 8)).unflatten(0, (2, 4))
    own = slice(4 * rank() // world_size(), 4 * (rank() + 1) // world_size())
    mask = pack(masks[:, own].flatten(0, 1).numpy(), 100)
    ibot.koleo_weight = 0.1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ibot_step, "draw_masks", lambda *_: [mask])
        ibot_step.train_step(ibot, [batch_of([crop[own] for crop in crops])], epoch=0)
    gradients = {name: p.grad for name, p in ibot.network.named_parameters() if p.grad is not None}
    return {**gradients, "center": ibot.loss.images.center, "patch center": ibot.loss.patches.center}


@pytest.mark.slow
@pytest.mark.parametrize("sinkhorn", [False, True])
def test_two_ranks_take_the_step_of_one_process(sinkhorn: bool, two_ranks: TwoRanks) -> None:
    whole = step_on_a_rank(sinkhorn)
    for found in two_ranks(step_on_a_rank, sinkhorn):
        for name, value in whole.items():
            if not name.endswith("qkv.bias"):
                torch.testing.assert_close(found[name], value, rtol=2e-3, atol=1e-5, msg=name)

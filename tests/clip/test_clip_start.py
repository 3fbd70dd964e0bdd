"""CLIP's weights go in and out: sparo-clip's recorded features, starting from other weights, frozen parts, exports."""

import json
import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("open_clip")

import open_clip
from clip_fakes import from_open_clip, open_clip_config, save_clip, small_clip, to_open_clip
from reference import weights as recorded
from runs import assert_close_weights, assert_same_checkpoint, checkpoint_of, train_small_on_two_ranks
from safetensors.torch import load_file
from test_clip_train import run

from dino_sparo import create_encoder, load_encoder
from dino_sparo.__main__ import run as run_command
from dino_sparo.clip import CLIP, create_clip, load_clip
from dino_sparo.data.defaults import OPENAI_CLIP_STD
from dino_sparo.image_text.towers import initialize_towers
from dino_sparo.weights.checkpoint import load_checkpoint
from dino_sparo.weights.entries import normalization_of
from dino_sparo.weights.export import CLIP_FORMATS, export
from dino_sparo.weights.file import CheckpointError
from dino_sparo.weights.foreign import to_open_clip_names
from dino_sparo.weights.initialize import initialize_encoder

# ---- sparo-clip


@pytest.fixture(scope="module")
def sparo_clip() -> tuple[dict[str, np.ndarray], dict[str, dict[str, torch.Tensor]]]:
    """The recorded features, and the weights they come from."""
    arrays = recorded.load("sparo_clip")
    shapes = json.loads(str(arrays["shapes"]))
    drawn = {case: recorded.sparo_clip_state(shapes[case]) for case in shapes}
    return arrays, {
        case: {name: torch.from_numpy(value) for name, value in state.items()} for case, state in drawn.items()
    }


@pytest.mark.parametrize("case", recorded.SPARO_CLIP_CASES)
@torch.no_grad()
def test_sparo_clips_weights_give_sparo_clips_features(tmp_path: Path, sparo_clip: Any, case: str) -> None:
    arrays, states = sparo_clip
    path = tmp_path / "epoch_1.pt"
    torch.save({"epoch": 1, "state_dict": {f"module.{k}": v for k, v in states[case].items()}}, path)
    model = load_clip(path, text_heads=2, quick_gelu=case == "quick_gelu").model
    images = torch.from_numpy(recorded.images("sparo_clip", 3, 32, 32))
    ids = torch.from_numpy(recorded.sparo_clip_ids())
    for found, side in ((model.encode_image(images), "image"), (model.encode_text(ids), "text")):
        np.testing.assert_allclose(found.numpy(), arrays[f"{case}/{side}"], rtol=1e-4, atol=1e-6)
        assert found.std() > 0.05
    expected_depth = 3 if model.config.readout == "sparo" else 4
    assert (model.config.image.arch, model.image.backbone.depth) == ("vit_micro", expected_depth)
    if case != "quick_gelu":  # of which the file says nothing
        torch.testing.assert_close(load_encoder(path)(images), model.image(images))
        assert normalization_of(load_checkpoint(path))[1] == pytest.approx(OPENAI_CLIP_STD)


@pytest.mark.parametrize("case", recorded.SPARO_CLIP_CASES)
def test_weights_that_went_through_ours_are_sparo_clips_again(sparo_clip: Any, case: str) -> None:
    theirs = sparo_clip[1][case]
    config, ours = from_open_clip(theirs, text_heads=2)
    back = to_open_clip_names(ours, config.readout)
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], value) for name, value in theirs.items())


def test_sparo_clips_values_of_their_own_are_refused(sparo_clip: Any) -> None:
    theirs = dict(sparo_clip[1]["sparo"])
    theirs["visual.sparo.v.weight"] = theirs["visual.sparo.v.weight"] + 1
    with pytest.raises(CheckpointError, match=r"1 are unknown \(visual\.sparo\.v\.weight\)"):
        from_open_clip(theirs, text_heads=2)


# ---- starting from other weights


def foreign(folder: Path, kind: str, model: CLIP) -> Path:
    if kind == "ours":
        return save_clip(model, folder / "clip.pth")
    torch.save(to_open_clip_names(model.state_dict(), model.config.readout), folder / "foreign.pt")
    return folder / "foreign.pt"


@pytest.mark.parametrize("readout", ["cls", "sparo"])
@pytest.mark.parametrize("kind", ["ours", "theirs"])
@torch.no_grad()
def test_both_towers_start_from_a_clip(tmp_path: Path, kind: str, readout: str) -> None:
    source, model = small_clip(readout), small_clip(readout, seed=1, context_length=7)
    assert initialize_towers(model, foreign(tmp_path, kind, source)) == model.state_dict().keys()
    images, ids = torch.randn(2, 3, 32, 32), torch.tensor([[3, 4, 52, 0, 0, 0, 0], [9, 8, 7, 6, 5, 4, 52]])
    assert torch.equal(model.encode_image(images), source.encode_image(images))
    torch.testing.assert_close(model.encode_text(ids), source.encode_text(ids))
    assert torch.equal(model.logit_scale, source.logit_scale)


@torch.no_grad()
def test_sparo_starts_behind_the_blocks_of_a_plain_clip(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    source, model = small_clip("cls"), small_clip("sparo", seed=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    taken = initialize_towers(model, foreign(tmp_path, "theirs", source))
    assert taken == {name for name in before if ".readout." not in name}
    after, theirs = model.state_dict(), source.state_dict()
    for name, value in after.items():
        assert torch.equal(value, (theirs if name in taken else before)[name]), name
    assert "dropped block 3" in caplog.messages[-1]
    assert caplog.messages[-1].endswith("of the rest new: text.readout")


@torch.no_grad()
def test_dinos_encoder_starts_from_the_image_tower_of_a_clip(tmp_path: Path) -> None:
    source = small_clip("cls")
    encoder = create_encoder("vit_micro", 8, "cls", img_size=32, pre_norm=True).eval()
    report = initialize_encoder(encoder, foreign(tmp_path, "theirs", source))
    assert (report.dropped, report.new) == ((), ())
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(encoder(images), source.image(images))
    with pytest.raises(CheckpointError, match=r"another kind: .*norm_pre.*; build the encoder with --pre_norm true"):
        initialize_encoder(create_encoder("vit_micro", 8, "cls", img_size=32), foreign(tmp_path, "ours", source))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_width": 48}, r"text.token_embed.weight \(53, 24\), not \(53, 48\).*; build it alike \(--text_width"),
        ({"context_length": 13}, r"text.pos_embed \(9, 24\), not \(13, 24\); .*--context_length"),
        ({"text_heads": 3}, "text encoder with 2 heads, the model 3; .*--text_heads"),
        ({"quick_gelu": True}, "trained with quick_gelu=False, the model has quick_gelu=True; .*--quick_gelu false"),
        ({"pre_norm": False}, "--pre_norm true"),
    ],
)
def test_towers_of_another_make_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        initialize_towers(small_clip("cls", seed=1, **changes), save_clip(small_clip("cls"), tmp_path / "clip.pth"))


def test_a_dino_checkpoint_starts_no_text_encoder(tmp_path: Path) -> None:
    torch.save(create_encoder("vit_micro", 8, "cls", img_size=32).state_dict(), tmp_path / "vit.pth")
    with pytest.raises(CheckpointError, match=r"holds no CLIP; --init_from starts the image encoder"):
        initialize_towers(small_clip("cls"), tmp_path / "vit.pth")


# ---- frozen parts


@pytest.mark.parametrize(
    ("part", "names"),
    [
        ("image", ("image.", "image_proj.")),
        ("text", ("text.", "text_proj.")),
        ("image_backbone", ("image.backbone.",)),
        ("text_backbone", ("text.token_embed.", "text.pos_embed", "text.blocks.", "text.norm.")),
    ],
)
@pytest.mark.parametrize("readout", ["sparo", "cls"])
def test_a_frozen_part_gets_no_gradients_and_stays_in_eval_mode(
    part: str, names: tuple[str, ...], readout: str
) -> None:
    model = small_clip(readout, img_size=16)
    model.freeze([part])
    model.train()
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == {
        name for name in model.state_dict() if name.startswith(names)
    }
    tower = model.image.backbone if part.startswith("image") else model.text.blocks
    assert not any(module.training for module in tower.modules())
    other = model.text.blocks if part.startswith("image") else model.image.backbone
    assert all(module.training for module in other.modules())
    output = model(torch.randn(2, 3, 16, 16), torch.tensor([[3, 52], [52, 0]]))
    images, ids = torch.randn(2, 3, 16, 16), torch.tensor([[52]])
    tokens = model.image.backbone(images) if part.startswith("image") else model.text(ids)
    assert tokens.grad_fn is None
    (output.image_features.sum() + output.text_features.sum()).backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None and name.startswith(names)} == set()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a short run, to start others from."""
    return run(tmp_path_factory.mktemp("start"), epochs=1, max_steps=1) / "checkpoint.pth"


@pytest.mark.parametrize(
    "freeze",
    [*(pytest.param(part, marks=pytest.mark.slow) for part in ("image", "text_backbone")), "image_backbone,text"],
)
def test_a_frozen_part_is_the_files_to_the_last_bit_and_the_rest_moves(
    tmp_path: Path, source: Path, freeze: str
) -> None:
    run(tmp_path / "run", init_clip=source, freeze=freeze, epochs=1, grad_accum_steps=2)
    before, after = checkpoint_of(source.parent)["model"], checkpoint_of(tmp_path / "run")["model"]
    frozen = {
        "image": ("image.",),
        "text_backbone": ("text.blocks.", "text.token"),
        "image_backbone,text": ("image.b", "text."),
    }
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert not {name for name in moved if name.startswith(frozen[freeze])}
    assert {name.split(".")[0] for name in moved} >= {"text" if freeze == "image" else "image", "logit_scale"}
    in_optimizer = len(checkpoint_of(tmp_path / "run")["optimizer"]["state"])
    assert in_optimizer < len(before)


@pytest.mark.slow
def test_a_run_with_a_frozen_tower_resumes_in_the_same_bits_without_the_file(tmp_path: Path, source: Path) -> None:
    file = Path(shutil.copy(source, tmp_path))
    changes = {"init_clip": file, "freeze": "image", "epochs": 2}
    run(tmp_path / "whole", **changes)
    run(tmp_path / "parts", **changes, max_steps=3)
    file.unlink()
    run(tmp_path / "parts", **changes)
    assert_same_checkpoint(tmp_path / "whole", tmp_path / "parts", "train-clip")
    with pytest.raises(CheckpointError, match=r"--freeze was \['image'\] and is now None"):
        run(tmp_path / "parts", epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize(("freeze", "frozen"), [("image_backbone", "image.backbone."), ("text", "text.")])
def test_two_processes_with_a_frozen_tower_train_as_one_does(
    tmp_path: Path, source: Path, freeze: str, frozen: str
) -> None:
    changes = {"init_clip": source, "freeze": freeze, "epochs": 2}
    run(tmp_path / "one", **changes)
    train_small_on_two_ranks("train-clip", tmp_path / "two", **changes)
    assert_close_weights(tmp_path / "one", tmp_path / "two", "model")
    before, after = checkpoint_of(source.parent)["model"], checkpoint_of(tmp_path / "two")["model"]
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert {name for name in before if name.startswith(frozen)} <= kept
    assert kept < before.keys()


def test_random_weights_are_not_frozen(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--freeze image would keep \d+ random weights .*--init_clip.*image_backbone"):
        run(tmp_path / "a", freeze="image")
    source = run(tmp_path / "start", epochs=1, max_steps=1, readout="cls") / "checkpoint.pth"
    with pytest.raises(ValueError, match=r"--freeze image would keep \d+ random weights \(image\.readout"):
        run(tmp_path / "b", init_clip=source, freeze="image", readout="sparo")
    run(tmp_path / "c", init_clip=source, freeze="image_backbone", readout="sparo", max_steps=1)


# ---- OpenCLIP's models


@pytest.mark.parametrize(
    ("name", "arch", "patch_size"),
    [
        ("ViT-L-14", "vit_large", 14),
        ("ViT-L-14-336", "vit_large", 14),
        ("ViT-L-14-quickgelu", "vit_large", 14),
        ("ViT-H-14", "vit_huge", 14),
        ("ViT-B-32", "vit_base", 32),
    ],
)
def test_open_clips_models_are_ours_by_name_shape_heads_and_activation(name: str, arch: str, patch_size: int) -> None:
    settings = open_clip.get_model_config(name)
    with torch.device("meta"):
        theirs = open_clip.CLIP(**settings)
        config, weights = from_open_clip(theirs.state_dict(), quick_gelu=settings.get("quick_gelu", False))
        ours = create_clip(
            arch,
            patch_size,
            "cls",
            img_size=config.image.img_size,
            embed_dim=settings["embed_dim"],
            text_width=settings["text_cfg"]["width"],
            text_heads=settings["text_cfg"]["heads"],
            text_layers=settings["text_cfg"]["layers"],
            quick_gelu=settings.get("quick_gelu", False),
        )
    assert (config.image.arch, config.image.patch_size) == (arch, patch_size)
    assert (ours.config.image.img_size, ours.config.image.quick_gelu) == (config.image.img_size, config.quick_gelu)
    assert ours.config.text.heads == config.text.heads
    assert {n: v.shape for n, v in ours.state_dict().items()} == {n: v.shape for n, v in weights.items()}
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    described = open_clip_config(ours.config)
    assert described["vision_cfg"]["head_width"] == settings["vision_cfg"].get("head_width", 64)
    assert described["vision_cfg"]["layers"] == settings["vision_cfg"]["layers"]
    assert {n: v.shape for n, v in to_open_clip(config, ours.state_dict()).items()} == {
        n: v.shape for n, v in theirs.state_dict().items()
    }


# ---- out


@pytest.mark.parametrize("readout", ["sparo", "cls", "fdt", "linear"])
@torch.no_grad()
def test_a_clip_exported_as_safetensors_is_read_back(tmp_path: Path, readout: str) -> None:
    model = small_clip(readout, quick_gelu=True)
    written = export(save_clip(model, tmp_path / "clip.pth"), tmp_path / "out" / "clip")
    loaded = load_clip(written)
    images, ids = torch.randn(2, 3, 32, 32), torch.tensor([[3, 4, 52], [9, 52, 0]])
    assert torch.equal(loaded.model.encode_image(images), model.encode_image(images))
    assert torch.equal(loaded.model.encode_text(ids), model.encode_text(ids))
    assert (loaded.mean, loaded.record["epoch"]) == (load_clip(tmp_path / "clip.pth").mean, 3)
    torch.testing.assert_close(load_encoder(written)(images), model.image(images))


@torch.no_grad()
def test_open_clip_builds_and_loads_the_exported_folder(tmp_path: Path) -> None:
    model = small_clip("cls", quick_gelu=True)
    folder = export(save_clip(model, tmp_path / "clip.pth"), tmp_path / "out", format="open_clip")
    theirs, _, view = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    images, ids = torch.randn(2, 3, 32, 32), torch.tensor([[3, 4, 52, 0, 0, 0, 0, 0, 0], [9, 8, 7, 6, 5, 4, 3, 2, 52]])
    theirs.eval()
    for normalize in (False, True):
        torch.testing.assert_close(model.encode_image(images, normalize), theirs.encode_image(images, normalize))
        torch.testing.assert_close(model.encode_text(ids, normalize), theirs.encode_text(ids, normalize))
    assert list(view.transforms[-1].mean) == list(load_clip(tmp_path / "clip.pth").mean)


def test_a_changed_digit_beside_the_weights_of_an_open_clip_folder_is_detected(tmp_path: Path) -> None:
    """The bug: images were normalised with another mean without a word."""
    folder = export(save_clip(small_clip("cls"), tmp_path / "clip.pth"), tmp_path / "out", format="open_clip")
    weights, config = folder / "open_clip_model.safetensors", folder / "open_clip_config.json"
    assert load_clip(weights, text_heads=2).mean == load_clip(tmp_path / "clip.pth").mean
    config.write_text(config.read_text().replace("0.48", "0.49"))
    with pytest.raises(
        CheckpointError, match=r"open_clip_config\.json does not belong to open_clip_model\.safetensors"
    ):
        load_clip(weights, text_heads=2)


@pytest.mark.parametrize("case", ["sparo", "shared_keys", "linear"])
def test_an_export_for_sparo_clip_has_its_weights_and_its_options(tmp_path: Path, sparo_clip: Any, case: str) -> None:
    theirs = sparo_clip[1][case]
    torch.save(theirs, tmp_path / "theirs.pt")
    model = load_clip(tmp_path / "theirs.pt", text_heads=2).model
    folder = export(save_clip(model, tmp_path / "clip.pth"), tmp_path / "out", format="sparo_clip")
    weights = load_file(folder / "open_clip_model.safetensors")
    assert weights.keys() == theirs.keys()
    assert all(torch.equal(weights[name], value) for name, value in theirs.items())
    settings = json.loads((folder / "open_clip_config.json").read_text())["model_cfg"]
    # The recorded model's, with the blocks counted that are there.
    expected = {**recorded.SPARO_CLIP, **recorded.SPARO_CLIP_CASES[case]}
    fewer = expected.pop("reduce_depth", 0)
    for tower in ("vision_cfg", "text_cfg"):
        layers = expected[tower]["layers"] - fewer
        assert settings[tower] == {**expected[tower], "layers": layers}
    names = expected.keys() - {"vision_cfg", "text_cfg", "embed_dim"}
    assert {name: settings[name] for name in names} == {name: expected[name] for name in names}


@torch.no_grad()
def test_the_export_command_writes_a_clip_in_every_format_that_has_its_parts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_clip(small_clip("cls"), tmp_path / "clip.pth")
    for name in ("safetensors", *CLIP_FORMATS):
        run_command("export", [str(path), str(tmp_path / name), "--format", name])
    written = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.safetensors")}
    assert written == {"safetensors.safetensors", *(f"{name}/open_clip_model.safetensors" for name in CLIP_FORMATS)}
    model, images = small_clip("cls", quick_gelu=True), torch.randn(2, 3, 32, 32)
    theirs = foreign(tmp_path, "theirs", model)
    run_command("export", [str(theirs), str(tmp_path / "image"), "--quick_gelu", "true"])
    encoder = load_encoder(tmp_path / "image.safetensors")
    assert encoder.config.quick_gelu
    torch.testing.assert_close(encoder(images), model.image(images))
    with caplog.at_level(logging.INFO):
        run_command("export", [str(path), str(tmp_path / "timm"), "--format", "timm"])
    assert f"encoder of {path} as timm" in caplog.text
    assert "teacher of" not in caplog.text  # which a CLIP does not have


def test_exports_that_the_other_side_has_no_parts_for_are_refused(tmp_path: Path) -> None:
    path = save_clip(small_clip("sparo"), tmp_path / "clip.pth")
    with pytest.raises(ValueError, match=r"open_clip has no 'sparo' read-out, only cls; .* exported as safetensors"):
        export(path, tmp_path / "out", format="open_clip")
    torch.save(create_encoder("vit_micro", 8, "cls", img_size=32).state_dict(), tmp_path / "vit.pth")
    with pytest.raises(ValueError, match="is not a CLIP of dino_sparo, as format 'open_clip' needs"):
        export(tmp_path / "vit.pth", tmp_path / "out", format="open_clip")
    with pytest.raises(ValueError, match="both towers of a CLIP are written as they are"):
        export(path, tmp_path / "out", img_size=64)


def test_openais_archive_is_named_as_such_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "ViT-B-32.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would have TorchScript replaced
        torch.jit.script(torch.nn.Linear(2, 3)).save(path)
    for load in (load_clip, load_encoder):
        with pytest.raises(CheckpointError, match=r"is a TorchScript archive.*load_openai_model\('.*--quick_gelu true"):
            load(path)

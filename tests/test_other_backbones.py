"""Backbones of timm, one tiny model per family: tokens, trainings, resuming, evaluations, pictures and exports."""

import functools
import json
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
import timm
import torch
from davis_files import write_davis
from runs import assert_same_checkpoint, epochs_of
from small_models import TINY
from timm_models import FAMILIES, Family
from torch import Tensor, nn

from dino_sparo import create_encoder, load_checkpoint, load_encoder
from dino_sparo.__main__ import run as run_command
from dino_sparo.api import call
from dino_sparo.dino import options
from dino_sparo.evaluation.attention.maps import attention_maps, class_token_share
from dino_sparo.evaluation.embed.store import load_embeddings
from dino_sparo.models.encoder import Encoder
from dino_sparo.models.foreign_backbone import plan_of
from dino_sparo.runtime.launch import shutdown
from dino_sparo.runtime.precision import use_fused_attention
from dino_sparo.weights.entries import encoder_description
from dino_sparo.weights.export import export

SLOTS, SLOT_DIM = 5, 3
QUICK = ("tiny_dinov3",)  # tokens with registers and rotary positions
SLOW = [pytest.param(family, marks=pytest.mark.slow, id=name) for name, family in FAMILIES.items() if name not in QUICK]
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
SLOW_AND_QUICK = [*(pytest.param(FAMILIES[name], id=name) for name in QUICK), *SLOW]
main_families = pytest.mark.parametrize("family", SLOW_AND_QUICK)
# tiny_dinov2_registers has all that these two have.
families_with_graphs_of_their_own = pytest.mark.parametrize(
    "family", [param for param in SLOW_AND_QUICK if param.id not in ("tiny_registers", "tiny_dinov2")]
)
# Prefix tokens, no class token, stages: videos take minutes for all families.
KINDS = ("tiny_dinov3", "tiny_siglip", "tiny_resnet50")
one_of_each_kind = pytest.mark.parametrize("family", [param for param in SLOW_AND_QUICK if param.id in KINDS])
with_blocks = pytest.mark.parametrize(
    "family", [pytest.param(family, id=name) for name, family in FAMILIES.items() if family.has_blocks]
)
CLIP = {
    **{"data_path": "scenes:26:32", "text_width": 24, "text_heads": 2, "text_layers": 2, "context_length": 20},
    **{"batch_size": 6, "epochs": 1, "warmup_steps": 1, "num_workers": 0, "device": "cpu"},
}
BINDING = {"bind_dim": 12, "bind_heads": 2, "bind_layers": 1, "rel_dim": 7}


def build(family: Family, readout: str = "sparo", **settings: Any) -> Encoder:
    torch.manual_seed(0)
    sizes = {"num_slots": SLOTS, "slot_dim": SLOT_DIM, "key_dim": 2, "img_size": family.side, **settings}
    encoder = create_encoder(family.arch, family.patch_size, readout, **sizes).eval()
    with torch.no_grad():  # as after training: no bias is zero and no LayerNorm the identity
        for parameter in encoder.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return encoder


def some_images(family: Family, batch: int = 2, more: tuple[int, int] = (0, 0)) -> Tensor:
    """Noise, with more rows and columns of patches than the model is built for."""
    height, width = (family.side + count * family.patch_size for count in more)
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(1))


def timms_own(family: Family, encoder: Encoder, **settings: Any) -> nn.Module:
    """The model of timm with the encoder's weights."""
    sizes = {"dynamic_img_size": True, "img_size": family.side, **settings} if family.has_blocks else settings
    model = family.build(**sizes).eval()
    weights = encoder.backbone.state_dict()
    named = {name.removeprefix("model."): value for name, value in weights.items()}
    missing, unexpected = model.load_state_dict(named, strict=False)
    assert not unexpected
    # A classifier's parts, which tokens do not pass.
    assert all(name.startswith(("fc_norm.", "attn_pool.", "head.norm.")) for name in missing), missing
    return model


def tokens_of(model: nn.Module, images: Tensor) -> Tensor:
    """timm's features as tokens; a map's positions row by row."""
    features = model.forward_features(images)
    return features.flatten(2).transpose(1, 2) if features.ndim == 4 else features


# ---- tokens


@every_family
@pytest.mark.parametrize("more", [(0, 0), (1, 3)], ids=["own size", "oblong"])
@torch.no_grad()
def test_tokens_are_timms_features(family: Family, more: tuple[int, int]) -> None:
    encoder, images = build(family, "gap"), some_images(family, more=more)
    tokens = encoder.backbone(images)
    rows, columns = encoder.backbone.grid(images)
    assert tokens.shape == (2, family.num_prefix_tokens + rows * columns, 24)
    assert (rows, columns) == tuple(side // family.patch_size for side in images.shape[-2:])
    torch.testing.assert_close(tokens, tokens_of(timms_own(family, encoder), images), atol=1e-6, rtol=1e-5)


@with_blocks
@torch.no_grad()
def test_sparo_replaces_the_last_block(family: Family) -> None:
    encoder, images = build(family), some_images(family)
    expected = tokens_of(timms_own(family, encoder, depth=2), images)
    torch.testing.assert_close(encoder.backbone(images), expected, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_rotary_positions_of_prepared_sizes_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES["tiny_dinov3"]
    backbone, images = build(family).train().backbone, some_images(family)
    expected, of_other_size = backbone(images), backbone(images[..., :-8])
    names = backbone.state_dict().keys()
    backbone.prepare(family.side)
    assert torch.equal(backbone(images[..., :-8]), of_other_size)
    monkeypatch.setattr(backbone, "_compute_positions", lambda *_: pytest.fail("computed again"))
    assert torch.equal(backbone(images), expected)
    assert backbone.state_dict().keys() == names


def test_rotary_positions_that_are_trained_are_computed_in_every_pass() -> None:
    with torch.device("meta"):
        backbone: Any = create_encoder("timm/vit_small_patch16_rope_mixed_224", readout="gap").backbone
    assert list(backbone.model.rope.parameters())
    backbone.prepare(96)
    assert not [name for name, _ in backbone.named_buffers() if "rotary_positions" in name]


@every_family
@torch.no_grad()
def test_intermediate_layers_split_prefix_tokens_from_patches(family: Family) -> None:
    encoder, images = build(family), some_images(family, more=(1, 0))
    number, (rows, columns) = family.num_prefix_tokens, encoder.backbone.grid(images)
    ((patches, prefix),) = encoder.get_intermediate_layers(images, return_prefix_tokens=True)
    torch.testing.assert_close(torch.cat((prefix, patches), dim=1), encoder.backbone(images))
    assert (patches.shape, prefix.shape) == ((2, rows * columns, 24), (2, number, 24))
    (maps,) = encoder.get_intermediate_layers(images, reshape=True)
    torch.testing.assert_close(maps.flatten(2).transpose(1, 2), patches)


@every_family
def test_every_parameter_gets_a_gradient(family: Family) -> None:
    """DDP ends with an error otherwise. One map position attends to itself, so that stages see four."""
    encoder = build(family).train()
    encoder(some_images(family)).square().sum().backward()
    assert [name for name, value in encoder.named_parameters() if value.grad is None or not value.grad.any()] == []


@main_families
def test_checkpointing_and_fused_attention_change_no_gradient(family: Family) -> None:
    gradients = []
    for checkpointing, fused in ((False, True), (True, False)):
        encoder = build(family, drop_path_rate=0.3).train()
        encoder.backbone.set_grad_checkpointing(checkpointing)
        use_fused_attention(encoder.backbone, fused)
        torch.manual_seed(3)
        encoder(some_images(family)).square().mean().backward()
        gradients.append({name: value.grad for name, value in encoder.named_parameters()})
    for name, value in gradients[0].items():
        torch.testing.assert_close(value, gradients[1][name], atol=1e-5, rtol=1e-4, msg=name)


# ---- trainings


def dino_options(family: Family, output_dir: Path, **changes: Any) -> list[str]:
    side = family.side
    own = {"arch": family.arch, "patch_size": family.patch_size, "global_crops_size": side}
    local = {"local_crops_size": side // 2, "data_path": "scenes:32:32", "epochs": 1, "drop_path_rate": 0.2}
    return words_of({**TINY, **own, **local, "output_dir": output_dir, **changes})


def words_of(options: dict[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", *str(value).split())]


@functools.cache
def trained(family: Family, folder: Path) -> Path:
    """A checkpoint of DINO with SPARO, trained once for all tests of this family."""
    run_command("train", dino_options(family, folder / family.name))
    return folder / family.name / "checkpoint.pth"


@pytest.fixture(scope="module")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("backbones")


@pytest.fixture
def checkpoint(family: Family, runs_folder: Path) -> Path:
    return trained(family, runs_folder)


@main_families
def test_a_step_of_dino_moves_the_student_and_a_resumed_run_ends_in_the_same_bits(
    family: Family, checkpoint: Path, tmp_path: Path
) -> None:
    run_command("train", dino_options(family, tmp_path, max_steps=1))
    first = load_checkpoint(tmp_path / "checkpoint.pth")
    assert first["step"] == 1
    is_moved = {
        name: not torch.equal(value, first["teacher"][name])
        for name, value in first["student"].items()
        if value.is_floating_point() and name.startswith(("backbone.", "readout."))
    }
    assert sum(is_moved.values()) > 0.8 * len(is_moved)
    run_command("train", dino_options(family, tmp_path))
    assert_same_checkpoint(checkpoint.parent, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it
@families_with_graphs_of_their_own
def test_compiled_networks_take_the_same_steps(
    family: Family, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs, guards and recompiles are those of any backend, so no code is generated."""
    compile_module, graphs = nn.Module.compile, list[Any]()

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(nn.Module, "compile", lambda self, **given: compile_module(self, backend=record, **given))
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the checks of shapes are no part of a graph
    torch._dynamo.reset()
    run_command("train", dino_options(family, tmp_path, compile="on"))
    assert len(graphs) >= 3  # student and teacher, for crops of two sizes
    # Not the weights: AdamW moves those whose gradient is zero, such as a bias of keys, by rounding.
    expected, compiled = epochs_of(checkpoint.parent), epochs_of(tmp_path)
    for number in ("train_loss", "train_grad_norm"):
        assert [row[number] for row in compiled] == pytest.approx([row[number] for row in expected], rel=1e-3)


@pytest.mark.slow
@main_families
@pytest.mark.parametrize("command", ["train-clip", "train-oc-clip"])
def test_a_step_of_clip_and_of_oc_clip(family: Family, command: str, tmp_path: Path) -> None:
    pytest.importorskip("open_clip")
    is_clip = command == "train-clip"
    slots = {"sparo_slots": SLOTS, "sparo_slot_dim": SLOT_DIM, "sparo_key_dim": 2} if is_clip else BINDING
    own = {"arch": family.arch, "patch_size": family.patch_size, "img_size": family.side, **slots}
    run_command(command, words_of({**CLIP, **own, "output_dir": tmp_path}))
    content = load_checkpoint(tmp_path / "checkpoint.pth")
    assert content["step"] == 4
    assert all(value.isfinite().all() for value in content["model"].values())
    row = json.loads((tmp_path / "log.txt").read_text().splitlines()[-1])
    assert 0 < row["train_loss"] < 20
    encoder = load_encoder(tmp_path / "checkpoint.pth")
    assert encoder.config.arch == family.arch
    assert encoder(some_images(family)).isfinite().all()


@pytest.mark.parametrize("readout", ["cls", "gap", "gap_then_norm", "fdt", "attpool"])
@main_families
@torch.no_grad()
def test_every_readout_reads_every_backbone(family: Family, readout: str) -> None:
    if readout == "cls" and not family.has_class_token:
        with pytest.raises(ValueError, match=r"readout 'cls'.*class token"):
            build(family, readout)
        return
    codes = {"num_codes": 7, "code_dim": 11} if readout == "fdt" else {}
    encoder, images = build(family, readout, **codes), some_images(family)
    output = encoder.readout_output(images)
    assert output.attention.shape[-1] == encoder.backbone(images).shape[1]
    torch.testing.assert_close(encoder(images), output.slots.flatten(1), atol=1e-5, rtol=1e-4)


# ---- evaluations


def evaluate(command: str, weights: Path, output_dir: Path, **options: Any) -> Any:
    given = {"pretrained_weights": weights, "data_path": "scenes:24:32", "output_dir": output_dir, "device": "cpu"}
    if command in ("attention", "slots score"):
        given.pop("data_path")
    else:
        given["num_workers"] = 0
    try:
        return run_command(command, words_of({**given, **options}))
    finally:
        shutdown()


@pytest.mark.slow
@main_families
def test_knn_linear_probe_and_slot_score_read_the_encoder(family: Family, checkpoint: Path, tmp_path: Path) -> None:
    result = evaluate("knn", checkpoint, tmp_path, nb_knn="1 3")
    assert result["encoder"]["arch"] == family.arch
    assert all(0 <= row["top1"] <= 100 for row in result["results"])
    result = evaluate("linear", checkpoint, tmp_path, fast="true", epochs=1, n_last_blocks=2, lr="0.01")
    assert result["feature"]["dim"] >= SLOTS * SLOT_DIM
    assert evaluate("slots score", checkpoint, tmp_path, num_images=3)["num_maps"] == SLOTS


@pytest.mark.slow
@main_families
@torch.no_grad()
def test_maps_are_the_slots_attention_to_patches(family: Family, checkpoint: Path, tmp_path: Path) -> None:
    encoder, images = load_encoder(checkpoint), some_images(family, more=(1, 0))
    maps, number = attention_maps(encoder, images), family.num_prefix_tokens
    attention = encoder.readout_output(images).attention
    np.testing.assert_allclose(maps.reshape(2, SLOTS, -1), attention[:, :, number:].numpy(), atol=1e-6)
    prefix = attention[:, :, :number].sum(dim=-1).numpy()
    np.testing.assert_allclose(class_token_share(maps), prefix, atol=1e-5)
    evaluate("attention", checkpoint, tmp_path)
    record = json.loads((tmp_path / "attention.json").read_text())
    assert len(record["maps"]) == SLOTS
    assert np.load(tmp_path / "attention.npy").shape == (1, SLOTS, *record["grid"])
    assert (tmp_path / "attention.png").is_file()


@pytest.mark.slow
@one_of_each_kind
def test_videos_are_segmented_by_tokens_and_by_slots(family: Family, checkpoint: Path, tmp_path: Path) -> None:
    davis, scores = write_davis(tmp_path / "DAVIS", ("tall",)), []
    for slots in (None, "0,1"):
        options = {
            "pretrained_weights": checkpoint,
            "data_path": davis,
            "img_size": 128,
            "device": "cpu",
            "slots": slots,
        }
        scores.append(call("video-segmentation", output_dir=tmp_path / f"masks {slots}", **options).results["J&F-Mean"])
    assert 0 < min(scores) < 100
    assert scores[0] != scores[1]


@with_blocks
@torch.no_grad()
def test_maps_of_cls_are_the_last_blocks_attention(family: Family) -> None:
    if not family.has_class_token:
        return
    encoder, images, seen = build(family, "cls"), some_images(family), []
    model = timms_own(family, encoder)
    attention: Any = model.blocks[-1].attn  # type: ignore[index, union-attr]
    attention.fused_attn = False
    attention.attn_drop.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model.forward_features(images)
    expected = seen[0][:, :, 0, family.num_prefix_tokens :].numpy()
    maps = attention_maps(encoder, images)
    np.testing.assert_allclose(maps.reshape(expected.shape), expected, atol=1e-6)


@main_families
def test_embeddings_know_prefix_tokens(
    family: Family, checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = ["encoding", "slots", "patches", "mean", *(["cls"] if family.has_class_token else [])]
    evaluate("embed", checkpoint, tmp_path, what=" ".join(kinds), split="val")
    arrays = load_embeddings(tmp_path).arrays
    encoder = load_encoder(checkpoint)
    patches = encoder.backbone.grid(some_images(family))
    assert arrays["patches"].shape[1:] == (np.prod(patches), 24)
    np.testing.assert_allclose(arrays["mean"], arrays["patches"].mean(axis=1), atol=1e-2)
    np.testing.assert_allclose(arrays["encoding"], arrays["slots"].reshape(len(arrays["slots"]), -1), atol=1e-2)
    if not family.has_class_token:
        with pytest.raises(SystemExit):
            evaluate("embed", checkpoint, tmp_path / "cls", what="cls")
        assert f"--what cls: {family.arch} has no class token; take encoding, patches or mean" in caplog.text


@main_families
def test_info_says_how_the_encoder_is_built(family: Family, checkpoint: Path, capsys: pytest.CaptureFixture) -> None:
    run_command("info", [str(checkpoint)])
    assert f"{family.arch}/{family.patch_size} at {family.side} px, sparo (5 slots of 3" in capsys.readouterr().out


# ---- exports


@main_families
@torch.no_grad()
def test_an_export_gives_the_same_encoding(family: Family, checkpoint: Path, tmp_path: Path) -> None:
    images = some_images(family)
    expected = load_encoder(checkpoint)(images)
    torch.testing.assert_close(load_encoder(export(checkpoint, tmp_path / "a"))(images), expected)
    folder = export(checkpoint, tmp_path / "hub", format="huggingface")
    torch.testing.assert_close(load_encoder(folder)(images), expected)
    with pytest.raises(ValueError, match=r"timm has no 'sparo' read-out"):
        export(checkpoint, tmp_path / "b", format="timm")


@with_blocks
@torch.no_grad()
def test_positions_of_another_image_size_are_stored(family: Family, tmp_path: Path) -> None:
    encoder, images = build(family), some_images(family, more=(2, 2))
    exported = load_encoder(export(saved(encoder, tmp_path), tmp_path / "out", img_size=48))
    assert exported.config.img_size == 48
    torch.testing.assert_close(exported(images), encoder(images), atol=1e-5, rtol=1e-4)


@with_blocks
@torch.no_grad()
def test_timm_builds_an_exported_encoder_of_class_tokens(family: Family, tmp_path: Path) -> None:
    if not family.has_class_token:
        return
    encoder, images = build(family, "cls"), some_images(family)
    path = saved(encoder, tmp_path)
    if family.original.startswith("eva"):  # which normalises after pooling
        with pytest.raises(ValueError, match=r"timm/tiny_eva with its class token as output has other weights"):
            export(path, tmp_path / "out", format="timm")
        return
    exported = export(path, tmp_path / "out", format="timm")
    said = json.loads(exported.with_suffix(".json").read_text())["timm"]
    model = timm.create_model(said["architecture"], **said["model_args"], checkpoint_path=str(exported)).eval()
    torch.testing.assert_close(model(images), encoder(images), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(load_encoder(exported)(images), encoder(images))


@pytest.mark.slow
@main_families
@torch.no_grad()
def test_transformers_gives_the_same_slots(family: Family, checkpoint: Path, tmp_path: Path) -> None:
    """Buffers that no file holds, such as frequencies of rotary positions, must not stay empty."""
    transformers = pytest.importorskip("transformers")
    folder = export(checkpoint, tmp_path / "hub", format="huggingface")
    model = transformers.AutoModel.from_pretrained(str(folder), trust_remote_code=True).eval()
    encoder, images = load_encoder(checkpoint), some_images(family)
    output = model(images)
    torch.testing.assert_close(output.slots, encoder.readout_output(images).slots, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(output.last_hidden_state, encoder.backbone(images), atol=1e-5, rtol=1e-4)
    assert f"{family.num_prefix_tokens} before the patches" in (folder / "README.md").read_text()


@pytest.mark.slow
@main_families
@torch.no_grad()
def test_onnx_runs_on_any_number_of_images(family: Family, checkpoint: Path, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    path, encoder = export(checkpoint, tmp_path / "a", format="onnx"), load_encoder(checkpoint)
    session = onnxruntime.InferenceSession(path)
    for batch in (1, 3):
        images = some_images(family, batch)
        encoding, attention = session.run(None, {"images": images.numpy()})
        np.testing.assert_allclose(encoding, encoder(images).numpy(), atol=1e-5, rtol=1e-3)
        np.testing.assert_allclose(attention, encoder.readout_output(images).attention.numpy(), atol=1e-5)


def saved(encoder: Encoder, folder: Path) -> Path:
    """A checkpoint with the encoder as teacher."""
    description = encoder_description(encoder.config)
    torch.save({"teacher": encoder.state_dict(), "encoder": description}, folder / "checkpoint.pth")
    return folder / "checkpoint.pth"


def test_a_model_whose_published_images_are_no_multiple_of_its_stride() -> None:
    encoder = create_encoder("timm/resnet10t", readout="gap", img_size=64)  # 176 px, stride 32: a padded map of 6 x 6
    assert encoder.backbone(torch.zeros(1, 3, 64, 96)).shape == (1, 2 * 3, 512)
    assert plan_of("resnet10t").img_size == 5 * 32


# ---- what is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arch": "timm/resnet5"}, r"unknown arch 'timm/resnet5'; the nearest are timm/resnet"),
        ({"arch": "timm/tiny_resnet50", "patch_size": 16}, r"--patch_size 16 with timm/tiny_resnet50.* 32 px"),
        ({"arch": "timm/tiny_dinov3", "patch_size": 8, "img_size": 33}, r"img_size=33 px.*patch_size=8 px.* 32"),
        ({"arch": "timm/tiny_siglip", "patch_size": 8, "img_size": 32, "readout": "cls"}, "has no class token; choose"),
    ],
)
def test_an_architecture_that_does_not_fit_is_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        create_encoder(**settings)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("option", ["--pre_norm", "--quick_gelu"])
def test_options_of_our_own_transformers_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=r"with --arch timm/tiny_dinov2: a model of timm has its own form"):
        options.check_options(options.get_args_parser().parse_args(["--arch", "timm/tiny_dinov2", option, "true"]))


@main_families
def test_images_of_another_number_of_channels_are_refused(family: Family) -> None:
    with pytest.raises(ValueError, match=r"images have 2 channels; the backbone was built with in_chans=3"):
        build(family)(torch.zeros(1, 2, family.side, family.side))


def test_maps_of_cls_are_refused_where_no_block_computes_them() -> None:
    encoder = build(FAMILIES["tiny_resnet50"], "gap")
    with pytest.raises(ValueError, match=r"timm/tiny_resnet50 computes no self-attention"):
        encoder.backbone.last_self_attention(some_images(FAMILIES["tiny_resnet50"]))

"""Files that hold weights: whole or not there, read without running them, and strict about what they fit."""

import argparse
import contextlib
import errno
import importlib
import inspect
import io
import json
import logging
import math
import os
import pickle
import random
import re
import shlex
import zipfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from runs import assert_same_state, options
from small_models import SMALL, SPARO, build, save_encoder
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from dino_sparo import CheckpointError, Encoder, EncoderConfig, create_encoder, load_checkpoint, load_encoder
from dino_sparo.__main__ import run as run_command
from dino_sparo.data.defaults import IMAGENET_MEAN, IMAGENET_STD, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from dino_sparo.evaluation.encoders import trained_encoder
from dino_sparo.runtime.faults import UserError
from dino_sparo.training.objective import Objective
from dino_sparo.training.resume import random_state, restore_random_state
from dino_sparo.weights import entries
from dino_sparo.weights import file as checkpoint_file
from dino_sparo.weights.encoder import encoder_of
from dino_sparo.weights.entries import (
    check_same_model,
    describe_encoder,
    encoder_description,
    max_value_of,
    normalization_of,
)
from dino_sparo.weights.export import export
from dino_sparo.weights.file import load_strictly, weights_checksum
from dino_sparo.weights.folder import save_checkpoint
from dino_sparo.weights.foreign import ENDS, NAMES, from_open_clip_names, infer_config
from dino_sparo.weights.initialize import check_same_blocks, initialize_encoder


def contents() -> dict[str, Any]:
    """Something of every kind that a checkpoint holds."""
    return {
        "student": {"backbone.w": torch.randn(3, 5), "backbone.n": torch.arange(7)},
        "epoch": 2,
        "args": {"lr": 5e-4, "scale": [0.4, 1.0], "device": "auto", "max_steps": None, "norm_last_layer": True},
        "dino_loss": {"center": torch.randn(1, 11).bfloat16()},
    }


# Saving.


def test_what_was_saved_is_loaded_and_nothing_else_lies_in_the_folder(tmp_path: Path) -> None:
    saved, path = contents(), tmp_path / "checkpoint.pth"
    save_checkpoint({"epoch": 1}, path)
    save_checkpoint(saved, path)
    assert_same_state(load_checkpoint(path), saved)
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pth"]


def test_the_old_file_stays_until_the_new_one_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, happened = tmp_path / "checkpoint.pth", []
    save_checkpoint({"epoch": 1}, path)

    def watched(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def watch(*arguments: Any) -> None:
            happened.append((name, load_checkpoint(path)["epoch"]))
            call(*arguments)

        return watch

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, watched(name, getattr(os, name)))
    save_checkpoint({"epoch": 2}, path)
    assert happened[:2] == [("fsync", 1), ("replace", 1)]
    assert load_checkpoint(path)["epoch"] == 2


def denied(*_: Any, **__: Any) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def full_after_some_bytes(_: Any, file: io.BufferedWriter) -> None:
    """What torch.save does on a full disk: some bytes, then a RuntimeError."""
    file.write(b"PK\x03\x04" + bytes(1000))
    raise RuntimeError("[enforce fail at inline_container.cc:626] . unexpected pos 64 vs 0: No space left on device")


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("save", [full_after_some_bytes, denied])
def test_a_save_that_fails_leaves_what_was_there_and_says_why_and_what_to_do(
    save: Callable[..., None], is_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of torch.save; test_checkpoint_folder.py has those of every call of the system."""
    path = tmp_path / "checkpoint.pth"
    if not is_first:
        save_checkpoint(contents(), path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    monkeypatch.setattr(torch, "save", save)
    kept = "no previous checkpoint; free some space, make the folder w" if is_first else "previous checkpoint is kept"
    with pytest.raises(
        CheckpointError, match=rf"could not write .*checkpoint\.pth \(.*(No space left|denied).*\); .*{kept}"
    ):
        save_checkpoint({"epoch": 3}, path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_random_numbers_go_on_where_they_were_saved(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [float(torch.rand(())), float(np.random.randn()), random.gauss(0, 1)]

    draw()  # numpy and Python draw normal numbers in pairs, and keep the second: it belongs to the state
    state = random_state(torch.device("cpu"))
    expected = [draw() for _ in range(3)]  # now: the checks of types in tests draw from Python's generator
    save_checkpoint({"ranks": [state]}, tmp_path / "checkpoint.pth")
    for module in (torch, np.random, random):
        (module.manual_seed if module is torch else module.seed)(7)
    assert draw() != expected[0]
    loaded = load_checkpoint(tmp_path / "checkpoint.pth")["ranks"][0]
    restore_random_state(loaded, torch.device("cpu"))
    assert [draw() for _ in range(3)] == expected


def test_saving_where_there_is_no_folder_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"could not write .*nowhere.*checkpoint\.pth"):
        save_checkpoint({"epoch": 3}, tmp_path / "nowhere" / "checkpoint.pth")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"could not write .*checkpoint\.pth"):
        save_checkpoint({"epoch": 3}, tmp_path / "file" / "checkpoint.pth")


# Files that are no checkpoints.


def saved_bytes(checkpoint: Any, in_zip: bool = True) -> bytes:
    """What torch.save writes, in today's format or in that of the years before it."""
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer, _use_new_zipfile_serialization=in_zip)
    return buffer.getvalue()


def zip_of_something_else() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, a=np.zeros(3))
    return buffer.getvalue()


def beginnings() -> dict[str, bytes]:
    """Truncated checkpoints of both formats."""
    found = {}
    for in_zip in (True, False):
        whole = saved_bytes({"student": {"w": torch.randn(31, 37)}, "epoch": 3}, in_zip)
        lengths = [math.ceil(share * len(whole)) for share in (0.001, 0.01, 0.1, 0.5, 0.9, 0.999)]
        found |= {f"{n} bytes, zip {in_zip}": whole[:n] for n in (0, 1, 2, 3, 4, 5, 17, 64, *lengths)}
    return found


NO_CHECKPOINTS = {
    "text": b"hello, I am a text\n",
    "text that a pickle could begin with": b"class\nof others\n",
    "404": b"Not found\n",
    "html": b"<!DOCTYPE html><html><body>404</body></html>",
    "json": b'{"epoch": 3}',
    "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 3\n",
    "umlauts": "Füße".encode(),
    "zeros": bytes(100),
    "ones": b"\xff" * 100,
    "pickle": pickle.dumps({"epoch": 3}, protocol=2),
    "npz": zip_of_something_else(),
}


@pytest.mark.parametrize(
    "data", [pytest.param(data, id=name) for name, data in (NO_CHECKPOINTS | beginnings()).items()]
)
def test_truncated_and_other_files_are_called_so_and_not_accused_of_wanting_to_run_code(
    data: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "other.pth"
    path.write_bytes(data)
    message = rf"^{re.escape(str(path))} is truncated or not a checkpoint \({len(data)} bytes; [A-Z]\w+ "
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(path)
    assert "run code" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_wrong_bit_at_the_end_of_an_archive_is_a_checkpoint_error_or_harmless(tmp_path: Path) -> None:
    """The bug: with a wrong number of disks `zipfile.is_zipfile` raises, and the user saw a traceback."""
    path, whole = tmp_path / "end.pth", saved_bytes({"w": torch.zeros(3, 5), "epoch": 3}, True)
    first = whole.rindex(b"PK\x06\x07")  # the locator of the directory, with the number of disks
    refused = 0
    for bit in range(8 * first, 8 * len(whole), 3):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            load_checkpoint(path)
        except CheckpointError:
            refused += 1
    assert refused > 33


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_whatever_the_bytes_the_error_is_ours(tmp_path: Path) -> None:
    rng, path = random.Random(0), tmp_path / "noise.pth"
    originals = [saved_bytes({"w": torch.zeros(3, 5), "epoch": 3}, in_zip) for in_zip in (True, False)]
    for trial in range(150):
        if trial % 3 == 2:
            data = rng.randbytes(rng.choice((3, 30, 300)))
        else:
            damaged = bytearray(originals[trial % 3])
            for _ in range(3):
                damaged[rng.randrange(min(len(damaged), 600))] = rng.randrange(256)
            data = bytes(damaged)
        path.write_bytes(data)
        with contextlib.suppress(CheckpointError):  # now and then the damage is harmless
            load_checkpoint(path)


def test_a_path_without_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*nothing\.pth; give the path"):
        load_checkpoint(tmp_path / "nothing.pth")
    save_checkpoint(contents(), tmp_path / "checkpoint.pth")
    with pytest.raises(CheckpointError, match=rf"no checkpoint at {tmp_path}; give the path of {tmp_path}/checkpoint"):
        load_checkpoint(str(tmp_path))
    (tmp_path / "cut.safetensors").write_bytes(b"\x08\x00\x00")
    with pytest.raises(CheckpointError, match=r"truncated or not a safetensors .*\(.*[Hh]eader.*\)"):
        load_checkpoint(tmp_path / "cut.safetensors")


def flipped(data: bytes, position: int) -> bytes:
    """The same bytes but for one bit."""
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_flipped_bit_in_the_weights_is_noticed_by_every_reader_not_only_on_resuming(
    suffix: str, tmp_path: Path
) -> None:
    encoder, path, rng = build(**SPARO), tmp_path / f"weights{suffix}", random.Random(0)
    path.write_bytes(save_encoder(tmp_path, encoder).read_bytes())
    if suffix == ".safetensors":
        export(tmp_path / "checkpoint.pth", path, overwrite=True)
    whole, content, noticed = path.read_bytes(), load_checkpoint(path), 0
    for _ in range(150):
        path.write_bytes(flipped(whole, rng.randrange(len(whole))))
        try:
            assert_same_state(load_checkpoint(path), content, "between the parts of a file lie bytes that say nothing")
        except CheckpointError:
            noticed += 1
    assert noticed > 140
    path.write_bytes(flipped(whole, whole.index(encoder.state_dict()["readout.queries"].numpy().tobytes()) + 1))
    for read in (load_checkpoint, load_encoder):
        with pytest.raises(CheckpointError, match=rf"weights\{suffix} is damaged: .* copy (it|the file) again"):
            read(path)


def test_a_checkpoint_that_was_verified_a_moment_ago_is_not_verified_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, verified = tmp_path / "checkpoint.pth", []
    save_checkpoint(contents(), path)
    monkeypatch.setattr(checkpoint_file, "verify_checkpoint", verified.append)
    load_checkpoint(path, verify=False)
    assert verified == []
    load_checkpoint(path)
    assert verified == [path]


def test_a_checksum_of_weights_is_of_names_types_shapes_and_values_in_any_order() -> None:
    weights = {"b": torch.arange(6).view(2, 3), "a": torch.ones(5).bfloat16()}
    checksum = weights_checksum(weights)
    assert re.fullmatch("[0-9a-f]{8}", checksum)
    assert weights_checksum(dict(reversed(weights.items()))) == checksum
    assert weights_checksum({**weights, "b": weights["b"].t().contiguous().t()}) == checksum  # another layout
    others = [
        {"c": weights["b"], "a": weights["a"]},
        {**weights, "b": weights["b"].view(3, 2)},
        {**weights, "a": weights["a"].view(torch.float16)},
        {**weights, "a": torch.ones(5).bfloat16().index_fill(0, torch.tensor(4), 1.25)},
    ]
    assert len({checksum, *map(weights_checksum, others)}) == 5


# Files that would run code.


class Runs:
    """Unpickled carelessly, this calls a function."""

    def __init__(self, function: Callable[[str], Any], argument: str) -> None:
        self.call = function, (argument,)

    def __reduce__(self) -> tuple:
        return self.call


def evil_bytes(marker: Path) -> dict[str, bytes]:
    """Files that write `marker` if they are unpickled carelessly, by the name that the refusal must give."""
    shell, python = Runs(os.system, f"touch {shlex.quote(str(marker))}"), Runs(eval, f"open({str(marker)!r}, 'w')")
    found = {}
    for in_zip in (True, False):
        found[f"{os.system.__module__}.system, zip {in_zip}"] = saved_bytes({"student": {}, "args": shell}, in_zip)
        found[f"builtins.eval, zip {in_zip}"] = saved_bytes({"epoch": python}, in_zip)
    bare = range(pickle.HIGHEST_PROTOCOL + 1)
    return found | {f"bare, protocol {protocol}": pickle.dumps(shell, protocol) for protocol in bare}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("kind", evil_bytes(Path()))
def test_a_pickle_that_runs_code_is_refused_by_name_and_not_run(kind: str, tmp_path: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "evil.pth"
    path.write_bytes(evil_bytes(marker)[kind])
    refusal = "" if kind.startswith("bare") else r" was refused: reading it would run code \((\w+\.)?\w+\)"
    for read in (load_checkpoint, load_encoder):
        with pytest.raises(CheckpointError, match=rf"evil\.pth{refusal}") as caught:
            read(path)
        assert kind.startswith("bare") or kind.partition(",")[0].partition(".")[2] in str(caught.value)
        assert not marker.exists()


def test_reading_a_checkpoint_does_not_change_what_torch_considers_safe(tmp_path: Path) -> None:
    before = set(torch.serialization.get_safe_globals())
    save_checkpoint(contents(), tmp_path / "checkpoint.pth")
    load_checkpoint(tmp_path / "checkpoint.pth")
    assert set(torch.serialization.get_safe_globals()) == before


# The reference's checkpoints.


def reference_checkpoint(encoder: Encoder) -> dict[str, Any]:
    """As facebookresearch/dino saves it: a Namespace with a Path, numpy numbers in the optimizer, DDP's names."""
    weights = {
        **encoder.state_dict(),
        "head.mlp.0.weight": torch.randn(3, 192),
        "head.last_layer.weight_g": torch.ones(2),
    }
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(3))])
    optimizer.param_groups[0].update(lr=np.float64(0.0005), weight_decay=np.linspace(0.04, 0.4, 5)[3])
    return {
        "student": {f"module.{name}": value for name, value in weights.items()},
        "teacher": {name: value + 0.01 for name, value in weights.items()},
        "optimizer": optimizer.state_dict(),
        "epoch": 101,
        "args": argparse.Namespace(arch="vit_small", output_dir=Path("runs/first"), global_crops_scale=(0.4, 1.0)),
        "dino_loss": {"center": torch.zeros(1, 5)},
        "fp16_scaler": {"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 7},
    }


def rename_globals(path: Path, pattern: bytes, name: bytes) -> None:
    """Rewrite the names of classes and functions in a checkpoint, as other versions of their packages write them."""
    with zipfile.ZipFile(path) as archive:
        entries = {entry: archive.read(entry) for entry in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for entry, data in entries.items():
            if entry.endswith("data.pkl"):
                data, count = re.subn(pattern, name, data)
                assert count > 0
            archive.writestr(entry, data)


@pytest.mark.parametrize("in_zip", [True, False])
def test_the_references_full_checkpoint_loads(in_zip: bool, tmp_path: Path) -> None:
    encoder, path = build(readout="cls"), tmp_path / "reference.pth"
    path.write_bytes(saved_bytes(reference_checkpoint(encoder), in_zip))
    checkpoint = load_checkpoint(path)
    assert checkpoint["args"].output_dir == Path("runs/first")
    group = checkpoint["optimizer"]["param_groups"][0]
    assert group["lr"] == 0.0005
    assert group["weight_decay"] == pytest.approx(0.31)
    images = torch.randn(2, 3, 24, 32)
    for which, shift in [("student", 0.0), ("teacher", 0.01)]:
        loaded = load_encoder(path, which)
        for name, value in loaded.state_dict().items():
            assert torch.equal(value, encoder.state_dict()[name] + shift)
        assert loaded.config == encoder.config == EncoderConfig(**SMALL, readout="cls")
        assert loaded(images).shape == (2, 128)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (rb"cnumpy\._?core\.multiarray\nscalar\n", b"cnumpy.core.multiarray\nscalar\n"),
        (rb"cnumpy\._?core\.multiarray\nscalar\n", b"cnumpy._core.multiarray\nscalar\n"),
        (rb"cpathlib(\._local)?\nPosixPath\n", b"cpathlib\nPosixPath\n"),
        (rb"cpathlib(\._local)?\nPosixPath\n", b"cpathlib._local\nPosixPath\n"),  # Python 3.13
    ],
)
def test_numbers_and_paths_load_under_the_names_of_all_numpys_and_pythons(
    pattern: bytes, name: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "reference.pth"
    save_checkpoint(reference_checkpoint(build(readout="cls")), path)
    rename_globals(path, pattern, name)
    loaded = load_checkpoint(path)
    assert loaded["optimizer"]["param_groups"][0]["lr"] == 0.0005
    assert loaded["args"].output_dir == Path("runs/first")


def test_raw_vit_weights_tell_how_the_vit_was_built(tmp_path: Path) -> None:
    encoder = create_encoder("vit_tiny", 4, "cls", img_size=28, in_chans=1)
    torch.save(encoder.backbone.state_dict(), tmp_path / "vit.pth")
    loaded = load_encoder(tmp_path / "vit.pth")
    assert loaded.config == EncoderConfig("vit_tiny", 4, "cls", img_size=28, in_chans=1)
    images = torch.randn(2, 1, 32, 20)
    with torch.no_grad():
        assert torch.equal(loaded(images), encoder.eval()(images))


Weights = dict[str, torch.Tensor]


def below(prefix: str, weights: Weights) -> Weights:
    return {f"{prefix}{name}": value for name, value in weights.items()}


def in_chunks(weights: Weights, wrapper: str = "") -> Weights:
    """As DINOv2's training names two chunks of two blocks."""
    blocks = {rf"blocks\.{number}\.(?!\d)": f"blocks.{number // 2}.{wrapper}{number}." for number in range(4)}
    for block, chunked in blocks.items():
        weights = {re.sub(rf"^{block}", chunked, name): value for name, value in weights.items()}
    return weights


def both(prefixes: tuple[str, str], weights: Weights) -> Weights:
    """The weights, beside a network of zeros."""
    return {**below(prefixes[0], weights), **below(prefixes[1], {name: 0 * value for name, value in weights.items()})}


FORMS: dict[str, Callable[[Weights], dict[str, Any]]] = {
    "DINOv2's released file": lambda vit: {**vit, "mask_token": torch.ones(1, 128)},
    "DINOv2's teacher_checkpoint.pth": lambda vit: {
        "teacher": {**below("backbone.", in_chunks(vit)), "dino_head.mlp.0.weight": torch.ones(2, 3)}
    },
    "DINOv2's model_final.rank_0.pth": lambda vit: {
        "model": {
            **both(("teacher.backbone.", "student.backbone."), vit),
            "teacher.ibot_head.last_layer": torch.ones(2),
        },
        "optimizer": {"state": {}},
        "iteration": 7,
    },
    "FSDP, compiled": lambda vit: {
        "model": below("teacher.backbone._orig_mod._fsdp_wrapped_module.", in_chunks(vit, "_fsdp_wrapped_module."))
    },
    "MoCo v3": lambda vit: {
        "arch": "vit_small",
        "state_dict": {
            **both(("module.momentum_encoder.", "module.base_encoder."), vit),
            "module.momentum_encoder.head.0.weight": torch.ones(2, 3),
            "module.predictor.0.weight": torch.ones(2, 3),
        },
    },
    "MAE with its decoder": lambda vit: {
        "model": {**vit, "mask_token": torch.ones(1, 1, 512), "decoder_blocks.0.norm1.weight": torch.ones(512)}
    },
    "DeiT": lambda vit: {"model": {**vit, "head.weight": torch.ones(10, 128)}},
    "DDP": lambda vit: {"state_dict": below("module.", vit), "epoch": 3},
    "iBOT": lambda vit: {"teacher": below("module.backbone.", {**vit, "masked_embed": torch.ones(1, 128)})},
}


@pytest.mark.parametrize("form", FORMS)
def test_the_teacher_is_read_from_files_of_other_programs(form: str, tmp_path: Path) -> None:
    encoder = build(readout="cls")
    torch.save(FORMS[form](dict(encoder.backbone.state_dict())), tmp_path / "vit.pth")
    loaded = load_encoder(tmp_path / "vit.pth")
    assert loaded.config == encoder.config
    assert_same_state(loaded.state_dict(), encoder.state_dict())
    if form == "DeiT":
        assert load_encoder(tmp_path / "vit.pth", "model").config == encoder.config
    if form in ("MoCo v3", "DINOv2's model_final.rank_0.pth"):
        student = load_encoder(tmp_path / "vit.pth", "student")
        assert not any(value.any() for value in student.state_dict().values())


def test_the_assumed_number_of_heads_is_logged_and_the_name_of_the_architecture_changes_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = build(readout="cls", arch="vit_micro_heads8")
    torch.save(encoder.backbone.state_dict(), tmp_path / "vit.pth")
    caplog.set_level("INFO")
    images = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        assert not torch.allclose(load_encoder(tmp_path / "vit.pth")(images), encoder(images))
        line = "vit.pth does not say its number of attention heads: 4 are assumed; --arch vit_micro_headsN takes N"
        assert line in caplog.text
        loaded = load_encoder(tmp_path / "vit.pth", arch="vit_micro_heads8")
        assert torch.equal(loaded(images), encoder(images))
    initialize_encoder(build(readout="cls"), tmp_path / "vit.pth")
    assert caplog.text.count("4 are assumed") == 2
    description = encoder_description(loaded.config)
    save_checkpoint({"teacher": encoder.state_dict(), "encoder": description}, tmp_path / "c.pth")
    with torch.no_grad():
        assert torch.equal(load_encoder(tmp_path / "c.pth")(images), encoder(images))
    with pytest.raises(CheckpointError, match=r"c\.pth was trained with --arch vit_micro_heads8, not vit_micro;"):
        initialize_encoder(build(readout="cls"), tmp_path / "c.pth")
    for arch in ("vit_micro_heads0", "vit_micro_heads7", "vit_micro_heads"):
        with pytest.raises(UserError, match=f"unknown arch '{arch}'; choose one of"):
            load_encoder(tmp_path / "vit.pth", arch=arch)


# What only some vision transformers have -> timm's name for them.
OTHERS = {
    "register_tokens (384, 14)": "vit_small_patch14_reg4_dinov2",
    "blocks.0.mlp.w12.weight (1536, 14)": "vit_giant_patch14_dinov2",
    "storage_tokens (768, 16)": "vit_base_patch16_dinov3_qkvb",
    "blocks.0.mlp.w1.weight (1280, 16)": "vit_huge_plus_patch16_dinov3_qkvb",
    "rope_embed.periods (4096, 16)": "vit_7b_patch16_dinov3",
    "dist_token (192, 16)": "deit_tiny_distilled_patch16_224",
    "blocks.0.attn.relative_position_index (1024, 16)": "beit_large_patch16_224",
    "blocks.0.gamma_1 (1280, 14)": "deit3_huge_patch14_224",
    "storage_tokens (385, 16)": "NAME",
}


@pytest.mark.parametrize("part", OTHERS)
def test_weights_that_only_timm_reads_are_refused_with_the_name_of_its_model(part: str, tmp_path: Path) -> None:
    name, _, sizes = part.partition(" (")
    width, patch = map(int, sizes.rstrip(")").split(", "))
    weights = {name: torch.zeros(1), "patch_embed.proj.weight": torch.zeros(width, 3, patch, patch)}
    for positions in ({}, {"pos_embed": torch.zeros(1, 5, width)}):
        torch.save({"teacher": below("backbone.", {**weights, **positions})}, tmp_path / "vit.pth")
        with pytest.raises(CheckpointError, match=rf"vit\.pth.*; give --arch timm/{OTHERS[part]}, the model of timm"):
            load_encoder(tmp_path / "vit.pth")


@pytest.mark.parametrize("replace_block", [True, False], ids=["in a block's place", "behind all blocks"])
def test_weights_with_sparo_tell_how_it_was_built(replace_block: bool) -> None:
    encoder = build(**SPARO, replace_block=replace_block)
    assert infer_config(encoder.state_dict()) == replace(encoder.config, replace_block=replace_block)


def test_parts_of_a_clip_that_are_not_known_are_counted_and_the_first_four_named() -> None:
    known = {name: torch.zeros(1, 1) for name in (NAMES | ENDS["cls"]).values() if not name.endswith(".")}
    assert len(from_open_clip_names(known)) == len(known)
    strange = {f"visual.x{number}": torch.zeros(1) for number in range(5)}
    with pytest.raises(CheckpointError) as caught:
        from_open_clip_names({"logit_scale": known["logit_scale"], **strange}, "clip.pt")
    assert str(caught.value).endswith(
        "of the weights of clip.pt 5 are unknown (visual.x0, visual.x1, visual.x2, visual.x3) and 7 missing "
        "(visual.conv1.weight, visual.class_embedding, visual.positional_embedding, token_embedding.weight)"
    )
    with pytest.raises(CheckpointError, match=r"1 are unknown .* 0 missing"):
        from_open_clip_names({**known, "visual.x": torch.zeros(1)})
    del known["text_projection"]
    with pytest.raises(CheckpointError, match=r"0 are unknown .* 1 missing"):
        from_open_clip_names(known)


@pytest.mark.parametrize(("readout", "codes"), [("cls", (0, 0)), ("fdt", (7, 11))])
def test_a_clips_image_tower_has_codes_only_where_its_readout_needs_them(readout: str, codes: tuple[int, int]) -> None:
    images = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    clip = {"image": {"readout": readout}, "replace_block": None, "quick_gelu": True, "num_codes": 7, "embed_dim": 11}
    description = describe_encoder({"clip": {**clip, **images}}, {}, "clip.pt", None, None)
    expected = {"readout": readout, "replace_block": None, "quick_gelu": True, **images}
    assert description == {**expected, "num_codes": codes[0], "code_dim": codes[1]}


@pytest.mark.parametrize("key", ["clip", "encoder", "published"])
@pytest.mark.parametrize("saved", [True, False])
def test_weights_trained_with_another_activation_start_nothing(key: str, saved: bool) -> None:
    check_same_blocks({key: {"quick_gelu": saved}}, saved, "vit_small", "clip.pt")
    message = rf"clip\.pt was trained with quick_gelu={saved}, the model has quick_gelu={not saved}; "
    with pytest.raises(CheckpointError, match=rf"{message}.*--quick_gelu {str(saved).lower()}$"):
        check_same_blocks({key: {"quick_gelu": saved}}, not saved, "vit_small", "clip.pt")


def test_weights_that_do_not_say_their_activation_may_start_any_if_foreign_and_gelu_if_ours() -> None:
    for quick_gelu in (True, False):
        check_same_blocks({"state_dict": {}}, quick_gelu, "vit_small", "clip.pt")
    check_same_blocks({"encoder": {}}, False, "vit_small", "checkpoint.pth")
    with pytest.raises(CheckpointError, match="quick_gelu=False, the model has quick_gelu=True"):
        check_same_blocks({"encoder": {}}, True, "vit_small", "checkpoint.pth")


# Our checkpoints.

ROUND_TRIPS: dict[str, dict[str, Any]] = {
    "sparo": SPARO,
    "sparo, one key per slot": {**SPARO, "num_slots": 5, "group_size": 1, "key_dim": 11},
    "sparo, grey images": {**SPARO, "in_chans": 1},
    "cls": {"readout": "cls"},
    "gap": {"readout": "gap", "patch_size": 4},
}


def test_a_loaded_encoder_prepares_images_as_its_checkpoint_says(tmp_path: Path) -> None:
    encoder = load_encoder(save_encoder(tmp_path, build()))
    grey, colour = Image.new("L", (40, 30), 51), Image.new("RGB", (30, 50), (255, 0, 51))
    batch = encoder.transform([grey, colour])
    assert batch.shape == (2, 3, 24, 24)
    expected = [[(0.2 - 0.1) / 0.4, 0, (0.2 - 0.3) / 0.6], [0.9 / 0.4, -0.2 / 0.5, (0.2 - 0.3) / 0.6]]
    assert torch.allclose(batch.mean(dim=(2, 3)), torch.tensor(expected), atol=1e-5)
    assert torch.equal(encoder.transform(grey), batch[:1])
    assert encoder(batch).shape == (2, encoder.encoding_dim)
    deep = Image.fromarray(np.full((30, 40), 51 * 257, np.uint16))  # 16 bit, which Pillow's conversion turns white
    assert torch.equal(encoder.transform(deep), batch[:1])
    with pytest.raises(ValueError, match="no images: the list is empty"):
        encoder.transform([])


@pytest.mark.parametrize("case", ROUND_TRIPS)
def test_a_loaded_encoder_is_the_saved_one_bit_for_bit(case: str, tmp_path: Path) -> None:
    encoder = build(**ROUND_TRIPS[case])
    loaded = load_encoder(save_encoder(tmp_path, encoder))
    assert loaded.config == encoder.config
    assert not any(module.training for module in loaded.modules())
    images = [torch.randn(2, encoder.config.in_chans, size, 32) for size in (24, 16)]
    encoder.eval()
    with torch.no_grad():
        assert torch.equal(loaded(images), encoder(images))
        ours, theirs = loaded.readout_output(images[0]), encoder.readout_output(images[0])
    assert torch.equal(ours.slots, theirs.slots)
    assert torch.equal(ours.attention, theirs.attention)


def raw_vit() -> dict[str, Any]:
    return build(readout="cls").backbone.state_dict()


def without_the_last_block() -> dict[str, Any]:
    return {name: value for name, value in raw_vit().items() if not name.startswith("blocks.3.")}


def cut_by_fsdp(value: Any) -> dict[str, Any]:
    return {"model": {"teacher.backbone._fsdp_wrapped_module._flat_param": value}}


# What torch.save wrote, options of load_encoder, what the line must name.
REFUSED: list[tuple[Callable[[], Any], dict[str, Any], str]] = [
    (lambda: [1, 2], {}, r"file\.pth holds a list, not a dict of weights"),
    (lambda: {"model": nn.Linear(2, 3)}, {}, r"would run code \(torch\.nn\.modules\.linear\.Linear\)"),
    (lambda: cut_by_fsdp(ShardedTensor), {}, r"file\.pth.*; give whole weights, such as teacher_checkpoint\.pth"),
    (lambda: cut_by_fsdp(torch.zeros(7)), {}, r"file\.pth.*; give whole weights, such as teacher_checkpoint\.pth"),
    (
        lambda: {"layer1.0.conv1.weight": torch.zeros(3, 3)},
        {},
        r"not the weights of a vision transformer.*layer1\.0\.conv1\.weight",
    ),
    (lambda: {"epoch": 3}, {}, "not the weights of a vision transformer"),
    (without_the_last_block, {}, r"width 128 and 3 blocks; known are vit_micro \(128, 4\).*vit_base \(768, 12\)"),
    (without_the_last_block, {"arch": "vit_micro"}, r"file\.pth \(encoder\) do not fit .*; 12 missing: .*blocks\.3\."),
    (raw_vit, {"arch": "vit_small"}, r"96 missing: .*blocks\.0\.attn\.proj\.bias \(128,\) instead of \(384,\)"),
    (raw_vit, {"patch_size": 4}, r"patch_embed\.proj\.weight \(128, 3, 8, 8\) instead of \(128, 3, 4, 4\)"),
    (raw_vit, {"arch": "vit_giant"}, "vit_giant.*vit_small"),
    (lambda: {"model": raw_vit()}, {"which": "ema"}, r"file\.pth has no 'ema'; it has raw weights"),
    (
        lambda: build(readout="attpool", num_slots=2, slot_dim=3, key_dim=4).state_dict(),
        {},
        r"do not fit the model; .*unexpected: readout\.",
    ),
    (lambda: {"student": {}, "teacher": {}}, {"which": "ema"}, r"file\.pth has no 'ema'; it has teacher, student"),
    (lambda: {"student": {}, "epoch": 1}, {}, r"file\.pth has no 'teacher'; it has student"),
]


@pytest.mark.parametrize(("content", "options", "message"), REFUSED)
def test_weights_that_make_no_encoder_are_refused_with_the_reason(
    content: Callable[[], Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    torch.save(content(), tmp_path / "file.pth")
    with pytest.raises(UserError, match=message):
        load_encoder(tmp_path / "file.pth", **options)


def test_weights_that_do_not_fit_are_counted_and_named(tmp_path: Path) -> None:
    path = save_encoder(tmp_path, build(**SPARO))
    checkpoint = load_checkpoint(path)
    weights = checkpoint["teacher"]
    del weights["readout.queries"], weights["backbone.norm.bias"]
    weights["readout.temperature"] = torch.zeros(1)
    weights["backbone.cls_token"] = torch.zeros(1, 1, 190)
    save_checkpoint(checkpoint, path)
    with pytest.raises(CheckpointError) as caught:
        load_encoder(path)
    assert str(caught.value) == (
        f"the weights of {path} (teacher) do not fit the model; "
        "2 missing: backbone.norm.bias, readout.queries; "
        "1 unexpected: readout.temperature; "
        "1 of another shape: backbone.cls_token (1, 1, 190) instead of (1, 1, 128)"
    )


def test_of_many_names_the_first_are_shown_the_rest_counted_and_no_weight_changes() -> None:
    module = nn.Sequential(*[nn.Linear(1, 1) for _ in range(9)])
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"17 missing: 0\.bias, 1\.bias, .*4\.bias, \.\.\. and 9 more"):
        load_strictly(module, {"0.weight": torch.zeros(1, 1)}, "nothing")
    assert_same_state(dict(module.state_dict()), before)
    with pytest.raises(CheckpointError, match=r"8 missing: .*3\.weight$"):
        load_strictly(module[:4], {}, "nothing")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (3, "a int, not a dict"),
        ("vit_small", "a str, not a dict"),
        ([1, 2], "a list, not a dict"),
        ({"arch": 5}, "arch 5, which is not of type str"),
        ({"num_slots": "many"}, "num_slots 'many', which is not of type int"),
        ({"img_size": None}, "img_size None, which is not of type int"),
        ({"blocks": 3}, "blocks, which this version does not know"),
        ({"mean": 0.5}, r"mean is 0\.5, not one number per channel"),
        ({"std": ["a"]}, r"std is \['a'\], not one number per channel"),
    ],
)
def test_an_encoder_entry_of_another_type_is_one_line_with_the_file_and_what_is_wrong(
    entry: Any, message: str, tmp_path: Path
) -> None:
    described = encoder_description(EncoderConfig(**SMALL, **SPARO))
    checkpoint = {"teacher": {}, "encoder": {**described, **entry} if isinstance(entry, dict) else entry}
    save_checkpoint(checkpoint, tmp_path / "checkpoint.pth")
    for read in (
        load_encoder,
        trained_encoder,
        lambda path: check_same_model(load_checkpoint(path), EncoderConfig(), str(path)),
        lambda path: export(path, tmp_path / "out"),
    ):
        with pytest.raises(
            CheckpointError, match=rf"checkpoint\.pth does not say under `encoder` .*{message}"
        ) as caught:
            read(str(tmp_path / "checkpoint.pth"))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("mean", math.inf), ("std", 0.0), ("std", -1), ("std", math.nan)])
def test_statistics_that_no_image_has_are_refused(name: str, value: float, tmp_path: Path) -> None:
    checkpoint = {"encoder": encoder_description(EncoderConfig(**SMALL, **SPARO)) | {name: [0.5, value, 0.5]}}
    with pytest.raises(CheckpointError, match=rf"{name} \(0\.5, {value}, 0\.5\).*, which are not finite"):
        normalization_of(checkpoint)


def test_an_encoder_that_is_only_described_has_no_memory_for_weights_of_its_own(tmp_path: Path) -> None:
    """The bug: describing a large encoder took a minute, for random weights that were replaced."""
    checkpoint = load_checkpoint(save_encoder(tmp_path, build(**SPARO)))
    described = encoder_of(checkpoint, "checkpoint.pth", "teacher", is_described=True)
    assert described.summary == build(**SPARO).summary
    own = {value.data_ptr() for value in checkpoint["teacher"].values()}
    assert {value.data_ptr() for value in described.state_dict().values()} <= own
    loaded = encoder_of(checkpoint, "checkpoint.pth", "teacher")
    assert not {value.data_ptr() for value in loaded.state_dict().values()} & own
    checkpoint["encoder"]["key_dim"] += 1
    with pytest.raises(CheckpointError, match="of another shape"):
        encoder_of(checkpoint, "checkpoint.pth", "teacher", is_described=True)


@pytest.mark.parametrize("options", ["args", "recipe"])
def test_the_white_of_16_bit_images_travels_with_a_checkpoint_and_with_an_export(options: str) -> None:
    assert max_value_of({options: {"max_value": 4095}}) == 4095
    for without in ({}, {options: {}}, {options: argparse.Namespace(max_value=4095)}):  # the reference's options
        assert max_value_of(without) == 65535


def test_timms_weights_are_read_as_they_were_published(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The bug: mean and deviation of 0.5, OpenAI's of a CLIP's image tower, and its activation, were not known."""
    path = tmp_path / "vit.pth"
    torch.save(build(readout="cls").backbone.state_dict(), path)
    assert normalization_of(load_checkpoint(path)) == (IMAGENET_MEAN, IMAGENET_STD)
    torch.save(build(readout="cls", pre_norm=True, quick_gelu=True).backbone.state_dict(), path)
    with caplog.at_level(logging.INFO):
        assert normalization_of(load_checkpoint(path)) == (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)
    assert "no config.json next to it; its images are taken as normalised like OpenAI's" in caplog.text
    assert not load_encoder(path).config.quick_gelu
    assert load_encoder(path, quick_gelu=True).config.quick_gelu
    images = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.25]}
    published = {"architecture": "vit_base_patch32_clip_quickgelu_224", "pretrained_cfg": images}
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert normalization_of(load_checkpoint(path)) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.25))
    assert load_encoder(path).config.quick_gelu
    (tmp_path / "config.json").write_text(json.dumps({**published, "architecture": "vit_base_patch16_224"}))
    with pytest.raises(CheckpointError, match=rf"but {re.escape(str(path))} says: with GELU"):
        load_encoder(path, quick_gelu=True)
    others = ({"model_type": "of another library"}, [1], *({"pretrained_cfg": x, "architecture": ""} for x in (3, "x")))
    for text in ("no JSON", *map(json.dumps, others)):
        (tmp_path / "config.json").write_text(text)
        assert normalization_of(load_checkpoint(path)) == (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"arch": "vit_tiny"}, r"arch 'vit_micro' in the checkpoint, 'vit_tiny' asked for\. Give the same"),
        ({"num_slots": 8, "key_dim": 3}, r"num_slots 6 in the checkpoint, 8 asked for; key_dim 5 .*, 3 asked for\."),
        ({"readout": "cls"}, r"readout 'sparo' in the checkpoint, 'cls' asked for"),
    ],
)
def test_resuming_another_model_is_refused_with_what_differs(changed: dict[str, Any], message: str) -> None:
    config = build(**SPARO).config
    check_same_model({"encoder": encoder_description(config)}, config, "checkpoint.pth")
    with pytest.raises(CheckpointError, match=rf"^run/checkpoint\.pth holds another model: {message}") as caught:
        check_same_model({"encoder": encoder_description(config)}, replace(config, **changed), "run/checkpoint.pth")
    unchanged = asdict(config).keys() - changed.keys()
    assert not any(re.search(rf"\b{name}\b", str(caught.value)) for name in unchanged)


def test_resuming_foreign_weights_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"does not say how its encoder was built.*another --output_dir"):
        check_same_model({"student": {}}, EncoderConfig(), "vit.pth")


# The keys that entries.py lists.


def keys_in_the_list() -> set[str]:
    lines = re.findall(r"^    (\w+(?:, \w+)*)  +\S", str(entries.__doc__), flags=re.MULTILINE)
    return {key for line in lines for key in line.split(", ")}


@pytest.mark.parametrize("name", ["dino", "clip", "oc_clip"])
def test_the_list_of_keys_names_all_that_an_objective_writes(name: str) -> None:
    """The bug: OC-CLIP's own entry and its counts were missing."""
    pytest.importorskip("open_clip" if name != "dino" else "torch")
    module = importlib.import_module(f"dino_sparo.{name}.train")
    (objective,) = (
        kind
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, Objective) and kind.__module__ == module.__name__
    )
    written = {*objective.counters, objective.score_name, f"num_{objective.noun}s"}
    assert written | {getattr(objective, "model_key", "encoder")} <= keys_in_the_list()


@pytest.mark.parametrize("command", ["train", pytest.param("train-oc-clip", marks=pytest.mark.slow)])
def test_the_list_of_keys_names_all_that_a_checkpoint_holds(tmp_path: Path, command: str) -> None:
    run_command(command, options(tmp_path, command, max_steps=1))
    assert load_checkpoint(tmp_path / "checkpoint.pth").keys() <= keys_in_the_list()

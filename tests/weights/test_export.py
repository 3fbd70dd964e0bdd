"""Exports: equal outputs wherever they are read, a record of where they come from, and clear refusals."""

import ast
import contextlib
import functools
import hashlib
import importlib
import json
import logging
import os
import re
import subprocess
import sys
import sysconfig
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import small_models
import timm
import torch
from PIL import Image
from runs import assert_same_state
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from small_models import MEAN, SPARO, STD, save_encoder
from timm.models.vision_transformer import VisionTransformer

from dino_sparo import CheckpointError, Encoder, EvalTransform, load_checkpoint, load_encoder
from dino_sparo.__main__ import run as run_command
from dino_sparo.evaluation.encoders import trained_encoder
from dino_sparo.models.architectures import CROSS_ATTENTION
from dino_sparo.runtime.faults import MissingPackageError, UserError
from dino_sparo.runtime.files import file_sha256
from dino_sparo.weights import file as weights_file
from dino_sparo.weights.entries import encoder_description, normalization_of
from dino_sparo.weights.export import export
from dino_sparo.weights.folder import save_checkpoint
from dino_sparo.weights.huggingface import modeling_code

ROOT = Path(__file__).resolve().parents[2]
READOUTS: list[dict[str, Any]] = [SPARO, {"readout": "cls"}, {"readout": "gap"}]


def build(seed: int = 0, **settings: Any) -> Encoder:
    encoder = small_models.build(seed, **settings)
    with torch.no_grad():  # as after training: no bias is zero and no LayerNorm the identity
        for parameter in encoder.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return encoder


def images(count: int = 3, size: int = 24) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(11))


# Safetensors.


@pytest.mark.parametrize("format", ["safetensors", "huggingface"])
def test_an_export_gives_the_same_encoder(tmp_path: Path, format: str) -> None:
    encoder = build(**SPARO)
    written = export(save_encoder(tmp_path, encoder), tmp_path / "deep" / "vit.v1", format=format)
    if format == "safetensors":
        assert sorted(path.name for path in written.parent.iterdir()) == ["vit.v1.json", "vit.v1.safetensors"]
        assert load_file(written).keys() == encoder.state_dict().keys()
    read = load_encoder(written)
    assert read.config == encoder.config
    assert not read.training
    assert torch.equal(read(images()), encoder(images()))


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_all_that_the_umask_allows_may_read_a_checkpoint_and_an_export(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        export(save_encoder(tmp_path, build(readout="cls")), tmp_path / "out", format="huggingface")
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(path.name for path in files) == sorted([*HUGGINGFACE_FILES, "checkpoint.pth"])
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == {path.name: oct(mode) for path in files}


def test_the_json_says_how_it_was_built_and_where_it_comes_from(tmp_path: Path) -> None:
    encoder = build(**SPARO)
    checkpoint = save_encoder(tmp_path, encoder)
    text = export(checkpoint, tmp_path / "out", "student").with_suffix(".json").read_text()
    assert text.startswith('{\n  "encoder": {\n    "arch": "vit_micro",\n'), "not indented for human readers"
    said = json.loads(text)
    assert said["encoder"] == {**asdict(encoder.config), "mean": list(MEAN), "std": list(STD)}
    assert (said["epoch"], said["step"], said["checkpoint_key"]) == (5, 35, "student")
    assert said["checkpoint"] == "checkpoint.pth"
    assert said["sha256"] == hashlib.sha256(checkpoint.read_bytes()).hexdigest()
    assert said["versions"]["torch"] == str(torch.__version__)


def test_an_export_is_evaluated_like_its_checkpoint(tmp_path: Path) -> None:
    checkpoint = save_encoder(tmp_path, build(**SPARO))
    exported = export(checkpoint, tmp_path / "out")
    assert normalization_of(load_checkpoint(exported)) == (MEAN, STD)
    ours, theirs = trained_encoder(str(exported)), trained_encoder(str(checkpoint))
    assert torch.equal(ours.encoder(images()), theirs.encoder(images()))
    assert (ours.mean, ours.std, ours.record["epoch"]) == (theirs.mean, theirs.std, 5)
    assert ours.record["checkpoint_key"] == "teacher"
    # An export holds one network: teacher is what is asked for by default, so that a student's opens too.
    for which in ("student", "ema"):
        with pytest.raises(CheckpointError, match=f"has no '{which}'; it has teacher"):
            load_encoder(exported, which)
    student = export(checkpoint, tmp_path / "student", "student")
    assert torch.equal(load_encoder(student)(images()), load_encoder(checkpoint, "student")(images()))


def test_an_export_is_exported_again_but_not_onto_itself(tmp_path: Path) -> None:
    checkpoint = save_encoder(tmp_path, build(**SPARO))
    once = export(checkpoint, tmp_path / "out", "student")
    with pytest.raises(UserError, match=r"out\.safetensors is the exported file itself; give another path"):
        export(once, tmp_path / "out.safetensors", overwrite=True)
    twice = export(once, tmp_path / "twice")
    assert_same_state(load_file(twice), load_file(once))
    said, again = (json.loads(path.with_suffix(".json").read_text()) for path in (once, twice))
    assert (again["checkpoint_key"], again["epoch"], again["encoder"]) == ("student", 5, said["encoder"])


@pytest.mark.parametrize("settings", READOUTS, ids=lambda settings: settings["readout"])
def test_another_image_size_is_stored_and_changes_no_output_at_it(tmp_path: Path, settings: dict[str, Any]) -> None:
    encoder = build(**settings)
    exported = load_encoder(export(save_encoder(tmp_path, encoder), tmp_path / "out", img_size=40))
    assert exported.config.img_size == 40
    assert exported.backbone.pos_embed.shape[1] == 1 + 5 * 5
    torch.testing.assert_close(exported(images(size=40)), encoder(images(size=40)), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"img_size": 41}, r"img_size=41 px is not a multiple of patch_size=8 px; .* 40"),
        # The bug: --quick_gelu gave an encoder with other outputs, without a word.
        ({"quick_gelu": True}, r"--quick_gelu is for weights that do not say .*, but .* says: with GELU"),
        ({"format": "timm"}, "timm has no 'sparo' read-out, .*exported as huggingface, safetensors or onnx"),
        ({"format": "tflite"}, r"unknown export format 'tflite'; choose one of \['huggingface', 'onnx'"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_nothing_is_written(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        export(save_encoder(tmp_path, build(**SPARO)), tmp_path / "out", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pth"]


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    exported = export(save_encoder(tmp_path, build(**SPARO)), tmp_path / "out")
    description = exported.with_suffix(".json")
    text = description.read_text()
    description.write_text("[1]")
    with pytest.raises(CheckpointError, match=r"out\.json does not describe the weights next to it"):
        load_encoder(exported)
    description.write_text(text.replace('"epoch": 5', '"epoch": 6'))
    with pytest.raises(CheckpointError, match=r"out\.json does not belong to out\.safetensors; export both again"):
        load_encoder(exported)
    description.write_text(text)
    exported.write_bytes(exported.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"out\.safetensors is truncated or not a safetensors file"):
        load_encoder(exported)


def test_a_full_disk_leaves_the_old_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = save_encoder(tmp_path, build(readout="cls"))
    exported = export(checkpoint, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    message = rf"^could not write {exported} \(No space left.*\); free some space or"
    for error in (OSError, SafetensorError):
        full = mock.Mock(side_effect=error("No space left on device"))
        monkeypatch.setattr(weights_file, "save_file", full)
        with pytest.raises(CheckpointError, match=message):
            export(checkpoint, exported, overwrite=True)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def kill_at(number: int, patch: pytest.MonkeyPatch) -> None:
    """From the `number`-th renaming or deletion on, no file is touched: what a kill leaves behind."""
    calls = iter(range(number))

    def until_killed(operation: Any) -> Any:
        def call(*args: Any, **options: Any) -> None:
            if next(calls, None) is None:
                raise KeyboardInterrupt
            operation(*args, **options)

        return call

    for name in ("replace", "unlink"):
        patch.setattr(os, name, until_killed(getattr(os, name)))


@pytest.mark.slow
@pytest.mark.parametrize("format", ["safetensors", "timm", "huggingface"])
def test_no_kill_leaves_weights_beside_a_description_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    """The bug: a kill between the files left new weights with the old mean and standard deviation."""
    old, new = build(readout="cls"), build(seed=1, readout="cls")
    sources = {mean: tmp_path / f"{mean}.pth" for mean in (0.1, 0.7)}
    for (mean, path), encoder in zip(sources.items(), (old, new), strict=True):
        description = encoder_description(encoder.config, (mean,) * 3, STD)
        save_checkpoint({"teacher": encoder.state_dict(), "encoder": description}, path)
    read_outs, is_whole = set(), False
    for number in range(12):
        out = export(sources[0.1], tmp_path / f"out{number}", format=format)
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            kill_at(number, patch)
            export(sources[0.7], tmp_path / f"out{number}", format=format, overwrite=True)
            is_whole = True
        weights = out / "model.safetensors" if out.is_dir() else out
        if not weights.exists():
            read_outs.add("none")
            continue
        texts = [path.read_text() for path in (out.glob("*.json") if out.is_dir() else [out.with_suffix(".json")])]
        cards = [path.read_text() for path in out.glob("README.md")] if out.is_dir() else []
        means = {mean for mean in sources if any(f"{mean},\n" in text for text in texts)}
        prefixes = ("", "backbone.", "encoder.backbone.")
        name = next(name for name in load_file(weights) if name in [f"{prefix}norm.weight" for prefix in prefixes])
        expected = next(
            mean
            for mean, encoder in ((0.1, old), (0.7, new))
            if torch.equal(load_file(weights)[name], encoder.backbone.state_dict()["norm.weight"])
        )
        assert means == {expected}, f"killed at operation {number}"
        assert all(f"{expected}.pth, SHA-256" in card for card in cards)
        read_outs.add(expected)
    assert is_whole
    assert read_outs == {"none", 0.1, 0.7}


def test_every_flipped_digit_of_an_export_is_detected(tmp_path: Path) -> None:
    """The bug: another mean or image size was read from the JSON without a word."""
    exported = export(save_encoder(tmp_path, build(readout="cls")), tmp_path / "out")
    header_bytes = 8 + int.from_bytes(exported.read_bytes()[:8], "little")
    for path, end in ((exported.with_suffix(".json"), None), (exported, header_bytes)):
        content = path.read_bytes()
        digits = [place for place in range(8, len(content[:end])) if content[place] in b"0123456789"]
        assert len(digits) > 50
        for place in digits[:: 1 + len(digits) // 20]:
            flipped = bytearray(content)
            flipped[place] ^= 1
            path.write_bytes(flipped)
            with pytest.raises(CheckpointError, match=r"damaged|does not (belong to|describe)|not a safetensors file"):
                load_checkpoint(exported)
        path.write_bytes(content)
    exported.with_suffix(".json").unlink()
    assert normalization_of(load_checkpoint(exported)) == (MEAN, STD)


# timm.


def test_timm_loads_an_export_by_its_own_command(tmp_path: Path) -> None:
    encoder = build(arch="vit_tiny", patch_size=16, img_size=224, readout="cls")
    exported = export(save_encoder(tmp_path, encoder), tmp_path / "out", format="timm")
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, checkpoint_path=str(exported)).eval()
    torch.testing.assert_close(model(images(2, 224)), encoder(images(2, 224)), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {},  # vit_micro, for which timm has no name
        {"pre_norm": True},
        {"quick_gelu": True, "pre_norm": True},
        {"quick_gelu": True, "arch": "vit_tiny"},
    ],
    ids=str,
)
def test_vanilla_encoders_are_timms_vit_and_are_read_back(tmp_path: Path, settings: dict[str, Any]) -> None:
    encoder = build(readout="cls", **settings)
    exported = export(save_encoder(tmp_path, encoder), tmp_path / "out", format="timm")
    said = json.loads(exported.with_suffix(".json").read_text())["timm"]
    is_named = "." not in said["architecture"]
    make = functools.partial(timm.create_model, said["architecture"]) if is_named else VisionTransformer
    model = make(**said["model_args"]).eval()
    model.load_state_dict(load_file(exported), strict=True)
    torch.testing.assert_close(model(images()), encoder(images()), rtol=0, atol=1e-5)
    torch.testing.assert_close(model.forward_features(images()), encoder.backbone(images()), rtol=0, atol=1e-5)
    assert (said["pretrained_cfg"]["mean"], said["pretrained_cfg"]["input_size"]) == (list(MEAN), [3, 24, 24])
    assert torch.equal(load_encoder(exported)(images()), encoder(images()))
    if not settings:  # without a description, the shapes say how it was built
        save_file(load_file(exported), tmp_path / "foreign.safetensors")
        assert torch.equal(load_encoder(tmp_path / "foreign.safetensors")(images()), encoder(images()))


# Hugging Face.

SIZES_OF_CODES = {"num_slots": 5, "slot_dim": 3, "key_dim": 2, "num_codes": 7, "code_dim": 16}

HUGGINGFACE_FILES = ["README.md", "config.json", "model.safetensors", "modeling_sparo.py"]

# Runs in an environment of its own, where neither this package nor jaxtyping is installed.
ELSEWHERE = """
import importlib.util, sys, torch
from transformers import AutoModel

assert not any(map(importlib.util.find_spec, ("dino_sparo", "jaxtyping")))
images, *folders = sys.argv[1:]
for folder in folders:
    model, report = AutoModel.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        output = model.eval()(torch.load(images))
    torch.save(dict(output.items()), folder + ".pt")
"""


@pytest.fixture
def another_python(tmp_path: Path) -> Path:
    """Python of an environment that has all packages of this one except dino_sparo and jaxtyping."""
    folder = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not re.match(r"dino_sparo|jaxtyping|__editable__|_.*\.pth", path.name):
            (packages / path.name).symlink_to(path)
    return folder / "bin" / "python"


@pytest.mark.slow
def test_transformers_gives_the_same_outputs_where_this_package_is_not_installed(
    tmp_path: Path, another_python: Path
) -> None:
    coded = ("gap_then_norm", "fdt", "fdt_raw", *CROSS_ATTENTION)
    others = [{"readout": "cls", "quick_gelu": True}, {"readout": "gap", "pre_norm": True}]
    encoders = {
        tmp_path / f"export_{settings['readout']}": build(**settings)
        for settings in [SPARO, *others, *({**SIZES_OF_CODES, "readout": readout} for readout in coded)]
    }
    for folder, encoder in encoders.items():
        export(save_encoder(tmp_path, encoder), folder, format="huggingface")
        assert sorted(path.name for path in folder.iterdir()) == HUGGINGFACE_FILES
    torch.save(images(), tmp_path / "images.pt")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    words = [another_python, "-c", ELSEWHERE, tmp_path / "images.pt", *encoders]
    subprocess.run(words, check=True, cwd=tmp_path, env=environment)
    for folder, encoder in encoders.items():
        with torch.no_grad():
            output = encoder.readout_output(images())
            expected = {
                "last_hidden_state": encoder.backbone(images()),
                "pooler_output": encoder(images()),
                "slots": output.slots,
                "slot_attentions": output.attention,
            }
        found = torch.load(f"{folder}.pt")
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)


def test_a_folder_that_transformers_saved_again_is_read_and_prepares_the_same_images(tmp_path: Path) -> None:
    from transformers import AutoImageProcessor, AutoModel  # takes a second

    encoder = build(**SPARO)
    folder, again = export(save_encoder(tmp_path, encoder), tmp_path / "out", format="huggingface"), tmp_path / "again"
    AutoModel.from_pretrained(folder, trust_remote_code=True).save_pretrained(again)
    assert torch.equal(load_encoder(again)(images()), encoder(images()))
    pixels = np.random.default_rng(7).integers(0, 256, (97, 64, 3), dtype=np.uint8)
    theirs = AutoImageProcessor.from_pretrained(again)(images=pixels, return_tensors="pt")["pixel_values"]
    expected = EvalTransform(24, MEAN, STD)(Image.fromarray(pixels))[0][None]
    torch.testing.assert_close(theirs, expected, rtol=0, atol=1e-5)


def test_the_modeling_code_defines_every_name_once_and_imports_nothing_of_this_package() -> None:
    code = modeling_code()
    statements = ast.parse(code).body
    names = [node.name for node in statements if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert sorted(names) == sorted(set(names))
    modules = {node.module for node in statements if isinstance(node, ast.ImportFrom)}
    assert not {module.split(".")[0] for module in modules if module} & {"dino_sparo", "jaxtyping"}
    assert not re.search(r"^ +(from|import) dino_sparo", code, re.MULTILINE)


def test_the_model_card_shows_the_scores_beside_the_checkpoint_and_a_snippet_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save_encoder(tmp_path, build(**SPARO))
    recipe = {"lr": 0.004, "epochs": 7, "data_path": "/data/somebody/imagenet/train", "output_dir": "/data/somebody"}
    save_checkpoint({**load_checkpoint(checkpoint), "args": recipe, "dino_loss": {}, "num_images": 99}, checkpoint)
    own = {"encoder": {"sha256": file_sha256(checkpoint)}, "images": {"data_path": "/data/somebody/cifar10"}}
    others = [
        {"encoder": {**own["encoder"], **changed}}
        for changed in ({"sha256": 64 * "0"}, {"checkpoint_key": "student"}, {"slots": {"slots": [1]}})
    ]
    best = {"headline": [{"name": "20-NN", "value": 99.0}]}
    results: dict[str, Any] = {
        "knn_checkpoint_cifar10": {
            **own,
            "headline": [{"name": "20-NN", "value": 61.25}, {"name": "10-NN", "value": 60.5}],
        },
        "linear": {**own, "headline": [{"name": "top-1", "value": 70.5}], "results": []},
        "knn_of_other_weights": {**own, **others[0], **best},
        "knn_of_the_student": {**own, **others[1], **best},
        "knn_of_some_slots": {**own, **others[2], **best},
        "zero_shot_of_both_towers": {"model": own["encoder"], **best},
        "probe_list": [],
    }
    for name, result in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    (tmp_path / "zero_shot_torn.json").write_text("{")
    folder = export(checkpoint, tmp_path / "out", format="huggingface")
    card = (folder / "README.md").read_text()
    assert "| knn_checkpoint_cifar10 | 20-NN 61.25 %, 10-NN 60.50 % on cifar10 |" in card
    assert "| linear | top-1 70.50 % on cifar10 |" in card
    assert "99.0" not in card
    facts = {"objective": "DINO", "data": "imagenet/train", "images": 99, "epochs": 5, "options": "epochs=7 lr=0.004"}
    for name, value in facts.items():
        assert f"| {name} | {value} |" in card
    assert "somebody" not in card
    Image.new("RGB", (60, 50)).save(tmp_path / "photo.jpg")
    snippet = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[0].replace("'out'", repr(str(folder)))
    result: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    exec(snippet, result)
    assert result["output"].slots.shape == (1, *build(**SPARO).readout_output(images()).slots.shape[1:])


def test_no_name_of_a_folder_becomes_code_or_markup_in_the_model_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = 'x"); import os; os.abort() #`<h1><script>|[a](b)\n## no heading\udcff'
    data = "\n".join(["<img src=x>", "| a |"])
    checkpoint = save_encoder(tmp_path, build(**SPARO))
    save_checkpoint({**load_checkpoint(checkpoint), "args": {"data_path": data}}, checkpoint)
    card = (export(checkpoint, name, format="huggingface") / "README.md").read_text()
    first, second = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    names = [node.value for node in ast.walk(ast.parse(first + second)) if isinstance(node, ast.Constant)]
    assert names.count(name) == 3
    assert not {node.id for node in ast.walk(ast.parse(first)) if isinstance(node, ast.Name)} & {"os"}
    outside = re.sub(r"```.*?```", "", card, flags=re.DOTALL)
    for text in ("<script>", "<img", "\n## no", "[a](b)", "| a |"):
        assert text not in outside
    assert r"&lt;h1&gt;&lt;script&gt;\|\[a\](b) ## no heading" in outside


def test_only_equal_files_are_replaced_unless_asked(tmp_path: Path) -> None:
    """The bug: an export overwrote a README.md, a config.json and weights that it had not written."""
    checkpoint, out = save_encoder(tmp_path, build(readout="cls")), tmp_path / "out"
    export_again = functools.partial(export, checkpoint, out, format="huggingface")
    export_again()
    assert export_again() == out
    contents = {file: file.read_bytes() for file in out.iterdir()}
    for file, content in contents.items():
        file.write_bytes(b"mine")
        with pytest.raises(UserError, match=rf"{re.escape(str(file))} exists and is another file; .*--overwrite"):
            export_again()
        assert {each: each.read_bytes() for each in out.iterdir()} == {**contents, file: b"mine"}
        file.write_bytes(content)
    for file in contents:
        file.write_bytes(b"mine")
    export_again(overwrite=True)
    assert b"mine" not in [file.read_bytes() for file in out.iterdir()]
    assert export_again() == out, "all files are equal to those of another export"


def test_a_missing_file_is_not_looked_up_on_the_hub_and_a_name_of_no_repository_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refuse = mock.Mock(side_effect=OSError("401 Client Error.\nMake sure that you are logged in."))
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(CheckpointError, match=r"no checkpoint at somebody/nothing, and .* hub: 401 Client Error\.$"):
        load_encoder("somebody/nothing")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    (tmp_path / "runs").mkdir()
    for name in ("runs/checkpoint.pth", "runs/typo"):
        with pytest.raises(CheckpointError, match=rf"no checkpoint at {re.escape(name)}; give the path"):
            load_encoder(name)


@pytest.mark.parametrize("img_size", [24, 224])
def test_transformers_prepares_images_of_every_size_and_mode_as_evaluation_does(tmp_path: Path, img_size: int) -> None:
    from transformers import AutoImageProcessor  # takes a second

    checkpoint = save_encoder(tmp_path, build(readout="cls"))
    folder = export(checkpoint, tmp_path / "out", format="huggingface", img_size=img_size)
    rng, ours = np.random.default_rng(7), EvalTransform(img_size, MEAN, STD)
    sizes = [(width, height) for width in range(64, 257, 21) for height in (64, 97, 255)]
    for options in ({}, {"trust_remote_code": True}):
        processor = AutoImageProcessor.from_pretrained(folder, **options)
        for width, height in sizes:
            image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
            theirs = processor(images=image, return_tensors="pt")["pixel_values"]
            torch.testing.assert_close(theirs, ours(image)[0][None], rtol=0, atol=1e-5)
    # With our code alone: without it, transformers takes RGB images only.
    modes = [image.convert(mode) for mode in ("L", "LA", "P", "RGBA", "1", "CMYK")]
    theirs = processor(images=modes, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(theirs, ours.batch(modes), rtol=0, atol=1e-5)


def test_transformers_prepares_images_of_five_channels_as_evaluation_does(tmp_path: Path) -> None:
    from transformers import AutoImageProcessor  # takes a second

    mean, std = (0.1, 0.2, 0.3, 0.4, 0.5), (0.2, 0.3, 0.2, 0.3, 0.2)
    encoder = build(readout="cls", in_chans=5)
    content = {"teacher": encoder.state_dict(), "encoder": encoder_description(encoder.config, mean, std)}
    save_checkpoint(content, tmp_path / "checkpoint.pth")
    folder = export(tmp_path / "checkpoint.pth", tmp_path / "out", format="huggingface")
    processor = AutoImageProcessor.from_pretrained(folder)
    for height, width in ((40, 61), (64, 97), (30, 30)):
        # Away from 0 and 255, at which evaluation cuts off what overshoots at an edge.
        levels = np.random.default_rng(7).integers(60, 196, (5, height, width), dtype=np.uint8)
        theirs = processor(torch.from_numpy(levels).float(), return_tensors="pt")["pixel_values"]
        torch.testing.assert_close(theirs, EvalTransform(24, mean, std).batch(levels), rtol=0, atol=0.02)


# ONNX.


def onnx_session(path: Path) -> Any:
    runtime = pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")
    return runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.mark.slow
@pytest.mark.parametrize("settings", [*READOUTS, {"readout": "gap", "pre_norm": True}], ids=str)
def test_onnx_gives_the_same_encoding_and_attention_for_any_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any]
) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="the extra `export` is not installed")
    encoder = build(**settings)
    path = tmp_path / "out.onnx"
    run_command("export", [str(save_encoder(tmp_path, encoder)), str(path), "--format", "onnx", "--img_size", "40"])
    ours = [record for record in caplog.records if record.levelno >= logging.INFO]
    assert {record.name.split(".")[0] for record in ours} == {"dino_sparo"}, "the exporter's own lines drown ours"
    session = onnx_session(path)
    names = ["encoding", "attention"][: 1 + (settings["readout"] == "sparo")]
    assert [output.name for output in session.get_outputs()] == names
    for count in (1, 5):
        batch = images(count, 40)
        found = dict(zip(names, session.run(None, {"images": batch.numpy()}), strict=True))
        expected = encoder.readout_output(batch)
        np.testing.assert_allclose(found["encoding"], expected.slots.flatten(1).detach(), rtol=0, atol=1e-4)
        if "attention" in found:
            np.testing.assert_allclose(found["attention"], expected.attention.detach(), rtol=0, atol=1e-4)
    said = json.loads((tmp_path / "out.onnx.json").read_text())
    assert said["onnx"] == {"inputs": {"images": ["batch", 3, 40, 40]}, "outputs": names}
    assert said["encoder"]["img_size"] == 40


@pytest.mark.slow
def test_a_read_out_that_onnx_takes_in_twos_only_is_refused(tmp_path: Path) -> None:
    """The bug: the file was written, and refused every other number of images."""
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason="the extra `export` is not installed")
    checkpoint = save_encoder(tmp_path, build(readout="fdt_raw", num_codes=7, code_dim=16))
    with pytest.raises(ValueError, match="cannot write 'fdt_raw' for any number of images, only for 2"):
        export(checkpoint, tmp_path / "out", format="onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pth"]


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find("json"))
    with pytest.raises(MissingPackageError, match=rf"need the package {package}; .*pip install 'dino_sparo\[export\]'"):
        export(save_encoder(tmp_path, build(**SPARO)), tmp_path / "out", format="onnx")


# The command.


def test_the_command_writes_what_it_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    encoder = build(readout="cls")
    checkpoint = save_encoder(tmp_path, encoder)
    with caplog.at_level(logging.INFO):
        run_command(
            "export", [str(checkpoint), str(tmp_path / "out"), "--checkpoint_key", "student", "--img_size", "40"]
        )
    assert "student of" in caplog.text
    assert load_encoder(tmp_path / "out.safetensors").config.img_size == 40
    torch.save(
        {"backbone." + name: value for name, value in encoder.backbone.state_dict().items()}, tmp_path / "raw.pth"
    )
    words = ["--format", "timm", "--arch", "vit_micro", "--patch_size", "8"]
    run_command("export", [str(tmp_path / "raw.pth"), str(tmp_path / "timm"), *words])
    assert torch.equal(load_encoder(tmp_path / "timm.safetensors")(images()), encoder(images()))
    said = json.loads((tmp_path / "timm.json").read_text())
    assert (said["epoch"], said["step"], said["checkpoint_key"]) == (None, None, None)  # raw weights do not say


# torch.hub.


def test_the_hub_loads_checkpoints_and_exports(tmp_path: Path) -> None:
    encoder = build(**SPARO)
    checkpoint = save_encoder(tmp_path, encoder)
    student = load_encoder(checkpoint, "student")
    for path, which, expected in [
        (checkpoint, "teacher", encoder),
        (checkpoint, "student", student),
        (export(checkpoint, tmp_path / "out"), "teacher", encoder),
    ]:
        found = torch.hub.load(str(ROOT), "dino_sparo_encoder", str(path), which=which, source="local")
        assert torch.equal(found(images()), expected(images()))


def test_the_hub_builds_encoders_with_random_weights() -> None:
    found = torch.hub.load(
        str(ROOT), "encoder", arch="vit_micro", readout="gap", patch_size=8, img_size=24, source="local"
    )
    assert found(images()).shape == (3, 128)

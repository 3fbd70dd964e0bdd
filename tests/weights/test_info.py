"""`dino-sparo info`: what a checkpoint, export, embedding, cache or result is, and one line for anything else."""

from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from small_models import TINY

import dino_sparo
from dino_sparo.__main__ import run
from dino_sparo.runtime.files import read_record, write_record
from dino_sparo.weights.checkpoint import load_checkpoint
from dino_sparo.weights.export import export
from dino_sparo.weights.folder import save_checkpoint
from dino_sparo.weights.results import data_name

ONE_EPOCH = {**TINY, "local_crops_number": 0, "epochs": 1}


KNN = "knn_checkpoint_scenes-40-32"  # stem of the result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training, its k-NN with cached features, embeddings, and two exports."""
    folder = tmp_path_factory.mktemp("info")
    run = dino_sparo.train(output_dir=folder / "run", **ONE_EPOCH)
    evaluation = {"pretrained_weights": run.checkpoint, "data_path": "scenes:40:32", "num_workers": 0, "device": "cpu"}
    dino_sparo.knn(nb_knn=[3, 5], dump_features=folder / "features", **evaluation)
    dino_sparo.embed(output_dir=folder / "embeddings", what=["slots", "cls"], **evaluation)
    export(run.checkpoint, folder / "out")
    export(run.checkpoint, folder / "hub", format="huggingface")
    return folder


def info(path: object) -> dict[str, Any]:
    """Facts that the command returns."""
    return run("info", [str(path)])


def test_a_checkpoint_tells_its_training_and_its_scores(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = info(folder / "run" / "checkpoint.pth")
    assert info(folder / "run") == facts
    assert (facts["objective"], facts["epochs"], facts["steps"], facts["images"]) == ("DINO", "1 of 1", 3, 48)
    assert facts["encoder"] == "vit_micro/8 at 32 px, sparo (5 slots of 3, keys of 2, 1 slots per key)"
    assert facts["networks"] == ["teacher", "student"]
    changed = {name: value for name, value in ONE_EPOCH.items() if name not in ("data_path", "knn_freq")}
    assert facts["options"].items() >= changed.items()
    assert not {"lr", "readout", "data_path", "output_dir"} & facts["options"].keys()
    assert facts["scores"][KNN].startswith("3-NN ")
    printed = capsys.readouterr().out
    assert "damaged          no: the checksums fit\n" in printed
    assert "arch=vit_micro  patch_size=8" in printed


def test_data_without_a_name_are_no_reason_to_fail(folder: Path, tmp_path: Path) -> None:
    """The bug: an IndexError."""
    assert [data_name(path) for path in (".", "..", "/")] == ["", "", ""]
    content = load_checkpoint(folder / "run" / "checkpoint.pth")
    save_checkpoint({**content, "args": {**content["args"], "data_path": ".."}}, tmp_path / "checkpoint.pth")
    assert info(tmp_path)["data"] == ".."
    assert "data" not in info(export(tmp_path / "checkpoint.pth", tmp_path / "out"))


@pytest.mark.parametrize("name", ["out.safetensors", "hub"])
def test_an_export_tells_where_it_comes_from(folder: Path, name: str) -> None:
    facts = info(folder / name)
    assert (facts["kind"], facts["objective"], facts["data"]) == ("export", "DINO", "scenes:48:32")
    assert (facts["epochs"], facts["networks"], facts["options"]["lr"]) == ("1 of 1", "teacher", 0.0005)
    assert facts["scores"][KNN].startswith("3-NN ")


@pytest.mark.slow
def test_an_onnx_file_tells_where_it_comes_from(folder: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="ONNX exports")
    pytest.importorskip("onnxscript", reason="ONNX exports")
    file = export(folder / "run" / "checkpoint.pth", tmp_path / "out", format="onnx")
    facts = info(file)
    assert (facts["kind"], facts["objective"], facts["data"]) == ("export as ONNX", "DINO", "scenes:48:32")
    assert (facts["encoder"]["readout"], facts["outputs"]) == ("sparo", ["encoding", "attention"])
    assert facts["scores"][KNN].startswith("3-NN ")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(SystemExit):
        info(file)
    model = onnx.load_from_string(content)
    del model.metadata_props[:]
    onnx.save(model, file)
    with pytest.raises(SystemExit):
        info(file)


def test_the_demo_is_an_export() -> None:
    facts = info("demo")
    assert (facts["kind"], facts["epochs"], facts["data"]) == ("export", "7 of 7", "scenes:10000:48")


def test_embeddings_features_and_results_tell_their_encoder(folder: Path) -> None:
    embeddings, features = info(folder / "embeddings"), info(folder / "features")
    assert (embeddings["kind"], embeddings["images"], embeddings["complete"]) == ("embeddings", 40, "yes")
    assert embeddings["features"] == {"slots": "5x3", "cls": "128"}
    assert features["features"] == {"train": "40x15", "val": "40x15"}
    result = info(folder / "run" / f"{KNN}.json")
    assert result["kind"] == "result of an evaluation: weighted k-NN"
    assert result["scores"].startswith("3-NN ")
    for facts in (embeddings, features, result):
        assert facts["encoder"] == {
            "arch": "vit_micro",
            "patch_size": 8,
            "readout": "sparo",
            "img_size": 32,
            "in_chans": 3,
        }
        assert facts["data"] == "scenes:40:32"
        assert len(facts["weights"]["sha256"]) == 64


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("embeddings/cls.npy", damage, "cls.npy is missing, damaged"),
        ("embeddings/embedding.json", damage, "embedding.json is damaged"),
        ("features/features.json", damage, "features.json is damaged"),
        ("run/checkpoint.pth", damage, "checkpoint.pth is damaged"),
        ("out.safetensors", damage, "out.safetensors is damaged"),
        ("features/trainfeat.pth", truncate, "trainfeat.pth is missing, damaged or of another run"),
        ("embeddings/cls.npy", truncate, "cls.npy is missing, damaged"),
        ("embeddings/embedding.json", truncate, "embedding.json is damaged"),
        (f"run/{KNN}.json", truncate, "32.json is not valid JSON"),
        ("out.json", None, "is not a result of an evaluation"),
        ("nothing.pth", None, "no checkpoint at "),
        ("empty", Path.mkdir, "holds no checkpoint, export, embeddings or cached features"),
        ("text.txt", lambda path: path.write_text("hello"), "text.txt is truncated or not a checkpoint"),
        ("list.json", lambda path: path.write_text("[1]"), "list.json is not a JSON object"),
        ("odd.json", lambda path: path.write_text('{"encoder": {}, "headline": 1}'), "is not a result of this version"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_and_other_files_are_one_line(folder: Path, name: str, change: Any, message: str) -> None:
    path = folder / name
    before = path.read_bytes() if path.is_file() else None
    if change is not None:
        change(path)
    with refused(message):
        info(path.parent if path.parent.name in ("features", "embeddings") else path)
    if before is not None:
        path.write_bytes(before)


def test_an_embedding_that_is_not_complete_says_so(folder: Path) -> None:
    path = folder / "embeddings" / "embedding.json"
    before = path.read_text()
    write_record({**read_record(path), "complete": False}, path)
    assert info(path.parent)["complete"] == "no: run the same embed command again to resume"
    path.write_text(before)

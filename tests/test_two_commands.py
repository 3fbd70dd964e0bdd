"""Two commands that meet: what one command writes, another reads, resumes, moves or overwrites."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import pytest
import torch
from runs import assert_same_run, small_options
from small_models import TINY, words_of

from dino_sparo.__main__ import main
from dino_sparo.commands import parse_keywords
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.launch import shutdown
from dino_sparo.training.objective import EpochResult

RUN = {**TINY, "data_path": "scenes:32:32", "batch_size_per_gpu": 8, "precision": "fp32", "epochs": 2, "knn_freq": 1}
STEPS = 4  # of an epoch
DEVICE = ("--device", "cpu", "--num_workers", "0")
EVALUATED = "scenes:40:32"


class Said(NamedTuple):
    """Exit status of a command, and its words on the terminal."""

    status: int
    text: str

    @property
    def errors(self) -> list[str]:
        """The errors in the log, one line each."""
        return re.findall(r"^\d\d:\d\d:\d\d E .*$", self.text, flags=re.MULTILINE)


Say = Callable[..., Said]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Runs a command in this process; it must end with one of these statuses."""

    def call(*words: object, statuses: tuple[int, ...] = (0,)) -> Said:
        capsys.readouterr()
        status = status_of(*words)
        said = Said(status, "".join(capsys.readouterr()))
        assert status in statuses, said.text
        return said

    return call


def status_of(*words: object) -> int:
    try:
        main([str(word) for word in words])
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        shutdown()
    return 0


def train(folder: Path, **changes: object) -> None:
    assert status_of("train", *words_of({**RUN, "output_dir": folder, **changes})) == 0


def knn(weights: object, data: str = EVALUATED) -> tuple[object, ...]:
    return "knn", "--pretrained_weights", weights, "--data_path", data, *DEVICE


def results_in(folder: Path) -> dict[Path, dict[str, Any]]:
    """The results of `dino-sparo knn` in a folder and its subfolders."""
    records = {path: json.loads(path.read_text()) for path in folder.rglob("*.json")}
    return {path: record for path, record in records.items() if record.get("evaluation") == "weighted k-NN"}


def score(record: dict[str, Any]) -> str:
    """The 20-NN accuracy as commands print it."""
    return next(f"{row['top1']:.2f} %" for row in record["results"] if row["k"] == 20)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def one_epoch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped after the first of two epochs, with a best checkpoint."""
    folder = tmp_path_factory.mktemp("one_epoch") / "run"
    train(folder, max_steps=STEPS)
    return folder


@pytest.fixture
def run(one_epoch: Path, tmp_path: Path) -> Path:
    """A copy of `one_epoch` that a test may change."""
    return Path(shutil.copytree(one_epoch, tmp_path / "run"))


def write_images(folder: Path) -> Path:
    """Noise of two classes, ten images in each of two splits."""
    rng = np.random.default_rng(0)
    for number in range(20):
        path = folder / ("train", "val")[number % 2] / "ab"[number // 2 % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(rng.integers(256, size=(32, 35, 3), dtype=np.uint8)).save(path)
    return folder


# Whose score is it?


def test_a_card_and_info_show_the_scores_of_their_own_weights_alone(run: Path, tmp_path: Path, say: Say) -> None:
    say(*knn(run / "checkpoint.pth"))
    (early,) = results_in(run).values()
    train(run)
    say("export", run / "checkpoint.pth", tmp_path / "early", "--format", "huggingface")
    assert score(early) not in (tmp_path / "early" / "README.md").read_text()
    assert score(early) not in say("info", run).text

    status_of(*knn(run / "checkpoint.pth"))
    assert early in results_in(run).values(), "the result of other weights was overwritten"
    say(*knn(run / "checkpoint.pth"), "--overwrite")
    (late,) = (record for record in results_in(run).values() if record["encoder"]["epoch"] == 2)
    say("export", run / "checkpoint.pth", tmp_path / "late", "--format", "huggingface")
    card = (tmp_path / "late" / "README.md").read_text()
    for text in (card, say("info", run).text):
        assert f"20-NN {score(late)}" in text
    assert EVALUATED in card


def test_two_exports_side_by_side_have_a_result_each(run: Path, tmp_path: Path, say: Say) -> None:
    folders = [tmp_path / network for network in ("teacher", "student")]
    for folder in folders:
        export = ("export", run / "checkpoint.pth", folder, "--format", "huggingface")
        say(*export, "--checkpoint_key", folder.name)
        say(*knn(folder))
    found = {record["encoder"]["sha256"]: path.parent for path, record in results_in(tmp_path).items()}
    assert [found.get(sha256(folder / "model.safetensors")) for folder in folders] == folders


def test_a_result_is_repeated_but_not_overwritten_by_another_protocol_unasked(run: Path, say: Say) -> None:
    say(*knn(run / "checkpoint.pth"))
    (path,) = results_in(run)
    before = path.read_bytes()
    say(*knn(run / "checkpoint.pth"))
    assert "--overwrite" in say(*knn(run / "checkpoint.pth"), "--nb_knn", "3", statuses=(1,)).errors[0]
    assert path.read_bytes() == before
    say(*knn(run / "checkpoint.pth"), "--nb_knn", "3", "--overwrite")
    assert [row["k"] for row in json.loads(path.read_text())["results"]] == [3]


def test_another_checkpoint_network_slots_data_or_file_of_the_same_stem_has_a_result_of_its_own(
    run: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    say("export", "run/checkpoint.pth", "run/checkpoint")
    say("export", "run/checkpoint.pth", "run/student", "--checkpoint_key", "student")
    for number in (0, 1):
        (run / f"mask{number}.json").write_text(json.dumps({"slots": [number]}))
    names = {
        (): "knn_checkpoint_scenes-40-32.json",
        ("--checkpoint_key", "student"): "knn_checkpoint_student_scenes-40-32.json",
        ("--slots", "0,2"): "knn_checkpoint_scenes-40-32_slots_0-2.json",
        ("--slots", "run/mask0.json"): "knn_checkpoint_scenes-40-32_slots_mask0.json",
        ("--slots", "run/mask1.json"): "knn_checkpoint_scenes-40-32_slots_mask1.json",
        ("--pretrained_weights", "run/checkpoint.safetensors"): "knn_checkpoint.safetensors_scenes-40-32.json",
        ("--pretrained_weights", "run/student.safetensors"): "knn_student.safetensors_student_scenes-40-32.json",
        ("--pretrained_weights", "run/checkpoint_best.pth"): "knn_checkpoint_best_scenes-40-32.json",
        ("--data_path", "scenes:24:32"): "knn_checkpoint_scenes-24-32.json",
    }
    for words in names:
        say(*knn("run/checkpoint.pth"), *words)
    found = results_in(run)
    assert {path.name for path in found} == set(names.values())
    assert found[run / "knn_checkpoint_scenes-24-32.json"]["images"]["data_path"] == "scenes:24:32"


def test_another_spelling_of_a_path_is_the_same_data(run: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_images(run.parent / "images").parent)
    for data in ("images", "images/", "./images", "run/../images", str(Path("images").resolve())):
        say(*knn("run/checkpoint.pth", data))
    assert len(results_in(run)) == 1


def test_the_card_of_an_export_at_another_size_states_the_size_of_its_scores(run: Path, say: Say) -> None:
    say(*knn(run / "checkpoint.pth"))
    say("export", run / "checkpoint.pth", run / "ex", "--format", "huggingface", "--img_size", 64)
    assert f"on {EVALUATED} at image size 32 |" in (run / "ex" / "README.md").read_text()


# What lies there already?


def test_features_of_others_are_not_overwritten_unasked(run: Path, say: Say) -> None:
    (run / "f").mkdir()
    (run / "f" / "trainfeat.pth").write_text("by facebookresearch/dino")
    dump = (*knn(run / "checkpoint.pth"), "--dump_features", run / "f")
    assert "--overwrite" in say(*dump, statuses=(1,)).errors[0]
    assert (run / "f" / "trainfeat.pth").read_text() == "by facebookresearch/dino"
    say(*dump, "--overwrite")
    say(*dump)
    for changes in (("--checkpoint_key", "student"), ("--n_last_blocks", 2), ("--img_size", 16)):
        other = (*dump, *changes, "--output_dir", run / "other")
        assert "--overwrite" in say(*other, statuses=(1,)).errors[0]


def test_scene_pairs_replace_older_pairs_whole_and_only_if_asked(tmp_path: Path, say: Say) -> None:
    words = ["scene-pairs", "--num_pairs", 3, "--img_size", 32, "--output_dir"]
    say(*words, tmp_path / "new", "--seed", 1)
    say(*words, tmp_path / "old")
    assert "--overwrite" in say(*words, tmp_path / "old", "--seed", 1, statuses=(1,)).errors[0]
    say(*words, tmp_path / "old", "--seed", 1, "--overwrite")
    old, new = ({path.name: path.read_bytes() for path in (tmp_path / name).rglob("*.*")} for name in ("old", "new"))
    assert old == new


@pytest.mark.parametrize(
    ("out", "form"),
    [("ex/", "onnx"), (".", "safetensors"), ("", "onnx"), ("FILE/x", "safetensors"), ("FILE", "huggingface")],
)
def test_an_export_without_a_name_or_below_a_file_is_refused(
    out: str, form: str, run: Path, tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("FILE").write_text("")
    said = say("export", run / "checkpoint.pth", out, "--format", form, statuses=(1, 2))
    assert re.search("give (a|the) path", said.text)
    assert os.listdir() == ["FILE"]


def test_a_folder_of_checkpoints_is_no_folder_for_an_export(run: Path, say: Say) -> None:
    before = sorted(os.listdir(run))
    said = say("export", run / "checkpoint.pth", run, "--format", "huggingface", "--overwrite", statuses=(1,))
    assert "another folder" in said.errors[0]
    assert sorted(os.listdir(run)) == before


@pytest.mark.parametrize("below", ["", "x"])
@pytest.mark.parametrize(
    "words",
    [
        ["embed", "--pretrained_weights", "run/checkpoint.pth", "--data_path", EVALUATED, *DEVICE, "--output_dir"],
        [*knn("run/checkpoint.pth"), "--output_dir"],
        [*knn("run/checkpoint.pth"), "--dump_features"],
        ["scene-pairs", "--num_pairs", 2, "--output_dir"],
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
def test_a_file_where_a_folder_is_to_be_written_is_named_with_a_remedy(
    words: list[object], below: str, run: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    Path("FILE").write_text("")
    error = say(*words, Path("FILE", below), statuses=(1,)).errors[0]
    assert f"{words[-1]} FILE" in error
    assert re.search("give the path of a folder|choose another", error)


def test_an_empty_path_is_not_the_working_folder(run: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "here").mkdir()
    monkeypatch.chdir(run / "here")
    for words in (["scene-pairs", "--output_dir", ""], [*knn(run / "checkpoint.pth"), "--dump_features", ""]):
        assert "is empty; give a path" in say(*words, statuses=(2,)).text
    assert not os.listdir()


# A run's folder is moved.


def test_a_moved_run_is_evaluated_resumed_and_exported_where_it_lies(run: Path, tmp_path: Path, say: Say) -> None:
    say(*knn(run / "checkpoint.pth"))
    (early,) = results_in(run).values()
    moved = tmp_path / "my archive" / "moved.run"
    moved.parent.mkdir()
    shutil.move(run, moved)
    say(*knn(moved / "checkpoint.pth"))
    assert score(early) in say("info", moved).text

    config = ("train", "--config", moved / "config.yaml")
    with pytest.raises(UserError, match=r"folder of a run, .*moved.run, but says output_dir: .*/run; "):
        parse_keywords("train", {"config": config[2]})
    assert f"--output_dir '{moved}' to resume" in say(*config, statuses=(2,)).text
    assert not run.exists()
    say(*config, "--output_dir", moved, "--max_steps", 2 * STEPS)
    train(tmp_path / "undisturbed")
    assert_same_run(moved, tmp_path / "undisturbed")
    say("export", moved / "checkpoint.pth", moved / "ex", "--format", "huggingface")
    assert score(early) not in (moved / "ex" / "README.md").read_text()
    for weights in (moved / "checkpoint.pth", moved / "ex"):
        say(*knn(weights), "--overwrite")
    found = {record["encoder"]["sha256"]: record["results"] for record in results_in(moved).values()}
    assert found[sha256(moved / "checkpoint.pth")] == found[sha256(moved / "ex" / "model.safetensors")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my archive", "undisturbed"]


# A run's folder has other files, or the run is resumed with other options.


def test_a_run_resumed_with_other_options_keeps_the_file_of_its_first(run: Path) -> None:
    first = (run / "config.yaml").read_text()
    train(run, seed=9, max_steps=STEPS)
    train(run, seed=9, max_steps=STEPS)
    assert (run / "config.yaml.old").read_text() == first
    assert "seed: 9\n" in (run / "config.yaml").read_text()
    assert not (run / "config.yaml.old1").exists()


@pytest.mark.parametrize("words", [("embed", "--output_dir"), ("knn", "--dump_features")], ids=lambda words: words[0])
def test_a_training_leaves_folders_of_features_alone(
    words: tuple[str, str], run: Path, tmp_path: Path, say: Say
) -> None:
    features = tmp_path / "features"
    say(words[0], *knn(run / "checkpoint.pth")[1:], words[1], features)
    before = sorted(features.iterdir())
    said = say("train", *small_options(features), statuses=(1,))
    assert f"--output_dir {features} holds" in said.errors[0]
    assert sorted(features.iterdir()) == before


def test_a_run_goes_on_beside_embeddings_in_its_folder(run: Path, say: Say) -> None:
    say("embed", *knn(run / "checkpoint.pth")[1:], "--output_dir", run)
    train(run, max_steps=STEPS + 1)


def test_a_best_checkpoint_may_have_a_score_of_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Say) -> None:
    result = EpochResult({"knn_20": 0.0}, score=0.0)
    monkeypatch.setattr("dino_sparo.dino.train.DINOObjective.after_epoch", lambda *_: result)
    train(tmp_path / "run", max_steps=STEPS - 1)
    assert "-inf" not in say("info", tmp_path / "run").text
    train(tmp_path / "run", max_steps=STEPS)
    best = sha256(tmp_path / "run" / "checkpoint_best.pth")
    train(tmp_path / "run")
    assert sha256(tmp_path / "run" / "checkpoint_best.pth") == best


# Embeddings and features are replaced, mixed, or of an older version.


def test_clusters_and_predictions_say_which_embeddings_they_are_of(run: Path, tmp_path: Path, say: Say) -> None:
    folder = tmp_path / "e"
    words = ("embed", *knn(run / "checkpoint.pth")[1:], "--output_dir", folder)
    say(*words)
    say("cluster", folder, "--clusters", 2, "--map", "pca")
    say("predict", folder)
    stale = [json.loads((folder / name).read_text()) for name in ("clusters.json", "predictions.json")]
    said = say(*words, "--checkpoint_key", "student", "--overwrite")
    assert re.search(r"W .*clusters.json, clusters.png, predictions.json were made from the embeddings that", said.text)
    file = json.loads((folder / "embedding.json").read_text())["files"]["encoding.npy"]
    assert file not in (stale[0]["embeddings"]["file"], stale[1]["files"][str(folder)])
    say("cluster", folder, "--clusters", 2, "--map", "pca", "--overwrite")
    assert json.loads((folder / "clusters.json").read_text())["embeddings"]["file"] == file


def test_features_of_one_split_are_not_taken_for_those_of_the_other(run: Path, tmp_path: Path, say: Say) -> None:
    say(*knn(run / "checkpoint.pth", "scenes:20:32"), "--dump_features", tmp_path / "f")
    shutil.copy(tmp_path / "f" / "trainfeat.pth", tmp_path / "f" / "testfeat.pth")
    said = say("knn", "--load_features", tmp_path / "f", statuses=(1,))
    assert "testfeat.pth is missing, damaged or of another run" in said.errors[0]


@pytest.mark.parametrize("kind", ["probes", "features"])
def test_files_of_versions_without_an_exif_option_are_of_stored_pixels(
    kind: str, run: Path, tmp_path: Path, say: Say
) -> None:
    evaluation = (*knn(run / "checkpoint.pth")[1:], "--exif", "ignore")
    out = ("--output_dir", tmp_path)
    if kind == "probes":
        words = ("linear", *evaluation, *out, "--epochs", 1)
        say(*words)
        (path,) = tmp_path.glob("linear_*.pth")
        state = torch.load(path, weights_only=True)
        del state["record"]["exif"]
        torch.save(state, path)
    else:
        words = ("knn", "--load_features", tmp_path / "f", "--exif", "ignore")
        say("knn", *evaluation, *out, "--dump_features", tmp_path / "f")
        path = tmp_path / "f" / "features.json"
        record = json.loads(path.read_text())
        del record["crc32"], record["files"], record["view"]["exif"]  # records of 0.1 have no checksums
        path.write_text(json.dumps(record))
    said = say(*words)
    assert "is of an older version, which took pixels as they are stored: --exif ignore" in said.text
    if kind == "probes":  # features take the record's rule, unless the other rule is given
        assert "'ignore'" in say(*words, "--exif", "apply", statuses=(1,)).errors[0]


# Bugs and mistakes.


def bug(*_: object, **__: object) -> None:
    """numpy's error about wrong shapes."""
    np.ones((2, 3)) @ np.ones((5, 7))


BUG = re.compile(r"Traceback \(most recent call last\).*_two_commands.py\", line \d+, in bug.*ValueError: ", re.DOTALL)


@pytest.mark.parametrize(
    ("command", "part_of_a_step"),
    [("train", "dino_sparo.distillation.loss.DINOLoss.forward"), ("train-clip", "dino_sparo.clip.train.clip_loss")],
)
def test_a_bug_in_an_objectives_step_shows_its_traceback_and_ends_with_status_70(
    command: str, part_of_a_step: str, tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = command, *small_options(tmp_path, command)
    monkeypatch.setattr(part_of_a_step, bug)
    said = say(*words, statuses=(70,))
    for text in (said.text, (tmp_path / "run.log").read_text()):
        assert BUG.search(text), text
        assert "bug of dino_sparo" in text


@pytest.mark.parametrize("command", ["knn", "linear", "embed", "attention"])
def test_a_bug_in_the_encoder_is_no_mistake_of_the_one_who_evaluates_it(
    command: str, run: Path, tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.Linear, "forward", bug)
    assert BUG.search(
        say(command, *knn(run / "checkpoint.pth")[1:], "--output_dir", tmp_path / "out", statuses=(70,)).text
    )


# Names of folders.


def test_a_job_expands_a_tilde_and_quotes_a_blank(tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    script = say("submit", "--dry_run", "--data_path", "~/my images", "--output_dir", "~/größe", "--job_dir=~/my jobs")
    assert "~" not in script.text
    assert f"'{tmp_path}/home/my jobs'" in script.text


def chain(typed: str) -> Iterator[tuple[object, ...]]:
    """Commands that read what earlier ones wrote; all paths begin with `typed`."""
    weights = f"{typed}/run/checkpoint.pth"
    evaluation = ("--pretrained_weights", weights, "--data_path", typed, *DEVICE)
    run = words_of({**RUN, "data_path": typed, "epochs": 1, "batch_size_per_gpu": 5})
    yield "train", *run, "--output_dir", f"{typed}/run"
    yield "train", *run, "--output_dir", f"{typed}/next", "--init_from", weights, "--max_steps", 1
    yield "knn", *evaluation, "--output_dir", f"{typed}/result", "--dump_features", f"{typed}/features"
    yield "knn", "--load_features", f"{typed}/features", "--output_dir", f"{typed}/loaded"
    yield "linear", *evaluation, "--output_dir", f"{typed}/linear", "--epochs", 1
    yield "slots", "study", *evaluation, "--output_dir", f"{typed}/study"
    yield "attention", *evaluation, "--data_path", f"{typed}/val/a/1.png", "--output_dir", f"{typed}/maps"
    for split in ("train", "val"):
        yield "embed", *evaluation, "--split", split, "--output_dir", f"{typed}/of_{split}"
    yield "cluster", f"{typed}/of_train", "--clusters", 2, "--map", "pca"
    yield "search", f"{typed}/of_train", "--images", f"{typed}/val/a/1.png", "--duplicates", 0.9, *DEVICE
    yield "predict", f"{typed}/of_train", "--images", f"{typed}/of_val", "--output", f"{typed}/p.csv"
    yield "export", weights, f"{typed}/exports/v1.0"
    yield "export", weights, f"{typed}/exports/hf", "--format", "huggingface"
    yield "attention", *evaluation, "--data_path", f"{typed}/val/a/1.png", "--output_dir", f"{typed}/maps", "--pca"
    results = ("maps/attention.json", "maps/pca.json", "of_train/search.json", "of_train/duplicates.json")
    for name in ("run", "of_train", "exports/hf", "exports/v1.0.safetensors", "features", *results):
        yield "info", f"{typed}/{name}"
    yield "statistics", "--data_path", typed, "--num_workers", 0
    yield "scene-pairs", "--output_dir", f"{typed}/pairs", "--num_pairs", 2
    yield "parse", "--captions", f"{typed}/captions.txt", "--output", f"{typed}/graphs.jsonl"


@pytest.mark.parametrize("typed", ["v1.2 größe-図", *(pytest.param(name, marks=pytest.mark.slow) for name in "~.")])
def test_commands_read_what_others_wrote_in_a_folder_of_any_name(
    typed: str, tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = write_images(tmp_path / "home" if typed == "~" else tmp_path / "here" / typed)
    (folder / "captions.txt").write_text("a red star\na blue ring\n")
    (tmp_path / "here").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "here")
    for words in chain(typed):
        say(*words)
    assert {"run", "next", "result", "loaded", "linear", "study", "maps", "pairs"} <= set(os.listdir(folder))
    assert {"v1.0.safetensors", "v1.0.json", "hf"} <= set(os.listdir(folder / "exports"))
    assert typed == "." or set(Path().resolve().iterdir()) <= {folder}, "written elsewhere"


def test_the_card_of_an_export_into_the_working_folder_names_that_folder(
    run: Path, tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    say("export", run / "checkpoint.pth", ".", "--format", "huggingface")
    names = re.findall(r"(?:from_pretrained|load_encoder)\((.*?)[,)]", Path("README.md").read_text())
    assert names == ["'here'"] * 3

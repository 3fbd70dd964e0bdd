"""Clusters of embeddings and predictions from them, on embeddings whose groups are known."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from refusals import refused
from small_models import save_small_encoder

from dino_sparo.__main__ import run
from dino_sparo.commands import parser_of
from dino_sparo.evaluation.embed import cluster
from dino_sparo.evaluation.embed.store import load_embeddings

GROUPS, SIZES, DIM = "abc", (11, 7, 5), 13


def write_embeddings(
    folder: Path,
    images: Path,
    sizes: tuple[int, ...] = SIZES,
    seed: int = 0,
    sha256: str = "0123",
    has_labels: bool = True,
    **arrays: Any,
) -> Path:
    """A folder as `dino-sparo embed` writes it: three groups of directions, one image in each group's colour."""
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(7).normal(size=(len(sizes), DIM))
    groups = np.repeat(np.arange(len(sizes)), sizes)
    lengths = rng.uniform(1, 9, size=(len(groups), 1))
    encodings = lengths * (centers[groups] + 0.1 * rng.normal(size=(len(groups), DIM)))
    folder.mkdir(parents=True)
    rows = []
    for number, group in enumerate(groups):
        path = images / GROUPS[group] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20 + number, 23), (80 * int(group), 100, 30)).save(path)
        rows.append((number, str(path), GROUPS[group] if has_labels else ""))
    with open(folder / "index.csv", "w", newline="") as file:
        csv.writer(file).writerows([("row", "path", "label"), *rows])
    arrays = {"encoding": encodings.astype(np.float32), **arrays}
    for kind, array in arrays.items():
        np.save(folder / f"{kind}.npy", array)
    record = {
        "settings": {"img_size": 16},
        "encoder": {"sha256": sha256, "pretrained_weights": str(folder), "checkpoint_key": "teacher"},
        "features": {kind: list(array.shape[1:]) for kind, array in arrays.items()},
        "images": {"data_path": str(images), "split": "all", "classes": list(GROUPS)},
        "num_images": len(groups),
        "num_unreadable": 0,
        "complete": True,
    }
    (folder / "embedding.json").write_text(json.dumps(record))
    return folder


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    return write_embeddings(tmp_path / "labelled", tmp_path / "images")


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("is_large", [False, True])
def test_clusters_find_the_groups_whatever_the_lengths_of_the_features(
    is_large: bool, labelled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_large:
        monkeypatch.setattr(cluster, "MAX_FIT_BYTES", 1)
    result = run("cluster", [str(labelled), "--clusters", "3", "--examples", "2"])
    rows = rows_of(labelled / "clusters.csv")
    groups = np.repeat([0, 1, 2], SIZES)
    assert [int(row["cluster"]) for row in rows] == groups.tolist()
    vectors = load_embeddings(labelled).vectors("encoding")
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
    if not is_large:
        centers = np.stack([vectors[groups == group].mean(axis=0) for group in range(3)])
        distances = np.linalg.norm(vectors - centers[groups], axis=1)
        np.testing.assert_allclose([float(row["distance"]) for row in rows], distances, rtol=1e-4)
        assert result["inertia"] == pytest.approx(float((distances**2).sum()), rel=1e-4)
    assert result["method"] == ("MiniBatchKMeans" if is_large else "KMeans")
    assert [entry["num_images"] for entry in result["clusters"]] == list(SIZES)
    assert [(entry["label"], entry["label_share"]) for entry in result["clusters"]] == [(name, 1.0) for name in GROUPS]
    assert result["labels"]["adjusted_rand_index"] == 1
    assert result["silhouette"] > 0.8
    nearest = [row["path"] for row in sorted(rows, key=lambda row: (int(row["cluster"]), float(row["distance"])))]
    assert result["clusters"][1]["nearest"] == nearest[SIZES[0] : SIZES[0] + 2]


def test_the_page_shows_examples_of_every_cluster_and_the_map_has_the_format_asked_for(labelled: Path) -> None:
    run("cluster", [str(labelled), "--clusters", "3", "--examples", "2", "--figure_format", "svg", "--map", "pca"])
    page = (labelled / "clusters.html").read_text()
    assert page.count("<img") == 3 * 2
    assert "cluster 2" in page
    assert "5 images" in page
    assert "100% c" in page
    assert "<svg" in (labelled / "clusters.svg").read_text()


def test_images_that_moved_are_found_by_data_path(
    labelled: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "images").rename(tmp_path / "elsewhere")
    options = [str(labelled), "--clusters", "2", "--map", "pca"]
    run("cluster", options)
    assert "the images are gone" in caplog.text
    assert not (labelled / "clusters.html").exists()
    with refused("--output_dir, or --overwrite"):
        run("cluster", options)
    run("cluster", [*options, "--overwrite", "--data_path", str(tmp_path / "elsewhere"), "--examples", "3"])
    assert (labelled / "clusters.html").read_text().count("<img") == 2 * 3


def test_the_same_seed_gives_the_same_files(labelled: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        run("cluster", [str(labelled), "--clusters", "4", "--output_dir", str(tmp_path / name)])
    for path in (tmp_path / "first").iterdir():
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes()


def test_one_slot_clusters_by_its_numbers_alone(tmp_path: Path) -> None:
    slots = np.random.default_rng(0).normal(size=(sum(SIZES), 5, 3)).astype(np.float32)
    slots[:, 2] = np.repeat([[1, 0, 0], [0, 1, 0], [0, 0, 1]], SIZES, axis=0)
    folder = write_embeddings(tmp_path / "embeddings", tmp_path / "images", slots=slots)
    result = run("cluster", [str(folder), "--what", "slots", "--slot", "2", "--clusters", "3", "--map", "pca"])
    assert [entry["num_images"] for entry in result["clusters"]] == list(SIZES)
    assert result["inertia"] == pytest.approx(0, abs=1e-6)
    with pytest.raises(ValueError, match="--slot 5: slots has the shape"):
        load_embeddings(folder).vectors("slots", slot=5)


def test_equal_features_are_clustered_and_named(labelled: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The bug: t-SNE of equal features ended the process with a segmentation fault."""
    np.save(labelled / "encoding.npy", np.ones((sum(SIZES), DIM), np.float32))
    result = run("cluster", [str(labelled), "--clusters", "3"])
    assert [entry["num_images"] for entry in result["clusters"]] == [sum(SIZES)]
    assert "clusters.png is not drawn: a map needs 3 images with different features" in caplog.text
    assert ["nearly equal" in text for text in result["warnings"]] == [True]
    assert result["warnings"][0] in caplog.messages


@pytest.mark.parametrize("name", ["cluster", "predict"])
def test_features_that_are_not_finite_are_refused(name: str, labelled: Path) -> None:
    np.save(labelled / "encoding.npy", np.full((sum(SIZES), DIM), np.nan, np.float32))
    with refused("features are not finite"):
        run(name, [str(labelled), *(["--clusters", "2"] if name == "cluster" else [])])


def test_a_map_of_two_images_is_left_out_and_an_old_one_is_removed(labelled: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("cluster", [str(labelled), "--clusters", "2", "--output_dir", str(out)])
    small = write_embeddings(tmp_path / "small", tmp_path / "few", sizes=(1, 1))
    run("cluster", [str(small), "--clusters", "2", "--output_dir", str(out), "--overwrite"])
    assert not (out / "clusters.png").exists()


def test_a_class_with_a_single_image_is_predicted_but_not_cross_validated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The bug: one such class refused the whole command."""
    folder = write_embeddings(tmp_path / "embeddings", tmp_path / "images", sizes=(4, 1, 3))
    result = run("predict", [str(folder)])
    assert "1 classes with a single image are not cross-validated, such as 'b'" in caplog.text
    assert (result["classes"], result["num_labelled"]) == (["a", "b", "c"], 8)
    assert result["cross_validation"]["left_out_classes"] == ["b"]
    assert (result["cross_validation"]["accuracy"], result["cross_validation"]["folds"]) == (100, 3)


def test_predictions_name_the_groups_of_new_images(labelled: Path, tmp_path: Path) -> None:
    new = write_embeddings(tmp_path / "new", tmp_path / "others", sizes=(2, 5, 3), seed=1)
    words = [str(labelled), "--images", str(new), "--top", "2", "--val", str(labelled)]
    result = run("predict", words)
    with refused("--output, or --overwrite"):
        run("predict", words)
    assert run("predict", [*words, "--overwrite"])["cross_validation"] == result["cross_validation"]
    rows = rows_of(new / "predictions.csv")
    assert [row["prediction"] for row in rows] == list("aabbbbbccc")
    assert list(rows[0]) == ["row", "path", "prediction", "probability", "prediction_2", "probability_2"]
    assert all(0.5 < float(row["probability"]) <= 1 for row in rows)
    assert all(float(row["probability"]) >= float(row["probability_2"]) for row in rows)
    assert result["cross_validation"]["accuracy"] == 100
    assert result["accuracy_on"] == {str(new): 100, str(labelled): 100}
    assert result["cross_validation"]["folds"] == 5


@pytest.mark.parametrize(("images", "is_warned"), [("same", True), ("half precision", True), ("new", False)])
def test_predicting_the_labelled_images_themselves_is_warned_of(
    images: str, is_warned: bool, labelled: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = labelled if images == "same" else tmp_path / images
    if images != "same":
        write_embeddings(folder, tmp_path / "others" if images == "new" else tmp_path / "images", seed=images == "new")
    if images == "half precision":
        np.save(folder / "encoding.npy", np.load(folder / "encoding.npy").astype(np.float16))
    result = run("predict", [str(labelled), "--images", str(folder)])
    assert result["accuracy_on"] == {str(folder): 100}
    assert (f"{folder} has the images that the classifier is fitted on (23 of 23)" in caplog.text) == is_warned
    assert len(result.get("warnings", [])) == is_warned


def test_wrong_labels_lower_the_accuracy_by_cross_validation(labelled: Path, tmp_path: Path) -> None:
    index = labelled / "index.csv"
    lines = index.read_text().splitlines()
    shuffled = np.random.default_rng(0).permutation([line[-1] for line in lines[1:]])
    shuffled_lines = [line[:-1] + label for line, label in zip(lines[1:], shuffled, strict=True)]
    index.write_text("\n".join([lines[0], *shuffled_lines]))
    result = run("predict", [str(labelled)])
    assert not (labelled / "predictions.csv").exists()
    assert result["cross_validation"]["accuracy"] < 70


# Bad input.


def test_embeddings_of_another_encoder_are_refused_by_its_hash(
    labelled: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    new = write_embeddings(tmp_path / "new", tmp_path / "others", sha256="4567" * 16)
    with refused("another encoder"):
        run("predict", [str(labelled), "--images", str(new)])
    assert "sha256 '0123' in" in caplog.text
    assert f"45674567... in {new}; embed both with the same checkpoint" in caplog.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--images", "EMBEDDINGS", "--output", "p.json"], "p.json names the table"),
        (["--images", "EMBEDDINGS", "--output", "config.csv"], "config.json exists already"),
        (["--output", "config.csv"], "config.json exists already"),
    ],
)
def test_predict_overwrites_no_json_and_not_its_own_table(
    words: list[str], message: str, labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text("mine")
    with refused(message):
        run("predict", [str(labelled), *[str(labelled) if word == "EMBEDDINGS" else word for word in words]])
    assert Path("config.json").read_text() == "mine"
    assert not Path("p.json").exists()


@pytest.mark.parametrize("name", ["predict embeddings", "few-labels", "table-probe"])
def test_one_fold_is_refused_when_options_are_parsed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *words = name.split()
    with pytest.raises(SystemExit):
        parser_of(command).parse_args([*words, "--folds", "1"])
    assert "--folds: 1: give at least 2 for the cross-validation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("cluster", ["--clusters", "24"], " has 23 images"),
        ("cluster", ["--what", "mean"], "--what mean: the folder has encoding; embed with --what mean"),
        ("cluster", ["--slot", "0"], "--slot 0: encoding has the shape (13,); take --what slots"),
    ],
)
def test_what_does_not_fit_the_embeddings_is_refused(name: str, more: list[str], message: str, labelled: Path) -> None:
    with refused(message):
        run(name, [str(labelled), *more])


def test_a_classifier_needs_labels_of_two_classes(labelled: Path, tmp_path: Path) -> None:
    single = write_embeddings(tmp_path / "single", tmp_path / "others", sizes=(5, 1))
    none = write_embeddings(tmp_path / "none", tmp_path / "others", has_labels=False)
    for folder, message in ((single, "two classes with two images each"), (none, "have no labels")):
        with refused(message):
            run("predict", [str(folder)])


def test_images_are_embedded_as_the_labelled_embeddings_were(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = save_small_encoder(tmp_path / "encoder.pth")
    for number in range(6):  # 12-bit values, so that --max_value decides
        path = tmp_path / "images" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((20, 24), 500 + 600 * number, np.uint16)).save(path)
    words = ["--pretrained_weights", str(weights), "--device", "cpu", "--num_workers", "0"]
    for name, given in (("labelled", ["--max_value", "4095", "--img_size", "16"]), ("other", ["--img_size", "16"])):
        run("embed", ["--data_path", str(tmp_path / "images"), "--output_dir", str(tmp_path / name), *words, *given])
    labelled, images = str(tmp_path / "labelled"), str(tmp_path / "images")
    fitted = "has the images that the classifier is fitted on (6 of 6)"
    result = run("predict", [labelled, "--images", images, "--folds", "2", *words, "--output", str(tmp_path / "p.csv")])
    assert fitted in result["warnings"][0]
    assert "read differently" not in caplog.text
    run("predict", [labelled, "--images", str(tmp_path / "other"), "--folds", "2"])
    assert f"max_value 65535 in {tmp_path / 'other'}, 4095 in {labelled}" in caplog.text

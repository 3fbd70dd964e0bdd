"""Few labels: balanced draws, lists of files, and accuracies that scikit-learn and k-NN alone find on the same rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from small_models import command

from dino_sparo.evaluation.features import Features, save_features
from dino_sparo.evaluation.few_labels import draw_labels
from dino_sparo.weights.results import scores_of

SIZES, VAL, DIM = (40, 30, 30), 60, 7
ON_CPU = ("--device", "cpu", "--num_workers", 0)


def features_of(labels: np.ndarray, seed: int) -> Features:
    """Features of length one around a direction per class."""
    rng, centers = np.random.default_rng(seed), np.random.default_rng(7).normal(size=(len(SIZES), DIM))
    features = torch.from_numpy(centers[labels] + rng.normal(size=(len(labels), DIM))).float()
    return Features(features, torch.from_numpy(labels), torch.arange(len(labels))).normalize_()


@pytest.fixture
def cache(tmp_path: Path) -> tuple[Path, Features, Features]:
    """Cached features in a folder, and the same in memory."""
    train = features_of(np.random.default_rng(1).permutation(np.repeat(np.arange(len(SIZES)), SIZES)), 2)
    val = features_of(np.arange(VAL) % len(SIZES), 3)
    record = {"encoder": {"sha256": "0"}, "images": {"data_path": "drawn"}, "feature": {}, "view": {"exif": "ignore"}}
    save_features(tmp_path / "cache", train, val, record)
    return tmp_path / "cache", train, val


def evaluate(folder: Path, *words: object) -> dict[str, Any]:
    """The content of the result file."""
    command("few-labels", "--load_features", folder, "--output_dir", folder / "out", *words, *ON_CPU)
    (file,) = (folder / "out").glob("few_labels_*.json")
    result: dict[str, Any] = json.loads(file.read_text())
    return result


@pytest.mark.parametrize(
    ("share", "expected"), [(0.001, [1, 1, 1]), (0.3, [10, 10, 10]), (0.9, [30, 30, 30]), (1.0, [33, 30, 30])]
)
def test_a_draw_is_balanced_random_and_part_of_a_larger_one(share: float, expected: list[int]) -> None:
    labels = np.repeat(np.arange(len(SIZES)), SIZES)
    drawn = draw_labels(labels, share, seed=5)
    assert np.bincount(labels[drawn]).tolist() == expected
    assert set(drawn) <= set(draw_labels(labels, 1.0, seed=5))
    assert share == 1.0 or set(drawn) != set(draw_labels(labels, share, seed=6))


def test_accuracies_are_those_of_scikit_learn_on_the_drawn_rows(cache: tuple[Path, Features, Features]) -> None:
    folder, train, val = cache
    words = ("--label_share", 0.1, "--draws", 3, "--nb_knn", 1, "--C", 10, "--seed", 4)
    rows = {row["classifier"]: row for row in evaluate(folder, *words)["results"]}
    expected: dict[str, list[float]] = {"1-NN": [], "logistic": []}
    for seed in (4, 5, 6):
        drawn = draw_labels(train.labels.numpy(), 0.1, seed)
        x, y = train.features.numpy()[drawn], train.labels.numpy()[drawn]
        oracles = {"1-NN": KNeighborsClassifier(1), "logistic": LogisticRegression(C=10, max_iter=1000)}
        for name, oracle in oracles.items():
            expected[name].append(100 * oracle.fit(x, y).score(val.features.numpy(), val.labels.numpy()))
    for name, accuracies in expected.items():
        top1 = rows[name]["top1"]
        assert top1["draws"] == pytest.approx(accuracies)
        assert (top1["mean"], top1["std"]) == pytest.approx((np.mean(accuracies), np.std(accuracies, ddof=1)))
        assert rows[name]["num_labelled"] == 9


def test_with_one_label_per_class_there_is_no_cross_validation_and_every_classifier_works(
    cache: tuple[Path, Features, Features],
) -> None:
    words = ("--label_share", 0.01, 0.5, "--draws", 2, "--classifiers", "knn", "logistic", "linear", "--epochs", 5)
    result = evaluate(cache[0], *words)
    names = [score.name for score in scores_of(result)]
    kinds = ("5-NN", "20-NN", "logistic", "linear")
    assert names == [f"{kind}, {share} of labels" for share in ("1 %", "50 %") for kind in kinds]
    for score in scores_of(result):
        assert score.low <= score.value <= score.high
        assert score.value > 100 / len(SIZES)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder of 12 images in three classes, the same for both splits; two files have one name."""
    for split in ("train", "val"):
        for number in range(12):
            name = "same" if number in (0, 1) else f"{number:02}"
            path = tmp_path / "data" / split / "abc"[number % 3] / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), (80 * (number % 3), 20 * number, 30)).save(path)
    return tmp_path / "data"


def test_a_list_names_the_labelled_images(images: Path, tmp_path: Path) -> None:
    words = ("--data_path", images, "--pretrained_weights", "demo", "--output_dir", tmp_path / "out", *ON_CPU)
    words = (*words, "--label_share", tmp_path / "list.txt", "--nb_knn", 1)
    for names, message in (
        ("same.png", "same.png names 2 of the 12 training images"),
        ("absent.png", "absent.png names 0 of"),
        ("", "list.txt names no readable image"),
    ):
        (tmp_path / "list.txt").write_text(names)
        with refused(message):
            command("few-labels", *words)
    (tmp_path / "list.txt").write_text("\ufeff03.png\r\nb/same.png\r\n\r\n05.png")
    result = command("few-labels", *words)
    assert {(row["num_labelled"], row["num_classes"]) for row in result["results"]} == {(3, 3)}
    assert result["options"]["label_lists"].keys() == {str(tmp_path / "list.txt")}
    (tmp_path / "list.txt").write_text("03.png\n04.png")  # another list of the same name is another result
    with refused("holds another result: "):
        command("few-labels", *words)


def test_predict_takes_images_and_equals_predict_on_their_embeddings(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    encoder = ("--pretrained_weights", "demo", *ON_CPU)
    for split in ("train", "val"):
        command("embed", "--data_path", images / split, "--output_dir", split, *encoder)
    stored = command("predict", "train", "--images", "val", "--output", "stored.csv")
    direct = command("predict", images / "train", "--images", images / "val", *encoder)
    assert Path("predictions.csv").read_text().splitlines() == Path("stored.csv").read_text().splitlines()
    assert [score.value for score in scores_of(direct)] == [score.value for score in scores_of(stored)]
    assert direct["cross_validation"] == stored["cross_validation"]
    table = command("report", "predictions.json", "stored.json")
    assert len(table) == 4
    with refused("has no embeddings: there is no "):
        command("predict", images / "train", "--overwrite")
    with refused("--pretrained_weights: all folders hold embeddings already"):
        command("predict", "train", "--overwrite", *encoder)

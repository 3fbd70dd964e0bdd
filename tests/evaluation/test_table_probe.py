"""Probes of a table's columns equal those of scikit-learn on the same features; missing values are counted."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from refusals import refused
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.metrics import average_precision_score, mean_absolute_error, r2_score, roc_auc_score
from small_models import command

from dino_sparo.evaluation.embed.store import load_embeddings
from dino_sparo.evaluation.table_probe import ALPHAS, errors_of, ranks_of, score_of
from dino_sparo.weights.results import scores_of

NUM_IMAGES, NUM_TRAIN = 48, 30
ON_CPU = ("--device", "cpu", "--num_workers", 0)
PROBES = ("--tags", "tags", "--binary", "dark", "--numbers", "red", "--C", 10, "--resamples", 20)
EMPTY = {3: "red", 40: "red", 5: "dark", 41: "dark", 6: "tags", 42: "tags"}  # row -> column without a value


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images of one colour, a table of their colours, and embeddings of the demo encoder."""
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for number in range(NUM_IMAGES):
        red, green, blue = (int(value) for value in rng.integers(256, size=3))
        Image.new("RGB", (32, 32), (red, green, blue)).save(folder / f"{number}.png")
        tags = [name for name, value in (("reddish", red), ("greenish", green)) if value > 100]
        row = {"path": f"{number}.png", "split": "train" if number < NUM_TRAIN else "val", "red": red}
        row |= {"dark": int(red + green + blue < 380), "tags": "; ".join(tags) or "other", "same": 1}
        rows.append(row | ({EMPTY[number]: ("-1" if EMPTY[number] == "dark" else "")} if number in EMPTY else {}))
    with open(folder / "photos.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    words = ("--pretrained_weights", "demo", "--data_path", folder / "photos.csv", "--split", "all", *ON_CPU)
    command("embed", *words, "--output_dir", folder / "embeddings")
    return folder


def known_rows(table: Path, column: str) -> tuple[np.ndarray, list[str], np.ndarray]:
    """Features and cells of the rows whose value is known, and which of them are of the validation images."""
    with open(table / "photos.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    known = [number for number in range(NUM_IMAGES) if EMPTY.get(number) != column]
    features = load_embeddings(table / "embeddings").vectors("encoding", known)
    return features, [rows[number][column] for number in known], np.array(known) >= NUM_TRAIN


def test_scores_are_those_of_scikit_learn_from_an_encoder_and_from_embeddings(table: Path, tmp_path: Path) -> None:
    words = ("table-probe", "--data_path", table / "photos.csv", *PROBES, *ON_CPU)
    direct = command(*words, "--pretrained_weights", "demo", "--output_dir", tmp_path)
    stored = command(*words, "--embeddings", table / "embeddings", "--output_dir", tmp_path)
    found = {score.name: score.value for score in scores_of(stored)}
    assert found == pytest.approx({score.name: score.value for score in scores_of(direct)}, abs=1e-3)

    expected = {}
    features, cells, is_val = known_rows(table, "red")
    y = np.array(cells, float)
    predicted = RidgeCV(ALPHAS).fit(features[~is_val], y[~is_val]).predict(features[is_val])
    expected["R2 red"] = r2_score(y[is_val], predicted)
    expected["MAE red"] = mean_absolute_error(y[is_val], predicted)
    for column, label in (("dark", ""), ("tags", "reddish"), ("tags", "greenish"), ("tags", "other")):
        features, cells, is_val = known_rows(table, column)
        y = np.array([label in cell if label else cell == "1" for cell in cells])
        model = LogisticRegression(C=10, max_iter=1000).fit(features[~is_val], y[~is_val])
        scores = model.predict_proba(features[is_val])[:, 1]
        expected[f"AP {label or column}"] = 100 * average_precision_score(y[is_val], scores)
        expected[f"AUROC {label or column}"] = 100 * roc_auc_score(y[is_val], scores)
    for kind, name in (("AP", "mAP"), ("AUROC", "mean AUROC")):
        expected[name] = np.mean([value for key, value in expected.items() if key.startswith(f"{kind} ")])
    assert found == pytest.approx(expected, abs=1e-3)

    rows = {row["column"]: row for row in stored["results"]}
    for column in ("red", "dark", "reddish"):
        assert (rows[column]["num_missing_train"], rows[column]["num_missing_val"]) == (1, 1)
    for score in scores_of(stored):
        assert score.low <= score.high
    assert len(list(tmp_path.glob("table_probe*.json"))) == 2
    assert len(command("report", tmp_path)) == len(found)


def test_scores_of_resamples_are_those_of_scikit_learn_with_ties() -> None:
    rng = np.random.default_rng(3)
    targets, labels = rng.normal(size=50), rng.integers(2, size=50)
    predicted = np.round(labels + rng.normal(size=50), 1)
    drawn = [np.arange(50), *(rng.integers(50, size=50) for _ in range(9))]
    weights = np.array([np.bincount(rows, minlength=50) for rows in drawn], float)
    found = ranks_of(labels.astype(float), predicted, weights) | errors_of(targets, predicted, weights)
    oracles = {"R2": (r2_score, targets, 1), "MAE": (mean_absolute_error, targets, 1)}
    oracles |= {"AP": (average_precision_score, labels, 100), "AUROC": (roc_auc_score, labels, 100)}
    for name, (oracle, truth, scale) in oracles.items():
        assert found[name] == pytest.approx([scale * oracle(truth[rows], predicted[rows]) for rows in drawn])
    score = score_of("MAE", "", found["MAE"])
    assert (score.low, score.high) == pytest.approx(tuple(np.percentile(found["MAE"][1:], [2.5, 97.5])))
    assert np.isnan(ranks_of(np.ones(50), predicted, weights)["AP"]).all()


def test_r2_of_equal_numbers_is_unknown_and_that_of_large_numbers_is_right() -> None:
    """Rounding once made R2 of resamples with equal targets 1e15, which was the end of an interval."""
    weights = np.array([[1.0, 1, 1], [3, 0, 0], [0, 3, 0], [0, 0, 3]])
    r2 = errors_of(np.array([0.1, 0.7, 0.3]), np.array([0.2, 0.6, 0.3]), weights)["R2"]
    assert np.isfinite(r2).tolist() == [True, False, False, False]
    offsets = np.array([1.0, 2.0, 3.0])
    near, far = (errors_of(shift + offsets, shift + offsets + 0.25, weights[:1])["R2"] for shift in (0, 1e9))
    assert near == pytest.approx(far)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--binary", "red"), "is not a label"),
        (("--numbers", "tags"), "is not a finite number"),
        (("--numbers", "size"), "size"),
        ((), "no column to predict"),
        (("--numbers", "red", "--label_column", "tags"), "name columns of labels with"),
        (("--numbers", "red", "--pretrained_weights", "demo"), "give either"),
    ],
)
def test_mistakes_are_named(words: tuple[str, ...], message: str, table: Path) -> None:
    options = ("--data_path", table / "photos.csv", "--embeddings", table / "embeddings", *ON_CPU)
    with refused(message):
        command("table-probe", *options, *words)


def test_embeddings_of_other_images_are_refused(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos.csv").write_text((table / "photos.csv").read_text())  # with paths relative to its own folder
    words = ("--data_path", "photos.csv", "--embeddings", table / "embeddings", "--numbers", "red", *ON_CPU)
    with pytest.raises(SystemExit, match="1"):
        command("table-probe", *words)
    assert "none of the train images has features" in (error := capfd.readouterr().err)
    assert "must hold them: embed the table with --split all" in error


def test_a_column_of_equal_values_is_left_out(table: Path, tmp_path: Path) -> None:
    words = ("--data_path", table / "photos.csv", "--embeddings", table / "embeddings", "--output_dir", tmp_path)
    result = command("table-probe", *words, "--binary", "same", "--numbers", "red", "--resamples", 2, *ON_CPU)
    assert [score.name for score in scores_of(result)] == ["R2 red", "MAE red"]
    assert json.dumps(result["results"][0])

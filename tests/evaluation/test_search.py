"""Nearest images and near copies, against numpy on all pairs; queries of every kind; what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import clip_fakes
import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from scipy.sparse.csgraph import connected_components
from small_models import save_small_encoder
from test_cluster_and_predict import rows_of, write_embeddings

from dino_sparo.__main__ import run
from dino_sparo.evaluation.embed import near_copies, vectors
from dino_sparo.evaluation.embed.near_copies import find_groups
from dino_sparo.evaluation.embed.search import nearest_rows
from dino_sparo.evaluation.embed.store import load_embeddings
from dino_sparo.evaluation.embed.vectors import Vectors, open_vectors
from dino_sparo.runtime.launch import shutdown

CPU = torch.device("cpu")
NUM_IMAGES = 7
DEVICE = ("--device", "cpu", "--num_workers", "0")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks, the last of them shorter."""
    for module in (vectors, near_copies):
        monkeypatch.setattr(module, "ROWS", 5)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "photographs"
    folder.mkdir()
    for number in range(NUM_IMAGES):
        pixels = np.random.default_rng(number).integers(256, size=(4, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((20 + number, 23)).save(folder / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_encoder(tmp_path_factory.mktemp("run") / "checkpoint.pth")


def embed(weights: Path, images: Path, out: Path, *more: str) -> Path:
    words = ["--pretrained_weights", weights, "--data_path", images, "--output_dir", out]
    run("embed", [*map(str, words), *DEVICE, "--batch_size_per_gpu", "3", *more])
    shutdown()
    return out


@pytest.fixture(scope="module")
def store(weights: Path, photographs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Embeddings of the photographs; tests write elsewhere."""
    return embed(weights, photographs, tmp_path_factory.mktemp("store") / "store")


def search(folder: Path, *words: object) -> dict[str, Any]:
    return run("search", [str(folder), *map(str, words), *DEVICE])


def unit(values: np.ndarray) -> np.ndarray:
    flat = values.reshape(len(values), -1).astype(np.float64)
    return flat / np.linalg.norm(flat, axis=1, keepdims=True)


def in_memory(values: np.ndarray) -> Vectors:
    return Vectors(len(values), lambda rows: torch.from_numpy(unit(values)[rows]).float())


@pytest.mark.parametrize("k", [1, 4, 23, 40])
def test_the_nearest_rows_are_those_of_all_cosines(k: int) -> None:
    rng = np.random.default_rng(0)
    values, queries = rng.normal(size=(23, 11)), rng.normal(size=(3, 11))
    values[[2, 17]] = values[9]  # equal rows stay in their order
    cosines = unit(queries) @ unit(values).T
    expected = np.argsort(-cosines.round(9), axis=1, kind="stable")[:, :k]
    similarities, rows = nearest_rows(in_memory(values), torch.from_numpy(unit(queries)).float(), k)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_allclose(similarities, np.take_along_axis(cosines, expected, 1), atol=1e-6)


@pytest.mark.parametrize("max_pairs", [1, 1 << 22])
@pytest.mark.parametrize("threshold", [0.5, 0.8, 1.0])
def test_groups_are_what_similar_pairs_connect(
    threshold: float, max_pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(near_copies, "MAX_PAIRS", max_pairs)
    values = np.random.default_rng(1).normal(size=(23, 3)) + 0.3
    values[[4, 20]] = 2 * values[11]
    cosines = unit(values) @ unit(values).T
    _, group_of = connected_components(cosines >= threshold - 1e-6)
    expected = [np.flatnonzero(group_of == group).tolist() for group in range(group_of.max() + 1)]
    groups, highest = find_groups(in_memory(values), threshold)
    assert groups == sorted((rows for rows in expected if len(rows) > 1), key=lambda rows: (-len(rows), rows[0]))
    np.fill_diagonal(cosines, -1)
    np.testing.assert_allclose(highest, cosines.max(axis=1), atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_image_finds_itself_under_another_name_only(
    dtype: str, weights: Path, photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = embed(weights, photographs, tmp_path / "store", "--dtype", dtype)
    copy = shutil.copy(photographs / "3.png", tmp_path / "copy.png")
    for query, first in ((copy, "3.png"), (photographs / "3.png", None)):
        result = search(folder, "--images", query, "--top", 4, "--overwrite")["search"]
        found = [Path(path).name for path, _ in result["queries"][0]["nearest"]]
        assert len(found) == 4
        assert ("3.png" in found) == (found[0] == first)
    assert str(folder / "search.html") in capsys.readouterr().out
    features = load_embeddings(folder).arrays["encoding"]
    cosines = unit(features) @ unit(features[3:4])[0]
    expected = [row for row in np.argsort(-cosines).tolist() if row != 3][:4]
    rows = rows_of(folder / "search.csv")
    assert [(row["query"], int(row["rank"]), int(row["row"])) for row in rows] == [
        (str(photographs / "3.png"), rank, row) for rank, row in enumerate(expected, 1)
    ]
    np.testing.assert_allclose([float(row["similarity"]) for row in rows], cosines[expected], atol=2e-3)


def test_a_folder_and_its_embeddings_are_the_same_query(
    store: Path, weights: Path, photographs: Path, tmp_path: Path
) -> None:
    queries = tmp_path / "queries"
    shutil.copytree(photographs, queries)
    (queries / "0.png").write_bytes(b"no image")
    query_store = embed(weights, queries, tmp_path / "query_store")
    tables = []
    for images in (queries, query_store):
        result = search(store, "--images", images, "--output_dir", tmp_path / "out", "--overwrite", "--top", 3)[
            "search"
        ]
        assert result["num_queries"] == NUM_IMAGES - 1
        assert (tmp_path / "out" / "search.html").read_text().count("<img") == (NUM_IMAGES - 1) * (1 + 3)
        tables.append([(row["query"], row["rank"], row["path"]) for row in rows_of(tmp_path / "out" / "search.csv")])
    assert tables[0] == tables[1]
    firsts = [(Path(query).name, Path(path).name) for query, rank, path in tables[0] if rank == "1"]
    assert firsts == [(f"{number}.png", f"{number}.png") for number in range(1, NUM_IMAGES)]


@pytest.mark.parametrize("what", ["encoding", "slots"])
def test_slots_are_searched_alone(what: str, weights: Path, photographs: Path, tmp_path: Path) -> None:
    folder = embed(weights, photographs, tmp_path / "store", "--what", "slots", "encoding")
    result = search(folder, "--images", folder, "--slots", "2,0", "--what", what, "--top", NUM_IMAGES)["search"]
    assert result["embeddings"]["slots"] == {"kind": "selection", "slots": [2, 0]}
    chosen = unit(load_embeddings(folder).arrays["slots"][:, [2, 0]])
    cosines = chosen @ chosen.T
    rows = rows_of(folder / "search.csv")
    for number in range(NUM_IMAGES):
        own = rows[(NUM_IMAGES - 1) * number : (NUM_IMAGES - 1) * (number + 1)]
        expected = [row for row in np.argsort(-cosines[number]).tolist() if row != number]
        assert [int(row["row"]) for row in own] == expected
    assert "features: " + what + ", slots 2, 0" in (folder / "search.html").read_text()


def test_near_copies_are_listed_and_shown(weights: Path, photographs: Path, tmp_path: Path) -> None:
    images = tmp_path / "images"
    shutil.copytree(photographs, images)
    for name, copy in (("2.png", "2-copy.png"), ("2.png", "9.png"), ("5.png", "8.png")):
        shutil.copy(images / name, images / copy)
    folder = embed(weights, images, tmp_path / "store")
    result = search(folder, "--duplicates", 1)["duplicates"]
    assert (result["num_groups"], result["num_images"]) == (2, 5)
    rows = rows_of(folder / "duplicates.csv")
    assert [(row["group"], Path(row["path"]).name) for row in rows] == [
        ("0", "2-copy.png"), ("0", "2.png"), ("0", "9.png"), ("1", "5.png"), ("1", "8.png"),
    ]  # fmt: skip
    assert {row["similarity"] for row in rows} <= {"1.000000", "0.999999", "1.000001"}
    assert (folder / "duplicates.html").read_text().count("<img") == 5
    single = write_embeddings(tmp_path / "single", tmp_path / "others", sizes=(1, 1))
    assert search(single, "--duplicates", 0.99)["duplicates"]["num_groups"] == 0
    assert not (single / "duplicates.html").exists()


def test_moved_images_are_shown_from_data_path(
    weights: Path, photographs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(photographs, tmp_path / "images")
    folder = embed(weights, tmp_path / "images", tmp_path / "store")
    (tmp_path / "images").rename(tmp_path / "elsewhere")
    search(folder, "--images", photographs / "0.png", "--duplicates", 0.01)
    assert "search.html is not written: the images are gone" in caplog.text
    assert not (folder / "search.html").exists()
    words = ("--duplicates", 0.01, "--overwrite", "--data_path", tmp_path / "elsewhere", "--top", 2)
    search(folder, "--images", photographs / "0.png", *words)
    assert (folder / "search.html").read_text().count("<img") == 1 + 2
    assert (folder / "duplicates.html").read_text().count("<img") >= 2
    search(folder, "--images", folder, *words)
    assert (folder / "search.html").read_text().count("<img") == NUM_IMAGES * (1 + 2)


def test_a_clip_is_searched_by_its_image_encoder(photographs: Path, tmp_path: Path) -> None:
    folder = embed(clip_fakes.small_checkpoint(tmp_path / "clip.pth"), photographs, tmp_path / "store")
    copy = shutil.copy(photographs / "4.png", tmp_path / "copy.png")
    [entry] = search(folder, "--images", copy, "--slots", "1")["search"]["queries"]
    assert entry["nearest"][0] == [str(photographs / "4.png"), pytest.approx(1, abs=1e-4)]


def test_weights_that_moved_are_found_and_others_are_refused(weights: Path, photographs: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(weights, tmp_path / "a.pth"))
    folder = embed(path, photographs, tmp_path / "store")
    query = ("--images", photographs / "1.png")
    path.rename(tmp_path / "b.pth")
    with refused("Say with --pretrained_weights where the weights are now; or embed"):
        search(folder, *query)
    search(folder, *query, "--pretrained_weights", tmp_path / "b.pth")
    save_small_encoder(path, seed=3)
    with refused("of another encoder than"):
        search(folder, *query, "--overwrite")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nothing to search; give --images, or --duplicates 0.97"),
        (("--images", "empty"), "empty"),
        (("--images", "broken.png"), "broken.png: is not"),
        (("--images", "broken"), "broken"),
        (("--images", "nowhere.jpg"), "data_path='nowhere.jpg' does not exist"),
        (("--duplicates", "0.9", "--what", "mean"), "--what mean: the folder has encoding"),
        (("--duplicates", "0.9", "--slots", "99"), "slots name slot 99, which does not exist"),
        (("--duplicates", "0.9", "--output_dir", "old"), "duplicates.csv exists already; give another --output_dir"),
        (("--images", "captions"), "holds captions; give a folder with embeddings of images"),
    ],
)
def test_mistakes_end_with_one_line(
    words: tuple[str, ...],
    message: str,
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "broken", "old"):
        Path(name).mkdir()
    for name in ("broken.png", "broken/1.png", "old/duplicates.csv"):
        Path(name).write_bytes(b"no image")
    if "captions" in words:
        write_embeddings(tmp_path / "captions", tmp_path / "others", captions=np.ones((23, 3), np.float32))
        record = json.loads(Path("captions/embedding.json").read_text())
        record["features"].pop("encoding")
        Path("captions/embedding.json").write_text(json.dumps(record))
    with refused(message):
        search(store, *words)


def test_slots_need_an_encoder_with_slots_and_random_weights_a_folder(
    photographs: Path, weights: Path, tmp_path: Path
) -> None:
    folder = embed(save_small_encoder(tmp_path / "cls.pth", "cls"), photographs, tmp_path / "cls")
    with refused("has no slots; take --what encoding or slots"):
        search(folder, "--duplicates", 0.9, "--slots", "1")
    folder = embed(weights, photographs, tmp_path / "random", "--untrained", "true")
    with refused("is of random weights; embed"):
        search(folder, "--images", photographs / "1.png")
    search(folder, "--images", folder)


def test_blocks_of_a_store_are_its_vectors(store: Path) -> None:
    found = load_embeddings(store)
    blocks = [block for _, block in open_vectors(found, "encoding", (), CPU).blocks()]
    assert [len(block) for block in blocks] == [5, 2]
    np.testing.assert_array_equal(torch.cat(blocks), found.vectors("encoding"))

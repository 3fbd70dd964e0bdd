"""Embeddings on disk: what they hold, unreadable images, kills and resumes, several processes, bad input."""

import contextlib
import csv
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kills import killed_at
from PIL import Image
from refusals import refused
from small_models import save_small_encoder
from two_ranks import TwoRanks

from dino_sparo.__main__ import run
from dino_sparo.data.scenes.images import Scenes
from dino_sparo.evaluation.embed import store
from dino_sparo.evaluation.embed.command import features_of
from dino_sparo.evaluation.embed.store import EmbeddingWriter, load_embeddings
from dino_sparo.runtime.launch import shutdown
from dino_sparo.runtime.lock import RunLock
from dino_sparo.weights.encoder import load_encoder

NUM_IMAGES, SIDE = 11, 16
ALL_KINDS = ("encoding", "slots", "cls", "patches", "mean")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return save_small_encoder(tmp_path / "run" / "checkpoint.pth")


def write_photographs(folder: Path) -> Path:
    """Images of three classes and of different sizes."""
    rng = np.random.default_rng(0)
    for number in range(NUM_IMAGES):
        path = folder / "photographs" / "abc"[number % 3] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(256, size=(20 + number, 23, 3), dtype=np.uint8)).save(path)
    return folder / "photographs"


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    return write_photographs(tmp_path)


def embed(weights: Path, images: Path, out: Path, *more: str) -> dict[str, Any]:
    words = ["--pretrained_weights", weights, "--data_path", images, "--output_dir", out, "--batch_size_per_gpu", "2"]
    try:
        return run("embed", [*map(str, words), "--num_workers", "0", "--device", "cpu", *more])
    finally:
        shutdown()


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("readout", ["sparo", "cls", "gap"])
def test_every_kind_of_feature_is_that_of_the_encoder(readout: str, photographs: Path, tmp_path: Path) -> None:
    weights = save_small_encoder(tmp_path / "checkpoint.pth", readout)
    kinds = [kind for kind in ALL_KINDS if kind != "slots" or readout == "sparo"]
    embed(weights, photographs, tmp_path / "out", "--what", *kinds)
    found = load_embeddings(tmp_path / "out")
    encoder = load_encoder(weights)
    images = encoder.transform([Image.open(path) for path in found.index["path"]])
    with torch.inference_mode():
        expected = features_of(encoder, kinds, images)
        torch.testing.assert_close(expected["encoding"], encoder(images))
    assert list(found.arrays) == kinds
    for kind in kinds:
        torch.testing.assert_close(torch.from_numpy(found.arrays[kind].copy()), expected[kind], rtol=1e-4, atol=1e-5)
    assert found.index["label"] == [Path(path).parent.name for path in found.index["path"]]
    assert sorted(found.index["path"]) == sorted(map(str, photographs.rglob("*.png")))


def test_unreadable_images_have_no_row_and_are_listed_with_the_reason(
    weights: Path, photographs: Path, tmp_path: Path
) -> None:
    embed(weights, photographs, tmp_path / "whole", "--what", "encoding", "mean")
    for name in ("a/3.png", "c/8.png"):
        (photographs / name).write_bytes(b"no image")
    record = embed(weights, photographs, tmp_path / "out", "--what", "encoding", "mean")
    whole, found = load_embeddings(tmp_path / "whole"), load_embeddings(tmp_path / "out")
    kept = [row for row, path in enumerate(whole.index["path"]) if not path.endswith(("a/3.png", "c/8.png"))]
    assert found.index["path"] == [whole.index["path"][row] for row in kept]
    for kind in ("encoding", "mean"):
        np.testing.assert_array_equal(found.arrays[kind], whole.arrays[kind][kept])
    with open(tmp_path / "out" / "unreadable.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [Path(row["path"]).name for row in rows] == ["3.png", "8.png"]
    assert all(row["reason"] for row in rows)
    assert (record["num_images"], record["num_unreadable"]) == (NUM_IMAGES - 2, 2)


KILLED = ("--what", "slots", "cls", "mean")  # options of the runs that are killed
Undisturbed = tuple[Path, Path, dict[str, bytes]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Weights, photographs of which one is unreadable, and the files of a run that nobody kills."""
    folder = tmp_path_factory.mktemp("undisturbed")
    weights, photographs = save_small_encoder(folder / "run" / "checkpoint.pth"), write_photographs(folder)
    (photographs / "b" / "4.png").write_bytes(b"no image")
    embed(weights, photographs, folder / "out", *KILLED)
    return weights, photographs, files_of(folder / "out")


@pytest.mark.parametrize(
    ("where", "name", "call"),
    [
        *((EmbeddingWriter, name, call) for name in ("write", "finish_chunk", "_keep_rows") for call in (1, 3)),
        *((store, "write_record", call) for call in (1, 2)),
        *((store, name, 1) for name in ("_write_index", "write_csv")),
        *((store.os, "replace", call) for call in (1, 2, 3, 5)),
        (store.shutil, "rmtree", 2),
    ],
    ids=str,
)
def test_a_killed_run_resumes_to_the_same_bytes_and_leaves_nothing_behind(
    where: Any, name: str, call: int, undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug: a kill behind the last file left `chunks/` for ever."""
    monkeypatch.setattr(store, "CHUNK_BATCHES", 2)
    monkeypatch.setattr(store, "MIN_CHUNKS", 1)
    weights, photographs, files = undisturbed
    with monkeypatch.context() as patch:
        patch.setattr(where, name, killed_at(call, getattr(where, name)))
        with pytest.raises(SystemExit):
            embed(weights, photographs, tmp_path / "out", *KILLED)
    embed(weights, photographs, tmp_path / "out", *KILLED)
    assert files_of(tmp_path / "out") == files


def test_a_kill_while_old_embeddings_are_removed_leaves_none_of_them(
    weights: Path, photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed(weights, photographs, tmp_path / "undisturbed")
    embed(weights, photographs, tmp_path / "out", "--what", "slots", "mean")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed_at(2, Path.unlink))
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            embed(weights, photographs, tmp_path / "out", "--overwrite")
    embed(weights, photographs, tmp_path / "out", "--overwrite")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "undisturbed")


def test_a_resumed_run_embeds_only_what_is_left(
    weights: Path,
    photographs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(store, "CHUNK_BATCHES", 1)
    folder = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(EmbeddingWriter, "finish", killed_at(1, EmbeddingWriter.finish))
        with pytest.raises(SystemExit):
            embed(weights, photographs, folder)
    with pytest.raises(ValueError, match="not complete; run the same embed command again"):
        load_embeddings(folder)
    (folder / store.CHUNKS / "00000002-2.json").unlink()
    embed(weights, photographs, folder)
    assert "resuming: 5 of 6 chunks are done" in capsys.readouterr().out


def test_chunks_of_another_length_are_not_taken_for_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Earlier versions wrote 16 batches into every chunk; several processes do not finish chunks in their order.
    record: dict[str, Any] = {name: {} for name in store.RECORDED}
    with monkeypatch.context() as patch:
        patch.setattr(store, "MIN_CHUNKS", 1)
        before = EmbeddingWriter(tmp_path, {"mean": (3,)}, "float32", Scenes(100, 24), batch_size=2)
        before.open(record, overwrite=False)
        before.finish_chunk(0, [])
        before.finish_chunk(2, [])
        assert before.remaining() == [1, 3]
    now = EmbeddingWriter(tmp_path, {"mean": (3,)}, "float32", Scenes(100, 24), batch_size=2)
    now.open(record, overwrite=False)
    assert now.remaining() == list(range(50))


def embed_on_a_rank(weights: Path, images: Path, out: Path) -> None:
    from dino_sparo.evaluation.embed.command import embed_images
    from dino_sparo.evaluation.embed.options import embed_parser

    store.CHUNK_BATCHES = 1
    words = ["--pretrained_weights", weights, "--data_path", images, "--output_dir", out, "--batch_size_per_gpu", "2"]
    embed_images(embed_parser().parse_args([*map(str, words), "--num_workers", "0", "--device", "cpu"]))


@pytest.mark.slow
def test_two_processes_write_one_result(
    weights: Path, photographs: Path, tmp_path: Path, two_ranks: TwoRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "CHUNK_BATCHES", 1)
    (photographs / "a" / "0.png").write_bytes(b"")
    embed(weights, photographs, tmp_path / "one")
    two_ranks(embed_on_a_rank, weights, photographs, tmp_path / "two")
    assert files_of(tmp_path / "two") == files_of(tmp_path / "one")


def flip_a_bit(path: Path, rng: np.random.Generator) -> bytes:
    """Flip a random bit; returns the file's content before."""
    whole = path.read_bytes()
    content, place = bytearray(whole), int(rng.integers(len(whole)))
    content[place] ^= 1 << int(rng.integers(8))
    path.write_bytes(content)
    return whole


def test_a_flipped_bit_in_any_file_is_refused_or_harmless(weights: Path, photographs: Path, tmp_path: Path) -> None:
    (photographs / "a" / "3.png").write_bytes(b"no image")
    embed(weights, photographs, tmp_path / "out", "--what", "encoding", "mean")
    found, rng = load_embeddings(tmp_path / "out"), np.random.default_rng(0)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*found.record["files"], "embedding.json"}
    for path in (tmp_path / "out").iterdir():
        for _ in range(20):
            whole = flip_a_bit(path, rng)
            try:
                again = load_embeddings(tmp_path / "out")
            except ValueError as error:
                assert str(path) in str(error)  # noqa: PT017
                assert "embed again with --overwrite" in str(error)  # noqa: PT017
            else:  # white space of the record
                assert (path.name, again.record) == ("embedding.json", found.record)
            path.write_bytes(whole)


def test_a_second_run_in_the_folder_is_refused(weights: Path, photographs: Path, tmp_path: Path) -> None:
    with RunLock(tmp_path / "out") as lock:
        lock.acquire()
        with refused("is in use by another run"):
            embed(weights, photographs, tmp_path / "out")


def write_table(photographs: Path, splits: Sequence[str] = (), label: str = "") -> Path:
    """A table of the photographs; `label` is that of the first."""
    table = photographs.parent / "labels.csv"
    paths = sorted(photographs.rglob("*.png"))
    rows = [[path, path.parent.name, *splits[row : row + 1]] for row, path in enumerate(paths)]
    rows[0][1] = label or rows[0][1]
    with open(table, "w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "split")[: len(rows[0])], *rows])
    return table


def change_pixels(photographs: Path) -> None:
    path = photographs / "a" / "3.png"
    Image.new("RGB", (30, 23), (1, 2, 3)).save(path)


def change_time(photographs: Path) -> None:
    os.utime(photographs / "a" / "3.png", (1, 1))


@pytest.mark.parametrize(
    ("change", "name", "killed", "call"),
    [
        (change_pixels, "sizes_and_times", "finish_chunk", 2),
        (change_time, "sizes_and_times", None, 0),
        (lambda photographs: write_table(photographs, label="b"), "labels", "finish", 1),
        (lambda photographs: write_table(photographs, label="b"), "labels", None, 0),
    ],
    ids=["pixels", "time", "label", "label of a finished run"],
)
def test_changed_images_and_labels_are_noticed(
    change: Any,
    name: str,
    killed: str | None,
    call: int,
    weights: Path,
    photographs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bug: a resumed run mixed features of old and new images, and a finished one kept its old labels."""
    table = write_table(photographs)
    with monkeypatch.context() as patch, contextlib.suppress(SystemExit):
        patch.setattr(store, "CHUNK_BATCHES", 1)
        if killed:
            patch.setattr(EmbeddingWriter, killed, killed_at(call, getattr(EmbeddingWriter, killed)))
        embed(weights, table, tmp_path / "out")
    change(photographs)
    with refused(f"holds other embeddings ({name} "):
        embed(weights, table, tmp_path / "out")
    embed(weights, table, tmp_path / "out", "--overwrite")
    embed(weights, table, tmp_path / "fresh")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "fresh")


def test_the_split_that_was_embedded_is_named(
    weights: Path, photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write_table(photographs, ["train"] * 8 + ["val"] * 3)
    embed(weights, table, tmp_path / "out")
    expected = f"8 images of table {table} (split 'train'; --split all embeds all), 0 unreadable"
    assert expected in capsys.readouterr().out
    embed(weights, table, tmp_path / "all", "--split", "all")
    assert f"11 images of table {table}, 0 unreadable" in capsys.readouterr().out


def test_half_precision_rounds_the_same_numbers(weights: Path, photographs: Path, tmp_path: Path) -> None:
    embed(weights, photographs, tmp_path / "full")
    embed(weights, photographs, tmp_path / "half", "--dtype", "float16")
    full, half = (load_embeddings(tmp_path / name).arrays["encoding"] for name in ("full", "half"))
    assert half.dtype == np.float16
    np.testing.assert_array_equal(half, full.astype(np.float16))


def test_arrays_are_opened_memory_mapped_and_a_second_call_changes_nothing(
    weights: Path, photographs: Path, tmp_path: Path
) -> None:
    embed(weights, photographs, tmp_path / "out")
    before = files_of(tmp_path / "out")
    assert isinstance(load_embeddings(tmp_path / "out").arrays["encoding"], np.memmap)
    embed(weights, photographs, tmp_path / "out")
    assert files_of(tmp_path / "out") == before


def test_unlabelled_images_have_empty_labels(weights: Path, photographs: Path, tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for path in photographs.rglob("*.png"):
        shutil.copy(path, flat)
    embed(weights, flat, tmp_path / "out")
    assert load_embeddings(tmp_path / "out").index["label"] == [""] * NUM_IMAGES


def test_the_index_is_parquet_where_pyarrow_is_installed(weights: Path, photographs: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pip install pyarrow")
    embed(weights, photographs, tmp_path / "out")
    table = parquet.read_table(tmp_path / "out" / "index.parquet")
    assert table.column("row").to_pylist() == list(range(NUM_IMAGES))
    assert len(load_embeddings(tmp_path / "out").index["path"]) == NUM_IMAGES


# Bad input.


def test_slots_of_an_encoder_without_slots_are_refused(photographs: Path, tmp_path: Path) -> None:
    weights = save_small_encoder(tmp_path / "checkpoint.pth", "cls")
    with refused("--what slots: readout 'cls' has no slots; take encoding, cls, patches or mean"):
        embed(weights, photographs, tmp_path / "out", "--what", "slots")


def test_other_embeddings_are_kept_unless_they_may_be_overwritten(
    weights: Path, photographs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    embed(weights, photographs, out)
    before = files_of(out)
    other = save_small_encoder(tmp_path / "other" / "checkpoint.pth", seed=1)
    with refused("holds other embeddings (weights"):
        embed(other, photographs, out)
    with refused("holds other embeddings (limits"):
        embed(weights, photographs, out, "--max_value", "4095")
    with refused("'exif': 'apply'} there, "):
        embed(weights, photographs, out, "--exif", "ignore")
    assert "give another --output_dir, or --overwrite" in caplog.text
    assert files_of(out) == before
    embed(other, photographs, out, "--overwrite")
    assert files_of(out)["encoding.npy"] != before["encoding.npy"]


def test_files_of_others_are_kept(weights: Path, photographs: Path, tmp_path: Path) -> None:
    """The bug: any `chunks/`, `mean.npy` and `unreadable.csv` in the folder were deleted."""
    others = {"mean.npy": b"1", "unreadable.csv": b"2", "chunks/notes.txt": b"3", "encoding.npy": b"4"}
    (tmp_path / "out" / "chunks").mkdir(parents=True)
    for name, content in others.items():
        (tmp_path / "out" / name).write_bytes(content)
    before = files_of(tmp_path / "out")
    with refused("holds encoding.npy, unreadable.csv, not written by embed; give another --output_dir, or --overwrite"):
        embed(weights, photographs, tmp_path / "out")
    assert files_of(tmp_path / "out") == before
    embed(weights, photographs, tmp_path / "out", "--overwrite")
    assert load_embeddings(tmp_path / "out").record["complete"]
    assert {name: before[name] for name in ("mean.npy", "notes.txt")}.items() <= files_of(tmp_path / "out").items()


def test_missing_rows_are_detected_without_a_comparison_of_checksums(
    weights: Path, photographs: Path, tmp_path: Path
) -> None:
    embed(weights, photographs, tmp_path / "out")
    np.save(tmp_path / "out" / "encoding.npy", np.zeros((3, 15)))
    with pytest.raises(ValueError, match=r"is damaged \(rows are missing"):
        load_embeddings(tmp_path / "out", verify=False)


def test_features_that_half_precision_cannot_hold_are_refused(weights: Path, photographs: Path, tmp_path: Path) -> None:
    checkpoint = torch.load(weights, weights_only=True)
    checkpoint["teacher"] = {name: 1e6 * value for name, value in checkpoint["teacher"].items()}
    torch.save(checkpoint, weights)
    with refused("features of images 0 to 1 are not finite in float16"):
        embed(weights, photographs, tmp_path / "out", "--dtype", "float16")


def test_a_disk_with_less_space_than_needed_is_refused_before_anything_is_written(
    weights: Path, photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Enough for the array, but not for the copy of its readable rows.
    usage = shutil.disk_usage(tmp_path)._replace(free=NUM_IMAGES * 15 * 4 * 3 // 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with refused("take 0.00 GB, but"):
        embed(weights, photographs, tmp_path / "out")
    assert files_of(tmp_path / "out") == {}


def test_what_is_no_embedding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no embeddings"):
        load_embeddings(tmp_path)
    for content, message in (("{", "damaged"), ("[1]", "damaged"), ('{"a": 1}', "is not of dino-sparo embed")):
        (tmp_path / "embedding.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            load_embeddings(tmp_path)


def test_the_folder_of_images_and_of_the_result_are_needed(weights: Path) -> None:
    with refused("embed needs --data_path"):
        run("embed", ["--pretrained_weights", str(weights)])

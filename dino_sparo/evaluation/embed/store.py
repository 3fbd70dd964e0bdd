"""A folder of embeddings: one array per kind of feature, an index of the images, and a record of how they were made.

    encoding.npy, slots.npy, ...   one row per readable image, in the order of the source; opened memory-mapped
    index.parquet or index.csv     row, path, label (the name of the class, empty if there is none)
                                   of captions the path is the image's, and the column caption has the words
    unreadable.csv                 path and reason of each image that has no row
    embedding.json                 encoder, images, view, precision, versions

While images are embedded, the arrays have a row for every image, and `chunks/` has one small file for every finished
chunk of images. So any number of processes write one result, and a run that was killed resumes behind its last chunk.
"""

import csv
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from dino_sparo.data.sources import ImageSource
from dino_sparo.evaluation.options import FEATURES
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import differences, write_json, writing

RECORD, UNREADABLE, CHUNKS = "embedding.json", "unreadable.csv", "chunks"
CHUNK_BATCHES = 16  # most batches between two files in `chunks/`
MIN_CHUNKS = 64  # fewer if there are fewer batches: a killed run repeats little
BLOCK_ROWS = 65_536  # rows that are copied or indexed at a time


@dataclass(frozen=True)
class Embeddings:
    """Embeddings on disk.

    Attributes:
        arrays: kind of feature -> memory-mapped array, (images, ...).
        index: "path" and "label" of each row; of captions also "caption".
        record: how the embeddings were made.
    """

    arrays: dict[str, np.ndarray]
    index: dict[str, list[str]]
    record: dict[str, Any]

    def vectors(self, kind: str, rows: Any = slice(None), slot: int | None = None) -> Float[np.ndarray, "rows F"]:
        """Features in memory, float32, each image's numbers in one vector of length one."""
        array = self.arrays.get(kind)
        if array is None:
            raise UserError(f"--what {kind}: the folder has {', '.join(self.arrays)}; embed with --what {kind}")
        if slot is not None and (array.ndim != 3 or not 0 <= slot < array.shape[1]):
            raise UserError(f"--slot {slot}: {kind} has the shape {array.shape[1:]}; take --what slots")
        features = np.asarray(array[rows] if slot is None else array[rows, slot], dtype=np.float32)
        features = features.reshape(len(features), -1)
        lengths = np.linalg.norm(features, axis=1, keepdims=True)
        return features / np.maximum(lengths, np.finfo(np.float32).tiny)


def load_embeddings(folder: str | Path) -> Embeddings:
    """Open the embeddings that `dino-sparo embed` or `dino_sparo.embed` wrote; the arrays stay on disk until used."""
    folder = Path(folder)
    record = read_record(folder)
    if record is None:
        raise UserError(f"{folder} has no embeddings: there is no {RECORD} in it; dino-sparo embed writes one")
    if not record["complete"]:
        raise UserError(f"the embeddings in {folder} are not complete; run the same embed command again to resume")
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in record["features"]}
    return Embeddings(arrays, _read_index(folder), record)


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record of a folder of embeddings; None if there is none."""
    try:
        record: dict[str, Any] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(f"{folder / RECORD} is damaged ({error}); embed again with --overwrite") from error
    return record


class EmbeddingWriter:
    """Writes a folder of embeddings, chunk by chunk, from several processes.

    Args:
        folder: of the result.
        shapes: kind of feature -> shape of one image's feature.
        dtype: of the arrays.
        num_images: of the source.
        batch_size: images per batch.
        unit: name of what has a row: images or captions.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: str,
        num_images: int,
        batch_size: int,
        unit: str = "images",
    ) -> None:
        self.folder, self.shapes, self.dtype = folder, dict(shapes), np.dtype(dtype)
        self.num_images, self.batch_size, self.unit = num_images, batch_size, unit
        self.chunk_images = batch_size * min(CHUNK_BATCHES, max(1, num_images // (MIN_CHUNKS * batch_size)))
        self.num_chunks = -(-num_images // self.chunk_images)

    @property
    def num_bytes(self) -> int:
        """Size of all arrays on disk."""
        return self.num_images * self.dtype.itemsize * sum(int(np.prod(shape)) for shape in self.shapes.values())

    def open(self, record: dict[str, Any], overwrite: bool) -> None:
        """Create the folder's files, or take up those of a run that was killed; called on one process."""
        self.folder.mkdir(parents=True, exist_ok=True)
        saved = None if overwrite else read_record(self.folder)
        if saved is not None:
            if different := differences(saved["settings"], record["settings"], "there", "now"):
                raise UserError(
                    f"{self.folder} holds other embeddings ({'; '.join(different)}); "
                    "give another --output_dir, or --overwrite"
                )
            return
        shutil.rmtree(self.folder / CHUNKS, ignore_errors=True)
        for name in (RECORD, *(f"{feature}.npy" for feature in FEATURES)):
            (self.folder / name).unlink(missing_ok=True)
        free = shutil.disk_usage(self.folder).free
        if self.num_bytes > free:
            raise UserError(
                f"the embeddings take {self.num_bytes / 1e9:.2f} GB, but {self.folder} has {free / 1e9:.2f} GB left; "
                "embed fewer kinds (--what), take --dtype float16, or give an --output_dir on a larger disk"
            )
        (self.folder / CHUNKS).mkdir()
        for name, shape in self.shapes.items():
            np.lib.format.open_memmap(self._path(name), "w+", self.dtype, (self.num_images, *shape)).flush()
        write_json({**record, "complete": False}, self.folder / RECORD)

    def remaining(self) -> list[int]:
        """Numbers of the chunks that are not finished."""
        return [chunk for chunk in range(self.num_chunks) if not self._chunk_file(chunk).is_file()]

    def batches(self, chunk: int) -> list[range]:
        """The batches of a chunk, as ranges of indices of images: lists of ten million numbers would take memory."""
        images = range(self.num_images)[chunk * self.chunk_images : (chunk + 1) * self.chunk_images]
        return [images[start : start + self.batch_size] for start in range(0, len(images), self.batch_size)]

    def write(self, name: str, start: int, rows: np.ndarray) -> None:
        """Write rows of one kind, the first of them that of image `start`."""
        header_bytes = np.load(self._path(name), mmap_mode="r").offset
        with open(self._path(name), "r+b") as file:
            file.seek(header_bytes + start * rows[0].nbytes)
            file.write(rows.tobytes())

    def finish_chunk(self, chunk: int, unreadable: list[tuple[int, str, str]]) -> None:
        """Note that a chunk is on the disk."""
        for name in self.shapes:
            with open(self._path(name), "r+b") as file:
                os.fsync(file.fileno())
        write_json({"unreadable": unreadable}, self._chunk_file(chunk))

    def finish(self, source: ImageSource, record: dict[str, Any], captions: Sequence[str] | None = None) -> None:
        """Remove the rows of unreadable images and write the index; called on one process when all chunks are done."""
        chunks = [json.loads(self._chunk_file(chunk).read_text()) for chunk in range(self.num_chunks)]
        unreadable = [entry for chunk in chunks for entry in chunk["unreadable"]]
        kept = np.setdiff1d(np.arange(self.num_images), [index for index, _, _ in unreadable])
        for name in self.shapes:
            self._keep_rows(name, kept)
        write_csv(self.folder / UNREADABLE, [("path", "reason"), *((path, reason) for _, path, reason in unreadable)])
        _write_index(self.folder, kept, source, captions)
        counts = {"num_images": len(kept), "num_unreadable": len(unreadable)}
        write_json({**record, **counts, "complete": True}, self.folder / RECORD)
        shutil.rmtree(self.folder / CHUNKS)

    def _keep_rows(self, name: str, kept: np.ndarray) -> None:
        """Copy the rows of readable images; a file that has these rows alone stays as it is."""
        path = self._path(name)
        rows = np.load(path, mmap_mode="r")
        if len(rows) == len(kept):
            return
        copy = path.with_suffix(".tmp")
        target = np.lib.format.open_memmap(copy, "w+", rows.dtype, (len(kept), *rows.shape[1:]))
        for start in range(0, len(kept), BLOCK_ROWS):
            target[start : start + BLOCK_ROWS] = rows[kept[start : start + BLOCK_ROWS]]
        target.flush()
        os.replace(copy, path)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.npy"

    def _chunk_file(self, chunk: int) -> Path:
        # With the length, since a version that cuts other chunks has other numbers for them.
        return self.folder / CHUNKS / f"{chunk:08d}-{self.chunk_images}.json"


def _write_index(folder: Path, kept: np.ndarray, source: ImageSource, captions: Sequence[str] | None) -> None:
    """index.parquet, or index.csv where pyarrow is not installed."""
    images = kept.tolist()
    labels = [-1] * len(images) if source.labels is None else [int(source.labels[image]) for image in images]
    columns: dict[str, Sequence[Any]] = {
        "row": list(range(len(images))),
        "path": [source.location(image) for image in images],
        "label": [(source.classes or [])[label] if label >= 0 else "" for label in labels],
        **({} if captions is None else {"caption": [captions[image] for image in images]}),
    }
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        write_csv(folder / "index.csv", [tuple(columns), *zip(*columns.values(), strict=True)])
        return
    for name in columns.keys() - {"row"}:  # file names as valid UTF-8
        columns[name] = [text.encode("utf-8", "backslashreplace").decode() for text in columns[name]]
    parquet.write_table(pa.table(columns), folder / "index.parquet")


def write_csv(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Write rows, the first of them the names of the columns."""
    with writing(path), open(path, "w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        csv.writer(file).writerows(rows)


def _read_index(folder: Path) -> dict[str, list[str]]:
    if (folder / "index.parquet").is_file():
        from pyarrow import parquet

        return dict(parquet.read_table(folder / "index.parquet").drop(["row"]).to_pydict())
    with open(folder / "index.csv", newline="", encoding="utf-8") as file:
        names, *rows = csv.reader(file)
    return {name: [row[column] for row in rows] for column, name in enumerate(names) if name != "row"}

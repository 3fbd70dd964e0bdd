"""A folder of embeddings: one array per kind of feature, an index of the images, and a record.

    encoding.npy, slots.npy, ...   one row per readable image, in the order of the source; opened memory-mapped
    index.parquet or index.csv     row, path, label (name of the class, or empty); for captions the image's path,
                                   and the column caption
    unreadable.csv                 path and reason of each image without a row
    embedding.json                 encoder, images, view, precision, versions; size and CRC-32 of each file

During embedding, the arrays have a row for every image, and `.embedding/` has a small file for every finished chunk of
images. So any number of processes write one result, and a killed run resumes after its finished chunks. Files that are
not in the record belong to the user: they are replaced only with --overwrite, and never deleted.
"""

import csv
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from dino_sparo.data.sources import ImageSource
from dino_sparo.evaluation.features import check_features
from dino_sparo.runtime import files
from dino_sparo.runtime.faults import UserError, is_passing, require
from dino_sparo.runtime.files import differences, write_json, write_record, writing, written_beside

logger = logging.getLogger(__name__)

DERIVED = ("clusters", "predictions", "search", "duplicates")  # stems of files that other commands write here
RECORD, UNREADABLE, CHUNKS = "embedding.json", "unreadable.csv", ".embedding"
INDEXES = ("index.parquet", "index.csv")
RECORDED = {"settings", "encoder", "features", "images", "complete"}  # entries that every record has
SAMPLED_BYTES = 1 << 26  # about the size of a sample that shows whether all features are equal
CHUNK_BATCHES = 16  # largest number of batches in a chunk
MIN_CHUNKS = 64  # if there are as many batches, so that a killed run repeats little
BLOCK_ROWS = 65_536  # rows that are copied or indexed at a time


@dataclass(frozen=True)
class Embeddings:
    """Embeddings on disk.

    Attributes:
        arrays: kind of feature -> memory-mapped array, (images, ...).
        index: "path" and "label" of each row; of captions also "caption".
        record: how the embeddings were made.
        folder: where they lie.
    """

    arrays: dict[str, np.ndarray]
    index: dict[str, list[str]]
    record: dict[str, Any]
    folder: Path

    def array(self, kind: str, slot: int | None = None) -> np.ndarray:
        """The features of a kind, (images, ...), or of one of its slots; UserError if the folder lacks them."""
        array = self.arrays.get(kind)
        if array is None and "captions" in self.arrays:
            raise UserError(f"{self.folder} holds captions; give a folder with embeddings of images")
        if array is None:
            raise UserError(f"--what {kind}: the folder has {', '.join(self.arrays)}; embed with --what {kind}")
        if slot is not None and (array.ndim != 3 or not 0 <= slot < array.shape[1]):
            raise UserError(f"--slot {slot}: {kind} has the shape {array.shape[1:]}; take --what slots")
        return array if slot is None else array[:, slot]

    def source(self, kind: str) -> dict[str, Any]:
        """Folder, kind and checksum of features, for a result."""
        return {"folder": str(self.folder), "what": kind, "file": self.record.get("files", {}).get(f"{kind}.npy")}

    def vectors(self, kind: str, rows: Any = slice(None), slot: int | None = None) -> Float[np.ndarray, "rows F"]:
        """Features of some rows, as `unit_vectors`."""
        return unit_vectors(self.array(kind, slot)[rows], kind)

    def cells(self, row: int) -> tuple[int, str, str]:
        """Row, path and label of an image, for a table."""
        return row, self.index["path"][row], self.index["label"][row]


def unit_vectors(features: np.ndarray, kind: str) -> Float[np.ndarray, "rows F"]:
    """Features (rows, ...) of a kind as one float32 vector of length one per row."""
    vectors = np.asarray(features, dtype=np.float32).reshape(len(features), -1)
    if not np.isfinite(vectors).all():
        raise UserError(f"{kind}: features are not finite; embed again, with an encoder that is not broken")
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny)


def check_sample(array: np.ndarray, name: str) -> list[str]:
    """`check_features` for evenly spaced rows of an array (images, ...)."""
    rows = np.array(array[:: 1 + array.nbytes // SAMPLED_BYTES], dtype=np.float32)
    return check_features(torch.from_numpy(rows).flatten(1), name)


def load_embeddings(folder: str | Path, verify: bool = True) -> Embeddings:
    """Open the embeddings that `dino-sparo embed` or `dino_sparo.embed` wrote; the arrays stay on disk.

    With `verify`, all files are compared with their checksums.
    """
    folder = Path(os.path.expanduser(folder))
    record = read_record(folder, verify)
    if record is None:
        raise UserError(f"{folder} has no embeddings: there is no {RECORD} in it; dino-sparo embed writes one")
    if not record["complete"]:
        raise UserError(f"the embeddings in {folder} are not complete; run the same embed command again to resume")
    try:
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in record["features"]}
        index = _read_index(folder)
        if {record["num_images"]} != {len(index["path"]), *map(len, arrays.values())}:
            raise ValueError("rows are missing, or its files are of two runs")
    except (OSError, ValueError, KeyError, SyntaxError) as error:  # without `verify`
        if is_passing(error):
            raise
        raise UserError(f"{folder} is damaged ({error}); embed again with --overwrite") from error
    return Embeddings(arrays, index, record, folder)


def is_store(path: str) -> bool:
    """Whether a path is a folder of embeddings."""
    return Path(path, RECORD).is_file()


def require_same_encoder(embeddings: Embeddings, other: Embeddings) -> None:
    """UserError unless both embeddings are of the same weights and image size; warns of images read differently."""
    first, second = (
        {**each.record["encoder"], "pretrained_weights": None, "img_size": each.record["settings"]["img_size"]}
        for each in (embeddings, other)
    )
    if different := differences(first, second, f"in {embeddings.folder}", f"in {other.folder}"):
        raise UserError(
            f"{other.folder} holds embeddings of another encoder than {embeddings.folder}: {'; '.join(different)}; "
            "embed both with the same checkpoint"
        )
    theirs, ours = options_of(other), options_of(embeddings)
    # Older records lack some.
    known = {name: value for name, value in ours.items() if None not in (value, theirs[name])}
    if different := differences(theirs, known, f"in {other.folder}", f"in {embeddings.folder}"):
        logger.warning("features may not be comparable, as images were read differently: %s", "; ".join(different))


def options_of(embeddings: Embeddings) -> dict[str, Any]:
    """The options of dino-sparo embed with which images are read and computed as for these embeddings."""
    settings = embeddings.record["settings"]
    limits = settings.get("limits", {})
    return {
        "max_image_mb": limits.get("max_mb"),
        "max_image_mpix": limits.get("max_mpix"),
        **{name: limits.get(name) for name in ("max_value", "exif")},
        **{name: settings.get(name) for name in ("img_size", "fast_views", "precision")},
    }


def read_record(folder: Path, verify: bool = False) -> dict[str, Any] | None:
    """The record of a folder, None without embeddings; `verify` compares the files with their checksums."""
    try:
        record = files.read_record(folder / RECORD, verify)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UserError as error:
        raise UserError(f"{error}; embed again with --overwrite") from error
    if missing := RECORDED - record.keys():
        raise UserError(f"{folder / RECORD} is not of dino-sparo embed: it has no {', '.join(sorted(missing))}")
    return record


class EmbeddingWriter:
    """Writes a folder of embeddings, chunk by chunk, from several processes.

    Args:
        folder: of the result.
        shapes: kind of feature -> shape of one image's feature.
        dtype: of the arrays.
        source: the images, or the image of each caption.
        batch_size: images per batch.
        captions: one per row, if captions are embedded.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: str,
        source: ImageSource,
        batch_size: int,
        captions: Sequence[str] | None = None,
    ) -> None:
        self.folder, self.shapes, self.dtype = folder, dict(shapes), np.dtype(dtype)
        self.source, self.num_images, self.batch_size, self.captions = source, len(source), batch_size, captions
        self.unit = "images" if captions is None else "captions"
        self.chunk_images = batch_size * min(CHUNK_BATCHES, max(1, self.num_images // (MIN_CHUNKS * batch_size)))
        self.num_chunks = -(-self.num_images // self.chunk_images)

    @property
    def num_bytes(self) -> int:
        """Size of all arrays on disk."""
        return self.num_images * sum(map(self._row_bytes, self.shapes))

    def _row_bytes(self, name: str) -> int:
        return self.dtype.itemsize * int(np.prod(self.shapes[name]))

    def open(self, record: dict[str, Any], overwrite: bool) -> None:
        """Create the files, or open the files of a killed run; called on one process, which has the lock.

        Raises:
            UserError: the folder has other embeddings or files of the user, or the disk is too small.
        """
        try:
            saved = read_record(self.folder, verify=not overwrite)
        except UserError:
            if not overwrite:
                raise
            saved = None
        different = differences(saved["settings"], record["settings"], "there", "now") if saved else []
        if different and not overwrite:
            raise UserError(
                f"{self.folder} holds other embeddings ({'; '.join(different)}); "
                "give another --output_dir, or --overwrite"
            )
        if saved is None or different or (overwrite and saved["complete"]):
            self._make_room(saved, overwrite)
            saved = {**record, "complete": False}
            write_record(saved, self.folder / RECORD)
        for remains in self.folder.glob(f".{RECORD}.*.tmp"):  # of a killed run
            remains.unlink()
        missing = [name for name in self.shapes if not self._path(name).is_file()]
        if missing or saved["complete"]:
            shutil.rmtree(self.folder / CHUNKS, ignore_errors=True)
        if not saved["complete"]:
            (self.folder / CHUNKS).mkdir(exist_ok=True)
            for name in missing:
                with writing(self._path(name)):
                    shape = (self.num_images, *self.shapes[name])
                    np.lib.format.open_memmap(self._copy(name), "w+", self.dtype, shape).flush()
                    os.replace(self._copy(name), self._path(name))

    def _make_room(self, saved: dict[str, Any] | None, overwrite: bool) -> None:
        """Remove the embeddings of the record `saved`; with `overwrite` also files of the user with the same names."""
        needed = {self.folder / name for name in (*INDEXES, UNREADABLE)}
        recorded = needed | set(map(self._path, saved["features"])) if saved else set()
        needed |= set(map(self._path, self.shapes))
        if (others := sorted(path.name for path in needed - recorded if path.exists())) and not overwrite:
            raise UserError(
                f"{self.folder} holds {', '.join(others)}, not written by embed; give another --output_dir, or "
                "--overwrite to replace them"
            )
        old = [path for path in recorded | needed if path.is_file()]
        free = shutil.disk_usage(self.folder).free + sum(path.stat().st_size for path in old)
        # If images are unreadable, arrays are copied, one after the other.
        if (size := self.num_bytes + self.num_images * max(map(self._row_bytes, self.shapes))) > free:
            raise UserError(
                f"the embeddings and the copy of an array at the end take {size / 1e9:.2f} GB, but {self.folder} has "
                f"{free / 1e9:.2f} GB left; embed fewer kinds (--what), take --dtype float16, or give an --output_dir "
                "on a larger disk"
            )
        for path in old:
            path.unlink()
        if stale := sorted(path.name for stem in DERIVED for path in self.folder.glob(f"{stem}.*")):
            logger.warning(
                "%s: %s were made from the embeddings that are replaced now; make them again with --overwrite, or "
                "remove them",
                *(self.folder, ", ".join(stale)),
            )

    def remaining(self) -> list[int]:
        """Numbers of the unfinished chunks."""
        return [chunk for chunk in range(self.num_chunks) if not self._chunk_file(chunk).is_file()]

    def batches(self, chunk: int) -> list[range]:
        """The batches of a chunk, as ranges of indices of images, since lists would take much memory."""
        images = range(self.num_images)[chunk * self.chunk_images : (chunk + 1) * self.chunk_images]
        return [images[start : start + self.batch_size] for start in range(0, len(images), self.batch_size)]

    def write(self, name: str, start: int, rows: np.ndarray) -> None:
        """Write rows of one kind, beginning with image `start`; UserError if they are not finite."""
        with np.errstate(over="ignore"):
            rows = rows.astype(self.dtype)
        if not np.isfinite(rows).all():
            raise UserError(
                f"--what {name}: features of {self.unit} {start} to {start + len(rows) - 1} are not finite in "
                f"{self.dtype}; the encoder is broken, or --dtype or --precision is too narrow"
            )
        header_bytes = np.load(self._path(name), mmap_mode="r").offset
        with writing(self._path(name)), open(self._path(name), "r+b") as file:
            file.seek(header_bytes + start * rows[0].nbytes)
            file.write(rows.tobytes())

    def finish_chunk(self, chunk: int, unreadable: list[tuple[int, str, str]]) -> None:
        """Record that a chunk is on disk."""
        for name in self.shapes:
            with writing(self._path(name)), open(self._path(name), "r+b") as file:
                os.fsync(file.fileno())
        write_json({"unreadable": unreadable}, self._chunk_file(chunk))

    def finish(self, record: dict[str, Any]) -> None:
        """Remove the rows of unreadable images and write the index; called on one process after all chunks."""
        chunks = [json.loads(self._chunk_file(chunk).read_text()) for chunk in range(self.num_chunks)]
        unreadable = [entry for chunk in chunks for entry in chunk["unreadable"]]
        kept = np.setdiff1d(np.arange(self.num_images), [index for index, _, _ in unreadable])
        warnings = []
        for name in self.shapes:
            warnings += self._keep_rows(name, kept)
        write_csv(self.folder / UNREADABLE, [("path", "reason"), *((path, reason) for _, path, reason in unreadable)])
        index = _write_index(self.folder, kept, self.source, self.captions)
        record = {**record, "num_images": len(kept), "num_unreadable": len(unreadable), "complete": True}
        record |= {"warnings": warnings} if warnings else {}
        names = [f"{name}.npy" for name in self.shapes]
        write_record(record, self.folder / RECORD, [*names, index, UNREADABLE])
        shutil.rmtree(self.folder / CHUNKS)

    def _keep_rows(self, name: str, kept: np.ndarray) -> list[str]:
        """Remove the rows of unreadable images; returns a warning if the other rows are all equal."""
        rows = np.load(self._path(name), mmap_mode="r")
        if len(rows) != len(kept):
            with writing(self._path(name)), open(self._copy(name), "wb") as file:
                header = np.lib.format.header_data_from_array_1_0(rows) | {"shape": (len(kept), *rows.shape[1:])}
                np.lib.format.write_array_header_1_0(file, header)
                for start in range(0, len(kept), BLOCK_ROWS):
                    file.write(rows[kept[start : start + BLOCK_ROWS]].tobytes())
                file.flush()
                os.fsync(file.fileno())
            os.replace(self._copy(name), self._path(name))
            rows = np.load(self._path(name), mmap_mode="r")
        return check_sample(rows, f"{name} in {self.folder}")

    def _copy(self, name: str) -> Path:
        return self.folder / CHUNKS / f"{name}.npy"

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.npy"

    def _chunk_file(self, chunk: int) -> Path:
        # With the length of a chunk, on which the numbers depend.
        return self.folder / CHUNKS / f"{chunk:08d}-{self.chunk_images}.json"


def labels_of(source: ImageSource) -> list[str]:
    """The name of each image's class, or ""."""
    classes = [*(source.classes or []), ""]
    return [classes[label] for label in source.labels] if source.labels is not None else [""] * len(source)


def text_hash(texts: Sequence[str]) -> str:
    """SHA-256 of some texts, hexadecimal."""
    return hashlib.sha256("\0".join(texts).encode(errors="surrogatepass")).hexdigest()


def _write_index(folder: Path, kept: np.ndarray, source: ImageSource, captions: Sequence[str] | None) -> str:
    """Write index.parquet, or index.csv without pyarrow; returns the name."""
    images, labels = kept.tolist(), labels_of(source)
    columns: dict[str, Sequence[Any]] = {
        "row": list(range(len(images))),
        "path": [source.location(image) for image in images],
        "label": [labels[image] for image in images],
        **({} if captions is None else {"caption": [captions[image] for image in images]}),
    }
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        write_csv(folder / INDEXES[1], [tuple(columns), *zip(*columns.values(), strict=True)])
        return INDEXES[1]
    for name in columns.keys() - {"row"}:  # Parquet needs valid UTF-8
        columns[name] = [text.encode("utf-8", "backslashreplace").decode() for text in columns[name]]
    with writing(folder / INDEXES[0]):
        parquet.write_table(pa.table(columns), folder / INDEXES[0])
    return INDEXES[0]


def write_csv(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Write rows, the first of them the names of the columns; an interrupted command leaves no part of a table."""
    with (
        written_beside(path) as temporary,
        open(temporary, "w", newline="", encoding="utf-8", errors="backslashreplace") as file,
    ):
        csv.writer(file).writerows(rows)


def _read_index(folder: Path) -> dict[str, list[str]]:
    if (folder / INDEXES[0]).is_file():
        require("pyarrow", f"embeddings with {INDEXES[0]}")
        from pyarrow import parquet

        return dict(parquet.read_table(folder / INDEXES[0]).drop(["row"]).to_pydict())
    with open(folder / INDEXES[1], newline="", encoding="utf-8") as file:
        names, *rows = csv.reader(file)
    return {name: [row[column] for row in rows] for column, name in enumerate(names) if name != "row"}

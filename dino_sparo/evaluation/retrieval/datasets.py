"""Folders in the layout of their authors -> images, queries and the right answers.

    PATH/roxford5k/gnd_roxford5k.pkl  PATH/roxford5k/jpg/*.jpg       revisited Oxford and Paris
    PATH/original/*.jpg  PATH/strong/*.jpg                            Copydays

Revisited Oxford and Paris: Radenovic et al., "Revisiting Oxford and Paris", CVPR 2018. Copydays: Douze et al.,
"Evaluation of GIST descriptors for web-scale image search", CIVR 2009.
"""

import io
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dino_sparo.data.sources import IMAGE_EXTENSIONS, FileSource, ImageLimits, ImageSource
from dino_sparo.evaluation.retrieval.measures import Query
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import open_regular

REVISITED = ("roxford5k", "rparis6k")
REVISITED_SOURCE = "python/download.py of https://github.com/filipradenovic/revisitop"
COPYDAYS_SOURCE = "https://lear.inrialpes.fr/~jegou/data.php#copydays"
PREFIX = 4  # first letters of a file's name in Copydays, which copies and their original share
# Names in a pickle of lists, numbers, texts and arrays; none of them runs code of the file.
ALLOWED = {
    (module, name)
    for module in ("numpy.core.multiarray", "numpy._core.multiarray")
    for name in ("_reconstruct", "scalar")
} | {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}
# Protocol -> lists of right images, lists of junk.
PROTOCOLS = {
    "easy": (("easy",), ("junk", "hard")),
    "medium": (("easy", "hard"), ("junk",)),
    "hard": (("hard",), ("junk", "easy")),
}


@dataclass(frozen=True)
class SearchSet:
    """Queries and a database.

    Attributes:
        queries: None: the images of the database, each without itself.
        protocols: name -> the answers of each query.
    """

    database: ImageSource
    queries: ImageSource | None
    protocols: dict[str, list[Query]]


class PlainUnpickler(pickle.Unpickler):
    """Reads pickles of plain values and arrays, and refuses other classes and functions, which could run code."""

    def find_class(self, module: str, name: str) -> Any:
        """The function or class that a pickle names."""
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def open_revisited(data_path: str, dataset: str, limits: ImageLimits) -> SearchSet:
    """Revisited Oxford or Paris with its three protocols.

    Raises:
        UserError: files are missing or damaged.
    """
    folder = Path(data_path, dataset)
    truth = folder / f"gnd_{dataset}.pkl"
    if not truth.is_file():
        raise UserError(f"{truth} does not exist; get it with {REVISITED_SOURCE}: {dataset}/gnd_{dataset}.pkl and jpg/")
    with open_regular(truth) as file:
        content = file.read()
    try:
        content = PlainUnpickler(io.BytesIO(content), encoding="latin1").load()
        names, queries, answers = (content[key] for key in ("imlist", "qimlist", "gnd"))
        protocols = {
            protocol: [Query(*(_rows(answer, parts) for parts in lists)) for answer in answers]
            for protocol, lists in PROTOCOLS.items()
        }
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise UserError(f"{truth} is not the ground truth of {dataset} ({error}); download it again") from error

    def images(part: str, stems: list[str]) -> FileSource:
        return file_source(f"{dataset} {part}", folder / "jpg", [f"{stem}.jpg" for stem in stems], limits)

    return SearchSet(images("database", names), images("queries", queries), protocols)


def _rows(answer: dict[str, Any], parts: tuple[str, ...]) -> np.ndarray:
    return np.concatenate([np.asarray(answer[part], np.int64).reshape(-1) for part in parts])


def labelled_set(source: ImageSource) -> SearchSet:
    """Each image is a query among all others; images of its class are right, the image itself is junk."""
    labels = np.asarray(source.labels)
    queries = [
        Query(np.setdiff1d((labels == label).nonzero()[0], [row]), np.array([row])) for row, label in enumerate(labels)
    ]
    return SearchSet(source, None, {"same class": queries})


def open_copydays(data_path: str, limits: ImageLimits) -> SearchSet:
    """Strong copies as queries among the originals; distractors are appended to the database by the caller.

    Raises:
        UserError: the folders are missing, or a copy has no original.
    """
    names = {}
    for part in ("original", "strong"):
        folder = Path(data_path, part)
        if not folder.is_dir():
            raise UserError(f"{folder} does not exist; get Copydays at {COPYDAYS_SOURCE}: original/*.jpg, strong/*.jpg")
        names[part] = image_files(folder, (".jpg",))
    originals = np.array([name[:PREFIX] for name in names["original"]])
    answers = [(originals == name[:PREFIX]).nonzero()[0] for name in names["strong"]]
    for name, answer in zip(names["strong"], answers, strict=True):
        if not len(answer):
            raise UserError(f"{data_path}/strong/{name} has no original that begins with {name[:PREFIX]}; add it")
    sources = [file_source(f"Copydays {part}", Path(data_path, part), names[part], limits) for part in names]
    return SearchSet(sources[0], sources[1], {"strong": [Query(answer, np.empty(0, int)) for answer in answers]})


def image_files(folder: Path, endings: tuple[str, ...] = IMAGE_EXTENSIONS) -> list[str]:
    """Names of the images in a folder, sorted, without hidden files; UserError if there are none."""
    names = sorted(name for name in os.listdir(folder) if name.lower().endswith(endings) and name[0] != ".")
    if not names:
        raise UserError(f"{folder} has no images ({', '.join(endings)}); give a folder of images")
    return names


def file_source(name: str, folder: Path, files: list[str], limits: ImageLimits) -> FileSource:
    """Images of a folder by their names; UserError if an image is missing."""
    missing = next((file for file in files if not (folder / file).is_file()), None)
    if missing is not None:
        raise UserError(f"{folder / missing} does not exist; the images of {name} are not complete")
    return FileSource(name, folder, files, limits=limits)

"""Folders of embeddings and of cached features -> their descriptions for `dino-sparo info`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dino_sparo.evaluation.embed.store import RECORD, load_embeddings, read_record
from dino_sparo.evaluation.features import CACHE_FILES, load_features
from dino_sparo.weights.info import CHECKED, UNCHECKED, facts_of


def describe_embeddings(folder: Path) -> dict[str, Any]:
    """Facts about the output of `dino-sparo embed`; compares complete embeddings with their checksums."""
    record = read_record(folder) or {}
    if record["complete"]:
        load_embeddings(folder)
    return {
        "folder": folder,
        "kind": "embeddings",
        "damaged": CHECKED if record["complete"] else UNCHECKED,
        "complete": "yes" if record["complete"] else "no: run the same embed command again to resume",
        "features": {name: "x".join(map(str, shape)) for name, shape in record["features"].items()},
        "images": record.get("num_images"),
        "unreadable": record.get("num_unreadable"),
        **facts_of(record),
    }


def describe_features(folder: Path) -> dict[str, Any]:
    """Facts about the output of --dump_features; compares its files with their checksums."""
    train, val, record = load_features(folder)
    return {
        "folder": folder,
        "kind": "cached features of --dump_features",
        "damaged": CHECKED if record else UNCHECKED,
        "features": {"train": "x".join(map(str, train.features.shape)), "val": "x".join(map(str, val.features.shape))},
        **facts_of(record),
    }


# Name of a file -> description of a folder with such a file.
FOLDERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    RECORD: describe_embeddings,
    CACHE_FILES["train"][0]: describe_features,
}

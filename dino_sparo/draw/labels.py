"""Locations of images and checkpoints -> names for titles, pages and files."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from dino_sparo.models.encoder import EncoderConfig
from dino_sparo.runtime.cli import printable

MAX_FILE_NAME = 80  # characters; file systems take 255 bytes, and endings and numbers are added


def short_name(location: str) -> str:
    """A location without the folders that all images share: the last two parts of its path, printable."""
    return printable("/".join(PurePath(location).parts[-2:]))


def run_names(weights: Sequence[str]) -> list[str]:
    """Short names of checkpoints: folder and file, and as many folders above as make the names differ."""
    paths = [Path(path).expanduser().absolute().parts[1:] for path in weights]
    depth = 2
    while len({path[-depth:] for path in paths}) < len(set(paths)):
        depth += 1
    return [printable("/".join(path[-depth:])) for path in paths]


def describe_model(record: Mapping[str, Any], encoder: EncoderConfig, run: str | None, *words: str) -> str:
    """A line about a model, for figures: run (None: named elsewhere), architecture, `words`, epoch."""
    epoch = f"epoch {record['epoch']}" if isinstance(record["epoch"], int) else None
    parts = (run, f"{encoder.arch}/{encoder.patch_size}", *words, epoch)
    return "  ·  ".join(part for part in parts if part is not None)


def file_names(locations: Sequence[str]) -> list[str]:
    """File names that show which images they were made of, without folder and ending; images of one name are numbered.

    Letters, digits, dots, dashes and underscores stay, all else becomes an underscore.
    """
    names: list[str] = []
    taken: set[str] = set()
    for location in locations:
        stem = re.sub(r"[^\w.-]+", "_", PurePath(location).stem).strip("_.")[:MAX_FILE_NAME] or "image"
        name, number = stem, 1
        while name.lower() in taken:  # some file systems do not tell capitals from small letters
            number += 1
            name = f"{stem}-{number}"
        taken.add(name.lower())
        names.append(name)
    return names

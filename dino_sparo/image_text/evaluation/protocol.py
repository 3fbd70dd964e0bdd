"""Start and end of an evaluation of an image-text model: its images, and the file of its result.

As in `evaluation/task.py`, a result file holds the whole protocol of its numbers, and the same command writes the same
file.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dino_sparo.data.dataset import require_same_source
from dino_sparo.data.scene_graphs import INDEPENDENT
from dino_sparo.data.scenes import Scenes, names_scenes, parse_scenes_spec
from dino_sparo.data.sources import ImageSource, open_source
from dino_sparo.data.sources.decode import DEFAULT_LIMITS, ImageLimits
from dino_sparo.evaluation.task import write_result
from dino_sparo.image_text.scorer import Scorer
from dino_sparo.runtime.choices import MAX_VALUE
from dino_sparo.runtime.collectives import rank_0_first
from dino_sparo.runtime.files import file_sha256
from dino_sparo.weights.checkpoint import load_checkpoint, max_value_of

# The options, the process among its peers, pixels cut off every side of an image -> the model.
OpenModel = Callable[..., Scorer]


def limits_of(args: argparse.Namespace) -> ImageLimits:
    """The limits of `--max_image_mb`, `--max_image_mpix` and `--max_value`, by default that of the checkpoint."""
    max_value = args.max_value
    if max_value is None and args.pretrained_weights:
        max_value = max_value_of(load_checkpoint(args.pretrained_weights, verify=False, mmap=True))
    return ImageLimits(args.max_image_mb, args.max_image_mpix, max_value or MAX_VALUE)


def open_evaluation_images(
    data_path: str, split: str | None = None, download: bool = False, limits: ImageLimits = DEFAULT_LIMITS
) -> ImageSource:
    """The images of a data path: the named split, else the split `val` if there is one, else all images.

    The built-in scenes are those of CLIP training, with independent attributes.
    """
    if not data_path:
        raise ValueError("--data_path is empty; give class folders, tar shards, a set such as cifar10:DIR, or scenes")
    if names_scenes(data_path):
        num_images, image_size = parse_scenes_spec(data_path)
        return Scenes(num_images, image_size, split=split or "val", ties=INDEPENDENT)
    with rank_0_first():
        source = open_source(data_path, split, download, default_split="val", limits=limits)
    require_same_source(source)
    return source


def file_record(path: Path) -> dict[str, str]:
    """Path and hash of a file, for a result file."""
    return {"path": str(path), "sha256": file_sha256(path)}


def plot_path(args: argparse.Namespace, name: str) -> Path:
    """Path of the plot beside the result; raises ValueError if the plot would overwrite the result."""
    path = Path(args.output) if args.output else Path(args.pretrained_weights).parent / name
    if path.suffix == ".png":
        raise ValueError(f"output={args.output!r} names a picture; give the JSON file, the plot is put beside it")
    return path.with_suffix(".png")


def report(result: dict[str, Any], table: str, args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Write the result and show the table, on rank 0; returns the result.

    By default the file has this name and lies beside the checkpoint; with `--slots` its name ends in `_slots.json`.
    """
    if getattr(args, "slots", None):
        name = f"{name.removesuffix('.json')}_slots.json"
    write_result(result, table, Path(args.output) if args.output else Path(args.pretrained_weights).parent / name)
    return result

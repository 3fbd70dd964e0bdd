"""The model to evaluate, the images to evaluate it on, and the record of how that was done.

Where every evaluation of this folder starts and ends. As in `evaluation/protocol.py` a result file carries all that its
numbers depend on, and nothing that changes from one run to the next: the same command writes the same file.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dino_sparo.data.dataset import require_same_source
from dino_sparo.data.scenes import INDEPENDENT, Scenes, names_scenes, parse_scenes_spec
from dino_sparo.data.sources import ImageSource, open_source
from dino_sparo.evaluation.task import write_result
from dino_sparo.image_text.scoring.scorer import Scorer
from dino_sparo.runtime.distributed import rank_0_first
from dino_sparo.runtime.records import file_sha256

# The options, the process among its peers, pixels cut off every side of an image -> the model.
OpenModel = Callable[..., Scorer]


def open_evaluation_images(data_path: str, split: str | None = None, download: bool = False) -> ImageSource:
    """The images of a data path that were not trained on.

    The built-in scenes are those of CLIP training, whose attributes are independent of each other.

    Args:
        data_path: anything `open_source` opens.
        split: `train` or `val`; None: `val` where there is one, else the path itself.
        download: fetch a torchvision set that is not on disk.

    Raises:
        ValueError: no path, or what `open_source` finds wrong with it.
    """
    if not data_path:
        raise ValueError("--data_path is empty; give class folders, tar shards, a set such as cifar10:DIR, or scenes")
    if names_scenes(data_path):
        num_images, image_size = parse_scenes_spec(data_path)
        return Scenes(num_images, image_size, split=split or "val", ties=INDEPENDENT)
    with rank_0_first():
        source = open_source(data_path, split, download, default_split="val")
    require_same_source(source)
    return source


def file_record(path: Path) -> dict[str, str]:
    """What a result file says about a file of annotations."""
    return {"path": str(path), "sha256": file_sha256(path)}


def result_paths(args: argparse.Namespace, name: str) -> tuple[Path, Path]:
    """Where the result goes, as `report` decides it, and where the plot beside it goes.

    Raises:
        ValueError: the result would be overwritten by the plot.
    """
    path = Path(args.output) if args.output else Path(args.pretrained_weights).parent / name
    if path.suffix == ".png":
        raise ValueError(f"output={args.output!r} names a picture; give the JSON file, the plot is put beside it")
    return path, path.with_suffix(".png")


def report(result: dict[str, Any], table: str, args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Write the result and show the table, on rank 0.

    Args:
        result: plain values.
        table: the numbers for people.
        args: parsed options.
        name: of the result file beside the checkpoint; with `--slots` it ends in `_slots.json`.

    Returns:
        The result.
    """
    if getattr(args, "slots", None):
        name = f"{name.removesuffix('.json')}_slots.json"
    write_result(result, table, Path(args.output) if args.output else Path(args.pretrained_weights).parent / name)
    return result

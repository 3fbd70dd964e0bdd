"""Checkpoint -> the CLIP model to evaluate, the images to evaluate it on, and the record of how that was done.

Where every evaluation of this folder starts and ends. As in `evaluation/protocol.py` a result file carries all that its
numbers depend on, and nothing that changes from one run to the next: the same command writes the same file.
"""

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dino_sparo.clip.encode import ClipEncoder, ClipView
from dino_sparo.clip.model import CLIP, load_clip
from dino_sparo.clip.slots import open_slots
from dino_sparo.clip.text import tokenize
from dino_sparo.data import ImageSource, open_source
from dino_sparo.distributed import PRECISIONS, Distributed, is_main, rank_0_first
from dino_sparo.evaluation.protocol import file_sha256, versions, view_record, write_json
from dino_sparo.extras import require
from dino_sparo.scenes import INDEPENDENT, Scenes, parse_scenes_spec


@dataclass(frozen=True)
class EvaluatedClip:
    """A model ready to encode, and what a result file says about it.

    Attributes:
        encoder: the model with all that its features depend on.
        record: plain values: `model`, `slots` (None: all), `feature`, `view`, `versions`.
    """

    encoder: ClipEncoder
    record: dict[str, Any]


def open_clip_encoder(args: argparse.Namespace, place: Distributed, border: int = 0) -> EvaluatedClip:
    """What the options of `add_model_options` and `add_computation_options` ask for.

    Args:
        args: parsed options.
        place: where to compute.
        border: pixels cut off every side of an image.

    Raises:
        ValueError: no checkpoint is named, it holds no CLIP, or `--slots` does not fit it.
    """
    if not args.pretrained_weights:
        raise ValueError(
            "--pretrained_weights is empty: there is nothing to evaluate; give a checkpoint of CLIP training"
        )
    require("open_clip", "captions")
    loaded = load_clip(args.pretrained_weights, args.text_heads, args.quick_gelu)
    config = loaded.model.config
    transform = ClipView(args.img_size or config.image.img_size, loaded.mean, loaded.std, border)
    model, slots = open_slots(args.slots, loaded)
    encoder = ClipEncoder(
        model.to(place.device),
        partial(tokenize, context_length=config.text.context_length),
        transform,
        place.device,
        args.batch_size_per_gpu,
        args.num_workers,
        PRECISIONS[args.precision],
    )
    dim = config.embed_dim if isinstance(model, CLIP) else model.encoding_dim
    record = {
        "model": loaded.record,
        "slots": slots,
        "feature": {"name": "normalised encoding", "dim": dim, "precision": args.precision},
        "view": {**view_record(transform), "border": border},
        "versions": {**versions(), "open_clip": version("open_clip_torch")},
    }
    return EvaluatedClip(encoder, record)


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
    if data_path.partition(":")[0] == "scenes":
        num_images, image_size = parse_scenes_spec(data_path)
        return Scenes(num_images, image_size, split=split or "val", ties=INDEPENDENT)
    with rank_0_first():
        return open_source(data_path, split, download, default_split="val")


def file_record(path: Path) -> dict[str, str]:
    """What a result file says about a file of annotations."""
    return {"path": str(path), "sha256": file_sha256(path)}


def report(result: dict[str, Any], table: str, args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Write the result and show the table, on rank 0.

    Args:
        result: plain values.
        table: the numbers for people.
        args: parsed options.
        name: of the result file beside the checkpoint.

    Returns:
        The result.
    """
    if is_main():
        path = Path(args.output) if args.output else Path(args.pretrained_weights).parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(result, path)
        sys.stdout.write(f"{table}\n\n{path}\n")
    return result

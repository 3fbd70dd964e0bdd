"""Checkpoint -> the encoder to evaluate, and the record of how it was evaluated.

Every evaluation begins here. A number without its protocol cannot be compared, so every result file carries it: which
weights (by hash), which network in them, which images, how resized, which versions. Nothing in it changes from one run
to the next: the same command writes the same file.
"""

import argparse
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dino_sparo.checkpoint import encoder_of, load_checkpoint, normalization_of
from dino_sparo.data import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    ImageSource,
    align_classes,
    open_source,
    require_labels,
)
from dino_sparo.encoder import Encoder, EncoderConfig, encoder_from_config
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.distributed import Distributed, init_distributed, is_main, rank_0_first
from dino_sparo.runtime.logs import setup_logging
from dino_sparo.runtime.precision import set_tf32
from dino_sparo.runtime.records import file_sha256, write_json
from dino_sparo.sources import ImageLimits, TableColumns
from dino_sparo.sources.decode import DEFAULT_LIMITS
from dino_sparo.sources.tables import USUAL_COLUMNS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluatedEncoder:
    """An encoder, and what a result file says about it.

    Attributes:
        encoder: in eval mode, on the CPU.
        mean: of its images' pixels in 0..1, per channel.
        std: likewise.
        record: plain values: weights, hash, key, epoch, architecture.
    """

    encoder: Encoder
    mean: tuple[float, ...]
    std: tuple[float, ...]
    record: dict[str, Any]


def start_evaluation(args: argparse.Namespace) -> Distributed:
    """Join the other processes, set up the log and the precision of products: how every evaluation begins."""
    process = init_distributed(args.device, args.dist_url, args.dist_timeout_min)
    set_tf32(allowed=args.precision == "tf32")
    setup_logging()
    return process


def trained_encoder(
    pretrained_weights: str, checkpoint_key: str = "teacher", arch: str | None = None, patch_size: int | None = None
) -> EvaluatedEncoder:
    """The encoder of a checkpoint.

    Args:
        pretrained_weights: path of one of our checkpoints, or of the reference's.
        checkpoint_key: `teacher` or `student`.
        arch: override for foreign weights.
        patch_size: override for foreign weights, pixels.

    Raises:
        ValueError: no path is given. (A path without a checkpoint, and weights that do not fit, are
            `checkpoint.load_encoder`'s errors.)
    """
    if not pretrained_weights:
        raise ValueError(
            "--pretrained_weights is empty: there is nothing to evaluate; give the path of a checkpoint, or ask for a "
            "random encoder with --untrained"
        )
    checkpoint = load_checkpoint(pretrained_weights)
    encoder = encoder_of(checkpoint, str(pretrained_weights), checkpoint_key, arch, patch_size)
    record = {
        "pretrained_weights": str(pretrained_weights),
        "sha256": file_sha256(Path(pretrained_weights)),
        # Raw weights hold one network, whatever the option says.
        "checkpoint_key": checkpoint_key if checkpoint_key in checkpoint else None,
        "epoch": checkpoint.get("epoch"),
        "untrained": False,
        **asdict(encoder.config),
    }
    return EvaluatedEncoder(encoder, *normalization_of(checkpoint), record)


def untrained_encoder(like: EvaluatedEncoder | EncoderConfig, seed: int) -> EvaluatedEncoder:
    """A randomly initialised encoder: what an evaluation gives before any training.

    Args:
        like: how to build it; a trained one also gives the images' mean and std.
        seed: of the initialisation.
    """
    mean: tuple[float, ...]
    std: tuple[float, ...]
    if isinstance(like, EncoderConfig):
        config, mean, std = like, IMAGENET_MEAN, IMAGENET_STD
    else:
        config, mean, std = like.encoder.config, like.mean, like.std
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = encoder_from_config(config).eval()
    logger.warning("the encoder is untrained: random weights from seed %d", seed)
    record = {
        "pretrained_weights": None,
        "sha256": None,
        "checkpoint_key": None,
        "epoch": None,
        "untrained": True,
        "seed": seed,
        **asdict(config),
    }
    return EvaluatedEncoder(encoder, mean, std, record)


def open_encoder(
    pretrained_weights: str,
    checkpoint_key: str = "teacher",
    arch: str | None = None,
    patch_size: int | None = None,
    *,
    untrained: bool = False,
    readout: str = "sparo",
    img_size: int | None = None,
    seed: int = 0,
) -> EvaluatedEncoder:
    """What the options of `add_evaluation_options` ask for.

    Args:
        pretrained_weights: path of a checkpoint; with `untrained` it says how to build the encoder, or may be empty.
        checkpoint_key: `teacher` or `student`.
        arch: of an encoder without checkpoint, or override for foreign weights.
        patch_size: likewise, pixels.
        untrained: random weights.
        readout: of an encoder without checkpoint.
        img_size: of an encoder without checkpoint, pixels.
        seed: of random weights.
    """
    if pretrained_weights or not untrained:
        trained = trained_encoder(pretrained_weights, checkpoint_key, arch, patch_size)
        return untrained_encoder(trained, seed) if untrained else trained
    given = {"arch": arch, "patch_size": patch_size, "img_size": img_size}
    config = EncoderConfig(readout=readout, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    return untrained_encoder(config, seed)


def open_splits(
    data_path: str,
    download: bool = False,
    columns: TableColumns = USUAL_COLUMNS,
    limits: ImageLimits = DEFAULT_LIMITS,
) -> tuple[ImageSource, ImageSource]:
    """The labelled training and validation images of a data path.

    Args:
        data_path: anything `open_source` finds the splits `train` and `val` in.
        download: fetch a torchvision set that is not on disk.
        columns: of a table, where they have other names than the usual ones.
        limits: larger images count as unreadable.

    Returns:
        Sources of the splits `train` and `val`, their classes numbered alike.

    Raises:
        ValueError: no path; a split without labels; validation classes that the training images lack.
    """
    if not data_path:
        raise ValueError(
            "--data_path is empty; give a folder with train/ and val/, a torchvision set such as cifar10:DIR, or scenes"
        )
    with rank_0_first():
        train, val = (
            open_source(data_path, split, download, columns=columns, limits=limits) for split in ("train", "val")
        )
    require_labels(train)
    return train, align_classes(val, train.classes or [])


def encoder_of_options(args: argparse.Namespace) -> EvaluatedEncoder:
    """The encoder that the options of `options.add_evaluation_options` name; raises what `open_encoder` raises."""
    return open_encoder(
        args.pretrained_weights,
        args.checkpoint_key,
        args.arch,
        args.patch_size,
        untrained=args.untrained,
        readout=args.readout,
        img_size=args.img_size,
        seed=args.seed,
    )


def splits_of_options(args: argparse.Namespace) -> tuple[ImageSource, ImageSource]:
    """The training and test images that these options name; raises what `open_splits` raises."""
    columns = TableColumns(args.path_column, args.label_column, args.split_column)
    limits = ImageLimits(args.max_image_mb, args.max_image_mpix)
    return open_splits(args.data_path, args.download, columns, limits)


def view_record(transform: Any) -> dict[str, Any]:
    """What `crops.EvalTransform` does to an image: sizes in pixels, interpolation, rounding, normalisation."""
    return {
        "resize": transform.resize_size,
        "crop": transform.img_size,
        "exact": transform.exact,
        "interpolation": "bicubic",
        "mean": list(transform.mean),
        "std": list(transform.std),
    }


def write_result(result: dict[str, Any], table: str, path: Path) -> None:
    """Write the result and show the table, on rank 0."""
    if is_main():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(result, path)
        say(f"{table}\n\n{path}")


def result_name(evaluation: str, record: Mapping[str, Any]) -> str:
    """Of a result file, without ending: those of random weights and of some slots stand beside the encoder's own.

    Args:
        evaluation: "knn".
        record: of the encoder.
    """
    endings = (("_untrained", record.get("untrained")), ("_slots", record.get("slots")))
    return evaluation + "".join(ending for ending, is_so in endings if is_so)


def result_folder(output_dir: str | None, pretrained_weights: str) -> Path:
    """Where results go: `output_dir`, created if need be, else beside the checkpoint, else the current folder."""
    if not output_dir:
        return Path(pretrained_weights).parent if pretrained_weights else Path()
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder

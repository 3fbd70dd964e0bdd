"""Checkpoint -> the encoder to evaluate, and the record of how it was evaluated.

Every evaluation begins here. A number without its protocol cannot be compared, so every result file carries it: which
weights (by hash), which network in them, which images, how resized, which versions. Nothing in it changes from one run
to the next: the same command writes the same file.
"""

import argparse
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dino_sparo.data.dataset import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    ImageSource,
    align_classes,
    open_source,
    require_labels,
    require_same_source,
)
from dino_sparo.data.sources import ImageLimits, TableColumns
from dino_sparo.data.views import EvalTransform
from dino_sparo.models.encoder import Encoder, EncoderConfig, encoder_from_config
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.distributed import Distributed, init_distributed, is_main, rank_0_first
from dino_sparo.runtime.logs import setup_logging
from dino_sparo.runtime.precision import PRECISIONS, set_tf32
from dino_sparo.runtime.records import file_sha256, versions, write_json
from dino_sparo.weights.checkpoint import activation_of, encoder_of, load_checkpoint, network_name, normalization_of

logger = logging.getLogger(__name__)

OTHER_SEED = 1_000_003  # away from the seeds of runs, whose start an untrained encoder of the same seed would be


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


def start_evaluation(args: argparse.Namespace, several_results: bool = False) -> Distributed:
    """Join the other processes, set up the log and the precision of products: how every evaluation begins.

    Args:
        args: parsed options.
        several_results: `--output` is the folder of several files, not a file.

    Raises:
        ValueError: the result cannot be written where `--output` says.
    """
    output = getattr(args, "output", None)
    if output and several_results and os.path.isfile(output):
        raise ValueError(f"--output {output} is a file; give a folder")
    if output and not several_results and os.path.isdir(output):
        raise ValueError(f"--output {output} is a folder; give the path of a file")
    process = init_distributed(args.device, args.dist_url, args.dist_timeout_min)
    set_tf32(allowed=args.precision == "tf32")
    setup_logging()
    return process


def trained_encoder(
    pretrained_weights: str,
    checkpoint_key: str = "teacher",
    arch: str | None = None,
    patch_size: int | None = None,
    quick_gelu: bool = False,
) -> EvaluatedEncoder:
    """The encoder of a checkpoint.

    Args:
        pretrained_weights: path of one of our checkpoints, or of the reference's.
        checkpoint_key: `teacher` or `student`.
        arch: override for foreign weights.
        patch_size: override for foreign weights, pixels.
        quick_gelu: of foreign weights that do not say.

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
    encoder = encoder_of(checkpoint, str(pretrained_weights), checkpoint_key, arch, patch_size, quick_gelu)
    record = {
        "pretrained_weights": str(pretrained_weights),
        "sha256": file_sha256(Path(pretrained_weights)),
        "checkpoint_key": network_name(checkpoint, checkpoint_key),
        "epoch": checkpoint.get("epoch"),
        "untrained": False,
        **asdict(encoder.config),
    }
    return EvaluatedEncoder(encoder, *normalization_of(checkpoint), record)


def compared_encoder(path: str, args: argparse.Namespace) -> EvaluatedEncoder:
    """The encoder of another checkpoint; options of foreign weights are for it too, if it does not say of itself."""
    is_foreign = path and activation_of(load_checkpoint(path)) is None
    overrides = (args.arch, args.patch_size, args.quick_gelu) if is_foreign else ()
    return trained_encoder(path, args.checkpoint_key, *overrides)


def untrained_encoder(
    config: EncoderConfig, seed: int, mean: tuple[float, ...] = IMAGENET_MEAN, std: tuple[float, ...] = IMAGENET_STD
) -> EvaluatedEncoder:
    """A randomly initialised encoder: what an evaluation gives before any training.

    Args:
        config: how to build it.
        seed: of the initialisation.
        mean: of its images' pixels in 0..1, per channel.
        std: likewise.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = encoder_from_config(config).eval()
    unknown = dict.fromkeys(("pretrained_weights", "sha256", "checkpoint_key", "epoch"))
    return EvaluatedEncoder(encoder, mean, std, {**unknown, "untrained": True, "seed": seed, **asdict(config)})


def encoder_of_options(args: argparse.Namespace) -> EvaluatedEncoder:
    """The encoder that the options of a command name; what a command has no option for is `EncoderConfig`'s default.

    With --untrained a checkpoint only says how to build the encoder, and without one the options do.

    Raises:
        ValueError: no checkpoint is named where one is needed, or its weights do not fit; or --readout stands beside a
            checkpoint, which has one.
    """
    given = vars(args)
    if args.pretrained_weights and (readout := given.get("readout")):
        raise ValueError(
            f"--readout {readout} beside --pretrained_weights: a checkpoint has a read-out of its own; leave out one"
        )
    seed = given.get("seed", 0)
    if args.untrained:
        logger.warning("the encoder is untrained: random weights from seed %d", seed)
    if args.pretrained_weights or not args.untrained:
        trained = trained_encoder(
            args.pretrained_weights, args.checkpoint_key, args.arch, args.patch_size, args.quick_gelu
        )
        if not args.untrained:
            return trained
        return untrained_encoder(trained.encoder.config, seed, trained.mean, trained.std)
    architecture = {name: given.get(name) for name in ("arch", "patch_size", "readout", "img_size")}
    config = EncoderConfig(**{name: value for name, value in architecture.items() if value is not None})
    return untrained_encoder(config, seed)


def splits_of_options(args: argparse.Namespace) -> tuple[ImageSource, ImageSource]:
    """The labelled training and validation images that these options name.

    Returns:
        Sources of the splits `train` and `val`, their classes numbered alike.

    Raises:
        ValueError: no path; a split without labels; validation classes that the training images lack.
    """
    if not args.data_path:
        raise ValueError(
            "--data_path is empty; give a folder with train/ and val/, a torchvision set such as cifar10:DIR, or scenes"
        )
    columns = TableColumns(args.path_column, args.label_column, args.split_column)
    limits = ImageLimits(args.max_image_mb, args.max_image_mpix)
    with rank_0_first():
        train, val = (
            open_source(args.data_path, split, args.download, columns=columns, limits=limits)
            for split in ("train", "val")
        )
    require_labels(train)
    for source in (train, val):
        require_same_source(source)
    return train, align_classes(val, train.classes or [])


def transform_of_options(args: argparse.Namespace, evaluated: EvaluatedEncoder) -> EvalTransform:
    """The view of an image that these options name: --img_size, or the size of the encoder's position grid."""
    img_size = args.img_size or evaluated.encoder.config.img_size
    return EvalTransform(img_size, evaluated.mean, evaluated.std, exact=not args.fast_views)


def storage_of_options(args: argparse.Namespace, device: torch.device) -> torch.device:
    """Where features are kept: on this process' device, or with --use_cuda false on the CPU."""
    return device if args.use_cuda else torch.device("cpu")


def extraction_of_options(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The arguments of `features.extract_split` that these options give, for a process that computes on `device`."""
    return {
        "batch_size": args.batch_size_per_gpu,
        "num_workers": args.num_workers,
        "dtype": PRECISIONS[args.precision],
        "storage": storage_of_options(args, device),
    }


def images_record(
    args: argparse.Namespace, num_classes: int, transform: EvalTransform, counts: Mapping[str, int | None]
) -> dict[str, Any]:
    """What a result says of its images: where they lie, how many were used and left out, how they were seen."""
    return {
        "images": {"data_path": args.data_path, "num_classes": num_classes, **counts},
        "view": view_record(transform),
        "versions": versions(),
    }


def view_record(transform: Any) -> dict[str, Any]:
    """What `EvalTransform` does to an image: sizes in pixels, interpolation, rounding, normalisation."""
    return {
        "resize": transform.resize_size,
        "crop": transform.img_size,
        "exact": transform.exact,
        "interpolation": "bicubic",
        "mean": list(transform.mean),
        "std": list(transform.std),
    }


def write_result(result: dict[str, Any], table: str, path: Path) -> None:
    """Show the table and write the result, on rank 0."""
    if is_main():
        say(table)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(result, path)
        say(f"\n{path}")


def result_name(evaluation: str, record: Mapping[str, Any], num_blocks: int | None = None) -> str:
    """Of a result file, without ending: random weights, some slots, more or fewer blocks have files of their own.

    Args:
        evaluation: "knn".
        record: of the encoder.
        num_blocks: whose class tokens are read, if not those that the evaluation reads by default.
    """
    endings = (("_untrained", record.get("untrained")), ("_slots", record.get("slots")))
    blocks = f"_{num_blocks}block{'s' * (num_blocks > 1)}" if num_blocks else ""
    return evaluation + blocks + "".join(ending for ending, is_so in endings if is_so)


def result_folder(output_dir: str | None, pretrained_weights: str) -> Path:
    """Where results go: `output_dir`, created if need be, else beside the checkpoint, else the current folder."""
    if not output_dir:
        return Path(pretrained_weights).parent if pretrained_weights else Path()
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder

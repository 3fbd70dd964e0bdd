"""Options -> the task of an evaluation: the encoder, the images, the folder of the result, and the result's protocol.

k-NN, linear probes, slots study, slots score, attention and embed start here. A number without its protocol cannot be
compared. So every result file says which weights (by hash), which network in them, which images, how resized, which
versions. The same command writes the same file: nothing in it changes from one run to the next.
"""

import argparse
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dino_sparo.data.labels import align_classes, require_labels
from dino_sparo.data.ranks import open_images
from dino_sparo.data.sources import ImageLimits, ImageSource, TableColumns
from dino_sparo.data.views import EvalTransform, PatchView
from dino_sparo.evaluation.features import WARNINGS, Features, extract_split
from dino_sparo.evaluation.slots.choice import keep_encoder_slots
from dino_sparo.models.backbone import own_patch_size
from dino_sparo.models.encoder import Encoder, EncoderConfig, encoder_from_config
from dino_sparo.runtime.choices import IMAGENET_MEAN, IMAGENET_STD, MAX_VALUE
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.collectives import require_same_options
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import INPUTS, differences, file_sha256, plain, read_json, versions, write_json
from dino_sparo.runtime.launch import Distributed, init_distributed, is_main, is_only_a_peer, select_device
from dino_sparo.runtime.lock import create_output_dir
from dino_sparo.runtime.logs import setup_logging
from dino_sparo.runtime.options import DEVICE
from dino_sparo.runtime.precision import PRECISIONS, set_tf32
from dino_sparo.weights.checkpoint import (
    EXPORTED_WEIGHTS,
    NETWORKS,
    activation_of,
    encoder_of,
    load_checkpoint,
    max_value_of,
    network_name,
    normalization_of,
    weights_sha256,
)
from dino_sparo.weights.origin import data_name

logger = logging.getLogger(__name__)

# Options that change no number of a result, or that `ResultFile.options` states otherwise.
HARMLESS_OPTIONS = {
    *DEVICE,
    *("pretrained_weights", "output_dir", "overwrite", "batch_size_per_gpu", "use_cuda", "download", "dump_features"),
    *("load_features", "chunk_images", "failures", "write_captions", "figure_format", "save_each", "threshold"),
}
MAX_PART = 40  # letters of each part of a file's name, which systems limit
OTHER_SEED = 1_000_003  # far from the seeds of runs: an untrained encoder of a run's seed equals the run's start


@dataclass(frozen=True)
class EvaluatedEncoder:
    """The subject of an evaluation: an encoder, the mean and std of its images, and its entry in a result file.

    Attributes:
        encoder: in eval mode, on the CPU.
        mean: of its images' pixels in 0..1, per channel.
        std: of these pixels.
        record: the entry `encoder` of a result file, plain values: weights, hash, key, epoch, architecture.
        max_value: value of 16-bit images that was white in training.
    """

    encoder: Encoder
    mean: tuple[float, ...]
    std: tuple[float, ...]
    record: dict[str, Any]
    max_value: int = MAX_VALUE

    def patch_view(self, image_size: Sequence[int] | None, **options: Any) -> PatchView:
        """The view in which maps are drawn and scored; `options` of `PatchView`.

        By default twice the side the encoder was trained for: with four times the patches maps show parts of objects.
        The reference looks at 480 pixels with a model trained at 224, for the same reason.
        """
        config = self.encoder.config
        return PatchView(image_size or [2 * config.img_size], config.patch_size, self.mean, self.std, **options)


def trained_encoder(
    pretrained_weights: str,
    checkpoint_key: str = "teacher",
    arch: str | None = None,
    patch_size: int | None = None,
    quick_gelu: bool = False,
) -> EvaluatedEncoder:
    """The encoder of one of our checkpoints, or of the reference's; the last three options describe foreign weights."""
    if not pretrained_weights:
        raise UserError("--pretrained_weights is empty; give the path of a checkpoint, or --untrained")
    checkpoint = load_checkpoint(pretrained_weights)
    encoder = encoder_of(checkpoint, str(pretrained_weights), checkpoint_key, arch, patch_size, quick_gelu)
    record = {
        "pretrained_weights": str(pretrained_weights),
        "sha256": weights_sha256(pretrained_weights),
        "checkpoint_key": network_name(checkpoint, checkpoint_key),
        "epoch": checkpoint.get("epoch"),
        "untrained": False,
        **asdict(encoder.config),
    }
    return EvaluatedEncoder(encoder, *normalization_of(checkpoint), record, max_value_of(checkpoint))


def untrained_encoder(
    config: EncoderConfig, seed: int, mean: tuple[float, ...] = IMAGENET_MEAN, std: tuple[float, ...] = IMAGENET_STD
) -> EvaluatedEncoder:
    """A randomly initialised encoder: the baseline before any training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = encoder_from_config(config).eval()
    unknown = dict.fromkeys(("pretrained_weights", "sha256", "checkpoint_key", "epoch"))
    return EvaluatedEncoder(encoder, mean, std, {**unknown, "untrained": True, "seed": seed, **asdict(config)})


def compared_encoder(path: str, args: argparse.Namespace) -> EvaluatedEncoder:
    """The encoder of a second checkpoint; options of foreign weights apply if it does not describe itself."""
    is_foreign = path and activation_of(load_checkpoint(path)) is None
    overrides = (args.arch, args.patch_size, args.quick_gelu) if is_foreign else ()
    return trained_encoder(path, args.checkpoint_key, *overrides)


def encoder_of_options(args: argparse.Namespace) -> EvaluatedEncoder:
    """The encoder that the options of a command name; options that a command lacks take `EncoderConfig`'s defaults.

    With --untrained a checkpoint only says how to build the encoder; without a checkpoint the options do.
    """
    given = vars(args)
    if args.pretrained_weights and (readout := given.get("readout")):
        raise UserError(f"--readout {readout} beside --pretrained_weights: a checkpoint has a read-out of its own")
    seed = given.get("seed", 0)
    if args.untrained:
        logger.warning("the encoder is untrained: random weights from seed %d", seed)
    if args.pretrained_weights or not args.untrained:
        trained = trained_encoder(
            args.pretrained_weights, args.checkpoint_key, args.arch, args.patch_size, args.quick_gelu
        )
        if not args.untrained:
            return trained
        untrained = untrained_encoder(trained.encoder.config, seed, trained.mean, trained.std)
        return replace(untrained, max_value=trained.max_value)
    architecture: dict[str, Any] = {name: given.get(name) for name in ("arch", "readout")}
    architecture["patch_size"] = args.patch_size or own_patch_size(args.arch or EncoderConfig.arch)
    if isinstance(given.get("img_size"), int):  # a list is the size of a picture
        architecture["img_size"] = given["img_size"]
    config = EncoderConfig(**{name: value for name, value in architecture.items() if value is not None})
    return untrained_encoder(config, seed)


class EvaluationTask:
    """The encoder, the images and the folder of one evaluation; the encoder and the images are opened on first use.

    Args:
        args: parsed options. An option that a command lacks takes its default.
        device: where to compute.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        # --use_cuda false keeps features in the host's memory.
        self.storage = device if getattr(args, "use_cuda", True) else torch.device("cpu")

    @classmethod
    def start(cls, args: argparse.Namespace) -> "EvaluationTask":
        """Join the other processes and set up log and precision; every process takes part in the evaluation."""
        return cls(args, start_evaluation(args).device)

    @classmethod
    def start_on_first(cls, args: argparse.Namespace) -> "EvaluationTask | None":
        """A task of the first process alone; None on all others, which have nothing to do."""
        if is_only_a_peer():
            return None
        setup_logging()
        WARNINGS.clear()
        return cls(args, select_device(args.device))

    @cached_property
    def subject(self) -> EvaluatedEncoder:
        """The encoder that the options name, with the slots of --slots alone, and its record."""
        subject = encoder_of_options(self.args)
        if not (slots := getattr(self.args, "slots", None)):
            return subject
        encoder, kept = keep_encoder_slots(subject.encoder, slots, subject.record["sha256"])
        return replace(subject, encoder=encoder, record={**subject.record, "slots": kept})

    @cached_property
    def encoder(self) -> Encoder:
        """The encoder, on the device."""
        return self.subject.encoder.to(self.device)

    @cached_property
    def splits(self) -> tuple[ImageSource, ImageSource]:
        """The labelled training and validation images, their classes numbered alike."""
        args = self.args
        if not args.data_path:
            raise UserError("--data_path is empty; give a folder with train/ and val/, cifar10:DIR, or scenes")
        columns = TableColumns(args.path_column, args.label_column, args.split_column)
        train, val = (
            open_images(args.data_path, split, args.download, columns=columns, limits=self.limits)
            for split in ("train", "val")
        )
        require_labels(train)
        return train, align_classes(val, train.classes or [])

    @property
    def limits(self) -> ImageLimits:
        """The images that are read: largest size, orientation, the encoder's channels and, by default, its range."""
        args, subject = self.args, self.subject
        max_value = subject.max_value if args.max_value is None else args.max_value
        in_chans = subject.encoder.config.in_chans
        return ImageLimits(args.max_image_mb, args.max_image_mpix, max_value, in_chans, args.exif)

    @property
    def num_classes(self) -> int:
        """Number of classes of the training images."""
        return len(self.splits[0].classes or [])

    @cached_property
    def transform(self) -> EvalTransform:
        """The view of an image: --img_size, or the size of the encoder's position grid."""
        img_size = self.args.img_size or self.subject.encoder.config.img_size
        return EvalTransform(img_size, self.subject.mean, self.subject.std, exact=not self.args.fast_views)

    @property
    def dtype(self) -> torch.dtype:
        """Precision in which the encoder runs."""
        return PRECISIONS[self.args.precision]

    def features(
        self, source: ImageSource, encode: Callable[[Tensor], Tensor] | None = None, gather: bool = False
    ) -> Features:
        """Features of un-augmented images: this process' share, or those of all processes with `gather`.

        `encode` is a method of the encoder, images (B, C, H, W) -> features (B, F); None: the encoder itself.
        """
        return extract_split(
            self.encoder,
            source,
            self.transform,
            self.device,
            batch_size=self.args.batch_size_per_gpu,
            num_workers=self.args.num_workers,
            encode=encode,
            dtype=self.dtype,
            storage=self.storage,
            gather=gather,
        )

    def images_record(self, counts: Mapping[str, int | None]) -> dict[str, Any]:
        """Entries of a result about its images: their path, the numbers used and skipped, the resizing."""
        return {
            "images": {"data_path": self.args.data_path, "num_classes": self.num_classes, **counts},
            "view": view_record(self.transform, self.args.exif),
            "versions": versions(),
        }


def start_evaluation(args: argparse.Namespace) -> Distributed:
    """Join the other processes, set up the log and the precision of products."""
    WARNINGS.clear()
    process = init_distributed(args.device, args.dist_url, args.dist_timeout_min)
    require_same_options(vars(args))
    set_tf32(allowed=args.precision == "tf32")
    setup_logging()
    return process


def view_record(transform: EvalTransform, exif: str) -> dict[str, Any]:
    """Orientation, resizing, cropping and normalisation of a view, sizes in pixels, for a result file."""
    return {
        "exif": exif,
        "resize": transform.resize_size,
        "crop": transform.img_size,
        "exact": transform.exact,
        "interpolation": "bicubic",
        "mean": list(transform.mean),
        "std": list(transform.std),
    }


# The files of results. The functions below alone decide on their folder and name, and on what may be overwritten.


@dataclass(frozen=True)
class ResultFile:
    """The file of a result.

    Attributes:
        path: of the JSON file; figures have the same stem.
        options: the entry `options` of the result: weights, data and protocol, from `options_of`.
    """

    path: Path
    options: dict[str, Any]

    def write(self, result: dict[str, Any], table: str | None = None) -> dict[str, Any]:
        """Write the result with its options and the warnings about its features, and print the table, on rank 0."""
        warnings = {"warnings": list(WARNINGS)} if WARNINGS else {}
        result = {**result, **warnings, "options": self.options}
        if is_main():
            write_json(result, self.path)
        if is_main() and table is not None:
            say(f"{table}\n\n{self.path}")
        return result


def open_result(args: argparse.Namespace, name: str, record: Mapping[str, Any], **options: Any) -> ResultFile:
    """The file NAME_WEIGHTS_DATA.json; a student, random weights and some slots have parts of their own in the name.

    In a folder that is not that of the weights, WEIGHTS begins with the folder of the weights. WEIGHTS has the suffix
    of the file unless it is .pth.

    Args:
        args: parsed options.
        name: of the evaluation, such as "knn".
        record: of the encoder or model, with `sha256`.
        options: further entries of `ResultFile.options`.

    Raises:
        UserError: the file holds a result of other weights, data or options, and --overwrite is not given.
    """
    given = vars(args)
    folder = result_folder(args.output_dir or given.get("load_features"), args.pretrained_weights)
    weights, network = "", record.get("checkpoint_key")
    if args.pretrained_weights:
        file = Path(os.path.abspath(_weights_beside(args.pretrained_weights)))
        is_elsewhere = file.is_file() and not file.parent.samefile(folder)
        weights = (f"{file.parent.name}_" if is_elsewhere else "") + file.name.removesuffix(".pth")
    data = data_name(_absolute(given.get("data_path") or given.get("data_root") or ""))
    parts = [name, weights, "" if network == NETWORKS[0] else network, data]
    parts += ["untrained"] * bool(record.get("untrained")) + ["slots"] * bool(record.get("slots") or given.get("slots"))
    parts.append(Path(given.get("slots") or "").stem)
    stem = "_".join(filter(None, (re.sub(r"[^\w.]+", "-", part or "").strip("-.")[:MAX_PART] for part in parts)))
    return open_figures(args, stem, record, **options)


def open_figures(args: argparse.Namespace, stem: str, record: Mapping[str, Any], **options: Any) -> ResultFile:
    """The file STEM.json in the folder of the result, which figures belong to; otherwise as `open_result`."""
    path = result_folder(args.output_dir or vars(args).get("load_features"), args.pretrained_weights) / f"{stem}.json"
    # Random weights have no hash, but an architecture and a seed.
    options |= {**options_of(args), "weights": record.get("sha256") or dict(record)}
    if path.exists() and not args.overwrite:
        saved = read_json(path)
        saved = saved.get("options", {}) if isinstance(saved, dict) else {}
        if differing := differences(saved, plain(options), "in the file", "now"):
            raise UserError(
                f"{path} holds another result: {'; '.join(differing)}. Give another --output_dir, or --overwrite"
            )
    return ResultFile(path, options)


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options that a result depends on, without the weights: paths are absolute, files are path and hash."""
    options = {name: value for name, value in vars(args).items() if name not in HARMLESS_OPTIONS}
    for name, value in options.items():
        if isinstance(value, str) and (name in INPUTS or os.sep in value or os.path.isfile(value)):
            path = _absolute(value)
            options[name] = [path, file_sha256(Path(path))] if os.path.isfile(path) else path
    return options


def _absolute(path: str) -> str:
    """The absolute path of a file, a folder or a pattern; other texts, such as scenes:64:32, as they are."""
    is_path = path and os.path.exists(os.path.dirname(path) or path)
    return os.path.abspath(path) if is_path else path


def result_folder(output_dir: str | None, pretrained_weights: str) -> Path:
    """The folder of results: `output_dir`, which is created, else that of the file of weights, else the current one."""
    if not output_dir:
        file = _weights_beside(pretrained_weights)
        return file.parent if file.is_file() else Path()  # of a model's name, such as timm/NAME, there is no file
    if Path(output_dir).suffix in (".json", ".png"):
        raise UserError(f"--output_dir {output_dir} names a file; give the folder of the result")
    create_output_dir(folder := Path(output_dir))
    return folder


def _weights_beside(pretrained_weights: str) -> Path:
    """The file of weights at a path, or in the folder of an export."""
    exported = Path(pretrained_weights) / EXPORTED_WEIGHTS
    return exported if exported.is_file() else Path(pretrained_weights)

"""Options -> the task of an evaluation: the encoder, the images, the folder of the result, and the result's protocol.

k-NN, linear probes, slot-study, slot-score and attention start here. A number without its protocol cannot be compared.
So every result file says which weights (by hash), which network in them, which images, how resized, which versions. The
same command writes the same file: nothing in it changes from one run to the next.
"""

import argparse
import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dino_sparo.data.dataset import align_classes, require_labels, require_same_source
from dino_sparo.data.sources import ImageLimits, ImageSource, TableColumns, open_source
from dino_sparo.data.views import EvalTransform
from dino_sparo.evaluation.features import Features, extract_split
from dino_sparo.evaluation.load import Subject, compared_encoder, encoder_of_options, view_record
from dino_sparo.evaluation.slots.choice import with_slots
from dino_sparo.models.encoder import Encoder
from dino_sparo.runtime.agree import rank_0_first, require_same_options
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.launch import Distributed, init_distributed, is_main, is_only_a_peer, select_device
from dino_sparo.runtime.logs import setup_logging
from dino_sparo.runtime.precision import PRECISIONS, set_tf32
from dino_sparo.runtime.records import versions, write_json


class EvaluationTask:
    """The encoder, the images and the folder of one evaluation; the encoder and the images are opened on first use.

    Args:
        args: parsed options. An option that a command lacks takes its default.
        device: where to compute.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device

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
        return cls(args, select_device(args.device))

    @cached_property
    def subject(self) -> Subject:
        """The encoder that the options name, with the slots of --slots alone, and its record."""
        return with_slots(encoder_of_options(self.args), getattr(self.args, "slots", None))

    @cached_property
    def encoder(self) -> Encoder:
        """The encoder, on the device."""
        return self.subject.encoder.to(self.device)

    def other_subject(self, path: str) -> Subject:
        """The encoder of another checkpoint, for a comparison."""
        return compared_encoder(path, self.args)

    @cached_property
    def splits(self) -> tuple[ImageSource, ImageSource]:
        """The labelled training and validation images, their classes numbered alike."""
        args = self.args
        if not args.data_path:
            raise ValueError(
                "--data_path is empty; give a folder with train/ and val/, a torchvision set such as cifar10:DIR, or "
                "scenes"
            )
        columns = TableColumns(args.path_column, args.label_column, args.split_column)
        with rank_0_first():
            train, val = (
                open_source(args.data_path, split, args.download, columns=columns, limits=self.limits)
                for split in ("train", "val")
            )
        require_labels(train)
        for source in (train, val):
            require_same_source(source)
        return train, align_classes(val, train.classes or [])

    @property
    def limits(self) -> ImageLimits:
        """The largest image that is read."""
        return ImageLimits(self.args.max_image_mb, self.args.max_image_mpix, self.args.max_value)

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
    def storage(self) -> torch.device:
        """Where features are kept: on the device, or with --use_cuda false in the host's memory."""
        return self.device if self.args.use_cuda else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Precision in which the encoder runs."""
        return PRECISIONS[self.args.precision]

    def features(
        self, source: ImageSource, encode: Callable[[Tensor], Tensor] | None = None, gather: bool = False
    ) -> Features:
        """Features of un-augmented images: this process' share, or those of all processes with `gather`.

        Args:
            source: the images.
            encode: images (B, C, H, W) -> features (B, F), a method of the encoder; None: the encoder itself.
            gather: give every process the features of all images.
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
            "view": view_record(self.transform),
            "versions": versions(),
        }

    @cached_property
    def folder(self) -> Path:
        """The folder of the result."""
        folder = self.args.output_dir or getattr(self.args, "load_features", None)
        return result_folder(folder, self.args.pretrained_weights)

    def result_path(self, name: str, record: Mapping[str, Any] | None = None) -> Path:
        """Path of a result file; results of random weights and of some slots have endings of their own.

        Args:
            name: of the evaluation, such as "knn".
            record: of the encoder, if it is not this task's.
        """
        record = self.subject.record if record is None else record
        endings = ("_untrained" * bool(record.get("untrained")), "_slots" * bool(record.get("slots")))
        return self.folder / f"{name}{''.join(endings)}.json"


def start_evaluation(args: argparse.Namespace, several_results: bool = False) -> Distributed:
    """Join the other processes, set up the log and the precision of products.

    Args:
        args: parsed options.
        several_results: `--output` is the folder of several files, not a file.
    """
    output = getattr(args, "output", None)
    if output and several_results and os.path.isfile(output):
        raise ValueError(f"--output {output} is a file; give a folder")
    if output and not several_results and os.path.isdir(output):
        raise ValueError(f"--output {output} is a folder; give the path of a file")
    process = init_distributed(args.device, args.dist_url, args.dist_timeout_min)
    require_same_options(vars(args))
    set_tf32(allowed=args.precision == "tf32")
    setup_logging()
    return process


def write_result(result: dict[str, Any], table: str, path: Path) -> None:
    """Print the table and write the result, on rank 0."""
    if is_main():
        say(table)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(result, path)
        say(f"\n{path}")


def result_folder(output_dir: str | None, pretrained_weights: str) -> Path:
    """The folder of results: `output_dir`, which is created, else the checkpoint's, else the current one."""
    if not output_dir:
        return Path(pretrained_weights).parent if pretrained_weights else Path()
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder

"""Options -> one evaluation: its processes, its subject, its images and its result file.

Every evaluation starts here and ends in `ResultFile.write`. The subject is an encoder of images (`EncoderTask`), or a
model of images and captions (`image_text/evaluation/task.py`).

    task = EncoderTask.start(args)
    file = task.open_result("knn")          # refuses to overwrite another result, before anything is computed
    train, val = map(task.features, task.splits)
    file.write({"top1": ...}, "a table", headline=[...])    # adds weights, versions and options
"""

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import DataLoader

from dino_sparo.data.dataset import ImageDataset
from dino_sparo.data.labels import align_classes, require_labels
from dino_sparo.data.loader import create_loader
from dino_sparo.data.ranks import open_images
from dino_sparo.data.sources import ImageLimits, ImageSource, TableColumns
from dino_sparo.data.views import EvalTransform
from dino_sparo.evaluation.encoders import EvaluatedEncoder, encoder_of_options
from dino_sparo.evaluation.features import WARNINGS, Features, extract_split
from dino_sparo.evaluation.result import ResultFile, open_result, result_stem
from dino_sparo.evaluation.slots.choice import keep_encoder_slots
from dino_sparo.models.encoder import Encoder
from dino_sparo.runtime.collectives import require_same_options
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import versions
from dino_sparo.runtime.launch import init_distributed, select_device
from dino_sparo.runtime.logs import setup_logging
from dino_sparo.runtime.precision import PRECISIONS, set_tf32
from dino_sparo.weights.results import subject_of

Task = TypeVar("Task", bound="EvaluationTask")


class EvaluationTask(ABC):
    """Options, device, images and result of one evaluation; the subject and the images are opened on first use.

    Args:
        args: parsed options. An option that a command lacks takes its default.
        device: where to compute.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        # --use_cuda false keeps features in the host's memory.
        self.storage = device if getattr(args, "use_cuda", True) else torch.device("cpu")

    @classmethod
    def start(cls: type[Task], args: argparse.Namespace, *opener: Any) -> Task:
        """Join the other processes, set up log and precision; `opener` is the last argument of some classes."""
        WARNINGS.clear()
        process = init_distributed(args.device, args.dist_url, args.dist_timeout_min)
        require_same_options(vars(args))
        set_tf32(allowed=args.precision == "tf32")
        setup_logging()
        return cls(args, process.device, *opener)

    @classmethod
    def start_alone(cls: type[Task], args: argparse.Namespace, *opener: Any) -> Task:
        """Set up the log, without other processes; for commands `on_first_process`."""
        setup_logging()
        WARNINGS.clear()
        return cls(args, select_device(args.device), *opener)

    @property
    @abstractmethod
    def weights(self) -> Mapping[str, Any]:
        """Description of the weights for a result: plain values, such as `sha256`."""

    @property
    @abstractmethod
    def max_value(self) -> int:
        """Value of 16-bit images that was white in training."""

    @property
    def in_chans(self) -> int:
        """Channels of the images."""
        return 3

    @abstractmethod
    def protocol(self) -> dict[str, Any]:
        """Entries of every result of this subject: weights, versions."""

    @abstractmethod
    def open_split(self, split: str | None) -> ImageSource:
        """The images of a split of --data_path."""

    @property
    def dtype(self) -> torch.dtype:
        """Precision in which the subject runs."""
        return PRECISIONS[self.args.precision]

    @property
    def limits(self) -> ImageLimits:
        """Largest size, range, channels and orientation of the images."""
        args = self.args
        max_value = self.max_value if args.max_value is None else args.max_value
        return ImageLimits(args.max_image_mb, args.max_image_mpix, max_value, self.in_chans, args.exif)

    @cached_property
    def splits(self) -> tuple[ImageSource, ImageSource]:
        """The labelled training and validation images, with the same numbers of classes."""
        train, val = map(self.open_split, ("train", "val"))
        require_labels(train)
        return train, align_classes(val, train.classes or [])

    @property
    def num_classes(self) -> int:
        """Number of classes of the training images."""
        return len(self.splits[0].classes or [])

    def open_result(
        self, name: str, features: Mapping[str, Any] | None = None, unrecorded: Collection[str] = (), **options: Any
    ) -> ResultFile:
        """The file NAME_WEIGHTS_DATA.json.

        Args:
            name: of the evaluation, such as "knn".
            features: record of cached features, which then describes the subject.
            unrecorded: options that change no number of the result.
            options: further entries of the result's `options`.

        Raises:
            UserError: the file holds a result of other weights, data or options, and --overwrite is not given.
        """
        weights = self.weights if features is None else subject_of(features)
        protocol = self.protocol if features is None else lambda: features
        stem = result_stem(self.args, name, weights)
        return open_result(self.args, stem, weights, protocol, unrecorded, **options)

    def open_figures(self, stem: str, unrecorded: Collection[str] = ()) -> ResultFile:
        """The file STEM.json, of figures with this stem; otherwise as `result.open_result`."""
        return open_result(self.args, stem, self.weights, self.protocol, unrecorded)


class EncoderTask(EvaluationTask):
    """An evaluation of an encoder of images."""

    @cached_property
    def subject(self) -> EvaluatedEncoder:
        """The encoder that the options name, reduced to the slots of --slots, and its record."""
        subject = encoder_of_options(self.args)
        if not (slots := getattr(self.args, "slots", None)):
            return subject
        encoder, kept = keep_encoder_slots(subject.encoder, slots, subject.record["sha256"])
        return replace(subject, encoder=encoder, record={**subject.record, "slots": kept})

    @cached_property
    def encoder(self) -> Encoder:
        """The encoder, on the device."""
        return self.subject.encoder.to(self.device)

    @property
    def weights(self) -> Mapping[str, Any]:
        """Weights, hash, network, epoch and architecture of the encoder."""
        return self.subject.record

    @property
    def max_value(self) -> int:
        """Value of 16-bit images that was white in training."""
        return self.subject.max_value

    @property
    def in_chans(self) -> int:
        """Channels of the encoder's images."""
        return self.subject.encoder.config.in_chans

    def protocol(self) -> dict[str, Any]:
        """The encoder and the versions."""
        return {"encoder": self.subject.record, "versions": versions()}

    def open_split(self, split: str | None) -> ImageSource:
        """The images of a split of --data_path, by default of the split that training uses."""
        args = self.args
        if not args.data_path:
            raise UserError("--data_path is empty; give a folder with train/ and val/, cifar10:DIR, or scenes")
        columns = TableColumns(args.path_column, args.label_column, args.split_column)
        return open_images(args.data_path, split, args.download, columns=columns, limits=self.limits)

    @cached_property
    def transform(self) -> EvalTransform:
        """The view of an image: --img_size, or the size of the encoder's position grid."""
        img_size = self.args.img_size or self.subject.encoder.config.img_size
        return EvalTransform(img_size, self.subject.mean, self.subject.std, exact=not self.args.fast_views)

    @property
    def blank(self) -> Float[Tensor, "1 C H W"]:
        """An image of the size of the views, from which the sizes of features are read."""
        side = self.transform.img_size
        return torch.zeros(1, self.in_chans, side, side, device=self.device)

    def loader(self, dataset: ImageDataset, batches: Iterable[Sequence[Any]]) -> DataLoader:
        """A loader of given batches, as `create_loader`."""
        return create_loader(dataset, batches, num_workers=self.args.num_workers, pin_memory=self.device.type == "cuda")

    def features(
        self,
        source: ImageSource,
        encode: Callable[[Tensor], Tensor] | None = None,
        gather: bool = False,
        view: Callable[..., list[Tensor]] | None = None,
    ) -> Features:
        """Features of un-augmented images: this process' share, or those of all processes with `gather`.

        Args:
            source: the images.
            encode: images (B, C, H, W) -> features (B, F), by the encoder; None: the encoder itself.
            gather: return the features of all processes.
            view: (image, rng) -> [what the encoder sees]; None: `transform`.
        """
        return extract_split(
            self.encoder,
            source,
            view or self.transform,
            self.device,
            batch_size=self.args.batch_size_per_gpu,
            num_workers=self.args.num_workers,
            encode=encode,
            dtype=self.dtype,
            storage=self.storage,
            gather=gather,
        )

    def images_record(self, **counts: int | None) -> dict[str, Any]:
        """Entries of a result about its labelled images: path, `counts`, resizing."""
        return {
            "images": {"data_path": self.args.data_path, "num_classes": self.num_classes, **counts},
            "view": view_record(self.transform, self.args.exif),
        }


def view_record(transform: EvalTransform, exif: str) -> dict[str, Any]:
    """Orientation, resizing and cropping (pixels) and normalisation of a view, for a result."""
    return {
        "exif": exif,
        "resize": transform.resize_size,
        "crop": transform.img_size,
        "exact": transform.exact,
        "interpolation": "bicubic",
        "mean": list(transform.mean),
        "std": list(transform.std),
    }

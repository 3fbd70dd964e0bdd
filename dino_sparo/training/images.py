"""What objectives on crops of images share: the data, the encoder's description, the k-NN probe during training.

An objective adds its networks, its loss and its step; see `objective.py` for the contract.
"""

import argparse
import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dino_sparo.data.augment import Distortions
from dino_sparo.data.crops import MultiCropAugmentation
from dino_sparo.data.dataset import (
    Batch,
    ImageDataset,
    collate_views,
    open_together,
    require_labels,
    require_same_source,
)
from dino_sparo.data.loader import create_loader
from dino_sparo.data.samplers import EpochSampler
from dino_sparo.data.sources import ImageLimits, ImageSource, TableColumns, index_images, open_source
from dino_sparo.data.sources.image_source import of_different_classes, spread_out
from dino_sparo.data.views import EvalTransform, PatchView
from dino_sparo.evaluation.features import disjoint_subsets
from dino_sparo.evaluation.knn.classify import evaluate_knn
from dino_sparo.models.encoder import Encoder
from dino_sparo.runtime.distributed import Distributed, is_main, without_reduction
from dino_sparo.runtime.logs import RunLog
from dino_sparo.runtime.precision import choose_precision
from dino_sparo.training.objective import EpochResult, Objective, Training
from dino_sparo.training.optim import create_optimizer, param_groups
from dino_sparo.training.updater import GroupSchedule, Updater
from dino_sparo.weights.checkpoint import check_same_model, encoder_description
from dino_sparo.weights.initialize import initialize_encoder

logger = logging.getLogger(__name__)

LOOK_IMAGES = 64  # whose encodings are measured after every epoch
SHOWN_IMAGES = 4  # with the maps of all slots, in TensorBoard
PROBE_NEIGHBOURS = 20
PROBE_IMAGES = (4000, 1000)  # that vote, that are classified, in the probe during training


class Examples(NamedTuple):
    """Images to look at after every epoch.

    Attributes:
        crops: per view a batch (B, C, H, W), augmented as for training.
        views: (B, C, H, W), the central squares of a few, not augmented.
    """

    crops: list[Tensor]
    views: Tensor


@dataclass(frozen=True)
class CropData:
    """The images of a run as crops.

    Attributes:
        source: the images.
        sampler: which images come when.
        dataset: image -> crops.
        loader: batches of crops.
        distort: distorts 8-bit crops on the device; None where the loader's crops are finished.
        examples: to look at after every epoch; rank 0 only.
    """

    source: ImageSource
    sampler: EpochSampler
    dataset: ImageDataset
    loader: DataLoader
    distort: Distortions | None
    examples: Examples | None

    def first_batch(self, size: int) -> Batch:
        """The first images as the loader would give them."""
        return collate_views([self.dataset[index % len(self.dataset)] for index in range(size)])


def open_crops(args: argparse.Namespace, process: Distributed) -> CropData:
    """Open the images that the options name.

    Args:
        args: the options of `main_dino.py` about images, crops, normalisation and processes.
        process: this process among its peers.

    Raises:
        ValueError: there are no such images, or too few for one step.
    """
    source = open_together(
        lambda: open_source(
            args.data_path,
            args.split,
            args.download,
            max_corrupt=args.max_corrupt,
            columns=TableColumns(args.path_column, args.label_column, args.split_column),
            limits=ImageLimits(args.max_image_mb, args.max_image_mpix, args.max_value),
        ),
        partial(index_images, args.data_path, split=args.split),
        f"opening {args.data_path}",
    )
    require_same_source(source)
    sampler = EpochSampler(
        len(source), args.batch_size_per_gpu, process.rank, process.world_size, args.grad_accum_steps, args.seed
    )
    defer = args.distort_on == "device" or (args.distort_on == "auto" and process.device.type == "cuda")
    augmentation = partial(
        MultiCropAugmentation,
        tuple(args.global_crops_scale),
        tuple(args.local_crops_scale),
        args.local_crops_number,
        args.global_crops_size,
        args.local_crops_size,
        tuple(args.norm_mean),
        tuple(args.norm_std),
    )
    dataset = ImageDataset(source, augmentation(defer), args.seed)
    loader = create_loader(
        dataset,
        sampler,
        num_workers=args.num_workers,
        pin_memory=process.device.type == "cuda",
        timeout_min=args.dist_timeout_min,
    )
    distort = Distortions(args.norm_mean, args.norm_std).to(process.device) if defer else None
    examples = draw_examples(args, source, augmentation(False)) if is_main() else None
    return CropData(source, sampler, dataset, loader, distort, examples)


def draw_examples(args: argparse.Namespace, source: ImageSource, augmentation: MultiCropAugmentation) -> Examples:
    """A few images of different classes, then others spread over the data: their crops, and of the few their views."""
    few = of_different_classes(source, SHOWN_IMAGES)
    indices = [*few, *(index for index in spread_out(source, LOOK_IMAGES) if index not in few)][:LOOK_IMAGES]
    cropped = ImageDataset(source, augmentation, args.seed)
    crops = zip(*(cropped[index].views for index in indices), strict=True)
    square = PatchView([args.global_crops_size], args.patch_size, args.norm_mean, args.norm_std)
    whole = ImageDataset(source, square, args.seed)
    shown = [whole[index].views[0] for index in few]
    return Examples([torch.stack(view) for view in crops], torch.stack(shown))


@dataclass
class CropTraining(Training[Batch]):
    """What a step on crops needs and changes.

    Attributes:
        student: the network that is trained, with an `encoder`; inside DDP where there are several processes.
        updater: its optimizer, schedules and precision.
        distort: distorts 8-bit crops on the device; None where the loader's crops are finished.
    """

    student: nn.Module
    updater: Updater
    distort: Distortions | None = field(default=None, kw_only=True)

    @property
    def network(self) -> Any:
        """The student without DDP."""
        return self.student.module if isinstance(self.student, DistributedDataParallel) else self.student

    @property
    def encoder(self) -> Encoder:
        """The encoder that is evaluated."""
        encoder: Encoder = self.network.encoder
        return encoder

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The student."""
        return {"student": self.network}

    def local_trial_loss(self, batch: Batch) -> Tensor:
        """The loss, without DDP."""
        with without_reduction(self.student):
            return self.trial_loss(batch)

    @property
    def compiled_modules(self) -> list[nn.Module]:
        """The student and the distortions."""
        return [self.network, *([self.distort] if self.distort else [])]

    @torch.no_grad()
    def crops(self, batch: Batch) -> list[Shaped[Tensor, "B C _ _"]]:
        """The S crops (B, C, H, W) of a batch on the device, distorted and normalised.

        Raises:
            ValueError: the loader left the distortions to the device, and there is no `distort`.
        """
        batch = batch.to(self.updater.device)
        if batch.parameters is None:
            return batch.views
        if self.distort is None:
            raise ValueError("the batch holds crops that have yet to be distorted; give the training a `distort`")
        return self.distort.views(batch.views, batch.parameters)


def create_updater(
    network: nn.Module, schedules: Sequence[GroupSchedule], args: argparse.Namespace, device: torch.device
) -> Updater:
    """The optimizer and precision that the options name.

    Args:
        network: what is trained, on the device.
        schedules: one per group of `optim.param_groups`.
        args: the options of `main_dino.py` about the optimisation.
        device: where to compute.
    """
    return Updater(
        create_optimizer(args.optimizer, param_groups(network)),
        schedules,
        list(network.parameters()),
        device,
        choose_precision(args.precision, args.use_fp16, device),
        args.grad_accum_steps,
        args.seed,
    )


class CropObjective(Objective[Batch]):
    """An objective on crops of images.

    Args:
        args: the options of `main_dino.py`.
        process: this process among its peers.

    Raises:
        ValueError: options that do not fit each other or the images.
    """

    noun: ClassVar[str] = "image"
    score_name: ClassVar[str] = "best_knn"
    metric: ClassVar[str] = "knn_20"
    counters: ClassVar[Mapping[str, str]] = {"num_corrupt": "corrupt_images"}
    harmless_options: ClassVar[Sequence[str]] = ("knn_freq",)
    training: CropTraining

    def __init__(self, args: argparse.Namespace, process: Distributed) -> None:
        self.args, self.data = args, open_crops(args, process)
        self.source, self.sampler, self.loader = self.data.source, self.data.sampler, self.data.loader
        self.num_left_out = getattr(self.source, "num_left_out", 0)  # in damaged shards
        if args.knn_freq:
            require_labels(self.data.source)
        self.training = self.build_training(args, process, self.sampler.steps_per_epoch)
        self.training.distort = self.data.distort

    @abstractmethod
    def build_training(self, args: argparse.Namespace, process: Distributed, steps_per_epoch: int) -> Any:
        """Networks, loss, optimizer and schedules from the options: a `CropTraining`."""

    @property
    def description(self) -> dict[str, Any]:
        """The checkpoint's `encoder`."""
        config = self.training.encoder.config
        return {"encoder": encoder_description(config, self.args.norm_mean, self.args.norm_std)}

    def check_same_model(self, checkpoint: Mapping[str, Any], source: str) -> None:
        """Refuse to resume a checkpoint of another encoder."""
        check_same_model(checkpoint, self.training.encoder.config, source)

    def start_from(self) -> None:
        """Start the student's encoder from a ViT's weights."""
        if self.args.init_from:
            report = initialize_encoder(self.training.network.encoder, self.args.init_from)
            logger.info("start from %s; the head is new", report)

    def rehearsal_batch(self) -> Batch:
        """The first images."""
        return self.data.first_batch(self.args.batch_size_per_gpu)

    def is_evaluated(self, epoch: int) -> bool:
        """Every `--knn_freq` epochs."""
        return self.args.knn_freq > 0 and (epoch + 1) % self.args.knn_freq == 0

    def after_epoch(self, epoch: int, means: Mapping[str, float], log: RunLog) -> EpochResult:
        """20-NN accuracy every `--knn_freq` epochs, on disjoint labelled subsets of the training images."""
        args = self.args
        if not self.is_evaluated(epoch):
            return EpochResult()
        voters, judged = disjoint_subsets(self.data.source, PROBE_IMAGES)
        outcome = evaluate_knn(
            self.training.encoder,
            voters,
            judged,
            EvalTransform(args.global_crops_size, tuple(args.norm_mean), tuple(args.norm_std)),
            device=self.updater.device,
            batch_size=args.batch_size_per_gpu,
            num_workers=min(args.num_workers, 2),
        )
        accuracy = outcome.results[PROBE_NEIGHBOURS].top1
        return EpochResult({self.metric: accuracy}, score=accuracy)

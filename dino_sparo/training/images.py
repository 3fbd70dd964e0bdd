"""Options -> crops of images, for objectives that learn from images alone."""

import argparse
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dino_sparo.crops import MultiCropAugmentation
from dino_sparo.data import (
    Batch,
    EpochSampler,
    ImageDataset,
    ImageSource,
    collate,
    create_loader,
    open_source,
    open_together,
)
from dino_sparo.distort import Distortions
from dino_sparo.evaluation.views import SquareView, of_different_classes, spread_out
from dino_sparo.runtime.distributed import Distributed, is_main, require_same
from dino_sparo.sources import ImageLimits, TableColumns, index_images

LOOK_IMAGES = 64  # whose encodings are measured after every epoch
SHOWN_IMAGES = 4  # with the maps of all slots, in TensorBoard


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
        return collate([self.dataset[index % len(self.dataset)] for index in range(size)])


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
            limits=ImageLimits(args.max_image_mb, args.max_image_mpix),
        ),
        partial(index_images, args.data_path),
        f"opening {args.data_path}",
    )
    require_same(len(source), "the number of images")
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
    square = SquareView([args.global_crops_size], args.patch_size, args.norm_mean, args.norm_std)
    whole = ImageDataset(source, square, args.seed)
    shown = [whole[index].views[0] for index in few]
    return Examples([torch.stack(view) for view in crops], torch.stack(shown))

"""Functions for objectives on crops of images: data, crops on the device, optimizer, k-NN probe during training.

An objective adds its networks, its loss and its step; see `training/objective.py` for the contract.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dino_sparo.data.augment import Distortions
from dino_sparo.data.crops import MultiCropAugmentation
from dino_sparo.data.dataset import ImageDataset, open_images
from dino_sparo.data.loader import create_loader
from dino_sparo.data.samplers import EpochSampler
from dino_sparo.data.sources import ImageLimits, ImageSource, TableColumns
from dino_sparo.data.sources.image_source import of_different_classes, spread_out
from dino_sparo.data.views import EvalTransform, PatchView
from dino_sparo.evaluation.features import disjoint_subsets, extract_split
from dino_sparo.evaluation.knn import classify_shards
from dino_sparo.models.encoder import Encoder
from dino_sparo.runtime.launch import Distributed, is_main
from dino_sparo.runtime.precision import choose_precision
from dino_sparo.training.optim import OPTIMIZERS, layer_factors, param_groups, split_by_factor
from dino_sparo.training.updater import GroupSchedule, Updater

LOOK_IMAGES = 64  # whose encodings are measured after every epoch
SHOWN_IMAGES = 4  # with the maps of all slots, in TensorBoard
PROBE_NEIGHBOURS = 20
PROBE_TEMPERATURE = 0.07
PROBE_IMAGES = (4000, 1000)  # that vote, that are classified, in the probe during training


class Examples(NamedTuple):
    """Example images for TensorBoard and for the rank of the encodings.

    Attributes:
        crops: per view a batch (B, C, H, W) of a few images, augmented as for training.
        views: (B, C, H, W), the central squares of these images, not augmented.
        first_crops: (B, C, H, W), the first crops of these and of more images, whose encodings are measured.
    """

    crops: list[Tensor]
    views: Tensor
    first_crops: Tensor


def open_crops(
    args: argparse.Namespace, process: Distributed
) -> tuple[ImageSource, EpochSampler, DataLoader, Distortions | None, Examples | None]:
    """Open the images of the options; ValueError if there are none, or too few for one step.

    Returns:
        The images, their sampler, the loader of crops, the distortions that run on the device (None if the loader
        distorts), and examples (None except on rank 0).
    """
    source = open_images(
        args.data_path,
        args.split,
        args.download,
        max_corrupt=args.max_corrupt,
        columns=TableColumns(args.path_column, args.label_column, args.split_column),
        limits=ImageLimits(args.max_image_mb, args.max_image_mpix, args.max_value, args.in_chans, args.exif),
    )
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
    loader = create_loader(
        ImageDataset(source, augmentation(defer), args.seed),
        sampler,
        num_workers=args.num_workers,
        pin_memory=process.device.type == "cuda",
        timeout_min=args.dist_timeout_min,
    )
    distort = Distortions(args.norm_mean, args.norm_std).to(process.device) if defer else None
    examples = draw_examples(args, source, augmentation(False)) if is_main() else None
    return source, sampler, loader, distort, examples


def draw_examples(args: argparse.Namespace, source: ImageSource, augmentation: MultiCropAugmentation) -> Examples:
    """Crops and views of a few images of different classes; first crops of these and of others spread over the data."""
    few = of_different_classes(source, SHOWN_IMAGES)
    others = [index for index in spread_out(source, LOOK_IMAGES) if index not in few][: LOOK_IMAGES - len(few)]
    cropped = ImageDataset(source, augmentation, args.seed)
    cropped_once = ImageDataset(source, augmentation.first(1), args.seed)
    crops = [torch.stack(view) for view in zip(*(cropped[index].views for index in few), strict=True)]
    first_crops = torch.stack([*crops[0], *(cropped_once[index].views[0] for index in others)])
    square = PatchView([args.global_crops_size], args.patch_size, args.norm_mean, args.norm_std)
    whole = ImageDataset(source, square, args.seed)
    shown = [whole[index].views[0] for index in few]
    return Examples(crops, torch.stack(shown), first_crops)


def create_updater(
    network: nn.Module, schedules: Sequence[GroupSchedule], args: argparse.Namespace, device: torch.device
) -> Updater:
    """Optimizer and precision of the options; `schedules` has one entry per group of `optim.param_groups`."""
    factors = layer_factors(network.backbone, args.layer_decay)
    groups, schedules = split_by_factor(param_groups(network), schedules, factors)
    names = {parameter: name for name, parameter in network.named_parameters()}
    for group in groups:  # torch's key for them
        group["param_names"] = [names[parameter] for parameter in group["params"]]
    return Updater(
        OPTIMIZERS[args.optimizer](groups),
        schedules,
        list(network.parameters()),
        device,
        choose_precision(args.precision, args.use_fp16, device),
        args.grad_accum_steps,
        args.seed,
    )


def knn_probe(encoder: Encoder, source: ImageSource, args: argparse.Namespace, device: torch.device) -> float:
    """20-NN accuracy, percent, on disjoint labelled subsets of the training images."""
    transform = EvalTransform(args.global_crops_size, tuple(args.norm_mean), tuple(args.norm_std))
    workers = min(args.num_workers, 2)
    voters, judged = (
        extract_split(
            encoder, subset, transform, device, batch_size=args.batch_size_per_gpu, num_workers=workers, gather=False
        ).normalize_()
        for subset in disjoint_subsets(source, PROBE_IMAGES)
    )
    accuracies = classify_shards(voters, judged, [PROBE_NEIGHBOURS], PROBE_TEMPERATURE, device)
    return accuracies[PROBE_NEIGHBOURS].top1

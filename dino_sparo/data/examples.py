"""Example images, for the pictures of a training: crops and whole views of images of different classes."""

from typing import NamedTuple

import torch
from torch import Tensor

from dino_sparo.data.crops import MultiCropAugmentation
from dino_sparo.data.dataset import ImageDataset
from dino_sparo.data.sources.image_source import ImageSource, of_different_classes, spread_out
from dino_sparo.data.views import PatchView

NUM_MEASURED = 64  # images whose encodings are measured after every epoch
NUM_SHOWN = 4  # images with the maps of all slots, in TensorBoard


class Examples(NamedTuple):
    """Example images for TensorBoard and for the rank of the encodings.

    `crops` has per view a batch (B, C, H, W) of a few images, augmented as for training; `views` the central squares of
    these images, not augmented; `first_crops` the first crops of these and of more images, whose encodings are
    measured.
    """

    crops: list[Tensor]
    views: Tensor
    first_crops: Tensor


def draw_examples(source: ImageSource, augmentation: MultiCropAugmentation, view: PatchView, seed: int) -> Examples:
    """Crops and views of a few images of different classes, and first crops of images spread over the data."""
    few = of_different_classes(source, NUM_SHOWN)
    others = [index for index in spread_out(source, NUM_MEASURED) if index not in few][: NUM_MEASURED - len(few)]
    cropped = ImageDataset(source, augmentation, seed)
    cropped_once = ImageDataset(source, augmentation.first(1), seed)
    crops = [torch.stack(crop) for crop in zip(*(cropped[index].views for index in few), strict=True)]
    first_crops = torch.stack([*crops[0], *(cropped_once[index].views[0] for index in others)])
    whole = ImageDataset(source, view, seed)
    return Examples(crops, torch.stack([whole[index].views[0] for index in few]), first_crops)

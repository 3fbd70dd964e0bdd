"""Any images -> mean and deviation of each channel, as options of training.

dino-sparo statistics --data_path stacks --in_chans 5
"""

import argparse
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from dino_sparo.data.channels import WHITE
from dino_sparo.data.crops import pixels_of
from dino_sparo.data.shares import readable_batches, share_loader
from dino_sparo.data.sources import ImageLimits, TableColumns, open_source
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.launch import on_first_process
from dino_sparo.runtime.logs import setup_logging


def channel_sums(image: Image.Image, rng: np.random.Generator) -> list[Float[Tensor, "3 C 1"]]:
    """Number, sum and sum of squares of the pixels of each channel, in [0, 1]; in fp64."""
    pixels = pixels_of(image).reshape(len(image.getbands()), -1).astype(np.float64) / WHITE
    numbers = np.full(len(pixels), pixels.shape[1], np.float64)
    return [torch.from_numpy(np.stack([numbers, pixels.sum(1), (pixels**2).sum(1)]))[..., None]]


@on_first_process
def measure_channels(args: argparse.Namespace) -> dict[str, Any]:
    """`dino-sparo statistics`: every image counts by its pixels, unreadable images are skipped; returns the numbers."""
    setup_logging()
    limits = ImageLimits(args.max_image_mb, args.max_image_mpix, args.max_value, args.in_chans, args.exif)
    columns = TableColumns(args.path_column, args.label_column, args.split_column)
    source = open_source(args.data_path, args.split, args.download, columns=columns, limits=limits)
    loader = share_loader(source, channel_sums, torch.device("cpu"), args.batch_size_per_gpu, args.num_workers)
    total = torch.zeros(3, args.in_chans, dtype=torch.float64)
    num_images = 0
    for batch, kept in readable_batches(loader, f"measuring {source.name}"):
        total += batch.views[0][kept].sum(0)[..., 0]
        num_images += len(kept)
    number, first, second = total
    mean = first / number
    std = (second / number - mean**2).clip(min=0).sqrt()
    values = {name: [round(value, 4) for value in of.tolist()] for name, of in (("mean", mean), ("std", std))}
    options = {
        "max_value": [args.max_value],
        "in_chans": [args.in_chans],
        "norm_mean": values["mean"],
        "norm_std": values["std"],
    }
    say("\n".join(f"--{name} {' '.join(map(str, option))}" for name, option in options.items()))
    return {"num_images": num_images, **values}

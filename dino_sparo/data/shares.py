"""A source -> this process' share of its images, each once and in order, without unreadable images."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import DataLoader

from dino_sparo.data.batch import Batch
from dino_sparo.data.dataset import ImageDataset
from dino_sparo.data.loader import create_loader
from dino_sparo.data.samplers import ShardSampler
from dino_sparo.data.sources import ImageSource
from dino_sparo.runtime.launch import rank, world_size
from dino_sparo.runtime.logs import progress

logger = logging.getLogger(__name__)

MAX_NAMED = 5  # unreadable images named in the log


def share_loader(
    source: ImageSource, transform: Callable, device: torch.device, batch_size: int, num_workers: int
) -> DataLoader:
    """Batches of this process' share of a source, in order.

    Args:
        source: the images.
        transform: (image, rng) -> [view].
        device: where the batches go.
        batch_size: per process.
        num_workers: processes that load images, per process.
    """
    sampler = ShardSampler(len(source), batch_size, rank=rank(), world_size=world_size())
    is_cuda = device.type == "cuda"
    return create_loader(ImageDataset(source, transform), sampler, num_workers=num_workers, pin_memory=is_cuda)


def readable_batches(loader: Any, desc: str) -> Iterator[tuple[Batch, Int[Tensor, " kept"]]]:
    """Each batch of a `share_loader`, and the rows of its images that could be read.

    Unreadable images are named in the log at the end; `desc` is the name of the work there.
    """
    corrupt: list[tuple[str, str]] = []
    batches = progress(loader, total=len(loader), desc=f"{desc}, batches")
    for wanted, batch in zip(loader.batch_sampler, batches, strict=True):
        corrupt += batch.corrupt
        # The loader replaces an unreadable image; the item has the replacement's index.
        yield batch, (batch.indices == torch.tensor(wanted)).nonzero().flatten()
    if corrupt:
        where = "; ".join(f"{location} ({reason})" for location, reason in sorted(set(corrupt))[:MAX_NAMED])
        logger.warning("%s: left out %d images that cannot be read: %s", desc, len(corrupt), where)

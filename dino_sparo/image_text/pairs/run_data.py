"""The options of a run -> its pairs, their order and their batches, for any image-text objective."""

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, Dataset, default_convert

from dino_sparo.data.dataset import open_together, require_same_source
from dino_sparo.data.loader import create_loader
from dino_sparo.data.samplers import EpochSampler
from dino_sparo.data.sources import ImageLimits
from dino_sparo.data.sources.tars import TarSource
from dino_sparo.image_text.evaluation.validation import hold_out
from dino_sparo.image_text.pairs.batches import PairDataset, PairSource, PairTransform
from dino_sparo.image_text.pairs.sources import index_pairs, open_pairs
from dino_sparo.image_text.pairs.streams import PairStream, StreamDataset
from dino_sparo.runtime.agree import all_or_none
from dino_sparo.runtime.launch import Distributed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchForm:
    """The form of an objective's batches.

    Attributes:
        collate: items -> batch.
        dataset: pairs -> items; by default the pairs themselves.
    """

    collate: Callable[[Sequence[Any]], Any]
    dataset: Callable[[PairDataset], Dataset] = lambda pairs: pairs


def micro_batch_size(batch_size: int, num_processes: int, accum_steps: int) -> int:
    """Pairs that one process encodes at a time, of `batch_size` per step; ValueError if the division leaves a rest."""
    parts = num_processes * accum_steps
    if batch_size % parts:
        raise ValueError(
            f"--batch_size {batch_size} cannot be shared by {num_processes} process(es) with --grad_accum_steps "
            f"{accum_steps}; the nearest that can is {max(round(batch_size / parts), 1) * parts}"
        )
    return batch_size // parts


@dataclass(frozen=True)
class PairData:
    """The pairs of a run.

    Attributes:
        source: pairs by number, or a stream of them.
        sampler: the order of the pairs; for a stream only the sizes of its epochs and batches.
        loader: batches of pairs.
        held_out: pairs to validate on, or None.
    """

    source: PairSource | PairStream
    sampler: EpochSampler
    loader: DataLoader
    held_out: PairSource | None = None


def number_pairs(args: argparse.Namespace, process: Distributed, micro_batch: int, form: BatchForm) -> PairData:
    """Pairs by number, their order and their batches."""
    source, held_out = _open_together(args, args.data_path, args.split), _open_held_out(args)
    if args.val_share:
        source, held_out = hold_out(source, args.val_share, args.seed)
    require_same_source(source)
    _note_few_shards(source, args.num_workers * process.world_size)
    sampler = EpochSampler(len(source), micro_batch, process.rank, process.world_size, args.grad_accum_steps, args.seed)
    pairs = PairDataset(source, PairTransform(args.img_size, tuple(args.crop_scale), args.exact_crops), args.seed)
    dataset = form.dataset(pairs)
    loader = create_loader(
        dataset,
        sampler,
        collate=form.collate,
        num_workers=args.num_workers,
        pin_memory=process.device.type == "cuda",
        timeout_min=args.dist_timeout_min,
    )
    return PairData(source, sampler, loader, held_out)


def stream_pairs(args: argparse.Namespace, process: Distributed, micro_batch: int) -> PairData:
    """A stream of pairs, the sizes of its epochs and batches, and its batches."""
    sampler = EpochSampler(
        args.epoch_pairs, micro_batch, process.rank, process.world_size, args.grad_accum_steps, args.seed
    )
    with all_or_none(f"opening {args.data_path}"):
        stream = PairStream(
            args.data_path,
            args.shard_weights,
            PairTransform(args.img_size, tuple(args.crop_scale), args.exact_crops),
            sampler,
            args.context_length,
            args.caption_key,
            ImageLimits(args.max_image_mb, args.max_image_mpix, args.max_value),
        )
    loader = create_loader(
        StreamDataset(stream),
        sampler=None,
        collate=default_convert,  # which leaves a batch of pairs as it is
        num_workers=args.num_workers,
        pin_memory=process.device.type == "cuda",
        timeout_min=args.dist_timeout_min,
    )
    return PairData(stream, sampler, loader, _open_held_out(args))


def _open_held_out(args: argparse.Namespace) -> PairSource | None:
    return _open_together(args, args.val_path, None, default_split="val") if args.val_path else None


def _open_together(args: argparse.Namespace, path: str, split: str | None, default_split: str = "train") -> PairSource:
    """The pairs of `--data_path` or `--val_path`, as the options say how they are read; all ranks share the work."""
    return open_together(
        lambda: open_pairs(
            path,
            args.image_key,
            args.caption_key,
            args.image_folder,
            args.caption_templates,
            max_left_out=args.max_corrupt,
            download=args.download,
            split=split,
            default_split=default_split,
            split_column=args.split_column,
            negative_key=getattr(args, "negative_key", None),
            limits=ImageLimits(args.max_image_mb, args.max_image_mpix, args.max_value),
        ),
        partial(index_pairs, path, split, default_split, args.caption_key, args.caption_templates),
        f"opening {path}",
    )


def _note_few_shards(source: PairSource, num_loaders: int) -> None:
    """Log that fewer shards than workers are fine. (Streamed, some processes would have no data.)"""
    if isinstance(source.images, TarSource) and len(source.images.shards) < num_loaders:
        logger.info(
            "%d shards for %d loading processes: this is fine, since any process reads any pair",
            len(source.images.shards),
            num_loaders,
        )

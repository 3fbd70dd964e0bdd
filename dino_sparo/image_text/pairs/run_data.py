"""The options of a run -> its pairs, their order and their batches, for any image-text objective."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset, default_convert

from dino_sparo.data.dataset import open_together, require_same_source
from dino_sparo.data.loader import create_loader
from dino_sparo.data.samplers import EpochSampler
from dino_sparo.data.sources import ImageLimits
from dino_sparo.image_text.evaluation.validation import hold_out
from dino_sparo.image_text.pairs.batches import PairDataset, PairSource, PairTransform
from dino_sparo.image_text.pairs.sources import PairPath
from dino_sparo.image_text.pairs.streams import PairStream
from dino_sparo.runtime.agree import all_or_none
from dino_sparo.runtime.launch import Distributed

# A `PairSource` or a `PairStream`, the order of its pairs, batches of pairs, and pairs to validate on.
PairData = tuple[Any, EpochSampler, DataLoader, PairSource | None]


def micro_batch_size(batch_size: int, num_processes: int, accum_steps: int) -> int:
    """Pairs that one process encodes at a time, of `batch_size` per step; ValueError if the division leaves a rest."""
    parts = num_processes * accum_steps
    if batch_size % parts:
        raise ValueError(
            f"--batch_size {batch_size} cannot be shared by {num_processes} process(es) with --grad_accum_steps "
            f"{accum_steps}; the nearest that can is {max(round(batch_size / parts), 1) * parts}"
        )
    return batch_size // parts


def number_pairs(
    args: argparse.Namespace,
    process: Distributed,
    micro_batch: int,
    collate: Callable[[Sequence[Any]], Any],
    with_graphs: Callable[[PairDataset], Dataset] = lambda pairs: pairs,
) -> PairData:
    """Pairs by number; `collate` makes a batch of the items of a data set, which `with_graphs` makes of the pairs."""
    source, held_out = _open_together(args, args.data_path, split=args.split), _open_held_out(args)
    if args.val_share:
        source, held_out = hold_out(source, args.val_share, args.seed)
    require_same_source(source)
    sampler = EpochSampler(len(source), micro_batch, process.rank, process.world_size, args.grad_accum_steps, args.seed)
    dataset = with_graphs(PairDataset(source, _transform(args), args.seed))
    return source, sampler, _loader(args, process, dataset, sampler, collate), held_out


def stream_pairs(args: argparse.Namespace, process: Distributed, micro_batch: int) -> PairData:
    """A stream of pairs; its sampler has only the sizes of its epochs and batches."""
    number, accum_steps = args.epoch_pairs, args.grad_accum_steps
    sampler = EpochSampler(number, micro_batch, process.rank, process.world_size, accum_steps, args.seed)
    sizes = sampler, args.context_length, args.caption_key, training_limits(args)
    with all_or_none(f"opening {args.data_path}"):
        stream = PairStream(args.data_path, args.shard_weights, _transform(args), *sizes)
    # `default_convert` leaves a batch of pairs as it is.
    return stream, sampler, _loader(args, process, stream, None, default_convert), _open_held_out(args)


def _loader(
    args: argparse.Namespace,
    process: Distributed,
    dataset: Dataset,
    sampler: EpochSampler | None,
    collate: Callable[[Any], Any],
) -> DataLoader:
    return create_loader(
        dataset,
        sampler,
        collate=collate,
        num_workers=args.num_workers,
        pin_memory=process.device.type == "cuda",
        timeout_min=args.dist_timeout_min,
    )


def _transform(args: argparse.Namespace) -> PairTransform:
    return PairTransform(args.img_size, tuple(args.crop_scale), args.exact_crops)


def training_limits(args: argparse.Namespace) -> ImageLimits:
    """The limits of `--max_image_mb`, `--max_image_mpix` and `--max_value`."""
    return ImageLimits(args.max_image_mb, args.max_image_mpix, args.max_value)


def _open_held_out(args: argparse.Namespace) -> PairSource | None:
    return _open_together(args, args.val_path, default_split="val") if args.val_path else None


def _open_together(args: argparse.Namespace, path: str, **split: Any) -> PairSource:
    """The pairs of `--data_path` or `--val_path`, as the options say how they are read; all ranks share the work."""
    pairs = PairPath(
        path,
        args.image_key,
        args.caption_key,
        args.image_folder,
        args.caption_templates,
        args.max_corrupt,
        args.download,
        split_column=args.split_column,
        negative_key=getattr(args, "negative_key", None),
        limits=training_limits(args),
        **split,
    )
    return open_together(pairs.open, pairs.index, f"opening {path}")

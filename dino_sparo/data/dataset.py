"""Images in, batches of crops out: data set, samplers, loader, and the one mean and standard deviation.

In order: a source (`sources/`: any images, by index) -> `ImageDataset` (image -> crops, by `crops.py`) -> batches of a
sampler -> `create_loader` -> `Batch` of S tensors (B, C, H, W).

All randomness is a pure function of numbers that a checkpoint holds: the order of the images of (seed, epoch), the
crops of an image of (seed, epoch, index). So a run is the same whatever the number of workers and ranks, and a resumed
run needs no state of the workers, only `EpochSampler.set_epoch(epoch, start_step)`.
"""

import copy
import functools
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int, Int64, Shaped
from PIL import Image
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, default_collate

from dino_sparo.data.augment import DeferredViews
from dino_sparo.data.sources import CorruptImageError, ImageSource, open_source
from dino_sparo.data.sources.cache import cache_folder
from dino_sparo.data.sources.image_source import fingerprint_of, hash_of
from dino_sparo.data.sources.splits import WITHOUT_LABELS
from dino_sparo.runtime.choices import IMAGENET_MEAN, IMAGENET_STD, MIN_CORRUPT
from dino_sparo.runtime.distributed import all_or_none, beating, rank_0_first, require_same, share_of, world_size
from dino_sparo.runtime.workers import remove_folder_of_a_killed_parent, share_temporary_folder

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "Batch",
    "CorruptImageError",
    "EpochSampler",
    "ImageDataset",
    "ImageSource",
    "Item",
    "ShardSampler",
    "align_classes",
    "create_loader",
    "open_source",
    "open_together",
    "require_labels",
    "require_same_source",
]

_logger = logging.getLogger(__name__)

# So many unreadable images in a row mean that a disk or a network does not answer.
MAX_CORRUPT_IN_A_ROW = 64
# Then, after so many neighbours, such a share of the source lies between two tries: the golden ratio's.
NUM_NEIGHBOURS, WIDE_STEP = 8, 0.6180339887

TERM_GRACE_SECONDS = 30  # between SIGTERM and the end of a worker
START_METHOD = "fork" if sys.platform == "linux" else None  # of a worker; None: Python's default, which differs

D = TypeVar("D", bound="DeviceBatch")
T = TypeVar("T")
AnySource = TypeVar("AnySource", bound=ImageSource)
Transform = Callable[[Image.Image, np.random.Generator], list[Tensor] | DeferredViews]


def image_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The random numbers of one image in one epoch, a pure function of the arguments.

    Args:
        seed: any integer; seeds that are equal modulo 2^64 are the same.
        epoch: from 0.
        index: from 0, the image's place in its source.
    """
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((*_seed_words(seed), epoch, index))))


def _epoch_rng(seed: int, epoch: int) -> np.random.Generator:
    """The random numbers of an epoch's order; the spawn key keeps them apart from those of image 0."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((*_seed_words(seed), epoch), spawn_key=(1,))))


def _seed_words(seed: int) -> tuple[int, int]:
    """Two 32-bit words, always two, so that no two (seed, epoch, index) give the same sequence of words."""
    seed %= 1 << 64
    return seed & 0xFFFFFFFF, seed >> 32


def require_labels(source: ImageSource) -> Int64[np.ndarray, " images"]:
    """The labels of a source, (images,) int64.

    Raises:
        ValueError: the source has none, or not for every image.
    """
    if source.labels is None:
        raise ValueError(
            f"{source.name} has no labels: evaluations need one subfolder per class, a list with a label after each "
            "path, a table with a column `label` (or --label_column NAME), or tar shards with .cls members\n"
            f"it holds {len(source):,} images, the first is {source.location(0)}\n{WITHOUT_LABELS}"
        )
    missing = np.flatnonzero(source.labels < 0)
    if len(missing):
        raise ValueError(
            f"{source.name}: {len(missing)} of {len(source)} images have no label, the first is "
            f"{source.location(int(missing[0]))}; label all of them or leave these out"
        )
    return source.labels


def open_together(open_it: Callable[[], AnySource], index: Callable[[int, int], None], what: str) -> AnySource:
    """Open a source on all ranks, however long it takes: they share the indexing, then rank 0 opens, then the others.

    Args:
        open_it: opens the source; where there is an index in the cache, it reads that.
        index: (number, count) -> puts this process' share of the index into the cache.
        what: is being done, for messages.
    """
    if world_size() > 1:
        with beating():
            number, count = share_of(cache_folder())
        with all_or_none(what, patient=True):
            index(number, count)
    with rank_0_first(what):
        source = open_it()
    return source


def require_same_source(source: ImageSource) -> None:
    """Make sure that all processes have opened the same images, by number, names, classes and labels.

    Raises:
        ValueError: on every rank, with what differs.
    """
    if world_size() == 1:
        return
    require_same(len(source), f"the number of images of {source.name}")
    require_same(fingerprint_of(source), f"the names of the images of {source.name}")
    require_same(None if source.classes is None else "\n".join(source.classes), f"the classes of {source.name}")
    labels = source.labels
    require_same(None if labels is None else hash_of(labels), f"the labels of {source.name}")


def align_classes(source: ImageSource, classes: list[str]) -> ImageSource:
    """The same source with its classes numbered as in `classes`.

    Two folders number their classes independently, each by its own names; where one lacks a class, the same number
    means different things.

    Args:
        source: e.g. the validation images.
        classes: e.g. those of the training images.

    Raises:
        ValueError: the source has no labels, or a class that is not among `classes`.
    """
    labels = require_labels(source)
    own, number = source.classes or [], {name: i for i, name in enumerate(classes)}
    unknown = [name for i, name in enumerate(own) if name not in number and (labels == i).any()]
    if unknown:
        raise ValueError(
            f"{source.name} has {len(unknown)} classes that the training images lack, the first is {unknown[0]!r}; the "
            f"training images have {len(classes)}: {', '.join(classes[:5])}, ...; give matching splits"
        )
    if own == classes:
        return source
    aligned = copy.copy(source)
    aligned.labels = np.array([number.get(name, -1) for name in own], dtype=np.int64)[labels]
    aligned.classes = classes
    return aligned


def most_corrupt(share: float, total: int) -> float:
    """How many of `total` images may be unreadable: `share` of them, at least `MIN_CORRUPT`, and none if it is 0."""
    return max(share * total, float(MIN_CORRUPT)) if share else 0.0


@dataclass(frozen=True)
class Item:
    """One image, ready for a batch.

    Attributes:
        views: S tensors (C, H, W), its crops.
        label: its class, -1 if it has none.
        index: its place in the source.
        corrupt: (location, reason) of the image asked for, if it could not be read. Others that were passed over on the
            way to a readable one are reported when they are asked for, so that an epoch counts each image once.
        parameters: (S, numbers), if the crops are 8-bit pixels that have yet to be distorted.
    """

    views: list[Tensor]
    label: int
    index: int
    corrupt: tuple[tuple[str, str], ...] = ()
    parameters: Float[Tensor, "S _"] | None = None


@dataclass
class DeviceBatch:
    """A batch that can move: fields that are tensors, or lists of tensors, go along; the others stay as they are."""

    def pin_memory(self: D) -> D:
        """A copy in page-locked memory, with all that stays on the host at first; the loader calls this."""
        pinned: D = _each_tensor(self, Tensor.pin_memory, nested=True)
        return pinned

    def to(self: D, device: torch.device | str) -> D:
        """The batch on a device; from page-locked memory the copy overlaps with computation."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        names = [member.name for member in fields(self)]
        return replace(self, **{name: _each_tensor(getattr(self, name), move, nested=False) for name in names})

    def tensors(self) -> Iterator[Tensor]:
        """All of its tensors."""
        for member in fields(self):
            value = getattr(self, member.name)
            yield from (item for item in (value if isinstance(value, list) else [value]) if isinstance(item, Tensor))


def _each_tensor(value: Any, change: Callable[[Tensor], Tensor], nested: bool) -> Any:
    """A value with its tensors changed; those in its tuples and dataclasses only if `nested`."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list) or (nested and type(value) is tuple):
        return type(value)(_each_tensor(item, change, nested) for item in value)
    if nested and is_dataclass(value) and not isinstance(value, type):
        names = [member.name for member in fields(value)]
        return replace(value, **{name: _each_tensor(getattr(value, name), change, nested) for name in names})
    return value


@dataclass
class Batch(DeviceBatch):
    """B images.

    Attributes:
        views: S tensors (B, C, H, W), one per crop; H and W differ between crops.
        labels: (B,), classes, -1 where an image has none.
        indices: (B,), places in the source.
        corrupt: (location, reason) of each unreadable image that was replaced.
        parameters: (S, B, numbers), if the views are 8-bit pixels that `distort.Distortions` has yet to distort.
    """

    views: list[Shaped[Tensor, "B C _ _"]]
    labels: Int64[Tensor, " B"]
    indices: Int64[Tensor, " B"]
    corrupt: list[tuple[str, str]]
    parameters: Float[Tensor, "S B _"] | None = None


class ImageDataset(Dataset):
    """Images of a source, each turned into crops by a transform with the image's own random numbers.

    Args:
        source: the images.
        transform: (PIL image, rng) -> S tensors (C, H, W), or `DeferredViews`.
        seed: any integer.

    An unreadable image is replaced by the next readable one (after the last comes the first) and reported in
    `Item.corrupt`. The item's label and index are those of the image that is shown; its crops still come from the
    random numbers of the image asked for, so that a replacement and its original do not show the same crops.
    """

    def __init__(self, source: ImageSource, transform: Transform, seed: int = 0) -> None:
        self.source, self.transform, self.seed = source, transform, seed

    def __len__(self) -> int:
        """Number of images."""
        return len(self.source)

    def __getitem__(self, key: int | tuple[int, int]) -> Item:
        """The item of (epoch, index), or of an index in epoch 0.

        Raises:
            IndexError: there is no such image.
            ValueError: too many images in a row cannot be read.
        """
        epoch, asked = key if isinstance(key, tuple) else (0, key)
        if not 0 <= asked < len(self.source):
            raise IndexError(f"image {asked} of {self.source.name}, which has {len(self.source)}")
        image, index, corrupt = read_next(self.source.read, asked, self.source)
        made = self.transform(image, image_rng(self.seed, epoch, asked))
        views, parameters = made if isinstance(made, DeferredViews) else (made, None)
        label = -1 if self.source.labels is None else int(self.source.labels[index])
        return Item(views, label, index, tuple(corrupt[:1]), parameters)


def read_next(read: Callable[[int], T], asked: int, source: ImageSource) -> tuple[T, int, list[tuple[str, str]]]:
    """What `read` gives for an index, or for another one if it cannot be read.

    First come the next ones, after the last the first. If they are unreadable too, as many neighbours are where a copy
    was cut off, the steps become wide: then only a disk that does not answer fails so often.

    Args:
        read: index -> anything; raises CorruptImageError.
        asked: the first index to try.
        source: which the indices are of.

    Returns:
        What was read, its index, and (location, reason) of those passed over.

    Raises:
        ValueError: too many in a row cannot be read.
    """
    corrupt: list[tuple[str, str]] = []
    for step in range(min(MAX_CORRUPT_IN_A_ROW, len(source))):
        is_near = step < NUM_NEIGHBOURS or len(source) <= MAX_CORRUPT_IN_A_ROW
        index = (asked + (step if is_near else int(step * WIDE_STEP * len(source)))) % len(source)
        try:
            return read(index), index, corrupt
        except CorruptImageError as error:
            corrupt.append((error.location, error.reason))
    location, reason = corrupt[0]
    raise ValueError(
        f"{len(corrupt)} images in a row of {source.name} cannot be read, the first is {location} ({reason}); "
        "is the disk still there, and are these files images?"
    )


def epoch_order(num_images: int, seed: int, epoch: int) -> Int[np.ndarray, " num_images"]:
    """The images of an epoch in random order."""
    # Shuffling 32-bit numbers gives the order of `permutation` in half the memory.
    order = np.arange(num_images, dtype=np.int32 if num_images < 1 << 31 else np.int64)
    _epoch_rng(seed, epoch).shuffle(order)
    return order


class EpochSampler:
    """Batches of (epoch, index) for training; one batch is one micro-batch of one rank.

    Global batch s of an epoch is permutation[s*n : (s+1)*n] with n = batch_size * world_size * accum_steps. The ranks
    divide it among themselves, so together they see what one process with batches of n images would see. Images left
    after the last whole global batch are not used in this epoch.

    Args:
        num_images: size of the source.
        batch_size: B, images per rank and micro-batch.
        rank: this process, from 0.
        world_size: number of processes.
        accum_steps: micro-batches per optimiser step.
        seed: any integer.

    Raises:
        ValueError: there are too few images for one global batch, or a number is out of its range.
    """

    def __init__(
        self, num_images: int, batch_size: int, rank: int = 0, world_size: int = 1, accum_steps: int = 1, seed: int = 0
    ) -> None:
        _check_share(batch_size, rank, world_size)
        if accum_steps < 1:
            raise ValueError(f"accum_steps={accum_steps} must be at least 1")
        self.num_images, self.batch_size, self.accum_steps, self.seed = num_images, batch_size, accum_steps, seed
        self.rank, self.world_size = rank, world_size
        self.global_batch_size = batch_size * world_size * accum_steps
        self.steps_per_epoch = num_images // self.global_batch_size
        self.epoch = self.start_step = 0
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"{num_images} images are too few for one step: {batch_size} images per process and micro-batch x "
                f"{world_size} process(es) x {accum_steps} accumulation step(s) = {self.global_batch_size}; use a "
                "smaller batch size, fewer processes or accumulation steps, or more images"
            )

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        """Choose what the next iteration yields: steps start_step, start_step + 1, ... of the epoch.

        Raises:
            ValueError: the epoch is negative, or there is no such step.
        """
        if epoch < 0 or not 0 <= start_step <= self.steps_per_epoch:
            raise ValueError(
                f"epoch={epoch}, start_step={start_step}: epochs count from 0, steps from 0 to {self.steps_per_epoch}"
            )
        self.epoch, self.start_step = epoch, start_step

    def __len__(self) -> int:
        """Number of micro-batches that the next iteration yields."""
        return (self.steps_per_epoch - self.start_step) * self.accum_steps

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, start_step = self.epoch, self.start_step
        permutation = epoch_order(self.num_images, self.seed, epoch)
        shape = (self.steps_per_epoch, self.accum_steps, self.world_size, self.batch_size)
        own = permutation[: self.steps_per_epoch * self.global_batch_size].reshape(shape)[start_step:, :, self.rank]
        own = own.reshape(-1, self.batch_size).copy()
        del permutation  # what follows needs this rank's part alone
        for micro_batch in own:
            yield [(epoch, index) for index in micro_batch.tolist()]


class ShardSampler(BatchSampler):
    """Batches of indices for evaluation: this rank's contiguous part, in order, without padding or duplicates.

    Rank r of w takes images n*r//w to n*(r+1)//w, so the ranks' results one after the other are in the source's order.

    Args:
        num_images: n, size of the source.
        batch_size: B, images per batch; the last batch is what remains.
        rank: this process, from 0.
        world_size: number of processes; may exceed the number of images, some ranks then yield nothing.

    Raises:
        ValueError: a number is out of its range.
    """

    def __init__(self, num_images: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        _check_share(batch_size, rank, world_size)
        self.start, self.end = num_images * rank // world_size, num_images * (rank + 1) // world_size
        super().__init__(range(self.start, self.end), batch_size, drop_last=False)


def _check_share(batch_size: int, rank: int, world_size: int) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} of world_size={world_size}: ranks count from 0 to world_size - 1")


def collate_views(items: list[Item]) -> Batch:
    """Stack items; in a worker `default_collate` writes straight into memory shared with the main process."""
    views = [default_collate(list(crops)) for crops in zip(*(item.views for item in items), strict=True)]
    labels, indices = torch.tensor([item.label for item in items]), torch.tensor([item.index for item in items])
    drawn = [item.parameters for item in items if item.parameters is not None]
    parameters = torch.stack(drawn, dim=1) if drawn else None
    return Batch(views, labels, indices, [pair for item in items for pair in item.corrupt], parameters)


def create_loader(
    dataset: Dataset,
    sampler: Iterable[Any] | None,
    *,
    num_workers: int,
    collate: Callable[[Any], Any] = collate_views,
    pin_memory: bool = False,
    timeout_min: float = 0.0,
) -> DataLoader:
    """A loader of batches; iterate it once per epoch, after `sampler.set_epoch`.

    Workers live as long as the loader. More workers than processors only take memory, so their number is capped. On
    Linux they are forked: they share the source's names with this process, and need not import torch again.

    Args:
        dataset: the images, the pairs, or a stream of whole batches.
        sampler: which of them make up each batch, or the batches themselves; None for a stream, whose workers are
            started anew in every epoch.
        num_workers: processes that read, crop and tokenise; 0 does all of it here.
        collate: items -> batch; of a stream, whatever it gives -> batch.
        pin_memory: batches in page-locked memory, for copies to a GPU that overlap with computation.
        timeout_min: minutes without a batch after which the loader gives up on its workers with a RuntimeError; 0 for
            never.

    Raises:
        ValueError: `num_workers` is negative.
    """
    num_workers = _as_many_as_cores(num_workers)
    share_temporary_folder()
    return DataLoader(
        dataset,
        batch_size=None if sampler is None else 1,  # torch's word for: the sampler says it, or the stream
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=collate,
        pin_memory=pin_memory,
        worker_init_fn=init_worker,
        persistent_workers=num_workers > 0 and sampler is not None,
        timeout=60 * timeout_min if num_workers else 0,
        multiprocessing_context=START_METHOD if num_workers else None,
        # The loader draws a number for its workers, which nothing here uses; not from the model's random numbers.
        generator=torch.Generator(),
    )


def _as_many_as_cores(num_workers: int) -> int:
    """At most one loading process for each processor that this process may use.

    Raises:
        ValueError: `num_workers` is negative.
    """
    if num_workers < 0:
        raise ValueError(f"num_workers={num_workers} must not be negative; 0 reads in the main process")
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    if num_workers > usable < total:  # of Slurm, a container or taskset; training would be slow without a word
        _logger.warning(
            "num_workers: %d instead of %d, since this process may use %d of the machine's %d cores; under Slurm "
            "`srun --cpus-per-task=%d` gives it more",
            *(usable, num_workers, usable, total, num_workers),
        )
    elif num_workers > usable:
        _logger.info("num_workers: %d instead of %d, as many as there are processors", usable, num_workers)
    return min(num_workers, usable)


def to_device(batches: Iterable[D], device: torch.device) -> Iterator[D]:
    """The batches on the device; a GPU copies the next one while it still computes with the last.

    Args:
        batches: of a loader; in page-locked memory if the copy is to overlap.
        device: where they are needed.
    """
    # Keep a reference to this iterator. Otherwise an error that leaves the training loop ends the loader, and
    # that waits for workers, of which one may hang.
    return iter(batches) if device.type != "cuda" else _copied(iter(batches), device)


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    """One stream for all epochs: memory that was used on a stream is used again on that one alone."""
    return torch.cuda.Stream(device)


def _copied(iterator: Iterator[D], device: torch.device) -> Iterator[D]:
    copying = _copy_stream(device)
    for batch in iterator:
        with torch.cuda.stream(copying):
            moved = batch.to(device)
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(copying)
        for tensor in moved.tensors():
            tensor.record_stream(computing)  # its memory is not given away before the computation is done
        yield moved


def init_worker(worker: int) -> None:
    """One thread per worker, and no reaction to signals that are meant for the main process (Ctrl-C, preemption).

    SIGTERM reaches a whole job, while the main process still finishes its step and saves; a worker obeys it later.
    """
    torch.set_num_threads(1)
    for name in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(TERM_GRACE_SECONDS))
    remove_folder_of_a_killed_parent()

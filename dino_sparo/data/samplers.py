"""Samplers: the images of each batch, in random order for training, in order for evaluations.

The order of an epoch is a pure function of (seed, epoch), the crops of an image of (seed, epoch, index). So a run is
the same for any number of workers and ranks, and a resumed run needs only `EpochSampler.set_epoch(epoch, start_step)`.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int
from torch.utils.data import BatchSampler

from dino_sparo.runtime.faults import UserError


def image_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The random numbers of one image in one epoch, a pure function of the arguments (the seed modulo 2^64)."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((*_seed_words(seed), epoch, index))))


def _epoch_rng(seed: int, epoch: int) -> np.random.Generator:
    """The random numbers of an epoch's order; the spawn key separates these numbers from the numbers of image 0."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((*_seed_words(seed), epoch), spawn_key=(1,))))


def _seed_words(seed: int) -> tuple[int, int]:
    """Always two 32-bit words, so that different (seed, epoch, index) give different sequences of words."""
    seed %= 1 << 64
    return seed & 0xFFFFFFFF, seed >> 32


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
    after the last whole global batch are not used in this epoch. Fewer than n images are a UserError.
    """

    def __init__(
        self, num_images: int, batch_size: int, rank: int = 0, world_size: int = 1, accum_steps: int = 1, seed: int = 0
    ) -> None:
        self.num_images, self.batch_size, self.accum_steps, self.seed = num_images, batch_size, accum_steps, seed
        self.rank, self.world_size = rank, world_size
        self.global_batch_size = batch_size * world_size * accum_steps
        self.steps_per_epoch = num_images // self.global_batch_size
        self.epoch = self.start_step = 0
        if self.steps_per_epoch == 0:
            raise UserError(
                f"{num_images} images are too few for one step: {batch_size} images per process and micro-batch x "
                f"{world_size} process(es) x {accum_steps} accumulation step(s) = {self.global_batch_size}; use a "
                "smaller batch size, fewer processes or accumulation steps, or more images"
            )

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        """Let the next iteration yield steps start_step, start_step + 1, ... of the epoch."""
        self.epoch, self.start_step = epoch, start_step

    def __len__(self) -> int:
        """Number of micro-batches that the next iteration yields."""
        return (self.steps_per_epoch - self.start_step) * self.accum_steps

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, start_step = self.epoch, self.start_step
        permutation = epoch_order(self.num_images, self.seed, epoch)
        shape = (self.steps_per_epoch, self.accum_steps, self.world_size, self.batch_size)
        of_all_ranks = permutation[: self.steps_per_epoch * self.global_batch_size].reshape(shape)
        micro_batches = of_all_ranks[start_step:, :, self.rank].reshape(-1, self.batch_size).copy()
        del permutation, of_all_ranks  # the loop needs this rank's part alone
        for micro_batch in micro_batches:
            yield [(epoch, index) for index in micro_batch.tolist()]


class ShardSampler(BatchSampler):
    """Batches of indices for evaluation: this rank's contiguous part, in order, without padding or duplicates.

    Rank r of w takes images n*r//w to n*(r+1)//w, so the ranks' results one after the other are in the source's order.
    The last batch may be smaller, and ranks may have no batch.
    """

    def __init__(self, num_images: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        self.start, self.end = num_images * rank // world_size, num_images * (rank + 1) // world_size
        super().__init__(range(self.start, self.end), batch_size, drop_last=False)

"""Batches from worker processes, and on to the device."""

import functools
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from dino_sparo.data.batch import D, collate_views

_logger = logging.getLogger(__name__)

TERM_GRACE_SECONDS = 30  # between SIGTERM and the end of a worker
CGROUP = Path("/sys/fs/cgroup")  # the container's own
START_METHOD = "fork" if sys.platform == "linux" else None  # of a worker; None: Python's default, which differs


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

    Workers live as long as the loader, those of a stream for one epoch. More workers than `usable_cores` only take
    memory, so their number is capped. On Linux they are forked: they share the source's names with this process, and
    need not import torch again.

    Args:
        dataset: the images, the pairs, or a stream of whole batches.
        sampler: the indices of each batch; None for a stream.
        num_workers: processes that read, crop and tokenise; 0 does all of it here.
        collate: items -> batch; element of a stream -> batch.
        pin_memory: batches in page-locked memory, for copies to a GPU that overlap with computation.
        timeout_min: minutes without a batch after which the loader raises a RuntimeError; 0 for never.
    """
    usable = usable_cores(os.environ)
    if num_workers > usable:
        _say_fewer(num_workers, usable)
    num_workers = min(num_workers, usable)
    return DataLoader(
        dataset,
        batch_size=None if sampler is None else 1,  # torch's way to leave it to the sampler, or to the stream
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=collate,
        pin_memory=pin_memory,
        worker_init_fn=init_worker,
        persistent_workers=num_workers > 0 and sampler is not None,
        timeout=60 * timeout_min if num_workers else 0,
        multiprocessing_context=START_METHOD if num_workers else None,
        # The loader draws a random seed for its workers, which must not come from the model's generator.
        generator=torch.Generator(),
    )


@functools.cache
def _say_fewer(num_workers: int, usable: int) -> None:
    """Log the number of workers once, not for every loader of a command."""
    _logger.info("num_workers: %d instead of %d, as this process may use %d cores", usable, num_workers, usable)


def usable_cores(environ: Mapping[str, str]) -> int:
    """Cores for this process alone.

    The limits are the affinity, the quota of the container (cgroup) and Slurm's cores per task. The processes that
    torchrun started on a node share its cores; a task of Slurm has cores of its own.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = min(cores, int(environ.get("SLURM_CPUS_PER_TASK") or cores), _quota_of_cgroup() or cores)
    return max(cores // int(environ.get("LOCAL_WORLD_SIZE") or 1), 1)


def _quota_of_cgroup() -> int | None:
    """Cores that a container may use, rounded up; None without a limit. The files are those of cgroup v2, then v1."""
    for name in ("cpu.max", "cpu/cpu.cfs_quota_us"):
        try:
            quota, *period = (CGROUP / name).read_text().split()
            period = period or (CGROUP / name).with_name("cpu.cfs_period_us").read_text().split()
        except (OSError, ValueError):
            continue
        if quota not in ("max", "-1"):
            return math.ceil(int(quota) / int(period[0]))
    return None


def to_device(batches: Iterable[D], device: torch.device) -> Iterator[D]:
    """The batches on the device; a GPU copies the next batch from page-locked memory while it computes.

    The caller must keep the iterator in a variable, not only loop over it. Else an error within the loop deletes the
    iterator, which waits for the loader's workers, and one of them may hang.
    """
    return iter(batches) if device.type != "cuda" else _copied(iter(batches), device)


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    """One stream for all epochs, because memory is reused only on the same stream."""
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
    """One thread per worker, and no reaction to signals for the main process (Ctrl-C, preemption).

    SIGTERM reaches a whole job, but the main process still finishes its step and saves; a worker ends later.
    """
    torch.set_num_threads(1)
    for name in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(TERM_GRACE_SECONDS))

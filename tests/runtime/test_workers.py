"""Processes that load images end with the process that they load for."""

import multiprocessing

from torch.utils.data import DataLoader

from dino_sparo.runtime.exits import end_workers


def test_a_worker_that_is_killed_within_a_lock_blocks_nobody() -> None:
    """The bug: torch's iterator waited for the lock forever, after the run had reported its error."""
    batches = iter(DataLoader(range(5), num_workers=1, multiprocessing_context="fork", timeout=20))
    next(batches)
    batches._workers_done_event._cond.acquire()  # type: ignore[attr-defined]
    end_workers()
    del batches
    # Ranks that other tests share are no daemons, as the processes that load images are.
    assert not [child for child in multiprocessing.active_children() if child.daemon]

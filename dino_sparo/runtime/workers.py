"""The processes that load images for this one end with it."""

import contextlib
import gc
import multiprocessing
import signal
import threading
from collections.abc import Collection, Iterator
from typing import Any

END_SECONDS = 5.0  # a process that waits for a hung disk cannot be killed


def end_workers(keep: Collection[Any] = ()) -> None:
    """Kill the processes that load images for this one: after a request they would run for `TERM_GRACE_SECONDS`.

    Args:
        keep: child processes that somebody else has started.
    """
    workers = [child for child in multiprocessing.active_children() if child.daemon and child not in keep]
    if not workers:
        return
    with ends_unnoticed():
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join(END_SECONDS)
    _shut_iterators(workers)


def _shut_iterators(workers: Collection[Any]) -> None:
    """Let torch's iterators over batches go without a word to these workers.

    A worker that was killed within a lock never releases it, and an iterator that says goodbye would wait for the lock
    forever.
    """
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    for iterator in gc.get_objects():
        if type(iterator) is _MultiProcessingDataLoaderIter and any(worker in workers for worker in iterator._workers):
            iterator._shutdown = True


@contextlib.contextmanager
def ends_unnoticed() -> Iterator[None]:
    """Within this context workers may end: torch's handler of SIGCHLD would raise an error wherever this process is."""
    handler = signal.getsignal(signal.SIGCHLD)
    # The main thread alone runs handlers.
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    # Not SIG_DFL: Python would print "ignored due to race condition" about a signal that came just before.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.siginterrupt(signal.SIGCHLD, False)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)

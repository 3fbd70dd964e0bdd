"""The processes that load images for this one: they end with it and leave no files behind."""

import contextlib
import gc
import multiprocessing
import multiprocessing.util
import os
import shutil
import signal
import threading
from collections.abc import Collection, Iterator
from typing import Any

OWNED_FOLDER = "dino_sparo_folder"  # in multiprocessing's settings of a process: owner and path of the shared folder
END_SECONDS = 5.0  # a process that waits for a hung disk cannot be killed


def share_temporary_folder() -> None:
    """Let the workers that start from now on keep their sockets in this process' folder instead of one folder each.

    A worker that is killed leaves its folder behind; this process removes its own, see `remove_temporary_folder`. A
    process that was started by multiprocessing itself uses its parent's folder, which is not its own to remove.
    """
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    is_inherited = multiprocessing.parent_process() is not None and "tempdir" in config
    folder = multiprocessing.util.get_temp_dir()
    if not is_inherited:
        config[OWNED_FOLDER] = (os.getpid(), folder)  # workers get a copy


def remove_temporary_folder() -> None:
    """Remove the shared folder. Python does so at a normal exit, but not at `os._exit`.

    Should this process continue after all, its next workers get a new folder: without one they would wait forever.
    """
    if _remove_folder_of(os.getpid()):
        multiprocessing.current_process()._config["tempdir"] = None  # type: ignore[attr-defined]


def _remove_folder_of(process: int) -> bool:
    """Remove the shared folder if `process` owns it; returns whether it does."""
    owner, folder = multiprocessing.current_process()._config.get(OWNED_FOLDER, (0, ""))  # type: ignore[attr-defined]
    if owner == process:
        shutil.rmtree(folder, ignore_errors=True)
    return bool(folder) and owner == process


def remove_folder_of_a_killed_parent() -> None:
    """Called in a worker: let its normal exit remove the shared folder if the parent process was killed."""
    parent = os.getppid()

    def clean() -> None:
        if os.getppid() != parent:
            _remove_folder_of(parent)

    multiprocessing.util.Finalize(None, clean, exitpriority=0)


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

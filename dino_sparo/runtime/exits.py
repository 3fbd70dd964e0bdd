"""The end of a command: one line after an error that is not a bug, a traceback after a bug; its workers are killed."""

import contextlib
import gc
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator
from typing import Any, NoReturn

from dino_sparo.runtime.faults import BUG_STATUS, FAULT_STATUS, RESUME_HINT, FaultError, is_correctable, is_passing

END_SECONDS = 5.0  # a worker that waits for a hung disk cannot be killed


@contextlib.contextmanager
def errors_in_one_line(logger: logging.Logger, note_final: Callable[[], None] = lambda: None) -> Iterator[None]:
    """End a command with one line and an exit status after an error; after a bug, with its traceback too.

    Status 1: the user can correct it. `FAULT_STATUS`: starting again helps. `BUG_STATUS`: any other error. 128 +
    signal: the run was asked to stop. run.log gets every traceback. After a fault, or if other processes take part, the
    process ends at once, without cleaning up: that would wait for a process that died or hangs.

    Args:
        logger: the script's.
        note_final: called where starting the process again would not help: with status 1, or after a request to stop.
    """
    # Here, not above: they import torch.
    from dino_sparo.runtime.launch import shutdown
    from dino_sparo.runtime.preemption import RunStopped

    try:
        yield
    except FaultError as error:
        _leave(FAULT_STATUS, logger, error)
    except RunStopped as stopped:
        note_final()
        _leave(stopped.status, logger, stopped, level=logging.INFO)
    except KeyboardInterrupt:
        note_final()
        _leave(128 + signal.SIGINT, logger, None, "ended by Ctrl-C")
    except Exception as error:
        if is_passing(error):
            _leave(FAULT_STATUS, logger, error, f"{without_traceback(str(error))}. {RESUME_HINT}")
        note_final()
        if is_correctable(error):
            _leave(1, logger, error)
        _leave(BUG_STATUS, logger, error, f"{_traceback(error)}This is a bug of dino_sparo; please report these lines")
    shutdown()


def _leave(
    status: int, logger: logging.Logger, error: BaseException | None, message: str = "", level: int = logging.ERROR
) -> NoReturn:
    # Here, not above: they import torch.
    from dino_sparo.runtime.launch import world_size
    from dino_sparo.runtime.logs import FILE_ONLY, HAS_LINES, RunLogHandler, setup_logging

    if not logging.getLogger().handlers:
        setup_logging()
    logger.log(level, "%s", message or without_traceback(str(error)), extra={HAS_LINES: True})
    has_run_log = any(isinstance(handler, RunLogHandler) for handler in logging.getLogger().handlers)
    if has_run_log and level == logging.ERROR and error is not None and status != BUG_STATUS:
        logger.error("%s", _traceback(error), extra={HAS_LINES: True, FILE_ONLY: True})
    if world_size() > 1 or status == FAULT_STATUS:  # a worker that hangs would be waited for, too
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    end_workers()
    raise SystemExit(status)


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def without_traceback(message: str) -> str:
    """The message of an error in a worker of the loader, without the worker's traceback, which torch adds."""
    if "in DataLoader worker process" not in message.partition("\n")[0]:
        return message
    last = message.rpartition("Traceback (most recent call last):\n")[2]
    match = re.search(r"^(?!\s)[\w.]+: ", last, re.MULTILINE)  # frames are indented, the error behind them is not
    return last[match.end() :].strip() if match else message


def end_workers(keep: Collection[Any] = ()) -> None:
    """Kill this process' workers, which load images; after a mere request they would run for `TERM_GRACE_SECONDS`.

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
    _mark_as_shut_down(workers)


def _mark_as_shut_down(workers: Collection[Any]) -> None:
    """Mark torch's iterators over the batches of killed workers as shut down.

    Else an iterator tells its workers to stop when it is deleted. This takes a lock of their queue, and a worker that
    was killed while it held the lock never releases it.
    """
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    for iterator in gc.get_objects():
        if type(iterator) is _MultiProcessingDataLoaderIter and any(worker in workers for worker in iterator._workers):
            iterator._shutdown = True


@contextlib.contextmanager
def ends_unnoticed() -> Iterator[None]:
    """Within this context workers may end; elsewhere torch's handler of SIGCHLD raises an error in any line of code."""
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

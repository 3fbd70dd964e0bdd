"""A watchdog ends a run that makes no progress, so that the cluster can start the run again.

Every training step is a sign of life, and so is every item of `logs.progress`, over which the evaluations loop.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator

from dino_sparo.runtime.faults import FAULT_STATUS, RESUME_HINT
from dino_sparo.runtime.launch import CONTROL_FACTOR

logger = logging.getLogger(__name__)

# The watchdog's patience, as a multiple of the time-out and in seconds beyond it.
WATCHDOG_FACTOR, WATCHDOG_MARGIN_S = 1.5, 1.0
LAST_WORDS_S = 3.0

_watching: list["Watchdog"] = []  # the watchdogs whose contexts are open


class Watchdog:
    """Ends this process after too long without progress; it may wait for a worker, a network, a disk or a device.

    Collectives and the loader have a time-out of their own, `timeout_min`, and can name the cause. The watchdog waits a
    little longer.
    """

    def __init__(self, timeout_min: float) -> None:
        self.seconds = WATCHDOG_FACTOR * 60 * timeout_min + WATCHDOG_MARGIN_S
        self.last_beat = time.monotonic()
        self.over = threading.Event()

    def __enter__(self) -> "Watchdog":
        self.beat()
        _watching.append(self)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        _watching.remove(self)
        self.over.set()

    def beat(self) -> None:
        """Note progress of the run."""
        self.last_beat = time.monotonic()

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """Wait longer within this context: one rank works, and all other ranks wait in the control group."""
        before = self.seconds
        self.seconds = before * CONTROL_FACTOR
        try:
            yield
        finally:
            self.beat()
            self.seconds = before

    def _watch(self) -> None:
        while not self.over.wait(min(self.seconds / 10, 1.0)):
            if time.monotonic() - self.last_beat > self.seconds:
                # In a thread: logging itself may hang, on a disk that does not answer.
                last_words = threading.Thread(target=self._say_why, daemon=True)
                last_words.start()
                last_words.join(LAST_WORDS_S)
                os._exit(FAULT_STATUS)

    def _say_why(self) -> None:
        logger.error(
            "no progress for %.0f s: a process that loads images, a collective, the disk or the device hangs. "
            "%s. If something is only slow, raise --dist_timeout_min",
            self.seconds,
            RESUME_HINT,
        )
        logging.shutdown()


def sign_of_life() -> None:
    """Note progress of this process for all open watchdogs."""
    for watchdog in _watching:
        watchdog.beat()

"""A run in which nothing moves ends itself, so that the cluster can start it again.

A step of the training is a sign of life, and so is every item of `logs.progress`, which the evaluations loop over.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator

from dino_sparo.runtime.faults import FAULT_STATUS
from dino_sparo.runtime.launch import CONTROL_FACTOR

logger = logging.getLogger(__name__)

# The watchdog's patience, as a multiple of the time-out and in seconds beyond it.
WATCHDOG_FACTOR, WATCHDOG_MARGIN_S = 1.5, 1.0
LAST_WORDS_S = 3.0

_watching: list["Watchdog"] = []  # those whose contexts are open


class Watchdog:
    """Ends this process if nothing moves for too long, whatever it waits for: a worker, a network, a disk, a device.

    Collectives and the loader of the training have their own time-outs and can name the cause; the watchdog waits a
    little longer.

    Args:
        timeout_min: their time-out.
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
        """The run makes progress."""
        self.last_beat = time.monotonic()

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """One rank works for all others, which wait in the control group: nothing moves meanwhile."""
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
                # The log may be what hangs, on a disk that does not answer.
                last_words = threading.Thread(target=self._say_why, daemon=True)
                last_words.start()
                last_words.join(LAST_WORDS_S)
                os._exit(FAULT_STATUS)

    def _say_why(self) -> None:
        logger.error(
            "nothing has moved for %.0f s: a process that loads images, a collective, the disk or the device hangs, or "
            "did not answer. The last checkpoint is complete: run the same command to resume. If something is only "
            "slow, raise --dist_timeout_min",
            self.seconds,
        )
        logging.shutdown()


def sign_of_life() -> None:
    """Tell the watchdog, if there is one, that this process makes progress."""
    for watchdog in _watching:
        watchdog.beat()

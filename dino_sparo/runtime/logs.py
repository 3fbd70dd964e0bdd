"""The logs of a run: the logger, meters, log.txt, trackers, progress.

Rank 0 logs everything; the other ranks log warnings and errors alone, with their rank.
"""

import json
import logging
import resource
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from dino_sparo.runtime.cli import printable
from dino_sparo.runtime.collectives import all_reduce_sum
from dino_sparo.runtime.files import keep_old, plain, write_text, writing
from dino_sparo.runtime.launch import is_main, rank
from dino_sparo.runtime.trackers import TrackedRun, Trackers
from dino_sparo.runtime.watchdog import sign_of_life

logger = logging.getLogger(__name__)

# Attributes of records: it goes to run.log and not to the terminal; its message has several lines on purpose.
FILE_ONLY, HAS_LINES = "file_only", "has_lines"
PROGRESS_SECONDS = 30.0  # between two lines about a long loop when the output is not a terminal
WAIT_REMEDY = " (give more cores and --num_workers, or smaller files)"
STEP_LINE_SECONDS = 10.0  # between two progress lines of training

T = TypeVar("T")


def setup_logging(output_dir: Path | None = None) -> None:
    """Send log lines to standard error, and on rank 0 also to `output_dir`/run.log.

    Args:
        output_dir: an existing folder, or None for no file.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        if getattr(handler, "is_dino_sparo", False):
            root.removeHandler(handler)
            handler.close()
    where = "" if is_main() else f" [rank {rank()}]"
    formatter = _EscapingFormatter(f"%(asctime)s %(levelname).1s{where} %(message)s", datefmt="%H:%M:%S")
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    handlers[0].addFilter(lambda record: not hasattr(record, FILE_ONLY))
    if output_dir is not None and is_main():
        handlers.append(RunLogHandler(output_dir / "run.log", encoding="utf-8", errors="backslashreplace"))
    for handler in handlers:
        handler.setFormatter(formatter)
        handler.is_dino_sparo = True  # type: ignore[attr-defined]
        root.addHandler(handler)
    root.setLevel(logging.INFO if is_main() else logging.WARNING)


class _EscapingFormatter(logging.Formatter):
    """Escapes control characters in messages, so that no file name can forge a line or move the cursor."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        has_lines = hasattr(record, HAS_LINES)
        record.message = printable(record.message, keep="\n" if has_lines else "").replace("\n", "\n    ")
        return super().formatMessage(record)


class RunLogHandler(logging.FileHandler):
    """Writes run.log. If the disk is full, lines are missing in run.log, but not on the terminal."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore a full disk, and report any other error."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def log_options(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Log the options that differ from their defaults in one line; run.log also gets all options, as JSON.

    Args:
        options: names and values.
        defaults: those of the trainer; options that it does not know, such as a job's, are left out of the line.
    """
    changed = [f"{name}={options[name]}" for name in defaults if options[name] != defaults[name]]
    logger.info("options: %s (all options: run.log)", ", ".join(changed) or "the defaults")
    logger.info("all options: %s", json.dumps(options, default=str), extra={FILE_ONLY: True})


class Meters:
    """Means of named numbers over an epoch, kept on the device until they are read."""

    def __init__(self) -> None:
        self.totals: dict[str, tuple[Tensor | float, int]] = {}  # name -> sum and count

    def update(self, **values: Tensor | float) -> None:
        """Add one observation of each named number."""
        for name, value in values.items():
            value = value.detach().double() if isinstance(value, Tensor) else float(value)
            total, count = self.totals.get(name, (0.0, 0))
            self.totals[name] = total + value, count + 1

    def state_dict(self) -> dict[str, list[float]]:
        """Sum and count of each number on this rank, as plain values."""
        return {name: [float(total), float(count)] for name, (total, count) in self.totals.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Continue the sums and counts that `state_dict` returned."""
        self.totals = {name: (total, int(count)) for name, (total, count) in state.items()}

    def means(self) -> dict[str, float]:
        """Mean of each number over all ranks, which must have observed the same names."""
        if not self.totals:
            return {}
        names = sorted(self.totals)
        totals = torch.tensor([[float(number) for number in self.totals[name]] for name in names], dtype=torch.float64)
        tensors = (total for total, _ in self.totals.values() if isinstance(total, Tensor))
        device = next((total.device for total in tensors), totals.device)
        totals = all_reduce_sum(totals.to(device)).cpu()
        return {name: (total / count).item() for name, (total, count) in zip(names, totals, strict=True)}


class EpochClock:
    """Times the steps of an epoch and writes a progress line now and then; in a notebook a bar shows the steps.

    Args:
        steps_per_epoch: steps of a whole epoch.
        end_step: step at which the run ends.
        device: where the steps are computed.
    """

    def __init__(self, steps_per_epoch: int, end_step: int, device: torch.device) -> None:
        self.steps_per_epoch, self.end_step, self.device = steps_per_epoch, end_step, device
        self.start = self.last_line = time.monotonic()
        self.waited, self.steps_done, self.images_done = 0.0, 0, 0
        self._fetches: deque[tuple[Any, Any]] = deque()  # a GPU's events, not read yet
        self.bar = tqdm(total=steps_per_epoch, unit="step") if is_main() and in_notebook() else None

    def fetch(self, iterator: Iterator[T], number: int) -> list[T]:
        """The next `number` items; measures how long the device was idle meanwhile.

        On a CPU this is the whole fetch. On a GPU two CUDA events in its queue mark the beginning and the end of the
        fetch. The time between them is 0 if the batch came while the GPU still computed the step before. The events are
        read later, so that nothing waits for them.
        """
        begin = self._now()
        items = list(islice(iterator, number))
        end = self._now()
        if self.device.type == "cuda":
            self._fetches.append((begin, end))
        else:
            self.waited += end - begin
        return items

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def speed(self) -> dict[str, float]:
        """Images per second over all ranks, and the share of the time in which the device waited for data."""
        while self._fetches and self._fetches[0][1].query():  # what the device has passed
            begin, end = self._fetches.popleft()
            self.waited += begin.elapsed_time(end) / 1000
        elapsed = max(time.monotonic() - self.start, 1e-9)
        return {"images_per_s": self.images_done / elapsed, "data_wait": self.waited / elapsed}

    def tick(self, step: int, epoch: int, num_images: int, loss: Tensor) -> None:
        """Count a step; write a line if the last line is old enough. Only a line reads the loss from the device.

        Args:
            step: steps of the run done so far.
            epoch: counted from 0.
            num_images: images of this step over all ranks.
            loss: of this step.
        """
        self.steps_done += 1
        self.images_done += num_images
        if self.bar is not None:
            self.bar.set_description(f"epoch {epoch}", refresh=False)
            self.bar.update((step - 1) % self.steps_per_epoch + 1 - self.bar.n)
            if self.bar.n == self.bar.total or step == self.end_step:
                self.bar.close()
        now = time.monotonic()
        if now - self.last_line < STEP_LINE_SECONDS:
            return
        self.last_line = now
        speed = self.speed()
        left = (self.end_step - step) * (now - self.start) / self.steps_done
        logger.info(
            "epoch %d  step %d/%d  loss %.4f  %s images/s  data wait %.0f %%%s  ETA %s  memory %.1f GiB",
            epoch,
            (step - 1) % self.steps_per_epoch + 1,
            self.steps_per_epoch,
            loss.item(),
            f"{rate:.0f}" if (rate := speed["images_per_s"]) >= 9.5 else f"{rate:.2g}",
            100 * speed["data_wait"],
            WAIT_REMEDY if self.device.type == "cuda" and speed["data_wait"] > 0.1 else "",
            timedelta(seconds=round(left)),
            peak_memory(self.device) / 2**30,
        )


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    kernel = sys.modules.get("ipykernel.kernelapp")
    return kernel is not None and kernel.IPKernelApp.initialized()


def peak_memory(device: torch.device) -> int:
    """Peak memory of this process in bytes: on its GPU, or in main memory without a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class RunLog:
    """The logs of a run: log.txt with one JSON line per epoch, and the trackers; only rank 0 writes.

    Args:
        run: what the trackers track.
        epoch: the epoch in which the run continues; log.txt's lines about it and later ones are dropped. None: none.
        report_to: names of trackers.
    """

    def __init__(self, run: TrackedRun, epoch: int | None = None, report_to: Sequence[str] = ("tensorboard",)) -> None:
        self.path = run.folder / "log.txt"
        self.trackers = Trackers(report_to if is_main() else (), run)
        if is_main() and self.path.is_file() and epoch is not None:
            self._drop_epochs_from(epoch)

    def _drop_epochs_from(self, epoch: int) -> None:
        lines = self.path.read_text().splitlines(keepends=True)
        kept = [line for line in lines if _epoch_of(line) < epoch]
        if len(kept) < len(lines):
            backup = keep_old(self.path)
            write_text("".join(kept), self.path)
            logger.warning(
                "%s: removed %d lines about epoch %d and later, which are trained again; the previous file is now %s",
                *(self.path, len(lines) - len(kept), epoch, backup),
            )

    def write_epoch(self, values: Mapping[str, Any]) -> None:
        """Append one JSON line to log.txt."""
        if is_main():
            with writing(self.path), self.path.open("a") as file:
                file.write(json.dumps(plain(values)) + "\n")

    def scalars(self, values: Mapping[str, Tensor | float], step: int) -> None:
        """Send named numbers to the trackers."""
        if self.trackers.open:
            numbers = {name: float(value) for name, value in values.items()}
            self.trackers.each(lambda tracker: tracker.scalars(numbers, step))

    def image(self, name: str, picture: np.ndarray, step: int) -> None:
        """Send a picture (H, W, 3), 8 bit, to the trackers."""
        self.trackers.each(lambda tracker: tracker.image(name, picture, step))

    def close(self) -> None:
        """Finish writing."""
        self.trackers.each(lambda tracker: tracker.close())


def _epoch_of(line: str) -> int:
    """The epoch of a line of log.txt; -1 if the line names no epoch, later than any epoch if the line is truncated."""
    try:
        values = json.loads(line)
    except ValueError:
        return sys.maxsize
    return values.get("epoch", -1) if isinstance(values, dict) else -1


def progress(iterable: Iterable[T], total: int | None = None, desc: str = "") -> Iterator[T]:
    """Iterate over `iterable` while rank 0 shows the progress; every item is a sign of life for the watchdog.

    A bar on a terminal and in a notebook; a line every half minute where the output goes to a file.

    Args:
        iterable: what to go through.
        total: its length, if it has no `len`.
        desc: what is going on.
    """
    length = total if total is not None or not isinstance(iterable, Sized) else len(iterable)
    has_bar = is_main() and (sys.stderr.isatty() or in_notebook())
    start = last = time.monotonic()
    for done, item in enumerate(tqdm(iterable, total=length, desc=desc, leave=False) if has_bar else iterable):
        sign_of_life()
        if is_main() and not has_bar and time.monotonic() - last > PROGRESS_SECONDS:
            last = time.monotonic()
            logger.info("%s: %d of %s, %.0f s", desc, done, length if length is not None else "?", last - start)
        yield item

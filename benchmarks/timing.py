"""Variants of one computation -> seconds per call, ratios, and peak memory, measured in turns."""

import contextlib
import fcntl
import gc
import math
import multiprocessing
import os
import platform
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

import PIL
import timm
import torch
import torchvision

from dino_sparo.data.batch import DeviceBatch

Build = Callable[..., Callable[[], Any]]
B = TypeVar("B", bound=DeviceBatch)
TURNS = "BENCHMARK_TURNS"  # names the folder of `gpu --jobs`: a file per process group, and a lock
DRAIN_S = 0.5  # until the kernels of stopped processes have ended


@dataclass(frozen=True)
class Spread:
    """Median and quartiles over the rounds."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """The spread of one or more values."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        lower, _, upper = quantiles(values, n=4, method="inclusive")
        return cls(median(values), lower, upper)

    def scaled(self, factor: float) -> "Spread":
        """The spread in another unit."""
        return Spread(self.median * factor, self.lower * factor, self.upper * factor)


@dataclass(frozen=True)
class Timings:
    """Seconds per call of each variant, one number per round."""

    seconds: Mapping[str, list[float]]

    def time(self, name: str) -> Spread:
        """Seconds per call."""
        return Spread.of(self.seconds[name])

    def ratio(self, slow: str, fast: str) -> Spread:
        """Speed of `fast` as a multiple of the speed of `slow`, within each round."""
        return Spread.of([a / b for a, b in zip(self.seconds[slow], self.seconds[fast], strict=True)])


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Within this context the other parts of `python -m benchmarks.gpu --jobs N` are stopped."""
    if TURNS not in os.environ:
        yield
        return
    folder = Path(os.environ.pop(TURNS))  # contexts within this one do nothing
    with locked(folder) as groups:
        others = [group for group in groups if group != os.getpgrp()]
        signal_groups(others, signal.SIGSTOP)
        try:
            time.sleep(DRAIN_S)
            yield
        finally:
            signal_groups(others, signal.SIGCONT)
            os.environ[TURNS] = str(folder)


@contextlib.contextmanager
def locked(turns: Path) -> Iterator[list[int]]:
    """Within this context no part starts or is timed, except by the caller; yields the process groups of the parts."""
    with (turns / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield [int(path.name) for path in turns.glob("[0-9]*")]


def signal_groups(groups: Iterable[int], number: int) -> None:
    """Send a signal to the process groups that still exist."""
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)


def interleave(
    variants: Mapping[str, Callable[[], Any]],
    rounds: int = 9,
    min_seconds: float = 0.05,
    device: torch.device | str = "cpu",
) -> Timings:
    """Time variants in turns: a, b, c, a, b, c, ..., `alone`.

    Args:
        variants: name -> what to call, without arguments. Each is called once before anything is timed.
        rounds: how often each is timed.
        min_seconds: a timing repeats its call until about this much time has passed; 0: each call is a timing.
        device: waited for before the clock is read.

    Raises:
        ValueError: no variants, or no rounds.
    """
    if not variants or rounds < 1:
        raise ValueError(f"{len(variants)} variants in {rounds} rounds; give at least one of each")
    for name, call in variants.items():
        begin = time.perf_counter()
        call()
        synchronize(device)
        print(f"{name}: first call {time.perf_counter() - begin:.3g} s", file=sys.stderr, flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    with alone():
        repeats = {
            name: max(1, math.ceil(min_seconds / max(_seconds(call, 1, device), 1e-9))) if min_seconds else 1
            for name, call in variants.items()
        }
        for _ in range(rounds):
            for name, call in variants.items():
                seconds[name].append(_seconds(call, repeats[name], device))
    medians = ", ".join(f"{name} {1e3 * Spread.of(times).median:,.3g}" for name, times in seconds.items())
    print(f"ms: {medians}", file=sys.stderr, flush=True)
    return Timings(seconds)


def _seconds(call: Callable[[], Any], repeats: int, device: torch.device | str) -> float:
    synchronize(device)
    was_enabled = gc.isenabled()
    gc.disable()  # as timeit does: the garbage of one variant must not be another's time
    try:
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        synchronize(device)
        return (time.perf_counter() - start) / repeats
    finally:
        if was_enabled:
            gc.enable()


def with_cudnn_benchmark(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as the scripts of facebookresearch/dino and OpenCLIP run it: cuDNN looks for its fastest algorithms."""

    def tuned() -> Any:
        before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
        try:
            return call()
        finally:
            torch.backends.cudnn.benchmark = before

    return tuned


def on_host(batch: B, device: torch.device | str) -> B:
    """A batch as the loader hands it over: in page-locked memory where a GPU computes."""
    return batch.pin_memory() if torch.device(device).type == "cuda" else batch


def synchronize(device: torch.device | str) -> None:
    """Wait until the device has finished."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(build: Build, *arguments: Any, device: torch.device | str = "cpu", fresh: bool = True) -> int:
    """Largest growth of memory during one call, bytes.

    On a CPU the resident memory of the process, of a fresh one so that no memory is there to be used again; on a GPU
    what torch allocates.

    Args:
        build: a function of a module; it makes everything that exists before, and returns what to call.
        arguments: of `build`; they travel to the other process.
        device: `cpu` or a CUDA device.
        fresh: on a CPU in a process of its own; else in this one, quicker and too small a number. A GPU may allow one
            process only, and torch counts there what it allocates.
    """
    words = (build, arguments, str(device), torch.get_num_threads())
    if fresh and torch.device(device).type == "cpu":
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            growth = pool.submit(_growth, *words).result()
    else:
        growth = _growth(*words)
    print(f"memory, {', '.join(map(str, arguments))}: {growth / 1e6:.3g} MB", file=sys.stderr, flush=True)
    return growth


def _growth(build: Build, arguments: tuple[Any, ...], device: str, threads: int) -> int:
    torch.set_num_threads(threads)
    call = build(*arguments)
    gc.collect()
    if torch.device(device).type == "cuda":
        synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    before = _reset_peak()
    call()
    return _peak() - before


# Linux' own mark of the most memory a process ever had. What `getrusage` says starts with the parent's.
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _reset_peak() -> int:
    """Forget the peak so far; the memory now, bytes."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return _peak()
    return _peak()


def _peak() -> int:
    """The most memory the process had, bytes."""
    if _STATUS.is_file():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def hardware(device: torch.device | str = "cpu") -> dict[str, str]:
    """The hardware that the numbers were measured on."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    facts = {
        "cpu": f"{cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads used, {memory:.0f} GiB",
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
    }
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["gpu"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    return facts


def software() -> dict[str, str]:
    """Versions that the numbers depend on."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torchvision": str(torchvision.__version__),
        "timm": timm.__version__,
        "pillow": PIL.__version__,
    }

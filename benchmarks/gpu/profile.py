"""Where the time of a step goes on a device, eager, compiled and recorded, and how far it is from the floor.

    python -m benchmarks.gpu.profile

By kernel: its kind, launches and milliseconds per step. `idle` is the step's time in which no kernel runs, so what the
host takes too long for. The floor is a paper model's: every fusion that is possible, at an H200's full rates.
"""

import argparse
import time
from collections import defaultdict
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.reference import Reference
from benchmarks.report import Section, options, run, save
from benchmarks.timing import alone, on_host, synchronize
from benchmarks.train_step import (
    FLOOR_BATCH,
    FLOOR_MS,
    QUICK,
    Sizes,
    Stepper,
    compile_failure,
    deferred_batch,
    our_training,
    ours,
)
from dino_sparo.dino.train import DINOObjective
from dino_sparo.training.recording import WARM_UP_CALLS

# Kind of a kernel -> words in its name, the first that fits.
KINDS: dict[str, tuple[str, ...]] = {
    "copies": ("memcpy", "memset"),
    "attention": ("flash", "fmha", "attention", "cudnn_generated"),
    "matrix products": ("gemm", "cutlass", "cublas", "nvjet", "xmma", "splitk"),
    "convolution": ("conv", "wgrad", "dgrad"),
    "optimizer and average": ("multi_tensor", "adam", "foreach", "lerp"),
    "fused by the compiler": ("triton",),
    "softmax and norms": ("softmax", "layer_norm", "norm"),
}
OTHER, STEPS = "other", 2  # torch takes minutes to sum up the events of five


def kind_of(kernel: str) -> str:
    """A kernel's kind, by its name."""
    name = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), OTHER)


def profile_step(
    training: DINOObjective, stepper: Stepper, readout: str, batch: int, device: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows by kind and by kernel, of one step."""
    for _ in range(WARM_UP_CALLS + 2):  # the last but one records
        stepper.step()
    on_device = device != "cpu"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
    with alone():
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(STEPS):
            stepper.step()
        launched = time.perf_counter() - begin
        synchronize(device)
        total = 1e3 * (time.perf_counter() - begin) / STEPS
        with profile(activities=activities) as profiled:
            for _ in range(STEPS):
                stepper.step()
            synchronize(device)
    averages: Any = profiled.key_averages()
    kernels = [
        event
        for event in averages
        if not on_device or (event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False))
    ]
    times = {
        event.key: (event.self_device_time_total if on_device else event.self_cpu_time_total) / 1e3 / STEPS
        for event in kernels
    }
    counts = {event.key: event.count / STEPS for event in kernels}
    kinds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, milliseconds in times.items():
        kinds[kind_of(name)][0] += milliseconds
        kinds[kind_of(name)][1] += counts[name]
    rows = [
        {"": kind, "ms": ms, "share of the step": ms / total, "launches": number}
        for kind, (ms, number) in sorted(kinds.items(), key=lambda item: -item[1][0])
    ]
    floor, busy = FLOOR_MS[readout] * batch / FLOOR_BATCH, sum(times.values())
    rows += [
        {"": what, "ms": ms, "share of the step": ms / total, "launches": number}
        for what, ms, number in (
            ("idle", max(total - busy, 0.0), None),
            ("a step", total, sum(counts.values())),
            ("its launches by the host", 1e3 * launched / STEPS, None),
            ("the paper model's floor", floor, None),
        )
    ]
    top = sorted(times, key=lambda name: -times[name])[:15]
    return rows, [{"kernel": name[:100].replace("|", "/"), "ms": times[name], "launches": counts[name]} for name in top]


def measure(args: argparse.Namespace, reference: Reference | None) -> Section:
    """Both read-outs, eager, compiled, and recorded."""
    sizes = QUICK if args.quick else Sizes(batch=FLOOR_BATCH)
    section = Section(
        "Where the time of a step goes", f"bf16, batch {sizes.batch}, on {args.device}, mean of {STEPS} steps."
    )
    batch = on_host(deferred_batch(sizes, 1), args.device)
    for readout in ("cls", "sparo"):
        training = our_training(sizes, readout, "bf16", args.device, 0.1, "off" if args.device == "cpu" else "on")
        stepper, record = ours(training, batch), training.recorder.record
        for form in ("eager",) if args.quick else ("eager", "compiled", "recorded"):
            if form == "compiled" and (reason := compile_failure(training, stepper)):
                section.notes.append(f"{readout}: could not be compiled. {reason}")
                break
            if form == "recorded" and record is None:
                break
            training.recorder.record = record if form == "recorded" else None
            kinds, kernels = profile_step(training, stepper, readout, sizes.batch, args.device)
            section.tables[f"{readout}, {form}: by kind"] = kinds
            section.tables[f"{readout}, {form}: the longest kernels"] = kernels
            save([section], None, args)
    return section


def main(argv: list[str] | None = None) -> Section:
    """Parse the options, measure, print."""
    return run(measure, options("Where the time of a step goes."), argv)


if __name__ == "__main__":
    main()

"""DINO with SPARO, compiled and recorded, at several batch sizes: time, memory, waiting for JPEG files.

    python -m benchmarks.gpu.batches

Every batch size is compiled anew. First steps on a batch that lies on the device are timed, then steps on what the
loader reads from JPEG files of ImageNet's size.
"""

import argparse
import gc
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.objectives import FULL, SMALL, build
from benchmarks.gpu.runs import write_list
from benchmarks.reference import Reference
from benchmarks.report import Section, options, run, save
from benchmarks.timing import alone, interleave
from dino_sparo.data.loader import to_device
from dino_sparo.runtime.logs import EpochClock, peak_memory
from dino_sparo.training.recording import WARM_UP_CALLS

BATCHES = [64, 128, 256, 512]
IMAGES = 12_800  # that are read at each batch size
ROUNDS = 15


def row_of(batch: int, images: Path, args: argparse.Namespace) -> dict[str, object]:
    """The row of the table for one batch size."""
    is_on_gpu = args.device != "cpu"
    sizes = {**(SMALL if args.quick else FULL)["DINO"], "data_path": images, "batch_size_per_gpu": batch}
    sizes |= {"precision": "bf16", "drop_path_rate": 0.1, "cuda_graph": "on", "num_workers": 0 if args.quick else 32}
    if is_on_gpu:
        torch.cuda.reset_peak_memory_stats()
    built = build("DINO", sizes, args.device, compiles=is_on_gpu)
    for _ in range(WARM_UP_CALLS + 1):
        built.step()
    step_time = interleave({"step": built.step}, 1 if args.quick else ROUNDS, 0.0, args.device).time("step")
    objective: Any = built.objective
    steps = len(objective.loader)
    with alone():
        batches = to_device(objective.loader, objective.updater.device)
        first = next(batches)  # the workers have started
        clock = EpochClock(steps, steps, objective.updater.device)
        for step in range(1, steps):
            (loaded,) = clock.fetch(batches, 1) if step > 1 else [first]
            clock.tick(step, 0, batch, objective.step([loaded], epoch=1, is_last=step == steps - 1).loss)
        if is_on_gpu:
            torch.cuda.synchronize()
        speed = clock.speed()
    objective.recorder.drop()
    return {
        "batch": batch,
        "ms": step_time.scaled(1e3),
        "images/s": batch / step_time.median,
        "GiB": peak_memory(objective.updater.device) / 2**30,
        "images/s from files": speed["images_per_s"],
        "data wait": speed["data_wait"],
    }


def measure(args: argparse.Namespace, reference: Reference | None) -> Section:
    """A row for each batch size."""
    section = Section("Batch sizes", f"DINO + SPARO in bf16, compiled and recorded, on {args.device}.")
    rows = section.tables["Batch sizes"] = []
    with tempfile.TemporaryDirectory() as folder:
        for batch in [2, 3] if args.quick else BATCHES:
            images = write_list(Path(folder), 3 * batch if args.quick else IMAGES, 8 if args.quick else None)
            rows.append(row_of(batch, images, args))
            save([section], None, args)
            gc.collect()
            if args.device != "cpu":
                torch.cuda.empty_cache()
    return section


def main(argv: list[str] | None = None) -> Section:
    """Parse the options, measure, print."""
    return run(measure, options("Time, memory and waiting at several batch sizes."), argv)


if __name__ == "__main__":
    main()

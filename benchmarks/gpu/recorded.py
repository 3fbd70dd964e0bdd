"""Recorded and unrecorded steps of DINO with SPARO, both compiled: equal weights in fp32, equal losses in bf16.

    python -m benchmarks.gpu.recorded

fp32 with deterministic kernels has to give the same bits, with stochastic depth too. bf16 runs with the usual kernels.
"""

import argparse
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from benchmarks.gpu.objectives import FULL, SMALL, build
from benchmarks.reference import Reference
from benchmarks.report import Section, options, run, save

STEPS, BATCH = 20, 16
BF16 = 1e-4  # nats


def trained(sizes: dict[str, object], is_exact: bool, device: str, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses (steps,) and all weights of the student and the teacher, on the CPU.

    Args:
        sizes: options of main_dino.py.
        is_exact: use deterministic kernels.
        device: cpu or cuda.
        steps: to take.
    """
    torch.use_deterministic_algorithms(is_exact)
    built = build("DINO", sizes, device, compiles=device != "cpu")
    losses = torch.stack([built.step() for _ in range(steps)]).double().cpu()
    dino: Any = built.objective
    networks = (dino.network, dino.teacher)
    weights = torch.cat([weight.detach().flatten() for network in networks for weight in network.parameters()])
    return losses, weights.cpu()


def measure(args: argparse.Namespace, reference: Reference | None) -> Section:
    """fp32, with stochastic depth, compiled in regions, bf16; every run is a separate process, and all run at once."""
    steps = 6 if args.quick else STEPS
    section = Section("Recorded and unrecorded steps", f"{steps} steps on {args.device}, sparo.")
    sizes = SMALL["DINO"] if args.quick else {**FULL["DINO"], "batch_size_per_gpu": BATCH}
    forms: dict[str, dict[str, object]] = {
        "fp32": {"precision": "fp32"},
        "fp32, stochastic depth": {"precision": "fp32", "drop_path_rate": 0.1},
        "fp32, stochastic depth, in regions": {"precision": "fp32", "drop_path_rate": 0.1, "compile": "regions"},
        "bf16": {"precision": "bf16"},
    }
    with ProcessPoolExecutor(2 * len(forms), mp_context=multiprocessing.get_context("spawn")) as pool:
        runs = {
            name: [
                pool.submit(trained, {**sizes, **changes, "cuda_graph": on}, name != "bf16", args.device, steps)
                for on in ("off", "on")
            ]
            for name, changes in forms.items()
        }
        for name, pair in runs.items():
            (plain, weights), (recorded, others) = (run_.result() for run_ in pair)
            if name == "bf16":
                section.check(f"{name}: losses of {steps} steps, recorded and not", recorded, plain, BF16)
            else:
                section.check(f"{name}: weights after {steps} steps, recorded and not", others, weights, 0)
            save([section], None, args)
    if args.device == "cpu":
        section.notes.append("A CPU records nothing: the steps ran, and more is not shown.")
    return section


def main(argv: list[str] | None = None) -> Section:
    """Parse the options, measure, print."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS wants it for deterministic algorithms
    return run(measure, options("Recorded and unrecorded steps give equal weights."), argv)


if __name__ == "__main__":
    main()

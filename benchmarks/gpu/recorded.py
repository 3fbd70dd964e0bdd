"""Recorded and unrecorded steps of DINO with SPARO, both compiled: equal weights in fp32, equal losses in bf16.

    python -m benchmarks.gpu.recorded

fp32 with deterministic kernels has to give the same bits, with stochastic depth too. bf16 runs with the usual kernels.
"""

import argparse
import os
from typing import Any

import torch

from benchmarks.gpu.objectives import FULL, SMALL, build
from benchmarks.reference import Reference
from benchmarks.report import Section, options, run, save

STEPS, BATCH = 20, 16
BF16 = 1e-4  # nats


def trained(sizes: dict[str, object], cuda_graph: str, device: str, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses (steps,) and all weights of the student and the teacher, on the CPU."""
    built = build("DINO", {**sizes, "cuda_graph": cuda_graph}, device, compiles=device != "cpu")
    losses = torch.stack([built.step() for _ in range(steps)]).double().cpu()
    dino: Any = built.objective
    networks = (dino.network, dino.teacher)
    weights = torch.cat([weight.detach().flatten() for network in networks for weight in network.parameters()])
    dino.recorder.drop()
    return losses, weights.cpu()


def measure(args: argparse.Namespace, reference: Reference | None) -> Section:
    """fp32, fp32 with stochastic depth, bf16."""
    steps = 6 if args.quick else STEPS
    section = Section("Recorded and unrecorded steps", f"{steps} steps on {args.device}, sparo.")
    sizes = SMALL["DINO"] if args.quick else {**FULL["DINO"], "batch_size_per_gpu": BATCH}
    forms: dict[str, dict[str, object]] = {
        "fp32": {"precision": "fp32"},
        "fp32, stochastic depth": {"precision": "fp32", "drop_path_rate": 0.1},
        "bf16": {"precision": "bf16"},
    }
    for name, changes in forms.items():
        torch.use_deterministic_algorithms(name != "bf16")
        try:
            (plain, weights), (recorded, others) = (
                trained({**sizes, **changes}, cuda_graph, args.device, steps) for cuda_graph in ("off", "on")
            )
        finally:
            torch.use_deterministic_algorithms(False)
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

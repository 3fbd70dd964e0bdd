"""DDP in a group of one process: NCCL on a GPU, static graph, accumulation, checkpointing, SyncBN, compiled.

    python -m benchmarks.gpu.one_process

One process gives DDP nothing to average, so the losses have to be those without DDP.
"""

import argparse

import torch

from benchmarks.gpu.objectives import OBJECTIVES, SMALL, build, wrapped_in_ddp
from benchmarks.reference import Reference
from benchmarks.report import Check, Section, options, run
from benchmarks.train_step import process_group

STEPS, EQUAL = 5, 1e-4
FORMS: dict[str, dict[str, object]] = {
    "static graph": {},
    "two micro-batches": {"grad_accum_steps": 2},
    "checkpointing": {"grad_checkpointing": True},
}


def losses(name: str, device: str, compiles: bool, changes: dict[str, object]) -> torch.Tensor:
    """Of the first steps in fp32, (STEPS,)."""
    built = build(name, SMALL[name], device, compiles, precision="fp32", **changes)
    return torch.stack([built.step().double().cpu() for _ in range(STEPS)])


def measure(args: argparse.Namespace, reference: Reference | None) -> Section:
    """Losses with DDP against those without."""
    backend = "gloo" if args.device == "cpu" else "nccl"
    section = Section("DDP in a group of one process", f"{backend}, on {args.device}, fp32, small sizes.")
    with process_group(args.device):
        for name in OBJECTIVES:
            for form, changes in FORMS.items():
                expected = losses(name, args.device, False, changes)
                for compiles in (False,) if args.quick else (False, True):
                    with wrapped_in_ddp():
                        found = losses(name, args.device, compiles, changes)
                    what = f"{name}, {form}{', compiled' * compiles}: losses with DDP and without"
                    section.check(what, found, expected, EQUAL)
        if args.device == "cpu":
            section.notes.append("SyncBN needs a GPU, so it was left out.")
            return section
        for compiles in (False, True):
            with wrapped_in_ddp(with_world_of_two=True):
                found = losses("DINO", args.device, compiles, {"use_bn_in_head": "true"})
            bad = float((~found.isfinite()).sum())
            section.checks.append(Check(f"DINO, SyncBN{', compiled' * compiles}: losses that are not finite", bad, 0))
    return section


def main(argv: list[str] | None = None) -> Section:
    """Parse the options, measure, print."""
    return run(measure, options("DDP in a group of one process."), argv)


if __name__ == "__main__":
    main()

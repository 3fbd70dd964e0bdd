"""DDP in a group of one process: NCCL on a GPU, static graph, accumulation, checkpointing, compiled.

    python -m benchmarks.gpu.one_process

One process gives DDP nothing to average, so the losses have to be those without DDP.
"""

import argparse

from benchmarks.gpu.objectives import OBJECTIVES, first_losses, wrapped_in_ddp
from benchmarks.reference import Reference
from benchmarks.report import Section, options, run, save
from benchmarks.train_step import process_group

EQUAL = 1e-4  # nats
FORMS: dict[str, dict[str, object]] = {
    "static graph": {},
    "two micro-batches": {"grad_accum_steps": 2},
    "checkpointing": {"grad_checkpointing": True},
}


def measure(args: argparse.Namespace, reference: Reference | None) -> Section:
    """Losses with DDP against losses without DDP."""
    backend = "gloo" if args.device == "cpu" else "nccl"
    section = Section("DDP in a group of one process", f"{backend}, on {args.device}, fp32, small sizes.")
    with process_group(args.device):
        for name in OBJECTIVES:
            for form, changes in FORMS.items():
                expected = first_losses(name, args.device, {**changes, "precision": "fp32"})
                for compiles in (False,) if args.quick else (False, True):
                    with wrapped_in_ddp():
                        losses = first_losses(name, args.device, {**changes, "precision": "fp32"}, compiles)
                    what = f"{name}, {form}{', compiled' * compiles}: losses with DDP and without"
                    section.check(what, losses, expected, EQUAL)
                    save([section], None, args)
    section.notes.append("SyncBN is left out: in a group of one it is plain batch norm.")
    return section


def main(argv: list[str] | None = None) -> Section:
    """Parse the options, measure, print."""
    return run(measure, options("DDP in a group of one process."), argv)


if __name__ == "__main__":
    main()

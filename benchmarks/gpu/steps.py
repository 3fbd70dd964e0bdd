"""No synchronisation within a step; losses by device, by precision, and compiled or not.

    python -m benchmarks.gpu.steps losses
    python -m benchmarks.gpu.steps waiting

Losses are those of a few steps from equal weights on equal crops: the CPU distorts them with the code of the device.
"""

import argparse
import contextlib
import logging
import math
from collections.abc import Iterator

import torch

from benchmarks.gpu.objectives import FULL, OBJECTIVES, SMALL, build, first_losses
from benchmarks.reference import Reference
from benchmarks.report import Check, Section, options, run, save
from benchmarks.timing import synchronize

logger = logging.getLogger(__name__)

WARM_STEPS = 2
# How far losses of several nats may be apart: of fp32 on a CPU and on a device, and of other precisions from fp32.
FP32, BF16, FP16, COMPILED = 1e-3, 5e-2, 2e-2, 1e-3
CLIP_FP16 = 5e-2  # 0.015 on a CPU
# Further forms of DINO whose steps must not wait for the device.
DINO_FORMS: dict[str, dict[str, object]] = {
    "": {},
    "vanilla": {"readout": "cls"},
    "fp16": {"precision": "fp16"},
    "two micro-batches": {"grad_accum_steps": 2},
    "checkpointing": {"grad_checkpointing": True},
    "loss in chunks": {"loss_chunk": 8192},
}
COMPILED_FORMS = ("", "fp16")  # compiling one takes about a minute


@contextlib.contextmanager
def no_synchronisation(device: str) -> Iterator[None]:
    """Within this context any wait for the device raises a RuntimeError; without effect on a CPU."""
    if device == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_synchronisation(section: Section, args: argparse.Namespace) -> None:
    """Steps of every objective, eager and compiled; DINO's in several forms, too."""
    sizes = SMALL if args.quick else FULL
    forms = [
        (name, what, changes)
        for name in OBJECTIVES
        for what, changes in (DINO_FORMS.items() if name == "DINO" else [("", {})])
    ]
    rows = section.tables["Steps"] = []
    for name, what, changes in forms:
        if args.device == "cpu" and changes.get("precision") == "fp16":
            continue
        for compiles in (False, True) if what in COMPILED_FORMS and not args.quick else (False,):
            form = ", ".join(filter(None, (name, what, "compiled" if compiles else "eager")))
            number, reason = waits(name, sizes[name] | changes, args.device, compiles)
            section.checks.append(Check(f"{form}: steps that wait for the device", number, 0))
            rows.append({"form": form, "waits": reason})
            save([section], None, args)


def waits(name: str, sizes: dict[str, object], device: str, compiles: bool) -> tuple[float, str]:
    """Whether a step waits for the device, 0 or 1, and why; NaN and the error if steps fail for another reason."""
    try:
        built = build(name, sizes, device, compiles)
        for _ in range(WARM_STEPS):
            built.step()
        synchronize(device)
        with no_synchronisation(device):
            for _ in range(3):
                built.step()
    except RuntimeError as error:
        text = " ".join(str(error).split())[:300]
        if "synchroniz" in text:  # of `torch.cuda.set_sync_debug_mode`
            return 1.0, text
        logger.exception("%s on %s, compiled: %s, %s", name, device, compiles, sizes)
        return math.nan, f"error: {text}"
    return 0.0, "never"


def check_losses(section: Section, args: argparse.Namespace) -> None:
    """Against fp32 on a CPU: fp32, bf16 and fp16 on the device; and compiled against eager."""
    limits = {"fp32": FP32, "bf16": BF16, **({} if args.device == "cpu" else {"fp16": FP16})}
    for name in OBJECTIVES:
        form: dict[str, object] = {"distort_on": "device"} if name == "DINO" else {}
        expected = first_losses(name, "cpu", {**form, "precision": "fp32"})
        for precision, limit in (limits | ({"fp16": CLIP_FP16} if name == "CLIP" and "fp16" in limits else {})).items():
            losses = first_losses(name, args.device, {**form, "precision": precision})
            section.check(f"{name}: first losses, {precision} on {args.device}, fp32 on cpu", losses, expected, limit)
            save([section], None, args)
        if not args.quick:
            eager, compiled = (
                first_losses(name, args.device, {**form, "precision": "fp32"}, on) for on in (False, True)
            )
            section.check(f"{name}: first losses, fp32, compiled and eager", compiled, eager, COMPILED)
            save([section], None, args)


MEASURES = {"losses": check_losses, "waiting": check_synchronisation}
TITLES = {"losses": "Losses by device, precision and compilation", "waiting": "Does a step wait for the device?"}


def measure(args: argparse.Namespace, reference: Reference | None) -> Section:
    """One of the two checks."""
    section = Section(TITLES[args.what], f"On {args.device}, built-in scenes.")
    MEASURES[args.what](section, args)
    if args.device == "cpu" and args.what == "waiting":
        section.notes.append("A CPU is never waited for: the steps ran, and more is not shown.")
    if args.quick:
        section.notes.append("Compiled forms are left out of a short run.")
    return section


def main(argv: list[str] | None = None) -> Section:
    """Parse the options, measure, print."""
    return run(
        measure, options("Steps: losses by device, precision and compilation, and synchronisation.", MEASURES), argv
    )


if __name__ == "__main__":
    main()

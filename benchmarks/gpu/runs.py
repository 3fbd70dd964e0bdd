"""Whole runs of `main_dino.py`: the gpu tests, kill and resume, start, and two epochs of the recipe for ImageNet.

    python -m benchmarks.gpu.runs tests
    python -m benchmarks.gpu.runs resume
    python -m benchmarks.gpu.runs start
    python -m benchmarks.gpu.runs recipe
    python -m benchmarks.gpu.runs recipe_recorded

The recipe's images are JPEG files of ImageNet's size, drawn once and named again and again in a list, so that decoding
and cropping cost what they cost in earnest.
"""

import argparse
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.objectives import SMALL
from benchmarks.input_pipeline import write_images
from benchmarks.reference import Reference
from benchmarks.report import Bar, Check, Section, options, run, save
from benchmarks.timing import alone

ROOT = Path(__file__).resolve().parents[2]
STOPPED = 128 + signal.SIGTERM
# Sums in the backward pass of a GPU's attention have no fixed order, and training enlarges the difference.
LOSS_APART = 0.1
# Share of the time in which a step waits for the loader, whose start is a large part of so short an epoch.
DATA_WAIT = 0.05
RECIPE_STEPS, RECIPE_BATCH, RECIPE_FILES = 300, 64, 1024
START_S = {"empty": 60, "full": 20}  # wanted, by the compiler's cache, with 16 cores


def train(words: dict[str, object], log: Path, **environment: str) -> subprocess.Popen:
    """Start `main_dino.py`; its output goes to a file."""
    command = [sys.executable, str(ROOT / "main_dino.py")]
    command += [word for name, value in words.items() for word in (f"--{name}", str(value))]
    with log.open("ab") as output:
        environment = {**os.environ, "TORCH_LOGS": "recompiles", **environment}
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)


def epochs_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log.txt."""
    path = folder / "log.txt"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def measure_tests(section: Section, args: argparse.Namespace, folder: Path) -> None:
    """The tests with the marker `gpu`; without a GPU they skip themselves."""
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files]
    # cuBLAS wants it wherever a test asks for deterministic algorithms, in older versions of torch with an error.
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(process.stdout + process.stderr)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", process.stdout)}
    section.tables["Tests"] = [{word: counts.get(word, 0) for word in ("passed", "failed", "skipped")}]
    section.checks.append(Check("exit status of pytest", process.returncode, 0))
    if args.device != "cpu":
        section.checks.append(Check("tests that were skipped", counts.get("skipped", 0), 0))


def measure_resume(section: Section, args: argparse.Namespace, folder: Path) -> None:
    """A whole run; one that is stopped by SIGTERM; one that is killed; both started again."""
    words: dict[str, object] = {"device": args.device, "epochs": 3, "saveckp_minutes": 0.02, "compile": "off"}
    if args.quick:
        words |= {**SMALL["DINO"], "data_path": "scenes:120:32", "precision": "fp32", "num_workers": 0}
    else:
        words |= {"data_path": "scenes:4096:256", "warmup_epochs": 1}
    whole = train({**words, "output_dir": folder / "whole"}, folder / "whole.log").wait()
    section.checks.append(Check("status of a whole run", whole, 0))
    for name, number, expected in (("SIGTERM", signal.SIGTERM, STOPPED), ("SIGKILL", signal.SIGKILL, -signal.SIGKILL)):
        run_dir, log = folder / name, folder / f"{name}.log"
        process = train({**words, "output_dir": run_dir}, log)
        while process.poll() is None and not (run_dir / "checkpoint.pth").is_file():
            time.sleep(0.02)
        process.send_signal(number)
        statuses = process.wait(), train({**words, "output_dir": run_dir}, log).wait()
        section.checks.append(Check(f"{name}: its status, from {expected}", abs(statuses[0] - expected), 0))
        section.checks.append(Check(f"{name}: status of the run that goes on", statuses[1], 0))
        print(log.read_text())
        section.checks += resumed_checks(name, epochs_of(folder / "whole"), epochs_of(run_dir))
        save([section], None, args)


def resumed_checks(name: str, whole: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> list[Check]:
    """Check that a resumed run has the epochs and steps of a whole run, and about the same losses.

    Args:
        name: of the signal.
        whole: lines of log.txt of the run that nobody stopped.
        resumed: of the other.
    """
    progress = [[(line["epoch"], line["step"]) for line in lines] for lines in (whole, resumed)]
    is_same = bool(whole) and progress[0] == progress[1]
    losses = [[line["train_loss"] for line in lines] for lines in (whole, resumed)]
    apart = max(abs(a - b) for a, b in zip(*losses, strict=True)) if is_same else math.nan
    return [
        Check(f"{name}: epochs and steps are those of the whole run", 0.0 if is_same else math.nan, 0),
        Check(f"{name}: epochs' losses from those of the whole run", apart, LOSS_APART),
    ]


def write_list(folder: Path, number: int, files: int | None = None) -> Path:
    """A list that names JPEG files again and again, `number` names in all; None: `RECIPE_FILES` files."""
    images = folder / "images"
    if not images.exists():
        images.mkdir()
        write_images(images, files or RECIPE_FILES)
    names = sorted(map(str, images.glob("*.jpg")))
    (folder / "images.txt").write_text("".join(f"{names[i % len(names)]}\n" for i in range(number)))
    return folder / "images.txt"


def measure_start(section: Section, args: argparse.Namespace, folder: Path) -> None:
    """Seconds from the command to the recording, compiled whole and in regions, with an empty and with a full cache."""
    batch = 4 if args.quick else RECIPE_BATCH
    words: dict[str, object] = dict(SMALL["DINO"]) if args.quick else {}
    words |= {"data_path": write_list(folder, 5 * batch, 8 if args.quick else None), "batch_size_per_gpu": batch}
    words |= {"device": args.device, "precision": "bf16", "epochs": 1, "warmup_epochs": 0}
    rows = section.tables["Start"] = []
    choices = ["off"] if args.quick else ["on", "regions"]  # a CPU compiles for a minute
    for choice, (cache, wanted) in product(choices, START_S.items()):
        form = f"--compile {choice}, {cache} cache"
        log = folder / f"{form}.log"
        with alone():
            begin, seconds = time.monotonic(), None
            form_words = {**words, "compile": choice, "output_dir": folder / form}
            process = train(form_words, log, TORCHINDUCTOR_CACHE_DIR=str(folder / choice))
            while process.poll() is None:
                if seconds is None and "recorded as one CUDA graph" in log.read_text():
                    seconds = time.monotonic() - begin
                time.sleep(0.05)
        print(log.read_text())
        section.checks.append(Check(f"{form}: status", process.returncode, 0))
        rows.append({"form": form, "s to the recording, after three steps": seconds})
        section.bars.append(Bar(f"s to the recording, {form}", wanted, seconds, at_most=True))
        save([section], None, args)


def measure_recipe(section: Section, args: argparse.Namespace, folder: Path, cuda_graph: str = "off") -> None:
    """The defaults of `main_dino.py` in bf16: an epoch in which workers start and networks warm up, one that counts."""
    steps, batch = (6, 4) if args.quick else (RECIPE_STEPS, RECIPE_BATCH)
    images = write_list(folder, steps * batch, 8 if args.quick else None)
    words: dict[str, object] = dict(SMALL["DINO"]) if args.quick else {}
    words |= {
        "cuda_graph": cuda_graph,
        "data_path": images,
        "batch_size_per_gpu": batch,
        "max_steps": 2 * steps,
        "epochs": 100,
    }
    words |= {"device": args.device, "precision": "bf16", "output_dir": folder / "recipe", "warmup_epochs": 10}
    process = train(words, folder / "recipe.log")
    while process.poll() is None and not epochs_of(folder / "recipe"):
        time.sleep(0.2)
    with alone():
        status = process.wait()
    text = (folder / "recipe.log").read_text()
    print(text)
    section.checks.append(Check("status", status, 0))
    lines = epochs_of(folder / "recipe")
    loss = lines[-1]["train_loss"] if lines else math.nan
    section.checks.append(Check("loss is finite", 0.0 if math.isfinite(loss) else math.nan, 0))
    if args.device != "cpu":  # where --compile auto compiles
        section.checks.append(Check("recompilations after the first steps", late_recompilations(text), 0))
    section.checks.append(Check("networks that run uncompiled", text.count("torch.compile does not work here"), 0))
    shown = ("train_loss", "train_images_per_s", "train_data_wait", "train_grad_norm", "feature_rank")
    section.tables[f"Second epoch, {steps} steps of batch {batch}"] = (
        [{name: lines[-1].get(name) for name in shown}] if lines else []
    )
    wait = lines[-1].get("train_data_wait") if lines and not args.quick else None
    section.bars.append(Bar("share of the time that waits for data", DATA_WAIT, wait, at_most=True))


def late_recompilations(log: str) -> float:
    """Functions that were compiled again after the first steps, which compile each for every size of crop.

    Args:
        log: of a run with TORCH_LOGS=recompiles.

    Returns:
        Their number; NaN if the log has no step.
    """
    first = log.find("epoch 0")
    return float(log.count("Recompiling function", first)) if first >= 0 else math.nan


MEASURES: dict[str, Callable[[Section, argparse.Namespace, Path], None]] = {
    "tests": measure_tests,
    "resume": measure_resume,
    "start": measure_start,
    "recipe": measure_recipe,
    "recipe_recorded": partial(measure_recipe, cuda_graph="on"),
}
TITLES = {
    "tests": "Tests that need a GPU",
    "resume": "Kill and resume",
    "start": "Start of a recorded run",
    "recipe": "The recipe for ImageNet, twice 300 steps",
    "recipe_recorded": "The recipe for ImageNet with --cuda_graph on, twice 300 steps",
}


def measure(args: argparse.Namespace, reference: Reference | None) -> Section:
    """Measure one kind of run, in a separate folder."""
    section = Section(TITLES[args.what], f"On {args.device}, torch {torch.__version__}.")
    # Not in /tmp, which may be small: checkpoints take about 8 GB. The runner removes it after a part that was ended.
    folder = Path(args.json).resolve().with_suffix(".tmp") if args.json else Path(tempfile.mkdtemp())
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        MEASURES[args.what](section, args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return section


def main(argv: list[str] | None = None) -> Section:
    """Parse the options, measure, print."""
    return run(measure, options("Whole runs: gpu tests, kill and resume, start, the recipe.", MEASURES), argv)


if __name__ == "__main__":
    main()

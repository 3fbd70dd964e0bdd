"""Run all parts, one after the other, each in a separate process: `python -m benchmarks.gpu --help`."""

import argparse
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.page import claims, not_shown, page, put_between_marks, read_reports, status, tables
from benchmarks.timing import TURNS, locked, signal_groups
from dino_sparo.runtime.cli import Parser, positive_int, positive_number
from dino_sparo.runtime.files import git_hash

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600  # of a part
NO_TIME = "no time left"
INTERRUPTED = "interrupted"  # a file among the turns: a part that waits for its turn does not start


class Part(NamedTuple):
    """A script.

    Attributes:
        words: module and options.
        minutes: that it takes on an H100, estimated; no part may take more than `LIMIT_S`.
        takes_reference: whether it compares with the reference.
    """

    words: str
    minutes: float
    takes_reference: bool = False


# In the order of their value: the recorded step, what never ran, what ran before.
PARTS = {
    "recorded": Part("benchmarks.gpu.recorded", 2),
    "train_step": Part("benchmarks.train_step --rounds 15", 5, takes_reference=True),
    "recipe_recorded": Part("benchmarks.gpu.runs recipe_recorded", 3),
    "recipe": Part("benchmarks.gpu.runs recipe", 3),
    "resume": Part("benchmarks.gpu.runs resume", 4),
    "start": Part("benchmarks.gpu.runs start", 6),
    "profile": Part("benchmarks.gpu.profile", 4),
    "clip": Part("benchmarks --only clip_step", 4),
    "evaluation": Part("benchmarks --only knn linear", 1, takes_reference=True),
    "encoder": Part("benchmarks --only readout backbone", 2, takes_reference=True),
    "batches": Part("benchmarks.gpu.batches", 7),
    "binding_bf16": Part("benchmarks.binding --precision bf16", 2),
    "tests": Part("benchmarks.gpu.runs tests", 2),
    "losses": Part("benchmarks.gpu.steps losses", 2),
    "waiting": Part("benchmarks.gpu.steps waiting", 4),
    "one_process": Part("benchmarks.gpu.one_process", 4),
    "binding": Part("benchmarks.binding", 2),
    "search": Part("benchmarks.gpu.search", 1),
    "input": Part("benchmarks --only input_pipeline", 2, takes_reference=True),
}


def get_args_parser() -> Parser:
    """The options."""
    parser = Parser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS), help="Parts to run.")
    parser.add_argument(
        "--minutes",
        type=positive_number,
        default=None,
        help="Start no part that is estimated to take longer than what is left of this time, and end what runs when "
        "the time is up. The next start continues with the parts that are not done. By default there is no limit.",
    )
    parser.add_argument(
        "--jobs",
        type=positive_int,
        default=1,
        help="Parts that run side by side, because compiling takes most of their time. While a part is timed, the "
        "others are stopped; they keep their memory on the GPU.",
    )
    parser.add_argument("--again", action="store_true", help="Run parts that are done a second time.")
    parser.add_argument(
        "--reference",
        default=os.environ.get("DINO_REFERENCE"),
        help="A checkout of facebookresearch/dino; without it only our code is measured. By default DINO_REFERENCE.",
    )
    parser.add_argument("--output_dir", type=Path, default=Path("output/gpu"), help="Folder of the parts' files.")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu proves that the parts work.")
    parser.add_argument("--short", action="store_true", help="Tiny sizes. Its numbers mean nothing.")
    return parser


def run_part(name: str, args: argparse.Namespace, turns: Path, end: float = math.inf) -> dict[str, Any]:
    """Run a part, unless it is done or there is no time for it; its report with its result and the seconds it took.

    Args:
        name: of the part.
        args: the options.
        turns: folder of `benchmarks.timing.alone`.
        end: when the time is up, on the monotonic clock.
    """
    part, path, seconds_left = PARTS[name], args.output_dir / f"{name}.json", end - time.monotonic()
    before = read_reports(args.output_dir, [name]).get(name, {})
    form = args.device + " short" * args.short
    if (before.get("result"), before.get("form")) == ("done", form) and not args.again:
        logger.info("%s: done before, skipped (--again runs it)", name)
        return before
    if not args.short and 60 * part.minutes > seconds_left:
        logger.info("%s: not started, %g minutes are left and it takes about %g", name, seconds_left / 60, part.minutes)
        return {**before, "result": NO_TIME}
    command = [sys.executable, "-m", *part.words.split(), "--device", args.device, "--json", str(path)]
    command += ["--reference", args.reference] if part.takes_reference and args.reference else []
    command += ["--quick"] if args.short else []
    log = path.with_suffix(".log")
    environment = {**os.environ, TURNS: str(turns)}
    with locked(turns):
        if (turns / INTERRUPTED).exists():
            return before
        logger.info("%s: %s (about %g minutes on an H100; log %s)", name, " ".join(command[1:]), part.minutes, log)
        path.unlink(missing_ok=True)
        begin = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        (turns / str(process.pid)).touch()
    limit = max(min(LIMIT_S, end - time.monotonic()), 1)
    try:
        exit_status = process.wait(limit)
    except subprocess.TimeoutExpired:
        exit_status = None
        signal_groups([process.pid], signal.SIGKILL)  # its own processes, too
        process.wait()
    finally:
        with locked(turns) as groups:
            (turns / str(process.pid)).unlink(missing_ok=True)
            signal_groups(groups, signal.SIGCONT)  # a part that ended while it was timed has left the others stopped
    shutil.rmtree(path.with_suffix(".tmp"), ignore_errors=True)  # of a part that was ended
    report = json.loads(path.read_text()) if path.is_file() else {"sections": []}
    checks = [check for section in report["sections"] for check in section["checks"]]
    if exit_status is None:
        result = f"ended after {limit:.0f} s"
    elif not report["sections"]:
        result = f"failed, status {exit_status}, no report"
    elif not all(check["passed"] for check in checks):
        result = "checks failed"
    else:
        result = "done" if exit_status == 0 else f"failed, status {exit_status}"
    report |= {"result": result, "form": form, "seconds": round(time.monotonic() - begin), "commit": git_hash()}
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    logger.info("%s: %s in %d s", name, result, report["seconds"])
    return report


def main(argv: Sequence[str] | None = None) -> None:
    """Run the parts, write the page.

    Raises:
        SystemExit: there is no GPU, or a part failed.
    """
    args = get_args_parser().parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "benchmarks.gpu: torch sees no GPU here. Run it on a machine with one, or give --device cpu --short, which "
            "shows that the parts work and measures nothing"
        )
    if args.device == "cpu" and not args.short:
        raise SystemExit("benchmarks.gpu: --device cpu takes hours at full size; add --short")
    args.output_dir = args.output_dir.resolve()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + (60 * args.minutes if args.minutes else math.inf)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        turns = Path(folder)
        try:
            reports = pool.map(lambda name: run_part(name, args, turns, end), args.part)
            results = {name: report["result"] for name, report in zip(args.part, reports, strict=True)}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            (turns / INTERRUPTED).touch()
            signal_groups([int(path.name) for path in turns.glob("[0-9]*")], signal.SIGKILL)
            raise
    all_reports = read_reports(args.output_dir, list(PARTS))
    text, measurements = page(all_reports), tables(all_reports, list(PARTS))
    (args.output_dir / "gpu.md").write_text(f"{text}\n\n{measurements}\n", encoding="utf-8")
    if args.device == "cuda" and not args.short:
        texts = {
            "status": status(all_reports),
            "claims": claims(all_reports),
            "not shown": not_shown(all_reports, list(PARTS)),
            "measured": text,
        }
        put_between_marks(texts, ROOT / "docs" / "gpu.md")
        put_between_marks({"tables": measurements}, ROOT / "benchmarks" / "gpu" / "README.md")
    logger.info("%s", args.output_dir / "gpu.md")
    left = [name for name, result in results.items() if result == NO_TIME]
    if left:
        logger.info("no time for %s; the same command continues with them", ", ".join(left))
    failed = [f"{name} ({result})" for name, result in results.items() if result not in ("done", NO_TIME)]
    if failed:
        raise SystemExit(f"benchmarks.gpu: {', '.join(failed)}; the logs are in {args.output_dir}")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    main()

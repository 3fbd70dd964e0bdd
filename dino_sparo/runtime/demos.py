"""Shared parts of all demos: options, one run, the end. No torch before a demo runs."""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dino_sparo.runtime.cli import Group, Option, Parser, say
from dino_sparo.runtime.faults import UserError

# A command's name and its words -> what it returns; see `dino_sparo.__main__.run`.
RunCommand = Callable[[str, Sequence[str]], Any]


OPTIONS: Group = {
    "method": Option("dino", "Objective to train with.", choices=("dino", "clip", "oc-clip")),
    "models": Option(
        None,
        "Models to compare: read-outs with dino and clip, by default sparo; with oc-clip oc_clip, cls and sparo, by "
        "default all.",
        str,
        nargs="+",
    ),
    "seeds": Option([0], "Random seeds; one training run each."),
    "output_dir": Option(None, "Where everything is written; by default in output/."),
    "device": Option("cpu", "auto, cpu or cuda.", str),
    "short": Option(False, "Train for a minute only, to see that all parts work."),
}


def demo_parser() -> Parser:
    """The options of all demos."""
    return Parser({"demo": OPTIONS})


def option_words(options: Mapping[str, object]) -> list[str]:
    """Options as a command line; several values of one are a list."""
    values = {name: value if isinstance(value, list) else [value] for name, value in options.items()}
    return [word for name, several in values.items() for word in (f"--{name}", *map(str, several))]


def spread(values: Sequence[int | float], unit: str = " %") -> str:
    """Mean, and with several values the standard deviation."""
    mean = f"{statistics.mean(values):.1f}{unit}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.1f}"


def choose_models(args: argparse.Namespace, models: Iterable[str], default: Sequence[str] = ("sparo",)) -> None:
    """Fill in `--models`; ValueError if one is not among `models`."""
    args.models = args.models or list(default)
    if unknown := [model for model in args.models if model not in models]:
        raise UserError(f"--models {' '.join(unknown)}: choose among {', '.join(sorted(models))}")


def start_demo(args: argparse.Namespace, name: str) -> None:
    """Choose the folder, `output/NAME` or `output/NAME-short`, and how many threads compute.

    The demos' networks are so small that half of the cores compute them fastest, while the others prepare images.
    """
    import torch  # not above: --help need not wait for it

    if args.output_dir is None:
        args.output_dir = f"output/{name}-short" if args.short else f"output/{name}"
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))


def train_and_score(
    args: argparse.Namespace,
    run: RunCommand,
    command: str,
    options: Mapping[str, object],
    name: str,
    seed: int,
    score: Callable[[Path], Mapping[str, Any]],
    kind: str = "readout",
) -> dict[str, Any]:
    """Train one model and evaluate it.

    Args:
        args: the demo's options.
        run: (command, words) -> what the command returns.
        command: that trains the model.
        options: of the command, without seed, device and folder.
        name: of the model among those compared.
        seed: of the run.
        score: folder of the run -> scores.
        kind: what the models differ in.

    Returns:
        Name under `kind`, seed, scores, seconds, folder.
    """
    folder = Path(args.output_dir) / f"{name}_seed{seed}"
    begin = time.monotonic()
    run(command, option_words({**options, "seed": seed, "device": args.device, "output_dir": folder}))
    trained_s = time.monotonic() - begin
    scores = score(folder)
    times = {"training_s": trained_s, "total_s": time.monotonic() - begin}
    return {kind: name, "seed": seed, **scores, **times, "folder": str(folder)}


def finish_demo(args: argparse.Namespace, runs: Sequence[Mapping[str, Any]], title: str, table: str) -> None:
    """Write demo.json and show the table, with the seeds and the minutes of all runs."""
    (Path(args.output_dir) / "demo.json").write_text(json.dumps(runs, indent=1))
    minutes = sum(run["total_s"] for run in runs) / 60
    say(f"\n{title}, seeds {args.seeds}, {minutes:.1f} minutes\n\n{table}")

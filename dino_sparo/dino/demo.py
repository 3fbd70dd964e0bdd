"""The whole path in minutes, on a laptop without a GPU: train on the built-in scenes, evaluate, draw the slots.

    make demo                                          # SPARO
    make demo-compare                                  # SPARO beside cls and gap
    dino-sparo demo --seeds 0 1 2 --output_dir runs/demo

Runs the commands a user would run, in their order, and ends with a table: 20-NN and linear probe on held-out scenes,
untrained encoder against trained. The options of the training are those of `demo.yaml`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dino_sparo.draw.plots import draw_training_curve
from dino_sparo.models.architectures import DINO_READOUTS
from dino_sparo.models.readouts import readout_kind
from dino_sparo.runtime.cli import read_config, say
from dino_sparo.runtime.demos import RunCommand, choose_models, finish_demo, spread, start_demo, train_and_score

TRAINING = read_config(Path(__file__).with_name("demo.yaml"))
EVALUATION_DATA = "scenes:4000:48"
MINUTES = "2 to 6"  # of one encoder, with its evaluations
SHORT = {"data_path": "scenes:640:48"}
SHORT_EVALUATION_DATA = "scenes:500:48"
PROBE = ["--fast", "--epochs", "30", "--lr", "0.01", "0.1", "1", "--val_freq", "30"]
SCORES = ("20-NN", "linear probe")


def evaluate(
    folder: Path, data_path: str, device: str, seed: int, untrained: bool, run: RunCommand
) -> dict[str, float]:
    """20-NN and linear probe of a checkpoint, in percent; `untrained` keeps its shape, not its weights."""
    shared = ["--pretrained_weights", str(folder / "checkpoint.pth"), "--data_path", data_path, "--device", device]
    shared += ["--seed", str(seed), "--num_workers", "2", *(["--untrained"] if untrained else [])]
    shared += ["--overwrite"]  # results of this run before it was trained further
    knn = run("knn", [*shared, "--nb_knn", "20"])
    linear = run("linear", [*shared, *PROBE])
    return dict(zip(SCORES, (knn["results"][0]["top1"], linear["best"]["top1"]), strict=True))


def train_and_evaluate(readout: str, seed: int, args: argparse.Namespace, run: RunCommand) -> dict[str, Any]:
    """One encoder, and the scores of the untrained and the trained one."""
    options = {**TRAINING, **(SHORT if args.short else {}), "readout": readout}
    data_path = SHORT_EVALUATION_DATA if args.short else EVALUATION_DATA

    def scores(folder: Path) -> dict[str, Any]:
        states = ("untrained", "trained")
        return {s: evaluate(folder, data_path, args.device, seed, untrained=s == "untrained", run=run) for s in states}

    return train_and_score(args, run, "train", options, readout, seed, scores)


def draw(folder: Path, readout: str, data_path: str, device: str, run: RunCommand) -> list[Path]:
    """The pictures of one run: attention on a scene, the atlas of what each slot looks at, the training's curve."""
    shared = ["--pretrained_weights", str(folder / "checkpoint.pth"), "--output_dir", str(folder), "--device", device]
    shared += ["--overwrite"]  # the demo's own figures
    run("attention", shared)
    if readout_kind(readout).shows != "average":  # whose one map is uniform, so there is nothing to search for
        run("attention", [*shared, "--atlas", data_path])
    draw_training_curve(folder / "log.txt", folder / "curve.png")
    return sorted(folder.glob("*.png")) + sorted(folder.glob("*.html"))


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Mean over seeds, with the standard deviation where there are several."""
    lines = [f"{'read-out':<10}{'encoder':<12}" + "".join(f"{name:>20}" for name in SCORES)]
    for readout in dict.fromkeys(run["readout"] for run in runs):
        mine = [run for run in runs if run["readout"] == readout]
        for state in ("untrained", "trained"):
            cells = [spread([run[state][name] for run in mine]) for name in SCORES]
            lines.append(f"{readout:<10}{state:<12}" + "".join(f"{cell:>20}" for cell in cells))
    return "\n".join(lines)


def demo(args: argparse.Namespace, run: RunCommand) -> list[dict[str, Any]]:
    """Train, evaluate, draw, show the table.

    Args:
        args: the options of `demos.demo_parser`.
        run: (command, words) -> what the command returns.
    """
    choose_models(args, DINO_READOUTS)
    start_demo(args, "demo")
    number, minutes = len(args.seeds) * len(args.models), "1" if args.short else MINUTES
    say(f"training and evaluation of {number} encoder(s), each {minutes} minutes on two free cores")
    runs = [train_and_evaluate(readout, seed, args, run) for seed in args.seeds for readout in args.models]
    data_path = SHORT_EVALUATION_DATA if args.short else EVALUATION_DATA
    pictures = [
        path for done in runs for path in draw(Path(done["folder"]), done["readout"], data_path, args.device, run)
    ]
    finish_demo(args, runs, "held-out scenes, accuracy (chance 10 %)", table(runs))
    say("\n".join(["\npictures:", *(f"  {path}" for path in pictures)]))
    return runs

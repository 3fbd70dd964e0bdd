"""CLIP + SPARO in less than an hour, on a laptop without a GPU: train on the built-in scenes, evaluate, draw the slots.

    make demo-clip                                                     # SPARO
    dino-sparo demo-clip --readouts sparo cls gap_image      # beside CLIP and the paper's CLIP+GAP
    dino-sparo demo-clip --seeds 0 1 2 --output_dir runs/clip-demo

Runs the commands a user would call, in their order, and ends with a table: zero-shot classification of shapes, and
true captions against the same words in another order, both on held-out scenes whose attributes are independent. The
options below are a recipe for a trial, not for accuracy.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dino_sparo.clip.config import towers_of
from dino_sparo.image_text.scene_recipe import CLIP_READOUTS, OPTIMISATION, TOWERS
from dino_sparo.readout_table import readout_kind
from dino_sparo.runtime.demos import RunCommand, finish_demo, option_words, spread, start_demo, timed_run

TRAINING = {
    "data_path": "scenes:25600:48",
    **TOWERS,
    **CLIP_READOUTS,
    **OPTIMISATION,
    "epochs": "20",
    "warmup_steps": "200",
    "zero_shot_freq": "1",
    "zero_shot_path": "scenes:1000:48",
    "num_workers": "1",
}
ZERO_SHOT_DATA, NUM_PAIRS, IMAGE_SIZE = "scenes:4000:48", 2000, 48
SHORT = {
    "data_path": "scenes:640:48",
    "batch_size": "64",
    "epochs": "2",
    "warmup_steps": "5",
    "zero_shot_path": "scenes:100:48",
}
SHORT_ZERO_SHOT_DATA, SHORT_NUM_PAIRS = "scenes:100:48", 20
# Score -> what guessing gives, percent.
CHANCE = {"zero-shot shape": 10.0, "swapped objects": 50.0, "swapped attributes": 50.0}


def train_and_evaluate(
    readout: str, seed: int, pairs: Path, args: argparse.Namespace, run: RunCommand
) -> dict[str, Any]:
    """Train one model and evaluate it.

    Args:
        readout: of both towers.
        seed: of the run.
        pairs: folder of true and false captions.
        args: the demo's options.
        run: (command, words) -> what the command returns.

    Returns:
        Scores in percent, and seconds.
    """
    options = {**TRAINING, **(SHORT if args.short else {}), "readout": readout, "seed": seed, "device": args.device}
    data_path = SHORT_ZERO_SHOT_DATA if args.short else ZERO_SHOT_DATA

    def scores(folder: Path) -> dict[str, float]:
        model = option_words({"pretrained_weights": folder / "checkpoint.pth", "device": args.device, "num_workers": 1})
        classified = run("zero-shot", [*model, "--data_path", data_path])
        compared = run("sugarcrepe", [*model, "--data_path", str(pairs)])["splits"]
        found = (classified["top1"], *(compared[split]["accuracy"] for split in ("swap_obj", "swap_att")))
        return dict(zip(CHANCE, found, strict=True))

    return timed_run(
        args, readout, seed, lambda folder: run("train-clip", option_words({**options, "output_dir": folder})), scores
    )


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Mean over seeds, with the standard deviation where there are several; the last line is what guessing gives."""
    lines = [f"{'read-out':<12}" + "".join(f"{name:>22}" for name in CHANCE)]
    for readout in dict.fromkeys(run["readout"] for run in runs):
        mine = [run for run in runs if run["readout"] == readout]
        lines.append(f"{readout:<12}" + "".join(f"{spread([run[name] for run in mine]):>22}" for name in CHANCE))
    return "\n".join([*lines, f"{'guessing':<12}" + "".join(f"{chance:>20.1f} %" for chance in CHANCE.values())])


def demo(args: argparse.Namespace, run: RunCommand) -> list[dict[str, Any]]:
    """Train, evaluate, draw, show the table.

    Args:
        args: the options of `demos.demo_parser`.
        run: (command, words) -> what the command returns.
    """
    start_demo(args, "clip-demo")
    folder = Path(args.output_dir)
    pairs, num_pairs = folder / "pairs", SHORT_NUM_PAIRS if args.short else NUM_PAIRS
    run("scene-pairs", option_words({"output_dir": pairs, "num_pairs": num_pairs, "image_size": IMAGE_SIZE}))
    runs = [train_and_evaluate(readout, seed, pairs, args, run) for seed in args.seeds for readout in args.readouts]
    for done in runs:
        if readout_kind(towers_of(done["readout"]).image).has_slots:
            weights = str(Path(done["folder"]) / "checkpoint.pth")
            run("pictures", ["--pretrained_weights", weights, "--device", args.device])
    finish_demo(args, runs, "held-out scenes, accuracy", table(runs))
    return runs

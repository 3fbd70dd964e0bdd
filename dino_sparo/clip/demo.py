"""CLIP + SPARO in minutes, on a laptop without a GPU: train on the built-in scenes, evaluate, draw the slots.

    make demo-clip                                                     # SPARO
    dino-sparo demo-clip --readouts sparo cls gap_image      # beside CLIP and the paper's CLIP+GAP
    dino-sparo demo-clip --seeds 0 1 2 --output_dir runs/clip-demo

Runs the commands a user would call, in their order, and ends with a table: zero-shot classification of shapes, and
true captions against the same words in another order, both on held-out scenes whose attributes are independent. The
options below are a recipe for a trial, not for accuracy.
"""

import argparse
from pathlib import Path
from typing import Any

from dino_sparo.clip.config import towers_of
from dino_sparo.image_text.choices import CLIP_READOUTS, OPTIMISATION, SCENE_TOWERS
from dino_sparo.image_text.demos import IMAGE_SIZE, draw_run, evaluation_data, scene_scores, score_table
from dino_sparo.models.readouts import readout_kind
from dino_sparo.runtime.demos import RunCommand, finish_demo, option_words, start_demo, timed_run

TRAINING = {
    "data_path": "scenes:25600:48",
    **SCENE_TOWERS,
    **CLIP_READOUTS,
    **OPTIMISATION,
    # Patches of 12 px take less than half the time of patches of 8.
    "patch_size": "12",
    "epochs": "14",
    "warmup_steps": "200",
    "zero_shot_freq": "1",
    "zero_shot_path": "scenes:1000:48",
    "num_workers": "1",
}
SHORT = {
    "data_path": "scenes:640:48",
    "batch_size": "64",
    "epochs": "2",
    "warmup_steps": "5",
    "zero_shot_path": "scenes:100:48",
}


def train_and_evaluate(
    readout: str, seed: int, data_path: str, pairs: Path, args: argparse.Namespace, run: RunCommand
) -> dict[str, Any]:
    """Train one model and evaluate it.

    Args:
        readout: of both towers.
        seed: of the run.
        data_path: scenes to classify.
        pairs: folder of true and false captions.
        args: the demo's options.
        run: (command, words) -> what the command returns.

    Returns:
        Scores in percent, and seconds.
    """
    options = {**TRAINING, **(SHORT if args.short else {}), "readout": readout, "seed": seed, "device": args.device}

    def train(folder: Path) -> None:
        run("train-clip", option_words({**options, "output_dir": folder}))

    return timed_run(
        args, readout, seed, train, lambda folder: scene_scores(folder, data_path, pairs, args.device, run)
    )


def demo(args: argparse.Namespace, run: RunCommand) -> list[dict[str, Any]]:
    """Train, evaluate, draw, show the table.

    Args:
        args: the options of `demos.demo_parser`.
        run: (command, words) -> what the command returns.
    """
    start_demo(args, "clip-demo")
    data_path, pairs, words = evaluation_data(args, run)
    runs = [
        train_and_evaluate(readout, seed, data_path, pairs, args, run)
        for seed in args.seeds
        for readout in args.readouts
    ]
    for done in runs:
        if readout_kind(towers_of(done["readout"]).image).has_slots:
            # A training image has 4 x 4 patches, too few for a picture.
            draw_run("pictures", done, args.device, run, image_size=2 * IMAGE_SIZE)
    finish_demo(args, runs, words, score_table(runs))
    return runs

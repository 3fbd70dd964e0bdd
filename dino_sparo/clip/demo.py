"""CLIP + SPARO in minutes, on a laptop without a GPU: train on the built-in scenes, evaluate, draw the slots.

    make demo-clip                                                     # SPARO
    dino-sparo demo --method clip --models sparo cls gap_image         # beside CLIP and the paper's CLIP+GAP
    dino-sparo demo --method clip --seeds 0 1 2 --output_dir runs/clip-demo

Runs the commands a user would call, in their order, and ends with a table: zero-shot classification of shapes, and
true captions against the same words in another order, both on held-out scenes whose attributes are independent. The
options below are a recipe for a trial, not for accuracy.
"""

import argparse
from typing import Any

from dino_sparo.clip.config import towers_of
from dino_sparo.clip.options import TOWERS
from dino_sparo.image_text.demos import CLIP_READOUTS, IMAGE_SIZE, SCENE_RECIPE, DemoModel, compare_models
from dino_sparo.models.readouts import readout_kind
from dino_sparo.runtime.demos import RunCommand, choose_models, start_demo

TRAINING = {
    "data_path": "scenes:25600:48",
    **SCENE_RECIPE,
    **CLIP_READOUTS,
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


def demo(args: argparse.Namespace, run: RunCommand) -> list[dict[str, Any]]:
    """Train, evaluate, draw, show the table."""
    choose_models(args, TOWERS)
    start_demo(args, "clip-demo")
    options = {**TRAINING, **(SHORT if args.short else {})}
    models = {}
    for readout in args.models:
        has_slots = readout_kind(towers_of(readout).image).has_slots
        # A training image has 4 x 4 patches, too few for a picture.
        pictures = ("pictures", "--img_size", str(2 * IMAGE_SIZE)) if has_slots else ()
        models[readout] = DemoModel("train-clip", {**options, "readout": readout}, pictures)
    return compare_models(args, run, models)

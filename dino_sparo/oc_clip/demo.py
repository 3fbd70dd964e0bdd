"""OC-CLIP beside CLIP in minutes, on a laptop without a GPU: train on the built-in scenes, evaluate, draw the entities.

    make demo-oc-clip                                                 # OC-CLIP, CLIP and CLIP + SPARO
    dino-sparo demo --method oc-clip --models oc_clip --seeds 0 1 2 --output_dir runs/oc-demo

All models have the same towers and see the same images and captions, as often, in batches of one size. OC-CLIP gets the
scene graphs of the captions too; the parser `templates` reads them from the captions' words. Runs the commands a user
would call, in their order, and ends with CLIP's table. The options below are a recipe for a trial, not for
accuracy: CLIP learns slowly, and gets no longer than OC-CLIP.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from dino_sparo.data.scenes.graphs import INDEPENDENT
from dino_sparo.data.scenes.images import Scenes
from dino_sparo.image_text.demos import CLIP_READOUTS, IMAGE_SIZE, SCENE_RECIPE, DemoModel, compare_models
from dino_sparo.image_text.prompts import scene_templates
from dino_sparo.runtime.demos import RunCommand, choose_models, start_demo
from dino_sparo.runtime.lock import create_output_dir

OC_CLIP, TABLE = "oc_clip", "train.jsonl"
SHARED = {
    **SCENE_RECIPE,
    "epochs": "3",
    "batch_size": "64",
    "warmup_steps": "40",
    "precision": "fp32",
    "num_workers": "1",
}
SHORT = {"epochs": "1", "warmup_steps": "2"}
# Model -> the command that trains it, and its own options.
MODELS: dict[str, tuple[str, dict[str, str]]] = {
    # With "all", the false graphs also say "sand on star", which no image shows: L_rel needs no "left of" to be small.
    OC_CLIP: ("train-oc-clip", {"preset": "oc-scenes", "rel_negatives": "one"}),
    "cls": ("train-clip", {"readout": "cls", **CLIP_READOUTS}),
    "sparo": ("train-clip", {"readout": "sparo", **CLIP_READOUTS}),
}
NUM_TRAINING, SHORT_NUM_TRAINING = 12800, 640


def write_training_pairs(folder: Path, num_images: int) -> None:
    """Scenes with their complete captions, as a table.

    `--data_path scenes` leaves attributes out of most captions, so that shapes are learned; this takes more images.
    """
    scenes = Scenes(num_images, IMAGE_SIZE, ties=INDEPENDENT)
    create_output_dir(folder / "train")
    with (folder / TABLE).open("w") as file:
        for index in range(num_images):
            name = f"train/{index:06d}.png"
            scenes.read(index).save(folder / name)
            file.write(json.dumps({"image": name, "caption": scenes.caption(index)}) + "\n")


def write_templates(folder: Path) -> Path:
    """The zero-shot captions of the scenes without their backgrounds, one per line; returns the file.

    OC-CLIP takes a class as one entity, and an entity of the scenes is a noun phrase such as "red striped star".
    """
    path = folder / "entity_templates.txt"
    path.write_text("".join(template.rpartition(" on ")[0] + "\n" for template in scene_templates()))
    return path


def demo(args: argparse.Namespace, run: RunCommand) -> list[dict[str, Any]]:
    """Train, evaluate, draw, show the table."""
    choose_models(args, MODELS, tuple(MODELS))
    start_demo(args, "oc-clip-demo")
    folder = Path(args.output_dir)
    write_training_pairs(folder, SHORT_NUM_TRAINING if args.short else NUM_TRAINING)
    shared = {**SHARED, **(SHORT if args.short else {}), "data_path": folder / TABLE}
    models = {}
    for name in args.models:
        command, own = MODELS[name]
        is_oc = name == OC_CLIP
        templates = str(write_templates(folder)) if is_oc else "auto"
        models[name] = DemoModel(command, {**shared, **own}, ("oc-pictures",) if is_oc else (), templates)
    return compare_models(args, run, models, "model", "model")

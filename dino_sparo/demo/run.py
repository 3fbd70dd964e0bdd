"""A recipe -> trained models, a table of their scores, pictures: the whole way in minutes, on a laptop without a GPU.

    make demo                                                                # DINO + SPARO; `make demo-clip` and others
    dino-sparo demo --method clip --models sparo cls gap_image               # beside CLIP and the paper's CLIP+GAP
    dino-sparo demo --method oc-clip --models oc_clip --seeds 0 1 2 --output_dir runs/oc-demo

Runs the commands a user would run, in their order. A recipe is a YAML file beside this one:

    folder, minutes, title     folder below output/, minutes of one model on two free cores, title of the table
    models                     name -> its training command, unless `command` names one for all, and its own options
    default                    models without --models
    training                   options of all trainings
    num_training_pairs         scenes with complete captions, written before the training
    images, num_pairs          held-out scenes, and true and false captions, to evaluate with
    states                     encoders to evaluate: untrained, trained
    evaluation, evaluations    options of all evaluations; command, options and scores: name -> its keys in the result
    curve                      if given, the curve of the training is drawn
    pictures                   command, models and options of the pictures
    short                      what --short replaces

In options stand {folder} for that of the demo, {run} for that of the model, {pairs}, {images} and {seed}.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import yaml

from dino_sparo.data.scenes.graphs import INDEPENDENT
from dino_sparo.data.scenes.images import Scenes
from dino_sparo.draw.plots import draw_training_curve
from dino_sparo.runtime.cli import option_words, say
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.lock import create_output_dir

# A command's name and its words -> what it returns; see `dino_sparo.__main__.run`.
RunCommand = Callable[[str, Sequence[str]], Any]
Recipe = dict[str, Any]

IMAGE_SIZE = 48
TRAINING_TABLE = "train.jsonl"


def read_recipe(method: str, is_short: bool = False) -> Recipe:
    """The recipe of a method; every value is a text, as on a command line."""
    text = Path(__file__).with_name(f"{method}.yaml").read_text(encoding="utf-8")
    recipe: Recipe = yaml.load(text, yaml.BaseLoader)
    short = recipe.pop("short")
    return {**recipe, **short, "training": recipe["training"] | short["training"]} if is_short else recipe


def demo(args: argparse.Namespace, run: RunCommand) -> list[dict[str, Any]]:
    """Train, evaluate and draw each model with each seed; write demo.json and show the table.

    Args:
        args: the options of `demo_parser`.
        run: runs a command.
    """
    recipe = read_recipe(args.method, args.short)
    models = args.models or recipe["default"]
    if unknown := [model for model in models if model not in recipe["models"]]:
        raise UserError(f"--models {' '.join(unknown)}: choose among {', '.join(sorted(recipe['models']))}")
    start_demo(args, recipe["folder"])
    minutes = "1" if args.short else recipe["minutes"]
    number = len(args.seeds) * len(models)
    say(f"training and evaluation of {number} model(s), each {minutes} minutes on two free cores")
    values = write_data(Path(args.output_dir), recipe, run)
    runs = [train_and_evaluate(recipe, model, seed, args, values, run) for seed in args.seeds for model in models]
    pictures = [picture for done in runs for picture in draw(recipe, done, args, values, run)]
    (Path(args.output_dir) / "demo.json").write_text(json.dumps(runs, indent=1))
    title, total = recipe["title"].format(**recipe), sum(done["total_s"] for done in runs) / 60
    say(f"\n{title}; seeds {args.seeds}, {total:.1f} minutes\n\n{table(runs, recipe)}")
    say("\n".join(["\npictures:", *(f"  {path}" for path in pictures)]))
    return runs


def start_demo(args: argparse.Namespace, name: str) -> None:
    """Choose the folder, `output/NAME` or `output/NAME-short`, and how many threads compute.

    The demos' networks are so small that half of the cores compute them fastest, while the others prepare images.
    """
    if args.output_dir is None:
        args.output_dir = f"output/{name}-short" if args.short else f"output/{name}"
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))


def write_data(folder: Path, recipe: Recipe, run: RunCommand) -> dict[str, str]:
    """Write the pairs to train on and to evaluate with, if the recipe names any; returns the values for options."""
    values = {"folder": str(folder), "pairs": str(folder / "pairs"), "images": recipe["images"]}
    if "num_training_pairs" in recipe:
        write_training_pairs(folder, int(recipe["num_training_pairs"]))
    if "num_pairs" in recipe:
        write_pairs(Path(values["pairs"]), int(recipe["num_pairs"]), run)
    return values


def write_training_pairs(folder: Path, num_images: int) -> None:
    """Scenes with their complete captions, as a table.

    `--data_path scenes` leaves attributes out of most captions, so that shapes are learned; this takes more images.
    """
    scenes = Scenes(num_images, IMAGE_SIZE, ties=INDEPENDENT)
    create_output_dir(folder / "train")
    with (folder / TRAINING_TABLE).open("w") as file:
        for index in range(num_images):
            name = f"train/{index:06d}.png"
            scenes.read(index).save(folder / name)
            file.write(json.dumps({"image": name, "caption": scenes.caption(index)}) + "\n")


def write_pairs(folder: Path, num_pairs: int, run: RunCommand) -> None:
    """Write true and false captions of held-out scenes into a folder."""
    options = {"output_dir": folder, "num_pairs": num_pairs, "img_size": IMAGE_SIZE, "overwrite": "true"}
    run("scene-pairs", option_words(options))


def filled(options: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Options with values in place of {names}."""
    return {name: text if isinstance(text, list) else text.format(**values) for name, text in options.items()}


def steps_for(recipe: Recipe, key: str, model: str) -> list[dict[str, Any]]:
    """The evaluations or pictures of a model."""
    return [step for step in recipe[key] if model in step.get("models", recipe["models"])]


def train_and_evaluate(
    recipe: Recipe, model: str, seed: int, args: argparse.Namespace, values: Mapping[str, str], run: RunCommand
) -> dict[str, Any]:
    """Train one model and evaluate it: model, seed, folder, seconds, and the scores of each state."""
    folder = Path(args.output_dir) / f"{model}_seed{seed}"
    options = {**recipe["training"], **recipe["models"][model]}
    command = options.pop("command", recipe.get("command"))
    of_this_run = {"seed": seed, "device": args.device, "output_dir": folder}
    begin = time.monotonic()
    run(command, option_words({**filled(options, values), **of_this_run}))
    trained_s = time.monotonic() - begin
    scores = {
        state: evaluate(recipe, model, folder, {**values, "seed": seed}, args.device, run, state == "untrained")
        for state in recipe["states"]
    }
    times = {"training_s": trained_s, "total_s": time.monotonic() - begin}
    return {"model": model, "seed": seed, **scores, **times, "folder": str(folder)}


def evaluate(
    recipe: Recipe,
    model: str,
    folder: Path,
    values: Mapping[str, Any],
    device: str,
    run: RunCommand,
    untrained: bool = False,
) -> dict[str, float]:
    """Scores of the checkpoint in a run's folder, in percent; `untrained` keeps its shape, not its weights."""
    shared = {"pretrained_weights": folder / "checkpoint.pth", "device": device, "overwrite": "true"}
    shared |= {**recipe["evaluation"], **({"untrained": "true"} if untrained else {})}
    scores: dict[str, float] = {}
    for step in steps_for(recipe, "evaluations", model):
        result = run(step["command"], option_words({**shared, **filled(step["options"], values)}))
        scores |= {name: reduce(_entry, keys, result) for name, keys in step["scores"].items()}
    return scores


def _entry(part: Any, key: str) -> Any:
    """An entry of a list or a dictionary."""
    return part[int(key)] if isinstance(part, list) else part[key]


def draw(
    recipe: Recipe, done: Mapping[str, Any], args: argparse.Namespace, values: Mapping[str, str], run: RunCommand
) -> list[Path]:
    """Draw the pictures of one run; returns all that are in its folder."""
    folder = Path(done["folder"])
    shared = {"pretrained_weights": folder / "checkpoint.pth", "device": args.device, "overwrite": "true"}
    for step in steps_for(recipe, "pictures", done["model"]):
        options = filled(step.get("options", {}), {**values, "run": folder})
        run(step["command"], option_words({**shared, **options}))
    if "curve" in recipe:
        draw_training_curve(folder, folder / "curve.png")
    return sorted([*folder.glob("*.png"), *folder.glob("*.html")])


def spread(values: Sequence[int | float], unit: str = " %") -> str:
    """Mean, and with several values the standard deviation."""
    mean = f"{statistics.mean(values):.1f}{unit}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.1f}"


def table(runs: Sequence[Mapping[str, Any]], recipe: Recipe) -> str:
    """Mean over seeds, with the standard deviation where there are several; the last line is what guessing gives."""
    chance, states = recipe["chance"], recipe["states"]
    labels = {
        (model, state): f"{model} ({state})" if len(states) > 1 else model
        for model in dict.fromkeys(done["model"] for done in runs)
        for state in states
    }
    width = max(map(len, ["guessing", *labels.values()])) + 2
    lines = [" " * width + "".join(f"{name:>22}" for name in chance)]
    for (model, state), label in labels.items():
        scores = [done[state] for done in runs if done["model"] == model]
        lines.append(f"{label:<{width}}" + "".join(f"{spread([one[name] for one in scores]):>22}" for name in chance))
    return "\n".join([*lines, f"{'guessing':<{width}}" + "".join(f"{float(c):>20.1f} %" for c in chance.values())])

"""Shared parts of the demos of image-text objectives: scores on the built-in scenes, and their table."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dino_sparo.image_text.choices import SCENE_TOWERS
from dino_sparo.runtime.demos import RunCommand, option_words, spread

IMAGE_SIZE = int(SCENE_TOWERS["img_size"])
# Score -> what guessing gives, percent.
CHANCE = {"zero-shot shape": 10.0, "swapped objects": 50.0, "swapped attributes": 50.0}


NUM_IMAGES, NUM_PAIRS = 4000, 2000  # scenes that are classified, pairs of captions that are compared
SHORT_NUM_IMAGES, SHORT_NUM_PAIRS = 100, 20  # with --short


def evaluation_data(args: argparse.Namespace, run: RunCommand) -> tuple[str, Path, str]:
    """Evaluation data of all models: scenes to classify, the folder of captions to compare, and both in words."""
    num_images, num_pairs = (SHORT_NUM_IMAGES, SHORT_NUM_PAIRS) if args.short else (NUM_IMAGES, NUM_PAIRS)
    pairs = write_pairs(Path(args.output_dir), num_pairs, run)
    words = f"accuracy on {num_images:,} held-out scenes and {num_pairs:,} pairs of captions"
    return f"scenes:{num_images}:{IMAGE_SIZE}", pairs, words


def draw_run(command: str, done: Mapping[str, Any], device: str, run: RunCommand, **options: Any) -> None:
    """Draw a run's model by a command."""
    model = {"pretrained_weights": Path(done["folder"]) / "checkpoint.pth", "device": device}
    run(command, option_words({**model, **options}))


def write_pairs(folder: Path, num_pairs: int, run: RunCommand) -> Path:
    """True and false captions of held-out scenes; returns their folder."""
    pairs = folder / "pairs"
    run("scene-pairs", option_words({"output_dir": pairs, "num_pairs": num_pairs, "image_size": IMAGE_SIZE}))
    return pairs


def scene_scores(
    folder: Path, data_path: str, pairs: Path, device: str, run: RunCommand, templates: str = "auto"
) -> dict[str, float]:
    """Scores of a trained model, in percent.

    Args:
        folder: of the run.
        data_path: scenes to classify by their shape.
        pairs: folder of true and false captions.
        device: where to compute.
        run: (command, words) -> what the command returns.
        templates: of zero-shot classification.
    """
    model = option_words({"pretrained_weights": folder / "checkpoint.pth", "device": device, "num_workers": 1})
    classified = run("zero-shot", [*model, "--data_path", data_path, "--templates", templates])
    compared = run("sugarcrepe", [*model, "--data_path", str(pairs)])["splits"]
    scores = (classified["top1"], *(compared[split]["accuracy"] for split in ("swap_obj", "swap_att")))
    return dict(zip(CHANCE, scores, strict=True))


def score_table(runs: Sequence[dict[str, Any]], kind: str = "readout", title: str = "read-out") -> str:
    """Mean over seeds, with the standard deviation where there are several; the last line is what guessing gives.

    Args:
        runs: of `demos.timed_run`, with scores of `scene_scores`.
        kind: of `demos.timed_run`.
        title: of the first column.
    """
    lines = [f"{title:<12}" + "".join(f"{name:>22}" for name in CHANCE)]
    for model in dict.fromkeys(run[kind] for run in runs):
        mine = [run for run in runs if run[kind] == model]
        lines.append(f"{model:<12}" + "".join(f"{spread([run[name] for run in mine]):>22}" for name in CHANCE))
    return "\n".join([*lines, f"{'guessing':<12}" + "".join(f"{chance:>20.1f} %" for chance in CHANCE.values())])

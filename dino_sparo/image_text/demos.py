"""The demos of image-text objectives: models of the built-in scenes are trained, evaluated, drawn and compared."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dino_sparo.runtime.demos import RunCommand, finish_demo, option_words, spread, train_and_score

# A recipe for models of the built-in scenes, trained from scratch on a few CPU cores: for trials, not for accuracy.
# Demos and studies share it, so that the models they compare have the same towers and the same optimizer.
SCENE_RECIPE: dict[str, Any] = {
    "arch": "vit_micro",
    "patch_size": 8,
    "img_size": 48,
    "text_width": 64,
    "text_heads": 2,
    "text_layers": 3,
    "context_length": 20,
    "batch_size": "256",
    "lr": "0.0015",
    "weight_decay": "0.1",
    "clip_grad": "1",
}
# Encodings of one width, with slots and without.
CLIP_READOUTS = {"sparo_slots": "16", "sparo_slot_dim": "16", "sparo_key_dim": "32", "embed_dim": "256"}

IMAGE_SIZE: int = SCENE_RECIPE["img_size"]
# Score -> what guessing gives, percent.
CHANCE = {"zero-shot shape": 10.0, "swapped objects": 50.0, "swapped attributes": 50.0}
NUM_IMAGES, NUM_PAIRS = 4000, 2000  # scenes that are classified, pairs of captions that are compared
SHORT_NUM_IMAGES, SHORT_NUM_PAIRS = 100, 20  # with --short


class DemoModel(NamedTuple):
    """A model of a demo: training command and options, the command that draws it, if any, and zero-shot templates."""

    command: str
    options: Mapping[str, object]
    pictures: Sequence[str] = ()
    templates: str = "auto"


def compare_models(
    args: argparse.Namespace,
    run: RunCommand,
    models: Mapping[str, DemoModel],
    kind: str = "readout",
    title: str = "read-out",
) -> list[dict[str, Any]]:
    """Train, evaluate and draw each model with each seed; show the table.

    `kind` is that of `train_and_score`, `title` that of the table's first column.
    """
    num_images, num_pairs = (SHORT_NUM_IMAGES, SHORT_NUM_PAIRS) if args.short else (NUM_IMAGES, NUM_PAIRS)
    data_path, pairs = f"scenes:{num_images}:{IMAGE_SIZE}", write_pairs(Path(args.output_dir), num_pairs, run)

    def train_and_evaluate(name: str, seed: int) -> dict[str, Any]:
        command, options, _, templates = models[name]

        def scores(folder: Path) -> dict[str, float]:
            return scene_scores(folder, data_path, pairs, args.device, run, templates)

        return train_and_score(args, run, command, options, name, seed, scores, kind)

    runs = [train_and_evaluate(name, seed) for seed in args.seeds for name in models]
    for done in runs:
        if pictures := models[done[kind]].pictures:
            model = {
                "pretrained_weights": Path(done["folder"]) / "checkpoint.pth",
                "device": args.device,
                "overwrite": "true",
            }
            run(pictures[0], [*option_words(model), *pictures[1:]])
    words = f"accuracy on {num_images:,} held-out scenes and {num_pairs:,} pairs of captions"
    finish_demo(args, runs, words, score_table(runs, kind, title))
    return runs


def write_pairs(folder: Path, num_pairs: int, run: RunCommand) -> Path:
    """True and false captions of held-out scenes; returns their folder."""
    pairs = folder / "pairs"
    options = {"output_dir": pairs, "num_pairs": num_pairs, "img_size": IMAGE_SIZE, "overwrite": "true"}
    run("scene-pairs", option_words(options))
    return pairs


def scene_scores(
    folder: Path, data_path: str, pairs: Path, device: str, run: RunCommand, templates: str = "auto"
) -> dict[str, float]:
    """Scores in percent of the model in a run's folder: on scenes to classify, and on a folder of `write_pairs`."""
    model = option_words(
        {"pretrained_weights": folder / "checkpoint.pth", "device": device, "num_workers": 1, "overwrite": "true"}
    )
    classified = run("zero-shot", [*model, "--data_path", data_path, "--templates", templates])
    (result,) = run("compositional", [*model, "--data_root", str(pairs), "--benchmarks", "scene-pairs"])
    compared = result["benchmarks"]["scene-pairs"]["splits"]
    scores = (classified["top1"], *(compared[split]["accuracy"] for split in ("swap_obj", "swap_att")))
    return dict(zip(CHANCE, scores, strict=True))


def score_table(runs: Sequence[dict[str, Any]], kind: str = "readout", title: str = "read-out") -> str:
    """Mean over seeds, with the standard deviation where there are several; the last line is what guessing gives."""
    lines = [f"{title:<12}" + "".join(f"{name:>22}" for name in CHANCE)]
    for model in dict.fromkeys(run[kind] for run in runs):
        mine = [run for run in runs if run[kind] == model]
        lines.append(f"{model:<12}" + "".join(f"{spread([run[name] for run in mine]):>22}" for name in CHANCE))
    return "\n".join([*lines, f"{'guessing':<12}" + "".join(f"{chance:>20.1f} %" for chance in CHANCE.values())])

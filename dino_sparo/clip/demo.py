"""CLIP + SPARO in less than an hour, on a laptop without a GPU: train on the built-in scenes, evaluate, draw the slots.

    make demo-clip                                                     # SPARO
    python -m dino_sparo.clip.demo --readouts sparo cls gap_image      # beside CLIP and the paper's CLIP+GAP
    python -m dino_sparo.clip.demo --seeds 0 1 2 --output_dir runs/clip-demo

Calls the commands a user would call, in their order, and ends with a table: zero-shot classification of shapes, and
true captions against the same words in another order, both on held-out scenes whose attributes are independent. The
options below are a recipe for a trial, not for accuracy.
"""

from dino_sparo.cli import demo_parser
from dino_sparo.clip.choices import READOUTS, SLOTTED

if __name__ == "__main__":
    # --help and mistakes are answered before torch is imported.
    demo_parser("python -m dino_sparo.clip.demo", __doc__, READOUTS).parse_args()

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dino_sparo.clip import pictures, scene_pairs, sugarcrepe, train, zero_shot

TRAINING = {
    "data_path": "scenes:25600:48",
    "arch": "vit_micro",
    "patch_size": "8",
    "img_size": "48",
    "text_width": "64",
    "text_heads": "2",
    "text_layers": "3",
    "context_length": "20",
    "sparo_slots": "16",
    "sparo_slot_dim": "16",
    "sparo_key_dim": "32",
    "embed_dim": "256",
    "epochs": "20",
    "batch_size": "256",
    "lr": "0.0015",
    "warmup_steps": "200",
    "weight_decay": "0.1",
    "clip_grad": "1",
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


def words(options: Mapping[str, object]) -> list[str]:
    """Options as a command line."""
    return [word for name, value in options.items() for word in (f"--{name}", *str(value).split())]


def run(readout: str, seed: int, pairs: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Train one model and evaluate it.

    Args:
        readout: of both towers.
        seed: of the run.
        pairs: folder of true and false captions.
        args: the demo's options.

    Returns:
        Scores in percent, and seconds.
    """
    folder = Path(args.output_dir) / f"{readout}_seed{seed}"
    begin = time.monotonic()
    options = {**TRAINING, **(SHORT if args.short else {}), "readout": readout, "seed": seed}
    train.main(words({**options, "device": args.device, "output_dir": folder}))
    trained_s = time.monotonic() - begin
    model = words({"pretrained_weights": folder / "checkpoint.pth", "device": args.device, "num_workers": 1})
    classified = zero_shot.main([*model, "--data_path", SHORT_ZERO_SHOT_DATA if args.short else ZERO_SHOT_DATA])
    compared = sugarcrepe.main([*model, "--data_path", str(pairs)])["splits"]
    scores = (classified["top1"], *(compared[split]["accuracy"] for split in ("swap_obj", "swap_att")))
    return {
        "readout": readout,
        "seed": seed,
        **dict(zip(CHANCE, scores, strict=True)),
        "training_s": trained_s,
        "total_s": time.monotonic() - begin,
        "folder": str(folder),
    }


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Mean over seeds, with the standard deviation where there are several; the last line is what guessing gives."""
    lines = [f"{'read-out':<12}" + "".join(f"{name:>22}" for name in CHANCE)]
    for readout in dict.fromkeys(run["readout"] for run in runs):
        mine = [run for run in runs if run["readout"] == readout]
        lines.append(f"{readout:<12}" + "".join(f"{_spread([run[name] for run in mine]):>22}" for name in CHANCE))
    return "\n".join([*lines, f"{'guessing':<12}" + "".join(f"{chance:>20.1f} %" for chance in CHANCE.values())])


def _spread(values: Sequence[float]) -> str:
    mean = f"{statistics.mean(values):.1f} %"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.1f}"


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Train, evaluate, draw, print the table.

    Args:
        argv: options; None: the command line's.
    """
    args = demo_parser("python -m dino_sparo.clip.demo", __doc__, READOUTS).parse_args(argv)
    if args.output_dir is None:
        args.output_dir = "output/clip-demo-short" if args.short else "output/clip-demo"
    # Both towers are so small that half of the cores compute them fastest, while the others draw images.
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    folder = Path(args.output_dir)
    pairs = scene_pairs.write_scene_pairs(folder / "pairs", SHORT_NUM_PAIRS if args.short else NUM_PAIRS, IMAGE_SIZE)
    runs = [run(readout, seed, pairs, args) for seed in args.seeds for readout in args.readouts]
    for done in runs:
        if done["readout"] in SLOTTED:
            weights = str(Path(done["folder"]) / "checkpoint.pth")
            pictures.main(["--pretrained_weights", weights, "--device", args.device])
    (folder / "demo.json").write_text(json.dumps(runs, indent=1))
    seconds = sum(done["total_s"] for done in runs)
    sys.stdout.write(f"\nheld-out scenes, accuracy, seeds {args.seeds}, {seconds / 60:.1f} minutes\n\n{table(runs)}\n")
    return runs


if __name__ == "__main__":
    main()

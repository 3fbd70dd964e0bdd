"""Encoders of the studies `scenes` and `cifar10`, and the `demo` encoder -> all probes on their frozen tokens.

    python -m studies probes --output_dir output/studies --data_path cifar10

`linear` reads the encoding, and `random slots` that of a SPARO which was only initialised on the same tokens: both
read-outs are frozen. `sparo`, `ep` and `attention` are trained with the labels. Needs the checkpoints of `python -m
studies scenes` and `cifar10` in the output folder; encoders without one are skipped. Writes a small result file per
encoder and prints a table.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from dino_sparo.demo.run import RunCommand, read_recipe
from dino_sparo.evaluation.linear.attentive import best_of_each
from dino_sparo.runtime.cli import Option, option_words
from dino_sparo.runtime.files import git_hash, write_json
from studies.plans import EQUAL_RATE, SLOT_SIZES, STUDIES, with_random_slots
from studies.report import markdown, mean_and_deviation
from studies.runs import FOLDERS, Run, is_finished, reported_rows

ROWS = {"scenes": (EQUAL_RATE, "sparo"), "cifar10": ("cls", "sparo")}  # rows of the studies' tables
DEMO = "demo"  # the encoder in this package, of the scenes
PROBES, RANDOM = ("linear", "sparo", "ep", "attention"), "random slots"
SIZES = {option: read_recipe("dino")["training"][option] for option in SLOT_SIZES.values()}
# 90 epochs of the paper have 28,000 steps with batches of 4096; these are few images in small batches.
RATES = [1, 3, 10, 30, 100]
PROTOCOL = {
    "epochs": 30,
    "val_freq": 30,
    "lr": " ".join(map(str, RATES)),
    "img_size": 32,
    "num_workers": 0,
    "device": "cpu",
    **SIZES,
}


OPTIONS = {
    "study": {
        "data_path": Option(None, "Class folders of CIFAR-10; without them the encoders of scenes are probed."),
        **FOLDERS,
        "report": Option(False, "Probe nothing: the table of the results so far."),
    }
}


def measure(weights: Path | str, folder: Path, seed: int, data: str, command: RunCommand) -> dict[str, dict[str, Any]]:
    """Probe -> accuracy with its best learning rate, and numbers of parameters."""
    shared = [*option_words({"data_path": data, "seed": seed, **PROTOCOL, "lr": RATES}), "--fast"]
    random = with_random_slots(weights, folder, seed)

    def best(weights: Path | str, part: str, *probes: str) -> dict[str, dict[str, Any]]:
        place = option_words({"pretrained_weights": weights, "output_dir": folder / part})
        rows = command("linear", [*shared, *place, "--probe", *probes])["results"]
        names = ("lr", "top1", "parameters", "readout_parameters")
        return {probe: {name: row[name] for name in names} for probe, row in best_of_each(rows).items()}

    return {**best(weights, "probes", *PROBES), RANDOM: best(random, "random_slots", "linear")["linear"]}


def measure_missing(args: argparse.Namespace, command: RunCommand) -> None:
    """Probe all encoders that have a checkpoint and no result yet."""
    folder = args.results / "probes"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [(DEMO, DEMO, 0, DEMO, args.output_dir / DEMO, "scenes:4000:48")]
    for study, rows in ROWS.items():
        known = reported_rows(study, args.results)
        for run, row in [(Run(study, *known[row], seed), row) for seed in range(3) for row in rows if row in known]:
            place = args.output_dir / study / run.name
            if is_finished(place, run) and (study == "scenes" or args.data_path):
                place.parent.mkdir(parents=True, exist_ok=True)
                _, data = STUDIES[study].prepare(args.data_path if study != "scenes" else None, place.parent, command)
                wanted.append(
                    (f"{study}, {row}", f"{study}_{run.name}", run.seed, place / "checkpoint.pth", place, data)
                )
    for name, file_name, seed, weights, place, data in wanted:
        path = folder / f"{file_name}.json"
        if not path.exists():
            place.mkdir(parents=True, exist_ok=True)
            probes = measure(weights, place, seed, data, command)
            protocol = {option: str(value) for option, value in PROTOCOL.items()}
            write_json(
                {"encoder": name, "seed": seed, "protocol": protocol, "probes": probes, "commit": git_hash()}, path
            )


def report(results: Path) -> str:
    """Top-1 of each probe, mean ± standard deviation over seeds, and its number of trained parameters."""
    found = [json.loads(path.read_text()) for path in sorted((results / "probes").glob("*.json"))]
    rows = []
    for encoder in dict.fromkeys(result["encoder"] for result in found):
        accuracies = [result["probes"] for result in found if result["encoder"] == encoder]
        cells = [mean_and_deviation([probes[probe]["top1"] for probes in accuracies]) for probe in (*PROBES, RANDOM)]
        rows.append([encoder, str(len(accuracies)), *cells])
    if not found:
        return ""
    last = found[-1]
    counts = [f"{last['probes'][probe]['parameters']:,}" for probe in (*PROBES, RANDOM)]
    return markdown(
        ["top-1 %", "seeds", *PROBES, RANDOM], [*rows, [f"trained parameters ({last['encoder']})", "", *counts]]
    )

"""Encoders of the study `scenes` -> what they are good for, frozen or fine-tuned, by our own commands on drawn data.

    python -m studies uses --output_dir output/studies

For what do SPARO's slots help, and for what not? Compares `sparo` with `cls` at an equal learning rate, and with random
slots: a SPARO that was only initialised, on the blocks of `cls`. Needs the checkpoints of `python -m studies scenes` in
the output folder; encoders without one are skipped. Writes a small result file per encoder and prints a table.
"""

import argparse
import csv
import itertools
import json
import shutil
import statistics
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from dino_sparo.data.scenes.patterns import BACKGROUNDS, COLOURS, SHAPES, TEXTURES
from dino_sparo.demo.run import RunCommand
from dino_sparo.evaluation.embed.store import load_embeddings
from dino_sparo.runtime.cli import Option, option_words
from dino_sparo.runtime.files import git_hash, write_json
from dino_sparo.weights.results import scores_of
from studies.drawn_uses import SIZE, draw_data
from studies.plans import DINO_DEMO, EQUAL_RATE, SLOT_SIZES, with_random_slots
from studies.report import differences, markdown, mean_and_deviation, t_interval
from studies.runs import FOLDERS, Run, is_finished, reported_rows

STUDY, NUM_SEEDS = "scenes", 3
SPARO, RANDOM = "sparo", f"{EQUAL_RATE}, random slots"
# What a command reads of an encoder. The tokens of random slots are those of `cls`, which has no slots.
ENCODING, TOKENS, MAPS, SLOTS = "encoding", "tokens", "maps", "slots"
READ = {EQUAL_RATE: (ENCODING, TOKENS, MAPS), SPARO: (ENCODING, TOKENS, MAPS, SLOTS), RANDOM: (ENCODING, MAPS, SLOTS)}
TAGS = {"shape": SHAPES, "colour": COLOURS, "texture": TEXTURES, "background": BACKGROUNDS}
ALL_SLOTS = ",".join(map(str, range(int(DINO_DEMO["training"][SLOT_SIZES["num_slots"]]))))
NEIGHBOURS = 10
SEARCH = f"search, same class among {NEIGHBOURS}"
SEARCHED = f"scenes:1000:{SIZE}"
STRENGTH = 1000  # inverse regularisation of logistic regressions; encodings of length one need little


class Use(NamedTuple):
    """A command and its scores.

    Attributes:
        reads: the part of the encoder that it reads.
        command: its name.
        options: its options besides encoder and folder; `{data}` is the folder of the drawn data.
        scores: what is measured -> scores in the command's result; their mean stands in the table.
    """

    reads: str
    command: str
    options: dict[str, Any]
    scores: dict[str, list[str]]

    @property
    def rows(self) -> dict[str, list[str]]:
        """Row of the table -> scores."""
        return {f"{self.command}, {name}": scores for name, scores in self.scores.items()}


FEW_LABELS = {"data_path": f"scenes:1000:{SIZE}", "img_size": 32, "label_share": [0.02, 0.2], "classifiers": "logistic"}
FEW_SCORES = {f"{share} per class: top-1": [f"logistic, {share} % of labels"] for share in (2, 20)}
TABLE = {"data_path": "{data}/table.csv", "img_size": 32, "tags": "tags", "binary": "two", "numbers": ["x", "y"]}
TABLE_SCORES = {f"{tag}: mAP": [f"AP {name}" for name in names] for tag, names in TAGS.items()}
TABLE_SCORES |= {"two objects: AP": ["AP two"], "position: R²": ["R2 x", "R2 y"]}
SAME_CLASS = {"data_path": SEARCHED, "dataset": "labelled", "imsize": 32, "batch_size_per_gpu": 100}
COPIES = {"data_path": "{data}/copies", "imsize": 32, "batch_size_per_gpu": 100}
FINETUNE = {"data_path": f"scenes:500:{SIZE}", "img_size": 32, "epochs": 5, "val_freq": 5, "batch_size_per_gpu": 20}
UNMIXED = {"lr": 0.01, "mixup": 0, "cutmix": 0, "random_erasing": 0}
MASKS = {number: {"data_path": f"scenes:{number}:{SIZE}", "val_path": f"scenes:100:{SIZE}"} for number in (20, 100)}
CLIPS = {"data_path": "{data}/clips", "img_size": 192}
USES = (
    Use(ENCODING, "few-labels", {**FEW_LABELS, "C": STRENGTH}, FEW_SCORES),
    Use(ENCODING, "table-probe", {**TABLE, "C": STRENGTH, "resamples": 1}, TABLE_SCORES),
    Use(ENCODING, "image-retrieval", SAME_CLASS, {"same class: mAP": ["mAP same class"]}),
    Use(ENCODING, "copy-detection", {**COPIES, "parts": ["encoding"]}, {"encoding: mAP": ["mAP strong"]}),
    Use(
        ENCODING,
        "copy-detection",
        {**COPIES, "parts": ["encoding", "gem"]},
        {"encoding and patches: mAP": ["mAP strong"]},
    ),
    Use(ENCODING, "finetune", {**FINETUNE, **UNMIXED}, {"500 labels: top-1": ["fine-tuned top-1"]}),
    *(
        Use(TOKENS, "segment", {**masks, "img_size": 64, "steps": 200}, {f"{number} masks: mIoU": ["mIoU"]})
        for number, masks in MASKS.items()
    ),
    Use(
        MAPS,
        "segment",
        {**MASKS[100], "img_size": 64, "steps": 1, "slot_masks": "true"},
        {"slots or heads as masks: mIoU": ["mIoU of slots"]},
    ),
    Use(TOKENS, "video-segmentation", CLIPS, {"tokens: J&F": ["J&F-Mean"]}),
    Use(SLOTS, "video-segmentation", {**CLIPS, "slots": ALL_SLOTS}, {"slots of patches: J&F": ["J&F-Mean"]}),
)


OPTIONS = {"study": {**FOLDERS, "report": Option(False, "Measure nothing: the table of the results so far.")}}


def measure(
    weights: Path, folder: Path, data: Path, seed: int, read: Collection[str], command: RunCommand
) -> dict[str, float]:
    """Row of the table -> percent, for the commands that read these parts of the encoder."""
    scores: dict[str, float] = {}
    for number, use in enumerate(USES):
        if use.reads not in read:
            continue
        out = folder / f"{number}_{use.command}"
        options = {"pretrained_weights": weights, "output_dir": out, "device": "cpu", **use.options}
        options |= {} if use.command == "video-segmentation" else {"seed": seed, "num_workers": 0}
        words = [word.replace("{data}", str(data)) for word in option_words(options)]
        result = command(use.command, words)
        if result is None:  # of a training
            result = json.loads(next(out.glob("finetune_*.json")).read_text())
        found = {score.name: score.value * (1 if score.unit else 100) for score in scores_of(result) if score.value}
        scores |= {row: statistics.mean(found[name] for name in names) for row, names in use.rows.items()}
    return scores | {SEARCH: search_score(weights, folder / "search", command)}


def search_score(weights: Path, folder: Path, command: RunCommand) -> float:
    """Share of the nearest images that have the class of their query, percent."""
    options = {"pretrained_weights": weights, "data_path": SEARCHED, "img_size": 32, "output_dir": folder}
    command("embed", option_words({**options, "device": "cpu", "num_workers": 0}))
    command("search", [str(folder), *option_words({"images": folder, "top": NEIGHBOURS, "device": "cpu"})])
    index = load_embeddings(folder).index
    label_of = dict(zip(index["path"], index["label"], strict=True))
    with (folder / "search.csv").open(newline="") as file:
        return 100 * statistics.mean(label_of[row["query"]] == row["label"] for row in csv.DictReader(file))


def measure_missing(args: argparse.Namespace, command: RunCommand) -> None:
    """Measure all encoders that have a checkpoint and no result yet."""
    results, place = args.results / "uses", args.output_dir / "uses"
    results.mkdir(parents=True, exist_ok=True)
    known = reported_rows(STUDY, args.results)
    for (row, read), seed in itertools.product(READ.items(), range(NUM_SEEDS)):
        run = Run(STUDY, *known[SPARO if row == SPARO else EQUAL_RATE], seed)
        trained = args.output_dir / STUDY / run.name
        folder = place / (f"{run.name}_random_slots" if row == RANDOM else run.name)
        path = results / f"{folder.name}.json"
        if path.exists() or not is_finished(trained, run):
            continue
        shutil.rmtree(folder, ignore_errors=True)  # of a study that was interrupted
        folder.mkdir(parents=True)
        weights, before = trained / "checkpoint.pth", time.process_time()
        if row == RANDOM:
            weights = with_random_slots(weights, folder, seed)
        scores = measure(weights, folder, draw_data(place / "data"), seed, read, command)
        seconds = round(time.process_time() - before)
        write_json({"encoder": row, "seed": seed, "scores": scores, "processor_s": seconds, "commit": git_hash()}, path)


def report(results: Path) -> str:
    """Scores in percent, mean ± standard deviation over seeds, and differences paired by seed."""
    found: dict[str, dict[int, dict[str, float]]] = {row: {} for row in READ}
    for path in sorted((results / "uses").glob("*.json")):
        result = json.loads(path.read_text())
        found[result["encoder"]][result["seed"]] = result["scores"]
    lines = []
    for name in dict.fromkeys([*(row for use in USES for row in use.rows), SEARCH]):
        of = {row: {seed: scores[name] for seed, scores in found[row].items() if name in scores} for row in READ}
        cells = [mean_and_deviation([*by_seed.values()]) for by_seed in of.values()]
        gains = [t_interval([*differences(of[SPARO], of[other]).values()]) for other in (EQUAL_RATE, RANDOM)]
        lines += [[name, *cells, *gains]] if any(cells) else []
    titles = ["%", *READ, f"{SPARO} - cls [95 % interval]", f"{SPARO} - random slots [95 % interval]"]
    return markdown(titles, lines) if lines else ""

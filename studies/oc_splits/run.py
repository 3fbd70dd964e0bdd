"""OC-CLIP's controlled experiment: models trained on some pairs of objects, asked about others.

    dino-sparo oc-splits                                                   # attributes, half of the pairs, seed 0
    dino-sparo oc-splits --split spatial --seeds 0 1 2 --models clip-cls clip-swapped oc-clip oc-clip-no-rel
    dino-sparo oc-splits --grid                                            # all shares, and their heat map

Runs the commands a user would call. For every cell (a share of seen pairs, a share of hard ones) and every seed the
split is written once (`split_data.py`); each model is trained on its pairs and asked all questions, with their own
pictures and with shuffled ones. A model whose result is there is not trained again, and a training that was interrupted
goes on. Ends with a table of every test and writes splits.json; `docs/oc_clip_splits.md` says how to read it.
Source: OC-CLIP, section 4.1, appendix A.5, figures 2 and 7.
"""

import argparse
import json
import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from dino_sparo.draw.sheet import require_matplotlib
from dino_sparo.image_text.scene_recipe import OPTIMISATION, SCENE_TOWERS
from dino_sparo.oc_clip.split_data import SplitSizes, write_split
from dino_sparo.oc_clip.split_design import TESTS, Split
from dino_sparo.oc_clip.splits_figure import draw_heat_maps
from dino_sparo.oc_clip.splits_options import HARD_SHARES, MODELS, SEEN_SHARES, TRUE_GRAPHS, Amount, chosen_amount
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.demos import RunCommand, option_words, spread, start_demo
from dino_sparo.runtime.logs import setup_logging
from dino_sparo.runtime.records import versions, write_json
from dino_sparo.weights.checkpoint import load_checkpoint

logger = logging.getLogger(__name__)

CHANCE = 50.0
WARMUP_SHARE = 10  # one of so many steps
NAME_WIDTH, COLUMN_WIDTH = 24, 15


def run_splits(args: argparse.Namespace, run: RunCommand) -> list[dict[str, Any]]:
    """Write, train, ask, show the table.

    Args:
        args: the options of `splits_options.py`.
        run: (command, words) -> what the command returns.

    Returns:
        One result per cell, seed and model, as splits.json holds them.

    Raises:
        ValueError: options that do not fit, or the folder holds results of others.
        ImportError: --grid without matplotlib.
    """
    amount = chosen_amount(args)
    if args.grid:
        require_matplotlib()
    start_demo(args, f"oc-splits-{args.split}")
    setup_logging()
    cells = list(product(SEEN_SHARES, HARD_SHARES)) if args.grid else [(args.seen, args.hard)]
    results = []
    for (seen, hard), seed in product(cells, args.seeds):
        split = Split(args.split, seed, seen, hard)
        folder = Path(args.output_dir) / f"seen{seen}_hard{hard}_seed{seed}"
        sizes = SplitSizes(amount.num_images, amount.num_questions, int(SCENE_TOWERS["img_size"]))
        data = write_split(folder / "data", split, sizes)
        results += [model_result(name, split, data, folder / name, amount, args, run) for name in args.models]
    path = Path(args.output_dir) / "splits.json"
    write_json({"experiment": f"oc-splits {args.split}", "results": results, "versions": versions()}, path)
    for seen, hard in cells:
        of_cell = [result for result in results if (result["seen"], result["hard"]) == (seen, hard)]
        say(f"\n{args.split}, {seen} % of the pairs seen, {hard} % of these hard, seeds {args.seeds}, accuracy in %\n")
        say(table(of_cell))
    if args.grid:
        draw_heat_maps(results, path.with_suffix(".png"))
    say(f"\n{path}")
    return results


def recipe(name: str, seed: int, amount: Amount) -> dict[str, str]:
    """Options of a model's training, without paths.

    Args:
        name: a key of MODELS.
        seed: of weights and order.
        amount: how much is trained.
    """
    steps = amount.epochs * (amount.num_images // amount.batch_size)
    return {
        **SCENE_TOWERS,
        **OPTIMISATION,
        "batch_size": str(amount.batch_size),
        "epochs": str(amount.epochs),
        "warmup_steps": str(max(1, steps // WARMUP_SHARE)),
        "seed": str(seed),
        "precision": "fp32",  # alike: what `auto` means differs between the commands
        **MODELS[name].options,
    }


def model_result(
    name: str, split: Split, data: Path, folder: Path, amount: Amount, args: argparse.Namespace, run: RunCommand
) -> dict[str, Any]:
    """Train a model and ask it, or take the result that is there.

    Args:
        name: a key of MODELS.
        split: what it is trained on.
        data: the split's folder.
        folder: of the model.
        amount: how much is trained and asked.
        args: the experiment's options.
        run: (command, words) -> what the command returns.

    Raises:
        ValueError: the folder holds a result of other options.
    """
    asked: dict[str, Any] = {
        "model": name,
        **{"split": split.kind, "seen": split.seen, "hard": split.hard, "seed": split.seed},
        **{"num_images": amount.num_images, "num_questions": amount.num_questions},
        **{"command": MODELS[name].command, "graphs": MODELS[name].graphs, "options": recipe(name, split.seed, amount)},
    }
    path = folder / "result.json"
    if path.is_file():
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if {key: result.get(key) for key in asked} != asked:
            raise ValueError(f"{path} is the result of other options; give the same ones, or another --output_dir")
        logger.info("%s is there", path)
        return result
    devices = {"device": args.device, "num_workers": args.num_workers}
    pairs, weights = data / "train" / "pairs.jsonl", folder / "checkpoint.pth"
    is_resumed = weights.is_file()
    begin = time.monotonic()
    paths = {"data_path": pairs, "output_dir": folder, **_graphs(name, pairs), **devices}
    run(MODELS[name].command, option_words({**asked["options"], **paths}))
    seconds = time.monotonic() - begin

    def answers(part: str) -> dict[str, Any]:
        files = {"data_path": data / part, "images": data / "tests" / "images", "output": folder / f"{part}.json"}
        graphs = _graphs(name, data / "tests" / "graphs.jsonl")
        splits = run("sugarcrepe", option_words({"pretrained_weights": weights, **files, **graphs, **devices}))[
            "splits"
        ]
        return {test: {"accuracy": each["accuracy"], "num_ties": each["num_ties"]} for test, each in splits.items()}

    result = {
        **asked,
        "tests": answers("tests"),
        "shuffled": answers("shuffled"),
        "num_parameters": count_parameters(weights),
        # Of a training that was interrupted only the last part was measured.
        "training_s": None if is_resumed else seconds,
    }
    write_json(result, path)
    return result


def _graphs(name: str, file: Path) -> dict[str, object]:
    """The option of OC-CLIP's commands for the graphs of captions."""
    graphs = MODELS[name].graphs
    return {} if graphs is None else {"graphs": file if graphs == TRUE_GRAPHS else graphs}


def count_parameters(weights: Path) -> int:
    """Numbers in a checkpoint's `model`, the temperature included."""
    return sum(tensor.numel() for tensor in load_checkpoint(weights)["model"].values())


def columns_of(kind: str) -> list[str]:
    """What the table shows: the two first tests, their mean, the others."""
    first, second, *others = TESTS[kind]
    return [first, second, "mean of both", *others]


def accuracies(answers: Mapping[str, Mapping[str, float]], kind: str) -> list[float]:
    """Accuracies of one model, in the order of `columns_of`.

    Args:
        answers: test -> accuracy in percent and ties.
        kind: of the split.
    """
    first, second, *others = (answers[test]["accuracy"] for test in TESTS[kind])
    return [first, second, (first + second) / 2, *others]


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Results of one cell: each model's tests and, below, the same with shuffled pictures; then what needs no picture.

    Mean over seeds and, with several, the standard deviation.

    Args:
        results: of `model_result`, in any order.
    """
    kind = results[0]["split"]
    columns = columns_of(kind)
    lines = [f"{'':<{NAME_WIDTH}}" + "".join(f"{name:>{COLUMN_WIDTH}}" for name in (*columns, "parameters", "seconds"))]
    for name in dict.fromkeys(result["model"] for result in results):
        own = [result for result in results if result["model"] == name]
        times = [result["training_s"] for result in own]
        costs = [f"{own[0]['num_parameters']:,}", "-" if None in times else f"{statistics.mean(times):.0f}"]
        for label, part, more in ((name, "tests", costs), ("  shuffled pictures", "shuffled", [])):
            values = zip(*(accuracies(result[part], kind) for result in own), strict=True)
            lines.append(_row(label, [spread(each, "") for each in values] + more))
    prior = [100.0, 0.0, *[CHANCE] * (len(columns) - 2)]
    lines.append(_row("captions alone, at best", [f"{value:.1f}" for value in prior]))
    return "\n".join([*lines, _row("guessing", [f"{CHANCE:.1f}"] * len(columns))])


def _row(label: str, values: Sequence[str]) -> str:
    return f"{label:<{NAME_WIDTH}}" + "".join(f"{value:>{COLUMN_WIDTH}}" for value in values)

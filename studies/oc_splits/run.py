"""OC-CLIP's controlled experiment: train models on some pairs of objects, ask about seen and unseen pairs.

    python -m studies oc-splits                                             # attributes, half of the pairs, seed 0
    python -m studies oc-splits --split spatial --seeds 0 1 2 --models clip-cls clip-swapped oc-clip oc-clip-no-rel
    python -m studies oc-splits --curve                                     # and the learning curves

Each cell (a share of seen pairs and a share of hard ones) and seed has one split on disk (`data.py`). Every model is
trained on it by its own command, and `compositional` asks all questions, once with their own pictures and once with
shuffled ones. A model with a result is skipped; an interrupted training resumes. Prints a table and writes
splits.json; `docs/oc_clip_splits.md` explains them. Source: OC-CLIP, section 4.1, appendix A.5, figures 2 and 7.
"""

import argparse
import json
import logging
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dino_sparo.demo.run import IMAGE_SIZE, RunCommand, read_recipe, spread, start_demo
from dino_sparo.draw.plots import colour_of, panels
from dino_sparo.draw.sheet import SOFT, require_matplotlib
from dino_sparo.draw.tables import text_table
from dino_sparo.runtime.cli import Option, option_words, positive_int, positive_number, say
from dino_sparo.runtime.files import read_log, versions, write_json
from dino_sparo.runtime.logs import setup_logging
from dino_sparo.weights.checkpoint import load_checkpoint
from studies.oc_splits.data import write_split
from studies.oc_splits.design import TESTS, Split

logger = logging.getLogger(__name__)

SEEN_SHARES, HARD_SHARES = (20, 50, 80), (0, 25, 50)
TRUE_GRAPHS, PARSED_GRAPHS = "true", "templates"
CHANCE = 50.0
WARMUP_SHARE = 10  # warmup takes one step in ten


class Model(NamedTuple):
    """One model of the experiment.

    Attributes:
        command: that trains it.
        options: in addition to the options that all models share.
        graphs: source of OC-CLIP's graphs, TRUE_GRAPHS or a parser; None for a model of captions.
    """

    command: str
    options: dict[str, str]
    graphs: str | None = None


_DEMO = read_recipe("oc-clip")
_CLS, _SPARO = (
    {option: value for option, value in _DEMO["models"][name].items() if option != "command"}
    for name in ("cls", "sparo")
)
SCENE_RECIPE = {
    option: value for option, value in _DEMO["training"].items() if option not in ("data_path", "num_workers")
}
_OC_CLIP = {"preset": "oc-scenes"}
MODELS: dict[str, Model] = {
    "clip-cls": Model("train-clip", _CLS),
    "clip-swapped": Model("train-clip", {**_CLS, "negative_key": "negative_caption"}),
    "clip-sparo": Model("train-clip", _SPARO),
    "oc-clip": Model("train-oc-clip", _OC_CLIP, TRUE_GRAPHS),
    "oc-clip-no-rel": Model("train-oc-clip", {**_OC_CLIP, "rel_loss_weight": "0"}, TRUE_GRAPHS),
    "oc-clip-no-competition": Model(
        "train-oc-clip", {**_OC_CLIP, "competition": "keys", "num_default": "0"}, TRUE_GRAPHS
    ),
    "oc-clip-parsed": Model("train-oc-clip", _OC_CLIP, PARSED_GRAPHS),
}


class Amount(NamedTuple):
    """Numbers of pictures, of questions per test, of epochs, and of pictures per step."""

    num_images: int
    num_questions: int
    epochs: int
    batch_size: int


FULL = Amount(num_images=12_800, num_questions=1000, epochs=8, batch_size=128)
SHORT = Amount(num_images=960, num_questions=40, epochs=1, batch_size=64)


def _amount(text: str, name: str) -> Option:
    """An option for one of the numbers of `Amount`."""
    defaults = f"By default {getattr(FULL, name)}, with --short {getattr(SHORT, name)}."
    return Option(None, f"{text} {defaults}", positive_int)


OPTIONS = {
    "split: what is trained on": {
        "split": Option(
            "attribute",
            "What the false captions exchange: the colours of two objects, or the two objects of a relation.",
            choices=list(TESTS),
        ),
        "seen": Option(50, "Percent of the pairs of shapes that are trained on.", choices=SEEN_SHARES),
        "hard": Option(
            0,
            "Percent of these pairs that are also trained on with colours, or objects, exchanged.",
            choices=HARD_SHARES,
        ),
        "num_images": _amount("Training pictures.", "num_images"),
        "num_questions": _amount("Questions per test.", "num_questions"),
    },
    "models: what is compared": {
        "models": Option(
            ["clip-cls", "clip-sparo", "oc-clip"],
            "All share towers, pictures, steps and optimizer. Controls: CLIP with each pair's false caption in the "
            "batch; OC-CLIP without the local loss, without competition and default tokens, and with parsed graphs "
            "instead of true graphs.",
            choices=list(MODELS),
        ),
        "seeds": Option([0], "One training run each; sets split, weights and order."),
        "epochs": _amount("Epochs of each training.", "epochs"),
        "batch_size": _amount("Pictures of a step.", "batch_size"),
        "lr": Option(float(SCENE_RECIPE["lr"]), "Learning rate after the warm-up.", positive_number),
        "img_size": Option(IMAGE_SIZE, "Side of the pictures, pixels.", positive_int),
        "init_from": Option(
            None,
            "Start the image encoders of all models from these weights of DINO; demo: the encoder of the package, "
            "which was trained on pictures of all pairs, without captions.",
        ),
        "curve": Option(False, "Keep the checkpoint of every epoch, ask the first two tests of each, and draw curves."),
        "short": Option(False, "Train for seconds, to see that all parts work."),
    },
    "run": {
        "output_dir": Option(None, "Folder of all files; by default in output/."),
        "device": Option("cpu", "auto, cpu or cuda."),
        "num_workers": Option(1, "Processes that load images."),
    },
}


def run_splits(args: argparse.Namespace, run: RunCommand) -> list[dict[str, Any]]:
    """Write the splits, train and ask the models, print the tables; returns the results of splits.json."""
    chosen = {name: value for name in Amount._fields if (value := getattr(args, name))}
    amount = (SHORT if args.short else FULL)._replace(**chosen)
    args.seeds, args.models = [*dict.fromkeys(args.seeds)], [*dict.fromkeys(args.models)]
    if args.curve:
        require_matplotlib()
    start_demo(args, f"oc-splits-{args.split}")
    setup_logging()
    results = []
    for seed in args.seeds:
        split = Split(args.split, seed, args.seen, args.hard)
        folder = Path(args.output_dir) / f"seen{args.seen}_hard{args.hard}_seed{seed}"
        data = write_split(folder / "data", split, amount.num_images, amount.num_questions, args.img_size)
        results += [model_result(name, split, data, folder / name, amount, args, run) for name in args.models]
    path = Path(args.output_dir) / "splits.json"
    write_json({"experiment": f"oc-splits {args.split}", "results": results, "versions": versions()}, path)
    head = f"{args.split}, {args.seen} % of the pairs seen, {args.hard} % of these hard, seeds {args.seeds}"
    say(f"\n{head}, accuracy in %\n\n{table(results)}")
    if args.curve:
        draw_curves(results, path.with_name("curves.png"))
    say(f"\n{path}")
    return results


def recipe(name: str, seed: int, amount: Amount, args: argparse.Namespace) -> dict[str, str]:
    """Training options of a model, without paths."""
    steps = amount.epochs * (amount.num_images // amount.batch_size)
    options = {
        **SCENE_RECIPE,
        **({"init_from": args.init_from, "pre_norm": "false"} if args.init_from else {}),
        "img_size": args.img_size,
        "lr": args.lr,
        "batch_size": amount.batch_size,
        "epochs": amount.epochs,
        "warmup_steps": max(1, steps // WARMUP_SHARE),
        "seed": seed,
        "precision": "fp32",  # the commands resolve `auto` differently
        **MODELS[name].options,
    }
    return {option: str(value) for option, value in options.items()}


def model_result(
    name: str, split: Split, data: Path, folder: Path, amount: Amount, args: argparse.Namespace, run: RunCommand
) -> dict[str, Any]:
    """Result of one model: read from its folder, or trained and asked now.

    Raises:
        ValueError: the folder holds a result of other options.
    """
    model, options = MODELS[name], recipe(name, split.seed, amount, args)
    cell = {"split": split.kind, "seen": split.seen, "hard": split.hard, "seed": split.seed}
    sizes = {"num_images": amount.num_images, "num_questions": amount.num_questions}
    training = {"command": model.command, "graphs": model.graphs, "options": options}
    settings: dict[str, Any] = {"model": name, **cell, **sizes, **training}
    path = folder / "result.json"
    devices = {"device": args.device, "num_workers": args.num_workers}
    if path.is_file():
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if {key: result.get(key) for key in settings} != settings:
            raise ValueError(f"{path} is the result of other options; give the same options, or another --output_dir")
        logger.info("%s exists, so the model is skipped", path)
    else:
        pairs, weights = data / "train" / "pairs.jsonl", folder / "checkpoint.pth"
        is_resumed = weights.is_file()
        begin = time.monotonic()
        paths = {"data_path": pairs, "output_dir": folder, **_graphs(name, pairs), **devices}
        checkpoints = {"saveckp_freq": "1"} if args.curve else {}
        run(model.command, option_words({**options, **paths, **checkpoints}))
        seconds = time.monotonic() - begin
        result = {
            **settings,
            "tests": answers(name, weights, data, "tests", devices, run),
            "shuffled": answers(name, weights, data, "shuffled", devices, run),
            "num_parameters": count_parameters(weights),
            "training_s": None if is_resumed else seconds,  # unknown: only the last part of the training was timed
        }
        write_json(result, path)
    if args.curve and "curve" not in result:
        result["curve"] = learning_curve(name, split, data, folder, devices, run)
        write_json(result, path)
    return result


def answers(
    name: str, weights: Path, data: Path, part: str, devices: Mapping[str, object], run: RunCommand
) -> dict[str, Any]:
    """Accuracy and number of ties of every test in a folder of questions; answers are in the folder of the weights."""
    files = {"data_root": data / part, "images": data / "tests" / "images"}
    graphs = _graphs(name, data / "tests" / "graphs.jsonl")
    words = option_words({"pretrained_weights": weights, "benchmarks": "sugarcrepe", **files, **graphs, **devices})
    (result,) = run("compositional", words)
    tests = result["benchmarks"]["SugarCrepe"]["splits"].items()
    return {test: {"accuracy": each["accuracy"], "num_ties": each["num_ties"]} for test, each in tests}


def learning_curve(
    name: str, split: Split, data: Path, folder: Path, devices: Mapping[str, object], run: RunCommand
) -> list[dict[str, float]]:
    """Training loss of each epoch and, where its checkpoint was kept, accuracy of the first two tests, in percent."""
    (data / "curve").mkdir(exist_ok=True)
    for test in split.tests[:2]:
        shutil.copy(data / "tests" / f"{test}.json", data / "curve")
    curve = []
    for epoch in read_log(folder):
        weights = folder / f"checkpoint{epoch['epoch']:04d}.pth"
        found = answers(name, weights, data, "curve", devices, run) if weights.is_file() else {}
        accuracy = {test: each["accuracy"] for test, each in found.items()}
        loss = epoch.get("train_itc_loss", epoch["train_loss"])  # OC-CLIP's is a part of its loss
        curve.append({"step": epoch["step"], "loss": loss, **accuracy})
    return curve


def _graphs(name: str, file: Path) -> dict[str, object]:
    """OC-CLIP's option for the graphs of captions."""
    graphs = MODELS[name].graphs
    return {} if graphs is None else {"graphs": file if graphs == TRUE_GRAPHS else graphs}


def count_parameters(weights: Path) -> int:
    """Number of parameters in a checkpoint's `model`, the temperature included."""
    return sum(tensor.numel() for tensor in load_checkpoint(weights)["model"].values())


def accuracies(answers: Mapping[str, Mapping[str, float]], kind: str) -> list[float]:
    """Accuracies of the first two tests, their mean, and the accuracies of all other tests, in percent."""
    first, second, *others = (answers[test]["accuracy"] for test in TESTS[kind])
    return [first, second, (first + second) / 2, *others]


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Table of one cell: for each model its tests, and below them the same tests with shuffled pictures.

    The last two rows need no picture. Values are means over seeds, with standard deviation where there are several.
    """
    kind = results[0]["split"]
    first, second, *others = TESTS[kind]
    columns = [first, second, "mean of both", *others]
    rows = [["", *columns, "parameters", "seconds"]]
    for name in dict.fromkeys(result["model"] for result in results):
        of_model = [result for result in results if result["model"] == name]
        times = [result["training_s"] for result in of_model]
        costs = [f"{of_model[0]['num_parameters']:,}", "-" if None in times else f"{statistics.mean(times):.0f}"]
        for label, part, more in ((name, "tests", costs), ("  shuffled pictures", "shuffled", ["", ""])):
            values = zip(*(accuracies(result[part], kind) for result in of_model), strict=True)
            rows.append([label, *(spread(each, "") for each in values), *more])
    guesses = [f"{CHANCE:.1f}"] * len(columns)
    rows += [["captions alone, at best", "100.0", "0.0", *guesses[2:], "", ""], ["guessing", *guesses, "", ""]]
    return text_table(rows, num_words=1)


def draw_curves(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Contrastive loss, accuracy on trained forms, and mean of these and their reverse, against steps, as a PNG."""
    first, second = TESTS[results[0]["split"]][:2]
    with panels(path, 1, 3) as ((losses, trained, both),):
        for position, result in enumerate(results):
            curve, name = result["curve"], f"{result['model']}, seed {result['seed']}"
            colour = colour_of(position, len(results))
            losses.plot([e["step"] for e in curve], [e["loss"] for e in curve], ".-", color=colour, label=name)
            points = [e for e in curve if first in e]
            steps = [e["step"] for e in points]
            trained.plot(steps, [e[first] for e in points], ".-", color=colour)
            both.plot(steps, [(e[first] + e[second]) / 2 for e in points], ".-", color=colour)
        losses.set(xlabel="step", ylabel="contrastive loss, nats")
        losses.legend(frameon=False)
        for axis, label in ((trained, first), (both, f"mean of {first} and {second}".replace("_", " "))):
            axis.axhline(CHANCE, color=SOFT, linestyle=":")
            axis.set(xlabel="step", ylabel=f"{label}, %", ylim=(20, 102))

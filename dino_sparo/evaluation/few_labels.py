"""Frozen features and few labels -> accuracy of k-NN, logistic regression and a linear probe, over several draws.

    dino-sparo few-labels --pretrained_weights demo --data_path scenes:2000:48 --label_share 0.05 0.2

A share of the labels is drawn as SimCLR does (section 4.2 of "A simple framework for contrastive learning of visual
representations"): balanced over the classes,

    labels of a class = min(max(1, round(share x training images / classes)), images of the class)

and at random within each class. Each draw takes the first images of a random order, so its smaller shares are parts of
its larger shares. Instead of a share, a file can name the labelled images, such as SimCLR's lists of ImageNet. The
encoder runs once on all images, and all classifiers get the same features of length one.
"""

import argparse
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64

from dino_sparo.data.sources import ImageSource
from dino_sparo.data.sources.tables import open_text
from dino_sparo.draw.tables import text_table
from dino_sparo.evaluation.embed.predict import MAX_STEPS, fit_classifier
from dino_sparo.evaluation.features import Features, image_counts
from dino_sparo.evaluation.knn import classify_shards, open_features
from dino_sparo.evaluation.linear.command import SELECTION
from dino_sparo.evaluation.linear.probe import probe_accuracy, train_on_cached
from dino_sparo.evaluation.result import spread
from dino_sparo.evaluation.task import EncoderTask
from dino_sparo.runtime.faults import UserError, require
from dino_sparo.runtime.files import file_sha256
from dino_sparo.runtime.launch import on_first_process
from dino_sparo.weights.released import take_released_weights
from dino_sparo.weights.results import Score

logger = logging.getLogger(__name__)

PROBE_BATCH = 256
# Task, training and validation images, number of classes, seed -> name of a score -> top-1.
Classifier = Callable[[EncoderTask, Features, Features, int, int], dict[str, float]]


@on_first_process
def evaluate_few_labels(args: argparse.Namespace) -> dict[str, Any]:
    """Evaluate the encoder or the cached features that the options name, write the result, print the table."""
    take_released_weights(args)
    task = EncoderTask.start_alone(args)
    require("sklearn", "logistic regression")
    lists = {str(share): file_sha256(Path(share)) for share in args.label_share if isinstance(share, str)}
    if lists and args.load_features:
        raise UserError(
            f"--label_share {next(iter(lists))} names images, and --load_features has no names: leave one out"
        )
    file, train, val, record = open_features(task, "few_labels", label_lists=lists)
    seeds, rows = range(args.seed, args.seed + args.draws), []
    for share in args.label_share:
        if isinstance(share, str):
            draws = [listed_rows(Path(share), task.splits[0], train)]
        else:
            draws = [draw_labels(train.labels.numpy(force=True), share, seed) for seed in seeds]
        rows += evaluate_draws(task, draws, str(share), train, val)
    result = {
        "evaluation": "few labels",
        "results": rows,
        "rule": "labels balanced over the classes, drawn at random within each; mean and standard deviation over draws",
        "selection": {"linear": SELECTION, "logistic": "cross-validation on the labelled images chooses C"},
        **record,
        "images": {**record.get("images", {}), **image_counts(task.device, train=train, val=val)},
    }
    return file.write(result, table(rows), headline=headline(rows))


def draw_labels(labels: Int64[np.ndarray, " images"], share: float, seed: int) -> Int64[np.ndarray, " drawn"]:
    """Rows of a class-balanced share of the images, ascending."""
    order = np.random.default_rng(seed).permutation(len(labels))
    classes = np.unique(labels)
    number = max(1, round(share * len(labels) / len(classes)))
    return np.sort(np.concatenate([order[labels[order] == each][:number] for each in classes]))


def listed_rows(path: Path, source: ImageSource, train: Features) -> Int64[np.ndarray, " listed"]:
    """Rows of the images in a list, which has a file name or the end of a path in each line."""
    with open_text(str(path)) as file:
        names = [line.strip() for line in file if line.strip()]
    images: dict[str, list[int]] = defaultdict(list)
    for image in range(len(source)):
        images[PurePath(source.location(image)).name].append(image)
    row_of = {image: row for row, image in enumerate(train.indices.tolist())}
    rows, unreadable = set(), 0
    for name in names:
        parts = PurePath(name).parts
        found = [i for i in images.get(parts[-1], []) if PurePath(source.location(i)).parts[-len(parts) :] == parts]
        if len(found) != 1:
            raise UserError(
                f"--label_share {path}: {name} names {len(found)} of the {len(source):,} training images; give one "
                "name per line, with as many folders as are needed"
            )
        unreadable += found[0] not in row_of
        rows |= {row_of[image] for image in found if image in row_of}
    if unreadable:
        logger.warning("%s: %d of the %d images are unreadable, and left out", path, unreadable, len(names))
    if not rows:
        raise UserError(f"--label_share {path} names no readable image; give one name of a file per line")
    return np.array(sorted(rows))


def evaluate_draws(
    task: EncoderTask, draws: Sequence[Int64[np.ndarray, " drawn"]], share: str, train: Features, val: Features
) -> list[dict[str, Any]]:
    """For each of --classifiers top-1 on all validation images, with its spread over the draws."""
    found: dict[str, list[float]] = defaultdict(list)
    num_classes = int(train.labels.max()) + 1
    for seed, drawn in enumerate(draws, task.args.seed):
        rows = torch.from_numpy(drawn).to(train.labels.device)
        some = Features(train.features[rows], train.labels[rows], train.indices[rows])
        for classifier in task.args.classifiers:
            for name, top1 in CLASSIFIERS[classifier](task, some, val, num_classes, seed).items():
                found[name].append(top1)
    counts = {"share": share, "num_labelled": len(draws[0]), "num_classes": len(train.labels[draws[0]].unique())}
    return [{**counts, "classifier": name, "top1": spread(values)} for name, values in found.items()]


def knn(task: EncoderTask, train: Features, val: Features, num_classes: int, seed: int) -> dict[str, float]:
    """Weighted k-NN, which uses no random numbers."""
    neighbours = {k: min(k, len(train.labels)) for k in task.args.nb_knn}
    found = classify_shards(train, val, sorted({*neighbours.values()}), task.args.temperature, task.device)
    return {f"{k}-NN": found[number].top1 for k, number in neighbours.items()}


def logistic(task: EncoderTask, train: Features, val: Features, num_classes: int, seed: int) -> dict[str, float]:
    """Logistic regression; with the first C, unless two classes have two labels for cross-validation."""
    from sklearn.linear_model import LogisticRegression

    strengths = task.args.C
    features, labels = (part.numpy(force=True) for part in (train.features, train.labels))
    numbers = np.unique(labels, return_counts=True)[1]
    if len(numbers) < 2:
        raise UserError("the labelled images are of one class; give more labels")
    if len(strengths) > 1 and (numbers > 1).sum() > 1:
        model = fit_classifier(features, labels.tolist(), strengths, task.args.folds, seed)[0]
    else:
        model = LogisticRegression(C=strengths[0], max_iter=MAX_STEPS).fit(features, labels)
    predicted = model.predict(val.features.numpy(force=True))
    return {"logistic": 100 * float(np.mean(predicted == val.labels.numpy(force=True)))}


def linear(task: EncoderTask, train: Features, val: Features, num_classes: int, seed: int) -> dict[str, float]:
    """The best linear probe of `linear --fast`; features get the length sqrt(F) of a LayerNorm's output."""
    length = train.features.shape[1] ** 0.5
    train = Features(length * train.features, train.labels, train.indices)
    args, batch_size = task.args, min(PROBE_BATCH, len(train.labels))
    probe = train_on_cached(train, num_classes, args.lr, args.epochs, task.device, batch_size, seed)
    return {"linear": max(row["top1"] for row in probe_accuracy(probe, length * val.features, val.labels))}


CLASSIFIERS: dict[str, Classifier] = {"knn": knn, "logistic": logistic, "linear": linear}


def share_name(row: dict[str, Any]) -> str:
    """The share in percent, or the name of the list."""
    share: str = row["share"]
    return f"{100 * float(share):g} %" if share.replace(".", "", 1).isdigit() else Path(share).name


def headline(rows: Sequence[dict[str, Any]]) -> list[Score]:
    """Mean top-1 of each share and classifier, with an interval of one standard deviation to each side."""
    scores = []
    for row in rows:
        mean, std = row["top1"]["mean"], row["top1"]["std"]
        ends = () if std is None else (mean - std, mean + std)
        scores.append(Score(f"{row['classifier']}, {share_name(row)} of labels", mean, "%", *ends))
    return scores


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Accuracies for the terminal."""
    lines = [("labels", "images", "classifier", "top-1 %", "std", "draws")]
    for row in rows:
        top1 = row["top1"]
        std = "" if top1["std"] is None else f"{top1['std']:.2f}"
        words = share_name(row), f"{row['num_labelled']}", row["classifier"]
        lines.append((*words, f"{top1['mean']:.2f}", std, f"{len(top1['draws'])}"))
    return text_table(lines)

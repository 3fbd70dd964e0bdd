"""Encoder and labelled images -> accuracy of each slot alone, and of the best slots together.

    dino-sparo slots study --pretrained_weights output/checkpoint.pth --data_path data/imagenet
    python eval_knn.py    --pretrained_weights output/checkpoint.pth --data_path data/imagenet \
        --slots output/slot_study_checkpoint_imagenet.json

Writes slot_study_WEIGHTS_DATA.json, with accuracies, protocol and the best slots, which every evaluation takes as
--slots, and a plot of that name.

The encoder runs once: slots are columns of its features, so every number equals that of `eval_knn.py` with these
`--slots`. Slots are ranked on the choosing images, a random part of the training images that the other training images
classify. Source of the question: SPARO, section 5.1 and table 4, for CLIP.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from dino_sparo.draw.sheet import require_matplotlib
from dino_sparo.draw.tables import text_table
from dino_sparo.evaluation.features import Features, gather_features, image_counts, require_memory
from dino_sparo.evaluation.knn import classify_shards
from dino_sparo.evaluation.linear.probe import probe_accuracy, train_on_cached
from dino_sparo.evaluation.result import spread
from dino_sparo.evaluation.slots.choice import check_has_slots
from dino_sparo.evaluation.slots.curve import (
    Curve,
    Rows,
    best_slots,
    check_number,
    describe_selection,
    draw_slots,
    number_rule,
)
from dino_sparo.evaluation.task import EncoderTask
from dino_sparo.runtime.collectives import all_reduce_sum
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.launch import is_main, world_size
from dino_sparo.runtime.logs import progress
from dino_sparo.weights.results import scores_in_percent

MAX_CHOOSING_SHARE = 5  # at most one of this many training images chooses
PROBE_BATCH = 256
Accuracies = Callable[[tuple[int, ...]], dict[str, float]]


@dataclass(frozen=True)
class StudyImages:
    """This process' share of the images.

    Attributes:
        train: encodings (images, L*V) as the encoder gives them.
        val: encodings of the validation images.
        chooses: (images,), which training images rank the slots.
        num_slots: L.
        num_classes: of the training images.
        device: where processes talk to each other and probes are trained.
    """

    train: Features
    val: Features
    chooses: Bool[Tensor, " images"]
    num_slots: int
    num_classes: int
    device: torch.device


def choosing_rows(train: Features, num_images: int, num_choosing: int, seed: int) -> Bool[Tensor, " images"]:
    """Mask of the random training images that rank the slots, in this process' share."""
    number = min(num_choosing, num_images // MAX_CHOOSING_SHARE)
    if number < 1:
        raise UserError(
            f"choosing_images={num_choosing} of {num_images} images: at least one must rank the slots, and at most a "
            f"fifth of them may; give 1 or more, and at least {MAX_CHOOSING_SHARE} training images"
        )
    chosen = np.random.default_rng(seed).permutation(num_images)[:number]
    return torch.isin(train.indices, torch.from_numpy(chosen).to(train.indices.device))


def slot_columns(
    features: Features, slots: Sequence[int], num_slots: int, rows: Bool[Tensor, " images"] | None = None
) -> Features:
    """Encodings (images, L*V) -> some slots of some images (rows, k*V), in the order of `slots`, copied once."""
    values = features.features.unflatten(1, (num_slots, -1))
    if rows is None:
        return replace(features, features=values[:, list(slots)].flatten(1))
    columns = torch.tensor(list(slots), device=values.device)
    kept = values[rows.nonzero(), columns].flatten(1)
    return Features(kept, features.labels[rows], features.indices[rows])


def knn_accuracies(images: StudyImages, k: int, temperature: float) -> Accuracies:
    """Slots -> their k-NN accuracy together; repeated calls use a cache."""

    def top1(train: Features, judged: Features) -> float:
        train, judged = train.normalize_(), judged.normalize_()
        return classify_shards(train, judged, [k], temperature, images.device)[k].top1

    @cache
    def accuracies(slots: tuple[int, ...]) -> dict[str, float]:
        rows = (~images.chooses, images.chooses)
        choosing = [slot_columns(images.train, slots, images.num_slots, part) for part in rows]
        held_out = [slot_columns(part, slots, images.num_slots) for part in (images.train, images.val)]
        return {"top1_choosing": top1(*choosing), "top1_held_out": top1(*held_out)}

    return accuracies


def rank_slots(accuracies: Accuracies, num_slots: int) -> list[dict[str, Any]]:
    """Rows `slot`, `top1_choosing`, `top1_held_out` of each slot alone, the best on the choosing images first."""
    rows = [{"slot": slot, **accuracies((slot,))} for slot in progress(range(num_slots), desc="slots alone")]
    return sorted(rows, key=lambda row: (-row["top1_choosing"], row["slot"]))


def random_orders(num_slots: int, num_draws: int, seed: int) -> list[list[int]]:
    """Random orders of the slots."""
    return [np.random.default_rng([seed, draw]).permutation(num_slots).tolist() for draw in range(num_draws)]


def accuracy_curve(
    accuracies: Accuracies, orders: Sequence[Sequence[int]], numbers: Sequence[int]
) -> list[dict[str, Any]]:
    """Accuracy of the first k slots of each order, for some k; the first order is the ranking, the others are random.

    Returns:
        For each k `num_kept`, the ranked slots' accuracies, and `random`, see `spread`.
    """
    curve = []
    for number in progress(numbers, desc="slots together"):
        ranked, *drawn = (accuracies(tuple(sorted(order[:number]))) for order in orders)
        random = spread([row["top1_held_out"] for row in drawn])
        curve.append({"num_kept": number, **ranked, "random": random})
    return curve


def probe_slots(
    images: StudyImages, slots: Sequence[int], epochs: int, learning_rates: Sequence[float], seed: int = 0
) -> dict[str, float]:
    """Accuracy of a linear probe on some slots' values: `lr`, `top1_choosing` and `top1_held_out`.

    Probes are trained on the training images that do not choose, un-augmented. The choosing images select the learning
    rate.
    """
    rows = images.chooses
    train, choosing = (slot_columns(images.train, slots, images.num_slots, part) for part in (~rows, rows))
    val = slot_columns(images.val, slots, images.num_slots)
    train = gather_features(train, images.device)
    batch_size = max(PROBE_BATCH // world_size(), 1)
    probe = train_on_cached(train, images.num_classes, learning_rates, epochs, images.device, batch_size, seed)
    top1 = [row["top1"] for row in probe_accuracy(probe, choosing.features, choosing.labels)]
    best = top1.index(max(top1))
    held_out = probe_accuracy(probe, val.features, val.labels)[best]["top1"]
    return {"lr": learning_rates[best], "top1_choosing": top1[best], "top1_held_out": held_out}


def study_slots(args: argparse.Namespace) -> dict[str, Any]:
    """Study the slots of the encoder that the options name, write result and plot, print the table."""
    task = EncoderTask.start(args)
    require_matplotlib()
    config = task.subject.encoder.config
    check_has_slots(config)
    numbers = kept_numbers(args.numbers, args.keep, config.num_slots)
    file = task.open_result("slot_study")
    images, record = extract(task)
    accuracies = knn_accuracies(images, args.nb_knn, args.temperature)
    ranking = rank_slots(accuracies, images.num_slots)
    orders = [[int(row["slot"]) for row in ranking], *random_orders(images.num_slots, args.draws, args.seed)]
    curve = accuracy_curve(accuracies, orders, numbers)
    probe = cache(lambda slots: probe_slots(images, slots, args.epochs, args.lr, args.seed))
    probes = accuracy_curve(probe, orders, numbers) if args.probe else None
    result = describe(task, ranking, curve, probes) | record
    if is_main():
        draw(result, file.path.with_suffix(".png"))
    names = {"top1_all": f"{args.nb_knn}-NN, all slots", "top1_selected": f"{args.nb_knn}-NN, selected slots"}
    return file.write(result, table(result), headline=scores_in_percent(result, names))


def kept_numbers(numbers: list[int] | None, keep: int | None, num_slots: int) -> list[int]:
    """Numbers of slots to keep, ascending: `numbers` or the powers of two, all slots, and `keep`."""
    extra = [] if keep is None else [keep]
    for name, given in (("keep", extra), ("numbers", numbers or [])):
        for number in given:
            check_number(name, number, num_slots)
    powers = [2**power for power in range(num_slots.bit_length()) if 2**power < num_slots]
    return sorted({*(numbers or powers), num_slots, *extra})


def extract(task: EncoderTask) -> tuple[StudyImages, dict[str, Any]]:
    """This process' share of the encodings, and the record of the images."""
    args, encoder = task.args, task.encoder
    num_train, num_val = map(len, task.splits)
    if args.probe:
        # A probe also needs this process' share, and twice its share of the validation images.
        num_rows = num_train + (num_train + 2 * num_val) // world_size()
        require_memory(num_rows, encoder.encoding_dim, task.storage)
    train, val = map(task.features, task.splits)
    chooses = choosing_rows(train, num_train, args.choosing_images, args.seed)
    images = StudyImages(train, val, chooses, encoder.config.num_slots, task.num_classes, task.device)
    num_choosing = int(all_reduce_sum(chooses.sum().to(task.device)))
    counts = image_counts(task.device, train=train, val=val)
    return images, task.images_record(num_choosing=num_choosing, **counts)


def describe(task: EncoderTask, ranking: Rows, curve: Rows, probes: Rows | None) -> dict[str, Any]:
    """Selection, accuracies and protocol, for the result."""
    args, subject = task.args, task.subject
    probe = {
        "epochs": args.epochs,
        "lr": list(args.lr),
        "rule": "trained on the training images that do not choose, un-augmented; the choosing images select the "
        "learning rate",
        "curve": probes,
    }
    return {
        **describe_selection(ranking, curve, args.keep, subject.record["sha256"]),
        "evaluation": "slots alone and together",
        "rule": {
            "ranking": "top-1 of each slot alone on the choosing images; of equally good slots the first is preferred",
            "number": number_rule(args.keep),
            "choosing": "a random part of the training images, classified by the others; held out: the validation "
            "images, classified by all training images",
            "random": "the first slots of random orders; mean and standard deviation over the orders",
        },
        "knn": {"k": args.nb_knn, "temperature": args.temperature, "similarity": "cosine"},
        "draws": args.draws,
        "seed": args.seed,
        "ranking": ranking,
        "curve": curve,
        "probe": None if probes is None else probe,
        "feature": {
            "name": "slots of the encoding",
            "slot_dim": subject.encoder.config.slot_dim,
            "precision": args.precision,
        },
    }


def chance(result: dict[str, Any]) -> float:
    """Top-1 of guessing among the classes, percent."""
    return 100 / result["images"]["num_classes"]


def curves_of(result: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Name of a classifier -> its curve."""
    probe = {"probe": result["probe"]["curve"]} if result["probe"] else {}
    return {f"{result['knn']['k']}-NN": result["curve"], **probe}


def table(result: dict[str, Any]) -> str:
    """The best slots alone, and accuracy against the number of slots, for the terminal."""
    ranking, images = result["ranking"], result["images"]
    names = {"alone, choosing %": "top1_choosing", "alone, held out %": "top1_held_out"}
    columns = {head: [row[name] for row in ranking] for head, name in names.items()}
    lines = best_slots(columns, [row["slot"] for row in ranking])
    for name, curve in curves_of(result).items():
        rows = [("kept", f"{name}, ranked %", f"{name}, random %")]
        for row in curve:
            mean, std = row["random"]["mean"], row["random"]["std"]
            drawn = f"{mean:.2f}" + ("" if std is None else f" ± {std:.2f}")
            rows.append((f"{row['num_kept']}", f"{row['top1_held_out']:.2f}", drawn))
        lines += ["", text_table(rows)]
    lines += [
        "",
        f"kept {len(result['slots'])} of {result['num_slots']} slots: {result['top1_selected']:.2f} % "
        f"{result['knn']['k']}-NN; all slots: {result['top1_all']:.2f} %; chance: {chance(result):.2f} %",
        f"ranked on {images['num_choosing']:,} training images, measured on {images['num_val']:,} held-out images; "
        f"random: {result['draws']} orders",
    ]
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Plot accuracy against the number of slots kept, and the accuracy of each slot alone."""
    curves = []
    for name, rows in curves_of(result).items():
        means, deviations = [row["random"]["mean"] for row in rows], [row["random"]["std"] or 0.0 for row in rows]
        random = ("random, mean ± std", means, deviations)
        curves.append(Curve(f"Slots together: {name}", f"{name} top-1", rows, "ranked", *random, chance(result)))
    label = "slot, best first on the choosing images"
    draw_slots(path, result, curves, "top1_held_out", chance(result), label)

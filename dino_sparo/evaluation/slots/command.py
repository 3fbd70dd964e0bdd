"""Checkpoint and labelled images -> what each slot alone knows, and how many slots are needed.

    dino-sparo slots study --pretrained_weights output/checkpoint.pth --data_path data/imagenet
    python eval_knn.py    --pretrained_weights output/checkpoint.pth --data_path data/imagenet \
        --slots output/slot_study.json

Prints a table, writes slot_study.json (accuracies, how they were found, and the best slots, which every evaluation
takes as --slots) and slot_study.png. `evaluation/slots/study.py` says how the slots are ranked.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from dino_sparo.draw.sheet import require_matplotlib
from dino_sparo.evaluation.features import require_memory
from dino_sparo.evaluation.slots.choice import check_has_slots
from dino_sparo.evaluation.slots.curve import (
    Curve,
    best_slots,
    check_number,
    describe_selection,
    draw_slots,
    number_rule,
)
from dino_sparo.evaluation.slots.study import (
    ProbeSettings,
    StudyImages,
    accuracy_curve,
    choosing_rows,
    knn_accuracies,
    random_orders,
    rank_slots,
)
from dino_sparo.evaluation.task import EvaluationTask, Subject, write_result
from dino_sparo.runtime.agree import all_or_none
from dino_sparo.runtime.collectives import all_reduce_sum
from dino_sparo.runtime.launch import is_main, world_size


def study_slots(args: argparse.Namespace) -> dict[str, Any]:
    """Study the slots of the encoder that the options name, write result and plot, print the table."""
    task = EvaluationTask.start(args)
    require_matplotlib()
    config = task.subject.encoder.config
    check_has_slots(config)
    numbers = kept_numbers(args.numbers, args.keep, config.num_slots)
    settings = ProbeSettings(args.epochs, tuple(args.lr), args.seed)
    path = task.result_path("slot_study")
    images, record = extract(task)
    accuracies = knn_accuracies(images, args.nb_knn, args.temperature)
    ranking = rank_slots(accuracies, images.num_slots)
    orders = [[int(row["slot"]) for row in ranking], *random_orders(images.num_slots, args.draws, args.seed)]
    curve = accuracy_curve(accuracies, orders, numbers)
    probes = accuracy_curve(settings.accuracies(images), orders, numbers) if args.probe else None
    result = describe(args, task.subject, ranking, curve, probes) | record
    if is_main():
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(result, path.with_suffix(".png"))
    write_result(result, table(result), path)
    return result


def kept_numbers(numbers: list[int] | None, keep: int | None, num_slots: int) -> list[int]:
    """Numbers of slots to keep, ascending: `numbers` or the powers of two, all slots, and `keep`."""
    extra = [] if keep is None else [keep]
    for name, given in (("keep", extra), ("numbers", numbers or [])):
        for number in given:
            check_number(name, number, num_slots)
    powers = [2**power for power in range(num_slots.bit_length()) if 2**power < num_slots]
    return sorted({*(numbers or powers), num_slots, *extra})


def extract(task: EvaluationTask) -> tuple[StudyImages, dict[str, Any]]:
    """This process' share of the encodings, and the record of the images."""
    args, encoder = task.args, task.encoder
    num_train, num_val = map(len, task.splits)
    if args.probe:
        with all_or_none("finding memory for all features"):
            remedy = f"{args.nb_knn}-NN alone, without --probe, needs no more than a process' share"
            # A probe also needs this process' share, and twice that of the validation images.
            more = (num_train + 2 * num_val) // world_size()
            require_memory(num_train, encoder.encoding_dim, task.storage, "--probe", remedy, more_rows=more)
    train, val = map(task.features, task.splits)
    chooses = choosing_rows(train, num_train, args.choosing_images, args.seed)
    images = StudyImages(train, val, chooses, encoder.config.num_slots, task.num_classes, task.device)
    sizes = (len(train.features), len(val.features), int(chooses.sum()), train.num_corrupt, val.num_corrupt)
    counts = all_reduce_sum(torch.tensor(sizes, device=task.device)).tolist()
    names = ("num_train", "num_val", "num_choosing", "num_corrupt_train", "num_corrupt_val")
    return images, task.images_record(dict(zip(names, counts, strict=True)))


def describe(
    args: argparse.Namespace,
    subject: Subject,
    ranking: list[dict[str, Any]],
    curve: list[dict[str, Any]],
    probes: list[dict[str, Any]] | None,
) -> dict[str, Any]:
    """Selection, accuracies and protocol, as slot_study.json holds them."""
    probe = {
        "epochs": args.epochs,
        "lr": list(args.lr),
        "rule": "trained on the training images that do not choose, un-augmented; the choosing images pick the "
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
        "encoder": subject.record,
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
    """The best slots alone, and accuracy against their number, for people."""
    ranking, images = result["ranking"], result["images"]
    names = {"alone, choosing %": "top1_choosing", "alone, held out %": "top1_held_out"}
    columns = {head: [row[name] for row in ranking] for head, name in names.items()}
    lines = best_slots(columns, [row["slot"] for row in ranking])
    for name, rows in curves_of(result).items():
        lines += ["", f"{'kept':>4}  {f'{name}, ranked %':>17}  {f'{name}, random %':>17}"]
        for row in rows:
            mean, std = row["random"]["mean"], row["random"]["std"]
            drawn = f"{mean:.2f}" + ("" if std is None else f" ± {std:.2f}")
            lines.append(f"{row['num_kept']:>4}  {row['top1_held_out']:>17.2f}  {drawn:>17}")
    lines += [
        "",
        f"kept {len(result['slots'])} of {result['num_slots']} slots: {result['top1_selected']:.2f} % "
        f"{result['knn']['k']}-NN; all slots: {result['top1_all']:.2f} %; chance: {chance(result):.2f} %",
        f"ranked on {images['num_choosing']:,} training images, measured on {images['num_val']:,} held-out images; "
        f"random: {result['draws']} orders",
    ]
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw accuracy against the number of slots kept, and of each slot alone, as a PNG."""
    ranking = result["ranking"]
    curves = []
    for name, rows in curves_of(result).items():
        means, deviations = [row["random"]["mean"] for row in rows], [row["random"]["std"] or 0.0 for row in rows]
        random = ("random, mean ± std", means, deviations)
        curves.append(Curve(f"Slots together: {name}", f"{name} top-1", rows, "ranked", *random, chance(result)))
    alone = [row["slot"] for row in ranking], [row["top1_held_out"] for row in ranking]
    label = "slot, best first on the choosing images"
    draw_slots(path, curves, *alone, len(result["slots"]), chance(result), label)

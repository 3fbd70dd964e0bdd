"""Checkpoint and labelled images -> what each slot alone knows, and how many slots are needed.

    dino-sparo slot-study --pretrained_weights output/checkpoint.pth --data_path data/imagenet
    python eval_knn.py    --pretrained_weights output/checkpoint.pth --data_path data/imagenet \
        --slots output/slot_study.json

Prints a table, writes slot_study.json (accuracies, how they were found, and the best slots, which every evaluation
takes as --slots) and slot_study.png. `evaluation/slots/study.py` says how the slots are ranked.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from dino_sparo.draw.plots import ACCENT, count_ticks, panels, ranked_bars, spaced
from dino_sparo.draw.sheet import INK, SOFT, require_matplotlib
from dino_sparo.evaluation.features import require_memory
from dino_sparo.evaluation.load import Subject
from dino_sparo.evaluation.slots.choice import SlotSelection, check_has_slots
from dino_sparo.evaluation.slots.study import (
    ProbeSettings,
    SlotAccuracies,
    StudyImages,
    choosing_rows,
    knn_curve,
    probe_curve,
    random_orders,
    rank_slots,
)
from dino_sparo.evaluation.task import EvaluationTask, write_result
from dino_sparo.runtime.collectives import all_reduce_sum
from dino_sparo.runtime.distributed import all_or_none, is_main, world_size

TABLE_SLOTS = 10  # best slots that the table names


def study_slots(args: argparse.Namespace) -> dict[str, Any]:
    """Study what the options say, write result and plot, print the table."""
    task = EvaluationTask.start(args)
    require_matplotlib()
    config = task.subject.encoder.config
    check_has_slots(config)
    numbers = kept_numbers(args.numbers, args.keep, config.num_slots)
    if args.draws < 1:
        raise ValueError(f"draws={args.draws}; give a positive number of random orders, e.g. 5")
    settings = ProbeSettings(args.epochs, tuple(args.lr), args.seed)
    path = task.result_path("slot_study")
    images, record = extract(task)
    accuracies = SlotAccuracies(images, args.nb_knn, args.temperature)
    ranking = rank_slots(accuracies, images.num_slots)
    order = [int(row["slot"]) for row in ranking]
    orders = random_orders(images.num_slots, args.draws, args.seed)
    curve = knn_curve(accuracies, order, orders, numbers)
    probes = probe_curve(images, order, orders, numbers, settings) if args.probe else None
    result = describe(args, task.subject, ranking, curve, probes) | record
    if is_main():
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(result, path.with_suffix(".png"))
    write_result(result, table(result), path)
    return result


def kept_numbers(numbers: list[int] | None, keep: int | None, num_slots: int) -> list[int]:
    """How many slots are kept, ascending: those asked for or the powers of two, all slots, and `keep`.

    Raises:
        ValueError: a number that is not between 1 and L.
    """
    for name, asked in (("keep", [keep] if keep is not None else []), ("numbers", numbers or [])):
        for number in asked:
            if not 1 <= number <= num_slots:
                raise ValueError(f"{name}={number} of num_slots={num_slots} slots; give a number from 1 to {num_slots}")
    chosen = set(numbers or [2**power for power in range(num_slots.bit_length()) if 2**power < num_slots])
    return sorted(chosen | {num_slots} | ({keep} if keep is not None else set()))


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
    config = subject.encoder.config
    # The smallest number at which the curve is highest.
    kept = args.keep or max(curve, key=lambda row: (row["top1_choosing"], -row["num_kept"]))["num_kept"]
    at_kept = next(row for row in curve if row["num_kept"] == kept)
    slots = tuple(sorted(int(row["slot"]) for row in ranking[:kept]))
    return {
        **SlotSelection(slots, config.num_slots, subject.record["sha256"]).to_dict(),
        "evaluation": "slots alone and together",
        "top1_selected": at_kept["top1_held_out"],
        "top1_all": curve[-1]["top1_held_out"],
        "rule": {
            "ranking": "top-1 of each slot alone on the choosing images; of equally good slots the first is preferred",
            "number": "asked for" if args.keep else "the smallest with the highest accuracy on the choosing images",
            "choosing": "a random part of the training images, classified by the others; held out: the validation "
            "images, classified by all training images",
            "random": "the first slots of random orders; mean and standard deviation over the orders",
        },
        "knn": {"k": args.nb_knn, "temperature": args.temperature, "similarity": "cosine"},
        "draws": args.draws,
        "seed": args.seed,
        "ranking": ranking,
        "curve": curve,
        "probe": None
        if probes is None
        else {
            "epochs": args.epochs,
            "lr": list(args.lr),
            "rule": "trained on the training images that do not choose, un-augmented; the choosing images pick the "
            "learning rate",
            "curve": probes,
        },
        "encoder": subject.record,
        "feature": {"name": "slots of the encoding", "slot_dim": config.slot_dim, "precision": args.precision},
    }


def chance(result: dict[str, Any]) -> float:
    """Top-1 of guessing among the classes, percent."""
    return 100 / result["images"]["num_classes"]


def table(result: dict[str, Any]) -> str:
    """The best slots alone, and accuracy against their number, for people."""
    ranking, curve, images = result["ranking"], result["curve"], result["images"]
    name = f"{result['knn']['k']}-NN"
    lines = [f"{'rank':>4}  {'slot':>5}  {'alone, choosing %':>17}  {'alone, held out %':>17}"]
    lines += [
        f"{rank:>4}  {row['slot']:>5}  {row['top1_choosing']:>17.2f}  {row['top1_held_out']:>17.2f}"
        for rank, row in enumerate(ranking[:TABLE_SLOTS], 1)
    ]
    lines += ["..."] if len(ranking) > TABLE_SLOTS else []
    curves = [(name, curve)] + ([("probe", result["probe"]["curve"])] if result["probe"] else [])
    for title, rows in curves:
        lines += ["", f"{'kept':>4}  {f'{title}, ranked %':>17}  {f'{title}, random %':>17}"]
        for row in rows:
            mean, std = row["random"]["mean"], row["random"]["std"]
            drawn = f"{mean:.2f}" + ("" if std is None else f" ± {std:.2f}")
            lines.append(f"{row['num_kept']:>4}  {row['top1_held_out']:>17.2f}  {drawn:>17}")
    lines += [
        "",
        f"kept {len(result['slots'])} of {result['num_slots']} slots: {result['top1_selected']:.2f} % {name}; all "
        f"slots: {result['top1_all']:.2f} %; guessing: {chance(result):.2f} %",
        f"ranked on {images['num_choosing']:,} training images, measured on {images['num_val']:,} held-out images; "
        f"random: {result['draws']} orders",
    ]
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Accuracy against the number of slots kept, and of each slot alone.

    Args:
        result: what slot_study.json holds.
        path: the PNG to write.

    Raises:
        ImportError: matplotlib is not installed.
    """
    name, kept = f"{result['knn']['k']}-NN", len(result["slots"])
    curves = [(name, result["curve"])] + ([("probe", result["probe"]["curve"])] if result["probe"] else [])
    with panels(path, 1, len(curves) + 1) as axes:
        for axis, (title, curve) in zip(axes[0], curves, strict=False):
            draw_curve(axis, curve, kept, chance(result))
            axis.set(xlabel="slots kept", ylabel=f"{title} top-1, %")
            axis.set_title(f"Slots together: {title}", loc="left", fontweight="bold", fontsize=11)
        alone, ranking = axes[0][-1], result["ranking"]
        heights = [row["top1_held_out"] for row in ranking]
        ranked_bars(alone, [row["slot"] for row in ranking], heights, kept)
        alone.axhline(chance(result), color=SOFT, linestyle=(0, (1, 2)), linewidth=1, label="guessing")
        # Above the plot: within it the bars may reach any height.
        alone.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.0), borderpad=0)
        alone.set(xlabel="slot, best first on the choosing images", ylabel=f"{name} top-1, %")
        alone.set_title("Each slot alone", loc="left", fontweight="bold", fontsize=11)


def draw_curve(axis: Any, curve: list[dict[str, Any]], kept: int, guessing: float) -> None:
    """Ranked and random slots against their number, on held-out images."""
    numbers = [row["num_kept"] for row in curve]
    means = [row["random"]["mean"] for row in curve]
    deviations = [row["random"]["std"] or 0.0 for row in curve]
    ranked = [row["top1_held_out"] for row in curve]
    axis.axhline(ranked[-1], color=SOFT, linestyle=(0, (4, 3)), linewidth=1, label="all slots")
    low, high = ([mean + sign * std for mean, std in zip(means, deviations, strict=True)] for sign in (-1, 1))
    axis.fill_between(numbers, low, high, color=SOFT, alpha=0.25, linewidth=0)
    axis.plot(numbers, means, color=SOFT, linewidth=1.2, marker=".", label="random, mean ± std")
    axis.plot(numbers, ranked, color=INK, linewidth=1.6, marker=".", label="ranked")
    at_kept = ranked[numbers.index(kept)]
    axis.plot([kept], [at_kept], "o", color=ACCENT, markersize=7, label=f"{kept} kept: {at_kept:.1f} %")
    axis.axhline(guessing, color=SOFT, linestyle=(0, (1, 2)), linewidth=1, label="guessing")
    if len(numbers) > 1:
        axis.set_xscale("log", base=2)
        axis.set_xticks(spaced(numbers), [str(number) for number in spaced(numbers)])
        axis.minorticks_off()
    else:
        count_ticks(axis)
    axis.legend(frameon=False, loc="best")

"""k-NN classification against the reference's, one k at a time and several at once, and its memory.

    python -m benchmarks.knn --reference dino

Features are drawn around class centers, so that about two images of three are classified right: neighbours that are
all right, or all wrong, would hide a mistake.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.reference import Reference
from benchmarks.report import Bar, Section, options, run
from benchmarks.timing import interleave, peak_memory
from dino_sparo.evaluation.features import Features
from dino_sparo.evaluation.knn import KNNResult, classify_shards

TEMPERATURE = 0.07
# Bars.
PER_K, ALL_K, EXTRA_MB = 1.5, 5.0, 100.0


class Sizes(NamedTuple):
    """Numbers of features, their width, their distance from the class center; numbers of neighbours."""

    train: int
    test: int
    dim: int
    classes: int
    noise: float
    ks: tuple[int, ...]


KS = (10, 20, 100, 200)
FULL = (Sizes(50_000, 5_000, 384, 1000, 3.0, KS), Sizes(50_000, 5_000, 4096, 1000, 6.0, KS))
# The reference takes minutes for each k of 50,000 x 5,000 x 4096; these take four on two cores without AVX-512.
USUAL = tuple(sizes._replace(train=10_000, test=2_500) for sizes in FULL)
QUICK = (Sizes(301, 103, 13, 11, 1.0, (2, 5)),)


def features(sizes: Sizes, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training features and labels, test features and labels; features of length one, as the reference needs."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(sizes.classes, sizes.dim, generator=generator)
    splits = []
    for number in (sizes.train, sizes.test):
        labels = torch.randint(sizes.classes, (number,), generator=generator)
        noise = torch.randn(number, sizes.dim, generator=generator).mul_(sizes.noise)
        splits += [F.normalize(noise.add_(centers[labels]), dim=1).to(device), labels.to(device)]
    return splits[0], splits[1], splits[2], splits[3]


def knn_classify(
    train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, k: list[int], temperature: float
) -> dict[int, KNNResult]:
    """`classify_shards` in one process, on the features' device."""
    sides = ((train, train_labels), (test, test_labels))
    voting, judged = (Features(values, labels, torch.arange(len(labels))) for values, labels in sides)
    return classify_shards(voting, judged, k, temperature, train.device)


def build(sizes: Sizes, device: str, ks: tuple[int, ...]) -> Callable[[], Any]:
    """A classification by ours, for its memory."""
    sets = features(sizes, device)
    return partial(knn_classify, *sets, list(ks), TEMPERATURE)


def measure(args: argparse.Namespace, reference: Reference | None) -> Section:
    """For each width: equality, seconds, memory."""
    rounds = 1 if args.quick else args.rounds
    section = Section("k-NN classification", f"On {args.device}; {rounds} rounds, median (quartiles).")
    for sizes in QUICK if args.quick else FULL if args.full or args.device != "cpu" else USUAL:
        rows, memory = _measure_sizes(section, sizes, args, reference, rounds)
        name = f"{sizes.train:,} x {sizes.test:,} features of {sizes.dim} numbers, {sizes.classes} classes"
        section.tables[f"Seconds, {name}"] = rows
        section.tables[f"Growth of memory, {name}"] = memory
    return section


def _measure_sizes(
    section: Section, sizes: Sizes, args: argparse.Namespace, reference: Reference | None, rounds: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    sets = features(sizes, args.device)
    usual = sizes.ks[1]
    _check(section, sizes, sets, reference)
    variants: dict[str, Callable[[], Any]] = {}
    if reference is not None:
        classify = reference.eval_knn.knn_classifier
        variants |= {
            f"reference, k={usual}": lambda: classify(*sets, usual, TEMPERATURE, sizes.classes),
            f"reference, {len(sizes.ks)} k": lambda: [classify(*sets, k, TEMPERATURE, sizes.classes) for k in sizes.ks],
        }
    for ks, what in (((usual,), f"k={usual}"), (sizes.ks, f"{len(sizes.ks)} k")):
        variants[f"ours, {what}"] = partial(knn_classify, *sets, list(ks), TEMPERATURE)
    timings = interleave(variants, rounds, 0.0, args.device)
    first = "ours" if reference is None else "reference"
    rows = [
        {"": name, "s": timings.time(name),
         f"times faster than {first}": timings.ratio(f"{first}, {name.split(', ')[1]}", name)}
        for name in variants
    ]  # fmt: skip
    extra = peak_memory(build, sizes, args.device, sizes.ks, device=args.device, fresh=not args.quick) / 1e6
    if not args.quick:
        for what, wanted in ((f"k={usual}", PER_K), (f"{len(sizes.ks)} k", ALL_K)):
            ratio = timings.ratio(f"reference, {what}", f"ours, {what}").median if reference is not None else None
            section.bars.append(Bar(f"times faster, {what}, {sizes.dim} numbers", wanted, ratio))
        section.bars.append(Bar(f"extra MB, {sizes.dim} numbers", EXTRA_MB, extra, at_most=True))
    return rows, [{"MB": extra}]


def _check(
    section: Section, sizes: Sizes, sets: tuple[Tensor, Tensor, Tensor, Tensor], reference: Reference | None
) -> None:
    """Accuracies: of several k at once against one k at a time, and against the reference's."""
    together = knn_classify(*sets, list(sizes.ks), TEMPERATURE)
    for k in sizes.ks:
        ours, alone = (
            torch.tensor(result, dtype=torch.float64)
            for result in (together[k], knn_classify(*sets, [k], TEMPERATURE)[k])
        )
        section.check(f"accuracies, %, {len(sizes.ks)} k at once against k={k}, {sizes.dim} numbers", ours, alone, 0.0)
        if reference is None:
            continue
        theirs = torch.tensor(
            reference.eval_knn.knn_classifier(*sets, k, TEMPERATURE, sizes.classes)[0], dtype=torch.float64
        )
        section.check(f"top-1 accuracy against the reference's, %, {sizes.dim} numbers, k={k}", ours[0], theirs, 1e-9)


def get_args_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = options("k-NN classification against the reference's.")
    parser.add_argument("--rounds", type=int, default=3, help="How often each variant is timed.")
    return parser


def main(argv: list[str] | None = None) -> Section:
    """Parse the options, measure, print."""
    return run(measure, get_args_parser(), argv)


if __name__ == "__main__":
    main()

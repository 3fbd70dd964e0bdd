"""k-NN at ImageNet's size: 1.28 million training images, 50,000 to classify, 4,096 numbers each.

    python -m benchmarks.gpu.search

Features are drawn on the device around class centres. Some images are classified by the definition, too.
"""

import argparse
import time

import torch
from torch.nn import functional as F

from benchmarks.knn import TEMPERATURE, knn_classify
from benchmarks.reference import Reference
from benchmarks.report import Section, options, run
from benchmarks.timing import alone, synchronize

TRAIN, TEST, DIM, CLASSES, K = 1_281_167, 50_000, 4096, 1000, 20
ROWS = 16_384  # drawn at once
CHECKED = 64  # classified by the definition


def features(number: int, centres: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(number, F), of length one, around the centres of their labels."""
    drawn = torch.empty(number, centres.shape[1], device=centres.device)
    for start in range(0, number, ROWS):
        part = centres[labels[start : start + ROWS]]
        drawn[start : start + ROWS] = F.normalize(part + 6 * torch.randn_like(part), dim=1)
    return drawn


def by_definition(
    train: torch.Tensor, labels: torch.Tensor, queries: torch.Tensor, classes: int, k: int
) -> torch.Tensor:
    """Predicted classes: of the k nearest each votes for its class by exp(similarity / temperature)."""
    similarities, nearest = (queries @ train.T).topk(k)
    votes = torch.zeros(len(queries), classes, device=train.device)
    votes.scatter_add_(1, labels[nearest], (similarities / TEMPERATURE).exp())
    return votes.argmax(dim=1)


def measure(args: argparse.Namespace, reference: Reference | None) -> Section:
    """Accuracy of some images by the definition, then seconds and memory for all."""
    number, test, dim, classes, k = (301, 67, 13, 11, 5) if args.quick else (TRAIN, TEST, DIM, CLASSES, K)
    section = Section(
        "k-NN at ImageNet's size", f"{number:,} x {test:,} features of {dim} numbers, k={k}, on {args.device}."
    )
    torch.manual_seed(0)
    centres = torch.randn(classes, dim, device=args.device)
    labels, wanted = (torch.randint(classes, (size,), device=args.device) for size in (number, test))
    train, queries = features(number, centres, labels), features(test, centres, wanted)
    few = slice(0, CHECKED)
    top1 = knn_classify(train, labels, queries[few], wanted[few], [k], TEMPERATURE)[k].top1
    right = (by_definition(train, labels, queries[few], classes, k) == wanted[few]).double().mean()
    section.check(
        f"top-1 of {CHECKED} images, %, by the definition", torch.tensor(top1).double(), 100 * right.cpu(), 1e-6
    )
    if args.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    with alone():
        synchronize(args.device)
        begin = time.perf_counter()
        result = knn_classify(train, labels, queries, wanted, [k], TEMPERATURE)[k]
        synchronize(args.device)
        seconds = time.perf_counter() - begin
    row = {
        "s": seconds,
        "top-1, %": result.top1,
        "features, GB": (train.nbytes + queries.nbytes) / 1e9,
    }
    if args.device != "cpu":
        row["most allocated, GB"] = torch.cuda.max_memory_allocated() / 1e9
    section.tables["All images"] = [row]
    return section


def main(argv: list[str] | None = None) -> Section:
    """Parse the options, measure, print."""
    return run(measure, options("k-NN at ImageNet's size."), argv)


if __name__ == "__main__":
    main()

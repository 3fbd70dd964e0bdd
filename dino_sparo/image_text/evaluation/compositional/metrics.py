"""Answers -> accuracies in percent, per split and as means, with intervals.

`accuracy` is our rule: strictly greater, a tie is wrong. `official` treats ties as the benchmark's own code does. A
95 % interval of our accuracy takes questions as independent, although some share an image: Wilson's for one split, and
a bootstrap within splits for a mean over splits.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dino_sparo.image_text.evaluation.compositional.benchmark import Benchmark, Outcome, Weights

Z_95 = 1.959963984540054  # 97.5 % quantile of the normal distribution
NUM_RESAMPLES = 10_000


def wilson(num_right: int, num_questions: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share, in percent.

        (p + z²/2n ± z sqrt(p (1-p) / n + z²/4n²)) / (1 + z²/n)

    Args:
        num_right: n p.
        num_questions: n.
    """
    share, count, square = num_right / num_questions, num_questions, Z_95**2
    middle = share + square / (2 * count)
    reach = Z_95 * math.sqrt(share * (1 - share) / count + square / (4 * count**2))
    low, high = ((middle + sign * reach) / (1 + square / count) for sign in (-1, 1))
    return 100 * max(0.0, low), 100 * min(1.0, high)


def bootstrap(
    num_right: Sequence[int], num_questions: Sequence[int], weights: Sequence[float], seed: int
) -> tuple[float, float]:
    """95 % interval of a weighted mean of accuracies, in percent, by drawing the questions of each split anew.

    With k of n answers right, a draw with replacement has Binomial(n, k/n) right answers. All lists are per split.
    """
    counts = np.asarray(num_questions)
    draws = np.random.default_rng(seed).binomial(counts, np.asarray(num_right) / counts, (NUM_RESAMPLES, len(counts)))
    low, high = np.quantile(draws / counts @ np.asarray(weights), (0.025, 0.975))
    return 100 * float(low), 100 * float(high)


def worth(outcome: Outcome, tie_credit: float) -> float:
    """Value of an answer by a benchmark's own rule, 0 to 1."""
    return 1.0 if outcome.right else tie_credit * outcome.tied


def summarize(benchmark: Benchmark, outcomes: Sequence[Outcome], seed: int) -> dict[str, Any]:
    """Accuracies of one benchmark; `seed` is the bootstrap's.

    Returns:
        `splits`: accuracy, interval, the benchmark's own number, chance, and numbers of questions and ties of each.
        `means`: the benchmark's averages, and `micro`, the share of all questions, if each counts in one split.
    """
    by_split: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_split.setdefault(outcome.split, []).append(outcome)
    splits = {split: _split(own, benchmark) for split, own in by_split.items()}
    counts = {split: len(own) for split, own in by_split.items()}
    rights = {split: sum(outcome.right for outcome in own) for split, own in by_split.items()}
    weights = dict(benchmark.means(counts))
    is_one_each = len({outcome.question for outcome in outcomes}) == len(outcomes)  # not several scores of each
    if is_one_each:
        weights["micro"] = {split: count / len(outcomes) for split, count in counts.items()}
    means = {name: _mean(splits, each, rights, seed) for name, each in weights.items()}
    if is_one_each:
        means["micro"]["interval_95"] = list(wilson(sum(rights.values()), len(outcomes)))
    return {"splits": splits, "means": means}


def _split(own: Sequence[Outcome], benchmark: Benchmark) -> dict[str, Any]:
    right = sum(outcome.right for outcome in own)
    return {
        "accuracy": 100 * right / len(own),
        "interval_95": list(wilson(right, len(own))),
        "official": 100 * sum(worth(outcome, benchmark.tie_credit) for outcome in own) / len(own),
        "chance": benchmark.chance_of(own[0].split),
        "num_questions": len(own),
        "num_ties": sum(outcome.tied for outcome in own),
    }


def _mean(
    splits: Mapping[str, Mapping[str, Any]], weights: Weights, rights: Mapping[str, int], seed: int
) -> dict[str, Any]:
    def mean(key: str) -> float:
        return sum(weight * splits[split][key] for split, weight in weights.items())

    counts = [splits[split]["num_questions"] for split in weights]
    interval = bootstrap([rights[split] for split in weights], counts, list(weights.values()), seed)
    return {
        "accuracy": mean("accuracy"),
        "interval_95": list(interval),
        "official": mean("official"),
        "chance": mean("chance"),
        "num_splits": len(weights),
    }

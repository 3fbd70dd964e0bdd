"""A benchmark of true and false captions: its files, a reader into questions, and its accuracies in percent.

A new benchmark is a file in `sets/` and one line of the table there.

`accuracy` is our rule: strictly greater, a tie is wrong. `official` treats ties as the benchmark's own code does. A
95 % interval of our accuracy takes questions as independent, although some share an image: Wilson's for one split, and
a combination of these for a mean over splits.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dino_sparo.image_text.evaluation.compositional.questions import Answer, Question

Z_95 = 1.959963984540054  # 97.5 % quantile of the normal distribution

# Split -> its weight in a mean; the weights of a mean sum to one.
Weights = dict[str, float]


class Outcome(NamedTuple):
    """One comparison that counts in an accuracy.

    Attributes:
        split: the split that counts the comparison.
        question: index of the question.
        right: whether the true caption, or image, scores strictly higher than all false ones.
        tied: whether the best false one scores equally; a tie is not right.
        official: credit by the benchmark's own code, 0 to 1, where a mean credit of ties does not say it.
    """

    split: str
    question: int
    right: bool
    tied: bool
    official: float | None = None

    def worth(self, tie_credit: float) -> float:
        """Credit by a benchmark's own rule, 0 to 1."""
        if self.official is not None:
            return self.official
        return 1.0 if self.right else tie_credit * self.tied


def one_per_question(questions: Sequence[Question], answers: Sequence[Answer]) -> list[Outcome]:
    """Whether each image prefers its caption to all others."""
    pairs = enumerate(zip(questions, answers, strict=True))
    return [Outcome(question.split, number, answer.text, answer.text_tied) for number, (question, answer) in pairs]


def equal_means(splits: Collection[str]) -> dict[str, Weights]:
    """One macro average, to which all splits contribute equally; none without splits."""
    return {"macro": dict.fromkeys(splits, 1 / len(splits))} if splits else {}


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Attributes:
        name: name on the command line and in result files.
        title: name in tables.
        files: annotation files; a folder with one of them holds the benchmark.
        read: folder -> questions, with names of images relative to one of the folders `images`.
        images: folders of the images, relative to the annotations, the folder above, or --data_root.
        source: where to get the benchmark.
        licence: of the annotations, and of images that come with them.
        size: of the download.
        headline: the split or mean that stands for the benchmark in a short table.
        chance: accuracy of guessing in percent, of all splits or per split.
        counts: questions per split of the complete benchmark, where known.
        total: questions of the complete benchmark, where known.
        tie_credit: mean credit of a tie in the benchmark's own code: 1 if that code lists the true caption first and
            takes the first maximum.
        means: questions per split -> averages by name; empty if splits must not be averaged.
        outcomes: questions and answers -> comparisons that count.
        more: questions and their credits, 0 to 1 -> further accuracies in percent.
        part_of: question -> the part of the images that the question needs; a user may have some parts only.
        blind_group: question -> the group in which the control with shuffled images exchanges images. The group must
            not reveal the answer.
        accepts: whether a folder with such files belongs to this benchmark.
        other_files: pattern of files of any name that `read` takes, too. If this benchmark alone is named, --data_root
            may hold such files.
    """

    name: str
    title: str
    files: tuple[str, ...]
    read: Callable[[Path], Iterable[Question]]
    images: tuple[str, ...]
    source: str
    licence: str = "not stated"
    size: str = "not stated"
    headline: str = "macro"
    chance: float | Mapping[str, float] = 50.0
    counts: Mapping[str, int] = field(default_factory=dict)
    total: int | None = None
    tie_credit: float = 0.0
    means: Callable[[Mapping[str, int]], dict[str, Weights]] = equal_means
    outcomes: Callable[[Sequence[Question], Sequence[Answer]], list[Outcome]] = one_per_question
    more: Callable[[Sequence[Question], Sequence[float]], dict[str, float]] = lambda questions, worth: {}
    part_of: Callable[[Question], str] = lambda question: "the images"
    blind_group: Callable[[Question], str] = lambda question: question.split
    accepts: Callable[[Path], bool] = lambda folder: True
    other_files: str = ""

    def is_in(self, folder: Path) -> bool:
        """Whether a folder holds the benchmark or a part of it."""
        return any((folder / name).is_file() for name in self.files) and self.accepts(folder)

    @property
    def origin(self) -> str:
        """Source, licence, size and layout, for messages."""
        others = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        layout = f"{self.files[0]}{others}; images in {' or '.join(self.images)}"
        return f"from {self.source}; licence: {self.licence}; size: {self.size}; layout: {layout}"

    def annotations(self, folder: Path) -> list[str]:
        """Names of the annotation files in a folder: of `files`, else files that match the pattern `other_files`."""
        names = [name for name in self.files if (folder / name).is_file()]
        if not names and self.other_files:
            names = sorted(path.name for path in folder.glob(self.other_files))
        return names


def wilson(num_right: int, num_questions: int) -> list[float]:
    """Low and high end of Wilson's 95 % interval of a share, in percent.

    (p + z²/2n ± z sqrt(p (1-p) / n + z²/4n²)) / (1 + z²/n)
    """
    share, count, square = num_right / num_questions, num_questions, Z_95**2
    middle = share + square / (2 * count)
    reach = Z_95 * math.sqrt(share * (1 - share) / count + square / (4 * count**2))
    low, high = ((middle + sign * reach) / (1 + square / count) for sign in (-1, 1))
    return [100 * max(0.0, low), 100 * min(1.0, high)]


def wilson_of_mean(num_right: Sequence[int], num_questions: Sequence[int], weights: Sequence[float]) -> list[float]:
    """Low and high end of the 95 % interval of a weighted mean of accuracies, in percent; all lists are per split.

        p - sqrt(sum_s w_s² (p_s - l_s)²),   p + sqrt(sum_s w_s² (h_s - p_s)²),   p = sum_s w_s p_s

    with l_s and h_s the ends of Wilson's interval of split s. A bootstrap has no spread if every split is 0 or 100 %,
    however few its questions are. Source: Zou and Donner, "Construction of confidence limits about effect measures: a
    general approach", 2008.
    """
    shares = [100 * right / count for right, count in zip(num_right, num_questions, strict=True)]
    ends = [wilson(right, count) for right, count in zip(num_right, num_questions, strict=True)]
    mean = math.fsum(weight * share for weight, share in zip(weights, shares, strict=True))
    rows = list(zip(weights, shares, ends, strict=True))
    low, high = (math.hypot(*(weight * (end[side] - share) for weight, share, end in rows)) for side in (0, 1))
    return [max(0.0, mean - low), min(100.0, mean + high)]


def summarize(benchmark: Benchmark, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Accuracies of one benchmark.

    Returns:
        `splits`: accuracy, interval, the benchmark's own number, chance, and numbers of questions and ties of each.
        `means`: the benchmark's averages, and `micro`, the share of all questions, if each counts in one split.
    """
    by_split: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_split[outcome.split].append(outcome)
    counts = {split: len(group) for split, group in by_split.items()}
    rights = {split: sum(outcome.right for outcome in group) for split, group in by_split.items()}
    splits = {
        split: {
            "accuracy": 100 * rights[split] / counts[split],
            "interval_95": wilson(rights[split], counts[split]),
            "official": 100 * sum(outcome.worth(benchmark.tie_credit) for outcome in group) / counts[split],
            "chance": benchmark.chance[split] if isinstance(benchmark.chance, Mapping) else benchmark.chance,
            "num_questions": counts[split],
            "num_ties": sum(outcome.tied for outcome in group),
        }
        for split, group in by_split.items()
    }
    weights = dict(benchmark.means(counts))
    is_one_each = len({outcome.question for outcome in outcomes}) == len(outcomes)  # not several scores of each
    if is_one_each:
        weights["micro"] = {split: count / len(outcomes) for split, count in counts.items()}
    means = {name: _mean(splits, rights, each) for name, each in weights.items()}
    if is_one_each:
        means["micro"]["interval_95"] = wilson(sum(rights.values()), len(outcomes))
    return {"splits": splits, "means": means}


def _mean(splits: Mapping[str, Mapping[str, Any]], rights: Mapping[str, int], weights: Weights) -> dict[str, Any]:
    accuracy, official, chance = (
        sum(weight * splits[split][key] for split, weight in weights.items())
        for key in ("accuracy", "official", "chance")
    )
    numbers, counts = [rights[split] for split in weights], [splits[split]["num_questions"] for split in weights]
    return {
        "accuracy": accuracy,
        "interval_95": wilson_of_mean(numbers, counts, list(weights.values())),
        "official": official,
        "chance": chance,
        "num_splits": len(weights),
    }

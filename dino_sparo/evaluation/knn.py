"""Features -> weighted k-nearest-neighbour accuracy.

The first number people ask for: no training, no learning rate, one pass over the images. Source: DINO, section 3.2; the
vote is that of Wu et al., "Unsupervised feature learning via non-parametric instance discrimination", section 3.4.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from dino_sparo.data import ImageSource, align_classes, require_labels
from dino_sparo.encoder import Encoder
from dino_sparo.evaluation.features import Features, extract_split
from dino_sparo.evaluation.neighbours import TrainSet, checked_lengths, nearest
from dino_sparo.runtime.distributed import all_reduce_sum, is_main
from dino_sparo.runtime.logs import progress

logger = logging.getLogger(__name__)

TEST_CHUNK = 512  # test images at a time; see `neighbours.TRAIN_CHUNK`
TOP = 5  # how many of the best classes are ranked


class KNNResult(NamedTuple):
    """Accuracies in percent: the first class is right, one of the first five is right."""

    top1: float
    top5: float


@overload
def knn_classify(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    k: int,
    temperature: float,
) -> KNNResult: ...


@overload
def knn_classify(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    k: Sequence[int],
    temperature: float,
) -> dict[int, KNNResult]: ...


def knn_classify(
    train_features: Float[Tensor, "train _"],
    train_labels: Int[Tensor, " _"],
    test_features: Float[Tensor, "test _"],
    test_labels: Int[Tensor, " _"],
    k: int | Sequence[int] = 20,
    temperature: float = 0.07,
) -> KNNResult | dict[int, KNNResult]:
    """Classify by the weighted vote of the nearest training images, and count how often that is right.

        sim_i = x . x_i / (||x|| ||x_i||),   vote_c = sum over the k most similar i with label c of exp(sim_i / tau)

    The first class is the one with most votes; of equal votes the smaller label comes first. Top-5 asks for one of the
    five first classes, among those that have a vote: the reference fills up with arbitrary ones of its 1000 classes,
    which is seldom a hit, and much luck where it is told of few classes.

    Features need not be normalised: they are here, block by block. Similarities are fp32, votes fp64. Deterministic;
    which of several equally similar images are the last neighbours is left to torch.

    Args:
        train_features: (train, F), any scale.
        train_labels: (train,), non-negative integers, gaps allowed.
        test_features: (test, F).
        test_labels: (test,).
        k: number of neighbours, or several numbers: they share one search. More than there are training images means
            all of them, with a warning.
        temperature: T.

    Returns:
        `KNNResult(top1, top5)` in percent; for several numbers a dict from each of them to its result.

    Raises:
        ValueError: no images, sizes that do not match, negative labels, features that are not finite, `k`
            or `temperature` out of range.
    """
    _check_labels("train", train_features, train_labels)
    _check_labels("test", test_features, test_labels)
    ks = [k] if isinstance(k, int) else list(k)
    hits = {number: [0, 0] for number in ks}
    start = 0
    for rankings in _rankings(train_features, train_labels, test_features, ks, temperature):
        stop = start + len(rankings[ks[0]])
        targets = test_labels[start:stop, None].to(train_features.device)
        for number in ks:
            right = rankings[number] == targets
            hits[number][0] += int(right[:, 0].sum())
            hits[number][1] += int(right.any(dim=1).sum())
        start = stop
    results = {number: KNNResult(*(100.0 * count / len(test_features) for count in hits[number])) for number in ks}
    return results[k] if isinstance(k, int) else results


def knn_predict(
    train_features: Float[Tensor, "train _"],
    train_labels: Int[Tensor, " _"],
    test_features: Float[Tensor, "test _"],
    k: int = 20,
    temperature: float = 0.07,
) -> Int[Tensor, "test 5"]:
    """The five best classes of each image, best first; see `knn_classify`.

    Returns:
        (test, 5) labels, -1 where fewer than five classes have a vote.
    """
    _check_labels("train", train_features, train_labels)
    blocks = _rankings(train_features, train_labels, test_features, [k], temperature)
    return torch.cat([rankings[k] for rankings in blocks])


def _rankings(
    train_features: Tensor, train_labels: Tensor, test_features: Tensor, ks: list[int], temperature: float
) -> Iterator[dict[int, Tensor]]:
    """For each block of test images and each k the five best classes."""
    if train_features.shape[1] != test_features.shape[1]:
        raise ValueError(
            f"train_features have {train_features.shape[1]} numbers per image and test_features "
            f"{test_features.shape[1]}; they must come from the same encoder"
        )
    if not ks or min(ks) < 1:
        raise ValueError(f"k={ks}; give one or more numbers of neighbours, each at least 1 (usually 20)")
    if temperature <= 0:
        raise ValueError(f"temperature={temperature}; give a positive number (usually 0.07)")
    train, num_train = TrainSet(train_features), len(train_features)
    checked_lengths("test", test_features)
    if max(ks) > num_train:
        logger.warning(
            "k=%s is more than the %d training images; all of them vote", [k for k in ks if k > num_train], num_train
        )
    clamped = {k: min(k, num_train) for k in ks}
    train_labels = train_labels.to(train_features.device)
    chunks = test_features.split(TEST_CHUNK)
    for chunk in progress(chunks, total=len(chunks), desc="k-NN"):
        images = F.normalize(chunk.to(train_features.device).float(), dim=1)
        similarities, indices = nearest(train, images, max(clamped.values()))
        ranked = _rank_classes(train_labels[indices], similarities, sorted(set(clamped.values())), temperature)
        yield {k: ranked[clamped[k]] for k in ks}


def _rank_classes(
    labels: Tensor, similarities: Tensor, ks: list[int], temperature: float
) -> dict[int, Int[Tensor, "m 5"]]:
    """The five classes with most votes, for several k at once; -1 where fewer classes have votes.

    Each image counts for its own neighbours' classes alone, so memory does not depend on the number of classes.

    Args:
        labels: (m, k), of the neighbours, nearest first.
        similarities: (m, k).
        ks: ascending, the last is k.
        temperature: T.
    """
    num_counters = max(labels.shape[1], TOP)
    # Relative to the nearest, so that no temperature overflows; a common factor changes no ranking.
    weights = ((similarities - similarities[:, :1]).double() / temperature).exp()
    classes, order = labels.sort(dim=1, stable=True)
    is_new = torch.zeros_like(classes)
    is_new[:, 1:] = classes[:, 1:] != classes[:, :-1]
    counters = is_new.cumsum(dim=1)  # equal labels share a counter; counters ascend with the labels
    counter_of = torch.empty_like(counters).scatter_(1, order, counters)
    counter_class = classes.new_full((len(labels), num_counters), -1).scatter_(1, counters, classes)
    votes = weights.new_full((len(labels), num_counters), -1.0)  # below a vote that underflows to zero
    rankings = {}
    # One neighbour after the other: the order of the sums is fixed, and every k is a stop on the way.
    for neighbour in range(max(ks)):
        counter = counter_of[:, neighbour : neighbour + 1]
        votes.scatter_(1, counter, votes.gather(1, counter).clamp(min=0) + weights[:, neighbour : neighbour + 1])
        if neighbour + 1 in ks:
            sums, best = votes.sort(dim=1, descending=True, stable=True)
            ranking = counter_class.gather(1, best).masked_fill_(sums < 0, -1)
            rankings[neighbour + 1] = ranking[:, :TOP]
    return rankings


def _check_labels(name: str, features: Tensor, labels: Tensor) -> None:
    if len(labels) != len(features):
        raise ValueError(f"{len(features)} {name}_features but {len(labels)} {name}_labels; one label per image")
    if len(labels) and int(labels.min()) < 0:
        raise ValueError(f"{name}_labels hold {int(labels.min())}; labels are non-negative, so these images have none")


@dataclass(frozen=True)
class KNNEvaluation:
    """What `evaluate_knn` finds.

    Attributes:
        results: for each k its accuracies.
        num_train: training images that voted.
        num_val: validation images classified.
        num_corrupt: images left out because they could not be read.
    """

    results: dict[int, KNNResult]
    num_train: int
    num_val: int
    num_corrupt: int


def evaluate_knn(
    encoder: Encoder,
    train_source: ImageSource,
    val_source: ImageSource,
    transform: Callable,
    device: torch.device,
    *,
    k: Sequence[int] = (20,),
    temperature: float = 0.07,
    **options: Any,
) -> KNNEvaluation:
    """Images in, accuracy out: the probe of a training run.

    Every process takes part and gets the result. The encoder's train or eval mode is left as it was.

    Args:
        encoder: on `device`.
        train_source: labelled images that vote.
        val_source: labelled images to classify.
        transform: (image, rng) -> [view].
        device: where to compute.
        k: numbers of neighbours.
        temperature: of the vote.
        options: of `features.extract_split`, such as `batch_size`, `num_workers`, `dtype`.
    """
    train, val = extract_splits(encoder, train_source, val_source, transform, device, **options)
    results = classify_on_rank_0(train, val, k, temperature, device)
    return KNNEvaluation(results, len(train.features), len(val.features), train.num_corrupt + val.num_corrupt)


def extract_splits(
    encoder: Encoder,
    train_source: ImageSource,
    val_source: ImageSource,
    transform: Callable,
    device: torch.device,
    **options: Any,
) -> tuple[Features, Features]:
    """Encodings of both splits, of length one, on every process.

    Args:
        encoder: on `device`.
        train_source: labelled images.
        val_source: labelled images of the same classes; their labels become the training images' numbers.
        transform: (image, rng) -> [view].
        device: where to compute.
        options: of `features.extract_split`.
    """
    require_labels(train_source)
    val_source = align_classes(val_source, train_source.classes or [])
    train = extract_split(encoder, train_source, transform, device, **options).normalize_()
    val = extract_split(encoder, val_source, transform, device, **options).normalize_()
    return train, val


def classify_on_rank_0(
    train: Features,
    val: Features,
    k: Sequence[int],
    temperature: float,
    device: torch.device,
) -> dict[int, KNNResult]:
    """`knn_classify` in one process, which tells the others.

    One process on all features computes the same sums whatever the number of processes that extracted them.

    Args:
        train: of all processes.
        val: of all processes.
        k: numbers of neighbours.
        temperature: of the vote.
        device: where the processes can talk to each other.
    """
    accuracies = torch.zeros(len(k), 2, dtype=torch.float64, device=device)
    if is_main():
        results = knn_classify(train.features, train.labels, val.features, val.labels, list(k), temperature)
        accuracies += torch.tensor([results[number] for number in k], dtype=torch.float64, device=device)
    table = all_reduce_sum(accuracies).tolist()
    return {number: KNNResult(*row) for number, row in zip(k, table, strict=True)}

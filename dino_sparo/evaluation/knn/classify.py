"""Features -> weighted k-nearest-neighbour accuracy.

The quickest evaluation: no training, no learning rate, one pass over the images. Source: DINO, section 3.2; the
vote is that of Wu et al., "Unsupervised feature learning via non-parametric instance discrimination", section 3.4.

Each process holds the features of its part of the images, and all search at the same time: every chunk of test images
goes to all processes, each finds the nearest of its own training images, and `neighbours.merge_ranks` merges them.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from dino_sparo.data.dataset import align_classes, require_labels
from dino_sparo.data.sources import ImageSource
from dino_sparo.evaluation.features import Features, extract_split, total_images
from dino_sparo.evaluation.knn.neighbours import TEST_CHUNK, TrainSet, checked_lengths, merge_ranks, nearest
from dino_sparo.models.encoder import Encoder
from dino_sparo.runtime.agree import all_or_none
from dino_sparo.runtime.collectives import all_gather_ragged
from dino_sparo.runtime.launch import world_size
from dino_sparo.runtime.logs import progress

logger = logging.getLogger(__name__)

TOP = 5  # how many of the best classes are ranked


class KNNResult(NamedTuple):
    """Accuracies in percent: the first class is right, one of the first five is right."""

    top1: float
    top5: float


def knn_classify(
    train_features: Float[Tensor, "train _"],
    train_labels: Int[Tensor, " _"],
    test_features: Float[Tensor, "test _"],
    test_labels: Int[Tensor, " _"],
    k: Sequence[int] = (20,),
    temperature: float = 0.07,
) -> dict[int, KNNResult]:
    """Classify by the weighted vote of the nearest training images; the accuracy for each number of neighbours.

        sim_i = x . x_i / (||x|| ||x_i||),   vote_c = sum over the k most similar i with label c of exp(sim_i / tau)

    The first class is the one with most votes; of equal votes the smaller label comes first. Top-5 is among the classes
    that have a vote. The reference fills up with arbitrary ones of its 1000 classes, which inflates top-5 when there
    are few classes.

    Features need not be normalised: they are here, block by block. Similarities are fp32, votes fp64. Of equally
    similar images the first are the nearest. One process needs all features; `classify_shards` is for several.

    Args:
        train_features: (train, F), any scale.
        train_labels: (train,), non-negative integers, gaps allowed.
        test_features: (test, F).
        test_labels: (test,).
        k: numbers of neighbours, which share one search. A number above that of the training images means all of them.
        temperature: tau.
    """
    voters = Voters(train_features, train_labels, k, temperature, len(train_features))
    _check_labels("test", test_features, test_labels)
    _check_test(train_features, test_features)
    chunks = zip(test_features.split(TEST_CHUNK), test_labels.split(TEST_CHUNK), strict=True)
    return _accuracies(voters, chunks, -(-len(test_features) // TEST_CHUNK))


class Voters:
    """Training images that vote, or this process' share of them.

    Args:
        features: (train, F), of any scale; may be empty where other processes have some.
        labels: (train,).
        ks: numbers of neighbours.
        temperature: tau.
        num_train: training images of all processes.
        device: where the processes talk to each other; None: this process has all images.
    """

    def __init__(
        self,
        features: Float[Tensor, "train _"],
        labels: Int[Tensor, " _"],
        ks: Sequence[int],
        temperature: float,
        num_train: int,
        device: torch.device | None = None,
    ) -> None:
        _check_labels("train", features, labels)
        if not ks or min(ks) < 1:
            raise ValueError(f"k={list(ks)}; give one or more numbers of neighbours, each at least 1 (usually 20)")
        if temperature <= 0:
            raise ValueError(f"temperature={temperature}; give a positive number (usually 0.07)")
        if num_train == 0:
            raise ValueError("train_features are empty; k-NN needs at least one image on each side")
        if max(ks) > num_train:
            too_many = [k for k in ks if k > num_train]
            logger.warning("k=%s is more than the %d training images; all of them vote", too_many, num_train)
        self.train, self.labels = TrainSet(features), labels.to(features.device)
        self.clamped = {k: min(k, num_train) for k in ks}
        self.temperature, self.device = temperature, device

    def rank_classes(self, features: Float[Tensor, "m F"]) -> dict[int, Int[Tensor, "m 5"]]:
        """The five best classes of some test images for each k; every process gives the same images."""
        images = F.normalize(features.to(self.labels.device).float(), dim=1)
        k = max(self.clamped.values())
        similarities, rows = nearest(self.train, images, min(k, len(self.labels)))
        labels = self.labels[rows]
        if self.device is not None:
            similarities, labels = merge_ranks(similarities, labels, k, self.device)
        ranked = _rank_classes(labels, similarities, sorted(set(self.clamped.values())), self.temperature)
        return {k: ranked[clamped] for k, clamped in self.clamped.items()}


def _accuracies(voters: Voters, chunks: Iterable[tuple[Tensor, Tensor]], num_chunks: int) -> dict[int, KNNResult]:
    """The accuracies for each k; chunks are features and labels."""
    hits = {k: [0, 0] for k in voters.clamped}
    count = 0
    for features, labels in progress(chunks, total=num_chunks, desc="k-NN"):
        for k, ranking in voters.rank_classes(features).items():
            right = ranking == labels[:, None].to(ranking.device)
            hits[k][0] += int(right[:, 0].sum())
            hits[k][1] += int(right.any(dim=1).sum())
        count += len(labels)
    return {k: KNNResult(100.0 * first / count, 100.0 * five / count) for k, (first, five) in hits.items()}


def _rank_classes(
    labels: Tensor, similarities: Tensor, ks: list[int], temperature: float
) -> dict[int, Int[Tensor, "m 5"]]:
    """The five classes with most votes, for several k at once; -1 where fewer classes have votes.

    Each image counts for its own neighbours' classes alone, so memory does not depend on the number of classes.

    Args:
        labels: (m, k), of the neighbours, nearest first.
        similarities: (m, k).
        ks: ascending, the last is k.
        temperature: tau.
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


def _check_test(train_features: Tensor, test_features: Tensor) -> None:
    if len(test_features) == 0:
        raise ValueError("test_features are empty; k-NN needs at least one image on each side")
    if train_features.shape[1] != test_features.shape[1]:
        raise ValueError(
            f"train_features have {train_features.shape[1]} numbers per image and test_features "
            f"{test_features.shape[1]}; they must come from the same encoder"
        )
    checked_lengths("test", test_features)


def _check_labels(name: str, features: Tensor, labels: Tensor) -> None:
    if len(labels) != len(features):
        raise ValueError(f"{len(features)} {name}_features but {len(labels)} {name}_labels; one label per image")
    if len(labels) and int(labels.min()) < 0:
        raise ValueError(f"{name}_labels hold {int(labels.min())}; labels are non-negative, so these images have none")


@dataclass(frozen=True)
class KNNEvaluation:
    """Accuracies for each k, and the numbers of images that voted, were classified and could not be read."""

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
    """Images -> accuracy: the evaluation during a training run. Every process takes part and gets the result.

    Args:
        encoder: on `device`; its train or eval mode is restored.
        train_source: labelled images that vote.
        val_source: labelled images of the same classes; their labels become the training images' numbers.
        transform: (image, rng) -> [view].
        device: where to compute.
        k: numbers of neighbours.
        temperature: of the vote.
        options: of `features.extract_split`, such as `batch_size`, `num_workers`, `dtype`.
    """
    require_labels(train_source)
    val_source = align_classes(val_source, train_source.classes or [])
    train, val = (
        extract_split(encoder, source, transform, device, gather=False, **options).normalize_()
        for source in (train_source, val_source)
    )
    results = classify_shards(train, val, k, temperature, device)
    (num_train, corrupt_train), (num_val, corrupt_val) = (total_images(part, device) for part in (train, val))
    return KNNEvaluation(results, num_train, num_val, corrupt_train + corrupt_val)


def classify_shards(
    train: Features,
    val: Features,
    k: Sequence[int],
    temperature: float,
    device: torch.device,
) -> dict[int, KNNResult]:
    """`knn_classify` where each process holds a share of both splits: bit-identical results, on all processes.

    Args:
        train: this process' share, contiguous and in rank order as `ShardSampler` deals it; searched where it is kept.
        val: this process' share.
        k: numbers of neighbours.
        temperature: of the vote.
        device: where the processes talk to each other.
    """
    (num_train, _), (num_val, _) = (total_images(part, device) for part in (train, val))
    width = int(all_gather_ragged(torch.tensor([train.features.shape[1]], device=device)).max())
    with all_or_none("checking the features of k-NN"):
        # A process without images does not know how wide features are.
        features = train.features if len(train.features) else train.features.new_empty(0, width)
        own = val.features if len(val.features) else val.features.new_empty(0, width)
        voters = Voters(features, train.labels, k, temperature, num_train, device)
        _check_labels("test", own, val.labels)
        if len(own) or num_val == 0:
            _check_test(features, own)
    rows = max(TEST_CHUNK // world_size(), 1)
    longest = int(all_gather_ragged(torch.tensor([len(own)], device=device)).max())
    parts = ((own[start : start + rows], val.labels[start : start + rows]) for start in range(0, longest, rows))
    chunks = ((all_gather_ragged(x.to(device)), all_gather_ragged(y.to(device))) for x, y in parts)
    return _accuracies(voters, chunks, -(-longest // rows))

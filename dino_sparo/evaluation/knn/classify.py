"""Features -> weighted k-nearest-neighbour accuracy.

The quickest evaluation: no training, no learning rate, one pass over the images. Source: DINO, section 3.2; the
vote is that of Wu et al., "Unsupervised feature learning via non-parametric instance discrimination", section 3.4.

Each process holds the features of its part of the images, and all search at the same time: every chunk of test images
goes to all processes, each finds the nearest of its own training images, and `merge_ranks` merges them, bit-identical
to the search of one process. Similarity is the cosine,

    s_ij = x_i . x_j / (|x_i| |x_j|)

computed block by block, so that memory does not grow with the number of images. Of equally similar images those that
come first in the training set are the nearer ones. All matrix products have one size, because rounding depends on the
size: with AVX-512 none of 60 million similarities changed with the place of its images.
"""

import logging
import math
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
from dino_sparo.models.encoder import Encoder
from dino_sparo.runtime.agree import all_or_none
from dino_sparo.runtime.collectives import all_gather_ragged
from dino_sparo.runtime.launch import world_size
from dino_sparo.runtime.logs import progress

logger = logging.getLogger(__name__)

TOP = 5  # how many of the best classes are ranked
TEST_CHUNK = 512  # test images at a time
PRODUCT_ROWS = 4096  # training images in a matrix product; test images are TEST_CHUNK
# The largest intermediate is one block of similarities, test images x (TRAIN_CHUNK + k).
TRAIN_CHUNK = 3 * PRODUCT_ROWS
MIN_NORM = 1e-12  # a feature of zeros is similar to none


class KNNResult(NamedTuple):
    """Accuracies in percent: the first class is right, one of the first five is right."""

    top1: float
    top5: float


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

    The images of `train_source` vote on those of `val_source`, whose labels become the training images' numbers.
    `options` and the other arguments are those of `extract_split` and `classify_shards`.
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


def knn_classify(
    train_features: Float[Tensor, "train _"],
    train_labels: Int[Tensor, " _"],
    test_features: Float[Tensor, "test _"],
    test_labels: Int[Tensor, " _"],
    k: Sequence[int] = (20,),
    temperature: float = 0.07,
) -> dict[int, KNNResult]:
    """`classify_shards` in one process, on the features' device; labels are non-negative, gaps are allowed."""
    train, test = (
        Features(features, labels, torch.arange(len(labels)))
        for features, labels in ((train_features, train_labels), (test_features, test_labels))
    )
    return classify_shards(train, test, k, temperature, train_features.device)


def classify_shards(
    train: Features, val: Features, k: Sequence[int], temperature: float, device: torch.device
) -> dict[int, KNNResult]:
    """Classify by the weighted vote of the nearest training images; the accuracy for each number of neighbours.

        sim_i = x . x_i / (||x|| ||x_i||),   vote_c = sum over the k most similar i with label c of exp(sim_i / tau)

    The first class is the one with most votes; of equal votes the smaller label comes first. Top-5 is among the classes
    that have a vote. The reference fills up with arbitrary ones of its 1000 classes, which inflates top-5 when there
    are few classes.

    Features need not be normalised: they are here, block by block. Similarities are fp32, votes fp64. All processes
    get the result, which is bit-identical for any number of them.

    Args:
        train: this process' share, contiguous and in rank order as `ShardSampler` deals it; searched where it is kept.
        val: this process' share.
        k: numbers of neighbours, which share one search. A number above that of the training images means all of them.
        temperature: tau.
        device: where the processes talk to each other.
    """
    (num_train, _), (num_val, _) = (total_images(part, device) for part in (train, val))
    width = int(all_gather_ragged(torch.tensor([train.features.shape[1]], device=device)).max())
    with all_or_none("checking the features of k-NN"):
        # A process without images does not know how wide features are.
        features, own = (
            part.features if len(part.features) else part.features.new_empty(0, width) for part in (train, val)
        )
        voters = Voters(features, train.labels, k, temperature, num_train, device)
        _check_labels("test", val.labels)
        if num_val == 0:
            raise ValueError("test_features are empty; k-NN needs at least one image on each side")
        if own.shape[1] != width:
            raise ValueError(
                f"train_features have {width} numbers per image and test_features {own.shape[1]}; they must come from "
                f"the same encoder"
            )
        checked_lengths("test", own)
    rows = max(TEST_CHUNK // world_size(), 1)
    longest = int(all_gather_ragged(torch.tensor([len(own)], device=device)).max())
    parts = ((own[start : start + rows], val.labels[start : start + rows]) for start in range(0, longest, rows))
    chunks = ((all_gather_ragged(x.to(device)), all_gather_ragged(y.to(device))) for x, y in parts)
    return _accuracies(voters, chunks, -(-longest // rows))


class Voters:
    """Training images that vote, or this process' share of them.

    Args:
        features: (train, F), of any scale; may be empty where other processes have some.
        labels: (train,).
        ks: numbers of neighbours.
        temperature: tau.
        num_train: training images of all processes.
        device: where the processes talk to each other.
    """

    def __init__(
        self,
        features: Float[Tensor, "train _"],
        labels: Int[Tensor, " _"],
        ks: Sequence[int],
        temperature: float,
        num_train: int,
        device: torch.device,
    ) -> None:
        _check_labels("train", labels)
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
        similarities, labels = merge_ranks(similarities, self.labels[rows], k, self.device)
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


def _check_labels(name: str, labels: Tensor) -> None:
    if len(labels) and int(labels.min()) < 0:
        raise ValueError(f"{name}_labels hold {int(labels.min())}; labels are non-negative, so these images have none")


class TrainSet:
    """Features as they are, beside one over their lengths: a normalised copy would double the memory."""

    def __init__(self, features: Float[Tensor, "train F"]) -> None:
        self.features = features
        self.scales = checked_lengths("train", features).clamp_(min=MIN_NORM).reciprocal_()


@torch.no_grad()
def nearest(train: TrainSet, images: Float[Tensor, "m F"], k: int) -> tuple[Tensor, Tensor]:
    """The k most similar training images of each test image, best first: similarities and indices, (m, k).

    `images` have length one, and are at most `TEST_CHUNK`; similarities are computed in their precision.
    """
    step = max(TRAIN_CHUNK, k)
    similarities = images.new_full((len(images), k), -math.inf)
    indices = torch.zeros(len(images), k, dtype=torch.int64, device=images.device)
    padded = _filled_up(images, TEST_CHUNK)
    # The best so far stand before each block: worse candidates are passed over quickly; earlier candidates win ties.
    block = images.new_empty(len(images), k + min(step, len(train.features)))
    products = images.new_empty(TEST_CHUNK, PRODUCT_ROWS)
    for start in range(0, len(train.features), step):
        stop = min(start + step, len(train.features))
        compared = block[:, : k + stop - start]
        compared[:, :k] = similarities
        for first in range(start, stop, PRODUCT_ROWS):
            last = min(first + PRODUCT_ROWS, stop)
            begin = max(min(first, len(train.features) - PRODUCT_ROWS), 0)  # earlier rows rather than zeros: no copy
            rows = train.features[begin : begin + PRODUCT_ROWS].to(images.dtype)
            torch.mm(padded, _filled_up(rows, PRODUCT_ROWS).t(), out=products)
            columns = compared[:, k + first - start : k + last - start]
            torch.mul(products[: len(images), first - begin : last - begin], train.scales[first:last], out=columns)
        similarities, positions = first_largest(compared, k)
        before = indices.gather(1, positions.clamp(max=k - 1))
        indices = torch.where(positions < k, before, positions + (start - k))
    return similarities, indices


def _filled_up(rows: Float[Tensor, "n F"], size: int) -> Float[Tensor, "size F"]:
    """The rows, and zeros below them."""
    return rows if len(rows) == size else torch.cat((rows, rows.new_zeros(size - len(rows), rows.shape[1])))


def first_largest(values: Float[Tensor, "m n"], k: int) -> tuple[Float[Tensor, "m k"], Int[Tensor, "m k"]]:
    """The k largest values of each row and their positions, largest first, of equal ones the first first.

    torch leaves open which of equal values its `topk` takes, and in which order, so rows with some are sorted anew.
    """
    largest, positions = values.topk(min(k + 1, values.shape[1]))
    is_tied = largest[:, 1:] == largest[:, :-1]
    largest, positions = largest[:, :k].contiguous(), positions[:, :k].contiguous()
    rows = is_tied[:, k - 1 :].any(dim=1).nonzero().flatten()  # a value that is left out equals the last one taken
    if len(rows):
        positions[rows] = values[rows].sort(dim=1, descending=True, stable=True).indices[:, :k]
    rows = is_tied.any(dim=1).nonzero().flatten()
    if len(rows):
        ascending = positions[rows].sort(dim=1).values
        largest[rows], order = values[rows].gather(1, ascending).sort(dim=1, descending=True, stable=True)
        positions[rows] = ascending.gather(1, order)
    return largest, positions


def merge_ranks(
    similarities: Float[Tensor, "m own"], labels: Int[Tensor, "m own"], k: int, device: torch.device
) -> tuple[Float[Tensor, "m k"], Int[Tensor, "m k"]]:
    """Neighbours that each process found for the same test images -> the k most similar of all, and their labels.

    Of equally similar images the lower rank's come first: it holds the earlier part of the training set. A process with
    fewer than k training images gives fewer than k.
    """
    if world_size() == 1:
        return similarities, labels
    width = torch.tensor([similarities.shape[1]], device=device)
    most = int(all_gather_ragged(width).max())
    missing = most - similarities.shape[1]
    padded = F.pad(similarities.to(device), (0, missing), value=-math.inf)
    padded_labels = F.pad(labels.to(device), (0, missing), value=-1)
    # Ranks one below the other -> side by side, (m, ranks * most).
    every, every_label = (
        all_gather_ragged(part).unflatten(0, (world_size(), -1)).transpose(0, 1).flatten(1)
        for part in (padded, padded_labels)
    )
    largest, order = every.sort(dim=1, descending=True, stable=True)
    return largest[:, :k], every_label.gather(1, order[:, :k])


def checked_lengths(name: str, features: Tensor) -> Float[Tensor, " images"]:
    """The features' lengths; refuses features that are not finite."""
    precision = torch.promote_types(features.dtype, torch.float32)
    lengths = torch.linalg.vector_norm(features, dim=1, dtype=precision).float()
    if not lengths.isfinite().all():
        row = int(lengths.isfinite().logical_not().nonzero()[0])
        raise ValueError(f"{name}_features of image {row} are not finite; the encoder is broken or overflowed")
    return lengths

"""Features -> accuracy of weighted k nearest neighbours.

    python eval_knn.py --pretrained_weights output/checkpoint.pth --data_path data/imagenet
    torchrun --nproc_per_node=8 eval_knn.py --pretrained_weights output/checkpoint.pth --data_path data/imagenet

Prints a table and writes knn_WEIGHTS_DATA.json. Options as in facebookresearch/dino. Source: DINO, section 3.2; the
vote is that of Wu et al., "Unsupervised feature learning via non-parametric instance discrimination", section 3.4.

Each process has the features of its share of the images. Every chunk of test images goes to all processes, each process
finds the nearest of its training images, and `merge_ranks` merges these, bit-identical to the search of one process.
Similarity is the cosine,

    s_ij = x_i . x_j / (|x_i| |x_j|)

computed block by block, so that memory does not grow with the number of images. Of equally similar images, the first in
the training set is the nearest. All matrix products have one size, because rounding depends on the size; the place of
an image within a product has changed no similarity so far (docs/verification.md).
"""

import argparse
import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from dino_sparo.data.defaults import EXIF
from dino_sparo.draw.tables import text_table
from dino_sparo.evaluation.features import (
    Features,
    check_dump,
    check_same_weights,
    gather_features,
    image_counts,
    load_features,
    save_features,
)
from dino_sparo.evaluation.options import KNN_BLOCKS
from dino_sparo.evaluation.result import ResultFile
from dino_sparo.evaluation.task import EncoderTask
from dino_sparo.runtime.collectives import all_gather_ragged, all_or_none
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.launch import world_size
from dino_sparo.runtime.logs import progress
from dino_sparo.weights.released import take_released_weights
from dino_sparo.weights.results import Score

logger = logging.getLogger(__name__)

TOP = 5  # classes that are ranked
TEST_CHUNK = 512  # test images at a time
PRODUCT_ROWS = 4096  # training images in a matrix product; test images are TEST_CHUNK
# The largest intermediate is one block of similarities, test images x (TRAIN_CHUNK + k).
TRAIN_CHUNK = 3 * PRODUCT_ROWS
MIN_NORM = 1e-12  # a feature of zeros is similar to none


class KNNResult(NamedTuple):
    """Accuracies in percent: the first class is right, one of the first five is right."""

    top1: float
    top5: float


def classify_shards(
    train: Features, val: Features, k: Sequence[int], temperature: float, device: torch.device
) -> dict[int, KNNResult]:
    """Accuracy of the weighted vote of the nearest training images, for each number of neighbours.

        sim_i = x . x_i / (||x|| ||x_i||),   vote_c = sum over the k most similar i with label c of exp(sim_i / tau)

    The class with most votes comes first; of equal votes, the smaller label. Only classes with a vote count for top-5.
    The reference fills up with arbitrary ones of its 1000 classes, which inflates top-5 when there are few classes.

    Features need not have length one. Similarities are fp32, votes fp64. All processes get the result, which is
    bit-identical for any number of processes.

    Args:
        train: this process' share, as `ShardSampler` deals it; searched on its device.
        val: this process' share.
        k: numbers of neighbours, which share one search. With fewer training images, all of them vote.
        temperature: tau.
        device: of the collectives.
    """
    counts = image_counts(device, train=train, val=val)
    num_train, num_val = counts["num_train"], counts["num_val"]
    width = int(all_gather_ragged(torch.tensor([train.features.shape[1]], device=device)).max())
    with all_or_none("checking the features of k-NN"):
        features, lengths = checked_features("train", train, num_train, width)
        test_features, _ = checked_features("test", val, num_val, width)
    if too_many := [number for number in k if number > num_train]:
        logger.warning("k=%s is more than the %d training images; all of them vote", too_many, num_train)
    neighbours = {number: min(number, num_train) for number in k}
    most, stops = max(neighbours.values()), sorted(set(neighbours.values()))
    train_labels = train.labels.to(features.device)
    rows = max(TEST_CHUNK // world_size(), 1)
    longest = int(all_gather_ragged(torch.tensor([len(test_features)], device=device)).max())
    hits = {number: [0, 0] for number in k}
    for start in progress(range(0, longest, rows), desc="k-NN"):
        # The same test images on every process.
        images, labels = (all_gather_ragged(x[start : start + rows].to(device)) for x in (test_features, val.labels))
        images = F.normalize(images.to(features.device).float(), dim=1)
        similarities, indices = nearest(features, lengths, images, min(most, len(train_labels)))
        similarities, voting = merge_ranks(similarities, train_labels[indices], most, device)
        ranked = rank_classes(voting, similarities, stops, temperature)
        for number in k:
            right = ranked[neighbours[number]] == labels[:, None].to(voting.device)
            hits[number][0] += int(right[:, 0].sum())
            hits[number][1] += int(right.any(dim=1).sum())
    return {number: KNNResult(100.0 * one / num_val, 100.0 * five / num_val) for number, (one, five) in hits.items()}


def checked_features(
    name: str, part: Features, num_images: int, width: int
) -> tuple[Float[Tensor, "images F"], Float[Tensor, " images"]]:
    """Features of a split, and their lengths; UserError without images, labels or finite features."""
    if num_images == 0:
        raise UserError(f"{name}_features are empty; k-NN needs at least one image on each side")
    if len(part.labels) and int(part.labels.min()) < 0:
        raise UserError(f"{name}_labels hold {int(part.labels.min())}; labels are non-negative")
    # A process without images does not know the width.
    features = part.features if len(part.features) else part.features.new_empty(0, width)
    if features.shape[1] != width:
        raise UserError(f"train_features have {width} numbers per image and {name}_features {features.shape[1]}")
    precision = torch.promote_types(features.dtype, torch.float32)
    lengths = torch.linalg.vector_norm(features, dim=1, dtype=precision).float()
    if not lengths.isfinite().all():
        row = int(lengths.isfinite().logical_not().nonzero()[0])
        raise UserError(f"{name}_features of image {row} are not finite; the encoder is broken or overflowed")
    return features, lengths


def rank_classes(
    labels: Tensor, similarities: Tensor, ks: list[int], temperature: float
) -> dict[int, Int[Tensor, "m 5"]]:
    """The five classes with most votes, for several k at once; -1 where fewer classes have votes.

    Args:
        labels: (m, k), of the neighbours, nearest first.
        similarities: (m, k).
        ks: ascending, the last is k.
        temperature: tau.
    """
    # Relative to the nearest image, so that no temperature overflows; a common factor changes no ranking.
    weights = ((similarities - similarities[:, :1]).double() / temperature).exp()
    classes, columns = labels.unique(return_inverse=True)  # ascending
    votes = weights.new_full((len(labels), len(classes)), -1.0)  # less than a vote that underflows to zero
    rankings = {}
    # One neighbour after the other, so that the order of the sums is fixed and all k share the sums.
    for neighbour in range(max(ks)):
        column = columns[:, neighbour : neighbour + 1]
        votes.scatter_(1, column, votes.gather(1, column).clamp(min=0) + weights[:, neighbour : neighbour + 1])
        if neighbour + 1 in ks:
            sums, best = votes.sort(dim=1, descending=True, stable=True)
            ranking = classes[best].masked_fill_(sums < 0, -1)[:, :TOP]
            rankings[neighbour + 1] = F.pad(ranking, (0, TOP - ranking.shape[1]), value=-1)
    return rankings


@torch.no_grad()
def nearest(
    train: Float[Tensor, "train F"], lengths: Float[Tensor, " train"], images: Float[Tensor, "m F"], k: int
) -> tuple[Tensor, Tensor]:
    """Similarities and indices (m, k) of the k most similar training images of each test image, best first.

    `lengths` are the lengths of `train`, since a normalised copy would double the memory. The at most `TEST_CHUNK`
    features in `images` have length one; similarities have their precision.
    """
    scales = lengths.clamp(min=MIN_NORM).reciprocal()
    step = max(TRAIN_CHUNK, k)
    similarities = images.new_full((len(images), k), -math.inf)
    indices = torch.zeros(len(images), k, dtype=torch.int64, device=images.device)
    padded = _filled_up(images, TEST_CHUNK)
    # The best images so far stand before each block, so that earlier images win ties.
    block = images.new_empty(len(images), k + min(step, len(train)))
    products = images.new_empty(TEST_CHUNK, PRODUCT_ROWS)
    for start in range(0, len(train), step):
        stop = min(start + step, len(train))
        compared = block[:, : k + stop - start]
        compared[:, :k] = similarities
        for first in range(start, stop, PRODUCT_ROWS):
            last = min(first + PRODUCT_ROWS, stop)
            begin = max(min(first, len(train) - PRODUCT_ROWS), 0)  # earlier rows rather than zeros: no copy
            rows = train[begin : begin + PRODUCT_ROWS].to(images.dtype)
            torch.mm(padded, _filled_up(rows, PRODUCT_ROWS).t(), out=products)
            columns = compared[:, k + first - start : k + last - start]
            torch.mul(products[: len(images), first - begin : last - begin], scales[first:last], out=columns)
        similarities, positions = first_largest(compared, k)
        before = indices.gather(1, positions.clamp(max=k - 1))
        indices = torch.where(positions < k, before, positions + (start - k))
    return similarities, indices


def _filled_up(rows: Float[Tensor, "n F"], size: int) -> Float[Tensor, "size F"]:
    """The rows, and zeros below them."""
    return rows if len(rows) == size else torch.cat((rows, rows.new_zeros(size - len(rows), rows.shape[1])))


def first_largest(values: Float[Tensor, "m n"], k: int) -> tuple[Float[Tensor, "m k"], Int[Tensor, "m k"]]:
    """The k largest values of each row and their positions, largest first; of equal values, the first comes first.

    torch's `topk` takes any of equal values in any order, so rows with equal values are sorted.
    """
    largest, positions = values.topk(min(k + 1, values.shape[1]))
    rows = (largest[:, 1:] == largest[:, :-1]).any(dim=1).nonzero().flatten()
    largest, positions = largest[:, :k].contiguous(), positions[:, :k].contiguous()
    if len(rows):
        ordered = values[rows].sort(dim=1, descending=True, stable=True)
        largest[rows], positions[rows] = ordered.values[:, :k], ordered.indices[:, :k]
    return largest, positions


def merge_ranks(
    similarities: Float[Tensor, "m own"], labels: Int[Tensor, "m own"], k: int, device: torch.device
) -> tuple[Float[Tensor, "m k"], Int[Tensor, "m k"]]:
    """The neighbours of the same test images on each process -> the k most similar of all, and their labels.

    Of equally similar images, those of the lower rank come first, which has the earlier part of the training set. A
    process with fewer than k training images gives fewer than k neighbours.
    """
    if world_size() == 1:
        return similarities, labels
    every, every_label = (all_gather_ragged(part.t().contiguous().to(device)).t() for part in (similarities, labels))
    largest, order = every.sort(dim=1, descending=True, stable=True)
    return largest[:, :k], every_label.gather(1, order[:, :k])


def evaluate_checkpoint(args: argparse.Namespace) -> dict[str, Any]:
    """Evaluate the encoder or the cached features that the options name, write the result, print the table."""
    take_released_weights(args)
    task = EncoderTask.start(args)
    name = "knn" if args.n_last_blocks == KNN_BLOCKS else f"knn_{args.n_last_blocks}blocks"
    file, train, val, record = open_features(task, name)
    results = classify_shards(train, val, args.nb_knn, args.temperature, task.device)
    counts = image_counts(task.device, train=train, val=val)
    headline = [Score(f"{k}-NN", accuracy.top1) for k, accuracy in results.items()]
    result = {
        "evaluation": "weighted k-NN",
        "results": [
            {"k": k, "neighbours": min(k, counts["num_train"]), **accuracy._asdict()} for k, accuracy in results.items()
        ],
        "similarity": "cosine",
        "temperature": args.temperature,
        **record,
        "images": {**record.get("images", {}), **counts},
    }
    rows = [(f"{k}", f"{accuracy.top1:.2f}", f"{accuracy.top5:.2f}") for k, accuracy in results.items()]
    return file.write(result, text_table([("k", "top-1 %", "top-5 %"), *rows]), headline=headline)


def open_features(task: EncoderTask, name: str, **options: Any) -> tuple[ResultFile, Features, Features, dict]:
    """The result file of an evaluation of features, from disk or by the encoder: as `load` or `extract` gives them."""
    cached = load(task) if task.args.load_features else None
    file = task.open_result(name, cached[2] if cached else None, ("dump_features", "load_features"), **options)
    return file, *(cached or extract(task))


def load(task: EncoderTask) -> tuple[Features, Features, dict]:
    """This process' share of the features of both splits on disk, and their record."""
    args = task.args
    train, val, record = load_features(Path(args.load_features))
    check_beside_cache(args, record)
    check_same_weights(record.get("encoder", {}).get("sha256"), args.pretrained_weights, args.load_features)
    return train.share().to(task.storage), val.share().to(task.storage), record


def check_beside_cache(args: argparse.Namespace, record: Mapping[str, Any]) -> None:
    """Refuse options that contradict the record of features on disk; take the record's value of all other options."""
    made = {
        "data_path": record.get("images", {}).get("data_path"),
        "n_last_blocks": record.get("feature", {}).get("n_last_blocks"),
        "precision": record.get("feature", {}).get("precision"),
        "untrained": record.get("encoder", {}).get("untrained"),
        "exif": record.get("view", {}).get("exif"),
    }
    refused = [name for name in ("slots", "dump_features", "img_size") if getattr(args, name)]
    for name, cached in made.items():
        default = {"n_last_blocks": KNN_BLOCKS, "precision": "fp32", "exif": EXIF[0]}.get(name)
        if getattr(args, name) and getattr(args, name) not in (default, cached):
            refused.append(name)
        elif cached is not None:
            setattr(args, name, cached)
    for name in refused:
        raise UserError(f"--{name} {getattr(args, name)} with --load_features: leave out one of the two")


def extract(task: EncoderTask) -> tuple[Features, Features, dict]:
    """This process' share of the features of both splits, and their record."""
    layers = task.args.n_last_blocks
    encoder = task.encoder  # opened before the images: wrong weights are refused first
    encode = None if layers == 1 else partial(encoder.probe_features, n_last_blocks=layers)
    record = {
        **task.protocol(),
        "feature": {
            "name": "encoding" if layers == 1 else f"class tokens of {layers} layers, the last of them the encoding",
            "n_last_blocks": layers,
            "dim": encoder.backbone.embed_dim * (layers - 1) + encoder.encoding_dim,
            "precision": task.args.precision,
        },
        **task.images_record(),
    }
    if task.args.dump_features:
        check_dump(task.args.dump_features, record, task.args.overwrite)
    train, val = (task.features(source, encode).normalize_() for source in task.splits)
    if task.args.dump_features:
        whole_train, whole_val = (gather_features(part, task.device, on_rank_0=True) for part in (train, val))
        save_features(Path(task.args.dump_features), whole_train, whole_val, record)
    return train, val, record

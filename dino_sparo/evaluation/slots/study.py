"""Slots' values of labelled images -> what each slot alone knows, and accuracy against the number of slots kept.

The encoder runs once. A choice of slots is a choice of columns, so every number is that of `eval_knn.py` with these
`--slots`. Slots are ranked on the training images alone: a seeded part of them, the choosing images, is
classified by the others. The validation images have no say in the ranking. Source of the question: SPARO, section 5.1
and table 4, for CLIP.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import repeat
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from dino_sparo.evaluation.features import Features, gather_features
from dino_sparo.evaluation.knn.classify import classify_shards
from dino_sparo.evaluation.linear.probe import (
    LinearProbe,
    ProbeSGD,
    cached_batches,
    cosine_factor,
    probe_accuracy,
    scaled_learning_rates,
    train_one_epoch,
)
from dino_sparo.runtime.launch import world_size
from dino_sparo.runtime.logs import progress

MAX_CHOOSING_SHARE = 5  # at most one of so many training images chooses
PROBE_BATCH = 256
Accuracies = Callable[[tuple[int, ...]], dict[str, float]]


@dataclass(frozen=True)
class StudyImages:
    """This process' share of the images.

    Attributes:
        train: encodings (images, L*V) as the encoder gives them.
        val: encodings of the validation images.
        chooses: (images,), which training images rank the slots.
        num_slots: L.
        num_classes: of the training images.
        device: where processes talk to each other and probes are trained.
    """

    train: Features
    val: Features
    chooses: Bool[Tensor, " images"]
    num_slots: int
    num_classes: int
    device: torch.device


@dataclass(frozen=True)
class ProbeSettings:
    """Linear probes: epochs, learning rates for a batch of 256, and the seed of weights and order."""

    epochs: int = 30
    learning_rates: tuple[float, ...] = (0.01, 0.1, 1.0)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"epochs={self.epochs}; a probe needs at least one")
        scaled_learning_rates(self.learning_rates, PROBE_BATCH)

    def accuracies(self, images: StudyImages) -> Accuracies:
        """Slots -> the accuracies of their probe; each set of slots is trained once."""
        return cache(lambda slots: probe_slots(images, slots, self))


def choosing_rows(train: Features, num_images: int, num_choosing: int, seed: int) -> Bool[Tensor, " images"]:
    """Which of this process' training images rank the slots: a random part, the same for any number of processes.

    Args:
        train: this process' share.
        num_images: size of the source.
        num_choosing: at most a fifth of the source.
        seed: of the choice.
    """
    number = min(num_choosing, num_images // MAX_CHOOSING_SHARE)
    if number < 1:
        raise ValueError(
            f"choosing_images={num_choosing} of {num_images} training images: a fifth of them, at least one image, "
            f"must rank the slots; give more images"
        )
    chosen = np.random.default_rng(seed).permutation(num_images)[:number]
    return torch.isin(train.indices, torch.from_numpy(chosen).to(train.indices.device))


def slot_columns(
    features: Features, slots: Sequence[int], num_slots: int, rows: Bool[Tensor, " images"] | None = None
) -> Features:
    """Encodings (images, L*V) -> those of some slots (chosen images, k*V), in the order of `slots`, copied once.

    Args:
        features: of all images.
        slots: to keep.
        num_slots: L.
        rows: images to keep; None: all.
    """
    values = features.features.unflatten(1, (num_slots, -1))
    if rows is None:
        return replace(features, features=values[:, list(slots)].flatten(1))
    columns = torch.tensor(list(slots), device=values.device)
    kept = values[rows.nonzero(), columns].flatten(1)
    return Features(kept, features.labels[rows], features.indices[rows])


def knn_accuracies(images: StudyImages, k: int, temperature: float) -> Accuracies:
    """Slots -> their k-NN accuracy together; each set of slots is measured once."""

    def top1(train: Features, judged: Features) -> float:
        train, judged = train.normalize_(), judged.normalize_()
        return classify_shards(train, judged, [k], temperature, images.device)[k].top1

    @cache
    def accuracies(slots: tuple[int, ...]) -> dict[str, float]:
        rows = (~images.chooses, images.chooses)
        choosing = [slot_columns(images.train, slots, images.num_slots, part) for part in rows]
        held_out = [slot_columns(part, slots, images.num_slots) for part in (images.train, images.val)]
        return {"top1_choosing": top1(*choosing), "top1_held_out": top1(*held_out)}

    return accuracies


def rank_slots(accuracies: Accuracies, num_slots: int) -> list[dict[str, Any]]:
    """Rows `slot`, `top1_choosing`, `top1_held_out` of each slot alone, best first on the choosing images.

    Of equally good slots the first comes first.
    """
    rows = [{"slot": slot, **accuracies((slot,))} for slot in progress(range(num_slots), desc="slots alone")]
    return sorted(rows, key=lambda row: (-row["top1_choosing"], row["slot"]))


def random_orders(num_slots: int, num_draws: int, seed: int) -> list[list[int]]:
    """Random orders of the slots; of each the first k are kept, for every k."""
    return [np.random.default_rng([seed, draw]).permutation(num_slots).tolist() for draw in range(num_draws)]


def accuracy_curve(
    accuracies: Accuracies, orders: Sequence[Sequence[int]], numbers: Sequence[int]
) -> list[dict[str, Any]]:
    """Accuracy of the first k slots of the ranking and of random orders, for some k.

    Args:
        accuracies: slots, ascending -> accuracies.
        orders: the ranking, then random orders.
        numbers: k.

    Returns:
        For each k `num_kept`, the ranked slots' accuracies, and `random`, see `spread`.
    """
    curve = []
    for number in progress(numbers, desc="slots together"):
        ranked, *drawn = (accuracies(tuple(sorted(order[:number]))) for order in orders)
        random = spread([row["top1_held_out"] for row in drawn])
        curve.append({"num_kept": number, **ranked, "random": random})
    return curve


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation (of a sample; None of one value) and the values."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "std": deviation, "draws": list(values)}


def probe_slots(images: StudyImages, slots: Sequence[int], settings: ProbeSettings) -> dict[str, float]:
    """Top-1 accuracy of a linear probe on some slots' values: `lr`, and `top1_choosing` and `top1_held_out` with it.

    The probes see the training images that do not choose; the choosing images pick the learning rate; the validation
    images judge. Features are cached, un-augmented and not normalised.
    """
    rows = images.chooses
    train, choosing = (slot_columns(images.train, slots, images.num_slots, part) for part in (~rows, rows))
    val = slot_columns(images.val, slots, images.num_slots)
    train = gather_features(train, images.device)
    batch_size = max(PROBE_BATCH // world_size(), 1)
    size = train.features.shape[1], images.num_classes, len(settings.learning_rates)
    probe = LinearProbe(*size, settings.seed).to(images.device)
    optimizer = ProbeSGD(probe, scaled_learning_rates(settings.learning_rates, batch_size * world_size()))
    batches = cached_batches(train, images.device, batch_size=batch_size, seed=settings.seed)
    for epoch in range(settings.epochs):
        train_one_epoch(probe, optimizer, batches(epoch), repeat(cosine_factor(epoch, settings.epochs)))
    top1 = [row["top1"] for row in probe_accuracy(probe, choosing.features, choosing.labels)]
    best = top1.index(max(top1))
    held_out = probe_accuracy(probe, val.features, val.labels)[best]["top1"]
    return {"lr": settings.learning_rates[best], "top1_choosing": top1[best], "top1_held_out": held_out}

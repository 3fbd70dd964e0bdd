"""Single maps and slots: the classes that they find, their redundancy, and matching of two models' slots."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from dino_sparo.evaluation.attention.maps import map_similarity
from dino_sparo.evaluation.objects.layouts import UNKNOWN

MIN_OBJECTS = 10  # a class of fewer objects is rare: its mean is far from 0 by chance
CLASS_SHUFFLES = 20  # of the objects' classes, for the control of selectivity
Jaccards = Float[np.ndarray, "objects maps"]
Lift = Float[np.ndarray, "maps classes"]
ClassesByImage = Sequence[Int[np.ndarray, " _"]]  # the classes of each image's objects


def describe_maps(
    jaccards: Jaccards, untrained: Jaccards, classes: ClassesByImage, class_names: Sequence[str], seed: int
) -> dict[str, Any]:
    """The mean Jaccard index of each map and, among known classes that are not rare, the class that it finds best."""
    found = jaccards.max(axis=1) > 0
    wins = np.bincount(jaccards[found].argmax(axis=1), minlength=jaccards.shape[1]) / len(jaccards)
    maps: list[dict[str, Any]] = [
        {"map": number, "jaccard": float(mean), "best_for": float(share)}
        for number, (mean, share) in enumerate(zip(jaccards.mean(axis=0), wins, strict=True))
    ]
    described = {"maps": maps, "found_by_no_map": float(1 - found.mean())}
    frequent, num_rare = without_rare(classes, len(class_names), MIN_OBJECTS)
    together = np.concatenate(frequent)
    seen = np.unique(together[together != UNKNOWN])
    if len(seen) < 2:
        return described
    lift = class_lift(jaccards, together, len(class_names))
    for entry, row in zip(maps, lift, strict=True):
        best = int(np.nanargmax(row))
        entry |= {"class": class_names[best], "lift": float(row[best])}
    return {
        **described,
        "classes": [
            {
                "class": class_names[number],
                "num_objects": int((together == number).sum()),
                "best_maps": np.argsort(-lift[:, number], kind="stable")[:3].tolist(),
                "lift": lift[:, number].tolist(),
            }
            for number in seen
        ],
        "selectivity": {
            "mean_best_lift": mean_best_lift(lift),
            "min_objects": MIN_OBJECTS,
            "rare_classes": num_rare,
            "shuffled": shuffled_lift(jaccards, frequent, len(class_names), seed),
            "untrained": mean_best_lift(class_lift(untrained, together, len(class_names))),
        },
    }


def class_lift(jaccards: Jaccards, classes: Int[np.ndarray, " objects"], num_classes: int) -> Lift:
    """Advantage of each map on objects of a class over its mean on all classes, in Jaccard points.

        r_om = J_om - mean_m J_om                 advantage of map m on object o, whose size helps all maps
        t_mc = mean of r_om over objects of class c
        lift_mc = t_mc - mean_c t_mc

    Objects of unknown class do not count. Classes without objects have NaN.
    """
    excess = jaccards - jaccards.mean(axis=1, keepdims=True)
    table = np.full((jaccards.shape[1], num_classes), np.nan)
    for number in np.unique(classes[classes != UNKNOWN]):
        table[:, number] = excess[classes == number].mean(axis=0)
    return table - np.nanmean(table, axis=1, keepdims=True)


def mean_best_lift(lift: Lift) -> float:
    """Selectivity: mean over maps of the lift on the class that the map finds best; for chance see `shuffled_lift`."""
    return float(np.nanmax(lift, axis=1).mean())


def shuffled_lift(jaccards: Jaccards, classes: ClassesByImage, num_classes: int, seed: int) -> list[float]:
    """`mean_best_lift` by chance, with classes shuffled among images of equally many objects.

    Objects of an image stay together, since they often have one class and similar scores.
    """
    rng, counts = np.random.default_rng(seed), np.array([len(of_image) for of_image in classes])
    lifts = []
    for _ in range(CLASS_SHUFFLES):
        origin = np.arange(len(classes))
        for count in np.unique(counts):
            origin[counts == count] = rng.permutation(origin[counts == count])
        shuffled = np.concatenate([classes[image] for image in origin.tolist()])
        lifts.append(mean_best_lift(class_lift(jaccards, shuffled, num_classes)))
    return lifts


def without_rare(classes: ClassesByImage, num_classes: int, min_objects: int) -> tuple[ClassesByImage, int]:
    """The classes of each image's objects, with UNKNOWN for rare classes, and the number of rare classes."""
    everything = np.concatenate(classes)
    counts = np.bincount(everything[everything != UNKNOWN], minlength=num_classes)
    rare = np.append(counts < min_objects, False)  # the last entry belongs to UNKNOWN, -1
    num_rare = int(((counts > 0) & (counts < min_objects)).sum())
    return [np.where(rare[of_image], UNKNOWN, of_image) for of_image in classes], num_rare


def map_redundancy(maps: Float[np.ndarray, "B maps h w"]) -> float:
    """Mean cosine of every two different maps of an image, in [0, 1]; NaN for a single map."""
    return _mean_of_pairs(map_similarity(maps))


def value_redundancy(slots: Float[np.ndarray, "B L V"]) -> float:
    """Mean absolute cosine of every two different slots of an image, without centering; NaN for a single slot."""
    norms = np.linalg.norm(slots, axis=-1, keepdims=True)
    unit = slots / np.where(norms > 0, norms, 1)
    return _mean_of_pairs(np.abs(np.einsum("blv,bmv->blm", unit, unit)).mean(axis=0))  # b image, l and m slots, v width


def _mean_of_pairs(table: Float[np.ndarray, "L L"]) -> float:
    """The mean of a square table without its diagonal."""
    count = len(table)
    return float((table.sum() - np.trace(table)) / (count * (count - 1))) if count > 1 else float("nan")


def slot_similarity(
    first: Float[np.ndarray, "images L V"], second: Float[np.ndarray, "images others width"]
) -> Float[np.ndarray, "L others"]:
    """Similarity of two models' slots, by their values for the same images: linear CKA.

        X (images, V), Y (images, V'), the values of two slots, centered over the images
        s = ||X^T Y||^2 / (||X^T X|| ||Y^T Y||),  Frobenius norms

    It is the squared correlation where V = V' = 1. Rotating a slot's value does not change it; a correlation coordinate
    by coordinate would compare axes that mean nothing across seeds. With few images it is above 0 by chance.
    Source: Kornblith et al., "Similarity of neural network representations revisited"; the RV coefficient.

    Returns:
        (L, others), in [0, 1]; 0 for a slot that has one value on all images.
    """
    first, second = (values.astype(np.float64) - values.mean(axis=0, dtype=np.float64) for values in (first, second))
    norms, other_norms = (
        np.array([np.linalg.norm(values[:, slot].T @ values[:, slot]) for slot in range(values.shape[1])])
        for values in (first, second)
    )
    flat = second.reshape(len(second), -1)
    products = (np.square(first[:, slot].T @ flat).reshape(-1, *second.shape[1:]) for slot in range(first.shape[1]))
    together = np.stack([product.sum(axis=(0, 2)) for product in products])
    scale = norms[:, None] * other_norms
    return np.clip(together / np.where(scale > 0, scale, 1), 0, 1)


def match_held_out(
    first: Float[np.ndarray, "images L V"], second: Float[np.ndarray, "images others width"]
) -> tuple[Int[np.ndarray, " pairs"], Int[np.ndarray, " pairs"], Float[np.ndarray, "L others"]]:
    """Match slots on every second image, so that the total similarity is largest, and compare them on the other images.

    On the images that chose it even a matching of noise looks better than its slots are. Where one model has more
    slots, some of them stay alone.

    Returns:
        Slots of the first model, their partners, and the similarities of all slots on the other images.
    """
    from scipy.optimize import linear_sum_assignment

    slots, partners = linear_sum_assignment(slot_similarity(first[::2], second[::2]), maximize=True)
    return slots, partners, slot_similarity(first[1::2], second[1::2])

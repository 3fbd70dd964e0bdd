"""Maps and objects of one image -> five measures of how well the maps find the objects, their bounds, moved maps.

A map is constant within a patch (nearest upsampling). So every measure on pixels follows exactly from the numbers of
pixels that objects have in patches, `PatchObjects`. Void pixels do not count.

Shapes: h, w rows and columns of the patch grid; maps, the slots or heads of an image.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from dino_sparo.evaluation.attention.maps import mass_mask
from dino_sparo.runtime.faults import UserError

MEASURES = ("jaccard", "mbo", "fg_ari", "pointing", "pointing_one_map")
NUM_SUBSETS = 5  # of an encoder's maps, with --maps
Maps = Float[np.ndarray, "maps h w"]
Scores = dict[str, float]  # measure -> number


class PatchObjects(NamedTuple):
    """The objects of an image, counted by patches.

    Attributes:
        pixels: (objects, h, w), pixels of each object in each patch; every object has at least one.
        alone: (objects, h, w), pixels that belong to no other object.
        valid: (h, w), pixels of each patch that are not void.
        centers: (objects, h, w), whether the middle pixel of the patch belongs to the object.
    """

    pixels: Int[np.ndarray, "objects h w"]
    alone: Int[np.ndarray, "objects h w"]
    valid: Int[np.ndarray, "h w"]
    centers: Bool[np.ndarray, "objects h w"]


def count_patches(
    masks: Bool[np.ndarray, "objects H W"], void: Bool[np.ndarray, "H W"], patch_size: int
) -> PatchObjects:
    """Count the pixels of objects in patches of P x P pixels; the middle pixel of a patch is (P // 2, P // 2)."""
    seen = masks & ~void
    middle = slice(patch_size // 2, None, patch_size)
    return PatchObjects(
        _per_patch(seen, patch_size),
        _per_patch(seen & (seen.sum(axis=0) == 1), patch_size),
        _per_patch(~void, patch_size),
        seen[..., middle, middle],
    )


def _per_patch(pixels: Bool[np.ndarray, "*B H W"], patch_size: int) -> Int[np.ndarray, "*B h w"]:
    height, width = pixels.shape[-2:]
    grid = (height // patch_size, patch_size, width // patch_size, patch_size)
    return pixels.reshape(*pixels.shape[:-2], *grid).sum(axis=(-3, -1))


def _flat(values: Shaped[np.ndarray, "*B h w"]) -> Shaped[np.ndarray, "*B patches"]:
    return values.reshape(*values.shape[:-2], values.shape[-2] * values.shape[-1])


def jaccards(regions: Bool[np.ndarray, "maps h w"], objects: PatchObjects) -> Float[np.ndarray, "objects maps"]:
    """Jaccard index of every object and every region of patches.

    J = |region and object| / |region or object|, in pixels that are not void
    """
    chosen = _flat(regions).astype(np.float64)
    pixels = _flat(objects.pixels)
    both = pixels @ chosen.T
    either = pixels.sum(axis=1)[:, None] + (chosen @ objects.valid.ravel())[None] - both
    return both / either


def map_jaccards(maps: Maps, objects: PatchObjects, share: float) -> Float[np.ndarray, "objects maps"]:
    """Jaccard index of every object and every map, reduced to the fewest patches with a share of the map's mass.

    Source: Caron et al., "Emerging properties in self-supervised vision transformers", section 4.2.2 and figure 4:
    VOC12, share 0.6, the best head. Our view and masks differ, so numbers cannot be compared with that figure.
    """
    return jaccards(mass_mask(maps, share), objects)


def assign_patches(maps: Maps) -> Bool[np.ndarray, "maps h w"]:
    """Each patch belongs to the map with the largest value there, the first of equal ones; maps are scaled to sum 1.

    Without scaling, a slot that attends mostly to the class token would get no patch.
    """
    mass = maps.sum(axis=(-2, -1), keepdims=True, dtype=np.float64)
    winners = (maps / np.where(mass > 0, mass, 1)).argmax(axis=0)
    return winners == np.arange(len(maps))[:, None, None]


def foreground_ari(segments: Bool[np.ndarray, "maps h w"], objects: PatchObjects) -> float:
    """Adjusted Rand index of segments and objects over the pixels that have exactly one object.

        n_os  pixels of object o in segment s,  a_o = sum_s n_os,  b_s = sum_o n_os,  n = sum_os n_os
        I = sum_os C(n_os, 2),  E = sum_o C(a_o, 2) sum_s C(b_s, 2) / C(n, 2),
        M = (sum_o C(a_o, 2) + sum_s C(b_s, 2)) / 2,      ARI = (I - E) / (M - E),  1 if M = E

    1 for equal partitions, 0 in the mean for random ones, possibly negative, NaN if no pixel has exactly one object.
    Equal to scikit-learn's adjusted_rand_score of all these pixels, which may be millions.
    Source: Hubert and Arabie, "Comparing partitions"; the foreground alone: Greff et al., IODINE.
    """
    table = _flat(objects.alone) @ _flat(segments).T.astype(np.float64)
    total = table.sum()
    if not total:
        return float("nan")
    together, rows, columns, pairs = (
        (n * (n - 1) / 2).sum() for n in (table, table.sum(axis=1), table.sum(axis=0), total)
    )
    expected = rows * columns / pairs if pairs else 0.0
    most = (rows + columns) / 2
    return 1.0 if most == expected else float((together - expected) / (most - expected))


def score_maps(maps: Maps, objects: PatchObjects, share: float) -> Scores:
    """All measures of one image with at least one object, means over its objects.

        jaccard           for each object the largest `map_jaccards`
        mbo               for each object the largest Jaccard index of a segment from `assign_patches`
        fg_ari            of these segments; NaN for fewer than two objects
        pointing          for each object whether any map's maximum lies in it; likelier with more maps
        pointing_one_map  for each object the share of maps whose maximum lies in it

    A maximum lies in an object if the middle pixel of its patch does. Of equal maxima, the first patch counts.
    Sources: for mBO Pont-Tuset et al., "Multiscale combinatorial grouping", 2017; for pointing Zhang et al., "Top-down
    neural attention by excitation backprop", which has one map for each class and a tolerance of 15 pixels.
    """
    segments = assign_patches(maps)
    hits = _flat(objects.centers)[:, _flat(maps).argmax(axis=1)]  # (objects, maps)
    several = (objects.alone.sum(axis=(1, 2)) > 0).sum() > 1
    return {
        "jaccard": float(map_jaccards(maps, objects, share).max(axis=1).mean()),
        "mbo": float(jaccards(segments, objects).max(axis=1).mean()),
        "fg_ari": foreground_ari(segments, objects) if several else float("nan"),
        "pointing": float(hits.any(axis=1).mean()),
        "pointing_one_map": float(hits.mean()),
    }


def map_subsets(num_maps: int, size: int | None, seed: int | Sequence[int]) -> Int[np.ndarray, "subsets K"]:
    """At most NUM_SUBSETS different random subsets of `size` maps; None: all maps.

    Subsets make encoders with different numbers of maps comparable. Each image has its own subsets, so that the
    interval over images includes their variance.
    """
    size = num_maps if size is None else size
    if not 1 <= size <= num_maps:
        raise UserError(f"maps={size}, but the encoder has {num_maps}; give 1 to {num_maps}, or leave --maps out")
    rng = np.random.default_rng(seed)
    subsets: set[tuple[int, ...]] = set()
    while len(subsets) < min(NUM_SUBSETS, math.comb(num_maps, size)):
        subsets.add(tuple(sorted(rng.choice(num_maps, size, replace=False).tolist())))
    return np.array(sorted(subsets))


def score_subsets(maps: Maps, objects: PatchObjects, share: float, subsets: Int[np.ndarray, "subsets K"]) -> Scores:
    """Mean of `score_maps` over subsets of the maps."""
    scores = [score_maps(maps[subset], objects, share) for subset in subsets]
    return {name: float(np.mean([of_subset[name] for of_subset in scores])) for name in MEASURES}


def grid_bounds(objects: PatchObjects) -> Scores:
    """Upper bounds of the measures for maps of whole patches.

    jaccard, mbo      the exact maximum for each object alone, so mbo may not be reached if objects share a patch
    fg_ari            NaN: unknown; to assign each patch to the object with most of its pixels is not always best
    pointing          whether the object has the middle pixel of any patch
    pointing_one_map  all maps point at the patch whose middle pixel belongs to the most objects
    """
    best = float(np.mean([_best_jaccard(pixels.ravel(), objects.valid.ravel()) for pixels in objects.pixels]))
    return {
        "jaccard": best,
        "mbo": best,
        "fg_ari": float("nan"),
        "pointing": float(objects.centers.any(axis=(1, 2)).mean()),
        "pointing_one_map": float(objects.centers.mean(axis=0).max()),
    }


def _best_jaccard(pixels: Int[np.ndarray, " patches"], valid: Int[np.ndarray, " patches"]) -> float:
    """The largest Jaccard index of an object and any set of patches.

    J > t means both - t * (other pixels) > t * |object|. The left side is largest for all patches in which the object's
    share exceeds a threshold. So the best set has the first patches, sorted by the object's share.
    """
    order = np.argsort(-pixels / np.maximum(valid, 1), kind="stable")
    both, all_of_them = np.cumsum(pixels[order]), np.cumsum(valid[order])
    return float((both / (pixels.sum() + all_of_them - both)).max())


def move_maps(maps: Maps, rng: np.random.Generator) -> Maps:
    """All maps of an image, moved cyclically by one random number of rows and columns.

    Moved maps keep their mass, peakedness, smoothness and similarity, but not their place.
    """
    rows, columns = maps.shape[-2:]
    moves = rng.integers(1, max(rows * columns, 2))  # not 0, which would not move the maps
    return np.roll(maps, divmod(int(moves), columns), axis=(-2, -1))


def bootstrap_interval(values: Float[np.ndarray, " images"], seed: int, draws: int = 1000) -> tuple[float, float]:
    """95 % interval of a mean: its 2.5 and 97.5 percentiles over resamples of the images with replacement."""
    rng, means = np.random.default_rng(seed), np.empty(draws)
    for draw in range(draws):  # one by one, since all draws of 100,000 images take a gigabyte
        means[draw] = values[rng.integers(len(values), size=len(values), dtype=np.int32)].mean()
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def summarize(values: Float[np.ndarray, " images"], seed: int) -> dict[str, float | int | list[float] | None]:
    """Mean, 95 % interval and number of the values that are not NaN."""
    present = values[~np.isnan(values)]
    if not len(present):
        return {"mean": None, "interval_95": None, "num_images": 0}
    interval = list(bootstrap_interval(present, seed))
    return {"mean": float(present.mean()), "interval_95": interval, "num_images": len(present)}

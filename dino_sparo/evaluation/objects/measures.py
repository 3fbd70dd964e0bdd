"""Maps and objects of one image -> how well the maps find the objects: four measures, their bounds, random maps.

A map has one value per patch and is constant within it (nearest-neighbour upsampling). So every measure on pixels
follows exactly from the numbers of pixels that objects have in patches, `PatchObjects`. Void pixels count nowhere.

Shapes: h, w rows and columns of the patch grid; maps, the slots or heads of an image.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from dino_sparo.evaluation.attention import mass_mask

MEASURES = ("jaccard", "mbo", "fg_ari", "pointing")


class PatchObjects(NamedTuple):
    """The objects of an image, counted by patches.

    Attributes:
        pixels: (objects, h, w), pixels of each object in each patch; every object has at least one.
        alone: (objects, h, w), those of them that no other object has.
        valid: (h, w), pixels of each patch that are not void.
        centres: (objects, h, w), whether the object has the pixel in the middle of the patch.
    """

    pixels: Int[np.ndarray, "objects h w"]
    alone: Int[np.ndarray, "objects h w"]
    valid: Int[np.ndarray, "h w"]
    centres: Bool[np.ndarray, "objects h w"]


def count_patches(
    masks: Bool[np.ndarray, "objects H W"], void: Bool[np.ndarray, "H W"], patch_size: int
) -> PatchObjects:
    """Count the pixels of objects in patches.

    Args:
        masks: (objects, H, W), whole patches.
        void: (H, W), pixels that count nowhere.
        patch_size: P, pixels. The middle of a patch is its pixel (P // 2, P // 2).
    """
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

    Args:
        regions: (maps, h, w), the patches of each region.
        objects: at least none.

    Returns:
        (objects, maps), in [0, 1].
    """
    chosen = _flat(regions).astype(np.float64)
    pixels = _flat(objects.pixels)
    both = pixels @ chosen.T
    either = pixels.sum(axis=1)[:, None] + (chosen @ objects.valid.ravel())[None] - both
    return both / either


def map_jaccards(
    maps: Float[np.ndarray, "maps h w"], objects: PatchObjects, share: float
) -> Float[np.ndarray, "objects maps"]:
    """Jaccard index of every object and every map, cut to the patches that hold a share of the map's mass.

    Source: Caron et al., "Emerging properties in self-supervised vision transformers", section 4.2.2 and table 7:
    VOC12, share 0.6, the best head. `mass_mask` keeps the patches that facebookresearch/dino's --threshold keeps.
    """
    return jaccards(mass_mask(maps, share), objects)


def assign_patches(maps: Float[np.ndarray, "maps h w"]) -> Bool[np.ndarray, "maps h w"]:
    """Each patch goes to the map that has most of its mass there: maps are scaled to sum 1 first; ties, to the first.

    Without the scaling a slot that attends mostly to the class token would get no patch.
    """
    mass = maps.sum(axis=(-2, -1), keepdims=True, dtype=np.float64)
    winners = (maps / np.where(mass > 0, mass, 1)).argmax(axis=0)
    return winners == np.arange(len(maps))[:, None, None]


def mean_best_overlap(segments: Bool[np.ndarray, "maps h w"], objects: PatchObjects) -> float:
    """mBO: for each object the largest Jaccard index of any segment, averaged over objects.

    Source: Pont-Tuset et al., "Multiscale combinatorial grouping", 2017.

    Args:
        segments: (maps, h, w), each patch in one of them.
        objects: at least one.
    """
    return float(jaccards(segments, objects).max(axis=1).mean())


def foreground_ari(segments: Bool[np.ndarray, "maps h w"], objects: PatchObjects) -> float:
    """Adjusted Rand index of segments and objects over the pixels that have exactly one object.

        n_os  pixels of object o in segment s,  a_o = sum_s n_os,  b_s = sum_o n_os,  n = sum_os n_os
        I = sum_os C(n_os, 2),  E = sum_o C(a_o, 2) sum_s C(b_s, 2) / C(n, 2),
        M = (sum_o C(a_o, 2) + sum_s C(b_s, 2)) / 2,      ARI = (I - E) / (M - E),  1 if M = E

    1 for equal partitions, 0 in the mean for random ones, and possibly negative. With one object it is 1 if one
    segment has all of it, else 0: it says nothing about separation. Equal to scikit-learn's adjusted_rand_score.
    Source: Hubert and Arabie, "Comparing partitions"; the foreground alone: Greff et al., IODINE.

    Args:
        segments: (maps, h, w), each patch in one of them.
        objects: any.

    Returns:
        ARI; NaN without such a pixel.
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


def pointing_hits(maps: Float[np.ndarray, "maps h w"], objects: PatchObjects) -> Bool[np.ndarray, "objects maps"]:
    """Whether a map's maximum lies in an object: whether the object has the middle pixel of that patch.

    Of several equal maxima the first patch counts, row by row. Source: Zhang et al., "Top-down neural attention by
    excitation backprop", without its tolerance of 15 pixels.
    """
    peaks = _flat(maps).argmax(axis=1)
    return _flat(objects.centres)[:, peaks]


def score_maps(maps: Float[np.ndarray, "maps h w"], objects: PatchObjects, share: float) -> dict[str, float]:
    """All measures of one image, means over its objects.

        jaccard    for each object its best map's Jaccard index, the map cut to a share of its mass
        mbo        for each object its best segment's Jaccard index, segments by `assign_patches`
        fg_ari     of these segments; NaN for fewer than two objects, as it says nothing then
        pointing   for each object whether any map's maximum lies in it

    Args:
        maps: (maps, h, w), non-negative.
        objects: at least one.
        share: of a map's mass, in (0, 1].
    """
    segments = assign_patches(maps)
    return {
        "jaccard": float(map_jaccards(maps, objects, share).max(axis=1).mean()),
        "mbo": mean_best_overlap(segments, objects),
        "fg_ari": _ari_of_several(segments, objects),
        "pointing": float(pointing_hits(maps, objects).any(axis=1).mean()),
    }


def _ari_of_several(segments: Bool[np.ndarray, "maps h w"], objects: PatchObjects) -> float:
    several = (objects.alone.sum(axis=(1, 2)) > 0).sum() > 1
    return foreground_ari(segments, objects) if several else float("nan")


def grid_bounds(objects: PatchObjects) -> dict[str, float]:
    """The measures of the best maps that are made of whole patches, each object having its own.

        jaccard, mbo  the exact maximum: patches enter by their share of the object while J grows. An object's best
                      patches do not depend on the other objects, so mbo is reached where no two want the same patch.
        fg_ari        every patch goes to the object that has most of it; a very good assignment, not a proven bound
        pointing      whether the object has the middle pixel of any patch

    Args:
        objects: at least one.
    """
    best = float(np.mean([_best_jaccard(pixels.ravel(), objects.valid.ravel()) for pixels in objects.pixels]))
    owners = objects.alone.argmax(axis=0) == np.arange(len(objects.alone))[:, None, None]
    reached = float(objects.centres.any(axis=(1, 2)).mean())
    return {"jaccard": best, "mbo": best, "fg_ari": _ari_of_several(owners, objects), "pointing": reached}


def _best_jaccard(pixels: Int[np.ndarray, " patches"], valid: Int[np.ndarray, " patches"]) -> float:
    """The largest Jaccard index of an object and any set of patches.

    J > t means both - t * (other pixels) > t * |object|, which is largest for all patches in which the object's share
    exceeds some number. So the best set is one of those that take patches by their share of the object.
    """
    order = np.argsort(-pixels / np.maximum(valid, 1), kind="stable")
    both, all_of_them = np.cumsum(pixels[order]), np.cumsum(valid[order])
    return float((both / (pixels.sum() + all_of_them - both)).max())


def shuffle_patches(maps: Float[np.ndarray, "maps h w"], rng: np.random.Generator) -> Float[np.ndarray, "maps h w"]:
    """Random maps: each map's values on random patches, so that its mass and its peakedness stay."""
    return rng.permuted(_flat(maps), axis=1).reshape(maps.shape)


def bootstrap_interval(values: Float[np.ndarray, " images"], seed: int, draws: int = 1000) -> tuple[float, float]:
    """95 % interval of a mean: its 2.5 and 97.5 percentiles when the images are drawn anew, with replacement.

    Args:
        values: (images,), one per image, which are taken as independent.
        seed: of the draws.
        draws: how many.
    """
    chosen = np.random.default_rng(seed).integers(len(values), size=(draws, len(values)), dtype=np.int32)
    low, high = np.percentile(values[chosen].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def summarize(values: Float[np.ndarray, " images"], seed: int) -> dict[str, float | int | list[float] | None]:
    """Mean, its 95 % interval and the number of images, of those that have a value (not NaN).

    Args:
        values: (images,).
        seed: of the bootstrap.
    """
    present = values[~np.isnan(values)]
    if not len(present):
        return {"mean": None, "interval_95": None, "num_images": 0}
    interval = list(bootstrap_interval(present, seed))
    return {"mean": float(present.mean()), "interval_95": interval, "num_images": len(present)}

"""Masks of a video's objects -> J, F and J&F, as in davisvideochallenge/davis2017-evaluation.

Semi-supervised task of DAVIS 2017: the first annotation is given, objects keep their numbers, and the first and the
last frame are not scored. T frames, H x W pixels.
"""

import math

import numpy as np
from jaxtyping import Bool, UInt8

VOID = 255  # in annotations: scored as background
BOUNDARY_SHARE = 0.008  # largest distance of matching boundaries, as a share of the diagonal
RECALL_FROM = 0.5  # frames with a higher score count for the recall
QUARTERS = 4
# Names of the official table, in its order; percent.
MEASURES = ("J&F-Mean", "J-Mean", "J-Recall", "J-Decay", "F-Mean", "F-Recall", "F-Decay")


def region_similarity(mask: Bool[np.ndarray, "H W"], truth: Bool[np.ndarray, "H W"]) -> float:
    """J = |mask and truth| / |mask or truth|; 1 if both are empty."""
    union = (mask | truth).sum()
    return float((mask & truth).sum() / union) if union else 1.0


def boundary_similarity(mask: Bool[np.ndarray, "H W"], truth: Bool[np.ndarray, "H W"]) -> float:
    """F = 2 P R / (P + R) for boundary pixels with a pixel of the other boundary within a radius.

    P is the share of such pixels in the mask's boundary, R in the true boundary. The radius is `BOUNDARY_SHARE` of the
    diagonal, rounded up. The official code intersects one boundary with the other, dilated by a disk, which counts the
    same pixels. F is 1 without any boundary, and 0 if only one mask has a boundary.
    """
    from scipy.spatial import KDTree

    radius = math.ceil(BOUNDARY_SHARE * math.hypot(*mask.shape))
    drawn, true = (np.argwhere(boundary(side)) for side in (mask, truth))
    if not (len(drawn) and len(true)):
        return float(len(drawn) == len(true))
    precision = (KDTree(true).query(drawn)[0] <= radius).mean()
    recall = (KDTree(drawn).query(true)[0] <= radius).mean()
    return float(2 * precision * recall / (precision + recall)) if precision + recall else 0.0


def boundary(mask: Bool[np.ndarray, "H W"]) -> Bool[np.ndarray, "H W"]:
    """Pixels that differ from the pixel to the right, below, or below right; pixels at edges are repeated."""
    padded = np.pad(mask, ((0, 1), (0, 1)), mode="edge")
    neighbours = (padded[:-1, 1:], padded[1:, :-1], padded[1:, 1:])
    return np.asarray(np.logical_or.reduce([mask ^ neighbour for neighbour in neighbours]))


def score_objects(
    masks: UInt8[np.ndarray, "T H W"], truths: UInt8[np.ndarray, "T H W"]
) -> dict[int, dict[str, list[float]]]:
    """J and F of each scored frame, for each object of the first annotation.

    The official code also scores numbers below the largest one that no pixel has, with 1. DAVIS has no such numbers.

    Args:
        masks: number of the object in each pixel, 0 for the background.
        truths: the annotations.
    """
    pairs = list(zip(masks[1:-1], truths[1:-1], strict=True))
    return {
        number: {
            "J": [region_similarity(mask == number, truth == number) for mask, truth in pairs],
            "F": [boundary_similarity(mask == number, truth == number) for mask, truth in pairs],
        }
        for number in np.unique(truths[0] % VOID).tolist()
        if number > 0
    }


def summarize(scores: dict[str, list[float]]) -> dict[str, float]:
    """`MEASURES` of one object, percent.

    Recall is the share of frames above `RECALL_FROM`, decay the mean of the first minus the mean of the last quarter.
    """
    summary = {}
    for measure, values in scores.items():
        frames = np.array(values)
        edges = np.round(np.linspace(1, len(frames), QUARTERS + 1) + 1e-10).astype(int) - 1
        first, last = frames[: edges[1] + 1], frames[edges[-2] : edges[-1] + 1]
        summary[f"{measure}-Mean"] = 100 * frames.mean()
        summary[f"{measure}-Recall"] = 100 * (frames > RECALL_FROM).mean()
        summary[f"{measure}-Decay"] = 100 * (first.mean() - last.mean())
    return average([{"J&F-Mean": (summary["J-Mean"] + summary["F-Mean"]) / 2, **summary}])


def average(summaries: list[dict[str, float]]) -> dict[str, float]:
    """Mean of each of `MEASURES` over objects, which all count equally."""
    return {name: float(np.mean([summary[name] for summary in summaries])) for name in MEASURES}

"""Features of a video's frames and the first frame's labels -> labels of every frame (DINO, section 4.2.2).

A patch takes the mean label of its k most similar patches in the first frame and in the preceding n frames, weighted by
exp(cosine / temperature). Only patches within a radius are compared (Jabri et al., 2020). h, w are rows and columns of
the patch grid; C labels, the background first.
"""

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

TEMPERATURE = 0.1
# Side of the squares of patches that are compared at once. A smaller square compares fewer patches beyond the radius, a
# larger square needs fewer matrix products. 10 to 16 are equally fast with a radius of 12.
TILE = 13


@torch.no_grad()
def propagate(
    features: Iterable[Float[Tensor, "h w D"]],
    labels: Float[Tensor, "C h w"],
    num_last_frames: int = 7,
    radius: int = 12,
    topk: int = 5,
) -> Iterator[Float[Tensor, "C h w"]]:
    """Labels of every frame but the first, one by one.

    Args:
        features: of each frame's patches, of length one.
        labels: of the first frame, one-hot.
        num_last_frames: preceding frames that give labels, besides the first frame.
        radius: largest distance of compared patches, in rows and in columns; 0: all patches are compared.
        topk: patches that give labels, besides all patches that are as similar as the last of them.
    """
    frames = iter(features)
    first = (next(frames), labels.permute(1, 2, 0))
    recent: deque[tuple[Tensor, Tensor]] = deque(maxlen=num_last_frames)
    for frame in frames:
        sources, source_labels = (torch.stack(parts) for parts in zip(first, *recent, strict=True))
        found = propagate_once(frame, sources, source_labels, radius or max(frame.shape[:2]), topk)
        recent.append((frame, found))
        yield found.permute(2, 0, 1)


def propagate_once(
    frame: Float[Tensor, "h w D"],
    sources: Float[Tensor, "n h w D"],
    labels: Float[Tensor, "n h w C"],
    radius: int,
    topk: int,
) -> Float[Tensor, "h w C"]:
    """Labels of a frame from n labelled frames.

    Each square of patches is compared with the patches within the radius of any patch of the square, so that the
    similarities of all pairs never exist together.
    """
    height, width = frame.shape[:2]
    grid = [torch.arange(side, device=frame.device, dtype=torch.int16) for side in (height, width)]
    places = torch.cartesian_prod(*grid).view(height, width, 2)
    found = frame.new_empty(height, width, labels.shape[-1])
    for top in range(0, height, TILE):
        for left in range(0, width, TILE):
            tile = slice(top, top + TILE), slice(left, left + TILE)
            rows, columns = (slice(max(0, start - radius), start + TILE + radius) for start in (top, left))
            of_tile, others = places[tile].flatten(0, 1), places[rows, columns].flatten(0, 1)
            near = (of_tile[:, None] - others).abs().amax(dim=-1) <= radius
            # One product per source frame, so that equal frames get bit-identical similarities.
            keys = sources[:, rows, columns].flatten(1, 2)
            similarity = frame[tile].flatten(0, 1) @ keys.transpose(1, 2)
            similarity = similarity.masked_fill_(~near, -torch.inf).transpose(0, 1).flatten(1)
            weights, chosen = _most_similar(similarity, topk)
            values = labels[:, rows, columns].flatten(0, 2)[chosen]
            found[tile] = (weights[..., None] * values).sum(dim=1).view_as(found[tile])
    return found


def _most_similar(similarity: Float[Tensor, "patches N"], topk: int) -> tuple[Float[Tensor, "patches k"], Tensor]:
    """Weights and places of the `topk` largest similarities in each row, and of all that equal the least of them."""
    values, places = similarity.topk(min(topk, similarity.shape[1]), dim=1)
    least = values[:, -1:]
    count = int((similarity >= least).sum(dim=1).max())
    if count > values.shape[1]:
        values, places = similarity.topk(count, dim=1)
        values = values.masked_fill(values < least, -torch.inf)
    return (values / TEMPERATURE).softmax(dim=1), places


def label_map(labels: Float[Tensor, "C h w"], patch_size: int, size: tuple[int, int]) -> UInt8[np.ndarray, "H W"]:
    """Number of the strongest label in each pixel: labels are upsampled (bilinear) and each is stretched to [0, 1].

    `size` is width and height of the result, to which the numbers are resized (nearest).
    """
    maps = F.interpolate(labels[None], scale_factor=patch_size, mode="bilinear", align_corners=False)[0]
    low, high = maps.amin(dim=(1, 2), keepdim=True), maps.amax(dim=(1, 2), keepdim=True)
    stretched = torch.where(high > low, (maps - low) / (high - low), maps)  # an object of the whole frame stays one
    numbers = stretched.argmax(dim=0).to(torch.uint8).cpu().numpy()
    return np.asarray(Image.fromarray(numbers).resize(size, Image.Resampling.NEAREST))


def first_labels(
    annotation: UInt8[np.ndarray, "H W"], num_labels: int, grid: tuple[int, int]
) -> Float[Tensor, "C h w"]:
    """One-hot labels of an annotation, which is resized to the grid of patches (nearest)."""
    numbers = Image.fromarray(annotation).resize(grid[::-1], Image.Resampling.NEAREST)
    return F.one_hot(torch.from_numpy(np.array(numbers)).long(), num_labels).permute(2, 0, 1).float()

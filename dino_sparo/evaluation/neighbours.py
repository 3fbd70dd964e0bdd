"""Features -> their most similar training features: the search behind `knn.py`.

Stage 5 of the map. Similarity is the cosine,

    s_ij = x_i . x_j / (|x_i| |x_j|)

computed block by block, so that memory does not grow with the number of images.
"""

import math
from collections.abc import Callable
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

# The largest intermediate is one block of similarities, test images x TRAIN_CHUNK.
TRAIN_CHUNK = 16384
# The same for the coarse search: it rounds all training images for each chunk of test images, so chunks are tall.
COARSE_TEST_CHUNK = 4096
COARSE_TRAIN_CHUNK = 4096
# Candidates of the coarse search for k neighbours: enough for nearly every image, the others are searched again.
CANDIDATES_PER_NEIGHBOUR, MORE_CANDIDATES = 2, 64
AGAIN_CHUNK = 512
RERANK_NUMBERS = 1 << 24  # of the features that are compared again at a time
NORM_ROWS = 1024  # features whose rounding is looked at a time
MIN_NORM = 1e-12  # a feature of zeros is similar to none


class TrainSet:
    """Features as they are, beside one over their lengths: a normalised copy would double the memory."""

    def __init__(self, features: Float[Tensor, "train F"]) -> None:
        self.features = features
        self.scales = checked_lengths("train", features).clamp_(min=MIN_NORM).reciprocal_()

    @cached_property
    def rounding(self) -> float:
        """By how much bf16 changes a feature, relative to its length: the largest of all."""
        largest = torch.zeros((), device=self.features.device)
        for features, scales in zip(self.features.split(NORM_ROWS), self.scales.split(NORM_ROWS), strict=True):
            largest = torch.maximum(largest, (_rounding(features.float()) * scales).max())
        return float(largest)


def _rounding(features: Float[Tensor, "rows F"]) -> Float[Tensor, " rows"]:
    """The length of what bf16 leaves out of each."""
    return torch.linalg.vector_norm(features - features.bfloat16().float(), dim=1)


@torch.no_grad()
def _nearest(train: TrainSet, images: Float[Tensor, "m F"], k: int, width: int | None = None) -> tuple[Tensor, Tensor]:
    """The k most similar training images of each test image, best first: similarities and indices, (m, k).

    Args:
        train: where to search.
        images: of length one; in their precision similarities are computed.
        k: at most the number of training images.
        width: similarities per image that exist at a time; None: `TRAIN_CHUNK`.
    """
    width = TRAIN_CHUNK if width is None else width
    step = max(width - k, k)
    similarities = images.new_full((len(images), k), -math.inf)
    indices = torch.zeros(len(images), k, dtype=torch.int64, device=images.device)
    # The best so far stand before each block: whatever is worse is passed over quickly.
    block = images.new_empty(len(images), k + min(step, len(train.features)))
    for start in range(0, len(train.features), step):
        features, scales = train.features[start : start + step].to(images.dtype), train.scales[start : start + step]
        compared = block[:, : k + len(features)]
        compared[:, :k] = similarities
        torch.mm(images, features.t(), out=compared[:, k:])
        compared[:, k:] *= scales
        similarities, positions = compared.topk(k)
        before = indices.gather(1, positions.clamp(max=k - 1))
        indices = torch.where(positions < k, before, positions + (start - k))
    return similarities, indices


@torch.no_grad()
def _nearest_by_candidates(train: TrainSet, images: Float[Tensor, "m F"], k: int) -> tuple[Tensor, Tensor]:
    """`_nearest` by a search in bf16 for candidates, which are then compared in fp32.

    With c the similarity in bf16 and |c - s| <= e, an image among the k most similar has c >= c_k - 2 e, c_k being the
    k-th best. If the candidates reach below that, no such image is missing; where they do not, fp32 searches again.

        e = |dx| + |dy| + |dx| |dy| + F u + |c| v   of unit vectors that bf16 changes by dx and dy

    u bounds fp32's rounding in a sum of F products, v bf16's of the product and of its scaling.
    """
    num_candidates = min(CANDIDATES_PER_NEIGHBOUR * k + MORE_CANDIDATES, len(train.features))
    coarse, candidates = _nearest(train, images.bfloat16(), num_candidates, COARSE_TRAIN_CHUNK)
    changed, others_changed = _rounding(images), train.rounding
    rounded = coarse[:, [0, -1]].abs().amax(dim=1).float() * torch.finfo(torch.bfloat16).eps
    error = changed + others_changed + changed * others_changed + rounded
    error += images.shape[1] * torch.finfo(torch.float32).eps
    is_wanted = coarse.float() >= (coarse[:, k - 1].float() - 2 * error)[:, None]
    is_known = is_wanted.logical_not()[:, -1] | (num_candidates == len(train.features))
    similarities, indices = images.new_empty(len(images), k), candidates.new_empty(len(images), k)
    for part in _parts(is_known, max(1, RERANK_NUMBERS // (num_candidates * images.shape[1]))):
        compared = candidates[part, : max(k, int(is_wanted[part].sum(dim=1).max()))]
        features = train.features[compared].float()
        exact = (features @ images[part, :, None])[..., 0] * train.scales[compared]
        similarities[part], order = exact.topk(k)
        indices[part] = compared.gather(1, order)
    for part in _parts(~is_known, AGAIN_CHUNK):
        similarities[part], indices[part] = _nearest(train, images[part], k)
    return similarities, indices


def _parts(chosen: Tensor, rows: int) -> list[Tensor]:
    """The numbers of the chosen rows, at most so many at a time."""
    numbers = chosen.nonzero().flatten()
    return list(numbers.split(rows)) if len(numbers) else []


SEARCHES: dict[str, Callable[[TrainSet, Tensor, int], tuple[Tensor, Tensor]]] = {
    "fp32": _nearest,
    "bf16": _nearest_by_candidates,
}


def checked_lengths(name: str, features: Tensor) -> Float[Tensor, " images"]:
    """The features' lengths.

    Raises:
        ValueError: there are none, or one is not finite.
    """
    if len(features) == 0:
        raise ValueError(f"{name}_features are empty; k-NN needs at least one image on each side")
    lengths = torch.linalg.vector_norm(features, dim=1, dtype=torch.float32)
    if not lengths.isfinite().all():
        row = int(lengths.isfinite().logical_not().nonzero()[0])
        raise ValueError(f"{name}_features of image {row} are not finite; the encoder is broken or overflowed")
    return lengths

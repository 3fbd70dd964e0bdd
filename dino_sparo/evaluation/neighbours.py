"""Features -> their most similar training features: the search behind `knn.py`.

Similarity is the cosine,

    s_ij = x_i . x_j / (|x_i| |x_j|)

computed block by block, so that memory does not grow with the number of images.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

# The largest intermediate is one block of similarities, test images x TRAIN_CHUNK.
TRAIN_CHUNK = 16384
MIN_NORM = 1e-12  # a feature of zeros is similar to none


class TrainSet:
    """Features as they are, beside one over their lengths: a normalised copy would double the memory."""

    def __init__(self, features: Float[Tensor, "train F"]) -> None:
        self.features = features
        self.scales = checked_lengths("train", features).clamp_(min=MIN_NORM).reciprocal_()


@torch.no_grad()
def nearest(train: TrainSet, images: Float[Tensor, "m F"], k: int) -> tuple[Tensor, Tensor]:
    """The k most similar training images of each test image, best first: similarities and indices, (m, k).

    Args:
        train: where to search.
        images: of length one; in their precision similarities are computed.
        k: at most the number of training images.
    """
    step = max(TRAIN_CHUNK - k, k)
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

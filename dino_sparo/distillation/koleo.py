"""Encodings -> KoLeo, a regulariser that keeps every image away from its nearest neighbour."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from dino_sparo.runtime.collectives import gather_with_gradient
from dino_sparo.runtime.launch import rank

EPSILON = 1e-8


def koleo_loss(encodings: Float[Tensor, "B M"]) -> Float[Tensor, ""]:
    """Minus the mean logarithm of the distance to the nearest neighbour, natural logarithm.

        x_i = encoding_i / ||encoding_i||_2
        j(i) = argmax_{j != i} x_i . x_j
        loss = - mean_i log(||x_i - x_j(i)||_2 + 1e-8)

    The neighbours are the images of all ranks; the mean is over this rank's images, so that the mean of the ranks'
    losses is the loss of the whole batch. Source: Sablayrolles et al., "Spreading vectors for similarity search",
    section 3.2, in the form of facebookresearch/dinov2's `KoLeoLoss`, which searches the images of one rank alone.

    Args:
        encodings: (B, M), one crop of each image; at least two images over all ranks.
    """
    normalized = F.normalize(encodings.to(torch.promote_types(encodings.dtype, torch.float32)), dim=-1, eps=EPSILON)
    all_rows = gather_with_gradient(normalized).flatten(0, 1)
    first = len(normalized) * rank()
    with torch.no_grad():
        cosines = normalized @ all_rows.T
        cosines.diagonal(first).fill_(-1)
        nearest = cosines.argmax(dim=1)
    distances = F.pairwise_distance(normalized, all_rows[nearest], eps=EPSILON)
    return -(distances + EPSILON).log().mean()

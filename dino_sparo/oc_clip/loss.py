"""Scores of images and graphs -> the contrastive loss and the local loss of relations.

    loss = (CE_t2i + CE_i2t) / 2 + weight * L_rel / 2        nats, means over pairs

This is equation 4 of OC-CLIP times 1 / (2 B). The paper's losses have no temperature, and the scores lie in [-1, 1]: at
B = 128 no model gets below 2.90 nats per direction. So both losses multiply the scores by a learned `logit_scale`, as
CLIP does; `None` is the paper's letter.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class RelationLoss(NamedTuple):
    """The local loss.

    Attributes:
        loss: (), the sum over pairs with an altered relation, divided by B.
        mean: (), the same divided by the number of such pairs, for the log; 0 where there is none.
    """

    loss: Float[Tensor, ""]
    mean: Float[Tensor, ""]


def relation_loss(
    true: Float[Tensor, " B"],
    swapped: Float[Tensor, " B"],
    shuffled: Float[Tensor, " B"],
    altered: Bool[Tensor, " B"],
    logit_scale: Float[Tensor, ""] | None = None,
) -> RelationLoss:
    """Each graph against two of its own, whose relations are false, in its own image.

        L_rel = -1 / B sum_{i altered} log e^{s S(x_i, G_i)} / sum_G e^{s S(x_i, G)}

    with G the true graph, the swapped and the shuffled one.

    Source: OC-CLIP, equation 6, with the mean in place of the sum. A pair without altered relations has three equal
    scores and the constant loss ln 3; it is left out of the sum, and counts in B.

    Args:
        true: (B,), S of matched pairs.
        swapped: (B,), with subjects and objects exchanged; see `pairs.draw_negatives`.
        shuffled: (B,), with other subjects and objects.
        altered: (B,), True where the false graphs have an altered relation.
        logit_scale: (), s; None for 1.
    """
    scores = torch.stack([true, swapped, shuffled], dim=-1)
    logits = scores if logit_scale is None else logit_scale * scores
    losses = (logits.logsumexp(dim=-1) - logits[:, 0]).masked_fill(~altered, 0)
    total = losses.sum()
    return RelationLoss(total / len(losses), (total / altered.sum().clamp(min=1)).detach())


def total_loss(contrastive: Float[Tensor, ""], relation: Float[Tensor, ""], weight: float = 1.0) -> Float[Tensor, ""]:
    """L = L_itc + weight * L_rel / 2: equation 4 times 1 / (2 B) at weight 1."""
    return contrastive + weight * relation / 2

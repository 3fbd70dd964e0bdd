"""Scores of images and texts -> the contrastive loss of CLIP, and the bounds of its temperature."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

INITIAL_LOGIT_SCALE = 1 / 0.07  # CLIP, section 2.5
MAX_LOGIT_SCALE = 100.0  # a larger one makes training unstable; CLIP, section 2.5


def contrastive_loss(scores: Float[Tensor, "B U"], logit_scale: Float[Tensor, ""] | None = None) -> Float[Tensor, ""]:
    """Every text among all images, and every image among all texts; text i belongs to image i.

        L = -1 / (2 B) sum_i [log e^{s S_ii} / sum_j e^{s S_ji} + log e^{s S_ii} / sum_j e^{s S_ij}]

    Source: CLIP, figure 3. OC-CLIP's equation 5, L_itc, has the sum of pairs and directions in place of their mean.

    Args:
        scores: S (B, U), image by text, U = B.
        logit_scale: (), s, the inverse temperature itself, not its logarithm; None for 1.

    Raises:
        ValueError: not as many texts as images.
    """
    if scores.shape[0] != scores.shape[1]:
        raise ValueError(f"scores have shape {tuple(scores.shape)}; give one text per image, (B, B)")
    logits = scores if logit_scale is None else logit_scale * scores
    labels = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2

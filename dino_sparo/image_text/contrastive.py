"""Scores of images and texts -> the contrastive loss of CLIP, and the bounds of its temperature."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from dino_sparo.runtime.collectives import gather_with_gradient
from dino_sparo.runtime.launch import rank, world_size

INITIAL_LOGIT_SCALE = 1 / 0.07  # CLIP, section 2.5
MAX_LOGIT_SCALE = 100.0  # a larger one makes training unstable; CLIP, section 2.5


def contrastive_loss(scores: Float[Tensor, "B U"], logit_scale: Float[Tensor, ""] | None = None) -> Float[Tensor, ""]:
    """Every text among all images, and every image among all texts; text i belongs to image i.

        L = -1 / (2 B) sum_i [log e^{s S_ii} / sum_j e^{s S_ji} + log e^{s S_ii} / sum_j e^{s S_ij}]

    With several ranks a rank has the scores of its own images with the texts of all, in the order of the ranks: no pair
    is scored twice. The sum over all images in the first term is then a sum over ranks, of which each knows its own
    part; the parts are gathered, with gradients. The mean of the ranks' losses is the loss above.

    Source: CLIP, figure 3. OC-CLIP's equation 5, L_itc, has the sum of pairs and directions in place of their mean.

    Args:
        scores: S (B, U), image by text; U = B, or B times the number of ranks.
        logit_scale: (), s, the inverse temperature itself, not its logarithm; None for 1.

    Raises:
        ValueError: there is another number of texts.
    """
    num_images, num_texts = scores.shape
    if num_texts not in (num_images, num_images * world_size()):
        raise ValueError(f"scores have shape {tuple(scores.shape)}; give one text per image, (B, B)")
    logits = scores if logit_scale is None else logit_scale * scores
    labels = torch.arange(num_images, device=logits.device)
    if num_texts == num_images:
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
    labels = labels + num_images * rank()
    normalizers = gather_with_gradient(logits.logsumexp(dim=0)).logsumexp(dim=0)
    by_text = (normalizers[labels] - logits.diagonal(num_images * rank())).mean()
    return (F.cross_entropy(logits, labels) + by_text) / 2

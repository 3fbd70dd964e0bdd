"""Image and text features -> the contrastive loss over all ranks, and its gradient at the features.

The loss itself is OpenCLIP's. `feature_gradients` serves accumulation: the loss of a step needs the features of every
micro-batch at once, the activations behind them do not.
"""

import warnings
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dino_sparo.distributed import rank, world_size
from dino_sparo.extras import require


def create_loss() -> nn.Module:
    """The contrastive loss of this rank; call it once the process group is there.

        S = s X Y^T                                        similarities of all images with all captions
        loss = (CE(S, 1..B) + CE(S^T, 1..B)) / 2           nats; caption i belongs to image i

    X (B, M) are the images' normalised features, Y (B, M) the captions', s is the inverse temperature `logit_scale`.
    With several ranks B counts all of them: each computes the rows of its own images and captions against the features
    of all, and gradients flow back through the gathering. The mean of the ranks' losses is the loss above, hence so is
    the mean of their gradients. Source: CLIP, figure 3; OpenCLIP, `local_loss` and `gather_with_grad`.
    """
    # OpenCLIP calls what torch 2.15 would have it replace; the result is the same. To go with OpenCLIP's next version.
    warnings.filterwarnings("ignore", message=r"torch\.distributed\.nn\.functional\.all_gather is deprecated")
    require("open_clip", "contrastive losses")
    from open_clip.loss import ClipLoss

    return ClipLoss(local_loss=True, gather_with_grad=True, cache_labels=True, rank=rank(), world_size=world_size())


class FeatureGradients(NamedTuple):
    """The loss of a step and its gradient at the features of this rank.

    Attributes:
        loss: of this rank, nats.
        images: (B, M), d loss / d image features.
        texts: (B, M), d loss / d text features.
        logit_scale: (), d loss / d logit scale.
    """

    loss: Float[Tensor, ""]
    images: Float[Tensor, "B M"]
    texts: Float[Tensor, "B M"]
    logit_scale: Float[Tensor, ""]


def feature_gradients(
    loss: nn.Module,
    image_features: Float[Tensor, "B M"],
    text_features: Float[Tensor, "B M"],
    logit_scale: Float[Tensor, ""],
) -> FeatureGradients:
    """The gradient of the loss at features that were computed without gradients.

    By the chain rule the gradient of a weight is the sum of (d loss / d features) (d features / d weight) over the
    micro-batches: each is passed through the network once more, alone, and this gradient sent back from its end. The
    temperature is no feature of any micro-batch; its gradient is taken here, once. Source: Gao et al., "Scaling deep
    contrastive learning batch size under memory limited setup", section 3. (OpenCLIP computes the whole loss anew for
    every micro-batch, and so adds up the temperature's gradient as many times.)

    Args:
        loss: from `create_loss`.
        image_features: (B, M), of all micro-batches of this rank, normalised.
        text_features: (B, M), likewise.
        logit_scale: (), the inverse temperature.
    """
    leaves = [tensor.detach().requires_grad_() for tensor in (image_features, text_features, logit_scale)]
    with torch.enable_grad():
        value = loss(*leaves)
    return FeatureGradients(value.detach(), *torch.autograd.grad(value, leaves))

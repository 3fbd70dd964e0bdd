"""Image and text features -> the contrastive loss over all ranks; it is OpenCLIP's."""

import re
import warnings
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from dino_sparo.clip.choices import PRODUCTS
from dino_sparo.runtime.faults import require
from dino_sparo.runtime.launch import rank, world_size


def create_loss(products: str = "fp32", texts_per_image: int = 1) -> nn.Module:
    """The contrastive loss of this rank; call it once the process group is there.

        S = s X Y^T                                        similarities of all images with all captions
        loss = (CE(S, 1..B) + CE(S^T, 1..B)) / 2           nats; caption i belongs to image i

    X (B, M) are the images' normalised features, Y (B, M) the captions', s is the inverse temperature `logit_scale`.
    With several ranks B counts all of them: each computes the rows of its own images and captions against the features
    of all, and gradients flow back through the gathering. The mean of the ranks' losses is the loss above, hence so is
    the mean of their gradients. Source: CLIP, figure 3; OpenCLIP, `local_loss` and `gather_with_grad`.

    Args:
        products: a member of `PRODUCTS`, the precision of X Y^T and of its gradient; see `rounded_product`.
        texts_per_image: rows of Y per row of X, the caption first and then its false captions; see `GeneralLoss`.

    Raises:
        ValueError: an unknown precision.
    """
    if products not in PRODUCTS:
        raise ValueError(f"logits={products!r}; choose one of {', '.join(PRODUCTS)}")
    # OpenCLIP calls what torch 2.15 replaces by an equal function. Remove after OpenCLIP's next release.
    warnings.filterwarnings("ignore", message=r"torch\.distributed\.nn\.functional\.all_gather is deprecated")
    require("open_clip", "contrastive losses")
    from open_clip.loss import ClipLoss

    exact = ClipLoss(local_loss=True, gather_with_grad=True, cache_labels=True, rank=rank(), world_size=world_size())
    return exact if (products, texts_per_image) == ("fp32", 1) else GeneralLoss(exact, products, texts_per_image)


def require_products(products: str, device: torch.device) -> None:
    """Refuse products that this version of torch cannot compute on a device.

    Raises:
        ValueError: bf16 on a GPU, before torch 2.8.
    """
    version = [int(number) for number in re.findall(r"\d+", torch.__version__)[:2]]
    if products == "bf16" and device.type == "cuda" and version < [2, 8]:
        raise ValueError(
            f"--logits bf16 on a GPU needs torch 2.8 or newer, this is {torch.__version__}; give --logits tf32 or fp32"
        )


class GeneralLoss(nn.Module):
    """The loss of `create_loss` with products in TF32 or bf16, or with false captions.

    With k texts per image row k i of Y is the caption of image i, and the rows behind it are false captions of it. They
    are further candidates for all images, and have no image of their own:

        loss = (CE(s X Y^T, k 0..k (B - 1)) + CE(s Y[::k] X^T, 0..B - 1)) / 2

    Source of the false captions' part: Yuksekgonul et al., "When and why vision-language models behave like
    bags-of-words", section 4, NegCLIP.

    Args:
        exact: OpenCLIP's loss in fp32; it tells ranks and numbers the pairs.
        products: a member of `PRODUCTS`.
        texts_per_image: k.
    """

    def __init__(self, exact: Any, products: str, texts_per_image: int = 1) -> None:
        super().__init__()
        self.exact, self.products, self.texts_per_image = exact, products, texts_per_image

    def forward(
        self,
        image_features: Float[Tensor, "B M"],
        text_features: Float[Tensor, "captions M"],
        logit_scale: Float[Tensor, ""],
    ) -> Float[Tensor, ""]:
        """Normalised features of this rank and the inverse temperature -> the loss of this rank, nats."""
        every = (image_features, text_features)
        if self.exact.world_size > 1:
            from open_clip.loss import gather_features

            options = {"local_loss": True, "gather_with_grad": True}
            ranks = {"rank": self.exact.rank, "world_size": self.exact.world_size}
            every = gather_features(image_features, text_features, **options, **ranks)
        labels = self.exact.get_ground_truth(image_features.device, len(image_features))
        step = self.texts_per_image
        parts = ((image_features, every[1], step * labels), (text_features[::step], every[0], labels))
        losses = [F.cross_entropy(logit_scale * self._product(own, others), right) for own, others, right in parts]
        return (losses[0] + losses[1]) / 2

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        return left @ right.t() if self.products == "fp32" else rounded_product(left, right, self.products)


def rounded_product(
    left: Float[Tensor, "B M"], right: Float[Tensor, "candidates M"], products: str
) -> Float[Tensor, "B candidates"]:
    """X Y^T whose factors are rounded to TF32 (11 bits) or bf16 (8 bits), and whose products are summed in fp32.

    So are the products of the backward pass. A GPU computes them in its tensor cores. On other devices this is no
    faster; results are equal.

    Args:
        left: X, fp32.
        right: Y, fp32.
        products: `tf32` or `bf16`.
    """
    return _RoundedProduct.apply(left, right, products)


class _RoundedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, products: str) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.products = products
        return _multiply(left, right.t(), products)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        left, right = ctx.saved_tensors
        return _multiply(gradient, right, ctx.products), _multiply(gradient.t(), left, ctx.products), None


def _multiply(
    left: Float[Tensor, "B M"], right: Float[Tensor, "M candidates"], products: str
) -> Float[Tensor, "B candidates"]:
    with torch.autocast(left.device.type, enabled=False):
        left, right = left.float(), right.float()
        if products == "bf16":
            if left.device.type == "cuda":
                return torch.mm(left.bfloat16(), right.bfloat16(), out_dtype=torch.float32)
            return left.bfloat16().float() @ right.bfloat16().float()
        if left.device.type != "cuda":
            return _tf32(left) @ _tf32(right)
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return left @ right
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before


def _tf32(values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """fp32 rounded to the nearest number with a significand of 11 bits, as a tensor core reads it."""
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)

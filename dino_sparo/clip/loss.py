"""Image and text features -> the contrastive loss over all ranks; it is OpenCLIP's."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.torch_version import TorchVersion

from dino_sparo.runtime.collectives import gather_with_gradient
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.launch import rank


def clip_loss(
    images: Float[Tensor, "B M"],
    texts: Float[Tensor, "captions M"],
    scale: Float[Tensor, ""],
    products: str = "fp32",
    texts_per_image: int = 1,
) -> Float[Tensor, ""]:
    """The contrastive loss of this rank, nats.

        loss = (CE(s X Y^T, k 0..k (B - 1)) + CE(s Y[::k] X^T, 0..B - 1)) / 2

    X (B, M) are the images' normalised features, Y (k B, M) the captions', s is the inverse temperature. Row k i of Y
    is the caption of image i; the rows behind it are false captions of image i. False captions are further candidates
    for all images, and have no image of their own. Here k is `texts_per_image`; `products`, one of `PRODUCTS`, is the
    precision of X Y^T and of its gradient, see `rounded_product`.

    With several ranks B counts all of them: each computes the rows of its own images and captions against the features
    of all, and gradients flow back through the gathering. The mean of the ranks' losses is the loss above, hence so is
    the mean of their gradients. Source: CLIP, figure 3; OpenCLIP, `local_loss` and `gather_with_grad`; for false
    captions Yuksekgonul et al., "When and why vision-language models behave like bags-of-words", section 4, NegCLIP.
    """
    every_image, every_text = (gather_with_gradient(rows).flatten(0, 1) for rows in (images, texts))
    labels = torch.arange(len(images), device=images.device) + len(images) * rank()
    parts = ((images, every_text, texts_per_image * labels), (texts[::texts_per_image], every_image, labels))
    losses = []
    for x, y, right in parts:
        # In fp32 in OpenCLIP's order of operations.
        logits = scale * x @ y.t() if products == "fp32" else scale * rounded_product(x, y, products)
        losses.append(F.cross_entropy(logits, right))
    return (losses[0] + losses[1]) / 2


def require_products(products: str, device: torch.device) -> None:
    """Refuse products that this version of torch cannot compute on a device: bf16 on a GPU needs torch 2.8."""
    if products == "bf16" and device.type == "cuda" and TorchVersion(torch.__version__) < "2.8":
        raise UserError(
            f"--logits bf16 on a GPU needs torch 2.8 or newer, this is {torch.__version__}; give --logits tf32 or fp32"
        )


def rounded_product(
    left: Float[Tensor, "B M"], right: Float[Tensor, "candidates M"], products: str
) -> Float[Tensor, "B candidates"]:
    """X Y^T whose factors are rounded to TF32 (11 bits) or bf16 (8 bits), and whose products are summed in fp32.

    So are the products of the backward pass. A GPU computes them in its tensor cores. On other devices this is no
    faster; results are equal.
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

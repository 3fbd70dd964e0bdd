"""clip/loss.py: the loss of several ranks is that of one with everything, and so are its gradients."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from two_ranks import TwoRanks

pytest.importorskip("open_clip")

from dino_sparo.clip.loss import clip_loss, require_products, rounded_product
from dino_sparo.image_text.step import loss_gradients
from dino_sparo.runtime.launch import rank

NUM_RANKS, PER_RANK, WIDTH = 2, 3, 5


def features(step: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised image (6, 5) and text features (6 step, 5) of all ranks, and the inverse temperature."""
    generator = torch.Generator().manual_seed(7)
    number = NUM_RANKS * PER_RANK
    images, texts = (torch.randn(rows, WIDTH, generator=generator) for rows in (number, step * number))
    return F.normalize(images, dim=-1), F.normalize(texts, dim=-1), torch.tensor(11.0)


def slow_loss(images: Tensor, texts: Tensor, scale: Tensor, step: int = 1) -> Tensor:
    """The definition, pair by pair: minus the log of the share of the right caption, and of the right image.

    Caption `step * i` belongs to image i; all captions are candidates for an image.
    """
    terms = []
    for i in range(len(images)):
        of_captions = torch.stack([scale * images[i] @ texts[j] for j in range(len(texts))])
        of_images = torch.stack([scale * images[j] @ texts[step * i] for j in range(len(images))])
        terms += [of_captions.logsumexp(0) - of_captions[step * i], of_images.logsumexp(0) - of_images[i]]
    return torch.stack(terms).mean()


@pytest.mark.parametrize(("step", "products"), [(1, "fp32"), (2, "fp32"), (2, "tf32"), (2, "bf16")])
def test_loss_and_gradients_at_the_features_are_those_of_the_definition(step: int, products: str) -> None:
    """With a step of 2, false captions are further candidates for images and have no image themselves."""
    leaves = [tensor.requires_grad_() for tensor in features(step)]
    expected = slow_loss(*leaves, step=step)
    gradients = torch.autograd.grad(expected, leaves)
    assert step == 1 or expected > slow_loss(leaves[0], leaves[1][::2], leaves[2])
    with torch.no_grad():
        found = feature_gradients(*leaves, partial(clip_loss, products=products, texts_per_image=step))
    tolerance = 1e-6 if products == "fp32" else 0.05
    for own, right in zip(found, (expected, *gradients), strict=True):
        assert torch.allclose(own, right, atol=tolerance)
        assert not own.requires_grad


# Products -> -log10 of the relative error of the loss, of the largest error of a cosine, and of the relative error of
# the gradients. Measured: fp32 7.5, 6.7, 6.4; tf32 5.1, 4.2, 3.6; bf16 4.3, 3.3, 2.7.
DIGITS = {"fp32": (6.5, 6.0, 5.5), "tf32": (4.5, 4.0, 3.5), "bf16": (3.7, 3.0, 2.5)}


def test_rounded_products_have_as_many_digits_as_the_help_states() -> None:
    """A batch of 1024 with features of width 512, half trained: pairs are nearer than others; against double."""
    generator = torch.Generator().manual_seed(0)
    images, noise = (torch.randn(1024, 512, generator=generator, dtype=torch.float64) for _ in range(2))
    exact = [F.normalize(images, dim=1), F.normalize(images + 3 * noise, dim=1), torch.tensor(20.0).double()]

    def loss_and_gradients(dtype: torch.dtype, products: str) -> list[Tensor]:
        leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in exact]
        loss = clip_loss(*leaves, products=products)
        return [each.detach().double() for each in (loss, *torch.autograd.grad(loss, leaves))]

    expected_loss, *expected = loss_and_gradients(torch.float64, "fp32")
    cosines, (left, right) = exact[0] @ exact[1].t(), (tensor.float() for tensor in exact[:2])
    for products, wanted in DIGITS.items():
        loss, *gradients = loss_and_gradients(torch.float32, products)
        product = left @ right.t() if products == "fp32" else rounded_product(left, right, products)
        gradient_error = max(float((a - b).norm() / b.norm()) for a, b in zip(gradients, expected, strict=True))
        logit_error = (product.double() - cosines).abs().max()
        errors = ((loss - expected_loss).abs() / expected_loss, logit_error, gradient_error)
        digits = [-math.log10(max(float(error), 1e-12)) for error in errors]
        assert all(have >= least for have, least in zip(digits, wanted, strict=True)), (products, digits)


def test_bf16_and_tf32_round_as_tensor_cores_do() -> None:
    """Factors to 8 and 11 bits, to the nearest; the sum stays fp32."""
    left, right = torch.tensor([[1 + 2**-8, 2.0**-20]]), torch.tensor([[1.0, 1.0]])
    assert rounded_product(left, right, "bf16").item() == 1 + 2**-20
    assert rounded_product(left, right, "tf32").item() == pytest.approx(1 + 2**-8 + 2**-20, abs=1e-9)
    assert rounded_product(torch.tensor([[1 + 2**-12]]), torch.ones(1, 1), "tf32").item() == 1
    assert rounded_product(torch.tensor([[1 + 2**-10]]), torch.ones(1, 1), "tf32").item() == 1 + 2**-10


class Gradients(NamedTuple):
    """Of the contrastive loss at the features."""

    loss: torch.Tensor
    images: torch.Tensor
    texts: torch.Tensor
    logit_scale: torch.Tensor


def feature_gradients(
    images: torch.Tensor, texts: torch.Tensor, logit_scale: torch.Tensor, contrast: Callable[..., Tensor] | None = None
) -> Gradients:
    """Gradients at features, and at the temperature as a weight of the loss."""
    contrast, scale = contrast or clip_loss, torch.nn.Parameter(logit_scale.detach())
    loss, _, of_features, of_scale = loss_gradients(
        lambda leaves: (contrast(*leaves, scale), {}), [images, texts], [scale]
    )
    return Gradients(loss, *of_features, *of_scale)


def _gradients_of_a_rank(step: int) -> Gradients:
    images, texts, scale = features(step)
    images, texts = (rows.chunk(NUM_RANKS)[rank()] for rows in (images, texts))
    return feature_gradients(images, texts, scale, partial(clip_loss, texts_per_image=step))


@pytest.mark.parametrize("step", [1, 2])
def test_the_mean_over_two_ranks_is_the_loss_of_the_whole_batch(two_ranks: TwoRanks, step: int) -> None:
    loss, images, texts, scale = zip(*two_ranks(_gradients_of_a_rank, step), strict=True)
    whole = feature_gradients(*features(step), partial(clip_loss, texts_per_image=step))
    assert torch.allclose(torch.stack(loss).mean(), whole.loss, atol=1e-6)
    # Ranks average their gradients, so each must carry as many times its share as there are ranks.
    assert torch.allclose(torch.cat(images) / NUM_RANKS, whole.images, atol=1e-6)
    assert torch.allclose(torch.cat(texts) / NUM_RANKS, whole.texts, atol=1e-6)
    assert torch.allclose(torch.stack(scale).mean(), whole.logit_scale, atol=1e-6)


def test_bf16_products_are_refused_on_a_gpu_where_torch_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: `out_dtype` of `torch.mm` is younger than the oldest torch allowed, and step 1 ended in a traceback."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(torch, "__version__", "2.7.1+cu126")
    with pytest.raises(ValueError, match=r"--logits bf16 on a GPU needs torch 2\.8 or newer, this is 2\.7\.1"):
        require_products("bf16", gpu)
    require_products("bf16", cpu)
    require_products("tf32", gpu)
    monkeypatch.setattr(torch, "__version__", "2.10.0a0")
    require_products("bf16", gpu)

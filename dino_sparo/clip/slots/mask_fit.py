"""Encodings of images with a true and a false caption -> the mask of image encodings that tells the captions apart.

`mask.py` runs this. The encodings are computed once and stay as they are; SugarCrepe's own evaluation says after every
epoch how well the mask fits. Source: SPARO, appendix 0.C.1.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from dino_sparo.clip.options import FitSettings
from dino_sparo.clip.slots.subsets import mask_features
from dino_sparo.image_text.evaluation.compositional.answers import EncodedQuestions, macro, split_results
from dino_sparo.image_text.scoring.dot_product import PAIR_CHUNK, DotProductScorer
from dino_sparo.image_text.step import INITIAL_LOGIT_SCALE
from dino_sparo.runtime.logs import progress

BOUND = 100.0
# How the inverse temperature is bounded -> where alpha starts. The paper prints max(100, exp(alpha)), "similar to
# CLIP", and does not say where alpha starts; CLIP's own is min(100, exp(alpha)) from ln(1 / 0.07). With max alpha
# starts where the bound begins to depend on it, a hair above, so that rounding does not decide whether it learns.
INITIAL_ALPHA = {"min": math.log(INITIAL_LOGIT_SCALE), "max": math.log(BOUND) + 1e-6}


class Mask(nn.Module):
    """Weights of the parts of an encoding, and the inverse temperature of their loss.

        scale = min(100, exp(alpha)),   m = sigmoid(scale / 4 * theta)

    theta, one number per part, starts at 0: m = 1/2 everywhere changes no cosine. (Where it starts is not in the
    paper.) Source: SPARO, appendix 0.C.1, which prints max(100, exp(alpha)): `bound="max"`. With max the sigmoid
    saturates in the first epochs, and a mask of slots stays at a larger loss (docs/clip.md has the numbers).

    Args:
        num_parts: number of parts.
        bound: `min` or `max`, of 100 and exp(alpha).
    """

    def __init__(self, num_parts: int, bound: str = "min") -> None:
        super().__init__()
        self.bound = bound
        self.theta = nn.Parameter(torch.zeros(num_parts))
        self.alpha = nn.Parameter(torch.tensor(INITIAL_ALPHA[bound]))

    def forward(self) -> tuple[Float[Tensor, " parts"], Float[Tensor, ""]]:
        """The weights m, and the scale."""
        exponential = self.alpha.exp()
        scale = exponential.clamp(max=BOUND) if self.bound == "min" else exponential.clamp(min=BOUND)
        return torch.sigmoid(scale / 4 * self.theta), scale


class PartProducts(NamedTuple):
    """All that the loss needs of normalised encodings: scalar products, part by part.

    Attributes:
        positive: (pairs, parts), of image and true caption.
        negative: (pairs, parts), of image and false caption.
        squares: (pairs, parts), of each pair's image with itself.
    """

    positive: Float[Tensor, "pairs parts"]
    negative: Float[Tensor, "pairs parts"]
    squares: Float[Tensor, "pairs parts"]


@dataclass(frozen=True)
class FitResult:
    """The best mask, and the course of its fit.

    Attributes:
        weights: (parts,), after the epoch with the highest accuracy.
        epoch: that epoch, from 1; of several the first.
        losses: mean loss of every epoch, nats.
        accuracies: on the pairs after every epoch, mean over the splits, percent.
    """

    weights: Float[Tensor, " parts"]
    epoch: int
    losses: list[float]
    accuracies: list[float]


def part_products(pairs: EncodedQuestions, num_parts: int) -> PartProducts:
    """Scalar products of the parts of encodings.

    Args:
        pairs: SugarCrepe's; their payloads are normalised encodings.
        num_parts: number of parts; divides M.
    """

    image_of = pairs.image_of[:, 0]

    def products(captions: Int64[Tensor, " pairs"]) -> Float[Tensor, "pairs parts"]:
        chunks = zip(image_of.split(PAIR_CHUNK), captions.split(PAIR_CHUNK), strict=True)
        parts = [
            (pairs.images[rows] * pairs.texts[texts]).unflatten(1, (num_parts, -1)).sum(dim=2) for rows, texts in chunks
        ]
        return torch.cat(parts)

    squares = pairs.images.square().unflatten(1, (num_parts, -1)).sum(dim=2)
    return PartProducts(products(pairs.text_of[:, 0]), products(pairs.text_of[:, 1]), squares[image_of])


def pair_loss(products: PartProducts, weights: Float[Tensor, " parts"], scale: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """Cross-entropy of choosing the true caption of two, in nats.

        y' = m * y,   logits = scale * [y' . y_p / (|y'| |y_p|),  y' . y_n / (|y'| |y_n|)],   target: the first

    with y, y_p and y_n the normalised encodings of image, true and false caption. Source: SPARO, appendix 0.C.1.

    Args:
        products: of the pairs.
        weights: m.
        scale: inverse temperature.
    """
    lengths = (products.squares @ weights.square()).sqrt()
    cosines = torch.stack((products.positive @ weights, products.negative @ weights), dim=1) / lengths[:, None]
    return F.cross_entropy(scale * cosines, torch.zeros_like(lengths, dtype=torch.int64))


def masked_pairs(pairs: EncodedQuestions, weights: Float[Tensor, " parts"]) -> EncodedQuestions:
    """The same pairs with masked images."""
    per_dimension = weights.repeat_interleave(pairs.images.shape[1] // len(weights))
    return replace(pairs, images=mask_features(pairs.images, per_dimension))


def fit_mask(pairs: EncodedQuestions, num_parts: int, settings: FitSettings) -> FitResult:
    """Learn a mask on frozen encodings and keep the one that fits best.

    After every epoch the masked encodings are evaluated as SugarCrepe is: right if strictly nearer, averaged over the
    splits. Pairs of all splits are put together without balancing them.

    Args:
        pairs: SugarCrepe's; their payloads are normalised encodings.
        num_parts: number of parts.
        settings: how.
    """
    products = part_products(pairs, num_parts)
    mask = Mask(num_parts, settings.bound).to(pairs.images.device)
    optimizer = torch.optim.SGD(mask.parameters(), lr=settings.lr, momentum=settings.momentum)
    generator = torch.Generator().manual_seed(settings.seed)
    best: tuple[float, int, Tensor] = (-1.0, 0, torch.empty(0))
    losses, accuracies = [], []
    for epoch in progress(range(1, settings.epochs + 1), desc="mask"):
        total = torch.zeros((), device=pairs.images.device)
        for rows in _batches(len(pairs.questions), settings.batch_size, generator):
            rows = rows.to(pairs.images.device)
            loss = pair_loss(PartProducts(*(part[rows] for part in products)), *mask())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(rows)
        weights = mask()[0].detach()
        if not (weights.isfinite().all() and weights.any()):
            raise ValueError(f"the mask of epoch {epoch} has no finite weight above 0; give a smaller --lr")
        accuracy = macro(split_results(masked_pairs(pairs, weights), DotProductScorer.score_pairs))
        losses.append(float(total) / len(pairs.questions))
        accuracies.append(accuracy)
        if accuracy > best[0]:
            best = (accuracy, epoch, weights)
    return FitResult(best[2], best[1], losses, accuracies)


def _batches(number: int, batch_size: int, generator: torch.Generator) -> Iterator[Int64[Tensor, " B"]]:
    """All rows in a new random order, some at a time."""
    yield from torch.randperm(number, generator=generator).split(batch_size)

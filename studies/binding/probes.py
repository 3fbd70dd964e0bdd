"""Features z and binary labels -> information in bits about features F, about bindings Y, and about binding alone.

    H(F | z) <= loss_F = - sum_k log2 p(F_k | z, F_1 ... F_k-1),  and so for Y                 mean over test images
    binding information = H(Y | F) - (loss_Y - loss_F),  binding ratio = binding information / H(Y | F)

A probe has one head per label, and head k reads z and the true labels before k. Y determines F, so H(Y | z) - H(F | z)
is H(Y | F, z). Both losses are upper bounds, so their difference may be wrong in both directions.

Source: "Formalizing the binding problem", and `probes.py` and `trainer.py` of its code. The MLP multiplies z with the
weights of all heads at once. One addition is ours: the logits get an offset, the exact log odds of label k given the
labels before k, and the weights start so that the probe adds nothing. So a probe that learns nothing from z finds no
information, where the authors' would first have to learn which labels exclude each other.
"""

import copy
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

EPOCHS, BATCH_SIZE, LEARNING_RATE, WEIGHT_DECAY = 20, 200, 0.005, 1e-4
SMALLEST_PROBABILITY = 1e-4  # of the offset, so that its logits are finite
# Capacity -> width of the hidden layer of each head; 0: linear.
CAPACITIES = {"linear": 0, "MLP 8": 8, "MLP 32": 32}
MAIN = "MLP 32"  # capacity of the main table and of the controls


def prior_logits(labels: Float[Tensor, "B n"], support: Float[Tensor, "rows n"]) -> Float[Tensor, "B n"]:
    """Log odds of each label given the labels before, where all rows of `support` are equally frequent."""
    agree = (labels[:, None] == support).cumprod(dim=2)  # (B, rows, n)
    before = torch.cat([torch.ones_like(agree[:, :, :1]), agree[:, :, :-1]], dim=2).float()
    share = (before * support).sum(dim=1) / before.sum(dim=1)
    return share.clamp(SMALLEST_PROBABILITY, 1 - SMALLEST_PROBABILITY).logit()


class LinearProbe(nn.Module):
    """logit_k = w_k z + sum_(i < k) v_ki (label_i - 1/2) + b_k."""

    def __init__(self, width: int, num_labels: int) -> None:
        super().__init__()
        self.from_features = nn.Linear(width, num_labels)
        nn.init.zeros_(self.from_features.weight)
        nn.init.zeros_(self.from_features.bias)
        self.from_labels = nn.Parameter(torch.zeros(num_labels, num_labels))

    def forward(self, z: Float[Tensor, "B F"], labels: Float[Tensor, "B n"]) -> Float[Tensor, "B n"]:
        """Logits."""
        return self.from_features(z) + (labels - 0.5) @ self.from_labels.tril(-1).t()


class MLPProbe(nn.Module):
    """logit_k = w_k GELU(A_k z + sum_(i < k) c_ki (label_i - 1/2) + b_k) + d_k: a separate MLP for each head."""

    def __init__(self, width: int, num_labels: int, hidden: int) -> None:
        super().__init__()
        self.num_labels, scale = num_labels, (width + num_labels) ** -0.5
        self.from_features = nn.Parameter(scale * torch.randn(width, num_labels * hidden))
        self.from_labels = nn.Parameter(scale * torch.randn(num_labels, num_labels, hidden))  # (heads, n, hidden)
        self.bias = nn.Parameter(torch.zeros(num_labels, hidden))
        self.out = nn.Parameter(torch.zeros(num_labels, hidden))
        self.out_bias = nn.Parameter(torch.zeros(num_labels))

    def forward(self, z: Float[Tensor, "B F"], labels: Float[Tensor, "B n"]) -> Float[Tensor, "B n"]:
        """Logits."""
        hidden = (z @ self.from_features).unflatten(1, (self.num_labels, -1))
        earlier = self.from_labels.permute(2, 0, 1).tril(-1)  # (hidden, heads, n)
        known = torch.einsum("bn,hkn->bkh", labels - 0.5, earlier)  # b image, n label, h hidden, k head
        return (F.gelu(hidden + known + self.bias) * self.out).sum(dim=2) + self.out_bias


class Split(NamedTuple):
    """One part of the images: the probe's input, the labels, and the offset of the logits."""

    z: Float[Tensor, "B F"]
    labels: Float[Tensor, "B n"]
    offset: Float[Tensor, "B n"]

    def bits(self, probe: nn.Module) -> Float[Tensor, " n"]:
        """Mean binary cross-entropy of each head in bits."""
        logits = probe(self.z, self.labels) + self.offset
        return F.binary_cross_entropy_with_logits(logits, self.labels, reduction="none").mean(dim=0) / math.log(2)


def fit_probe(train: Split, validation: Split, test: Split, hidden: int, seed: int) -> Float[Tensor, " n"]:
    """Train a probe; bits of each head on the test images, at the epoch of the smallest validation loss."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = train.z.shape[1], train.labels.shape[1]
        probe = MLPProbe(*sizes, hidden) if hidden else LinearProbe(*sizes)
        optimizer = torch.optim.Adam(probe.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
        best, weights = math.inf, {}
        for epoch in range(EPOCHS + 1):
            with torch.no_grad():
                loss = validation.bits(probe).sum().item()
            if loss < best:
                best, weights = loss, copy.deepcopy(probe.state_dict())
            if epoch < EPOCHS:
                for rows in torch.randperm(len(train.z)).split(BATCH_SIZE):
                    optimizer.zero_grad()
                    Split(*(part[rows] for part in train)).bits(probe).sum().backward()
                    optimizer.step()
                schedule.step()
    probe.load_state_dict(weights)
    with torch.no_grad():
        return test.bits(probe)


def binding_ratio(loss_y: float, loss_f: float, entropy: float) -> float:
    """Binding information over `entropy`, H(Y | F); losses are bits per image, means over the test images."""
    return 1 - (loss_y - loss_f) / entropy


def standardized(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """Every input of the probe with mean 0 and deviation 1 on the training images."""
    mean, deviation = parts[0].mean(dim=0), parts[0].std(dim=0).clamp_min(1e-6)
    return [(part - mean) / deviation for part in parts]


def projected(parts: Sequence[Tensor], width: int) -> Sequence[Tensor]:
    """The first principal components of the training images; narrower features stay as they are."""
    if parts[0].shape[1] <= width:
        return parts
    mean = parts[0].mean(dim=0)
    centered = parts[0] - mean
    if centered.shape[1] > len(centered):  # components from the smaller of the two products
        values, vectors = torch.linalg.eigh((centered @ centered.t()).double())
        basis = (centered.t().double() @ vectors[:, -width:] / values[-width:].clamp_min(1e-12).sqrt()).float()
    else:
        basis = torch.linalg.eigh((centered.t() @ centered).double()).eigenvectors[:, -width:].float()
    return [(part - mean) @ basis for part in parts]

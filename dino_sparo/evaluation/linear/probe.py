"""Features -> linear probes, one per learning rate, trained side by side on a frozen encoder.

The features come from `features.py`; `run.py` is a whole training. The encoder is by far the dearest part of a
probe and the learning rate its most delicate option, so the encoder runs once for many probes that differ in nothing
else. Source: DINO, section 4.1, in the variant of facebookresearch/dino's `eval_linear.py`; SPARO, appendix 0.C.2, for
which features the probe sees.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dino_sparo.runtime.collectives import all_reduce_sum
from dino_sparo.runtime.distributed import world_size

INIT_STD = 0.01
MOMENTUM = 0.9
TOP = 5
TEST_ROWS = 1024  # images whose logits exist at a time
REFERENCE_BATCH = 256  # the global batch a learning rate is quoted for

Batches = Iterable[tuple[Tensor, Tensor]]


class LinearProbe(nn.Module):
    """Linear classifiers side by side, on the same features.

        logits_r = x W_r^T + b_r

    All start from the same weights, normal with standard deviation 0.01, and zero bias, as DINO's probe does: they
    differ in their learning rate alone.

    Args:
        feature_dim: F.
        num_classes: number of classes.
        num_probes: number of probes.
        seed: of the weights.
        torch_init: weights and bias as `nn.Linear` draws them after `torch.manual_seed(seed)`, instead of DINO's.

    Raises:
        ValueError: a size is not positive.
    """

    def __init__(
        self, feature_dim: int, num_classes: int, num_probes: int = 1, seed: int = 0, torch_init: bool = False
    ) -> None:
        super().__init__()
        for name, size in (("feature_dim", feature_dim), ("num_classes", num_classes), ("num_probes", num_probes)):
            if size < 1:
                raise ValueError(f"{name}={size} is not a valid size for a linear probe; give a positive integer")
        generator = torch.Generator().manual_seed(seed)
        weight, bias = torch.empty(num_classes, feature_dim), torch.zeros(num_classes)
        if torch_init:
            bound = feature_dim**-0.5
            weight.uniform_(-bound, bound, generator=generator)
            bias.uniform_(-bound, bound, generator=generator)
        else:
            weight.normal_(std=INIT_STD, generator=generator)
        self.weight = nn.Parameter(weight.repeat(num_probes, 1, 1))
        self.bias = nn.Parameter(bias.repeat(num_probes, 1))

    def forward(self, features: Float[Tensor, "B F"]) -> Float[Tensor, "probes B classes"]:
        """Features (B, F) -> logits (probes, B, classes): one matrix product for all probes."""
        logits = F.linear(features, self.weight.flatten(0, 1), self.bias.flatten())
        return logits.unflatten(1, self.bias.shape).transpose(0, 1)


class ProbeSGD:
    """SGD with momentum and without weight decay, with a learning rate for each probe.

        v <- 0.9 v + g,   w_r <- w_r - lr_r v_r

    That is `torch.optim.SGD` for each probe alone.

    Args:
        probe: whose weights to move.
        learning_rates: one per probe, as they are applied at the start of the training.
    """

    def __init__(self, probe: LinearProbe, learning_rates: Sequence[float]) -> None:
        self.parameters = dict(probe.named_parameters())
        self.momenta = {name: torch.zeros_like(parameter) for name, parameter in self.parameters.items()}
        self.learning_rates = torch.tensor(learning_rates, device=probe.weight.device)

    @torch.no_grad()
    def step(self, schedule: float) -> None:
        """Average the gradients over processes and move the weights.

        Args:
            schedule: factor on all learning rates.
        """
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                raise ValueError(f"{name} of the probe has no gradient; call backward() before step()")
            gradient = all_reduce_sum(parameter.grad).div_(world_size())
            momentum = self.momenta[name].mul_(MOMENTUM).add_(gradient)
            rates = (schedule * self.learning_rates).view(-1, *[1] * (parameter.ndim - 1))
            parameter.sub_(rates * momentum)
            parameter.grad = None

    def load_momenta(self, momenta: dict[str, Tensor]) -> None:
        """Go on from saved momenta."""
        for name, momentum in self.momenta.items():
            momentum.copy_(momenta[name])


def cosine_factor(epoch: int, epochs: int) -> float:
    """Factor on the learning rate during an epoch: (1 + cos(pi epoch / epochs)) / 2, constant within it."""
    return (1 + math.cos(math.pi * epoch / epochs)) / 2


def scaled_learning_rates(learning_rates: Sequence[float], global_batch_size: int) -> list[float]:
    """The linear scaling rule: lr x batch / 256.

    Raises:
        ValueError: none, or one that is not positive, or one twice.
    """
    rates = list(learning_rates)
    if not rates or min(rates) <= 0 or len(set(rates)) < len(rates):
        raise ValueError(f"lr={rates}; give one or more different positive numbers, e.g. 0.001 0.01 0.1")
    return [rate * global_batch_size / REFERENCE_BATCH for rate in rates]


def train_one_epoch(probe: LinearProbe, optimizer: ProbeSGD, batches: Batches, schedule: float) -> list[float]:
    """One pass over the training features.

        loss = sum over probes r of the mean cross-entropy of probe r

    The probes share no weight, so the gradient of the sum is each probe's own.

    Args:
        probe: the probes.
        optimizer: of the probe.
        batches: (features (B, F), labels (B,)) on the probe's device, B the same on every process.
        schedule: factor on all learning rates.

    Returns:
        Mean training loss of each probe over all processes, nats.

    Raises:
        ValueError: no batches; every probe diverged. (One that diverges among others is left to fail alone.)
    """
    losses = torch.zeros(len(probe.weight), dtype=torch.float64, device=probe.weight.device)
    steps = 0
    for features, labels in batches:
        logits = probe(features)
        per_probe = _cross_entropy(logits, labels).mean(dim=1)
        per_probe.sum().backward()
        optimizer.step(schedule)
        losses += per_probe.detach()
        steps += 1
    if steps == 0:
        raise ValueError("an epoch of the probe has no batch; give more images or a smaller batch")
    means = (all_reduce_sum(losses) / (steps * world_size())).tolist()
    if not any(map(math.isfinite, means)):
        raise ValueError(f"every probe diverged (training losses {means}); give smaller learning rates with --lr")
    return means


def _cross_entropy(logits: Float[Tensor, "probes B classes"], labels: Int[Tensor, " B"]) -> Float[Tensor, "probes B"]:
    """Of each probe and image, nats."""
    losses = F.cross_entropy(logits.flatten(0, 1), labels.repeat(len(logits)), reduction="none")
    return losses.unflatten(0, logits.shape[:2])


@torch.no_grad()
def probe_accuracy(
    probe: LinearProbe, features: Float[Tensor, "images F"], labels: Int[Tensor, " images"]
) -> list[dict[str, float]]:
    """Accuracy of each probe over the images of all processes.

    Args:
        probe: the probes.
        features: (images, F), this process' share; may be empty.
        labels: (images,).

    Returns:
        For each probe `top1` and `top5` in percent, and `loss` in nats. With fewer than five classes `top5` looks at
        all of them.

    Raises:
        ValueError: no process has an image.
    """
    sums = torch.zeros(len(probe.weight), 4, dtype=torch.float64, device=probe.weight.device)
    for start in range(0, len(features), TEST_ROWS):
        targets = labels[start : start + TEST_ROWS].to(sums.device)
        logits = probe(features[start : start + TEST_ROWS].to(sums.device))
        right = logits.topk(min(TOP, logits.shape[-1])).indices == targets[:, None]
        right &= logits.isfinite().all(dim=2, keepdim=True)  # a probe that diverged is never right
        sums[:, 0] += right[..., 0].sum(dim=1)
        sums[:, 1] += right.any(dim=2).sum(dim=1)
        sums[:, 2] += _cross_entropy(logits, targets).double().sum(dim=1)
        sums[:, 3] += len(targets)
    sums = all_reduce_sum(sums)
    rows = sums.tolist()
    if not rows[0][3]:
        raise ValueError("there are no images to test the probe on")
    return [{"top1": 100 * n1 / n, "top5": 100 * n5 / n, "loss": loss / n} for n1, n5, loss, n in rows]

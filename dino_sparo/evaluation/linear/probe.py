"""Features -> linear probes, trained side by side on a frozen encoder: one trainer for every evaluation with probes.

`linear` trains probes that differ in their learning rate, `clip-probe` probes that differ in their weight decay, and
`slot-study` probes of some slots. Encoding dominates the cost, so the encoder runs once for many probes that differ in
one number. Sources: DINO, section 4.1, in the variant of facebookresearch/dino's `eval_linear.py`; for the probe's
features SPARO, appendix 0.C.2.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dino_sparo.data.samplers import epoch_order
from dino_sparo.evaluation.features import Features
from dino_sparo.runtime.collectives import all_reduce_sum
from dino_sparo.runtime.launch import rank, world_size

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

    With `torch_init` weights and bias are those of `nn.Linear` after `torch.manual_seed(seed)`, instead of DINO's.
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
    """

    def __init__(self, probe: LinearProbe, learning_rates: Sequence[float]) -> None:
        self.probe = probe
        self.momenta = {name: torch.zeros_like(parameter) for name, parameter in probe.named_parameters()}
        self.learning_rates = torch.tensor(learning_rates, device=probe.weight.device)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Average the gradients over processes and move the weights; `factor` scales all learning rates."""
        _average_gradients(self.probe)
        for name, parameter in self.probe.named_parameters():
            momentum = self.momenta[name].mul_(MOMENTUM).add_(parameter.grad)  # type: ignore[arg-type]
            parameter.sub_(_per_probe(factor * self.learning_rates, parameter) * momentum)
            parameter.grad = None

    def load_momenta(self, momenta: dict[str, Tensor]) -> None:
        """Resume from saved momenta."""
        for name, momentum in self.momenta.items():
            momentum.copy_(momenta[name])


class ProbeAdamW:
    """AdamW with a weight decay for each probe; each probe alone takes the steps of `torch.optim.AdamW`.

        w_r <- (1 - lr d_r) w_r,   w_r <- w_r - lr Adam(gradient)        d_r the weight decay of probe r

    A decay of more than 2 / lr makes a probe diverge; that probe is then never right.
    """

    def __init__(self, probe: LinearProbe, lr: float, weight_decays: Sequence[float]) -> None:
        self.probe, self.lr = probe, lr
        self.decays = torch.tensor(weight_decays, device=probe.weight.device)
        self.adam = torch.optim.Adam(probe.parameters(), lr=lr)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Average the gradients over processes and move the weights; `factor` scales the learning rate."""
        _average_gradients(self.probe)
        for parameter in self.probe.parameters():
            parameter.mul_(_per_probe(1 - factor * self.lr * self.decays, parameter))
        self.adam.param_groups[0]["lr"] = factor * self.lr
        self.adam.step()
        self.adam.zero_grad()


def _average_gradients(probe: LinearProbe) -> None:
    for name, parameter in probe.named_parameters():
        if parameter.grad is None:
            raise ValueError(f"{name} of the probe has no gradient; call backward() before step()")
        all_reduce_sum(parameter.grad).div_(world_size())


def _per_probe(numbers: Float[Tensor, " probes"], parameter: Tensor) -> Tensor:
    """One number per probe, shaped to multiply a parameter (probes, ...)."""
    return numbers.view(-1, *[1] * (parameter.ndim - 1))


class ProbeSampler:
    """Batches of (epoch, index) in a random order; the last batch holds the remaining images, as in the reference.

    If the images do not divide among the processes, the first ones are taken again, as torch's `DistributedSampler`
    does, so that every process has equally many in each batch.

    Args:
        num_images: size of the source.
        batch_size: B, images per process.
        seed: of the order.
    """

    def __init__(self, num_images: int, batch_size: int, seed: int = 0) -> None:
        self.num_images, self.batch_size, self.seed, self.epoch = num_images, batch_size, seed, 0
        self.per_process = math.ceil(num_images / world_size())

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        return math.ceil(self.per_process / self.batch_size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, global_batch_size = self.epoch, self.batch_size * world_size()
        order = np.resize(epoch_order(self.num_images, self.seed, epoch), self.per_process * world_size())
        for start in range(0, len(order), global_batch_size):
            batch = order[start : start + global_batch_size].reshape(world_size(), -1)[rank()]
            yield [(epoch, index) for index in batch.tolist()]


def cached_batches(
    train: Features, device: torch.device, *, batch_size: int, seed: int = 0, rows: Int[Tensor, " n"] | None = None
) -> Callable[[int], Batches]:
    """Epoch -> this process' batches of features that were extracted once.

    Args:
        train: of all processes.
        device: the probe's.
        batch_size: per process.
        seed: of the order.
        rows: images to take; None: all.
    """
    rows = torch.arange(len(train.features)) if rows is None else rows.cpu()
    sampler = ProbeSampler(len(rows), batch_size, seed)

    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        sampler.set_epoch(epoch)
        for keys in sampler:
            chosen = rows[[index for _, index in keys]].to(train.features.device)
            yield train.features[chosen].to(device), train.labels[chosen].to(device)

    return batches


def cosine_factor(epoch: int, epochs: int) -> float:
    """Factor on the learning rate during an epoch: (1 + cos(pi epoch / epochs)) / 2, constant within it."""
    return (1 + math.cos(math.pi * epoch / epochs)) / 2


def scaled_learning_rates(learning_rates: Sequence[float], global_batch_size: int) -> list[float]:
    """The linear scaling rule: lr x batch / 256."""
    rates = list(learning_rates)
    if not rates or min(rates) <= 0 or len(set(rates)) < len(rates):
        raise ValueError(f"lr={rates}; give one or more different positive numbers, e.g. 0.001 0.01 0.1")
    return [rate * global_batch_size / REFERENCE_BATCH for rate in rates]


def train_one_epoch(
    probe: LinearProbe, optimizer: ProbeSGD | ProbeAdamW, batches: Batches, factors: Iterable[float]
) -> list[float]:
    """One pass over the training features.

        loss = sum over probes r of the mean cross-entropy of probe r

    The probes share no weight, so the gradient of the sum is each probe's own.

    Args:
        probe: the probes.
        optimizer: of the probe.
        batches: (features (B, F), labels (B,)) on the probe's device, B the same on every process.
        factors: of the learning rate, one per step.

    Returns:
        Mean training loss of each probe over all processes, nats; not finite for a probe that diverged.
    """
    losses = torch.zeros(len(probe.weight), dtype=torch.float64, device=probe.weight.device)
    steps = 0
    for (features, labels), factor in zip(batches, factors, strict=False):
        per_probe = _cross_entropy(probe(features), labels).mean(dim=1)
        per_probe.sum().backward()
        optimizer.step(factor)
        losses += per_probe.detach()
        steps += 1
    if steps == 0:
        raise ValueError("an epoch of the probe has no batch; give more images")
    return (all_reduce_sum(losses) / (steps * world_size())).tolist()


def _cross_entropy(logits: Float[Tensor, "probes B classes"], labels: Int[Tensor, " B"]) -> Float[Tensor, "probes B"]:
    """Cross-entropy of each probe and image, nats."""
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
        For each probe `top1` and `top5` in percent, and `loss` in nats. With fewer than five classes `top5` counts all.
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

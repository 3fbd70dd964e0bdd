"""Features -> linear probes, trained side by side on a frozen encoder, for every evaluation with probes.

`ProbeRun` is a training with validation, saving and resuming. Probes of `linear` differ in their learning rate, with
`--probe` in their read-out (`attentive.py`), and for a CLIP in their weight decay. Encoding dominates the cost, so the
encoder runs once for all probes. Sources: DINO, section 4.1, in the variant of facebookresearch/dino's
`eval_linear.py`; for the features, SPARO, appendix 0.C.2.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dino_sparo.data.samplers import epoch_order
from dino_sparo.evaluation.features import Features, inference, with_exif
from dino_sparo.runtime.collectives import all_reduce_sum
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import differences, plain
from dino_sparo.runtime.launch import is_main, rank, world_size
from dino_sparo.runtime.logs import STEP_LINE_SECONDS, progress
from dino_sparo.weights.checkpoint import load_checkpoint
from dino_sparo.weights.file import load_strictly
from dino_sparo.weights.folder import save_checkpoint

logger = logging.getLogger(__name__)

INIT_STD = 0.01
MOMENTUM = 0.9
TOP = 5
TEST_ROWS = 1024  # images whose logits exist at a time
REFERENCE_BATCH = 256  # global batch size for which learning rates are given

Batches = Iterable[tuple[Tensor, Tensor]]


class Probes(nn.Module):
    """Classifiers side by side: features (B, F) -> logits (probes, B, classes).

    Attributes:
        num_probes: number of classifiers.
        min_batch: images that a step needs; smaller batches are skipped.
    """

    num_probes: int
    min_batch: int = 1

    @property
    def device(self) -> torch.device:
        """Device of the classifiers."""
        return next(self.parameters()).device

    def describe(self, index: int) -> dict[str, Any]:
        """Entries of a result about one probe."""
        return {}


class LinearProbe(Probes):
    """Linear classifiers side by side, on the same features.

        logits_r = x W_r^T + b_r

    All probes start from the same weights, as DINO's probe does: normal with standard deviation 0.01, and bias 0. With
    `torch_init`, weights and bias are those of `nn.Linear` after `torch.manual_seed(seed)`.
    """

    def __init__(
        self, feature_dim: int, num_classes: int, num_probes: int = 1, seed: int = 0, torch_init: bool = False
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight, bias = torch.empty(num_classes, feature_dim), torch.zeros(num_classes)
        if torch_init:
            bound = feature_dim**-0.5
            weight.uniform_(-bound, bound, generator=generator)
            bias.uniform_(-bound, bound, generator=generator)
        else:
            weight.normal_(std=INIT_STD, generator=generator)
        self.num_probes = num_probes
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

    def __init__(self, probe: Probes, learning_rates: Sequence[float]) -> None:
        self.probe = probe
        self.momenta = {name: torch.zeros_like(parameter) for name, parameter in probe.named_parameters()}
        self.learning_rates = torch.tensor(learning_rates, device=probe.device)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Move the weights; `factor` scales all learning rates."""
        for name, parameter in self.probe.named_parameters():
            momentum = self.momenta[name].mul_(MOMENTUM).add_(parameter.grad)  # type: ignore[arg-type]
            parameter.sub_(_per_probe(factor * self.learning_rates, parameter) * momentum)


class ProbeAdamW:
    """AdamW with a weight decay for each probe; the steps of each probe equal those of `torch.optim.AdamW`.

        w_r <- (1 - lr d_r) w_r,   w_r <- w_r - lr Adam(gradient)        d_r the weight decay of probe r

    A probe with a decay of more than 2 / lr diverges.
    """

    def __init__(self, probe: LinearProbe, lr: float, weight_decays: Sequence[float]) -> None:
        self.probe, self.lr = probe, lr
        self.decays = torch.tensor(weight_decays, device=probe.weight.device)
        self.adam = torch.optim.Adam(probe.parameters(), lr=lr)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Move the weights; `factor` scales the learning rate."""
        for parameter in self.probe.parameters():
            parameter.mul_(_per_probe(1 - factor * self.lr * self.decays, parameter))
        self.adam.param_groups[0]["lr"] = factor * self.lr
        self.adam.step()


def _per_probe(numbers: Float[Tensor, " probes"], parameter: Tensor) -> Tensor:
    """One number per probe, shaped to multiply a parameter (probes, ...)."""
    return numbers.view(-1, *[1] * (parameter.ndim - 1))


class ProbeSampler:
    """Batches of (epoch, index) in a random order; the last batch has the remaining images, as in the reference.

    If the number of images does not divide by the number of processes, the first images are used again, as in torch's
    `DistributedSampler`, so that every process has equally many.
    """

    def __init__(self, num_images: int, batch_size: int, seed: int = 0) -> None:
        self.num_images, self.batch_size, self.seed, self.epoch = num_images, batch_size, seed, 0
        self.per_process = math.ceil(num_images / world_size())

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
    """Epoch -> this process' batches of features in memory, of all images or of some rows."""
    rows = torch.arange(len(train.features)) if rows is None else rows.cpu()
    sampler = ProbeSampler(len(rows), batch_size, seed)

    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        sampler.epoch = epoch
        for keys in sampler:
            chosen = rows[[index for _, index in keys]].to(train.features.device)
            yield train.features[chosen].to(device), train.labels[chosen].to(device)

    return batches


def live_batches(
    encoder: nn.Module, encode: Callable[[Tensor], Tensor], loader: Any, device: torch.device, dtype: torch.dtype
) -> Callable[[int], Batches]:
    """Epoch -> this process' batches of features of augmented images.

    `loader` has a `ProbeSampler`; for the other arguments see `extract_split`.
    """

    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        loader.batch_sampler.epoch = epoch
        for batch in progress(loader, total=len(loader), desc=f"probe epoch {epoch + 1}"):
            with inference(encoder, device, dtype):
                features = encode(batch.views[0].to(device, non_blocking=True)).float()
            # Cloned outside inference mode, so that gradients work.
            yield features.clone(), batch.labels.to(device, non_blocking=True)

    return batches


def cosine_factor(epoch: int, epochs: int) -> float:
    """Factor on the learning rate during an epoch: (1 + cos(pi epoch / epochs)) / 2, constant within it."""
    return (1 + math.cos(math.pi * epoch / epochs)) / 2


def scaled_learning_rates(learning_rates: Sequence[float], global_batch_size: int) -> list[float]:
    """The linear scaling rule: lr x batch size / 256."""
    rates = list(learning_rates)
    if not rates or min(rates) <= 0 or len(set(rates)) < len(rates):
        raise UserError(f"lr={rates}; give one or more different positive numbers, e.g. 0.001 0.01 0.1")
    return [rate * global_batch_size / REFERENCE_BATCH for rate in rates]


def train_one_epoch(probe: Probes, optimizer: Any, batches: Batches, factors: Iterable[float]) -> list[float]:
    """One pass over the training features.

        loss = sum over probes r of the mean cross-entropy of probe r

    The probes share no weight, so the sum gives each probe its own gradient. Gradients are averaged over processes.

    Args:
        probe: the probes.
        optimizer: of the probes: `step(factor)` moves the weights, `factor` scales all learning rates.
        batches: (features (B, F), labels (B,)) on the probe's device, with equal B on all processes.
        factors: of the learning rate, one per step.

    Returns:
        Mean training loss of each probe over all processes, nats; not finite for a probe that diverged.
    """
    losses = torch.zeros(probe.num_probes, dtype=torch.float64, device=probe.device)
    steps = 0
    probe.train()
    for (features, labels), factor in zip(batches, factors, strict=False):
        if len(labels) < probe.min_batch:
            continue
        per_probe = _cross_entropy(probe(features), labels).mean(dim=1)
        per_probe.sum().backward()
        for gradient in (parameter.grad for parameter in probe.parameters() if parameter.grad is not None):
            all_reduce_sum(gradient).div_(world_size())
        optimizer.step(factor)
        probe.zero_grad()
        losses += per_probe.detach()
        steps += 1
    if steps == 0:
        raise UserError("an epoch of the probe has no batch; give more images")
    for buffer in probe.buffers():  # running statistics of batch norm
        if buffer.is_floating_point():
            all_reduce_sum(buffer).div_(world_size())
    return (all_reduce_sum(losses) / (steps * world_size())).tolist()


def train_on_cached(
    train: Features,
    num_classes: int,
    learning_rates: Sequence[float],
    epochs: int,
    device: torch.device,
    batch_size: int,
    seed: int,
) -> LinearProbe:
    """Linear probes, one per learning rate, trained on un-augmented features; `batch_size` is per process."""
    probe = LinearProbe(train.features.shape[1], num_classes, len(learning_rates), seed).to(device)
    optimizer = ProbeSGD(probe, scaled_learning_rates(learning_rates, batch_size * world_size()))
    batches = cached_batches(train, device, batch_size=batch_size, seed=seed)
    for epoch in range(epochs):
        train_one_epoch(probe, optimizer, batches(epoch), repeat(cosine_factor(epoch, epochs)))
    return probe


def _cross_entropy(logits: Float[Tensor, "probes B classes"], labels: Int[Tensor, " B"]) -> Float[Tensor, "probes B"]:
    """Cross-entropy of each probe and image, nats."""
    losses = F.cross_entropy(logits.flatten(0, 1), labels.repeat(len(logits)), reduction="none")
    return losses.unflatten(0, logits.shape[:2])


@torch.no_grad()
def probe_accuracy(
    probe: Probes, features: Float[Tensor, "images F"], labels: Int[Tensor, " images"]
) -> list[dict[str, float]]:
    """Accuracy of each probe over the images of all processes, of which this process has a share.

    Returns:
        For each probe `top1` and `top5` in percent, and `loss` in nats. With fewer than five classes `top5` counts all.
    """
    sums = torch.zeros(probe.num_probes, 4, dtype=torch.float64, device=probe.device)
    probe.eval()
    for start in range(0, len(features), TEST_ROWS):
        targets = labels[start : start + TEST_ROWS].to(sums.device)
        logits = probe(features[start : start + TEST_ROWS].to(sums.device))
        right = logits.topk(min(TOP, logits.shape[-1])).indices == targets[:, None]
        right &= logits.isfinite().all(dim=2, keepdim=True)  # a probe that diverged is always wrong
        sums[:, 0] += right[..., 0].sum(dim=1)
        sums[:, 1] += right.any(dim=2).sum(dim=1)
        sums[:, 2] += _cross_entropy(logits, targets).double().sum(dim=1)
        sums[:, 3] += len(targets)
    rows = all_reduce_sum(sums).tolist()
    if not rows[0][3]:
        raise UserError("there are no images to test the probe on")
    return [{"top1": 100 * n1 / n, "top5": 100 * n5 / n, "loss": loss / n} for n1, n5, loss, n in rows]


@dataclass
class ProbeRun:
    """A training of several probes, which can be saved and resumed.

    Attributes:
        optimizer: of the probes, with the attribute `momenta`.
        learning_rates: one per probe, for a global batch of 256.
        record: plain values; a saved training with other values is refused.
        path: file of the saved training; None: the training is not saved.
        epoch: finished epochs.
        history: one entry per validation: epoch (from 0), and each probe's accuracies.
        counts: numbers of images, for the result of a finished training.
        factors: epoch -> factors on the learning rate, one per step; None: `cosine_factor`.
    """

    probe: Probes
    optimizer: Any
    learning_rates: Sequence[float]
    epochs: int
    record: dict[str, Any]
    path: Path | None = None
    epoch: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, int | None] = field(default_factory=dict)
    factors: Callable[[int], Iterable[float]] | None = None

    def save(self) -> None:
        """Write the state of the training, on rank 0."""
        if self.path is not None and is_main():
            state = {
                "state_dict": self.probe.state_dict(),
                "momenta": self.optimizer.momenta,
                "epoch": self.epoch,
                "history": self.history,
                "counts": self.counts,
                "learning_rates": list(self.learning_rates),
                "record": self.record,
            }
            save_checkpoint(state, self.path)

    def resume(self, overwrite: bool = False) -> None:
        """Resume the saved training, if there is one; with `overwrite`, only a training with the same record."""
        if self.path is None or not self.path.is_file():
            return
        state = load_heads(self.path)
        if overwrite and state["record"] != self.record:
            return
        check_same_record(state["record"], self.record, self.path)
        load_strictly(self.probe, state["state_dict"], str(self.path))
        device = self.probe.device
        self.optimizer.momenta = {name: momentum.to(device) for name, momentum in state["momenta"].items()}
        self.epoch, self.history, self.counts = state["epoch"], state["history"], state["counts"]
        logger.info("%s: resuming after epoch %d of %d", self.path, self.epoch, self.epochs)

    def train(self, epoch_batches: Callable[[int], Batches], val: Features, val_freq: int = 1) -> None:
        """Train to the end with validation every `val_freq` epochs; the log beside `path` has a line per epoch."""
        last_line = -math.inf
        for epoch in range(self.epoch, self.epochs):
            schedule = cosine_factor(epoch, self.epochs)
            factors = repeat(schedule) if self.factors is None else self.factors(epoch)
            losses = train_one_epoch(self.probe, self.optimizer, epoch_batches(epoch), factors)
            if not any(map(math.isfinite, losses)):
                raise UserError(f"every probe diverged (training losses {losses}); give smaller rates with --lr")
            line: dict[str, Any] = {"epoch": epoch, "schedule": schedule, "train_loss": losses}
            if epoch % val_freq == 0 or epoch == self.epochs - 1:
                line["test"] = probe_accuracy(self.probe, val.features, val.labels)
                self.history.append({"epoch": epoch, "test": line["test"]})
                best = max(range(len(losses)), key=lambda probe: line["test"][probe]["top1"])
                if epoch == self.epochs - 1 or time.monotonic() - last_line > STEP_LINE_SECONDS:
                    last_line = time.monotonic()
                    logger.info(
                        "epoch %d of %d: best top-1 %.2f %% (lr %g), loss %.4f", epoch + 1, self.epochs,
                        line["test"][best]["top1"], self.learning_rates[best], losses[best],
                    )  # fmt: skip
            self.epoch = epoch + 1
            self.save()
            if self.path is not None and is_main():
                with self.path.with_name(f"{self.path.stem}_log.txt").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(plain({"lr": list(self.learning_rates), **line})) + "\n")

    def table(self) -> list[dict[str, Any]]:
        """One row per probe: accuracies after the last epoch, and the highest top-1 of all epochs."""
        rows = []
        for number, rate in enumerate(self.learning_rates):
            peak = max(self.history, key=lambda entry: entry["test"][number]["top1"])
            peaks = {"max_top1": peak["test"][number]["top1"], "max_top1_epoch": peak["epoch"]}
            rows.append({**self.probe.describe(number), "lr": rate, **self.history[-1]["test"][number], **peaks})
        return rows


def load_heads(path: Path) -> dict[str, Any]:
    """The state of a saved training of probes."""
    state = load_checkpoint(path)
    missing = {"state_dict", "momenta", "epoch", "history", "counts", "learning_rates", "record"} - state.keys()
    if missing:
        raise UserError(f"{path} holds no linear probes: {', '.join(sorted(missing))} missing; train some first")
    return state


def reference_heads(path: Path, avgpool_patchtokens: bool) -> dict[str, Tensor] | None:
    """Weights (1, classes, F) and bias (1, classes) of the reference's linear head; None for another file.

    With --avgpool_patchtokens, the features of the reference's head alternate between class token and mean of the
    patches. In our features the class token comes first, so the columns are reordered.
    """
    weights = load_checkpoint(path).get("state_dict", {})
    head = {name.removeprefix("module."): value for name, value in weights.items()}
    if head.keys() != {"linear.weight", "linear.bias"}:
        return None
    weight = head["linear.weight"]
    if avgpool_patchtokens:
        weight = weight.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
    return {"weight": weight[None], "bias": head["linear.bias"][None]}


def check_same_record(saved: dict[str, Any], wanted: dict[str, Any], path: Path) -> None:
    """Refuse probes of another encoder, other data or other options."""
    if differing := differences(with_exif(saved, path), wanted, "in the file", "now"):
        raise UserError(
            f"{path} holds probes of another run: {'; '.join(differing)}. Give the same options, or --overwrite"
        )

"""Linear probes -> a whole training of them: batches of augmented images, validation, saving, resuming.

`probe.py` says what a probe is, and trains it for one epoch.
"""

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dino_sparo.data.dataset import ImageDataset
from dino_sparo.data.loader import create_loader
from dino_sparo.data.sources import ImageSource
from dino_sparo.evaluation.features import Features, inference
from dino_sparo.evaluation.linear.probe import (
    Batches,
    LinearProbe,
    ProbeSampler,
    ProbeSGD,
    cosine_factor,
    probe_accuracy,
    scaled_learning_rates,
    train_one_epoch,
)
from dino_sparo.runtime.launch import is_main
from dino_sparo.runtime.logs import progress
from dino_sparo.runtime.records import differences, plain
from dino_sparo.weights.checkpoint import load_checkpoint, load_strictly
from dino_sparo.weights.folder import save_checkpoint

logger = logging.getLogger(__name__)


def live_batches(
    encoder: nn.Module,
    encode: Callable[[Tensor], Tensor],
    source: ImageSource,
    augmentation: Callable,
    device: torch.device,
    *,
    batch_size: int,
    num_workers: int = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Callable[[int], Batches]:
    """Epoch -> this process' batches of features of augmented images, which are encoded anew in every epoch.

    The crops of an image depend on seed, epoch and image alone. An unreadable image is replaced by its neighbour, as in
    pretraining.

    Args:
        encoder: on `device`.
        encode: images (B, C, H, W) -> features (B, F), a method of the encoder.
        source: labelled images.
        augmentation: (image, rng) -> [view].
        device: where to compute.
        batch_size: per process.
        num_workers: processes that load images, per process.
        dtype: fp32, or bf16 or fp16 for autocast.
        seed: of order and crops.
    """
    sampler = ProbeSampler(len(source), batch_size, seed)
    dataset = ImageDataset(source, augmentation, seed=seed)
    loader = create_loader(dataset, sampler, num_workers=num_workers, pin_memory=device.type == "cuda")

    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        sampler.set_epoch(epoch)
        for batch in progress(loader, total=len(loader), desc=f"probe epoch {epoch + 1}"):
            with inference(encoder, device, dtype):
                features = encode(batch.views[0].to(device, non_blocking=True)).float()
            # Cloned outside inference mode, so that gradients work.
            yield features.clone(), batch.labels.to(device, non_blocking=True)

    return batches


@dataclass
class ProbeRun:
    """A training of several probes, which can be saved and resumed.

    Attributes:
        probe: the classifiers.
        learning_rates: one per probe, as given, for a global batch of 256.
        global_batch_size: images per step, over all processes.
        epochs: length of the training.
        record: plain values; a saved training with other values is refused.
        path: file of the saved training; None: none is saved.
        epoch: finished epochs.
        history: one entry per validation: epoch (from 0), and each probe's accuracies.
        counts: images used and left out, for the result of a training that is already finished.
    """

    probe: LinearProbe
    learning_rates: Sequence[float]
    global_batch_size: int
    epochs: int
    record: dict[str, Any]
    path: Path | None = None
    epoch: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"epochs={self.epochs}; a probe needs at least one")
        rates = scaled_learning_rates(self.learning_rates, self.global_batch_size)
        self.optimizer = ProbeSGD(self.probe, rates)

    def save(self) -> None:
        """Write heads, momenta, epoch and history, whole or not at all; on rank 0."""
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

    def resume(self) -> None:
        """Resume the saved training, if there is one."""
        if self.path is None or not self.path.is_file():
            return
        state = load_heads(self.path)
        check_same_record(state["record"], self.record, self.path)
        load_strictly(self.probe, state["state_dict"], str(self.path))
        self.optimizer.load_momenta(state["momenta"])
        self.epoch, self.history, self.counts = state["epoch"], state["history"], state["counts"]
        logger.info("%s: resuming after epoch %d of %d", self.path, self.epoch, self.epochs)

    def train(
        self, epoch_batches: Callable[[int], Batches], val: Features, val_freq: int = 1, log: Path | None = None
    ) -> None:
        """Train to the end.

        Args:
            epoch_batches: epoch -> this process' batches.
            val: this process' share of the validation features.
            val_freq: epochs between two validations; the last epoch is always validated.
            log: file that gets one JSON line per epoch.
        """
        if val_freq < 1:
            raise ValueError(f"val_freq={val_freq}; give the number of epochs between two validations, at least 1")
        for epoch in range(self.epoch, self.epochs):
            schedule = cosine_factor(epoch, self.epochs)
            losses = train_one_epoch(self.probe, self.optimizer, epoch_batches(epoch), repeat(schedule))
            if not any(map(math.isfinite, losses)):
                raise ValueError(
                    f"every probe diverged (training losses {losses}); give smaller learning rates with --lr"
                )
            line: dict[str, Any] = {"epoch": epoch, "schedule": schedule, "train_loss": losses}
            if epoch % val_freq == 0 or epoch == self.epochs - 1:
                line["test"] = probe_accuracy(self.probe, val.features, val.labels)
                self.history.append({"epoch": epoch, "test": line["test"]})
                best = max(range(len(losses)), key=lambda probe: line["test"][probe]["top1"])
                logger.info(
                    "epoch %d of %d: best top-1 %.2f %% (lr %g), loss %.4f", epoch + 1, self.epochs,
                    line["test"][best]["top1"], self.learning_rates[best], losses[best],
                )  # fmt: skip
            self.epoch = epoch + 1
            self.save()
            if log is not None and is_main():
                with log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(plain({"lr": list(self.learning_rates), **line})) + "\n")

    def table(self) -> list[dict[str, float]]:
        """One row per learning rate: accuracies after the last epoch, and the highest top-1 on the way."""
        rows = []
        for number, rate in enumerate(self.learning_rates):
            peak = max(self.history, key=lambda entry: entry["test"][number]["top1"])
            rows.append(
                {
                    "lr": rate,
                    **self.history[-1]["test"][number],
                    "max_top1": peak["test"][number]["top1"],
                    "max_top1_epoch": peak["epoch"],
                }
            )
        return rows


def load_heads(path: Path) -> dict[str, Any]:
    """Read the probes of a training that was saved."""
    state = load_checkpoint(path)
    missing = {"state_dict", "momenta", "epoch", "history", "counts", "learning_rates", "record"} - state.keys()
    if missing:
        raise ValueError(f"{path} holds no linear probes: {', '.join(sorted(missing))} missing; train some first")
    return state


def reference_heads(path: Path, avgpool_patchtokens: bool) -> dict[str, Tensor] | None:
    """Weights (1, classes, F) and bias (1, classes) of the reference's linear head; None for another file.

    With --avgpool_patchtokens the reference's head sees class token and mean of the patches in turn, number by number,
    and ours sees the whole class token first. So the columns are reordered.
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
    """Refuse probes of another encoder, of other data or of other options."""
    if differing := differences(saved, wanted, "in the file", "now"):
        raise ValueError(
            f"{path} holds probes of another run: {'; '.join(differing)}. Give the same options, or another "
            f"--output_dir, or delete the file"
        )

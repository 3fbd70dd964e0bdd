"""Linear probes -> a whole training of them: batches of features, validation, saving, going on.

`linear.py` says what a probe is, and trains it for one epoch.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dino_sparo.data.dataset import EpochSampler, ImageDataset, ImageSource, create_loader
from dino_sparo.evaluation.features import Features, inference
from dino_sparo.evaluation.linear.probe import (
    Batches,
    LinearProbe,
    ProbeSGD,
    cosine_factor,
    probe_accuracy,
    scaled_learning_rates,
    train_one_epoch,
)
from dino_sparo.runtime.distributed import is_main, rank, world_size
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
    """Features of augmented images, encoded anew in every epoch.

    The crops of an image depend on seed, epoch and image alone. An epoch's incomplete last batch is left out, another
    one in every epoch. An image that cannot be read is replaced by its neighbour, as in pretraining.

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

    Returns:
        epoch -> this process' batches.
    """
    sampler = EpochSampler(len(source), batch_size, rank=rank(), world_size=world_size(), seed=seed)
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


def cached_batches(
    train: Features, device: torch.device, *, batch_size: int, seed: int = 0
) -> Callable[[int], Batches]:
    """Batches of features that were extracted once, in the order `live_batches` would take the images.

    Args:
        train: of all processes.
        device: the probe's.
        batch_size: per process.
        seed: of the order.

    Returns:
        epoch -> this process' batches.
    """
    sampler = EpochSampler(len(train.features), batch_size, rank=rank(), world_size=world_size(), seed=seed)

    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        sampler.set_epoch(epoch)
        for keys in sampler:
            rows = torch.tensor([index for _, index in keys], device=train.features.device)
            yield train.features[rows].to(device), train.labels[rows].to(device)

    return batches


@dataclass
class ProbeRun:
    """A training of several probes: where it stands, how to save it, how to go on.

    Attributes:
        probe: the classifiers.
        learning_rates: one per probe, as given, for a global batch of 256.
        global_batch_size: images per step, over all processes.
        epochs: length of the training.
        record: plain values that must be the same for a saved training to be continued.
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
        """Go on from the saved training, if there is one.

        Raises:
            ValueError: it was another training; the message names what differs.
        """
        if self.path is None or not self.path.is_file():
            return
        state = load_heads(self.path)
        check_same_record(state["record"], self.record, self.path)
        load_strictly(self.probe, state["state_dict"], str(self.path))
        self.optimizer.load_momenta(state["momenta"])
        self.epoch, self.history, self.counts = state["epoch"], state["history"], state["counts"]
        logger.info("%s: going on after epoch %d of %d", self.path, self.epoch, self.epochs)

    def train(
        self, epoch_batches: Callable[[int], Batches], val: Features, val_freq: int = 1, log: Path | None = None
    ) -> None:
        """Train to the end.

        Args:
            epoch_batches: epoch -> this process' batches.
            val: this process' share of the validation features.
            val_freq: epochs between two validations; the last epoch is always validated.
            log: file that gets one JSON line per epoch.

        Raises:
            ValueError: `val_freq` is not positive; every probe diverged.
        """
        if val_freq < 1:
            raise ValueError(f"val_freq={val_freq}; give the number of epochs between two validations, at least 1")
        for epoch in range(self.epoch, self.epochs):
            schedule = cosine_factor(epoch, self.epochs)
            losses = train_one_epoch(self.probe, self.optimizer, epoch_batches(epoch), schedule)
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
    """Read saved heads.

    Raises:
        ValueError: no such file, or it holds something else.
    """
    state = load_checkpoint(path)
    missing = {"state_dict", "momenta", "epoch", "history", "counts", "learning_rates", "record"} - state.keys()
    if missing:
        raise ValueError(f"{path} holds no linear probes: {', '.join(sorted(missing))} missing; train some first")
    return state


def check_same_record(saved: dict[str, Any], wanted: dict[str, Any], path: Path) -> None:
    """Refuse probes of another encoder, of other data or of other options.

    Raises:
        ValueError: names each value that differs.
    """
    if differing := differences(saved, wanted, "in the file", "now"):
        raise ValueError(
            f"{path} holds probes of another run: {'; '.join(differing)}. Give the same options, or another "
            f"--output_dir, or delete the file"
        )

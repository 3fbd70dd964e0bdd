"""The contract between an objective (DINO, CLIP, ...) and the trainer.

An objective owns its networks, loss, data and `updater`. It takes steps and evaluates after an epoch. The other files
of this folder resume, save, log, and handle signals and faults. They never ask which objective they train. For a new
loss or objective, docs/extending.md has an example.
"""

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dino_sparo.data.samplers import EpochSampler
from dino_sparo.data.sources.image_source import fingerprint_of
from dino_sparo.runtime.cli import Parser
from dino_sparo.runtime.launch import Distributed
from dino_sparo.runtime.logs import RunLog
from dino_sparo.training.updater import Updater

UNREADABLE = "num_corrupt"  # the counter of unreadable items, and its key in checkpoints


@runtime_checkable
class TrainingBatch(Protocol):
    """A batch as the trainer sees it.

    Attributes:
        indices: (B,), item numbers in the source.
        corrupt: (location, reason) of each unreadable item, which another one replaced.
    """

    indices: Int64[Tensor, " B"]
    corrupt: list[tuple[str, str]]


AnyBatch = TypeVar("AnyBatch", bound=TrainingBatch)


@dataclass(frozen=True)
class StepReport:
    """The numbers of a step; tensors stay on the device, unread.

    Attributes:
        loss: of this rank, nats.
        nonfinite: (), 1 once a loss or gradient was not finite; see `Updater.nonfinite`.
        scalars: numbers to log in addition to the loss.
    """

    loss: Float[Tensor, ""]
    nonfinite: Float[Tensor, ""]
    scalars: dict[str, Tensor | float]


@dataclass(frozen=True)
class EpochResult:
    """The evaluation after an epoch.

    Attributes:
        values: numbers for the log.
        score: percent, or None without an evaluation; the run keeps the checkpoint with the highest score.
        warning: that the run fails, such as a collapse, with the remedies; on rank 0.
    """

    values: dict[str, float] = field(default_factory=dict)
    score: float | None = None
    warning: str | None = None


class Objective(ABC, Generic[AnyBatch]):
    """One way to train the encoder. The constructor builds data, networks, loss and optimizer from the options.

    Attributes:
        noun: an item of the data, "image" or "pair"; for messages and the checkpoint's keys.
        command: the command of `dino-sparo` that trains it, for config.yaml.
        make_parser: makes the parser of its options, whose defaults the log leaves out.
        fill_in_defaults: sets options that are None because their default depends on others; returns them by name.
        score_name: the checkpoint's key of the best score so far.
        metric: the name of the score in the log.
        counters: the checkpoint's key of a count per epoch -> its name in the log; one key is `UNREADABLE`.
        fixed_options: options that the optimizer's state depends on; resuming refuses other values.
        harmless_options: options that may change without a warning, in addition to `resume.HARMLESS_OPTIONS`.
        source: the data; its `location(index)` is the path or name of an item.
        sampler: the order of the items.
        loader: batches of items.
        updater: gradients -> weights.
        num_left_out: samples that the source skipped when it was opened.
    """

    noun: ClassVar[str] = "image"
    command: ClassVar[str] = "train"
    make_parser: ClassVar[Callable[[], Parser]]
    fill_in_defaults: ClassVar[Callable[[argparse.Namespace], dict[str, Any]]] = lambda args: {}
    score_name: ClassVar[str] = "best_knn"
    metric: ClassVar[str] = "knn_20"
    counters: ClassVar[Mapping[str, str]] = {UNREADABLE: "corrupt_images"}
    fixed_options: ClassVar[Sequence[str]] = ()
    harmless_options: ClassVar[Sequence[str]] = ()

    source: Any
    sampler: EpochSampler
    loader: DataLoader
    updater: Updater
    num_left_out: int = 0

    @abstractmethod
    def __init__(self, args: argparse.Namespace, process: Distributed) -> None:
        """Build everything from the options; ValueError where they do not fit each other or the data."""

    @classmethod
    @abstractmethod
    def check_options(cls, args: argparse.Namespace) -> None:
        """Refuse options that do not fit each other, with a ValueError, before anything is opened or queued."""

    @property
    @abstractmethod
    def networks(self) -> dict[str, nn.Module]:
        """The modules whose weights a checkpoint stores, by its keys; without DDP."""

    @property
    @abstractmethod
    def description(self) -> dict[str, Any]:
        """How the networks are built: the checkpoint's entry that `load_encoder` or `load_clip` reads."""

    @abstractmethod
    def check_same_model(self, checkpoint: Mapping[str, Any], source: str) -> None:
        """Refuse to resume a checkpoint of another model; the `CheckpointError` names the difference."""

    @abstractmethod
    def step(self, batches: list[AnyBatch], epoch: int, is_last: bool) -> StepReport:
        """Take one step on this rank's micro-batches, on the device; `is_last`: the epoch or the run ends with it."""

    def initialize(self) -> None:
        """Load the weights that the options name for the start of a run, if any."""

    def synchronize(self) -> None:
        """Called once before the first step, after the weights were loaded: make all ranks equal, unless DDP did."""

    @property
    def compiled_modules(self) -> list[nn.Module]:
        """The modules that `--compile` compiles; by default all networks."""
        return list(self.networks.values())

    @property
    def dynamic_modules(self) -> list[nn.Module]:
        """Further modules that `--compile` compiles, once for inputs of all sizes."""
        return []

    @cached_property
    def data_hashes(self) -> dict[str, str]:
        """Fingerprint of the data, by a noun in the plural; resuming warns if it changed."""
        fingerprint = fingerprint_of(self.source)
        return {} if fingerprint is None else {f"{self.noun}s": fingerprint}

    def count(self, batch: AnyBatch) -> dict[str, int]:
        """The batch's share of each of `counters`."""
        return {UNREADABLE: len(batch.corrupt)}

    def watch_counts(self, counts: Mapping[str, int], num_seen: int) -> None:
        """Called every few steps with the counts of this epoch over all ranks, and its number of items so far."""

    def is_evaluated(self, epoch: int) -> bool:
        """Whether `after_epoch` takes long after this epoch, so that the run saves before it too."""
        return False

    def after_epoch(self, epoch: int, means: Mapping[str, float], log: RunLog) -> EpochResult:
        """Evaluate, on every rank, after an epoch (counted from 0) with these means; `log` takes pictures."""
        return EpochResult()

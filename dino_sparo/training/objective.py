"""The contract between an objective (DINO, CLIP, ...) and the trainer.

An objective builds its networks, its loss and its data. It takes steps and evaluates after an epoch. The other files of
this folder do what is the same for all objectives: resuming, saving, signals, faults, logs. They never ask which
objective they train.
"""

import argparse
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dino_sparo.data.samplers import EpochSampler
from dino_sparo.data.sources.image_source import fingerprint_of
from dino_sparo.runtime.distributed import Distributed
from dino_sparo.runtime.logs import RunLog
from dino_sparo.training.updater import Updater


@runtime_checkable
class TrainingBatch(Protocol):
    """What the trainer needs to know of a batch.

    Attributes:
        indices: (B,), places in the source.
        corrupt: (location, reason) of each item that could not be read and was replaced.
    """

    indices: Int64[Tensor, " B"]
    corrupt: list[tuple[str, str]]


AnyBatch = TypeVar("AnyBatch", bound=TrainingBatch)


@runtime_checkable
class Source(Protocol):
    """What the trainer needs to know of a collection of images or pairs."""

    def location(self, index: int) -> str:
        """Where an item lies, for messages."""


@dataclass(frozen=True)
class StepReport:
    """What a step reports; tensors stay on the device, unread.

    Attributes:
        loss: of this rank, nats.
        skipped: (), 1 if the optimizer did nothing: the loss on this rank or the gradients on any are not finite.
        scalars: what is logged of every step beside the loss, the learning rate first.
    """

    loss: Float[Tensor, ""]
    skipped: Float[Tensor, ""]
    scalars: dict[str, Tensor | float]


@dataclass(frozen=True)
class EpochResult:
    """What an objective measures after an epoch.

    Attributes:
        values: named numbers for the log.
        score: of an evaluation, percent; the run keeps the checkpoint with the highest. None where none was made.
    """

    values: dict[str, float] = field(default_factory=dict)
    score: float | None = None


class Training(ABC, Generic[AnyBatch]):
    """Everything that a step needs and changes: networks, loss, and the updater.

    Attributes:
        updater: gradients -> weights.
    """

    updater: Updater

    @property
    @abstractmethod
    def modules(self) -> dict[str, nn.Module]:
        """What a checkpoint holds the weights of, by its keys; without DDP."""

    @abstractmethod
    def trial_loss(self, batch: AnyBatch) -> Float[Tensor, ""]:
        """The loss of a batch as a step computes it; moves nothing but buffers."""

    @abstractmethod
    def local_trial_loss(self, batch: AnyBatch) -> Float[Tensor, ""]:
        """A number that is computed by all that is compiled, without the other processes.

        So the compiler can fail on one process while none waits for it.
        """

    @property
    def compiled_modules(self) -> list[nn.Module]:
        """What `compile` compiles: by default all networks."""
        return list(self.modules.values())

    def compile(self, batch: AnyBatch) -> None:
        """Compile for the shapes of the first batch.

        Args:
            batch: of these shapes. What networks keep for them is made here: a graph would make it at every step.
        """
        for module in self.compiled_modules:
            module.compile(dynamic=False)

    def uncompile(self) -> None:
        """Take `compile` back."""
        for module in self.compiled_modules:
            module._compiled_call_impl = None

    def train(self) -> None:
        """Put the networks into training mode."""
        for module in self.modules.values():
            module.train()


class Objective(ABC, Generic[AnyBatch]):
    """One way to train the encoder.

    Attributes:
        noun: what one item of the data is, "image" or "pair"; for messages and the checkpoint's keys.
        score_name: the checkpoint's key of the best score so far.
        metric: the name of the score in the log.
        counters: the checkpoint's key of what is counted in an epoch -> its name in the log. The first counts the items
            that could not be read.
        fixed_options: what the optimizer's state depends on, so that a run cannot go on with another.
        harmless_options: what may change, beside `run.HARMLESS_OPTIONS`, without making it another run.
        source: the data.
        sampler: which items come when.
        loader: their batches.
        training: networks, loss, updater.
        num_left_out: samples that the source left out when it was opened.
    """

    noun: ClassVar[str]
    score_name: ClassVar[str]
    metric: ClassVar[str]
    counters: ClassVar[Mapping[str, str]]
    fixed_options: ClassVar[Sequence[str]] = ()
    harmless_options: ClassVar[Sequence[str]] = ()

    source: Source
    sampler: EpochSampler
    loader: DataLoader
    training: Training[AnyBatch]
    num_left_out: int = 0

    @staticmethod
    @abstractmethod
    def check_options(args: argparse.Namespace) -> None:
        """Refuse options that cannot be, before anything is opened.

        Raises:
            ValueError: names the option and what would fit.
        """

    @staticmethod
    @abstractmethod
    def defaults_of(args: argparse.Namespace) -> dict[str, Any]:
        """Set the options whose defaults depend on the run; returns the defaults of all options.

        The log begins with the options that differ from these.
        """

    @abstractmethod
    def __init__(self, args: argparse.Namespace, process: Distributed) -> None:
        """Build networks, loss and data.

        Args:
            args: the options.
            process: this process among its peers.

        Raises:
            ValueError: options that do not fit each other or the data.
        """

    @property
    def updater(self) -> Updater:
        """Gradients -> weights."""
        return self.training.updater

    @property
    @abstractmethod
    def description(self) -> dict[str, Any]:
        """How the networks are built: the checkpoint's entry that `load_encoder` or `load_clip` reads."""

    @property
    def data_hashes(self) -> dict[str, str]:
        """What tells the data from as many others: a name in the plural -> a hash. `resume` warns where one differs."""
        fingerprint = fingerprint_of(self.source)
        return {} if fingerprint is None else {f"{self.noun}s": fingerprint}

    @abstractmethod
    def check_same_model(self, checkpoint: Mapping[str, Any], source: str) -> None:
        """Refuse to resume a checkpoint of another model.

        Raises:
            CheckpointError: names what differs.
        """

    @abstractmethod
    def start_from(self) -> None:
        """Start from the weights in the files that the options name, if any; called where there is no run to resume.

        Raises:
            CheckpointError: the weights do not fit.
        """

    @abstractmethod
    def step(self, batches: list[AnyBatch], epoch: int, is_last: bool) -> StepReport:
        """Take one step.

        Args:
            batches: the step's micro-batches of this rank, on the device.
            epoch: counted from 0.
            is_last: whether the epoch, or the run, ends with this step.
        """

    @abstractmethod
    def rehearsal_batch(self) -> AnyBatch:
        """A batch as the loader gives them, for `training/compile.py`."""

    def count(self, batch: AnyBatch) -> tuple[int, ...]:
        """How much of each of `counters` a batch holds."""
        return (len(batch.corrupt),)

    def watch_counts(self, counts: Mapping[str, int], num_seen: int) -> None:
        """Called every few steps with what was counted in this epoch so far.

        Args:
            counts: a name of `counters` -> how many, over all ranks.
            num_seen: items of this epoch so far.
        """

    def is_evaluated(self, epoch: int) -> bool:
        """Whether `after_epoch` takes long after this epoch, so that the run saves before it too."""
        return False

    def after_epoch(self, epoch: int, means: Mapping[str, float], log: RunLog) -> EpochResult:
        """Look at the networks and evaluate them; every rank calls this.

        Args:
            epoch: the one that has ended, counted from 0.
            means: of the epoch's numbers.
            log: for pictures.
        """
        return EpochResult()

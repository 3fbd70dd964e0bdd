"""What a run consists of between two steps <-> what a checkpoint holds of it.

Stage 3 of the folder: model, optimizer, schedule and counts. `train.py` builds a `Training`, `engine.py` changes it.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dino_sparo.checkpoint import CheckpointError, load_strictly, random_state, restore_random_state
from dino_sparo.clip.model import CLIP
from dino_sparo.distributed import all_gather_object, rank, world_size
from dino_sparo.logs import Meters


def param_groups(model: nn.Module, weight_decay: float, betas: tuple[float, float], eps: float) -> list[dict[str, Any]]:
    """Split trainable parameters into regularised ones and the rest, with AdamW's constants.

    Vectors and numbers get no weight decay: gains, biases, class token, temperature, and all others with fewer than two
    dimensions longer than one. Source: OpenCLIP, which decides by name and number of dimensions.

    Returns:
        Two groups, the second with weight decay 0.
    """
    regularised: list[nn.Parameter] = []
    unregularised: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_vector = name.endswith(".bias") or sum(size > 1 for size in parameter.shape) < 2
            (unregularised if is_vector else regularised).append(parameter)
    constants = {"betas": betas, "eps": eps}
    return [
        {"params": regularised, "weight_decay": weight_decay, **constants},
        {"params": unregularised, "weight_decay": 0.0, **constants},
    ]


@dataclass
class Training:
    """Everything a step needs and changes.

    Attributes:
        model: a `CLIP`, inside DDP where there are several processes.
        loss: from `create_loss`.
        optimizer: over the groups of `param_groups`.
        lr: learning rate, one value per step.
        weight_decay: of the regularised parameters.
        device: where to compute.
        mean: (1, C, 1, 1), of pixels in 0..1, on the device.
        std: likewise.
        dtype: of autocast; float32 switches it off.
        scaler: of fp16's gradients, or None.
        accum_steps: micro-batches per step.
        clip_grad: largest norm of all gradients together; 0 for no limit.
        max_corrupt: share of the samples that may have no readable image or no caption.
        num_left_out: samples that were no pairs from the beginning.
        locate: a pair's index -> its image's file, for messages.
        step: steps taken so far.
        meters: of the epoch that is under way.
        num_corrupt: pairs of this epoch that were replaced so far, over all ranks.
        num_truncated: captions of this epoch that were cut off so far, over all ranks.
        has_warned: whether the log says that most captions are cut off; this process alone, not saved.
        nonfinite: () 1 from the step on whose loss or gradients were not finite on some rank; nothing is updated then.
    """

    model: nn.Module
    loss: nn.Module
    optimizer: torch.optim.Optimizer
    lr: np.ndarray
    weight_decay: float
    device: torch.device
    mean: Tensor
    std: Tensor
    dtype: torch.dtype = torch.float32
    scaler: torch.amp.GradScaler | None = None
    accum_steps: int = 1
    clip_grad: float = 0.0
    max_corrupt: float = 0.01
    num_left_out: int = 0
    locate: Callable[[int], str] = str
    step: int = 0
    meters: Meters = field(default_factory=Meters)
    num_corrupt: int = 0
    num_truncated: int = 0
    has_warned: bool = False
    nonfinite: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.nonfinite = torch.zeros((), device=self.device)

    @property
    def network(self) -> CLIP:
        """The model without DDP."""
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model  # type: ignore[return-value]

    def autocast(self) -> AbstractContextManager[None]:
        """The precision of the forward passes."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on, under a checkpoint's names; every rank calls this, rank 0 has use for it.

        `ranks` holds what belongs to one process: its random numbers and its part of the epoch's means.
        """
        own = {"rng": random_state(self.device), "meters": self.meters.state_dict()}
        state = {
            "model": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "num_corrupt": self.num_corrupt,
            "num_truncated": self.num_truncated,
            "ranks": all_gather_object(own),
        }
        return state if self.scaler is None else {**state, "fp16_scaler": self.scaler.state_dict()}

    def load_state_dict(self, checkpoint: Mapping[str, Any], source: str) -> None:
        """Go on from a checkpoint.

        Args:
            checkpoint: what `state_dict` returned on rank 0.
            source: its file, for messages.

        Raises:
            CheckpointError: weights that do not fit the model.
        """
        load_strictly(self.network, checkpoint["model"], source)
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        if self.scaler is not None and "fp16_scaler" in checkpoint:
            self.scaler.load_state_dict(checkpoint["fp16_scaler"])
        self.step = checkpoint["step"]
        self.num_corrupt, self.num_truncated = checkpoint["num_corrupt"], checkpoint["num_truncated"]
        ranks = checkpoint["ranks"]
        if len(ranks) == world_size():
            restore_random_state(ranks[rank()]["rng"], self.device)
            self.meters.load_state_dict(ranks[rank()]["meters"])


def check_same_model(checkpoint: Mapping[str, Any], description: Mapping[str, Any], source: str) -> None:
    """Refuse to resume a checkpoint of another model.

    Args:
        checkpoint: what was saved.
        description: of the model that the options ask for, `clip_description`.
        source: the checkpoint's file, for messages.

    Raises:
        CheckpointError: names each field that differs.
    """
    said = checkpoint.get("clip")
    if said is None:
        raise CheckpointError(f"{source} holds no CLIP model, so it cannot be resumed; choose another --output_dir")
    saved, asked = _flat(said), _flat(description)
    differing = [
        f"{name} {saved.get(name)!r} in the checkpoint, {value!r} asked for"
        for name, value in asked.items()
        if saved.get(name) != value
    ]
    if differing:
        raise CheckpointError(
            f"{source} holds another model: {'; '.join(differing)}. Give the same options, or another --output_dir"
        )


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values under dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= {f"{name}.{inner}": item for inner, item in value.items()} if isinstance(value, dict) else {name: value}
    return flat

"""Memory of one step, by part: weights, gradients, optimizer, activations."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dino_sparo.runtime.logs import peak_memory
from dino_sparo.training.objective import Objective

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def memory_report(objective: Objective[Any]) -> Iterator[dict[str, int]]:
    """Measure the step within this context and log its parts; yields them, bytes by part, filled in at the end.

    Activations are the tensors that the forward passes of one micro-batch keep for the backward pass.
    """
    updater = objective.updater
    weights = {parameter.untyped_storage().data_ptr() for parameter in updater.parameters}
    kept: dict[int, int] = {}  # address of a storage -> its bytes
    parts: dict[str, int] = {}
    activations = 0

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def release(tensor: Tensor) -> Tensor:
        nonlocal activations
        activations = max(activations, sum(kept.values()))
        kept.clear()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, release):
        yield parts
    parts |= {name: num_bytes(network) for name, network in objective.networks.items()}
    parts["gradients"] = sum(parameter.nbytes for parameter in updater.parameters if parameter.requires_grad)
    states = (value for state in updater.optimizer.state.values() for value in state.values())
    parts["optimizer"] = sum(value.nbytes for value in states if isinstance(value, Tensor))
    parts["activations"] = activations
    parts |= {"sum": sum(parts.values()), "peak so far": peak_memory(updater.device)}
    for part, size in parts.items():
        logger.info("memory of a step: %-12s %8.1f MiB", part, size / 2**20)


def num_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))

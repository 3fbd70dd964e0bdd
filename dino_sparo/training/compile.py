"""torch.compile of an objective's networks; they are compiled in the first step."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dino_sparo.runtime.faults import MendableError
from dino_sparo.training.objective import Objective
from dino_sparo.training.optim import scale_

logger = logging.getLogger(__name__)

# Gradients whose scaling is compiled: 151 took 25 s on an H100. The bound is a choice and was not measured.
MAX_SCALED = 200
# Of one function: every block is a variant (its rate of stochastic depth is a constant), for every size of crop.
MAX_COMPILED_VARIANTS = 256


class CompileError(MendableError):
    """torch.compile failed."""


def is_compiled(choice: str, device: torch.device) -> bool:
    """Whether `--compile CHOICE` compiles on this device; `auto`: on GPUs."""
    return choice == "on" or (choice == "auto" and device.type == "cuda")


def compile_networks(objective: Objective[Any]) -> None:
    """Compile for the shapes of the first step, and `dynamic_modules` for all shapes."""
    modules = objective.compiled_modules
    parts = [part for module in modules for part in module.modules()]
    if any(isinstance(part, nn.SyncBatchNorm) for part in parts):
        logger.warning("the networks run uncompiled: batch norm that is synchronised between GPUs is not compiled")
        return
    # The names of torch 2.6, which later versions keep next to `recompile_limit` and `fail_on_recompile_limit_hit`.
    torch._dynamo.config.cache_size_limit = MAX_COMPILED_VARIANTS
    torch._dynamo.config.fail_on_cache_limit_hit = True
    # Older versions cannot cut a graph with checkpoints where DDP's buckets end. Uncut, it sends its gradients last.
    torch._dynamo.config.optimize_ddp = not any(getattr(part, "grad_checkpointing", False) for part in parts)
    # Notes for the authors of the compiler; nobody who trains can act on them.
    warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # --precision tf32 allows it
    for module in modules:
        module.compile(dynamic=False)
    for module in objective.dynamic_modules:
        module.compile(dynamic=True)
    updater = objective.updater
    if updater.device.type == "cuda" and len(updater.parameters) <= MAX_SCALED:
        updater.scale_gradients = torch.compile(scale_, dynamic=False)
    logger.info("the first step compiles the networks, which takes a minute or two")


@contextlib.contextmanager
def compile_failures_named() -> Iterator[None]:
    """Turn an error of torch's compiler into one line with its reason and the remedy."""
    try:
        yield
    except RuntimeError as error:
        from torch._dynamo.exc import TorchDynamoException  # not above: it takes a second

        if not isinstance(error, TorchDynamoException):
            raise
        reason = " ".join(str(error).strip().split("\n\n")[0].split())[:300]
        raise CompileError(
            f"torch.compile does not work here ({type(error).__name__}: {reason}); give --compile off"
        ) from error

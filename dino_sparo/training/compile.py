"""torch.compile of an objective's networks; they are compiled in the first step."""

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dino_sparo.runtime.faults import MendableError
from dino_sparo.training.objective import Objective
from dino_sparo.training.optim import ScaleGradients, scale_

logger = logging.getLogger(__name__)

# Gradients that one compiled function scales: those of a vision transformer's block, so that all blocks share it. All
# 151 of ViT-S in one function took 25 s on an H100.
SCALED_TOGETHER = 12
MAX_SCALE_FUNCTIONS = 20  # a choice; ViT-S has 4, ResNet-50 has 15
# Of one function: every block is a variant (its rate of stochastic depth is a constant), for every size of crop.
MAX_COMPILED_VARIANTS = 256


class CompileError(MendableError):
    """torch.compile failed."""


def is_compiled(choice: str, device: torch.device) -> bool:
    """Whether `--compile CHOICE` compiles on this device; `auto`: on GPUs."""
    return choice in ("on", "regions") or (choice == "auto" and device.type == "cuda")


def compile_networks(objective: Objective[Any], in_regions: bool = False) -> None:
    """Compile for the shapes of the first step, and `dynamic_modules` for all shapes.

    Args:
        objective: changed in place.
        in_regions: compile networks in regions, as far as they can be, see `models/regions.py`; else whole.
    """
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
    regional = [module for module in modules if in_regions and getattr(module, "compile_regions", lambda: False)()]
    if in_regions and not regional:
        logger.warning("--compile regions: compiled whole, as only DINO and SimDINO with --arch vit_* have regions")
    for module in modules:
        if module not in regional:
            module.compile(dynamic=False)
    for module in objective.dynamic_modules:
        module.compile(dynamic=True)
    updater = objective.updater
    shapes = {tuple(weight.shape for weight in weights) for weights in _groups(updater.parameters)}
    if updater.device.type == "cuda" and len(shapes) <= MAX_SCALE_FUNCTIONS:
        updater.scale_gradients = partial(scale_in_groups, torch.compile(scale_, dynamic=False))
    logger.info("the first step compiles the networks, which takes a minute or two")


def scale_in_groups(scale: ScaleGradients, gradients: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
    """`scale_` by several calls of `scale`, which is compiled once for groups of equal shapes."""
    for group in zip(_groups(gradients), _groups(factors), strict=True):
        scale(*group)


def _groups(tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    return [tensors[start : start + SCALED_TOGETHER] for start in range(0, len(tensors), SCALED_TOGETHER)]


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

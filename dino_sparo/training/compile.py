"""A step without updates: it compiles the networks and measures what a step keeps in memory."""

import importlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dino_sparo.runtime.distributed import all_gather_object, is_device_fault, world_size
from dino_sparo.runtime.logs import peak_memory
from dino_sparo.runtime.memory import is_memory_full
from dino_sparo.training.objective import Objective, Training

logger = logging.getLogger(__name__)

# Of one function: every block is a variant (its rate of stochastic depth is a constant), for every size of crop.
MAX_COMPILED_VARIANTS = 256
MAX_COMPILE_WORKERS = 32  # of one rank; Inductor's own limit


def prepare_step(objective: Objective[Any], compile_option: str, report_memory: bool) -> None:
    """Compile, and say what a step takes, if the options ask for it.

    Args:
        objective: its networks are compiled in place; weights, statistics and gradients stay as they are.
        compile_option: of `--compile`: `on`, `off`, or `auto`, which compiles on GPUs.
        report_memory: whether to log what a step keeps in memory.
    """
    compiles = compile_option == "on" or (compile_option == "auto" and objective.updater.device.type == "cuda")
    if not (compiles or report_memory):
        return
    batch = objective.rehearsal_batch()
    if compiles:
        compile_networks(objective.training, batch)
    if report_memory:
        for part, size in memory_report(objective.training, batch).items():
            logger.info("memory of a step: %-12s %8.1f MiB", part, size / 2**20)


def compile_networks(training: Training[Any], batch: Any) -> bool:
    """Compile the networks for the shapes of a batch, and rehearse a step to see that it works.

    If it does not work on every process, all of them run their networks as they are, after one warning. A later change
    of shapes is an error, not a silent return to uncompiled code.

    Args:
        training: changed in place, but for weights, statistics and gradients.
        batch: as the loader gives them.

    Returns:
        Whether they are compiled now.

    Raises:
        RuntimeError: memory is full, the GPU failed, or another process died.
    """
    networks = training.compiled_modules
    if any(isinstance(module, nn.SyncBatchNorm) for network in networks for module in network.modules()):
        # It talks to the other processes in every forward pass: one that cannot compile would leave them waiting.
        logger.warning("the networks run uncompiled: batch norm that is synchronised between GPUs is not compiled")
        return False
    for name in ("recompile_limit", "cache_size_limit"):  # the second is the older name
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, MAX_COMPILED_VARIANTS)
    if hasattr(torch._dynamo.config, "fail_on_recompile_limit_hit"):
        torch._dynamo.config.fail_on_recompile_limit_hit = True
    share_compile_workers()
    # Older versions cannot cut a graph with checkpoints where DDP's buckets end. Uncut, it sends its gradients last.
    blocks = [block for network in networks for block in network.modules()]
    torch._dynamo.config.optimize_ddp = not any(getattr(block, "grad_checkpointing", False) for block in blocks)
    training.compile(batch)
    begin, failure = time.monotonic(), ""
    try:
        # Alone: where the compiler fails, in the forward or the backward pass, no other process waits for this one.
        rehearse(training, batch, alone=True)
    except Exception as error:  # compilers raise errors of all kinds
        if is_memory_full(error) or is_device_fault(error):
            raise
        failure = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        if world_size() > 1:  # if the others are gone, what follows is about them alone
            logger.warning("torch.compile does not work here: %s", failure)
    failures = {number: text for number, text in enumerate(all_gather_object(failure)) if text}
    if not failures:
        rehearse(training, batch)
        logger.info("compiled in %.0f s", time.monotonic() - begin)
        return True
    training.uncompile()
    number, text = next(iter(failures.items()))
    where = f"on {len(failures)} of {world_size()} processes, rank {number}: " if world_size() > 1 else ""
    logger.warning(
        "torch.compile does not work here, so the networks run uncompiled (%s%s); --compile off does not try it",
        where,
        text,
    )
    return False


def share_compile_workers() -> None:
    """Let Inductor start as many processes as this rank's share of its cores, unless the environment says how many.

    By default every rank starts up to 32, and all ranks of a machine compile at once. What is compiled lies in one
    folder of the machine for all ranks (`TORCHINDUCTOR_CACHE_DIR`), and a run that goes on finds it there.
    """
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    ranks = all_gather_object((socket.gethostname(), cores))  # of all ranks, whatever their environments say
    if "TORCHINDUCTOR_COMPILE_THREADS" in os.environ:
        return
    sharing = sum(host == socket.gethostname() and bool(other & cores) for host, other in ranks)
    workers = min(max(len(cores) // sharing, 1), MAX_COMPILE_WORKERS)
    # Read by the thread of the backward pass too, which does not see what this one sets.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(workers)
    config: Any = importlib.import_module("torch._inductor.config")
    config.compile_threads = workers


def rehearse(training: Training[Any], batch: Any, alone: bool = False) -> int:
    """Take a step without the updates: weights, statistics and gradients are afterwards as they were before.

    Args:
        training: left as it is.
        batch: one micro-batch as the loader gives it.
        alone: without the other processes; see `Training.local_trial_loss`.

    Returns:
        Bytes that the forward passes keep for the backward pass, without the parameters.
    """
    buffers = {name: value.clone() for name, value in _buffers(training)}
    kept: dict[int, int] = {}
    owned = {parameter.untyped_storage().data_ptr() for parameter in training.updater.parameters}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    training.train()
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = 0 * (training.local_trial_loss(batch) if alone else training.trial_loss(batch))
        if alone:
            trained = [parameter for parameter in training.updater.parameters if parameter.requires_grad]
            torch.autograd.grad(loss, trained, allow_unused=True)
        else:
            loss.backward()
    finally:
        training.updater.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, value in _buffers(training):
                value.copy_(buffers[name])
    return sum(kept.values())


def _buffers(training: Training[Any]) -> Iterator[tuple[str, Tensor]]:
    for key, module in training.modules.items():
        for name, value in module.named_buffers():
            yield f"{key}.{name}", value


def memory_report(training: Training[Any], batch: Any) -> dict[str, int]:
    """What a step keeps in memory, bytes, by part; a rehearsal measures the activations.

    Args:
        training: left as it is.
        batch: one micro-batch as the loader gives it.
    """
    updater = training.updater
    trained = sum(parameter.nbytes for parameter in updater.parameters if parameter.requires_grad)
    states = 2 if isinstance(updater.optimizer, torch.optim.AdamW) else 1  # of the size of the weights
    parts = {name: _num_bytes(module) for name, module in training.modules.items()}
    parts |= {"gradients": trained, "optimizer": states * trained, "activations": rehearse(training, batch)}
    return {**parts, "sum": sum(parts.values()), "peak so far": peak_memory(updater.device)}


def _num_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))

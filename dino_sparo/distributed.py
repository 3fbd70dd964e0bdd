"""Where this process stands among its peers: started by torchrun, by Slurm, or alone.

Plumbing. A process that is alone needs no process group: the collectives below then return their input.
"""

import logging
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

logger = logging.getLogger(__name__)

# Ports below Linux' ephemeral range, so that no outgoing connection can hold the one a job's id leads to.
FIRST_PORT, NUM_PORTS = 10_000, 20_000


@dataclass(frozen=True)
class Distributed:
    """This process among its peers.

    Attributes:
        rank: 0 .. world_size - 1.
        world_size: number of processes.
        local_rank: rank among the processes of this machine.
        device: where this process computes.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device


def detect_launcher(environ: Mapping[str, str]) -> tuple[str, int, int, int]:
    """Who started this process, from its environment.

    torchrun sets RANK, WORLD_SIZE and LOCAL_RANK. Slurm counts only inside a step of several tasks that is not an
    interactive shell (`srun --pty`): in a batch script or an allocation SLURM_PROCID and SLURM_NTASKS are set too, but
    there a plain `python main_dino.py` is one process.

    Returns:
        Launcher ("torchrun", "slurm" or "plain"), rank, world size, local rank.
    """
    if {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= environ.keys():
        return "torchrun", int(environ["RANK"]), int(environ["WORLD_SIZE"]), int(environ["LOCAL_RANK"])
    num_tasks = int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
    is_shell = "SLURM_PTY_PORT" in environ or environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    if {"SLURM_PROCID", "SLURM_LOCALID"} <= environ.keys() and num_tasks > 1 and not is_shell:
        return "slurm", int(environ["SLURM_PROCID"]), num_tasks, int(environ["SLURM_LOCALID"])
    return "plain", 0, 1, 0


def init_distributed(device: str = "auto", dist_url: str = "env://", timeout_min: float = 30.0) -> Distributed:
    """Find this process' place and join the process group, if there are others.

    Args:
        device: `auto` (cuda where there is one, else cpu), `cpu`, `cuda` (one GPU per local rank) or `cuda:N`.
        dist_url: rendezvous, `env://`, `tcp://HOST:PORT` or `file://PATH`.
        timeout_min: minutes after which a collective that a peer never joins fails.

    Raises:
        ValueError: a device that does not exist here.
    """
    launcher, rank, size, local_rank = detect_launcher(os.environ)
    torch_device = select_device(device, local_rank)
    if size > 1 and not dist.is_initialized():
        if launcher == "slurm" and dist_url == "env://":
            _set_slurm_rendezvous()
        backend = "nccl" if torch_device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, init_method=dist_url, rank=rank, world_size=size, timeout=timedelta(minutes=timeout_min)
        )
    return Distributed(rank, size, local_rank, torch_device)


def select_device(device: str, local_rank: int = 0) -> torch.device:
    """The torch device an option means; makes a GPU the current one.

    Args:
        device: `auto`, or a torch device; `cuda` takes the GPU of this local rank.
        local_rank: rank among the processes of this machine.

    Raises:
        ValueError: no such device here.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch_device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"unknown device {device!r}; give auto, cpu, cuda or cuda:N") from error
    if torch_device.type != "cuda":
        return torch_device
    num_gpus = torch.cuda.device_count()
    index = local_rank if torch_device.index is None else torch_device.index
    # A launcher that shows each process only its own GPU leaves one device, whatever the local rank.
    index = 0 if num_gpus == 1 and torch_device.index is None else index
    if index >= num_gpus:
        raise ValueError(
            f"device {device!r} asks for GPU {index}, but this process sees {num_gpus}; start one process per GPU, or "
            f"give --device cpu"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _set_slurm_rendezvous() -> None:
    """Master address and port from Slurm's variables: the step's first host, a port of this attempt of the job."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ["SLURM_JOB_NODELIST"]
    command = ["scontrol", "show", "hostnames", nodes]
    first_host = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]
    # A requeued job keeps its id; its restart count gives it another port than the attempt before.
    attempt = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    number = int(os.environ["SLURM_JOB_ID"]) + 1009 * attempt + 31 * int(os.environ.get("SLURM_STEP_ID", "0"))
    os.environ.setdefault("MASTER_ADDR", first_host)
    os.environ.setdefault("MASTER_PORT", str(FIRST_PORT + number % NUM_PORTS))


def shutdown() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This process' number, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    """Whether this is rank 0, the one that writes."""
    return rank() == 0


def barrier() -> None:
    """Wait for all processes."""
    if world_size() > 1:
        dist.barrier()


def all_reduce_sum(tensor: Shaped[Tensor, "*size"]) -> Shaped[Tensor, "*size"]:
    """Sum a tensor over all processes, in place; every process gets the sum."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def all_gather_ragged(tensor: Shaped[Tensor, "n *size"]) -> Shaped[Tensor, "N *size"]:
    """Concatenate the tensors of all processes in rank order; their first dimensions may differ.

    Args:
        tensor: (n_rank, ...), the same trailing dimensions and type on every rank.

    Returns:
        (sum of n_rank, ...), on every rank.
    """
    if world_size() == 1:
        return tensor
    length = torch.tensor([len(tensor)], device=tensor.device)
    lengths = [torch.empty_like(length) for _ in range(world_size())]
    dist.all_gather(lengths, length)
    sizes = [int(item) for item in lengths]
    padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])

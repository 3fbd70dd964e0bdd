"""Where this process stands among its peers: started by torchrun, by Slurm, or alone.

Plumbing. A process that is alone needs no process group: the collectives below then return their input.
"""

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

logger = logging.getLogger(__name__)

# Ports below Linux' ephemeral range, so that no outgoing connection can hold the one a job's id leads to.
FIRST_PORT, NUM_PORTS = 10_000, 20_000
INTERACTIVE_STEP = "4294967290"  # Slurm's SLURM_INTERACTIVE_STEP, the shell that salloc opens on a node


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


def detect_launcher(environ: Mapping[str, str], has_terminal: bool = False) -> tuple[str, int, int, int]:
    """Who started this process, from its environment.

    torchrun sets RANK, WORLD_SIZE and LOCAL_RANK. Slurm counts only inside a step of several tasks: in a batch script
    or an allocation SLURM_PROCID and SLURM_NTASKS are set too, but there a plain `python main_dino.py` is one process.
    So it is in a shell that is itself a step (`srun --pty`, or Slurm's interactive step), where the process has the
    terminal; an `srun` from within that shell starts a step whose tasks have none.

    Args:
        environ: the process' environment.
        has_terminal: whether its standard input is a terminal.

    Returns:
        Launcher ("torchrun", "slurm" or "plain"), rank, world size, local rank.
    """
    if {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= environ.keys():
        return "torchrun", int(environ["RANK"]), int(environ["WORLD_SIZE"]), int(environ["LOCAL_RANK"])
    num_tasks = int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
    is_shell = has_terminal or environ.get("SLURM_STEP_ID") == INTERACTIVE_STEP
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
    launcher, rank, size, local_rank = detect_launcher(os.environ, has_terminal=sys.stdin is not None and os.isatty(0))
    # Slurm can show each task its own GPU alone; torchrun's processes all see the same ones.
    torch_device = select_device(device, local_rank, may_share=launcher == "slurm")
    if size > 1 and not dist.is_initialized():
        if launcher == "slurm" and dist_url == "env://":
            _set_slurm_rendezvous()
        backend = "nccl" if torch_device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            init_method=dist_url,
            rank=rank,
            world_size=size,
            timeout=timedelta(minutes=timeout_min),
            device_id=torch_device if torch_device.type == "cuda" else None,
        )
    return Distributed(rank, size, local_rank, torch_device)


def select_device(device: str, local_rank: int = 0, may_share: bool = True) -> torch.device:
    """The torch device an option means; makes a GPU the current one.

    Args:
        device: `auto`, or a torch device; `cuda` takes the GPU of this local rank.
        local_rank: rank among the processes of this machine.
        may_share: take the only GPU in sight whatever the local rank, because it may be this process' own.

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
    index = 0 if num_gpus == 1 and torch_device.index is None and may_share else index
    if index >= num_gpus:
        raise ValueError(
            f"device {device!r} asks for GPU {index}, but this process sees {num_gpus}; start one process per GPU, or "
            f"give --device cpu"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _set_slurm_rendezvous() -> None:
    """Master address and port from Slurm's variables: the step's first host, a port of this attempt of the job.

    Raises:
        ValueError: Slurm's `scontrol`, which names the hosts, cannot be run.
    """
    if "MASTER_ADDR" not in os.environ:
        nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ["SLURM_JOB_NODELIST"]
        command = ["scontrol", "show", "hostnames", nodes]
        try:
            hosts = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        except (OSError, subprocess.CalledProcessError) as error:
            raise ValueError(
                f"cannot find the first host of {nodes} ({error}); set MASTER_ADDR, or give --dist_url tcp://HOST:PORT"
            ) from error
        os.environ["MASTER_ADDR"] = hosts[0]
    # A requeued job keeps its id; its restart count gives it another port than the attempt before.
    attempt = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    number = int(os.environ["SLURM_JOB_ID"]) + 1009 * attempt + 31 * int(os.environ.get("SLURM_STEP_ID", "0"))
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


@contextlib.contextmanager
def rank_0_first() -> Iterator[None]:
    """Let rank 0 do something before the others do it too: download, or index files and leave a cache."""
    if not is_main():
        barrier()
    yield
    if is_main():
        barrier()


def require_same(value: int, what: str) -> None:
    """Make sure that all processes mean the same number, e.g. of images, before they wait for each other.

    Raises:
        ValueError: on every rank, with the numbers.
    """
    if world_size() == 1:
        return
    values: list[int] = [0] * world_size()
    dist.all_gather_object(values, value)
    if len(set(values)) > 1:
        raise ValueError(f"the processes disagree on {what}: {values}, by rank; do they read the same folder?")


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

"""This process and its peers: started by torchrun or Slurm, or one process alone; how processes find each other.

A single process needs no process group: collectives then return their input. Several processes have two groups:

    the main group     tensors on the devices (NCCL on GPUs); all ranks come together, so its time-out is short
    the control group  objects and barriers through the hosts (gloo); the other ranks wait there while one rank works
                       for all of them: it saves, downloads or draws
"""

import functools
import os
import socket
import subprocess
import sys
import time
import uuid
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dino_sparo.runtime.faults import FaultError, UserError
from dino_sparo.runtime.precision import set_tf32

# Ports below Linux' ephemeral range, so that no outgoing connection can hold the port of a job.
FIRST_PORT, NUM_PORTS = 10_000, 20_000
ASK_SECONDS = 0.02  # between two checks whether the others have come
INTERACTIVE_STEP = "4294967290"  # Slurm's SLURM_INTERACTIVE_STEP, the shell that salloc opens on a node
# The control group waits this many times as long as the main one: a rank works there for all others.
CONTROL_FACTOR = 6.0
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
# Words in torch's errors which mean that processes share a GPU, or that its driver is too old: the user has to act.
NCCL_MISUSE = ("Duplicate GPU", "ncclInvalidUsage", "driver version is insufficient")


@dataclass(frozen=True)
class Distributed:
    """This process among its peers."""

    rank: int
    world_size: int
    device: torch.device

    def __str__(self) -> str:
        """In words: "cpu"; "cuda:0, rank 3 of 8"."""
        return f"{self.device}, rank {self.rank} of {self.world_size}" if self.world_size > 1 else str(self.device)


_control: tuple[Any, float] = None, 0.0  # the control group, and the minutes that a collective waits


def control_group() -> tuple[Any, float]:
    """The control group (None without other processes), and the minutes that a collective of the main group waits."""
    return _control


def detect_launcher(environ: Mapping[str, str], has_terminal: bool = False) -> tuple[str, int, int, int]:
    """The launcher of this process, from its environment.

    torchrun sets RANK, WORLD_SIZE and LOCAL_RANK. Slurm counts only within a step of several tasks. Batch scripts and
    allocations have SLURM_PROCID and SLURM_NTASKS too, but there `python main_dino.py` is a single process. The same
    holds in a shell that is itself a step (`srun --pty`, or Slurm's interactive step): its process has the terminal,
    whereas the tasks of an `srun` from that shell have none.

    Returns:
        Launcher ("torchrun", "slurm" or "plain"), rank, world size, local rank.

    Raises:
        UserError: variables of torchrun are missing or contradict each other.
    """
    variables = {name: environ[name] for name in TORCHRUN_VARIABLES if environ.get(name)}
    if len(variables) == len(TORCHRUN_VARIABLES):
        return "torchrun", *_torchrun_ranks(variables)
    num_tasks = int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
    is_shell = has_terminal or environ.get("SLURM_STEP_ID") == INTERACTIVE_STEP
    if {"SLURM_PROCID", "SLURM_LOCALID"} <= environ.keys() and num_tasks > 1 and not is_shell:
        return "slurm", int(environ["SLURM_PROCID"]), num_tasks, int(environ["SLURM_LOCALID"])
    if "RANK" in variables or variables.get("WORLD_SIZE", "1") != "1":
        missing = ", ".join(name for name in TORCHRUN_VARIABLES if name not in variables)
        raise UserError(
            f"the environment has {_assignments(variables)}, but no {missing}; start the processes with torchrun, or "
            "unset these variables to train in one process"
        )
    return "plain", 0, 1, 0


def _torchrun_ranks(given: Mapping[str, str]) -> tuple[int, int, int]:
    """Rank, world size, local rank; UserError unless they are numbers, and both ranks lie below the world size."""
    try:
        rank, size, local_rank = (int(given[name]) for name in TORCHRUN_VARIABLES)
    except ValueError:
        rank, size, local_rank = -1, 0, -1
    if not (0 <= rank < size and 0 <= local_rank < size):
        raise UserError(
            f"{_assignments(given)} in the environment: ranks are whole numbers from 0 to WORLD_SIZE - 1; start the "
            "processes with torchrun, or unset these variables to train in one process"
        )
    return rank, size, local_rank


def _assignments(variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in variables.items())


def on_first_process(command: Callable[[Namespace], Any]) -> Callable[[Namespace], Any]:
    """A command for which one process suffices: if a launcher started several, the others return {} at once."""

    @functools.wraps(command)
    def run(args: Namespace) -> Any:
        return {} if detect_launcher(os.environ)[1] > 0 else command(args)

    return run


def init_distributed(device: str = "auto", dist_url: str = "env://", timeout_min: float = 10.0) -> Distributed:
    """Detect the launcher of this process, and join the process group, if there are other processes.

    Args:
        device: `auto` (cuda where there is one, else cpu), `cpu`, `cuda` (one GPU per local rank) or `cuda:N`.
        dist_url: rendezvous, `env://`, `tcp://HOST:PORT` or `file://PATH`.
        timeout_min: minutes that a collective waits for a peer; the control group waits `CONTROL_FACTOR` times that.

    Raises:
        ValueError: a device that does not exist here.
        FaultError: the other processes cannot be reached.
    """
    launcher, rank, size, local_rank = detect_launcher(os.environ, has_terminal=sys.stdin is not None and os.isatty(0))
    # Slurm may show each task its own GPU alone; torchrun's processes all see the same GPUs.
    torch_device = select_device(device, local_rank, may_share=launcher == "slurm")
    if size > 1 and not dist.is_initialized():
        if launcher == "slurm" and dist_url == "env://":
            _set_slurm_rendezvous()
        _join(dist_url, rank, size, torch_device, timedelta(minutes=timeout_min))
    return Distributed(rank, size, torch_device)


def _join(dist_url: str, rank: int, size: int, device: torch.device, timeout: timedelta) -> None:
    """Join the process group."""
    try:
        store, rank, size = next(dist.rendezvous(dist_url, rank, size, timeout=timeout))
        store.set_timeout(timeout)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = fresh_store(store, rank, size, timeout)
        require_one_device_type(store, rank, size, device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        global _control
        _control = dist.new_group(backend="gloo", timeout=CONTROL_FACTOR * timeout), timeout.total_seconds() / 60
    except RuntimeError as error:
        text = " ".join(str(error).split())
        if any(cause in text for cause in NCCL_MISUSE):
            raise UserError(
                f"process {rank} of {size} cannot use {device}: {text}; each process needs a GPU of its own, and the "
                "driver has to be new enough for torch"
            ) from error
        if "EADDRINUSE" in text:
            raise FaultError(
                "the port where the processes meet is in use, perhaps by another run; choose another port: torchrun "
                f"--master_port, MASTER_PORT, or --dist_url tcp://HOST:PORT ({text})"
            ) from error
        hint = "; GLOO_SOCKET_IFNAME names the network interface to use" * ("gloo" in text.lower())
        raise FaultError(
            f"process {rank} of {size} cannot reach the other processes within {timeout.total_seconds() / 60:g} "
            f"minutes; their logs may say why. Nothing is lost: run the same command again{hint} ({text})"
        ) from error


def fresh_store(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """The part of a store that belongs to this attempt alone; RuntimeError if a process does not join in time.

    torchrun restarts processes after a fault, and may give them the store of the attempt before (torch 2.15 does). It
    still holds the addresses of dead processes. So every attempt puts a name before all of its keys: a random number
    of rank 0. The other ranks ask for the name: each writes a random number of its own as its question, and rank 0
    writes the name under that number. No earlier attempt can have answered, since the number is new.
    TORCHELASTIC_RESTART_COUNT cannot be the name: nodes of one attempt may have different counts (`_invoke_run` of
    torch's elastic agent).
    """
    random_name, end = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    name, missing = random_name, set(range(1, size)) if rank == 0 else {rank}
    while missing:
        if time.monotonic() > end:
            raise RuntimeError(f"processes {sorted(missing)} did not join" if rank == 0 else "process 0 did not join")
        if rank == 0:
            for other in sorted(missing):
                if store.check([f"asks{other}"]):
                    store.set(f"answer{store.get(f'asks{other}').decode()}", random_name)
            missing = {other for other in missing if not store.check([f"{random_name}/joins{other}"])}
        else:
            store.set(f"asks{rank}", random_name)  # again and again: rank 0 may have answered the attempt before
            if store.check([f"answer{random_name}"]):
                name, missing = store.get(f"answer{random_name}").decode(), set()
                store.set(f"{name}/joins{rank}", "")
        time.sleep(ASK_SECONDS)
    return dist.PrefixStore(name, store)


def require_one_device_type(store: dist.Store, rank: int, size: int, device: torch.device) -> None:
    """UserError unless all processes compute on GPUs, or all on CPUs: NCCL and gloo would wait for each other."""
    store.set(f"device{rank}", f"{device.type} of {socket.gethostname()}")
    if rank == 0:
        devices = [store.get(f"device{other}").decode() for other in range(size)]
        others = [f"rank {number} on {name}" for number, name in enumerate(devices) if name.split()[0] != device.type]
        message = (
            f"rank 0 computes on {devices[0]}, but {', '.join(others[:3])}; does torch see the GPUs of all machines? "
            "Give all processes --device cuda, or --device cpu"
        )
        store.set("devices", message if others else "alike")
    if (message := store.get("devices").decode()) != "alike":
        store.set(f"read{rank}", "")
        if rank == 0:  # the store may end with this process
            store.wait([f"read{other}" for other in range(size)])
        raise UserError(message)


def select_device(device: str, local_rank: int = 0, may_share: bool = True) -> torch.device:
    """The torch device of an option. A GPU becomes the current device; TF32 is off until `set_tf32` allows it.

    Args:
        device: `auto`, or a torch device; `cuda` takes the GPU of this local rank.
        local_rank: rank among the processes of this machine.
        may_share: any local rank takes the only visible GPU: Slurm may show each task its own GPU alone.

    Raises:
        ValueError: no such device here, or `auto` finds none of the GPUs that Slurm gave.
    """
    set_tf32(allowed=False)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        numbers, count = os.environ.get("SLURM_JOB_GPUS", ""), os.environ.get("SLURM_GPUS_ON_NODE", "0")
        if device == "cpu" and (numbers or count not in ("", "0")):
            raise UserError(
                f"--device auto: Slurm gave this job GPUs ({numbers or count}), but torch sees none on "
                f"{socket.gethostname()}; `nvidia-smi` may say why. Give --device cpu to compute on the CPU"
            )
    try:
        torch_device = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"unknown device {device!r}; give auto, cpu, cuda or cuda:N") from error
    if torch_device.type != "cuda":
        return torch_device
    num_gpus = torch.cuda.device_count()
    index = local_rank if torch_device.index is None else torch_device.index
    index = 0 if num_gpus == 1 and torch_device.index is None and may_share else index
    if index >= num_gpus:
        raise UserError(
            f"device {device!r} asks for GPU {index}, but this process sees {num_gpus}; start one process per GPU, or "
            f"give --device cpu"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _set_slurm_rendezvous() -> None:
    """Master address and port from Slurm's variables: the step's first host, a port of this attempt of the job."""
    if "MASTER_ADDR" not in os.environ:
        nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ["SLURM_JOB_NODELIST"]
        command = ["scontrol", "show", "hostnames", nodes]
        try:
            hosts = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        except (OSError, subprocess.CalledProcessError) as error:
            raise UserError(
                f"cannot find the first host of {nodes} ({error}); set MASTER_ADDR, or give --dist_url tcp://HOST:PORT"
            ) from error
        os.environ["MASTER_ADDR"] = hosts[0]
    # A requeued job keeps its id; its restart count gives it another port than the attempt before.
    attempt = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    number = int(os.environ["SLURM_JOB_ID"]) + 1009 * attempt + 31 * int(os.environ.get("SLURM_STEP_ID", "0"))
    os.environ.setdefault("MASTER_PORT", str(FIRST_PORT + number % NUM_PORTS))


def wrap_ddp(model: nn.Module, device: torch.device, static_graph: bool = False) -> nn.Module:
    """The model inside DDP, if there are several processes; a `static_graph` lets DDP overlap more communication."""
    if world_size() == 1:
        return model
    device_ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids, gradient_as_bucket_view=True, static_graph=static_graph)


def shutdown() -> None:
    """Leave the process group, if there is one."""
    global _control
    _control = None, 0.0
    if dist.is_initialized():
        dist.destroy_process_group()


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def num_nodes() -> int:
    """Number of machines, as torchrun or Slurm gives it."""
    if nodes := os.environ.get("GROUP_WORLD_SIZE"):  # torchrun's; the nodes may have different numbers of processes
        return int(nodes)
    if here := os.environ.get("LOCAL_WORLD_SIZE"):
        return max(world_size() // int(here), 1)
    return int(os.environ.get("SLURM_STEP_NUM_NODES") or 1) if world_size() > 1 else 1


def rank() -> int:
    """This process' number, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    """Whether this is rank 0, which writes the files."""
    return rank() == 0

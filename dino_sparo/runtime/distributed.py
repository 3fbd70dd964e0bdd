"""This process and its peers: torchrun or Slurm started them, or it is the only one.

A single process needs no process group: collectives then return their input. Several have two groups:

    the main one     tensors on the devices (NCCL on GPUs); all ranks come at the same moment, so its time-out is short
    the control one  objects and barriers, through the hosts (gloo); others wait there while one rank works for all of
                     them: it saves, downloads, draws
"""

import contextlib
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dino_sparo._version import __version__
from dino_sparo.runtime.precision import set_tf32

logger = logging.getLogger(__name__)

# Ports below Linux' ephemeral range, so that no outgoing connection can hold the one a job's id leads to.
FIRST_PORT, NUM_PORTS = 10_000, 20_000
ASK_SECONDS = 0.02  # between two looks whether the others have come
INTERACTIVE_STEP = "4294967290"  # Slurm's SLURM_INTERACTIVE_STEP, the shell that salloc opens on a node

# Words in torch's errors which mean that another process failed, not this one.
PEER_SIGNS = (
    *("gloo/", "Gloo", "NCCL", "ProcessGroup", "TCPStore", "Connection closed by peer", "Connection reset by peer"),
    *("Socket Timeout", "failed to connect", "connection was refused", "Application timeout", "Timed out waiting"),
)
# The control group waits this many times as long as the main one: a rank works there for all others.
CONTROL_FACTOR = 6.0

# Words in torch's errors which mean that a GPU, its driver or a link failed, not the program.
DEVICE_SIGNS = (
    *("uncorrectable", "ECC error", "Xid", "unspecified launch failure", "hardware stack error", "hardware error"),
    *("fallen off the bus", "GPU is lost", "CUDA error: unknown error", "devices are busy or unavailable"),
)
# Words in torch's errors which mean that processes share a GPU, or that its driver is too old: the user has to act.
NCCL_MISUSE = ("Duplicate GPU", "ncclInvalidUsage", "driver version is insufficient")
# Seconds between two heartbeats of a process, and between two looks at those of the others.
BEAT_SECONDS, LOOK_SECONDS = 1.0, 0.05
WAIT_LOG_SECONDS = 30.0  # between two lines on whom rank 0 waits for

# Options that may differ between the processes of one command: where it computes, and how it finds the others.
OPTIONS_OF_ONE_RANK = {"device", "dist_url", "local_rank"}

_GO_ON = "The last checkpoint is whole: start the same command to go on"
WORKER_SIGNS = ("DataLoader worker", "DataLoader timed out")

T = TypeVar("T")


class FaultError(RuntimeError):
    """A process, a worker or the network failed; the run can go on from its last checkpoint."""


class PeerError(ValueError):
    """The error of another rank, raised on this one too, so that all ranks end."""


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

    def __str__(self) -> str:
        """In words: "cpu"; "cuda:0, rank 3 of 8"."""
        return f"{self.device}, rank {self.rank} of {self.world_size}" if self.world_size > 1 else str(self.device)


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


def is_only_a_peer() -> bool:
    """Whether a launcher started several processes and this is not the first: one is enough to draw pictures."""
    return detect_launcher(os.environ)[1] > 0


def init_distributed(device: str = "auto", dist_url: str = "env://", timeout_min: float = 10.0) -> Distributed:
    """Find out who started this process, and join the process group, if there are others.

    Args:
        device: `auto` (cuda where there is one, else cpu), `cpu`, `cuda` (one GPU per local rank) or `cuda:N`.
        dist_url: rendezvous, `env://`, `tcp://HOST:PORT` or `file://PATH`.
        timeout_min: minutes after which a collective that a peer never joins fails; the control group's wait longer,
            see `CONTROL_FACTOR`.

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
    return Distributed(rank, size, local_rank, torch_device)


@dataclass
class _Peers:
    """What ranks need to wait for each other: the control group, or without a time limit; see `gather_patiently`.

    Attributes:
        control: the control group, gloo's.
        store: theirs.
        timeout_s: a rank without a sign of life for this long counts as dead.
        round: number of the next exchange through the store.
        progress: how far this rank's work is; empty if it does not report.
    """

    control: Any
    store: dist.Store
    timeout_s: float
    round: int = 0
    progress: str = ""


_peers: _Peers | None = None


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
        global _peers
        control = dist.new_group(backend="gloo", timeout=CONTROL_FACTOR * timeout)
        _peers = _Peers(control, dist.PrefixStore("patience", store), timeout.total_seconds())
    except RuntimeError as error:
        text = " ".join(str(error).split())
        if any(cause in text for cause in NCCL_MISUSE):
            raise ValueError(
                f"process {rank} of {size} cannot use {device}: {text}; each process needs a GPU of its own, and the "
                "driver has to be new enough for torch"
            ) from error
        hint = "; GLOO_SOCKET_IFNAME names the network interface to use" * ("gloo" in text.lower())
        raise FaultError(
            f"process {rank} of {size} cannot reach the others within {timeout.total_seconds() / 60:g} minutes; their "
            f"logs may say why. Nothing is lost: start the same command again{hint} ({text})"
        ) from error


def fresh_store(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """The part of a store that belongs to this attempt alone.

    torchrun starts processes again after a fault, and may hand them the store of those before (torch 2.15 does): one
    that reads before its peer has written gets the address of a dead process. So rank 0 draws a name, and the others
    ask for it under names of their own, which no attempt before can have answered. TORCHELASTIC_RESTART_COUNT cannot be
    the name: every node's agent counts its own restarts and leaves out those after a change of nodes, so that nodes of
    one attempt may have different counts (`_invoke_run` of torch's elastic agent).

    Args:
        store: shared by all attempts.
        rank: of this process.
        size: number of processes.
        timeout: of the wait for the others.

    Raises:
        RuntimeError: some process has not come.
    """
    own, end = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    name, missing = own, set(range(1, size)) if rank == 0 else {rank}
    while missing:
        if time.monotonic() > end:
            raise RuntimeError(f"processes {sorted(missing)} have not come" if rank == 0 else "process 0 has not come")
        if rank == 0:
            for other in sorted(missing):
                if store.check([f"asks{other}"]):
                    store.set(f"answer{store.get(f'asks{other}').decode()}", own)
            missing = {other for other in missing if not store.check([f"{own}/joins{other}"])}
        else:
            store.set(f"asks{rank}", own)  # again and again: an answer may have gone to the one before
            if store.check([f"answer{own}"]):
                name, missing = store.get(f"answer{own}").decode(), set()
                store.set(f"{name}/joins{rank}", "")
        time.sleep(ASK_SECONDS)
    return dist.PrefixStore(name, store)


def require_one_device_type(store: dist.Store, rank: int, size: int, device: torch.device) -> None:
    """Make sure that all processes compute on GPUs, or all on CPUs: NCCL's group and gloo's would wait for each other.

    Args:
        store: shared by the processes of this attempt.
        rank: of this process.
        size: number of processes.
        device: of this process.

    Raises:
        ValueError: they differ; on every process.
        RuntimeError: some process has not come.
    """
    store.set(f"device{rank}", f"{device.type} of {socket.gethostname()}")
    if rank == 0:
        devices = [store.get(f"device{other}").decode() for other in range(size)]
        others = [f"rank {number} on {name}" for number, name in enumerate(devices) if name.split()[0] != device.type]
        message = (
            f"rank 0 computes on {devices[0]}, but {', '.join(others[:3])}; does torch see the GPUs of all machines? "
            "--device cuda or --device cpu says what all processes take"
        )
        store.set("devices", message if others else "alike")
    if (message := store.get("devices").decode()) != "alike":
        store.set(f"read{rank}", "")
        if rank == 0:  # the store may end with this process
            store.wait([f"read{other}" for other in range(size)])
        raise ValueError(message)


def select_device(device: str, local_rank: int = 0, may_share: bool = True) -> torch.device:
    """The torch device an option means; makes a GPU the current one, and its products of fp32 numbers exact.

    An option that allows TF32 does so afterwards, by `set_tf32`.

    Args:
        device: `auto`, or a torch device; `cuda` takes the GPU of this local rank.
        local_rank: rank among the processes of this machine.
        may_share: if only one GPU is visible, take it for any local rank: Slurm may show each task its own GPU alone.

    Raises:
        ValueError: no such device here, or `auto` finds none of the GPUs that Slurm gave.
    """
    set_tf32(allowed=False)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        # The first holds their numbers, the second how many they are.
        given = [
            name
            for name, none in (("SLURM_JOB_GPUS", ""), ("SLURM_GPUS_ON_NODE", "0"))
            if os.environ.get(name, none) not in ("", none)
        ]
        if device == "cpu" and given:
            raise ValueError(
                f"--device auto: Slurm gave this job GPUs ({given[0]}={os.environ[given[0]]}), but torch sees none on "
                f"{socket.gethostname()}; `nvidia-smi` may say why. Give --device cpu to compute on the CPU"
            )
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


def wrap_ddp(model: nn.Module, device: torch.device, static_graph: bool = False) -> nn.Module:
    """The model inside DDP, where there are several processes; else the model itself.

    Args:
        model: on its device.
        device: of this process.
        static_graph: every step runs the same operations, which lets DDP overlap more.
    """
    if world_size() == 1:
        return model
    device_ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids, gradient_as_bucket_view=True, static_graph=static_graph)


def shutdown() -> None:
    """Leave the process group, if there is one."""
    global _peers
    _peers = None
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
    """Wait for all processes, as long as the control group does; no device is waited for."""
    if world_size() > 1:
        with _peers_named():
            dist.barrier(group=_peers.control if _peers else None)


@contextlib.contextmanager
def _peers_named() -> Iterator[None]:
    """Turn what the control group raises into a `FaultError` that says how long it waited."""
    try:
        yield
    except RuntimeError as error:
        if _peers is None or is_device_fault(error):
            raise
        text = " ".join(str(error).split())
        raise FaultError(_peer_failed(CONTROL_FACTOR * _peers.timeout_s / 60, text)) from error


def _peer_failed(timeout_min: float, text: str) -> str:
    return (
        f"another process died, or did not answer for {timeout_min:g} minutes; its log may say why. {_GO_ON} ({text})"
    )


@contextlib.contextmanager
def all_or_none(what: str, patient: bool = False) -> Iterator[None]:
    """Do something on every rank, without collectives in it; if it fails on one, all ranks raise.

    Args:
        what: what is being done, for the message on the other ranks: "opening the images".
        patient: it may take longer than a collective waits; see `gather_patiently`.

    Raises:
        PeerError: it failed on another rank.
        FaultError: likewise, by faults alone: starting again helps.
        Exception: what was raised here.
    """
    error: Exception | None = None
    with beating() if patient else contextlib.nullcontext():
        try:
            yield
        except Exception as raised:
            error = raised
        own = _message_of(error), isinstance(error, FaultError)
        of_ranks = gather_patiently(own, what) if patient else all_gather_object(own)
    failures = [(number, text) for number, (text, _) in enumerate(of_ranks) if text]
    if error is not None:
        raise error
    if failures:
        number, text = failures[0]
        # Else the other ranks would say that the user must mend something, and the job would not start again.
        kind = FaultError if all(is_fault for text, is_fault in of_ranks if text) else PeerError
        raise kind(f"{what} failed on {len(failures)} of {world_size()} processes; rank {number}: {text}")


def require_same_options(options: Mapping[str, Any]) -> None:
    """Refuse processes that were started with different options, or with another version of torch or of this package.

    Raises:
        ValueError: on every rank, with the first option that differs and both values.
    """
    own = {"torch": str(torch.__version__), "dino_sparo": __version__}
    own |= {f"--{name}": value for name, value in options.items() if name not in OPTIONS_OF_ONE_RANK}
    first, *others = all_gather_object(own)
    for number, other in enumerate(others, 1):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"{name} is {first.get(name)} on rank 0 and {other.get(name)} on rank {number}; start all "
                    "processes with the same options and the same versions"
                )


@contextlib.contextmanager
def rank_0_first(what: str = "preparing the data") -> Iterator[None]:
    """Let rank 0 do something before the others do it too: download, or index files and leave a cache.

    What fails on one rank fails on all, as in `all_or_none`; the others do not begin if rank 0 fails. It may take
    longer than a collective waits.

    Args:
        what: what is being done, for messages.
    """
    with all_or_none(what, patient=True):
        if is_main():
            error: Exception | None = None
            try:
                yield
            except Exception as raised:
                error = raised
            gather_patiently(_message_of(error), what)
            if error is not None:
                raise error
        elif message := gather_patiently("", what)[0]:
            raise PeerError(f"{what} failed on rank 0: {message}")
        else:
            yield


@contextlib.contextmanager
def beating() -> Iterator[None]:
    """Within this context the other ranks can see in the store that this process lives, and how far it is."""
    peers = _peers
    if peers is None:
        yield
        return
    over = threading.Event()

    def beat() -> None:
        number = 0
        with contextlib.suppress(RuntimeError):  # the store ends with rank 0; this rank notices that by itself
            while True:
                peers.store.set(f"beat{rank()}", f"{number} {peers.progress}")
                number += 1
                if over.wait(min(BEAT_SECONDS, peers.timeout_s / 4)):
                    return

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(BEAT_SECONDS)
        peers.progress = ""


def note_progress(text: str) -> None:
    """Report how far this rank is. From then on it counts as hung if its report does not change for the time-out."""
    if _peers is not None:
        _peers.progress = text


def gather_patiently(value: T, what: str) -> list[T]:
    """`all_gather_object` without a time limit: it waits as long as the others live and move, within `beating`.

    Rank 0 collects the values and waits for all; the others wait for rank 0.

    Args:
        value: picklable.
        what: is being done, for the log.

    Raises:
        FaultError: a rank gave no sign of life, or made no progress, for as long as a collective waits.
    """
    peers = _peers
    if world_size() == 1 or peers is None:
        return all_gather_object(value)
    store, number = peers.store, peers.round
    peers.round += 1
    peers.progress = ""  # from here on this rank waits, and makes no progress of its own
    if rank():
        store.set(f"{number}/value{rank()}", pickle.dumps(value))  # type: ignore[arg-type]
        _wait_for_keys(peers, {0: f"{number}/all"}, what)
        values = pickle.loads(store.get(f"{number}/all"))
        store.set(f"{number}/read{rank()}", "")
        return values
    others = range(1, world_size())
    _wait_for_keys(peers, {other: f"{number}/value{other}" for other in others}, what)
    values = [value, *(pickle.loads(store.get(f"{number}/value{other}")) for other in others)]
    store.set(f"{number}/all", pickle.dumps(values))  # type: ignore[arg-type]
    # The store may end with this process, so it stays until all have read.
    _wait_for_keys(peers, {other: f"{number}/read{other}" for other in others}, what)
    return values


def _wait_for_keys(peers: _Peers, keys: dict[int, str], what: str) -> None:
    """Wait until each of these ranks has set its key, watching their heartbeats."""
    begin = last_log = last_look = time.monotonic()
    beats: dict[int, tuple[str, str, float, float]] = {}  # number, progress, and when each was last seen to change
    missing = dict(keys)
    while True:
        missing = {other: key for other, key in missing.items() if not peers.store.check([key])}
        if not missing:
            return
        now = time.monotonic()
        if now - last_look >= min(BEAT_SECONDS, peers.timeout_s / 4) or not beats:
            last_look = now
            for other in missing:
                beats[other] = _look_at_beat(peers, other, beats.get(other, ("", "", now, now)), now)
        if is_main() and now - last_log >= WAIT_LOG_SECONDS:
            last_log, other = now, min(missing)
            progress = beats[other][1] or "at work"
            logger.info(
                "%s: %d of %d processes are not through after %.0f s; rank %d: %s",
                *(what, len(missing), world_size(), now - begin, other, progress),
            )
        time.sleep(min(LOOK_SECONDS * (1 + int(now - begin)), BEAT_SECONDS / 2, peers.timeout_s / 8))


def _look_at_beat(
    peers: _Peers, other: int, last: tuple[str, str, float, float], now: float
) -> tuple[str, str, float, float]:
    """What a rank's heartbeat says now; FaultError if it, or the progress in it, has stood still for too long."""
    name = f"beat{other}"
    text = peers.store.get(name).decode() if peers.store.check([name]) else ""
    number, _, progress = text.partition(" ")
    last_number, last_progress, beat_at, moved_at = last
    beat_at = now if number != last_number else beat_at
    moved_at = now if progress != last_progress or not progress else moved_at
    if now - min(beat_at, moved_at) > peers.timeout_s:
        state = "died" if beat_at <= moved_at else f"has not moved on from {progress!r}"
        raise FaultError(
            f"process {other} of {world_size()} {state}: nothing for {peers.timeout_s / 60:g} minutes; its log may "
            f"say why. Start the same command to go on"
        )
    return number, progress, beat_at, moved_at


def share_of(folder: str) -> tuple[int, int]:
    """This process' number among the ranks that see the same folder, and how many they are.

    Machines may have a folder of that name each, or all the same one: every rank leaves a file there and looks for
    those of the others. Where nothing can be written a process is alone.

    Args:
        folder: is made if it is not there.
    """
    token = gather_patiently(uuid.uuid4().hex, "comparing folders")[0]
    names = [os.path.join(folder, f"{token}.rank{number}") for number in range(world_size())]
    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)
        with open(names[rank()], "w"):
            pass
    gather_patiently(None, "comparing folders")
    seen = [number for number, name in enumerate(names) if os.path.exists(name)]
    gather_patiently(None, "comparing folders")
    with contextlib.suppress(OSError):
        os.remove(names[rank()])
    return (seen.index(rank()), len(seen)) if rank() in seen else (0, 1)


def on_rank_0(function: Callable[[], None], what: str) -> None:
    """Call a function on rank 0 while the others wait; if it fails there, all ranks raise.

    Raises:
        PeerError: it failed on rank 0, and this is another.
    """
    with all_or_none(what):
        if is_main():
            function()


def _message_of(error: Exception | None) -> str:
    """The message of an error for the other ranks; empty for none."""
    return "" if error is None else str(error) or type(error).__name__


@contextlib.contextmanager
def faults_named(timeout_min: float) -> Iterator[None]:
    """Turn what torch raises when a peer, a worker or a GPU fails or hangs into a `FaultError` that says so.

    Args:
        timeout_min: minutes a collective waits, for the message.

    Raises:
        FaultError: with the cause and what to do.
    """
    try:
        yield
    except FaultError:
        raise
    except (RuntimeError, ConnectionError, EOFError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        if not isinstance(error, RuntimeError) or any(sign in text for sign in WORKER_SIGNS):
            what = "a process that loads images died or hangs; if memory ran out, give fewer --num_workers"
            message = f"{what}. {_GO_ON} ({text})"
        elif is_device_fault(error):
            message = (
                f"the GPU of rank {rank()} on {socket.gethostname()} failed, or its driver or link did; `nvidia-smi "
                f"-q` and `dmesg` may say why. {_GO_ON}; if it comes back there, leave that machine out: "
                f"--slurm_additional exclude=NODE ({text})"
            )
        elif isinstance(error, dist.DistError) or (world_size() > 1 and any(sign in text for sign in PEER_SIGNS)):
            message = _peer_failed(timeout_min, text)
        else:
            raise
        raise FaultError(message) from error


def is_device_fault(error: Exception) -> bool:
    """Whether an error of CUDA says that the hardware failed; a program's mistake, such as a bad index, does not."""
    text = str(error)
    return ("CUDA" in text or "NVML" in text) and any(sign in text for sign in DEVICE_SIGNS)


def require_same(value: int | str | None, what: str) -> None:
    """Make sure that all processes have the same value, e.g. a number of images, before they wait for each other.

    Raises:
        ValueError: on every rank; with the values if they are numbers.
    """
    values = all_gather_object(value)
    if len(set(values)) > 1:
        shown = f": {values}, by rank" if isinstance(value, int) else ""
        raise ValueError(f"the processes disagree on {what}{shown}; do they read the same folder?")


def all_gather_object(value: T) -> list[T]:
    """The picklable values of all ranks, in rank order, on every rank; through the hosts, so no device waits."""
    if world_size() == 1:
        return [value]
    values: list[T] = [value] * world_size()
    with _peers_named():
        dist.all_gather_object(values, value, group=_peers.control if _peers else None)
    return values


def broadcast_object(value: T) -> T:
    """Rank 0's picklable value, on every rank; the others' own is not used."""
    if world_size() == 1:
        return value
    values = [value]
    with _peers_named():
        dist.broadcast_object_list(values, src=0, group=_peers.control if _peers else None)
    return values[0]

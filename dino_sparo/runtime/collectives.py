"""Exchange between ranks: tensors on the devices; objects, barriers and errors through the hosts.

A single process gets back what it gives. Tensors go through the main group. Everything else goes through the control
group, which waits `CONTROL_FACTOR` times as long, so that no device waits.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor

from dino_sparo._version import __version__
from dino_sparo.runtime.faults import FaultError, PeerError, UserError, is_device_fault, peer_failed
from dino_sparo.runtime.launch import CONTROL_FACTOR, control_group, is_main, rank, world_size


def all_reduce_sum(tensor: Shaped[Tensor, "*size"]) -> Shaped[Tensor, "*size"]:
    """Sum a tensor over all processes, in place; every process gets the sum."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def all_reduce_flat(tensors: Sequence[Tensor]) -> None:
    """Sum tensors of one device over all processes, in place, in one exchange of one buffer in fp32 or wider."""
    if world_size() == 1 or not tensors:
        return
    dtype = torch.promote_types(torch.float32, tensors[0].dtype)
    flat = torch.cat([tensor.flatten().to(dtype) for tensor in tensors])
    dist.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(list(tensors), [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])


@torch.no_grad()
def broadcast_tensors(tensors: Sequence[Tensor]) -> None:
    """Give all processes rank 0's values, in place."""
    if world_size() > 1:
        for tensor in tensors:
            dist.broadcast(tensor.data, src=0)


def all_gather_ragged(tensor: Shaped[Tensor, "n *size"]) -> Shaped[Tensor, "N *size"]:  # noqa: F821
    """Concatenate the tensors of all processes in rank order; their first dimensions may differ."""
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


def gather_with_gradient(tensor: Float[Tensor, "*size"]) -> Float[Tensor, "ranks *size"]:  # noqa: F821
    """The tensors of all ranks, of one shape, in rank order.

    The gradient of a rank's own tensor is the sum of all ranks' gradients for it. If the loss of a step is the mean of
    the ranks' losses, the mean over ranks that DDP takes is then its exact gradient.
    """
    return tensor[None] if world_size() == 1 else _Gather.apply(tensor)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        gathered = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(world_size())]
        dist.all_gather(gathered, tensor.contiguous())
        return torch.stack(gathered)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.contiguous()
        dist.all_reduce(total)
        return total[rank()]


# Options that may differ between the processes of one command: where it computes, and how it finds the others.
OPTIONS_OF_ONE_RANK = {"device", "dist_url", "local_rank"}

T = TypeVar("T")


def barrier() -> None:
    """Wait for all processes, at most for the control group's time-out; does not synchronise with the device."""
    if world_size() > 1:
        with _control_exchange() as control:
            dist.barrier(group=control)


def all_gather_object(value: T) -> list[T]:
    """The picklable values of all ranks, in rank order, on every rank; through the hosts, so devices keep working."""
    if world_size() == 1:
        return [value]
    values: list[T] = [value] * world_size()
    with _control_exchange() as control:
        dist.all_gather_object(values, value, group=control)
    return values


def broadcast_object(value: T) -> T:
    """Rank 0's picklable value, on every rank; the values of other ranks are ignored."""
    if world_size() == 1:
        return value
    values = [value]
    with _control_exchange() as control:
        dist.broadcast_object_list(values, src=0, group=control)
    return values[0]


@contextlib.contextmanager
def _control_exchange() -> Iterator[Any]:
    """The control group; within this context its errors become a `FaultError` that names the time-out."""
    control, timeout_min = control_group()
    try:
        yield control
    except RuntimeError as error:
        if control is None or is_device_fault(error):
            raise
        raise FaultError(peer_failed(CONTROL_FACTOR * timeout_min, " ".join(str(error).split()))) from error


@contextlib.contextmanager
def all_or_none(what: str) -> Iterator[None]:
    """Within this context every rank works without collectives; if one rank fails, all ranks raise an error.

    The message on other ranks names the action, `what`: "opening the images".

    Raises:
        PeerError: another rank failed.
        FaultError: other ranks failed, all by faults, so that starting again helps.
        Exception: the error of this rank.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    outcomes = all_gather_object((_message_of(error), isinstance(error, FaultError)))
    failures = [(number, text, is_fault) for number, (text, is_fault) in enumerate(outcomes) if text]
    if error is not None:
        raise error
    if failures:
        number, text, _ = failures[0]
        # A PeerError ends the job, as a mistake of the user's does. After faults alone the job shall start again.
        kind = FaultError if all(is_fault for _, _, is_fault in failures) else PeerError
        raise kind(f"{what} failed on {len(failures)} of {world_size()} processes; rank {number}: {text}")


def on_rank_0(function: Callable[[], None], what: str) -> None:
    """Call a function on rank 0 while all other ranks wait; if the function fails, all ranks raise an error."""
    with all_or_none(what):
        if is_main():
            function()


@contextlib.contextmanager
def rank_0_first(what: str = "preparing the data") -> Iterator[None]:
    """Within this context rank 0 works first, for instance downloads; then the other ranks work.

    A failure of one rank is a failure of all, as in `all_or_none`. If rank 0 fails, the other ranks do not begin.
    """
    with all_or_none(what):
        if is_main():
            try:
                yield
            except Exception as error:
                broadcast_object(_message_of(error))
                raise
            broadcast_object("")
        elif message := broadcast_object(""):
            raise PeerError(f"{what} failed on rank 0: {message}")
        else:
            yield


def require_same(value: int | str | None, what: str) -> None:
    """UserError on every rank unless all ranks have the same value, such as a number of images."""
    values = all_gather_object(value)
    if len(set(values)) > 1:
        shown = f": {values}, by rank" if isinstance(value, int) else ""
        raise UserError(f"the processes disagree on {what}{shown}; do they read the same folder?")


def require_same_options(options: Mapping[str, Any]) -> None:
    """UserError on every rank unless all ranks have the same options, and versions of torch and of this package."""
    settings = {"torch": str(torch.__version__), "dino_sparo": __version__}
    settings |= {f"--{name}": value for name, value in options.items() if name not in OPTIONS_OF_ONE_RANK}
    first, *others = all_gather_object(settings)
    for number, other in enumerate(others, 1):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                raise UserError(
                    f"{name} is {first.get(name)} on rank 0 and {other.get(name)} on rank {number}; start all "
                    "processes with the same options and the same versions"
                )


def _message_of(error: Exception | None) -> str:
    """The message of an error for the other ranks; empty without an error."""
    return "" if error is None else str(error) or type(error).__name__

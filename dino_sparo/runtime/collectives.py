"""Tensors of all processes: sums, and rows one after the other. A single process gets back what it gives."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor

from dino_sparo.runtime.launch import rank, world_size


def all_reduce_sum(tensor: Shaped[Tensor, "*size"]) -> Shaped[Tensor, "*size"]:
    """Sum a tensor over all processes, in place; every process gets the sum."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def all_reduce_sum_async(tensor: Shaped[Tensor, "*size"]) -> Callable[[], Tensor]:
    """Start `all_reduce_sum` without waiting; the returned function waits for the result and returns the tensor."""
    if world_size() == 1:
        return lambda: tensor
    work = dist.all_reduce(tensor, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return tensor

    return wait


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

    The gradient of a rank's own tensor is the sum of all ranks' gradients for it. With the loss of a step as the
    mean of the ranks' losses, the mean of the ranks' gradients is the gradient.
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

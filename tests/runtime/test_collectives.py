"""Collectives over two real ranks, against what one process computes."""

import torch
from torch import Tensor
from two_ranks import TwoRanks

from dino_sparo.runtime.collectives import all_gather_ragged, all_reduce_flat, all_reduce_sum, gather_with_gradient
from dino_sparo.runtime.launch import rank


def _sums(numbers: list[list[float]]) -> list[list[float]]:
    tensor = torch.tensor(numbers[rank()])
    parts = [tensor[:2].clone(), tensor[2:].half()]
    all_reduce_flat(parts)
    return [all_reduce_sum(tensor).tolist(), tensor.tolist(), [*parts[0].tolist(), *parts[1].tolist()]]


def test_a_sum_over_ranks_is_the_same_on_both_and_in_place(two_ranks: TwoRanks) -> None:
    assert two_ranks(_sums, [[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]]) == [[[11.0, 22.0, 33.0]] * 3] * 2


def _rows(sizes: list[int]) -> list[list[float]]:
    return all_gather_ragged(torch.full((sizes[rank()], 2), 1.0 + rank())).tolist()


def test_rows_of_different_numbers_are_gathered_in_rank_order(two_ranks: TwoRanks) -> None:
    for sizes in ([3, 1], [0, 2], [0, 0]):
        expected = [[1.0, 1.0]] * sizes[0] + [[2.0, 2.0]] * sizes[1]
        assert two_ranks(_rows, sizes) == [expected] * 2


def _loss(gathered: Tensor, number: int) -> Tensor:
    """A loss that differs between ranks and mixes their tensors."""
    return ((number + 1) * gathered[0] * gathered[1] ** 2).sum()


def _gradient(tensors: Tensor) -> tuple[Tensor, Tensor]:
    own = tensors[rank()].clone().requires_grad_()
    gathered = gather_with_gradient(own)
    _loss(gathered, rank()).backward()
    assert own.grad is not None
    return gathered.detach(), own.grad


def test_the_gradient_through_a_gather_is_the_sum_over_ranks(two_ranks: TwoRanks) -> None:
    tensors = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    results = two_ranks(_gradient, tensors)
    whole = tensors.clone().requires_grad_()
    sum(_loss(whole, number) for number in range(2)).backward()
    assert whole.grad is not None
    for number, (gathered, gradient) in enumerate(results):
        assert torch.equal(gathered, tensors)
        assert torch.allclose(gradient, whole.grad[number])

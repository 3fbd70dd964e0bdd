"""OC-CLIP over several processes is OC-CLIP in one: loss and every gradient."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from two_ranks import ThreeRanks, TwoRanks

pytest.importorskip("open_clip")

from oc_clip_fakes import assert_same_gradients, batch_of, small_model, some_graphs, training_of

from dino_sparo.image_text.step import backward_at_once, backward_in_parts
from dino_sparo.runtime.launch import rank, world_size

NUM_PAIRS = 12


class Case(NamedTuple):
    """One loss.

    Attributes:
        binding: how the model differs.
        without_relations: numbers of the graphs that have none.
        rel_loss_weight: lambda.
        in_parts: the first pair of a rank is a micro-batch of its own.
    """

    binding: dict[str, Any]
    without_relations: tuple[int, ...] = ()
    rel_loss_weight: float = 1.0
    in_parts: bool = False


CASES = {
    "all": Case({}),
    "rank 0 has no relations": Case({}, without_relations=(0, 1, 2, 3, 4, 5)),
    "no relations at all": Case({}, without_relations=tuple(range(NUM_PAIRS))),
    "no local loss": Case({}, rel_loss_weight=0.0),
    "no local loss, no relations": Case({}, without_relations=tuple(range(NUM_PAIRS)), rel_loss_weight=0.0),
    "no temperature": Case({"logit_scale": False}),
    "one MLP of both ends": Case({"relation": "mlp"}),
    "competition among patches": Case({"competition": "keys", "num_default": 0}),
    "in parts": Case({}, in_parts=True),
}


def loss_and_gradients(name: str) -> dict[str, Tensor]:
    """The loss of a rank and all gradients as they are after a step's backward pass, in float64; twice, as DDP asks."""
    case, size = CASES[name], NUM_PAIRS // world_size()
    training = training_of(small_model(**case.binding).double(), case.rel_loss_weight)
    own = list(range(rank() * size, (rank() + 1) * size))
    parts = [own[:1], own[1:]] if case.in_parts and world_size() > 1 else [own]
    batches = [batch_of(some_graphs(case.without_relations), part) for part in parts]
    for _ in range(2):
        training.updater.optimizer.zero_grad(set_to_none=True)
        backward = backward_at_once if len(batches) == 1 else backward_in_parts
        loss, _ = backward(training, batches)
    gradients = {name: parameter.grad for name, parameter in training.network.named_parameters()}
    return {"loss": loss, **{n: torch.zeros(()) if g is None else g.clone() for n, g in gradients.items()}}


def assert_mean_is_the_whole_batch(name: str, ranks: list[dict[str, Tensor]]) -> None:
    """Loss and gradients of all ranks against those of one process."""
    whole = loss_and_gradients(name)
    mean = torch.stack([found["loss"] for found in ranks]).mean()
    assert mean.item() == pytest.approx(whole.pop("loss").item(), rel=1e-12)
    for found in ranks:  # DDP has taken the mean: all ranks have the same
        assert_same_gradients(found, whole)


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[ThreeRanks]:
    ranks = ThreeRanks()
    yield ranks
    ranks.end()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_mean_of_three_ranks_is_one_process_with_the_whole_batch(three_ranks: ThreeRanks, name: str) -> None:
    assert_mean_is_the_whole_batch(name, three_ranks(loss_and_gradients, name))


@pytest.mark.parametrize("name", ["rank 0 has no relations", "in parts"])
def test_the_mean_of_two_ranks_is_one_process_with_the_whole_batch(two_ranks: TwoRanks, name: str) -> None:
    assert_mean_is_the_whole_batch(name, two_ranks(loss_and_gradients, name))

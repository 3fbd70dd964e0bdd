"""OC-CLIP over three processes is OC-CLIP in one: loss and every gradient."""

import os
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("open_clip")

from oc_clip_fakes import batch_of, small_model, some_graphs, training_of
from runs import PATIENCE, context
from test_faults import server

from dino_sparo.image_text.step import backward_at_once, backward_in_parts, contrastive_loss
from dino_sparo.runtime.collectives import barrier
from dino_sparo.runtime.launch import init_distributed, rank, shutdown, world_size

__all__ = ["server"]  # a fixture
pytestmark = pytest.mark.slow
NUM_PAIRS = 12


class Case(NamedTuple):
    """One loss.

    Attributes:
        binding: how the model differs.
        without_relations: numbers of the graphs that have none.
        rel_loss_weight: lambda.
        parts: sizes of the micro-batches of a rank of six pairs.
    """

    binding: dict[str, Any]
    without_relations: tuple[int, ...] = ()
    rel_loss_weight: float = 1.0
    parts: tuple[int, ...] = ()


CASES = {
    "all": Case({}),
    "rank 0 has no relations": Case({}, without_relations=(0, 1, 2, 3, 4, 5)),
    "no relations at all": Case({}, without_relations=tuple(range(NUM_PAIRS))),
    "no local loss": Case({}, rel_loss_weight=0.0),
    "no local loss, no relations": Case({}, without_relations=tuple(range(NUM_PAIRS)), rel_loss_weight=0.0),
    "no temperature": Case({"logit_scale": False}),
    "one MLP of both ends": Case({"relation": "mlp"}),
    "competition among patches": Case({"competition": "keys", "num_default": 0}),
    "in parts": Case({}, parts=(1, 3)),
}


def loss_and_gradients(case: Case, num_ranks: int = 1, number: int = 0) -> dict[str, Tensor]:
    """The loss of a rank and all gradients as they are after a step's backward pass, in float64; twice, as DDP asks."""
    training = training_of(small_model(**case.binding).double(), case.rel_loss_weight)
    graphs, size = some_graphs(case.without_relations), NUM_PAIRS // num_ranks
    own = list(range(number * size, (number + 1) * size))
    parts = [own]
    if case.parts and num_ranks > 1:
        first = case.parts[0]
        parts = [own[:first], own[first:]]
    batches = [batch_of(graphs, part) for part in parts]
    for _ in range(2):
        training.updater.optimizer.zero_grad(set_to_none=True)
        backward = backward_at_once if len(batches) == 1 else backward_in_parts
        loss, _ = backward(training, batches)
    gradients = {name: parameter.grad for name, parameter in training.network.named_parameters()}
    return {"loss": loss, **{n: torch.zeros(()) if g is None else g.clone() for n, g in gradients.items()}}


def random_scores() -> tuple[Tensor, Tensor]:
    """Scores (12, 12) of all images and texts, and the inverse temperature."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(NUM_PAIRS, NUM_PAIRS, generator=generator).double(), torch.tensor(3.7).double()


def contrast_of_rows(scores: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """The contrastive loss of a rank's rows, and what it says of them and of the temperature."""
    leaves = [scores.clone().requires_grad_(), scale.clone().requires_grad_()]
    loss = contrastive_loss(*leaves)
    return dict(zip(("loss", "scores", "scale"), (loss.detach(), *torch.autograd.grad(loss, leaves)), strict=True))


def _peer(number: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(number), WORLD_SIZE=str(size), LOCAL_RANK=str(number))
    init_distributed("cpu", dist_url=f"file://{folder}/rendezvous")
    assert (rank(), world_size()) == (number, size)
    found = {name: loss_and_gradients(case, size, number) for name, case in CASES.items()}
    rows = NUM_PAIRS // size
    scores, scale = random_scores()
    found["contrast"] = contrast_of_rows(scores[number * rows : (number + 1) * rows], scale)
    torch.save(found, f"{folder}/{number}.pt")
    barrier()
    shutdown()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict]]:
    """What each of three ranks found, by case."""
    size, folder = 3, tmp_path_factory.mktemp("ranks")
    peers = [context.Process(target=_peer, args=(number, size, str(folder))) for number in range(size)]
    for peer in peers:
        peer.start()
    for peer in peers:
        peer.join(timeout=PATIENCE)
    assert [peer.exitcode for peer in peers] == [0] * size
    return [torch.load(folder / f"{number}.pt", weights_only=True) for number in range(size)]


def assert_mean_is_the_whole_batch(name: str, ranks: list[dict[str, Tensor]]) -> None:
    """Loss and gradients of all ranks against those of one process."""
    whole = loss_and_gradients(CASES[name])
    mean = torch.stack([found["loss"] for found in ranks]).mean()
    assert mean.item() == pytest.approx(whole.pop("loss").item(), rel=1e-12)
    largest = max(float(gradient.abs().max()) for gradient in whole.values())
    for parameter, expected in whole.items():
        for found in ranks:  # DDP has taken the mean: all ranks have the same
            torch.testing.assert_close(
                found[parameter].double(),
                expected.double(),
                rtol=1e-9,
                atol=1e-11 * largest,
                msg=lambda text, parameter=parameter: f"{parameter}: {text}",
            )


@pytest.mark.parametrize("name", CASES)
def test_the_mean_of_three_ranks_is_one_process_with_the_whole_batch(ranks: list[dict[str, dict]], name: str) -> None:
    assert_mean_is_the_whole_batch(name, [found[name] for found in ranks])


def test_the_contrastive_loss_over_ranks_is_its_definition(ranks: list[dict[str, dict]]) -> None:
    scores, scale = (tensor.requires_grad_() for tensor in random_scores())
    terms = []
    for i in range(NUM_PAIRS):
        terms += [torch.stack([(scale * scores[i, j]).exp() for j in range(NUM_PAIRS)]).sum().log()]
        terms += [torch.stack([(scale * scores[j, i]).exp() for j in range(NUM_PAIRS)]).sum().log()]
        terms += [-2 * scale * scores[i, i]]
    loss = torch.stack(terms).sum() / (2 * NUM_PAIRS)
    expected = torch.autograd.grad(loss, (scores, scale))
    each = [found["contrast"] for found in ranks]
    torch.testing.assert_close(torch.stack([found["loss"] for found in each]).mean(), loss.detach())
    torch.testing.assert_close(torch.cat([found["scores"] for found in each]) / len(each), expected[0])
    torch.testing.assert_close(torch.stack([found["scale"] for found in each]).mean(), expected[1])

"""OC-CLIP over several processes is OC-CLIP in one: loss and every gradient; the pairs of a run on two ranks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from two_ranks import ThreeRanks, TwoRanks

pytest.importorskip("open_clip")

from oc_clip_fakes import batch_of, small_model, some_graphs, training_of
from PIL import Image
from runs import options

from dino_sparo.clip.options import check_options, get_args_parser
from dino_sparo.image_text.objective import open_data
from dino_sparo.image_text.pairs.batches import collate_pairs
from dino_sparo.image_text.step import backward_at_once, backward_in_parts
from dino_sparo.runtime.launch import Distributed, rank, world_size

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


def _open_pairs(tables: list[str]) -> int:
    words = options(Path("unused"), "train-clip", data_path=tables[rank()])
    args = get_args_parser().parse_args(words)
    check_options(args)
    process = Distributed(rank(), world_size(), torch.device("cpu"))
    return len(open_data(args, process, collate_pairs)[0])


def write_table(path: Path, captions: list[str]) -> str:
    for number in range(len(captions)):
        Image.new("RGB", (32, 32)).save(path.parent / f"{number}.png")
    rows = "".join(f"{number}.png,{caption}\n" for number, caption in enumerate(captions))
    path.write_text(f"image,caption\n{rows}")
    return str(path)


def test_ranks_with_different_pairs_are_refused(two_ranks: TwoRanks, tmp_path: Path) -> None:
    """A mutant survived in which each rank trained on its own pairs."""
    captions = ["a dog", "a cat", "a red ball"]
    table, same, shorter = (
        write_table(tmp_path / name, words)
        for name, words in (("a.csv", captions), ("b.csv", captions), ("c.csv", captions[:2]))
    )
    assert two_ranks(_open_pairs, [table, same]) == [3, 3]
    errors = two_ranks.errors(_open_pairs, [table, shorter])
    assert all("disagree on the number of images" in text and "[3, 2], by rank" in text for text in errors)

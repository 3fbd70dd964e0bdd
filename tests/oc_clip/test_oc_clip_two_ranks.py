"""OC-CLIP's step and the pairs of a run on two ranks; `test_oc_clip_ranks.py` has three ranks."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from two_ranks import TwoRanks

pytest.importorskip("open_clip")

from PIL import Image
from runs import options
from test_oc_clip_ranks import CASES, assert_mean_is_the_whole_batch, loss_and_gradients

from dino_sparo.clip.options import check_options, get_args_parser
from dino_sparo.image_text.objective import number_pairs
from dino_sparo.image_text.pairs.batches import collate_pairs
from dino_sparo.runtime.launch import Distributed, rank, world_size


def _rank_loss_and_gradients(name: str) -> dict[str, Tensor]:
    return loss_and_gradients(CASES[name], world_size(), rank())


QUICK = ("rank 0 has no relations", "in parts")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_a_step_of_two_ranks_is_that_of_one_process_with_the_whole_batch(two_ranks: TwoRanks, name: str) -> None:
    assert_mean_is_the_whole_batch(name, two_ranks(_rank_loss_and_gradients, name))


def _open_pairs(tables: list[str]) -> int:
    words = options(Path("unused"), "train-clip", data_path=tables[rank()])
    args = get_args_parser().parse_args(words)
    check_options(args)
    process = Distributed(rank(), world_size(), torch.device("cpu"))
    return len(number_pairs(args, process, 1, collate_pairs)[0])


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

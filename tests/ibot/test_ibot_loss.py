"""Losses of iBOT against loops, Sinkhorn-Knopp over ranks, masks, and the collapse of each loss."""

import random

import pytest
import torch
from objectives import bare
from torch import Tensor
from two_ranks import TwoRanks

from dino_sparo.ibot.loss import PatchLoss, diagnose_patches, sinkhorn_knopp
from dino_sparo.ibot.mask import MaskRecipe, pack
from dino_sparo.ibot.options import fill_in_defaults, get_args_parser
from dino_sparo.ibot.train import IBOTObjective
from dino_sparo.runtime.launch import rank

CROPS, PATCHES, PROTOTYPES = 4, 35, 11
RECIPE = MaskRecipe((5, 7), 0.5, (0.1, 0.5))


def rows(number: int, seed: int) -> Tensor:
    return torch.randn(number, PROTOTYPES, generator=torch.Generator().manual_seed(seed))


def test_the_patch_loss_is_the_mean_over_crops_of_means_over_their_masked_patches() -> None:
    masks = RECIPE.draw(random.Random(0), CROPS)
    mask = pack(masks, RECIPE.most_patches(CROPS, parts=1))
    student, teacher = rows(CROPS * PATCHES, 0), rows(CROPS * PATCHES, 1).softmax(dim=-1)
    expected = 0.0
    for crop in range(CROPS):
        places = [crop * PATCHES + patch for patch in range(PATCHES) if masks[crop, patch]]
        losses = [-(teacher[place] * (student[place] / 0.1).log_softmax(dim=0)).sum() for place in places]
        expected += sum(losses) / max(len(losses), 1) / CROPS
    value = PatchLoss(PROTOTYPES)(student[mask.patches], teacher[mask.patches], mask.weights)
    assert value.item() == pytest.approx(float(expected), rel=1e-5)
    assert len(mask.patches.unique()) == len(mask.patches)
    assert masks.reshape(-1)[mask.patches[mask.weights > 0]].all()


@pytest.mark.parametrize("seed", range(3))
def test_masks_have_the_wanted_shares_and_fit_into_their_places(seed: int) -> None:
    recipe, images = MaskRecipe((14, 14), 0.5, (0.1, 0.5)), 8
    for parts in (1, 2):
        masks = recipe.draw_step(random.Random(seed), images // parts, parts)
        shares = torch.cat([mask.masked for mask in masks]).double().mean(dim=1)
        assert (shares > 0).sum() == images  # half of the crops
        assert shares.max() <= 0.5
        assert sum((mask.weights > 0).sum() for mask in masks) == sum(mask.masked.sum() for mask in masks)
        assert len({mask.patches.shape for mask in masks}) == 1  # whatever was drawn


def test_sinkhorn_knopp_is_three_rounds_of_columns_and_rows() -> None:
    logits, is_row = rows(13, 2), torch.ones(17, 1)
    expected = (logits / 0.07).exp()
    for _ in range(3):
        for k in range(PROTOTYPES):
            expected[:, k] /= expected[:, k].sum() * PROTOTYPES
        for r in range(13):
            expected[r] /= expected[r].sum() * 13
    expected *= 13
    torch.testing.assert_close(sinkhorn_knopp(logits, 0.07), expected, rtol=1e-4, atol=1e-6)
    is_row[13:] = 0
    padded = sinkhorn_knopp(torch.cat([logits, rows(4, 3)]), 0.07, is_row)
    torch.testing.assert_close(padded, torch.cat([expected, torch.zeros(4, PROTOTYPES)]), rtol=1e-4, atol=1e-6)


def sinkhorn_on_a_rank(logits: Tensor) -> Tensor:
    return sinkhorn_knopp(logits.chunk(2)[rank()], 0.07)


@pytest.mark.slow
def test_sinkhorn_knopp_takes_the_rows_of_all_ranks_together(two_ranks: TwoRanks) -> None:
    logits = rows(14, 4)
    parts = two_ranks(sinkhorn_on_a_rank, logits)
    torch.testing.assert_close(torch.cat(parts), sinkhorn_knopp(logits, 0.07))


def test_information_of_patches_counts_masked_patches_alone() -> None:
    weights = torch.tensor([0.25, 0.25, 0.0])
    one_hot = torch.eye(3)
    found = diagnose_patches(one_hot, weights, torch.tensor(0.5))
    assert found.teacher_entropy.item() == 0
    assert found.marginal_entropy.item() == pytest.approx(torch.tensor(2.0).log().item())
    assert found.kl.item() == pytest.approx(1)  # half of the crops are masked


@pytest.mark.parametrize(
    ("entropies", "weights", "words"),
    [
        ((1.0, 2.0, 1.0, 2.0), (1, 1), None),
        ((4.1, 4.1, 1.0, 2.0), (1, 1), "loss 4.1000, ln 64 = 4.1589, information 0.0000 nats: uniform collapse"),
        ((1.0, 2.0, 0.0, 0.0), (1, 1), "patches: loss 2.0000, .*collapse on one prototype"),
        ((1.0, 2.0, 0.0, 0.0), (1, 0), None),
    ],
)
def test_a_collapse_of_either_loss_is_named(entropies: tuple, weights: tuple, words: str | None) -> None:
    args = get_args_parser().parse_args(["--out_dim", "64", "--epochs", "1"])
    fill_in_defaults(args)
    args.image_weight, args.patch_weight = weights
    ibot = bare(IBOTObjective, args=args, mask_recipe=RECIPE)
    names = ("teacher_entropy", "marginal_entropy", "patch_teacher_entropy", "patch_marginal_entropy")
    means = {**dict(zip(names, entropies, strict=True)), "image_loss": 4.1, "patch_loss": 2.0}
    values, warning = ibot.diagnose(0, means, feature_rank=10.0)
    assert values["patch_information"] == entropies[3] - entropies[2]
    assert warning is None if words is None else pytest.importorskip("re").search(words, warning or "")

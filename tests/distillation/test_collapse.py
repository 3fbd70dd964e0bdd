"""Telling learning from collapse: entropies against loops, and the name each collapse is given."""

import math
from typing import Any

import pytest
import torch

from dino_sparo import DINOLoss
from dino_sparo.dino.options import get_args_parser
from dino_sparo.distillation.loss import COLLAPSE_SHARE, diagnose_collapse
from dino_sparo.distillation.objective import may_warn_of_collapse

HEALTHY: dict[str, Any] = {
    "loss": 5.0,
    "teacher_entropy": 2.0,
    "marginal_entropy": 4.0,
    "feature_rank": 30.0,
    "out_dim": 1024,
    "batch_size": 64,
}


def entropy(distribution: list[float]) -> float:
    """-sum_k p ln p in nats, a sum of one term after the other."""
    return -sum(p * math.log(p) for p in distribution if p > 0)


def build(num_crops: int, out_dim: int, temp: float = 0.05) -> DINOLoss:
    return DINOLoss(out_dim, num_crops, temp, temp, warmup_teacher_temp_epochs=0, num_epochs=3).double()


# What is measured.


def test_the_entropies_are_those_of_a_loop() -> None:
    torch.manual_seed(0)
    batch, num_crops, out_dim = 5, 4, 7
    loss = build(num_crops, out_dim)
    loss.center.normal_()
    student = torch.randn(num_crops * batch, out_dim, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(2 * batch, out_dim, dtype=torch.float64)
    probs = loss.teacher_probabilities(teacher, epoch=0)
    assert probs.shape == (2, batch, out_dim)
    value = loss(student, teacher, 0, update_center=False)
    found = loss.diagnose(probs, value)
    rows = [probs[t, b].tolist() for t in range(2) for b in range(batch)]
    expected_entropy = sum(entropy(row) for row in rows) / len(rows)
    marginal = [sum(row[k] for row in rows) / len(rows) for k in range(out_dim)]
    assert found.teacher_entropy.item() == pytest.approx(expected_entropy, rel=1e-12)
    assert found.marginal_entropy.item() == pytest.approx(entropy(marginal), rel=1e-12)
    assert found.kl.item() == pytest.approx(value.item() - expected_entropy, rel=1e-9)
    assert not any(item.requires_grad or item.ndim for item in found)


def test_what_is_measured_carries_no_graph_even_of_probabilities_that_do() -> None:
    probs = torch.full((2, 3, 5), 0.2, dtype=torch.float64, requires_grad=True)
    found = build(2, 5).diagnose(probs, torch.tensor(1.0, dtype=torch.float64, requires_grad=True))
    assert not any(item.requires_grad for item in found)


def test_distributions_that_reach_zero_have_finite_entropies() -> None:
    loss = build(2, 5).float()
    teacher = 1e4 * torch.eye(5)[[0, 1, 0, 1]]
    probs = loss.teacher_probabilities(teacher, 0)
    assert (probs == 0).any()
    found = loss.diagnose(probs, loss(teacher, teacher, 0, update_center=False))
    assert found.teacher_entropy.item() == 0.0
    assert found.marginal_entropy.item() == pytest.approx(math.log(2))


# What it is called.


FLAT, LOW = (1 - COLLAPSE_SHARE) * math.log(1024), COLLAPSE_SHARE * math.log(1024)
ENOUGH = COLLAPSE_SHARE * math.log(8)  # what a batch of 8 can reach is ln 8, less than ln 1024
SIMILAR = {"loss": 6.931, "teacher_entropy": 6.897, "marginal_entropy": 6.930, "batch_size": 16}
UNKNOWN = {"teacher_entropy": math.nan, "marginal_entropy": math.nan}
SAME = "collapse, the teacher gives every image the same distribution (entropy"
DIRECTIONS = "loss 5.0000: dimensional collapse, the encodings of a batch span"
# Case -> how it differs from a healthy run, and what the line says; None: there is no line.
CASES: dict[str, tuple[dict[str, float], str | None]] = {
    "a run that learns": ({}, None),
    # Random logits: nearly flat answers that still differ from image to image.
    "the start of a run": ({"loss": 6.93, "teacher_entropy": 6.0, "marginal_entropy": 6.85}, None),
    "uniform": (
        {
            **{"loss": 11.0903, "teacher_entropy": 11.0903, "marginal_entropy": 11.09035},
            **{"feature_rank": 5.0, "out_dim": 65536},
        },
        "loss 11.0903, ln 65536 = 11.0904, information 0.0001 nats: uniform collapse",
    ),
    "flat up to exactly the share": ({"teacher_entropy": FLAT, "marginal_entropy": FLAT}, f"{SAME} 6.7235)"),
    "a marginal of exactly the share": ({"teacher_entropy": LOW, "marginal_entropy": LOW}, SAME),
    "an information of exactly the share": (
        {"batch_size": 8, "teacher_entropy": 0.0, "marginal_entropy": ENOUGH},
        None,
    ),
    "less information than the share": (
        {"batch_size": 8, "teacher_entropy": 0.0, "marginal_entropy": math.nextafter(ENOUGH, 0)},
        "collapse on one prototype",
    ),
    "a batch of two": ({"batch_size": 2, "teacher_entropy": 3.0, "marginal_entropy": 3.0}, SAME),
    # The bug: a run that ended with a loss of ln 1024 and 0.03 of at most 2.77 nats was not called collapsed.
    "similar images": (SIMILAR, "uniform collapse"),
    "similar images that are told apart": ({**SIMILAR, "teacher_entropy": 6.47, "marginal_entropy": 6.90}, None),
    "one prototype": (
        {"loss": 0.003, "teacher_entropy": 0.001, "marginal_entropy": 0.002},
        "loss 0.0030, ln 1024 = 6.9315, information 0.0010 nats: collapse on one prototype",
    ),
    "one answer, neither flat nor single": ({"teacher_entropy": 3.0, "marginal_entropy": 3.001}, f"{SAME} 3.0000)"),
    "one direction": ({"feature_rank": 1.0}, f"{DIRECTIONS} 1.00 directions"),
    "hardly two directions": ({"feature_rank": 1.9}, f"{DIRECTIONS} 1.90 directions"),
    "two directions": ({"feature_rank": 2.1}, None),
    # Both views of a single image on the same prototype: right, and indistinguishable from a collapse.
    "one image per batch": ({"teacher_entropy": 0.5, "marginal_entropy": 0.5, "batch_size": 1}, None),
    "one image, by rounding": ({"teacher_entropy": 0.5, "marginal_entropy": 0.5 - 1e-7, "batch_size": 1}, None),
    "no diagnostics": (UNKNOWN, None),
    "no diagnostics, one direction": ({**UNKNOWN, "feature_rank": 1.0}, "dimensional collapse"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_collapse_is_named_and_nothing_else_is(case: str) -> None:
    changes, words = CASES[case]
    line = diagnose_collapse(**{**HEALTHY, **changes})
    assert words in line if words and line else line is words


@pytest.mark.parametrize(
    ("case", "remedies"),
    [
        # The bug: on images that resemble one another, none of the remedies that the warning named helps.
        ("similar images", ["train-simdino", "--koleo_weight 1 --use_bn_in_head true --teacher_temp 0.02"]),
        ("one prototype", ["--teacher_temp"]),
        ("one answer, neither flat nor single", ["try"]),
    ],
)
def test_the_line_names_the_remedies_that_helped_best_first(case: str, remedies: list[str]) -> None:
    line = diagnose_collapse(**{**HEALTHY, **CASES[case][0]}) or ""
    assert sorted(remedies, key=line.index) == remedies
    assert "--lr" not in line or case != "similar images"


@pytest.mark.parametrize("batch_size", [2, 64, 4096])
@pytest.mark.parametrize("out_dim", [8, 65536])
def test_the_most_informative_teacher_is_never_called_collapsed(out_dim: int, batch_size: int) -> None:
    # Each image on one prototype with all its mass: the marginal is as broad as batch and prototypes allow.
    marginal = math.log(min(out_dim, batch_size))
    assert (
        diagnose_collapse(
            loss=0.1,
            teacher_entropy=0.0,
            marginal_entropy=marginal,
            feature_rank=2.0,
            out_dim=out_dim,
            batch_size=batch_size,
        )
        is None
    )


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"epochs": 20, "warmup_teacher_temp_epochs": 0}, 2),
        ({"epochs": 20, "warmup_teacher_temp_epochs": 7}, 7),
        ({"epochs": 3, "warmup_teacher_temp_epochs": 0}, 0),
    ],
)
def test_a_collapse_is_named_only_after_the_temperatures_warm_up_and_a_tenth_of_the_run(
    changes: dict[str, int], first: int
) -> None:
    """The bug: the first warning came after twelve steps, when flat answers are normal."""
    args = get_args_parser().parse_args([word for name, value in changes.items() for word in (f"--{name}", str(value))])
    assert [epoch for epoch in range(args.epochs) if may_warn_of_collapse(args, epoch)] == [*range(first, args.epochs)]

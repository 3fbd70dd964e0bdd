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


def test_the_divergence_is_the_mean_over_pairs_of_different_views() -> None:
    torch.manual_seed(1)
    batch, num_crops, out_dim = 3, 5, 11
    loss = build(num_crops, out_dim)
    student = torch.randn(num_crops * batch, out_dim, dtype=torch.float64)
    teacher = torch.randn(2 * batch, out_dim, dtype=torch.float64) / 5
    found = loss.diagnose(loss.teacher_probabilities(teacher, 0), loss(student, teacher, 0))
    terms = []
    for t in range(2):
        for s in set(range(num_crops)) - {t}:
            for b in range(batch):
                target = (teacher[t * batch + b] / 0.05).softmax(0).tolist()
                answer = (student[s * batch + b] / 0.1).softmax(0).tolist()
                terms.append(sum(q * math.log(q / p) for q, p in zip(target, answer, strict=True)))
    assert found.kl.item() == pytest.approx(sum(terms) / len(terms), rel=1e-9)


def test_a_student_that_answers_like_its_teacher_has_no_divergence() -> None:
    out_dim, rows = 7, torch.randn(3, 7, dtype=torch.float64)
    loss = build(2, out_dim)
    teacher = rows.repeat(2, 1)  # both views alike, so that every pair agrees
    student = teacher * (0.1 / 0.05)
    found = loss.diagnose(loss.teacher_probabilities(teacher, 0), loss(student, teacher, 0, update_center=False))
    assert found.kl.item() == pytest.approx(0.0, abs=1e-12)


def test_distributions_that_reach_zero_have_finite_entropies() -> None:
    loss = build(2, 5).float()
    teacher = 1e4 * torch.eye(5)[[0, 1, 0, 1]]
    probs = loss.teacher_probabilities(teacher, 0)
    assert (probs == 0).any()
    found = loss.diagnose(probs, loss(teacher, teacher, 0, update_center=False))
    assert found.teacher_entropy.item() == 0.0
    assert found.marginal_entropy.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("out_dim", [13, 64])
def test_what_is_measured_in_a_collapse_is_diagnosed_as_one(out_dim: int) -> None:
    batch = 6

    def diagnosis(teacher: torch.Tensor, student: torch.Tensor) -> str | None:
        loss = build(2, out_dim)
        value = loss(student, teacher, 0, update_center=False)
        found = loss.diagnose(loss.teacher_probabilities(teacher, 0), value)
        return diagnose_collapse(
            value.item(), found.teacher_entropy.item(), found.marginal_entropy.item(), 9.0, out_dim, batch
        )

    flat = torch.zeros(2 * batch, out_dim, dtype=torch.float64)
    uniform = diagnosis(flat, flat)
    assert uniform is not None
    assert "uniform collapse" in uniform
    one = flat.clone()
    one[:, 3] = 10.0
    single = diagnosis(one, one)
    assert single is not None
    assert "collapse on one prototype" in single
    assignments = torch.eye(out_dim, dtype=torch.float64)[:batch].repeat(2, 1)  # image i to prototype i, in both views
    assert diagnosis(assignments, assignments) is None


# What it is called.


def test_a_run_that_learns_is_left_alone() -> None:
    assert diagnose_collapse(**HEALTHY) is None


def test_a_run_at_its_start_is_left_alone() -> None:
    # Random logits: nearly flat answers that still differ from image to image.
    assert diagnose_collapse(**{**HEALTHY, "loss": 6.93, "teacher_entropy": 6.0, "marginal_entropy": 6.85}) is None


def test_a_uniform_collapse_is_named_with_the_logarithm_of_the_prototypes_and_the_information() -> None:
    line = diagnose_collapse(
        loss=11.0903, teacher_entropy=11.0903, marginal_entropy=11.09035, feature_rank=5.0, out_dim=65536, batch_size=64
    )
    assert line is not None
    assert line.startswith("loss 11.0903, ln 65536 = 11.0904, information 0.0001 nats: uniform collapse")


def test_the_remedies_of_a_uniform_collapse_are_those_that_helped_best_first() -> None:
    """The bug: on images that resemble one another, none of the remedies that the warning named helps."""
    log_k = math.log(1024)
    line = diagnose_collapse(**{**HEALTHY, "loss": log_k, "teacher_entropy": log_k - 0.03, "marginal_entropy": log_k})
    assert line is not None
    words = ("train-simdino", "--koleo_weight 1 --use_bn_in_head true --teacher_temp 0.02")
    assert sorted(words, key=line.index) == [*words]
    assert "--lr" not in line


def test_a_teacher_that_is_flat_up_to_exactly_the_share_is_not_called_uniform() -> None:
    flat = (1 - COLLAPSE_SHARE) * math.log(1024)
    line = diagnose_collapse(**{**HEALTHY, "teacher_entropy": flat, "marginal_entropy": flat})
    assert line is not None
    assert "collapse, the teacher gives every image the same distribution (entropy 6.7235)" in line


def test_a_marginal_of_exactly_the_share_is_not_called_one_prototype() -> None:
    low = COLLAPSE_SHARE * math.log(1024)
    line = diagnose_collapse(**{**HEALTHY, "teacher_entropy": low, "marginal_entropy": low})
    assert line is not None
    assert "the same distribution" in line


def test_an_information_of_exactly_the_share_is_enough() -> None:
    # What a batch of 8 can reach is ln 8, less than ln 1024.
    enough = {**HEALTHY, "batch_size": 8, "teacher_entropy": 0.0, "marginal_entropy": COLLAPSE_SHARE * math.log(8)}
    assert diagnose_collapse(**enough) is None
    line = diagnose_collapse(**{**enough, "marginal_entropy": math.nextafter(enough["marginal_entropy"], 0)})
    assert line is not None
    assert "collapse on one prototype" in line


def test_a_batch_of_two_can_already_tell() -> None:
    line = diagnose_collapse(**{**HEALTHY, "batch_size": 2, "teacher_entropy": 3.0, "marginal_entropy": 3.0})
    assert line is not None
    assert "the same distribution" in line


def test_what_a_collapsed_run_on_similar_images_keeps_is_no_information() -> None:
    """The bug: a run that ended with a loss of ln 1024 and 0.03 of at most 2.77 nats was not called collapsed."""
    ended = {**HEALTHY, "loss": 6.931, "teacher_entropy": 6.897, "marginal_entropy": 6.930, "batch_size": 16}
    assert "uniform collapse" in (diagnose_collapse(**ended) or "")
    assert diagnose_collapse(**{**ended, "teacher_entropy": 6.47, "marginal_entropy": 6.90}) is None


def test_a_collapse_on_one_prototype_is_named() -> None:
    line = diagnose_collapse(**{**HEALTHY, "loss": 0.003, "teacher_entropy": 0.001, "marginal_entropy": 0.002})
    assert line is not None
    assert line.startswith("loss 0.0030, ln 1024 = 6.9315, information 0.0010 nats: collapse on one prototype")
    assert "--teacher_temp" in line


def test_the_same_answer_for_every_image_is_named_even_if_it_is_neither_flat_nor_single() -> None:
    line = diagnose_collapse(**{**HEALTHY, "teacher_entropy": 3.0, "marginal_entropy": 3.001})
    assert line is not None
    assert "every image the same distribution (entropy 3.0000)" in line
    assert "try" in line


@pytest.mark.parametrize(("feature_rank", "collapsed"), [(1.0, True), (1.9, True), (2.1, False), (64.0, False)])
def test_encodings_that_span_one_direction_are_named(feature_rank: float, collapsed: bool) -> None:
    line = diagnose_collapse(**{**HEALTHY, "feature_rank": feature_rank})
    assert (line is not None) == collapsed
    if line is not None:
        assert line.startswith(
            f"loss 5.0000: dimensional collapse, the encodings of a batch span {feature_rank:.2f} directions"
        )


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


def test_one_image_per_batch_tells_nothing_about_the_prototypes() -> None:
    # Both views of a single image on the same prototype: right, and indistinguishable from a collapse.
    for marginal in (0.5, 0.5 - 1e-7):  # below the entropy by rounding alone
        alone = {**HEALTHY, "teacher_entropy": 0.5, "marginal_entropy": marginal, "batch_size": 1}
        assert diagnose_collapse(**alone) is None


def test_a_run_without_diagnostics_is_judged_by_its_features_alone() -> None:
    unknown = {**HEALTHY, "teacher_entropy": math.nan, "marginal_entropy": math.nan}
    assert diagnose_collapse(**unknown) is None
    line = diagnose_collapse(**{**unknown, "feature_rank": 1.0})
    assert line is not None
    assert "dimensional collapse" in line


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

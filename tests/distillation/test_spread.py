"""KoLeo and SimDINO's loss: recorded numbers, all ranks; a run that is evaluated."""

from pathlib import Path

import numpy as np
import pytest
import torch
from reference import record_spread as recorded
from runs import small_options, train_small
from torch.nn import functional as F
from two_ranks import TwoRanks

from dino_sparo import load_checkpoint, load_encoder
from dino_sparo.__main__ import run
from dino_sparo.commands import parse_keywords
from dino_sparo.distillation.koleo import koleo_loss
from dino_sparo.runtime.launch import rank
from dino_sparo.simdino.loss import SimDINOLoss
from dino_sparo.weights.origin import origin_of

NUMBERS = np.load(recorded.FOLDER / "spread.npz")


def simdino_rows() -> tuple[torch.Tensor, torch.Tensor]:
    student = F.normalize(recorded.rows(2, recorded.CROPS * recorded.IMAGES, recorded.WIDTH), dim=-1)
    return student.requires_grad_(), F.normalize(recorded.rows(1, 2 * recorded.IMAGES, recorded.WIDTH), dim=-1)


def test_koleo_and_its_gradient_equal_dinov2s() -> None:
    encodings = recorded.rows(0, *recorded.KOLEO_SIZE).requires_grad_()
    value = koleo_loss(encodings)
    value.backward()
    assert value.item() == pytest.approx(float(NUMBERS["koleo"]), rel=1e-6)
    torch.testing.assert_close(encodings.grad, torch.from_numpy(NUMBERS["koleo/grad"]), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("number", range(len(recorded.SIMDINO_CASES)))
def test_simdinos_terms_and_gradient_equal_the_authors(number: int) -> None:
    eps, coeff, expa_type = recorded.SIMDINO_CASES[number]
    student, teacher = simdino_rows()
    terms = SimDINOLoss(recorded.CROPS, eps, coeff, with_teacher=expa_type == 1)(student, teacher)
    terms.loss.backward()
    assert [term.item() for term in terms] == pytest.approx(NUMBERS[f"simdino{number}"], rel=1e-5)
    torch.testing.assert_close(student.grad, torch.from_numpy(NUMBERS[f"simdino{number}/grad"]), rtol=1e-4, atol=1e-7)


def own_part(whole: torch.Tensor, number: int) -> torch.Tensor:
    """This rank's half of the images of every crop."""
    return whole.unflatten(0, (number, -1)).chunk(2, dim=1)[rank()].flatten(0, 1)


def koleo_on_a_rank() -> tuple[float, torch.Tensor]:
    encodings = recorded.rows(0, 6, 5).requires_grad_()
    value = koleo_loss(own_part(encodings, 1))
    value.backward()
    return value.item(), encodings.grad


def simdino_on_a_rank() -> tuple[float, torch.Tensor]:
    student = F.normalize(recorded.rows(2, 4 * 6, 5), dim=-1).requires_grad_()
    teacher = F.normalize(recorded.rows(1, 2 * 6, 5), dim=-1)
    terms = SimDINOLoss(4)(own_part(student, 4), own_part(teacher, 2))
    terms.loss.backward()
    return terms.expansion.item(), student.grad


def test_koleo_on_two_ranks_is_that_of_the_whole_batch(two_ranks: TwoRanks) -> None:
    values, gradients = zip(*two_ranks(koleo_on_a_rank), strict=True)
    encodings = recorded.rows(0, 6, 5).requires_grad_()
    whole = koleo_loss(encodings)
    whole.backward()
    assert np.mean(values) == pytest.approx(whole.item(), rel=1e-5)
    # DDP takes the mean of the ranks' gradients.
    torch.testing.assert_close(sum(gradients) / 2, encodings.grad, rtol=1e-5, atol=1e-6)


def test_simdino_on_two_ranks_is_that_of_the_whole_batch(two_ranks: TwoRanks) -> None:
    values, gradients = zip(*two_ranks(simdino_on_a_rank), strict=True)
    student = F.normalize(recorded.rows(2, 4 * 6, 5), dim=-1).requires_grad_()
    whole = SimDINOLoss(4)(student, F.normalize(recorded.rows(1, 2 * 6, 5), dim=-1))
    whole.loss.backward()
    assert values == pytest.approx([whole.expansion.item()] * 2, rel=1e-5)
    torch.testing.assert_close(sum(gradients) / 2, student.grad, rtol=1e-4, atol=1e-6)


def test_koleo_without_a_neighbour_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = small_options(tmp_path, batch_size_per_gpu=1, grad_accum_steps=2, koleo_weight=0.1)
    with pytest.raises(SystemExit, match="1"):
        run("train", words)
    assert "--koleo_weight 0.1 with one image per batch, which has no neighbour" in caplog.messages[-1]


def test_a_simdino_checkpoint_is_read_like_one_of_dino(tmp_path: Path) -> None:
    path = train_small("train-simdino", tmp_path, max_steps=1) / "checkpoint.pth"
    assert load_encoder(path).config.readout == "sparo"
    evaluation = ["--pretrained_weights", str(path), "--data_path", "scenes:26:32", "--output_dir", str(tmp_path)]
    run("knn", [*evaluation, "--device", "cpu", "--num_workers", "0"])
    run("export", [str(path), str(tmp_path / "exported")])
    assert origin_of(load_checkpoint(path), path)["objective"] == "SimDINO"


def test_a_precision_of_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--eps: 0: give a positive number"):
        parse_keywords("train-simdino", {"data_path": "scenes", "output_dir": tmp_path, "eps": 0})

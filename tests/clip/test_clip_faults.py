"""Faults while CLIP trains: the loop is the one that DINO has, and ends and goes on as there; see test_faults.py."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("open_clip")

from runs import (
    FAULT,
    PATIENCE,
    Ranks,
    assert_same_run,
    assert_whole_checkpoints,
    options,
    undisturbed,
)
from test_faults import assert_ended, kill_under_torchrun, server

import dino_sparo.image_text.step

__all__ = ["server"]  # a fixture
CLIP = "train-clip"
KILLS, LONG = 9, 8
pytestmark = [pytest.mark.slow, pytest.mark.alone]


@pytest.fixture(scope="session")
def whole_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbs."""
    return undisturbed(tmp_path_factory.mktemp("whole_clip"), CLIP)


def _no_memory_on_rank_1(rank: int) -> None:
    backward, steps = dino_sparo.image_text.step.backward_at_once, 0

    def full(*args: Any) -> tuple[torch.Tensor, Any]:
        nonlocal steps
        steps += 1
        if rank == 1 and steps == 23:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return backward(*args)

    dino_sparo.image_text.step.backward_at_once = full


def test_a_full_memory_ends_the_run_with_what_helps_and_is_not_tried_again(tmp_path: Path) -> None:
    with Ranks(tmp_path, options(tmp_path, CLIP), spoil=_no_memory_on_rank_1, command=CLIP) as ranks:
        ranks.wait_for_save(tmp_path)
        assert_ended(ranks, [FAULT, 1], time.monotonic(), "another process died", PATIENCE)
    assert "memory is full. What helps: halve the batch size" in ranks.log(1)
    assert "(CUDA out of memory. Tried to allocate 2.00 GiB.)" in ranks.log(1)
    assert 0 < assert_whole_checkpoints(tmp_path) <= 22


@pytest.mark.kills
def test_kills_under_torchrun_end_in_the_same_bits(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    long = undisturbed(tmp_path_factory.mktemp("long_clip"), CLIP, epochs=LONG)
    kills = kill_under_torchrun(tmp_path / "run", 3, KILLS, CLIP, num_workers=1, epochs=LONG)
    assert_same_run(long, tmp_path / "run", CLIP)
    assert len(kills) == KILLS

"""How a training begins: what is refused before anything is built."""

from pathlib import Path

import pytest
from runs import PATIENCE, Ranks, options
from two_ranks import TwoRanks

from dino_sparo.runtime import collectives, launch
from dino_sparo.runtime.collectives import require_same_options


def _start(shared: dict[str, object], own: list[dict[str, object]]) -> None:
    require_same_options({**shared, **own[launch.rank()]})


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ([{"lr": 0.1}, {"lr": 0.2}], "--lr is 0.1 on rank 0 and 0.2 on rank 1"),
        ([{"precision": "bf16"}, {"precision": "fp32"}], "--precision is bf16 on rank 0 and fp32 on rank 1"),
        ([{}, {"new": 3}], "--new is None on rank 0 and 3 on rank 1"),
        ([{"crops": [0.4, 1.0]}, {"crops": [0.4, 0.9]}], r"--crops is [0.4, 1.0] on rank 0 and [0.4, 0.9] on rank 1"),
    ],
)
def test_ranks_with_different_options_are_refused(
    two_ranks: TwoRanks, own: list[dict[str, object]], message: str
) -> None:
    """The bug: they trained together."""
    errors = two_ranks.errors(_start, {"seed": 0}, own)
    assert errors[0] == errors[1]
    assert errors[0].startswith(f"UserError: {message}; start all processes with the same options")


def test_ranks_may_have_their_own_device_and_number(two_ranks: TwoRanks) -> None:
    own = [{"device": "cuda:0", "local_rank": 0}, {"device": "cuda:1", "local_rank": 1}]
    assert two_ranks.errors(_start, {"seed": 0}, own) == ["", ""]


def _start_with_versions() -> None:
    before = collectives.__version__
    collectives.__version__ = f"0.{launch.rank()}"
    try:
        require_same_options({})
    finally:
        collectives.__version__ = before


def test_ranks_with_different_versions_are_refused(two_ranks: TwoRanks) -> None:
    assert all(
        "dino_sparo is 0.0 on rank 0 and 0.1 on rank 1" in text for text in two_ranks.errors(_start_with_versions)
    )


@pytest.mark.slow
def test_a_run_whose_ranks_have_different_options_ends_before_anything_is_built(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Ranks(tmp_path, [options(folder, freeze_last_layer=value) for value in (1, 2)]) as ranks:
        assert ranks.wait(PATIENCE) == [1, 1]
        for rank in range(2):
            assert "--freeze_last_layer is 1 on rank 0 and 2 on rank 1" in ranks.log(rank)
            assert "Traceback" not in ranks.log(rank)
    assert not folder.exists()

"""What two ranks tell each other: objects and errors."""

import time
from pathlib import Path

from two_ranks import TwoRanks

from dino_sparo.runtime.collectives import (
    all_gather_object,
    all_or_none,
    barrier,
    broadcast_object,
    on_rank_0,
    rank_0_first,
    require_same,
)
from dino_sparo.runtime.launch import is_main, rank, world_size


def _objects() -> list[object]:
    barrier()
    own = {"rank": rank(), "size": world_size(), "main": is_main()}
    return [all_gather_object(own), broadcast_object(own)]


def test_objects_are_gathered_in_rank_order_and_broadcast_from_rank_0(two_ranks: TwoRanks) -> None:
    both = [{"rank": 0, "size": 2, "main": True}, {"rank": 1, "size": 2, "main": False}]
    assert two_ranks(_objects) == [[both, both[0]]] * 2


def _fail(failing: int) -> None:
    with all_or_none("opening the images"):
        if rank() == failing:
            raise ValueError("no such folder")


def test_an_error_of_one_rank_ends_both(two_ranks: TwoRanks) -> None:
    for failing in (0, 1):
        messages = two_ranks.errors(_fail, failing)
        assert messages[failing] == "ValueError: no such folder"
        other = f"opening the images failed on 1 of 2 processes; rank {failing}: no such folder"
        assert messages[1 - failing] == f"PeerError: {other}"
    assert two_ranks.errors(_fail, 2) == ["", ""]


def _write(path: str, fails: bool) -> str:
    with rank_0_first("indexing"):
        if is_main():
            if fails:
                raise OSError("disk is full")
            time.sleep(0.1)
            Path(path).write_text("index")
        return Path(path).read_text()


def test_the_others_begin_when_rank_0_is_done_and_not_at_all_if_it_fails(two_ranks: TwoRanks, tmp_path: Path) -> None:
    assert two_ranks(_write, str(tmp_path / "index"), False) == ["index"] * 2
    first, second = two_ranks.errors(_write, str(tmp_path / "other"), True)
    assert first == "OSError: disk is full"
    assert second == "PeerError: indexing failed on rank 0: disk is full"


def _save(fails: bool) -> None:
    def save() -> None:
        assert is_main()
        if fails:
            raise ValueError("no space")

    on_rank_0(save, "saving")


def test_what_rank_0_alone_does_fails_on_both(two_ranks: TwoRanks) -> None:
    assert two_ranks.errors(_save, False) == ["", ""]
    assert two_ranks.errors(_save, True)[1] == "PeerError: saving failed on 1 of 2 processes; rank 0: no space"


def _require(values: list[int | str]) -> None:
    require_same(values[rank()], "the images")


def test_values_that_differ_are_named_on_both_ranks(two_ranks: TwoRanks) -> None:
    assert two_ranks.errors(_require, [5, 5]) == ["", ""]
    message = "UserError: the processes disagree on the images: [5, 7], by rank; do they read the same folder?"
    assert two_ranks.errors(_require, [5, 7]) == [message] * 2

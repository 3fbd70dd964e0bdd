"""How a training begins: what is refused before anything is built."""

from pathlib import Path

import pytest
from runs import PATIENCE, Ranks, options
from two_ranks import TwoRanks

from dino_sparo.__main__ import run as run_command
from dino_sparo.runtime import collectives, launch
from dino_sparo.runtime.collectives import require_same_options

COMMANDS = ("train", "train-clip", "train-oc-clip")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("words", "missing"),
    [
        ([], "give --data_path and --output_dir."),
        (["--data_path", "scenes"], "give --output_dir."),
        (["--output_dir", "runs"], "give --data_path."),
    ],
)
def test_a_training_without_data_or_folder_is_refused_and_told_how_to_try(
    command: str,
    words: list[str],
    missing: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The bug: it trained on the built-in scenes, in the working directory."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        run_command(command, words)
    assert stopped.value.code == 1
    assert missing in caplog.text
    assert "`--data_path scenes`" in caplog.text
    assert "`dino-sparo demo`" in caplog.text
    assert list(tmp_path.iterdir()) == []


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
@pytest.mark.parametrize(
    ("command", "name", "values"),
    [("train", "freeze_last_layer", (1, 2)), ("train-clip", "seed", (0, 1)), ("train-oc-clip", "max_nodes", (5, 6))],
)
def test_a_run_whose_ranks_have_different_options_ends_before_anything_is_built(
    tmp_path: Path, command: str, name: str, values: tuple[int, int]
) -> None:
    folder = tmp_path / "run"
    words = [options(folder, command, **{name: value}) for value in values]
    with Ranks(tmp_path, words, command=command) as ranks:
        assert ranks.wait(PATIENCE) == [1, 1]
        for rank in range(2):
            assert f"--{name} is {values[0]} on rank 0 and {values[1]} on rank 1" in ranks.log(rank)
            assert "Traceback" not in ranks.log(rank)
    assert not folder.exists()

"""Full memory ends a command with what helps."""

import argparse
from unittest import mock

import pytest

from dino_sparo import __main__ as commands
from dino_sparo.clip.options import get_args_parser as clip_parser
from dino_sparo.dino.options import get_args_parser as dino_parser
from dino_sparo.evaluation.options import knn_parser
from dino_sparo.runtime.faults import FaultError, MemoryFullError, explain_full_memory, is_memory_full


@pytest.mark.parametrize(
    ("parser", "helps", "helps_not"),
    [
        (dino_parser, ("--grad_accum_steps", "--grad_checkpointing", "DINO's --loss_chunk"), "--use_cuda"),
        (clip_parser, ("--grad_accum_steps", "--grad_checkpointing"), "--use_cuda"),
        (knn_parser, ("smaller batches", "--use_cuda false"), "--grad_accum_steps"),
    ],
)
def test_full_memory_is_answered_by_what_helps_trainings_or_evaluations(
    parser: mock.Mock, helps: tuple[str, ...], helps_not: str
) -> None:
    """The bugs: `--loss_chunk` was never named; evaluations ended with a traceback."""
    options = {action.dest: True for action in parser()._actions}
    message = r"^memory is full\. What helps: .*Tried to allocate"
    # Twice, as in a command and in its trainer.
    with (
        pytest.raises(MemoryFullError, match=message) as raised,
        explain_full_memory(options),
        explain_full_memory(options),
    ):
        raise RuntimeError("CUDA out of memory.\nTried to allocate 2.00 GiB.")
    assert all(word in str(raised.value) for word in helps)
    assert helps_not not in str(raised.value)
    assert str(raised.value).count("memory is full") == 1


@pytest.mark.parametrize(
    "error", [RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."), MemoryError()]
)
def test_the_hosts_memory_may_be_full_too(error: Exception) -> None:
    with pytest.raises(MemoryFullError, match="smaller batches"), explain_full_memory({}):
        raise error


def test_a_loading_process_without_memory_is_a_fault_so_that_the_job_is_requeued() -> None:
    with pytest.raises(FaultError, match="worker"), explain_full_memory({"grad_accum_steps": 1}):
        raise FaultError("a worker died: can't allocate memory")


@pytest.mark.parametrize("text", ["CUBLAS_STATUS_ALLOC_FAILED when calling", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"])
def test_libraries_say_full_memory_in_their_own_words(text: str) -> None:
    assert is_memory_full(RuntimeError(text))
    assert not is_memory_full(RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED"))


def test_an_evaluation_ends_with_one_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def full(_: argparse.Namespace) -> None:
        raise RuntimeError("CUDA out of memory.")

    monkeypatch.setattr("dino_sparo.evaluation.knn.evaluate_checkpoint", full)
    with pytest.raises(SystemExit) as left:
        commands.run("knn", [])
    assert left.value.code == 1
    assert "memory is full. What helps: smaller batches" in caplog.text

"""The end of a command after an error: one line or a traceback on the terminal, the exit status, run.log."""

import errno
import logging
from pathlib import Path

import numpy as np
import pytest

from dino_sparo.runtime import faults
from dino_sparo.runtime.exits import errors_in_one_line
from dino_sparo.runtime.faults import BUG_STATUS, FaultError, MissingPackageError, UserError, is_passing, retry
from dino_sparo.runtime.logs import setup_logging
from dino_sparo.weights.file import CheckpointError


def fail_with(error: Exception) -> None:
    raise error


def fail_in_numpy() -> None:
    np.zeros(3) + np.zeros(5)


def terminal_and_log(folder: Path, capfd: pytest.CaptureFixture[str], error: Exception | None) -> tuple[int, str, str]:
    """Exit status, the terminal's lines and run.log of a command that ends by an error; None: numpy's."""
    setup_logging(folder)
    with pytest.raises(SystemExit) as ended, errors_in_one_line(logging.getLogger("test")):
        fail_in_numpy() if error is None else fail_with(error)
    return int(str(ended.value.code)), capfd.readouterr().err, (folder / "run.log").read_text()


@pytest.mark.parametrize(
    "error",
    [
        UserError("--lr -1: give 0 or more"),
        CheckpointError("a.pth is damaged"),
        MissingPackageError("install it"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "images.csv"),
        PermissionError(errno.EACCES, "Permission denied", "images"),
    ],
)
def test_a_mistake_of_the_user_is_one_line_and_run_log_has_the_traceback(
    error: Exception, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, terminal, log = terminal_and_log(tmp_path, capfd, error)
    assert status == 1
    assert terminal.count("\n") == 1
    assert str(error) in terminal
    assert "in fail_with" in log


@pytest.mark.parametrize("error", [None, ValueError("x"), KeyError("x"), OSError("x"), FileNotFoundError("x")])
def test_any_other_error_is_a_bug_whose_traceback_is_shown(
    error: Exception | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The bug: a numpy error in a loss was one line without file or function, as a mistake of the user is."""
    status, terminal, log = terminal_and_log(tmp_path, capfd, error)
    assert status == BUG_STATUS
    for text in (terminal, log):
        assert f"in fail_{'in_numpy' if error is None else 'with'}" in text
        assert "This is a bug of dino_sparo" in text


def hidden(error: OSError) -> RuntimeError:
    """An error as torch.save raises it."""
    try:
        try:
            raise error
        finally:
            raise RuntimeError("unexpected pos")
    except RuntimeError as raised:
        return raised


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN])
def test_a_file_system_that_is_away_is_tried_again_and_then_a_fault(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(faults.time, "sleep", waited.append)
    errors = [hidden(OSError(number, "away")), OSError(number, "away")]
    assert retry(lambda: fail_with(errors.pop()) if errors else 7) == 7
    with pytest.raises(FaultError, match=r"away. Run the same command to resume"):
        retry(lambda: fail_with(OSError(number, "away")))
    assert waited == [1.0, 5.0] * 2
    assert not is_passing(OSError(errno.ENOSPC, "full"))

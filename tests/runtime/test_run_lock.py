"""One run per output folder: who is refused, who takes over, and what is not mistaken for a holder that is gone."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import main_dino
from dino_sparo.runtime import lock as run_lock
from dino_sparo.runtime.lock import OutputDirError, RunLock, this_process

# Takes the lock, forks a process that lives on, as those that load images do for some seconds, and says so.
HOLDER = """
import os, sys, time
from dino_sparo.runtime.lock import RunLock
with RunLock(sys.argv[1]) as lock:
    lock.acquire()
    child = os.fork()
    if child:
        print(child, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """A process that holds the lock of `run`, and has a child."""
    words = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        yield process
        process.kill()
        os.kill(child, signal.SIGKILL)


def assert_taken_over(folder: Path) -> None:
    with RunLock(folder) as lock:
        lock.acquire()
        assert json.loads((folder / "run.lock").read_text())["pid"] == os.getpid()
    assert not list(folder.iterdir()), "the lock is given back"


def test_a_second_run_in_an_output_dir_is_refused_with_one_line_and_changes_nothing(tmp_path: Path) -> None:
    args = main_dino.get_args_parser().parse_args(["--data_path", "scenes", "--output_dir", str(tmp_path / "run")])
    with RunLock(tmp_path / "run") as lock:
        lock.acquire()
        with pytest.raises(OutputDirError) as caught:
            main_dino.train_dino(args)
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]
    expected = (
        rf"--output_dir .*run is in use by another run \(process {os.getpid()} on \S+, since 20.*\); give another"
    )
    assert re.match(expected, str(caught.value)), caught.value
    assert str(caught.value).endswith(f"or end that run first (kill {os.getpid()})")
    assert "\n" not in str(caught.value)


def test_an_output_dir_that_is_a_file_is_called_so_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a note")
    parser = main_dino.get_args_parser()
    with pytest.raises(OutputDirError, match=r"--output_dir .*run is a file; give the path of a folder, or remove"):
        main_dino.train_dino(parser.parse_args(["--data_path", "scenes", "--output_dir", str(tmp_path / "run")]))
    assert (tmp_path / "run").read_text() == "a note"
    with pytest.raises(OutputDirError, match=r"run/deep cannot be created \(.*Not a directory.*\); choose another"):
        main_dino.train_dino(
            parser.parse_args(["--data_path", "scenes", "--output_dir", str(tmp_path / "run" / "deep")])
        )


@pytest.mark.slow
def test_the_lock_of_a_process_that_was_killed_is_taken_over_at_once_though_its_workers_live(
    tmp_path: Path, holder: subprocess.Popen
) -> None:
    with RunLock(tmp_path / "run") as lock, pytest.raises(OutputDirError, match=rf"process {holder.pid} on .*kill"):
        lock.acquire()
    holder.kill()
    holder.wait()
    assert_taken_over(tmp_path / "run")


@pytest.mark.parametrize(("attempt", "is_taken_over"), [(1, True), (2, False)])
def test_a_requeued_job_takes_over_from_its_earlier_attempt_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt: int, is_taken_over: bool
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    (tmp_path / "run.lock").write_text(json.dumps({**this_process(), "attempt": attempt}))
    with (tmp_path / "run.lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        if is_taken_over:
            assert_taken_over(tmp_path)
        else:
            with RunLock(tmp_path) as lock, pytest.raises(OutputDirError, match=r"Slurm job 123.*\(scancel 123\)"):
                lock.acquire()


def test_a_lock_file_that_nobody_holds_is_taken_over(tmp_path: Path) -> None:
    for content in ("", "{", json.dumps({**this_process(), "pid": 1})):
        (tmp_path / "run.lock").write_text(content)
        assert_taken_over(tmp_path)


def test_a_disk_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(run_lock.fcntl, "flock", no_locks)
    assert_taken_over(tmp_path)
    assert "cannot be locked" in caplog.text


def test_a_lock_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full_disk)
    with RunLock(tmp_path / "run") as lock, pytest.raises(OutputDirError, match=r"cannot be written \(.*No space left"):
        lock.acquire()

"""One run per output folder: who is refused, who takes over, and what is not mistaken for a holder that is gone."""

import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import main_dino
from dino_sparo.clip import train as clip
from dino_sparo.runtime import lock as run_lock
from dino_sparo.runtime.lock import Holder, OutputDirError, RunLock


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "REFRESH_S", 0.05)
    monkeypatch.setattr(run_lock, "PATIENCE_S", 0.5)
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen]:
    """A process that does nothing."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def write_lock(folder: Path, holder: Holder) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "run.lock").write_text(json.dumps(asdict(holder)))
    return folder / "run.lock"


def holder_of(process: subprocess.Popen) -> Holder:
    """The lock that a process on this machine would have written."""
    return replace(Holder.this_process(), pid=process.pid, started=run_lock._start_of(process.pid))


def elsewhere(**changes: object) -> Holder:
    """A process on another machine."""
    return replace(Holder.this_process(), host="node17", machine="another boot", **changes)


def assert_taken_over(folder: Path) -> None:
    with RunLock(folder) as lock:
        lock.acquire()
        assert json.loads((folder / "run.lock").read_text())["token"] == lock.me.token
    assert not list(folder.iterdir()), "the lock is given back"


def assert_refused(folder: Path, message: str) -> None:
    before = (folder / "run.lock").read_text()
    with RunLock(folder) as lock, pytest.raises(OutputDirError, match=message):
        lock.acquire()
    assert (folder / "run.lock").read_text() == before


@pytest.mark.parametrize("trainer", [main_dino.train_dino, clip.train], ids=["dino", "clip"])
def test_a_second_run_in_an_output_dir_is_refused_with_one_line_and_changes_nothing(
    tmp_path: Path, trainer: object
) -> None:
    parser = main_dino.get_args_parser() if trainer is main_dino.train_dino else clip.get_args_parser()
    args = parser.parse_args(["--data_path", "scenes", "--output_dir", str(tmp_path / "run")])
    with RunLock(tmp_path / "run") as lock:
        lock.acquire()
        with pytest.raises(OutputDirError) as caught:
            trainer(args)
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]
    expected = (
        rf"--output_dir .*run is in use by another run \(process {os.getpid()} on \S+, since 20.*\); give another"
    )
    assert re.match(expected, str(caught.value)), caught.value
    assert str(caught.value).endswith(f"or end that run first (kill {os.getpid()})")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("trainer", [main_dino.train_dino, clip.train], ids=["dino", "clip"])
def test_an_output_dir_that_is_a_file_is_called_so_with_a_remedy(tmp_path: Path, trainer: object) -> None:
    (tmp_path / "run").write_text("a note")
    parser = main_dino.get_args_parser() if trainer is main_dino.train_dino else clip.get_args_parser()
    with pytest.raises(OutputDirError, match=r"--output_dir .*run is a file; give the path of a folder, or remove"):
        trainer(parser.parse_args(["--data_path", "scenes", "--output_dir", str(tmp_path / "run")]))
    assert (tmp_path / "run").read_text() == "a note"
    with pytest.raises(OutputDirError, match=r"run/deep cannot be created \(.*Not a directory.*\); choose another"):
        trainer(parser.parse_args(["--data_path", "scenes", "--output_dir", str(tmp_path / "run" / "deep")]))


# Holders on this machine.


def test_the_lock_of_a_process_that_was_killed_is_taken_over_at_once(
    tmp_path: Path, sleeper: subprocess.Popen, caplog: pytest.LogCaptureFixture
) -> None:
    write_lock(tmp_path / "run", holder_of(sleeper))
    assert_refused(tmp_path / "run", rf"in use by another run \(process {sleeper.pid} on .*kill {sleeper.pid}\)")
    sleeper.kill()
    begin = time.monotonic()
    while run_lock._start_of(sleeper.pid) and time.monotonic() - begin < 10:
        time.sleep(0.01)
    assert sleeper.returncode is None, "nobody has waited for it: it is a zombie"
    assert_taken_over(tmp_path / "run")
    assert f"process {sleeper.pid} on" in caplog.text
    sleeper.wait()
    write_lock(tmp_path / "run", replace(Holder.this_process(), pid=sleeper.pid, started="17"))
    assert_taken_over(tmp_path / "run")


def test_another_process_with_the_holders_number_is_not_the_holder(tmp_path: Path, sleeper: subprocess.Popen) -> None:
    write_lock(tmp_path / "run", replace(holder_of(sleeper), started="17"))
    assert_taken_over(tmp_path / "run")


def test_after_a_restart_of_the_machine_a_number_says_nothing(tmp_path: Path, sleeper: subprocess.Popen) -> None:
    write_lock(tmp_path / "run", replace(holder_of(sleeper), machine="an earlier boot"))
    assert_taken_over(tmp_path / "run")


# Holders elsewhere.


class Refreshing:
    """A holder on another machine, whose clock goes wrong by some hours."""

    def __init__(self, path: Path, hours: float) -> None:
        self.path, self.hours, self.over = path, hours, threading.Event()

    def __enter__(self) -> None:
        self.thread = threading.Thread(target=self._refresh)
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def _refresh(self) -> None:
        while not self.over.wait(0.05):
            now = time.time() + 3600 * self.hours
            os.utime(self.path, (now, now))


@pytest.mark.parametrize("hours", [-5.0, 0.0, 5.0])
def test_a_holder_on_another_machine_is_seen_to_live_whatever_its_clock_says(tmp_path: Path, hours: float) -> None:
    path = write_lock(tmp_path / "run", elsewhere(pid=os.getpid(), job="123"))
    with Refreshing(path, hours):
        assert_refused(tmp_path / "run", r"\(process \d+ on node17, Slurm job 123, since .*\(scancel 123\)")


@pytest.mark.parametrize("hours", [-5.0, 0.0, 5.0])
def test_a_holder_on_another_machine_that_gives_no_sign_of_life_is_gone(tmp_path: Path, hours: float) -> None:
    path = write_lock(tmp_path / "run", elsewhere(pid=os.getpid()))
    now = time.time() + 3600 * hours
    os.utime(path, (now, now))
    begin = time.monotonic()
    assert_taken_over(tmp_path / "run")
    assert time.monotonic() - begin >= run_lock.PATIENCE_S


def test_a_requeued_job_takes_over_from_its_earlier_attempt_at_once_though_it_ran_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    monkeypatch.setattr(run_lock, "PATIENCE_S", 600.0)
    write_lock(tmp_path / "run", elsewhere(job="123", attempt=1))
    assert_taken_over(tmp_path / "run")


@pytest.mark.parametrize(("job", "attempt"), [("123", 2), ("124", 1)])
def test_a_second_step_of_a_job_and_another_job_are_other_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, attempt: int
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    path = write_lock(tmp_path / "run", elsewhere(job=job, attempt=attempt))
    with Refreshing(path, 0.0):
        assert_refused(tmp_path / "run", rf"Slurm job {job}")


# The life of a lock.


def test_of_many_that_find_an_abandoned_lock_one_gets_it(tmp_path: Path) -> None:
    for number in range(20):
        folder = tmp_path / str(number)
        write_lock(folder, replace(Holder.this_process(), started="17"))
        locks, barrier, refused = [RunLock(folder) for _ in range(6)], threading.Barrier(6), []

        def acquire(lock: RunLock, barrier: threading.Barrier = barrier, refused: list = refused) -> None:
            barrier.wait()
            try:
                lock.acquire()
            except OutputDirError as error:
                refused.append(error)

        threads = [threading.Thread(target=acquire, args=(lock,)) for lock in locks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ([lock.is_held for lock in locks].count(True), len(refused)) == (1, 5)
        for lock in locks:
            lock.__exit__(None, None, None)
        assert not list(folder.iterdir())


def test_a_lock_whose_writer_died_while_it_wrote_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.lock").write_text("")
    assert_taken_over(tmp_path / "run")


def test_a_lock_is_refreshed_and_comes_back_when_somebody_removes_it(tmp_path: Path) -> None:
    with RunLock(tmp_path / "run") as lock:
        lock.acquire()
        os.utime(lock.path, (0, 0))
        wait_for(lambda: lock.path.stat().st_mtime > 0)
        lock.path.unlink()
        wait_for(lock.path.is_file)
    assert not lock.path.exists()


def test_a_removed_lock_that_cannot_be_written_again_at_once_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug: on a full disk the run ended as if another one had taken over, without saving."""
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    with RunLock(tmp_path / "run") as lock:
        lock.acquire()
        create, tries = lock._create, iter([OSError(28, "No space left on device"), None])

        def full_at_first() -> bool:
            if error := next(tries, None):
                raise error
            return create()

        monkeypatch.setattr(lock, "_create", full_at_first)
        lock.path.unlink()
        wait_for(lock.path.is_file)
    assert statuses == []


def test_a_run_whose_lock_was_taken_over_ends_and_leaves_the_lock_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was suspended for an hour; somebody else writes there now."""
    statuses: list[int] = []
    monkeypatch.setattr(run_lock.logging, "shutdown", lambda: None)
    with RunLock(tmp_path / "run") as lock:
        monkeypatch.setattr(os, "_exit", lambda status: (statuses.append(status), lock.over.set()))
        lock.acquire()
        write_lock(tmp_path / "run", elsewhere())
        wait_for(lambda: statuses)
    assert statuses == [1]
    assert "another run has taken over --output_dir" in caplog.text
    assert (tmp_path / "run" / "run.lock").is_file()


def test_a_lock_that_cannot_be_written_leaves_none_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full_disk)
    with RunLock(tmp_path / "run") as lock, pytest.raises(OutputDirError, match=r"cannot be written \(.*No space left"):
        lock.acquire()
    assert not list((tmp_path / "run").iterdir())


def wait_for(condition: object) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)

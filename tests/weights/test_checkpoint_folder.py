"""Saving, call by call: what lies in the folder when any one of them fails, or is the last before the process dies."""

import builtins
import errno
import io
import os
import re
import shutil
import signal
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import pytest
import torch

from dino_sparo.runtime import faults
from dino_sparo.runtime.faults import FaultError
from dino_sparo.training import resume
from dino_sparo.weights.checkpoint import load_checkpoint
from dino_sparo.weights.file import CheckpointError, contents_checksum, verify_checkpoint
from dino_sparo.weights.folder import CheckpointFolder

KEEP = 3
NAMES = ("checkpoint.pth", "checkpoint_previous1.pth", "checkpoint_previous2.pth")
# Functions of `os` that touch no file.
PURE = {"fspath", "fsencode", "fsdecode", "getpid", "getppid", "urandom", "register_at_fork", "cpu_count", "_exit"}


def content(step: int) -> dict[str, Any]:
    """A checkpoint of a few times the size of a file's buffer."""
    return {"step": step, "student": {name: torch.full((1500,), float(step)) for name in "abcdefgh"}}


def filled(folder: Path, saves: int = KEEP) -> CheckpointFolder:
    """A folder with the checkpoints of steps 1, 2, ..., the last of them the newest."""
    folder.mkdir(parents=True)
    checkpoints = CheckpointFolder(folder, KEEP)
    for step in range(1, saves + 1):
        checkpoints.save(content(step), ["checkpoint_best.pth"] if step == 1 else [])
    return checkpoints


def steps_in(folder: Path) -> list[int]:
    """The steps of the checkpoints that a run may go on from, the newest first; all of them are whole."""
    for name in NAMES:
        verify_checkpoint(folder / name)
    return [load_checkpoint(folder / name)["step"] for name in NAMES]


def bytes_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_of_more_checkpoints_than_are_kept_the_newest_is_found(tmp_path: Path) -> None:
    """The bug: as text previous10 comes before previous4, so a run lost the steps between them."""
    folder = filled(tmp_path / "run").folder
    for number in (10, 4):
        shutil.copy(folder / NAMES[0], folder / f"checkpoint_previous{number}.pth")
    for name in NAMES:
        (folder / name).write_bytes(b"damaged")
    assert CheckpointFolder(folder, KEEP).find() == folder / "checkpoint_previous4.pth"


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew(tmp_path: Path) -> None:
    folder = filled(tmp_path / "run").folder
    for name in NAMES:
        (folder / name).write_bytes(b"damaged")
    before, each = bytes_in(folder), " is .*".join(map(re.escape, NAMES))
    with pytest.raises(CheckpointError, match=f"{each} is .*; none is left to resume from. Choose another --output"):
        CheckpointFolder(folder, KEEP).find()
    assert bytes_in(folder) == before


class Died(BaseException):
    """Raised in place of the end of the process."""


class Calls:
    """Counts every call that touches a file, whoever makes it, and spoils one of them.

    All functions of `os` are replaced, and files are opened on raw files of ours, so that each write and each read that
    reaches the system counts: a call that is added to saving is spoiled like the others without being named here.

    Args:
        number: of the call to be spoiled, from 0; None to count only.
        spoil: called in its place, with this object.
    """

    def __init__(self, number: int | None = None, spoil: Callable[["Calls"], None] = lambda _: None) -> None:
        self.number, self.spoil = number, spoil
        self.names: list[str] = []
        self.is_dead = False

    def __call__(self, name: str) -> None:
        if self.is_dead:  # no process, no calls: what a dead process would still clean up stays
            raise Died(name)
        self.names.append(name)
        if len(self.names) - 1 == self.number:
            self.spoil(self)

    def die(self) -> None:
        """The process is killed before this call."""
        self.is_dead = True
        raise Died

    def __enter__(self) -> "Calls":
        self.patch = pytest.MonkeyPatch()
        for name, function in vars(os).copy().items():
            if isinstance(function, BuiltinFunctionType) and name not in PURE:
                self.patch.setattr(os, name, self._counted(name, function))
        opened = self._opener(io.open)
        self.patch.setattr(builtins, "open", opened)
        self.patch.setattr(io, "open", opened)
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.undo()

    def _counted(self, name: str, function: Callable) -> Callable:
        def counted(*args: Any, **named: Any) -> Any:
            self(name)
            return function(*args, **named)

        return counted

    def _opener(self, original: Callable) -> Callable:
        calls = self

        class Raw(io.FileIO):
            def write(self, data: Any) -> int:
                if calls.is_dead:
                    return len(data)
                calls("write")
                return super().write(data) or 0

            def readinto(self, buffer: Any) -> int:
                calls("read")
                return super().readinto(buffer) or 0

        def opened(path: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
            if "b" not in mode or isinstance(path, int):
                return original(path, mode, *args, **named)
            calls("open")
            raw = Raw(os.fspath(path), mode.replace("b", ""))
            return io.BufferedReader(raw) if mode == "rb" else io.BufferedWriter(raw)

        return opened


def calls_of_a_save(folder: Path) -> Iterator[tuple[int, str, CheckpointFolder]]:
    """The calls that a save into a full folder makes, by number and name, and such a folder for each of them."""
    filled(folder / "full")
    shutil.copytree(folder / "full", folder / "count")
    with Calls() as calls:
        CheckpointFolder(folder / "count", KEEP).save(content(4), ["checkpoint_best.pth"])
    for number, name in enumerate(calls.names):
        shutil.copytree(folder / "full", folder / f"{number}")
        yield number, name, CheckpointFolder(folder / f"{number}", KEEP)


def fail(number: int) -> Callable[..., None]:
    def raise_error(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return raise_error


def error_of_a_save(checkpoints: CheckpointFolder, index: int, number: int) -> str | None:
    """What is said of a save whose call `index` fails; None if it went well all the same."""
    try:
        with Calls(index, fail(number)):
            checkpoints.save(content(4), ["checkpoint_best.pth"])
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["no space", "input/output error"])
def test_a_save_that_fails_at_any_call_changes_nothing_and_is_repeated_without_loss(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk stays full; an input/output error may pass, so the save is tried again."""
    monkeypatch.setattr(faults.time, "sleep", lambda seconds: None)
    failed = []
    for index, name, checkpoints in calls_of_a_save(tmp_path):
        folder = checkpoints.folder
        before = bytes_in(folder)
        for _ in range(2):
            error = error_of_a_save(checkpoints, index, number)
            if error is None:  # what fails once the new file has its name ends no run, and a link may be a copy
                break
            # zipfile has words of its own for what it cannot read back.
            assert os.strerror(number) in error or name == "read", error
            assert "the previous checkpoint is kept" in error
            assert bytes_in(folder) == before, name
            failed.append(name)
        assert len(set(steps_in(folder))) == KEEP, name
        checkpoints.save(content(5))
        assert steps_in(folder)[0] == 5
        assert len(set(steps_in(folder))) == KEEP, name
        assert not list(folder.glob(".*")), "a temporary file is left"
    expected = {"open", "write", "fsync", "read", "replace", "unlink"} if number == errno.ENOSPC else set()
    assert expected <= set(failed)
    assert bool(expected) == bool(failed), failed


@pytest.mark.slow
def test_after_any_call_a_dead_process_leaves_three_different_checkpoints_however_often(tmp_path: Path) -> None:
    for index, name, checkpoints in calls_of_a_save(tmp_path):
        folder = checkpoints.folder
        for step in (4, 5):
            newest = steps_in(folder)[0]
            with Calls(index, Calls.die), pytest.raises(Died):
                checkpoints.save(content(step), ["checkpoint_best.pth"])
            steps = steps_in(folder)
            assert steps[0] in (newest, step), name
            assert steps == sorted(set(steps), reverse=True), name
            verify_checkpoint(folder / "checkpoint_best.pth")
        (folder / "checkpoint.pth").write_bytes(b"damaged")
        assert checkpoints.find() == folder / NAMES[1], "there is something to go on from"
        checkpoints.save(content(9))
        assert not list(folder.glob(".*")), "a temporary file is left"


def test_a_file_that_is_not_what_was_written_takes_no_checkpoints_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that takes all bytes and keeps others."""
    checkpoints, save = filled(tmp_path / "run"), torch.save
    before = bytes_in(checkpoints.folder)

    def save_badly(value: Any, file: io.BufferedWriter) -> None:
        buffer = io.BytesIO()
        save(value, buffer)
        data = bytearray(buffer.getvalue())
        data[len(data) // 2] ^= 16
        file.write(data)

    monkeypatch.setattr(torch, "save", save_badly)
    with pytest.raises(
        CheckpointError, match=r"could not write .*the checksum of its part .* is wrong.*previous checkpoint is kept"
    ):
        checkpoints.save(content(4))
    assert bytes_in(checkpoints.folder) == before


def test_a_file_server_that_is_away_costs_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: the newest checkpoint was set aside as damaged, and the run went on from the one before."""
    checkpoints = filled(tmp_path / "run")
    before = bytes_in(tmp_path / "run")

    def stale(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(zipfile.ZipFile, "testzip", stale)
        patch.setattr(faults.time, "sleep", lambda seconds: None)
        with pytest.raises(FaultError, match=r"Stale file handle.*Run the same command to resume"):
            checkpoints.find()
        with pytest.raises(FaultError, match=r"Stale file handle.*Run the same command to resume"):
            checkpoints.save(content(4))
    assert bytes_in(tmp_path / "run") == before
    assert checkpoints.find() == tmp_path / "run" / "checkpoint.pth"


def test_ranks_that_read_different_checkpoints_do_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as from disks of their own: their networks would be averaged."""
    filled(tmp_path / "run")
    newest, before = (tmp_path / "run" / name for name in NAMES[:2])
    shutil.copy(newest, tmp_path / "copy.pth")
    assert contents_checksum(newest) == contents_checksum(tmp_path / "copy.pth") != contents_checksum(before)

    def check(*other: int) -> None:
        monkeypatch.setattr(resume, "all_gather_object", lambda own: [own, other])
        resume.require_same_file(newest, 3, contents_checksum(newest))

    check(3, contents_checksum(newest))
    with pytest.raises(FaultError, match=r"read different files as .*checkpoint.pth, of steps 3, 3: --output_dir"):
        check(3, contents_checksum(before))
    with pytest.raises(FaultError, match=r"of steps 3, 2: --output_dir must be one folder for all machines"):
        check(2, contents_checksum(newest))


def test_a_worker_that_ends_during_a_save_does_not_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: 30 s after SIGTERM workers end, torch's handler raises an error, and a large file was not written."""

    def worker_died(*_: object) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Alarm clock.")

    def slow_save(*arguments: Any) -> None:
        assert callable(signal.getsignal(signal.SIGCHLD))  # else Python prints of a signal that came just before
        subprocess.run(["true"], check=True)  # a child that ends
        save(*arguments)

    save, handler = torch.save, signal.signal(signal.SIGCHLD, worker_died)
    try:
        monkeypatch.setattr(torch, "save", slow_save)
        filled(tmp_path / "run", saves=1)
        assert signal.getsignal(signal.SIGCHLD) is worker_died
    finally:
        signal.signal(signal.SIGCHLD, handler)
    assert load_checkpoint(tmp_path / "run" / "checkpoint.pth")["step"] == 1


def test_without_hard_links_checkpoints_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", fail(errno.EPERM))
    checkpoints = filled(tmp_path / "run")
    checkpoints.save(content(4), ["checkpoint_best.pth"])
    assert steps_in(checkpoints.folder) == [4, 3, 2]
    assert load_checkpoint(checkpoints.folder / "checkpoint_best.pth")["step"] == 4


def test_a_run_that_had_failed_saves_with_an_older_version_gets_its_fallbacks_back(tmp_path: Path) -> None:
    """There three names of one file could be left, and a temporary file whose name no later save uses."""
    checkpoints = filled(tmp_path / "run")
    (checkpoints.folder / ".checkpoint_previous7.pth.tmp").write_bytes(b"of a killed save")
    for name in NAMES[1:]:
        (checkpoints.folder / name).unlink()
        os.link(checkpoints.newest, checkpoints.folder / name)
    for step in (4, 5):
        checkpoints.save(content(step))
    assert steps_in(checkpoints.folder) == [5, 4, 3]
    assert not list(checkpoints.folder.glob(".*"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for three checkpoints of `content` and half of a fourth."""
    folder = tmp_path / "disk"
    folder.mkdir()
    torch.save(content(0), tmp_path / "one.pth")
    size = 7 * (tmp_path / "one.pth").stat().st_size // 2
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk, and not everywhere")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_on_a_full_disk_no_save_uses_up_a_fallback(small_disk: Path) -> None:
    checkpoints = CheckpointFolder(small_disk, KEEP)
    for step in range(1, KEEP + 1):
        checkpoints.save(content(step))
    before = bytes_in(small_disk)
    for step in range(4, 8):
        with pytest.raises(CheckpointError, match=r"No space left.*previous checkpoint is kept; free some space"):
            checkpoints.save(content(step))
        assert bytes_in(small_disk) == before
    assert steps_in(small_disk) == [3, 2, 1]
    (small_disk / "checkpoint.pth").write_bytes(b"damaged")
    assert checkpoints.find() == small_disk / NAMES[1]


# Files that take more memory than they have bytes.


def rezipped(path: Path, target: Path, compression: int) -> Path:
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(target, "w", compression) as packed:
        for part in source.infolist():
            packed.writestr(part.filename, source.read(part))
    return target


def test_a_compressed_checkpoint_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1_000_000)}, tmp_path / "whole.pth")
    packed = rezipped(tmp_path / "whole.pth", tmp_path / "packed.pth", zipfile.ZIP_DEFLATED)
    assert packed.stat().st_size < 10_000
    for read in (load_checkpoint, verify_checkpoint):
        message = rf"^{re.escape(str(packed))} is compressed \(\w+/data\.pkl\), .*zip -0"
        with pytest.raises(CheckpointError, match=message):
            read(packed)
    unpacked = rezipped(packed, tmp_path / "unpacked.pth", zipfile.ZIP_STORED)
    assert torch.equal(load_checkpoint(unpacked)["w"], torch.zeros(1_000_000))


def test_parts_that_share_their_bytes_are_refused(tmp_path: Path) -> None:
    """A central directory can list one part many times; each would take memory of its own."""
    path = tmp_path / "shared.pth"
    torch.save({"w": torch.zeros(10_000)}, path)
    with zipfile.ZipFile(path, "a") as archive:
        part = archive.getinfo(next(name for name in archive.namelist() if name.endswith("data/0")))
        archive.filelist += [part] * 100
        archive._didModify = True
    with pytest.raises(CheckpointError, match="parts share their bytes"):
        load_checkpoint(path)

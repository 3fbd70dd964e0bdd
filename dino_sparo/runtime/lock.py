"""One run per output folder: a lock file names the run that writes there; a new run takes over an abandoned lock.

Only one process can create the lock `run.lock` (O_EXCL works on NFS too, unlike flock). The file names host, process,
Slurm job and time. A new run considers the holder of the lock ended

    on this machine         when no process has the holder's number and start time
    in the same Slurm job   when the holder is an attempt before the last requeue: Slurm has ended that attempt
    anywhere else           when the holder has not refreshed the file for `PATIENCE_S`, by the new run's clock

So clocks may differ, and numbers of processes may be reused. A run that finds another holder in its lock ends at once:
another run has taken over the lock, for instance while this run was suspended.
"""

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from dino_sparo.runtime.launch import is_main

logger = logging.getLogger(__name__)

NAME = "run.lock"
REFRESH_S = 10.0
PATIENCE_S = 60.0  # several refreshes, since a file server or a busy process may delay some


class OutputDirError(ValueError):
    """The output folder is no folder, or another run writes there."""


@dataclass(frozen=True)
class Holder:
    """The holder of a lock; unknown values are empty.

    Attributes:
        host: name of the machine.
        machine: the machine's boot and the namespace of processes, within which `pid` is unique.
        pid: number of the process.
        started: start of the process, in the kernel's ticks since the boot.
        job: number of the Slurm job.
        attempt: number of requeues of the job so far.
        since: local time at which the lock was created.
        token: random name of this lock.
    """

    host: str = ""
    machine: str = ""
    pid: int = 0
    started: str = ""
    job: str = ""
    attempt: int = 0
    since: str = ""
    token: str = ""

    @classmethod
    def this_process(cls) -> "Holder":
        """The calling process as a holder."""
        return cls(
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            started=_start_of(os.getpid()),
            job=os.environ.get("SLURM_JOB_ID", ""),
            attempt=int(os.environ.get("SLURM_RESTART_COUNT") or 0),
            since=datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
            token=uuid.uuid4().hex,
        )

    def is_gone(self, me: "Holder") -> bool | None:
        """Whether the holder's process has ended; None if `me` cannot know."""
        if self.job and self.job == me.job and self.attempt < me.attempt:
            return True
        if self.machine and (self.host, self.machine) == (me.host, me.machine):
            return _start_of(self.pid) != self.started
        return None

    def __str__(self) -> str:
        job = f", Slurm job {self.job}" if self.job else ""
        return f"process {self.pid or '?'} on {self.host or '?'}{job}, since {self.since or '?'}"


class RunLock:
    """The lock of an output folder, or of a file in it (by `FILE.lock`); rank 0 holds the lock for all ranks of a run.

    A context manager: it releases the lock that `acquire` took.
    """

    def __init__(self, folder: str | Path, file: str = "") -> None:
        self.folder = Path(folder)
        self.path = self.folder / (f"{file}.lock" if file else NAME)
        self.option = "--output" if file else "--output_dir"
        self.target = f"{self.option} {self.folder / file}"
        self.me = Holder.this_process()
        self.is_held = False
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._refresh, name="run lock", daemon=True)

    def acquire(self) -> None:
        """Create the folder and, on rank 0, the lock; wait up to `PATIENCE_S` for a sign of life of another holder.

        Raises:
            OutputDirError: another run writes there, or the folder cannot be created.
        """
        create_output_dir(self.folder)
        if not is_main():
            return
        try:
            while not self._create():
                self._remove_if_gone()
        except OSError as error:
            raise OutputDirError(f"{self.target} cannot be written ({error}); choose another") from error
        self.is_held = True
        self.thread.start()

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_held:
            return
        self.over.set()
        self.thread.join(REFRESH_S)  # with a limit: the thread may wait for a file server
        with contextlib.suppress(OSError):
            if self._read()[0].token == self.me.token:
                self.path.unlink()
        self.is_held = False

    def _create(self) -> bool:
        """Create the lock file; False if there is one."""
        try:
            file = self.path.open("x")
        except FileExistsError:
            return False
        try:
            with file:
                json.dump(asdict(self.me), file)
        except OSError:
            self.path.unlink()
            raise
        return True

    def _read(self) -> tuple[Holder, int]:
        """The holder, and the time of the last refresh (ns); FileNotFoundError if the lock was released.

        Opening the file makes NFS ask its server.
        """
        with self.path.open() as file:
            refreshed = os.fstat(file.fileno()).st_mtime_ns
            try:
                return Holder(**json.load(file)), refreshed
            except (ValueError, TypeError):  # the file is being written, or its writer died
                return Holder(), refreshed

    def _remove_if_gone(self) -> None:
        """Remove the lock if its holder has ended; OutputDirError if the holder lives."""
        with contextlib.suppress(FileNotFoundError):  # the lock was released meanwhile
            first = holder, _ = self._read()
            is_gone = holder.is_gone(self.me)
            if is_gone is None:
                logger.warning("%s is held by %s; waiting for a sign of life from it", self.path, holder)
                is_gone, end = True, time.monotonic() + PATIENCE_S
                while is_gone and time.monotonic() < end:
                    time.sleep(min(1.0, PATIENCE_S / 10))
                    is_gone = self._read() == first
            if not is_gone:
                raise OutputDirError(
                    f"{self.target} is in use by another run ({holder}); give another {self.option}, or "
                    f"end that run first ({f'scancel {holder.job}' if holder.job else f'kill {holder.pid}'})"
                )
            self._remove(first)

    def _remove(self, abandoned: tuple[Holder, int]) -> None:
        """Remove an abandoned lock, unless another process has taken it over meanwhile."""
        guard, end = self.path.with_name(f"{self.path.name}.takeover"), time.monotonic() + PATIENCE_S
        while True:
            try:
                guard.touch(exist_ok=False)
                break
            except FileExistsError:
                if time.monotonic() > end:  # the process that created the guard has died
                    guard.unlink(missing_ok=True)
                time.sleep(0.01)
        try:
            if self._read() == abandoned:
                self.path.unlink()
                logger.warning("%s of %s is taken over: that process has ended", self.path, abandoned[0])
        finally:
            guard.unlink(missing_ok=True)

    def _refresh(self) -> None:
        """Refresh the lock regularly, also if a user removes it; end this process if another run takes it over."""
        while not self.over.wait(REFRESH_S):
            with contextlib.suppress(OSError):  # a full disk or a silent file server: the next refresh may succeed
                try:
                    is_mine = self._read()[0].token == self.me.token
                except FileNotFoundError:
                    is_mine = self._create()
                if is_mine:
                    os.utime(self.path)
                elif not self.over.is_set():
                    logger.error(
                        "another run has taken over %s (%s) while this run gave no sign of life; this run ends now, "
                        "without saving",
                        *(self.target, self.path),
                    )
                    logging.shutdown()
                    os._exit(1)


def create_output_dir(folder: Path) -> None:
    """Create a folder and its parents; OutputDirError if a file has its name, or the parent cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise OutputDirError(
            f"--output_dir {folder} is a file; give the path of a folder, or remove the file"
        ) from error
    except OSError as error:
        raise OutputDirError(f"--output_dir {folder} cannot be created ({error}); choose another") from error


def _machine() -> str:
    """The machine's boot and this process' namespace of process numbers; empty where there is no /proc."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _start_of(pid: int) -> str:
    """Start of a process; empty if it has ended, or where there is no /proc."""
    with contextlib.suppress(OSError, IndexError):
        # The name of the program, in brackets, may contain spaces and brackets.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]  # a zombie has ended
    return ""

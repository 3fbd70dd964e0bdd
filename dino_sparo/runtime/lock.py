"""One run per output folder: a lock file that says who writes there, and that is taken over when its holder is gone.

The lock is `run.lock`, created so that only one process can succeed (O_EXCL, which NFS keeps too, unlike flock). It
names host, process, Slurm job and time. A holder is gone

    on this machine          when no process has its number and its start time
    in this Slurm job        when it belongs to an attempt before the last requeue: Slurm has ended that one
    anywhere else            when it does not refresh the file for `PATIENCE_S`, by the clock of the process that waits

So clocks that differ, and numbers of processes or jobs that are used again, cause no mistake. A run that finds another
holder in its lock ends at once: another run has taken the lock over, for instance while this one was suspended.
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
PATIENCE_S = 60.0  # several refreshments, since a file server or a busy process may delay some


class OutputDirError(ValueError):
    """The output folder cannot be used: it is no folder, or another run writes there."""


@dataclass(frozen=True)
class Holder:
    """Who holds a lock; what is not known is empty.

    Attributes:
        host: name of the machine.
        machine: what process numbers count in: the machine's boot and the namespace of processes.
        pid: number of the process.
        started: when the process was started, in the kernel's ticks since the boot.
        job: number of the Slurm job.
        attempt: how often Slurm has requeued the job before.
        since: local time at which the lock was taken.
        token: of this lock alone.
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
        """Whether the holder's process has ended, as far as another process can know; None where it cannot."""
        if self.job and self.job == me.job and self.attempt < me.attempt:
            return True
        if self.machine and (self.host, self.machine) == (me.host, me.machine):
            return not _is_alive(self.pid) or _start_of(self.pid) != self.started
        return None

    def __str__(self) -> str:
        job = f", Slurm job {self.job}" if self.job else ""
        return f"process {self.pid or '?'} on {self.host or '?'}{job}, since {self.since or '?'}"


class RunLock:
    """The right to write into an output folder, for a `with` statement; rank 0 holds it for all ranks of a run.

    Args:
        folder: the output folder; `acquire` creates it.
        file: name of a file in the folder; only this file is locked, by `FILE.lock`.
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
        """Create the folder and, on rank 0, take the lock; waits for up to `PATIENCE_S` where the holder may be gone.

        Raises:
            OutputDirError: another run writes there, or no folder can be there.
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
        self.thread.join(REFRESH_S)  # not for ever: it may wait for a file server
        with contextlib.suppress(OSError):
            if self._read()[0].token == self.me.token:
                self.path.unlink()
        self.is_held = False

    def _create(self) -> bool:
        """Write the lock, unless there is one."""
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
        """Who holds the lock, and when it was refreshed last, ns. The file is opened: else NFS may answer from memory.

        Raises:
            FileNotFoundError: there is no lock any more.
        """
        with self.path.open() as file:
            refreshed = os.fstat(file.fileno()).st_mtime_ns
            try:
                return Holder(**json.load(file)), refreshed
            except (ValueError, TypeError):  # it is just being written, or its writer died then
                return Holder(), refreshed

    def _remove_if_gone(self) -> None:
        """Remove the lock of a holder that is gone.

        Raises:
            OutputDirError: the holder is there.
        """
        with contextlib.suppress(FileNotFoundError):  # it was released meanwhile
            first = holder, _ = self._read()
            is_gone = holder.is_gone(self.me)
            end = time.monotonic() + PATIENCE_S
            if is_gone is None:
                logger.warning("%s is held by %s; waiting for a sign of life from it", self.path, holder)
            while is_gone is None:
                time.sleep(min(1.0, PATIENCE_S / 10))
                if self._read() != first:
                    is_gone = False
                elif time.monotonic() > end:
                    is_gone = True
            if not is_gone:
                raise OutputDirError(
                    f"{self.target} is in use by another run ({holder}); give another {self.option}, or "
                    f"end that run first ({f'scancel {holder.job}' if holder.job else f'kill {holder.pid}'})"
                )
            self._remove(first)

    def _remove(self, abandoned: tuple[Holder, int]) -> None:
        """Remove a lock, unless another process has done so and taken the lock meanwhile."""
        guard, end = self.path.with_name(f"{self.path.name}.takeover"), time.monotonic() + PATIENCE_S
        while True:
            try:
                guard.touch(exist_ok=False)
                break
            except FileExistsError:
                if time.monotonic() > end:  # whoever held it has died in the few calls below
                    guard.unlink(missing_ok=True)
                time.sleep(0.01)
        try:
            if self._read() == abandoned:
                self.path.unlink()
                logger.warning("%s of %s is taken over: that process is gone", self.path, abandoned[0])
        finally:
            guard.unlink(missing_ok=True)

    def _refresh(self) -> None:
        """Refresh the lock regularly; end this process if another run has taken it over."""
        while not self.over.wait(REFRESH_S):
            try:
                if self._read()[0].token == self.me.token:
                    os.utime(self.path)
                    continue
            except FileNotFoundError:  # a user has removed it
                try:
                    if self._create():
                        continue
                except OSError:  # as below
                    continue
            except OSError:  # the file server does not answer; it may do so again
                continue
            if not self.over.is_set():
                self._leave()

    def _leave(self) -> None:
        logger.error(
            "another run has taken over %s (%s) while this one gave no sign of life; this one ends now, without saving",
            self.target,
            self.path,
        )
        logging.shutdown()
        os._exit(1)


def create_output_dir(folder: Path) -> None:
    """Create a folder and those above it, unless it is there.

    Raises:
        OutputDirError: a file is in the way, or the folder above cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise OutputDirError(
            f"--output_dir {folder} is a file; give the path of a folder, or remove the file"
        ) from error
    except OSError as error:
        raise OutputDirError(f"--output_dir {folder} cannot be created ({error}); choose another") from error


def _machine() -> str:
    """The machine's boot and this process' namespace of process numbers; outside of Linux the host's name must do."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return "without /proc"


def _start_of(pid: int) -> str:
    """When a process was started; empty if it has ended, or the system does not tell."""
    with contextlib.suppress(OSError, IndexError):
        # The name of the program, in brackets, may hold spaces and brackets itself.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]  # a zombie has ended
    return ""


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # of another user
    return True

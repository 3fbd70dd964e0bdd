"""One run per output folder: the run holds a lock (flock) on a file that names the run.

The kernel releases the lock when the process ends, however it ends; so does the server of a network disk. The file is
only read for messages, and to recognise an attempt of the same Slurm job before the last requeue.
"""

import fcntl
import json
import logging
import os
import socket
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.launch import is_main

logger = logging.getLogger(__name__)

NAME = "run.lock"


class OutputDirError(UserError):
    """The output folder is not a folder, or another run writes there."""


class RunLock:
    """The lock of an output folder, or of a file in it (by `FILE.lock`); rank 0 holds the lock for all ranks of a run.

    A context manager: it releases the lock that `acquire` took.
    """

    def __init__(self, folder: str | Path, file: str = "") -> None:
        self.folder = Path(folder)
        self.path = self.folder / (f"{file}.lock" if file else NAME)
        self.option = "--output" if file else "--output_dir"
        self.target = f"{self.option} {self.folder / file}"
        self.file: TextIO | None = None

    def acquire(self) -> None:
        """Create the folder and, on rank 0, take the lock; OutputDirError if that fails or another run writes there."""
        create_output_dir(self.folder)
        try:
            while is_main() and self.file is None:
                self.file = self._lock(self.path.open("a+"))
        except OSError as error:
            raise OutputDirError(f"{self.target} cannot be written ({error}); choose another") from error

    def _lock(self, file: TextIO) -> TextIO | None:
        """The locked file, which names this process; None if the file has been removed meanwhile."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = read_holder(file)
            if not is_earlier_attempt(holder):
                file.close()
                raise self._in_use_by(holder) from None
            self.path.unlink(missing_ok=True)
        except OSError as error:  # some clusters mount their disks without locks
            logger.warning("%s cannot be locked (%s); take care that no other run writes there", self.target, error)
        if not self.path.exists() or not os.path.samestat(os.fstat(file.fileno()), self.path.stat()):
            file.close()
            return None
        os.register_at_fork(after_in_child=file.close)  # else processes that load images would hold the lock
        file.truncate(0)
        json.dump(this_process(), file)
        file.flush()
        return file

    def _in_use_by(self, holder: dict[str, Any]) -> OutputDirError:
        """The error that names the process which holds the lock."""
        job, pid = holder["job"], holder["pid"]
        where = f"{holder['host']}, Slurm job {job}" if job else holder["host"]
        return OutputDirError(
            f"{self.target} is in use by another run (process {pid} on {where}, since "
            f"{holder['since']}); give another {self.option}, or end that run first "
            f"({f'scancel {job}' if job else f'kill {pid}'})"
        )

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.path.unlink(missing_ok=True)
            self.file.close()
            self.file = None


def this_process() -> dict[str, Any]:
    """The content of the lock file; `attempt` counts requeues of the Slurm job."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job": os.environ.get("SLURM_JOB_ID", ""),
        "attempt": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
        "since": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
    }


def read_holder(file: TextIO) -> dict[str, Any]:
    """The record of the process that holds the lock, by `this_process`; its values are "?" until it is written."""
    file.seek(0)
    text = file.read()
    return dict(json.loads(text)) if text.endswith("}") else dict.fromkeys(this_process(), "?")


def is_earlier_attempt(holder: dict[str, Any]) -> bool:
    """Whether a lock's holder is an attempt of this Slurm job before its last requeue, which Slurm has ended."""
    me = this_process()
    return bool(holder["job"]) and holder["job"] == me["job"] and holder["attempt"] < me["attempt"]


def create_output_dir(folder: Path, option: str = "--output_dir ") -> None:
    """Create a folder and its parents; OutputDirError, which names `option`, if the path is a file or not permitted."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise OutputDirError(f"{option}{folder} is a file; give the path of a folder, or remove the file") from error
    except OSError as error:
        raise OutputDirError(f"{option}{folder} cannot be created ({error}); choose another") from error

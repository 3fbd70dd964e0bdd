"""Errors that end a command in one line: missing packages, full memory, and faults after which a rerun helps.

A fault is not a mistake of the user: a process, a worker, a GPU or the network failed. The command then ends with
`FAULT_STATUS`, and the cluster starts it again. No torch here, since commands catch these errors before they import it.
"""

import contextlib
import errno
import importlib.util
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Exit status of a process that failed through no mistake of the user's: starting it again may well help.
FAULT_STATUS = 75  # EX_TEMPFAIL of sysexits.h
BUG_STATUS = 70  # EX_SOFTWARE
# Errors of a file that say nothing about the file: no memory, no descriptors, a disk or a file server that is away.
PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
RETRY_SECONDS = (1.0, 5.0)  # before the second and the third try
# Errors of a file that the user can correct: a wrong path, missing permission, a full disk; 0 is of `open_regular`.
CORRECTABLE = {
    0,
    *(errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
}
RESUME_HINT = "Run the same command to resume from the last checkpoint, if there is one"

# How to install what may be missing: extra of this package -> packages; then those of other ways.
EXTRAS = {
    "clip": ("open_clip", "entmax", "webdataset"),
    "export": ("onnx", "onnxscript"),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "analyse": ("sklearn",),
    "plots": ("matplotlib",),
    "parse-llm": ("openai",),
    "objects": ("scipy", "pycocotools"),
    "video": ("av",),
}
INSTALL = {
    **{package: f"pip install 'dino_sparo[{extra}]'" for extra, packages in EXTRAS.items() for package in packages},
    **{package: f"pip install {package}" for package in ("transformers", "requests", "pyarrow")},
    "clip_benchmark": "pip install clip-benchmark requests",
    "spacy": "pip install 'dino_sparo[parse]' && python -m spacy download en_core_web_sm",
    "nltk": "pip install nltk && python -m nltk.downloader punkt_tab",
}

# Words in torch's errors, where their types do not tell. gloo raises plain RuntimeErrors, which name its source files.
PEER_SIGNS = (
    *("gloo/", "Gloo", "Connection closed by peer", "Connection reset by peer", "Application timeout"),
    *("Socket Timeout", "failed to connect", "connection was refused", "Timed out waiting"),
)
LATE_SIGNS = ("timed out", "timeout", "time out")
WORKER_SIGNS = ("DataLoader worker", "DataLoader timed out")
# A GPU, its driver or a link failed, not the program.
DEVICE_SIGNS = (
    *("uncorrectable", "ECC error", "Xid", "unspecified launch failure", "hardware stack error", "hardware error"),
    *("fallen off the bus", "GPU is lost", "CUDA error: unknown error", "devices are busy or unavailable"),
)
# Memory is full, in the words of CUDA's libraries and of torch's allocator on the CPU.
MEMORY_SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "_STATUS_ALLOC_FAILED")

TRAINING_REMEDY = (
    "halve the batch size and double --grad_accum_steps, for the same steps in less memory; --grad_checkpointing keeps "
    "fewer activations; DINO's --loss_chunk computes the loss of a part of the prototypes at a time"
)
EVALUATION_REMEDY = (
    "smaller batches or images; in commands that have it, --use_cuda false, which keeps features in the host's memory"
)


class UserError(ValueError):
    """A mistake of the user: the message names the value and the remedy. Any other ValueError is a bug."""


class MendableError(RuntimeError):
    """An error that the user can correct although no value is wrong. The command ends with one line and status 1."""


class MissingPackageError(ImportError):
    """A package is not installed; the message says how to install it."""


class MemoryFullError(MendableError):
    """The memory of the device or of the host is full."""


class FaultError(RuntimeError):
    """A process, a worker or the network failed; the run can resume from its last checkpoint."""


class PeerError(UserError):
    """The error of another rank, raised on this rank too, so that all ranks end."""


def is_passing(error: BaseException) -> bool:
    """Whether an error, or its cause, says that a file cannot be read or written at the moment."""
    if isinstance(error, OSError):
        return error.errno in PASSING
    # torch and zipfile raise errors of their own while they handle the system's.
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return cause is not None and is_passing(cause)


def retry(function: Callable[[], T], waits: Sequence[float] = RETRY_SECONDS) -> T:
    """The function's result. After an error that `is_passing` the function is called again, once after each wait.

    Raises:
        FaultError: the last call failed with such an error too.
    """
    try:
        return function()
    except Exception as error:
        if not is_passing(error):
            raise
        if not waits:
            raise FaultError(f"{error}. {RESUME_HINT}") from error
        logger.warning("%s; trying again in %g s", error, waits[0])
    time.sleep(waits[0])
    return retry(function, waits[1:])


def is_correctable(error: BaseException) -> bool:
    """Whether the user can correct an error. An OSError counts if it names a file; any other error is a bug."""
    is_of_file = isinstance(error, OSError) and error.errno in CORRECTABLE and error.filename is not None
    return is_of_file or isinstance(error, UserError | MendableError | MissingPackageError)


def require(package: str, purpose: str) -> None:
    """Raise MissingPackageError unless a package of `INSTALL` is installed.

    Args:
        package: a key of `INSTALL`.
        purpose: the subject of "need the package", in the plural.
    """
    if importlib.util.find_spec(package) is None:
        raise MissingPackageError(f"{purpose} need the package {package}; install it with: {INSTALL[package]}")


@contextlib.contextmanager
def explain_faults(timeout_min: float) -> Iterator[None]:
    """Turn torch's errors about a peer, a worker or a GPU that failed into a `FaultError` with a remedy."""
    try:
        yield
    except FaultError:
        raise
    except (RuntimeError, ConnectionError, EOFError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        if not isinstance(error, RuntimeError) or any(sign in text for sign in WORKER_SIGNS):
            message = (
                "a process that loads images died or hangs; if memory ran out, give fewer --num_workers. "
                f"{RESUME_HINT} ({text})"
            )
        elif is_device_fault(error):
            message = (
                f"the GPU of rank {_rank()} on {socket.gethostname()} failed, or its driver or link did; `nvidia-smi "
                f"-q` and `dmesg` may say why. {RESUME_HINT}; if the error comes back on that machine, exclude it: "
                f"--slurm_additional exclude=NODE ({text})"
            )
        elif is_peer_fault(error):
            message = peer_failed(timeout_min, text)
        else:
            raise
        raise FaultError(message) from error


def _rank() -> int:
    from torch import distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


def peer_failed(timeout_min: float, text: str) -> str:
    """The message about a process that died, or that did not answer a collective within the time-out."""
    is_late = any(sign in text.lower() for sign in LATE_SIGNS)
    fate = f"did not answer for {timeout_min:g} minutes" if is_late else "died"
    return f"another process {fate}; its log may say why. {RESUME_HINT} ({text})"


def is_peer_fault(error: Exception) -> bool:
    """Whether another process failed, by the type of torch's error, or for gloo by its text."""
    from torch import distributed as dist

    return isinstance(error, dist.DistError) or (
        dist.is_initialized() and any(sign in str(error) for sign in PEER_SIGNS)
    )


def is_device_fault(error: Exception) -> bool:
    """Whether an error of CUDA reports failed hardware, and not a mistake of the program, such as a bad index."""
    text = str(error)
    return ("CUDA" in text or "NVML" in text) and any(sign in text for sign in DEVICE_SIGNS)


@contextlib.contextmanager
def explain_full_memory(options: Mapping[str, Any]) -> Iterator[None]:
    """Turn torch's errors about full memory into a `MemoryFullError` that says what helps."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # A loading process without memory is a fault: starting again helps.
        if isinstance(error, MemoryFullError | FaultError) or not is_memory_full(error):
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        remedy = TRAINING_REMEDY if "grad_accum_steps" in options else EVALUATION_REMEDY
        raise MemoryFullError(f"memory is full. What helps: {remedy} ({text[:300]})") from error


def is_memory_full(error: Exception) -> bool:
    """Whether an error says that a device or the host has no memory left."""
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(sign in str(error) for sign in MEMORY_SIGNS)

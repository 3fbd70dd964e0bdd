"""What torch raises when memory is full -> one line that says which options help."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from dino_sparo.runtime.cli import MendableError

# In the texts of torch, CUDA's libraries and the system.
SIGNS = (
    *("out of memory", "can't allocate memory", "not enough memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)
# Option -> how it helps; of trainings and of evaluations.
TRAINING = {
    "grad_accum_steps": "a smaller batch with as many more --grad_accum_steps takes the same steps",
    "grad_checkpointing": "--grad_checkpointing keeps fewer activations",
    "loss_chunk": "--loss_chunk computes the loss of a part of the prototypes at a time",
    "memory_report": "--memory_report says what a step keeps, for a batch that fits",
}
EVALUATION = {
    "batch_size_per_gpu": "a smaller --batch_size_per_gpu",
    "use_cuda": "--use_cuda false, which keeps features in the host's memory",
    "image_size": "a smaller --image_size",
}


class MemoryFullError(MendableError):
    """The device's memory, or the host's, does not hold what is computed."""


@contextlib.contextmanager
def full_memory_named(options: Mapping[str, Any]) -> Iterator[None]:
    """Turn what torch raises when memory is full into one line that says what helps.

    Args:
        options: of the command; those among them that help are named.

    Raises:
        MemoryFullError: in its place.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        from dino_sparo.runtime.distributed import FaultError

        # A loading process without memory is a fault: starting again helps.
        if isinstance(error, MemoryFullError | FaultError) or not is_memory_full(error):
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        remedies = TRAINING if "grad_accum_steps" in options else EVALUATION
        is_host = isinstance(error, MemoryError) or not any(
            name in text.upper() for name in ("CUDA", "CUBLAS", "CUDNN")
        )
        useless = {"use_cuda"} if is_host or not options.get("use_cuda") else set()
        helps = "; ".join(text for name, text in remedies.items() if name in options.keys() - useless)
        raise MemoryFullError(f"memory is full. {f'What helps: {helps} ' * bool(helps)}({text[:300]})") from error


def is_memory_full(error: Exception) -> bool:
    """Whether an error says that a device or the host has no memory left."""
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in SIGNS)

"""Objectives for tests of a step, without data and options."""

from types import SimpleNamespace
from typing import Any, TypeVar

T = TypeVar("T")


def bare(kind: type[T], **fields: Any) -> T:
    """An objective with these attributes alone; its constructor is not called."""
    objective = object.__new__(kind)
    vars(objective).update(fields)
    return objective


def no_data(steps_per_epoch: int, global_batch_size: int) -> tuple[Any, ...]:
    """In place of the result of `open_crops` where batches are made by hand."""
    sampler = SimpleNamespace(steps_per_epoch=steps_per_epoch, global_batch_size=global_batch_size)
    return None, sampler, None, None, None

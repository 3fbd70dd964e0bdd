"""Ranks agree through the hosts: barriers, objects, and errors of one rank that end all ranks.

A rank that works for all others may take longer than a collective waits. The others then watch its heartbeat in the
store, and wait as long as it lives and makes progress.
"""

import contextlib
import itertools
import logging
import os
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dino_sparo._version import __version__
from dino_sparo.runtime.faults import RESUME_HINT, FaultError, PeerError, is_device_fault, peer_failed
from dino_sparo.runtime.launch import CONTROL_FACTOR, Peers, is_main, peers, rank, world_size

logger = logging.getLogger(__name__)

# Seconds between two heartbeats of a process, and between two checks of those of the others.
BEAT_SECONDS, LOOK_SECONDS = 1.0, 0.05
WAIT_LOG_SECONDS = 30.0  # between two lines about the ranks that rank 0 waits for
# Options that may differ between the processes of one command: where it computes, and how it finds the others.
OPTIONS_OF_ONE_RANK = {"device", "dist_url", "local_rank"}

T = TypeVar("T")


def barrier() -> None:
    """Wait for all processes, as long as the control group does; no device is waited for."""
    if world_size() > 1:
        with _peers_named() as control:
            dist.barrier(group=control)


def all_gather_object(value: T) -> list[T]:
    """The picklable values of all ranks, in rank order, on every rank; through the hosts, so no device waits."""
    if world_size() == 1:
        return [value]
    values: list[T] = [value] * world_size()
    with _peers_named() as control:
        dist.all_gather_object(values, value, group=control)
    return values


def broadcast_object(value: T) -> T:
    """Rank 0's picklable value, on every rank; the others' own is not used."""
    if world_size() == 1:
        return value
    values = [value]
    with _peers_named() as control:
        dist.broadcast_object_list(values, src=0, group=control)
    return values[0]


@contextlib.contextmanager
def _peers_named() -> Iterator[Any]:
    """The control group, within a context that turns its errors into a `FaultError` with the time it waited."""
    group = peers()
    try:
        yield group.control if group else None
    except RuntimeError as error:
        if group is None or is_device_fault(error):
            raise
        text = " ".join(str(error).split())
        raise FaultError(peer_failed(CONTROL_FACTOR * group.timeout_s / 60, text)) from error


@contextlib.contextmanager
def all_or_none(what: str, patient: bool = False) -> Iterator[None]:
    """Within this context every rank works without collectives; if one rank fails, all ranks raise an error.

    Args:
        what: the action, for the message on the other ranks: "opening the images".
        patient: the action may take longer than a collective waits; see `gather_patiently`.

    Raises:
        PeerError: another rank failed.
        FaultError: other ranks failed, all by faults, so that starting again helps.
        Exception: the error of this rank.
    """
    error: Exception | None = None
    with beating() if patient else contextlib.nullcontext():
        try:
            yield
        except Exception as raised:
            error = raised
        own = _message_of(error), isinstance(error, FaultError)
        of_ranks = gather_patiently(own, what) if patient else all_gather_object(own)
    failures = [(number, text) for number, (text, _) in enumerate(of_ranks) if text]
    if error is not None:
        raise error
    if failures:
        number, text = failures[0]
        # Else the other ranks would say that the user must mend something, and the job would not start again.
        kind = FaultError if all(is_fault for text, is_fault in of_ranks if text) else PeerError
        raise kind(f"{what} failed on {len(failures)} of {world_size()} processes; rank {number}: {text}")


def on_rank_0(function: Callable[[], None], what: str) -> None:
    """Call a function on rank 0 while the others wait; if it fails, all ranks raise an error."""
    with all_or_none(what):
        if is_main():
            function()


@contextlib.contextmanager
def rank_0_first(what: str = "preparing the data") -> Iterator[None]:
    """Within this context rank 0 works first, then the others: it downloads, or indexes files into a cache.

    A failure of one rank is a failure of all, as in `all_or_none`, and the action may take longer than a collective
    waits. If rank 0 fails, the others do not begin.
    """
    with all_or_none(what, patient=True):
        if is_main():
            error: Exception | None = None
            try:
                yield
            except Exception as raised:
                error = raised
            gather_patiently(_message_of(error), what)
            if error is not None:
                raise error
        elif message := gather_patiently("", what)[0]:
            raise PeerError(f"{what} failed on rank 0: {message}")
        else:
            yield


def require_same(value: int | str | None, what: str) -> None:
    """ValueError on every rank unless all ranks have the same value, such as a number of images."""
    values = all_gather_object(value)
    if len(set(values)) > 1:
        shown = f": {values}, by rank" if isinstance(value, int) else ""
        raise ValueError(f"the processes disagree on {what}{shown}; do they read the same folder?")


def require_same_options(options: Mapping[str, Any]) -> None:
    """ValueError on every rank unless all ranks have the same options, and versions of torch and of this package."""
    own = {"torch": str(torch.__version__), "dino_sparo": __version__}
    own |= {f"--{name}": value for name, value in options.items() if name not in OPTIONS_OF_ONE_RANK}
    first, *others = all_gather_object(own)
    for number, other in enumerate(others, 1):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"{name} is {first.get(name)} on rank 0 and {other.get(name)} on rank {number}; start all "
                    "processes with the same options and the same versions"
                )


def _message_of(error: Exception | None) -> str:
    """The message of an error for the other ranks; empty for none."""
    return "" if error is None else str(error) or type(error).__name__


def gather_patiently(value: T, what: str) -> list[T]:
    """`all_gather_object` without a time limit, while all ranks are within `beating` and make progress.

    Rank 0 collects the values; the others wait for rank 0.

    Raises:
        FaultError: a rank gave no sign of life, or made no progress, for as long as a collective waits.
    """
    group = peers()
    if group is None:
        return all_gather_object(value)
    store, number = group.store, group.round
    group.round += 1
    group.progress = ""  # from here on this rank waits, and makes no progress of its own
    if rank():
        store.set(f"{number}/value{rank()}", pickle.dumps(value))  # type: ignore[arg-type]
        _wait_for_keys(group, {0: f"{number}/all"}, what)
        values = pickle.loads(store.get(f"{number}/all"))
        store.set(f"{number}/read{rank()}", "")
        return values
    others = range(1, world_size())
    _wait_for_keys(group, {other: f"{number}/value{other}" for other in others}, what)
    values = [value, *(pickle.loads(store.get(f"{number}/value{other}")) for other in others)]
    store.set(f"{number}/all", pickle.dumps(values))  # type: ignore[arg-type]
    # The store may end with this process, so it stays until all have read.
    _wait_for_keys(group, {other: f"{number}/read{other}" for other in others}, what)
    return values


@contextlib.contextmanager
def beating() -> Iterator[None]:
    """Within this context the store shows the other ranks the progress of this process, or else that it lives."""
    group = peers()
    if group is None:
        yield
        return
    over = threading.Event()

    def beat() -> None:
        with contextlib.suppress(RuntimeError):  # the store ends with rank 0; this rank notices that by itself
            for number in itertools.count():
                group.store.set(f"beat{rank()}", group.progress or f"heartbeat {number}")
                if over.wait(min(BEAT_SECONDS, group.timeout_s / 4)):
                    return

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(BEAT_SECONDS)
        group.progress = ""


def note_progress(text: str) -> None:
    """Report the progress of this rank. A report that does not change for the time-out means that the rank hangs."""
    if group := peers():
        group.progress = text


def _wait_for_keys(group: Peers, keys: dict[int, str], what: str) -> None:
    """Wait until each of these ranks has set its key; FaultError if the heartbeat of one does not change any more."""
    begin = last_log = time.monotonic()
    beats: dict[int, tuple[str, float]] = {}  # of each rank, and when it was first seen
    while missing := [other for other, key in keys.items() if not group.store.check([key])]:
        now = time.monotonic()
        for other in missing:
            name = f"beat{other}"
            beat = group.store.get(name).decode() if group.store.check([name]) else ""
            seen, since = beats.setdefault(other, (beat, now))
            if beat != seen:
                beats[other] = beat, now
            elif now - since > group.timeout_s:
                raise FaultError(
                    f"process {other} of {world_size()} died or hangs: it has not moved on from {beat!r} for "
                    f"{group.timeout_s / 60:g} minutes; its log may say why. {RESUME_HINT}"
                )
        if is_main() and now - last_log >= WAIT_LOG_SECONDS:
            last_log = now
            logger.info(
                "%s: %d of %d processes are not ready after %.0f s; rank %d: %s",
                *(what, len(missing), world_size(), now - begin, missing[0], beats[missing[0]][0]),
            )
        time.sleep(min(LOOK_SECONDS * (1 + int(now - begin)), BEAT_SECONDS / 2, group.timeout_s / 8))


def share_of(folder: str) -> tuple[int, int]:
    """This process' number among the ranks that see the same folder, and the number of these ranks.

    Machines may share the folder or have one each: every rank leaves a file there and looks for the files of the
    others. A process that cannot write there is alone.
    """
    token = gather_patiently(uuid.uuid4().hex, "comparing folders")[0]
    names = [os.path.join(folder, f"{token}.rank{number}") for number in range(world_size())]
    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)
        with open(names[rank()], "w"):
            pass
    gather_patiently(None, "comparing folders")
    seen = [number for number, name in enumerate(names) if os.path.exists(name)]
    gather_patiently(None, "comparing folders")
    with contextlib.suppress(OSError):
        os.remove(names[rank()])
    return (seen.index(rank()), len(seen)) if rank() in seen else (0, 1)

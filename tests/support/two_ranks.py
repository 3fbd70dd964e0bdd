"""Two ranks of one gloo group, started once and shared by many tests: a function of a test module runs on both.

    def test_the_sum_is_the_same_on_both_ranks(two_ranks: TwoRanks) -> None:
        assert two_ranks(sum_of, 5) == [11, 11]

The function and its arguments must be picklable, so the function stands at the top of its module.
"""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory
from typing import Any

PATIENCE = 120.0  # seconds for one call on a busy machine
TIMEOUT_MIN = 0.5  # of a collective


class TwoRanks:
    """Two processes, started at the first call and again after an error; the fixture `two_ranks` of `conftest.py`.

    They are no daemons, which a command that ends would kill.
    """

    size = 2

    def __init__(self) -> None:
        self.ranks: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of both ranks; the first exception is raised here, and both ranks end."""
        if not all(process.is_alive() for process, _ in self.ranks):
            self.end()
        if not self.ranks:
            self._start()
        for _, connection in self.ranks:
            connection.send((function, arguments))
        results = [connection.recv() if connection.poll(PATIENCE) else TimeoutError() for _, connection in self.ranks]
        for result in results:
            if isinstance(result, BaseException):
                self.end()
                raise result
        return results

    def errors(self, function: Callable[..., Any], *arguments: Any) -> list[str]:
        """What the function raises on both ranks, as "ValueError: its message"; empty where it raises nothing."""
        return self(_error_of, function, *arguments)

    def _start(self) -> None:
        from runs import context  # a server that has imported everything; not above, where no hook checks shapes yet

        self.folder = TemporaryDirectory()
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, self.size, f"{self.folder.name}/rendezvous"))
            process.start()
            there.close()
            self.ranks.append((process, here))

    def end(self) -> None:
        """End both processes."""
        for process, _ in self.ranks:
            process.kill()
            process.join()
        if self.ranks:
            self.folder.cleanup()
        self.ranks = []


class ThreeRanks(TwoRanks):
    """Three processes: their sums depend on the order of the ranks, those of two do not."""

    size = 3


def _serve(connection: Connection, rank: int, size: int, rendezvous: str) -> None:
    import torch

    from dino_sparo.runtime.launch import init_distributed

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    init_distributed("cpu", f"file://{rendezvous}", TIMEOUT_MIN)
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            result = function(*arguments)
        except Exception as error:
            result = error
        connection.send(result)


def _error_of(function: Callable[..., Any], *arguments: Any) -> str:
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""

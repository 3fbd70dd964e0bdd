"""Training runs in processes of their own, for tests that interrupt them and compare how they end."""

import contextlib
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from recipes import RECIPES
from slurm.cluster import environment_of, is_alive, processes, wait_until

from dino_sparo.__main__ import COMMANDS
from dino_sparo.__main__ import run as run_command
from dino_sparo.weights.checkpoint import load_checkpoint
from dino_sparo.weights.file import verify_checkpoint

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 400.0  # seconds; runs take 5 to 40 on an idle machine, and other work can make a machine ten times slower
FAULT = 75  # exit status of what helps to start again, as in sysexits.h
SPEED_FIELDS = {"train_images_per_s", "train_data_wait"}  # of log.txt; no two runs have them alike


def options(output_dir: Path, command: str = "train", **changes: object) -> list[str]:
    """The words of a command line for the recipe's run of two processes, changed as asked for."""
    values = {**RECIPES[command].options, "output_dir": output_dir, **changes}
    return [word for name, value in values.items() for word in (f"--{name}", *filter(None, str(value).split(",")))]


def small_options(output_dir: Path, command: str = "train", **changes: object) -> list[str]:
    """The words of a command line for the recipe's run of one process; an option without a value is given as ""."""
    return options(output_dir, command, **{**RECIPES[command].small, **changes})


def train_small(command: str, output_dir: Path, **changes: object) -> Path:
    """Train in this process, without the command's catching of errors; returns the folder of the run."""
    entry = COMMANDS[command]
    assert entry.parser is not None
    entry.function(entry.parser().parse_args(small_options(output_dir, command, **changes)))
    return output_dir


def environment() -> dict[str, str]:
    """For processes that run one rank each."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


# What a run leaves.


def epochs_of(output_dir: Path) -> list[dict]:
    """The lines of log.txt without what depends on the machine's speed."""
    lines = (output_dir / "log.txt").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in SPEED_FIELDS} for line in lines]


def checkpoint_of(output_dir: Path) -> dict[str, Any]:
    """The last checkpoint of a run."""
    return load_checkpoint(output_dir / "checkpoint.pth")


def assert_same_state(first: object, second: object, where: str = "") -> None:
    """Equal bit for bit, whatever the nesting."""
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second), where
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for key in first:
            assert_same_state(first[key], second[key], f"{where}.{key}")
    elif isinstance(first, list):
        assert len(first) == len(second), where
        for index, pair in enumerate(zip(first, second, strict=True)):
            assert_same_state(*pair, f"{where}[{index}]")
    else:
        assert type(first) is type(second), where
        assert first == second, where


def assert_same_checkpoint(first: Path, second: Path, command: str = "train") -> None:
    """Two runs ended with the same weights, optimizer and center, bit for bit."""
    states = [checkpoint_of(folder) for folder in (first, second)]
    for key in RECIPES[command].state:
        assert_same_state(states[0][key], states[1][key], key)


def assert_same_run(first: Path, second: Path, command: str = "train") -> None:
    """The same, and the same log."""
    assert_same_checkpoint(first, second, command)
    assert epochs_of(first) == epochs_of(second)


def assert_close_weights(first: Path, second: Path, *networks: str) -> None:
    """Two runs ended with the same weights, up to the rounding of sums in another order."""
    checkpoints = [checkpoint_of(folder) for folder in (first, second)]
    for network in networks:
        weights, others = (checkpoint[network] for checkpoint in checkpoints)
        assert weights.keys() == others.keys()
        for name, value in weights.items():
            # A key's bias has no gradient but rounding, which Adam turns into noise.
            shown = torch.arange(len(value)) // (len(value) // 3) != 1 if name.endswith("qkv.bias") else ...
            assert torch.allclose(value[shown], others[name][shown], atol=1e-4), f"{network}.{name}"


def last_saved_step(log: str) -> int:
    """The last step of which a log says that it was saved; 0 if it does not."""
    found = re.findall(r"saved at step (\d+)", log)
    return int(found[-1]) if found else 0


def checkpoints_of(output_dir: Path) -> list[Path]:
    """All checkpoints a run has left, the newest first."""
    return sorted(output_dir.glob("checkpoint*.pth"))


def assert_whole_checkpoints(output_dir: Path) -> int:
    """Every checkpoint can be read and has the checksums it was written with; returns the newest one's step."""
    steps = []
    for path in checkpoints_of(output_dir):
        verify_checkpoint(path)
        steps.append(int(load_checkpoint(path)["step"]))
    return steps[0] if steps else 0


def newest_save(output_dir: Path) -> int:
    """When the newest checkpoint was written, ns; 0 before the first."""
    try:
        return (output_dir / "checkpoint.pth").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def is_saving(output_dir: Path) -> bool:
    """Whether a checkpoint is being written, or one was left half-written."""
    return any(output_dir.glob(".checkpoint*.tmp"))


def errors_in(log: str) -> list[str]:
    """The lines of rank 0's log that name an error; one from before the log is set up has no time."""
    return re.findall(r"^(?:\d\d:\d\d:\d\d E |--output_dir ).*$", log, flags=re.MULTILINE)


def children_of(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [child for child in processes() if parent_of(child) == pid]


def parent_of(pid: int) -> int | None:
    """The process that has started a process; None if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return None


# Ranks as processes that are forked from a server which has imported everything: they start at once.

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["dino_sparo.dino.train", "dino_sparo.clip.train", "dino_sparo.oc_clip.train", "runs"])


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _become_rank(
    rank: int, size: int, port: int, words: list[str], log: Path, spoil: Callable[[int], None] | None
) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of the data workers, as in any other process
    if spoil is not None:
        spoil(rank)
    run_command(words[0], words[1:])


class Ranks:
    """The processes of one training run, which start as soon as they are described.

    Args:
        folder: of their logs, `rank0.log`, ..., which are added to.
        arguments: the command line, one for all or one per rank.
        size: number of processes.
        spoil: called first in every process, with its rank, to arrange for a fault.
        command: a key of `RECIPES`.
    """

    def __init__(
        self,
        folder: Path,
        arguments: list[str] | list[list[str]],
        size: int = 2,
        spoil: Callable[[int], None] | None = None,
        command: str = "train",
    ) -> None:
        port = free_port()
        each = [list(words) for words in arguments] if isinstance(arguments[0], list) else [list(arguments)] * size
        self.logs = [folder / f"rank{rank}.log" for rank in range(size)]
        self.members: list[BaseProcess] = [
            context.Process(
                target=_become_rank, args=(rank, size, port, [command, *each[rank]], self.logs[rank], spoil)
            )
            for rank in range(size)
        ]
        for member in self.members:
            member.start()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            for child in children_of(member.pid or -1):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)  # a data worker that is stopped would outlive it
            member.kill()
            member.join()

    def pid(self, rank: int) -> int:
        """The process of a rank."""
        pid = self.members[rank].pid
        assert pid is not None
        return pid

    def log(self, rank: int = 0) -> str:
        """What a rank has said so far."""
        return self.logs[rank].read_text(errors="replace") if self.logs[rank].is_file() else ""

    def wait(self, seconds: float = PATIENCE) -> list[int | None]:
        """The exit statuses, -N for a process killed by signal N and None for one that still runs then."""
        end = time.monotonic() + seconds
        for member in self.members:
            member.join(max(end - time.monotonic(), 0))
        return [member.exitcode for member in self.members]

    def wait_for_save(self, output_dir: Path) -> None:
        """Wait until a checkpoint is newer than the last one was when this was called."""
        before = newest_save(output_dir)
        wait_until(
            lambda: newest_save(output_dir) > before or not any(member.is_alive() for member in self.members),
            PATIENCE,
            f"a checkpoint in {output_dir}",
        )
        assert newest_save(output_dir) > before, self.log()


def train_small_on_two_ranks(command: str, output_dir: Path, **changes: object) -> Path:
    """Train in two processes; returns the folder of the run."""
    with Ranks(output_dir.parent, small_options(output_dir, command, **changes), command=command) as ranks:
        assert ranks.wait() == [0, 0], ranks.log()
    return output_dir


def undisturbed(folder: Path, command: str = "train", **changes: object) -> Path:
    """The folder of a run of two processes that nobody disturbs; taken once for every `folder`."""
    output_dir = folder / "undisturbed"
    if not (output_dir / "finished").is_file():
        output_dir.mkdir(exist_ok=True)
        with Ranks(output_dir, options(output_dir, command, **changes), command=command) as ranks:
            assert ranks.wait() == [0, 0], ranks.log()
        (output_dir / "finished").touch()
    return output_dir


# Ranks under torchrun.


class Torchrun:
    """`torchrun main_dino.py`, or `torchrun -m dino_sparo COMMAND`, two processes.

    Args:
        arguments: the options of the command.
        log: what all of them say.
        launcher: torchrun's own options.
        command: a key of `RECIPES`.
    """

    def __init__(self, arguments: list[str], log: Path, *launcher: str, command: str = "train") -> None:
        self.log = log
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *launcher]
        program = [str(ROOT / "main_dino.py")] if command == "train" else ["-m", "dino_sparo", command]
        with log.open("a") as file:
            self.agent = subprocess.Popen(
                [*start, *program, *arguments], **{"cwd": ROOT, "env": environment(), "stdout": file, "stderr": file}
            )

    def __enter__(self) -> "Torchrun":
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [self.agent.pid, *(member for member, _ in self.ranks())]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.agent.wait()

    def ranks(self) -> list[tuple[int, int]]:
        """Process and rank of the living workers of this agent."""
        return sorted(
            ((pid, number) for pid in processes() if (number := self._rank(pid)) is not None), key=lambda pair: pair[1]
        )

    def _rank(self, pid: int) -> int | None:
        variables = environment_of(pid) if parent_of(pid) == self.agent.pid and is_alive(pid) else {}
        return int(variables["RANK"]) if "RANK" in variables else None

    def wait(self, seconds: float = PATIENCE) -> int:
        """The exit status of torchrun."""
        try:
            return self.agent.wait(seconds)
        except subprocess.TimeoutExpired:
            message = f"torchrun still runs after {seconds:.0f} s:\n{self.log.read_text(errors='replace')}"
            raise AssertionError(message) from None

    def wait_for_ranks(self, others_than: set[int]) -> list[tuple[int, int]]:
        """Wait until two workers that are new have started, or the agent has ended."""
        found: list[tuple[int, int]] = []

        def are_here() -> bool:
            nonlocal found
            found = [(pid, rank) for pid, rank in self.ranks() if pid not in others_than]
            return len(found) == 2 or self.agent.poll() is not None

        wait_until(are_here, PATIENCE, "torchrun to start its workers", pause=0.02)
        return found


# Moments of a run at which it is killed.


class Moments:
    """Draws when to kill: anywhere in the start, in training, or while a checkpoint is being written.

    Args:
        seed: of the draws.
        start_seconds: how long a start takes, about.
    """

    PHASES = ("start", "training", "saving")

    def __init__(self, seed: int, start_seconds: float = 5.0) -> None:
        self.random, self.start_seconds = random.Random(seed), start_seconds

    def draw(self) -> "Moment":
        """The next moment; one phase is as likely as another."""
        phase = self.random.choice(self.PHASES)
        # Only rank 0 writes: its end in the middle of it is what a checkpoint has to survive.
        rank = 0 if phase == "saving" and self.random.random() < 0.75 else self.random.randrange(2)
        longest = {"start": self.start_seconds, "training": 0.3, "saving": 0.01}[phase]
        return Moment(phase, rank, 0 if phase == "start" else self.random.randrange(3), self.random.random() * longest)


class Moment:
    """When and whom to kill.

    Args:
        phase: of the run.
        rank: of the process to be killed.
        saves: checkpoints that are written first.
        seconds: that are waited in the phase.
    """

    def __init__(self, phase: str, rank: int, saves: int, seconds: float) -> None:
        self.phase, self.rank, self.saves, self.seconds = phase, rank, saves, seconds

    def wait(self, output_dir: Path, has_ended: Callable[[], bool]) -> None:
        """Wait for it, or until the run has ended."""
        for condition in self._conditions(output_dir):
            wait_until(lambda condition=condition: condition() or has_ended(), PATIENCE, self.phase, pause=0.001)
        time.sleep(self.seconds)

    def _conditions(self, output_dir: Path) -> Iterator[Callable[[], bool]]:
        if self.phase == "start":
            return
        # The remains of a save that was killed are no sign of a new one: the first save comes and goes.
        for _ in range(self.saves + 1):
            before = newest_save(output_dir)
            yield lambda before=before: newest_save(output_dir) > before
        if self.phase == "saving":
            yield lambda: is_saving(output_dir)

"""Processes that load images leave no files behind, however the process ends that they load for."""

import multiprocessing
import multiprocessing.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from dino_sparo.runtime.workers import end_workers, remove_temporary_folder, share_temporary_folder

# Takes two batches from two workers, then ends in the way that the first word says.
PROGRAM = """
import os, signal, sys, time
from dino_sparo.data.loader import create_loader
from dino_sparo.runtime.workers import end_workers, remove_temporary_folder
import torch

class Tensors(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((3,), float(index))

batches = iter(create_loader(Tensors(), range(64), num_workers=2, collate=torch.stack))
shared = next(batches)
print(sum(name.startswith("pymp-") for name in os.listdir(os.environ["TMPDIR"])), flush=True)
if sys.argv[1] == "exit":
    end_workers()
elif sys.argv[1] == "at once":
    remove_temporary_folder()
    os._exit(75)
else:
    time.sleep(60)
"""


def start(folder: Path, how: str) -> subprocess.Popen:
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.replace("range(64)", "[[i] for i in range(64)]"), how],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", ["exit", "at once", "kill"])
def test_no_temporary_folder_of_a_worker_stays_behind(tmp_path: Path, how: str) -> None:
    """The bug: the folder pymp-* of each worker stayed in $TMPDIR, since workers are killed when a run is stopped."""
    with start(tmp_path, how) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) >= 1, "the workers' sockets lie in a folder"
        if how == "kill":
            process.send_signal(signal.SIGTERM)
        process.wait(60)
    end = time.monotonic() + 30  # workers look every five seconds whether their parent lives
    while list(tmp_path.glob("pymp-*")) and time.monotonic() < end:
        time.sleep(0.1)
    assert list(tmp_path.glob("pymp-*")) == []


def _share_and_remove() -> None:
    share_temporary_folder()
    remove_temporary_folder()


CONTINUES = """
import os, multiprocessing.util, torch
from torch.utils.data import DataLoader
from dino_sparo.runtime.workers import remove_temporary_folder, share_temporary_folder

share_temporary_folder()
removed = multiprocessing.util.get_temp_dir()
remove_temporary_folder()
share_temporary_folder()
loader = DataLoader(range(5), num_workers=1, multiprocessing_context="fork", timeout=20)
print(torch.cat(list(loader)).tolist(), removed != multiprocessing.util.get_temp_dir(), flush=True)
os._exit(0)
"""


def test_a_process_that_continues_without_its_folder_gets_another_for_its_next_workers() -> None:
    """The bug: a worker that could not open a socket in the removed folder made its loader wait forever."""
    done = subprocess.run([sys.executable, "-c", CONTINUES], capture_output=True, text=True, timeout=100)
    assert done.stdout == "[0, 1, 2, 3, 4] True\n", done.stderr


def test_a_worker_that_is_killed_within_a_lock_blocks_nobody() -> None:
    """The bug: torch's iterator waited for the lock forever, after the run had reported its error."""
    batches = iter(DataLoader(range(5), num_workers=1, multiprocessing_context="fork", timeout=20))
    next(batches)
    batches._workers_done_event._cond.acquire()  # type: ignore[attr-defined]
    end_workers()
    del batches
    assert not multiprocessing.active_children()


def test_a_process_never_removes_the_folder_of_the_process_that_started_it() -> None:
    """The bug: a rank that multiprocessing had started removed the sockets of its parent's fork server."""
    folder = Path(multiprocessing.util.get_temp_dir())
    child = multiprocessing.get_context("forkserver").Process(target=_share_and_remove)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert folder.is_dir()

"""Faults while main_dino.py trains: all ranks end in a bounded time, one line says why, the checkpoints stay whole.

Most tests fork their two ranks from a server that has imported everything; the last ones use torchrun itself. What
the same faults do under Slurm stands in tests/slurm.
"""

import contextlib
import io
import json
import math
import multiprocessing
import os
import random
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from image_files import write_images
from runs import (
    FAULT,
    PATIENCE,
    Moments,
    Ranks,
    Torchrun,
    assert_same_run,
    assert_whole_checkpoints,
    checkpoints_of,
    children_of,
    context,
    errors_in,
    is_saving,
    last_saved_step,
    newest_save,
    options,
    undisturbed,
)
from slurm.cluster import is_alive, wait_until

import dino_sparo.data.sources.decode
import dino_sparo.distillation.loss
from dino_sparo.evaluation import knn_probe
from dino_sparo.runtime.files import open_regular
from dino_sparo.runtime.launch import CONTROL_FACTOR
from dino_sparo.training import run as training_run
from dino_sparo.weights.checkpoint import load_checkpoint
from dino_sparo.weights.folder import CheckpointFolder

pytestmark = [pytest.mark.slow, pytest.mark.alone]
LIMIT = 15.0  # seconds within which all ranks are gone, beyond the time-out where one counts
HANG_MIN = 0.05  # --dist_timeout_min of the tests about what hangs
LONG = 20  # epochs of 18 steps and 2 checkpoints each


@pytest.fixture(scope="session", autouse=True)
def server() -> None:
    """The server that ranks are forked from has imported everything: tests count seconds from a rank's start."""
    first = context.Process(target=int)
    first.start()
    first.join()


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbs."""
    return undisturbed(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="session")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbs and that is long enough to be killed many times."""
    return undisturbed(tmp_path_factory.mktemp("long"), epochs=LONG)


def have_ended(pids: Iterable[int]) -> bool:
    return not any(is_alive(pid) for pid in pids)


def assert_ended(ranks: Ranks, statuses: list[int], begin: float, message: str, limit: float = LIMIT) -> None:
    """All ranks ended in time, and the only error of rank 0 is the message."""
    found = ranks.wait(limit - (time.monotonic() - begin))
    assert found == statuses, ranks.log(0) + ranks.log(1)
    errors = errors_in(ranks.log(0))
    assert len(errors) == 1, ranks.log(0)
    assert re.search(message, errors[0]), errors[0]
    assert "Traceback" not in ranks.log(0)


# Processes that die or hang.


def test_a_killed_rank_ends_the_others_and_the_run_goes_on_to_the_same_bits(tmp_path: Path, whole: Path) -> None:
    with Ranks(tmp_path, options(tmp_path)) as ranks:
        ranks.wait_for_save(tmp_path)
        os.kill(ranks.pid(1), signal.SIGKILL)
        assert_ended(ranks, [FAULT, -signal.SIGKILL], time.monotonic(), "another process died")
    assert assert_whole_checkpoints(tmp_path) > 0
    with Ranks(tmp_path, options(tmp_path)) as ranks:
        assert ranks.wait() == [0, 0], ranks.log()
    assert_same_run(whole, tmp_path)


def kill_rank_1_in_an_evaluation(rank: int) -> None:
    training_run.MUCH_TO_LOSE_S = 0.0
    if rank == 1:
        knn_probe.classify_shards = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_in_an_evaluation_loses_no_step_and_the_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    changes = {"knn_freq": 1, "epochs": 2, "saveckp_minutes": 0}
    whole = undisturbed(tmp_path, **changes)
    (folder := tmp_path / "parts").mkdir()
    with Ranks(folder, options(folder, **changes), spoil=kill_rank_1_in_an_evaluation) as ranks:
        assert ranks.wait() == [FAULT, -signal.SIGKILL]
        assert "another process died" in ranks.log()
    assert assert_whole_checkpoints(folder) == 18
    with Ranks(folder, options(folder, **changes)) as ranks:
        assert ranks.wait() == [0, 0], ranks.log()
    assert "18 steps done" in ranks.log()
    assert_same_run(whole, folder)


def test_a_dead_data_worker_ends_all_ranks(tmp_path: Path) -> None:
    with Ranks(tmp_path, options(tmp_path, num_workers=1)) as ranks:
        ranks.wait_for_save(tmp_path)
        wait_until(lambda: children_of(ranks.pid(0)), PATIENCE, "a data worker")
        begin = time.monotonic()
        while time.monotonic() - begin < LIMIT and ranks.members[0].is_alive():  # an epoch's worker may just be ending
            for worker in children_of(ranks.pid(0)):
                os.kill(worker, signal.SIGKILL)
            time.sleep(0.05)
        assert_ended(ranks, [FAULT, FAULT], begin, "a process that loads images died")
    assert assert_whole_checkpoints(tmp_path) > 0


def test_a_rank_that_hangs_ends_the_others_after_the_timeout(tmp_path: Path) -> None:
    with Ranks(tmp_path, options(tmp_path, dist_timeout_min=HANG_MIN)) as ranks:
        ranks.wait_for_save(tmp_path)
        os.kill(ranks.pid(1), signal.SIGSTOP)
        ranks.members[0].join(CONTROL_FACTOR * 60 * HANG_MIN + LIMIT)  # it may hang while the others wait for its save
        os.kill(ranks.pid(1), signal.SIGCONT)  # a launcher would kill it; here it finds itself alone
        assert_ended(ranks, [FAULT, FAULT], time.monotonic(), r"did not answer for 0\.(05|3) minutes")
    assert assert_whole_checkpoints(tmp_path) > 0


def _hang_when(stuck: Path, rank: int) -> None:
    """Once a file is there, opening one image takes for ever, as on a network disk that does not answer any more."""

    def open_or_hang(path: str) -> io.BufferedReader:
        while stuck.exists() and path.endswith("05.png"):
            time.sleep(60)
        return open_regular(path)

    dino_sparo.data.sources.decode.open_regular = open_or_hang  # type: ignore[attr-defined]


def test_an_image_that_is_never_read_ends_all_ranks_after_the_timeout(tmp_path: Path) -> None:
    images, stuck = write_images(tmp_path / "images"), tmp_path / "stuck"
    changes = {"data_path": images, "num_workers": 1, "dist_timeout_min": HANG_MIN, "epochs": 1000}
    with Ranks(tmp_path, options(tmp_path / "run", **changes), spoil=partial(_hang_when, stuck)) as ranks:
        ranks.wait_for_save(tmp_path / "run")
        stuck.touch()
        message = "loads images died or hangs|another process (died|did not answer)"
        assert_ended(ranks, [FAULT, FAULT], time.monotonic(), message, 60 * HANG_MIN + LIMIT)
    assert assert_whole_checkpoints(tmp_path / "run") > 0


# What the user must mend.


def _work_in(folder: Path, rank: int) -> None:
    os.chdir(folder if rank == 0 else folder.parent)


def test_a_folder_missing_on_one_rank_is_named_on_rank_0(tmp_path: Path) -> None:
    write_images(tmp_path / "mounted-on-rank-0")
    words = options(tmp_path / "run", data_path="mounted-on-rank-0")
    begin = time.monotonic()
    with Ranks(tmp_path, words, spoil=partial(_work_in, tmp_path)) as ranks:
        assert_ended(ranks, [1, 1], begin, "rank 1: .*mounted-on-rank-0")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_read_only_output_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o500)
    with Ranks(tmp_path, options(tmp_path / "run")) as ranks:
        assert_ended(ranks, [1, 1], time.monotonic(), "run cannot be written .*Permission denied")


def test_too_many_corrupt_images_end_all_ranks(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images")
    (images / "03.png").write_bytes(b"")
    (images / "07.png").write_bytes(b"no image")
    begin = time.monotonic()
    with Ranks(tmp_path, options(tmp_path / "run", data_path=images, max_corrupt=0)) as ranks:
        # The ranks meet one image each; how many of both they know of when they agree depends on who is faster.
        assert_ended(ranks, [1, 1], begin, "[12] of 12 images are unreadable")
        named = ranks.log(0) + ranks.log(1)
    assert re.search(r"skipped an unreadable image: .*0[37]\.png", named)


def _spoil_losses_of_rank_1(rank: int) -> None:
    forward = dino_sparo.distillation.loss.DINOLoss.forward
    number = 0

    def spoiled(self: torch.nn.Module, *args: object, **named: object) -> torch.Tensor:
        nonlocal number
        number += 1
        loss = forward(self, *args, **named)
        return loss * math.nan if rank == 1 and number == 23 else loss

    dino_sparo.distillation.loss.DINOLoss.forward = spoiled


def test_a_loss_that_is_not_finite_on_one_rank_ends_all(tmp_path: Path) -> None:
    with Ranks(tmp_path, options(tmp_path), spoil=_spoil_losses_of_rank_1) as ranks:
        ranks.wait_for_save(tmp_path)
        message = r"the loss is not finite at step 22 .*rank 1: loss nan, images scen"
        assert_ended(ranks, [1, 1], time.monotonic(), message)
    assert 0 < assert_whole_checkpoints(tmp_path) <= 22


# Saving.


def _allow_files_of_1_mib(rank: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))


def _assert_save_fails(output_dir: Path, log: Path, message: str, spoil: Callable[[int], None] | None = None) -> None:
    with Ranks(log, options(output_dir), spoil=spoil) as ranks:
        assert_ended(ranks, [1, 1], time.monotonic(), message, PATIENCE)


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path: Path, whole: Path) -> None:
    with Ranks(tmp_path, options(tmp_path, max_steps=18)) as ranks:
        assert ranks.wait() == [0, 0], ranks.log()
    before = {path.name: path.read_bytes() for path in tmp_path.glob("checkpoint*.pth")}
    (tmp_path / "rank0.log").unlink()
    message = "could not write .*checkpoint.pth.* the previous checkpoint is kept"
    _assert_save_fails(tmp_path, tmp_path, message, _allow_files_of_1_mib)
    assert (tmp_path / "checkpoint.pth").read_bytes() == before["checkpoint.pth"]
    assert assert_whole_checkpoints(tmp_path) == 18
    assert not is_saving(tmp_path)
    with Ranks(tmp_path, options(tmp_path)) as ranks:
        assert ranks.wait() == [0, 0], ranks.log()
    assert_same_run(whole, tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path, whole: Path) -> Iterator[Path]:
    """A disk with room for two checkpoints and half of a third."""
    folder = tmp_path / "disk"
    folder.mkdir()
    size = 5 * (whole / "checkpoint.pth").stat().st_size // 2
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk, and not everywhere")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_leaves_the_checkpoint_before(small_disk: Path, tmp_path: Path) -> None:
    _assert_save_fails(small_disk, tmp_path, "could not write .* previous checkpoint is kept; free some")
    assert assert_whole_checkpoints(small_disk) > 0


SAVES_SIZE = 16_000_000  # numbers in the checkpoint that is killed while it is written: 64 MB


def _save_again_and_again(folder: Path, marks: Connection, step: int) -> None:
    """Write checkpoints, and say before and after each of them so."""
    checkpoints, weights = CheckpointFolder(folder, keep=3), torch.arange(SAVES_SIZE, dtype=torch.float32)
    while True:
        step += 1
        marks.send(("begin", step))
        checkpoints.save({"step": step, "student": {"w": weights}}, ["checkpoint_best.pth"])
        marks.send(("end", step))


def _last(marks: Connection, last: tuple[str, int]) -> tuple[str, int]:
    """The last thing a killed process has said, after what was heard already."""
    with contextlib.suppress(EOFError):
        while True:
            last = marks.recv()
    return last


@pytest.mark.parametrize("number", [5, pytest.param(25, marks=pytest.mark.kills)])
def test_kills_aimed_at_the_inside_of_a_large_save_use_up_no_fallback(tmp_path: Path, number: int) -> None:
    """Kills at random moments of one save's length, of a process that does nothing but save."""
    moments, inside, seconds, newest = random.Random(7), 0, 0.5, 0
    for _ in range(number):
        marks, writer = multiprocessing.Pipe(duplex=False)
        process = context.Process(target=_save_again_and_again, args=(tmp_path, writer, newest))
        process.start()
        writer.close()
        heard = marks.recv()
        if newest < 3:  # there are to be three before the first kill; they tell how long a save takes
            for _ in range(3):
                assert marks.recv()[0] == "end"
                begin = time.monotonic()
                assert marks.recv()[0] == "begin"
            heard = marks.recv()
            seconds = time.monotonic() - begin
        time.sleep(moments.random() * seconds)
        process.kill()
        process.join()
        event, step = _last(marks, heard)
        inside += event == "begin"
        found = [int(load_checkpoint(path)["step"]) for path in checkpoints_of(tmp_path) if "best" not in path.name]
        assert len(set(found)) == 3, "three different ones, each of them whole"
        assert found == sorted(found, reverse=True)
        assert found[0] in ((step - 1, step) if event == "begin" else (step,))
        newest = found[0]
    assert inside >= number // 2


# Signals.


def test_a_signal_to_one_rank_stops_all_after_the_same_step_with_a_checkpoint(tmp_path: Path, whole: Path) -> None:
    with Ranks(tmp_path, options(tmp_path, saveckp_minutes=0)) as ranks:
        wait_until(lambda: (tmp_path / "log.txt").is_file(), PATIENCE, "the first epoch")
        os.kill(ranks.pid(1), signal.SIGINT)
        assert ranks.wait(LIMIT) == [130, 130], ranks.log(0) + ranks.log(1)
    assert assert_whole_checkpoints(tmp_path) == last_saved_step(ranks.log()) >= 18
    with Ranks(tmp_path, options(tmp_path, num_workers=1)) as ranks:
        assert ranks.wait() == [0, 0], ranks.log()
    assert_same_run(whole, tmp_path)


# The real launcher.


def kill_under_torchrun(
    output_dir: Path, seed: int, number: int, command: str = "train", **changes: object
) -> list[str]:
    """Kill random ranks of a run under torchrun at random moments, then let it end; returns the phases of the kills."""
    moments, seen, kills = Moments(seed), set[int](), list[str]()
    output_dir.mkdir()
    launcher = ("--max-restarts", str(number), "--monitor-interval", "0.1")
    with Torchrun(
        options(output_dir, command, **changes), output_dir / "all.log", *launcher, command=command
    ) as torchrun:
        while len(kills) < number:
            ranks = {rank: pid for pid, rank in torchrun.wait_for_ranks(seen)}
            moment, step = moments.draw(), assert_whole_checkpoints(output_dir)
            moment.wait(output_dir, lambda: torchrun.agent.poll() is not None)
            assert torchrun.agent.poll() is None, f"ended after {len(kills)} kills"
            os.kill(ranks[moment.rank], signal.SIGKILL)
            wait_until(partial(have_ended, ranks.values()), 2 * LIMIT, "the ranks to end", pause=0.01)
            kills.append(moment.phase)
            assert assert_whole_checkpoints(output_dir) >= step
            seen |= set(ranks.values())
        assert torchrun.wait() == 0
    return kills


@pytest.mark.parametrize(("number", "seed"), [(3, 10), pytest.param(25, 2, marks=pytest.mark.kills)])
def test_kills_under_torchrun_end_in_the_same_bits(tmp_path: Path, long: Path, number: int, seed: int) -> None:
    kills = kill_under_torchrun(tmp_path / "run", seed, number, num_workers=1, epochs=LONG)
    assert_same_run(long, tmp_path / "run")
    assert len(kills) == number
    assert min(kills.count(phase) for phase in Moments.PHASES) >= max(1, number // 8)


def test_ranks_end_when_torchrun_itself_is_killed_and_a_new_one_goes_on(tmp_path: Path, long: Path) -> None:
    (tmp_path / "run").mkdir()
    with Torchrun(options(tmp_path / "run", epochs=LONG), tmp_path / "log") as torchrun:
        ranks = torchrun.wait_for_ranks(set())
        wait_until(lambda: newest_save(tmp_path / "run"), PATIENCE, "a checkpoint")
        os.kill(torchrun.agent.pid, signal.SIGKILL)
        wait_until(partial(have_ended, [pid for pid, _ in ranks]), LIMIT, "orphaned ranks to end")
    step = assert_whole_checkpoints(tmp_path / "run")
    assert 0 < step < 18 * LONG, "the orphans trained to the end"
    with Torchrun(options(tmp_path / "run", epochs=LONG), tmp_path / "log") as torchrun:
        assert torchrun.wait() == 0, (tmp_path / "log").read_text()
    assert_same_run(long, tmp_path / "run")


def test_a_terminated_torchrun_leaves_a_checkpoint_to_go_on_from(tmp_path: Path, long: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with Torchrun(options(run, num_workers=1, epochs=LONG), tmp_path / "log") as torchrun:
        torchrun.wait_for_ranks(set())
        wait_until(lambda: (run / "log.txt").is_file(), PATIENCE, "the first epoch")
        torchrun.agent.send_signal(signal.SIGTERM)
        assert torchrun.wait(2 * LIMIT) != 0
    log = (tmp_path / "log").read_text()
    said = re.search(r"after step (\d+), which is saved", log)
    assert said is not None, log
    assert assert_whole_checkpoints(run) == int(said[1])
    with Torchrun(options(run, epochs=LONG), tmp_path / "log") as torchrun:
        assert torchrun.wait() == 0, (tmp_path / "log").read_text()
    assert_same_run(long, run)
    assert len(json.loads((run / "log.txt").read_text().splitlines()[0])) > 5

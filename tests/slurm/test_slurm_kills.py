"""Ranks of Slurm jobs are killed at random moments, again and again; the batch script requeues the job each time."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from runs import PATIENCE, Moments, assert_same_run, assert_whole_checkpoints, undisturbed
from slurm.cluster import Cluster, is_alive, wait_until
from slurm.jobs import Job, submit

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

EPOCHS = 10
LIMIT = 15.0  # seconds within which all tasks of a job are gone


@pytest.fixture(scope="session")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbs, long enough to be killed a few times."""
    return undisturbed(tmp_path_factory.mktemp("long"), epochs=EPOCHS)


def kill_again_and_again(job: Job, output_dir: Path, seed: int, kills: int) -> None:
    """Kill a random task at a random moment, wait until the job is requeued, and so on; then let it end."""
    moments = Moments(seed)
    for number in range(kills):
        wait_until(lambda number=number: job.restarts == number and job.state == "RUNNING", PATIENCE, "a start")
        ranks = job.wait_for_ranks(2)
        moment, step = moments.draw(), assert_whole_checkpoints(output_dir)
        moment.wait(output_dir, lambda ranks=ranks: not all(map(is_alive, ranks.values())))
        assert set(ranks) == {0, 1}, job.log()
        assert all(map(is_alive, ranks.values())), job.log()
        os.kill(ranks[moment.rank], signal.SIGKILL)
        wait_until(lambda ranks=ranks: not any(map(is_alive, ranks.values())), LIMIT, "the tasks to end", pause=0.01)
        assert assert_whole_checkpoints(output_dir) >= step
        wait_until(lambda number=number: job.restarts == number + 1, PATIENCE, f"job {job.number} to be requeued")
    assert job.wait_for_end(4 * PATIENCE) == "COMPLETED", job.log()
    assert job.restarts == kills


# The jobs run at the same time, since a requeued one waits most of the time.
@pytest.mark.parametrize(("num_jobs", "kills_per_job"), [(1, 1), pytest.param(4, 6, marks=pytest.mark.kills)])
def test_killed_jobs_are_requeued_and_end_in_the_same_bits(
    slurm: Cluster, tmp_path: Path, long: Path, num_jobs: int, kills_per_job: int
) -> None:
    folders = [tmp_path / str(number) for number in range(num_jobs)]
    jobs = []
    for number, folder in enumerate(folders):
        folder.mkdir()
        jobs.append(submit(slurm, folder, "--max_requeues", str(kills_per_job), epochs=EPOCHS, num_workers=number % 2))
    with ThreadPoolExecutor(num_jobs) as pool:
        seeds = range(100, 100 + num_jobs)
        list(pool.map(kill_again_and_again, jobs, folders, seeds, [kills_per_job] * num_jobs))
    for folder in folders:
        assert_same_run(long, folder)

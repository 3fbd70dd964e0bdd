"""A Slurm cluster for the tests.

Skipped where slurm-wlm and munge are not installed, unless REQUIRE_SLURM is set, as in continuous integration.
"""

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import PATIENCE, ROOT, undisturbed
from slurm.cluster import PACKAGES, Cluster, free_port, missing_programs, wait_until


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes, for as long as the tests take."""
    if missing_programs():
        reason = f"Slurm is not installed ({PACKAGES}): {', '.join(missing_programs())} not found"
        pytest.fail(reason) if os.environ.get("REQUIRE_SLURM") else pytest.skip(reason)
    worker = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or 0)
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), free_port(8 * worker + os.getpid() % 8))
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture
def slurm(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster, as this process and its children see it during one test; jobs that are left over end with it."""
    variables = cluster.environment()
    for name in set(os.environ) - set(variables):
        monkeypatch.delenv(name)
    for name, value in {**variables, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)  # a job finds the scripts in the folder it was submitted from
    yield cluster
    numbers = cluster.command("squeue", "--noheader", "--format=%A").split()
    if numbers:
        with contextlib.suppress(subprocess.CalledProcessError):  # a job that waits has nothing to be killed
            cluster.command("scancel", "--full", "--signal=KILL", *numbers)
        with contextlib.suppress(subprocess.CalledProcessError):  # and one that ends meanwhile cannot be cancelled
            cluster.command("scancel", *numbers)
        wait_until(lambda: not cluster.command("squeue", "--noheader"), PATIENCE, "the jobs to end")


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbs."""
    return undisturbed(tmp_path_factory.mktemp("whole"))

"""Jobs on the tests' cluster: submitted, looked at, signalled, killed."""

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path

from runs import PATIENCE, options, parent_of
from slurm.cluster import Cluster, environment_of, is_alive, processes, wait_until

import run_with_submitit

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED")


@dataclass(frozen=True)
class Job:
    """A job of a cluster.

    Attributes:
        cluster: where it runs.
        number: Slurm's.
        folder: of its logs.
    """

    cluster: Cluster
    number: str
    folder: Path

    def fields(self) -> dict[str, str]:
        """What Slurm says about it."""
        shown = self.cluster.command("scontrol", "--oneliner", "show", "job", self.number)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    @property
    def state(self) -> str:
        return self.fields()["JobState"]

    @property
    def restarts(self) -> int:
        return int(self.fields()["Restarts"])

    def wait_for_end(self, seconds: float = 2 * PATIENCE) -> str:
        """Wait until the job is over for good; returns its state."""
        wait_until(lambda: self.state in ENDED, seconds, f"job {self.number} to end", pause=0.2)
        return self.state

    def ranks(self) -> dict[int, int]:
        """The processes of the running tasks, by rank; without those that they have started themselves."""
        found: dict[int, int] = {}
        for pid in processes():
            variables = environment_of(pid)
            if (variables.get("SLURM_CONF"), variables.get("SLURM_JOB_ID")) != (str(self.cluster.conf), self.number):
                continue
            if "SLURM_PROCID" in variables and "SLURM_STEP_NUM_TASKS" in variables and _is_task(pid):
                found[int(variables["SLURM_PROCID"])] = pid
        return found

    def wait_for_ranks(self, number: int) -> dict[int, int]:
        """Wait until the tasks have started."""
        wait_until(lambda: len(self.ranks()) == number or self.state in ENDED, PATIENCE, "the tasks", pause=0.1)
        return self.ranks()

    def signal(self, name: str) -> None:
        """`scancel --signal`."""
        self.cluster.command("scancel", f"--signal={name}", self.number)

    def log(self) -> str:
        """All that its tasks have said."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*_log.*")))


def _is_task(pid: int) -> bool:
    """Whether a process of a job is the one that Slurm started as a task."""
    try:
        return Path(f"/proc/{parent_of(pid)}/comm").read_text().startswith("slurmstepd") and is_alive(pid)
    except OSError:
        return False


def submit(
    cluster: Cluster, output_dir: Path, *words: str, tasks: int = 2, command: str = "train", **changes: object
) -> Job:
    """run_with_submitit.py in this process, which has imported all it needs: one node unless `words` say otherwise."""
    resources = f"--ngpus {tasks} --cpus_per_task 1 --timeout_min 60 --mem_gb_per_gpu 1".split()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        run_with_submitit.main([*resources, *words, *options(output_dir, command, **changes)])
    return submitted(cluster, output_dir, said.getvalue())


def submitted(cluster: Cluster, output_dir: Path, said: str) -> Job:
    """The job of which run_with_submitit.py has spoken."""
    found = re.search(r"job (\d+)", said)
    assert found, said
    return Job(cluster, found[1], output_dir / found[1])


def sbatch(cluster: Cluster, folder: Path, command: str, *words: str) -> Job:
    """A batch script without submitit."""
    script = folder / "job.sh"
    script.write_text(f"#!/bin/sh\n{command}\n")
    output = f"--output={folder}/plain_log.out"
    number = cluster.command("sbatch", "--parsable", "--open-mode=append", output, *words, str(script)).strip()
    return Job(cluster, number, folder)

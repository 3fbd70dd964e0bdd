"""run_with_submitit.py on a real Slurm: it trains, and what takes its machines away costs it nothing."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import (
    PATIENCE,
    RECIPES,
    ROOT,
    assert_same_run,
    assert_whole_checkpoints,
    epochs_of,
    last_saved_step,
    options,
    undisturbed,
)
from slurm.cluster import Cluster, wait_until
from slurm.jobs import Job, sbatch, submit, submitted
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from main_dino import get_args_parser, train_dino

pytestmark = pytest.mark.slurm

EIGHT = {"data_path": "scenes:32:32", "local_crops_number": 2, "epochs": 2, "drop_path_rate": 0, "saveckp_minutes": 0}


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process with the batch of eight."""
    folder = tmp_path_factory.mktemp("single")
    train_dino(get_args_parser().parse_args(options(folder, **EIGHT, batch_size_per_gpu=16)))
    return [line["train_loss"] for line in epochs_of(folder)]


def test_eight_tasks_have_the_losses_of_one_process_with_their_batch(
    slurm: Cluster, tmp_path: Path, single: list[float]
) -> None:
    words = ["--nodes", "2", "--cpus_per_task", "16", "--mem_gb_per_gpu", "200", "--partition", "main", "--qos", "any"]
    job = submit(slurm, tmp_path, *words, tasks=4, **EIGHT, batch_size_per_gpu=2)
    assert job.wait_for_end() == "COMPLETED", job.log()
    assert int(job.fields()["NumNodes"]) == 2
    assert [line["train_loss"] for line in epochs_of(tmp_path)] == pytest.approx(single, abs=1e-5)


# What ends a job early, and starts it again.


def wait_for_epoch(output_dir: Path, job: Job) -> dict[int, int]:
    """Wait for the first line of log.txt; returns the ranks' processes."""
    wait_until(lambda: (output_dir / "log.txt").is_file() or job.state == "FAILED", PATIENCE, "an epoch", pause=0.02)
    return job.ranks()


def assert_went_on(job: Job, whole: Path, output_dir: Path, most_restarts: int = 1, command: str = "train") -> None:
    """The job was requeued, went on under its number from where it was, and ended as if nothing had happened."""
    wait_until(lambda: job.restarts >= 1, PATIENCE, f"job {job.number} to be requeued", pause=0.1)
    assert job.wait_for_end() == "COMPLETED", job.log()
    assert 1 <= job.restarts <= most_restarts
    assert_same_run(whole, output_dir, command)
    log = (output_dir / "run.log").read_text()
    saved, resumed = re.findall(r"saved at step (\d+)", log), re.findall(r"resumed .*, (\d+) steps done", log)
    assert 1 <= len(resumed) <= job.restarts
    assert set(resumed) <= set(saved)
    saves = log.count("saved at step") - log.count("before the epoch is evaluated")  # it is saved again afterwards
    assert saves == len(set(saved)) + log.count("the job is requeued")  # no step was taken twice


def test_oc_clips_training_is_requeued_and_goes_on_to_the_same_bits(slurm: Cluster, tmp_path: Path) -> None:
    pytest.importorskip("open_clip")
    command = "train-oc-clip"
    whole = undisturbed(tmp_path, command)
    job = submit(slurm, tmp_path, "--module", "dino_sparo.oc_clip.train", command=command, saveckp_minutes=0)
    wait_for_epoch(tmp_path, job)
    job.signal("USR2")
    assert_went_on(job, whole, tmp_path, command=command)


def test_a_signal_that_comes_before_training_listens_costs_a_start_and_no_more(
    slurm: Cluster, tmp_path: Path, whole: Path
) -> None:
    """Python is still importing: the signal ends it, as it would any program."""
    job = submit(slurm, tmp_path)
    job.wait_for_ranks(2)
    job.signal("USR2")
    wait_until(lambda: job.restarts == 1, PATIENCE, f"job {job.number} to be requeued", pause=0.1)
    assert job.wait_for_end() == "COMPLETED", job.log()
    assert_same_run(whole, tmp_path)


def test_a_job_of_higher_priority_interrupts_the_run_and_costs_it_nothing(
    slurm: Cluster, tmp_path: Path, whole: Path
) -> None:
    job = submit(slurm, tmp_path, "--slurm_additional", "nodelist=127.0.0.1", saveckp_minutes=0, num_workers=1)
    wait_for_epoch(tmp_path, job)
    urgent = sbatch(slurm, tmp_path, "true", "--partition=high", "--nodelist=127.0.0.1", "--exclusive", "--mem=0")
    assert_went_on(job, whole, tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    steps = [event.step for event in events.Scalars("train/loss")]
    assert steps == list(range(1, 18 * int(RECIPES["train"].options["epochs"]) + 1))
    assert urgent.state == "COMPLETED"


def test_the_time_limit_interrupts_the_run_and_costs_it_nothing(slurm: Cluster, tmp_path: Path, whole: Path) -> None:
    words = ["--timeout_min", "2", "--slurm_additional", "signal=USR2@75"]  # 15 to 45 s after the start
    job = submit(slurm, tmp_path, *words, saveckp_minutes=0)
    ranks = wait_for_epoch(tmp_path, job)
    # Training would be over before its time is: it stands still until Slurm wakes it up to give it the signal.
    for pid in ranks.values():
        os.kill(pid, signal.SIGSTOP)
    time.sleep(0.5)
    announced = "Bypassing signal SIGCONT"  # before they stood still
    wait_until(lambda: not is_stopped(ranks[0]) or announced in job.log(), 90, "Slurm's signal", pause=0.1)
    for pid in ranks.values():
        os.kill(pid, signal.SIGCONT)
    # Where a start takes long, the limit comes again.
    assert_went_on(job, whole, tmp_path, most_restarts=5)


def is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def test_a_batch_script_without_submitit_is_requeued_and_goes_on(slurm: Cluster, tmp_path: Path, whole: Path) -> None:
    words = " ".join(options(tmp_path, saveckp_minutes=0))
    command = f"srun --kill-on-bad-exit=1 {sys.executable} {ROOT / 'main_dino.py'} {words}"
    job = sbatch(slurm, tmp_path, command, "--ntasks=2", "--requeue", "--signal=USR2@120", "--time=60")
    wait_for_epoch(tmp_path, job)
    job.signal("USR2")
    assert_went_on(job, whole, tmp_path)


# What ends a job for good.


def test_a_job_that_is_asked_to_end_saves_and_is_not_requeued(slurm: Cluster, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, epochs=1000, saveckp_minutes=0)
    wait_for_epoch(tmp_path, job)
    job.signal("TERM")
    assert job.wait_for_end() == "FAILED", job.log()
    assert (job.fields()["ExitCode"], job.restarts) == ("143:0", 0)
    assert assert_whole_checkpoints(tmp_path) == last_saved_step(job.log()) >= 18


def test_a_cancelled_job_stays_cancelled(slurm: Cluster, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, epochs=1000)
    ranks = wait_for_epoch(tmp_path, job)
    slurm.command("scancel", job.number)
    assert job.wait_for_end() == "CANCELLED"
    wait_until(lambda: not any(Path(f"/proc/{pid}/cwd").exists() for pid in ranks.values()), 15, "the tasks to end")
    time.sleep(2)
    assert job.state == "CANCELLED"
    assert job.restarts == 0
    assert assert_whole_checkpoints(tmp_path) >= 18


def test_a_fault_beyond_max_requeues_ends_the_job_with_its_status(slurm: Cluster, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, "--max_requeues", "0", epochs=1000)
    ranks = wait_for_epoch(tmp_path, job)
    os.kill(ranks[1], signal.SIGKILL)
    assert job.wait_for_end() == "FAILED"
    assert job.fields()["ExitCode"] in ("137:0", "75:0")
    assert job.restarts == 0
    assert "not requeued again, --max_requeues is 0" in job.log()
    assert assert_whole_checkpoints(tmp_path) > 0  # the line of an epoch is written before its last step is saved


def test_a_mistake_is_not_tried_again(slurm: Cluster, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, data_path=tmp_path / "no-such-folder")
    assert job.wait_for_end() == "FAILED"
    assert (job.fields()["ExitCode"], job.restarts) == ("1:0", 0)
    assert re.search(r" E .*no-such-folder", (job.folder / f"{job.number}_0_log.err").read_text())


# Before a job runs.


def test_the_script_says_what_it_submitted_and_how_to_follow_it(slurm: Cluster, tmp_path: Path) -> None:
    words = ["--ngpus", "3", "--nodes", "2", *options(tmp_path, device="auto")]
    script = [sys.executable, str(ROOT / "run_with_submitit.py"), *words]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    job = submitted(slurm, tmp_path, done.stdout)
    assert f"tail -F {job.folder}/{job.number}_0_log.err" in done.stdout
    fields = job.fields()
    slurm.command("scancel", job.number)
    assert (fields["NumNodes"], fields["NumTasks"], fields["TresPerNode"]) == ("2", "6", "gres:gpu:3")
    assert fields["TimeLimit"] == "1-22:40:00"  # 2800 minutes, the default


def test_the_batch_script_of_a_dry_run_is_one_that_slurm_takes(slurm: Cluster, tmp_path: Path) -> None:
    resources = ["--nodes", "2", "--ngpus", "8", "--cpus_per_task", "16", "--mem_gb_per_gpu", "60"]
    words = ["--dry_run", *resources, "--partition", "main", "--comment", "two words"]
    script = [sys.executable, str(ROOT / "run_with_submitit.py"), *words, *options(tmp_path, device="auto")]
    text = subprocess.run(script, check=True, capture_output=True, text=True, timeout=PATIENCE).stdout
    (tmp_path / "job.sh").write_text(text)
    slurm.command("sbatch", "--test-only", str(tmp_path / "job.sh"))
    assert not slurm.command("squeue", "--noheader")
    (tmp_path / "wrong.sh").write_text(text.replace("--partition=main", "--partition=none"))
    with pytest.raises(subprocess.CalledProcessError):
        slurm.command("sbatch", "--test-only", str(tmp_path / "wrong.sh"))


def test_a_job_that_slurm_refuses_is_said_to_be_refused(slurm: Cluster, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"not submitted: .*(?i:partition)"):
        submit(slurm, tmp_path, "--partition", "none")

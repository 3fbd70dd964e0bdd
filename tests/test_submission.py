"""run_with_submitit.py without a cluster: its batch script, its checks, a job on this machine."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from submitit.slurm.slurm import _get_default_parameters

from dino_sparo import submit as submission
from dino_sparo.submit import (
    DO_NOT_REQUEUE,
    additional_parameters,
    check_tasks,
    get_submission_parser,
    job_parameters,
    main,
    requeue_after_faults,
    shell_path,
    slurm_parameters,
)

PATHS = ("--data_path", "scenes", "--output_dir", "runs")


def script(capsys: pytest.CaptureFixture, *words: str) -> str:
    main(["--dry_run", *PATHS, *words])
    return capsys.readouterr().out


def test_the_batch_script_asks_for_what_the_options_say(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    words = "--ngpus 4 --nodes 3 --timeout_min 77 --partition day --mem_gb_per_gpu 20 --cpus_per_task 5 --account acc"
    words += " --qos fast --constraint h100 --name trial --slurm_additional exclude=node17 reservation=tuesday"
    text = script(capsys, *words.split(), "--comment", "two words", "--output_dir", str(tmp_path / "run"))
    for line in (
        *("nodes=3", "ntasks-per-node=4", "gpus-per-node=4", "time=77", "partition=day", "mem=80GB", "cpus-per-task=5"),
        *("account=acc", "qos=fast", "constraint=h100", "job-name=trial", "exclude=node17", "reservation=tuesday"),
        *("comment='two words'", "requeue", "signal=USR2@120", "open-mode=append"),
        f"error={tmp_path}/run/%j/%j_0_log.err",
    ):
        assert f"#SBATCH --{line}\n" in text, line
    assert re.search(r"^srun .*--kill-on-bad-exit=1 --cpus-per-task=5 ", text, flags=re.MULTILINE)
    assert not (tmp_path / "run").exists(), "a dry run leaves nothing behind"


def test_nobodys_site_is_a_default(capsys: pytest.CaptureFixture) -> None:
    text = script(capsys)
    for word in ("partition", "account", "qos", "constraint", "comment", "mem"):
        assert f"#SBATCH --{word}=" not in text


def test_without_gpus_none_are_asked_for(capsys: pytest.CaptureFixture) -> None:
    assert "gpus-per-node" not in script(capsys, "--device", "cpu")


def test_a_cluster_that_wants_gres_is_asked_for_gres_alone(capsys: pytest.CaptureFixture) -> None:
    for words, line in (("--gres gpu", "gres=gpu:8"), ("--gres gpu:a100 --ngpus 4", "gres=gpu:a100:4")):
        text = script(capsys, *words.split())
        assert f"#SBATCH --{line}\n" in text
        assert "gpus-per-node" not in text
    args = get_submission_parser().parse_args(["--gres", "gpu:a100", "--output_dir", "runs"])
    assert slurm_parameters(args)["gres"] == "gpu:a100:8"
    assert "gres" in _get_default_parameters(), "submitit passes it on"
    args.local = True  # there submitit itself hands out the GPUs
    assert job_parameters(args)["gpus_per_node"] == 8


def test_the_batch_script_of_the_docs_gives_each_task_its_cores() -> None:
    """Since Slurm 22.05 srun does not take them from #SBATCH."""
    page = (Path(__file__).resolve().parent.parent / "docs" / "slurm.md").read_text()
    (asked,) = re.findall(r"#SBATCH .*--cpus-per-task=(\d+)", page)
    (given,) = re.findall(r"^ +srun .*--cpus-per-task=(\d+) python main_dino.py", page, flags=re.MULTILINE)
    assert given == asked


def test_the_warning_comes_early_enough_in_a_short_job(capsys: pytest.CaptureFixture) -> None:
    assert "--signal=USR2@30" in script(capsys, "--timeout_min", "2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--local --nodes 2", "--local runs on this machine only, but --nodes is 2"),
        ("--slurm_additional exclude", "--slurm_additional exclude: give KEY=VALUE"),
        ("--slurm_additional ex*lude=node17", "--slurm_additional ex*lude=node17: give KEY=VALUE"),
        ("--gres gpu:8", "--gres gpu:8: give gpu or gpu:TYPE, as gpu:a100; --ngpus gives the number"),
        ("--gres gpu:a100:8", "--gres gpu:a100:8: give gpu or gpu:TYPE"),
        ("--gres gpu --device cpu", "--gres gpu asks for GPUs, but --device is cpu"),
        ("--warmup_epochs 200", "--warmup_epochs 200 is longer than the run"),
        ("--arch vit_smal", "unknown arch 'vit_smal'; choose one of"),
        ("--sparo_group_size 3", "group_size=3 does not divide num_slots=64"),
        ("--epochs 4 --warmup_teacher_temp_epochs 30", "warmup_teacher_temp_epochs=30 does not fit a run of 4 epochs"),
        ("--module dino_sparo.clip.train --arch vit_smal", "unknown arch 'vit_smal'; choose one of"),
    ],
)
def test_a_job_that_cannot_be_is_not_submitted(words: str, message: str) -> None:
    with pytest.raises(SystemExit, match=f"not submitted: {re.escape(message)}"):
        main(["--dry_run", *PATHS, *words.split()])


@pytest.mark.parametrize("module", ["dino_sparo.clip.train", "dino_sparo.oc_clip.train"])
def test_a_job_whose_packages_are_missing_is_not_submitted(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "open_clip" else find(name))
    with pytest.raises(SystemExit, match=r"not submitted: captions need the package open_clip; .*dino_sparo\[clip\]"):
        main(["--dry_run", "--module", module])


def test_additional_options_may_hold_equal_signs() -> None:
    assert additional_parameters(["--export=A=1", "gres=disk:2"]) == {"export": "A=1", "gres": "disk:2"}


@pytest.mark.parametrize(
    ("tasks", "nodes", "gpus", "message"),
    [
        (8, 1, 4, r"8 tasks on 1 nodes were started, but --nodes 2 --ngpus 4 means 8 on 2"),
        (6, 2, 4, r"6 tasks on 2 nodes"),
        (8, 2, 3, r"sees 3 GPUs, but --ngpus 4 asks for 4"),
    ],
)
def test_a_job_with_other_tasks_than_asked_for_is_refused(tasks: int, nodes: int, gpus: int, message: str) -> None:
    args = get_submission_parser().parse_args(["--nodes", "2", "--ngpus", "4"])
    check_tasks(args, 8, 2, 4)
    check_tasks(args, 8, 2, 1)  # Slurm shows each task its own
    with pytest.raises(ValueError, match=message):
        check_tasks(args, tasks, nodes, gpus)


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:1"])
def test_a_node_without_gpus_does_not_train_on_its_cpu(device: str) -> None:
    """The job asked for GPUs; `auto` would have gone on for days at a hundredth of the speed."""
    args = get_submission_parser().parse_args(["--ngpus", "8", "--device", device])
    with pytest.raises(ValueError, match=f"sees no GPU, and --device {device} asks for 8 per node. Give --device cpu"):
        check_tasks(args, 8, 1, 0)
    args.device = "cpu"
    check_tasks(args, 8, 1, 0)


def end_of_script(folder: Path, status: int, scontrol: str) -> str:
    """Run the end of the batch script after tasks that ended with a status; returns what it writes."""
    lines = [f"scontrol() {{ {scontrol}; }}", "sleep() { :; }", f"(exit {status})"]
    lines += requeue_after_faults(shell_path(folder), max_requeues=2)
    done = subprocess.run(["bash", "-c", "\n".join(lines)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == status
    return done.stdout


@pytest.mark.parametrize("status", [137, 143])
def test_what_was_meant_to_end_is_not_tried_again(tmp_path: Path, status: int) -> None:
    """A mistake of the user's: one task left with status 1 and srun killed the others. Or all of them were stopped."""
    (tmp_path / DO_NOT_REQUEUE).touch()
    end_of_script(tmp_path, status, "echo JobState=RUNNING")
    assert not (tmp_path / "faults").exists()


@pytest.mark.parametrize(
    ("status", "state", "before", "requeued"),
    [
        (0, "RUNNING", 0, False),  # done
        (1, "RUNNING", 0, False),  # the user's mistake
        (75, "RUNNING", 1, True),  # a fault
        (137, "RUNNING", 0, True),  # killed
        (137, "RUNNING", 2, False),  # killed too often
        (137, "COMPLETING", 0, False),  # cancelled
        (143, "RUNNING", 0, True),  # one was killed while they started, srun ended the others
        (143, "COMPLETING", 0, False),  # cancelled
    ],
)
def test_the_batch_script_requeues_faults_so_often_and_nothing_else(
    tmp_path: Path, status: int, state: str, before: int, requeued: bool
) -> None:
    (tmp_path / "faults").write_text("earlier\n" * before)
    scontrol = f'[ "$2" = show ] && echo "JobId=3 JobState={state}"; [ "$1" = requeue ] && echo REQUEUED'
    assert ("REQUEUED" in end_of_script(tmp_path, status, scontrol)) == requeued


def test_the_batch_script_asks_a_busy_controller_again(tmp_path: Path) -> None:
    busy = '[ "$2" = show ] && echo JobState=RUNNING && return; echo asked >> asked; [ "$(wc -l < asked)" = 3 ]'
    end_of_script(tmp_path, 75, busy)
    assert len((tmp_path / "asked").read_text().splitlines()) == 3


EVIL = ["runs/$(touch pwned)", "runs/`touch pwned`", "runs/a b;touch pwned", 'runs/"; touch pwned #', "runs/it's"]


@pytest.mark.parametrize("output_dir", EVIL)
def test_an_output_dir_is_a_path_in_the_batch_script_whatever_it_is_called(
    capsys: pytest.CaptureFixture, tmp_path: Path, output_dir: str
) -> None:
    """The script is run by bash, with functions in place of Slurm's commands, once as it ends well and once not."""
    text = script(capsys, "--device", "cpu", "--output_dir", output_dir)
    folder = tmp_path / output_dir / "17"
    folder.mkdir(parents=True)
    for status in (0, 75):
        (folder / DO_NOT_REQUEUE).touch()
        (folder / "17_0_result.pkl").touch()
        slurm = f"srun() {{ return {status}; }}\nscontrol() {{ echo JobState=RUNNING; }}\nsleep() {{ :; }}\n"
        done = subprocess.run(
            ["bash", "-c", slurm + text], cwd=tmp_path, env={"SLURM_JOB_ID": "17", "PATH": os.defpath}, text=True
        )
        assert done.returncode == status
        left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
        assert left == [str(folder.relative_to(tmp_path) / "faults")] * (status != 0)


@pytest.mark.parametrize("option", ["--output_dir", "--job_dir", "--comment"])
def test_a_line_break_in_an_option_is_refused_since_what_follows_would_be_a_command(option: str) -> None:
    with pytest.raises(SystemExit, match=rf"not submitted: {option} .*without line breaks"):
        main(["--dry_run", option, "a\ntouch pwned #"])


def test_a_broken_pipe_does_not_say_that_a_job_was_not_submitted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = SimpleNamespace(job_id="17", paths=SimpleNamespace(stdout="out", stderr="err"))
    monkeypatch.setattr(submission, "submit", lambda args: job)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        main(["--data_path", "scenes", "--output_dir", str(tmp_path)])


@pytest.mark.slow
def test_a_job_runs_on_this_machine_as_it_would_on_slurm(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parent.parent
    tiny = "--data_path scenes:40:24 --arch vit_micro --patch_size 8 --global_crops_size 16 --local_crops_number 0"
    tiny += " --out_dim 16 --head_hidden_dim 16 --batch_size_per_gpu 5 --epochs 1 --warmup_epochs 0 --num_workers 0"
    command = [sys.executable, "run_with_submitit.py", "--local", "--ngpus", "2", "--device", "cpu", *tiny.split()]
    command += ["--output_dir", str(tmp_path / "job%j"), "--job_dir", str(tmp_path / "%j")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    number = re.search(r"job (\d+) is done", done.stdout)[1]
    assert "rank 0 of 2" in (tmp_path / "local" / f"{number}_0_log.err").read_text()
    assert (tmp_path / f"job{number}" / "checkpoint.pth").is_file()

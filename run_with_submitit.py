"""Submit a training run to Slurm, one task per GPU, requeued when it is preempted or its time is over.

    python run_with_submitit.py --nodes 1 --ngpus 8 --partition gpu --timeout_min 2800 \\
        --data_path imagenet/train --output_dir runs/vits16

Takes every option of `main_dino.py` and a few of Slurm's. A requeued job starts the same command again, which goes on
from the checkpoint of the last epoch.
"""

import argparse
import logging
from pathlib import Path
from typing import Any

import submitit
from submitit.helpers import DelayedSubmission

from dino_sparo.cli import HelpFormatter
from dino_sparo.distributed import shutdown
from main_dino import check_options, get_args_parser, train_dino

logger = logging.getLogger("run_with_submitit")

# Slurm's warning before the end of the job's time, in which submitit submits the rest of the run.
SIGNAL_DELAY_S = 120


class Trainer:
    """What runs in every task of the job.

    Args:
        args: the options of `main_dino.py`.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    def __call__(self) -> None:
        """Train; ranks and rendezvous come from Slurm's environment."""
        job_id = submitit.JobEnvironment().job_id
        self.args.output_dir = str(self.args.output_dir).replace("%j", job_id)
        train_dino(self.args)
        shutdown()

    def checkpoint(self) -> DelayedSubmission:
        """Called by submitit before the job ends early: submit the same again."""
        return DelayedSubmission(type(self)(self.args))


def get_submission_parser() -> argparse.ArgumentParser:
    """The options of `main_dino.py` and those of the job."""
    parser = argparse.ArgumentParser(
        parents=[get_args_parser()],
        description=__doc__,
        formatter_class=HelpFormatter,
    )
    group = parser.add_argument_group("Slurm job")
    group.add_argument("--ngpus", type=int, default=8, help="GPUs, and tasks, per node.")
    group.add_argument("--nodes", type=int, default=1, help="Nodes.")
    group.add_argument("--timeout_min", type=int, default=2800, help="Time limit of the job in minutes.")
    group.add_argument("--partition", default=None, help="Partition; the cluster's default if not given.")
    group.add_argument("--mem_gb_per_gpu", type=int, default=None, help="Main memory per GPU in GB.")
    group.add_argument("--cpus_per_task", type=int, default=10, help="CPU cores per GPU; match --num_workers.")
    group.add_argument("--account", default=None, help="Account to charge.")
    group.add_argument("--qos", default=None, help="Quality of service.")
    group.add_argument("--constraint", default=None, help="Features the nodes must have.")
    group.add_argument("--comment", default=None, help="Message to the scheduler.")
    group.add_argument("--name", default="dino_sparo", help="Name of the job.")
    group.add_argument("--job_dir", default=None, help="Folder of the job's own files; default: OUTPUT_DIR/%%j.")
    return parser


def slurm_parameters(args: argparse.Namespace) -> dict[str, Any]:
    """submitit's parameters for the job that the options describe."""
    optional = {
        "slurm_partition": args.partition,
        "slurm_account": args.account,
        "slurm_qos": args.qos,
        "slurm_constraint": args.constraint,
        "slurm_comment": args.comment,
        "mem_gb": None if args.mem_gb_per_gpu is None else args.mem_gb_per_gpu * args.ngpus,
    }
    return {
        "name": args.name,
        "nodes": args.nodes,
        "gpus_per_node": args.ngpus,
        "tasks_per_node": args.ngpus,
        "cpus_per_task": args.cpus_per_task,
        "timeout_min": args.timeout_min,
        "slurm_signal_delay_s": SIGNAL_DELAY_S,
        # A rank that dies takes the others with it instead of leaving them in a collective.
        "slurm_srun_args": ["--kill-on-bad-exit=1"],
        **{name: value for name, value in optional.items() if value is not None},
    }


def main(argv: list[str] | None = None) -> submitit.Job:
    """Check the options, submit the job and say how to follow it."""
    args = get_submission_parser().parse_args(argv)
    try:
        # Now, rather than after an hour in the queue.
        check_options(args)
        return submit(args)
    except (ValueError, OSError, RuntimeError) as error:
        raise SystemExit(f"not submitted: {error}") from error


def submit(args: argparse.Namespace) -> submitit.Job:
    """Hand the run to Slurm.

    Raises:
        RuntimeError: there is no Slurm here.
        submitit.core.utils.FailedJobError: Slurm refused the job.
    """
    folder = Path(args.job_dir or Path(args.output_dir) / "%j")
    executor = submitit.AutoExecutor(folder=folder, cluster="slurm", slurm_max_num_timeout=30)
    executor.update_parameters(**slurm_parameters(args))
    job = executor.submit(Trainer(args))
    print(f"job {job.job_id}, log {job.paths.stderr}\nfollow it with: tail -f {job.paths.stderr}")
    return job


if __name__ == "__main__":
    main()

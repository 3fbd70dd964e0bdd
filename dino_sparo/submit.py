"""A training -> a Slurm job, requeued when it is preempted, at its time limit and after faults.

    dino-sparo submit --nodes 1 --ngpus 8 --partition gpu --timeout_min 2800 \\
        --data_path imagenet/train --output_dir runs/vits16

The job has one task per GPU. The command takes every option of the trainer (`--module`) and a few of Slurm's. When
Slurm preempts the job, it saves between two steps, is requeued under the same number, and resumes at the same step.
"""

import argparse
import logging
import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dino_sparo.commands import COMMANDS
from dino_sparo.runtime.cli import Group, Option, Parser, positive_int, say, values_of
from dino_sparo.runtime.exits import errors_in_one_line
from dino_sparo.runtime.faults import FAULT_STATUS, UserError, is_correctable
from dino_sparo.training.options import check_run

if TYPE_CHECKING:  # submitit takes longer to import than --help may take
    import submitit
    from submitit.helpers import DelayedSubmission

logger = logging.getLogger(__name__)

# Slurm's warning before the end of the job's time; at most a quarter of that time.
SIGNAL_DELAY_S = 120
# After these exit statuses starting the job again may help: our own status for faults; 128 + SIGABRT (NCCL's watchdog),
# SIGBUS, SIGKILL (also when memory runs out), SIGSEGV, SIGUSR2 (before its handler was set), and SIGTERM, which srun
# sends to the other tasks when one dies: srun's own status is the highest of all tasks.
FAULT_STATUSES = (FAULT_STATUS, 128 + 6, 128 + 7, 128 + 9, 128 + 11, 128 + 12, 128 + 15)
# A file in the job's folder. It says that starting the job again would not help: the user must mend something, or has
# asked for the end. The exit status does not: srun kills the tasks that have not ended yet.
DO_NOT_REQUEUE = "do_not_requeue"


VOLTA32 = "volta32gb"  # the constraint that the reference's --use_volta32 means
SCRIPT, SCRIPT_NODES = "run_with_submitit.py", 2  # the reference's script, and its default of --nodes

# `--module` -> the command that trains its objective.
TRAINERS = {
    "main_dino" if name == "train" else f"dino_sparo.{command.needs['objective_class'].partition(':')[0]}": command
    for name, command in COMMANDS.items()
    if "objective_class" in command.needs
}


class Trainer:
    """The function that runs in every task of the job.

    Args:
        args: the options of the trainer and of the job.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    def __call__(self) -> None:
        """Train; ranks and rendezvous come from Slurm's environment, or from submitit's where it runs without Slurm."""
        import submitit
        import torch  # not above: submitting does not need torch
        from submitit.helpers import TorchDistributedEnvironment

        job = submitit.JobEnvironment()
        with errors_in_one_line(logger, note_final=(job.paths.folder / DO_NOT_REQUEUE).touch):
            check_tasks(self.args, job.num_tasks, job.num_nodes, torch.cuda.device_count())
            if job.cluster == "local":  # under Slurm, `runtime/launch.py` gives each attempt a port of its own
                TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
                os.environ["MASTER_ADDR"] = "127.0.0.1"
            self.args.output_dir = str(self.args.output_dir).replace("%j", job.job_id)
            TRAINERS[self.args.module].function(self.args)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # there is nothing left to interrupt

    def checkpoint(self) -> "DelayedSubmission":
        """Called by submitit when the job is requeued: the same again, which resumes from the checkpoint."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(type(self)(self.args))


def check_tasks(args: argparse.Namespace, num_tasks: int, num_nodes: int, num_gpus: int) -> None:
    """Refuse to train with other processes than were asked for.

    Args:
        args: the options.
        num_tasks: tasks that were started.
        num_nodes: nodes they run on.
        num_gpus: GPUs that this task sees.

    Raises:
        ValueError: the numbers do not match.
    """
    if (num_tasks, num_nodes) != (args.nodes * args.ngpus, args.nodes):
        raise UserError(
            f"{num_tasks} tasks on {num_nodes} nodes were started, but --nodes {args.nodes} --ngpus {args.ngpus} means "
            f"{args.nodes * args.ngpus} on {args.nodes}; does --slurm_additional change the number of tasks?"
        )
    if args.device != "cpu" and num_gpus == 0:
        raise UserError(
            f"this task sees no GPU, and --device {args.device} asks for {args.ngpus} per node. Give --device cpu, or "
            f"a --partition with GPUs; does `torch.cuda.is_available()` say True on that node?"
        )
    if args.device in ("auto", "cuda") and num_gpus not in (1, args.ngpus):
        raise UserError(
            f"this task sees {num_gpus} GPUs, but --ngpus {args.ngpus} asks for {args.ngpus} per node, one per task; "
            f"does --slurm_additional change the number of GPUs?"
        )


JOB: Group = {
    "module": Option("main_dino", "The trainer to submit.", choices=sorted(TRAINERS)),
    "ngpus": Option(8, "GPUs per node, with one task each.", positive_int),
    "nodes": Option(1, "Nodes.", positive_int),
    "gres": Option(
        None,
        "Request GPUs by sbatch's --gres, as gpu or gpu:a100, on clusters without --gpus-per-node. --ngpus "
        "gives the number.",
        str,
        metavar="gpu[:TYPE]",
    ),
    "timeout_min": Option(2800, "Time limit of the job in minutes.", positive_int),
    "timeout": Option(None, "The reference's name of --timeout_min.", positive_int),
    "partition": Option(None, "Partition; the cluster's default if not given.", str),
    "mem_gb_per_gpu": Option(None, "Main memory per GPU in GB.", positive_int),
    "cpus_per_task": Option(10, "CPU cores per GPU; --num_workers uses them.", positive_int),
    "account": Option(None, "Account to charge.", str),
    "qos": Option(None, "Quality of service.", str),
    "constraint": Option(None, "Features the nodes must have.", str),
    "use_volta32": Option(False, "The reference's short form of --constraint volta32gb."),
    "comment": Option(None, "Message to the scheduler.", str),
    "name": Option("dino_sparo", "Name of the job.", str),
    "slurm_additional": Option([], "Other options of sbatch, such as exclude=node17.", str, metavar="KEY=VALUE"),
    "job_dir": Option(None, "Folder of the job's own files; default: OUTPUT_DIR/%%j."),
    "max_requeues": Option(
        10,
        "Largest number of requeues after faults (a process died, or the network hangs), and of requeues at the "
        "time limit. Preemptions do not count.",
    ),
    "dry_run": Option(False, "Print the batch script and submit nothing."),
    "local": Option(False, "Run the job's tasks on this machine, without Slurm."),
}


def get_submission_parser(module: str = "main_dino", prog: str = "dino-sparo submit") -> Parser:
    """The options of a trainer and those of the job.

    Args:
        module: a key of `TRAINERS`.
        prog: name of the command in `--help`.
    """
    make_parser = TRAINERS[module].parser
    assert make_parser is not None
    parser = make_parser()
    parser.prog, parser.description = prog, str(__doc__).replace("dino-sparo submit", prog)
    parser.add_options("Slurm job", JOB)
    return parser


def job_folder(args: argparse.Namespace) -> Path:
    """Where the job's own files go; `%j` stands for its number."""
    return Path(args.job_dir or Path(args.output_dir) / "%j")


def additional_parameters(pairs: list[str]) -> dict[str, str]:
    """`KEY=VALUE` words as a dict; ValueError for a word without a key or a value."""
    parameters = {}
    for pair in pairs:
        key, _, value = pair.lstrip("-").partition("=")
        if not (re.fullmatch("[A-Za-z][A-Za-z0-9_-]*", key) and value):
            raise UserError(f"--slurm_additional {pair}: give KEY=VALUE, an option of sbatch as exclude=node17")
        parameters[key] = value
    return parameters


def check_submission(args: argparse.Namespace) -> None:
    """Fill in the reference's short forms; refuse a job whose options are out of range or do not fit each other.

    Raises:
        ValueError: names the option and what would do.
    """
    args.timeout_min = args.timeout or args.timeout_min
    if args.use_volta32:
        args.constraint = "&".join(filter(None, (args.constraint, VOLTA32)))
    for name, value in vars(args).items():
        texts = value if isinstance(value, list) else [value]
        if any(isinstance(text, str) and not text.isprintable() for text in texts):
            raise UserError(f"--{name} {value!r}: give text without line breaks and other control characters")
    if args.gres is not None and not re.fullmatch(r"gpu(:(?!\d+$)[^:,=]+)?", args.gres):
        raise UserError(f"--gres {args.gres}: give gpu or gpu:TYPE, as gpu:a100; --ngpus gives the number")
    if args.gres is not None and args.device == "cpu":
        raise UserError(f"--gres {args.gres} asks for GPUs, but --device is cpu; leave one of them out")
    if args.local and args.nodes > 1:
        raise UserError(f"--local runs on this machine only, but --nodes is {args.nodes}; give --nodes 1")


def job_parameters(args: argparse.Namespace) -> dict[str, Any]:
    """submitit's parameters for the job, wherever it runs."""
    parameters: dict[str, Any] = {
        "name": args.name,
        "nodes": args.nodes,
        "tasks_per_node": args.ngpus,
        "cpus_per_task": args.cpus_per_task,
        "timeout_min": args.timeout_min,
    }
    if args.device != "cpu" and (args.local or args.gres is None):
        parameters["gpus_per_node"] = args.ngpus
    if args.mem_gb_per_gpu is not None:
        parameters["mem_gb"] = args.mem_gb_per_gpu * args.ngpus
    return parameters


def slurm_parameters(args: argparse.Namespace) -> dict[str, Any]:
    """submitit's parameters for Slurm alone."""
    folder = shell_path(job_folder(args))
    names = ("partition", "account", "qos", "constraint", "comment")
    return {
        **{name: getattr(args, name) for name in names if getattr(args, name) is not None},
        **({} if args.gres is None else {"gres": f"{args.gres}:{args.ngpus}"}),
        "signal_delay_s": min(SIGNAL_DELAY_S, 60 * args.timeout_min // 4),
        # A rank that dies takes the others with it instead of leaving them in a collective.
        # srun of Slurm 22.05 and later does not take the number of cores per task from sbatch: a task would get one.
        "srun_args": ["--kill-on-bad-exit=1", f"--cpus-per-task={args.cpus_per_task}"],
        "additional_parameters": {"requeue": True, **additional_parameters(args.slurm_additional)},
        # Otherwise submitit takes the result of an earlier attempt for this one's.
        "setup": [f'rm -f -- {folder}/{DO_NOT_REQUEUE} {folder}/"$SLURM_JOB_ID"_*_result.pkl'],
        "teardown": requeue_after_faults(folder, args.max_requeues),
    }


def shell_path(folder: Path) -> str:
    """A folder as a word of bash: with the job's number for `%j`, and quoted, so that nothing in it is run."""
    return '"$SLURM_JOB_ID"'.join(shlex.quote(part) if part else "" for part in str(folder).split("%j"))


def requeue_after_faults(folder: str, max_requeues: int) -> list[str]:
    """The end of the batch script: submit the job again if starting it again may help.

    A cancelled job is not submitted again. Nor is one that ended by a user's mistake, or that was asked to stop and has
    saved.

    Args:
        folder: of the job's files, as a word of bash; its file `faults` counts.
        max_requeues: how often at most.
    """
    return [
        "status=$?",
        f"folder={folder} max_requeues={max_requeues} do_not_requeue={DO_NOT_REQUEUE}",
        f"fault_statuses='{' '.join(map(str, FAULT_STATUSES))}'",
        *Path(__file__).with_name("requeue.sh").read_text(encoding="utf-8").splitlines(),
    ]


def batch_script(args: argparse.Namespace) -> str:
    """The file that would be given to sbatch."""
    from submitit.slurm.slurm import SlurmExecutor, _make_sbatch_string

    folder = job_folder(args)
    command = f"{shlex.quote(sys.executable)} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    # As submitit itself would write it, also on a machine without Slurm, where its executor cannot be made.
    parameters = SlurmExecutor._convert_parameters(SlurmExecutor.__new__(SlurmExecutor), job_parameters(args))
    return _make_sbatch_string(command=command, folder=folder, **parameters, **slurm_parameters(args))


def submit(args: argparse.Namespace) -> "submitit.Job":
    """Hand the run to Slurm, or to this machine.

    Raises:
        UserError: there is no Slurm here.
        submitit.core.utils.FailedJobError: Slurm refused the job.
    """
    import submitit

    folder, parameters, cluster = job_folder(args), job_parameters(args), "slurm"
    if args.local:
        folder = Path(str(folder).replace("%j", "local"))  # its number is not known before it runs
        cluster = "local"
    else:
        parameters |= {f"slurm_{name}": value for name, value in slurm_parameters(args).items()}
    requeues = {f"{cluster}_max_num_timeout": args.max_requeues}
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster, **requeues)
    except RuntimeError as error:
        raise UserError(f"{error} --local runs the job on this machine") from error
    executor.update_parameters(**parameters)
    return executor.submit(Trainer(args))


def main(argv: Sequence[str] | None = None, prog: str = "dino-sparo submit") -> None:
    """Check the options, submit the job and say how to follow it.

    Args:
        argv: options; None: the command line's. Those of the trainer depend on `--module` among them.
        prog: what `--help` calls the command.
    """
    words = sys.argv[1:] if argv is None else argv
    module = (values_of(words, "--module") or ["main_dino"])[-1]
    parser = get_submission_parser(module if module in TRAINERS else "main_dino", prog)
    if prog == SCRIPT and "--local" not in words:
        parser.set_defaults(nodes=SCRIPT_NODES)
    args = parser.parse_args(words)
    from submitit.core.utils import FailedJobError

    try:
        # Checked now, not after an hour in the queue.
        check_submission(args)
        TRAINERS[args.module].function.keywords["objective_class"].check_options(args)
        check_run(args)
        if args.dry_run:
            say(batch_script(args))
            return
        job = submit(args)
    except Exception as error:
        if not is_correctable(error) and not isinstance(error, FailedJobError):
            raise
        raise SystemExit(f"not submitted: {error}") from error
    say(f"job {job.job_id}\noutput {job.paths.stdout}\nlog    {job.paths.stderr}")
    say(f"follow it with: tail -F {shlex.quote(str(job.paths.stderr))}")
    if args.local:
        wait(job)


def wait(job: "submitit.Job") -> None:
    """Wait for a job on this machine.

    Raises:
        SystemExit: it failed.
    """
    from submitit.core.utils import FailedJobError, UncompletedJobError

    try:
        job.results()
    except (FailedJobError, UncompletedJobError) as error:
        raise SystemExit(f"job {job.job_id} failed; its log {job.paths.stderr} says why") from error
    say(f"job {job.job_id} is done")

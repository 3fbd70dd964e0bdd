"""The life of a run of any objective: build, resume, epochs, evaluations, checkpoints.

The commands of `commands.py` call `train` with the class of an objective. The same command resumes a run.
"""

import argparse
import contextlib
import logging
import time
from pathlib import Path
from signal import Signals
from typing import Any

from dino_sparo.evaluation.embed.store import RECORD as EMBEDDINGS
from dino_sparo.evaluation.features import CACHE_RECORD as FEATURES
from dino_sparo.runtime.cli import RUN_CONFIG, RUN_FILES
from dino_sparo.runtime.collectives import all_or_none, broadcast_object, on_rank_0, require_same_options
from dino_sparo.runtime.faults import UserError, explain_faults, explain_full_memory
from dino_sparo.runtime.launch import init_distributed
from dino_sparo.runtime.lock import RunLock
from dino_sparo.runtime.logs import RunLog, log_options, setup_logging
from dino_sparo.runtime.precision import set_tf32
from dino_sparo.runtime.preemption import Agreement, StopSignals, hand_over
from dino_sparo.runtime.trackers import TrackedRun
from dino_sparo.runtime.watchdog import Watchdog
from dino_sparo.training.compile import compile_failures_named, compile_networks, is_compiled
from dino_sparo.training.loop import train_one_epoch
from dino_sparo.training.objective import Objective
from dino_sparo.training.options import check_run
from dino_sparo.training.resume import Run, resume, write_config
from dino_sparo.weights.folder import CheckpointFolder

logger = logging.getLogger(__name__)

# A run whose last save is older is saved before an evaluation too.
MUCH_TO_LOSE_S = 60.0


def train(args: argparse.Namespace, objective_class: type[Objective[Any]]) -> None:
    """Build a run from the options, resume if there is a checkpoint, train.

    SIGUSR2, SIGTERM and Ctrl-C end the run after the next few steps, with a checkpoint. `train_one_epoch` saves an
    epoch that a signal or `--max_steps` cuts short; the resumed run evaluates and logs the epoch.

    Args:
        args: the options.
        objective_class: class of the objective.

    Raises:
        ValueError: options that do not fit each other, the data or the checkpoint; nothing was overwritten.
        NonFiniteLossError, TooManyCorruptError, MemoryFullError, CompileError: the last checkpoint stays.
        FaultError: a process or a worker died or hangs; the same command resumes from the last checkpoint.
        RunStopped: a signal ended the run after it had saved.
    """
    check_run(args)
    given, defaults = dict(vars(args)), vars(objective_class.make_parser().parse_args([]))
    folder = Path(args.output_dir)
    with (
        StopSignals() as signals,
        explain_full_memory(vars(args)),
        explain_faults(args.dist_timeout_min),
        compile_failures_named(),
        RunLock(folder) as lock,
    ):
        process = init_distributed(args.device, args.dist_url, args.dist_timeout_min)
        require_same_options(given)
        with all_or_none(f"preparing {folder}"):
            objective_class.check_options(args)
            lock.acquire()
            refuse_folder_of_features(folder)
            setup_logging(folder)
        set_tf32(args.precision == "tf32")
        filled_in = objective_class.fill_in_defaults(args)
        log_options(vars(args), {**defaults, **filled_in})
        objective = objective_class(args, process)
        if is_compiled(args.compile, process.device):
            compile_networks(objective, in_regions=args.compile == "regions")
        checkpoints = CheckpointFolder(folder, args.keep_checkpoints)
        agreement = Agreement(signals, args.saveckp_minutes, process.device)
        run = Run(objective, vars(args), checkpoints, agreement, args.max_corrupt, args.saveckp_freq)
        log_step = resume(run, args.allow_rescale)
        objective.synchronize()
        config = {name: value for name, value in given.items() if name in defaults and name != "local_rank"}
        on_rank_0(lambda: write_config(folder, config, objective.command), f"writing {RUN_CONFIG}")
        begin, end_step = time.monotonic(), last_step(objective, args.epochs, args.max_steps)
        metrics = ("epoch/train_loss", f"epoch/{objective.metric}")
        log = RunLog(TrackedRun(folder, args.run_name, log_step, vars(args), metrics), run.epochs_done, args.report_to)
        with contextlib.closing(log), Watchdog(args.dist_timeout_min) as watchdog:
            signals.begin_training()
            stop = None if run.unlogged_epoch is None else finish_epoch(run, log, watchdog)
            while run.step < end_step and stop is None:
                means, stop = train_one_epoch(run, end_step, log, watchdog)
                if run.step % objective.sampler.steps_per_epoch == 0:
                    run.unlogged_epoch = means
                    stop = finish_epoch(run, log, watchdog, stop)
                if stop is None and run.step < end_step:
                    stop = run.agreement.stop_between_steps()
        if stop is not None:
            hand_over(signals, stop, run.step)
        warning = "" if run.warning is None else f"; {run.warning}"
        level = logging.WARNING if warning else logging.INFO
        took = f"{run.step} steps in {time.monotonic() - begin:.0f} s"
        logger.log(level, "done: %s, %s%s", took, run.checkpoints.newest, warning)


def last_step(objective: Objective[Any], epochs: int, max_steps: int | None) -> int:
    """The step with which the run ends; the log names the run's sizes."""
    sampler = objective.sampler
    peak_lr = max(schedule["lr"].max() for schedule in objective.updater.schedules)
    sizes = epochs, sampler.steps_per_epoch, sampler.global_batch_size, peak_lr
    logger.info("epochs %d, steps per epoch %d, total batch %d, peak learning rate %.3g", *sizes)
    end = epochs * sampler.steps_per_epoch
    return end if max_steps is None else min(end, max_steps)


def refuse_folder_of_features(folder: Path) -> None:
    """UserError if a folder without a run holds embeddings or cached features, whose record describes all its files."""
    if any((folder / name).exists() for name in RUN_FILES):
        return
    for record, noun in ((EMBEDDINGS, "embeddings"), (FEATURES, "cached features")):
        if (folder / record).exists():
            raise UserError(f"--output_dir {folder} holds {noun} ({record}); give another folder for the run")


def finish_epoch(run: Run, log: RunLog, watchdog: Watchdog, stop: Signals | None = None) -> Signals | None:
    """Evaluate, log and save the trained epoch whose means are `unlogged_epoch`.

    A run whose last save is older than `MUCH_TO_LOSE_S` is saved before the evaluation too. After a signal the run is
    saved and not evaluated; the resumed run evaluates it. Returns the signal: `stop`, or one that came before the
    evaluation.
    """
    epoch, means = run.epochs_done, run.unlogged_epoch or {}
    if stop is None and run.objective.is_evaluated(epoch):
        if broadcast_object(time.monotonic() - run.agreement.last_save >= MUCH_TO_LOSE_S):
            run.save_patiently(watchdog)
        stop = run.agreement.stop_between_steps()
    if stop is not None:
        if run.saved_step != run.step:
            run.save_patiently(watchdog)
        return stop
    watchdog.beat()
    result = run.objective.after_epoch(epoch, means, log)
    values = {f"train_{name}": value for name, value in means.items()} | result.values
    copies, run.warning = [], result.warning
    if run.warning is not None:
        logger.warning("%s", run.warning)
    if result.score is not None and result.score > run.best_score:
        run.best_score = result.score
        copies.append("checkpoint_best.pth")
    if run.copy_every and epoch % run.copy_every == 0:
        copies.append(f"checkpoint{epoch:04}.pth")
    logger.info("epoch %d, step %d: %s", epoch, run.step, "  ".join(f"{k} {v:.4g}" for k, v in values.items()))
    log.scalars({f"epoch/{name}": value for name, value in values.items()}, run.step)
    # The line first: a run killed in between repeats the evaluation, and drops the line on resuming.
    log.write_epoch({**values, "epoch": epoch, "step": run.step})
    run.unlogged_epoch = None
    run.save_patiently(watchdog, copies)
    return None

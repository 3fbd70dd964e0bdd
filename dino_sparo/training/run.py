"""A run of any objective from its options: build, resume, epochs, save.

`dino/train.py`, `clip/train.py` and `oc_clip/train.py` call `train`. What happens within an epoch is `loop.py`.
Starting the same command again goes on from the last checkpoint.
"""

import argparse
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from signal import Signals
from typing import Any

from dino_sparo.runtime.distributed import (
    FaultError,
    all_gather_object,
    all_or_none,
    broadcast_object,
    faults_named,
    init_distributed,
    is_main,
    on_rank_0,
    rank,
    require_same_options,
    world_size,
)
from dino_sparo.runtime.lock import RunLock
from dino_sparo.runtime.logs import RunLog, log_options, setup_logging
from dino_sparo.runtime.memory import full_memory_named
from dino_sparo.runtime.precision import set_tf32
from dino_sparo.runtime.preemption import Agreement, StopSignals, hand_over
from dino_sparo.runtime.records import git_hash, plain, versions
from dino_sparo.runtime.watchdog import Watchdog
from dino_sparo.training.compile import prepare_step
from dino_sparo.training.loop import Progress, train_one_epoch
from dino_sparo.training.objective import Objective
from dino_sparo.training.options import require_paths
from dino_sparo.weights.checkpoint import (
    CheckpointError,
    load_checkpoint,
    load_strictly,
    random_state,
    restore_random_state,
)
from dino_sparo.weights.file import contents_checksum
from dino_sparo.weights.folder import CheckpointFolder

logger = logging.getLogger(__name__)

# Options that may differ when a run resumes. init_from matters at the start of a run alone.
HARMLESS_OPTIONS = {
    *("output_dir", "num_workers", "max_steps", "device", "dist_url", "local_rank", "download", "init_from"),
    *("saveckp_freq", "saveckp_minutes", "keep_checkpoints", "max_corrupt", "allow_rescale", "dist_timeout_min"),
    *("memory_report", "grad_checkpointing", "max_image_mb", "max_image_mpix"),
}
# A run that was saved longer ago is saved before an evaluation too.
MUCH_TO_LOSE_S = 60.0


@dataclass
class Run:
    """A run between two steps.

    Attributes:
        objective: networks, loss, data.
        args: the options.
        progress: of the epoch under way.
        checkpoints: where the run is saved.
        agreement: when the ranks agree on what to do next.
        best_score: the highest so far, percent.
        unlogged_epoch: the means of an epoch that is trained and saved, and has yet to be evaluated and logged.
        saved_step: of the newest checkpoint; None before the first.
    """

    objective: Objective[Any]
    args: argparse.Namespace
    progress: Progress
    checkpoints: CheckpointFolder
    agreement: Agreement
    best_score: float = 0.0
    unlogged_epoch: dict[str, float] | None = None
    saved_step: int | None = None

    @property
    def scale(self) -> dict[str, int]:
        """What a step's number counts: steps of this many items, of a data set of this size."""
        return {
            f"num_{self.objective.noun}s": self.objective.sampler.num_images,
            "global_batch": self.objective.sampler.global_batch_size,
            "steps_per_epoch": self.objective.sampler.steps_per_epoch,
        }

    @cached_property
    def data_hashes(self) -> dict[str, str]:
        """What tells the data from as many others; see `Objective.data_hashes`."""
        return self.objective.data_hashes


def train(args: argparse.Namespace, objective_class: type[Objective[Any]]) -> None:
    """Build everything the options describe, resume if there is something to resume, train.

    SIGUSR2, SIGTERM and Ctrl-C end the run after the next few steps, with a checkpoint.

    Args:
        args: the options.
        objective_class: what to train.

    Raises:
        ValueError: options that do not fit each other, the data or the checkpoint; nothing was overwritten.
        NonFiniteLossError, TooManyCorruptError, MemoryFullError: from training; the last checkpoint stays as it is.
        FaultError: a process or a worker died or hangs; the last checkpoint stays, and starting again goes on from it.
        RunStopped: a signal ended the run after it had saved.
    """
    require_paths(args)
    with (
        StopSignals() as signals,
        full_memory_named(vars(args)),
        faults_named(args.dist_timeout_min),
        RunLock(args.output_dir) as lock,
    ):
        process = init_distributed(args.device, args.dist_url, args.dist_timeout_min)
        require_same_options(vars(args))
        output_dir = Path(args.output_dir)
        with all_or_none(f"preparing {output_dir}"):
            objective_class.check_options(args)
            lock.acquire()
            setup_logging(output_dir)
        set_tf32(args.precision == "tf32")
        log_options(vars(args), objective_class.defaults_of(args))
        objective = objective_class(args, process)
        prepare_step(objective, args.compile, args.memory_report)
        run = Run(
            objective,
            args,
            Progress(dict.fromkeys(objective.counters, 0)),
            CheckpointFolder(output_dir, args.keep_checkpoints),
            Agreement(signals, args.saveckp_minutes, process.device),
        )
        start_from(run)
        log_step = resume(run)
        log = RunLog(output_dir, log_step, epochs_done(run))
        log.options(vars(args), ("epoch/train_loss", f"epoch/{objective.metric}"))
        signals.begin_training()
        try:
            stop = train_epochs(run, log)
        finally:
            log.close()
        if stop is not None:
            hand_over(signals, stop, objective.updater.step)


def start_from(run: Run) -> None:
    """Start from other weights if the options say so, unless there is a checkpoint to resume.

    Raises:
        CheckpointError: the weights do not fit.
    """
    if not run.checkpoints.newest.is_file():
        run.objective.start_from()
        return
    for name, value in vars(run.args).items():
        if name.startswith("init_") and value:
            logger.info("--%s %s is ignored: %s goes on", name, value, run.checkpoints.newest)


# ---- resume


def resume(run: Run) -> int | None:
    """Go on from the newest sound checkpoint, if there is one.

    Returns:
        The step after which TensorBoard's files are written anew; None if the steps are counted in another way now.

    Raises:
        CheckpointError: none is sound, or it is of another model, or counts its steps towards other data or batches.
    """
    newest: list[Path | None] = []
    on_rank_0(lambda: newest.append(run.checkpoints.find()), "looking for a checkpoint")
    path = broadcast_object(newest[0] if newest else None)
    if path is None:
        return 0
    with all_or_none(f"reading {path}"):
        checkpoint = load_checkpoint(path, verify=not is_main())  # rank 0 has verified it
        run.objective.check_same_model(checkpoint, str(path))
        is_rescaled = _is_rescaled(checkpoint, run.scale)
        _check_same_scale(run, checkpoint, str(path), may_differ=is_rescaled and run.args.allow_rescale)
        load_state(run, checkpoint, str(path))
        checksum = contents_checksum(path)
    check_same_file(path, run.objective.updater.step, checksum)
    if is_rescaled:
        rescale(run, checkpoint)
    name_differences(run, checkpoint)
    logger.info("resumed %s: %d epochs, %d steps done", path, checkpoint["epoch"], run.objective.updater.step)
    return None if is_rescaled else run.objective.updater.step


def name_differences(run: Run, checkpoint: Mapping[str, Any]) -> None:
    """Warn of options, data and versions that are not those of the checkpoint, where the run can go on with them."""
    after = "the rest of the run differs from its beginning"
    before, now = checkpoint["args"], plain(vars(run.args))
    for name in sorted(before.keys() & now.keys() - HARMLESS_OPTIONS - set(run.objective.harmless_options)):
        if before[name] != now[name]:
            logger.warning("--%s was %s and is now %s: %s", name, before[name], now[name], after)
    for name, value in run.data_hashes.items():
        if checkpoint.get("data_hashes", {}).get(name, value) != value:
            logger.warning("the %s, or their order, are not those of %s: %s", name, run.checkpoints.newest, after)
    for name, value in versions().items():
        if checkpoint.get("versions", {}).get(name, value) != value:
            logger.warning(
                "%s was %s and is now %s: %s, if only by rounding", name, checkpoint["versions"][name], value, after
            )


def check_same_file(path: Path, step: int, checksum: int) -> None:
    """Every rank has read the same checkpoint.

    Args:
        path: that this rank has read.
        step: of its checkpoint.
        checksum: of the file's contents.

    Raises:
        FaultError: a machine has another file there, such as a disk of its own, or the file server an old one in store.
    """
    of_ranks = all_gather_object((step, checksum))
    if len(set(of_ranks)) > 1:
        steps = ", ".join(str(each) for each, _ in of_ranks)
        raise FaultError(
            f"the ranks have read different files as {path}, of steps {steps}: --output_dir must be one folder for all "
            "machines. If it is, starting again helps"
        )


def _is_rescaled(checkpoint: Mapping[str, Any], scale: Mapping[str, int]) -> bool:
    """Whether the same data come in batches of another size than when the checkpoint was written."""
    num_items, *_ = scale
    differs = [name for name, value in scale.items() if checkpoint.get(name, value) != value]
    return bool(differs) and num_items not in differs


def _check_same_scale(run: Run, checkpoint: Mapping[str, Any], path: str, may_differ: bool) -> None:
    """Refuse other data, other options that the optimizer's state depends on, and other batches unless allowed."""
    before, now = checkpoint["args"], plain(vars(run.args))
    fixed = run.objective.fixed_options
    differing = [(f"--{name}", before.get(name), now[name]) for name in fixed if before.get(name) != now[name]]
    if not may_differ:
        numbers = ((name, checkpoint.get(name, value), value) for name, value in run.scale.items())
        differing += [(name, old, new) for name, old, new in numbers if old != new]
    if differing:
        noun = run.objective.noun
        remedy = f"; or --allow_rescale, to go on from the {noun}s seen so far" * _is_rescaled(checkpoint, run.scale)
        raise CheckpointError(
            f"{path} cannot be resumed: "
            + ", ".join(f"{name} was {old} and is now {new}" for name, old, new in differing)
            + f". Give the same options, {noun}s and batch (of all processes together), or another --output_dir{remedy}"
        )


def rescale(run: Run, checkpoint: Mapping[str, Any]) -> None:
    """Go on with another batch: the step becomes the one at which as many items of the epoch were seen, rounded down.

    The schedules are those of the new batch, read at that step, so they go on where they were as functions of the items
    seen (DINO's learning rate scaled with the batch).
    """
    updater, sampler = run.objective.updater, run.objective.sampler
    num_items = checkpoint[f"num_{run.objective.noun}s"]
    before = updater.step
    epoch, steps = divmod(before, checkpoint["steps_per_epoch"])
    batch = checkpoint.get("global_batch", num_items // checkpoint["steps_per_epoch"])
    seen = min(steps * batch // sampler.global_batch_size, sampler.steps_per_epoch - 1)
    updater.step = epoch * sampler.steps_per_epoch + seen
    run.saved_step = None  # its number is one of the other batch
    run.progress.clear()
    logger.warning(
        "--allow_rescale: step %d with batches of %d %ss is step %d with %d; from here on the run has this batch size",
        before,
        batch,
        run.objective.noun,
        updater.step,
        sampler.global_batch_size,
    )


# ---- epochs


def epochs_done(run: Run) -> int:
    """Epochs that are trained, evaluated and logged."""
    return run.objective.updater.step // run.objective.sampler.steps_per_epoch - (run.unlogged_epoch is not None)


def train_epochs(run: Run, log: RunLog) -> Signals | None:
    """The epochs that are left: train, evaluate, log, save.

    `train_one_epoch` saves an epoch that `--max_steps` or a signal cuts short. Such an epoch is neither evaluated nor
    logged in log.txt: its rest comes later. An epoch that a signal ends at its last step is saved, and evaluated when
    the run goes on.

    Returns:
        The signal that ended the run early, or None.
    """
    args, updater, sampler = run.args, run.objective.updater, run.objective.sampler
    end_step = args.epochs * sampler.steps_per_epoch
    if args.max_steps is not None:
        end_step = min(end_step, args.max_steps)
    begin, stop = time.monotonic(), None
    with Watchdog(args.dist_timeout_min) as watchdog:
        if run.unlogged_epoch is not None:
            stop = finish_epoch(run, log, watchdog)
        while updater.step < end_step and stop is None:
            epoch, start_step = divmod(updater.step, sampler.steps_per_epoch)
            sampler.set_epoch(epoch, start_step)
            means, stop = train_one_epoch(
                run.objective,
                run.progress,
                end_step,
                log,
                run.agreement,
                partial(save, run),
                watchdog,
                args.max_corrupt,
            )
            if updater.step % sampler.steps_per_epoch == 0:
                run.unlogged_epoch = means
                stop = finish_epoch(run, log, watchdog, stop)
            if stop is None and updater.step < end_step:
                stop = run.agreement.stop_between_steps()
    if stop is None:
        seconds = time.monotonic() - begin
        logger.info("done: %d steps in %.0f s, %s", updater.step, seconds, run.checkpoints.newest)
    return stop


def finish_epoch(run: Run, log: RunLog, watchdog: Watchdog, stop: Signals | None = None) -> Signals | None:
    """Evaluate, log and save the epoch that has been trained, of which `unlogged_epoch` has the means.

    If the evaluation takes long, the run is saved before it too. If it is asked to stop, it is saved and not evaluated.

    Args:
        run: at an epoch's end.
        log: gets the epoch's line.
        watchdog: is patient with saves.
        stop: the signal that came in the epoch's last steps.

    Returns:
        The signal that came before the evaluation; else None.
    """
    args, step, epoch, means = run.args, run.objective.updater.step, epochs_done(run), run.unlogged_epoch or {}
    if stop is None and run.objective.is_evaluated(epoch):
        if broadcast_object(time.monotonic() - run.agreement.last_save >= MUCH_TO_LOSE_S):
            save_patiently(run, watchdog)
        stop = run.agreement.stop_between_steps()
    if stop is not None:
        if run.saved_step != step:
            save_patiently(run, watchdog)
        return stop
    watchdog.beat()
    result = run.objective.after_epoch(epoch, means, log)
    values = {f"train_{name}": value for name, value in means.items()} | result.values
    copies = []
    if result.score is not None and result.score > run.best_score:
        run.best_score = result.score
        copies.append("checkpoint_best.pth")
    if args.saveckp_freq and epoch % args.saveckp_freq == 0:
        copies.append(f"checkpoint{epoch:04}.pth")
    logger.info("epoch %d, step %d: %s", epoch, step, "  ".join(f"{k} {v:.4g}" for k, v in values.items()))
    log.scalars({f"epoch/{name}": value for name, value in values.items()}, step)
    # The line first: a run killed in between takes the epoch or its evaluation again, and drops the line on resuming.
    log.write_epoch({**values, "epoch": epoch, "step": step})
    run.unlogged_epoch = None
    save_patiently(run, watchdog, copies)
    return None


# ---- save


def save_patiently(run: Run, watchdog: Watchdog, copies: Sequence[str] = ()) -> None:
    """`save`, between two epochs."""
    with watchdog.patient():
        save(run, copies)
    run.agreement.saved()


def save(run: Run, copies: Sequence[str] = ()) -> None:
    """Write a checkpoint, and copies beside it that later saves do not overwrite; every rank calls this.

    Args:
        run: what to save.
        copies: names of the copies.

    Raises:
        CheckpointError: on every rank, if rank 0 could not write; the checkpoint before stays.
    """
    checkpoint = {
        **state(run),
        **run.scale,
        **run.objective.description,
        "epoch": run.objective.updater.step // run.objective.sampler.steps_per_epoch,  # whole ones
        "unlogged_epoch": run.unlogged_epoch,
        run.objective.score_name: run.best_score,
        "args": plain(vars(run.args)),
        "data_hashes": run.data_hashes,
        "versions": {**versions(), "git": git_hash()},
    }
    step = run.objective.updater.step
    is_again = step == run.saved_step  # before and after an evaluation
    on_rank_0(lambda: run.checkpoints.save(checkpoint, copies, is_again), "saving a checkpoint")
    run.saved_step = step
    when = "" if run.unlogged_epoch is None else ", before the epoch is evaluated"
    logger.info("saved at step %d%s", step, when)


def state(run: Run) -> dict[str, Any]:
    """All that a run needs to go on, under a checkpoint's names; every rank calls this, rank 0 has use for it.

    `ranks` holds what belongs to one process: its random numbers (which nothing reads between two steps, since a step
    seeds its own) and its part of the epoch's means.
    """
    updater = run.objective.updater
    own = {"rng": random_state(updater.device), "meters": run.progress.meters.state_dict()}
    values = {
        **{name: module.state_dict() for name, module in run.objective.training.modules.items()},
        "optimizer": updater.optimizer.state_dict(),
        "step": updater.step,
        **run.progress.counts,
        "ranks": all_gather_object(own),
    }
    return values if updater.scaler is None else {**values, "fp16_scaler": updater.scaler.state_dict()}


def load_state(run: Run, checkpoint: Mapping[str, Any], source: str) -> None:
    """Go on from what `state` returned on rank 0.

    Args:
        run: changed in place.
        checkpoint: the values.
        source: their file, for messages.

    Raises:
        CheckpointError: weights that do not fit the networks.
    """
    updater = run.objective.updater
    for name, module in run.objective.training.modules.items():
        load_strictly(module, checkpoint[name], f"{source} ({name})")
    updater.optimizer.load_state_dict(checkpoint["optimizer"])
    if updater.scaler is not None and "fp16_scaler" in checkpoint:
        updater.scaler.load_state_dict(checkpoint["fp16_scaler"])
    updater.step = checkpoint["step"]
    run.progress.counts = {name: checkpoint.get(name, 0) for name in run.progress.counts}
    run.best_score = checkpoint[run.objective.score_name]
    run.unlogged_epoch, run.saved_step = checkpoint.get("unlogged_epoch"), updater.step
    ranks = checkpoint.get("ranks", [])
    if len(ranks) == world_size():
        restore_random_state(ranks[rank()]["rng"], updater.device)
        run.progress.meters.load_state_dict(ranks[rank()]["meters"])
    elif ranks:
        logger.warning(
            "%s is of %d processes and goes on with %d: the rest of the run is not equal to the bit, and the means of "
            "this epoch are those of its rest",
            source,
            len(ranks),
            world_size(),
        )

"""The state of a run and its checkpoints: save, and resume from the newest sound one."""

import logging
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dino_sparo.data.defaults import EXIF
from dino_sparo.runtime.cli import RUN_CONFIG, config_text
from dino_sparo.runtime.collectives import all_gather_object, all_or_none, broadcast_object, on_rank_0
from dino_sparo.runtime.faults import FaultError
from dino_sparo.runtime.files import git_hash, keep_old, plain, versions, write_text
from dino_sparo.runtime.launch import is_main, rank, world_size
from dino_sparo.runtime.logs import Meters
from dino_sparo.runtime.preemption import Agreement
from dino_sparo.runtime.watchdog import Watchdog
from dino_sparo.training.objective import Objective
from dino_sparo.weights.checkpoint import load_checkpoint
from dino_sparo.weights.file import CheckpointError, contents_checksum, load_strictly
from dino_sparo.weights.folder import CheckpointFolder

logger = logging.getLogger(__name__)

# Options that may differ when a run resumes. init_from matters at the start of a run alone.
HARMLESS_OPTIONS = {
    *("output_dir", "num_workers", "max_steps", "device", "dist_url", "local_rank", "download", "init_from"),
    *("saveckp_freq", "saveckp_minutes", "keep_checkpoints", "max_corrupt", "allow_rescale", "dist_timeout_min"),
    *("grad_checkpointing", "max_image_mb", "max_image_mpix", "report_to", "run_name"),
}


def random_state(device: torch.device) -> dict[str, Any]:
    """States of all random number generators of this process, as plain values and tensors."""
    numpy_name, numpy_keys, *numpy_rest = np.random.get_state()
    version, internal, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": [str(numpy_name), torch.from_numpy(np.asarray(numpy_keys).astype(np.int64)), *numpy_rest],
        "python": [version, list(internal), gauss],
    }
    return {**state, "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else state


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Inverse of `random_state`."""
    torch.set_rng_state(state["torch"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@dataclass
class Run:
    """A run between two steps.

    Attributes:
        objective: networks, loss, data.
        options: names and values, for the checkpoint.
        checkpoints: folder of the run.
        agreement: decisions of all ranks.
        max_corrupt: share of unreadable items that is tolerated.
        copy_every: epochs between two checkpoints that later ones do not overwrite; 0 for none.
        counts: of the epoch under way over all ranks, by the keys of `Objective.counters`.
        meters: this rank's means of the epoch under way.
        best_score: the highest so far, percent; -inf before the first evaluation.
        unlogged_epoch: the means of an epoch that is trained and saved, and not yet evaluated and logged.
        warning: of the last evaluated epoch, see `EpochResult`.
        saved_step: of the newest checkpoint; None before the first.
    """

    objective: Objective[Any]
    options: Mapping[str, Any]
    checkpoints: CheckpointFolder
    agreement: Agreement
    max_corrupt: float = 0.0
    copy_every: int = 0
    counts: dict[str, int] = field(init=False)
    meters: Meters = field(init=False)
    best_score: float = -math.inf
    unlogged_epoch: dict[str, float] | None = None
    warning: str | None = None
    saved_step: int | None = None

    def __post_init__(self) -> None:
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Set the counts and means of the epoch to zero."""
        self.counts, self.meters = dict.fromkeys(self.objective.counters, 0), Meters()

    @property
    def step(self) -> int:
        """Steps taken so far."""
        return self.objective.updater.step

    @property
    def epochs_done(self) -> int:
        """Epochs that are trained, evaluated and logged."""
        return self.step // self.objective.sampler.steps_per_epoch - (self.unlogged_epoch is not None)

    @property
    def sizes(self) -> dict[str, int]:
        """Data-set and batch size, which define a step."""
        sampler = self.objective.sampler
        return {
            f"num_{self.objective.noun}s": sampler.num_images,
            "global_batch": sampler.global_batch_size,
            "steps_per_epoch": sampler.steps_per_epoch,
        }

    def save_patiently(self, watchdog: Watchdog, copies: Sequence[str] = ()) -> None:
        """`save`, for which the watchdog waits longer than for a step."""
        with watchdog.patient():
            self.save(copies)
        self.agreement.saved()

    def save(self, copies: Sequence[str] = ()) -> None:
        """Write a checkpoint, and copies under these names that later saves do not overwrite; every rank calls this.

        Each rank adds its random state and its means. Steps do not need the random state: each seeds itself from seed,
        step and rank.

        Raises:
            CheckpointError: on every rank, if rank 0 could not write; the checkpoint before stays.
        """
        objective, updater = self.objective, self.objective.updater
        rank_state = {"rng": random_state(updater.device), "meters": self.meters.state_dict()}
        checkpoint = {
            **{name: network.state_dict() for name, network in objective.networks.items()},
            "optimizer": updater.optimizer.state_dict(),
            **({} if updater.scaler is None else {"fp16_scaler": updater.scaler.state_dict()}),
            "step": updater.step,
            "epoch": updater.step // objective.sampler.steps_per_epoch,  # whole ones
            "unlogged_epoch": self.unlogged_epoch,
            "warning": self.warning,
            objective.score_name: self.best_score,
            **self.counts,
            "ranks": all_gather_object(rank_state),
            **self.sizes,
            **objective.description,
            "args": plain(dict(self.options)),
            "data_hashes": objective.data_hashes,
            "versions": {**versions(), "git": git_hash()},
        }
        is_again = self.step == self.saved_step  # before and after an evaluation
        on_rank_0(lambda: self.checkpoints.save(checkpoint, copies, is_again), "saving a checkpoint")
        self.saved_step = self.step
        when = "" if self.unlogged_epoch is None else ", before the epoch is evaluated"
        logger.info("saved at step %d%s", self.step, when)

    def load(self, checkpoint: Mapping[str, Any], source: str) -> None:
        """Continue from a checkpoint; `CheckpointError` if its weights do not fit the networks."""
        updater = self.objective.updater
        if lacking := [name for name in self.objective.networks if name not in checkpoint]:
            raise CheckpointError(
                f"{source} is of another objective: it has no {', '.join(lacking)}; choose another --output_dir"
            )
        for name, network in self.objective.networks.items():
            load_strictly(network, checkpoint[name], f"{source} ({name})")
        updater.optimizer.load_state_dict(checkpoint["optimizer"])
        if updater.scaler is not None and "fp16_scaler" in checkpoint:
            updater.scaler.load_state_dict(checkpoint["fp16_scaler"])
        updater.step = self.saved_step = checkpoint["step"]
        self.counts = {name: checkpoint.get(name, 0) for name in self.counts}
        self.best_score = checkpoint[self.objective.score_name]
        self.unlogged_epoch, self.warning = checkpoint.get("unlogged_epoch"), checkpoint.get("warning")
        ranks = checkpoint.get("ranks", [])
        if len(ranks) == world_size():
            restore_random_state(ranks[rank()]["rng"], updater.device)
            self.meters.load_state_dict(ranks[rank()]["meters"])
        elif ranks:
            logger.warning(
                "%s was saved by %d processes and is resumed by %d: the rest of the run is not bit-identical, and the "
                "means of this epoch are of its remaining steps",
                *(source, len(ranks), world_size()),
            )


def resume(run: Run, allow_rescale: bool = False) -> int | None:
    """Resume from the newest sound checkpoint; without one, start from the weights that the options name.

    Args:
        run: changed in place.
        allow_rescale: the batch may have another size than before.

    Returns:
        The step after which TensorBoard's files are written anew; None if the batch changed, and with it the steps.

    Raises:
        CheckpointError: no checkpoint is sound, or it is of another model, other data or another batch.
    """
    newest = list[Path | None]()
    on_rank_0(lambda: newest.append(run.checkpoints.find()), "looking for a checkpoint")
    path = broadcast_object(newest[0] if newest else None)
    if path is None:
        run.objective.initialize()
        return 0
    with all_or_none(f"reading {path}"):
        checkpoint = load_checkpoint(path, verify=not is_main())  # rank 0 has verified it
        run.objective.check_same_model(checkpoint, str(path))
        has_other_batch = require_same_steps(run, checkpoint, str(path), allow_rescale)
        run.load(checkpoint, str(path))
        checksum = contents_checksum(path)
    require_same_file(path, run.step, checksum)
    if has_other_batch:
        rescale(run, checkpoint)
    warn_of_differences(run, checkpoint, path)
    logger.info("resumed %s: %d epochs, %d steps done", path, checkpoint["epoch"], run.step)
    return None if has_other_batch else run.step


def write_config(folder: Path, options: Mapping[str, Any], command: str) -> None:
    """Write the options of a run; the file of a run that is resumed with other options is kept as config.yaml.old."""
    path, text = folder / RUN_CONFIG, config_text(options, command)
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        logger.info("the options differ from those in %s, which is %s now", path.name, keep_old(path))
    write_text(text, path)


def warn_of_differences(run: Run, checkpoint: Mapping[str, Any], path: Path) -> None:
    """Warn of options, data and versions that differ from the checkpoint, but do not prevent the run from resuming."""
    after = "the rest of the run differs from its beginning"
    before, now = {"exif": EXIF[1], **checkpoint["args"]}, plain(dict(run.options))  # older versions ignored it
    for name in sorted(before.keys() & now.keys() - HARMLESS_OPTIONS - set(run.objective.harmless_options)):
        if before[name] != now[name]:
            logger.warning("--%s was %s and is now %s: %s", name, before[name], now[name], after)
    for name, value in now.items():
        if name.startswith("init_") and value:
            logger.info("--%s %s is ignored: %s is resumed", name, value, path)
    for name, value in run.objective.data_hashes.items():
        if checkpoint.get("data_hashes", {}).get(name, value) != value:
            logger.warning("the %s, or their order, differ from those of %s: %s", name, run.checkpoints.newest, after)
    for name, value in versions().items():
        old = checkpoint.get("versions", {}).get(name, value)
        if old != value:
            logger.warning("%s was %s and is now %s: %s, if only by rounding", name, old, value, after)


def require_same_file(path: Path, step: int, checksum: int) -> None:
    """Refuse ranks that have read different files: the folder is local to a machine, or a file server has an old copy.

    Raises:
        FaultError: with the steps of the checkpoints.
    """
    ranks = all_gather_object((step, checksum))
    if len(set(ranks)) > 1:
        steps = ", ".join(str(each) for each, _ in ranks)
        raise FaultError(
            f"the ranks have read different files as {path}, of steps {steps}: --output_dir must be one folder for all "
            "machines. If it is, start the same command again"
        )


def require_same_steps(run: Run, checkpoint: Mapping[str, Any], path: str, allow_rescale: bool) -> bool:
    """Refuse other data, other options that the optimizer's state depends on, and another batch unless allowed.

    Returns:
        Whether the same data come in batches of another size.
    """
    before, now, noun = checkpoint["args"], plain(dict(run.options)), run.objective.noun
    options = [(f"--{name}", before.get(name), now[name]) for name in run.objective.fixed_options]
    sizes = [(name, checkpoint.get(name, value), value) for name, value in run.sizes.items()]
    changed = [change for change in sizes if change[1] != change[2]]
    has_other_batch = bool(changed) and f"num_{noun}s" not in [name for name, _, _ in changed]
    if has_other_batch and allow_rescale:
        changed = []
    changed = [change for change in options if change[1] != change[2]] + changed
    if changed:
        remedy = f"; or --allow_rescale, to resume from the {noun}s seen so far" * has_other_batch
        raise CheckpointError(
            f"{path} cannot be resumed: "
            + ", ".join(f"{name} was {old} and is now {new}" for name, old, new in changed)
            + f". Give the same options, {noun}s and batch (of all processes together), or another --output_dir{remedy}"
        )
    return has_other_batch


def rescale(run: Run, checkpoint: Mapping[str, Any]) -> None:
    """Resume with another batch size, at the step with the same number of items seen in the epoch, rounded down.

    The schedules of the new batch start at that step. At an equal number of items seen they have the values of the old
    schedules, except that DINO's learning rate is scaled with the batch.
    """
    updater, sampler, noun = run.objective.updater, run.objective.sampler, run.objective.noun
    before = updater.step
    epoch, steps = divmod(before, checkpoint["steps_per_epoch"])
    batch = checkpoint.get("global_batch", checkpoint[f"num_{noun}s"] // checkpoint["steps_per_epoch"])
    steps_seen = min(steps * batch // sampler.global_batch_size, sampler.steps_per_epoch - 1)
    updater.step = epoch * sampler.steps_per_epoch + steps_seen
    run.saved_step = None  # its number is one of the other batch
    run.begin_epoch()
    logger.warning(
        "--allow_rescale: step %d with batches of %d %ss is step %d with %d; the run continues with this batch size",
        *(before, batch, noun, updater.step, sampler.global_batch_size),
    )

"""Train CLIP with a SPARO read-out on pairs of images and captions.

    python -m dino_sparo.clip.train --output_dir runs/clip                         # built-in scenes, this machine
    torchrun --nproc_per_node=8 -m dino_sparo.clip.train --preset cc3m --data_path 'cc3m/{00000..00331}.tar' \\
        --output_dir runs/cc3m
    python run_with_submitit.py --module dino_sparo.clip.train ...                 # the same on Slurm

Options are those of `options.py`. `train` builds what they describe and loops over epochs; what happens in an
epoch is `engine.py`. Starting the same command again goes on from the last checkpoint.
"""

import argparse
import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dino_sparo.checkpoint import CheckpointError, CheckpointFolder, initialize_encoder, load_checkpoint
from dino_sparo.cli import HelpFormatter, errors_in_one_line
from dino_sparo.clip.encode import ClipView
from dino_sparo.clip.engine import NonFiniteLossError, TooManyDroppedPairsError, train_one_epoch
from dino_sparo.clip.loss import create_loss
from dino_sparo.clip.model import CLIP, clip_description, create_clip
from dino_sparo.clip.options import check_options, get_args_parser
from dino_sparo.clip.pair_sources import open_pairs
from dino_sparo.clip.pairs import PairDataset, PairSource, PairTransform, create_pair_loader
from dino_sparo.clip.state import Training, check_same_model, param_groups
from dino_sparo.clip.zero_shot_probe import ZeroShotProbe, open_training_probe
from dino_sparo.data import EpochSampler
from dino_sparo.distributed import (
    Distributed,
    all_or_none,
    broadcast_object,
    choose_precision,
    faults_named,
    init_distributed,
    on_rank_0,
    rank_0_first,
    require_same,
    world_size,
)
from dino_sparo.evaluation.protocol import git_hash, plain, versions
from dino_sparo.logs import RunLog, setup_logging
from dino_sparo.optim import cosine_schedule, create_optimizer
from dino_sparo.preemption import Agreement, StopSignals, Watchdog, hand_over
from dino_sparo.scenes import Ties
from dino_sparo.sources.tars import TarSource

__all__ = ["MENDABLE_ERRORS", "check_options", "get_args_parser", "main", "train"]

logger = logging.getLogger("dino_sparo.clip.train")

# What the optimizer's state depends on, so that a run cannot go on with another.
FIXED_OPTIONS = ("beta1", "beta2", "eps")
# What may change without making it another run; init_from said how it began.
HARMLESS_OPTIONS = {
    *("output_dir", "num_workers", "max_steps", "device", "dist_url", "local_rank", "download", "init_from", "preset"),
    *("saveckp_freq", "saveckp_minutes", "keep_checkpoints", "max_corrupt", "dist_timeout_min"),
    *("zero_shot_freq", "zero_shot_path", "grad_accum_steps", "grad_checkpointing"),
}
# Errors of training that end with one line, since the user can mend their cause.
MENDABLE_ERRORS: tuple[type[Exception], ...] = (NonFiniteLossError, TooManyDroppedPairsError)


def train(args: argparse.Namespace) -> None:
    """Build everything the options describe, resume if there is something to resume, train.

    SIGUSR2, SIGTERM and Ctrl-C end the run after the next few steps, with a checkpoint.

    Raises:
        ValueError: options that do not fit each other, the data or the checkpoint; nothing was overwritten.
        NonFiniteLossError, TooManyDroppedPairsError: from training; the last checkpoint stays as it is.
        FaultError: a process or a worker died or hangs; the last checkpoint stays, and starting again goes on from it.
        RunStopped: a signal ended the run after it had saved.
    """
    with StopSignals() as signals, faults_named(args.dist_timeout_min):
        place = init_distributed(args.device, args.dist_url, args.dist_timeout_min)
        output_dir = Path(args.output_dir)
        with all_or_none(f"preparing {output_dir}"):
            check_options(args)
            output_dir.mkdir(parents=True, exist_ok=True)
            setup_logging(output_dir)
        logger.info("options: %s", json.dumps(vars(args), default=str))
        run = build_run(args, place, signals)
        if args.init_from:
            start_from(run, args.init_from)
        resume(run)
        log = RunLog(output_dir, run.training.step, run.training.step // run.sampler.steps_per_epoch)
        signals.begin_training()
        try:
            stop = train_epochs(run, log)
        finally:
            log.close()
        if stop is not None:
            hand_over(signals, stop, run.training.step)


def micro_batch_size(batch_size: int, num_processes: int, accum_steps: int) -> int:
    """Pairs that one process encodes at a time.

    Args:
        batch_size: pairs per step.
        num_processes: that share them.
        accum_steps: parts of a process' share.

    Raises:
        ValueError: they do not come out even.
    """
    parts = num_processes * accum_steps
    if batch_size % parts:
        raise ValueError(
            f"--batch_size {batch_size} cannot be shared by {num_processes} process(es) with --grad_accum_steps "
            f"{accum_steps}; the nearest that can is {max(round(batch_size / parts), 1) * parts}"
        )
    return batch_size // parts


@dataclass
class Run:
    """What `build_run` builds and the epochs use.

    Attributes:
        source: the pairs.
        sampler: which come when.
        loader: their batches.
        training: model, loss, optimizer, schedule.
        args: the options.
        description: how the model is built, for the checkpoint.
        checkpoints: where the run is saved.
        agreement: when the ranks agree on what to do next.
        probe: what the model is asked every few epochs, or None.
        best_zero_shot: best answer so far, percent.
    """

    source: PairSource
    sampler: EpochSampler
    loader: DataLoader
    training: Training
    args: argparse.Namespace
    description: dict[str, Any]
    checkpoints: CheckpointFolder
    agreement: Agreement
    probe: ZeroShotProbe | None = None
    best_zero_shot: float = 0.0

    @property
    def extent(self) -> dict[str, int]:
        """What a step's number means: it counts towards these."""
        return {
            "num_pairs": len(self.source),
            "global_batch": self.sampler.global_batch_size,
            "steps_per_epoch": self.sampler.steps_per_epoch,
        }


def build_run(args: argparse.Namespace, place: Distributed, signals: StopSignals) -> Run:
    """Pairs, model, loss, optimizer and schedule from the options."""
    micro_batch = micro_batch_size(args.batch_size, place.world_size, args.grad_accum_steps)
    with rank_0_first(f"opening {args.data_path}"):
        source = open_pairs(
            args.data_path,
            args.image_key,
            args.caption_key,
            args.image_folder,
            args.caption_templates,
            Ties(*args.scene_ties),
            args.max_corrupt,
            args.download,
        )
    require_same(len(source), "the number of pairs")
    _note_few_shards(source, args.num_workers * place.world_size)
    sampler = EpochSampler(len(source), micro_batch, place.rank, place.world_size, args.grad_accum_steps, args.seed)
    loader = create_pair_loader(
        PairDataset(source, PairTransform(args.img_size, tuple(args.crop_scale), args.exact_crops), args.seed),
        sampler,
        context_length=args.context_length,
        num_workers=args.num_workers,
        pin_memory=place.device.type == "cuda",
        timeout_min=args.dist_timeout_min,
    )
    training = build_training(args, place, sampler.steps_per_epoch)
    training.locate, training.num_left_out = source.location, source.left_out.total
    description = clip_description(training.network.config, args.norm_mean, args.norm_std)
    checkpoints = CheckpointFolder(Path(args.output_dir), args.keep_checkpoints)
    agreement = Agreement(signals, args.saveckp_minutes, place.device)
    probe = None
    if args.zero_shot_freq:
        view = ClipView(args.img_size, tuple(args.norm_mean), tuple(args.norm_std))
        probe = open_training_probe(args.zero_shot_path, args.data_path, view, args.download)
    return Run(source, sampler, loader, training, args, description, checkpoints, agreement, probe)


def _note_few_shards(source: PairSource, num_loaders: int) -> None:
    """Trainers that read shards from end to end would leave loaders without work, or without data."""
    if isinstance(source.images, TarSource) and len(source.images.shards) < num_loaders:
        logger.info(
            "%d shards for %d loading processes: no loss, any process reads any pair",
            len(source.images.shards),
            num_loaders,
        )


def build_training(args: argparse.Namespace, place: Distributed, steps_per_epoch: int) -> Training:
    """Model, loss, optimizer and schedule from the options."""
    torch.manual_seed(args.seed)
    dtype = choose_precision(args.precision, None, place.device)
    model = build_model(args).to(place.device)
    model.set_grad_checkpointing(args.grad_checkpointing)
    is_fused = place.device.type != "cpu" or dtype != torch.bfloat16
    model.image.backbone.use_fused_attention(is_fused)
    model.text.use_fused_attention(is_fused)
    wrapped: nn.Module = model
    if world_size() > 1:
        device_ids = [place.device.index] if place.device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids, gradient_as_bucket_view=True)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    logger.info("%s, %.1f M parameters, %s on %s", model.config, num_parameters / 1e6, dtype, place)
    mean, std = (
        torch.tensor(values, device=place.device).view(1, -1, 1, 1) for values in (args.norm_mean, args.norm_std)
    )
    groups = param_groups(model, args.weight_decay, (args.beta1, args.beta2), args.eps)
    total_steps = args.epochs * steps_per_epoch
    return Training(
        model=wrapped,
        loss=create_loss(args.logits),
        optimizer=create_optimizer("adamw", groups),
        # OpenCLIP's warm-up: the first step already moves, by one of `warmup_steps` equal parts.
        lr=cosine_schedule(
            args.lr, args.min_lr, total_steps, args.warmup_steps, start=args.lr / max(args.warmup_steps, 1)
        ),
        weight_decay=args.weight_decay,
        device=place.device,
        mean=mean,
        std=std,
        dtype=dtype,
        scaler=torch.amp.GradScaler(place.device.type) if dtype == torch.float16 else None,
        accum_steps=args.grad_accum_steps,
        clip_grad=args.clip_grad,
        max_corrupt=args.max_corrupt,
    )


def build_model(args: argparse.Namespace) -> CLIP:
    """The model from the options, with random weights."""
    return create_clip(
        arch=args.arch,
        patch_size=args.patch_size,
        readout=args.readout,
        num_slots=args.sparo_slots,
        slot_dim=args.sparo_slot_dim,
        key_dim=args.sparo_key_dim,
        group_size=args.sparo_group_size,
        img_size=args.img_size,
        embed_dim=args.embed_dim,
        text_width=args.text_width,
        text_heads=args.text_heads,
        text_layers=args.text_layers,
        context_length=args.context_length,
        pre_norm=args.pre_norm,
        replace_block=args.replace_block,
        bottleneck_dim=args.bottleneck_dim,
        num_codes=args.num_codes,
        norm_first=args.norm_first,
    )


def start_from(run: Run, source: str) -> None:
    """Start the image encoder from other weights, unless there is a checkpoint to resume.

    Raises:
        CheckpointError: the weights do not fit the encoder.
    """
    if run.checkpoints.newest.is_file():
        logger.info("--init_from %s is ignored: %s goes on", source, run.checkpoints.newest)
        return
    logger.info("image encoder: start from %s", initialize_encoder(run.training.network.image, source))


def resume(run: Run) -> None:
    """Go on from the newest sound checkpoint, if there is one; the number of processes may be another.

    Raises:
        CheckpointError: none is sound, or it is of another model, or counts its steps towards other pairs or batches.
    """
    found: list[Path | None] = []
    on_rank_0(lambda: found.append(run.checkpoints.find()), "looking for a checkpoint")
    path = broadcast_object(found[0] if found else None)
    if path is None:
        return
    with all_or_none(f"reading {path}"):
        checkpoint = load_checkpoint(path)
        check_same_model(checkpoint, run.description, str(path))
        before, now = checkpoint["args"], plain(vars(run.args))
        differing = [(f"--{name}", before[name], now[name]) for name in FIXED_OPTIONS if before[name] != now[name]]
        differing += [
            (name, checkpoint[name], value) for name, value in run.extent.items() if checkpoint[name] != value
        ]
        if differing:
            raise CheckpointError(
                f"{path} cannot be resumed: "
                + ", ".join(f"{name} was {old} and is now {new}" for name, old, new in differing)
                + ". Give the same pairs and batch size, or another --output_dir"
            )
        run.training.load_state_dict(checkpoint, str(path))
    run.best_zero_shot = checkpoint["best_zero_shot"]
    for name in sorted(before.keys() & now.keys() - HARMLESS_OPTIONS):
        if before[name] != now[name]:
            logger.warning("--%s was %s and is now %s: the run will not be what it was", name, before[name], now[name])
    logger.info("resumed %s: %d epochs, %d steps done", path, checkpoint["epoch"], run.training.step)


def train_epochs(run: Run, log: RunLog) -> Signals | None:
    """The epochs that are left: train, probe, log, save.

    An epoch that `--max_steps` or a signal cuts short is saved, but neither probed nor logged in log.txt: its rest
    comes later.

    Returns:
        The signal that ended the run early, or None.
    """
    args, training, steps_per_epoch = run.args, run.training, run.sampler.steps_per_epoch
    end_step = args.epochs * steps_per_epoch
    if args.max_steps is not None:
        end_step = min(end_step, args.max_steps)
    begin, stop = time.monotonic(), None
    while training.step < end_step and stop is None:
        epoch, start_step = divmod(training.step, steps_per_epoch)
        run.sampler.set_epoch(epoch, start_step)
        with Watchdog(args.dist_timeout_min) as watchdog:
            means, stop = train_one_epoch(
                training,
                run.loader,
                epoch,
                steps_per_epoch,
                len(run.source),
                log,
                end_step,
                run.agreement,
                save=partial(save, run, epoch),
                watchdog=watchdog,
            )
        if training.step % steps_per_epoch == 0:
            finish_epoch(run, log, epoch, means)
        elif stop is None:
            save(run, epoch)
    if stop is None:
        seconds = time.monotonic() - begin
        logger.info("done: %d steps in %.0f s, %s", training.step, seconds, run.checkpoints.newest)
    return stop


def finish_epoch(run: Run, log: RunLog, epoch: int, means: dict[str, float]) -> None:
    """Probe, log, save."""
    args, training = run.args, run.training
    # A model that tells nothing apart has a loss of ln(batch).
    values = {f"train_{name}": value for name, value in means.items()}
    values["loss_over_ln_batch"] = means["loss"] / math.log(max(args.batch_size, 2))
    copies = []
    if run.probe is not None and (epoch + 1) % args.zero_shot_freq == 0:
        values["zero_shot"] = run.probe.accuracy(
            training.network, training.device, training.dtype, run.sampler.batch_size, min(args.num_workers, 2)
        )
        if values["zero_shot"] > run.best_zero_shot:
            copies.append("checkpoint_best.pth")
            run.best_zero_shot = values["zero_shot"]
    if args.saveckp_freq and epoch % args.saveckp_freq == 0:
        copies.append(f"checkpoint{epoch:04}.pth")
    logger.info("epoch %d, step %d: %s", epoch, training.step, "  ".join(f"{k} {v:.4g}" for k, v in values.items()))
    log.scalars({f"epoch/{name}": value for name, value in values.items()}, training.step)
    # The line first: a run killed in between takes the epoch again, and drops the line when it resumes.
    log.write_epoch({**values, "epoch": epoch, "step": training.step})
    save(run, epoch + 1, copies)
    run.agreement.saved()


def save(run: Run, epochs_done: int, copies: Sequence[str] = ()) -> None:
    """Write a checkpoint, and copies beside it that later saves do not overwrite; every rank calls this.

    Args:
        run: what to save.
        epochs_done: whole epochs.
        copies: names of the copies.

    Raises:
        CheckpointError: on every rank, if rank 0 could not write; the checkpoint before stays.
    """
    checkpoint = {
        **run.training.state_dict(),
        **run.extent,
        "clip": run.description,
        "epoch": epochs_done,
        "best_zero_shot": run.best_zero_shot,
        "args": plain(vars(run.args)),
        "versions": {**versions(), "git": git_hash()},
    }
    on_rank_0(lambda: run.checkpoints.save(checkpoint, copies), "saving a checkpoint")
    logger.info("saved at step %d", run.training.step)


def main(argv: list[str] | None = None) -> None:
    """Parse the options and train; a mistake in them ends with one line, not a traceback."""
    parser = argparse.ArgumentParser(parents=[get_args_parser()], description=__doc__, formatter_class=HelpFormatter)
    args = parser.parse_args(argv)
    with errors_in_one_line(logger, *MENDABLE_ERRORS):
        train(args)


if __name__ == "__main__":
    main()

"""Pretrain a vision transformer with DINO and a SPARO read-out.

    python main_dino.py --output_dir runs/first                                   # built-in scenes, this machine
    torchrun --nproc_per_node=8 main_dino.py --data_path imagenet/train --output_dir runs/vits16
    python run_with_submitit.py ...                                               # the same on Slurm

Options stand in the order of the data flow, with the names and defaults of facebookresearch/dino. `train_dino` builds
what they describe and loops over epochs; what happens in an epoch is `dino_sparo/engine.py`. Starting the same command
again goes on from the last checkpoint.
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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dino_sparo.checkpoint import (
    CheckpointError,
    CheckpointFolder,
    check_same_model,
    encoder_description,
    initialize_encoder,
    load_checkpoint,
)
from dino_sparo.cli import (
    HelpFormatter,
    add_architecture_options,
    add_device_options,
    add_normalization_options,
    bool_flag,
    errors_in_one_line,
)
from dino_sparo.crops import EvalTransform, MultiCropAugmentation
from dino_sparo.data import (
    EpochSampler,
    ImageDataset,
    ImageSource,
    collate,
    create_loader,
    open_source,
    require_labels,
)
from dino_sparo.distort import Distortions
from dino_sparo.distributed import (
    Distributed,
    all_or_none,
    broadcast_object,
    choose_precision,
    faults_named,
    init_distributed,
    is_main,
    on_rank_0,
    rank_0_first,
    require_same,
    world_size,
)
from dino_sparo.encoder import EncoderConfig, encoder_from_config
from dino_sparo.engine import (
    NonFiniteLossError,
    Schedules,
    TooManyCorruptImagesError,
    Training,
    choose_compile,
    compile_networks,
    effective_rank,
    memory_report,
    train_one_epoch,
)
from dino_sparo.evaluation.attention import crops_grid, slots_grid
from dino_sparo.evaluation.features import disjoint_subsets
from dino_sparo.evaluation.knn import evaluate_knn
from dino_sparo.evaluation.protocol import git_hash, plain, versions
from dino_sparo.evaluation.views import SquareView, of_different_classes, spread_out
from dino_sparo.head import DINOHead, DINONetwork
from dino_sparo.logs import Meters, RunLog, setup_logging
from dino_sparo.loss import NUM_TEACHER_CROPS, DINOLoss, diagnose_collapse
from dino_sparo.optim import OPTIMIZERS, cosine_schedule, create_optimizer, param_groups
from dino_sparo.preemption import Agreement, StopSignals, Watchdog, hand_over

logger = logging.getLogger("main_dino")

REFERENCE_BATCH = 256  # images; learning rates are stated for it and scaled with the batch
LOOK_IMAGES = 64  # whose encodings' rank is taken after every epoch; the rank is at most this
SHOWN_IMAGES = 4  # with the maps of all slots, in TensorBoard
POSITIVE_OPTIONS = ("epochs", "max_steps", "batch_size_per_gpu", "grad_accum_steps", "patch_size", "keep_checkpoints")
NON_NEGATIVE_OPTIONS = (
    *("warmup_epochs", "saveckp_freq", "saveckp_minutes", "knn_freq", "num_workers", "freeze_last_layer", "clip_grad"),
    *("lr", "min_lr", "weight_decay", "weight_decay_end", "loss_chunk"),
)
# What the optimizer's state depends on, so that a run cannot go on with another.
FIXED_OPTIONS = ("optimizer", "norm_last_layer", "use_bn_in_head")
# What may change without making it another run; init_from said how it began.
HARMLESS_OPTIONS = {
    *("output_dir", "num_workers", "max_steps", "device", "dist_url", "local_rank", "download", "init_from"),
    *("saveckp_freq", "saveckp_minutes", "keep_checkpoints", "knn_freq", "max_corrupt"),
    *("allow_rescale", "dist_timeout_min", "memory_report"),
}
# Errors of training that end with one line, since the user can mend their cause.
MENDABLE_ERRORS: tuple[type[Exception], ...] = (NonFiniteLossError, TooManyCorruptImagesError)
PROBE_NEIGHBOURS = 20
PROBE_IMAGES = (4000, 1000)  # that vote, that are classified, in the probe during training


def get_args_parser() -> argparse.ArgumentParser:
    """The options of training, in data-flow order."""
    parser = argparse.ArgumentParser(
        "main_dino.py", description="Pretrain with DINO + SPARO.", formatter_class=HelpFormatter, add_help=False
    )
    _add_data_options(parser)
    _add_crop_options(parser)
    add_normalization_options(parser)
    add_architecture_options(parser)
    _add_head_options(parser)
    _add_loss_options(parser)
    _add_optimization_options(parser)
    _add_run_options(parser)
    add_device_options(parser)
    return parser


def _add_data_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("images")
    group.add_argument(
        "--data_path",
        default="scenes",
        help="Where the images are: a folder, a list (.txt) or table (.csv) of paths, tar shards "
        "(shard-{000..099}.tar), a torchvision set (cifar10:DIR), or the built-in scenes (scenes:NUMBER:SIZE).",
    )
    group.add_argument("--download", action="store_true", help="Let a torchvision set download itself.")
    group.add_argument(
        "--max_corrupt", type=float, default=0.01, help="Share of unreadable images above which the run stops."
    )
    group.add_argument("--batch_size_per_gpu", type=int, default=64, help="Images per process and forward pass.")
    group.add_argument(
        "--grad_accum_steps",
        type=int,
        default=1,
        help="Forward passes per step; their gradients are averaged, as if the batch were that many times larger.",
    )


def _add_crop_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("crops")
    group.add_argument("--global_crops_size", type=int, default=224, help="Side of the global crops in pixels.")
    group.add_argument("--local_crops_size", type=int, default=96, help="Side of the local crops in pixels.")
    group.add_argument(
        "--global_crops_scale",
        type=float,
        nargs=2,
        default=(0.4, 1.0),
        help="Share of the image's area in a global crop; without local crops a wider range, 0.14 1, works better.",
    )
    group.add_argument("--local_crops_number", type=int, default=8, help="Local crops per image; 0 for none.")
    group.add_argument(
        "--local_crops_scale", type=float, nargs=2, default=(0.05, 0.4), help="Share of the area in a local crop."
    )
    group.add_argument(
        "--distort_on",
        default="auto",
        choices=["auto", "cpu", "device"],
        help="Where crops get colour jitter, blur and solarisation: in the processes that load them, or in batches on "
        "the device, so that these only decode and cut; auto does so on GPUs.",
    )


def _add_head_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("head: encoding -> logits")
    group.add_argument(
        "--out_dim",
        type=int,
        default=65536,
        help="Number of prototypes K. Large for large and varied data; a few thousand for tens of thousands of images.",
    )
    group.add_argument(
        "--norm_last_layer",
        type=bool_flag,
        default=True,
        help="Keep the prototypes' lengths at one. False can be better for a ViT-S, and less stable.",
    )
    group.add_argument(
        "--head_hidden_dim", type=int, default=2048, help="Width of the head's MLP; less saves time with tiny encoders."
    )
    group.add_argument("--use_bn_in_head", type=bool_flag, default=False, help="Batch norm in the head's MLP.")


def _add_loss_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("loss and teacher")
    group.add_argument(
        "--warmup_teacher_temp",
        type=float,
        default=0.04,
        help="Teacher's temperature in the first epoch; lower it if the loss does not fall.",
    )
    group.add_argument(
        "--teacher_temp",
        type=float,
        default=0.04,
        help="Teacher's temperature after the warm-up; above 0.07 training is usually unstable.",
    )
    group.add_argument(
        "--warmup_teacher_temp_epochs", type=int, default=0, help="Epochs between the two; 30 is typical for 0.07."
    )
    group.add_argument(
        "--momentum_teacher",
        type=float,
        default=0.996,
        help="Momentum of the moving average in the first step, rising to 1; 0.9995 suits a batch of 256, and lower "
        "values short runs.",
    )


def _add_optimization_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimisation")
    group.add_argument("--epochs", type=int, default=100, help="Epochs of the run, which the schedules span.")
    group.add_argument(
        "--max_steps", type=int, default=None, help="Stop after this many steps in all, for trials; schedules stay."
    )
    group.add_argument("--optimizer", default="adamw", choices=sorted(OPTIMIZERS), help="adamw suits transformers.")
    group.add_argument(
        "--lr",
        type=float,
        default=0.0005,
        help=f"Learning rate after the warm-up, for a batch of {REFERENCE_BATCH} images; scaled with the batch.",
    )
    group.add_argument("--warmup_epochs", type=int, default=10, help="Epochs of linear warm-up of the learning rate.")
    group.add_argument("--min_lr", type=float, default=1e-6, help="Learning rate at the end.")
    group.add_argument("--weight_decay", type=float, default=0.04, help="Weight decay in the first step.")
    group.add_argument("--weight_decay_end", type=float, default=0.4, help="Weight decay in the last step.")
    group.add_argument(
        "--clip_grad", type=float, default=3.0, help="Largest norm of a parameter's gradient; 0 for no limit."
    )
    group.add_argument(
        "--freeze_last_layer",
        type=int,
        default=1,
        help="Epochs during which the prototypes stay as drawn; more if the loss does not fall.",
    )
    group.add_argument(
        "--precision",
        default="auto",
        choices=["auto", "bf16", "fp16", "fp32"],
        help="Precision of the forward passes; auto is bf16 where the device computes in it, else fp32.",
    )
    group.add_argument(
        "--compile",
        default="auto",
        choices=["auto", "on", "off"],
        help="torch.compile of networks and loss, which takes a minute or two at the start; auto does so on GPUs.",
    )
    group.add_argument(
        "--packed_crops", action="store_true", help="Run crops of both sizes together; fewer, larger kernels on GPUs."
    )
    group.add_argument(
        "--grad_checkpointing",
        action="store_true",
        help="Compute the student's blocks twice instead of keeping what is in them: less memory, more time.",
    )
    group.add_argument(
        "--loss_chunk", type=int, default=0, help="Prototypes that the loss looks at together; 0 for all; saves memory."
    )
    group.add_argument(
        "--memory_report", action="store_true", help="Say at the start what weights, gradients and activations take."
    )
    group.add_argument(
        "--use_fp16", type=bool_flag, default=None, help="The reference's option: true for fp16, false for fp32."
    )


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument("--output_dir", default=".", help="Where checkpoints and logs go; a run there is resumed.")
    group.add_argument("--saveckp_freq", type=int, default=20, help="Keep a checkpoint every so many epochs; 0: never.")
    group.add_argument(
        "--saveckp_minutes",
        type=float,
        default=30.0,
        help="Also save after so many minutes within an epoch: what a crash can cost at most; 0: only after epochs.",
    )
    group.add_argument(
        "--keep_checkpoints",
        type=int,
        default=3,
        help="How many of the last checkpoints stay; if the newest is damaged, the one before it is used.",
    )
    group.add_argument(
        "--allow_rescale",
        action="store_true",
        help="Go on from a checkpoint with another batch or number of processes: schedules and the place in the epoch "
        "follow from the images seen. Without it that is refused.",
    )
    group.add_argument(
        "--knn_freq",
        type=int,
        default=0,
        help="Probe the teacher with 20-NN every so many epochs, on a few thousand labelled images, and keep the best "
        "checkpoint; 0: never.",
    )
    group.add_argument("--seed", type=int, default=0, help="Of weights, order, crops and stochastic depth.")


def train_dino(args: argparse.Namespace) -> None:
    """Build everything the options describe, resume if there is something to resume, train.

    SIGUSR2, SIGTERM and Ctrl-C end the run after the next few steps, with a checkpoint.

    Raises:
        ValueError: options that do not fit each other, the data or the checkpoint; nothing was overwritten.
        NonFiniteLossError, TooManyCorruptImagesError: from training; the last checkpoint stays as it is.
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
        log_step = resume(run)
        log = RunLog(output_dir, log_step, run.training.step // run.sampler.steps_per_epoch)
        log.options(vars(args), ("epoch/train_loss", "epoch/knn_20"))
        signals.begin_training()
        try:
            stop = train_epochs(run, log)
        finally:
            log.close()
        if stop is not None:
            hand_over(signals, stop, run.training.step)


def check_options(args: argparse.Namespace) -> None:
    """Refuse numbers that cannot be and crops that do not fit the patches.

    Raises:
        ValueError: names the option and what would fit.
    """
    for name in POSITIVE_OPTIONS:
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}: give a positive number")
    for name in NON_NEGATIVE_OPTIONS:
        if getattr(args, name) < 0:
            raise ValueError(f"--{name} {getattr(args, name)}: give 0 or more")
    for name in ("momentum_teacher", "max_corrupt"):
        if not 0 <= getattr(args, name) <= 1:
            raise ValueError(f"--{name} {getattr(args, name)}: give a number from 0 to 1")
    if args.warmup_epochs > args.epochs:
        raise ValueError(
            f"--warmup_epochs {args.warmup_epochs} is longer than the run of {args.epochs} epochs; shorten it"
        )
    sizes = {"global_crops_size": args.global_crops_size}
    if args.local_crops_number:
        sizes["local_crops_size"] = args.local_crops_size
    for name, size in sizes.items():
        if size < args.patch_size or size % args.patch_size:
            nearest = max(round(size / args.patch_size), 1) * args.patch_size
            raise ValueError(
                f"--{name} {size} px is not a multiple of --patch_size {args.patch_size} px; the nearest that fits is "
                f"{nearest}"
            )


class Examples(NamedTuple):
    """Images to look at after every epoch.

    Attributes:
        crops: per view a batch (B, C, H, W), augmented as for training.
        views: (B, C, H, W), the central squares of a few, not augmented.
    """

    crops: list[Tensor]
    views: Tensor


@dataclass
class Run:
    """What `build_run` builds and the epochs use.

    Attributes:
        source: the images.
        sampler: whose images come when.
        loader: their crops.
        training: networks, loss, optimizer, schedules.
        args: the options.
        description: how the encoder is built, for the checkpoint.
        examples: what is looked at after every epoch; rank 0 only.
        checkpoints: where the run is saved.
        agreement: when the ranks agree on what to do next.
        best_knn: best 20-NN accuracy so far, percent.
    """

    source: ImageSource
    sampler: EpochSampler
    loader: DataLoader
    training: Training
    args: argparse.Namespace
    description: dict[str, Any]
    examples: Examples | None
    checkpoints: CheckpointFolder
    agreement: Agreement
    best_knn: float = 0.0

    @property
    def extent(self) -> dict[str, int]:
        """What a step's number means: it counts towards these."""
        return {
            "num_images": len(self.source),
            "global_batch": self.sampler.global_batch_size,
            "steps_per_epoch": self.sampler.steps_per_epoch,
        }


def build_run(args: argparse.Namespace, place: Distributed, signals: StopSignals) -> Run:
    """Images, networks, loss, optimizer and schedules from the options."""
    with rank_0_first(f"opening {args.data_path}"):
        source = open_source(args.data_path, download=args.download)
    require_same(len(source), "the number of images")
    if args.knn_freq:
        require_labels(source)
    sampler = EpochSampler(
        len(source), args.batch_size_per_gpu, place.rank, place.world_size, args.grad_accum_steps, args.seed
    )
    augmentation = partial(
        MultiCropAugmentation,
        tuple(args.global_crops_scale),
        tuple(args.local_crops_scale),
        args.local_crops_number,
        args.global_crops_size,
        args.local_crops_size,
        tuple(args.norm_mean),
        tuple(args.norm_std),
    )
    defer = choose_distortion(args.distort_on, place.device)
    dataset = ImageDataset(source, augmentation(defer), args.seed)
    loader = create_loader(
        dataset,
        sampler,
        num_workers=args.num_workers,
        pin_memory=place.device.type == "cuda",
        timeout_min=args.dist_timeout_min,
    )
    training = build_training(args, place, sampler.steps_per_epoch)
    training.locate = source.location
    description = encoder_description(training.network.config, args.norm_mean, args.norm_std)
    if defer:
        training.distort = Distortions(args.norm_mean, args.norm_std).to(place.device)
    prepare_step(args, training, dataset)
    examples = draw_examples(args, source, augmentation(False)) if is_main() else None
    checkpoints = CheckpointFolder(Path(args.output_dir), args.keep_checkpoints)
    agreement = Agreement(signals, args.saveckp_minutes, place.device)
    return Run(source, sampler, loader, training, args, description, examples, checkpoints, agreement)


def draw_examples(args: argparse.Namespace, source: ImageSource, augmentation: MultiCropAugmentation) -> Examples:
    """A few images of different classes, then others spread over the data: their crops, and of the few their views."""
    few = of_different_classes(source, SHOWN_IMAGES)
    indices = [*few, *(index for index in spread_out(source, LOOK_IMAGES) if index not in few)][:LOOK_IMAGES]
    cropped = ImageDataset(source, augmentation, args.seed)
    crops = zip(*(cropped[index].views for index in indices), strict=True)
    square = SquareView([args.global_crops_size], args.patch_size, args.norm_mean, args.norm_std)
    whole = ImageDataset(source, square, args.seed)
    shown = [whole[index].views[0] for index in few]
    return Examples([torch.stack(view) for view in crops], torch.stack(shown))


def build_training(args: argparse.Namespace, place: Distributed, steps_per_epoch: int) -> Training:
    """Student, teacher, loss, optimizer and schedules from the options."""
    torch.manual_seed(args.seed)
    dtype = choose_precision(args.precision, args.use_fp16, place.device)
    student = build_network(args, args.drop_path_rate).to(place.device)
    teacher = build_network(args, drop_path_rate=0.0).to(place.device)
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    for network in (student, teacher):
        network.backbone.use_fused_attention(place.device.type != "cpu" or dtype != torch.bfloat16)
        network.backbone.use_packed_crops(args.packed_crops)
    student.backbone.set_grad_checkpointing(args.grad_checkpointing)
    if args.use_bn_in_head and world_size() > 1 and place.device.type != "cuda":
        logger.warning("batch norm is synchronised on GPUs only: here every process normalises by its own images")
    elif args.use_bn_in_head and world_size() > 1:
        student, teacher = (nn.SyncBatchNorm.convert_sync_batchnorm(network) for network in (student, teacher))
    wrapped: nn.Module = student
    if world_size() > 1:
        device_ids = [place.device.index] if place.device.type == "cuda" else None
        # With several micro-batches the graph that synchronises is not the only one.
        wrapped = DistributedDataParallel(
            student, device_ids, gradient_as_bucket_view=True, static_graph=args.grad_accum_steps == 1
        )
    loss = DINOLoss(
        args.out_dim,
        args.local_crops_number + NUM_TEACHER_CROPS,
        args.warmup_teacher_temp,
        args.teacher_temp,
        args.warmup_teacher_temp_epochs,
        args.epochs,
        chunk_size=args.loss_chunk,
    ).to(place.device)
    num_parameters = sum(parameter.numel() for parameter in student.parameters())
    logger.info("%s, %.1f M parameters with the head, %s on %s", student.config, num_parameters / 1e6, dtype, place)
    return Training(
        student=wrapped,
        teacher=teacher,
        loss=loss,
        optimizer=create_optimizer(args.optimizer, param_groups(student)),
        schedules=build_schedules(args, steps_per_epoch),
        device=place.device,
        dtype=dtype,
        scaler=torch.amp.GradScaler(place.device.type) if dtype == torch.float16 else None,
        accum_steps=args.grad_accum_steps,
        clip_grad=args.clip_grad,
        freeze_last_layer=args.freeze_last_layer,
        max_corrupt=args.max_corrupt,
        seed=args.seed,
    )


def choose_distortion(option: str, device: torch.device) -> bool:
    """Whether `--distort_on` means to distort crops on this device."""
    return option == "device" or (option == "auto" and device.type == "cuda")


def prepare_step(args: argparse.Namespace, training: Training, dataset: ImageDataset) -> None:
    """Compile, and say what a step takes, if the options ask for it."""
    compiles = choose_compile(args.compile, training.device)
    if not (compiles or args.memory_report):
        return
    items = [dataset[index % len(dataset)] for index in range(args.batch_size_per_gpu)]
    batch = collate(items)
    if compiles:
        compile_networks(training, batch)
    if args.memory_report:
        for part, size in memory_report(training, batch).items():
            logger.info("memory of a step: %-12s %8.1f MiB", part, size / 2**20)


def build_network(args: argparse.Namespace, drop_path_rate: float) -> DINONetwork:
    """Encoder and head from the options, with random weights."""
    config = EncoderConfig(
        arch=args.arch.replace("deit", "vit"),  # the reference's older names of the same models
        patch_size=args.patch_size,
        readout=args.readout,
        num_slots=args.sparo_slots,
        slot_dim=args.sparo_slot_dim,
        key_dim=args.sparo_key_dim,
        group_size=args.sparo_group_size,
        img_size=args.global_crops_size,
    )
    encoder = encoder_from_config(config, drop_path_rate)
    head = DINOHead(
        encoder.encoding_dim, args.out_dim, args.use_bn_in_head, args.norm_last_layer, hidden_dim=args.head_hidden_dim
    )
    return DINONetwork(encoder, head)


def build_schedules(args: argparse.Namespace, steps_per_epoch: int) -> Schedules:
    """Learning rate, weight decay and teacher momentum, one value per step."""
    total_steps = args.epochs * steps_per_epoch
    batch = args.batch_size_per_gpu * args.grad_accum_steps * world_size()
    return Schedules(
        lr=cosine_schedule(
            args.lr * batch / REFERENCE_BATCH, args.min_lr, total_steps, args.warmup_epochs * steps_per_epoch
        ),
        weight_decay=cosine_schedule(args.weight_decay, args.weight_decay_end, total_steps),
        momentum=cosine_schedule(args.momentum_teacher, 1.0, total_steps),
    )


def start_from(run: Run, source: str) -> None:
    """Start student and teacher from other weights, unless there is a checkpoint to resume.

    Args:
        run: what to start.
        source: file with a ViT's weights.

    Raises:
        CheckpointError: the weights do not fit the encoder.
    """
    if run.checkpoints.newest.is_file():
        logger.info("--init_from %s is ignored: %s goes on", source, run.checkpoints.newest)
        return
    student = run.training.network
    logger.info("start from %s; the head is new", initialize_encoder(student.encoder, source))
    run.training.teacher.load_state_dict(student.state_dict())


def resume(run: Run) -> int | None:
    """Go on from the newest sound checkpoint, if there is one.

    Returns:
        The step after which TensorBoard's files are written anew; None if the steps are counted in another way now.

    Raises:
        CheckpointError: none is sound, or it is of another model, or counts its steps towards other images or batches.
    """
    args = run.args
    found: list[Path | None] = []
    on_rank_0(lambda: found.append(run.checkpoints.find()), "looking for a checkpoint")
    path = broadcast_object(found[0] if found else None)
    if path is None:
        return 0
    with all_or_none(f"reading {path}"):
        checkpoint, training = load_checkpoint(path), run.training
        check_same_model(checkpoint, training.network.config, str(path))
        before, now = checkpoint["args"], plain(vars(args))
        is_rescaled = _is_rescaled(checkpoint, run.extent)
        _check_same_extent(run, checkpoint, str(path), may_differ=is_rescaled and args.allow_rescale)
        training.load_state_dict(checkpoint, str(path))
    run.best_knn = checkpoint["best_knn"]
    if is_rescaled:
        rescale(run, checkpoint)
    for name in sorted(before.keys() & now.keys() - HARMLESS_OPTIONS):
        if before[name] != now[name]:
            logger.warning("--%s was %s and is now %s: the run will not be what it was", name, before[name], now[name])
    logger.info("resumed %s: %d epochs, %d steps done", path, checkpoint["epoch"], training.step)
    return None if is_rescaled else training.step


def _is_rescaled(checkpoint: dict[str, Any], extent: dict[str, int]) -> bool:
    """Whether the same images come in batches of another size than when the checkpoint was written."""
    differs = [name for name, value in extent.items() if checkpoint.get(name, value) != value]
    return bool(differs) and "num_images" not in differs


def _check_same_extent(run: Run, checkpoint: dict[str, Any], path: str, may_differ: bool) -> None:
    """Refuse other images, other options that the optimizer's state depends on, and other batches unless allowed."""
    before, now = checkpoint["args"], plain(vars(run.args))
    differing = [(f"--{name}", before[name], now[name]) for name in FIXED_OPTIONS if before[name] != now[name]]
    if not may_differ:
        extent = ((name, checkpoint.get(name, value), value) for name, value in run.extent.items())
        differing += [(name, old, new) for name, old, new in extent if old != new]
    if differing:
        remedy = "; or --allow_rescale, to go on from the images seen so far" * _is_rescaled(checkpoint, run.extent)
        raise CheckpointError(
            f"{path} cannot be resumed: "
            + ", ".join(f"{name} was {old} and is now {new}" for name, old, new in differing)
            + f". Give the same images, batch size and number of processes, or another --output_dir{remedy}"
        )


def rescale(run: Run, checkpoint: dict[str, Any]) -> None:
    """Go on with another batch: the step becomes the one at which as many images of the epoch were seen, rounded down.

    The schedules are those of the new batch, read at that step, so learning rate, weight decay and momentum go on where
    they were as functions of the images seen (the learning rate scaled with the batch).
    """
    training, steps_per_epoch = run.training, run.sampler.steps_per_epoch
    epoch, steps = divmod(training.step, checkpoint["steps_per_epoch"])
    before = training.step
    batch = checkpoint.get("global_batch", checkpoint["num_images"] // checkpoint["steps_per_epoch"])
    seen = min(steps * batch // run.sampler.global_batch_size, steps_per_epoch - 1)
    training.step = epoch * steps_per_epoch + seen
    training.meters, training.num_corrupt = Meters(), 0
    logger.warning(
        "--allow_rescale: step %d with batches of %d images is step %d with %d; this run is not the one that was begun",
        before,
        batch,
        training.step,
        run.sampler.global_batch_size,
    )


def train_epochs(run: Run, log: RunLog) -> Signals | None:
    """The epochs that are left: train, look, probe, log, save.

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
    """Look, probe, log, save."""
    args, training = run.args, run.training
    values = {f"train_{name}": value for name, value in means.items()} | look_at_epoch(run, log, means)
    is_best = False
    if args.knn_freq and (epoch + 1) % args.knn_freq == 0:
        values["knn_20"] = probe(run)
        is_best = values["knn_20"] > run.best_knn
        run.best_knn = max(run.best_knn, values["knn_20"])
    logger.info("epoch %d, step %d: %s", epoch, training.step, "  ".join(f"{k} {v:.4g}" for k, v in values.items()))
    log.scalars({f"epoch/{name}": value for name, value in values.items()}, training.step)
    copies = ["checkpoint_best.pth"] if is_best else []
    if args.saveckp_freq and epoch % args.saveckp_freq == 0:
        copies.append(f"checkpoint{epoch:04}.pth")
    # The line first: a run killed in between takes the epoch again, and drops the line when it resumes.
    log.write_epoch({**values, "epoch": epoch, "step": training.step})
    save(run, epoch + 1, copies)
    run.agreement.saved()


def look_at_epoch(run: Run, log: RunLog, means: dict[str, float]) -> dict[str, float]:
    """Rank of the encodings and pictures of some images, on rank 0; names a collapse in the log."""
    if run.examples is None:
        return {}
    training, args = run.training, run.args
    encoder = training.teacher.encoder.eval()
    crops, views = run.examples
    with torch.no_grad(), training.autocast():
        rank_of_features = effective_rank(encoder(crops[0].to(training.device)))
        pictures = {
            "crops": crops_grid(crops, args.norm_mean, args.norm_std),
            "slots": slots_grid(encoder, views.to(training.device), args.norm_mean, args.norm_std),
        }
    for name, picture in pictures.items():
        log.image(name, picture, training.step)
    collapse = diagnose_collapse(
        means["loss"],
        means["teacher_entropy"],
        means["marginal_entropy"],
        rank_of_features,
        args.out_dim,
        args.batch_size_per_gpu,
    )
    if collapse is not None:
        logger.warning("%s", collapse)
    return {"feature_rank": rank_of_features, "loss_over_ln_k": means["loss"] / math.log(args.out_dim)}


def probe(run: Run) -> float:
    """20-NN accuracy of the teacher in percent, on disjoint labelled subsets of the training images."""
    args = run.args
    voters, judged = disjoint_subsets(run.source, PROBE_IMAGES)
    found = evaluate_knn(
        run.training.teacher.encoder,
        voters,
        judged,
        EvalTransform(args.global_crops_size, tuple(args.norm_mean), tuple(args.norm_std)),
        device=run.training.device,
        batch_size=args.batch_size_per_gpu,
        num_workers=min(args.num_workers, 2),
    )
    return found.results[PROBE_NEIGHBOURS].top1


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
        "encoder": run.description,
        "epoch": epochs_done,
        "best_knn": run.best_knn,
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
        train_dino(args)


if __name__ == "__main__":
    main()

"""DINO for the trainer: options -> networks, loss, data; evaluation after an epoch.

The run itself (resuming, epochs, saving, faults) is `training/run.py`; a step is `step.py`.
"""

import argparse
import logging
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from dino_sparo.data.dataset import Batch
from dino_sparo.dino import options
from dino_sparo.dino.head import DINOHead, DINONetwork
from dino_sparo.dino.loss import NUM_TEACHER_CROPS, DINOLoss, diagnose_collapse
from dino_sparo.dino.options import REFERENCE_BATCH, defaults_of
from dino_sparo.dino.step import DINOTraining, train_step
from dino_sparo.draw.pixels import crops_grid
from dino_sparo.evaluation.attention.maps import slots_grid
from dino_sparo.evaluation.features import effective_rank
from dino_sparo.models.encoder import EncoderConfig, encoder_from_config
from dino_sparo.runtime.distributed import Distributed, world_size, wrap_ddp
from dino_sparo.runtime.logs import RunLog
from dino_sparo.runtime.precision import use_fused_attention
from dino_sparo.training import run
from dino_sparo.training.images import CropObjective, Examples, create_updater
from dino_sparo.training.objective import EpochResult, StepReport
from dino_sparo.training.optim import cosine_schedule
from dino_sparo.training.updater import GroupSchedule

__all__ = ["check_options", "train"]

logger = logging.getLogger(__name__)

DIAGNOSE_EVERY = 10  # steps of an epoch between two looks at the teacher's entropies


def check_options(args: argparse.Namespace) -> None:
    """What `DINOObjective` checks, and that networks and loss can be built, before a job waits in a queue.

    Raises:
        ValueError: names the option or the value and what would fit.
    """
    DINOObjective.check_options(args)
    with torch.device("meta"):  # takes no memory
        build_network(args, args.drop_path_rate)
        build_loss(args)


def train(args: argparse.Namespace) -> None:
    """Train DINO with these options, or go on from the last checkpoint; see `training.run.train` for what is raised."""
    run.train(args, DINOObjective)


class DINOObjective(CropObjective):
    """DINO: a student learns to predict the teacher's prototypes from other crops."""

    fixed_options = ("optimizer", "norm_last_layer", "use_bn_in_head", "out_dim", "head_hidden_dim")
    training: DINOTraining
    check_options, defaults_of = staticmethod(options.check_options), staticmethod(defaults_of)

    def build_training(self, args: argparse.Namespace, process: Distributed, steps_per_epoch: int) -> DINOTraining:
        """Student, teacher, loss, optimizer and schedules from the options."""
        return build_training(args, process, steps_per_epoch)

    def start_from(self) -> None:
        """Start student and teacher from a ViT's weights."""
        super().start_from()
        self.training.teacher.load_state_dict(self.training.network.state_dict())

    def step(self, batches: list[Batch], epoch: int, is_last: bool) -> StepReport:
        """One step of algorithm 1; every few steps also the teacher's entropies."""
        step_of_epoch = self.updater.step % self.sampler.steps_per_epoch
        return train_step(self.training, batches, epoch, diagnose=is_last or step_of_epoch % DIAGNOSE_EVERY == 0)

    def after_epoch(self, epoch: int, means: Mapping[str, float], log: RunLog) -> EpochResult:
        """The k-NN probe; rank of the encodings and pictures of some images."""
        probe = super().after_epoch(epoch, means, log)  # first: if it is made again, TensorBoard has no picture twice
        values = self._look(self.data.examples, epoch, means, log) if self.data.examples is not None else {}
        return EpochResult({**values, **probe.values}, probe.score)

    def _look(self, examples: Examples, epoch: int, means: Mapping[str, float], log: RunLog) -> dict[str, float]:
        """Rank of the encodings and pictures of some images; names a collapse in the log."""
        args, encoder = self.args, self.training.encoder.eval()
        device = self.updater.device
        with torch.no_grad(), self.updater.autocast():
            feature_rank = effective_rank(encoder(examples.crops[0].to(device)))
            pictures = {
                "crops": crops_grid(examples.crops, args.norm_mean, args.norm_std),
                "slots": slots_grid(encoder, examples.views.to(device), args.norm_mean, args.norm_std),
            }
        for name, picture in pictures.items():
            log.image(name, picture, self.updater.step)
        collapse = diagnose_collapse(
            means["loss"],
            means["teacher_entropy"],
            means["marginal_entropy"],
            feature_rank,
            args.out_dim,
            args.batch_size_per_gpu,
        )
        if collapse is not None and may_warn_of_collapse(args, epoch):
            logger.warning("%s", collapse)
        return {"feature_rank": feature_rank, "loss_over_ln_k": means["loss"] / math.log(args.out_dim)}


def may_warn_of_collapse(args: argparse.Namespace, epoch: int) -> bool:
    """False while flat answers are normal: while the teacher's temperature warms up, and in a tenth of the run."""
    return epoch >= max(args.warmup_teacher_temp_epochs, args.epochs // 10)


def build_training(args: argparse.Namespace, process: Distributed, steps_per_epoch: int) -> DINOTraining:
    """Student, teacher, loss, optimizer and schedules from the options."""
    torch.manual_seed(args.seed)
    student = build_network(args, args.drop_path_rate).to(process.device)
    schedules = build_schedules(args, steps_per_epoch)
    updater = create_updater(student, schedules.groups, args, process.device)
    teacher = build_network(args, drop_path_rate=0.0).to(process.device)
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    for network in (student, teacher):
        network.backbone.use_fused_attention(use_fused_attention(process.device, updater.dtype))
    student.backbone.set_grad_checkpointing(args.grad_checkpointing)
    if args.use_bn_in_head and world_size() > 1 and process.device.type != "cuda":
        logger.warning("batch norm is synchronised on GPUs only: here every process normalises by its own images")
    elif args.use_bn_in_head and world_size() > 1:
        student, teacher = (nn.SyncBatchNorm.convert_sync_batchnorm(network) for network in (student, teacher))
    loss = build_loss(args).to(process.device)
    num_parameters = sum(parameter.numel() for parameter in student.parameters())
    summary = student.encoder.summary
    logger.info("%s, %.1f M parameters with the head, %s on %s", summary, num_parameters / 1e6, updater.dtype, process)
    return DINOTraining(
        # Steps under no_sync use another graph, so static_graph must be off.
        student=wrap_ddp(student, process.device, static_graph=args.grad_accum_steps == 1),
        teacher=teacher,
        loss=loss,
        updater=updater,
        momentum=schedules.momentum,
        clip_grad=args.clip_grad,
        freeze_last_layer=args.freeze_last_layer,
    )


class Schedules(NamedTuple):
    """One value per step of the run.

    Attributes:
        groups: of learning rate and weight decay, for each group of `optim.param_groups`.
        momentum: of the teacher's moving average.
    """

    groups: list[GroupSchedule]
    momentum: np.ndarray


def build_schedules(args: argparse.Namespace, steps_per_epoch: int) -> Schedules:
    """Learning rate, weight decay and teacher momentum from the options."""
    total_steps = args.epochs * steps_per_epoch
    batch = args.batch_size_per_gpu * args.grad_accum_steps * world_size()
    lr = cosine_schedule(
        args.lr * batch / REFERENCE_BATCH, args.min_lr, total_steps, args.warmup_epochs * steps_per_epoch
    )
    weight_decay = cosine_schedule(args.weight_decay, args.weight_decay_end, total_steps)
    momentum = cosine_schedule(args.momentum_teacher, 1.0, total_steps)
    return Schedules([{"lr": lr, "weight_decay": weight_decay}, {"lr": lr}], momentum)  # the second has no decay


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
        pre_norm=args.pre_norm,
        quick_gelu=args.quick_gelu,
    )
    encoder = encoder_from_config(config, drop_path_rate)
    head = DINOHead(
        encoder.encoding_dim, args.out_dim, args.use_bn_in_head, args.norm_last_layer, hidden_dim=args.head_hidden_dim
    )
    return DINONetwork(encoder, head)


def build_loss(args: argparse.Namespace) -> DINOLoss:
    """The loss from the options, with a centre of zeros."""
    return DINOLoss(
        args.out_dim,
        args.local_crops_number + NUM_TEACHER_CROPS,
        args.warmup_teacher_temp,
        args.teacher_temp,
        args.warmup_teacher_temp_epochs,
        args.epochs,
        chunk_size=args.loss_chunk,
    )

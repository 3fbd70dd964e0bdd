"""The objectives with a student and a teacher: data, schedules, optimizer, evaluation after an epoch.

An objective adds its head, its loss and its step; see `training/objective.py` for the contract.
"""

import argparse
import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import DataLoader

from dino_sparo.data.augment import Distortions
from dino_sparo.data.batch import Batch
from dino_sparo.data.crops import MultiCropAugmentation
from dino_sparo.data.dataset import ImageDataset
from dino_sparo.data.examples import Examples, draw_examples
from dino_sparo.data.labels import require_labels
from dino_sparo.data.loader import create_loader
from dino_sparo.data.ranks import open_images
from dino_sparo.data.samplers import EpochSampler
from dino_sparo.data.sources import ImageLimits, ImageSource, TableColumns
from dino_sparo.data.views import EvalTransform, PatchView
from dino_sparo.distillation import options
from dino_sparo.distillation.initialize import initialize_networks
from dino_sparo.distillation.loss import DINOLoss
from dino_sparo.distillation.network import NUM_TEACHER_CROPS, EncoderWithHead, has_batch_norm, synchronize_batch_norm
from dino_sparo.draw.pixels import crops_grid
from dino_sparo.evaluation.attention.maps import slots_grid
from dino_sparo.evaluation.features import effective_rank
from dino_sparo.evaluation.knn_probe import knn_probe
from dino_sparo.models.architectures import TIMM
from dino_sparo.models.backbone import default_patch_size
from dino_sparo.models.encoder import Encoder, EncoderConfig
from dino_sparo.runtime.collectives import broadcast_tensors
from dino_sparo.runtime.faults import MendableError, UserError
from dino_sparo.runtime.launch import Distributed, is_main, num_nodes, world_size, wrap_ddp
from dino_sparo.runtime.logs import RunLog
from dino_sparo.runtime.precision import choose_precision, prefers_fused_attention, use_fused_attention
from dino_sparo.training.objective import EpochResult, Objective
from dino_sparo.training.optim import cosine_schedule, layer_factors, param_groups
from dino_sparo.training.recording import HostTensors, Recorder, cuda_recording
from dino_sparo.training.updater import create_updater
from dino_sparo.weights.entries import NETWORKS, check_same_model, encoder_description
from dino_sparo.weights.initialize import initialize_pretrained

logger = logging.getLogger(__name__)

DIAGNOSE_EVERY = 10  # steps of an epoch between two looks at the teacher's entropies


class DistillationObjective(Objective[Batch]):
    """An objective whose student learns from a teacher, its moving average, that sees the global crops.

    Attributes:
        loss_key: the checkpoint's key of the loss's state.
        student: the trained `EncoderWithHead`, inside DDP where there are several processes.
        network: the student without DDP.
        teacher: a `EncoderWithHead` without gradients, the student's moving average.
        loss: student's and teacher's outputs -> loss.
        momentum: of the moving average, one value per step.
        clip_grad: largest norm of a parameter's gradient; 0 for no limit.
        frozen_steps: number of first steps in which the backbones of student and teacher stay as they are.
        distort: distorts 8-bit crops on the device; None where the loader's crops are finished.
        recorder: calls or replays the first part of a step.
        examples: images to look at after every epoch; rank 0 only.
        lr_power: the learning rate is proportional to this power of the batch size.
        crop_scale: side of the loaded global crops, in units of `--global_crops_size`.
    """

    loss_key: ClassVar[str]
    fill_in_defaults: ClassVar[Callable[[argparse.Namespace], dict[str, Any]]] = options.fill_in_defaults
    fixed_options: ClassVar[Sequence[str]] = ("optimizer", "layer_decay", "use_bn_in_head", "head_hidden_dim")
    harmless_options: ClassVar[Sequence[str]] = ("knn_freq", "init_head", "init_optimizer", "cuda_graph")
    source: ImageSource
    loss: nn.Module
    recorder = Recorder([])
    lr_power: ClassVar[float] = 1.0
    crop_scale: int = 1

    def __init__(self, args: argparse.Namespace, process: Distributed) -> None:
        # Data: images -> S crops.
        self.args = args
        self.source, self.sampler, self.loader, self.distort, self.examples = open_crops(args, process, self.crop_scale)
        self.num_left_out = getattr(self.source, "num_left_out", 0)  # in damaged shards
        if args.knn_freq:
            require_labels(self.source)

        # Student and teacher, which begin with the same weights.
        torch.manual_seed(args.seed)
        student = self.build_network(args, args.drop_path_rate).to(process.device)
        teacher = self.build_network(args, drop_path_rate=0.0).to(process.device)
        teacher.load_state_dict(student.state_dict())
        teacher.requires_grad_(False)

        # Loss.
        self.loss = self.build_loss(args).to(process.device)

        # Schedules: one value per step of the run.
        steps_per_epoch = self.sampler.steps_per_epoch
        steps, warmup_steps = args.epochs * steps_per_epoch, args.warmup_epochs * steps_per_epoch
        peak_lr = args.lr * (self.sampler.global_batch_size / options.REFERENCE_BATCH) ** self.lr_power
        lr = cosine_schedule(peak_lr, args.min_lr, steps, warmup_steps)
        weight_decay = cosine_schedule(args.weight_decay, args.weight_decay_end, steps)
        self.momentum = cosine_schedule(args.momentum_teacher, 1.0, steps)

        # Optimizer; its second group, biases and norms, has no weight decay.
        self.updater = create_updater(
            student,
            param_groups(student),
            [{"lr": lr, "weight_decay": weight_decay}, {"lr": lr}],
            process.device,
            choose_precision(args.precision, args.use_fp16, process.device),
            optimizer=args.optimizer,
            layer_factors=layer_factors(student.backbone, args.layer_decay),
            accum_steps=args.grad_accum_steps,
            seed=args.seed,
        )
        self.clip_grad, self.frozen_steps = args.clip_grad, args.freeze_backbone_epochs * steps_per_epoch

        # Device and processes.
        for network in (student, teacher):
            use_fused_attention(network.backbone, prefers_fused_attention(process.device, self.updater.dtype))
            network.prepare(crop_sides(args))
        student.backbone.set_grad_checkpointing(args.grad_checkpointing)
        if world_size() > 1 and has_batch_norm(student):
            student, teacher = synchronize_batch_norm(student, teacher, process.device)
        self.network, self.teacher = student, teacher
        is_recorded = self.decide_recording(process.device)
        self.recorder = Recorder(self.updater.parameters, cuda_recording(process.device) if is_recorded else None)
        # Steps under no_sync use another graph, so static_graph must be off. Recorded steps exchange their gradients
        # after the replay, without DDP.
        static_graph = args.grad_accum_steps == 1
        self.student = student if is_recorded else wrap_ddp(student, process.device, static_graph)
        millions = sum(parameter.numel() for parameter in student.parameters()) / 1e6
        summary, dtype = student.encoder.summary, self.updater.dtype
        logger.info("%s, %.1f M parameters with the head, %s on %s", summary, millions, dtype, process)

    @classmethod
    def check_options(cls, args: argparse.Namespace) -> None:
        """Refuse options that do not fit, and sizes of which no networks or loss can be built."""
        options.check_options(args)
        with torch.device("meta"):  # takes no memory
            cls.build_network(args, args.drop_path_rate).prepare(crop_sides(args))
            cls.build_loss(args)

    @property
    def loss_exchanges(self) -> bool:
        """Whether the loss exchanges tensors between ranks, so that a step of several ranks is not recorded."""
        return False

    @property
    def copies_from_host(self) -> bool:
        """Whether the backbone copies tensors from the host in every forward pass, as some models of timm do."""
        with torch.device("meta"):
            network = self.build_network(self.args, drop_path_rate=0.0)
        network.prepare(crop_sides(self.args))
        with HostTensors() as host:
            for side in crop_sides(self.args):
                network.backbone(torch.empty(2, self.args.in_chans, side, side, device="meta"))
        return host.are_used

    def decide_recording(self, device: torch.device) -> bool:
        """Whether the steps are recorded as a CUDA graph, by `--cuda_graph`; the log says why not.

        Decided by rules, not by trying: a failed recording leaves CUDA's allocator unusable.
        """
        wanted = self.args.cuda_graph
        reasons = {
            f"the device is {device.type}": device.type != "cuda",
            "there are several nodes, whose exchange of gradients DDP overlaps with the backward pass": (
                wanted == "auto" and num_nodes() > 1
            ),
            "--grad_checkpointing repeats random numbers": (
                self.args.grad_checkpointing and (self.args.drop_path_rate > 0 or self.args.arch.startswith(TIMM))
            ),
            f"timm copies tensors from the host in every forward pass of {self.args.arch}": (
                wanted != "off" and device.type == "cuda" and self.copies_from_host
            ),
            "its loss exchanges tensors between ranks": world_size() > 1 and self.loss_exchanges,
            "its batch norm is synchronised between ranks": world_size() > 1 and has_batch_norm(self.network),
        }
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        if reason is not None and wanted != "off":
            level = logging.WARNING if wanted == "on" else logging.INFO
            logger.log(level, "--cuda_graph %s: the step is not recorded, as %s", wanted, reason)
        return wanted != "off" and reason is None

    @staticmethod
    @abstractmethod
    def build_network(args: argparse.Namespace, drop_path_rate: float) -> EncoderWithHead:
        """Student or teacher from the options, with random weights."""

    @staticmethod
    @abstractmethod
    def build_loss(args: argparse.Namespace) -> nn.Module:
        """The loss from the options."""

    @abstractmethod
    def diagnose(
        self, epoch: int, means: Mapping[str, float], feature_rank: float
    ) -> tuple[dict[str, float], str | None]:
        """Numbers for the log after an epoch, and a warning if the encodings collapsed.

        Args:
            epoch: counted from 0.
            means: over the steps of the epoch.
            feature_rank: effective rank of the teacher's encodings of some images.
        """

    @property
    def networks(self) -> dict[str, nn.Module]:
        """Student, teacher, and the loss.

        In training the teacher is in training mode too: batch norm in its head uses the batch's statistics.
        """
        return {"student": self.network, "teacher": self.teacher, self.loss_key: self.loss}

    @property
    def compiled_modules(self) -> list[nn.Module]:
        """All networks and the distortions."""
        return [*self.networks.values(), *([self.distort] if self.distort else [])]

    @property
    def description(self) -> dict[str, Any]:
        """The checkpoint's `encoder`."""
        return {"encoder": encoder_description(self.network.config, self.args.norm_mean, self.args.norm_std)}

    def check_same_model(self, checkpoint: Mapping[str, Any], source: str) -> None:
        """Refuse to resume a checkpoint of another encoder."""
        check_same_model(checkpoint, self.network.config, source)

    def initialize(self) -> None:
        """Start all networks and the optimizer from the file of `--init_from`, as far as they fit, or from timm."""
        args = self.args
        if args.init_from:
            optimizer = args.optimizer if args.init_optimizer else None
            new_head = args.init_head == "new"
            networks = {name: self.networks[name] for name in (*NETWORKS, self.loss_key)}
            parts = initialize_networks(networks, self.updater, args.init_from, new_head, optimizer)
            logger.info("start from %s", parts)
        elif args.pretrained:
            report = initialize_pretrained(self.network.encoder)
            self.teacher.load_state_dict(self.network.state_dict())
            logger.info("start from %s; the head is new", report)
        elif args.freeze_backbone_epochs:
            raise UserError(
                f"--freeze_backbone_epochs {args.freeze_backbone_epochs} would keep random weights; start them from a "
                "file (--init_from), from timm (--pretrained), or leave the option out"
            )

    def synchronize(self) -> None:
        """Give all ranks rank 0's weights; DDP does the same for an unrecorded run."""
        if self.recorder.record is not None:
            for network in self.networks.values():
                broadcast_tensors([*network.parameters(), *network.buffers()])

    @property
    def is_backbone_frozen(self) -> bool:
        """Whether this step leaves the backbones of student and teacher as they are."""
        return self.updater.step < self.frozen_steps

    def begin_step(self) -> None:
        """Begin a step of the updater; in frozen steps batch norm in the backbones keeps and uses its statistics."""
        self.updater.begin_step()
        if self.is_backbone_frozen:  # every epoch begins in training mode
            for part in (*self.network.backbone.modules(), *self.teacher.backbone.modules()):
                if isinstance(part, nn.modules.batchnorm._BatchNorm):
                    part.eval()

    def is_diagnosed(self, is_last: bool) -> bool:
        """Whether a step reports the teacher's entropies: every tenth step of an epoch, and a last one."""
        return is_last or self.updater.step % self.sampler.steps_per_epoch % DIAGNOSE_EVERY == 0

    def is_evaluated(self, epoch: int) -> bool:
        """Every `--knn_freq` epochs."""
        return self.args.knn_freq > 0 and (epoch + 1) % self.args.knn_freq == 0

    def after_epoch(self, epoch: int, means: Mapping[str, float], log: RunLog) -> EpochResult:
        """The k-NN probe of the teacher; rank of its encodings and pictures of some images."""
        self.recorder.drop()  # its memory is the evaluation's
        values, accuracy, collapse = dict[str, float](), None, None
        if self.is_evaluated(epoch):  # first: if it is repeated, TensorBoard has no picture twice
            accuracy = self.probe(self.teacher.encoder)
        if self.examples is not None:
            feature_rank = self._look(self.examples, log)
            values, collapse = self.diagnose(epoch, means, feature_rank)
            values = {"feature_rank": feature_rank, **values}
        return EpochResult(values if accuracy is None else {**values, self.metric: accuracy}, accuracy, collapse)

    def probe(self, encoder: Encoder) -> float:
        """The 20-NN accuracy of an encoder on the training images, percent."""
        args = self.args
        transform = EvalTransform(args.global_crops_size, tuple(args.norm_mean), tuple(args.norm_std))
        sizes = args.batch_size_per_gpu, args.num_workers
        return knn_probe(encoder, self.source, transform, self.updater.device, *sizes)

    def _look(self, examples: Examples, log: RunLog) -> float:
        """Log pictures of some images; returns the effective rank of the teacher's encodings of the images."""
        args, encoder, device = self.args, self.teacher.encoder.eval(), self.updater.device
        with torch.no_grad(), self.updater.autocast():
            encodings = encoder(examples.first_crops.to(device))
            if not encodings.isfinite().all():  # the next step would find this too, but this may be the last one
                raise MendableError(
                    f"the teacher's encodings are not finite after step {self.updater.step}, although the loss was; "
                    "the last checkpoint stays. Try --precision fp32, a lower --lr or --clip_grad"
                )
            feature_rank = effective_rank(encodings)
            pictures = {
                "crops": crops_grid(examples.crops, args.norm_mean, args.norm_std),
                "slots": slots_grid(encoder, examples.views.to(device), args.norm_mean, args.norm_std),
            }
        for name, picture in pictures.items():
            log.image(name, picture, self.updater.step)
        return feature_rank


# What the options say.


def image_options(args: argparse.Namespace, in_chans: int) -> dict[str, Any]:
    """The options of a training for `open_images`, but for the path and the split."""
    columns = TableColumns(args.path_column, args.label_column, args.split_column)
    limits = ImageLimits(args.max_image_mb, args.max_image_mpix, args.max_value, in_chans, args.exif)
    return {"download": args.download, "max_corrupt": args.max_corrupt, "columns": columns, "limits": limits}


def open_loader(
    source: ImageSource, transform: Callable, args: argparse.Namespace, process: Distributed
) -> tuple[EpochSampler, DataLoader]:
    """The order of a training's images, and its batches.

    Args:
        source: the images.
        transform: (image, rng) -> views.
        args: options of the training: batch, accumulated steps, seed, workers and their time limit.
        process: this process among its peers.
    """
    sizes = args.batch_size_per_gpu, process.rank, process.world_size, args.grad_accum_steps
    sampler = EpochSampler(len(source), *sizes, args.seed)
    settings = {"num_workers": args.num_workers, "timeout_min": args.dist_timeout_min}
    dataset, is_cuda = ImageDataset(source, transform, args.seed), process.device.type == "cuda"
    return sampler, create_loader(dataset, sampler, pin_memory=is_cuda, **settings)


def open_crops(
    args: argparse.Namespace, process: Distributed, crop_scale: int = 1
) -> tuple[ImageSource, EpochSampler, DataLoader, Distortions | None, Examples | None]:
    """Open the images of the options; ValueError if there are none, or too few for one step.

    Args:
        args: the options.
        process: this process among its peers.
        crop_scale: side of the loaded global crops, in units of the option's.

    Returns:
        The images, their sampler, the loader of crops, the distortions that run on the device (None if the loader
        distorts), and examples (None except on rank 0).
    """
    source = open_images(args.data_path, args.split, **image_options(args, args.in_chans))
    defer = args.distort_on == "device" or (args.distort_on == "auto" and process.device.type == "cuda")
    augmentation = partial(
        MultiCropAugmentation,
        tuple(args.global_crops_scale),
        tuple(args.local_crops_scale),
        args.local_crops_number,
        crop_scale * args.global_crops_size,
        args.local_crops_size,
        tuple(args.norm_mean),
        tuple(args.norm_std),
    )
    sampler, loader = open_loader(source, augmentation(defer), args, process)
    distort = Distortions(args.norm_mean, args.norm_std).to(process.device) if defer else None
    square = PatchView([args.global_crops_size], args.patch_size, args.norm_mean, args.norm_std)
    examples = draw_examples(source, augmentation(False), square, args.seed) if is_main() else None
    return source, sampler, loader, distort, examples


def crop_sides(args: argparse.Namespace) -> list[int]:
    """Sides of the crops in pixels."""
    return [args.global_crops_size, *([args.local_crops_size] if args.local_crops_number else [])]


def encoder_config(args: argparse.Namespace) -> EncoderConfig:
    """How the encoder is built."""
    return EncoderConfig(
        arch=args.arch,
        patch_size=default_patch_size(args.arch) if args.patch_size is None else args.patch_size,
        readout=args.readout,
        num_slots=args.sparo_slots,
        slot_dim=args.sparo_slot_dim,
        key_dim=args.sparo_key_dim,
        group_size=args.sparo_group_size,
        img_size=args.global_crops_size,
        in_chans=args.in_chans,
        pre_norm=args.pre_norm,
        quick_gelu=args.quick_gelu,
    )


def may_warn_of_collapse(args: argparse.Namespace, epoch: int) -> bool:
    """False while flat output is normal: in the warm-up of the teacher's temperature and the first tenth of the run."""
    return epoch >= max(args.warmup_teacher_temp_epochs, args.epochs // 10)


def loss_of_crops(args: argparse.Namespace, chunk_size: int = 0) -> DINOLoss:
    """DINO's loss from the options, with a center of zeros; UserError for KoLeo on batches of one image."""
    if args.koleo_weight and args.batch_size_per_gpu * world_size() == 1:
        raise UserError(
            f"--koleo_weight {args.koleo_weight} with one image per batch, which has no neighbour; "
            "give --batch_size_per_gpu 2 or more, which --grad_accum_steps does not replace, or leave it out"
        )
    return DINOLoss(
        args.out_dim,
        args.local_crops_number + NUM_TEACHER_CROPS,
        args.warmup_teacher_temp,
        args.teacher_temp,
        args.warmup_teacher_temp_epochs or 0,  # iBOT's is None until `fill_in_defaults`
        args.epochs,
        chunk_size=chunk_size,
    )

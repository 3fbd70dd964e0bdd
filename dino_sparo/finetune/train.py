"""Fine-tuning for the trainer: options -> labelled images, encoder with a linear head, its moving average, one step.

    images -> erased -> mixed by twos -> logits = W encoder(image) + b -> cross-entropy with the mixed labels

The run itself (resuming, epochs, saving, faults) is `training/run.py`. A checkpoint holds the trained network as
`student` and its moving average as `teacher`, so every command reads it as it reads one of DINO. Erasing and mixing are
timm's; they run on the device, with random numbers that are a function of seed, step and rank (`Updater.begin_step`).
"""

import argparse
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms import InterpolationMode

from dino_sparo.data.batch import Batch
from dino_sparo.data.labels import align_classes, require_labels
from dino_sparo.data.ranks import open_images
from dino_sparo.data.samplers import EpochSampler
from dino_sparo.data.sources import ImageSource
from dino_sparo.data.views import EvalTransform
from dino_sparo.distillation.network import EncoderWithHead, has_batch_norm, synchronize_batch_norm
from dino_sparo.distillation.objective import image_options, open_loader
from dino_sparo.distillation.options import REFERENCE_BATCH
from dino_sparo.evaluation.encoders import encoder_of_options
from dino_sparo.evaluation.features import Features, extract_split
from dino_sparo.evaluation.knn_probe import MAX_WORKERS
from dino_sparo.evaluation.linear.command import ProbeAugmentation
from dino_sparo.finetune import options
from dino_sparo.models.backbone import has_stochastic_depth
from dino_sparo.models.encoder import Encoder, encoder_from_config
from dino_sparo.runtime.collectives import all_reduce_sum
from dino_sparo.runtime.files import differences
from dino_sparo.runtime.launch import Distributed, world_size, wrap_ddp
from dino_sparo.runtime.logs import RunLog
from dino_sparo.runtime.precision import choose_precision, prefers_fused_attention, use_fused_attention
from dino_sparo.training.objective import EpochResult, Objective, StepReport
from dino_sparo.training.optim import cosine_schedule, layer_factors, param_groups
from dino_sparo.training.options import check_whole_patches
from dino_sparo.training.updater import Updater, create_updater
from dino_sparo.weights.entries import check_same_model, encoder_description
from dino_sparo.weights.file import CheckpointError
from dino_sparo.weights.initialize import initialize_from

logger = logging.getLogger(__name__)

HEAD_STD = 2e-5  # of the head's initial weights: the first gradients of the encoder are small. As in MAE.
TOP = 5
IDENTITY = ("sha256", "checkpoint_key", "untrained", "seed")  # entries of an encoder's record, whatever its path


class FinetuneObjective(Objective[Batch]):
    """Cross-entropy of an encoder with a linear head.

    Attributes:
        network: the trained network.
        average: the moving average of its weights.
        val: labelled images to validate on; None if the run does not validate.
        start: record of the encoder that the run starts from.
    """

    command = "finetune"
    make_parser = options.finetune_parser
    fill_in_defaults = options.fill_in_defaults
    check_options = staticmethod(options.check_options)
    score_name = "best_top1"
    metric = "val_top1"
    fixed_options = ("optimizer", "layer_decay")
    harmless_options = ("val_freq", "val_split")

    def __init__(self, args: argparse.Namespace, process: Distributed) -> None:
        # The encoder, and the options that follow from it.
        self.args = args
        started = encoder_of_options(args)
        self.start, self.mean, self.std = started.record, started.mean, started.std
        config, dtype = started.encoder.config, choose_precision(args.precision, None, process.device)
        complete_options(args, started.encoder, started.max_value)

        # Data: labelled images -> augmented views.
        self.source = open_labelled(args, args.split, config.in_chans)
        self.classes = list(self.source.classes or [])
        self.val = None
        if args.val_freq:
            self.val = align_classes(open_labelled(args, args.val_split, config.in_chans), self.classes)
        self.num_left_out = getattr(self.source, "num_left_out", 0)
        view = ProbeAugmentation(args.img_size, self.mean, self.std, InterpolationMode.BICUBIC)
        self.sampler, self.loader = open_loader(self.source, view, args, process)
        self.erase = RandomErasing(args.random_erasing, mode="pixel", device=process.device)
        self.mix = None
        if args.mixup or args.cutmix:  # the loss smooths the labels
            self.mix = Mixup(args.mixup, args.cutmix, label_smoothing=0.0, num_classes=len(self.classes))

        # Network and moving average.
        torch.manual_seed(args.seed)
        network = build_network(started.encoder, args.img_size, args.drop_path_rate, len(self.classes))
        network.to(process.device)
        use_fused_attention(network.backbone, prefers_fused_attention(process.device, dtype))
        self.average = ModelEmaV3(network, args.ema_decay, use_warmup=True).requires_grad_(False)
        network.backbone.set_grad_checkpointing(args.grad_checkpointing)
        if world_size() > 1 and has_batch_norm(network):
            network, self.average.module = synchronize_batch_norm(network, self.average.module, process.device)
        self.network = network
        self.updater = build_updater(network, args, self.sampler, process.device, dtype)
        self.model = wrap_ddp(network, process.device)
        words = "%s, %d classes, %s on %s"
        logger.info(words, network.encoder.summary, len(self.classes), dtype, process)

    @property
    def networks(self) -> dict[str, nn.Module]:
        """The trained network, and its moving average."""
        return {"student": self.network, "teacher": self.average.module}

    @property
    def compiled_modules(self) -> list[nn.Module]:
        """The trained network."""
        self.network.prepare([self.args.img_size])
        return [self.network]

    @property
    def description(self) -> dict[str, Any]:
        """The checkpoint's `encoder`; its classes, and the encoder that the run started from."""
        encoder = encoder_description(self.network.config, self.mean, self.std)
        return {"encoder": encoder, "finetune": {"classes": self.classes, "start": self.start}}

    def check_same_model(self, checkpoint: Mapping[str, Any], source: str) -> None:
        """Refuse to resume a checkpoint of another objective, other classes, another start or another encoder."""
        classes = checkpoint.get("finetune", {}).get("classes")
        if classes != self.classes:
            held = "no fine-tuned classifier" if classes is None else f"a classifier of {len(classes)} other classes"
            raise CheckpointError(f"{source} holds {held}, so it cannot be resumed; choose another --output_dir")
        wanted = {name: self.start.get(name) for name in IDENTITY}
        if other := differences(checkpoint["finetune"]["start"], wanted, "there", "now"):
            raise CheckpointError(
                f"{source} started from another encoder ({'; '.join(other)}), so it cannot be resumed; choose another "
                "--output_dir"
            )
        check_same_model(checkpoint, self.network.config, source)

    def step(self, batches: list[Batch], epoch: int, is_last: bool) -> StepReport:
        """Forward, loss, backward, update of network and average; see the equation above."""
        updater, losses = self.updater, []
        updater.begin_step()
        for index, batch in enumerate(batches):
            with updater.gradient_sync(self.model, is_last=index == len(batches) - 1):
                images, targets = self.augment(batch.views[0], batch.labels)
                with updater.autocast():
                    logits = self.model(images)
                loss = F.cross_entropy(logits.float(), targets, label_smoothing=self.args.label_smoothing)
                updater.backward(loss, loss, parts=len(batches))
            losses.append(loss.detach())
        loss = torch.stack(losses).mean()
        grad_norm = updater.finish_gradients(loss).norm()
        if self.args.clip_grad:
            torch.nn.utils.clip_grads_with_norm_(updater.parameters, self.args.clip_grad, grad_norm)
        updater.update()
        self.average.update(self.network, step=updater.step + 1)
        report = StepReport(
            loss, updater.nonfinite.clone(), {"lr": updater.hyperparameter("lr"), "grad_norm": grad_norm}
        )
        updater.step += 1
        return report

    def augment(
        self, images: Float[Tensor, "B C H W"], labels: Int64[Tensor, " B"]
    ) -> tuple[Float[Tensor, "B C H W"], Tensor]:
        """Erase rectangles, mix images by twos, in place; returns the images and their targets.

        Targets are labels (B,), or shares of classes (B, classes) of mixed images.
        """
        images = self.erase(images)
        return (images, labels) if self.mix is None else self.mix(images, labels)

    def is_evaluated(self, epoch: int) -> bool:
        """Every `--val_freq` epochs, and after the last."""
        frequency = self.args.val_freq
        return frequency > 0 and ((epoch + 1) % frequency == 0 or epoch + 1 == self.args.epochs)

    def after_epoch(self, epoch: int, means: Mapping[str, float], log: RunLog) -> EpochResult:
        """Top-1 and top-5 accuracy of the moving average."""
        if self.val is None or not self.is_evaluated(epoch):
            return EpochResult()
        args = self.args
        logits = extract_split(
            self.average.module,
            self.val,
            EvalTransform(args.img_size, self.mean, self.std),
            self.updater.device,
            batch_size=args.batch_size_per_gpu,
            num_workers=min(args.num_workers, MAX_WORKERS),
            dtype=self.updater.dtype,
            gather=False,
        )
        top1, top5 = accuracies(logits, self.updater.device)
        return EpochResult({self.metric: top1, "val_top5": top5}, score=top1)


def complete_options(args: argparse.Namespace, encoder: Encoder, max_value: int) -> None:
    """Fill in what the encoder determines, in place: sides of images and patches, range of pixels, stochastic depth."""
    config = encoder.config
    args.img_size, args.patch_size = args.img_size or config.img_size, config.patch_size
    args.max_value = max_value if args.max_value is None else args.max_value
    check_whole_patches(args, "img_size")
    if args.drop_path_rate and not has_stochastic_depth(config.arch):
        logger.warning("--drop_path_rate 0 instead of %s: %s has no stochastic depth", args.drop_path_rate, config.arch)
        args.drop_path_rate = 0.0


def open_labelled(args: argparse.Namespace, split: str | None, in_chans: int) -> ImageSource:
    """The labelled images of a split."""
    source = open_images(args.data_path, split, **image_options(args, in_chans))
    require_labels(source)
    return source


def build_network(started: Encoder, img_size: int, drop_path_rate: float, num_classes: int) -> EncoderWithHead:
    """The encoder for another size of images, with its weights, and a new head whose logits are nearly equal."""
    encoder = encoder_from_config(replace(started.config, img_size=img_size), drop_path_rate)
    logger.info("start from %s", initialize_from(encoder, started.state_dict(), "the encoder"))
    head = nn.Linear(encoder.encoding_dim, num_classes)
    nn.init.trunc_normal_(head.weight, std=HEAD_STD)
    nn.init.zeros_(head.bias)
    return EncoderWithHead(encoder, head)


def build_updater(
    network: EncoderWithHead, args: argparse.Namespace, sampler: EpochSampler, device: torch.device, dtype: torch.dtype
) -> Updater:
    """Optimizer and schedules: a warm-up and half a cosine, with a lower learning rate for earlier layers."""
    steps, warmup = (epochs * sampler.steps_per_epoch for epochs in (args.epochs, args.warmup_epochs))
    lr = cosine_schedule(args.lr * sampler.global_batch_size / REFERENCE_BATCH, args.min_lr, steps, warmup)
    return create_updater(
        network,
        param_groups(network),
        [{"lr": lr, "weight_decay": np.full(steps, args.weight_decay)}, {"lr": lr}],
        device,
        dtype,
        optimizer=args.optimizer,
        layer_factors=layer_factors(network.backbone, args.layer_decay),
        accum_steps=args.grad_accum_steps,
        seed=args.seed,
    )


def accuracies(logits: Features, device: torch.device) -> Sequence[float]:
    """Top-1 and top-5 accuracy in percent over the images of all processes, of which this process has a share."""
    scores = logits.features
    right = scores.topk(min(TOP, scores.shape[1])).indices == logits.labels[:, None]
    counts = torch.stack([right[:, :1].sum(), right.sum(), torch.tensor(len(right), device=right.device)])
    top1, top5, number = all_reduce_sum(counts.to(device)).tolist()
    return 100 * top1 / number, 100 * top5 / number

"""What the objectives on pairs of images and texts share on the trainer's side: data, validation, optimizer, resume.

An objective adds its model, its loss and the form of its batches; see `training/objective.py` for the contract.
"""

import argparse
import logging
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from dino_sparo.data.views import ClipView
from dino_sparo.image_text.evaluation.validation import open_validation
from dino_sparo.image_text.evaluation.zero_shot_probe import open_training_probe
from dino_sparo.image_text.initialize import initialize_towers
from dino_sparo.image_text.pairs.run_data import BatchForm, micro_batch_size, number_pairs, stream_pairs
from dino_sparo.image_text.scoring.scorer import Scorer
from dino_sparo.image_text.step import ContrastiveTraining, train_step
from dino_sparo.runtime.distributed import Distributed, wrap_ddp
from dino_sparo.runtime.extras import require
from dino_sparo.runtime.logs import RunLog
from dino_sparo.runtime.precision import choose_precision, use_fused_attention
from dino_sparo.training.objective import AnyBatch, EpochResult, Objective, StepReport
from dino_sparo.training.optim import cosine_schedule, create_optimizer
from dino_sparo.training.updater import Updater
from dino_sparo.weights.checkpoint import CheckpointError, check_same_description
from dino_sparo.weights.initialize import initialize_encoder

logger = logging.getLogger(__name__)

MOST_TEXTS = 0.5  # share of texts cut off above which the log warns


class PairObjective(Objective[AnyBatch]):
    """An objective on pairs of images and texts.

    Attributes:
        options: the module with its `get_args_parser`, `check_options` and `RECIPES`.
        model_name: for messages.
        model_key: the checkpoint's entry that says how the model is built.

    Args:
        args: the options of `options.py`.
        process: this process among its peers.

    Raises:
        ValueError: options that do not fit each other or the pairs.
    """

    options: ClassVar[ModuleType]
    model_name: ClassVar[str]
    model_key: ClassVar[str]
    noun: ClassVar[str] = "pair"
    score_name: ClassVar[str] = "best_zero_shot"
    metric: ClassVar[str] = "zero_shot"
    counters: ClassVar[Mapping[str, str]] = {"num_corrupt": "corrupt_pairs", "num_truncated": "truncated_captions"}
    fixed_options: ClassVar[Sequence[str]] = ("beta1", "beta2", "eps")
    harmless_options: ClassVar[Sequence[str]] = (
        "preset",
        "init_clip",
        "zero_shot_freq",
        "zero_shot_path",
        "grad_accum_steps",
    )
    training: ContrastiveTraining[AnyBatch]
    has_warned = False  # of texts that are cut off

    @classmethod
    def check_options(cls, args: argparse.Namespace) -> None:
        """Refuse a missing package, and options that cannot be."""
        require("open_clip", "captions")
        cls.options.check_options(args)

    @classmethod
    def defaults_of(cls, args: argparse.Namespace) -> dict[str, Any]:
        """What the options would be if none had been given."""
        defaults = cls.options.get_args_parser().parse_args([])
        cls.options.RECIPES.apply(defaults)
        return vars(defaults)

    def __init__(self, args: argparse.Namespace, process: Distributed) -> None:
        self.args = args
        micro_batch = micro_batch_size(args.batch_size, process.world_size, args.grad_accum_steps)
        if args.shards == "streamed":
            self.data = stream_pairs(args, process, micro_batch)
        else:
            self.data = number_pairs(args, process, micro_batch, self.batch_form(args))
        self.source, self.sampler, self.loader = self.data.source, self.data.sampler, self.data.loader
        self.num_left_out = self.data.source.left_out.total
        self.training = self.build_training(args, process, self.sampler.steps_per_epoch)
        held_out = self.data.held_out
        self.validation = None if held_out is None else open_validation(held_out, args.batch_size)
        self.probe = None
        if args.zero_shot_freq:
            self.probe = open_training_probe(args.zero_shot_path, args.data_path, args.download)

    @abstractmethod
    def batch_form(self, args: argparse.Namespace) -> BatchForm:
        """How batches are made of pairs."""

    @abstractmethod
    def build_training(self, args: argparse.Namespace, process: Distributed, steps_per_epoch: int) -> Any:
        """Model, loss, optimizer and schedule from the options: a `ContrastiveTraining`."""

    @property
    def model_description(self) -> dict[str, Any]:
        """How the model is built, and the mean and std of its images."""
        config = self.training.network.config
        return {**config.to_dict(), "mean": list(self.args.norm_mean), "std": list(self.args.norm_std)}

    @property
    def description(self) -> dict[str, Any]:
        """The checkpoint's entry `model_key`."""
        return {self.model_key: self.model_description}

    def check_same_model(self, checkpoint: Mapping[str, Any], source: str) -> None:
        """Refuse to resume a checkpoint of another model.

        Raises:
            CheckpointError: names each value that differs.
        """
        saved, config = checkpoint.get(self.model_key), self.training.network.config
        if saved is None:
            raise CheckpointError(
                f"{source} holds no {self.model_name}, so it cannot be resumed; choose another --output_dir"
            )
        # As this version writes it: an older one left out what had to be as it is now by default.
        complete = {**saved, **type(config).from_dict(dict(saved)).to_dict()}
        check_same_description(complete, self.model_description, source)

    def start_towers(self, with_rest: bool = True) -> set[str]:
        """Start the image encoder, or both encoders, from other weights; with both options each from its own.

        Args:
            with_rest: as in `initialize_towers`.

        Returns:
            Names of the weights that come from a file.

        Raises:
            CheckpointError: the weights do not fit the model.
        """
        args, model, taken = self.args, self.training.network, set[str]()
        if args.init_clip:
            report = initialize_towers(model, args.init_clip, with_rest, with_image=not args.init_from)
            taken |= set(report.taken)
            logger.info("start from %s", report)
        if args.init_from:
            image = initialize_encoder(model.image, args.init_from)
            taken |= {f"image.{name}" for name in image.taken}
            logger.info("image encoder: start from %s", image)
        return taken

    @property
    def scorer_settings(self) -> tuple[ClipView, torch.device, int, int, torch.dtype]:
        """What every scorer takes beside the model: view, device, batch size, loading processes, precision."""
        args, updater = self.args, self.updater
        view = ClipView(args.img_size, tuple(args.norm_mean), tuple(args.norm_std))
        return view, updater.device, self.sampler.batch_size, min(args.num_workers, 2), updater.dtype

    @property
    @abstractmethod
    def scorer(self) -> Scorer:
        """The model as evaluations ask it."""

    @property
    @abstractmethod
    def logit_scale(self) -> Tensor:
        """(), the inverse temperature of the loss."""

    def step(self, batches: list[AnyBatch], epoch: int, is_last: bool) -> StepReport:
        """One contrastive step."""
        return train_step(self.training, batches)

    def rehearsal_batch(self) -> AnyBatch:
        """The first pairs."""
        batch: AnyBatch = self.data.first_batch(self.sampler.batch_size)
        return batch

    def count(self, batch: Any) -> tuple[int, ...]:
        """Pairs that were replaced, texts that were cut off."""
        return len(batch.corrupt), batch.num_truncated

    def watch_counts(self, counts: Mapping[str, int], num_seen: int) -> None:
        """Say once that most texts are cut off."""
        number = counts["num_truncated"]
        if self.has_warned or number <= MOST_TEXTS * num_seen:
            return
        self.has_warned = True
        logger.warning(
            "%d of %d captions (%.0f %%) are longer than --context_length %d and lose their last words; give a longer "
            "context (CLIP's is 77), or shorter captions",
            *(number, num_seen, 100 * number / num_seen, self.args.context_length),
        )

    def is_evaluated(self, epoch: int) -> bool:
        """After every epoch if pairs are held out, else every `--zero_shot_freq` epochs."""
        return self.validation is not None or self._is_probed(epoch)

    def _is_probed(self, epoch: int) -> bool:
        return self.probe is not None and (epoch + 1) % self.args.zero_shot_freq == 0

    def after_epoch(self, epoch: int, means: Mapping[str, float], log: RunLog) -> EpochResult:
        """Loss and retrieval on the pairs held out; zero-shot accuracy every `--zero_shot_freq` epochs."""
        # A model that distinguishes nothing has a loss of ln(batch).
        values = {"loss_over_ln_batch": means.get("itc_loss", means["loss"]) / math.log(max(self.args.batch_size, 2))}
        if self.validation is not None:
            values |= self.validation.measure(self.scorer, self.logit_scale)
        if self.probe is None or not self._is_probed(epoch):
            return EpochResult(values)
        accuracy = self.probe.accuracy(self.scorer)
        return EpochResult({**values, self.metric: accuracy}, score=accuracy)


@dataclass(frozen=True)
class ModelPart:
    """Weights that share a learning rate.

    Attributes:
        prefixes: how their names begin.
        lr: after the warm-up.
        warmup_steps: of its linear warm-up.
    """

    prefixes: tuple[str, ...]
    lr: float
    warmup_steps: int


def tower_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of both encoders, as fields of `TowerSizes`."""
    return {
        "arch": args.arch,
        "patch_size": args.patch_size,
        "img_size": args.img_size,
        "text_width": args.text_width,
        "text_heads": args.text_heads,
        "text_layers": args.text_layers,
        "context_length": args.context_length,
        "pre_norm": args.pre_norm,
        "quick_gelu": args.quick_gelu,
    }


def shared_training(
    model: Any, parts: Sequence[ModelPart], args: argparse.Namespace, steps_per_epoch: int, process: Distributed
) -> dict[str, Any]:
    """The fields of `ContrastiveTraining`: the model on the device, as the options say, and what trains it.

    Args:
        model: a module with an `image` and a `text` encoder and a `config`.
        parts: of the model; see `updater_of_parts`.
        args: the options.
        steps_per_epoch: of the run.
        process: this process among its peers.
    """
    device, dtype = process.device, choose_precision(args.precision, None, process.device)
    model.to(device)
    for tower in (model.image.backbone, model.text):
        tower.set_grad_checkpointing(args.grad_checkpointing)
        tower.use_fused_attention(use_fused_attention(device, dtype))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    logger.info(
        "%s, %.1f M parameters, %.1f M of them trained, %s on %s",
        *(model.config.summary, num_parameters / 1e6, num_trained / 1e6, dtype, process),
    )
    statistics = {"mean": args.norm_mean, "std": args.norm_std}
    return {
        "model": wrap_ddp(model, device),
        "updater": updater_of_parts(model, parts, args, steps_per_epoch, device, dtype),
        "clip_grad": args.clip_grad,
        **{name: torch.tensor(value, device=device).view(1, -1, 1, 1) for name, value in statistics.items()},
    }


def updater_of_parts(
    model: nn.Module,
    parts: Sequence[ModelPart],
    args: argparse.Namespace,
    steps_per_epoch: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Updater:
    """AdamW with a cosine schedule per part of the model.

    The warm-up is OpenCLIP's: the first step already moves, by one of `warmup_steps` equal parts.

    Args:
        model: what is trained, on the device.
        parts: each weight that is trained belongs to the first part that has a prefix of its name. The log has the
            learning rate of the last.
        args: the options of the optimisation.
        steps_per_epoch: of the run.
        device: where to compute.
        dtype: of autocast.
    """
    total = args.epochs * steps_per_epoch
    groups: list[dict[str, Any]] = []
    schedules: list[dict[str, Any]] = []
    left = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for part in parts:
        own = {name: left.pop(name) for name in list(left) if name.startswith(part.prefixes)}
        start = part.lr / max(part.warmup_steps, 1)
        lr = cosine_schedule(part.lr, args.min_lr, total, part.warmup_steps, start=start)
        # The last part comes first: what is logged is the rate of the first group.
        groups[:0] = param_groups(own, args.weight_decay, (args.beta1, args.beta2), args.eps)
        # A schedule, too, so that a resumed run takes the value that is asked for, not the optimizer's saved one.
        schedules[:0] = [{"lr": lr, "weight_decay": np.full(len(lr), args.weight_decay)}, {"lr": lr}]
    return Updater(
        create_optimizer("adamw", groups),
        schedules,
        list(model.parameters()),
        device,
        dtype,
        args.grad_accum_steps,
        args.seed,
    )


def param_groups(
    parameters: Mapping[str, nn.Parameter], weight_decay: float, betas: tuple[float, float], eps: float
) -> list[dict[str, Any]]:
    """Split parameters into regularised ones and the rest, with AdamW's constants.

    Vectors and numbers get no weight decay: gains, biases, class token, temperature, and all others with fewer than two
    dimensions longer than one. Source: OpenCLIP, which decides by name and number of dimensions.

    Args:
        parameters: by name.
        weight_decay: of the regularised ones.
        betas: AdamW's decays of the mean gradient and of its square.
        eps: AdamW's guard against division by zero.

    Returns:
        Two groups, the second with weight decay 0.
    """
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, parameter in parameters.items():
        is_vector = name.endswith(".bias") or sum(size > 1 for size in parameter.shape) < 2
        groups[is_vector].append(parameter)
    constants = {"betas": betas, "eps": eps}
    return [
        {"params": group, "weight_decay": decay, **constants}
        for group, decay in zip(groups, (weight_decay, 0.0), strict=True)
    ]

"""The objectives on pairs of images and texts: data, optimizer, validation, and what a checkpoint says of the model.

An objective adds its model, its loss and the form of its batches; see `training/objective.py` for the contract.
"""

import argparse
import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_convert

from dino_sparo.data.loader import create_loader
from dino_sparo.data.ranks import opened_together, require_same_source
from dino_sparo.data.samplers import EpochSampler
from dino_sparo.data.sources import ImageLimits
from dino_sparo.data.views import ClipView
from dino_sparo.image_text.evaluation.validation import hold_out, open_zero_shot_probe, validate, validation_pairs
from dino_sparo.image_text.options import shorten_warmups
from dino_sparo.image_text.pairs.batches import PairDataset, PairSource, PairTransform
from dino_sparo.image_text.pairs.sources import PairPath
from dino_sparo.image_text.pairs.streams import PairStream
from dino_sparo.image_text.scorer import Scorer
from dino_sparo.image_text.step import MAX_LOGIT_SCALE, train_step
from dino_sparo.image_text.towers import initialize_towers
from dino_sparo.models.architectures import PATCH_SIZE
from dino_sparo.models.backbone import default_patch_size
from dino_sparo.runtime.collectives import all_or_none
from dino_sparo.runtime.faults import UserError, require
from dino_sparo.runtime.launch import Distributed, wrap_ddp
from dino_sparo.runtime.logs import RunLog
from dino_sparo.runtime.precision import choose_precision, prefers_fused_attention, use_fused_attention
from dino_sparo.training.objective import UNREADABLE, AnyBatch, EpochResult, Objective
from dino_sparo.training.optim import cosine_schedule, layer_factors
from dino_sparo.training.updater import Updater, create_updater
from dino_sparo.weights.entries import check_same_description
from dino_sparo.weights.file import CheckpointError
from dino_sparo.weights.initialize import initialize_encoder, initialize_pretrained

logger = logging.getLogger(__name__)


# Weights that share a learning rate: how their names begin, the rate after the linear warm-up, and its steps.
ModelPart = tuple[tuple[str, ...], float, int]


class PairObjective(Objective[AnyBatch]):
    """An objective on pairs of images and texts; `step.py` takes its steps.

    Attributes:
        model_name: for messages.
        model_key: the checkpoint's entry that says how the model is built.
        check_combinations: refuses options that do not fit each other.
        patch_size: of our own vision transformers by default, pixels.
        model: the model, inside DDP where there are several processes.
        network: the model without DDP: a module with an `image` and a `text` encoder, a `config` and a
            `logit_scale`, the logarithm of its inverse temperature, or None.
        mean: (1, C, 1, 1), of pixels in 0..1, on the device.
        std: as `mean`.
        clip_grad: largest norm of all gradients together; 0 for no limit.

    Args:
        args: the options of `options.py`.
        process: this process among its peers.
        forms: `collate`, and for an objective that adds to pairs `with_graphs`; see `open_data`.
    """

    model_name: ClassVar[str]
    model_key: ClassVar[str]
    check_combinations: ClassVar[Callable[[argparse.Namespace], None]]
    patch_size: ClassVar[int] = PATCH_SIZE
    noun: ClassVar[str] = "pair"
    score_name: ClassVar[str] = "best_zero_shot"
    metric: ClassVar[str] = "zero_shot"
    counters: ClassVar[Mapping[str, str]] = {UNREADABLE: "corrupt_pairs", "num_truncated": "truncated_captions"}
    fixed_options: ClassVar[Sequence[str]] = ("beta1", "beta2", "eps", "layer_decay")
    harmless_options: ClassVar[Sequence[str]] = (
        *("preset", "init_clip", "zero_shot_freq", "zero_shot_path", "grad_accum_steps"),
    )

    step = train_step  # of `step.py`

    def __init__(self, args: argparse.Namespace, process: Distributed, *forms: Callable[..., Any]) -> None:
        # Pairs of images and texts.
        self.args = args
        self.source, self.sampler, self.loader, held_out = open_data(args, process, *forms)
        self.num_left_out = self.source.left_out.total

        # Model.
        torch.manual_seed(args.seed)
        self.network = self.build_model(args)
        device, dtype = process.device, choose_precision(args.precision, None, process.device)
        self.network.to(device)
        for tower in (self.network.image.backbone, self.network.text):
            tower.set_grad_checkpointing(args.grad_checkpointing)
            use_fused_attention(tower, prefers_fused_attention(device, dtype))
        self.mean, self.std = (
            torch.tensor(values, device=device).view(1, -1, 1, 1) for values in (args.norm_mean, args.norm_std)
        )

        # Optimizer and schedules.
        shorten_warmups(args, args.epochs * self.sampler.steps_per_epoch)
        self.updater = self.updater_of_parts(device, dtype)
        self.clip_grad = args.clip_grad
        self.model = wrap_ddp(self.network, device)
        weights = list(self.network.parameters())
        sizes = [sum(w.numel() for w in weights if w.requires_grad or every) / 1e6 for every in (True, False)]
        words = "%s, %.1f M parameters, %.1f M of them trained, %s on %s"
        logger.info(words, self.network.config.summary, *sizes, dtype, process)

        # Evaluations after an epoch.
        self.held_out = None if held_out is None else validation_pairs(held_out)
        self.probe = None
        if args.zero_shot_freq:
            self.probe = open_zero_shot_probe(args.zero_shot_path, args.data_path, args.download, _image_limits(args))

    @classmethod
    def check_options(cls, args: argparse.Namespace) -> None:
        """Fill in the patch size; refuse a missing package, options that do not fit, and impossible sizes."""
        require("open_clip", "captions")
        if args.patch_size is None:
            args.patch_size = default_patch_size(args.arch, cls.patch_size)
        cls.check_combinations(args)
        with torch.device("meta"):  # takes no memory
            cls.build_model(args)

    @staticmethod
    @abstractmethod
    def build_model(args: argparse.Namespace) -> Any:
        """The model from the options, with random weights."""

    def model_parts(self) -> list[ModelPart]:
        """The parts of the model with their learning rates and warm-ups; by default the whole model is one part."""
        return [(("",), self.args.lr, self.args.warmup_steps)]

    def updater_of_parts(self, device: torch.device, dtype: torch.dtype) -> Updater:
        """AdamW with a cosine schedule per part of the model.

        Each trained weight belongs to the first part that has a prefix of its name; the log has the learning rate of
        the last part. The warm-up is OpenCLIP's: the first step already moves, by one of `warmup_steps` equal parts.
        """
        args, model = self.args, self.network
        total = args.epochs * self.sampler.steps_per_epoch
        groups: list[dict[str, Any]] = []
        schedules: list[dict[str, Any]] = []
        left = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        for prefixes, rate, warmup_steps in self.model_parts():
            tower = {name: left.pop(name) for name in list(left) if name.startswith(prefixes)}
            lr = cosine_schedule(rate, args.min_lr, total, warmup_steps, start=rate / max(warmup_steps, 1))
            # The last part comes first: what is logged is the rate of the first group.
            groups[:0] = param_groups(tower, args.weight_decay, (args.beta1, args.beta2), args.eps)
            # A schedule, too, so that a resumed run takes the value that is asked for, not the optimizer's saved one.
            schedules[:0] = [{"lr": lr, "weight_decay": np.full(len(lr), args.weight_decay)}, {"lr": lr}]
        factors = layer_factors(model.get_submodule("image.backbone"), args.layer_decay)
        rest = {"layer_factors": factors, "accum_steps": args.grad_accum_steps, "seed": args.seed}
        return create_updater(model, groups, schedules, device, dtype, **rest)

    def encode(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        """Features of a batch on the device, by the model inside DDP or without, in the updater's precision.

        Features of several batches can be concatenated along the first dimension.
        """
        with self.updater.autocast():
            features: tuple[Tensor, ...] = model(self.normalized(batch.images), batch.token_ids)
        return features

    @abstractmethod
    def loss(self, features: Sequence[Tensor], batches: Sequence[AnyBatch]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of this rank over the features of all ranks and micro-batches; and detached numbers for the log."""

    @property
    @abstractmethod
    def loss_parameters(self) -> list[nn.Parameter]:
        """The model's weights that `loss` reads."""

    def bound_weights(self) -> None:
        """Called after each update, without gradients: keep the temperature in its range."""
        if self.network.logit_scale is not None:
            self.network.logit_scale.clamp_(0, math.log(MAX_LOGIT_SCALE))

    @property
    @abstractmethod
    def scorer(self) -> Scorer:
        """The model as evaluations use it."""

    @property
    def logit_scale(self) -> Tensor:
        """(), the inverse temperature of the loss; 1 if the model has none."""
        logarithm: Tensor | None = self.network.logit_scale
        return torch.ones((), device=self.updater.device) if logarithm is None else logarithm.exp()

    @property
    def networks(self) -> dict[str, nn.Module]:
        """The model."""
        return {"model": self.network}

    def normalized(self, images: UInt8[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """8-bit pixels -> input of the image encoder."""
        return (images.float() / 255 - self.mean) / self.std

    @property
    def model_description(self) -> dict[str, Any]:
        """How the model is built, and the mean and std of its images."""
        return {**self.network.config.to_dict(), "mean": list(self.args.norm_mean), "std": list(self.args.norm_std)}

    @property
    def description(self) -> dict[str, Any]:
        """The checkpoint's entry under `model_key`."""
        return {self.model_key: self.model_description}

    def check_same_model(self, checkpoint: Mapping[str, Any], source: str) -> None:
        """Refuse to resume a checkpoint of another model; the `CheckpointError` names each value that differs."""
        saved, config = checkpoint.get(self.model_key), self.network.config
        if saved is None:
            raise CheckpointError(
                f"{source} holds no {self.model_name}, so it cannot be resumed; choose another --output_dir"
            )
        # As this version writes it: an older one left out what had to be as it is now by default.
        complete = {**saved, **type(config).from_dict(dict(saved)).to_dict()}
        check_same_description(complete, self.model_description, source)

    def initialize_encoders(self, with_rest: bool = True) -> set[str]:
        """Start the image encoder, or both encoders, from other weights; with both options each encoder from its file.

        Returns the names of the weights that come from a file; `with_rest` as in `initialize_towers`.
        """
        args, model, taken = self.args, self.network, set[str]()
        if args.init_clip:
            taken |= initialize_towers(model, args.init_clip, with_rest, not (args.init_from or args.pretrained))
        if args.init_from or args.pretrained:
            path = args.init_from
            image = initialize_encoder(model.image, path) if path else initialize_pretrained(model.image)
            taken |= {f"image.{name}" for name in image.taken}
            logger.info("image encoder: start from %s", image)
        return taken

    @property
    def scorer_settings(self) -> tuple[ClipView, torch.device, int, int, torch.dtype]:
        """Settings of a scorer other than the model: view, device, batch size, loading processes, precision."""
        args, updater = self.args, self.updater
        view = ClipView(args.img_size, tuple(args.norm_mean), tuple(args.norm_std))
        return view, updater.device, self.sampler.batch_size, min(args.num_workers, 2), updater.dtype

    def count(self, batch: Any) -> dict[str, int]:
        """Pairs that were replaced, texts that were cut off."""
        return {**super().count(batch), "num_truncated": batch.num_truncated}

    def is_evaluated(self, epoch: int) -> bool:
        """After every epoch if pairs are held out, else every `--zero_shot_freq` epochs."""
        return self.held_out is not None or self._is_probed(epoch)

    def _is_probed(self, epoch: int) -> bool:
        return self.probe is not None and (epoch + 1) % self.args.zero_shot_freq == 0

    def after_epoch(self, epoch: int, means: Mapping[str, float], log: RunLog) -> EpochResult:
        """Loss and retrieval on the pairs held out; zero-shot accuracy every `--zero_shot_freq` epochs."""
        # A model that distinguishes nothing has a loss of ln(batch).
        values = {"loss_over_ln_batch": means.get("itc_loss", means["loss"]) / math.log(max(self.args.batch_size, 2))}
        if self.held_out is not None:
            values |= validate(self.scorer, self.held_out, self.logit_scale, self.args.batch_size)
        if self.probe is None or not self._is_probed(epoch):
            return EpochResult(values)
        accuracy = self.probe(self.scorer)
        return EpochResult({**values, self.metric: accuracy}, score=accuracy)


# The data of a run.


def micro_batch_size(batch_size: int, num_processes: int, accum_steps: int) -> int:
    """Pairs that one process encodes at a time, of `batch_size` per step; ValueError if the division leaves a rest."""
    parts = num_processes * accum_steps
    if batch_size % parts:
        raise UserError(
            f"--batch_size {batch_size} cannot be shared by {num_processes} process(es) with --grad_accum_steps "
            f"{accum_steps}; the nearest possible batch size is {max(round(batch_size / parts), 1) * parts}"
        )
    return batch_size // parts


def open_data(
    args: argparse.Namespace,
    process: Distributed,
    collate: Callable[[Any], Any],
    with_graphs: Callable[[PairDataset], Dataset] = lambda pairs: pairs,
) -> tuple[Any, EpochSampler, DataLoader, PairSource | None]:
    """The data of a run: pairs by number, or a stream, whose sampler has only the sizes of its epochs and batches.

    `collate` makes a batch of the items of a data set, which `with_graphs` makes of the pairs; a stream has batches.

    Returns:
        A `PairSource` or a `PairStream`, the order of its pairs, batches of pairs, and pairs to validate on.
    """
    micro_batch = micro_batch_size(args.batch_size, process.world_size, args.grad_accum_steps)
    sizes = micro_batch, process.rank, process.world_size, args.grad_accum_steps, args.seed
    transform = PairTransform(args.img_size, tuple(args.crop_scale), args.exact_crops)
    held_out = _open_pairs(args, args.val_path, default_split="val") if args.val_path else None
    source: Any
    order: EpochSampler | None = None
    if args.shards == "streamed":
        sampler = EpochSampler(args.epoch_pairs, *sizes)
        texts = args.context_length, args.caption_key
        with all_or_none(f"opening {args.data_path}"):
            source = PairStream(args.data_path, args.shard_weights, transform, sampler, *texts, _image_limits(args))
        dataset, collate = source, default_convert  # which leaves a batch of pairs as it is
    else:
        source = _open_pairs(args, args.data_path, split=args.split)
        if args.val_share:
            source, held_out = hold_out(source, args.val_share, args.seed)
        require_same_source(source)
        sampler = order = EpochSampler(len(source), *sizes)
        dataset = with_graphs(PairDataset(source, transform, args.seed))
    settings = {"num_workers": args.num_workers, "timeout_min": args.dist_timeout_min}
    loader = create_loader(dataset, order, collate=collate, pin_memory=process.device.type == "cuda", **settings)
    return source, sampler, loader, held_out


def _image_limits(args: argparse.Namespace) -> ImageLimits:
    return ImageLimits(args.max_image_mb, args.max_image_mpix, args.max_value, exif=args.exif)


def _open_pairs(args: argparse.Namespace, path: str, **split: Any) -> PairSource:
    """The pairs of `--data_path` or `--val_path`, as the options say how they are read; all ranks share the work."""
    names = "image_key", "caption_key", "image_folder", "caption_templates", "download", "split_column", "negative_key"
    given = {name: value for name, value in vars(args).items() if name in names}
    pairs = PairPath(path, **given, **split, max_left_out=args.max_corrupt, limits=_image_limits(args))
    with opened_together(pairs.kind, path, pairs.split, pairs.default_split):
        return pairs.open()


# Model and optimizer.


def tower_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of both encoders, by the names of `tower_configs`."""
    names = "arch", "patch_size", "img_size", "text_width", "text_heads", "text_layers", "context_length"
    return {name: getattr(args, name) for name in (*names, "pre_norm", "quick_gelu")}


def param_groups(
    parameters: Mapping[str, nn.Parameter], weight_decay: float, betas: tuple[float, float], eps: float
) -> list[dict[str, Any]]:
    """Split parameters into regularised ones and the rest, with AdamW's constants.

    Vectors and numbers get no weight decay: gains, biases, class token, temperature, and all others with fewer than two
    dimensions longer than one. Source: OpenCLIP, which decides by name and number of dimensions.
    """
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, parameter in parameters.items():
        is_vector = name.endswith(".bias") or sum(size > 1 for size in parameter.shape) < 2
        groups[is_vector].append(parameter)
    decays = zip(groups, (weight_decay, 0.0), strict=True)
    return [{"params": group, "weight_decay": decay, "betas": betas, "eps": eps} for group, decay in decays]

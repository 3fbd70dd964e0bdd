"""Train CLIP with a SPARO read-out on pairs of images and captions.

    dino-sparo train-clip --output_dir runs/clip                         # built-in scenes, this machine
    torchrun --nproc_per_node=8 -m dino_sparo train-clip --preset cc3m --data_path 'cc3m/{00000..00331}.tar' \\
        --output_dir runs/cc3m
    python run_with_submitit.py --module dino_sparo.clip.train ...                 # the same on Slurm

Options are those of `options.py`. What they describe is built here; a step is `step.py`, the run is
`training/run.py`. Starting the same command again goes on from the last checkpoint.
"""

import argparse
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import DataLoader

from dino_sparo.checkpoint import CheckpointError, initialize_encoder
from dino_sparo.clip.config import CLIPConfig
from dino_sparo.clip.loss import create_loss
from dino_sparo.clip.model import CLIP, clip_description, create_clip
from dino_sparo.clip.options import check_options, get_args_parser
from dino_sparo.clip.presets import apply_preset, fill_in_warmup
from dino_sparo.clip.start import initialize_clip, require_trained
from dino_sparo.clip.step import CLIPTraining, train_step
from dino_sparo.data import EpochSampler, open_together
from dino_sparo.image_text.evaluation.dot_product import ClipView, DotProductScorer
from dino_sparo.image_text.evaluation.validation import hold_out, open_validation
from dino_sparo.image_text.evaluation.zero_shot_probe import open_training_probe
from dino_sparo.image_text.pairs.batches import (
    PairBatch,
    PairDataset,
    PairSource,
    PairTransform,
    collate_pairs,
    create_pair_loader,
)
from dino_sparo.image_text.pairs.sources import index_pairs, open_pairs
from dino_sparo.image_text.pairs.streams import PairStream, create_stream_loader
from dino_sparo.image_text.text import tokenize
from dino_sparo.runtime.distributed import (
    Distributed,
    all_or_none,
    choose_precision,
    require_same,
    use_fused_attention,
    wrap_ddp,
)
from dino_sparo.runtime.extras import require
from dino_sparo.runtime.logs import RunLog
from dino_sparo.scenes import Ties
from dino_sparo.sources import ImageLimits
from dino_sparo.sources.tars import TarSource
from dino_sparo.training import run
from dino_sparo.training.objective import EpochResult, Objective, StepReport
from dino_sparo.training.optim import cosine_schedule, create_optimizer
from dino_sparo.training.updates import Updater

__all__ = ["check_options", "get_args_parser", "train"]

logger = logging.getLogger(__name__)

MOST_CAPTIONS = 0.5  # share of captions cut off above which the log warns


def train(args: argparse.Namespace) -> None:
    """Train CLIP with these options, or go on from the last checkpoint; see `training.run.train` for what is raised."""
    run.train(args, CLIPObjective)


class CLIPObjective(Objective[PairBatch]):
    """CLIP: among the captions of a batch find each image's own, and the other way round.

    Args:
        args: the options of `options.py`.
        process: this process among its peers.

    Raises:
        ValueError: options that do not fit each other or the pairs.
    """

    noun: ClassVar[str] = "pair"
    score_name: ClassVar[str] = "best_zero_shot"
    metric: ClassVar[str] = "zero_shot"
    counters: ClassVar[Mapping[str, str]] = {"num_corrupt": "corrupt_pairs", "num_truncated": "truncated_captions"}
    fixed_options = ("beta1", "beta2", "eps", "freeze", "negative_key")
    harmless_options = ("preset", "init_clip", "zero_shot_freq", "zero_shot_path", "grad_accum_steps")
    training: CLIPTraining
    has_warned = False  # of captions that are cut off

    @staticmethod
    def check_options(args: argparse.Namespace) -> None:
        """Refuse a missing package, and options that cannot be."""
        require("open_clip", "CLIP's loss and captions")
        check_options(args)

    @staticmethod
    def defaults_of(args: argparse.Namespace) -> dict[str, Any]:
        """What the options would be if only the preset had been given."""
        defaults = get_args_parser().parse_args([])
        apply_preset(defaults)
        return vars(defaults)

    def __init__(self, args: argparse.Namespace, process: Distributed) -> None:
        self.args = args
        micro_batch = micro_batch_size(args.batch_size, process.world_size, args.grad_accum_steps)
        open_data = stream_pairs if args.shards == "streamed" else number_pairs
        self.data = open_data(args, process, micro_batch)
        self.source, self.sampler, self.loader = self.data.source, self.data.sampler, self.data.loader
        self.num_left_out = self.data.source.left_out.total
        self.training = build_training(args, process, self.sampler.steps_per_epoch)
        held_out = self.data.held_out
        self.validation = None if held_out is None else open_validation(held_out, args.batch_size)
        self.probe = None
        if args.zero_shot_freq:
            self.probe = open_training_probe(args.zero_shot_path, args.data_path, args.download)

    @property
    def description(self) -> dict[str, Any]:
        """The checkpoint's `clip`."""
        return {"clip": clip_description(self.training.network.config, self.args.norm_mean, self.args.norm_std)}

    @property
    def scorer(self) -> DotProductScorer:
        """The model as evaluations ask it."""
        args, updater = self.args, self.updater
        return DotProductScorer(
            self.training.network,
            partial(tokenize, context_length=args.context_length),
            ClipView(args.img_size, tuple(args.norm_mean), tuple(args.norm_std)),
            updater.device,
            self.sampler.batch_size,
            min(args.num_workers, 2),
            updater.dtype,
        )

    def check_same_model(self, checkpoint: Mapping[str, Any], source: str) -> None:
        """Refuse to resume a checkpoint of another model."""
        check_same_model(checkpoint, self.description["clip"], source)

    def start_from(self) -> None:
        """Start the image encoder, or both towers, from other weights.

        Raises:
            CheckpointError: the weights do not fit the model.
            ValueError: weights that are to be frozen would be random.
        """
        args, model, taken = self.args, self.training.network, set[str]()
        if args.init_clip:
            report = initialize_clip(model, args.init_clip)
            taken |= set(report.taken)
            logger.info("start from %s", report)
        if args.init_from:
            image = initialize_encoder(model.image, args.init_from)
            taken |= {f"image.{name}" for name in image.taken}
            logger.info("image encoder: start from %s", image)
        require_trained(args.freeze or (), taken, model.state_dict())

    def step(self, batches: list[PairBatch], epoch: int, is_last: bool) -> StepReport:
        """One contrastive step."""
        return train_step(self.training, batches)

    def rehearsal_batch(self) -> PairBatch:
        """The first pairs."""
        return self.data.first_batch(self.sampler.batch_size)

    def count(self, batch: PairBatch) -> tuple[int, ...]:
        """Pairs that were replaced, captions that were cut off."""
        return len(batch.corrupt), batch.num_truncated

    def watch_counts(self, counts: Mapping[str, int], num_seen: int) -> None:
        """Say once that most captions are cut off."""
        number = counts["num_truncated"]
        if self.has_warned or number <= MOST_CAPTIONS * num_seen:
            return
        self.has_warned = True
        logger.warning(
            "%d of %d captions (%.0f %%) are longer than --context_length %d and lose their last words; give a longer "
            "context (CLIP's is 77), or shorter captions",
            *(number, num_seen, 100 * number / num_seen, self.args.context_length),
        )

    def after_epoch(self, epoch: int, means: Mapping[str, float], log: RunLog) -> EpochResult:
        """Loss and retrieval on the pairs held out; zero-shot accuracy every `--zero_shot_freq` epochs."""
        # A model that distinguishes nothing has a loss of ln(batch).
        values = {"loss_over_ln_batch": means["loss"] / math.log(max(self.args.batch_size, 2))}
        if self.validation is not None:
            values |= self.validation.measure(self.scorer, self.training.network.logit_scale.exp())
        if self.probe is None or (epoch + 1) % self.args.zero_shot_freq:
            return EpochResult(values)
        accuracy = self.probe.accuracy(self.scorer)
        return EpochResult({**values, self.metric: accuracy}, score=accuracy)


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


@dataclass(frozen=True)
class PairData:
    """The pairs of a run.

    Attributes:
        source: pairs by number, or a stream of them.
        sampler: which come when; of a stream only the sizes of its epochs and batches.
        loader: batches of pairs.
        first_batch: a batch of so many pairs, as the loader would give it.
        held_out: pairs to validate on, or None.
    """

    source: PairSource | PairStream
    sampler: EpochSampler
    loader: DataLoader
    first_batch: Callable[[int], PairBatch]
    held_out: PairSource | None = None


def number_pairs(args: argparse.Namespace, process: Distributed, micro_batch: int) -> PairData:
    """Pairs by number, their order and their batches."""
    source, held_out = _open_together(args, args.data_path), _open_held_out(args)
    if args.val_share:
        source, held_out = hold_out(source, args.val_share, args.seed)
    require_same(len(source), "the number of pairs")
    _note_few_shards(source, args.num_workers * process.world_size)
    sampler = EpochSampler(len(source), micro_batch, process.rank, process.world_size, args.grad_accum_steps, args.seed)
    dataset = PairDataset(source, PairTransform(args.img_size, tuple(args.crop_scale), args.exact_crops), args.seed)
    loader = create_pair_loader(
        dataset,
        sampler,
        context_length=args.context_length,
        num_workers=args.num_workers,
        pin_memory=process.device.type == "cuda",
        timeout_min=args.dist_timeout_min,
    )

    def first_batch(size: int) -> PairBatch:
        return collate_pairs([dataset[index % len(dataset)] for index in range(size)], args.context_length)

    return PairData(source, sampler, loader, first_batch, held_out)


def _open_held_out(args: argparse.Namespace) -> PairSource | None:
    return _open_together(args, args.val_path, default_split="val") if args.val_path else None


def _open_together(args: argparse.Namespace, path: str, default_split: str = "train") -> PairSource:
    """The pairs of `--data_path` or `--val_path`, as the options say how they are read; all ranks share the work."""
    split = args.split if path == args.data_path else None
    return open_together(
        lambda: open_pairs(
            path,
            args.image_key,
            args.caption_key,
            args.image_folder,
            args.caption_templates,
            Ties(*args.scene_ties),
            args.max_corrupt,
            args.download,
            split=split,
            default_split=default_split,
            split_column=args.split_column,
            negative_key=args.negative_key,
            limits=ImageLimits(args.max_image_mb, args.max_image_mpix),
        ),
        partial(index_pairs, path, split, args.caption_key, args.caption_templates),
        f"opening {path}",
    )


def stream_pairs(args: argparse.Namespace, process: Distributed, micro_batch: int) -> PairData:
    """A stream of pairs, the sizes of its epochs and batches, and its batches."""
    sampler = EpochSampler(
        args.epoch_pairs, micro_batch, process.rank, process.world_size, args.grad_accum_steps, args.seed
    )
    with all_or_none(f"opening {args.data_path}"):
        stream = PairStream(
            args.data_path,
            args.shard_weights,
            PairTransform(args.img_size, tuple(args.crop_scale), args.exact_crops),
            sampler,
            args.context_length,
            args.caption_key,
        )
    loader = create_stream_loader(
        stream,
        num_workers=args.num_workers,
        pin_memory=process.device.type == "cuda",
        timeout_min=args.dist_timeout_min,
    )

    def first_batch(size: int) -> PairBatch:
        # The stream itself is not touched: a rehearsal needs shapes alone.
        images = torch.randint(256, (size, 3, args.img_size, args.img_size), dtype=torch.uint8)
        return PairBatch(images, tokenize(["a photo"] * size, args.context_length).ids, torch.arange(size), [], 0)

    return PairData(stream, sampler, loader, first_batch, _open_held_out(args))


def _note_few_shards(source: PairSource, num_loaders: int) -> None:
    """Trainers that read shards from end to end would leave loaders without work, or without data."""
    if isinstance(source.images, TarSource) and len(source.images.shards) < num_loaders:
        logger.info(
            "%d shards for %d loading processes: no loss, any process reads any pair",
            len(source.images.shards),
            num_loaders,
        )


def build_training(args: argparse.Namespace, process: Distributed, steps_per_epoch: int) -> CLIPTraining:
    """Model, loss, optimizer and schedule from the options."""
    torch.manual_seed(args.seed)
    dtype = choose_precision(args.precision, None, process.device)
    model = build_model(args).to(process.device)
    model.freeze(args.freeze or ())
    model.set_grad_checkpointing(args.grad_checkpointing)
    is_fused = use_fused_attention(process.device, dtype)
    model.image.backbone.use_fused_attention(is_fused)
    model.text.use_fused_attention(is_fused)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    logger.info(
        "%s, %.1f M parameters, %.1f M of them trained, %s on %s",
        *(model.config.summary, num_parameters / 1e6, num_trained / 1e6, dtype, process),
    )
    mean, std = (
        torch.tensor(values, device=process.device).view(1, -1, 1, 1) for values in (args.norm_mean, args.norm_std)
    )
    fill_in_warmup(args, args.epochs * steps_per_epoch)
    # OpenCLIP's warm-up: the first step already moves, by one of `warmup_steps` equal parts.
    lr = cosine_schedule(
        args.lr,
        args.min_lr,
        args.epochs * steps_per_epoch,
        args.warmup_steps,
        start=args.lr / max(args.warmup_steps, 1),
    )
    groups = param_groups(model, args.weight_decay, (args.beta1, args.beta2), args.eps)
    return CLIPTraining(
        model=wrap_ddp(model, process.device),
        loss=create_loss(args.logits, texts_per_image=1 if args.negative_key is None else 2),
        updater=Updater(
            create_optimizer("adamw", groups),
            [{"lr": lr}] * len(groups),
            list(model.parameters()),
            process.device,
            dtype,
            args.grad_accum_steps,
            args.seed,
        ),
        mean=mean,
        std=std,
        clip_grad=args.clip_grad,
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
        quick_gelu=args.quick_gelu,
        norm_first=args.norm_first,
    )


def param_groups(model: nn.Module, weight_decay: float, betas: tuple[float, float], eps: float) -> list[dict[str, Any]]:
    """Split trainable parameters into regularised ones and the rest, with AdamW's constants.

    Vectors and numbers get no weight decay: gains, biases, class token, temperature, and all others with fewer than two
    dimensions longer than one. Source: OpenCLIP, which decides by name and number of dimensions.

    Returns:
        Two groups, the second with weight decay 0.
    """
    regularised: list[nn.Parameter] = []
    unregularised: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_vector = name.endswith(".bias") or sum(size > 1 for size in parameter.shape) < 2
            (unregularised if is_vector else regularised).append(parameter)
    constants = {"betas": betas, "eps": eps}
    return [
        {"params": regularised, "weight_decay": weight_decay, **constants},
        {"params": unregularised, "weight_decay": 0.0, **constants},
    ]


def check_same_model(checkpoint: Mapping[str, Any], description: Mapping[str, Any], source: str) -> None:
    """Refuse to resume a checkpoint of another model.

    Args:
        checkpoint: what was saved.
        description: of the model that the options ask for, `clip_description`.
        source: the checkpoint's file, for messages.

    Raises:
        CheckpointError: names each field that differs.
    """
    description_before = checkpoint.get("clip")
    if description_before is None:
        raise CheckpointError(f"{source} holds no CLIP model, so it cannot be resumed; choose another --output_dir")
    # As this version writes it: an older one left out what had to be as it is now by default.
    complete = {**description_before, **CLIPConfig.from_dict(dict(description_before)).to_dict()}
    saved, asked = _flat(complete), _flat(description)
    differing = [
        f"{name} {saved.get(name)!r} in the checkpoint, {value!r} asked for"
        for name, value in asked.items()
        if saved.get(name) != value
    ]
    if differing:
        raise CheckpointError(
            f"{source} holds another model: {'; '.join(differing)}. Give the same options, or another --output_dir"
        )


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values under dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= {f"{name}.{inner}": item for inner, item in value.items()} if isinstance(value, dict) else {name: value}
    return flat

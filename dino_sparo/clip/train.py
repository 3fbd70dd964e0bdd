"""Train CLIP with a SPARO read-out on pairs of images and captions.

    dino-sparo train-clip --output_dir runs/clip                         # built-in scenes, this machine
    torchrun --nproc_per_node=8 -m dino_sparo train-clip --preset cc3m --data_path 'cc3m/{00000..00331}.tar' \\
        --output_dir runs/cc3m
    python run_with_submitit.py --module dino_sparo.clip.train ...                 # the same on Slurm

Options are those of `options.py`. What they describe is built here; a step is `step.py`, what all image-text objectives
share is `image_text/objective.py`, the run is `training/run.py`. Starting the same command again goes on from the last
checkpoint.
"""

import argparse
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from dino_sparo.checkpoint import CheckpointError, initialize_encoder
from dino_sparo.clip.config import CLIPConfig
from dino_sparo.clip.loss import create_loss
from dino_sparo.clip.model import CLIP, clip_description, create_clip
from dino_sparo.clip.options import check_options, get_args_parser
from dino_sparo.clip.presets import RECIPES
from dino_sparo.clip.start import require_trained
from dino_sparo.clip.step import CLIPTraining
from dino_sparo.image_text.evaluation.dot_product import DotProductScorer
from dino_sparo.image_text.evaluation.image_rows import ClipView
from dino_sparo.image_text.objective import (
    ModelPart,
    PairObjective,
    check_same_description,
    create_updater,
    default_options,
    pixel_statistics,
    prepare_model,
)
from dino_sparo.image_text.pairs.batches import PairBatch, collate_pairs
from dino_sparo.image_text.pairs.run_data import BatchForm
from dino_sparo.image_text.start import initialize_towers
from dino_sparo.image_text.text import tokenize
from dino_sparo.runtime.distributed import Distributed, wrap_ddp
from dino_sparo.runtime.extras import require
from dino_sparo.training import run

__all__ = ["check_options", "get_args_parser", "train"]

logger = logging.getLogger(__name__)


def train(args: argparse.Namespace) -> None:
    """Train CLIP with these options, or go on from the last checkpoint; see `training.run.train` for what is raised."""
    run.train(args, CLIPObjective)


class CLIPObjective(PairObjective[PairBatch]):
    """CLIP: among the captions of a batch find each image's own, and the other way round; see `PairObjective`."""

    fixed_options: ClassVar[Sequence[str]] = (*PairObjective.fixed_options, "freeze", "negative_key")
    training: CLIPTraining

    @staticmethod
    def check_options(args: argparse.Namespace) -> None:
        """Refuse a missing package, and options that cannot be."""
        require("open_clip", "CLIP's loss and captions")
        check_options(args)

    @staticmethod
    def defaults_of(args: argparse.Namespace) -> dict[str, Any]:
        """What the options would be if none had been given."""
        return default_options(get_args_parser(), RECIPES)

    def batch_form(self, args: argparse.Namespace) -> BatchForm:
        """Images and the tokens of captions."""
        return BatchForm(partial(collate_pairs, context_length=args.context_length))

    def build_training(self, args: argparse.Namespace, process: Distributed, steps_per_epoch: int) -> CLIPTraining:
        """Model, loss, optimizer and schedule from the options."""
        return build_training(args, process, steps_per_epoch)

    @property
    def description(self) -> dict[str, Any]:
        """The checkpoint's `clip`."""
        return {"clip": clip_description(self.training.network.config, self.args.norm_mean, self.args.norm_std)}

    @property
    def logit_scale(self) -> Tensor:
        """The inverse temperature."""
        scale: Tensor = self.training.network.logit_scale.exp()
        return scale

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
            report = initialize_towers(model, args.init_clip)
            taken |= set(report.taken)
            logger.info("start from %s", report)
        if args.init_from:
            image = initialize_encoder(model.image, args.init_from)
            taken |= {f"image.{name}" for name in image.taken}
            logger.info("image encoder: start from %s", image)
        require_trained(args.freeze or (), taken, model.state_dict())


def build_training(args: argparse.Namespace, process: Distributed, steps_per_epoch: int) -> CLIPTraining:
    """Model, loss, optimizer and schedule from the options."""
    torch.manual_seed(args.seed)
    model = build_model(args)
    model.freeze(args.freeze or ())
    dtype = prepare_model(model, args, process)
    RECIPES.fill_in_warmup(args, args.epochs * steps_per_epoch)
    parts = [ModelPart(("",), args.lr, args.warmup_steps)]
    return CLIPTraining(
        model=wrap_ddp(model, process.device),
        updater=create_updater(model, parts, args, steps_per_epoch, process.device, dtype),
        clip_grad=args.clip_grad,
        contrast=create_loss(args.logits, texts_per_image=1 if args.negative_key is None else 2),
        **pixel_statistics(args, process.device),
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
    check_same_description(complete, description, source)

"""Train CLIP with a SPARO read-out on pairs of images and captions.

    dino-sparo train-clip --data_path scenes --output_dir runs/clip      # built-in scenes, this machine
    torchrun --nproc_per_node=8 -m dino_sparo train-clip --preset cc3m --data_path 'cc3m/{00000..00331}.tar' \\
        --output_dir runs/cc3m
    python run_with_submitit.py --module dino_sparo.clip.train ...                 # the same on Slurm

Options are those of `options.py`. What they describe is built here; a step is `step.py`, what all image-text objectives
share is `image_text/objective.py`, the run is `training/run.py`. Starting the same command again goes on from the last
checkpoint.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from dino_sparo.clip import options as clip_options
from dino_sparo.clip.initialize import require_trained
from dino_sparo.clip.loss import create_loss, require_products
from dino_sparo.clip.model import CLIP, create_clip
from dino_sparo.clip.options import get_args_parser
from dino_sparo.clip.presets import RECIPES
from dino_sparo.clip.step import CLIPTraining
from dino_sparo.image_text.objective import ModelPart, PairObjective, shared_training, tower_options
from dino_sparo.image_text.pairs.batches import PairBatch, collate_pairs
from dino_sparo.image_text.pairs.run_data import BatchForm
from dino_sparo.image_text.scoring.dot_product import DotProductScorer
from dino_sparo.image_text.text import tokenize
from dino_sparo.runtime.distributed import Distributed
from dino_sparo.training import run

__all__ = ["check_options", "get_args_parser", "train"]


def check_options(args: argparse.Namespace) -> None:
    """What `CLIPObjective` checks, and that the model can be built, before a job waits in a queue.

    Raises:
        ValueError: names the option or the value and what would fit.
        MissingPackageError: names the package and how to install it.
    """
    CLIPObjective.check_options(args)
    with torch.device("meta"):  # takes no memory
        build_model(args)


def train(args: argparse.Namespace) -> None:
    """Train CLIP with these options, or go on from the last checkpoint; see `training.run.train` for what is raised."""
    run.train(args, CLIPObjective)


class CLIPObjective(PairObjective[PairBatch]):
    """CLIP: among the captions of a batch find each image's own, and the other way round; see `PairObjective`."""

    options: ClassVar[ModuleType] = clip_options
    model_name, model_key = "CLIP", "clip"
    fixed_options: ClassVar[Sequence[str]] = (*PairObjective.fixed_options, "freeze", "negative_key")
    training: CLIPTraining

    def batch_form(self, args: argparse.Namespace) -> BatchForm:
        """Images and the tokens of captions."""
        return BatchForm(partial(collate_pairs, context_length=args.context_length))

    def build_training(self, args: argparse.Namespace, process: Distributed, steps_per_epoch: int) -> CLIPTraining:
        """Model, loss, optimizer and schedule from the options."""
        return build_training(args, process, steps_per_epoch)

    @property
    def logit_scale(self) -> Tensor:
        """The inverse temperature."""
        scale: Tensor = self.training.network.logit_scale.exp()
        return scale

    @property
    def scorer(self) -> DotProductScorer:
        """The model as evaluations ask it."""
        tokenizer = partial(tokenize, context_length=self.args.context_length)
        return DotProductScorer(self.training.network, tokenizer, *self.scorer_settings)

    def start_from(self) -> None:
        """Start the image encoder, or both towers, from other weights.

        Raises:
            CheckpointError: the weights do not fit the model.
            ValueError: weights that are to be frozen would be random.
        """
        require_trained(self.args.freeze or (), self.start_towers(), self.training.network.state_dict())


def build_training(args: argparse.Namespace, process: Distributed, steps_per_epoch: int) -> CLIPTraining:
    """Model, loss, optimizer and schedule from the options."""
    require_products(args.logits, process.device)
    torch.manual_seed(args.seed)
    model = build_model(args)
    model.freeze(args.freeze or ())
    RECIPES.fill_in_warmup(args, args.epochs * steps_per_epoch)
    parts = [ModelPart(("",), args.lr, args.warmup_steps)]
    return CLIPTraining(
        contrast=create_loss(args.logits, texts_per_image=1 if args.negative_key is None else 2),
        **shared_training(model, parts, args, steps_per_epoch, process),
    )


def build_model(args: argparse.Namespace) -> CLIP:
    """The model from the options, with random weights."""
    return create_clip(
        readout=args.readout,
        num_slots=args.sparo_slots,
        slot_dim=args.sparo_slot_dim,
        key_dim=args.sparo_key_dim,
        group_size=args.sparo_group_size,
        embed_dim=args.embed_dim,
        replace_block=args.replace_block,
        bottleneck_dim=args.bottleneck_dim,
        num_codes=args.num_codes,
        norm_first=args.norm_first,
        **tower_options(args),
    )

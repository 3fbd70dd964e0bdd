"""DINO for the trainer: options -> student and teacher with their heads, loss; signs of collapse.

The run itself (resuming, epochs, saving, faults) is `training/run.py`; a step is `step.py`.
"""

import argparse
import math
from collections.abc import Mapping

from dino_sparo.dino import options
from dino_sparo.dino.step import train_step
from dino_sparo.distillation.head import DINOHead
from dino_sparo.distillation.loss import DINOLoss, diagnose_collapse
from dino_sparo.distillation.network import EncoderWithHead
from dino_sparo.distillation.objective import DistillationObjective, encoder_config, loss_of_crops, may_warn_of_collapse
from dino_sparo.models.encoder import encoder_from_config


class DINOObjective(DistillationObjective):
    """DINO: a student learns to predict the teacher's prototypes from other crops.

    Attributes:
        loss: with the center.
    """

    make_parser = options.get_args_parser
    fill_in_defaults = options.fill_in_defaults
    loss_key = "dino_loss"
    fixed_options = (*DistillationObjective.fixed_options, "norm_last_layer", "out_dim")
    loss: DINOLoss

    step = train_step  # of algorithm 1

    @property
    def loss_exchanges(self) -> bool:
        """Whether the loss exchanges tensors between ranks: KoLeo does."""
        return bool(self.args.koleo_weight)

    @staticmethod
    def build_network(args: argparse.Namespace, drop_path_rate: float) -> EncoderWithHead:
        """Student or teacher from the options, with random weights."""
        encoder = encoder_from_config(encoder_config(args), drop_path_rate)
        head = DINOHead(
            encoder.encoding_dim,
            args.out_dim,
            args.use_bn_in_head,
            args.norm_last_layer,
            hidden_dim=args.head_hidden_dim,
        )
        return EncoderWithHead(encoder, head)

    @staticmethod
    def build_loss(args: argparse.Namespace) -> DINOLoss:
        """The loss from the options."""
        return loss_of_crops(args, args.loss_chunk)

    def diagnose(
        self, epoch: int, means: Mapping[str, float], feature_rank: float
    ) -> tuple[dict[str, float], str | None]:
        """Information, loss relative to the loss of a flat distribution, and the kind of collapse, if there is one."""
        args, entropies = self.args, (means["teacher_entropy"], means["marginal_entropy"])
        collapse = diagnose_collapse(means["loss"], *entropies, feature_rank, args.out_dim, args.batch_size_per_gpu)
        information = means["marginal_entropy"] - means["teacher_entropy"]
        values = {"information": information, "loss_over_ln_k": means["loss"] / math.log(args.out_dim)}
        return values, collapse if may_warn_of_collapse(args, epoch) else None

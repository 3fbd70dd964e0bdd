"""iBOT for the trainer: options -> student and teacher with their heads, losses, Gram teacher; signs of collapse.

The run itself (resuming, epochs, saving, faults) is `training/run.py`; a step is `step.py`.
"""

import argparse
import logging
import math
from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from dino_sparo.distillation.head import DINOHead
from dino_sparo.distillation.loss import diagnose_collapse
from dino_sparo.distillation.network import NUM_TEACHER_CROPS
from dino_sparo.distillation.objective import DistillationObjective, encoder_config, loss_of_crops, may_warn_of_collapse
from dino_sparo.ibot import options
from dino_sparo.ibot.head import IBOTNetwork
from dino_sparo.ibot.loss import IBOTLoss, PatchLoss
from dino_sparo.ibot.mask import MaskRecipe
from dino_sparo.ibot.step import train_step
from dino_sparo.models.backbone import AnyBackbone
from dino_sparo.models.encoder import encoder_from_config
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.launch import Distributed
from dino_sparo.weights.initialize import initialize_encoder

logger = logging.getLogger(__name__)


class IBOTObjective(DistillationObjective):
    """iBOT: a student learns to predict the teacher's prototypes from other crops, and of patches that it does not see.

    Attributes:
        loss: of crops and of patches, with their centers.
        mask_recipe: how many patches are masked.
        image_weight, patch_weight, koleo_weight, gram_weight: of the four losses; 0 for none.
        freeze_last_layer: epochs during which the prototypes are not trained.
        gram_teacher: a fixed backbone; None without Gram anchoring.
    """

    command = "train-ibot"
    make_parser = options.get_args_parser
    fill_in_defaults = options.fill_in_defaults
    loss_key = "ibot_loss"
    lr_power = 0.5
    fixed_options = (
        *(*DistillationObjective.fixed_options, "norm_last_layer", "out_dim", "separate_heads", "patch_out_dim"),
        "gram_teacher",
    )
    loss: IBOTLoss
    network: IBOTNetwork
    gram_teacher: AnyBackbone | None = None
    gram_weight: float = 0.0

    step = train_step

    def __init__(self, args: argparse.Namespace, process: Distributed) -> None:
        side = args.global_crops_size // args.patch_size
        self.mask_recipe = MaskRecipe((side, side), args.mask_probability, tuple(args.mask_ratio))
        self.image_weight, self.patch_weight = args.image_weight, args.patch_weight
        self.koleo_weight, self.gram_weight = args.koleo_weight, args.gram_weight
        self.freeze_last_layer = args.freeze_last_layer
        if args.gram_teacher:
            self.crop_scale = args.gram_scale
            self.gram_teacher = encoder_from_config(encoder_config(args)).backbone.requires_grad_(False)
            self.gram_teacher.to(process.device).prepare(self.crop_scale * args.global_crops_size)
        super().__init__(args, process)

    @property
    def loss_exchanges(self) -> bool:
        """KoLeo does, and Sinkhorn-Knopp."""
        return self.koleo_weight > 0 or self.loss.sinkhorn

    @classmethod
    def check_options(cls, args: argparse.Namespace) -> None:
        """Refuse options that do not fit, and sizes of which no networks or loss can be built."""
        options.check_options(args)
        super().check_options(args)

    @staticmethod
    def build_network(args: argparse.Namespace, drop_path_rate: float) -> IBOTNetwork:
        """Student or teacher from the options, with random weights."""
        encoder = encoder_from_config(encoder_config(args), drop_path_rate)
        shared, width = args.separate_heads is False, encoder.backbone.embed_dim
        if args.separate_heads is None:
            shared = encoder.encoding_dim == width and args.patch_out_dim in (None, args.out_dim)

        def head(in_dim: int, out_dim: int) -> DINOHead:
            sizes = {"hidden_dim": args.head_hidden_dim}
            return DINOHead(in_dim, out_dim, args.use_bn_in_head, args.norm_last_layer, **sizes)

        patch_head = None if shared else head(width, args.patch_out_dim or args.out_dim)
        return IBOTNetwork(encoder, head(encoder.encoding_dim, args.out_dim), patch_head)

    @staticmethod
    def build_loss(args: argparse.Namespace) -> IBOTLoss:
        """The losses from the options, with centers of zeros."""
        patches = PatchLoss(args.patch_out_dim or args.out_dim)
        return IBOTLoss(loss_of_crops(args), patches, args.centering == "sinkhorn_knopp")

    @property
    def networks(self) -> dict[str, nn.Module]:
        """Student, teacher, losses; the Gram teacher, so that a resumed run does not need its file."""
        gram = {} if self.gram_teacher is None else {"gram_teacher": self.gram_teacher}
        return {**super().networks, **gram}

    def initialize(self) -> None:
        """As the base; also load the Gram teacher."""
        super().initialize()
        if self.gram_teacher is None:
            return
        encoder = encoder_from_config(encoder_config(self.args))
        report = initialize_encoder(encoder, self.args.gram_teacher)
        if new := [name for name in report.new if name.startswith("backbone.")]:
            raise UserError(
                f"--gram_teacher {self.args.gram_teacher} lacks {len(new)} weights of the backbone, such as {new[0]}; "
                "give a checkpoint or weights of the same --arch"
            )
        self.gram_teacher.load_state_dict(encoder.backbone.state_dict())
        logger.info("Gram teacher from %s", self.args.gram_teacher)

    def shrink(self, crops: Sequence[Tensor]) -> Sequence[Tensor]:
        """The crops in the sizes of the options: with --gram_scale the loaded global crops are larger."""
        if self.crop_scale == 1:
            return crops
        size = tuple(side * self.network.backbone.patch_size for side in self.mask_recipe.grid)
        small = [F.interpolate(crop, size, mode="bicubic", antialias=True) for crop in crops[:NUM_TEACHER_CROPS]]
        return [*small, *crops[NUM_TEACHER_CROPS:]]

    def diagnose(
        self, epoch: int, means: Mapping[str, float], feature_rank: float
    ) -> tuple[dict[str, float], str | None]:
        """Information of crops and patches about the prototypes; the kind of collapse, if there is one."""
        args, values, warnings = self.args, dict[str, float](), []
        masked = self.mask_recipe.most_patches(NUM_TEACHER_CROPS * args.batch_size_per_gpu, 1)
        patch_out_dim = args.patch_out_dim or args.out_dim
        for prefix, loss, sizes, rank, weight in (
            ("", "image_loss", (args.out_dim, args.batch_size_per_gpu), feature_rank, args.image_weight),
            ("patch_", "patch_loss", (patch_out_dim, masked), math.inf, args.patch_weight),
        ):
            entropies = means[f"{prefix}teacher_entropy"], means[f"{prefix}marginal_entropy"]
            values[f"{prefix}information"] = entropies[1] - entropies[0]
            collapse = diagnose_collapse(means[loss], *entropies, rank, *sizes)
            if collapse and weight:
                warnings.append(f"{'patches: ' if prefix else ''}{collapse}")
        return values, "; ".join(warnings) if warnings and may_warn_of_collapse(args, epoch) else None

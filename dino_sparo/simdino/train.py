"""SimDINO for the trainer: its head; options -> student and teacher, loss; one step; signs of collapse.

The run itself (resuming, epochs, saving, faults) is `training/run.py`.
"""

import argparse
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from dino_sparo.data.batch import Batch
from dino_sparo.distillation.network import NUM_TEACHER_CROPS, EncoderWithHead, mlp
from dino_sparo.distillation.objective import DistillationObjective, encoder_config
from dino_sparo.distillation.step import clip_student, compute_gradients, exchange, move_teacher
from dino_sparo.models.encoder import encoder_from_config
from dino_sparo.models.readout import require_positive
from dino_sparo.simdino import options
from dino_sparo.simdino.loss import SimDINOLoss
from dino_sparo.training.objective import StepReport
from dino_sparo.training.recording import Outputs


class SimDINOHead(nn.Module):
    """feature = MLP(encoding) / ||MLP(encoding)||_2, with three linear layers and GELU between them.

    Source: RobinWu218/SimDINO, the head of its vision transformer, with its parameter names.

    Args:
        in_dim: width of the encoding, L*V.
        out_dim: width of the feature.
        hidden_dim: width of the hidden layers.
        use_bn: batch norm before every GELU.
    """

    def __init__(self, in_dim: int, out_dim: int = 256, hidden_dim: int = 2048, use_bn: bool = False) -> None:
        super().__init__()
        require_positive("the SimDINO head", in_dim=in_dim, out_dim=out_dim, hidden_dim=hidden_dim)
        self.mlp = mlp([in_dim, hidden_dim, hidden_dim, out_dim], use_bn)

    def forward(self, encodings: Float[Tensor, "B in_dim"]) -> Float[Tensor, "B out_dim"]:
        """Encodings (B, L*V) -> features (B, out_dim)."""
        return F.normalize(self.mlp(encodings), dim=-1)


class SimDINOObjective(DistillationObjective):
    """SimDINO: the student's features agree with the teacher's of other crops, and span many directions."""

    command = "train-simdino"
    make_parser = options.get_args_parser
    loss_key = "simdino_loss"
    fixed_options = (*DistillationObjective.fixed_options, "z_dim")
    loss: SimDINOLoss
    loss_exchanges = True  # the coding rate is that of all ranks' features

    @staticmethod
    def build_network(args: argparse.Namespace, drop_path_rate: float) -> EncoderWithHead:
        """Student or teacher from the options, with random weights."""
        encoder = encoder_from_config(encoder_config(args), drop_path_rate)
        head = SimDINOHead(encoder.encoding_dim, args.z_dim, args.head_hidden_dim, args.use_bn_in_head)
        return EncoderWithHead(encoder, head)

    @staticmethod
    def build_loss(args: argparse.Namespace) -> SimDINOLoss:
        """The loss from the options, which has no state."""
        return SimDINOLoss(args.local_crops_number + NUM_TEACHER_CROPS, args.eps, args.coeff, args.expa_type == 1)

    def step(self, batches: list[Batch], epoch: int, is_last: bool) -> StepReport:
        """One step. Each micro-batch has its own coding rate."""
        self.begin_step()
        outputs = compute_gradients(self, self.compute, batches, key=None)
        exchange(self)
        means = {name: torch.stack([output[name] for output in outputs]).mean() for name in outputs[0]}
        loss = means.pop("loss")
        grad_norm = clip_student(self, loss)
        self.updater.update()
        scalars = {**means, "grad_norm": grad_norm}
        return StepReport(loss, self.updater.nonfinite.clone(), {**move_teacher(self), **scalars})

    def compute(self, crops: Sequence[Tensor], parts: int) -> Outputs:
        """Crops -> gradients of the student; the terms of the loss. A GPU may record this function."""
        with self.updater.autocast():
            with torch.no_grad():
                teacher_features = self.teacher(crops[:NUM_TEACHER_CROPS])
            student_features = self.student(crops)
        terms = self.loss(student_features, teacher_features)
        self.updater.backward(terms.loss, terms.loss, parts=parts)
        return {name: value.detach() for name, value in terms._asdict().items()}

    def diagnose(
        self, epoch: int, means: Mapping[str, float], feature_rank: float
    ) -> tuple[dict[str, float], str | None]:
        """A warning after a tenth of the run if the encodings of a batch span fewer than two directions."""
        if feature_rank >= 2 or epoch < self.args.epochs // 10:
            return {}, None
        return {}, (
            f"coding rate {means['expansion']:.4f}: collapse, the encodings of a batch span {feature_rank:.2f} "
            "directions; try a lower --coeff, a lower --lr or a larger batch"
        )

"""Features -> loss: cosine between student and teacher, and the coding rate of the features."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from dino_sparo.distillation.network import NUM_TEACHER_CROPS
from dino_sparo.runtime.collectives import gather_with_gradient
from dino_sparo.runtime.launch import world_size


class SimDINOTerms(NamedTuple):
    """The loss and its two terms; scalar tensors.

    Attributes:
        loss: - weight * compression - expansion.
        compression: mean cosine between a teacher crop and another student crop of an image, -1 to 1.
        expansion: coding rate times its balancing factor, nats; smallest if all features are equal.
    """

    loss: Tensor
    compression: Tensor
    expansion: Tensor


class SimDINOLoss(nn.Module):
    """The loss of SimDINO: features of an image agree, features of all images span many directions.

    With the features z (p numbers) of n images over all ranks, and per global crop v

        compression = mean_{t, s != t} cos(teacher_t, student_s)
        R(v) = 1/2 log det( I + p / (n eps) sum_i z_vi z_vi^T )
        expansion = (p + n) / (p n) mean_v R(v)
        loss = - coeff * compression - expansion

    z is the mean of the student's and the teacher's feature, or the student's alone. Source: Wu et al., "Simplifying
    DINO via coding rate regularization", equations 8 and 9; RobinWu218/SimDINO, `MCRLoss`. Their code sums over the
    images of one rank, unless its option `reduce_cov` is 1, but divides by the number n of all images. The sum here is
    always over all images.

    Args:
        num_crops: S, number of student crops; the first two are the teacher's.
        eps: square of the precision to which features are coded.
        coeff: weight of the compression.
        with_teacher: z is the mean of student and teacher.
    """

    def __init__(self, num_crops: int, eps: float = 0.05, coeff: float = 1.0, with_teacher: bool = True) -> None:
        super().__init__()
        self.num_crops, self.eps, self.coeff, self.with_teacher = num_crops, eps, coeff, with_teacher

    def forward(self, student: Float[Tensor, "SB p"], teacher: Float[Tensor, "TB p"]) -> SimDINOTerms:
        """The loss of one batch; the gradient flows to the student alone.

        Args:
            student: (S*B, p), features crop by crop, global crops first.
            teacher: (2*B, p), features crop by crop.
        """
        student = student.float().unflatten(0, (self.num_crops, -1))  # (S, B, p)
        teacher = teacher.detach().float().unflatten(0, (NUM_TEACHER_CROPS, -1))
        compression = self._compression(student, teacher)
        views = student[:NUM_TEACHER_CROPS]
        expansion = self._expansion((views + teacher) / 2 if self.with_teacher else views)
        return SimDINOTerms(-self.coeff * compression - expansion, compression.detach(), expansion.detach())

    def _compression(self, student: Float[Tensor, "S B p"], teacher: Float[Tensor, "T B p"]) -> Float[Tensor, ""]:
        # t: teacher crops, s: student crops, b: images, p: width
        cosines = torch.einsum("tbp,sbp->ts", F.normalize(teacher, dim=-1), F.normalize(student, dim=-1))
        same_crop = cosines.diagonal().sum()
        return (cosines.sum() - same_crop) / (len(teacher) * (self.num_crops - 1) * student.shape[1])

    def _expansion(self, views: Float[Tensor, "T B p"]) -> Float[Tensor, ""]:
        images, width = views.shape[1] * world_size(), views.shape[2]
        sums = gather_with_gradient(views.mT @ views).sum(dim=0)  # (T, p, p)
        identity = torch.eye(width, device=views.device)
        # The diagonal of L in L L^T = I + ...: its logarithms sum to half the log determinant.
        factor = torch.linalg.cholesky_ex(identity + width / (images * self.eps) * sums).L
        rate = factor.diagonal(dim1=1, dim2=2).log().sum(dim=1).mean()
        return rate * (width + images) / (width * images)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: matrix products and a factorisation dominate, and a compiler does not make them faster."""

"""The losses of iBOT: of images, of masked patches, and Gram anchoring; centring and Sinkhorn-Knopp."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from dino_sparo.distillation.loss import DINOLoss, LossDiagnostics
from dino_sparo.runtime.collectives import all_reduce_sum

SINKHORN_ITERATIONS = 3


class Targets(NamedTuple):
    """The teacher's distributions over prototypes.

    Attributes:
        images: (T*B, K), of the global crops.
        patches: (chosen, K), of the chosen patches.
    """

    images: Float[Tensor, "TB K"]
    patches: Float[Tensor, "chosen _"]


class PatchLoss(nn.Module):
    """Cross-entropy of the student's distribution at masked patches with the teacher's, which sees these patches.

        loss = sum_n w_n ( - sum_k q_n[k] log p_n[k] ),    w_n = 1 / (number of crops * masked patches of the crop)

    with q and p as in `DINOLoss`, and a center of its own. Source: iBOT, equation 2, in the form of
    facebookresearch/dinov2's `iBOTPatchLoss.forward_masked`.

    Args:
        out_dim: K, number of prototypes.
        student_temp: tau_student.
    """

    center: Tensor

    def __init__(self, out_dim: int, student_temp: float = 0.1) -> None:
        super().__init__()
        self.student_temp = student_temp
        self.register_buffer("center", torch.zeros(1, out_dim))

    def forward(
        self,
        student_logits: Float[Tensor, "chosen K"],
        teacher_probs: Float[Tensor, "chosen K"],
        weights: Float[Tensor, " chosen"],
    ) -> Float[Tensor, ""]:
        """The loss of one batch, nats; the gradient flows to the student alone."""
        student = student_logits.to(teacher_probs.dtype) / self.student_temp
        losses = student.logsumexp(dim=-1) - (teacher_probs * student).sum(dim=-1)
        return (weights * losses).sum()


class IBOTLoss(nn.Module):
    """The losses of images and of patches with one schedule of the teacher's temperature.

    Args:
        images: the loss of DINO.
        patches: the loss of patches.
        sinkhorn: the teacher's distributions are made by Sinkhorn-Knopp, else by centers.
    """

    def __init__(self, images: DINOLoss, patches: PatchLoss, sinkhorn: bool = False) -> None:
        super().__init__()
        self.images, self.patches, self.sinkhorn = images, patches, sinkhorn

    @torch.no_grad()
    def targets(
        self,
        logits: Sequence[Float[Tensor, "TB K"]],
        patch_logits: Sequence[Float[Tensor, "chosen _"]],
        weights: Sequence[Float[Tensor, " chosen"]],
        temperature: float,
    ) -> list[Targets]:
        """The teacher's distributions for micro-batches; Sinkhorn-Knopp takes all of them, and all ranks, together."""
        if not self.sinkhorn:
            centers = self.images.center, self.patches.center
            return [
                Targets(
                    *(((rows - center) / temperature).softmax(-1) for rows, center in zip(pair, centers, strict=True))
                )
                for pair in zip(logits, patch_logits, strict=True)
            ]
        is_masked = torch.cat(list(weights))[:, None] > 0
        images = sinkhorn_knopp(torch.cat(list(logits)), temperature)
        patches = sinkhorn_knopp(torch.cat(list(patch_logits)), temperature, is_masked)
        parts = len(logits)
        return [Targets(*pair) for pair in zip(images.chunk(parts), patches.chunk(parts), strict=True)]

    @torch.no_grad()
    def move_centers(
        self,
        logits: tuple[Float[Tensor, "1 K"], int],
        patch_logits: tuple[Float[Tensor, "1 _"], Float[Tensor, "1"]],
        keep: Float[Tensor, ""],
    ) -> None:
        """Move the centers towards the means of the teacher's logits.

        Args:
            logits: sum over the crops of all ranks, and their number.
            patch_logits: sum over the masked patches of all ranks, and their number; none leave the center as it is.
            keep: a flag (); the centers stay if it is not zero.
        """
        self.images.move_center(*logits, keep=keep)
        (total, number), center = patch_logits, self.patches.center
        moved = torch.lerp((total / number.clamp(min=1)).to(center), center, self.images.center_momentum)
        center.copy_(torch.where((keep > 0) | (number == 0), center, moved))

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the cross-entropies."""
        self.images.compile(*args, **kwargs)
        self.patches.compile(*args, **kwargs)


@torch.no_grad()
def sinkhorn_knopp(
    logits: Float[Tensor, "rows K"],
    temperature: float,
    is_row: Tensor | None = None,
    iterations: int = SINKHORN_ITERATIONS,
) -> Float[Tensor, "rows K"]:
    """Assignments of rows to prototypes, such that all prototypes are used equally often.

        Q = exp(logits / temperature)
        repeat:  Q[:, k] /= sum_r Q[r, k] over the rows of all ranks;   Q[r, :] /= sum_k Q[r, k]

    DINOv2 also divides by the numbers of rows and of prototypes, which the next division cancels. Source: SwAV, section
    3.1; facebookresearch/dinov2, `sinkhorn_knopp_teacher`.

    Args:
        logits: (rows, K), of the teacher.
        temperature: of the teacher.
        is_row: (rows, 1), False for rows that do not count; they become zero.
        iterations: number of repetitions.
    """
    q = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).exp()
    if is_row is not None:
        q = q * is_row
    tiny = torch.finfo(q.dtype).tiny
    for _ in range(iterations):
        q = q / all_reduce_sum(q.sum(dim=0)).clamp(min=tiny)
        q = q / q.sum(dim=1, keepdim=True).clamp(min=tiny)
    return q


def gram_loss(student: Float[Tensor, "B N D"], teacher: Float[Tensor, "B N D"]) -> Float[Tensor, ""]:
    """Mean squared difference of the cosines between all patches of a crop.

        loss = mean_{b, i, j} ( cos(x_bi, x_bj) - cos(y_bi, y_bj) )^2

    with the student's patch tokens x and those of the Gram teacher y. Source: DINOv3, section 4.2;
    facebookresearch/dinov3, `GramLoss` at the level of images, with negative cosines.
    """
    dtype = torch.promote_types(student.dtype, torch.float32)
    x, y = (F.normalize(tokens.to(dtype), dim=-1) for tokens in (student, teacher.detach()))
    return F.mse_loss(x @ x.mT, y @ y.mT)


@torch.no_grad()
def diagnose_patches(
    teacher_probs: Float[Tensor, "chosen K"], weights: Float[Tensor, " chosen"], loss: Float[Tensor, ""]
) -> LossDiagnostics:
    """Entropies over this rank's masked patches, weighted as in the loss; see `LossDiagnostics`."""
    total = weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)  # a small batch may have no masked patch
    share = weights / total
    entropy = (torch.special.entr(teacher_probs).sum(dim=-1) * share).sum()
    marginal = torch.special.entr(share @ teacher_probs).sum()
    return LossDiagnostics(teacher_entropy=entropy, kl=loss.detach() / total - entropy, marginal_entropy=marginal)

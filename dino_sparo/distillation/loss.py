"""The loss of DINO from the logits of student and teacher, the center, and a diagnosis of collapse."""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dino_sparo.distillation.network import NUM_TEACHER_CROPS
from dino_sparo.runtime.collectives import all_reduce_sum
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.launch import world_size


class LossDiagnostics(NamedTuple):
    """Signs of collapse; scalar tensors, nats.

    Attributes:
        teacher_entropy: mean entropy of the teacher's distribution for one image; ln K for a flat distribution.
        kl: loss - teacher_entropy, the distance of the student from the teacher.
        marginal_entropy: entropy of the teacher's mean distribution over this rank's batch; 0 if all images have one
            prototype.
    """

    teacher_entropy: Tensor
    kl: Tensor
    marginal_entropy: Tensor


class DINOLoss(nn.Module):
    """The self-distillation loss of DINO.

    With q_t = softmax((teacher_t - center) / tau_teacher) and p_s = softmax(student_s / tau_student), per image

        loss = 0
        for t in teacher crops (the two global ones):
            for s in student crops (all):
                if s is not the same crop as t:
                    loss += - sum_k q_t[k] log p_s[k]
        loss /= number of pairs

    averaged over the batch. Since log p_s = x_s - logsumexp(x_s) for x_s = student_s / tau_student, and q_t sums to
    one, the double loop needs one logsumexp per student row and one dot product per teacher crop:

        loss * pairs = sum_s n_s logsumexp(x_s) - sum_t q_t . (sum_{s != t} x_s)

    with n_s the number of teacher crops that are not s: T - 1 for the global crops, T for the local ones. The center is

        center <- momentum center + (1 - momentum) mean of the teacher's logits over the batch and all ranks

    after the loss was taken. Source: DINO, equations 2 to 4 and algorithm 1.

    Args:
        out_dim: K, number of prototypes.
        num_crops: S, number of student crops; the first two are the teacher's.
        warmup_teacher_temp: tau_teacher in the first epoch.
        teacher_temp: tau_teacher after the warm-up.
        warmup_teacher_temp_epochs: epochs of linear warm-up from `warmup_teacher_temp` to `teacher_temp`.
        num_epochs: epochs of the whole run.
        student_temp: tau_student.
        center_momentum: momentum of the center.
        chunk_size: prototypes computed together, 0 for all; fewer take less memory and more time, with equal results
            up to rounding.
    """

    center: Tensor

    def __init__(
        self,
        out_dim: int,
        num_crops: int,
        warmup_teacher_temp: float,
        teacher_temp: float,
        warmup_teacher_temp_epochs: int,
        num_epochs: int,
        student_temp: float = 0.1,
        center_momentum: float = 0.9,
        chunk_size: int = 0,
    ) -> None:
        super().__init__()
        if num_crops < NUM_TEACHER_CROPS or out_dim < 2:
            raise UserError(
                f"num_crops={num_crops}, out_dim={out_dim}: DINO needs at least the {NUM_TEACHER_CROPS} global crops, "
                "and 2 prototypes"
            )
        temperatures = {
            "warmup_teacher_temp": warmup_teacher_temp,
            "teacher_temp": teacher_temp,
            "student_temp": student_temp,
        }
        for name, value in temperatures.items():
            if value <= 0:
                raise UserError(f"{name}={value} is not a temperature; give a positive number, usually 0.04 to 0.1")
        if not 0 <= warmup_teacher_temp_epochs <= num_epochs:
            raise UserError(
                f"warmup_teacher_temp_epochs={warmup_teacher_temp_epochs} does not fit a run of {num_epochs} epochs; "
                f"give 0 to {num_epochs}"
            )
        self.out_dim, self.num_crops = out_dim, num_crops
        self.student_temp, self.center_momentum, self.chunk_size = student_temp, center_momentum, chunk_size
        self.register_buffer("center", torch.zeros(1, out_dim))
        self.teacher_temp_schedule = np.concatenate(
            (
                np.linspace(warmup_teacher_temp, teacher_temp, warmup_teacher_temp_epochs),
                np.full(num_epochs - warmup_teacher_temp_epochs, teacher_temp),
            )
        )
        self.num_pairs = NUM_TEACHER_CROPS * (num_crops - 1)

    def forward(
        self,
        student_logits: Float[Tensor, "SB K"],
        teacher_logits: Float[Tensor, "TB K"],
        epoch: int,
        update_center: bool = True,
    ) -> Float[Tensor, ""]:
        """The loss of one batch, nats per pair of crops; then the center moves.

        Args:
            student_logits: (S*B, K), crop by crop, global crops first.
            teacher_logits: (2*B, K), crop by crop.
            epoch: counted from 0, for the teacher's temperature.
            update_center: False if the caller moves the center with `move_center`, as `dino/step.py` does.
        """
        teacher_probs = self.teacher_probabilities(teacher_logits, epoch)  # (T, B, K)
        batch_size = len(teacher_logits) // NUM_TEACHER_CROPS
        if student_logits.shape != (self.num_crops * batch_size, self.out_dim):
            raise UserError(
                f"student logits have shape {tuple(student_logits.shape)}; with {self.num_crops} crops, "
                f"{batch_size} images and {self.out_dim} prototypes they need "
                f"{(self.num_crops * batch_size, self.out_dim)}"
            )
        loss = self.cross_entropy(student_logits, teacher_probs)
        if update_center:
            self.update_center(teacher_logits.detach().float().sum(dim=0, keepdim=True), len(teacher_logits))
        return loss

    def teacher_probabilities(self, teacher_logits: Float[Tensor, "TB K"], epoch: int) -> Float[Tensor, "T B K"]:
        """q = softmax((teacher - center) / tau_teacher), without gradient."""
        temperature = float(self.teacher_temp_schedule[epoch])
        centered = teacher_logits.detach() - self.center
        return (centered / temperature).softmax(dim=-1).unflatten(0, (NUM_TEACHER_CROPS, -1))

    def cross_entropy(
        self, student_logits: Float[Tensor, "SB K"], teacher_probs: Float[Tensor, "T B K"]
    ) -> Float[Tensor, ""]:
        """The loss of one batch, nats per pair of crops, for the teacher's distributions."""
        student_logits = student_logits.unflatten(0, (self.num_crops, -1))  # (S, B, K)
        if self.chunk_size == 0:
            normalisers, agreement = self._part(student_logits, teacher_probs)
        else:
            # The backward pass computes a chunk's numbers again instead of keeping them.
            chunks = zip(
                student_logits.split(self.chunk_size, dim=-1), teacher_probs.split(self.chunk_size, dim=-1), strict=True
            )
            parts = [checkpoint(self._part, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
            normalisers = torch.stack([part for part, _ in parts]).logsumexp(dim=0)
            agreement = torch.stack([part for _, part in parts]).sum()
        # n_s logsumexp(x_s), as each teacher crop meets all student crops but itself.
        log_partition = len(teacher_probs) * normalisers.sum() - normalisers[: len(teacher_probs)].sum()
        return (log_partition - agreement) / (self.num_pairs * teacher_probs.shape[1])

    def _part(self, student_logits: Tensor, teacher_probs: Tensor) -> tuple[Tensor, Tensor]:
        """For a chunk of prototypes: logsumexp of x (S, B), and the sum of q_t . (sum_{s != t} x_s), ()."""
        # The sums over K run in the center's precision (fp32) also where the network computes in fewer bits.
        student = student_logits.to(teacher_probs.dtype) / self.student_temp
        all_crops = student.sum(dim=0)  # (B, K)
        agreement = sum((q * (all_crops - student[t])).sum() for t, q in enumerate(teacher_probs))
        return student.logsumexp(dim=-1), agreement

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the cross-entropy alone: the teacher's temperature changes with the epoch."""
        self.cross_entropy = torch.compile(self.cross_entropy, *args, **kwargs)  # type: ignore[method-assign]

    def update_center(self, logits_sum: Float[Tensor, "1 K"], count: int) -> None:
        """Sum this rank's teacher logits (1, K) over all ranks, of `count` rows each, and move the center."""
        self.move_center(all_reduce_sum(logits_sum.detach().clone()), count * world_size())

    @torch.no_grad()
    def move_center(self, logits_sum: Float[Tensor, "1 K"], count: int, keep: Float[Tensor, ""] | None = None) -> None:
        """Move the center towards the mean of the teacher's logits.

        Args:
            logits_sum: (1, K), sum over the rows of all ranks.
            count: number of these rows.
            keep: a flag (); the center stays if it is not zero.
        """
        mean = logits_sum / count
        moved = (self.center * self.center_momentum).add_(mean.to(self.center), alpha=1 - self.center_momentum)
        self.center.copy_(moved if keep is None else torch.where(keep > 0, self.center, moved))

    @torch.no_grad()
    def diagnose(self, teacher_probs: Float[Tensor, "T B K"], loss: Float[Tensor, ""]) -> LossDiagnostics:
        """Entropies of this rank's batch, from `teacher_probabilities` and the loss of the same batch."""
        entropy = torch.special.entr(teacher_probs).sum(dim=-1).mean()
        marginal = torch.special.entr(teacher_probs.mean(dim=(0, 1))).sum()
        return LossDiagnostics(teacher_entropy=entropy, kl=loss.detach() - entropy, marginal_entropy=marginal)


# Below this share of the largest possible information, the teacher's answer hardly depends on the image.
COLLAPSE_SHARE = 0.03


def diagnose_collapse(
    loss: float, teacher_entropy: float, marginal_entropy: float, feature_rank: float, out_dim: int, batch_size: int
) -> str | None:
    """A line for the log that names the collapse and what usually helps; None if there is no collapse.

    I = marginal_entropy - teacher_entropy is the mutual information of image and prototype. I is zero if every image
    gets the same distribution. The entropy then distinguishes DINO's two collapses (DINO, section 5.3: uniform without
    sharpening, on one prototype without centring).

    Args:
        loss: nats, like the entropies, which are those of `LossDiagnostics`.
        teacher_entropy: mean over images.
        marginal_entropy: of the mean over images.
        feature_rank: effective rank of the encodings of a batch.
        out_dim: K.
        batch_size: images on one rank.
    """
    log_k = math.log(out_dim)
    information = marginal_entropy - teacher_entropy
    reachable = min(log_k, math.log(batch_size))
    # The two crops of one image should agree, so a batch of one image cannot show a collapse.
    if batch_size > 1 and information < COLLAPSE_SHARE * reachable:
        signs = f"loss {loss:.4f}, ln {out_dim} = {log_k:.4f}, information {information:.4f} nats"
        if teacher_entropy > (1 - COLLAPSE_SHARE) * log_k:
            return (
                f"{signs}: uniform collapse, every image gets the same flat distribution; start again in another "
                f"--output_dir with dino-sparo train-simdino, or with --koleo_weight 1 --use_bn_in_head true "
                f"--teacher_temp 0.02 --warmup_teacher_temp 0.02"
            )
        if marginal_entropy < COLLAPSE_SHARE * log_k:
            return (
                f"{signs}: collapse on one prototype, all images get it; try a higher --teacher_temp, a lower --lr, or "
                f"--norm_last_layer true"
            )
        return (
            f"{signs}: collapse, the teacher gives every image the same distribution (entropy {teacher_entropy:.4f}); "
            f"try a lower --lr, more --warmup_epochs, or a lower --clip_grad"
        )
    if feature_rank < 2:
        return (
            f"loss {loss:.4f}: dimensional collapse, the encodings of a batch span {feature_rank:.2f} directions; try "
            f"a lower --lr or a lower --weight_decay_end"
        )
    return None

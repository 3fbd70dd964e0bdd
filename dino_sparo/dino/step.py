"""One step of DINO, the paper's algorithm 1: the student sees all crops, the teacher the two global ones.

The loss compares them, the optimizer moves the student, the moving average moves the teacher, and the center moves
towards the teacher's logits. `train.py` builds the networks and the loss, `distillation/objective.py` the schedules and
the optimizer.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dino_sparo.data.dataset import Batch
from dino_sparo.dino.koleo import koleo_loss
from dino_sparo.distillation.images import crops_on_device
from dino_sparo.distillation.network import NUM_TEACHER_CROPS
from dino_sparo.distillation.step import clip_student, move_teacher
from dino_sparo.training.objective import StepReport

if TYPE_CHECKING:
    from dino_sparo.dino.train import DINOObjective

DIAGNOSE_EVERY = 10  # steps of an epoch between two looks at the teacher's entropies


def train_step(dino: "DINOObjective", batches: list[Batch], epoch: int, is_last: bool = False) -> StepReport:
    """One step of algorithm 1: forward, loss, backward, student update, teacher update, center update.

    With several micro-batches the gradients are those of one batch that holds them all: every part uses the same
    center, which moves once, at the end. (Batch norm in the head and KoLeo, if asked for, see each part alone.)

    No value is copied to the CPU, so the step never waits for a GPU. If the loss or gradients of any rank are not
    finite, student, optimizer and center do not change until the trainer reads the report and ends the run. Meanwhile
    the teacher still moves; that teacher is never saved.

    Args:
        dino: changed in place.
        batches: `accum_steps` micro-batches of this rank.
        epoch: counted from 0.
        is_last: the epoch or the run ends with this step, so that it reports the teacher's entropies, as every tenth.
    """
    updater, criterion = dino.updater, dino.loss
    dino.begin_step()
    losses, koleo, logits_sum, num_logits = [], list[Tensor](), torch.zeros_like(criterion.center), 0
    for index, batch in enumerate(batches):
        is_last_part = index == len(batches) - 1
        crops = crops_on_device(batch, dino.distort, updater.device)
        with updater.gradient_sync(dino.student, is_last_part):
            with updater.autocast():
                with torch.no_grad():
                    teacher_logits = dino.teacher(crops[:NUM_TEACHER_CROPS])
                logits_sum += teacher_logits.float().sum(dim=0, keepdim=True)
                num_logits += len(teacher_logits)
                if is_last_part:  # the ranks' sums are exchanged while the student computes
                    finish_center = criterion.begin_center_update(logits_sum, num_logits)
                student_logits, encodings = dino.student(crops, with_encodings=True)
            loss = criterion(student_logits, teacher_logits, epoch, update_center=False)
            total = loss
            if dino.koleo_weight:  # the two crops of an image shall be close, so each is spread on its own
                parts = [koleo_loss(crop) for crop in encodings[: len(teacher_logits)].chunk(NUM_TEACHER_CROPS)]
                koleo.append(torch.stack(parts).sum())
                total = loss + dino.koleo_weight * koleo[-1]
            updater.backward(total, total, parts=len(batches))
        losses.append(loss.detach())
    scalars = {"koleo": torch.stack(koleo).detach().mean()} if koleo else {}
    if is_last or updater.step % dino.sampler.steps_per_epoch % DIAGNOSE_EVERY == 0:
        scalars |= criterion.diagnose(criterion.teacher_probabilities(teacher_logits, epoch), loss)._asdict()
    step_loss = torch.stack(losses).mean()
    last_layer = [dino.network.head.get_submodule("last_layer")] if epoch < dino.freeze_last_layer else []
    scalars["grad_norm"] = clip_student(dino, step_loss, frozen=last_layer)
    updater.update()
    schedules = move_teacher(dino)
    finish_center(updater.nonfinite)
    return StepReport(step_loss, updater.nonfinite.clone(), {**schedules, **scalars})

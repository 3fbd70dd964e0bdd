"""One step of DINO, the paper's algorithm 1: the student sees all crops, the teacher the two global ones.

The loss compares them, the optimizer moves the student, the moving average moves the teacher, and the center moves
towards the teacher's logits. `distillation/step.py` clips the gradients and moves student and teacher; `train.py`
builds the networks, the loss and the schedules.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dino_sparo.data.dataset import Batch
from dino_sparo.dino.koleo import koleo_loss
from dino_sparo.distillation.network import NUM_TEACHER_CROPS
from dino_sparo.distillation.step import finish_step
from dino_sparo.training.images import crops_on_device
from dino_sparo.training.objective import StepReport

if TYPE_CHECKING:
    from dino_sparo.dino.train import DINOObjective


def train_step(dino: "DINOObjective", batches: list[Batch], epoch: int, diagnose: bool = False) -> StepReport:
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
        diagnose: also report the teacher's entropies.
    """
    updater, loss_of = dino.updater, dino.loss
    dino.begin_step()
    losses, koleo, logits_sum, num_logits = [], list[Tensor](), torch.zeros_like(loss_of.center), 0
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        crops = crops_on_device(batch, dino.distort, updater.device)
        with updater.gradient_sync(dino.student, is_last):
            with updater.autocast():
                with torch.no_grad():
                    teacher_logits = dino.teacher(crops[:NUM_TEACHER_CROPS])
                logits_sum += teacher_logits.float().sum(dim=0, keepdim=True)
                num_logits += len(teacher_logits)
                if is_last:  # the ranks' sums are exchanged while the student computes
                    finish_center = loss_of.begin_center_update(logits_sum, num_logits)
                student_logits, encodings = dino.student(crops, with_encodings=True)
            loss = loss_of(student_logits, teacher_logits, epoch, update_center=False)
            total = loss
            if dino.koleo_weight:  # the two crops of an image shall be close, so each is spread on its own
                parts = [koleo_loss(crop) for crop in encodings[: len(teacher_logits)].chunk(NUM_TEACHER_CROPS)]
                koleo.append(torch.stack(parts).sum())
                total = loss + dino.koleo_weight * koleo[-1]
            updater.backward(total, total, parts=len(batches))
        losses.append(loss.detach())
    scalars = {"koleo": torch.stack(koleo).detach().mean()} if koleo else {}
    if diagnose:
        scalars |= loss_of.diagnose(loss_of.teacher_probabilities(teacher_logits, epoch), loss)._asdict()
    last_layer = [dino.network.head.get_submodule("last_layer")] if epoch < dino.freeze_last_layer else []
    report = finish_step(dino, losses, scalars, frozen=last_layer)
    finish_center(updater.nonfinite)
    return report

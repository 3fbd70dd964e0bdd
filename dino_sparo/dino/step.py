"""One step of DINO, the paper's algorithm 1: the student sees all crops, the teacher the two global ones.

The loss compares them, the optimizer moves the student, the moving average moves the teacher, and the center moves
towards the teacher's logits. `train.py` builds the networks and the loss, `distillation/objective.py` the schedules and
the optimizer.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dino_sparo.data.batch import Batch
from dino_sparo.distillation.koleo import koleo_loss
from dino_sparo.distillation.network import NUM_TEACHER_CROPS
from dino_sparo.distillation.step import clip_student, compute_gradients, exchange, move_teacher
from dino_sparo.runtime.launch import world_size
from dino_sparo.training.objective import StepReport
from dino_sparo.training.recording import Outputs

if TYPE_CHECKING:
    from dino_sparo.dino.train import DINOObjective


def train_step(dino: "DINOObjective", batches: list[Batch], epoch: int, is_last: bool = False) -> StepReport:
    """One step of algorithm 1: `compute` gives the gradients, `apply` updates student, teacher and center.

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
    dino.begin_step()
    temperature = float(dino.loss.teacher_temp_schedule[epoch])
    outputs = compute_gradients(dino, partial(compute, dino, epoch), batches, key=temperature)
    return apply(dino, outputs, epoch, dino.is_diagnosed(is_last))


def compute(dino: "DINOObjective", epoch: int, crops: Sequence[Tensor], parts: int) -> Outputs:
    """Crops -> gradients of the student: forward passes, loss, backward pass. A GPU may record this function.

    Returns:
        loss (); teacher_logits (2*B, K); logits_sum (1, K), their sum over the rows; koleo (), if it has a weight.
    """
    updater, criterion = dino.updater, dino.loss
    with updater.autocast():
        with torch.no_grad():
            teacher_logits = dino.teacher(crops[:NUM_TEACHER_CROPS])
        student_logits, encodings = dino.student(crops, with_encodings=True)
    loss = total = criterion(student_logits, teacher_logits, epoch, update_center=False)
    outputs = {"loss": loss.detach(), "teacher_logits": teacher_logits}
    outputs["logits_sum"] = teacher_logits.float().sum(dim=0, keepdim=True)
    if dino.args.koleo_weight:  # the two crops of an image shall be close, so each is spread on its own
        terms = [koleo_loss(crop) for crop in encodings[: len(teacher_logits)].chunk(NUM_TEACHER_CROPS)]
        koleo = torch.stack(terms).sum()
        total = loss + dino.args.koleo_weight * koleo
        outputs["koleo"] = koleo.detach()
    updater.backward(total, total, parts=parts)
    return outputs


def apply(dino: "DINOObjective", outputs: Sequence[Outputs], epoch: int, is_diagnosed: bool) -> StepReport:
    """Gradients -> student; student -> teacher; the teacher's logits -> center.

    Args:
        dino: changed in place.
        outputs: of `compute`, for each micro-batch.
        epoch: counted from 0.
        is_diagnosed: report the teacher's entropies for the last micro-batch.
    """
    updater, criterion, last = dino.updater, dino.loss, outputs[-1]
    logits_sum = torch.stack([output["logits_sum"] for output in outputs]).sum(dim=0)
    exchange(dino, [logits_sum])
    scalars = {"koleo": torch.stack([output["koleo"] for output in outputs]).mean()} if "koleo" in last else {}
    if is_diagnosed:
        probabilities = criterion.teacher_probabilities(last["teacher_logits"], epoch)
        scalars |= criterion.diagnose(probabilities, last["loss"])._asdict()
    step_loss = torch.stack([output["loss"] for output in outputs]).mean()
    last_layer = [dino.network.head.get_submodule("last_layer")] if epoch < dino.args.freeze_last_layer else []
    scalars["grad_norm"] = clip_student(dino, step_loss, frozen=last_layer)
    updater.update()
    schedules = move_teacher(dino)
    num_logits = len(outputs) * len(last["teacher_logits"]) * world_size()
    criterion.move_center(logits_sum, num_logits, keep=updater.nonfinite)
    return StepReport(step_loss, updater.nonfinite.clone(), {**schedules, **scalars})

"""One step of DINO: the paper's algorithm 1.

Student and teacher see the crops, the loss compares them, the optimizer moves the student, the centre moves towards the
teacher's logits, and the moving average moves the teacher. `train.py` builds what goes in here.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dino_sparo.data.dataset import Batch
from dino_sparo.dino.head import DINONetwork
from dino_sparo.dino.loss import NUM_TEACHER_CROPS, DINOLoss
from dino_sparo.dino.teacher import ema_update_
from dino_sparo.models.encoder import Encoder
from dino_sparo.training.images import CropTraining
from dino_sparo.training.objective import StepReport
from dino_sparo.training.optim import clip_gradients_, drop_gradients


@dataclass
class DINOTraining(CropTraining):
    """Everything a step needs and changes.

    Attributes:
        student: a `DINONetwork`, inside DDP where there are several processes.
        teacher: a `DINONetwork` without gradients.
        loss: with the centre.
        updater: the student's optimizer, schedules and precision.
        momentum: of the teacher's moving average, one value per step.
        clip_grad: largest norm of a parameter's gradient; 0 for no limit.
        freeze_last_layer: epochs during which the head's last layer is not trained.
    """

    teacher: DINONetwork
    loss: DINOLoss
    momentum: np.ndarray
    clip_grad: float = 3.0
    freeze_last_layer: int = 1

    @property
    def encoder(self) -> Encoder:
        """The teacher's."""
        return self.teacher.encoder

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Student, teacher, and the loss with its centre.

        In training the teacher is in training mode too: batch norm in its head uses the batch's statistics.
        """
        return {"student": self.network, "teacher": self.teacher, "dino_loss": self.loss}

    def trial_loss(self, batch: Batch) -> Tensor:
        """Forward passes and loss, as in `train_step`."""
        crops = self.crops(batch)
        with self.updater.autocast():
            with torch.no_grad():
                teacher_logits = self.teacher(crops[:NUM_TEACHER_CROPS])
            student_logits = self.student(crops)
        return self.loss(student_logits, teacher_logits, epoch=0, update_center=False)

    @property
    def compiled_modules(self) -> list[nn.Module]:
        """Student, teacher and distortions."""
        return [*super().compiled_modules, self.teacher]

    def compile(self, batch: Batch) -> None:
        """Compile the loss' cross-entropy too; before, positions are resampled once for each size of crop."""
        for network in (self.network, self.teacher):
            for view in batch.views:
                network.backbone.position_embedding(*view.shape[-2:])
        self.loss.compile_cross_entropy()
        super().compile(batch)

    def uncompile(self) -> None:
        """Take `compile` back."""
        self.loss.uncompile()
        super().uncompile()


def train_step(training: DINOTraining, batches: list[Batch], epoch: int, diagnose: bool = False) -> StepReport:
    """One step of algorithm 1: forward, loss, backward, student update, centre update, teacher update.

    With several micro-batches the gradients are those of one batch that holds them all: every part uses the same
    centre, which moves once, at the end. (Batch norm in the head, if asked for, sees each part alone.)

    No value is copied to the CPU, so the step never waits for a GPU. After a loss or gradients that are not finite, on
    any rank, student, optimizer and centre stay as they are until the trainer reads the report and ends the run. The
    teacher still moves towards the student in these steps; that teacher is never saved.

    Args:
        training: changed in place.
        batches: `accum_steps` micro-batches of this rank.
        epoch: counted from 0.
        diagnose: also look at the teacher's entropies.
    """
    updater, loss_of = training.updater, training.loss
    updater.begin_step()
    losses, logits_sum, num_logits = [], torch.zeros_like(loss_of.center), 0
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        crops = training.crops(batch)
        with updater.gradient_sync(training.student, is_last):
            with updater.autocast():
                with torch.no_grad():
                    teacher_logits = training.teacher(crops[:NUM_TEACHER_CROPS])
                logits_sum += teacher_logits.float().sum(dim=0, keepdim=True)
                num_logits += len(teacher_logits)
                if is_last:  # the ranks' sums are exchanged while the student computes
                    finish_center = loss_of.begin_center_update(logits_sum, num_logits)
                student_logits = training.student(crops)
            loss = loss_of(student_logits, teacher_logits, epoch, update_center=False)
            updater.backward(loss, loss, parts=len(batches))
        losses.append(loss.detach())
    entropies = (
        loss_of.diagnose(loss_of.teacher_probabilities(teacher_logits, epoch), loss)._asdict() if diagnose else {}
    )
    mean_loss = torch.stack(losses).mean()
    grad_norm = update_student(training, mean_loss, epoch)
    finish_center(updater.nonfinite)
    momentum = float(training.momentum[updater.step])
    ema_update_(training.teacher, training.network, momentum)
    rates = {"lr": updater.hyperparameter("lr"), "wd": updater.hyperparameter("weight_decay"), "momentum": momentum}
    updater.step += 1
    return StepReport(mean_loss, updater.nonfinite.clone(), {**rates, "grad_norm": grad_norm, **entropies})


def update_student(training: DINOTraining, loss: Tensor, epoch: int) -> Tensor:
    """Clip, keep the last layer frozen in the first epochs, step.

    Args:
        training: changed in place; its student has its gradients.
        loss: of the step.
        epoch: counted from 0.

    Returns:
        The norm of all gradients together, (), before clipping.
    """
    norms = training.updater.finish_gradients(loss)
    if training.clip_grad:
        clip_gradients_(training.updater.parameters, training.clip_grad, norms)
    if epoch < training.freeze_last_layer:
        drop_gradients(training.network.head.last_layer)
    training.updater.update()
    return norms.norm()

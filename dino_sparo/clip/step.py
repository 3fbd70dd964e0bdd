"""One step of contrastive training.

Both towers encode a batch of pairs, the loss compares all images with all captions, the optimizer moves the model.
`train.py` builds what goes in here. Nothing in a step is random: the crops and captions of a batch were drawn by the
loader.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dino_sparo.clip.loss import feature_gradients
from dino_sparo.clip.model import CLIP, ClipOutput
from dino_sparo.image_text.contrastive import MAX_LOGIT_SCALE
from dino_sparo.image_text.pairs.batches import PairBatch
from dino_sparo.training.objective import StepReport, Training
from dino_sparo.training.updates import Updater


@dataclass
class CLIPTraining(Training[PairBatch]):
    """Everything a step needs and changes.

    Attributes:
        model: a `CLIP`, inside DDP where there are several processes.
        loss: from `create_loss`.
        updater: the model's optimizer, schedules and precision.
        mean: (1, C, 1, 1), of pixels in 0..1, on the device.
        std: likewise.
        clip_grad: largest norm of all gradients together; 0 for no limit.
    """

    model: nn.Module
    loss: nn.Module
    updater: Updater
    mean: Tensor
    std: Tensor
    clip_grad: float = 0.0

    @property
    def network(self) -> CLIP:
        """The model without DDP."""
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model  # type: ignore[return-value]

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The model."""
        return {"model": self.network}

    def forward(self, model: nn.Module, batch: PairBatch) -> ClipOutput:
        """Features of a batch on the device, by the model inside DDP or without."""
        images = (batch.images.float() / 255 - self.mean) / self.std
        with self.updater.autocast():
            return model(images, batch.token_ids)

    def trial_loss(self, batch: PairBatch) -> Tensor:
        """Forward passes and loss of one micro-batch."""
        return self.loss(*self.forward(self.model, batch.to(self.updater.device)))


def train_step(training: CLIPTraining, batches: list[PairBatch]) -> StepReport:
    """Forward, loss, backward, update.

    With several micro-batches the gradients are those of one batch that holds them all: every pair is compared with all
    pairs of the step. Nothing is read from the device. After a loss or gradients that are not finite, on any rank, the
    weights stay as they are until the trainer reads the report and ends the run.

    Args:
        training: changed in place.
        batches: `accum_steps` micro-batches of this rank.

    Returns:
        The report; its scalars: `batch_accuracy`, the share of this rank's images whose own caption is the most similar
        among this rank's; `grad_norm`, of all gradients together before clipping; `logit_scale`, of this step.
    """
    updater = training.updater
    updater.begin_step()
    batches = [batch.to(updater.device) for batch in batches]
    backward = _backward_at_once if len(batches) == 1 else _backward_in_parts
    loss, output = backward(training, batches)
    grad_norm = _update(training, loss)
    scalars: dict[str, Tensor | float] = {
        "lr": updater.hyperparameter("lr"),
        "batch_accuracy": _accuracy(output),
        "grad_norm": grad_norm,
        "logit_scale": output.logit_scale,
    }
    updater.step += 1
    return StepReport(loss, updater.nonfinite.clone(), scalars)


def _backward_at_once(training: CLIPTraining, batches: list[PairBatch]) -> tuple[Tensor, ClipOutput]:
    """Gradients of a step with one micro-batch; the loss and the features, detached."""
    (batch,) = batches
    output = training.forward(training.model, batch)
    loss = training.loss(*output)
    training.updater.backward(loss, loss)
    return loss.detach(), ClipOutput(*(tensor.detach() for tensor in output))


def _backward_in_parts(training: CLIPTraining, batches: list[PairBatch]) -> tuple[Tensor, ClipOutput]:
    """The same with several: all features first, without gradients, then each part again; see `feature_gradients`."""
    with torch.no_grad():
        outputs = [training.forward(training.network, batch) for batch in batches]
    features = [torch.cat(parts) for parts in list(zip(*outputs, strict=True))[:2]]
    whole = ClipOutput(features[0], features[1], outputs[0].logit_scale)
    gradients = feature_gradients(training.loss, *whole)
    image_sizes, text_sizes = ([len(part) for part in column] for column in list(zip(*outputs, strict=True))[:2])
    parts = zip(batches, gradients.images.split(image_sizes), gradients.texts.split(text_sizes), strict=True)
    for index, (batch, image_gradient, text_gradient) in enumerate(parts):
        is_last = index == len(batches) - 1
        with training.updater.gradient_sync(training.model, is_last):
            output = training.forward(training.model, batch)
            # Its gradient is the loss' own: the factors are constants.
            product = (output.image_features * image_gradient).sum() + (output.text_features * text_gradient).sum()
            if is_last:
                product = product + output.logit_scale * gradients.logit_scale
            training.updater.backward(product, gradients.loss)
    return gradients.loss, whole


def _update(training: CLIPTraining, loss: Tensor) -> Tensor:
    """Clip, step, keep the temperature in its range; returns the gradients' norm."""
    updater = training.updater
    grad_norm = updater.finish_gradients(loss).norm()
    if training.clip_grad:
        torch.nn.utils.clip_grads_with_norm_(updater.parameters, training.clip_grad, grad_norm)
    updater.update()
    with torch.no_grad():
        training.network.logit_scale.clamp_(0, math.log(MAX_LOGIT_SCALE))
    return grad_norm


def _accuracy(output: ClipOutput) -> Float[Tensor, ""]:
    step = len(output.text_features) // len(output.image_features)  # false captions are left out
    nearest = (output.image_features @ output.text_features[::step].T).argmax(dim=1)
    return (nearest == torch.arange(len(nearest), device=nearest.device)).float().mean()

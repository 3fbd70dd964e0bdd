"""One step of a contrastive objective: images and texts are encoded, all are compared with all, the model is updated.

    features = encode(batch)      per image, per text: towers and all that sees one image or text alone
    loss = loss(features)         compares all with all; it may have weights of its own
    gradients, update

An objective says what its features and its loss are. Nothing in a step is random: crops, captions and false graphs were
drawn by the loader.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dino_sparo.runtime.distributed import without_reduction
from dino_sparo.training.objective import AnyBatch, StepReport, Training
from dino_sparo.training.updater import Updater

# Features -> loss of this rank in nats, and what is logged beside it.
Loss = Callable[[Sequence[Tensor]], tuple[Tensor, dict[str, Tensor]]]


@dataclass
class ContrastiveTraining(Training[AnyBatch]):
    """Everything a step needs and changes.

    Attributes:
        model: the model, inside DDP where there are several processes.
        updater: the model's optimizer, schedules and precision.
        mean: (1, C, 1, 1), of pixels in 0..1, on the device.
        std: likewise.
        clip_grad: largest norm of all gradients together; 0 for no limit.
    """

    model: nn.Module
    updater: Updater
    mean: Tensor
    std: Tensor
    clip_grad: float = 0.0

    @property
    def network(self) -> Any:
        """The model without DDP."""
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The model."""
        return {"model": self.network}

    def normalized(self, images: UInt8[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """8-bit pixels -> what the image encoder takes."""
        return (images.float() / 255 - self.mean) / self.std

    @abstractmethod
    def encode(self, model: nn.Module, batch: AnyBatch) -> tuple[Tensor, ...]:
        """Features of a batch on the device, by the model inside DDP or without, in the updater's precision.

        Features of several batches can be put together along the first dimension.
        """

    @abstractmethod
    def loss(self, features: Sequence[Tensor], batches: Sequence[AnyBatch]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of this rank over all ranks' features, and what is logged beside it, detached.

        Args:
            features: as `encode` returns them, of all micro-batches.
            batches: the micro-batches.
        """

    @property
    @abstractmethod
    def loss_parameters(self) -> list[nn.Parameter]:
        """The model's weights that `loss` reads."""

    @abstractmethod
    def bound_weights(self) -> None:
        """Called after each update, without gradients: bring back what left its range."""

    def trial_loss(self, batch: AnyBatch) -> Tensor:
        """Forward passes and loss of one micro-batch."""
        on_device: Any = batch
        batch = on_device.to(self.updater.device)
        return self.loss(self.encode(self.model, batch), [batch])[0]

    def local_trial_loss(self, batch: AnyBatch) -> Tensor:
        """The sum of all features: what compares the ranks' features is not compiled."""
        on_device: Any = batch
        batch = on_device.to(self.updater.device)
        if self.updater.accum_steps > 1:
            with torch.no_grad():  # as in `backward_in_parts`: to the compiler another graph
                self.encode(self.network, batch)
        with without_reduction(self.model):
            features = self.encode(self.model, batch)
        return torch.stack([feature.float().sum() for feature in features]).sum()


def train_step(training: ContrastiveTraining[AnyBatch], batches: Sequence[Any]) -> StepReport:
    """Forward, loss, backward, update.

    With several micro-batches the gradients are those of one batch that holds them all: every pair is compared with all
    pairs of the step. Nothing is read from the device. After a loss or gradients that are not finite, on any rank, the
    weights stay as they are until the trainer reads the report and ends the run.

    Args:
        training: changed in place.
        batches: `accum_steps` micro-batches of this rank.

    Returns:
        The report; its scalars: the objective's own and `grad_norm`, of all gradients together before clipping.
    """
    updater = training.updater
    updater.begin_step()
    batches = [batch.to(updater.device) for batch in batches]
    backward = backward_at_once if len(batches) == 1 else backward_in_parts
    loss, scalars = backward(training, batches)
    grad_norm = _update(training, loss)
    report: dict[str, Tensor | float] = {"lr": updater.hyperparameter("lr"), **scalars, "grad_norm": grad_norm}
    updater.step += 1
    return StepReport(loss, updater.nonfinite.clone(), report)


def backward_at_once(
    training: ContrastiveTraining[AnyBatch], batches: Sequence[AnyBatch]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Gradients of a step with one micro-batch; the loss, detached, and what is logged."""
    (batch,) = batches
    loss, scalars = training.loss(training.encode(training.model, batch), batches)
    training.updater.backward(loss, loss)
    return loss.detach(), scalars


def backward_in_parts(
    training: ContrastiveTraining[AnyBatch], batches: Sequence[AnyBatch]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The same with several: all features first, without gradients, then each part again; see `loss_gradients`."""
    with torch.no_grad():
        outputs = [training.encode(training.network, batch) for batch in batches]
    features = [torch.cat(parts) for parts in zip(*outputs, strict=True)]
    of_loss = loss_gradients(lambda leaves: training.loss(leaves, batches), features, training.loss_parameters)
    sizes = [[len(feature) for feature in parts] for parts in zip(*outputs, strict=True)]
    own_gradients = zip(
        *(gradient.split(size) for gradient, size in zip(of_loss.features, sizes, strict=True)), strict=True
    )
    for index, (batch, gradients) in enumerate(zip(batches, own_gradients, strict=True)):
        is_last = index == len(batches) - 1
        with training.updater.gradient_sync(training.model, is_last):
            output = training.encode(training.model, batch)
            # Its gradient is the loss' own: the factors are constants.
            pairs = list(zip(output, gradients, strict=True))
            if is_last:
                pairs += zip(training.loss_parameters, of_loss.parameters, strict=True)
            product = torch.stack([(value * gradient).sum() for value, gradient in pairs]).sum()
            training.updater.backward(product, of_loss.loss)
    return of_loss.loss, of_loss.scalars


class LossGradients(NamedTuple):
    """The loss of a step and its gradient at what it reads.

    Attributes:
        loss: of this rank, nats.
        scalars: what is logged beside it.
        features: d loss / d feature, of every feature of this rank.
        parameters: d loss / d weight, of the weights that the loss reads.
    """

    loss: Float[Tensor, ""]
    scalars: dict[str, Tensor]
    features: list[Tensor]
    parameters: list[Tensor]


def loss_gradients(loss: Loss, features: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> LossGradients:
    """The gradient of the loss at features that were computed without gradients.

    By the chain rule the gradient of a weight is the sum of (d loss / d features) (d features / d weight) over the
    micro-batches: each is passed through the network once more, alone, and this gradient sent back from its end. The
    loss' own weights are no feature of any micro-batch; their gradient is taken here, once. Source: Gao et al.,
    "Scaling deep contrastive learning batch size under memory limited setup", section 3. (OpenCLIP computes the whole
    loss anew for every micro-batch, and so adds up the temperature's gradient as many times.)

    Args:
        loss: of this rank.
        features: of all micro-batches of this rank.
        parameters: weights that the loss reads.
    """
    leaves = [feature.detach().requires_grad_() for feature in features]
    with torch.enable_grad():
        value, scalars = loss(leaves)
    gradients = torch.autograd.grad(value, [*leaves, *parameters], materialize_grads=True)
    return LossGradients(value.detach(), scalars, list(gradients[: len(leaves)]), list(gradients[len(leaves) :]))


def _update(training: ContrastiveTraining[AnyBatch], loss: Tensor) -> Tensor:
    """Clip, step, keep weights in their range; returns the gradients' norm."""
    updater = training.updater
    grad_norm = updater.finish_gradients(loss).norm()
    if training.clip_grad:
        torch.nn.utils.clip_grads_with_norm_(updater.parameters, training.clip_grad, grad_norm)
    updater.update()
    with torch.no_grad():
        training.bound_weights()
    return grad_norm

"""One step of a contrastive objective: encode images and texts, compare all images with all texts, update the model.

    features = encode(batch)      per image, per text: towers and all that sees one image or text alone
    loss = loss(features)         compares all with all; it may have weights of its own
    gradients, update

A `PairObjective` says what its features and its loss are. Nothing in a step is random: the loader drew crops, captions
and false graphs.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from dino_sparo.runtime.collectives import gather_with_gradient
from dino_sparo.runtime.launch import rank
from dino_sparo.training.objective import StepReport

if TYPE_CHECKING:
    from dino_sparo.image_text.objective import PairObjective

INITIAL_LOGIT_SCALE = 1 / 0.07  # CLIP, section 2.5
MAX_LOGIT_SCALE = 100.0  # a larger one makes training unstable; CLIP, section 2.5

# Features -> loss of this rank in nats, and further numbers for the log.
Loss = Callable[[Sequence[Tensor]], tuple[Tensor, dict[str, Tensor]]]


def contrastive_loss(scores: Float[Tensor, "B U"], logit_scale: Float[Tensor, ""] | None = None) -> Float[Tensor, ""]:
    """Cross-entropy of every text among all images, and of every image among all texts; text i belongs to image i.

        L = -1 / (2 B) sum_i [log e^{s S_ii} / sum_j e^{s S_ji} + log e^{s S_ii} / sum_j e^{s S_ij}]

    Each rank scores its own images with the texts of all ranks, in the order of the ranks, so that no pair is scored
    twice. The sum over all images in the first term needs the scores of all ranks: each rank sums its part, and the
    parts are gathered, with gradients. The mean of the ranks' losses is the loss above.

    Source: CLIP, figure 3. OC-CLIP's equation 5, L_itc, has the sum of pairs and directions in place of their mean.

    Args:
        scores: S (B, U), image by text; U = B, or B times the number of ranks.
        logit_scale: (), s, the inverse temperature itself, not its logarithm; None for 1.
    """
    num_images, num_texts = scores.shape
    logits = scores if logit_scale is None else logit_scale * scores
    labels = torch.arange(num_images, device=logits.device)
    if num_texts == num_images:
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
    labels = labels + num_images * rank()
    normalizers = gather_with_gradient(logits.logsumexp(dim=0)).logsumexp(dim=0)
    by_text = (normalizers[labels] - logits.diagonal(num_images * rank())).mean()
    return (F.cross_entropy(logits, labels) + by_text) / 2


def batch_accuracy(scores: Float[Tensor, "B B"]) -> Float[Tensor, ""]:
    """The share of images whose text scores highest, for the log; text i belongs to image i."""
    return (scores.detach().argmax(dim=1) == torch.arange(len(scores), device=scores.device)).float().mean()


def train_step(
    objective: "PairObjective[Any]", batches: Sequence[Any], epoch: int = 0, is_last: bool = False
) -> StepReport:
    """Forward, loss, backward, update; every step is the same, whatever its `epoch` and whether it `is_last`.

    With several micro-batches the gradients are those of one batch that holds them all: every pair is compared with all
    pairs of the step. Nothing is read from the device. After a loss or gradients that are not finite, on any rank, the
    weights stay as they are until the trainer reads the report and ends the run. `grad_norm` in the report is of all
    gradients together, before clipping.
    """
    updater = objective.updater
    updater.begin_step()
    batches = [batch.to(updater.device) for batch in batches]
    backward = backward_at_once if len(batches) == 1 else backward_in_parts
    loss, scalars = backward(objective, batches)
    grad_norm = updater.finish_gradients(loss).norm()
    if objective.clip_grad:
        torch.nn.utils.clip_grads_with_norm_(updater.parameters, objective.clip_grad, grad_norm)
    updater.update()
    with torch.no_grad():
        objective.bound_weights()
    report: dict[str, Tensor | float] = {"lr": updater.hyperparameter("lr"), **scalars, "grad_norm": grad_norm}
    updater.step += 1
    return StepReport(loss, updater.nonfinite.clone(), report)


def backward_at_once(objective: "PairObjective[Any]", batches: Sequence[Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Gradients of a step with one micro-batch; returns the detached loss and further numbers for the log."""
    (batch,) = batches
    loss, scalars = objective.loss(objective.encode(objective.model, batch), batches)
    objective.updater.backward(loss, loss)
    return loss.detach(), scalars


def backward_in_parts(objective: "PairObjective[Any]", batches: Sequence[Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Gradients with several micro-batches: first all features, without gradients, then each batch again."""
    with torch.no_grad():
        outputs = [objective.encode(objective.network, batch) for batch in batches]
    features = [torch.cat(parts) for parts in zip(*outputs, strict=True)]
    loss, scalars, of_features, of_parameters = loss_gradients(
        lambda leaves: objective.loss(leaves, batches), features, objective.loss_parameters
    )
    sizes = [[len(feature) for feature in parts] for parts in zip(*outputs, strict=True)]
    by_batch = zip(*(gradient.split(size) for gradient, size in zip(of_features, sizes, strict=True)), strict=True)
    for index, (batch, gradients) in enumerate(zip(batches, by_batch, strict=True)):
        is_last = index == len(batches) - 1
        with objective.updater.gradient_sync(objective.model, is_last):
            output = objective.encode(objective.model, batch)
            # Its gradient is the loss' own: the factors are constants.
            pairs = list(zip(output, gradients, strict=True))
            if is_last:
                pairs += zip(objective.loss_parameters, of_parameters, strict=True)
            product = torch.stack([(value * gradient).sum() for value, gradient in pairs]).sum()
            objective.updater.backward(product, loss)
    return loss, scalars


def loss_gradients(
    loss: Loss, features: Sequence[Tensor], parameters: Sequence[nn.Parameter]
) -> tuple[Float[Tensor, ""], dict[str, Tensor], Sequence[Tensor], Sequence[Tensor]]:
    """The loss, further numbers for the log, and the gradients of the loss at features and at its weights.

    By the chain rule the gradient of a weight is the sum of (d loss / d features) (d features / d weight) over the
    micro-batches. So each micro-batch is encoded again, alone, and the gradient of its features goes back through the
    network. The gradient of the loss's own weights, such as the temperature, is taken here, once. Source: Gao et al.,
    "Scaling deep contrastive learning batch size under memory limited setup", section 3. (OpenCLIP computes the whole
    loss anew for every micro-batch, and so adds up the temperature's gradient as many times.)
    """
    leaves = [feature.detach().requires_grad_() for feature in features]
    with torch.enable_grad():
        value, scalars = loss(leaves)
    gradients = torch.autograd.grad(value, [*leaves, *parameters], materialize_grads=True)
    return value.detach(), scalars, gradients[: len(leaves)], gradients[len(leaves) :]

"""One step of iBOT: DINO's step on encodings, and the same comparison for the patches that the student does not see.

    teacher  sees the global crops                   -> q of each crop, q of each masked patch
    student  sees masked global crops, local crops   -> p of each crop, p of each masked patch
    loss = image_weight H(q, p) over pairs of crops + patch_weight H(q, p) over masked patches
         + koleo_weight KoLeo(encodings)            + gram_weight Gram(patch tokens, those of a fixed teacher)

The optimizer moves the student, the moving average moves the teacher, and with centring the two centers move towards
the teacher's logits. `train.py` builds networks and losses, `mask.py` draws the masks.
"""

import random
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dino_sparo.data.batch import Batch
from dino_sparo.distillation.koleo import koleo_loss
from dino_sparo.distillation.network import NUM_TEACHER_CROPS
from dino_sparo.distillation.step import clip_student, compute_gradients, crops_on_device, exchange, move_teacher
from dino_sparo.ibot.loss import Targets, diagnose_patches, gram_loss
from dino_sparo.ibot.mask import Mask
from dino_sparo.runtime.launch import world_size
from dino_sparo.training.objective import StepReport
from dino_sparo.training.recording import Outputs

if TYPE_CHECKING:
    from dino_sparo.ibot.train import IBOTObjective

TERMS = ("image_loss", "patch_loss", "koleo", "gram")


def train_step(ibot: "IBOTObjective", batches: list[Batch], epoch: int, is_last: bool = False) -> StepReport:
    """One step: `compute` gives the gradients, `apply` updates student, teacher and centers.

    With several micro-batches the gradients are those of one batch that holds them all: the masks are drawn for all
    images, and Sinkhorn-Knopp compares all of them. (KoLeo and batch norm in a head see each part alone.) No value is
    copied to the CPU; steps after a loss that is not finite are those of `dino/step.py`.

    Args:
        ibot: changed in place.
        batches: `accum_steps` micro-batches of this rank.
        epoch: counted from 0.
        is_last: the epoch or the run ends with this step, so that it reports the teacher's entropies, as every tenth.
    """
    ibot.begin_step()
    temperature = float(ibot.loss.images.teacher_temp_schedule[epoch])
    masks = draw_masks(ibot, batches)
    extras: list[Any] = masks
    if ibot.loss.sinkhorn and len(batches) > 1:
        targets = targets_of_all(ibot, batches, masks, temperature)
        extras = [[*mask, *target] for mask, target in zip(masks, targets, strict=True)]
    outputs = compute_gradients(ibot, partial(compute, ibot, temperature), batches, key=temperature, extras=extras)
    return apply(ibot, outputs, epoch, ibot.is_diagnosed(is_last))


def draw_masks(ibot: "IBOTObjective", batches: Sequence[Batch]) -> list[Mask]:
    """Masks of the step on the device, by a generator of their own: anybody may draw from the global ones."""
    rng = random.Random(ibot.updater.step_seed)
    masks = ibot.mask_recipe.draw_step(rng, len(batches[0].indices), len(batches))
    device = ibot.updater.device
    if device.type == "cuda":  # from page-locked memory nothing waits
        masks = [Mask(*(tensor.pin_memory() for tensor in mask)) for mask in masks]
    return [Mask(*(tensor.to(device, non_blocking=True) for tensor in mask)) for mask in masks]


@torch.no_grad()
def targets_of_all(
    ibot: "IBOTObjective", batches: Sequence[Batch], masks: Sequence[Mask], temperature: float
) -> list[Targets]:
    """The teacher's distributions, for Sinkhorn-Knopp over all micro-batches: before the student sees the first."""
    logits, patch_logits = [], []
    for batch, mask in zip(batches, masks, strict=True):
        crops = ibot.shrink(crops_on_device(batch, ibot.distort, ibot.updater.device))
        with ibot.updater.autocast():
            seen = ibot.teacher(crops[:NUM_TEACHER_CROPS], mask.patches)
        logits.append(seen.logits)
        patch_logits.append(seen.patch_logits)
    return ibot.loss.targets(logits, patch_logits, [mask.weights for mask in masks], temperature)


def compute(ibot: "IBOTObjective", temperature: float, crops: Sequence[Tensor], *extras: Tensor, parts: int) -> Outputs:
    """Crops -> gradients of the student: forward passes, losses, backward pass. A GPU may record this function.

    Args:
        ibot: its student gets the gradients.
        temperature: of the teacher.
        crops: S crops, global ones first.
        extras: the tensors of a `Mask`, and of `Targets` unless they are computed here.
        parts: number of micro-batches.

    Returns:
        loss, image_loss, patch_loss, koleo, gram (); logits_sum (1, K), patch_sum (1, K), num_patches (1,) for the
        centers; probabilities of crops and patches, and weights of the patches, for `apply`.
    """
    updater, criterion = ibot.updater, ibot.loss
    mask, given = Mask(*extras[:3]), extras[3:]
    large, crops = crops[:NUM_TEACHER_CROPS], ibot.shrink(crops)
    with updater.autocast():
        with torch.no_grad():
            teacher = None if given else ibot.teacher(crops[:NUM_TEACHER_CROPS], mask.patches)
        student = ibot.student(crops, mask.patches, mask.masked)
    if teacher is None:
        targets = Targets(*given)
    else:
        [targets] = criterion.targets([teacher.logits], [teacher.patch_logits], [mask.weights], temperature)
    probabilities = targets.images.unflatten(0, (NUM_TEACHER_CROPS, -1))
    terms = {
        "image_loss": criterion.images.cross_entropy(student.logits, probabilities),
        "patch_loss": criterion.patches(student.patch_logits, targets.patches, mask.weights),
    }
    if ibot.koleo_weight:  # the two crops of an image shall be close, so each is spread on its own
        global_encodings = student.encodings[: len(targets.images)]
        terms["koleo"] = torch.stack([koleo_loss(crop) for crop in global_encodings.chunk(NUM_TEACHER_CROPS)]).sum()
    if ibot.gram_teacher is not None:
        terms["gram"] = gram_loss(student.tokens, gram_tokens(ibot, torch.cat(list(large)), student.tokens))
    weights = {"image_loss": ibot.image_weight, "patch_loss": ibot.patch_weight}
    weights |= {"koleo": ibot.koleo_weight, "gram": ibot.gram_weight}
    loss = torch.stack([weights[name] * term for name, term in terms.items()]).sum()
    updater.backward(loss, loss, parts=parts)
    outputs = {"loss": loss.detach(), **{name: term.detach() for name, term in terms.items()}}
    outputs |= {"probabilities": probabilities, "patch_probabilities": targets.patches, "weights": mask.weights}
    return outputs | ({} if teacher is None or criterion.sinkhorn else center_sums(teacher, mask))


def center_sums(teacher: Any, mask: Mask) -> Outputs:
    """Sums of the teacher's logits over crops (1, K) and masked patches (1, K), and the number of these patches."""
    is_masked = (mask.weights > 0).to(torch.promote_types(teacher.logits.dtype, torch.float32))
    return {
        "logits_sum": teacher.logits.to(is_masked.dtype).sum(dim=0, keepdim=True),
        "patch_sum": is_masked[None] @ teacher.patch_logits.to(is_masked.dtype),
        "num_patches": is_masked.sum(dim=0, keepdim=True),
    }


@torch.no_grad()
def gram_tokens(ibot: "IBOTObjective", images: Tensor, like: Tensor) -> Tensor:
    """Patch tokens of the Gram teacher (T*B, N, D), resampled to the student's grid where it sees larger crops."""
    backbone = ibot.gram_teacher
    assert backbone is not None
    with ibot.updater.autocast():
        tokens = backbone(images)[:, backbone.num_prefix_tokens :]
    if tokens.shape[1] == like.shape[1]:
        return tokens
    maps = tokens.float().mT.unflatten(2, backbone.grid(images))
    return F.interpolate(maps, size=ibot.mask_recipe.grid, mode="bicubic").flatten(2).mT


def apply(ibot: "IBOTObjective", outputs: Sequence[Outputs], epoch: int, is_diagnosed: bool) -> StepReport:
    """Gradients -> student; student -> teacher; the teacher's logits -> centers.

    Args:
        ibot: changed in place.
        outputs: of `compute`, for each micro-batch.
        epoch: counted from 0.
        is_diagnosed: report the teacher's entropies for the last micro-batch.
    """
    updater, criterion, last = ibot.updater, ibot.loss, outputs[-1]
    names = [name for name in ("logits_sum", "patch_sum", "num_patches") if name in last]
    sums = {name: torch.stack([output[name] for output in outputs]).sum(dim=0) for name in names}
    exchange(ibot, list(sums.values()))
    terms: list[str] = [name for name in TERMS if name in last]
    scalars: dict[str, Tensor] = {name: torch.stack([output[name] for output in outputs]).mean() for name in terms}
    if is_diagnosed:
        scalars |= criterion.images.diagnose(last["probabilities"], last["image_loss"])._asdict()
        found = diagnose_patches(last["patch_probabilities"], last["weights"], last["patch_loss"])
        scalars |= {f"patch_{name}": value for name, value in found._asdict().items()}
    step_loss = torch.stack([output["loss"] for output in outputs]).mean()
    frozen = ibot.network.last_layers if epoch < ibot.freeze_last_layer else []
    scalars["grad_norm"] = clip_student(ibot, step_loss, frozen=frozen)
    updater.update()
    schedules = move_teacher(ibot)
    if sums:
        num_crops = sum(output["probabilities"].shape[:2].numel() for output in outputs) * world_size()
        patches = sums["patch_sum"], sums["num_patches"]
        criterion.move_centers((sums["logits_sum"], num_crops), patches, keep=updater.nonfinite)
    return StepReport(step_loss, updater.nonfinite.clone(), {**schedules, **scalars})

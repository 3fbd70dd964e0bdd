"""iBOT against dinov2's own modules and Gram anchoring against dinov3's, recorded in float64."""

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from objectives import bare
from reference import record_ibot as recorded

from dino_sparo.data.batch import Batch
from dino_sparo.distillation.head import DINOHead
from dino_sparo.distillation.loss import DINOLoss
from dino_sparo.ibot import step as ibot_step
from dino_sparo.ibot.head import IBOTNetwork
from dino_sparo.ibot.loss import IBOTLoss, PatchLoss, gram_loss
from dino_sparo.ibot.mask import MaskRecipe
from dino_sparo.ibot.train import IBOTObjective
from dino_sparo.models.architectures import ViTSize
from dino_sparo.models.backbone import Backbone
from dino_sparo.models.encoder import Encoder, EncoderConfig
from dino_sparo.models.readouts import readout_kind
from dino_sparo.training.optim import OPTIMIZERS, param_groups
from dino_sparo.training.updater import Updater

NUMBERS = np.load(recorded.FOLDER / "ibot.npz")
EQUAL = 1e-10


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def build_network(patch_out_dim: int | None) -> IBOTNetwork:
    """The recorded sizes and weights; the encoding is the class token."""
    sizes = recorded.VIT
    backbone = Backbone(
        ViTSize(sizes["embed_dim"], sizes["depth"], sizes["num_heads"]), sizes["patch_size"], sizes["img_size"]
    )
    config = EncoderConfig(patch_size=sizes["patch_size"], readout="cls", img_size=sizes["img_size"])
    encoder = Encoder(backbone, readout_kind("cls").build(None), config)
    heads = [
        None if out_dim is None else DINOHead(sizes["embed_dim"], out_dim, norm_last_layer=False, **recorded.HEAD)
        for out_dim in (recorded.OUT_DIM, patch_out_dim)
    ]
    network = IBOTNetwork(encoder, *heads)
    network.load_state_dict(recorded.generated({name: value.shape for name, value in network.state_dict().items()}))
    return network


def build_objective(sinkhorn: bool, patch_out_dim: int | None, parts: int = 1) -> IBOTObjective:
    student, teacher = build_network(patch_out_dim), build_network(patch_out_dim).requires_grad_(False)
    lr = np.full(recorded.STEPS, recorded.LR)
    decay = np.full(recorded.STEPS, recorded.DECAY)
    temperatures = (recorded.TEMPERATURE, recorded.TEMPERATURE, 0)
    images = DINOLoss(recorded.OUT_DIM, 2 + recorded.LOCAL, *temperatures, num_epochs=1)
    side = recorded.VIT["img_size"] // recorded.VIT["patch_size"]
    updater = Updater(
        OPTIMIZERS["adamw"](param_groups(student)),
        [{"lr": lr, "weight_decay": decay}, {"lr": lr}],
        list(student.parameters()),
        torch.device("cpu"),
        accum_steps=parts,
    )
    updater.nonfinite, updater.overflow = updater.nonfinite.float(), updater.overflow.float()  # as torch's AdamW wants
    return bare(
        IBOTObjective,
        student=student,
        network=student,
        teacher=teacher,
        loss=IBOTLoss(images, PatchLoss(patch_out_dim or recorded.OUT_DIM), sinkhorn),
        mask_recipe=MaskRecipe((side, side), recorded.PROBABILITY, recorded.RATIOS),
        image_weight=recorded.IMAGE_WEIGHT,
        patch_weight=recorded.PATCH_WEIGHT,
        koleo_weight=recorded.KOLEO_WEIGHT,
        updater=updater,
        momentum=np.full(recorded.STEPS, recorded.MOMENTUM),
        clip_grad=0.0,
        freeze_last_layer=0,
        frozen_steps=0,
        sampler=SimpleNamespace(steps_per_epoch=recorded.STEPS),
        distort=None,
    )


def batch_of(crops: list[torch.Tensor]) -> Batch:
    number = len(crops[0])
    return Batch(crops, torch.full((number,), -1), torch.arange(number), [])


@pytest.fixture
def seeded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives the masks of a step the random numbers of the recording."""

    def seed(number: int) -> None:
        numbers = SimpleNamespace(Random=lambda _: random.Random(number))
        monkeypatch.setattr(ibot_step, "random", numbers)

    return seed


@pytest.mark.parametrize("name", recorded.CASES)
def test_thirty_steps_follow_dinov2(name: str, seeded: Any) -> None:
    ibot = build_objective(*recorded.CASES[name])
    losses, masks = [], []
    for number in range(recorded.STEPS):
        seeded(number)
        masks.append(ibot.mask_recipe.draw(random.Random(number), 2 * recorded.BATCH))
        report = ibot_step.train_step(ibot, [batch_of(recorded.crops_of_step(number))], epoch=0)
        losses.append([float(report.scalars[term]) for term in ("image_loss", "patch_loss", "koleo")])
    assert (np.packbits(np.stack(masks)) == NUMBERS[f"{name}/masks"]).all()
    np.testing.assert_allclose(losses, NUMBERS[f"{name}/losses"], rtol=0, atol=EQUAL)
    for which, network in (("student", ibot.network), ("teacher", ibot.teacher)):
        weights = dict(network.named_parameters())
        np.testing.assert_allclose(recorded.summary(weights), NUMBERS[f"{name}/{which}"], rtol=0, atol=EQUAL)
    if not ibot.loss.sinkhorn:
        for loss, key in ((ibot.loss.images, "DINOLoss"), (ibot.loss.patches, "iBOTPatchLoss")):
            np.testing.assert_allclose(loss.center[0], NUMBERS[f"{name}/{key}"], rtol=0, atol=EQUAL)


@pytest.mark.parametrize("seed", recorded.MASK_SEEDS)
def test_masks_are_dinov2s_on_the_same_random_numbers(seed: int) -> None:
    recipe = MaskRecipe(recorded.MASK_GRID, recorded.PROBABILITY, recorded.RATIOS)
    masks = recipe.draw(random.Random(seed), recorded.MASK_CROPS)
    assert (np.packbits(masks) == NUMBERS[f"masks{seed}"]).all()
    assert recipe.most_patches(recorded.MASK_CROPS, parts=1) == NUMBERS["most_patches"]


def test_gram_anchoring_and_its_gradient_are_dinov3s() -> None:
    student, teacher = (torch.from_numpy(recorded.w.normal(f"gram/{i}", recorded.GRAM_SIZE)).double() for i in range(2))
    value = gram_loss(student.requires_grad_(), teacher)
    value.backward()
    assert value.item() == pytest.approx(float(NUMBERS["gram"]), abs=EQUAL)
    np.testing.assert_allclose(student.grad, NUMBERS["gram/grad"], rtol=0, atol=EQUAL)


@pytest.mark.parametrize("name", recorded.CASES)
def test_micro_batches_have_the_gradients_of_one_batch(name: str, seeded: Any) -> None:
    seeded(0)
    crops = [torch.cat([crop, crop.flip(0)[:1]]) for crop in recorded.crops_of_step(0)]  # four images
    gradients, centers = [], []
    for parts in (1, 2):
        ibot = build_objective(*recorded.CASES[name], parts=parts)
        ibot.koleo_weight = 0.0  # sees each part alone, as in DINO
        halves = list(zip(*(crop.chunk(parts) for crop in crops), strict=True))
        ibot_step.train_step(ibot, [batch_of(list(half)) for half in halves], epoch=0)
        gradients.append({name: p.grad for name, p in ibot.network.named_parameters()})
        centers.append([ibot.loss.images.center, ibot.loss.patches.center])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=EQUAL)
    torch.testing.assert_close(centers[1], centers[0], rtol=0, atol=EQUAL)

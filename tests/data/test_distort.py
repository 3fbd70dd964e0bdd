"""Distortions against Pillow's: bit for bit for one crop, and for a batch on the device."""

import importlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from PIL import Image
from pillow_distortions import ENHANCERS, distorted
from torch import Tensor
from torchvision.transforms import functional as TF

from dino_sparo.data.augment import (
    BLUR_UNIT,
    FACTORS,
    NEUTRAL,
    STAGES,
    Distortions,
    box_weights,
    channel_constant,
    distort_crop,
    gray_levels,
    hue_table,
    mean_level,
    normalize_levels,
    pack_parameters,
    shift_hue,
)

JITTER = ("brightness", "contrast", "saturation", "hue")
MEAN, STD = (0.4, 0.5, 0.6), (0.3, 0.2, 0.1)
NOTHING: dict[str, Any] = {"flip": False, "jitter": (), "grayscale": False, "blur_radius": 0.0, "solarize": False}


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Pixels (3, H, W) of every colour, grays, black and white among them."""
    rng = np.random.default_rng(seed)
    pixels, kind = rng.integers(0, 256, (3, height, width), dtype=np.uint8), rng.random((height, width))
    pixels = np.where(kind < 0.2, np.where(pixels > 128, 255, 0), pixels)
    return np.where(kind > 0.9, pixels[:1], pixels).astype(np.uint8)


def image(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(pixels.transpose(1, 2, 0).astype(np.uint8))


def levels(picture: Image.Image) -> np.ndarray:
    return np.asarray(picture).transpose(2, 0, 1).astype(np.float32)


def with_pillow(pixels: np.ndarray, drawn: dict[str, Any]) -> np.ndarray:
    return levels(distorted(image(pixels), drawn))


def draws(number: int, seed: int = 1) -> list[dict[str, Any]]:
    """Distortions of all kinds, alone and together, in all orders."""
    rng = np.random.default_rng(seed)
    orders = list(itertools.permutations(JITTER))
    found = []
    for index in range(number):
        factors = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}
        factors = {name: rng.uniform(-bound, bound) + (name != "hue") for name, bound in factors.items()}
        flip, jitters, grayscale, blurs, solarize = (rng.random(5) < (0.5, 0.9, 0.2, 0.6, 0.3)).tolist()
        jitter = tuple((name, factors[name]) for name in orders[index % len(orders)]) if jitters else ()
        radius = rng.uniform(0.1, 2.0) if blurs else 0.0
        found.append(
            {"flip": flip, "jitter": jitter, "grayscale": grayscale, "blur_radius": radius, "solarize": solarize}
        )
    return found


# One distortion.


def colors(parts: int = 8) -> Iterator[np.ndarray]:
    """All 2^24 colours, in parts (3, H, W)."""
    for reds in np.array_split(np.arange(256, dtype=np.uint8), parts):
        grid = np.meshgrid(reds, *[np.arange(256, dtype=np.uint8)] * 2, indexing="ij")
        yield np.stack(grid).reshape(3, -1, 256)


@pytest.mark.slow
def test_gray_and_hue_are_pillows_for_every_colour_there_is() -> None:
    for steps, part in enumerate(colors(), start=-4):
        channels, view = np.split(part.astype(np.float32), 3), image(part)
        assert np.array_equal(gray_levels(channels)[0], np.asarray(view.convert("L")))
        factor = (steps + math.copysign(0.5, steps)) * 6 / 255  # never on the edge of a step
        turned = shift_hue(channels, int(factor * 255) % 256, hue_table())
        assert np.array_equal(np.concatenate(turned), levels(TF.adjust_hue(view, factor)))


@pytest.mark.parametrize("name", ENHANCERS)
def test_blends_are_pillows(name: str) -> None:
    pixels = noise(61, 67)
    for factor in np.linspace(0.55, 1.45, 31).tolist():
        found = distort_crop(pixels, pack_parameters(**{**NOTHING, "jitter": ((name, factor),)}))
        assert np.array_equal(found, levels(ENHANCERS[name](image(pixels)).enhance(factor))), factor


def test_the_mean_of_a_large_crop_is_exact() -> None:
    # Beyond 2^24, the sum of so many levels is no exact float any more; this mean is as near to .5 as it can be.
    gray = np.full((1, 500, 501), 254, dtype=np.float32)
    gray[..., ::2] = 255
    assert gray.sum(dtype=np.float64) > 1 << 24
    for changed, mean in ((0, 255), (250, 255), (251, 254)):
        darker = gray.copy()
        darker[0, :changed, 0] -= 1
        assert math.floor(darker.mean(dtype=np.float64) + 0.5) == mean
        assert mean_level(darker).item() == mean_level(torch.from_numpy(darker)).item() == mean


@pytest.mark.parametrize("radius", [0.1, 0.5, 1.0, 1.4142135, 1.4142137, 1.5, 1.999, 2.0, 2.4])
def test_the_blur_is_pillows(radius: float) -> None:
    for height, width in [(1, 1), (2, 3), (3, 2), (5, 1), (17, 13), (41, 53)]:
        pixels = noise(height, width, seed=height)
        found = distort_crop(pixels, pack_parameters(**{**NOTHING, "blur_radius": radius}))
        assert np.array_equal(found, with_pillow(pixels, {**NOTHING, "blur_radius": radius})), (height, width)


def test_a_boxs_weights_add_up_to_one_and_to_the_blurs_variance() -> None:
    for radius in np.linspace(0.1, 2.4, 47).tolist():
        weights = np.array(box_weights(radius))
        assert len(weights) == 3
        assert weights.tolist() == np.float32(weights).tolist()  # so they survive the way to the device
        assert 0 <= BLUR_UNIT - (weights[0] + 2 * weights[1:].sum()) <= 1
        variance = 3 * 2 * (weights * np.arange(3) ** 2).sum() / BLUR_UNIT
        assert math.sqrt(variance) == pytest.approx(radius, rel=1e-5)


# What was drawn, packed.


def test_a_hue_of_no_steps_still_goes_through_8_bits_and_no_hue_does_not() -> None:
    pixels = noise(11, 13)
    turned = {**NOTHING, "jitter": (("hue", 0.001),)}
    hues = [pack_parameters(**drawn)[FACTORS][STAGES.index("hue")] for drawn in (turned, NOTHING)]
    assert hues == [0, NEUTRAL["hue"]]
    assert np.array_equal(distort_crop(pixels, pack_parameters(**turned)), with_pillow(pixels, turned))
    assert not np.array_equal(with_pillow(pixels, turned), pixels)
    assert np.array_equal(distort_crop(pixels, pack_parameters(**NOTHING)), pixels)


# All of them.


def batch(number: int, height: int, width: int, seed: int = 2) -> tuple[Tensor, Tensor]:
    """Crops and their parameters, one of them left as it is."""
    drawn = [NOTHING, *draws(number - 1, seed)]
    pixels = np.stack([noise(height, width, 100 * seed + index) for index in range(number)])
    return torch.from_numpy(pixels), torch.tensor([pack_parameters(**one) for one in drawn])


def one_by_one(pixels: Tensor, parameters: Tensor) -> Tensor:
    """The oracle of a batch: each crop alone."""
    crops = [distort_crop(crop, row) for crop, row in zip(pixels.numpy(), parameters.tolist(), strict=True)]
    return torch.from_numpy(normalize_levels(np.stack(crops), channel_constant(MEAN), channel_constant(STD)))


def test_a_batch_is_its_crops_one_by_one_bit_for_bit() -> None:
    pixels, parameters = batch(53, 19, 29)
    found = Distortions(MEAN, STD)(pixels, parameters)
    assert found.dtype == torch.float32
    assert torch.equal(found, one_by_one(pixels, parameters))


def test_normalisation_is_torchvisions_to_the_last_bit() -> None:
    pixels = noise(7, 11)
    expected = TF.normalize(TF.to_tensor(image(pixels)), MEAN, STD)
    for given in (pixels, pixels.astype(np.float32)):
        found = normalize_levels(given, channel_constant(MEAN), channel_constant(STD))
        assert torch.equal(torch.from_numpy(found), expected)
    parameters = torch.tensor([pack_parameters(**NOTHING)])
    assert torch.equal(Distortions(MEAN, STD)(torch.from_numpy(pixels)[None], parameters)[0], expected)


def test_views_of_equal_size_are_distorted_together_and_come_back_in_their_order() -> None:
    sizes, number = [(19, 19), (19, 19), (13, 13), (13, 13), (13, 13), (19, 19)], 5
    parts = [batch(number, *size, seed=seed) for seed, size in enumerate(sizes)]
    calls: list[tuple[int, ...]] = []
    distortions = Distortions(MEAN, STD)
    distortions.register_forward_hook(lambda module, inputs, output: calls.append(tuple(output.shape)))
    found = distortions.views([pixels for pixels, _ in parts], torch.stack([parameters for _, parameters in parts]))
    assert calls == [(10, 3, 19, 19), (15, 3, 13, 13), (5, 3, 19, 19)]
    for view, part in zip(found, parts, strict=True):
        assert torch.equal(view, one_by_one(*part))


def test_the_distortions_have_no_weights_to_save() -> None:
    assert Distortions(MEAN, STD).state_dict() == {}


def test_nothing_depends_on_a_value_so_the_device_is_never_waited_for() -> None:
    # Tensors without values: to read one, or to make a shape of one, is an error.
    distortions = Distortions(MEAN, STD).to("meta")
    pixels, parameters = (tensor.to("meta") for tensor in batch(5, 7, 11))
    assert distortions(pixels, parameters).shape == (5, 3, 7, 11)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_it_compiles_as_one_graph(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the checks of shapes are no part of a graph
    torch._dynamo.reset()
    pixels, parameters = batch(29, 11, 13)
    distortions = Distortions(MEAN, STD)
    expected = distortions(pixels, parameters)
    distortions.compile(fullgraph=True, dynamic=False, backend=backend)
    metrics = importlib.import_module("torch._inductor.metrics")
    metrics.reset()
    with importlib.import_module("torch._inductor.config").patch(fx_graph_cache=False):  # what is cached is not counted
        assert_same_pixels(distortions(pixels, parameters), expected)
    # One kernel for the stages up to the contrast, one after it, two for its mean, one for each pass of the blur and a
    # few that copy; 53 when the compiler could not join the stages.
    assert metrics.generated_kernel_count <= 20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_pixels_are_the_same() -> None:
    pixels, parameters = batch(29, 37, 41)
    distortions = Distortions(MEAN, STD)
    expected = distortions(pixels, parameters)
    assert_same_pixels(distortions.cuda()(pixels.cuda(), parameters.cuda()).cpu(), expected)


def assert_same_pixels(found: Tensor, expected: Tensor) -> None:
    """But for a pixel in a thousand: a compiler may join a product and a sum, which then are rounded once."""
    difference = (found - expected).abs() * 255 * torch.from_numpy(channel_constant(STD))
    assert difference.mean() < 1e-3

"""Crops against torchvision's: the same distributions when drawn, the same pixels when applied."""

import inspect
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pillow_distortions import distorted
from torchvision import transforms
from torchvision.transforms import functional as TF

from dino_sparo.data.augment import NUM_PARAMETERS, DeferredViews, Distortions
from dino_sparo.data.crops import (
    CropParameters,
    CropRecipe,
    MultiCropAugmentation,
    apply_crop,
    cut_crop,
    cut_crop_fast,
    pixels_in_rows,
    sample_box,
    sample_crop,
)
from dino_sparo.data.dataset import ImageDataset
from dino_sparo.data.defaults import IMAGENET_MEAN as MEAN
from dino_sparo.data.defaults import IMAGENET_STD as STD
from dino_sparo.data.loader import create_loader
from dino_sparo.data.samplers import EpochSampler, image_rng
from dino_sparo.data.scenes.images import Scenes
from dino_sparo.data.views import EvalTransform

# What facebookresearch/dino's DataAugmentationDINO asks of torchvision and Pillow, written out here once more.
RATIO = (3 / 4, 4 / 3)
FACTORS = {"brightness": (0.6, 1.4), "contrast": (0.6, 1.4), "saturation": (0.8, 1.2), "hue": (-0.1, 0.1)}
RADIUS = (0.1, 2.0)
UNDISTORTED: dict[str, Any] = {"flip": False, "jitter": (), "grayscale": False, "blur_radius": 0.0, "solarize": False}


def photograph(height: int, width: int, seed: int = 0) -> Image.Image:
    """A colourful image with smooth and rough parts, so that no two distortions of it are the same."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width]
    waves = [np.sin(rows / rng.uniform(3, 20) + columns / rng.uniform(3, 20) + i) for i in range(3)]
    pixels = 128 + 90 * np.stack(waves, axis=-1) + rng.normal(0, 20, (height, width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


@pytest.fixture
def torch_seed() -> Iterator[None]:
    """Torchvision draws from torch's global generator: seeded here, and put back afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def box_statistics(boxes: list[tuple[int, int, int, int]], height: int, width: int) -> dict[str, np.ndarray]:
    """Area share, log aspect ratio and relative position of boxes (top, left, height, width)."""
    top, left, box_height, box_width = np.array(boxes, dtype=float).T
    return {
        "area": box_height * box_width / (height * width),
        "aspect": np.log(box_width / box_height),
        "top": top / np.maximum(height - box_height, 1),
        "left": left / np.maximum(width - box_width, 1),
    }


def distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Kolmogorov and Smirnov's: the largest difference between two empirical distributions."""
    grid = np.union1d(ours, theirs)
    share_below = [np.searchsorted(np.sort(sample), grid, side="right") / len(sample) for sample in (ours, theirs)]
    return float(np.abs(share_below[0] - share_below[1]).max())


# Boxes.


@pytest.mark.usefixtures("torch_seed")
@pytest.mark.parametrize("scale", [(0.4, 1.0), (0.05, 0.4)])
@pytest.mark.parametrize(("height", "width"), [(300, 300), (211, 383), (401, 157), (61, 223)])
def test_boxes_are_distributed_as_torchvisions(height: int, width: int, scale: tuple[float, float]) -> None:
    draws = 2000
    rng = np.random.default_rng(1)
    image = Image.new("RGB", (width, height))
    ours = box_statistics([sample_box(rng, height, width, scale) for _ in range(draws)], height, width)
    drawn = [transforms.RandomResizedCrop.get_params(image, list(scale), list(RATIO)) for _ in range(draws)]
    theirs = box_statistics(drawn, height, width)
    # Two samples of one distribution are further apart than this once in ten thousand times.
    bound = math.sqrt(-math.log(1e-4 / 2) / draws)
    for name in ours:
        assert distance(ours[name], theirs[name]) < bound, name
        assert ours[name].mean() == pytest.approx(theirs[name].mean(), abs=5 * theirs[name].std() / math.sqrt(draws))
        for share in (0.1, 0.5, 0.9):
            spread = 0.05 * np.ptp(theirs[name])
            assert np.quantile(ours[name], share) == pytest.approx(np.quantile(theirs[name], share), abs=spread), name


@pytest.mark.parametrize(("height", "width"), [(1, 1), (5, 3), (13, 97), (1, 50), (50, 1), (300, 300), (17, 16)])
def test_boxes_lie_inside_the_image_and_are_never_empty(height: int, width: int) -> None:
    rng = np.random.default_rng(3)
    for scale in ((0.4, 1.0), (0.05, 0.4), (0.01, 0.02), (1.0, 1.0)):
        for _ in range(100):
            top, left, box_height, box_width = sample_box(rng, height, width, scale)
            assert 0 <= top <= height - box_height
            assert 0 <= left <= width - box_width
            assert min(box_height, box_width) >= 1


def test_where_no_box_fits_the_central_one_is_exactly_torchvisions() -> None:
    rng, four_times = np.random.default_rng(4), (4.0, 4.0)  # no box of that area fits into any image
    sizes = [*product((1, 2, 3, 5, 7, 11, 64, 97, 101, 333), repeat=2), (300, 400), (400, 300), (301, 400), (50, 1000)]
    for height, width in sizes:
        image = Image.new("RGB", (width, height))
        theirs = transforms.RandomResizedCrop.get_params(image, list(four_times), list(RATIO))
        assert sample_box(rng, height, width, four_times) == tuple(theirs), (height, width)


# The distortions drawn.


@lru_cache
def draws_of(recipe: CropRecipe, count: int = 3000, seed: int = 5) -> list[CropParameters]:
    rng = np.random.default_rng(seed)
    return [sample_crop(rng, 97, 131, recipe) for _ in range(count)]


def assert_share(count: int, draws: int, probability: float) -> None:
    """Within four and a half standard deviations of the binomial distribution."""
    bound = 4.5 * math.sqrt(probability * (1 - probability) / draws)
    assert abs(count / draws - probability) <= bound, (count / draws, probability)


def test_every_distortion_happens_as_often_as_it_should() -> None:
    """The first global crop is always blurred, the second rarely and sometimes solarised."""
    first, second, *local = MultiCropAugmentation(local_crops_number=3).recipes
    assert (first.blur_probability, first.solarize_probability) == (1.0, 0.0)
    assert (second.blur_probability, second.solarize_probability) == (0.1, 0.2)
    assert [(crop.blur_probability, crop.solarize_probability) for crop in local] == [(0.5, 0.0)] * 3
    for recipe in (first, second, local[-1]):
        drawn = draws_of(recipe)
        for count, probability in (
            (sum(crop.flip for crop in drawn), 0.5),
            (sum(bool(crop.jitter) for crop in drawn), 0.8),
            (sum(crop.grayscale for crop in drawn), 0.2),
            (sum(crop.blur_radius > 0 for crop in drawn), recipe.blur_probability),
            (sum(crop.solarize for crop in drawn), recipe.solarize_probability),
        ):
            assert_share(count, len(drawn), probability)


def test_the_distortions_are_drawn_independently_of_each_other() -> None:
    drawn = draws_of(CropRecipe(32, (0.4, 1.0), blur_probability=0.5, solarize_probability=0.2))
    flags = np.array(
        [(crop.flip, bool(crop.jitter), crop.grayscale, crop.blur_radius > 0, crop.solarize) for crop in drawn],
        dtype=float,
    )
    correlation = np.corrcoef(flags.T) - np.eye(flags.shape[1])
    assert np.abs(correlation).max() < 4.5 / math.sqrt(len(drawn))


def test_the_jitters_factors_are_uniform_over_the_references_ranges() -> None:
    jitters = [dict(crop.jitter) for crop in draws_of(CropRecipe(32, (0.4, 1.0), 0.5)) if crop.jitter]
    assert all(jitter.keys() == FACTORS.keys() for jitter in jitters)
    ideal = (np.arange(len(jitters)) + 0.5) / len(jitters)
    bound = math.sqrt(-math.log(1e-4 / 2) / 2 / len(jitters))
    for name, (low, high) in FACTORS.items():
        factors = np.array([jitter[name] for jitter in jitters])
        assert low <= factors.min() < factors.max() <= high
        assert distance(factors, low + (high - low) * ideal) < bound, name


def test_the_jitters_four_operations_come_in_every_order_equally_often() -> None:
    orders = Counter(
        tuple(name for name, _ in crop.jitter) for crop in draws_of(CropRecipe(32, (0.4, 1.0), 0.5)) if crop.jitter
    )
    assert len(orders) == math.factorial(4)
    for count in orders.values():
        assert_share(count, orders.total(), 1 / 24)


def test_the_blurs_radius_is_uniform_from_a_tenth_to_two_pixels() -> None:
    radii = np.array([crop.blur_radius for crop in draws_of(CropRecipe(32, (0.4, 1.0), blur_probability=1.0))])
    ideal = (np.arange(len(radii)) + 0.5) / len(radii)
    bound = math.sqrt(-math.log(1e-4 / 2) / 2 / len(radii))
    assert RADIUS[0] <= radii.min() < radii.max() <= RADIUS[1]
    assert distance(radii, RADIUS[0] + (RADIUS[1] - RADIUS[0]) * ideal) < bound


# The distortions applied.


def with_pillow(image: Image.Image, crop: CropParameters, size: int) -> Image.Image:
    """The pipeline that torchvision v1 and the reference run on a PIL image, operation by operation."""
    top, left, height, width = crop.box
    view = image.crop((left, top, left + width, top + height)).resize((size, size), Image.Resampling.BICUBIC)
    return distorted(view, asdict(crop))


def pixels_of_levels(crop: np.ndarray) -> np.ndarray:
    """(3, H, W) floats that hold 8-bit integers -> (H, W, 3)."""
    assert np.array_equal(crop, crop.astype(np.uint8))
    return crop.transpose(1, 2, 0)


def test_crops_equal_torchvisions_pipeline_pixel_for_pixel() -> None:
    rng = np.random.default_rng(6)
    recipe = CropRecipe(0, (0.05, 1.0), blur_probability=0.5, solarize_probability=0.3)
    seen: Counter[str] = Counter()
    for trial in range(120):
        height, width, size = int(rng.integers(9, 90)), int(rng.integers(9, 90)), int(rng.integers(5, 60))
        image = photograph(height, width, seed=trial)
        crop = sample_crop(rng, height, width, recipe)
        ours = apply_crop(image, crop, size)
        assert ours.shape == (3, size, size)
        assert np.array_equal(pixels_of_levels(ours), np.asarray(with_pillow(image, crop, size))), crop
        seen.update({"flip": crop.flip, "grayscale": crop.grayscale, "solarize": crop.solarize})
        seen.update({"blur": crop.blur_radius > 0, "jitter": bool(crop.jitter)})
    assert min(seen.values()) > 10


# Drawn once, whatever comes after.


def test_seeds_give_what_they_always_gave() -> None:
    # Recorded with the first version of `sample_crop`; a run that is resumed counts on it.
    rng = image_rng(5, 2, 7)
    recipes = small_augmentation(local_crops_number=1).recipes
    first, second, local = (sample_crop(rng, 97, 131, recipe) for recipe in recipes)
    assert [crop.box for crop in (first, second, local)] == [(0, 2, 96, 122), (17, 57, 75, 71), (9, 46, 58, 57)]
    assert [crop.flip for crop in (first, second, local)] == [False, True, False]
    assert first.blur_radius == 0.17218955045136783
    assert first.jitter == (
        ("hue", 0.020072273131127555),
        ("brightness", 0.6330962967371353),
        ("saturation", 0.9140282717375648),
        ("contrast", 1.35531776533082),
    )
    assert second.jitter[1] == ("hue", -0.0013384872873518638)
    assert local.jitter[0] == ("contrast", 0.6378331633118947)


def test_finished_and_deferred_crops_have_the_same_boxes_factors_and_order() -> None:
    image = photograph(83, 71)
    pixels = pixels_in_rows(image)
    for seed in range(20):
        rngs = [np.random.default_rng(seed) for _ in range(3)]
        finished = small_augmentation()(image, rngs[0])
        deferred = small_augmentation(defer_color=True)(image, rngs[1])
        assert isinstance(deferred, DeferredViews)
        assert rngs[0].bit_generator.state == rngs[1].bit_generator.state
        for recipe, crop, view, row in zip(small_augmentation().recipes, finished, *deferred, strict=True):
            drawn = sample_crop(rngs[2], image.height, image.width, recipe)
            assert torch.equal(row, torch.tensor(drawn.packed()))
            assert torch.equal(view, cut_crop_fast(pixels, drawn.box, recipe.size))
            levels = torch.from_numpy(apply_crop(image, drawn, recipe.size))
            assert torch.equal(crop, TF.normalize(levels / 255, MEAN, STD))


def test_deferred_crops_end_less_than_half_a_level_from_finished_ones() -> None:
    distortions, differences = Distortions(MEAN, STD), []
    for seed in range(12):
        image = photograph(140 + 11 * seed, 190 - 7 * seed, seed)
        finished = small_augmentation()(image, np.random.default_rng(seed))
        deferred = small_augmentation(defer_color=True)(image, np.random.default_rng(seed))
        assert isinstance(deferred, DeferredViews)
        views = distortions.views([view[None] for view in deferred.views], deferred.parameters[:, None])
        for ours, theirs in zip(views, finished, strict=True):
            differences.append(((ours[0] - theirs) * 255 * torch.tensor(STD)[:, None, None]).abs().mean().item())
    assert np.mean(differences) < 0.5
    assert max(differences) < 1.5


def test_the_fast_cut_shows_the_same_pixels_but_for_rounding() -> None:
    rng, differences = np.random.default_rng(17), []
    for trial in range(60):
        image = photograph(int(rng.integers(30, 200)), int(rng.integers(30, 200)), seed=trial)
        box, size = sample_box(rng, image.height, image.width, (0.05, 1.0)), int(rng.integers(8, 97))
        exact, fast = cut_crop(image, box, size), cut_crop_fast(pixels_in_rows(image), box, size)
        assert fast.shape == exact.shape == (3, size, size)
        assert fast.is_contiguous()
        differences.append(np.abs(fast.numpy().astype(int) - exact).mean())
    # Either may resize rows before columns or columns before rows, with 8 bits in between: where they do not agree,
    # every fourth pixel is a level off.
    assert np.mean(differences) < 0.05
    assert max(differences) < 0.35


@pytest.mark.parametrize("num_workers", [0, 2])
def test_deferred_crops_travel_through_the_loader_with_their_parameters(num_workers: int) -> None:
    source, augmentation = Scenes(7, image_size=40), small_augmentation(defer_color=True)
    dataset, sampler = ImageDataset(source, augmentation, seed=3), EpochSampler(7, 3, seed=3)
    sampler.set_epoch(2)
    batches = list(create_loader(dataset, sampler, num_workers=num_workers))
    assert len(batches) == 2
    for batch in batches:
        assert [view.dtype for view in batch.views] == [torch.uint8] * 5
        assert batch.parameters.shape == (5, 3, NUM_PARAMETERS)
        moved = batch.to("cpu")
        assert torch.equal(moved.parameters, batch.parameters)
        for row, index in enumerate(batch.indices.tolist()):
            alone = augmentation(source.read(index), image_rng(3, 2, index))
            assert isinstance(alone, DeferredViews)
            assert torch.equal(batch.parameters[:, row], alone.parameters)
            assert all(torch.equal(a[row], b) for a, b in zip(batch.views, alone.views, strict=True))


# All crops of an image.


def small_augmentation(**changed: Any) -> MultiCropAugmentation:
    settings = {"local_crops_number": 3, "global_crops_size": 40, "local_crops_size": 24}
    return MultiCropAugmentation(**{**settings, **changed})


def test_two_global_and_the_asked_number_of_local_crops_come_in_their_sizes() -> None:
    image = photograph(53, 71)
    for number in (0, 1, 5):
        crops = small_augmentation(local_crops_number=number)(image, np.random.default_rng(0))
        assert [tuple(crop.shape) for crop in crops] == [(3, 40, 40)] * 2 + [(3, 24, 24)] * number
        assert all(crop.dtype == torch.float32 for crop in crops)


def test_first_crops_alone_are_the_first_of_all() -> None:
    image, augmentation = photograph(53, 71), small_augmentation()
    crops, first = (each(image, np.random.default_rng(3)) for each in (augmentation, augmentation.first(2)))
    assert (len(crops), len(first)) == (5, 2)
    assert all(torch.equal(crop, alone) for crop, alone in zip(crops[:2], first, strict=True))


def test_crops_draw_from_their_generator_alone() -> None:
    image, augmentation = photograph(53, 71), small_augmentation()
    crops = []
    for seed in (0, 1):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            crops.append(augmentation(image, np.random.default_rng(13)))
            assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(*crops, strict=True))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"global_crops_scale": (0.0, 1.0)}, r"global_crops_scale=\(0.0, 1.0\).*0 < smallest <= largest <= 1"),
        ({"global_crops_scale": (0.9, 0.4)}, r"global_crops_scale=\(0.9, 0.4\).*smallest <= largest"),
        ({"local_crops_scale": (0.05, 1.5)}, r"local_crops_scale=\(0.05, 1.5\).*largest <= 1"),
        ({"local_crops_scale": (math.nan, 0.4)}, r"local_crops_scale=\(nan, 0.4\)"),
        ({"global_crops_size": 0}, "global_crops_size=0, .*give positive sizes"),
        ({"local_crops_size": -8}, "local_crops_size=-8, .*give positive sizes"),
        ({"local_crops_number": -1}, "local_crops_number=-1; .*0 or more crops"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiCropAugmentation(**changed)


def test_a_range_of_one_number_is_refused() -> None:
    unchecked = inspect.unwrap(MultiCropAugmentation.__init__)  # as users have it, without the checks of types of tests
    with pytest.raises(ValueError, match=r"global_crops_scale=\(0.4,\) is not a range of areas"):
        unchecked(object.__new__(MultiCropAugmentation), global_crops_scale=(0.4,))


def test_settings_at_the_end_of_their_range_are_taken() -> None:
    scales = {"global_crops_scale": (1.0, 1.0), "local_crops_scale": (1e-9, 1e-9)}
    smallest = small_augmentation(**scales, global_crops_size=1, local_crops_size=1, local_crops_number=1)
    crops = smallest(photograph(53, 71), np.random.default_rng(0))
    assert [tuple(crop.shape) for crop in crops] == [(3, 1, 1)] * 3


def test_the_papers_crops_are_the_defaults() -> None:
    augmentation = MultiCropAugmentation()
    assert [(recipe.size, recipe.scale) for recipe in augmentation.recipes] == (
        [(224, (0.4, 1.0))] * 2 + [(96, (0.05, 0.4))] * 8
    )
    assert not augmentation.defer_color
    assert augmentation.mean.flatten().tolist() == pytest.approx(MEAN)
    assert augmentation.std.flatten().tolist() == pytest.approx(STD)
    assert (CropRecipe(1, (0.1, 0.2), 0.3).solarize_probability, EvalTransform().exact) == (0.0, True)


class Draws(np.random.Generator):
    """A generator that gives the numbers it is told, and the highest integer."""

    def __init__(self, *numbers: float) -> None:
        super().__init__(np.random.PCG64(0))
        self.numbers = list(numbers)

    def random(self) -> float:
        return self.numbers.pop(0)

    def integers(self, low: int, high: int, endpoint: bool) -> int:
        assert endpoint
        return high


@pytest.mark.parametrize(("height", "width"), [(4, 3), (3, 4)])
def test_a_box_that_just_fits_is_taken(height: int, width: int) -> None:
    # Of the ratios from 3/4 to 4/3 the last and the first: the box is the image, to the pixel.
    draws = Draws(1.0, 1.0 if width > height else 0.0)
    assert sample_box(draws, height, width, (1.0, 1.0)) == (0, 0, height, width)
    assert draws.numbers == []


def test_a_box_without_pixels_is_drawn_again() -> None:
    draws = Draws(0.0, 0.5, 1.0, 0.5)  # an area of a hundredth pixel, then of 4 pixels
    assert sample_box(draws, 2, 2, (0.0025, 1.0)) == (0, 0, 2, 2)


def test_a_box_of_one_pixel_is_taken() -> None:
    assert sample_box(Draws(0.0, 0.5), 2, 2, (0.25, 1.0)) == (1, 1, 1, 1)


def test_ten_draws_are_made_before_the_central_box_is_taken() -> None:
    draws = Draws(*[0.5] * 100)
    assert sample_box(draws, 6, 6, (4.0, 4.0)) == (0, 0, 6, 6)
    assert len(draws.numbers) == 100 - 2 * 10


# Evaluation.


@pytest.mark.parametrize(("height", "width"), [(67, 101), (133, 58), (40, 40), (37, 37), (257, 31)])
@pytest.mark.parametrize("img_size", [224, 96, 32, 37])
def test_the_evaluations_view_equals_torchvisions(height: int, width: int, img_size: int) -> None:
    mean, std = (0.4, 0.5, 0.6), (0.3, 0.2, 0.1)
    image = photograph(height, width)
    pipeline = transforms.Compose(
        [
            transforms.Resize(round(img_size * 256 / 224), interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(img_size),
            transforms.ToTensor(),
            transforms.Normalize(mean, std),
        ]
    )
    (view,) = EvalTransform(img_size, mean, std)(image)
    assert view.shape == (3, img_size, img_size)
    assert torch.equal(view, pipeline(image))


@pytest.mark.parametrize(("height", "width"), [(67, 101), (133, 58), (40, 40), (37, 37), (257, 31)])
def test_the_evaluations_fast_view_shows_the_same_pixels_but_for_rounding(height: int, width: int) -> None:
    image = photograph(height, width)
    (exact,), (fast,) = EvalTransform(32)(image), EvalTransform(32, exact=False)(image)
    assert exact.shape == fast.shape
    difference = (exact - fast).abs() * 255 * torch.tensor(STD)[:, None, None]
    assert difference.mean() < 0.35
    assert difference.max() < 8


@pytest.mark.parametrize("exact", [True, False])
def test_the_view_of_a_line_of_pixels_needs_no_memory_for_its_ends(exact: bool) -> None:
    """The bug: of 17 kB of JPEG, 65,500 x 1 px, a picture of 16.8 million x 256 px was made."""
    image = Image.fromarray(np.arange(60_000 * 3, dtype=np.uint32).astype(np.uint8).reshape(60_000, 1, 3))
    (view,) = EvalTransform(16, exact=exact)(image)
    assert view.shape == (3, 16, 16)
    (expected,) = EvalTransform(16, exact=exact)(image.crop((0, 29_950, 1, 30_050)))
    assert (view - expected).abs().max() < 0.05


def test_the_evaluations_view_draws_nothing() -> None:
    rng, image = np.random.default_rng(16), photograph(53, 71)
    before = rng.bit_generator.state
    (with_rng,), (without,) = EvalTransform(32)(image, rng), EvalTransform(32)(image)
    assert torch.equal(with_rng, without)
    assert rng.bit_generator.state == before

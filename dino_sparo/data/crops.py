"""One image -> S crops: two global ones and S - 2 local ones, with DINO's distortions.

`sample_crop` draws the random parameters of a crop; then the crop is cut out and distorted. So a crop is a function
of the image and the random generator. It is distorted here, by `apply_crop`, or on the device, by `augment.Distortions`
from the same parameters.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Shaped
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

from dino_sparo.data.augment import DeferredViews, channel_constant, distort_crop, normalize_levels, pack_parameters
from dino_sparo.data.channels import WHITE
from dino_sparo.data.defaults import IMAGENET_MEAN, IMAGENET_STD
from dino_sparo.runtime.faults import UserError

# The distortions of DINO (facebookresearch/dino, main_dino.py, DataAugmentationDINO; BYOL, appendix B).
FLIP_PROBABILITY = 0.5
JITTER_PROBABILITY = 0.8
JITTER_STRENGTH = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}
GRAYSCALE_PROBABILITY = 0.2
BLUR_RADIUS = (0.1, 2.0)  # pixels, of the resized crop
ASPECT_RATIO = (3 / 4, 4 / 3)
LOG_ASPECT_RATIO = tuple(np.log(ASPECT_RATIO).tolist())
CROP_ATTEMPTS = 10


@dataclass(frozen=True)
class CropRecipe:
    """Random parameters of one kind of crop.

    Attributes:
        size: side of the crop in pixels.
        scale: smallest and largest share of the image's area.
        blur_probability: how often it is blurred.
        solarize_probability: how often its bright pixels are inverted.
    """

    size: int
    scale: tuple[float, float]
    blur_probability: float
    solarize_probability: float = 0.0


@dataclass(frozen=True)
class CropParameters:
    """One draw from a `CropRecipe`, for one image; the distortions are listed in the order in which they are applied.

    Attributes:
        box: top, left, height, width in pixels of the image.
        flip: mirror left and right.
        jitter: (operation, factor) pairs in their random order; empty if the crop keeps its colours.
        grayscale: drop the colours.
        blur_radius: standard deviation of the blur in pixels, 0 for none.
        solarize: invert bright pixels.
    """

    box: tuple[int, int, int, int]
    flip: bool
    jitter: tuple[tuple[str, float], ...]
    grayscale: bool
    blur_radius: float
    solarize: bool

    def packed(self) -> list[float]:
        """The distortions as the numbers that `data/augment.py` computes with."""
        return pack_parameters(self.flip, self.jitter, self.grayscale, self.blur_radius, self.solarize)

    def without_colours(self, in_chans: int) -> "CropParameters":
        """The same draw without hue, saturation and gray, for images of other than three channels.

        Solarisation stays for one channel alone: half of white means nothing in a stack of sensors.
        """
        jitter = tuple((name, factor) for name, factor in self.jitter if name in ("brightness", "contrast"))
        return replace(self, jitter=jitter, grayscale=False, solarize=self.solarize and in_chans == 1)


def require_areas(name: str, scale: Sequence[float]) -> None:
    """Refuse smallest and largest shares of an image's area that are not an interval within (0, 1]."""
    if len(scale) != 2 or not 0 < scale[0] <= scale[1] <= 1:
        raise UserError(
            f"{name}={tuple(scale)} is not a range of areas; give two numbers with 0 < smallest <= largest <= 1"
        )


def sample_box(
    rng: np.random.Generator, height: int, width: int, scale: tuple[float, float]
) -> tuple[int, int, int, int]:
    """Draw a box of random area and aspect ratio, as torchvision's RandomResizedCrop does.

    The area is uniform in `scale` times the image's, the aspect ratio log-uniform in 3/4 to 4/3; a box that does not
    fit is drawn again, and after ten failures the largest central box of a valid aspect ratio is taken.

    Returns:
        Top, left, height and width in pixels.
    """
    for _ in range(CROP_ATTEMPTS):
        area = height * width * _uniform(rng, *scale)
        ratio = math.exp(_uniform(rng, *LOG_ASPECT_RATIO))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            top = int(rng.integers(0, height - box_height, endpoint=True))
            left = int(rng.integers(0, width - box_width, endpoint=True))
            return top, left, box_height, box_width
    ratio = min(max(width / height, ASPECT_RATIO[0]), ASPECT_RATIO[1])
    box_width, box_height = min(width, round(height * ratio)), min(height, round(width / ratio))
    return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


def _uniform(rng: np.random.Generator, low: float, high: float) -> float:
    """Same as `rng.uniform(low, high)`, four times faster."""
    return low + (high - low) * rng.random()


def sample_crop(rng: np.random.Generator, height: int, width: int, recipe: CropRecipe) -> CropParameters:
    """Draw the parameters of one crop of an image of `height` x `width` pixels."""
    box = sample_box(rng, height, width, recipe.scale)
    flip = rng.random() < FLIP_PROBABILITY
    jitter: tuple[tuple[str, float], ...] = ()
    if rng.random() < JITTER_PROBABILITY:
        # Hue turns by a share of the colour circle; the others scale by a factor around one.
        factors = {
            name: _uniform(rng, -strength, strength) + (name != "hue") for name, strength in JITTER_STRENGTH.items()
        }
        names = list(factors)
        jitter = tuple((names[i], factors[names[i]]) for i in rng.permutation(len(names)).tolist())
    grayscale = rng.random() < GRAYSCALE_PROBABILITY
    blur_radius = _uniform(rng, *BLUR_RADIUS) if rng.random() < recipe.blur_probability else 0.0
    solarize = rng.random() < recipe.solarize_probability
    return CropParameters(box, flip, jitter, grayscale, blur_radius, solarize)


def cut_crop(image: Image.Image, box: tuple[int, int, int, int], size: int) -> Shaped[np.ndarray, "C size size"]:
    """Cut out and resize (bicubic), pixel for pixel as torchvision does with PIL images."""
    return pixels_of(TF.resized_crop(image, *box, [size, size], InterpolationMode.BICUBIC))


def cut_crop_fast(
    pixels: Shaped[Tensor, "C H W"], box: tuple[int, int, int, int], size: int
) -> Shaped[Tensor, "C size size"]:
    """`cut_crop` by torch's resize: three times as fast, and about one pixel in fifty differs by one level.

    At hard edges in boxes taller than wide more pixels differ: Pillow resizes their columns first.

    Args:
        pixels: of the image, in the layout of `pixels_in_rows`; any other layout is slow.
        box: top, left, height, width in pixels of the image.
        size: side of the result in pixels.
    """
    top, left, height, width = box
    return resize_fast(pixels[:, top : top + height, left : left + width], [size, size])


def resize_fast(pixels: Shaped[Tensor, "C H W"], sides: list[int]) -> Shaped[Tensor, "C _ _"]:
    """Bicubic, by torch; see `cut_crop_fast`."""
    resized = F.interpolate(pixels[None], size=sides, mode="bicubic", antialias=True)[0]
    return resized if resized.dtype == torch.uint8 else resized.clip(0, WHITE)


def pixels_of(image: Image.Image) -> Shaped[np.ndarray, "C H W"]:
    """RGB or `ChannelImage` -> its pixels, one channel after the other."""
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def pixels_in_rows(image: Image.Image) -> Shaped[Tensor, "C H W"]:
    """RGB or `ChannelImage` -> a view of its pixels as they lie in a file: row by row, the channels side by side."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def apply_crop(image: Image.Image, parameters: CropParameters, size: int) -> Float[np.ndarray, "C size size"]:
    """Cut, resize (bicubic) and distort an image, RGB as torchvision does with PIL images; levels from 0 to 255."""
    return distort_crop(cut_crop(image, parameters.box, size), parameters.packed())


def normalized_tensor(image: Image.Image, mean: tuple[float, ...], std: tuple[float, ...]) -> Float[Tensor, "C H W"]:
    """RGB or `ChannelImage` -> (C, H, W) floats, (pixel / 255 - mean) / std."""
    return torch.from_numpy(normalize_levels(pixels_of(image), channel_constant(mean), channel_constant(std)))


class MultiCropAugmentation:
    """Image -> [global 1, global 2, local 1, ...]: the views that student and teacher compare.

    The first global crop is always blurred, the second rarely blurred and sometimes solarised, local crops blurred half
    of the time; all may be flipped, colour-jittered and turned grey. Source: DINO, section 3.2, implementation details.
    With other than three means, colours are no longer distorted: see `CropParameters.without_colours`.

    Args:
        global_crops_scale: smallest and largest share of the image's area in a global crop.
        local_crops_scale: smallest and largest share in a local crop.
        local_crops_number: S - 2; 0 trains on the two global crops alone.
        global_crops_size: side of a global crop in pixels.
        local_crops_size: side of a local crop in pixels.
        mean: per channel, of pixels in 0..1.
        std: per channel.
        defer_color: return crops resized by torch, and the numbers by which `augment.Distortions` distorts them on the
            device. False returns finished crops, equal to those of torchvision's pipeline on PIL images.

    Raises:
        ValueError: a scale that is not an interval within (0, 1], or a size or number out of range.
    """

    def __init__(
        self,
        global_crops_scale: tuple[float, float] = (0.4, 1.0),
        local_crops_scale: tuple[float, float] = (0.05, 0.4),
        local_crops_number: int = 8,
        global_crops_size: int = 224,
        local_crops_size: int = 96,
        mean: tuple[float, ...] = IMAGENET_MEAN,
        std: tuple[float, ...] = IMAGENET_STD,
        defer_color: bool = False,
    ) -> None:
        require_areas("global_crops_scale", global_crops_scale)
        require_areas("local_crops_scale", local_crops_scale)
        if min(global_crops_size, local_crops_size, local_crops_number + 1) < 1:
            raise UserError(
                f"global_crops_size={global_crops_size}, local_crops_size={local_crops_size}, local_crops_number="
                f"{local_crops_number}; give positive sizes in pixels, multiples of the patch size, and 0 or more crops"
            )
        self.recipes = [
            CropRecipe(global_crops_size, global_crops_scale, blur_probability=1.0),
            CropRecipe(global_crops_size, global_crops_scale, blur_probability=0.1, solarize_probability=0.2),
            *[CropRecipe(local_crops_size, local_crops_scale, blur_probability=0.5)] * local_crops_number,
        ]
        self.mean, self.std = channel_constant(mean), channel_constant(std)
        self.defer_color = defer_color

    def first(self, number: int) -> "MultiCropAugmentation":
        """An augmentation that makes only the first crops; their random numbers are drawn first."""
        shorter = copy.copy(self)
        shorter.recipes = self.recipes[:number]
        return shorter

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> list[Float[Tensor, "C _ _"]] | DeferredViews:
        """The S crops of an image, drawn with `rng`: normalised, or as they are with their distortions."""
        drawn = [sample_crop(rng, image.height, image.width, recipe) for recipe in self.recipes]
        if len(self.mean) != 3:
            drawn = [crop.without_colours(len(self.mean)) for crop in drawn]
        sizes = [recipe.size for recipe in self.recipes]
        if self.defer_color:
            pixels = pixels_in_rows(image)
            crops = [cut_crop_fast(pixels, crop.box, size) for crop, size in zip(drawn, sizes, strict=True)]
            parameters = np.array([crop.packed() for crop in drawn], dtype=np.float32)
            return DeferredViews(crops, torch.from_numpy(parameters))
        finished = [apply_crop(image, crop, size) for crop, size in zip(drawn, sizes, strict=True)]
        return [torch.from_numpy(normalize_levels(levels, self.mean, self.std)) for levels in finished]

"""Crops of pixels and the parameters drawn for them -> distorted, normalised crops.

Mirror, colour jitter, gray, blur, solarise, normalise. Each distortion of RGB computes what Pillow computes: it rounds
to 8 bits after every operation and uses Pillow's fixed-point weights. Crops of other than three channels are distorted
without rounding, since their levels have fractions; contrast then is about each channel's own mean.

`pack_parameters` turns a draw into numbers. One of two functions applies them:

    distort_crop   one crop on the CPU, only the distortions that were drawn; the pixels are Pillow's, bit for bit
    Distortions    a batch on any device. Every distortion runs for every crop, with neutral numbers where it was not
                   drawn. No branch and no shape depends on a value, so the device never waits and the code compiles.

Levels of RGB are floats that hold integers from 0 to 255. Integers up to 2^24 are exact in fp32 on every device.
"""

import itertools
import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Shaped, UInt8
from PIL import Image
from torch import Tensor, nn

Array = TypeVar("Array", Tensor, np.ndarray)

# The jitter's operations come in any order. Each takes the next stage of its kind, so this list has room for every
# order. A blend is brightness or saturation. Only the contrast needs more than one pixel: the mean of the crop.
# A compiler fuses the stages before it, and the stages after it.
STAGES = ("blend", "blend", "hue", "blend", "blend", "contrast", "blend", "blend", "hue", "blend", "blend")
NEUTRAL = {"blend": 1.0, "contrast": 1.0, "hue": -1.0}  # kind -> the factor with which a stage changes nothing
KINDS = {"brightness": "blend", "saturation": "blend", "contrast": "contrast", "hue": "hue"}  # of the operations

# Columns of the parameters. Each stage has a factor (the hue: steps), and 1 if the base of its blend is gray, else 0.
FLIP, FACTORS, OF_GRAY, GRAYSCALE, BLUR, SOLARIZE = 0, slice(1, 12), slice(12, 23), 23, slice(24, 27), 27
NUM_PARAMETERS = 28

LUMA = (19595, 38470, 7471)  # red, green, blue; of 2^16
SOLARIZE_THRESHOLD = 128
BLUR_PASSES = 3
BLUR_UNIT = 1 << 24  # the sum of a box's weights
BLUR_TAPS = 3  # weights of a box by distance: the pixel's own, its neighbours', and theirs
NO_BLUR = (float(BLUR_UNIT), 0.0, 0.0)


class DeferredViews(NamedTuple):
    """The S crops of one image, as 8-bit RGB or float levels (C, H, W), and the parameters for `Distortions`."""

    views: list[Shaped[Tensor, "C _ _"]]
    parameters: Float[Tensor, "S _"]


def pack_parameters(
    flip: bool, jitter: Sequence[tuple[str, float]], grayscale: bool, blur_radius: float, solarize: bool
) -> list[float]:
    """One draw -> the `NUM_PARAMETERS` numbers of the distortions; all but the factors are exact in fp32.

    The arguments are the attributes of `crops.CropParameters`.
    """
    factors, of_gray, stage = [NEUTRAL[kind] for kind in STAGES], [0.0] * len(STAGES), 0
    for name, factor in jitter:
        stage = STAGES.index(KINDS[name], stage)
        factors[stage] = float(int(factor * 255) % 256) if name == "hue" else factor
        of_gray[stage] = float(name == "saturation")
        stage += 1
    weights = box_weights(blur_radius) if blur_radius else NO_BLUR
    return [float(flip), *factors, *of_gray, float(grayscale), *weights, float(solarize)]


def box_weights(radius: float) -> tuple[float, ...]:
    """The weights of a box filter by distance from its middle; three such filters are Pillow's GaussianBlur(radius).

        L = sqrt(12 radius^2 / 3 + 1),  l = floor((L - 1) / 2)

    The box of length L has the l nearest pixels on each side whole, and a share a of the next pixel on each side.

    Source: Gwosdek et al., "Theoretical foundations of Gaussian convolution by extended box filtering"; rounded to fp32
    where Pillow's BoxBlur.c rounds.

    Returns:
        `BLUR_TAPS` integers, in units of 1 / `BLUR_UNIT`, which hold radii below 2.45.
    """
    # Every operand is np.float32: with Python's numbers some versions of numpy compute in float64.
    one, two, three, six, unit = (np.float32(number) for number in (1, 2, 3, 6, BLUR_UNIT))
    variance = np.float32(radius) * np.float32(radius) / np.float32(BLUR_PASSES)
    whole = math.floor((float(np.float32(math.sqrt(12.0 * float(variance) + 1.0))) - 1.0) / 2.0)
    length = np.float32(whole)
    next_length = length + one
    share = (two * length + one) * (length * next_length - three * variance)
    share /= six * (variance - next_length * next_length)
    weight = int(unit / ((length + share) * two + one))
    edge = (BLUR_UNIT - (2 * whole + 1) * weight) // 2
    return (*[float(weight)] * (whole + 1), float(edge), *[0.0] * (BLUR_TAPS - 2 - whole))


# The distortions, on levels (..., C, H, W). Factors and weights are numbers, or arrays that broadcast.


def gray_levels(channels: Sequence[Float[Array, "*B 1 H W"]]) -> Float[Array, "*B 1 H W"]:
    """The luma of ITU-R 601-2, in Pillow's fixed point: all integers below 2^24."""
    red, green, blue = channels
    luma = red * LUMA[0]
    luma += green * LUMA[1]
    luma += blue * LUMA[2]
    luma += 1 << 15
    luma *= 2.0**-16
    return _library(luma).floor(luma, out=luma)


def mean_level(gray: Float[Array, "*B 1 H W"]) -> Float[Array, "*B 1 1 1"]:
    """The mean of a crop, rounded to the nearest integer; exact for crops of any size."""
    number = gray.shape[-2] * gray.shape[-1]
    total = _cast(gray.sum(-1), "int64").sum(-1)
    return _cast((2 * total + number) // (2 * number), "float32")[..., None, None]


def blend(
    levels: Float[Array, "*B C H W"], base: Array | float, factor: Array | float, is_8_bit: bool = True
) -> Float[Array, "*B C H W"]:
    """Base + factor (levels - base), clipped; with `is_8_bit` rounded down.

    The base is black for brightness, the mean for contrast and the pixel's gray for saturation.
    """
    library = _library(levels)
    blended = levels - base
    blended *= factor
    blended += base
    blended = library.clip(blended, 0, 255, out=blended)
    return library.floor(blended, out=blended) if is_8_bit else blended


def shift_hue(
    channels: Sequence[Float[Array, "*B 1 H W"]], steps: Array | int, hues: UInt8[Array, "261121"]
) -> list[Float[Array, "*B 1 H W"]]:
    """Convert RGB to 8-bit hue, saturation and value, turn the hue, and convert back.

        s = floor(255 (v - min) / v),   H = 6 hue,   out = v - round(v s w / 255^2),
        w = 0 where a channel has the value v, 255 where it is lowest, and falls and rises over 255 steps of H between

    Pillow divides the circle into 255 hues, so H goes from 0 to 1530. All numbers are integers; w / 255 is the weight
    of colorsys.hsv_to_rgb. 256 `steps` turn the hue once around the circle; `hues` is the `hue_table`.
    """
    red, green, blue = channels
    library = _library(red)
    value = library.maximum(library.maximum(red, green), blue)
    amount = value - library.minimum(library.minimum(red, green), blue)
    amount *= 255
    amount += 0.25  # changes no quotient of integers, and protects against a device that divides approximately
    amount /= library.clip(value, 1, 255)
    amount = library.floor(amount, out=amount)
    amount *= value
    # (red - green, green - blue), each from -255 to 255, as a row and a column of the table.
    index = red * 511
    index -= green * 510
    index -= blue
    index += 255 * 512
    angle = _cast(library.take(hues, _cast(index, "int64")), "int32")
    angle += steps
    angle &= 255
    angle = _cast(angle, "float32")
    angle *= 6
    # Distance of the angle from a channel's middle: red lowest there, green and blue highest.
    distances = 510 - abs(angle - 765), abs(angle - 510) - 255, abs(angle - 1020) - 255
    return [value - _rounded_share(library.clip(distance, 0, 255, out=distance), amount) for distance in distances]


def _rounded_share(weight: Array, amount: Array) -> Array:
    weight *= amount
    weight += 255 * 255 // 2
    weight /= 255 * 255
    return _library(weight).floor(weight, out=weight)


@cache
def hue_table() -> UInt8[np.ndarray, "261121"]:
    """Pillow's 8-bit hue by the differences (red - green, green - blue); it depends on nothing else."""
    red_green, green_blue = np.mgrid[-255:256, -255:256]
    colors = np.stack((red_green + green_blue, green_blue, np.zeros_like(green_blue)), axis=-1)
    colors -= colors.min(axis=-1, keepdims=True)
    # Entries of differences that no colour has are arbitrary.
    return np.asarray(Image.fromarray((colors & 255).astype(np.uint8)).convert("HSV"))[..., 0].flatten()


def blur(
    levels: Float[Array, "*B C H W"], weights: Sequence[Array | int], is_8_bit: bool = True
) -> Float[Array, "*B C H W"]:
    """Three box filters along the rows, then three along the columns; beyond the border the border's pixels repeat.

    The weights come from `box_weights`, whose zeros at the end may be omitted. `is_8_bit` rounds as Pillow does.
    """
    # Centered on zero, so that a product with a weight fits into 32 bits.
    centered = _cast(levels - 128, "int32") if is_8_bit else levels - 128
    for _ in range(2):
        centered = _boxes(_transposed(centered), weights)
    blurred = _cast(centered, "float32")
    blurred += 128
    return blurred


def _boxes(centered: Shaped[Array, "*B C H W"], weights: Sequence[Any]) -> Shaped[Array, "*B C H W"]:
    """Box filters along the columns, of integers each rounded to 8 bits.

    Pillow's fixed-point weights sum to 2^24 or one less. For levels centered on zero that one costs 128, which the
    rounding adds back.
    """
    boxed: Any = centered
    reach, height = len(weights) - 1, boxed.shape[-2]
    rounding = (2 * sum(weights[1:]) + weights[0] - BLUR_UNIT) * 128 + BLUR_UNIT // 2
    for _ in range(BLUR_PASSES):
        padded = _padded(boxed, reach)
        boxed = boxed * weights[0]
        for distance in range(1, reach + 1):
            above, below = reach - distance, reach + distance
            both = padded[..., above : above + height, :] + padded[..., below : below + height, :]
            both *= weights[distance]
            boxed += both
        if "int" in str(boxed.dtype):
            boxed += rounding
            boxed >>= 24
        else:
            boxed *= 1 / BLUR_UNIT
    return boxed


def solarize_levels(levels: Float[Array, "*B C H W"]) -> Float[Array, "*B C H W"]:
    """Invert levels at or above the threshold."""
    return _library(levels).where(levels >= SOLARIZE_THRESHOLD, 255 - levels, levels)


def normalize_levels(levels: Shaped[Array, "*B C H W"], mean: Array, std: Array) -> Float[Array, "*B C H W"]:
    """(levels / 255 - mean) / std, in the order of torchvision's ToTensor and Normalize and so with their rounding."""
    normalized = _cast(levels, "float32") / 255
    normalized -= mean
    normalized /= std
    return normalized


def _padded(levels: Any, rows: int) -> Any:
    """The levels with the first and the last row repeated `rows` times."""
    if isinstance(levels, np.ndarray):
        return np.concatenate([levels[..., :1, :]] * rows + [levels] + [levels[..., -1:, :]] * rows, -2)
    # An index: a compiler fuses it with the next operation, whereas a concatenation goes through memory.
    height = levels.shape[-2]
    return levels[..., torch.arange(-rows, height + rows, device=levels.device).clip(0, height - 1), :]


def _library(array: Any) -> Any:
    """The module for this array, numpy or torch; numpy calls a function in a third of torch's time."""
    return np if isinstance(array, np.ndarray) else torch


def _cast(array: Array, kind: str) -> Array:
    return array.astype(kind, copy=False) if isinstance(array, np.ndarray) else array.to(getattr(torch, kind))


def _transposed(array: Array) -> Array:
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array.swapaxes(-2, -1))
    return array.transpose(-2, -1).contiguous()


def channel_constant(values: Sequence[float]) -> Float[np.ndarray, "C 1 1"]:
    """One number per channel, in a shape that broadcasts over a crop."""
    return np.array(values, dtype=np.float32)[:, None, None]


def distort_crop(pixels: Shaped[np.ndarray, "C H W"], parameters: Sequence[float]) -> Float[np.ndarray, "C H W"]:
    """Distort one crop by numbers from `pack_parameters`, RGB pixel for pixel as Pillow; levels are not normalised."""
    is_rgb = len(pixels) == 3
    levels = (pixels[..., ::-1] if parameters[FLIP] else pixels).astype(np.float32)
    for kind, factor, of_gray in zip(STAGES, parameters[FACTORS], parameters[OF_GRAY], strict=True):
        if factor == NEUTRAL[kind]:
            continue
        if kind == "hue":
            levels = np.concatenate(shift_hue(np.split(levels, 3), int(factor), hue_table()))
        elif kind == "contrast":
            mean = mean_level(gray_levels(np.split(levels, 3))) if is_rgb else levels.mean((-2, -1), keepdims=True)
            levels = blend(levels, mean, factor, is_rgb)
        else:
            levels = blend(levels, gray_levels(np.split(levels, 3)) if of_gray else 0.0, factor, is_rgb)
    if parameters[GRAYSCALE]:
        levels = gray_levels(np.split(levels, 3))
    weights = [int(weight) for weight in parameters[BLUR] if weight]
    if len(weights) > 1:
        levels = blur(levels, weights, is_rgb)
    if parameters[SOLARIZE]:
        levels = solarize_levels(levels)
    return np.repeat(levels, 3, axis=0) if is_rgb and len(levels) == 1 else levels


class Distortions(nn.Module):
    """A batch of crops and their parameters -> the batch distorted and normalised by `mean` and `std`."""

    mean: Tensor
    std: Tensor
    hues: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        for name, constant in (("mean", channel_constant(mean)), ("std", channel_constant(std)), ("hues", hue_table())):
            self.register_buffer(name, torch.from_numpy(constant), persistent=False)

    def forward(self, pixels: Shaped[Tensor, "B C H W"], parameters: Float[Tensor, "B _"]) -> Float[Tensor, "B C H W"]:
        """Distort every crop by its own parameters, (B, NUM_PARAMETERS) on the same device."""
        column = parameters[:, :, None, None, None].unbind(1)
        is_rgb = pixels.shape[1] == 3
        levels = torch.where(column[FLIP] > 0, pixels.flip(-1), pixels).to(torch.float32)
        levels = self._colours(levels, column) if is_rgb else self._brightness_and_contrast(levels, column)
        levels = blur(levels, [weight.to(torch.int32) for weight in column[BLUR]], is_rgb)
        levels = torch.where(column[SOLARIZE] > 0, solarize_levels(levels), levels)
        return normalize_levels(levels, self.mean, self.std)

    def _colours(self, levels: Float[Tensor, "B 3 H W"], column: Sequence[Tensor]) -> Float[Tensor, "B 3 H W"]:
        """Jitter and gray."""
        # Separate channels have one shape, so a compiler fuses the stages up to the contrast, and those after it.
        channels = list(levels.split(1, dim=1))
        for kind, factor, of_gray in zip(STAGES, column[FACTORS], column[OF_GRAY], strict=True):
            if kind == "hue":
                turned = shift_hue(channels, factor.to(torch.int32), self.hues)
                unused = factor == NEUTRAL["hue"]
                channels = [torch.where(unused, old, new) for old, new in zip(channels, turned, strict=True)]
            else:
                gray = gray_levels(channels)
                base = mean_level(gray) if kind == "contrast" else of_gray * gray
                channels = [blend(channel, base, factor) for channel in channels]
        gray = gray_levels(channels)
        return torch.cat([torch.where(column[GRAYSCALE] > 0, gray, channel) for channel in channels], dim=1)

    def _brightness_and_contrast(
        self, levels: Float[Tensor, "B C H W"], column: Sequence[Tensor]
    ) -> Float[Tensor, "B C H W"]:
        """The jitter of channels that are not colours."""
        for kind, factor in zip(STAGES, column[FACTORS], strict=True):
            if kind != "hue":
                base = levels.mean((-2, -1), keepdim=True) if kind == "contrast" else 0.0
                levels = blend(levels, base, factor, is_8_bit=False)
        return levels

    def views(
        self, views: Sequence[Shaped[Tensor, "B C _ _"]], parameters: Float[Tensor, "S B _"]
    ) -> list[Float[Tensor, "B C _ _"]]:
        """The S crops of a batch; neighbours of equal size are distorted together."""
        crops_so_far: list[Tensor] = []
        for _, group in itertools.groupby(views, key=lambda view: view.shape):
            crops = list(group)
            crop_parameters = parameters[len(crops_so_far) : len(crops_so_far) + len(crops)].flatten(0, 1)
            crops_so_far += self(torch.cat(crops), crop_parameters).chunk(len(crops))
        return crops_so_far

"""Image -> the view that a trained encoder sees: DINO's, CLIP's, and the whole patches of attention maps.

A figure shows the same part of the original at the figure's own size (`view_pixels`). The part is a box in the
original's coordinates, so that a patch of a map lies exactly over the pixels it was made from.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

from dino_sparo.data.augment import channel_constant, normalize_levels
from dino_sparo.data.channels import picture_of
from dino_sparo.data.crops import normalized_tensor, pixels_in_rows, pixels_of, resize_fast
from dino_sparo.data.defaults import IMAGENET_MEAN, IMAGENET_STD, MAX_VALUE
from dino_sparo.data.sources.decode import to_image
from dino_sparo.runtime.faults import UserError

BICUBIC = InterpolationMode.BICUBIC
# The evaluation protocol of ImageNet: the short side to 256, of which the central 224 are seen.
RESIZE_RATIO = 256 / 224
MAX_ASPECT = 20  # of an image that is resized for a view
# Self-attention among this number of patches takes about 2 GB per image; more is usually a slip of --image_size.
MAX_PATCHES = 8_192


class View(NamedTuple):
    """A part of an image, and the size at which the encoder sees it.

    Attributes:
        box: left, top, right, bottom in pixels of the image, with fractions.
        height: pixels, a multiple of the patch size, like `width`.
    """

    box: tuple[float, float, float, float]
    height: int
    width: int


def view_pixels(
    image: Image.Image, view: View, height: int, channels: Sequence[int] = ()
) -> UInt8[np.ndarray, "height _ 3"]:
    """The part of an image that a view covers, `height` pixels high; `channels` as in `picture_of`."""
    width = max(1, round(height * view.width / view.height))
    return rgb_pixels(image.resize((width, height), Image.Resampling.LANCZOS, box=view.box), channels)


def rgb_pixels(image: Image.Image, channels: Sequence[int] = ()) -> UInt8[np.ndarray, "H W 3"]:
    """An RGB image as it is; a `ChannelImage`, or some channels of any image, by `picture_of`."""
    is_rgb = image.mode == "RGB" and not channels
    return np.asarray(image) if is_rgb else picture_of(np.asarray(image), channels)


def without_far_ends(image: Image.Image) -> Image.Image:
    """The middle of an image whose long side is more than `MAX_ASPECT` times the short one.

    A central square shows no more of it, and resized as a whole such an image may take all memory.
    """
    most = MAX_ASPECT * min(image.size)
    if max(image.size) <= most:
        return image
    left, top = ((side - most) // 2 if side > most else 0 for side in image.size)
    return image.crop((left, top, left + min(image.width, most), top + min(image.height, most)))


class EvalTransform:
    """Image -> one central view: the short side resized, the middle cut out, normalised.

    Args:
        img_size: side of the view in pixels; the short side is first resized to 256/224 of it (bicubic).
        mean: per channel, of pixels in 0..1.
        std: per channel.
        exact: the pixels of torchvision's pipeline on PIL images; False resizes by torch, about twice as fast
            (`benchmarks/README.md`), with another rounding: most pixels are equal or a level off, hard edges in
            images taller than wide by more, since Pillow takes their columns first and torch the rows.
        max_value: value of pixels with more than 8 bit that is white, for `batch`.
    """

    def __init__(
        self,
        img_size: int = 224,
        mean: tuple[float, ...] = IMAGENET_MEAN,
        std: tuple[float, ...] = IMAGENET_STD,
        exact: bool = True,
        max_value: int = MAX_VALUE,
    ) -> None:
        self.img_size, self.exact, self.max_value = img_size, exact, max_value
        self.resize_size = round(img_size * RESIZE_RATIO)
        self.mean, self.std = mean, std

    def __call__(
        self, image: Image.Image, rng: np.random.Generator | None = None
    ) -> list[Float[Tensor, "C img_size img_size"]]:
        """The view, in a list as training's crops are; nothing is drawn from `rng`."""
        image = without_far_ends(image)
        if self.exact:
            pixels = pixels_of(TF.center_crop(TF.resize(image, [self.resize_size], BICUBIC), [self.img_size]))
        else:
            sides = [self.resize_size * side // min(image.size) for side in (image.height, image.width)]
            pixels = TF.center_crop(resize_fast(pixels_in_rows(image), sides), [self.img_size]).numpy()
        return [torch.from_numpy(normalize_levels(pixels, channel_constant(self.mean), channel_constant(self.std)))]

    def batch(
        self, images: Image.Image | np.ndarray | Sequence[Image.Image | np.ndarray]
    ) -> Float[Tensor, "B C img_size img_size"]:
        """The views of one image or of several, of any mode or as arrays, as an encoder takes them.

        Raises:
            ValueError: there are no images, or one has other channels than the encoder takes.
        """
        images = [images] if isinstance(images, Image.Image | np.ndarray) else images
        if not len(images):
            raise UserError("no images: the list is empty; give one image or several")
        return torch.stack([self(to_image(image, len(self.mean), self.max_value))[0] for image in images])


class ClipView(EvalTransform):
    """CLIP's and OpenCLIP's view: the short side resized to the view's side (bicubic), the middle cut out, normalised.

    Args:
        img_size: side of the view in pixels.
        mean: per channel, of pixels in 0..1.
        std: per channel.
        border: pixels cut off every side of the image first.
    """

    def __init__(self, img_size: int, mean: tuple[float, ...], std: tuple[float, ...], border: int = 0) -> None:
        if border < 0:
            raise UserError(f"border={border}; give 0 or more pixels with --crop_border")
        super().__init__(img_size, mean, std)
        self.resize_size, self.border = img_size, border

    def __call__(
        self, image: Image.Image, rng: np.random.Generator | None = None
    ) -> list[Float[Tensor, "C img_size img_size"]]:
        """The view, in a list; ValueError if the border leaves nothing of the image."""
        if 2 * self.border >= min(image.size):
            raise UserError(
                f"a border of {self.border} px on every side leaves nothing of an image of {image.width} x "
                f"{image.height} px; give a smaller border"
            )
        return super().__call__(ImageOps.crop(image, self.border))

    def view(self, image: Image.Image, patch_size: int) -> View:
        """The part of an image that whole patches of the view cover, up to a rounding of less than a pixel."""
        width, height = image.width - 2 * self.border, image.height - 2 * self.border
        side = min(width, height)
        left, top = self.border + (width - side) / 2, self.border + (height - side) / 2
        seen = self.img_size // patch_size * patch_size
        part = side * seen / self.img_size
        return View((left, top, left + part, top + part), seen, seen)


class PatchView:
    """An image, or its central square, resized; then the upper left part in whole patches, as DINO's reference cuts it.

    Args:
        size: one number: the short side, the aspect ratio is kept; two: height and width, the image is squeezed.
        patch_size: P, pixels.
        mean: per channel, of pixels in 0..1.
        std: per channel.
        square: with one size, take the central square first, so that the views of several images have one size.
        resampling: BILINEAR, as `visualize_attention.py` of facebookresearch/dino; or BICUBIC, as in training.
    """

    def __init__(
        self,
        size: Sequence[int],
        patch_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        square: bool = True,
        resampling: Image.Resampling = Image.Resampling.BICUBIC,
    ) -> None:
        if len(size) not in (1, 2):
            raise UserError(f"image_size={list(size)} has {len(size)} numbers; give one (the short side) or two (H W)")
        if min(size) < patch_size:
            raise UserError(
                f"image_size={list(size)} px is smaller than one patch of {patch_size} px; give at least {patch_size}, "
                f"better 20 times that"
            )
        self.size, self.patch_size, self.mean, self.std = list(size), patch_size, tuple(mean), tuple(std)
        self.square, self.resampling = square and len(size) == 1, resampling

    def view(self, image: Image.Image) -> View:
        """The part that the encoder sees; raises UserError if it has more than `MAX_PATCHES` patches."""
        (left, top, right, bottom), height, width = self._resized(image)
        rows, columns = height // self.patch_size, width // self.patch_size
        if rows * columns > MAX_PATCHES:
            raise UserError(
                f"image_size={self.size} px makes {rows} x {columns} patches of {self.patch_size} px from an image of "
                f"{image.width} x {image.height} px; at most {MAX_PATCHES} are supported; give a smaller size"
            )
        seen_height, seen_width = rows * self.patch_size, columns * self.patch_size
        right, bottom = left + (right - left) * seen_width / width, top + (bottom - top) * seen_height / height
        return View((left, top, right, bottom), seen_height, seen_width)

    def __call__(self, image: Image.Image, rng: np.random.Generator | None = None) -> list[Float[Tensor, "C H W"]]:
        """The view, in a list as training's crops are; nothing is drawn from `rng`."""
        view = self.view(image)
        region, height, width = self._resized(image)
        pixels = image.resize((width, height), self.resampling, box=region).crop((0, 0, view.width, view.height))
        return [normalized_tensor(pixels, self.mean, self.std)]

    def _resized(self, image: Image.Image) -> tuple[tuple[float, float, float, float], int, int]:
        """Region that is resized, in pixels of the image, and the height and width it gets."""
        left, top, right, bottom = 0.0, 0.0, float(image.width), float(image.height)
        if self.square:
            side = min(image.size)
            left, top = (image.width - side) / 2, (image.height - side) / 2
            right, bottom = left + side, top + side
        if len(self.size) == 2:
            height, width = self.size
        else:
            # torchvision's rule for the long side: rounded down.
            short = min(right - left, bottom - top)
            height, width = (int(self.size[0] * side / short) for side in (bottom - top, right - left))
        return (left, top, right, bottom), height, width

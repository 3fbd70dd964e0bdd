"""An image of any size -> a map of patch features (F, h, w), by overlapping windows; a cache of such maps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from dino_sparo.data.crops import normalized_tensor
from dino_sparo.data.views import MAX_PATCHES
from dino_sparo.evaluation.attention.maps import maps_and_slots
from dino_sparo.evaluation.features import inference
from dino_sparo.evaluation.segment.data import MaskSource
from dino_sparo.evaluation.task import EncoderTask
from dino_sparo.runtime.faults import UserError

MIN_PATCHES = 2  # per side of a window; batch normalisation needs several values


@dataclass(frozen=True)
class WindowedView:
    """Image -> features of its patches.

    The short side is resized to `img_size`, and both sides to whole patches. Windows of `window` x `window` pixels
    move by half a window; the last window of a row or column ends at the edge. Features of overlaps are averaged.

    Attributes:
        img_size: short side of the resized image, pixels.
        window: side of a window, pixels.
        patch_size: P, pixels.
        mean: per channel, of pixels in 0..1.
        std: per channel.
        batch_size: windows that are encoded together.
        device: where the encoder is.
    """

    img_size: int
    window: int
    patch_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    batch_size: int
    device: torch.device

    def __post_init__(self) -> None:
        least, side = MIN_PATCHES * self.patch_size, min(self.img_size, self.window)
        if side < least or (side // self.patch_size) ** 2 > MAX_PATCHES:
            raise UserError(
                f"--img_size {self.img_size} --window {self.window}: a window has {least} px or more, and at most "
                f"{MAX_PATCHES} patches of {self.patch_size} px; give a smaller --window to see large images"
            )

    @property
    def side(self) -> int:
        """Side of a window in patches."""
        return min(self.img_size, self.window) // self.patch_size

    def grid(self, image: Image.Image) -> tuple[int, int]:
        """Rows and columns of patches."""
        short = min(image.size)
        rows, columns = (round(self.img_size * side / short / self.patch_size) for side in (image.height, image.width))
        return max(rows, self.side), max(columns, self.side)

    def features(self, image: Image.Image, encode: Callable[[Tensor], Tensor]) -> Float[Tensor, "F h w"]:
        """Features of an image, on the CPU; `encode` maps windows (B, C, H, W) to features (B, F, h, w)."""
        (rows, columns), patch = self.grid(image), self.patch_size
        resized = image.resize((columns * patch, rows * patch), Image.Resampling.BICUBIC)
        pixels = normalized_tensor(resized, self.mean, self.std)
        places = [(top, left) for top in self._starts(rows) for left in self._starts(columns)]
        total, count, side = torch.zeros(()), torch.zeros(rows, columns), self.side
        for start in range(0, len(places), self.batch_size):
            batch = places[start : start + self.batch_size]
            windows = [
                pixels[:, top * patch : (top + side) * patch, left * patch : (left + side) * patch]
                for top, left in batch
            ]
            parts = encode(torch.stack(windows).to(self.device)).float().cpu()
            total = total if total.ndim else torch.zeros(parts.shape[1], rows, columns)
            for (top, left), part in zip(batch, parts, strict=True):
                total[:, top : top + side, left : left + side] += part
                count[top : top + side, left : left + side] += 1
        return total / count

    def _starts(self, patches: int) -> list[int]:
        """First patches of windows along a side."""
        last = patches - self.side
        return [*range(0, last, max(1, self.side // 2)), last]


def token_encoder(task: EncoderTask, n_last_blocks: int) -> Callable[[Tensor], Float[Tensor, "B F h w"]]:
    """Windows -> patch tokens of the last blocks, concatenated on the grid of the last block."""

    def encode(images: Tensor) -> Tensor:
        with inference(task.encoder, task.device, task.dtype):
            layers: Any = task.encoder.get_intermediate_layers(images, n_last_blocks, reshape=True)
            size = layers[-1].shape[-2:]
            return torch.cat([F.interpolate(layer, size, mode="bilinear") for layer in layers], dim=1)

    return encode


def map_encoder(task: EncoderTask) -> Callable[[Tensor], Float[Tensor, "B maps h w"]]:
    """Windows -> attention maps of slots or heads with sum 1; otherwise some maps would never be the largest."""

    def encode(images: Tensor) -> Tensor:
        with inference(task.encoder, task.device, task.dtype):
            maps = torch.from_numpy(maps_and_slots(task.encoder, images)[0])
        return maps / maps.sum(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(maps.dtype).tiny)

    return encode


class TokenCache:
    """Features and labels of training images; kept in fp16 while they fit, else computed again when they are read.

    Args:
        source: images with masks.
        view: gives the features.
        encode: as in `WindowedView.features`.
        max_bytes: of all that is kept.
    """

    def __init__(
        self, source: MaskSource, view: WindowedView, encode: Callable[[Tensor], Tensor], max_bytes: float
    ) -> None:
        self.source, self.view, self.encode, self.free = source, view, encode, max_bytes
        self._kept: dict[int, tuple[Tensor, UInt8[np.ndarray, "H W"]]] = {}

    def __getitem__(self, index: int) -> tuple[Float[Tensor, "F h w"], UInt8[np.ndarray, "H W"]]:
        """Features in fp16, and labels with P x P pixels for each patch."""
        if index in self._kept:
            return self._kept[index]
        image, labels = self.source.read(index)
        tokens = self.view.features(image, self.encode).half()
        size = (tokens.shape[2] * self.view.patch_size, tokens.shape[1] * self.view.patch_size)
        item = tokens, np.asarray(Image.fromarray(labels).resize(size, Image.Resampling.NEAREST))
        if (needed := tokens.nbytes + item[1].nbytes) <= self.free:
            self._kept[index] = item
            self.free -= needed
        return item

    def crop(self, index: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """A random window of an image: features (F, side, side) and labels (side * P, side * P)."""
        tokens, labels = self[index]
        side, patch = self.view.side, self.view.patch_size
        top, left = (int(rng.integers(patches - side + 1)) for patches in tokens.shape[1:])
        rows, columns = (slice(start * patch, (start + side) * patch) for start in (top, left))
        return tokens[:, top : top + side, left : left + side], torch.from_numpy(labels[rows, columns].astype(np.int64))

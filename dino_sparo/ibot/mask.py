"""Masks of global crops: blocks of patches that the student does not see, with their weights in the patch loss.

Masks are drawn on the host for a whole step, by one random generator, with the numbers of facebookresearch/dinov2
(`MaskingGenerator` and `collate_data_and_cast`): a share of the crops is masked, each by another share of its patches.
"""

import math
import random
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from dino_sparo.distillation.network import NUM_TEACHER_CROPS

MIN_BLOCK = 4  # patches that a block has, unless fewer are still to be masked
MIN_ASPECT = 0.3  # height / width of a block is log-uniform between this number and its inverse
BLOCK_ATTEMPTS = 10


class Mask(NamedTuple):
    """The masked patches of the T*B global crops of a micro-batch, in the order of the crops.

    Sizes depend on the options alone, so that a step can be recorded and compiled: as many patches are chosen as may
    be masked at most. Places that this batch does not need hold patches that the student sees, with weight 0.

    Attributes:
        masked: (T*B, N), True where the student sees the mask token.
        patches: (chosen,), different places in the T*B*N patches, the masked ones first.
        weights: (chosen,), 1 / (T*B * number of masked patches in the same crop), 0 for a patch that is not masked.
    """

    masked: Bool[Tensor, "TB N"]
    patches: Int64[Tensor, " chosen"]
    weights: Float[Tensor, " chosen"]


class MaskRecipe(NamedTuple):
    """How many patches are masked.

    Attributes:
        grid: rows and columns of the patches of a global crop.
        probability: share of the crops that are masked.
        ratios: smallest and largest share of the patches that are masked in such a crop.
    """

    grid: tuple[int, int]
    probability: float
    ratios: tuple[float, float]

    @property
    def num_patches(self) -> int:
        """N, of a global crop."""
        return math.prod(self.grid)

    def most_patches(self, crops: int, parts: int) -> int:
        """Largest number of masked patches in one of `parts` micro-batches, which share `crops` crops."""
        edges = np.linspace(*self.ratios, int(crops * self.probability) + 1)[1:]
        return sum(int(self.num_patches * edge) for edge in edges[::-1][: crops // parts])

    def draw_step(self, rng: random.Random, images: int, parts: int) -> list[Mask]:
        """The masks of a step of `parts` micro-batches of `images` images, drawn as for one batch of all images."""
        crops = NUM_TEACHER_CROPS * images * parts
        masks = self.draw(rng, crops).reshape(NUM_TEACHER_CROPS, parts, images, self.num_patches)
        size = self.most_patches(crops, parts)
        return [pack(masks[:, part].reshape(-1, self.num_patches), size) for part in range(parts)]

    def draw(self, rng: random.Random, crops: int) -> Bool[np.ndarray, "crops N"]:
        """One mask for each crop: block-wise for a share of the crops, empty for the others, shuffled."""
        edges = np.linspace(*self.ratios, int(crops * self.probability) + 1).tolist()
        masks = [draw_blocks(rng, self.grid, int(self.num_patches * rng.uniform(*pair))) for pair in pairwise(edges)]
        masks += [np.zeros(self.grid, dtype=bool)] * (crops - len(masks))
        rng.shuffle(masks)
        return np.stack(masks).reshape(crops, self.num_patches)


def pack(masks: Bool[np.ndarray, "TB N"], size: int) -> Mask:
    """Masks -> the places of `size` chosen patches, and their weights."""
    masked = masks.reshape(-1)
    places = np.argsort(~masked, kind="stable")[:size]
    shares = masks / (len(masks) * np.maximum(masks.sum(axis=1, keepdims=True), 1))
    weights = torch.as_tensor(shares.reshape(-1)[places], dtype=torch.get_default_dtype())
    return Mask(torch.from_numpy(masks), torch.from_numpy(places), weights)


def draw_blocks(rng: random.Random, grid: tuple[int, int], number: int) -> Bool[np.ndarray, "rows columns"]:
    """A mask of about `number` patches: blocks of random size, shape and place until there is no room for more.

    Source: BEiT, section 2.3, in the form of facebookresearch/dinov2's `MaskingGenerator`.
    """
    rows, columns = grid
    mask = np.zeros(grid, dtype=bool)
    while (missing := number - int(mask.sum())) > 0:
        # A single block masks at most half of the patches.
        if not _add_block(rng, mask, min(missing, rows // 2 * columns)):
            break
    return mask


def _add_block(rng: random.Random, mask: Bool[np.ndarray, "rows columns"], most: int) -> bool:
    """Mask one more block, in place, with at most `most` new patches; False after ten attempts."""
    rows, columns = mask.shape
    for _ in range(BLOCK_ATTEMPTS):
        area = rng.uniform(MIN_BLOCK, most)
        aspect = math.exp(rng.uniform(math.log(MIN_ASPECT), -math.log(MIN_ASPECT)))
        height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if width >= columns or height >= rows:
            continue
        top, left = rng.randint(0, rows - height), rng.randint(0, columns - width)
        block = mask[top : top + height, left : left + width]
        if 0 < block.size - int(block.sum()) <= most:
            block[:] = True
            return True
    return False

"""The forward pass of our vision transformer, compiled in regions: all blocks share one function.

    first      crops -> tokens, and the output of the attention of block 1
    between    the rest of block i, then the attention of block i + 1
    last       the rest of the last block -> what the network returns

A region ends with a matrix product, with which a compiler fuses nothing, so nothing is lost against a network that is
compiled whole. Tokens of crops of all sizes are rows of one matrix (T, D), and only attention takes them apart.
Source of the one matrix: facebookresearch/dinov3, `SelfAttention.forward_list`.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dino_sparo.models.backbone import Backbone, attention
from dino_sparo.models.encoder import group_by_size


class Unfinished(NamedTuple):
    """Tokens within a block.

    Attributes:
        tokens: (T, D), before the block; batch by batch, image by image.
        attended: (T, D), what the block's attention adds to them.
        shapes: B and N of each size of crop.
    """

    tokens: Tensor
    attended: Tensor
    shapes: list[tuple[int, int]]


class Regions:
    """The compiled forward pass of a network: crops -> what `finish` returns.

    Args:
        backbone: the blocks.
        finish: tokens after block `depth`, for each size of crop -> the output.
        depth: number of blocks between the two.
    """

    def __init__(self, backbone: Backbone, finish: Callable[[list[Tensor]], Any], depth: int) -> None:
        self.backbone, self.depth = backbone, depth
        rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in backbone.blocks[:depth]]
        self.keep = 1 - torch.tensor(rates, device=backbone.pos_embed.device)

        def first(block: nn.Module, crops: Any) -> Unfinished:
            groups = [backbone.embed(images) for images in group_by_size(crops)]
            shapes = [(tokens.shape[0], tokens.shape[1]) for tokens in groups]
            return _begin(block, torch.cat([tokens.flatten(0, 1) for tokens in groups]), shapes)

        def last(block: nn.Module, unfinished: Unfinished, factors: Tensor | None) -> Any:
            return finish(_by_size(_complete(block, unfinished, factors), unfinished.shapes))

        self.first, self.between, self.last = (torch.compile(part, dynamic=False) for part in (first, _between, last))

    def __call__(self, crops: Any) -> Any:
        """Run the regions one after the other. With checkpointing the last one keeps its activations."""
        call, blocks = self.backbone.call, list(self.backbone.blocks[: self.depth])
        unfinished = call(self.first, blocks[0], crops)
        factors = self._draw_factors(unfinished.shapes)
        for index, (block, following) in enumerate(pairwise(blocks)):
            unfinished = call(self.between, block, following, unfinished, factors[index])
        return self.last(blocks[-1], unfinished, factors[-1])

    def _draw_factors(self, shapes: list[tuple[int, int]]) -> Sequence[Float[Tensor, "2 T 1"] | None]:
        """Factors of each block's two branches: 0 or 1 / (1 - rate), by image; None: all are 1.

        timm's blocks draw other random numbers.
        """
        if not (self.backbone.is_random and self.backbone.training):
            return [None] * self.depth
        keep = self.keep[:, None, None, None]
        draws = [torch.rand(self.depth, 2, batch, 1, device=keep.device).expand(-1, -1, -1, n) for batch, n in shapes]
        return torch.cat([((draw < keep) / keep).flatten(2) for draw in draws], dim=2).unsqueeze(-1).unbind()


def _between(block: Any, following: Any, unfinished: Unfinished, factors: Tensor | None) -> Unfinished:
    """Complete a block, and begin the following one."""
    return _begin(following, _complete(block, unfinished, factors), unfinished.shapes)


def _begin(block: Any, tokens: Float[Tensor, "T D"], shapes: list[tuple[int, int]]) -> Unfinished:
    """The block's attention, for each size of crop."""
    groups = _by_size(block.attn.qkv(block.norm1(tokens)), shapes)
    mixed = [attention(block.attn, *projected.chunk(3, dim=-1)).flatten(0, 1) for projected in groups]
    return Unfinished(tokens, block.attn.proj(torch.cat(mixed)), shapes)


def _by_size(rows: Float[Tensor, "T _"], shapes: list[tuple[int, int]]) -> list[Float[Tensor, "B N _"]]:
    parts = rows.split([batch * number for batch, number in shapes])
    return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]


def _complete(block: Any, unfinished: Unfinished, factors: Tensor | None) -> Float[Tensor, "T D"]:
    """The block's tokens."""
    tokens, attended, _ = unfinished
    of_attention, of_mlp = (1, 1) if factors is None else factors
    tokens = tokens + attended * of_attention
    return tokens + block.mlp(block.norm2(tokens)) * of_mlp

"""The forward pass of our vision transformer, compiled in regions: all blocks share one function.

    first      crops -> tokens, and what the attention of block 1 adds to them
    between    the rest of block i, then the attention of block i + 1
    last       the rest of the last block -> what the network returns

A region ends with a matrix product, with which a compiler fuses nothing, so the kernels are those of a network that is
compiled whole. Crops of all sizes go through a region together, so that weights are cast once.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dino_sparo.models.backbone import Backbone

# For each size of crop: tokens (B, N, D), and what the next attention adds to them (B, N, D).
Unfinished = list[tuple[Tensor, Tensor]]
# For each size of crop: factors (2, B, 1, 1) of a block's two branches; None: all are 1.
Factors = list[Tensor] | None


class Regions:
    """The compiled forward pass of a network: crops -> what `finish` returns.

    Args:
        backbone: the blocks.
        embed: crops -> tokens before block 1, for each size of crop.
        finish: tokens after block `depth`, for each size of crop -> the output.
        depth: number of blocks between the two.
    """

    def __init__(
        self,
        backbone: Backbone,
        embed: Callable[[Any], list[Tensor]],
        finish: Callable[[list[Tensor]], Any],
        depth: int,
    ) -> None:
        self.backbone, self.depth = backbone, depth
        rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in backbone.blocks[:depth]]
        self.keep = 1 - torch.tensor(rates, device=backbone.pos_embed.device)

        def first(block: nn.Module, crops: Any) -> Unfinished:
            return [(tokens, _attend(block, tokens)) for tokens in embed(crops)]

        def last(block: nn.Module, unfinished: Unfinished, factors: Factors) -> Any:
            return finish(_complete(block, unfinished, factors))

        self.first, self.between, self.last = (torch.compile(part, dynamic=False) for part in (first, _between, last))

    def __call__(self, crops: Any) -> Any:
        """Run the regions one after the other."""
        call, blocks = self.backbone.call, list(self.backbone.blocks[: self.depth])
        unfinished = call(self.first, blocks[0], crops)
        factors = self._draw_factors(unfinished)
        for index, (block, following) in enumerate(pairwise(blocks)):
            unfinished = call(self.between, block, following, unfinished, factors[index])
        return call(self.last, blocks[-1], unfinished, factors[-1])

    def _draw_factors(self, unfinished: Unfinished) -> Sequence[Factors]:
        """Factors for each block: stochastic depth, 0 or 1 / (1 - rate). timm draws other random numbers."""
        if not (self.backbone.is_random and self.backbone.training):
            return [None] * self.depth
        keep = self.keep[:, None, None, None, None]
        draws = [torch.rand(self.depth, 2, len(tokens), 1, 1, device=tokens.device) for tokens, _ in unfinished]
        return [list(block) for block in zip(*((draw < keep) / keep for draw in draws), strict=True)]


def _between(block: Any, following: Any, unfinished: Unfinished, factors: Factors) -> Unfinished:
    """Complete a block, and begin the following one."""
    return [(tokens, _attend(following, tokens)) for tokens in _complete(block, unfinished, factors)]


def _attend(block: Any, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
    """Output of the block's attention, which `_complete` adds to the tokens."""
    return block.attn(block.norm1(tokens))


def _complete(block: Any, unfinished: Unfinished, factors: Factors) -> list[Float[Tensor, "B N D"]]:
    """The block's tokens, for each size of crop, given what its attention adds."""
    completed = []
    for index, (tokens, attended) in enumerate(unfinished):
        of_attention, of_mlp = (1, 1) if factors is None else factors[index]
        tokens = tokens + attended * of_attention
        completed.append(tokens + block.mlp(block.norm2(tokens)) * of_mlp)
    return completed

"""The read-outs of both towers by one name, and the end token's, which only captions have.

All others are `dino_sparo.readout`'s and `dino_sparo.pooling`'s. Every read-out turns tokens
(B, N, D) and a mask (B, N) into `ReadoutOutput(slots (B, L, V), attention (B, L, N))`.

What can be chosen stands in `choices.READOUTS`.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from dino_sparo.pooling import create_pooling
from dino_sparo.readout import ReadoutOutput


class EndTokenReadout(nn.Module):
    """CLIP's read-out of a caption: one slot, the end token, the last one that may be attended. No parameters.

    slot = h_end,  attention = one-hot at the end token
    """

    def forward(self, tokens: Float[Tensor, "B N D"], mask: Bool[Tensor, "B N"] | None = None) -> ReadoutOutput:
        """Take the last token that the mask allows.

        Args:
            tokens: (B, N, D).
            mask: (B, N), True up to and including the end token; without it the last token is the end token.

        Returns:
            Slots (B, 1, D) and the one-hot attention (B, 1, N).
        """
        number = tokens.shape[1]
        end = tokens.new_full((len(tokens),), number, dtype=torch.long) if mask is None else mask.sum(dim=-1)
        attention = F.one_hot(end - 1, number).to(tokens.dtype)[:, None, :]
        return ReadoutOutput(
            slots=tokens[torch.arange(len(tokens), device=tokens.device), end - 1, None], attention=attention
        )


def create_tower_readout(
    name: str,
    embed_dim: int,
    num_slots: int,
    slot_dim: int,
    key_dim: int,
    group_size: int = 1,
    codebook: nn.Parameter | None = None,
    num_prefix_tokens: int = 0,
    context_length: int | None = None,
    eps: float = 1e-5,
) -> nn.Module:
    """Build the read-out of one tower.

    Args:
        name: one side of an entry of `choices.READOUTS` or `choices.NORM_FIRST`.
        embed_dim: D, width of the tower's tokens.
        num_slots: L, of a slotted read-out.
        slot_dim: V, likewise.
        key_dim: A, likewise.
        group_size: G, of `sparo`.
        codebook: (codes, M), of `fdt`.
        num_prefix_tokens: leading tokens that `fdt` leaves out.
        context_length: of a text tower, for `fdt_raw`.
        eps: of the LayerNorm of `gap_then_norm`.

    Raises:
        ValueError: the name is unknown, a size does not fit, or `fdt` lacks its codebook.
    """
    if name == "eos":
        return EndTokenReadout()
    sizes = (embed_dim, num_slots, slot_dim, key_dim, group_size)
    return create_pooling(name, *sizes, codebook, num_prefix_tokens, context_length, eps)

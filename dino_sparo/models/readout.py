"""Tokens -> slots: SPARO, class token, end token and averages.

Every read-out turns tokens (B, N, D) from `backbone.py` into `ReadoutOutput(slots (B, L, V), attention (B, L, N))`;
`encoder.py` concatenates the slots. `readouts.py` names the read-outs.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from dino_sparo.runtime.faults import UserError


@dataclass(frozen=True)
class ReadoutOutput:
    """Output of every read-out.

    Attributes:
        slots: (B, L, V); their concatenation over L is the encoding.
        attention: (B, L, N), non-negative weight of each token in each slot; sums to one over N.
    """

    slots: Float[Tensor, "B L V"]
    attention: Float[Tensor, "B L N"]


def require_positive(module: str, **sizes: int) -> None:
    """Refuse sizes below one; `module` is named in the message."""
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"{name}={size} is not a valid size for {module}; give a positive integer")


class Sparo(nn.Module):
    """Separate-head attention read-out: L single-head attentions with learned queries (SPARO, eq. 1, appendix 0.A).

        slot_l = W K_l H^T softmax(H K_l^T q_l / sqrt(A))

    with tokens H (N, D), query q_l (A), key projection K_l (A, D), and value projection W (V, A), which all slots
    share. Both projections have a bias. Slot l uses key l // G (multi-query attention).
    Letters: our A is the paper's D, our D its d, our N its n; L, V, K_l, W and q_l are the paper's.

    The paper's listing forms all keys, a (N, L*A) tensor per image. Another order of the sums avoids it: the key bias
    b_l adds the same number q_l . b_l to the scores of all tokens, which the softmax ignores, and attention sums to
    one.

        scores_l = H (K_l^T q_l) / sqrt(A)           (L, D) vectors K_l^T q_l, the same for all images
        pooled_l = softmax(scores_l)^T H             (D)
        slot_l   = W (K_l pooled_l + b_l) + b_W      (V)

    Args:
        embed_dim: D, width of the tokens.
        num_slots: L.
        slot_dim: V, width of a slot.
        key_dim: A, width of keys and queries.
        group_size: G, number of neighbouring slots that share a key projection; divides L.
    """

    def __init__(self, embed_dim: int, num_slots: int, slot_dim: int, key_dim: int, group_size: int = 1) -> None:
        super().__init__()
        require_positive(
            "SPARO", embed_dim=embed_dim, num_slots=num_slots, slot_dim=slot_dim, key_dim=key_dim, group_size=group_size
        )
        if num_slots % group_size:
            divisors = [g for g in range(1, num_slots + 1) if num_slots % g == 0]
            raise UserError(
                f"group_size={group_size} does not divide num_slots={num_slots}: slots share keys in equal groups; "
                f"choose one of {divisors}"
            )
        self.embed_dim, self.num_slots, self.slot_dim = embed_dim, num_slots, slot_dim
        self.key_dim, self.group_size = key_dim, group_size
        self.encoding_dim = num_slots * slot_dim
        self.queries = nn.Parameter(torch.empty(num_slots, key_dim))
        self.key_proj = nn.Linear(embed_dim, num_slots // group_size * key_dim)
        self.value_proj = nn.Linear(key_dim, slot_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize as in the listing: q standard normal, keys Xavier-uniform, W as `nn.Linear`, biases zero."""
        nn.init.normal_(self.queries)
        nn.init.xavier_uniform_(self.key_proj.weight)
        nn.init.zeros_(self.key_proj.bias)
        self.value_proj.reset_parameters()
        nn.init.zeros_(self.value_proj.bias)

    def extra_repr(self) -> str:
        """The sizes, for the log."""
        return f"{self.num_slots} slots of {self.slot_dim}, keys of {self.key_dim}, {self.group_size} slots per key"

    def forward(self, tokens: Float[Tensor, "B N D"], mask: Bool[Tensor, "B N"] | None = None) -> ReadoutOutput:
        """Read slots out of tokens.

        Args:
            tokens: (B, N, D), normalised tokens of the last block, class token included.
            mask: (B, N), True where a token may be attended. A row without any True gives NaN: a check would
                wait for the GPU.
        """
        if tokens.ndim != 3 or tokens.shape[-1] != self.embed_dim:
            raise UserError(f"tokens have shape {tuple(tokens.shape)}; SPARO was built for (B, N, {self.embed_dim})")
        # einsum letters: b image, d width, a key width, k key projection (L/G of them), g slot within its group
        keys = self.key_proj.weight.unflatten(0, (-1, self.key_dim))  # (k, a, d)
        queries = self.queries.unflatten(0, (-1, self.group_size)) * self.key_dim**-0.5  # (k, g, a)
        token_queries = torch.einsum("kga,kad->kgd", queries, keys).flatten(0, 1)  # (L, D)
        attention, pooled = pool(tokens, token_queries, mask)
        pooled = pooled.unflatten(1, (-1, self.group_size))  # (B, k, g, D)
        bias = self.key_proj.bias.unflatten(0, (-1, self.key_dim))[:, None, :]  # (k, 1, a)
        values = (torch.einsum("bkgd,kad->bkga", pooled, keys) + bias).flatten(1, 2)  # (B, L, A)
        return ReadoutOutput(slots=self.value_proj(values), attention=attention)


class ClassTokenReadout(nn.Module):
    """DINO's read-out: one slot, the class token h_0, with one-hot attention. No parameters."""

    def forward(self, tokens: Float[Tensor, "B N D"], mask: Bool[Tensor, "B N"] | None = None) -> ReadoutOutput:
        """Slots (B, 1, D) and attention (B, 1, N); a mask has no effect."""
        if mask is not None:
            _checked_mask(mask, tokens)
        attention = torch.zeros_like(tokens[:, None, :, 0])
        attention[:, :, 0] = 1
        return ReadoutOutput(slots=tokens[:, :1], attention=attention)


class EndTokenReadout(nn.Module):
    """CLIP's read-out of a caption: one slot, the last token that the mask allows, with one-hot attention."""

    def forward(self, tokens: Float[Tensor, "B N D"], mask: Bool[Tensor, "B N"] | None = None) -> ReadoutOutput:
        """Slots (B, 1, D) and attention (B, 1, N); the mask is True up to and including the end token."""
        number = tokens.shape[1]
        end = tokens.new_full((len(tokens),), number, dtype=torch.long) if mask is None else mask.sum(dim=-1)
        attention = F.one_hot(end - 1, number).to(tokens.dtype)[:, None, :]
        return ReadoutOutput(
            slots=tokens[torch.arange(len(tokens), device=tokens.device), end - 1, None], attention=attention
        )


class AveragePoolReadout(nn.Module):
    """Global average pooling over the tokens that the mask allows, class token included; no parameters.

    slot = sum_n w_n h_n,  w_n = 1 / (number of allowed tokens)
    """

    def forward(self, tokens: Float[Tensor, "B N D"], mask: Bool[Tensor, "B N"] | None = None) -> ReadoutOutput:
        """Slots (B, 1, D) and uniform attention (B, 1, N)."""
        allowed = torch.ones_like(tokens[..., 0]) if mask is None else _checked_mask(mask, tokens).to(tokens.dtype)
        attention = (allowed / allowed.sum(dim=-1, keepdim=True))[:, None, :]
        return ReadoutOutput(slots=attention @ tokens, attention=attention)


class AverageThenNormReadout(nn.Module):
    """Global average pooling of CLIP+GAP: LayerNorm of the average of tokens that are not normalised.

        slot = LayerNorm(sum_n w_n h_n),  w_n = 1 / (number of allowed tokens)

    `AveragePoolReadout` averages normalised tokens, which differs. This LayerNorm replaces the backbone's last one.
    Source: the SPARO authors' code, `VisionTransformer.forward_output`.
    """

    def __init__(self, embed_dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.average = AveragePoolReadout()
        self.norm = nn.LayerNorm(embed_dim, eps=eps)

    def forward(self, tokens: Float[Tensor, "B N D"], mask: Bool[Tensor, "B N"] | None = None) -> ReadoutOutput:
        """Slots (B, 1, D) and uniform attention (B, 1, N) of tokens without final LayerNorm."""
        output = self.average(tokens, mask)
        return ReadoutOutput(slots=self.norm(output.slots), attention=output.attention)


def pool(
    tokens: Float[Tensor, "B N D"], token_queries: Float[Tensor, "L D"], mask: Tensor | None
) -> tuple[Float[Tensor, "B L N"], Float[Tensor, "B L D"]]:
    """The attention of each query, which is compared with the tokens, and its mean of the tokens; mask: (B, N)."""
    scores = (tokens @ token_queries.t()).transpose(1, 2)
    if mask is not None:
        scores = scores.masked_fill(~_checked_mask(mask, tokens)[:, None, :], -math.inf)
    # Under autocast the softmax runs in fp32 and the product below casts it back.
    attention = scores.softmax(dim=-1)
    return attention, attention @ tokens


def _checked_mask(mask: Tensor, tokens: Tensor) -> Tensor:
    """The mask, if it is a bool tensor of shape (B, N)."""
    if mask.dtype != torch.bool or mask.shape != tokens.shape[:2]:
        raise UserError(
            f"mask has dtype {mask.dtype} and shape {tuple(mask.shape)}; give a bool tensor of shape "
            f"{tuple(tokens.shape[:2])}, True where a token may be attended"
        )
    return mask

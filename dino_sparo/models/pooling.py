"""Tokens -> slots, read-outs other than SPARO: attentional pooling, its ablations, codebooks, attentive probes.

Each turns tokens (B, N, D) and a mask (B, N) into `ReadoutOutput(slots (B, L, V), attention (B, L, N))`.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from dino_sparo.models.architectures import CrossAttentionKind
from dino_sparo.models.readout import ReadoutOutput, pool, require_positive
from dino_sparo.runtime.faults import UserError, require

# Of efficient probing and of AIM.
QUERY_STD, BATCH_NORM_EPS = 0.02, 1e-6


class CrossAttentionReadout(nn.Module):
    """Attentional pooling with L learned queries, and the steps from it to SPARO (SPARO, section 5.3 and table 6).

        z_l = (H U_l^T + c_l)^T softmax(H K_l^T q_l / sqrt(A))      L heads of width A
        z   = O concat(z_1, ..., z_L) + b_O                          multi-head only: O mixes the heads
        z   = LayerNorm(z)                                           of all L*A numbers, or slot by slot
        y   = P z + b_P                                              L*A -> L*V, or slot by slot A -> V

    with tokens H (N, D), query q_l (A), key and value projections K_l, U_l (A, D). Slot-wise operations share their
    parameters between slots. Unlike SPARO, values have a projection of their own and there is a LayerNorm; unlike usual
    multi-head attention, queries are not projected. The paper has no code for it: its numbers of parameters settle what
    its text leaves open. Attentional pooling is Yu et al., CoCa, section 3.2.

    As in `Sparo`, the order of the sums avoids keys and values of all tokens. Keys have no bias, which the softmax
    ignores.

    Args:
        embed_dim: D, width of the tokens.
        num_slots: L, number of queries and heads.
        slot_dim: V.
        key_dim: A, width of keys, queries and values.
        kind: which steps are slot-wise.
    """

    def __init__(self, embed_dim: int, num_slots: int, slot_dim: int, key_dim: int, kind: CrossAttentionKind) -> None:
        super().__init__()
        require_positive("a read-out", embed_dim=embed_dim, num_slots=num_slots, slot_dim=slot_dim, key_dim=key_dim)
        self.num_slots, self.slot_dim, self.key_dim, self.kind = num_slots, slot_dim, key_dim, kind
        self.encoding_dim, width = num_slots * slot_dim, num_slots * key_dim
        self.queries = nn.Parameter(torch.empty(num_slots, key_dim))
        self.key_proj = nn.Linear(embed_dim, width, bias=False)
        self.value_proj = nn.Linear(embed_dim, width)
        self.out_proj = nn.Identity() if kind.separate_heads else nn.Linear(width, width)
        self.norm = nn.LayerNorm(key_dim if kind.slotwise_norm else width)
        self.proj = nn.Linear(key_dim, slot_dim) if kind.slotwise_projection else nn.Linear(width, self.encoding_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize as SPARO: q normal, K, U, O Xavier-uniform, P as `nn.Linear`, biases zero."""
        nn.init.normal_(self.queries)
        nn.init.xavier_uniform_(self.key_proj.weight)
        for linear in (self.value_proj, self.out_proj):
            if isinstance(linear, nn.Linear):
                nn.init.xavier_uniform_(linear.weight)
                nn.init.zeros_(linear.bias)
        self.norm.reset_parameters()
        self.proj.reset_parameters()
        nn.init.zeros_(self.proj.bias)

    def forward(self, tokens: Float[Tensor, "B N D"], mask: Bool[Tensor, "B N"] | None = None) -> ReadoutOutput:
        """Slots (B, L, V) and attention (B, L, N); the mask is True where a token may be attended."""
        attention, pooled = pool(tokens, _token_queries(self.queries, self.key_proj.weight), mask)
        heads = _slot_values(pooled, self.value_proj.weight) + self.value_proj.bias.unflatten(0, (-1, self.key_dim))
        mixed = self.out_proj(heads.flatten(1)).unflatten(1, (self.num_slots, self.key_dim))
        normed = self.norm(mixed) if self.kind.slotwise_norm else self.norm(mixed.flatten(1)).view_as(mixed)
        projected = self.proj(normed if self.kind.slotwise_projection else normed.flatten(1))
        return ReadoutOutput(slots=projected.flatten(1).unflatten(1, (self.num_slots, -1)), attention=attention)


class EfficientProbing(nn.Module):
    """Efficient probing: L queries attend to the tokens, and each query reads its part of one value projection.

        slot_l = U_l H^T softmax(H q_l / sqrt(D))

    with tokens H (N, D), query q_l (D) and value projection U_l (V, D), without bias. There are no keys: a query is as
    wide as a token. The authors choose L and the width of the encoding L*V, by default D. Source: Psomas et al.,
    "Attention, please! Revisiting attentive probing through the lens of efficiency" (ICLR 2026).

    Args:
        embed_dim: D, width of the tokens.
        num_slots: L.
        slot_dim: V.
    """

    def __init__(self, embed_dim: int, num_slots: int, slot_dim: int) -> None:
        super().__init__()
        require_positive("efficient probing", embed_dim=embed_dim, num_slots=num_slots, slot_dim=slot_dim)
        self.encoding_dim = num_slots * slot_dim
        self.queries = nn.Parameter(torch.randn(num_slots, embed_dim) * QUERY_STD)
        self.value_proj = nn.Linear(embed_dim, self.encoding_dim, bias=False)

    def extra_repr(self) -> str:
        """The sizes, for the log."""
        return f"{len(self.queries)} slots of {self.encoding_dim // len(self.queries)}"

    def forward(self, tokens: Float[Tensor, "B N D"], mask: Bool[Tensor, "B N"] | None = None) -> ReadoutOutput:
        """Slots (B, L, V) and attention (B, L, N); the mask is True where a token may be attended."""
        attention, pooled = pool(tokens, self.queries * tokens.shape[-1] ** -0.5, mask)
        return ReadoutOutput(slots=_slot_values(pooled, self.value_proj.weight), attention=attention)


class AttentionReadout(nn.Module):
    """One learned query with L heads, on tokens that a batch norm without scale and shift normalises.

        slot_l = U_l Z^T softmax(Z K_l^T q_l / sqrt(A)),  Z = BatchNorm(H)

    with tokens H (N, D), heads of width A = V = D / L, keys K_l and values U_l (A, D) without bias. The encoding is as
    wide as a token. Source: El-Nouby et al., AIM, section 3.3, as efficient probing compares with it.

    Args:
        embed_dim: D, width of the tokens.
        num_slots: L, number of heads; divides D.
    """

    def __init__(self, embed_dim: int, num_slots: int) -> None:
        super().__init__()
        require_positive("an attentive query", embed_dim=embed_dim, num_slots=num_slots)
        if embed_dim % num_slots:
            raise UserError(f"{num_slots} heads do not divide tokens of width {embed_dim}; give another number")
        self.norm = nn.BatchNorm1d(embed_dim, affine=False, eps=BATCH_NORM_EPS)
        self.queries = nn.Parameter(torch.randn(num_slots, embed_dim // num_slots) * QUERY_STD)
        self.key_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.value_proj = nn.Linear(embed_dim, embed_dim, bias=False)

    def extra_repr(self) -> str:
        """The sizes, for the log."""
        return "{} heads of {}".format(*self.queries.shape)

    def forward(self, tokens: Float[Tensor, "B N D"], mask: Bool[Tensor, "B N"] | None = None) -> ReadoutOutput:
        """Slots (B, L, V) and attention (B, L, N); the mask is True where a token may be attended."""
        normed = self.norm(tokens.flatten(0, 1)).view_as(tokens)
        attention, pooled = pool(normed, _token_queries(self.queries, self.key_proj.weight), mask)
        return ReadoutOutput(slots=_slot_values(pooled, self.value_proj.weight), attention=attention)


# einsum letters: b image, l slot, a key or value width, d token width


def _token_queries(queries: Float[Tensor, "L A"], keys: Float[Tensor, "LA D"]) -> Float[Tensor, "L D"]:
    """K_l^T q_l / sqrt(A): queries to be compared with tokens."""
    return torch.einsum("la,lad->ld", queries * queries.shape[1] ** -0.5, keys.unflatten(0, queries.shape))


def _slot_values(pooled: Float[Tensor, "B L D"], values: Float[Tensor, "LA D"]) -> Float[Tensor, "B L A"]:
    """U_l times the mean of the tokens."""
    return torch.einsum("bld,lad->bla", pooled, values.unflatten(0, (pooled.shape[1], -1)))


class CodebookReadout(nn.Module):
    """Finite Discrete Tokens: a convex combination of the codes of a book that images and captions share.

        r_k  = max_n f(h_n) . c_k / (sqrt(M) tau)      relevance of code k
        w    = Sparsemax(r)                            most weights are zero once trained
        slot = sum_k w_k c_k

    with codes c_k (M), temperature tau, and f = Linear GELU LayerNorm Linear on normalised tokens. The attention of a
    token is the weight of the codes for which it was the most relevant token. With a `context_length`, tokens are those
    before the tower's last LayerNorm, and each token of a caption's padding competes with relevance 0. (The attention
    of a code that is relevant to padding alone goes to the most relevant word.) Source: Chen et al., FDT, section 3;
    SPARO, appendix 0.B.2; the authors' `FDTQueryModel` for tau, f, padding and for leaving the class token out.

    Args:
        embed_dim: D, width of the tokens.
        codebook: (codes, M), a parameter that both towers hold.
        num_prefix_tokens: leading tokens to leave out: an image's class token.
        context_length: tokens of a caption with its padding; None: padding does not compete.
    """

    temperature = 1000.0

    def __init__(
        self, embed_dim: int, codebook: nn.Parameter, num_prefix_tokens: int = 0, context_length: int | None = None
    ) -> None:
        super().__init__()
        self.encoding_dim = code_dim = codebook.shape[1]
        self.num_prefix_tokens, self.context_length = num_prefix_tokens, context_length
        self.codebook = codebook
        self.query_map = nn.Sequential(
            nn.LayerNorm(embed_dim),
            nn.Linear(embed_dim, code_dim),
            nn.GELU(),
            nn.LayerNorm(code_dim),
            nn.Linear(code_dim, code_dim),
        )

    def forward(self, tokens: Float[Tensor, "B N D"], mask: Bool[Tensor, "B N"] | None = None) -> ReadoutOutput:
        """Slots (B, 1, M) and attention (B, 1, N); the mask is True where a token may be attended."""
        allowed = torch.arange(tokens.shape[1], device=tokens.device) >= self.num_prefix_tokens
        allowed = allowed.expand(len(tokens), -1) if mask is None else allowed & mask
        relevance = self.query_map(tokens) @ self.codebook.t()  # (B, N, codes)
        best, winner = relevance.masked_fill(~allowed[..., None], -math.inf).max(dim=1)
        if self.context_length is not None and mask is not None:
            is_padded = mask.sum(dim=1, keepdim=True) < self.context_length
            best = torch.where(is_padded, best.clamp(min=0), best)
        # Differences between logits are small against one: below fp32 Sparsemax would see none.
        logits = best.to(torch.promote_types(best.dtype, torch.float32))
        weights = sparsemax(logits / (math.sqrt(self.codebook.shape[1]) * self.temperature))
        attention = weights.new_zeros(tokens.shape[:2]).scatter_add(1, winner, weights)
        return ReadoutOutput(slots=(weights.to(tokens.dtype) @ self.codebook)[:, None], attention=attention[:, None])


def sparsemax(logits: Float[Tensor, "B codes"]) -> Float[Tensor, "B codes"]:
    """Projection onto the probability simplex, zeros included (Martins and Astudillo, 2016)."""
    require("entmax", "models with readout 'fdt'")
    import entmax

    return entmax.sparsemax(logits, dim=-1)

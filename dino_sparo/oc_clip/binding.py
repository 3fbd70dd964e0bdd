"""Patches of images and entities of captions -> visual slots: the binding module.

The slot of an entity is a weighted mean of the values of the patches. The entities of one caption compete for each
patch, with one another and with default tokens, which take the patches that no entity names.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from dino_sparo.runtime.faults import UserError

EPSILON = 1e-8  # of the renormalisation over patches, as in the paper's listing
MLP_RATIO = 2
DEFAULT_CHUNK_MB = 256.0
# Of `chunk_mb`: smaller batches are not computed twice. The second share is for padded captions, as launches are dear.
KEPT_SHARE, KEPT_SHARE_PADDED = 1 / 32, 1 / 8
NORM_EPS = 1e-5  # of all LayerNorms; torch's, which OpenCLIP's blocks have


@dataclass(frozen=True)
class BindingConfig:
    """Sizes of the modules between the towers and the scores; the paper's by default (OC-CLIP, table 11).

    Attributes:
        dim: the paper's D, width of entities, keys, values and slots.
        num_default: N_d, number of default tokens.
        num_layers: self-attention blocks on the patches.
        num_heads: of these blocks.
        position_std: standard deviation of the patches' positions at the start; the listing's by default.
        competition: a member of `COMPETITIONS`: what the softmax of the binding runs over.
        rel_dim: width of relations.
        relation: how a relation is scored, a member of `RELATION_SCORES`.
        ent_coef: alpha at the start.
        rel_coef: beta at the start.
        logit_scale: scores are multiplied by a learned inverse temperature; the paper has none.

    Raises:
        ValueError: the heads do not divide `dim`, or default tokens where nothing competes with them.
    """

    dim: int = 256
    num_default: int = 4
    num_layers: int = 2
    num_heads: int = 4
    position_std: float = 1.0
    competition: str = "queries"
    rel_dim: int = 128
    relation: str = "additive"
    ent_coef: float = 1.5
    rel_coef: float = 0.5
    logit_scale: bool = True

    def __post_init__(self) -> None:
        if self.dim % self.num_heads:
            raise UserError(f"num_heads={self.num_heads} does not divide dim={self.dim}; choose a divisor")
        if self.competition == "keys" and self.num_default:
            raise UserError(
                f"num_default={self.num_default} with competition='keys': default tokens change nothing where entities "
                "do not compete; give num_default=0"
            )


class BoundPatches(NamedTuple):
    """The image side of the binding: K^ (not projected), V, and logsumexp of the default tokens' logits.

    Without default tokens the logsumexp is -inf, so that they take no share.
    """

    keys: Float[Tensor, "B N dim"]
    values: Float[Tensor, "B N dim"]
    defaults: Float[Tensor, "B N"]


class Binding(nn.Module):
    """Inverted cross-attention of a caption's entities over an image's patches: one head, one pass.

        h      = Lin(GELU(Lin(x))) + pos, then pre-norm self-attention blocks           x (N, image_dim): the patches
        K, V   = W_k LN(h W_1 + b_1), W_v LN(h W_2 + b_2)                               (N, dim)
        q_m    = W_q LN(entity_m);  q_c = W_q default_c
        a_mn   = exp(q_m . K_n / sqrt(dim)) / sum_j exp(q_j . K_n / sqrt(dim))          j: caption's entities, defaults
        w_mn   = (a_mn + 1e-8) / sum_n (a_mn + 1e-8)
        slot_m = sum_n w_mn V_n

    Letters: E and U are the paper's M and B; dim is its D, num_default its N_d. The slots of default tokens are not
    computed. With `competition="keys"`, the paper's ablation, a is an ordinary softmax over patches.
    Source: OC-CLIP, equation 1, figure 9 and table 11. The listing of figure 9 adds to equation 1 the network on the
    patches, positions, norms of keys and values, and the renormalisation. The norm of the queries stands in table 11
    alone. Default tokens are not normalised. Initial weights are torch's, since the paper does not give any.

    The listing pads all captions to one size and keeps (B, U, E + num_default, N) weights. Here captions with equal
    numbers of entities form a chunk of bounded size, without padding. Training on a GPU pads them nevertheless: there
    the launch of a kernel takes longer than the padding. The default tokens enter the softmax as one query that all
    captions share; its logit for patch n is logsumexp_c q_c . K_n. W_k multiplies the queries instead of the keys,
    because a caption has fewer entities than an image has patches: with K^ the keys before W_k, q . W_k K^ =
    (W_k^T q) . K^. Logits, softmax and sums are fp32 or wider also under autocast.

    Args:
        image_dim: width of the patches.
        num_patches: N.
        sizes: all other sizes.

    Attributes:
        chunk_mb: size of the largest tensor of a chunk, in 2^20 bytes; a few tensors of this size exist at a time. One
            caption with all images is the smallest chunk.
        pads_on: kinds of devices on which captions with different numbers of entities form a chunk while training.
            Evaluations pad nothing: graphs that differ in the order of their nodes alone have bit-identical scores.
    """

    def __init__(self, image_dim: int, num_patches: int, sizes: BindingConfig) -> None:
        super().__init__()
        dim = sizes.dim
        self.num_patches, self.dim, self.num_default = num_patches, dim, sizes.num_default
        self.competition, self.chunk_mb = sizes.competition, DEFAULT_CHUNK_MB
        self.pads_on = ("cuda",)
        self.patch_mlp = nn.Sequential(nn.Linear(image_dim, dim), nn.GELU(), nn.Linear(dim, dim))
        self.positions = nn.Parameter(sizes.position_std * torch.randn(num_patches, dim))
        # The default epsilon differs among versions of timm.
        norm_layer: Any = partial(nn.LayerNorm, eps=NORM_EPS)
        block = partial(Block, dim, sizes.num_heads, MLP_RATIO, qkv_bias=True, norm_layer=norm_layer)
        self.blocks = nn.Sequential(*(block() for _ in range(sizes.num_layers)))
        self.to_keys_values = nn.Linear(dim, 2 * dim)
        self.key_norm, self.value_norm, self.query_norm = (norm_layer(dim) for _ in range(3))
        self.key_proj, self.value_proj, self.query_proj = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        # An empty parameter must not be trained: DDP would wait for its gradient.
        self.default_tokens = nn.Parameter(torch.randn(sizes.num_default, dim), requires_grad=sizes.num_default > 0)

    def forward(
        self,
        entities: Float[Tensor, "U E dim"],
        mask: Bool[Tensor, "U E"],
        keys: Float[Tensor, "B N dim"],
        values: Float[Tensor, "B N dim"],
    ) -> Float[Tensor, "B U E dim"]:
        """The slots of all captions in all images; slots of padding have no meaning."""
        with torch.autocast(keys.device.type, enabled=False):
            return self.chunk_slots(self.queries(entities), self.project(keys, values), mask)

    def encode_patches(
        self, patches: Float[Tensor, "B N image_dim"]
    ) -> tuple[Float[Tensor, "B N dim"], Float[Tensor, "B N dim"]]:
        """Patches -> keys and values, normalised, not yet projected; once per image, in the caller's precision."""
        hidden = self.blocks(self.patch_mlp(patches) + self.positions)
        keys, values = self.to_keys_values(hidden).chunk(2, dim=-1)
        return self.key_norm(keys), self.value_norm(values)

    def bind_matched(
        self,
        entities: Float[Tensor, "B E dim"],
        mask: Bool[Tensor, "B E"],
        keys: Float[Tensor, "B N dim"],
        values: Float[Tensor, "B N dim"],
    ) -> Float[Tensor, "B E dim"]:
        """The slots of caption i in image i alone, for the local loss; the slots of padding are 0.

        Without default tokens every caption needs an entity: else gradients are NaN.
        """
        with torch.autocast(keys.device.type, enabled=False):
            patches = self.project(keys, values)
            logits = self.queries(entities) @ patches.keys.transpose(1, 2)  # (B, E, N)
            weights = self._competed(logits, patches.defaults, mask[..., None]) + EPSILON
            return _means(weights, patches.values).masked_fill(~mask[..., None], 0)

    def attention(
        self, entities: Float[Tensor, "E dim"], keys: Float[Tensor, "N dim"]
    ) -> tuple[Float[Tensor, "E N"], Float[Tensor, "num_default N"]]:
        """The shares a of each patch of an image that a caption's entities and the default tokens take, for pictures.

        Together the shares of a patch sum to one; with `competition="keys"` every row sums to one over the patches.
        """
        with torch.autocast(keys.device.type, enabled=False):
            queries = torch.cat([self.queries(entities), self._against_keys(self.default_tokens)])
            logits = queries @ self._wide(keys).t()
            shares = logits.softmax(dim=1 if self.competition == "keys" else 0)
            return shares[: len(entities)], shares[len(entities) :]

    # The parts of `scoring.score_all_pairs`.

    def project(self, keys: Float[Tensor, "B N dim"], values: Float[Tensor, "B N dim"]) -> BoundPatches:
        """K^, V and the logit of the default tokens; once per image."""
        keys = self._wide(keys)
        defaults = (keys @ self._against_keys(self.default_tokens).t()).logsumexp(dim=-1)
        return BoundPatches(keys, self._wide(self.value_proj(self._cast(values))), defaults)

    def queries(self, entities: Float[Tensor, "*shape dim"]) -> Float[Tensor, "*shape dim"]:
        """W_k^T q / sqrt(dim) of entities."""
        return self._against_keys(self.query_norm(self._cast(entities)))

    def chunks(
        self, counts: Sequence[int], relation_counts: Sequence[int], num_images: int, pads: bool = False
    ) -> tuple[list[list[int]], bool]:
        """Captions in groups, ordered by their numbers of entities, each group within `chunk_mb`.

        Args:
            counts: U numbers of entities.
            relation_counts: U numbers of relations that are scored in the same chunk.
            num_images: B.
            pads: whether captions of a group may differ in their numbers of entities. They are padded to the last.

        Returns:
            The groups, and whether the backward pass should compute each again to save memory. Chunks that are small
            together (`KEPT_SHARE` of one, `KEPT_SHARE_PADDED` if they are padded) stay in memory, which is faster.
        """
        widest = max(self.num_patches, self.dim)
        # Numbers per image in the largest tensor of each caption, and the number that `chunk_mb` allows.
        numbers = [max(e * widest, r * self.dim) for e, r in zip(counts, relation_counts, strict=True)]
        budget = self.chunk_mb * 2**20 / max(4, self.key_proj.weight.element_size()) / num_images
        chunks: list[list[int]] = []
        largest = 0
        for text in sorted(range(len(counts)), key=lambda text: (counts[text], numbers[text])):
            largest = max(largest, numbers[text])
            fits = bool(chunks) and (len(chunks[-1]) + 1) * largest <= budget
            if fits and (pads or counts[chunks[-1][0]] == counts[text]):
                chunks[-1].append(text)
            else:
                chunks.append([text])
                largest = numbers[text]
        return chunks, sum(numbers) > (KEPT_SHARE_PADDED if pads else KEPT_SHARE) * budget

    def chunk_slots(
        self, queries: Float[Tensor, "U E dim"], patches: BoundPatches, mask: Bool[Tensor, "U E"] | None = None
    ) -> Float[Tensor, "B U E dim"]:
        """The slots of captions from `queries` and `project`; with a mask, slots of padding have no meaning."""
        logits = queries.flatten(0, 1) @ patches.keys.flatten(0, 1).t()
        logits = logits.view(*queries.shape[:2], *patches.keys.shape[:2])  # (U, E, B, N)
        mask = None if mask is None else mask[..., None, None]
        weights = (self._competed(logits, patches.defaults, mask) + EPSILON).flatten(0, 1)  # (U * E, B, N)
        return _means(weights.transpose(0, 1), patches.values).unflatten(1, queries.shape[:2])

    def _competed(
        self, logits: Float[Tensor, "U E *B N"], defaults: Float[Tensor, "B N"], mask: Tensor | None
    ) -> Float[Tensor, "U E *B N"]:
        """Logits -> a: the softmax over a caption's entities (in the mask) and the defaults, or over patches.

        Without B caption i has image i alone.
        """
        if self.competition == "keys":
            return logits.softmax(dim=-1)
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf)
        others = defaults.view(-1, 1, *logits.shape[2:]).expand_as(logits[:, :1])
        return torch.cat([logits, others], dim=1).softmax(dim=1)[:, :-1]

    def _against_keys(self, tokens: Float[Tensor, "*shape dim"]) -> Float[Tensor, "*shape dim"]:
        return self._wide(self.query_proj(tokens) @ self.key_proj.weight) * self.dim**-0.5

    def _cast(self, tensor: Tensor) -> Tensor:
        """In the weights' precision."""
        return tensor.to(self.key_proj.weight.dtype)

    def _wide(self, tensor: Tensor) -> Tensor:
        """In fp32, or the weights' precision if it is wider."""
        return tensor.to(torch.promote_types(self.key_proj.weight.dtype, torch.float32))


def _means(weights: Float[Tensor, "B M N"], values: Float[Tensor, "B N dim"]) -> Float[Tensor, "B M dim"]:
    """Weighted means over patches."""
    return weights @ values / weights.sum(dim=-1, keepdim=True)

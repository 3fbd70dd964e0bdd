"""Patches of images and entities of captions -> visual slots: the binding module.

An entity's slot is a weighted mean of the patches' values. The entities of one caption compete for each patch, with one
another and with default tokens that take what no entity names. Image encoder before, `scoring.py` after it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dino_sparo.oc_clip.config import BindingConfig

EPSILON = 1e-8  # of the renormalisation over patches, as in the paper's listing
MLP_RATIO = 2
DEFAULT_CHUNK_MB = 256
KEPT_SHARE = 1 / 32  # of `chunk_mb`: below it nothing is computed twice
NORM_EPS = 1e-5  # of all LayerNorms; torch's, which OpenCLIP's blocks have


class BoundPatches(NamedTuple):
    """What all captions need of some images.

    Attributes:
        keys: (B, N, dim), K^, not projected.
        values: (B, N, dim), V.
        defaults: (B, N), logsumexp of the default tokens' logits; None where there are none.
    """

    keys: Float[Tensor, "B N dim"]
    values: Float[Tensor, "B N dim"]
    defaults: Float[Tensor, "B N"] | None


class Binding(nn.Module):
    """Inverted cross-attention of a caption's entities over an image's patches: one head, one pass.

        h      = Lin(GELU(Lin(x))) + pos, then pre-norm self-attention blocks           x (N, image_dim): the patches
        K, V   = W_k LN(h W_1 + b_1), W_v LN(h W_2 + b_2)                               (N, dim)
        q_m    = W_q LN(entity_m);  q_c = W_q default_c
        a_mn   = exp(q_m . K_n / sqrt(dim)) / sum_j exp(q_j . K_n / sqrt(dim))          j: caption's entities, defaults
        w_mn   = (a_mn + 1e-8) / sum_n (a_mn + 1e-8)
        slot_m = sum_n w_mn V_n

    Letters: E and U are the paper's M and B; dim is its d, num_default its N_d. The slots of default tokens are not
    needed. With `competition="keys"`, the paper's ablation, a is an ordinary softmax over patches.
    Source: OC-CLIP, equation 1, figure 9 and table 11. The listing adds to equation 1 the patches' network, positions,
    norms of keys and values and the renormalisation; the norm of the queries stands in table 11 alone. Defaults are
    not normalised. What the paper leaves open is drawn as torch draws it.

    The listing pads all captions to one size and keeps (B, U, E + num_default, N) weights. Here captions of one number
    of entities are taken together, so nothing is padded; the defaults enter the softmax as one query, whose logit for
    patch n is logsumexp_c q_c . K_n and which all captions share; and a chunk of captions is bounded. With K = W_k K^
    the products are taken as q . K = (W_k^T q) . K^, so W_k multiplies the few entities, not the patches. Logits,
    softmax and sums are fp32 or wider also under autocast.

    Args:
        image_dim: width of the patches.
        num_patches: N.
        sizes: the others; without default tokens every caption needs an entity.
        chunk_mb: size of the largest tensor of a chunk, megabytes (2^20 bytes); a few of that size live together. One
            caption with all images is the smallest chunk. The backward pass computes chunks again if they hold more
            than `KEPT_SHARE` of it together.

    Raises:
        ValueError: there are no patches, or a chunk has no size.
    """

    def __init__(
        self, image_dim: int, num_patches: int, sizes: BindingConfig, chunk_mb: int | float = DEFAULT_CHUNK_MB
    ) -> None:
        super().__init__()
        if num_patches < 1 or chunk_mb <= 0:
            raise ValueError(f"num_patches={num_patches}, chunk_mb={chunk_mb}; give positive numbers")
        dim = sizes.dim
        self.num_patches, self.dim, self.num_default = num_patches, dim, sizes.num_default
        self.competition, self.chunk_mb = sizes.competition, chunk_mb
        self.patch_mlp = nn.Sequential(nn.Linear(image_dim, dim), nn.GELU(), nn.Linear(dim, dim))
        self.positions = nn.Parameter(sizes.position_std * torch.randn(num_patches, dim))
        # Versions of timm differ in the norm's epsilon that they take unasked.
        norm_layer: Any = partial(nn.LayerNorm, eps=NORM_EPS)
        blocks = (
            Block(dim, sizes.num_heads, MLP_RATIO, qkv_bias=True, norm_layer=norm_layer)
            for _ in range(sizes.num_layers)
        )
        self.blocks = nn.Sequential(*blocks)
        self.to_keys_values = nn.Linear(dim, 2 * dim)
        self.key_norm, self.value_norm, self.query_norm = (norm_layer(dim) for _ in range(3))
        self.key_proj, self.value_proj, self.query_proj = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        # Without tokens there is nothing to train: DDP would wait for a gradient.
        self.default_tokens = nn.Parameter(torch.randn(sizes.num_default, dim), requires_grad=sizes.num_default > 0)

    def extra_repr(self) -> str:
        """Sizes and competition, for the log."""
        return f"{self.num_patches} patches, {self.num_default} default tokens, competition over {self.competition}"

    def encode_patches(
        self, patches: Float[Tensor, "B N image_dim"]
    ) -> tuple[Float[Tensor, "B N dim"], Float[Tensor, "B N dim"]]:
        """Patches -> keys and values, normalised, not yet projected; once per image. Runs in the caller's precision.

        Args:
            patches: (B, N, image_dim), the image encoder's last tokens after its LayerNorm, without class token.

        Raises:
            ValueError: the number of patches is not `num_patches`.
        """
        if patches.ndim != 3 or patches.shape[1] != self.num_patches:
            raise ValueError(
                f"patches have shape {tuple(patches.shape)}; the binding was built for {self.num_patches} per image: "
                "give (B, N, image_dim) of images of the size that it was built for"
            )
        hidden = self.blocks(self.patch_mlp(patches) + self.positions)
        keys, values = self.to_keys_values(hidden).chunk(2, dim=-1)
        return self.key_norm(keys), self.value_norm(values)

    def bind(
        self,
        entities: Float[Tensor, "U E dim"],
        mask: Bool[Tensor, "U E"],
        keys: Float[Tensor, "B N dim"],
        values: Float[Tensor, "B N dim"],
        counts: Sequence[int] | None = None,
    ) -> Float[Tensor, "B U E dim"]:
        """The slots of all captions in all images; those of padding are 0.

        `pair_scores.score_pairs` scores slots without keeping them.

        Args:
            entities: (U, E, dim).
            mask: (U, E), True where there is an entity.
            keys: (B, N, dim), from `encode_patches`.
            values: (B, N, dim), likewise.
            counts: U numbers of entities, where they come before the padding. Without them the mask is read, which
                waits for the device.

        Raises:
            ValueError: a caption without entities where there are no default tokens.
        """
        with torch.autocast(keys.device.type, enabled=False):
            patches, queries = self.project(keys, values), self.queries(entities).flatten(0, 1)
            rows = _rows(mask) if counts is None else [range(count) for count in counts]
            width = mask.shape[1]
            slots, where = [values.new_zeros(len(keys), 1, self.dim, dtype=patches.values.dtype)], [0] * mask.numel()
            end = 1
            sizes = [len(row) for row in rows], [0] * len(rows), len(keys)
            chunk_slots = self.recomputed(self.chunk_slots, *sizes)
            for texts in self.chunks(*sizes):
                chosen = [[text * width + entity for entity in rows[text]] for text in texts]
                index = torch.tensor(chosen, device=queries.device)
                slots.append(chunk_slots(queries[index], patches).flatten(1, 2))
                for flat in (number for row in chosen for number in row):
                    where[flat], end = end, end + 1
            packed = torch.cat(slots, dim=1)
            return packed[:, torch.tensor(where, device=packed.device, dtype=torch.long)].unflatten(1, mask.shape)

    def bind_matched(
        self,
        entities: Float[Tensor, "B E dim"],
        mask: Bool[Tensor, "B E"],
        keys: Float[Tensor, "B N dim"],
        values: Float[Tensor, "B N dim"],
    ) -> Float[Tensor, "B E dim"]:
        """The slots of caption i in image i alone, for the local loss; those of padding are 0.

        Every caption needs an entity where entities compete without default tokens: else gradients are NaN.
        """
        with torch.autocast(keys.device.type, enabled=False):
            patches = self.project(keys, values)
            logits = self.queries(entities) @ patches.keys.transpose(1, 2)  # (B, E, N)
            if self.competition == "queries":
                logits = logits.masked_fill(~mask[..., None], -torch.inf)
            weights = self._competed(logits, patches.defaults) + EPSILON
            return _means(weights, patches.values).masked_fill(~mask[..., None], 0)

    def attention(
        self, entities: Float[Tensor, "U E dim"], mask: Bool[Tensor, "U E"], keys: Float[Tensor, "B N dim"]
    ) -> Float[Tensor, "B U E N"]:
        """The entities' shares a of each patch, for pictures; with the defaults' they sum to one over a caption.

        With `competition="keys"` they sum to one over the patches instead. The share of padding is 0.

        Args:
            entities: (U, E, dim).
            mask: (U, E), True where there is an entity.
            keys: (B, N, dim), from `encode_patches`.
        """
        return self._shares(entities, mask, keys)[:, :, : entities.shape[1]]

    def default_attention(
        self, entities: Float[Tensor, "U E dim"], mask: Bool[Tensor, "U E"], keys: Float[Tensor, "B N dim"]
    ) -> Float[Tensor, "B U num_default N"]:
        """The default tokens' shares of each patch, beside those of `attention`, whose arguments it takes."""
        return self._shares(entities, mask, keys)[:, :, entities.shape[1] :]

    def _shares(self, entities: Tensor, mask: Tensor, keys: Tensor) -> Float[Tensor, "B U everything N"]:
        with torch.autocast(keys.device.type, enabled=False):
            defaults = self._default_queries().expand(len(entities), -1, -1)
            everything = torch.cat([self.queries(entities), defaults], dim=1)
            logits = torch.einsum("bnd,uqd->buqn", self._wide(keys), everything)
            allowed = torch.cat([mask, mask.new_ones(len(mask), self.num_default)], dim=1)
            if self.competition == "keys":
                return logits.softmax(dim=-1).masked_fill(~allowed[:, :, None], 0)
            return logits.masked_fill(~allowed[:, :, None], -torch.inf).softmax(dim=2)

    # The parts of `bind`; `pair_scores.py` puts them together with the scores.

    def project(self, keys: Float[Tensor, "B N dim"], values: Float[Tensor, "B N dim"]) -> BoundPatches:
        """K^, V and the defaults' part of the softmax; once per image."""
        keys = self._wide(keys)
        defaults = (keys @ self._default_queries().t()).logsumexp(dim=-1) if self.num_default else None
        return BoundPatches(keys, self._wide(self.value_proj(self._cast(values))), defaults)

    def queries(self, entities: Float[Tensor, "U E dim"]) -> Float[Tensor, "U E dim"]:
        """W_k^T q / sqrt(dim) of entities."""
        return self._against_keys(self.query_norm(self._cast(entities)))

    def chunks(self, counts: Sequence[int], relation_counts: Sequence[int], num_images: int) -> list[list[int]]:
        """Captions in groups of one number of entities, each group within `chunk_mb`; without those that have none.

        Args:
            counts: U numbers of entities.
            relation_counts: U numbers of relations that are scored in the same chunk.
            num_images: B.

        Raises:
            ValueError: a caption without entities where there are no default tokens.
        """
        if not self.num_default and self.competition == "queries" and 0 in counts:
            raise ValueError(
                f"caption {list(counts).index(0)} has no entity, and with num_default=0 nothing takes the patches; "
                "give every caption an entity (graphs.normalize) or the binding default tokens"
            )
        numbers, budget = self._numbers(counts, relation_counts, num_images)
        chunks: list[list[int]] = []
        room = 0.0
        some = (text for text, count in enumerate(counts) if count)
        for text in sorted(some, key=lambda text: (counts[text], numbers[text])):
            if chunks and counts[chunks[-1][0]] == counts[text] and numbers[text] <= room:
                chunks[-1].append(text)
            else:
                chunks.append([text])
                room = budget
            room -= numbers[text]
        return chunks

    def _numbers(
        self, counts: Sequence[int], relation_counts: Sequence[int], num_images: int
    ) -> tuple[list[int], float]:
        """How many numbers per image the largest tensor of each caption has, and how many `chunk_mb` allows."""
        largest = max(self.num_patches, self.dim)
        numbers = [max(own * largest, related * self.dim) for own, related in zip(counts, relation_counts, strict=True)]
        return numbers, self.chunk_mb * 2**20 / max(4, self.key_proj.weight.element_size()) / num_images

    def recomputed(
        self, function: Callable[..., Tensor], counts: Sequence[int], relation_counts: Sequence[int], num_images: int
    ) -> Callable[..., Tensor]:
        """The same function of a chunk; while training, the backward pass computes it again and nothing in it is kept.

        Where all chunks together are small, `KEPT_SHARE` of one, they are kept: that is faster. The arguments are those
        of `chunks`.
        """
        numbers, budget = self._numbers(counts, relation_counts, num_images)
        if not (self.training and torch.is_grad_enabled()) or sum(numbers) <= KEPT_SHARE * budget:
            return function
        return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)

    def chunk_slots(self, queries: Float[Tensor, "U E dim"], patches: BoundPatches) -> Float[Tensor, "B U E dim"]:
        """The slots of captions without padding, from `queries` and `project`."""
        logits = queries.flatten(0, 1) @ patches.keys.flatten(0, 1).t()
        logits = logits.view(*queries.shape[:2], *patches.keys.shape[:2])  # (U, E, B, N)
        weights = (self._competed(logits, patches.defaults) + EPSILON).flatten(0, 1)  # (U * E, B, N)
        return _means(weights.transpose(0, 1), patches.values).unflatten(1, queries.shape[:2])

    def _competed(
        self, logits: Float[Tensor, "U E *B N"], defaults: Float[Tensor, "B N"] | None
    ) -> Float[Tensor, "U E *B N"]:
        """Logits -> a: the softmax over a caption's entities and the defaults, or over patches.

        Without B caption i has image i alone.
        """
        if self.competition == "keys":
            return logits.softmax(dim=-1)
        if defaults is None:
            return logits.softmax(dim=1)
        others = defaults.view(-1, 1, *logits.shape[2:]).expand_as(logits[:, :1])
        return torch.cat([logits, others], dim=1).softmax(dim=1)[:, :-1]

    def _default_queries(self) -> Float[Tensor, "num_default dim"]:
        return self._against_keys(self.default_tokens)

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


def _rows(mask: Bool[Tensor, "U E"]) -> list[list[int]]:
    """For each caption, where its mask is True."""
    return [[entity for entity, kept in enumerate(row) if kept] for row in mask.tolist()]

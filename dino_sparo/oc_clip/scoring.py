"""Slots, entities and relations -> the structured similarity of images and graphs."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dino_sparo.oc_clip.config import MIN_COEF, BindingConfig

NORM_EPS = 1e-8  # smallest norm that a cosine divides by


class Scoring(nn.Module):
    """How well the slots of an image fit the entities and relations of a graph: a number in [-1, 1].

        S(x, G) = [alpha sum_m cos(N_m, S_m) + beta sum_p f(r_p, S_s, S_o)] / (alpha E + beta R)
        f(r, S_s, S_o) = cos(r, f_s [r; S_s] + f_o [r; S_o])
        f_s, f_o: Linear(rel_dim + dim, rel_dim) - GELU - Linear(rel_dim, rel_dim)

    N_m are entities, S_m their slots, r_p relations with subject s and object o. E and R are this graph's own numbers,
    the paper's M and P. Only alpha / beta matters. Source: OC-CLIP, equations 2 and 3, table 11; the MLPs' hidden width
    and activation are ours, as is the bound of `MIN_COEF`.

    With `relation="mlp"`, an ablation that the paper only names, f = cos(r, g [r; S_s; S_o]) with one MLP g of the same
    hidden width.

    The first layer is split, W [r; S] = W_r r + W_S S: its first part is computed once per relation, not per image.
    Everything is computed in the weights' precision, fp32 or wider, also under autocast.

    Attributes:
        subject: f_s; None with `relation="mlp"`.
        object: f_o, likewise.
        joint: g; None otherwise.
        ent_coef: (), alpha. A score takes it as at least `MIN_COEF`; call `clamp_coefs_` after each update, so that it
            does not fall far below.
        rel_coef: (), beta, likewise.

    Args:
        sizes: widths, coefficients at the start, and how a relation is scored.
    """

    def __init__(self, sizes: BindingConfig) -> None:
        super().__init__()
        self.dim, self.rel_dim = sizes.dim, sizes.rel_dim
        is_additive = sizes.relation == "additive"
        self.subject: Any = _mlp(sizes.rel_dim, sizes.dim) if is_additive else None
        self.object: Any = _mlp(sizes.rel_dim, sizes.dim) if is_additive else None
        self.joint = None if is_additive else _mlp(sizes.rel_dim, 2 * sizes.dim)
        self.ent_coef = nn.Parameter(torch.tensor(float(sizes.ent_coef)))
        self.rel_coef = nn.Parameter(torch.tensor(float(sizes.rel_coef)))

    @torch.no_grad()
    def clamp_coefs_(self) -> None:
        """Keep both coefficients at `MIN_COEF` or above; after each update."""
        self.ent_coef.clamp_(min=MIN_COEF)
        self.rel_coef.clamp_(min=MIN_COEF)

    def scores(
        self,
        entities: Float[Tensor, "U E dim"],
        entity_mask: Bool[Tensor, "U E"],
        relations: Float[Tensor, "U R rel_dim"],
        subjects: Int[Tensor, "U R"],
        objects: Int[Tensor, "U R"],
        relation_mask: Bool[Tensor, "U R"],
        slots: Float[Tensor, "B U E dim"],
    ) -> Float[Tensor, "B U"]:
        """Scores of all images and graphs from the slots of each graph in each image.

        With slots (1, U, E, dim) of `Binding.bind_matched` these are the scores of matched pairs, (1, U).

        Args:
            entities: (U, E, dim).
            entity_mask: (U, E), True where there is an entity; every graph has at least one (without any its score
                is NaN).
            relations: (U, R, rel_dim), the predicates' embeddings; R may be 0.
            subjects: (U, R), indices into the graph's own entities; any valid index where the mask is False.
            objects: (U, R), likewise.
            relation_mask: (U, R), True where there is a relation.
            slots: (B, U, E, dim).
        """
        with torch.autocast(slots.device.type, enabled=False):
            fits = self.relation_scores(relations, subjects, objects, slots).masked_fill(~relation_mask, 0)
            return self.combined(entities, entity_mask, slots, fits, relation_mask.sum(dim=-1))

    def combined(
        self,
        entities: Float[Tensor, "U E dim"],
        entity_mask: Bool[Tensor, "U E"],
        slots: Float[Tensor, "B U E dim"],
        fits: Float[Tensor, "B U R"],
        num_relations: Int[Tensor, " U"],
    ) -> Float[Tensor, "B U"]:
        """Scores from the slots and `relation_scores`; arguments as in `scores`.

        Args:
            entities: (U, E, dim).
            entity_mask: (U, E).
            slots: (B, U, E, dim).
            fits: (B, U, R), 0 where there is no relation.
            num_relations: (U,).
        """
        with torch.autocast(slots.device.type, enabled=False):
            # The gradient passes below the bound too, so that a coefficient can come back.
            coefs = (self.ent_coef, self.rel_coef)
            alpha, beta = (coef + (coef.clamp(min=MIN_COEF) - coef).detach() for coef in coefs)
            cosines = _cosine(self._cast(entities), self._cast(slots)).masked_fill(~entity_mask, 0)
            total = alpha * entity_mask.sum(dim=-1) + beta * num_relations
            return (alpha * cosines.sum(dim=-1) + beta * fits.sum(dim=-1)) / total

    def relation_scores(
        self,
        relations: Float[Tensor, "U R rel_dim"],
        subjects: Int[Tensor, "U R"],
        objects: Int[Tensor, "U R"],
        slots: Float[Tensor, "B U E dim"],
    ) -> Float[Tensor, "B U R"]:
        """f of every relation in every image, padded ones too; arguments as in `scores`."""
        with torch.autocast(slots.device.type, enabled=False):
            relations, slots = self._cast(relations), self._cast(slots)
            if self.joint is not None:
                return _cosine(relations, self._projected(self.joint, relations, (subjects, objects), slots))
            subject = self._projected(self.subject, relations, (subjects,), slots)
            return _cosine(relations, subject + self._projected(self.object, relations, (objects,), slots))

    def _projected(
        self,
        mlp: Any,
        relations: Float[Tensor, "U R rel_dim"],
        ends: Sequence[Int[Tensor, "U R"]],
        slots: Float[Tensor, "B U E dim"],
    ) -> Float[Tensor, "B U R rel_dim"]:
        """MLP of [r; S] or [r; S; S], S the slots that `ends` point to."""
        first, activation, last = mlp.children()
        relation_weight, *slot_weights = first.weight.split([self.rel_dim, *[self.dim] * len(ends)], dim=1)
        hidden = F.linear(relations, relation_weight, first.bias)
        rows = torch.arange(len(relations), device=relations.device)[:, None]
        for end, weight in zip(ends, slot_weights, strict=True):
            # Indexing adds up in one order in its backward pass, on every device; `gather` does not.
            hidden = F.linear(slots[:, rows, end], weight) + hidden  # (B, U, R, rel_dim)
        projected: Tensor = last(activation(hidden))
        return projected

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.ent_coef.dtype)


def _mlp(rel_dim: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(rel_dim + width, rel_dim), nn.GELU(), nn.Linear(rel_dim, rel_dim))


def _cosine(texts: Float[Tensor, "U item width"], images: Float[Tensor, "B U item width"]) -> Float[Tensor, "B U item"]:
    """Cosine of every text's items with their counterparts in every image."""
    # einsum letters: b image, u text, r item, w width
    products = torch.einsum("urw,burw->bur", texts, images)
    norms = [torch.linalg.vector_norm(tensor, dim=-1).clamp(min=NORM_EPS) for tensor in (texts, images)]
    return products / (norms[0] * norms[1])

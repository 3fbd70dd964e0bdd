"""Slots, entities and relations -> the structured similarity of images and graphs; `score_all_pairs` binds, too."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dino_sparo.oc_clip.batches import EncodedGraphs
from dino_sparo.oc_clip.binding import Binding, BindingConfig

MIN_COEF = 1e-3  # of entities and of relations in a score
NORM_EPS = 1e-8  # smallest norm that a cosine divides by


class Scoring(nn.Module):
    """Similarity S of the slots of an image and the entities and relations of a graph, in [-1, 1].

        S(x, G) = [alpha sum_m cos(N_m, S_m) + beta sum_p f(r_p, S_s, S_o)] / (alpha E + beta R)
        f(r, S_s, S_o) = cos(r, f_s [r; S_s] + f_o [r; S_o])
        f_s, f_o: Linear(rel_dim + dim, rel_dim) - GELU - Linear(rel_dim, rel_dim)

    N_m are entities, S_m their slots, r_p relations with subject s and object o. E and R are the graph's own numbers,
    the paper's M and P. Only alpha / beta matters. Source: OC-CLIP, equations 2 and 3, table 11. The hidden width and
    the activation of the MLPs are our choice, and so is the lower bound `MIN_COEF` of alpha and beta.

    With `relation="mlp"`, an ablation that the paper only names, f = cos(r, g [r; S_s; S_o]) with one MLP g of the same
    hidden width.

    The first layer is split, W [r; S] = W_r r + W_S S: W_r r is computed once per relation, not per image. Everything
    is computed in the weights' precision, fp32 or wider, also under autocast.

    Attributes:
        subject: f_s; None with `relation="mlp"`.
        object: f_o; None with `relation="mlp"`.
        joint: g; None with `relation="additive"`.
        ent_coef: (), alpha.
        rel_coef: (), beta.
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

    def scores(self, graphs: EncodedGraphs, slots: Float[Tensor, "B U E dim"]) -> Float[Tensor, "B U"]:
        """`forward` of encoded graphs, not compiled, for evaluations: equal graphs have bit-identical scores."""
        return self.forward(*graphs.tensors, slots)

    def forward(
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

        Slots (1, U, E, dim) of `Binding.bind_matched` give the scores of matched pairs, (1, U).
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
        """Scores from slots and from `relation_scores`, `fits`, which are 0 for padding; called without autocast."""
        # The values are clamped, their gradients are not, so that a coefficient below the bound can grow again.
        alpha, beta = (coef + (coef.clamp(min=MIN_COEF) - coef).detach() for coef in (self.ent_coef, self.rel_coef))
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
        """f of every relation in every image, of padding too."""
        with torch.autocast(slots.device.type, enabled=False):
            relations, slots = self._cast(relations), self._cast(slots)
            rows = torch.arange(len(relations), device=relations.device)[:, None]
            # The backward pass of indexing is deterministic on every device; the one of `gather` is not. It sorts, so
            # both ends are indexed at once.
            ends = slots[:, rows, torch.cat([subjects, objects], dim=1)].chunk(2, dim=2)  # 2 (B, U, R, dim)
            if self.joint is not None:
                return _cosine(relations, self._projected(self.joint, relations, ends))
            subject = self._projected(self.subject, relations, ends[:1])
            object_ = self._projected(self.object, relations, ends[1:])
            return _cosine(relations, subject + object_)

    def _projected(
        self, mlp: Any, relations: Float[Tensor, "U R rel_dim"], ends: Sequence[Float[Tensor, "B U R dim"]]
    ) -> Float[Tensor, "B U R rel_dim"]:
        """MLP of [r; S] or [r; S; S], S the slots of the relations' ends."""
        first, activation, last = mlp.children()
        relation_weight, *slot_weights = first.weight.split([self.rel_dim, *[self.dim] * len(ends)], dim=1)
        hidden = F.linear(relations, relation_weight, first.bias)
        for end, weight in zip(ends, slot_weights, strict=True):
            hidden = F.linear(end, weight) + hidden  # (B, U, R, rel_dim)
        projected: Tensor = last(activation(hidden))
        return projected

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.ent_coef.dtype)


def _mlp(rel_dim: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(rel_dim + width, rel_dim), nn.GELU(), nn.Linear(rel_dim, rel_dim))


def _cosine(texts: Float[Tensor, "U item width"], images: Float[Tensor, "B U item width"]) -> Float[Tensor, "B U item"]:
    """Cosine of each item of a text (entity or relation) with its counterpart in every image."""
    # einsum letters: b image, u text, r item, w width
    products = torch.einsum("urw,burw->bur", texts, images)
    norms = [torch.linalg.vector_norm(tensor, dim=-1).clamp(min=NORM_EPS) for tensor in (texts, images)]
    return products / (norms[0] * norms[1])


def score_all_pairs(
    binding: Binding,
    scoring: Scoring,
    graphs: EncodedGraphs,
    keys: Float[Tensor, "B N dim"],
    values: Float[Tensor, "B N dim"],
) -> Float[Tensor, "B U"]:
    """S of every image and graph; no slot is kept.

    Graphs with equal numbers of entities are bound and scored together, in chunks bounded by `binding.chunk_mb`.
    Relations are not padded: the graphs of a chunk are joined into one graph, whose relations are scored together.
    Training on the devices `Binding.pads_on` pads entities and relations of a chunk instead. While training, only the
    scores of large chunks stay in memory (`Binding.chunks`).
    """
    pads = binding.training and keys.device.type in binding.pads_on
    chunks, is_large = binding.chunks(graphs.entity_counts, graphs.relation_counts, len(keys), pads)

    def call(score: Callable[..., Tensor], *inputs: Any) -> Tensor:
        if is_large and binding.training and torch.is_grad_enabled():
            return checkpoint(score, *inputs, use_reentrant=False, preserve_rng_state=False)
        return score(*inputs)

    def score_padded(width: int, index: Tensor | None = None) -> Tensor:
        tensors = graphs.tensors if index is None else [tensor[index] for tensor in graphs.tensors]
        entities, mask = (tensor[:, :width] for tensor in tensors[:2])
        return scoring(entities, mask, *tensors[2:], binding(entities, mask, keys, values))

    def score_joined(width: int, index: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        with torch.autocast(keys.device.type, enabled=False):
            entities, mask = (tensor[index, :width] for tensor in (graphs.entities, graphs.entity_mask))
            slots = binding.chunk_slots(queries[index, :width], patches)
            chosen = index[rows], columns
            relations = graphs.relations[chosen][None]
            subjects, objects = (ends[chosen][None] + rows * width for ends in (graphs.subjects, graphs.objects))
            scores = scoring.relation_scores(relations, subjects, objects, slots.flatten(1, 2)[:, None])
            fits = scores.new_zeros(*slots.shape[:2], graphs.relations.shape[1])
            fits[:, rows, columns] = scores[:, 0]
            return scoring.combined(entities, mask, slots, fits, graphs.relation_mask[index].sum(dim=-1))

    widths = [max(graphs.entity_counts[text] for text in texts) for texts in chunks]
    if pads and len(chunks) == 1:  # in their order: the backward pass of indexing sorts, in many launches
        return call(score_padded, *widths)
    order = [text for texts in chunks for text in texts]
    numbers = [sorted(range(len(order)), key=order.__getitem__), *chunks]
    if pads:  # each chunk projects the patches again
        original, *indices = _on_device(numbers, keys.device)
        parts = [call(score_padded, width, index) for width, index in zip(widths, indices, strict=True)]
        return torch.cat(parts, dim=1)[:, original]
    for texts in chunks:
        numbers.append([row for row, text in enumerate(texts) for _ in range(graphs.relation_counts[text])])
        numbers.append([column for text in texts for column in range(graphs.relation_counts[text])])
    original, *indices = _on_device(numbers, keys.device)
    with torch.autocast(keys.device.type, enabled=False):
        patches, queries = binding.project(keys, values), binding.queries(graphs.entities)
    captions, relations = indices[: len(chunks)], indices[len(chunks) :]
    inputs = zip(widths, captions, relations[::2], relations[1::2], strict=True)
    parts = [call(score_joined, *of_chunk) for of_chunk in inputs]
    return torch.cat(parts, dim=1)[:, original]


def _on_device(numbers: Sequence[Sequence[int]], device: torch.device) -> tuple[Int[Tensor, " _"], ...]:
    """Lists of numbers as tensors on the device, in one copy that does not wait for the device."""
    together = torch.tensor([number for row in numbers for number in row], dtype=torch.long)
    return together.to(device, non_blocking=True).split([len(row) for row in numbers])

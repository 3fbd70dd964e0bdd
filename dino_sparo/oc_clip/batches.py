"""Scene graphs of a batch -> padded index tensors, each phrase once; embeddings of phrases -> `EncodedGraphs`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from dino_sparo.oc_clip.graph import SceneGraph


@dataclass(frozen=True)
class GraphBatch:
    """U graphs, padded to the largest E and R among them; padding comes last and its indices are 0.

    A graph may come with K - 1 false graphs, which differ from the graph in the ends of relations alone.

    Attributes:
        phrases: the different phrases and predicates, in the order of their first use.
        entities: (U, E), indices into the phrases.
        entity_mask: (U, E), False for padding.
        predicates: (U, R), indices into the phrases.
        relation_mask: (U, R), False for padding.
        ends: (K, 2, U, R), subjects and objects of the true graphs, then of the false ones; indices into the graph's
            own entities.
        entity_counts: U numbers of entities, on the host.
        relation_counts: U numbers of relations, on the host.
    """

    phrases: tuple[str, ...]
    entities: Int[Tensor, "U E"]
    entity_mask: Bool[Tensor, "U E"]
    predicates: Int[Tensor, "U R"]
    relation_mask: Bool[Tensor, "U R"]
    ends: Int[Tensor, "K 2 U R"]
    entity_counts: tuple[int, ...]
    relation_counts: tuple[int, ...]

    @property
    def is_altered(self) -> Bool[Tensor, " U"]:
        """Whether the first false graph differs from the true one."""
        return (self.ends[1] != self.ends[0]).any(dim=2).any(dim=0)


class EncodedGraphs(NamedTuple):
    """U graphs after the text encoder, padded like `GraphBatch`: padding comes last.

    Attributes:
        entities: (U, E, dim).
        entity_mask: (U, E), False for padding; every graph has at least one entity.
        relations: (U, R, rel_dim).
        subjects: (U, R), indices into the graph's own entities.
        objects: (U, R), indices into the graph's own entities.
        relation_mask: (U, R), False for padding.
        entity_counts: U numbers of entities, on the host.
        relation_counts: U numbers of relations, on the host.
    """

    entities: Float[Tensor, "U E dim"]
    entity_mask: Bool[Tensor, "U E"]
    relations: Float[Tensor, "U R rel_dim"]
    subjects: Int[Tensor, "U R"]
    objects: Int[Tensor, "U R"]
    relation_mask: Bool[Tensor, "U R"]
    entity_counts: tuple[int, ...]
    relation_counts: tuple[int, ...]


def look_up(
    graphs: GraphBatch, entities: Float[Tensor, "phrases dim"], relations: Float[Tensor, "phrases rel_dim"]
) -> EncodedGraphs:
    """The graphs of a batch with the embeddings of their phrases; indices move to the embeddings' device."""
    parts = (graphs.entities, graphs.entity_mask, graphs.predicates, graphs.ends[0], graphs.relation_mask)
    numbers, mask, predicates, ends, relation_mask = (part.to(entities.device, non_blocking=True) for part in parts)
    counts = graphs.entity_counts, graphs.relation_counts
    subjects, objects = ends
    return EncodedGraphs(entities[numbers], mask, relations[predicates], subjects, objects, relation_mask, *counts)


def batch_graphs(graphs: Sequence[SceneGraph], *false_graphs: Sequence[SceneGraph]) -> GraphBatch:
    """Pad U graphs, each with an entity, to one shape; K - 1 times U false graphs share entities and predicates."""
    numbers: dict[str, int] = {}
    entities = [[numbers.setdefault(phrase, len(numbers)) for phrase in graph.entities] for graph in graphs]
    predicates = [[numbers.setdefault(r.predicate, len(numbers)) for r in graph.relations] for graph in graphs]
    entity_counts, relation_counts = tuple(map(len, entities)), tuple(map(len, predicates))
    ends = [
        _padded([[getattr(relation, end) for relation in graph.relations] for graph in own])
        for own in (graphs, *false_graphs)
        for end in ("subject", "object")
    ]
    return GraphBatch(
        phrases=tuple(numbers),
        entities=_padded(entities),
        entity_mask=_mask(entity_counts),
        predicates=_padded(predicates),
        relation_mask=_mask(relation_counts),
        ends=torch.stack(ends).unflatten(0, (-1, 2)),
        entity_counts=entity_counts,
        relation_counts=relation_counts,
    )


def join_graphs(batches: Sequence[GraphBatch]) -> GraphBatch:
    """Several batches as one; a phrase of two batches stays twice, so that their embeddings can be concatenated."""
    starts = accumulate((len(batch.phrases) for batch in batches), initial=0)
    offsets = list(zip(batches, starts, strict=False))
    return GraphBatch(
        phrases=tuple(phrase for batch in batches for phrase in batch.phrases),
        entities=_joined([batch.entities + start for batch, start in offsets]),
        entity_mask=_joined([batch.entity_mask for batch in batches]),
        predicates=_joined([batch.predicates + start for batch, start in offsets]),
        relation_mask=_joined([batch.relation_mask for batch in batches]),
        ends=_joined([batch.ends for batch in batches]),
        entity_counts=tuple(count for batch in batches for count in batch.entity_counts),
        relation_counts=tuple(count for batch in batches for count in batch.relation_counts),
    )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Tensors (*K, U, width) concatenated along U, filled up with zeros to the largest width."""
    width = max(part.shape[-1] for part in parts)
    return torch.cat([F.pad(part, (0, width - part.shape[-1])) for part in parts], dim=-2)


def _padded(rows: Sequence[Sequence[int]]) -> Int[Tensor, "U width"]:
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.long).reshape(len(rows), width)


def _mask(counts: Sequence[int]) -> Bool[Tensor, "U width"]:
    return torch.arange(max(counts)) < torch.tensor(counts)[:, None]

"""Scene graphs of a batch -> padded index tensors, and each different phrase once for the text encoder."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F

from dino_sparo.oc_clip.graphs.graph import Relation, SceneGraph


@dataclass(frozen=True)
class GraphBatch:
    """U graphs, padded to the largest E and R among them; padding comes last and its indices are 0.

    Attributes:
        phrases: the different phrases and predicates, in the order of their first use; each is encoded once.
        entities: (U, E), indices into the phrases.
        entity_mask: (U, E), True where there is an entity.
        predicates: (U, R), indices into the phrases.
        subjects: (U, R), indices into the text's own entities.
        objects: (U, R), likewise.
        relation_mask: (U, R), True where there is a relation.
        entity_counts: U numbers of entities, on the host.
        relation_counts: U numbers of relations, on the host.
    """

    phrases: tuple[str, ...]
    entities: Int[Tensor, "U E"]
    entity_mask: Bool[Tensor, "U E"]
    predicates: Int[Tensor, "U R"]
    subjects: Int[Tensor, "U R"]
    objects: Int[Tensor, "U R"]
    relation_mask: Bool[Tensor, "U R"]
    entity_counts: tuple[int, ...]
    relation_counts: tuple[int, ...]


def batch_graphs(graphs: Sequence[SceneGraph]) -> GraphBatch:
    """Pad graphs to one shape.

    Raises:
        ValueError: there is no graph, or one has no entity.
    """
    if not graphs:
        raise ValueError("a batch of 0 graphs; give at least one")
    for number, graph in enumerate(graphs):
        if not graph.entities:
            raise ValueError(f"graph {number} of the batch has no entity; pass it through graphs.normalize first")
    numbers: dict[str, int] = {}
    entities = [[numbers.setdefault(phrase, len(numbers)) for phrase in graph.entities] for graph in graphs]
    predicates = [[numbers.setdefault(r.predicate, len(numbers)) for r in graph.relations] for graph in graphs]
    entity_counts = tuple(len(graph.entities) for graph in graphs)
    relation_counts = tuple(len(graph.relations) for graph in graphs)
    subjects, objects = relation_ends([graph.relations for graph in graphs])
    return GraphBatch(
        phrases=tuple(numbers),
        entities=_padded(entities),
        entity_mask=_mask(entity_counts),
        predicates=_padded(predicates),
        subjects=subjects,
        objects=objects,
        relation_mask=_mask(relation_counts),
        entity_counts=entity_counts,
        relation_counts=relation_counts,
    )


def join_graphs(batches: Sequence[GraphBatch]) -> GraphBatch:
    """The graphs of several batches as one batch; the batches' phrases stand one after the other.

    A phrase of two batches stays twice, so that embeddings of the batches' phrases can be put together as they are.
    """
    starts = [0]
    for batch in batches:
        starts.append(starts[-1] + len(batch.phrases))
    offsets = list(zip(batches, starts, strict=False))
    return GraphBatch(
        phrases=tuple(phrase for batch in batches for phrase in batch.phrases),
        entities=join_rows([batch.entities + start for batch, start in offsets]),
        entity_mask=join_rows([batch.entity_mask for batch in batches]),
        predicates=join_rows([batch.predicates + start for batch, start in offsets]),
        subjects=join_rows([batch.subjects for batch in batches]),
        objects=join_rows([batch.objects for batch in batches]),
        relation_mask=join_rows([batch.relation_mask for batch in batches]),
        entity_counts=tuple(count for batch in batches for count in batch.entity_counts),
        relation_counts=tuple(count for batch in batches for count in batch.relation_counts),
    )


def join_rows(rows: Sequence[Tensor]) -> Tensor:
    """Tensors (B, width) one below the other, filled up with zeros to the largest width."""
    width = max(part.shape[1] for part in rows)
    return torch.cat([F.pad(part, (0, width - part.shape[1])) for part in rows])


def relation_ends(relations: Sequence[Sequence[Relation]]) -> tuple[Int[Tensor, "U R"], Int[Tensor, "U R"]]:
    """Subjects and objects (U, R) of the relations of U graphs; of the negatives too, which share all else."""
    subjects = _padded([[relation.subject for relation in own] for own in relations])
    return subjects, _padded([[relation.object for relation in own] for own in relations])


def _padded(rows: Sequence[Sequence[int]]) -> Int[Tensor, "U width"]:
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.long).reshape(len(rows), width)


def _mask(counts: Sequence[int]) -> Bool[Tensor, "U width"]:
    return torch.arange(max(counts)) < torch.tensor(counts)[:, None]

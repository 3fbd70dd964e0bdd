"""Encoded patches and encoded graphs -> the scores of all pairs, without keeping any slot."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dino_sparo.oc_clip.binding import Binding, BoundPatches
from dino_sparo.oc_clip.scoring import Scoring


class EncodedGraphs(NamedTuple):
    """U graphs after the text encoder, padded as `graph_batches.GraphBatch` is: padding comes last.

    Attributes:
        entities: (U, E, dim).
        entity_mask: (U, E), True where there is an entity.
        relations: (U, R, rel_dim).
        subjects: (U, R), indices into the graph's own entities.
        objects: (U, R), likewise.
        relation_mask: (U, R), True where there is a relation.
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


def score_pairs(
    binding: Binding,
    scoring: Scoring,
    graphs: EncodedGraphs,
    keys: Float[Tensor, "B N dim"],
    values: Float[Tensor, "B N dim"],
) -> Float[Tensor, "B U"]:
    """S of every image and graph; equal to `scoring.scores(..., binding.bind(...))`.

    Graphs of one number of entities are bound and scored together, in chunks that `binding.chunk_mb` bounds. While
    training, the backward pass computes a chunk again: only its scores are kept.

    Args:
        binding: the binding module.
        scoring: the scoring module.
        graphs: the texts.
        keys: (B, N, dim), from `binding.encode_patches`.
        values: (B, N, dim), likewise.

    Raises:
        ValueError: a graph has no entity.
    """
    if 0 in graphs.entity_counts:
        number = graphs.entity_counts.index(0)
        raise ValueError(f"graph {number} has no entity to score; pass it through graphs.normalize first")

    def score_chunk(index: Tensor, width: int, length: int, queries: Tensor, patches: BoundPatches) -> Tensor:
        with torch.autocast(keys.device.type, enabled=False):
            return scoring.scores(
                graphs.entities[index, :width],
                graphs.entity_mask[index, :width],
                graphs.relations[index, :length],
                graphs.subjects[index, :length],
                graphs.objects[index, :length],
                graphs.relation_mask[index, :length],
                binding.chunk_slots(queries[index, :width], patches),
            )

    with torch.autocast(keys.device.type, enabled=False):
        patches, queries = binding.project(keys, values), binding.queries(graphs.entities)
    chunks = binding.chunks(graphs.entity_counts, graphs.relation_counts, len(keys))
    parts = []
    for texts in chunks:
        index = torch.tensor(texts, device=queries.device)
        width, length = graphs.entity_counts[texts[0]], max(graphs.relation_counts[text] for text in texts)
        parts.append(binding.recomputed(score_chunk, index, width, length, queries, patches))
    order = [text for texts in chunks for text in texts]
    column = sorted(range(len(order)), key=order.__getitem__)
    return torch.cat(parts, dim=1)[:, torch.tensor(column, device=keys.device)]

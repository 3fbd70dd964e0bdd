"""Encoded patches and encoded graphs -> the scores of all pairs, without keeping any slot."""

from collections.abc import Sequence
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


def scores_of_slots(scoring: Scoring, graphs: EncodedGraphs, slots: Float[Tensor, "B U E dim"]) -> Float[Tensor, "B U"]:
    """S of every image and graph from the slots of each graph in each image; see `Scoring.scores`."""
    return scoring.scores(*graphs[:6], slots)


def score_pairs(
    binding: Binding,
    scoring: Scoring,
    graphs: EncodedGraphs,
    keys: Float[Tensor, "B N dim"],
    values: Float[Tensor, "B N dim"],
) -> Float[Tensor, "B U"]:
    """S of every image and graph; equal to `scoring.scores(..., binding.bind(...))`.

    Graphs of one number of entities are bound and scored together, in chunks that `binding.chunk_mb` bounds, and no
    padding is computed: a chunk's relations are taken as those of one graph of all its entities. While training, the
    backward pass computes a chunk again, and only its scores are kept; not where all are small (`Binding.recomputed`).

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

    def score_chunk(index: Tensor, width: int, rows: Tensor, columns: Tensor, patches: BoundPatches) -> Tensor:
        with torch.autocast(keys.device.type, enabled=False):
            slots = binding.chunk_slots(queries[index, :width], patches)
            chosen = index[rows], columns
            relations = graphs.relations[chosen][None]
            subjects, objects = (ends[chosen][None] + rows * width for ends in (graphs.subjects, graphs.objects))
            scores = scoring.relation_scores(relations, subjects, objects, slots.flatten(1, 2)[:, None])
            fits = scores.new_zeros(*slots.shape[:2], graphs.relations.shape[1])
            fits[:, rows, columns] = scores[:, 0]
            entities, mask = graphs.entities[index, :width], graphs.entity_mask[index, :width]
            return scoring.combined(entities, mask, slots, fits, graphs.relation_mask[index].sum(dim=-1))

    with torch.autocast(keys.device.type, enabled=False):
        patches, queries = binding.project(keys, values), binding.queries(graphs.entities)
    sizes = graphs.entity_counts, graphs.relation_counts, len(keys)
    chunks, score = binding.chunks(*sizes), binding.recomputed(score_chunk, *sizes)
    order = [text for texts in chunks for text in texts]
    numbers = [sorted(range(len(order)), key=order.__getitem__)]
    for texts in chunks:
        rows = [row for row, text in enumerate(texts) for _ in range(graphs.relation_counts[text])]
        columns = [column for text in texts for column in range(graphs.relation_counts[text])]
        numbers += texts, rows, columns
    original, *indices = _on_device(numbers, keys.device)
    parts = [
        score(index, graphs.entity_counts[texts[0]], rows, columns, patches)
        for texts, index, rows, columns in zip(chunks, indices[::3], indices[1::3], indices[2::3], strict=True)
    ]
    return torch.cat(parts, dim=1)[:, original]


def _on_device(numbers: Sequence[Sequence[int]], device: torch.device) -> tuple[Int[Tensor, " _"], ...]:
    """Lists of numbers as tensors, in one copy that does not wait for the device, as `torch.tensor` would."""
    together = torch.tensor([number for own in numbers for number in own], dtype=torch.long)
    return together.to(device, non_blocking=True).split([len(own) for own in numbers])

"""Pairs of images and captions -> batches with the captions' graphs and two false graphs of each, as padded tensors.

    pairs, graphs -> `GraphPairBatch`                  in loading processes; each phrase once
    graphs, embeddings of phrases -> `EncodedGraphs`   on the device

All randomness is a pure function of (seed, epoch, index), like the randomness of crops and captions.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from dino_sparo.data.dataset import EpochDataset
from dino_sparo.data.samplers import image_rng
from dino_sparo.image_text.pairs.batches import PairBatch, PairDataset, PairItem, stack_images
from dino_sparo.image_text.pairs.tars import TarCaptions
from dino_sparo.image_text.towers import Tokens, tokenize, without_padding
from dino_sparo.oc_clip.graphs.files import CaptionGraphs
from dino_sparo.oc_clip.graphs.graph import LookupCounts, Relation, SceneGraph, spaced
from dino_sparo.runtime.faults import UserError


@dataclass(frozen=True)
class GraphBatch:
    """U graphs, padded to the largest E and R among them; padding comes last and its indices are 0.

    A graph may come with K - 1 false graphs, which differ from the graph in the ends of relations alone.

    Attributes:
        phrases: the different phrases and predicates, in the order of their first use.
        entities: (U, E), indices into the phrases.
        predicates: (U, R), indices into the phrases.
        ends: (K, 2, U, R), subjects and objects of the true graphs, then of the false ones; indices into the graph's
            own entities.
        entity_counts: U numbers of entities, on the host.
        relation_counts: U numbers of relations, on the host.
    """

    phrases: tuple[str, ...]
    entities: Int[Tensor, "U E"]
    predicates: Int[Tensor, "U R"]
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

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """All but the numbers on the host."""
        return self[:6]


def look_up(
    graphs: GraphBatch, entities: Float[Tensor, "phrases dim"], relations: Float[Tensor, "phrases rel_dim"]
) -> EncodedGraphs:
    """The graphs of a batch with the embeddings of their phrases; indices move to the embeddings' device."""
    counts = graphs.entity_counts, graphs.relation_counts
    parts = (graphs.entities, graphs.predicates, graphs.ends[0], *map(mask_of, counts))
    numbers, predicates, ends, mask, relation_mask = (part.to(entities.device, non_blocking=True) for part in parts)
    subjects, objects = ends
    return EncodedGraphs(entities[numbers], mask, relations[predicates], subjects, objects, relation_mask, *counts)


def batch_graphs(graphs: Sequence[SceneGraph], *false_graphs: Sequence[SceneGraph]) -> GraphBatch:
    """Pad U graphs, each with an entity, to one shape; K - 1 times U false graphs share entities and predicates."""
    numbers: dict[str, int] = {}
    entities = [[numbers.setdefault(phrase, len(numbers)) for phrase in graph.entities] for graph in graphs]
    predicates = [[numbers.setdefault(r.predicate, len(numbers)) for r in graph.relations] for graph in graphs]
    ends = [
        _padded([[getattr(relation, end) for relation in graph.relations] for graph in some_graphs])
        for some_graphs in (graphs, *false_graphs)
        for end in ("subject", "object")
    ]
    return GraphBatch(
        phrases=tuple(numbers),
        entities=_padded(entities),
        predicates=_padded(predicates),
        ends=torch.stack(ends).unflatten(0, (-1, 2)),
        entity_counts=tuple(map(len, entities)),
        relation_counts=tuple(map(len, predicates)),
    )


def join_graphs(batches: Sequence[GraphBatch]) -> GraphBatch:
    """Several batches as one; a phrase of two batches stays twice, so that their embeddings can be concatenated."""
    starts = accumulate((len(batch.phrases) for batch in batches), initial=0)
    offsets = list(zip(batches, starts, strict=False))
    return GraphBatch(
        phrases=tuple(phrase for batch in batches for phrase in batch.phrases),
        entities=_joined([batch.entities + start for batch, start in offsets]),
        predicates=_joined([batch.predicates + start for batch, start in offsets]),
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


def mask_of(counts: Sequence[int]) -> Bool[Tensor, "U width"]:
    """True for the entities, or relations, that each of U graphs has, False for padding."""
    return torch.arange(max(counts)) < torch.tensor(counts)[:, None]


# Pairs.

# Added to the seed, so that false graphs are independent of crops and captions.
NEGATIVES_STREAM = 0x2545F4914F6CDD1D


class GraphItem(NamedTuple):
    """One pair with the graph of its caption, two false graphs (`draw_negatives`), and the changes by normalising."""

    pair: PairItem
    graph: SceneGraph
    swapped: SceneGraph
    shuffled: SceneGraph
    counts: LookupCounts


@dataclass
class GraphPairBatch(PairBatch):
    """B pairs with the graphs of their captions, whose phrases are the `token_ids`; graph i belongs to image i.

    Graphs stay in the host's memory, since their sizes determine the chunks, and several batches are joined first.
    """

    graphs: GraphBatch
    graph_counts: LookupCounts


class GraphPairDataset(EpochDataset):
    """Pairs with the graphs of their captions, and the false graphs of `draw_negatives`.

    With `graph_key` the graph of a pair stands under this key in the `.json` member of its shard.
    """

    def __init__(
        self,
        pairs: PairDataset,
        graphs: CaptionGraphs,
        graph_key: str | None = None,
        relations: str = "all",
        symmetric: Container[str] = (),
    ) -> None:
        super().__init__(pairs.source, pairs.transform, pairs.seed)
        if graph_key is not None and not isinstance(self.source.captions, TarCaptions):
            raise UserError(f"--graph_key is for tar shards; {pairs.source.name} has none. Give --graphs FILE")
        self.pairs, self.graphs, self.graph_key = pairs, graphs, graph_key
        self.relations, self.symmetric = relations, symmetric

    def item(self, epoch: int, start: int) -> GraphItem:
        """The pair of an index in an epoch, its graph and false graphs."""
        pair = self.pairs.item(epoch, start)
        graph, counts = self.graph_of(pair)
        rng = image_rng(self.seed + NEGATIVES_STREAM, epoch, start)
        return GraphItem(pair, graph, *draw_negatives(graph, rng, self.relations, self.symmetric), counts)

    def graph_of(self, pair: PairItem) -> tuple[SceneGraph, LookupCounts]:
        """The graph of a pair's caption, and the changes by normalising."""
        if self.graph_key is None:
            return self.graphs.lookup(pair.caption)
        try:
            content = self.source.captions.json_of(pair.index)
            graph = SceneGraph.from_json(content[self.graph_key]) if self.graph_key in content else None
        except ValueError as error:
            raise UserError(f"{self.source.captions.location(pair.index)}: {error}") from error
        return self.graphs.normalized(graph, pair.caption)


def collate_graph_pairs(items: Sequence[GraphItem], context_length: int) -> GraphPairBatch:
    """Stack images, pad graphs, tokenise each different phrase once."""
    pairs, graphs, swapped, shuffled, counts = zip(*items, strict=True)
    batch = batch_graphs(graphs, swapped, shuffled)
    tokens = tokenize_phrases(batch.phrases, context_length)
    images, indices, corrupt = stack_images(pairs)
    return GraphPairBatch(images, tokens.ids, indices, corrupt, tokens.num_truncated, batch, LookupCounts.total(counts))


def tokenize_phrases(phrases: Sequence[str], context_length: int) -> Tokens:
    """Phrases -> ids without the columns that are padding for all phrases."""
    tokens = tokenize(list(phrases), context_length)
    return tokens._replace(ids=without_padding(tokens.ids))


# False graphs: the local loss, `loss.relation_loss`, trains the true graph to score above both.


def draw_negatives(
    graph: SceneGraph, rng: np.random.Generator, relations: str = "all", symmetric: Container[str] = ()
) -> tuple[SceneGraph, SceneGraph]:
    """The swapped and the shuffled graph; relation p of each is made of relation p of the true graph.

        (s, o) -> (o, s)                                     swapped, equation 8
        (s, o) -> (j, i) with j != s, i != o, j != i         shuffled, equation 9; uniform over `shuffled_choices`

    The paper's j and i are any entities; j != i is our choice, since an entity has no relation with itself. With two
    entities both negatives are the same. A relation without a false choice is not shuffled. The paper speaks of "a
    relationship" in section 3.3 and of indices in A.1: by default all relations of a graph are altered.

    Args:
        graph: the true graph.
        rng: the draws depend on it and on the graph alone.
        relations: "all"; or "one": one relation is altered, the same in both negatives.
        symmetric: predicates that are never altered, since they hold both ways, such as "next to"; the paper alters
            all.
    """
    altered = [number for number, relation in enumerate(graph.relations) if relation.predicate not in symmetric]
    if relations == "one" and altered:
        altered = [altered[_drawn(rng, len(altered))]]
    swapped, shuffled = list(graph.relations), list(graph.relations)
    for number in altered:
        relation = graph.relations[number]
        swapped[number] = Relation(relation.object, relation.predicate, relation.subject)
        if choices := shuffled_choices(graph, relation):
            subject, other = choices[_drawn(rng, len(choices))]
            shuffled[number] = Relation(subject, relation.predicate, other)
    return SceneGraph(graph.entities, tuple(swapped)), SceneGraph(graph.entities, tuple(shuffled))


def read_symmetric(path: Path) -> frozenset[str]:
    """The predicates of a text file, one per line, in the form of normalised graphs: lower case, single spaces."""
    try:
        predicates = frozenset(filter(None, map(spaced, path.read_text(encoding="utf-8-sig").splitlines())))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--symmetric {path} cannot be read as text: {error}") from error
    if not predicates:
        raise UserError(f"--symmetric {path} names no predicate; write one per line, such as: next to")
    return predicates


def shuffled_choices(graph: SceneGraph, relation: Relation) -> list[tuple[int, int]]:
    """The (subject, object) that a shuffled relation may take.

    Their number is (E - 1)^2 - (E - 2) for E entities of different phrases and one relation. Pairs of phrases that the
    graph relates in the same way are left out: entities with one phrase have one slot, so such a relation would score
    exactly like the true one.
    """
    phrases = graph.entities
    true = {(phrases[r.subject], phrases[r.object]) for r in graph.relations if r.predicate == relation.predicate}
    entities = range(len(phrases))
    return [
        (j, i)
        for j in entities
        for i in entities
        if j != relation.subject and i != relation.object and j != i and (phrases[j], phrases[i]) not in true
    ]


def _drawn(rng: np.random.Generator, number: int) -> int:
    """One of 0..number-1; `rng.random` gives the same numbers in every version of numpy."""
    return int(rng.random() * number)

"""Pairs of images and captions -> batches with the captions' graphs and two false graphs of each.

All randomness is a pure function of (seed, epoch, index), as that of crops and captions.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor
from torch.utils.data import Dataset

from dino_sparo.data.dataset import DeviceBatch, image_rng
from dino_sparo.image_text.pairs.batches import PairDataset, PairItem, stack_images
from dino_sparo.image_text.text import Tokens, tokenize
from dino_sparo.oc_clip.graphs.batches import GraphBatch, batch_graphs, join_graphs, join_rows, relation_ends
from dino_sparo.oc_clip.graphs.graph import LookupCounts, SceneGraph
from dino_sparo.oc_clip.graphs.negatives import Negatives, draw_negatives

# Added to the seed, so that false graphs have nothing to do with crops and captions.
NEGATIVES_STREAM = 0x2545F4914F6CDD1D

# A pair -> its caption's graph, normalised, and what was changed in it.
GraphOfPair = Callable[[PairItem], tuple[SceneGraph, LookupCounts]]


class GraphItem(NamedTuple):
    """One pair with the graph of its caption.

    Attributes:
        pair: image and caption.
        graph: of the caption.
        negatives: two false graphs.
        counts: what was changed in the graph.
    """

    pair: PairItem
    graph: SceneGraph
    negatives: Negatives
    counts: LookupCounts


@dataclass(frozen=True)
class FalseEnds:
    """The ends of the relations of the false graphs of B captions; all else is the true graphs'.

    Attributes:
        swapped: subjects and objects (B, R), exchanged.
        shuffled: subjects and objects (B, R), drawn.
        altered: (B,), True where a relation was to be altered; elsewhere both graphs are the true one.
    """

    swapped: tuple[Int64[Tensor, "B R"], Int64[Tensor, "B R"]]
    shuffled: tuple[Int64[Tensor, "B R"], Int64[Tensor, "B R"]]
    altered: Bool[Tensor, " B"]


@dataclass
class GraphPairBatch(DeviceBatch):
    """B pairs; graph i belongs to image i.

    Graphs stay in the host's memory: their sizes decide what is computed, and several batches are put together first.

    Attributes:
        images: (B, C, H, W), 0 to 255.
        token_ids: (phrases, length), the different phrases and predicates of the graphs, in `graphs.phrases`' order.
        indices: (B,), places in the source.
        corrupt: (location, reason) of each pair that was replaced.
        graphs: of the captions.
        negatives: the ends of the false graphs' relations.
        num_truncated: phrases that were longer than the context.
        graph_counts: what was changed in the graphs, summed.
    """

    images: UInt8[Tensor, "B C H W"]
    token_ids: Int64[Tensor, "phrases length"]
    indices: Int64[Tensor, " B"]
    corrupt: list[tuple[str, str]]
    graphs: GraphBatch
    negatives: FalseEnds
    num_truncated: int
    graph_counts: LookupCounts


class GraphPairDataset(Dataset):
    """Pairs with the graphs of their captions.

    Args:
        pairs: the pairs.
        graph_of: pair -> graph.
        relations: which relations the false graphs alter, a member of `negatives.RELATION_NEGATIVES`.
        symmetric: predicates that they never alter.
    """

    def __init__(
        self, pairs: PairDataset, graph_of: GraphOfPair, relations: str = "all", symmetric: Container[str] = ()
    ) -> None:
        self.pairs, self.graph_of, self.relations, self.symmetric = pairs, graph_of, relations, symmetric

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self.pairs)

    def __getitem__(self, key: int | tuple[int, int]) -> GraphItem:
        """The pair of (epoch, index), or of an index in epoch 0."""
        epoch, asked = key if isinstance(key, tuple) else (0, key)
        item = self.pairs[key]
        graph, counts = self.graph_of(item)
        rng = image_rng(self.pairs.seed + NEGATIVES_STREAM, epoch, asked)
        return GraphItem(item, graph, draw_negatives(graph, rng, self.relations, self.symmetric), counts)


def collate_graph_pairs(items: Sequence[GraphItem], context_length: int) -> GraphPairBatch:
    """Stack images, pad graphs, tokenise each different phrase once."""
    graphs = batch_graphs([item.graph for item in items])
    tokens = tokenize_phrases(graphs.phrases, context_length)
    swapped, shuffled = (
        relation_ends([getattr(item.negatives, name).relations for item in items]) for name in ("swapped", "shuffled")
    )
    ends = FalseEnds(swapped, shuffled, torch.tensor([item.negatives.altered > 0 for item in items]))
    images, indices, corrupt = stack_images([item.pair for item in items])
    counts = reduce(LookupCounts.plus, (item.counts for item in items))
    return GraphPairBatch(images, tokens.ids, indices, corrupt, graphs, ends, tokens.num_truncated, counts)


def tokenize_phrases(phrases: Sequence[str], context_length: int) -> Tokens:
    """Phrases -> ids without the columns that are padding for all of them."""
    tokens = tokenize(list(phrases), context_length)
    length = int(tokens.ids.argmax(dim=1).max()) + 1  # the end token has the largest id
    return tokens._replace(ids=tokens.ids[:, :length])


def join_batches(batches: Sequence[GraphPairBatch]) -> tuple[GraphBatch, FalseEnds]:
    """The graphs and false graphs of several batches as those of one; see `join_graphs`."""
    if len(batches) == 1:
        return batches[0].graphs, batches[0].negatives
    swapped, shuffled = (
        (join_rows([subjects for subjects, _ in ends]), join_rows([objects for _, objects in ends]))
        for ends in ([getattr(batch.negatives, name) for batch in batches] for name in ("swapped", "shuffled"))
    )
    altered = torch.cat([batch.negatives.altered for batch in batches])
    return join_graphs([batch.graphs for batch in batches]), FalseEnds(swapped, shuffled, altered)

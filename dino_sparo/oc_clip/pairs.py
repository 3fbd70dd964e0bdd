"""Pairs of images and captions -> batches with the captions' graphs and two false graphs of each.

All randomness is a pure function of (seed, epoch, index), like the randomness of crops and captions.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

from jaxtyping import Int64, UInt8
from torch import Tensor
from torch.utils.data import Dataset

from dino_sparo.data.dataset import DeviceBatch
from dino_sparo.data.samplers import image_rng
from dino_sparo.image_text.pairs.batches import PairDataset, PairItem, stack_images
from dino_sparo.image_text.text import Tokens, tokenize
from dino_sparo.oc_clip.graphs.batches import GraphBatch, batch_graphs
from dino_sparo.oc_clip.graphs.graph import LookupCounts, SceneGraph
from dino_sparo.oc_clip.graphs.negatives import draw_negatives

# Added to the seed, so that false graphs are independent of crops and captions.
NEGATIVES_STREAM = 0x2545F4914F6CDD1D

# A pair -> its caption's graph, normalised, and the changes by normalising.
GraphOfPair = Callable[[PairItem], tuple[SceneGraph, LookupCounts]]


class GraphItem(NamedTuple):
    """One pair with the graph of its caption, two false graphs (`draw_negatives`), and the changes by normalising."""

    pair: PairItem
    graph: SceneGraph
    swapped: SceneGraph
    shuffled: SceneGraph
    counts: LookupCounts


@dataclass
class GraphPairBatch(DeviceBatch):
    """B pairs; graph i belongs to image i.

    Graphs stay in the host's memory: their sizes decide what is computed, and several batches are joined first.

    Attributes:
        images: (B, C, H, W), 0 to 255.
        token_ids: (phrases, length), of the phrases of `graphs`.
        indices: (B,), places in the source.
        corrupt: (location, reason) of each pair that was replaced.
        graphs: of the captions, with the swapped and the shuffled ones.
        num_truncated: phrases that are longer than the context.
        graph_counts: changes by normalising, summed.
    """

    images: UInt8[Tensor, "B C H W"]
    token_ids: Int64[Tensor, "phrases length"]
    indices: Int64[Tensor, " B"]
    corrupt: list[tuple[str, str]]
    graphs: GraphBatch
    num_truncated: int
    graph_counts: LookupCounts


class GraphPairDataset(Dataset):
    """Pairs with the graphs of their captions.

    Args:
        pairs: images and captions.
        graph_of: pair -> graph.
        relations: see `draw_negatives`.
        symmetric: see `draw_negatives`.
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
        epoch, index = key if isinstance(key, tuple) else (0, key)
        pair = self.pairs[key]
        graph, counts = self.graph_of(pair)
        rng = image_rng(self.pairs.seed + NEGATIVES_STREAM, epoch, index)
        return GraphItem(pair, graph, *draw_negatives(graph, rng, self.relations, self.symmetric), counts)


def collate_graph_pairs(items: Sequence[GraphItem], context_length: int) -> GraphPairBatch:
    """Stack images, pad graphs, tokenise each different phrase once."""
    pairs, graphs, swapped, shuffled, counts = zip(*items, strict=True)
    batch = batch_graphs(graphs, swapped, shuffled)
    tokens = tokenize_phrases(batch.phrases, context_length)
    images, indices, corrupt = stack_images(pairs)
    total = reduce(LookupCounts.plus, counts)
    return GraphPairBatch(images, tokens.ids, indices, corrupt, batch, tokens.num_truncated, total)


def tokenize_phrases(phrases: Sequence[str], context_length: int) -> Tokens:
    """Phrases -> ids without the columns that are padding for all of them."""
    tokens = tokenize(list(phrases), context_length)
    length = int(tokens.ids.argmax(dim=1).max()) + 1  # the end token has the largest id
    return tokens._replace(ids=tokens.ids[:, :length])

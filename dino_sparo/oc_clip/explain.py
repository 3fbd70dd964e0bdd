"""A model, an image and the graph of its caption -> the share of each patch that each entity takes, all scores, tiles.

Tiles of a pair, in their order on a sheet or a page:

    winner      which entity wins each patch, in the entity's colour
    entity      the share of each patch that one entity takes, framed in its colour
    rest        the share that the default tokens take together, under a veil
    default     the maps of the default tokens, on request

h, w are rows and columns of the patch grid. Source: OC-CLIP, equations 1 to 3 and figure 8.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import ImageColor
from torch.nn import functional as F

from dino_sparo.draw.figure import Tile, map_painter
from dino_sparo.draw.pixels import MIN_CONTRAST, Picture, enlarge, lightness
from dino_sparo.evaluation.attention.maps import effective_patches
from dino_sparo.image_text.picture_pairs import ViewedPair
from dino_sparo.oc_clip.batches import batch_graphs, look_up, tokenize_phrases
from dino_sparo.oc_clip.graphs.graph import SceneGraph
from dino_sparo.oc_clip.model import OCCLIP

logger = logging.getLogger(__name__)

Maps = Float[np.ndarray, "maps h w"]

# Colours of Okabe and Ito, which colour-blind eyes distinguish, and a violet.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#f0e442", "#8a5fbf")
VEIL = "#ece8f6"
PAINT, BRIGHTNESS = 0.62, 0.85  # of a won patch: how much of it is paint, and of an image in grey


# `binding.Binding.competition` -> how to read the tiles, for the sheet.
SUMMARIES = {
    "queries": "The entities of a caption and default tokens compete for each patch of the image. The first map shows "
    "which entity wins each patch, in the colour of the entity's frame; patches that a default token wins stay grey. "
    "The framed maps show the share of each patch that one entity takes, on one scale per row, which comes from the "
    'entities alone. In the panel "default tokens" a veil covers the share of default tokens.',
    "keys": "A map shows how one entity shares its attention among the patches: each map adds up to 100 %. Entities do "
    "not compete.",
}
# The same with the limits of the tiles, for the page.
EXPLANATIONS = {
    "queries": f"{SUMMARIES['queries']} The shares of a patch add up to 100 % over all maps. The share below a map "
    "is the mean over all patches, not an area. A large share says that this entity wins the patch against others, "
    "not that the image shows it: compare the cosines.",
    "keys": f"{SUMMARIES['keys']} Below a map: the effective number of patches, exp(entropy) of its attention.",
}
# Words for the lowest and the highest colour.
ENDS = {
    "queries": ("even share of a patch or less", "largest share of an entity in the row"),
    "keys": ("even share of attention or less", "largest share in the row"),
}
RELATIONS_LEGEND = (
    "The number behind a relation is its score f, from -1 to 1: how well the slots of subject and object fit it. "
    "Turned round: f with subject and object exchanged, which is lower if the model reads the direction."
)


@dataclass(frozen=True)
class PairMaps:
    """Maps and scores of one image with the graph of its caption.

    Attributes:
        pair: image and caption.
        graph: of the caption.
        score: S of image and graph.
        cosines: (E,), of every entity and its slot.
        relation_scores: (R,), f of every relation.
        turned_scores: (R,), f of every relation with subject and object exchanged.
        shares: (E, h, w), a of every entity.
        default_shares: (num_default, h, w), of the default tokens.
        competition: what the softmax runs over: "queries", so that each patch has a winner, or "keys".
    """

    pair: ViewedPair
    graph: SceneGraph
    score: float
    cosines: Float[np.ndarray, " E"]
    relation_scores: Float[np.ndarray, " R"]
    turned_scores: Float[np.ndarray, " R"]
    shares: Float[np.ndarray, "E h w"]
    default_shares: Float[np.ndarray, "num_default h w"]
    competition: str

    @property
    def maps(self) -> Maps:
        """Maps of the entities, then of the default tokens."""
        return np.concatenate([self.shares, self.default_shares])

    @property
    def levels(self) -> Maps:
        """`maps` on one scale of colours: 0 for an even share or less, 1 for the largest share of an entity or more.

        Where even the largest share is hardly above an even one, all levels stay low.
        """
        even = 1 / (len(self.maps) if self.competition == "queries" else self.maps[0].size)
        times_even = self.maps / even
        top = max(float(times_even[: len(self.shares)].max()), min(MIN_CONTRAST, 1 / even))
        # A single entity without default tokens has all of every patch.
        return np.clip((times_even - 1) / (top - 1), 0, 1) if top > 1 else np.zeros_like(times_even)

    @property
    def winners(self) -> Int[np.ndarray, "h w"]:
        """The entity with the largest share of each patch; -1 where a default token has it."""
        winner = self.maps.argmax(axis=0)
        return np.where(winner < len(self.shares), winner, -1)

    def size(self, shares: Float[np.ndarray, "h w"]) -> str:
        """The share of the image that a map takes, in words."""
        if self.competition == "queries":
            return f"share {100 * shares.mean():.0f} %"
        return f"{float(effective_patches(shares)):.1f} patches"

    @property
    def sentences(self) -> list[str]:
        """The relations in words, with their scores."""
        phrases = self.graph.entities
        scored = zip(self.graph.relations, self.relation_scores, self.turned_scores, strict=True)
        return [
            f"{phrases[r.subject]} {r.predicate} {phrases[r.object]}: {score:.2f}, turned round {turned:.2f}"
            for r, score, turned in scored
        ]

    def to_json(self) -> dict[str, Any]:
        """The numbers."""

        def map_numbers(shares: Float[np.ndarray, "h w"]) -> dict[str, float]:
            return {"mean_share": float(shares.mean()), "largest_share": float(shares.max())}

        entities = [
            {"entity": phrase, "cosine": float(cosine), **map_numbers(shares)}
            for phrase, cosine, shares in zip(self.graph.entities, self.cosines, self.shares, strict=True)
        ]
        for number, entity in enumerate(entities) if self.competition == "queries" else ():
            entity["patches_won"] = int((self.winners == number).sum())
        scores = zip(self.graph.to_json()["relationships"], self.relation_scores, self.turned_scores, strict=True)
        return {
            "index": self.pair.index,
            "image": self.pair.name,
            "caption": self.pair.caption,
            "score": self.score,
            "entities": entities,
            "relationships": [
                {**relation, "score": float(score), "turned_round": float(turned)} for relation, score, turned in scores
            ],
            "default_tokens": [map_numbers(shares) for shares in self.default_shares],
        }


@torch.no_grad()
def explain_pair(model: OCCLIP, pair: ViewedPair, graph: SceneGraph, device: torch.device) -> PairMaps:
    """Bind a graph to its image, and score it."""
    batch, scoring, binding = batch_graphs([graph]), model.scoring, model.binding
    tokens = tokenize_phrases(batch.phrases, model.config.text.context_length)
    if tokens.num_truncated:
        logger.warning("%s: %d phrases are longer than the context and cut off", pair.name, tokens.num_truncated)
    keys, values, entities, relations = model(pair.image[None].to(device), tokens.ids.to(device))
    graphs = look_up(batch, entities, relations)
    slots = binding.bind_matched(graphs.entities, graphs.entity_mask, keys, values)[None]
    ends = graphs.subjects, graphs.objects
    score = scoring.scores(graphs, slots)
    cosines = F.cosine_similarity(graphs.entities.float(), slots[0].float(), dim=-1)
    true, turned = (scoring.relation_scores(graphs.relations, *order, slots)[0, 0] for order in (ends, ends[::-1]))
    shares, defaults = binding.attention(graphs.entities[0], keys[0])
    grid = model.image.backbone.grid(pair.image[None])
    tensors = (cosines[0], true, turned, shares.unflatten(1, grid), defaults.unflatten(1, grid))
    of_entities, of_relations, of_turned, maps, rest = (tensor.float().cpu().numpy() for tensor in tensors)
    return PairMaps(pair, graph, float(score), of_entities, of_relations, of_turned, maps, rest, binding.competition)


# The tiles.


def tiles_of(maps: PairMaps, picture: Picture, default_tokens: bool = False) -> list[Tile]:
    """The tiles of a pair over the view of its image; `default_tokens`: whether each default token has a map too."""
    tile = partial(Tile, picture, maps.pair.name)
    colours = [COLOURS[number % len(COLOURS)] for number in range(len(maps.shares))]
    size, levels = maps.size, maps.levels
    tiles = []
    if maps.competition == "queries":
        won = f"{int((maps.winners >= 0).sum())} of {maps.winners.size} patches won"
        winners = partial(paint_winners, winners=maps.winners, colours=colours)
        tiles.append(tile(winners, "winner of each patch", notes=("", won)))
    for number, colour in enumerate(colours):
        notes = (f"cosine {maps.cosines[number]:.2f}", size(maps.shares[number]))
        paint = map_painter(levels[number], smooth=False)
        tiles.append(tile(paint, maps.graph.entities[number], notes=notes, frame=colour))
    if len(maps.default_shares):
        rest = maps.default_shares.sum(axis=0)
        tiles.append(tile(partial(veil, shares=rest), "default tokens", notes=("", size(rest)), is_soft=True))
    for token, shares in enumerate(maps.default_shares if default_tokens else ()):
        paint = map_painter(levels[len(maps.shares) + token], smooth=False)
        tiles.append(tile(paint, f"default token {token + 1}", notes=("", size(shares)), is_soft=True))
    return tiles


def paint_winners(picture: Picture, winners: Int[np.ndarray, "h w"], colours: Sequence[str]) -> Picture:
    """The image in grey, and on it the patches that entities win, in their colours."""
    shown = np.repeat(BRIGHTNESS * lightness(picture), 3, axis=-1)
    height, width = picture.shape[:2]
    winner = enlarge(winners.astype(np.float32), height, width, smooth=False).astype(int)
    for number in np.unique(winners[winners >= 0]):
        paint = np.array(ImageColor.getrgb(colours[number]))
        patch = winner == number
        shown[patch] = (1 - PAINT) * shown[patch] + PAINT * paint
    return (shown + 0.5).astype(np.uint8)


def veil(picture: Picture, shares: Float[np.ndarray, "h w"]) -> Picture:
    """The image behind a veil, the thicker the larger the share, from none at 0 to opaque at 1."""
    height, width = picture.shape[:2]
    cover = enlarge(shares, height, width, smooth=False)[..., None]
    return (picture * (1 - cover) + np.array(ImageColor.getrgb(VEIL)) * cover + 0.5).astype(np.uint8)

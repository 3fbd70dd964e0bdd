"""Maps of a pair -> the tiles of a row.

winner      which entity wins each patch, in the entity's colour
entity      the share of each patch that one entity takes, framed in its colour; at most `MAX_ENTITIES`
rest        the share that the default tokens take together, under a veil
default     the maps of the default tokens, on request
"""

from functools import partial

import numpy as np
from jaxtyping import Float, Int
from PIL import ImageColor

from dino_sparo.draw.figure import Tile, map_painter
from dino_sparo.draw.pixels import Picture, enlarge
from dino_sparo.oc_clip.pictures.explain import PairMaps

# Colours of Okabe and Ito, which colour-blind eyes tell apart, and a violet.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#f0e442", "#8a5fbf")
MAX_ENTITIES = len(COLOURS)
OTHER = "#ffffff"  # entities that have no map of their own
VEIL = "#ece8f6"
PAINT, BRIGHTNESS = 0.62, 0.85  # of a won patch: how much of it is paint, and of an image in grey


def tiles_of(maps: PairMaps, picture: Picture, default_tokens: bool = False) -> list[Tile]:
    """The tiles of a pair over its image, in the order in which they are shown.

    Args:
        maps: the numbers.
        picture: the view of the image.
        default_tokens: whether each default token has a map too.
    """
    tile = partial(Tile, picture, maps.pair.name)
    numbers = shown_entities(maps)
    colours = dict(zip(numbers, COLOURS, strict=False))
    size, levels = maps.reading.size, maps.levels
    tiles = []
    if maps.reading.is_competition:
        won = f"{int((maps.winners >= 0).sum())} of {maps.winners.size} patches won"
        winners = partial(paint_winners, winners=maps.winners, colours=colours)
        tiles.append(tile(winners, "winner of each patch", notes=("", won)))
    for number in numbers:
        notes = (f"cosine {maps.cosines[number]:.2f}", size(maps.shares[number]))
        paint = map_painter(levels[number], smooth=False)
        tiles.append(tile(paint, maps.graph.entities[number], notes=notes, frame=colours[number]))
    if len(maps.default_shares):
        rest = maps.default_shares.sum(axis=0)
        tiles.append(tile(partial(veil, shares=rest), "default tokens", notes=("", size(rest)), is_soft=True))
    for token, shares in enumerate(maps.default_shares if default_tokens else ()):
        paint = map_painter(levels[len(maps.shares) + token], smooth=False)
        tiles.append(tile(paint, f"default token {token + 1}", notes=("", size(shares)), is_soft=True))
    return tiles


def shown_entities(maps: PairMaps) -> list[int]:
    """The entities that have a map, in the graph's order.

    Where there are too many, those that win most patches; of equal ones those with the larger mean share.
    """
    won = [(maps.winners == number).sum() * maps.reading.is_competition for number in range(len(maps.shares))]
    order = np.lexsort((-maps.shares.mean(axis=(1, 2)), -np.array(won)))
    return sorted(order[:MAX_ENTITIES].tolist())


def without_map(maps: PairMaps) -> str:
    """The number of entities without a tile, in words; empty where every entity has one."""
    number = len(maps.shares) - MAX_ENTITIES
    where = "; patches that they win are white" if maps.reading.is_competition else ""
    return f"{number} more entities have no map{where}" if number > 0 else ""


def paint_winners(picture: Picture, winners: Int[np.ndarray, "h w"], colours: dict[int, str]) -> Picture:
    """The image in grey, and on it the patches that entities win, in their colours.

    Args:
        picture: (H, W, 3).
        winners: (h, w), number of the entity; -1 where a default token wins: such a patch is not painted.
        colours: of the entities that have one; the others share `OTHER`.
    """
    grey = picture @ np.array([0.299, 0.587, 0.114])
    shown = np.repeat(BRIGHTNESS * grey[..., None], 3, axis=-1)
    height, width = picture.shape[:2]
    winner = enlarge(winners.astype(np.float32), height, width, smooth=False).astype(int)
    for number in np.unique(winners[winners >= 0]):
        paint = np.array(ImageColor.getrgb(colours.get(int(number), OTHER)))
        patch = winner == number
        shown[patch] = (1 - PAINT) * shown[patch] + PAINT * paint
    return (shown + 0.5).astype(np.uint8)


def veil(picture: Picture, shares: Float[np.ndarray, "h w"]) -> Picture:
    """The image behind a veil, the thicker the larger the share, from none at 0 to opaque at 1."""
    height, width = picture.shape[:2]
    cover = enlarge(shares, height, width, smooth=False)[..., None]
    return (picture * (1 - cover) + np.array(ImageColor.getrgb(VEIL)) * cover + 0.5).astype(np.uint8)

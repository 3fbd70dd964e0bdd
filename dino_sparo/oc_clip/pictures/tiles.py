"""A look -> the tiles of a row, for the sheet and for the page.

winner      which entity wins each patch, in the entity's colour
entity      the share of each patch that one entity takes, framed in its colour; at most `MAX_ENTITIES`
rest        what the default tokens take together, under a veil
default     the maps of the default tokens, where they are asked for
"""

from functools import partial

import numpy as np
from jaxtyping import Float, Int
from PIL import ImageColor

from dino_sparo.draw.tiles import Picture, Tile, map_tile
from dino_sparo.evaluation.attention.maps import enlarge
from dino_sparo.oc_clip.pictures.explain import GraphLook

# Colours of Okabe and Ito, which colour-blind eyes tell apart, and a violet.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#f0e442", "#8a5fbf")
MAX_ENTITIES = len(COLOURS)
OTHER = "#ffffff"  # entities that have no map of their own
VEIL = "#ece8f6"
PAINT, BRIGHTNESS = 0.62, 0.85  # of a won patch: how much of it is paint, and of an image in grey


def tiles_of(look: GraphLook, default_tokens: bool = False) -> list[Tile]:
    """The tiles of a look, in the order in which they are shown.

    Args:
        look: its numbers.
        default_tokens: whether each default token has a map too.
    """
    numbers = shown_entities(look)
    colours = dict(zip(numbers, COLOURS, strict=False))
    tiles = []
    if look.reading.is_competition:
        won = int((look.winners >= 0).sum())
        paint = partial(paint_winners, winners=look.winners, colours=colours)
        tiles.append(Tile("winner of each patch", paint, ("", f"{won} of {look.winners.size} patches won")))
    for number in numbers:
        notes = (f"cosine {look.cosines[number]:.2f}", look.reading.size(look.shares[number]))
        title, levels = look.graph.entities[number], look.levels[number]
        tiles.append(map_tile(title, levels, notes, frame=colours[number], smooth=False))
    if len(look.default_shares):
        rest = look.default_shares.sum(axis=0)
        notes = ("", look.reading.size(rest))
        tiles.append(Tile("default tokens", partial(veil, shares=rest), notes, is_soft=True))
    for token, shares in enumerate(look.default_shares if default_tokens else ()):
        levels = look.levels[len(look.shares) + token]
        notes = ("", look.reading.size(shares))
        tiles.append(map_tile(f"default token {token + 1}", levels, notes, is_soft=True, smooth=False))
    return tiles


def shown_entities(look: GraphLook) -> list[int]:
    """The entities that have a map, in the graph's order.

    Where there are too many, those that win most patches; of equal ones those with the larger mean share.
    """
    won = [(look.winners == number).sum() * look.reading.is_competition for number in range(len(look.shares))]
    order = np.lexsort((-look.shares.mean(axis=(1, 2)), -np.array(won)))
    return sorted(order[:MAX_ENTITIES].tolist())


def without_map(look: GraphLook) -> str:
    """What the tiles do not show, in words; "" where they show every entity."""
    number = len(look.shares) - MAX_ENTITIES
    where = "; patches that they win are white" if look.reading.is_competition else ""
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

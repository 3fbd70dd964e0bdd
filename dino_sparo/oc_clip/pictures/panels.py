"""A look and its picture -> the panels of a row, for the sheet and for the page.

winner      which entity wins each patch, in the entity's colour
entity      the share of each patch that one entity takes, framed in its colour; at most `MAX_ENTITIES`
rest        what the default tokens take together, under a veil
default     the maps of the default tokens, where they are asked for
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, UInt8
from PIL import ImageColor

from dino_sparo.evaluation.attention import enlarge, overlay_levels
from dino_sparo.oc_clip.pictures.looks import GraphLook

# Colours of Okabe and Ito, which colour-blind eyes tell apart, and a violet.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#f0e442", "#8a5fbf")
MAX_ENTITIES = len(COLOURS)
OTHER = "#ffffff"  # entities that have no map of their own
VEIL = "#ece8f6"
PAINT, BRIGHTNESS = 0.62, 0.85  # of a won patch: how much of it is paint, and of an image in grey


@dataclass(frozen=True)
class Panel:
    """One picture of a row and what stands around it.

    Attributes:
        kind: as at the top of this file.
        title: above it.
        notes: below it, left and right.
        picture: the map over its image.
        colour: of its frame; None: without one.
    """

    kind: str
    title: str
    notes: tuple[str, str]
    picture: UInt8[np.ndarray, "H W 3"]
    colour: str | None = None


def panels_of(look: GraphLook, picture: UInt8[np.ndarray, "H W 3"], default_tokens: bool = False) -> list[Panel]:
    """The panels of a look, in the order in which they are shown.

    Args:
        look: its numbers.
        picture: (H, W, 3), the view of its image, at the size to draw.
        default_tokens: whether each default token has a map too.
    """
    numbers = shown_entities(look)
    colours = dict(zip(numbers, COLOURS, strict=False))
    panels = []
    if look.reading.is_competition:
        won = int((look.winners >= 0).sum())
        painted = paint_winners(look.winners, colours, picture)
        notes = ("", f"entities win {won} of {look.winners.size} patches")
        panels.append(Panel("winner", "winner of each patch", notes, painted))
    for number in numbers:
        notes = (f"cosine {look.cosines[number]:.2f}", look.reading.size(look.shares[number]))
        map_on_it = overlay_levels(picture, look.levels[number], smooth=False)
        panels.append(Panel("entity", look.graph.entities[number], notes, map_on_it, colours[number]))
    if len(look.default_shares):
        rest = look.default_shares.sum(axis=0)
        panels.append(Panel("rest", "taken by default tokens", ("", look.reading.size(rest)), veil(rest, picture)))
    for token, shares in enumerate(look.default_shares if default_tokens else ()):
        map_on_it = overlay_levels(picture, look.levels[len(look.shares) + token], smooth=False)
        panels.append(Panel("default", f"default token {token + 1}", ("", look.reading.size(shares)), map_on_it))
    return panels


def shown_entities(look: GraphLook) -> list[int]:
    """The entities that have a map, in the graph's order.

    Where there are too many, those that win most patches; of equal ones those with the larger mean share.
    """
    won = [(look.winners == number).sum() * look.reading.is_competition for number in range(len(look.shares))]
    order = np.lexsort((-look.shares.mean(axis=(1, 2)), -np.array(won)))
    return sorted(order[:MAX_ENTITIES].tolist())


def without_map(look: GraphLook) -> str:
    """What the panels do not show, in words; "" where they show every entity."""
    number = len(look.shares) - MAX_ENTITIES
    where = "; patches that they win are white" if look.reading.is_competition else ""
    return f"{number} more entities have no map{where}" if number > 0 else ""


def paint_winners(
    winners: Int[np.ndarray, "h w"], colours: dict[int, str], picture: UInt8[np.ndarray, "H W 3"]
) -> UInt8[np.ndarray, "H W 3"]:
    """The image in grey, and on it the patches that entities win, in their colours.

    Args:
        winners: (h, w), number of the entity; -1 where a default token wins: such a patch is not painted.
        colours: of the entities that have one; the others share `OTHER`.
        picture: (H, W, 3).
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


def veil(shares: Float[np.ndarray, "h w"], picture: UInt8[np.ndarray, "H W 3"]) -> UInt8[np.ndarray, "H W 3"]:
    """The image behind a veil, the thicker the larger the share, from none at 0 to opaque at 1."""
    height, width = picture.shape[:2]
    cover = enlarge(shares, height, width, smooth=False)[..., None]
    return (picture * (1 - cover) + np.array(ImageColor.getrgb(VEIL)) * cover + 0.5).astype(np.uint8)


def framed(panel: Panel, width: int) -> UInt8[np.ndarray, "H W 3"]:
    """The panel's picture with a frame of its colour inside its edges, `width` pixels wide."""
    if panel.colour is None:
        return panel.picture
    shown = np.empty_like(panel.picture)
    shown[:] = ImageColor.getrgb(panel.colour)
    shown[width:-width, width:-width] = panel.picture[width:-width, width:-width]
    return shown

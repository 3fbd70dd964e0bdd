"""Maps that explain a score: what a model looks at in an image when it reads a caption.

A `Scorer` that also has the method of `ExplainableScorer` is drawn with its maps where single images are shown, such
as the errors that `dino-sparo compositional` shows; others are drawn without.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from PIL import Image

from dino_sparo.draw.figure import Tile
from dino_sparo.draw.pixels import Picture


class CaptionMaps(NamedTuple):
    """Maps of a model for one caption.

    Attributes:
        lines: further numbers in words; may be empty.
        tiles: maps over `Explanation.picture`.
    """

    lines: Sequence[str]
    tiles: Sequence[Tile]


@dataclass(frozen=True)
class Explanation:
    """Maps of a model on one image, per caption.

    Attributes:
        picture: (H, W, 3), the part of the image that the maps cover.
        captions: maps per caption.
        words: how to read a map and the numbers around it.
        ends: words for the lowest and the highest colour.
    """

    picture: Picture
    captions: Sequence[CaptionMaps]
    words: str
    ends: tuple[str, str]


@runtime_checkable
class ExplainableScorer(Protocol):
    """A scorer whose maps can be drawn."""

    def explain(self, image: Image.Image, captions: Sequence[str]) -> Explanation:
        """Maps of an 8-bit RGB image for each of some captions, in this process alone.

        A model may show what distinguishes one caption from the others.
        """

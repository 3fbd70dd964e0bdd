"""What a scorer may say beside its scores: what it looks at in an image when it reads a caption.

A `Scorer` that also has the method of `LookingScorer` is drawn with its maps where single images are shown, such as the
errors that `dino-sparo compositional` shows; others are drawn without.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from PIL import Image

from dino_sparo.data.views import View
from dino_sparo.draw.tiles import Tile


@dataclass(frozen=True)
class CaptionLook:
    """What a model looks at for one caption.

    Attributes:
        line: further numbers in words; may be empty.
        tiles: maps over `ImageLook.view`.
    """

    line: str
    tiles: Sequence[Tile]


@dataclass(frozen=True)
class ImageLook:
    """What a model looks at in one image.

    Attributes:
        view: the part of the image that the maps cover.
        captions: one look per caption.
        explanation: how to read a map and the numbers around it.
        ends: words for the lowest and the highest colour.
    """

    view: View
    captions: Sequence[CaptionLook]
    explanation: str
    ends: tuple[str, str]


@runtime_checkable
class LookingScorer(Protocol):
    """What a scorer has whose maps can be drawn."""

    def look_at(self, image: Image.Image, captions: Sequence[str]) -> ImageLook:
        """Maps of one image for each of some captions, in this process alone.

        Args:
            image: 8-bit RGB.
            captions: in words; a model may show what distinguishes one from the others.
        """

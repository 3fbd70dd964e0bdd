"""Some images of a source: as a source of their own, and which to take where a few are shown."""

import numpy as np
from jaxtyping import Int64
from PIL import Image

from dino_sparo.data.sources import ImageSource, fingerprint_of
from dino_sparo.data.sources.packed import hash_of


class Subset:
    """Some images of a source, under new indices.

    Args:
        source: all images.
        indices: (images,), those that are taken, in their new order.
        labels: (images,), their classes; None: as in the source.
        classes: names of the classes; None: as in the source.
    """

    def __init__(
        self,
        source: ImageSource,
        indices: Int64[np.ndarray, " images"],
        labels: Int64[np.ndarray, " images"] | None = None,
        classes: list[str] | None = None,
    ) -> None:
        self.source, self.indices = source, indices
        self.name = source.name if len(indices) == len(source) else f"{len(indices)} images of {source.name}"
        self.classes = source.classes if classes is None else classes
        self.labels = labels if labels is not None or source.labels is None else source.labels[indices]

    def __len__(self) -> int:
        """Number of images."""
        return len(self.indices)

    def read(self, index: int) -> Image.Image:
        """Image `index` as 8-bit RGB; raises CorruptImageError."""
        return self.source.read(int(self.indices[index]))

    def location(self, index: int) -> str:
        """Where image `index` lies."""
        return self.source.location(int(self.indices[index]))

    def fingerprint(self) -> str | None:
        """A hash of the source's and of the indices; None if the source has none."""
        whole = fingerprint_of(self.source)
        return None if whole is None else f"{whole} {hash_of(self.indices)}"


def spread_out(source: ImageSource, max_images: int) -> list[int]:
    """At most `max_images` indices, evenly spaced: folders are sorted by class, so the first would be of one class."""
    count = min(max_images, len(source))
    return [i * len(source) // count for i in range(count)]


def of_different_classes(source: ImageSource, max_images: int) -> list[int]:
    """At most `max_images` indices: of as many classes, where there are labels for so many, else evenly spaced."""
    firsts = [] if source.labels is None else np.unique(source.labels, return_index=True)[1].tolist()
    if len(firsts) < max_images:
        return spread_out(source, max_images)
    return [firsts[i * len(firsts) // max_images] for i in range(max_images)]

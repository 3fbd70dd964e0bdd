"""An image's objects as masks, the part of them that an encoder sees, and the contract of all sources of them."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int
from PIL import Image

from dino_sparo.data.sources import CorruptImageError, ImageSource
from dino_sparo.data.sources.image_source import FileSource, PackedStrings
from dino_sparo.data.views import View

UNKNOWN = -1  # class of an object whose class nobody says


class ObjectMasks(NamedTuple):
    """The objects of an image.

    Attributes:
        masks: (objects, H, W), True where the object is; masks may overlap.
        classes: (objects,), numbers of `ObjectSource.classes`, or UNKNOWN.
        void: (H, W), pixels that count neither as object nor as background.
    """

    masks: Bool[np.ndarray, "objects H W"]
    classes: Int[np.ndarray, " objects"]
    void: Bool[np.ndarray, "H W"]


@dataclass(frozen=True)
class ObjectSource:
    """Images with their objects, by index.

    Attributes:
        images: any images.
        classes: names of the objects' classes; empty where there are none.
        objects: index -> the objects of that image; raises CorruptImageError if they cannot be read.
    """

    images: ImageSource
    classes: list[str]
    objects: Callable[[int], ObjectMasks]

    def __len__(self) -> int:
        """Number of images."""
        return len(self.images)


def image_files(name: str, folder: Path, names: Sequence[str]) -> FileSource:
    """Image files of a folder.

    Args:
        name: what the log calls them.
        folder: where they lie.
        names: of the files.
    """
    return FileSource(name, str(folder), PackedStrings.pack([os.fsencode(file) for file in names]), None, None)


def masks_of_ids(ids: Int[np.ndarray, "H W"]) -> Bool[np.ndarray, "objects H W"]:
    """One mask per number of a mask image, by number; 0 is the background."""
    numbers = np.unique(ids)
    return ids[None] == numbers[numbers > 0][:, None, None]


def view_objects(objects: ObjectMasks, view: View, location: str, image_size: tuple[int, int]) -> ObjectMasks:
    """The objects as the encoder sees them: cut and resampled as the image is, by the nearest pixel.

    Objects without a pixel in the view are left out.

    Args:
        objects: of the whole image.
        view: what is seen of it.
        location: where the image lies, for errors.
        image_size: width and height of the image, pixels.
    """
    height, width = objects.void.shape
    if (width, height) != image_size:
        turned = (
            "; the image may have an EXIF orientation, which is not applied" if (height, width) == image_size else ""
        )
        raise CorruptImageError(
            location, f"has {image_size[0]} x {image_size[1]} pixels, but its masks have {width} x {height}{turned}"
        )
    void = _resampled(objects.void, view)
    masks = [_resampled(mask, view) & ~void for mask in objects.masks]
    seen = np.array([mask.any() for mask in masks], dtype=bool)
    stack = np.stack(masks)[seen] if seen.any() else np.zeros((0, *void.shape), dtype=bool)
    return ObjectMasks(stack, objects.classes[seen], void)


def _resampled(mask: Bool[np.ndarray, "H W"], view: View) -> Bool[np.ndarray, "height width"]:
    picture = Image.fromarray(mask.astype(np.uint8))
    return np.asarray(picture.resize((view.width, view.height), Image.Resampling.NEAREST, box=view.box)) > 0

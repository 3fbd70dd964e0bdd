"""Pairs of image and caption that are to be drawn: where they lie, and the views of some of them.

What a model looks at in them is drawn by the objectives' folders: `clip/pictures/`, `oc_clip/pictures/`.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from dino_sparo.data import CorruptImageError
from dino_sparo.evaluation.views import SquareView
from dino_sparo.image_text.pairs.batches import LeftOut, PairSource
from dino_sparo.image_text.pairs.captions import ListedCaptions, PackedTexts
from dino_sparo.image_text.pairs.sources import open_pairs
from dino_sparo.runtime.logs import progress
from dino_sparo.sources import IMAGE_EXTENSIONS
from dino_sparo.sources.packed import FileSource

logger = logging.getLogger(__name__)

PICTURE_HEIGHT = 480  # pixels, of a view on a page


@dataclass(frozen=True)
class ViewedPair:
    """A pair as a model sees it.

    Attributes:
        index: place in the source.
        name: where the image lies.
        caption: the first of the image's captions.
        image: (C, H, W), the view, normalised.
    """

    index: int
    name: str
    caption: str
    image: Float[Tensor, "C H W"]


def open_picture_pairs(
    data_path: str, image_key: str | None = None, caption_key: str | None = None, image_folder: str | None = None
) -> PairSource:
    """The pairs to look at; scenes are held-out ones.

    Args:
        data_path: a folder of pairs, or anything that `open_pairs` opens.
        image_key: of `open_pairs`.
        caption_key: likewise.
        image_folder: likewise.

    Raises:
        ValueError: nothing lies there, or no pairs do.
    """
    folder = Path(data_path).expanduser()
    if folder.is_dir() and any(folder.glob("*.txt")) and not any(folder.glob("*.tar")):
        return open_pair_folder(folder)
    return open_pairs(data_path, image_key, caption_key, image_folder, default_split="val")


def open_pair_folder(folder: Path) -> PairSource:
    """The images of a folder that have their caption in a .txt file of the same name beside them, sorted by name.

    Raises:
        ValueError: there are none.
    """
    images = sorted(path for path in folder.iterdir() if path.name.lower().endswith(IMAGE_EXTENSIONS))
    names, captions, left_out = PackedTexts(), PackedTexts(), LeftOut()
    for image in images:
        caption = image.with_suffix(".txt")
        if caption.is_file():
            names.append(image.name)
            captions.append(caption.read_text(encoding="utf-8-sig", errors="replace").strip())
        else:
            left_out.add("without a .txt", str(image))
    if not len(names.ends):
        raise ValueError(f"{folder} holds {len(images)} images, none with a .txt file of the same name beside it")
    if left_out.total:
        logger.warning("%s: left out %s", folder, left_out)
    files = FileSource(f"folder {folder}", str(folder), names.packed(), None, None)
    return PairSource(files, ListedCaptions(captions.packed()), left_out)


def view_pairs(source: PairSource, indices: Sequence[int], view: SquareView) -> Iterator[ViewedPair]:
    """The pairs of some indices; those that cannot be read are left out, named and counted.

    Args:
        source: the pairs.
        indices: places in the source.
        view: what is seen of an image.

    Raises:
        ValueError: at the end, none could be read.
    """
    errors: list[CorruptImageError] = []
    for index in progress(indices, desc=source.name):
        try:
            yield ViewedPair(index, source.location(index), source.captions_of(index)[0], view(source.read(index))[0])
        except CorruptImageError as error:
            errors.append(error)
            logger.warning("left out %s", error)
    if errors and len(errors) == len(indices):
        raise ValueError(f"none of {len(errors)} pairs can be read: {errors[0]}")
    if errors:
        logger.warning("%s: left out %d pairs", source.name, len(errors))

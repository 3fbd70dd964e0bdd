"""DAVIS 2017 on disk: the videos of a split, and their annotations."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from dino_sparo.evaluation.video.measures import VOID
from dino_sparo.runtime.faults import UserError

SOURCE = "https://davischallenge.org/davis2017/code.html (TrainVal, Images and Annotations, 480p)"
LAYOUT = (
    "JPEGImages/480p/VIDEO/00000.jpg, Annotations/480p/VIDEO/00000.png with the number of the object in each pixel, "
    "and ImageSets/2017/SPLIT.txt with the names of the videos"
)


@dataclass(frozen=True)
class AnnotatedVideo:
    """A video of DAVIS.

    Attributes:
        name: of its folders.
        frames: paths of the images, in order.
        annotations: paths of the masks, one per frame.
    """

    name: str
    frames: Sequence[Path]
    annotations: Sequence[Path]


def open_davis(data_path: str, split: str) -> list[AnnotatedVideo]:
    """The videos of a split.

    Raises:
        UserError: a file is missing; the message names it, the layout and the source.
    """
    if not data_path:
        raise UserError(f"--data_path is empty; give the folder of DAVIS 2017, which holds {LAYOUT}; from {SOURCE}")
    root = Path(data_path)
    listing = root / "ImageSets" / "2017" / f"{split}.txt"
    if not listing.is_file():
        raise _missing(listing, root)
    names = listing.read_text(encoding="utf-8-sig").split()
    if wrong := [name for name in names if Path(name).name != name]:
        raise UserError(f"{listing} names the video {wrong[0]!r}; give the name of a folder")
    if not names:
        raise UserError(f"{listing} names no video")
    return [_open_video(root, name) for name in names]


def _open_video(root: Path, name: str) -> AnnotatedVideo:
    folders = [root / kind / "480p" / name for kind in ("JPEGImages", "Annotations")]
    frames, annotations = sorted(folders[0].glob("[!.]*.jpg")), folders[1].glob("[!.]*.png")
    if not frames:
        raise _missing(folders[0] / "*.jpg", root)
    annotated = {path.stem for path in annotations}
    if absent := [frame.stem for frame in frames if frame.stem not in annotated]:
        raise _missing(folders[1] / f"{absent[0]}.png", root)
    if len(frames) < 3:
        raise UserError(
            f"{folders[0]} holds {len(frames)} frames; at least 3 are needed: first and last are not scored"
        )
    return AnnotatedVideo(name, frames, [folders[1] / f"{frame.stem}.png" for frame in frames])


def _missing(path: Path, root: Path) -> UserError:
    return UserError(f"{path} is missing; --data_path {root} must hold {LAYOUT}; from {SOURCE}")


def read_annotations(paths: Sequence[Path]) -> tuple[UInt8[np.ndarray, "T H W"], list[int] | None]:
    """Number of the object, or `VOID`, in each pixel of each frame; and the palette, None for grey images.

    Raises:
        UserError: a file is not an image of numbers, sizes differ, or the first annotation has no object.
    """
    images: list[Image.Image] = []
    for path in paths:
        try:
            with Image.open(path, formats=("PNG",)) as image:
                image.load()
        except OSError as error:
            raise UserError(f"{path} is not a readable PNG ({error}); is the download complete?") from error
        if image.mode not in ("P", "L"):
            raise UserError(f"{path} has {image.mode} pixels, not the number of an object per pixel; take {SOURCE}")
        images.append(image)
        if image.size != images[0].size:
            raise UserError(f"{path} has {image.size} pixels, the first annotation of the video {images[0].size}")
    numbers = np.stack([np.array(image) for image in images])
    if not (numbers[0] % VOID).any():
        raise UserError(f"{paths[0]} holds no object: all of its pixels are 0 or {VOID}")
    return numbers, images[0].getpalette() if images[0].mode == "P" else None

"""Image file -> the view of it that is looked at: a part in whole patches, for the encoder and for the eye.

`attention/maps.py` takes these views. The encoder sees the view at its own, small size; a picture shows the same part
of the original at the picture's size. Both come from one box in the original's coordinates, so that a patch of the
map lies exactly over the pixels it was made from.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from dino_sparo.data.dataset import ImageSource, open_source
from dino_sparo.data.scenes import Scenes
from dino_sparo.data.sources import IMAGE_EXTENSIONS
from dino_sparo.data.sources.decode import read_image
from dino_sparo.data.sources.splits import ALL
from dino_sparo.models.encoder import EncoderConfig

# Self-attention among so many patches takes about 2 GB per image; more is usually a slip of --image_size.
MAX_PATCHES = 8_192
# Of files that people take for images.
VIDEO_EXTENSIONS = (".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg")
# The scene that is shown where no image is given: two objects on a quiet background; drawn at this size, pixels.
SCENE_INDEX, SCENE_SIZE = 23, 384


class View(NamedTuple):
    """A part of an image, and the size at which the encoder sees it.

    Attributes:
        box: left, top, right, bottom in pixels of the image, fractions of pixels included.
        height: pixels, a multiple of the patch size.
        width: likewise.
    """

    box: tuple[float, float, float, float]
    height: int
    width: int


def default_image_size(config: EncoderConfig) -> int:
    """Twice the side the encoder was trained for: four times the patches, so that maps show parts of objects.

    The reference looks at 480 pixels with a model trained at 224, for the same reason.
    """
    return 2 * config.img_size


def choose_view(image_size: tuple[int, int], size: Sequence[int], patch_size: int, square: bool = False) -> View:
    """The view of an image: resized to `size`, then cropped around the centre to whole patches.

    Args:
        image_size: width and height of the image, pixels.
        size: one number: the short side, the aspect ratio is kept; two: height and width, the image is squeezed.
        patch_size: P, pixels.
        square: take the central square first, so that the views of several images have one size.

    Raises:
        ValueError: `size` is not one or two numbers, is smaller than a patch, or makes too many patches.
    """
    if len(size) not in (1, 2):
        raise ValueError(f"image_size={list(size)} has {len(size)} numbers; give one (the short side) or two (H W)")
    if min(size) < patch_size:
        raise ValueError(
            f"image_size={list(size)} px is smaller than one patch of {patch_size} px; give at least {patch_size}, "
            f"better 20 times that"
        )
    width, height = image_size
    left = top = 0.0
    if square and len(size) == 1:
        side = min(width, height)
        left, top, width, height = (width - side) / 2, (height - side) / 2, side, side
    scale = size[0] / min(width, height)
    wanted_height, wanted_width = size if len(size) == 2 else (round(height * scale), round(width * scale))
    rows, columns = wanted_height // patch_size, wanted_width // patch_size
    if rows * columns > MAX_PATCHES:
        raise ValueError(
            f"image_size={list(size)} px makes {rows} x {columns} patches of {patch_size} px from an image of "
            f"{image_size[0]} x {image_size[1]} px; at most {MAX_PATCHES} can be looked at, give a smaller size"
        )
    seen_height, seen_width = rows * patch_size, columns * patch_size
    part_width, part_height = width * seen_width / wanted_width, height * seen_height / wanted_height
    left, top = left + (width - part_width) / 2, top + (height - part_height) / 2
    return View((left, top, left + part_width, top + part_height), seen_height, seen_width)


def view_tensor(image: Image.Image, view: View, mean: Sequence[float], std: Sequence[float]) -> Float[Tensor, "C H W"]:
    """What the encoder sees of an RGB image: resampled bicubically, (pixel / 255 - mean) / std."""
    seen = image.resize((view.width, view.height), Image.Resampling.BICUBIC, box=view.box)
    values = (np.asarray(seen, dtype=np.float32) / 255 - np.asarray(mean)) / np.asarray(std)
    return torch.from_numpy(values.astype(np.float32).transpose(2, 0, 1).copy())


def view_pixels(image: Image.Image, view: View, height: int) -> UInt8[np.ndarray, "height _ 3"]:
    """What a picture shows of an RGB image: the same part, `height` pixels high."""
    width = max(1, round(height * view.width / view.height))
    return np.asarray(image.resize((width, height), Image.Resampling.LANCZOS, box=view.box))


class OneImage:
    """A single image as an `ImageSource`.

    Args:
        location: what to call it.
        load: gives the image as 8-bit RGB; raises CorruptImageError.
    """

    def __init__(self, location: str, load: Callable[[], Image.Image]) -> None:
        self.name, self.load = location, load
        self.classes: list[str] | None = None
        self.labels: np.ndarray | None = None

    def __len__(self) -> int:
        return 1

    def read(self, index: int) -> Image.Image:
        """The image."""
        return self.load()

    def location(self, index: int) -> str:
        """Its name."""
        return self.name


def open_images(image_path: str | None) -> ImageSource:
    """The images to look at.

    Args:
        image_path: an image; a folder or anything else that `open_source` takes; None: a built-in, held-out scene.

    Raises:
        ValueError: nothing lies there, it is a video, or it holds no images.
    """
    if image_path is None:
        scenes = Scenes(SCENE_INDEX + 1, image_size=SCENE_SIZE, split="val")
        name = f"{scenes.location(SCENE_INDEX)}: {scenes.caption(SCENE_INDEX)}"
        return OneImage(name, lambda: scenes.read(SCENE_INDEX))
    path = Path(image_path).expanduser()
    if image_path.lower().endswith(VIDEO_EXTENSIONS):
        raise ValueError(
            f"--image_path {image_path} is a video; write some of its frames as images and give their folder: "
            f"ffmpeg -i {image_path} -vf fps=1 FOLDER/%04d.png"
        )
    if not path.exists() and image_path.lower().endswith(IMAGE_EXTENSIONS) and not set(image_path) & set("*?[{"):
        raise ValueError(
            f"--image_path {image_path} does not exist (in {os.getcwd()}); give an image or a folder of images, or "
            "leave the option out for a built-in scene"
        )
    if path.is_file() and image_path.lower().endswith(IMAGE_EXTENSIONS):
        return OneImage(image_path, lambda: read_image(image_path, image_path))
    return open_source(image_path, ALL)


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


class SquareView:
    """The central square of each image, as a transform for `ImageDataset`: maps of many images fit in one array.

    Args:
        size: as in `choose_view`.
        patch_size: P, pixels.
        mean: per channel, of pixels in 0..1.
        std: per channel.
    """

    def __init__(self, size: Sequence[int], patch_size: int, mean: Sequence[float], std: Sequence[float]) -> None:
        self.size, self.patch_size, self.mean, self.std = list(size), patch_size, mean, std

    def view(self, image: Image.Image) -> View:
        """The part that is seen."""
        return choose_view(image.size, self.size, self.patch_size, square=True)

    def __call__(self, image: Image.Image, rng: np.random.Generator | None = None) -> list[Float[Tensor, "C H W"]]:
        """The view, in a list as training's crops are; nothing is drawn from `rng`."""
        return [view_tensor(image, self.view(image), self.mean, self.std)]

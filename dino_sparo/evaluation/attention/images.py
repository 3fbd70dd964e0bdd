"""The images of `--image_path`, by index: one file, a built-in scene, or anything that `open_source` opens."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from dino_sparo.data.scenes import Scenes
from dino_sparo.data.sources import IMAGE_EXTENSIONS, ImageLimits, ImageSource, open_source
from dino_sparo.data.sources.decode import DEFAULT_LIMITS, read_image
from dino_sparo.data.sources.folders import ALL
from dino_sparo.models.encoder import EncoderConfig

VIDEO_EXTENSIONS = (".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg")
# The scene that is shown where no image is given: two objects on a quiet background; drawn at this size, pixels.
SCENE_INDEX, SCENE_SIZE = 23, 384


def default_image_size(config: EncoderConfig) -> int:
    """Twice the side the encoder was trained for: four times the patches, so that maps show parts of objects.

    The reference looks at 480 pixels with a model trained at 224, for the same reason.
    """
    return 2 * config.img_size


class OneImage:
    """A single image as an `ImageSource`; `load` returns it as 8-bit RGB and raises CorruptImageError."""

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


def open_images(image_path: str | None, limits: ImageLimits = DEFAULT_LIMITS) -> ImageSource:
    """An image, a folder, or anything else that `open_source` takes; None: a built-in, held-out scene."""
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
        return OneImage(image_path, lambda: read_image(image_path, image_path, limits=limits))
    return open_source(image_path, ALL, limits=limits)

"""Drawn videos in the layout of DAVIS 2017, features of their patches, and imperfect masks of their objects.

Everything is a function of names, so `reference/record_davis.py` and the tests draw the same.
"""

import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

PALETTE = [0, 0, 0, 128, 0, 0, 0, 128, 0, 128, 128, 0, *[7] * 756]
VOID = 255


class DrawnVideo(NamedTuple):
    """Height and width in pixels, number of frames and of objects; `is_still`: all frames have the same features."""

    height: int
    width: int
    num_frames: int
    num_objects: int
    is_still: bool = False


VIDEOS = {
    "wide": DrawnVideo(90, 120, 9, 3),
    "tall": DrawnVideo(71, 50, 7, 2),
    "still": DrawnVideo(240, 450, 6, 2, is_still=True),
}
# Options of the propagation: frames before, radius, number of neighbours.
SETTINGS = {"wide": (3, 4, 5), "tall": (7, 12, 5), "still": (2, 0, 3)}
PATCH_SIZE, WIDTH = 32, 6  # of the features: 480 pixels make a grid of 15 rows


def generator(name: str) -> np.random.RandomState:
    return np.random.RandomState(zlib.crc32(name.encode()))


def annotation(name: str, frame: int) -> np.ndarray:
    """Moving ellipses, the later above the earlier; the last object leaves the picture, and some pixels are void."""
    video, numbers = VIDEOS[name], generator(name)
    rows, columns = np.mgrid[: video.height, : video.width]
    mask = np.zeros((video.height, video.width), dtype=np.uint8)
    for number in range(1, video.num_objects + 1):
        place, step, size = (
            numbers.uniform(0.25, 0.75, 2),
            numbers.uniform(-0.04, 0.04, 2),
            numbers.uniform(0.1, 0.3, 2),
        )
        step = step + 0.15 * (number == 3)
        middle = (place + (0 if video.is_still else frame) * step) * mask.shape
        radii = size * mask.shape
        mask[((rows - middle[0]) / radii[0]) ** 2 + ((columns - middle[1]) / radii[1]) ** 2 < 1] = number
    if frame:
        mask[frame : frame + 2, :9] = VOID
    return mask


def predicted(name: str, frame: int) -> np.ndarray:
    """The annotation, moved and with wrong pixels; in the first video the last object is never found."""
    mask = np.roll(annotation(name, frame), frame, axis=1)
    mask[generator(f"{name}/{frame}").rand(*mask.shape) < 0.02 * frame] = 1
    mask[(mask == VOID) | (mask == 3)] = 0
    return mask


def features(name: str, frame: int, rows: int, columns: int) -> np.ndarray:
    """Features (rows, columns, WIDTH) of a frame, fp32: smooth, drifting, with noise."""
    frame = 0 if VIDEOS[name].is_still else frame
    coarse = generator(f"{name}/features").randn(rows // 3 + 2, columns // 3 + 2, WIDTH)
    smooth = np.roll(np.kron(coarse, np.ones((3, 3, 1))), (frame, frame), axis=(0, 1))[:rows, :columns]
    return (smooth + 0.4 * generator(f"{name}/features/{frame}").randn(rows, columns, WIDTH)).astype(np.float32)


def write_mask(mask: np.ndarray, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(mask)
    image.putpalette(PALETTE)
    image.save(path)


def write_davis(root: Path, names: tuple[str, ...] = tuple(VIDEOS)) -> Path:
    """Write videos in the official layout; the frames show the objects in grey."""
    for name in names:
        for frame in range(VIDEOS[name].num_frames):
            mask = annotation(name, frame)
            write_mask(mask, root / "Annotations" / "480p" / name / f"{frame:05}.png")
            path = root / "JPEGImages" / "480p" / name / f"{frame:05}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            noise = generator(f"{name}/pixels").randint(0, 40, (*mask.shape, 3))
            Image.fromarray((60 * (mask % VOID)[..., None] + noise).astype(np.uint8)).save(path, quality=95)
    listing = root / "ImageSets" / "2017" / "val.txt"
    listing.parent.mkdir(parents=True, exist_ok=True)
    listing.write_text("\n".join(names) + "\n")
    return root

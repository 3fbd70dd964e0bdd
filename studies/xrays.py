"""Draw smooth grey images that resemble one another, as X-rays of the chest do: PNGs of 12 bits in class folders.

    python -m studies.xrays xrays --num_images 200            # a wide heart, or fluid in one lung, or neither
    python -m studies.xrays nodules --num_images 200 --hard   # a nodule, or grains, or neither, anywhere in the lungs

`FOLDER/train` gets the images, `FOLDER/val` 300 others. docs/results.md has runs on these images.
"""

import argparse
from pathlib import Path

import numpy as np
from numpy.random import Generator
from PIL import Image

SIDE, NUM_CLASSES, NUM_VAL, MAX_VALUE = 96, 3, 300, 4095
Y, X = np.mgrid[0:SIDE, 0:SIDE] / SIDE  # all positions and lengths are shares of the side


def ellipse(x: float, y: float, half_width: float, half_height: float, softness: float) -> np.ndarray:
    """(SIDE, SIDE): 1 inside, 0 outside, with a soft edge."""
    radius = np.sqrt(((X - x) / half_width) ** 2 + ((Y - y) / half_height) ** 2)
    return 1 / (1 + np.exp((radius - 1) / softness))


def thorax(rng: Generator, heart_growth: float) -> np.ndarray:
    """(SIDE, SIDE), about 0 to 1: body, lungs, spine, ribs and heart, with small differences between images."""

    def noise(deviation: float) -> float:
        return rng.normal(0, deviation)

    levels = 0.1 + 0.55 * ellipse(0.5 + noise(0.02), 0.55 + noise(0.02), 0.47 + noise(0.02), 0.6 + noise(0.02), 0.06)
    for x in (0.31, 0.69):
        levels -= 0.3 * ellipse(x + noise(0.015), 0.47 + noise(0.02), 0.14 + noise(0.01), 0.3 + noise(0.02), 0.15)
    levels += 0.15 * ellipse(0.5 + noise(0.01), 0.5, 0.05, 0.6, 0.2)
    ribs = np.sin(2 * np.pi * (9 * Y + rng.random() + 1.5 * (X - 0.5) ** 2))
    levels += 0.02 * ribs * ellipse(0.5, 0.5, 0.42, 0.42, 0.1)
    half_width = 0.12 + noise(0.006) + heart_growth
    levels += 0.2 * ellipse(0.55 + noise(0.01), 0.64 + noise(0.015), half_width, 0.13 + noise(0.01), 0.12)
    return levels


def finding(rng: Generator, label: int) -> np.ndarray | float:
    """A nodule (1) or six grains (2), at a random place of a random lung."""
    angle = 2 * np.pi * rng.random()
    x = rng.choice((0.31, 0.69)) + 0.06 * np.cos(angle) * rng.random()
    y = 0.45 + 0.18 * np.sin(angle) * rng.random()
    if label == 1:
        return 0.16 * ellipse(x, y, 0.055, 0.055, 0.15)
    grains = [rng.normal(0, 0.07, 2) for _ in range(6 if label else 0)]
    return sum(0.18 * ellipse(x + dx, y + dy, 0.02, 0.02, 0.15) for dx, dy in grains)


def draw(rng: Generator, label: int, hard: bool) -> Image.Image:
    """One image of class `label`."""
    levels = thorax(rng, heart_growth=0.07 if label == 1 and not hard else 0)
    if hard:
        levels = levels + finding(rng, label)
    elif label == 2:
        levels += 0.25 * ellipse(0.3 + rng.normal(0, 0.01), 0.75 + rng.normal(0, 0.02), 0.14, 0.12, 0.12)
    field = Image.fromarray(rng.normal(0, 1, (7, 7)).astype(np.float32)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    levels = levels * (1 + rng.normal(0, 0.04)) + 0.02 * np.asarray(field) + rng.normal(0, 0.02)
    levels = levels.astype(np.float32) + rng.normal(0, 0.004, (SIDE, SIDE))
    return Image.fromarray((levels.clip(0, 1) * MAX_VALUE).astype(np.uint16))


def main() -> None:
    """Write the images that the command line describes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num_images", type=int, default=200, help="training images")
    parser.add_argument("--hard", action="store_true", help="classes that an untrained encoder does not separate")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    for split, number in (("train", args.num_images), ("val", NUM_VAL)):
        for index in range(number):
            label = index % NUM_CLASSES
            path = args.folder / split / f"class{label}" / f"{index:05}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            draw(rng, label, args.hard).save(path)


if __name__ == "__main__":
    main()

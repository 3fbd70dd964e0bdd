"""The built-in scenes -> small data for the study `uses`: a table, copies in Copydays' layout, clips in DAVIS' layout.

table.csv, images/                                 attributes of the large object; two: whether there are two objects
copies/original/, copies/strong/                   scenes, and three changed copies of each
clips/{JPEGImages,Annotations}/480p/NAME/, ...     two objects that move over a still background, and their masks
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter

from dino_sparo.data.scenes.graphs import INDEPENDENT, SceneDescription
from dino_sparo.data.scenes.images import Scenes, object_masks
from dino_sparo.draw.pixels import save_picture
from dino_sparo.evaluation.embed.store import write_csv
from dino_sparo.evaluation.segment.pictures import PALETTE
from studies.drawn_sets import samples

SIZE = 48  # side of the pictures, pixels
NUM_ROWS, NUM_ORIGINALS = 500, 200  # rows of a split of the table, originals of copies
NUM_CLIPS, NUM_FRAMES, CLIP_SIZE = 8, 8, 96
SPEED = (0.02, 0.05)  # of an object along each axis, image sides per frame


def draw_data(root: Path) -> Path:
    """Draw what is missing; returns the folder."""
    for name, write in (("table.csv", write_table), ("copies", write_copies), ("clips", write_clips)):
        if not (root / name).exists():
            write(root / name)
    return root


def write_table(path: Path) -> None:
    """Scenes whose attributes do not go together, so that none can be guessed from another."""
    (folder := path.parent / "images").mkdir(parents=True, exist_ok=True)
    rows: list[list[object]] = [["path", "split", "tags", "two", "x", "y"]]
    for split in ("train", "val"):
        scenes = Scenes(NUM_ROWS, SIZE, split, ties=INDEPENDENT)
        for index in range(len(scenes)):
            graph = scenes.scene_graph(index)
            large = graph.objects[0]
            scenes.read(index).save(picture := folder / f"{split}{index}.png")
            tags = "; ".join((large.shape, large.colour, large.texture, graph.background))
            numbers = (len(graph.objects) - 1, *large.center)
            rows.append([picture.relative_to(path.parent), split, tags, *numbers])
    write_csv(path, rows)


def write_copies(root: Path) -> None:
    """Originals, and of each a crop, a blurred copy and one under a grey bar, in other light."""
    for part in ("original", "strong"):
        (root / part).mkdir(parents=True)
    scenes, rng = Scenes(NUM_ORIGINALS, SIZE, "val"), np.random.default_rng(0)
    for index in range(len(scenes)):
        original = scenes.read(index)
        original.save(root / "original" / f"{index:04}0.jpg", quality=95)
        for number, copy in enumerate(changed(original, rng), 1):
            light = ImageEnhance.Brightness(copy).enhance(rng.uniform(0.6, 1.4))
            light.save(root / "strong" / f"{index:04}{number}.jpg", quality=50)


def changed(original: Image.Image, rng: np.random.Generator) -> Iterator[Image.Image]:
    """A crop of half the side or more, a blurred copy, and a copy of which a bar hides a third."""
    side = int(rng.uniform(0.5, 0.7) * SIZE)
    left, top = rng.integers(SIZE - side + 1, size=2).tolist()
    yield original.crop((left, top, left + side, top + side)).resize(original.size, Image.Resampling.BICUBIC)
    yield original.filter(ImageFilter.GaussianBlur(rng.uniform(1.5, 3)))
    covered = original.copy()
    covered.paste((128, 128, 128), (0, start := int(rng.integers(SIZE * 2 // 3)), SIZE, start + SIZE // 3))
    yield covered


def write_clips(root: Path) -> None:
    """Clips of two moving objects, with the number of the object in each pixel."""
    names = [f"clip{number}" for number in range(NUM_CLIPS)]
    for name, sample in zip(names, samples(NUM_CLIPS, CLIP_SIZE, seed=0), strict=True):
        folders = [root / kind / "480p" / name for kind in ("JPEGImages", "Annotations")]
        for folder in folders:
            folder.mkdir(parents=True)
        for number, graph in enumerate(moving(sample.graph, np.random.default_rng(sample.seed))):
            sample.picture(graph).save(folders[0] / f"{number:05}.jpg", quality=95)
            masks = object_masks(graph, CLIP_SIZE)
            numbers = (masks * np.arange(1, 1 + len(masks))[:, None, None]).sum(axis=0).astype(np.uint8)
            save_picture(numbers, folders[1] / f"{number:05}.png", PALETTE.flatten().tolist())
    listing = root / "ImageSets" / "2017" / "val.txt"
    listing.parent.mkdir(parents=True)
    listing.write_text("\n".join(names) + "\n")


def moving(graph: SceneDescription, rng: np.random.Generator) -> Iterator[SceneDescription]:
    """The same scene in every frame, its objects elsewhere; they turn round at the borders."""
    speeds = rng.uniform(*SPEED, (len(graph.objects), 2)) * rng.choice((-1, 1), (len(graph.objects), 2))
    for frame in range(NUM_FRAMES):
        objects = []
        for thing, speed in zip(graph.objects, speeds, strict=True):
            low, reach = thing.radius, 1 - 2 * thing.radius
            way = (np.array(thing.center) - low + frame * speed) % (2 * reach)  # there and back
            x, y = low + np.minimum(way, 2 * reach - way)
            objects.append(replace(thing, center=(float(x), float(y))))
        yield replace(graph, objects=tuple(objects))

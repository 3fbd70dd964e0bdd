"""(seed, split, index) -> image, class label and caption: the built-in procedural pictures, no download.

`--data_path scenes` opens them. A scene shows one large textured object, whose shape is the class label, sometimes with
a smaller second object. Its description (`graphs.py`) is drawn from a random stream that depends on (seed, split,
index) alone; caption and picture are functions of the graph and of that stream.

Other experiments make their own scenes with `place_one`, `place_pair`, `turned_object` and `draw_scene`.
"""

from functools import lru_cache
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Int64
from PIL import Image

from dino_sparo.data.defaults import SCENE_SIZE
from dino_sparo.data.scenes import patterns
from dino_sparo.data.scenes.graphs import SceneDescription, SceneObject, Ties, between, sample_graph
from dino_sparo.data.scenes.patterns import SHAPES, Array, Tone
from dino_sparo.runtime.faults import UserError

DEFAULT_NUM_IMAGES = 20_000
DEFAULT_IMAGE_SIZE = SCENE_SIZE
# Below this the texture of a large object has a period of less than two pixels and cannot be recognised. That
# of a small object needs about 48 px.
MIN_IMAGE_SIZE = 24
# Bytes of drawn scenes that are kept, by all processes of a loader together.
CACHE_BYTES = 2**28
# The stream of random numbers of a split; a scene of one split is never drawn again in the other.
SPLITS: dict[str, int] = {"train": 0, "val": 1}

# Periods of a texture per radius of its object.
TEXTURE_FREQUENCY = (2.2, 2.8)
# The light of the whole scene: factors on the contrast around middle grey and on the brightness.
CONTRAST = (0.4, 1.2)
BRIGHTNESS = (0.35, 1.3)


class Scenes:
    """The built-in procedural images, an `ImageSource` that draws each image when it is read.

    Scene i is a pure function of (seed, split, i): the same in every process, whatever was read before, and whatever
    `num_images` is, so a short list of scenes is the beginning of a long one. Drawing takes a millisecond, so a process
    keeps what it has drawn for the next epoch, as far as CACHE_BYTES allow. Its class is i modulo the number of
    shapes, so that any run of consecutive scenes is balanced.

    Args:
        num_images: length of the list.
        image_size: side of the square images, pixels.
        split: "train" or "val" (held out: no scene is drawn in both).
        seed: non-negative; another seed gives other scenes of the same kind.
        ties: how strongly a category's cues go together.

    Raises:
        ValueError: a count or size is out of range, or the split is unknown.
    """

    def __init__(
        self,
        num_images: int = DEFAULT_NUM_IMAGES,
        image_size: int = DEFAULT_IMAGE_SIZE,
        split: str = "train",
        seed: int = 0,
        ties: Ties | None = None,
    ) -> None:
        if num_images < 1 or image_size < MIN_IMAGE_SIZE:
            raise UserError(
                f"{num_images} scenes of {image_size} px: give at least one, and {MIN_IMAGE_SIZE} px for the textures"
            )
        if split not in SPLITS:
            raise UserError(f"unknown split {split!r} of scenes; choose one of {sorted(SPLITS)}")
        self.num_images, self.image_size, self.split, self.seed = num_images, image_size, split, seed
        self.ties = Ties() if ties is None else ties
        self.name = f"scenes {split} ({image_size} px, seed {seed})"
        self.classes: list[str] | None = list(SHAPES)
        self.labels: np.ndarray | None = np.arange(num_images, dtype=np.int64) % len(SHAPES)
        self._drawn: dict[int, Image.Image] = {}

    def __len__(self) -> int:
        return self.num_images

    def read(self, index: int) -> Image.Image:
        """Draw scene `index`: an RGB image, 8 bit, (image_size, image_size)."""
        if index not in self._drawn:
            rng = self._rng(index)
            picture = draw_scene(sample_graph(rng, index % len(SHAPES), self.ties), rng, self.image_size)
            if (len(self._drawn) + 1) * 3 * self.image_size**2 > CACHE_BYTES // _processes_of_the_loader():
                return picture
            self._drawn[index] = picture
        return self._drawn[index].copy()

    def location(self, index: int) -> str:
        """Origin of the image, for logs and errors."""
        return f"scenes[{index}]" if self.split == "train" else f"scenes-{self.split}[{index}]"

    def scene_graph(self, index: int) -> SceneDescription:
        """Objects, relation and background of scene `index`."""
        return sample_graph(self._rng(index), index % len(SHAPES), self.ties)

    def caption(self, index: int) -> str:
        """The caption of scene `index`."""
        return self.scene_graph(index).caption

    def object_masks(self, index: int) -> tuple[Bool[np.ndarray, "objects H W"], Int64[np.ndarray, " objects"]]:
        """Masks of the objects in scene `index`, and their classes, numbers of `classes`."""
        graph = self.scene_graph(index)
        labels = np.array([SHAPES.index(thing.shape) for thing in graph.objects], dtype=np.int64)
        return object_masks(graph, self.image_size), labels

    def _rng(self, index: int) -> np.random.Generator:
        if not 0 <= index < self.num_images:
            raise IndexError(f"scene {index} does not exist; {self.name} has {self.num_images} scenes, from 0")
        return np.random.default_rng([self.seed, SPLITS[self.split], index])


def _processes_of_the_loader() -> int:
    from torch.utils.data import get_worker_info  # late: commands print their help without torch

    worker = get_worker_info()
    return 1 if worker is None else worker.num_workers


def names_scenes(data_path: str) -> bool:
    """Whether a data path is `scenes`, with or without numbers, and no file or folder has that name."""
    return data_path.partition(":")[0] == "scenes" and not Path(data_path).exists()


def parse_scenes_spec(spec: str) -> tuple[int, int]:
    """Read `scenes`, `scenes:NUM` or `scenes:NUM:IMAGE_SIZE`.

    Returns:
        Number of images and their side in pixels, by default the module's; ValueError for a text of another form.
    """
    word, *numbers = spec.split(":")
    if word != "scenes" or len(numbers) > 2 or not all(n.isascii() and n.isdigit() for n in numbers):
        raise UserError(
            f"cannot read {spec!r} as built-in scenes; write scenes, scenes:NUM or scenes:NUM:IMAGE_SIZE, "
            f"for example scenes:{DEFAULT_NUM_IMAGES}:{DEFAULT_IMAGE_SIZE}"
        )
    num_images, image_size = [*map(int, numbers), *(DEFAULT_NUM_IMAGES, DEFAULT_IMAGE_SIZE)[len(numbers) :]]
    return num_images, image_size


# From a graph to pixels, float32 canvases (3, H, W) in [0, 1].


@lru_cache(maxsize=8)
def _pixel_centers(size: int) -> Float[np.ndarray, " size"]:
    return ((np.arange(size) + 0.5) / size).astype(np.float32)


@lru_cache(maxsize=8)
def _noise_tile(size: int) -> Float[np.ndarray, "tile tile"]:
    """Soft noise of unit variance, (2 size, 2 size), periodic; its grain is a fixed fraction of an image's side."""
    side = 2 * size
    frequency = np.sqrt(np.fft.fftfreq(side)[:, None] ** 2 + np.fft.fftfreq(side)[None] ** 2) * size
    white = np.fft.fft2(np.random.default_rng(0).random((side, side)) - 0.5)
    soft = np.fft.ifft2(white * np.where(frequency > 0, np.exp(-frequency / 6) / (1 + frequency), 0)).real
    return (soft / soft.std()).astype(np.float32)


def draw_scene(graph: SceneDescription, rng: np.random.Generator, size: int) -> Image.Image:
    """Paint background, then objects with their shadows, then the light.

    Args:
        graph: what the picture shows.
        rng: random numbers, of the light, of the patterns' origins and of the exact tones.
        size: side of the picture, pixels.

    Returns:
        RGB, 8 bit, (size, size).
    """
    angle = 2 * np.pi * rng.random()
    light = (float(np.cos(angle)), float(np.sin(angle)))
    contrast, brightness = np.float32(between(rng, *CONTRAST)), np.float32(between(rng, *BRIGHTNESS))
    canvas = _paint_background(graph.background, rng, size)
    for thing in graph.objects:
        _paint_object(canvas, thing, light, rng)
    axis = _pixel_centers(size) - 0.5
    shade = (0.22 * light[0]) * axis[None, :] + (0.22 * light[1]) * axis[:, None]
    canvas = (canvas - 0.5) * contrast + 0.5
    canvas *= brightness + shade
    pixels = np.clip(canvas * 255 + 0.5, 0, 255).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))


def object_masks(graph: SceneDescription, size: int) -> Bool[np.ndarray, "objects H W"]:
    """The pixels of `draw_scene` that show each object: those whose center lies within its outline.

    An object hides those before it. Shadows belong to the background.

    Args:
        graph: what the picture shows.
        size: side of the picture, pixels.

    Returns:
        (objects, size, size), in the order of `graph.objects`; no pixel has two objects.
    """
    axis = _pixel_centers(size)
    masks = np.zeros((len(graph.objects), size, size), dtype=bool)
    for mask, thing in zip(masks, graph.objects, strict=True):
        u, v = _upright(thing, *_offsets(thing, axis, axis))
        visible = patterns.SHAPE_TABLE[thing.shape](u, v) <= 0
        masks[:, visible] = False
        mask[visible] = True
    return masks


def _offsets(thing: SceneObject, x: Array, y: Array) -> tuple[Array, Array]:
    """The steps from an object's center to pixels, (1, W) and (H, 1), in units of its radius."""
    dx = (x[None] - np.float32(thing.center[0])) / np.float32(thing.radius)
    dy = (y[:, None] - np.float32(thing.center[1])) / np.float32(thing.radius)
    return dx, dy


def _upright(thing: SceneObject, dx: Array, dy: Array) -> tuple[Array, Array]:
    """The same steps in the frame of the object, before its rotation, (H, W) each."""
    cos, sin = np.float32(np.cos(thing.rotation)), np.float32(np.sin(thing.rotation))
    return cos * dx + sin * dy, cos * dy - sin * dx


def _paint_background(background: str, rng: np.random.Generator, size: int) -> Array:
    pattern, dark, bright = patterns.BACKGROUND_TABLE[background]
    axis = _pixel_centers(size)
    row, column = int(size * rng.random()), int(size * rng.random())
    noise = _noise_tile(size)[row : row + size, column : column + size]
    x, y = axis[None, :] + np.float32(rng.random()), axis[:, None] + np.float32(rng.random())
    value = np.clip(pattern(x, y, noise), 0, 1).astype(np.float32, copy=False)
    low, high = _jittered(dark, rng), _jittered(bright, rng)
    return low + (high - low) * value


def _jittered(tone: Tone, rng: np.random.Generator) -> Array:
    """A tone (3, 1, 1), each channel a little off, so that a colour is a range and not one number."""
    return np.clip(np.asarray(tone) + 0.1 * (rng.random(3) - 0.5), 0, 1).astype(np.float32)[:, None, None]


def _paint_object(canvas: Array, thing: SceneObject, light: tuple[float, float], rng: np.random.Generator) -> None:
    """Paint one object and its shadow into the canvas, in place."""
    size = canvas.shape[-1]
    # The window: the object's box and room for the soft shadow, cut at the image's border.
    (left, top, right, bottom), margin = thing.box, 0.3 * thing.radius
    x0, y0 = max(0, int((left - margin) * size)), max(0, int((top - margin) * size))
    x1, y1 = min(size, int((right + margin) * size) + 1), min(size, int((bottom + margin) * size) + 1)
    axis = _pixel_centers(size)
    dx, dy = _offsets(thing, axis[x0:x1], axis[y0:y1])
    u, v = _upright(thing, dx, dy)
    distance = patterns.SHAPE_TABLE[thing.shape](u, v)
    pixels = np.float32(size * thing.radius)  # per unit of distance

    _cast_shadow(canvas, distance, x0, y0, light, thing.radius)
    frequency = np.float32(between(rng, *TEXTURE_FREQUENCY))
    s, t = (frequency * axis + np.float32(rng.random()) for axis in (u, v))
    wave = patterns.TEXTURE_TABLE[thing.texture](s, t)
    tone = np.clip(0.5 + wave * (0.16 * pixels / frequency), 0, 1)
    main, second = (_jittered(tone, rng) for tone in patterns.COLOUR_TABLE[thing.colour])
    paint = second + (main - second) * tone
    # A lit side, a dark side, and a darker rim keep the outline visible on a background of the same colour.
    shade = 1 + 0.2 * (np.float32(light[0]) * dx + np.float32(light[1]) * dy)
    paint *= shade * np.clip(0.55 - distance * (0.25 * pixels), 0.55, 1)
    cover = np.clip(0.5 - distance * pixels, 0, 1)
    window = canvas[:, y0:y1, x0:x1]
    window += (paint - window) * cover


def _cast_shadow(canvas: Array, distance: Array, x0: int, y0: int, light: tuple[float, float], radius: float) -> None:
    """Darken the canvas behind an object, away from the light, by whole pixels; the edge is soft."""
    size = canvas.shape[-1]
    shift_x, shift_y = (-round(0.14 * radius * size * component) for component in light)
    soft = 1 - 0.5 * np.clip(0.5 - distance * 3, 0, 1)
    height, width = distance.shape
    left, top = max(0, -(x0 + shift_x)), max(0, -(y0 + shift_y))
    right, bottom = min(width, size - x0 - shift_x), min(height, size - y0 - shift_y)
    y, x = y0 + shift_y, x0 + shift_x
    canvas[:, y + top : y + bottom, x + left : x + right] *= soft[top:bottom, left:right]

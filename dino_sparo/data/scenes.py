"""(seed, split, index) -> scene graph, caption, class label and image: the built-in procedural pictures, no download.

`--data_path scenes` opens them. A scene shows one large textured object, whose shape is the class label, sometimes with
a smaller second one next to it. Its scene graph is drawn from a random stream that depends on (seed, split, index)
alone; the caption and the picture are functions of the graph and of that stream.

CAPTION grammar, what `Scenes.caption` says:

    caption  = object [relation object] "on" background      a red striped star left of a blue dotted ring on sand
    object   = ("a" | "an") colour texture shape             an orange plain heart
    relation = "left of" | "right of" | "above" | "under"    of the two centres, subject first, as seen in the picture

Every word is in one of the tuples SHAPES, COLOURS, TEXTURES, BACKGROUNDS, RELATIONS. Two objects of one scene
differ in shape and in colour, so exchanging the objects, their colours or the relation always gives a false caption.

Other experiments make scenes of their own with `place_one`, `place_pair`, `turned_object` and `draw_scene`.

A category is more than its shape, as it is for real things: `Ties` says how often it also has its typical texture,
colour and background. Cues that go together make categories easier to find without labels; but the stronger colour and
background are tied, the better an untrained encoder already tells the categories apart. The defaults are our choice.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int64
from PIL import Image

from dino_sparo.runtime.choices import SCENE_SIZE

Array = np.ndarray

DEFAULT_NUM_IMAGES = 20_000
DEFAULT_IMAGE_SIZE = SCENE_SIZE
# Below this the texture of a large object has a period of less than two pixels and cannot be recognised. That
# of a small object needs about 48 px.
MIN_IMAGE_SIZE = 24
# Bytes of drawn scenes that are kept, by all processes of a loader together.
CACHE_BYTES = 2**28
# The stream of random numbers of a split; a scene of one split is never drawn again in the other.
SPLITS: dict[str, int] = {"train": 0, "val": 1}

# What a caption may leave out.
ATTRIBUTES = ("colour", "texture", "background")
# How often a scene has two objects, and how often the large one is then the subject of the caption.
SECOND_OBJECT_PROBABILITY = 0.5
LARGE_SUBJECT_PROBABILITY = 0.5
# Lengths are fractions of the image's side, angles are radians.
LONE_RADIUS = (0.28, 0.38)
LARGE_RADIUS = (0.27, 0.31)
SMALL_RADIUS = (0.12, 0.15)
MAX_ROTATION = 0.35
# Periods of a texture per radius of its object.
TEXTURE_FREQUENCY = (2.2, 2.8)
# The light of the whole scene: factors on the contrast around middle grey and on the brightness.
CONTRAST = (0.4, 1.2)
BRIGHTNESS = (0.35, 1.3)


@dataclass(frozen=True)
class Ties:
    """How often an object has what is typical of its category; otherwise the attribute is drawn uniformly.

    Attributes:
        texture: probability of the typical texture, in [0, 1].
        colour: probability of the typical colour, in [0, 1].
        background: probability that the large object stands on its typical background, in [0, 1].

    Raises:
        ValueError: a probability is outside [0, 1].
    """

    texture: float = 0.9
    colour: float = 0.85
    background: float = 0.6

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value <= 1:
                raise ValueError(f"Ties.{field.name}={value} is not a probability; give a number from 0 to 1")


# Attributes that go together would let a model guess one from the other instead of looking.
INDEPENDENT = Ties(texture=0.0, colour=0.0, background=0.0)


class Circle(NamedTuple):
    """The circle that holds an object.

    Attributes:
        centre: (x, y), fractions of the image's side, x to the right, y downwards.
        radius: a fraction of the image's side.
    """

    centre: tuple[float, float]
    radius: float


@dataclass(frozen=True)
class SceneObject:
    """One object of a scene.

    Attributes:
        shape: one of SHAPES.
        colour: one of COLOURS.
        texture: one of TEXTURES.
        centre: (x, y), fractions of the image's side, x to the right, y downwards.
        radius: of the circle around the centre that holds the object, a fraction of the image's side.
        rotation: radians, clockwise as seen in the picture.
    """

    shape: str
    colour: str
    texture: str
    centre: tuple[float, float]
    radius: float
    rotation: float

    @property
    def box(self) -> tuple[float, float, float, float]:
        """(left, top, right, bottom) of the circle that holds the object, fractions of the image's side."""
        (x, y), r = self.centre, self.radius
        return (x - r, y - r, x + r, y + r)

    @property
    def phrase(self) -> str:
        """The object in words: article, colour, texture, shape."""
        return self.described(ATTRIBUTES)

    def described(self, attributes: Collection[str]) -> str:
        """The object in words, with these of its ATTRIBUTES alone: article, perhaps colour and texture, shape."""
        words = [getattr(self, name) for name in ("colour", "texture") if name in attributes] + [self.shape]
        return with_article(" ".join(words))


def with_article(phrase: str) -> str:
    """`red star` -> `a red star`, `orange star` -> `an orange star`."""
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


@dataclass(frozen=True, order=True)
class Relation:
    """`objects[subject] predicate objects[object]`, with predicate one of RELATIONS."""

    subject: int
    predicate: str
    object: int


@dataclass(frozen=True)
class SceneGraph:
    """What a scene shows.

    Attributes:
        objects: one or two; the first is the large one, which gives the class label.
        relations: none or one, between the two objects.
        background: one of BACKGROUNDS.
    """

    objects: tuple[SceneObject, ...]
    relations: tuple[Relation, ...]
    background: str

    @property
    def caption(self) -> str:
        """The graph in words, by the grammar at the top of this module."""
        return self.described(ATTRIBUTES)

    def described(self, attributes: Collection[str]) -> str:
        """The same with these of the ATTRIBUTES alone; shapes and relation are always kept.

        Args:
            attributes: some of ATTRIBUTES.
        """
        backdrop = f" on {self.background}" if "background" in attributes else ""
        if not self.relations:
            return self.objects[0].described(attributes) + backdrop
        relation = self.relations[0]
        subject, other = (self.objects[i].described(attributes) for i in (relation.subject, relation.object))
        return f"{subject} {relation.predicate} {other}{backdrop}"


# Shapes: signed distance to the outline, negative inside, in units of the object's radius; u right, v down, upright.


def _circle(u: Array, v: Array, radius: float = 0.88) -> Array:
    return np.sqrt(u * u + v * v) - radius


def _box(u: Array, v: Array, half_width: float, half_height: float) -> Array:
    return np.maximum(np.abs(u) - half_width, np.abs(v) - half_height)


def _star(u: Array, v: Array) -> Array:
    # Fold the plane into one tenth of the star, a half point, where the outline is the straight edge from the tip
    # (0.98, 0) to the inner corner, 0.46 from the centre.
    turn = np.arctan2(u, -v) * np.float32(2.5 / np.pi)
    angle = np.abs(turn - np.round(turn)) * np.float32(0.4 * np.pi)
    r = np.sqrt(u * u + v * v)
    return 0.4064 * r * np.cos(angle) + 0.9137 * r * np.sin(angle) - 0.3983


def _triangle(u: Array, v: Array) -> Array:
    return np.maximum(v - 0.6, 0.88 * np.abs(u) - 0.475 * v - 0.42)


def _heart(u: Array, v: Array) -> Array:
    u = np.abs(u)
    lobe = np.sqrt((u - 0.42) ** 2 + (v + 0.26) ** 2) - 0.47
    # The tip ends where its edge, at 45 degrees, touches the lobe.
    edge, base = 0.7071 * (u + v) - 0.583, 0.7071 * (u - v) - 0.481
    return np.minimum(lobe, np.maximum(np.maximum(edge, base), -v - 0.26))


def _crescent(u: Array, v: Array) -> Array:
    return np.maximum(_circle(u, v), 0.72 - np.sqrt((u - 0.5) ** 2 + (v + 0.1) ** 2))


def _flower(u: Array, v: Array) -> Array:
    r2 = u * u + v * v + 1e-6
    # cos(5 angle) = Re (v + iu)^5 / r^5, without a trigonometric function per pixel
    cos5 = v * (v**4 - 10 * v * v * u * u + 5 * u**4) / (r2 * r2 * np.sqrt(r2))
    return 0.8 * (np.sqrt(r2) - 0.68 - 0.24 * cos5)


def _arrow(u: Array, v: Array) -> Array:
    head = np.maximum(v, 0.74 * np.abs(u) - 0.67 * v - 0.6)
    return np.minimum(head, _box(u, v - 0.4, 0.27, 0.5))


_SHAPES: dict[str, Callable[[Array, Array], Array]] = {
    "circle": _circle,
    "square": lambda u, v: _box(u, v, 0.68, 0.68),
    "triangle": _triangle,
    "star": _star,
    "heart": _heart,
    "ring": lambda u, v: np.abs(_circle(u, v, 0.64)) - 0.25,
    "cross": lambda u, v: np.minimum(_box(u, v, 0.88, 0.3), _box(u, v, 0.3, 0.88)),
    "crescent": _crescent,
    "flower": _flower,
    "arrow": _arrow,
}

# Textures: a wave in about [-1, 1] whose sign says which of two tones a pixel gets; s, t count periods.


def _wave(phase: Array) -> Array:
    return np.sin(2 * np.pi * phase)


def _zigzag(s: Array, t: Array) -> Array:
    return _wave(t + 0.9 * np.abs((0.8 * s) % 1 - 0.5))


def _brick(s: Array, t: Array) -> Array:
    row = np.floor(1.1 * t)
    joint = np.minimum(np.abs((1.1 * t) % 1 - 0.5), 1.6 * np.abs((0.7 * s + 0.5 * (row % 2)) % 1 - 0.5))
    return 4 * (joint - 0.12)


def _speckle(s: Array, t: Array) -> Array:
    return _wave(0.9 * s + 0.6 * _wave(0.61 * t)) + _wave(0.83 * t + 0.7 * _wave(0.53 * s + 0.3)) - 0.35


_TEXTURES: dict[str, Callable[[Array, Array], Array]] = {
    "dotted": lambda s, t: _wave(s) + _wave(t) - 0.55,
    "striped": lambda s, t: _wave(1.15 * t),
    "plain": lambda s, t: np.full(np.broadcast_shapes(s.shape, t.shape), 1.0, dtype=np.float32),
    "zigzag": _zigzag,
    "checkered": lambda s, t: 1.6 * _wave(0.8 * s) * _wave(0.8 * t),
    "banded": lambda s, t: _wave(1.15 * s),
    "gridded": lambda s, t: 0.75 - np.maximum(_wave(s), _wave(t)),
    "speckled": _speckle,
    "rippled": lambda s, t: _wave(1.1 * np.sqrt(s * s + t * t)),
    "bricked": _brick,
}

# The two tones of a colour, RGB in [0, 1].
_COLOURS: dict[str, tuple[tuple[float, float, float], tuple[float, float, float]]] = {
    "red": ((0.86, 0.16, 0.15), (1.00, 0.74, 0.68)),
    "orange": ((0.97, 0.52, 0.10), (0.45, 0.17, 0.02)),
    "yellow": ((0.99, 0.84, 0.18), (0.52, 0.36, 0.02)),
    "green": ((0.14, 0.62, 0.28), (0.78, 0.95, 0.68)),
    "blue": ((0.14, 0.36, 0.84), (0.70, 0.86, 1.00)),
    "purple": ((0.52, 0.24, 0.72), (0.90, 0.76, 1.00)),
    "pink": ((0.98, 0.55, 0.72), (0.56, 0.09, 0.30)),
    "white": ((0.97, 0.97, 0.95), (0.34, 0.37, 0.43)),
}

# Backgrounds: a pattern in about [0, 1] from x (1, W), y (H, 1), in image sides with a random origin, and soft noise
# (H, W) in about [-1, 1]; then the tones for 0 and for 1.


def _sand(x: Array, y: Array, noise: Array) -> Array:
    return 0.5 + 0.2 * _wave(7 * y + 0.5 * _wave(0.7 * x) + 0.3 * noise) + 0.15 * noise


def _grass(x: Array, y: Array, noise: Array) -> Array:
    return 0.5 + 0.22 * _wave(15 * x + 1.1 * _wave(3 * y + 0.5 * noise)) + 0.2 * noise


def _water(x: Array, y: Array, noise: Array) -> Array:
    return 0.45 + 0.35 * _wave(6 * y + 0.3 * _wave(1.7 * x) + 0.25 * noise) + 0.1 * noise


def _wood(x: Array, y: Array, noise: Array) -> Array:
    plank = np.floor(4 * y)
    grain = 0.5 + 0.2 * _wave(13 * y + 0.5 * _wave(0.8 * x + 0.37 * plank) + 0.2 * noise) + 0.25 * _wave(0.37 * plank)
    return np.minimum(grain, 14 * (0.5 - np.abs((4 * y) % 1 - 0.5)))


def _brick_wall(x: Array, y: Array, noise: Array) -> Array:
    row = np.floor(6 * y)
    joint = np.minimum(0.5 - np.abs((6 * y) % 1 - 0.5), 2 * (0.5 - np.abs((3 * x + 0.5 * (row % 2)) % 1 - 0.5)))
    return np.minimum(8 * joint, 0.8 + 0.15 * noise)


_Tone = tuple[float, float, float]
_BACKGROUNDS: dict[str, tuple[Callable[[Array, Array, Array], Array], _Tone, _Tone]] = {
    "sand": (_sand, (0.71, 0.60, 0.43), (0.94, 0.86, 0.70)),
    "grass": (_grass, (0.25, 0.40, 0.16), (0.52, 0.65, 0.32)),
    "water": (_water, (0.19, 0.42, 0.52), (0.47, 0.70, 0.76)),
    "snow": (lambda x, y, noise: 0.6 + 0.25 * noise, (0.74, 0.80, 0.88), (0.96, 0.97, 1.00)),
    "brick": (_brick_wall, (0.72, 0.67, 0.62), (0.58, 0.36, 0.29)),
    "wood": (_wood, (0.32, 0.21, 0.13), (0.62, 0.45, 0.29)),
}

SHAPES = tuple(_SHAPES)
COLOURS = tuple(_COLOURS)
TEXTURES = tuple(_TEXTURES)
BACKGROUNDS = tuple(_BACKGROUNDS)
# The step from the second object's centre to the first's, x to the right, y downwards.
_RELATIONS: dict[str, tuple[int, int]] = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "under": (0, 1)}
RELATIONS = tuple(_RELATIONS)
# The relation of the second object to the first.
OPPOSITES = {"left of": "right of", "right of": "left of", "above": "under", "under": "above"}


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

    Attributes:
        name: for log lines.
        classes: names of the classes, which are the shapes.
        labels: (num_images,) int64, index into `classes`.

    Raises:
        ValueError: a count, size or seed is out of range, or the split is unknown.
    """

    def __init__(
        self,
        num_images: int = DEFAULT_NUM_IMAGES,
        image_size: int = DEFAULT_IMAGE_SIZE,
        split: str = "train",
        seed: int = 0,
        ties: Ties | None = None,
    ) -> None:
        if num_images < 1:
            raise ValueError(f"num_images={num_images} is not a number of scenes; give a positive integer")
        if image_size < MIN_IMAGE_SIZE:
            raise ValueError(
                f"image_size={image_size} px is too small for scenes: textures need at least {MIN_IMAGE_SIZE} px"
            )
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r} of scenes; choose one of {sorted(SPLITS)}")
        if seed < 0:
            raise ValueError(f"seed={seed} is negative; give an integer from 0")
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
            picture = draw_scene(_sample_graph(rng, index % len(SHAPES), self.ties), rng, self.image_size)
            if (len(self._drawn) + 1) * 3 * self.image_size**2 > CACHE_BYTES // _processes_of_the_loader():
                return picture
            self._drawn[index] = picture
        return self._drawn[index].copy()

    def location(self, index: int) -> str:
        """Where the image comes from, for logs and errors."""
        return f"scenes[{index}]" if self.split == "train" else f"scenes-{self.split}[{index}]"

    def scene_graph(self, index: int) -> SceneGraph:
        """Objects, relation and background of scene `index`."""
        return _sample_graph(self._rng(index), index % len(SHAPES), self.ties)

    def caption(self, index: int) -> str:
        """Scene `index` in words."""
        return self.scene_graph(index).caption

    def object_masks(self, index: int) -> tuple[Bool[np.ndarray, "objects H W"], Int64[np.ndarray, " objects"]]:
        """Which pixels of scene `index` show which object, and the objects' classes, numbers of `classes`."""
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
    """Whether a data path is `scenes`, with or without numbers."""
    return data_path.partition(":")[0] == "scenes"


def parse_scenes_spec(spec: str) -> tuple[int, int]:
    """Read `scenes`, `scenes:NUM` or `scenes:NUM:IMAGE_SIZE`.

    Returns:
        Number of images and their side in pixels; what the text leaves out has the module's defaults.

    Raises:
        ValueError: the text has another form, or a number is out of range.
    """
    word, *numbers = spec.split(":")
    if word != "scenes" or len(numbers) > 2 or not all(n.isascii() and n.isdigit() for n in numbers):
        raise ValueError(
            f"cannot read {spec!r} as built-in scenes; write scenes, scenes:NUM or scenes:NUM:IMAGE_SIZE, "
            f"for example scenes:{DEFAULT_NUM_IMAGES}:{DEFAULT_IMAGE_SIZE}"
        )
    num_images, image_size = [*map(int, numbers), *(DEFAULT_NUM_IMAGES, DEFAULT_IMAGE_SIZE)[len(numbers) :]]
    if num_images < 1:
        raise ValueError(f"{spec!r} asks for {num_images} scenes; give a positive number")
    if image_size < MIN_IMAGE_SIZE:
        raise ValueError(f"{spec!r} asks for images of {image_size} px; scenes need at least {MIN_IMAGE_SIZE} px")
    return num_images, image_size


# From a random stream to a graph. Only `rng.random` is used: its stream is the same in every version of numpy.


def _between(rng: np.random.Generator, low: float, high: float) -> float:
    return low + (high - low) * rng.random()


def _choose(rng: np.random.Generator, words: tuple[str, ...], typical: str | None = None, tie: float = 0.0) -> str:
    """`typical` with probability `tie`, otherwise any of the words with equal probability."""
    tied, u = rng.random() < tie, rng.random()
    return typical if tied and typical is not None else words[int(u * len(words))]


def _choose_object(
    rng: np.random.Generator, shape: str, colours: tuple[str, ...], ties: Ties, circle: Circle
) -> SceneObject:
    category = SHAPES.index(shape)
    colour = _choose(rng, colours, COLOURS[category % len(COLOURS)], ties.colour)
    if colour not in colours:
        colour = _choose(rng, colours)
    texture = _choose(rng, TEXTURES, TEXTURES[category], ties.texture)
    return turned_object(rng, shape, colour, texture, circle)


def turned_object(rng: np.random.Generator, shape: str, colour: str, texture: str, circle: Circle) -> SceneObject:
    """An object in a circle, turned by a random angle.

    Args:
        rng: random numbers.
        shape: one of SHAPES.
        colour: one of COLOURS.
        texture: one of TEXTURES.
        circle: from `place_one` or `place_pair`.
    """
    return SceneObject(shape, colour, texture, *circle, _between(rng, -MAX_ROTATION, MAX_ROTATION))


def _sample_graph(rng: np.random.Generator, label: int, ties: Ties) -> SceneGraph:
    """Draw what a scene of class `label` shows."""
    shape = SHAPES[label]
    background = _choose(rng, BACKGROUNDS, BACKGROUNDS[label % len(BACKGROUNDS)], ties.background)
    if rng.random() >= SECOND_OBJECT_PROBABILITY:
        return SceneGraph((_choose_object(rng, shape, COLOURS, ties, place_one(rng)),), (), background)
    predicate = _choose(rng, RELATIONS)
    large_circle, small_circle = place_pair(rng, predicate)
    large = _choose_object(rng, shape, COLOURS, ties, large_circle)
    other_shape = _choose(rng, tuple(s for s in SHAPES if s != shape))
    other_colours = tuple(c for c in COLOURS if c != large.colour)
    small = _choose_object(rng, other_shape, other_colours, ties, small_circle)
    if rng.random() < LARGE_SUBJECT_PROBABILITY:
        relation = Relation(0, predicate, 1)
    else:
        relation = Relation(1, OPPOSITES[predicate], 0)
    return SceneGraph((large, small), (relation,), background)


def place_one(rng: np.random.Generator) -> Circle:
    """Where a lone object stands, all of it inside the image."""
    radius = _between(rng, *LONE_RADIUS)
    return Circle((_between(rng, radius, 1 - radius), _between(rng, radius, 1 - radius)), radius)


def place_pair(rng: np.random.Generator, predicate: str) -> tuple[Circle, Circle]:
    """Where a large and a small object stand, so that the large one is `predicate` the small one.

    The circles lie inside the image and do not overlap.

    Args:
        rng: random numbers.
        predicate: one of RELATIONS.

    Returns:
        The circle of the large object, and that of the small one.
    """
    step = _RELATIONS[predicate]
    large, small = _between(rng, *LARGE_RADIUS), _between(rng, *SMALL_RADIUS)
    slack = 1 - 2 * (large + small)
    start = slack * rng.random()
    gap = (slack - start) * rng.random()
    along_small, along_large = start + small, start + 2 * small + gap + large
    across_large = _between(rng, 0.42, 0.58)
    # Across the relation the centres differ less than along it, so that the other relations are clearly false.
    across_small = across_large + 0.4 * (large + small) * _between(rng, -1.0, 1.0)
    if sum(step) < 0:
        along_small, along_large = 1 - along_small, 1 - along_large
    if step[0]:
        return Circle((along_large, across_large), large), Circle((along_small, across_small), small)
    return Circle((across_large, along_large), large), Circle((across_small, along_small), small)


# From a graph to pixels, float32 canvases (3, H, W) in [0, 1].


@lru_cache(maxsize=8)
def _pixel_centres(size: int) -> Float[np.ndarray, " size"]:
    return ((np.arange(size) + 0.5) / size).astype(np.float32)


@lru_cache(maxsize=8)
def _noise_tile(size: int) -> Float[np.ndarray, "tile tile"]:
    """Soft noise of unit variance, (2 size, 2 size), periodic; its grain is a fixed fraction of an image's side."""
    side = 2 * size
    frequency = np.sqrt(np.fft.fftfreq(side)[:, None] ** 2 + np.fft.fftfreq(side)[None] ** 2) * size
    white = np.fft.fft2(np.random.default_rng(0).random((side, side)) - 0.5)
    soft = np.fft.ifft2(white * np.where(frequency > 0, np.exp(-frequency / 6) / (1 + frequency), 0)).real
    return (soft / soft.std()).astype(np.float32)


def draw_scene(graph: SceneGraph, rng: np.random.Generator, size: int) -> Image.Image:
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
    contrast, brightness = np.float32(_between(rng, *CONTRAST)), np.float32(_between(rng, *BRIGHTNESS))
    canvas = _paint_background(graph.background, rng, size)
    for thing in graph.objects:
        _paint_object(canvas, thing, light, rng)
    axis = _pixel_centres(size) - 0.5
    shade = (0.22 * light[0]) * axis[None, :] + (0.22 * light[1]) * axis[:, None]
    canvas = (canvas - 0.5) * contrast + 0.5
    canvas *= brightness + shade
    pixels = np.clip(canvas * 255 + 0.5, 0, 255).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))


def object_masks(graph: SceneGraph, size: int) -> Bool[np.ndarray, "objects H W"]:
    """The pixels of `draw_scene` that show each object: those whose centre lies within its outline.

    An object hides those before it. Shadows belong to the background.

    Args:
        graph: what the picture shows.
        size: side of the picture, pixels.

    Returns:
        (objects, size, size), in the order of `graph.objects`; no pixel has two objects.
    """
    axis = _pixel_centres(size)
    masks = np.zeros((len(graph.objects), size, size), dtype=bool)
    for mask, thing in zip(masks, graph.objects, strict=True):
        u, v = _upright(thing, *_offsets(thing, axis, axis))
        visible = _SHAPES[thing.shape](u, v) <= 0
        masks[:, visible] = False
        mask[visible] = True
    return masks


def _offsets(thing: SceneObject, x: Array, y: Array) -> tuple[Array, Array]:
    """The steps from an object's centre to pixels, (1, W) and (H, 1), in units of its radius."""
    dx = (x[None] - np.float32(thing.centre[0])) / np.float32(thing.radius)
    dy = (y[:, None] - np.float32(thing.centre[1])) / np.float32(thing.radius)
    return dx, dy


def _upright(thing: SceneObject, dx: Array, dy: Array) -> tuple[Array, Array]:
    """The same steps as the object sees them before it is turned, (H, W) each."""
    cos, sin = np.float32(np.cos(thing.rotation)), np.float32(np.sin(thing.rotation))
    return cos * dx + sin * dy, cos * dy - sin * dx


def _paint_background(background: str, rng: np.random.Generator, size: int) -> Array:
    pattern, dark, bright = _BACKGROUNDS[background]
    axis = _pixel_centres(size)
    row, column = int(size * rng.random()), int(size * rng.random())
    noise = _noise_tile(size)[row : row + size, column : column + size]
    x, y = axis[None, :] + np.float32(rng.random()), axis[:, None] + np.float32(rng.random())
    value = np.clip(pattern(x, y, noise), 0, 1).astype(np.float32, copy=False)
    low, high = _jittered(dark, rng), _jittered(bright, rng)
    return low + (high - low) * value


def _jittered(tone: _Tone, rng: np.random.Generator) -> Array:
    """A tone (3, 1, 1), each channel a little off, so that a colour is a range and not one number."""
    return np.clip(np.asarray(tone) + 0.1 * (rng.random(3) - 0.5), 0, 1).astype(np.float32)[:, None, None]


def _paint_object(canvas: Array, thing: SceneObject, light: tuple[float, float], rng: np.random.Generator) -> None:
    """Paint one object and its shadow into the canvas, in place."""
    size = canvas.shape[-1]
    # The window: the object's box and room for the soft shadow, cut at the image's border.
    (left, top, right, bottom), margin = thing.box, 0.3 * thing.radius
    x0, y0 = max(0, int((left - margin) * size)), max(0, int((top - margin) * size))
    x1, y1 = min(size, int((right + margin) * size) + 1), min(size, int((bottom + margin) * size) + 1)
    axis = _pixel_centres(size)
    dx, dy = _offsets(thing, axis[x0:x1], axis[y0:y1])
    u, v = _upright(thing, dx, dy)
    distance = _SHAPES[thing.shape](u, v)
    pixels = np.float32(size * thing.radius)  # per unit of distance

    _cast_shadow(canvas, distance, x0, y0, light, thing.radius)
    frequency = np.float32(_between(rng, *TEXTURE_FREQUENCY))
    wave = _TEXTURES[thing.texture](frequency * u + np.float32(rng.random()), frequency * v + np.float32(rng.random()))
    tone = np.clip(0.5 + wave * (0.16 * pixels / frequency), 0, 1)
    main, second = (_jittered(t, rng) for t in _COLOURS[thing.colour])
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

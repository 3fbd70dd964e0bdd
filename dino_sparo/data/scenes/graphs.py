"""Random numbers -> description of a scene -> caption, for the built-in scenes.

    caption  = object [relation object] "on" background      a red striped star left of a blue dotted ring on sand
    object   = ("a" | "an") colour texture shape             an orange plain heart
    relation = "left of" | "right of" | "above" | "under"    of the two centers, subject first, as seen in the picture

Every word is in one of the tuples SHAPES, COLOURS, TEXTURES, BACKGROUNDS, RELATIONS. Two objects of one scene
differ in shape and in colour, so exchanging the objects, their colours or the relation always gives a false caption.

A category is more than its shape: `Ties` gives the probabilities of its typical texture, colour and background. Cues
that go together make categories easier to find without labels. But the stronger colour and background are tied, the
better an untrained encoder separates the categories. The defaults are our choice.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dino_sparo.data.scenes.patterns import BACKGROUNDS, COLOURS, SHAPES, TEXTURES

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
# The step from the second object's center to the first's, x to the right, y downwards.
_RELATIONS: dict[str, tuple[int, int]] = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "under": (0, 1)}
RELATIONS = tuple(_RELATIONS)
# The relation of the second object to the first.
OPPOSITES = {"left of": "right of", "right of": "left of", "above": "under", "under": "above"}


@dataclass(frozen=True)
class Ties:
    """Probabilities that an object has the typical attribute of its category; else the attribute is drawn uniformly.

    Attributes:
        texture: probability of the typical texture, in [0, 1].
        colour: probability of the typical colour, in [0, 1].
        background: probability that the large object stands on its typical background, in [0, 1].
    """

    texture: float = 0.9
    colour: float = 0.85
    background: float = 0.6


# Attributes that go together would let a model guess one from the other instead of looking.
INDEPENDENT = Ties(texture=0.0, colour=0.0, background=0.0)


class Circle(NamedTuple):
    """The circle that holds an object.

    Attributes:
        center: (x, y), fractions of the image's side, x to the right, y downwards.
        radius: a fraction of the image's side.
    """

    center: tuple[float, float]
    radius: float


@dataclass(frozen=True)
class SceneObject:
    """One object of a scene.

    Attributes:
        shape: one of SHAPES.
        colour: one of COLOURS.
        texture: one of TEXTURES.
        center: (x, y), fractions of the image's side, x to the right, y downwards.
        radius: of the circle around the center that holds the object, a fraction of the image's side.
        rotation: radians, clockwise as seen in the picture.
    """

    shape: str
    colour: str
    texture: str
    center: tuple[float, float]
    radius: float
    rotation: float

    @property
    def box(self) -> tuple[float, float, float, float]:
        """(left, top, right, bottom) of the circle that holds the object, fractions of the image's side."""
        (x, y), r = self.center, self.radius
        return (x - r, y - r, x + r, y + r)

    def described(self, attributes: Collection[str]) -> str:
        """The object in words with some of its ATTRIBUTES: article, optionally colour and texture, shape."""
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
class SceneDescription:
    """Content of a scene.

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
        """The graph in words with some of the ATTRIBUTES; shapes and relation are always named."""
        backdrop = f" on {self.background}" if "background" in attributes else ""
        if not self.relations:
            return self.objects[0].described(attributes) + backdrop
        relation = self.relations[0]
        subject, other = (self.objects[i].described(attributes) for i in (relation.subject, relation.object))
        return f"{subject} {relation.predicate} {other}{backdrop}"


# From a random stream to a graph. Only `rng.random` is used: its stream is the same in every version of numpy.


def between(rng: np.random.Generator, low: float, high: float) -> float:
    """A uniform number from `low` to `high`."""
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
    """An object in a circle, turned by a random angle."""
    return SceneObject(shape, colour, texture, *circle, between(rng, -MAX_ROTATION, MAX_ROTATION))


def sample_graph(rng: np.random.Generator, label: int, ties: Ties) -> SceneDescription:
    """Draw the content of a scene of class `label`."""
    shape = SHAPES[label]
    background = _choose(rng, BACKGROUNDS, BACKGROUNDS[label % len(BACKGROUNDS)], ties.background)
    if rng.random() >= SECOND_OBJECT_PROBABILITY:
        return SceneDescription((_choose_object(rng, shape, COLOURS, ties, place_one(rng)),), (), background)
    predicate = _choose(rng, RELATIONS)
    large_circle, small_circle = place_pair(rng, predicate)
    large = _choose_object(rng, shape, COLOURS, ties, large_circle)
    other_shape = _choose(rng, tuple(s for s in SHAPES if s != shape))
    other_colours = tuple(c for c in COLOURS if c != large.colour)
    small = _choose_object(rng, other_shape, other_colours, ties, small_circle)
    is_large_subject = rng.random() < LARGE_SUBJECT_PROBABILITY
    relation = Relation(0, predicate, 1) if is_large_subject else Relation(1, OPPOSITES[predicate], 0)
    return SceneDescription((large, small), (relation,), background)


def place_one(rng: np.random.Generator) -> Circle:
    """Draw the place of a lone object, all of it inside the image."""
    radius = between(rng, *LONE_RADIUS)
    return Circle((between(rng, radius, 1 - radius), between(rng, radius, 1 - radius)), radius)


def place_pair(rng: np.random.Generator, predicate: str) -> tuple[Circle, Circle]:
    """Draw the places of a large and a small object, so that the large one is `predicate` the small one.

    The two circles lie inside the image and do not overlap.
    """
    step = _RELATIONS[predicate]
    large, small = between(rng, *LARGE_RADIUS), between(rng, *SMALL_RADIUS)
    slack = 1 - 2 * (large + small)
    start = slack * rng.random()
    gap = (slack - start) * rng.random()
    along_small, along_large = start + small, start + 2 * small + gap + large
    across_large = between(rng, 0.42, 0.58)
    # Across the relation the centers differ less than along it, so that the other relations are clearly false.
    across_small = across_large + 0.4 * (large + small) * between(rng, -1.0, 1.0)
    if sum(step) < 0:
        along_small, along_large = 1 - along_small, 1 - along_large
    if step[0]:
        return Circle((along_large, across_large), large), Circle((along_small, across_small), small)
    return Circle((across_large, along_large), large), Circle((across_small, along_small), small)

"""Index -> a built-in scene of two objects, and binary labels: which features, and which pairs of features, it shows.

The two objects differ in shape and in colour, and all such pairs of objects are equally frequent, so whoever knows both
shapes and both colours still lacks one bit: which colour belongs to which shape. Texture and background tell nothing.
"""

import itertools
import math
from collections import Counter

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor
from torch.nn.functional import one_hot

from dino_sparo.data.scenes.graphs import RELATIONS, SceneDescription, place_pair, turned_object
from dino_sparo.data.scenes.images import SPLITS, draw_scene
from dino_sparo.data.scenes.patterns import BACKGROUNDS, COLOURS, SHAPES, TEXTURES

# Fixed before any model was probed: the first words of both tables.
NUM_SHAPES, NUM_COLOURS = 4, 4
PROBED_SHAPES, PROBED_COLOURS = SHAPES[:NUM_SHAPES], COLOURS[:NUM_COLOURS]
STREAM = 33  # sets these scenes apart from those the models are trained on


def binding_graph(rng: np.random.Generator) -> SceneDescription:
    """A large and a small object, each with another shape, colour and texture."""
    shapes = rng.permutation(NUM_SHAPES)[:2]
    colours, textures = rng.permutation(NUM_COLOURS)[:2], rng.permutation(len(TEXTURES))[:2]
    circles = place_pair(rng, RELATIONS[rng.integers(len(RELATIONS))])
    things = tuple(
        turned_object(rng, PROBED_SHAPES[shape], PROBED_COLOURS[colour], TEXTURES[texture], circle)
        for shape, colour, texture, circle in zip(shapes, colours, textures, circles, strict=True)
    )
    return SceneDescription(things, (), BACKGROUNDS[rng.integers(len(BACKGROUNDS))])


def draw_scenes(
    number: int, split: str, image_size: int
) -> tuple[UInt8[Tensor, "B 3 H W"], Int64[Tensor, "B objects 2"]]:
    """Images, and the numbers of shape and colour of the large and of the small object."""
    pixels, objects = [], []
    for index in range(number):
        rng = np.random.default_rng([STREAM, SPLITS[split], index])
        graph = binding_graph(rng)
        objects.append([[PROBED_SHAPES.index(o.shape), PROBED_COLOURS.index(o.colour)] for o in graph.objects])
        pixels.append(np.asarray(draw_scene(graph, rng, image_size)).transpose(2, 0, 1))
    return torch.from_numpy(np.stack(pixels)), torch.tensor(objects)


def exchanged(objects: Int64[Tensor, "B objects 2"], seed: int) -> Int64[Tensor, "B objects 2"]:
    """The same objects, the colours of each scene exchanged with probability 1/2: the features F do not change."""
    swap = torch.rand(len(objects), generator=torch.Generator().manual_seed(seed)) < 0.5
    colours = torch.where(swap[:, None], objects[..., 1].flip(1), objects[..., 1])
    return torch.stack([objects[..., 0], colours], dim=2)


def bindings(objects: Int64[Tensor, "B objects 2"]) -> Float[Tensor, "B pairs"]:
    """Y: which pairs of a shape and a colour are present; shape first."""
    pairs = objects[..., 0] * NUM_COLOURS + objects[..., 1]
    return torch.zeros(len(objects), NUM_SHAPES * NUM_COLOURS).scatter_(1, pairs, 1.0)


def features(objects: Int64[Tensor, "B objects 2"]) -> Float[Tensor, "B features"]:
    """F: which shapes, then which colours are present."""
    columns = torch.stack([objects[..., 0], NUM_SHAPES + objects[..., 1]], dim=1).flatten(1)
    return torch.zeros(len(objects), NUM_SHAPES + NUM_COLOURS).scatter_(1, columns, 1.0)


def one_hot_objects(objects: Int64[Tensor, "B objects 2"]) -> Float[Tensor, "B F"]:
    """The true shape and colour of each object, large object first, as of a perfect encoder."""
    shapes, colours = one_hot(objects[..., 0], NUM_SHAPES), one_hot(objects[..., 1], NUM_COLOURS)
    return torch.cat([shapes, colours], dim=2).flatten(1).float()


def all_objects() -> Int64[Tensor, "B objects 2"]:
    """Every pair of objects that a scene may show, once."""
    things = list(itertools.product(range(NUM_SHAPES), range(NUM_COLOURS)))
    pairs = [(a, b) for a, b in itertools.combinations(things, 2) if a[0] != b[0] and a[1] != b[1]]
    return torch.tensor(pairs)


def entropy_of_bindings(y: Float[Tensor, "B pairs"], f: Float[Tensor, "B features"]) -> float:
    """Mean H(Y | F) in bits over the distinct rows of Y, which are equally frequent."""
    distinct = {tuple(row.tolist()): tuple(parts.tolist()) for row, parts in zip(y, f, strict=True)}
    counts = Counter(distinct.values())
    return sum(number * math.log2(number) for number in counts.values()) / len(distinct)

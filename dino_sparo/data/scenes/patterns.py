"""Shapes, textures, colours and backgrounds of the built-in scenes, as functions of pixel coordinates."""

from collections.abc import Callable

import numpy as np

Array = np.ndarray

# Shapes: signed distance to the outline, negative inside, in units of the object's radius; u right, v down, upright.


def _circle(u: Array, v: Array, radius: float = 0.88) -> Array:
    return np.sqrt(u * u + v * v) - radius


def _box(u: Array, v: Array, half_width: float, half_height: float) -> Array:
    return np.maximum(np.abs(u) - half_width, np.abs(v) - half_height)


def _star(u: Array, v: Array) -> Array:
    # Fold the plane into one tenth of the star, a half point, where the outline is the straight edge from the tip
    # (0.98, 0) to the inner corner, 0.46 from the center.
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


SHAPE_TABLE: dict[str, Callable[[Array, Array], Array]] = {
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


TEXTURE_TABLE: dict[str, Callable[[Array, Array], Array]] = {
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
COLOUR_TABLE: dict[str, tuple[tuple[float, float, float], tuple[float, float, float]]] = {
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


Tone = tuple[float, float, float]
BACKGROUND_TABLE: dict[str, tuple[Callable[[Array, Array, Array], Array], Tone, Tone]] = {
    "sand": (_sand, (0.71, 0.60, 0.43), (0.94, 0.86, 0.70)),
    "grass": (_grass, (0.25, 0.40, 0.16), (0.52, 0.65, 0.32)),
    "water": (_water, (0.19, 0.42, 0.52), (0.47, 0.70, 0.76)),
    "snow": (lambda x, y, noise: 0.6 + 0.25 * noise, (0.74, 0.80, 0.88), (0.96, 0.97, 1.00)),
    "brick": (_brick_wall, (0.72, 0.67, 0.62), (0.58, 0.36, 0.29)),
    "wood": (_wood, (0.32, 0.21, 0.13), (0.62, 0.45, 0.29)),
}

SHAPES = tuple(SHAPE_TABLE)
COLOURS = tuple(COLOUR_TABLE)
TEXTURES = tuple(TEXTURE_TABLE)
BACKGROUNDS = tuple(BACKGROUND_TABLE)

"""scenes.py: pictures, labels, captions and graphs belong together and depend on (seed, split, index) alone."""

import hashlib
import pickle
import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest

from dino_sparo.data.scenes import images as scenes
from dino_sparo.data.scenes.graphs import RELATIONS, Ties
from dino_sparo.data.scenes.images import Scenes, parse_scenes_spec
from dino_sparo.data.scenes.patterns import BACKGROUNDS, COLOURS, SHAPES, TEXTURES

# Checked against the pictures by eye, with these ties and seed 0.
RECORDED_TIES = Ties(0.9, 0.3, 0.3)
RECORDED_CAPTIONS = {
    0: "a purple banded ring above a red dotted circle on grass",
    1: "an orange striped square on water",
    2: "a blue plain triangle on water",
    3: "a green zigzag star right of a pink gridded cross on water",
    4: "a pink bricked heart on water",
}


def digest(source: Scenes, indices: range) -> str:
    return hashlib.sha256(b"".join(source.read(i).tobytes() for i in indices)).hexdigest()


def drawn(graph: scenes.SceneDescription, size: int = 56) -> np.ndarray:
    """The picture of a graph, always with the same light and the same jitter, in levels."""
    return np.asarray(scenes.draw_scene(graph, np.random.default_rng(3), size)).astype(float)


def lone(shape: str, texture: str = "plain", colour: str = "red", radius: float = 0.3) -> scenes.SceneDescription:
    thing = scenes.SceneObject(shape, colour, texture, (0.55, 0.48), radius, 0.0)
    return scenes.SceneDescription((thing,), (), "snow")


def test_vocabulary_is_as_large_as_promised_and_names_each_thing_once():
    assert (len(SHAPES), len(COLOURS), len(TEXTURES), len(BACKGROUNDS)) >= (10, 6, 6, 5)
    assert set(RELATIONS) == {"left of", "right of", "above", "under"}
    words = [*SHAPES, *COLOURS, *TEXTURES, *BACKGROUNDS, *RELATIONS]
    assert len(set(words)) == len(words)


def test_captions_are_the_recorded_ones():
    source = Scenes(11, 48, ties=RECORDED_TIES)
    assert {i: source.caption(i) for i in RECORDED_CAPTIONS} == RECORDED_CAPTIONS


def test_a_scene_is_the_same_whatever_was_read_before_and_however_long_the_list_is():
    short, long = Scenes(13, 40), Scenes(1000, 40)
    backwards = [long.read(i).tobytes() for i in reversed(range(13))][::-1]
    assert [short.read(i).tobytes() for i in range(13)] == backwards
    assert [short.caption(i) for i in range(13)] == [long.caption(i) for i in range(13)]


def test_scenes_are_kept_up_to_a_number_of_bytes_and_a_reader_may_write_on_them(monkeypatch):
    monkeypatch.setattr(scenes, "CACHE_BYTES", 2 * 3 * 32**2)
    draws, draw = [], scenes.draw_scene
    monkeypatch.setattr(scenes, "draw_scene", lambda *given: draws.append(given) or draw(*given))
    source = Scenes(5, 32)
    before = [np.asarray(source.read(index)) for index in range(5)]
    source.read(0).paste((0, 0, 0), (0, 0, 32, 32))
    for index, pixels in enumerate(before):
        np.testing.assert_array_equal(np.asarray(source.read(index)), pixels)
    assert len(draws) == 5 + 3


@pytest.mark.slow
def test_another_process_draws_the_same_pixels():
    # By its path, because importing the package would also import torch.
    code = (
        "import hashlib, runpy, sys; Scenes = runpy.run_path(sys.argv[1])['Scenes']; s = Scenes(7, 40, seed=5); "
        "print(hashlib.sha256(b''.join(s.read(i).tobytes() for i in range(7))).hexdigest())"
    )
    command = [sys.executable, "-c", code, scenes.__file__]
    other = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    source = pickle.loads(pickle.dumps(Scenes(7, 40, seed=5)))
    assert digest(source, range(7)) == other


@pytest.mark.slow
def test_no_scene_is_in_both_splits_nor_in_two_seeds():
    pictures = [
        Scenes(300, 24, split, seed).read(i).tobytes()
        for split in ("train", "val")
        for seed in (0, 1)
        for i in range(300)
    ]
    assert len(set(pictures)) == len(pictures)


@pytest.mark.parametrize("size", [24, 37, 64])
def test_images_are_rgb_of_the_asked_size_and_labels_balanced(size):
    source = Scenes(70, size)
    image = source.read(0)
    assert (image.mode, image.size) == ("RGB", (size, size))
    assert len(source) == 70
    assert source.labels.dtype == np.int64
    np.testing.assert_array_equal(np.bincount(source.labels), np.full(len(SHAPES), 7))
    assert source.classes == list(SHAPES)
    assert "train" in source.name
    assert source.location(17) == "scenes[17]"
    assert Scenes(70, size, "val").location(17) == "scenes-val[17]"


def test_label_graph_and_caption_agree():
    source = Scenes(400, 32)
    for i in range(400):
        graph = source.scene_graph(i)
        assert graph.objects[0].shape == source.classes[source.labels[i]]
        # The caption, taken apart by the grammar, gives the graph's words back.
        text, background = source.caption(i).rsplit(" on ", 1)
        predicate = next((word for word in RELATIONS if f" {word} " in text), None)
        phrases = text.split(f" {predicate} ") if predicate else [text]
        order = [graph.relations[0].subject, graph.relations[0].object] if graph.relations else [0]
        assert [p.split(" ") for p in phrases] == [
            ["an" if (o := graph.objects[k]).colour == "orange" else "a", o.colour, o.texture, o.shape] for k in order
        ]
        assert background == graph.background
        assert [r.predicate for r in graph.relations] == ([predicate] if predicate else [])


def test_relations_agree_with_the_centers_and_objects_lie_apart_inside_the_image():
    seen = set()
    for i in range(400):
        graph = Scenes(400, 32).scene_graph(i)
        for thing in graph.objects:
            assert min(thing.box) >= -1e-9
            assert max(thing.box) <= 1 + 1e-9
        for relation in graph.relations:
            subject, other = graph.objects[relation.subject], graph.objects[relation.object]
            dx, dy = np.subtract(subject.center, other.center)
            axis = ("left of" if dx < 0 else "right of") if abs(dx) > abs(dy) else ("above" if dy < 0 else "under")
            assert relation.predicate == axis
            assert np.hypot(dx, dy) >= subject.radius + other.radius - 1e-9
            assert graph.objects[0].radius > 1.5 * graph.objects[1].radius
            assert (subject.shape != other.shape, subject.colour != other.colour) == (True, True)
            seen.add((relation.subject, relation.predicate))
    assert seen == {(subject, word) for subject in (0, 1) for word in RELATIONS}


def test_objects_are_drawn_where_the_graph_says():
    # Oracle: with and without the objects, pixels differ around each center (or its shadow) and nowhere far off.
    for i in range(30):
        graph = Scenes(30, 64).scene_graph(i)
        bare = drawn(scenes.SceneDescription((), (), graph.background), 64)
        for thing in graph.objects:
            alone = drawn(scenes.SceneDescription((thing,), (), graph.background), 64)
            changed = np.abs(alone - bare).max(axis=-1) > 3
            y, x = (np.argwhere(changed) + 0.5).T / 64
            assert changed.sum() > 0.15 * np.pi * (64 * thing.radius) ** 2
            assert np.hypot(x - thing.center[0], y - thing.center[1]).max() < 1.6 * thing.radius


@pytest.mark.parametrize("size", [24, 64])
@pytest.mark.parametrize("words", [SHAPES, TEXTURES], ids=["shapes", "textures"])
def test_every_shape_and_texture_is_drawn_and_looks_like_no_other(words, size):
    things = [lone("square", word) if words is TEXTURES else lone(word) for word in words]
    pictures = dict(zip(words, (drawn(thing, size) for thing in things), strict=True))
    for one, other in combinations(words, 2):
        assert (np.abs(pictures[one] - pictures[other]).max(axis=-1) > 20).mean() > 0.02, (one, other)


def test_every_colour_and_background_has_its_own_mean():
    objects = [drawn(lone("square", "plain", c))[20:34, 24:38].mean(axis=(0, 1)) for c in COLOURS]
    floors = [drawn(scenes.SceneDescription((), (), b)).mean(axis=(0, 1)) for b in BACKGROUNDS]
    for means in (np.array(objects), np.array(floors)):
        distance = np.abs(means[:, None] - means[None]).max(axis=-1)
        assert distance[~np.eye(len(means), dtype=bool)].min() > 15


def test_ties_bind_attributes_to_the_category_as_often_as_they_say():
    free, tied = Scenes(900, 24, ties=Ties(0.0, 0.0, 0.0)), Scenes(900, 24, ties=Ties(1.0, 1.0, 1.0))

    def num_combinations(source: Scenes) -> int:
        graphs = [source.scene_graph(i) for i in range(0, 900, len(SHAPES))]
        return len({(g.objects[0].colour, g.objects[0].texture, g.background) for g in graphs})

    assert num_combinations(tied) == 1
    assert num_combinations(free) > 60


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("scenes", (scenes.DEFAULT_NUM_IMAGES, scenes.DEFAULT_IMAGE_SIZE)),
        ("scenes:300", (300, scenes.DEFAULT_IMAGE_SIZE)),
        ("scenes:300:48", (300, 48)),
    ],
)
def test_spec_is_read(spec, expected):
    assert parse_scenes_spec(spec) == expected


@pytest.mark.parametrize(
    "spec", ["scene", "scenes:", "scenes:many", "scenes:3:48:1", "scenes:-3", "scenes:2.5", "scenes:٣"]
)
def test_spec_of_another_form_is_refused(spec):
    with pytest.raises(ValueError, match=r"cannot read .* write scenes, scenes:NUM or scenes:NUM:IMAGE_SIZE"):
        parse_scenes_spec(spec)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_images": 0}, "0 scenes of 64 px: give at least one, and 24 px"),
        ({"image_size": 11}, "5 scenes of 11 px: give at least one, and 24 px"),
        ({"split": "test"}, r"unknown split 'test' of scenes; choose one of \['train', 'val'\]"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Scenes(**{"num_images": 5, **arguments})


@pytest.mark.parametrize("index", [-1, 5])
def test_a_scene_outside_the_list_is_refused(index):
    with pytest.raises(IndexError, match=rf"scene {index} does not exist; .* has 5 scenes, from 0"):
        Scenes(5, 24).read(index)

"""A split of `design.py` -> pictures, captions, scene graphs and questions as files.

    FOLDER/train/images/*.png     training pictures; every second one shows one object, the others show two
    FOLDER/train/pairs.jsonl      {"image", "caption", "entities", "relationships"}: pairs for `train-clip` and
                                  `train-oc-clip`, and the graphs of their captions; "negative_caption" describes the
                                  reversed form and is empty for one object
    FOLDER/tests/TEST.json        questions in SugarCrepe's format
    FOLDER/tests/images/*.png     their pictures
    FOLDER/tests/graphs.jsonl     the true graphs of all true and false captions
    FOLDER/shuffled/TEST.json     control: the same questions, each with the picture of another question
    FOLDER/split.json             the draw; written last

The pictures of one object show every shape in every colour on every background. A picture depends on (seed, kind, part,
number) alone.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dino_sparo.data.scenes import graphs
from dino_sparo.data.scenes.images import draw_scene
from dino_sparo.data.scenes.patterns import BACKGROUNDS, COLOURS, SHAPES, TEXTURES
from studies.oc_splits.design import Picture, Question, Split, Thing, choose, shuffled, stream

logger = logging.getLogger(__name__)

NUM_SINGLES = len(SHAPES) * len(COLOURS) * len(BACKGROUNDS)
MIN_TRAINING_IMAGES = 2 * NUM_SINGLES
MAX_ROUNDS = 100  # rounds of exchanges of shuffled pictures
PNG: dict[str, Any] = {"compress_level": 1}  # the default takes as long as drawing, and textures hardly compress
FORMAT = 2  # version of the files


def scene_of(rng: np.random.Generator, picture: Picture, background: str) -> graphs.SceneDescription:
    """Place the objects of a picture; size, texture, direction and position, which captions do not name, are random."""

    def placed(thing: Thing, circle: graphs.Circle) -> Any:
        return graphs.turned_object(rng, thing.shape, thing.colour, choose(rng, TEXTURES), circle)

    if len(picture.things) == 1:
        return graphs.SceneDescription((placed(picture.things[0], graphs.place_one(rng)),), (), background)
    large_first = picture if rng.random() < 0.5 else picture.turned
    predicate = large_first.predicate or choose(rng, graphs.RELATIONS)
    circles = graphs.place_pair(rng, predicate)
    objects = tuple(placed(thing, circle) for thing, circle in zip(large_first.things, circles, strict=True))
    return graphs.SceneDescription(objects, (graphs.Relation(0, predicate, 1),), background)


def training_pictures(split: Split, num_images: int) -> Iterator[tuple[Picture, str | None]]:
    """Content of each training picture, and its background, None if random. Every second picture shows one object.

    Pictures of one object cycle through all shapes, colours and backgrounds in random order.
    """
    rng = stream(split.seed, split.kind, "singles")
    singles = shuffled(rng, list(product(COLOURS, SHAPES, BACKGROUNDS)))
    for number in range(num_images):
        if number % 2:
            yield split.training_pair(number // 2), None
        else:
            colour, shape, background = singles[number // 2 % NUM_SINGLES]
            yield Picture((Thing(colour, shape),)), background


def draw_picture(
    split: Split, part: str, number: int, picture: Picture, size: int, background: str | None = None
) -> Image.Image:
    """Draw picture `number` of `training` or of a test; without a background a random one."""
    rng = stream(split.seed, split.kind, part, "picture", number)
    return draw_scene(scene_of(rng, picture, background or choose(rng, BACKGROUNDS)), rng, size)


def graph_line(picture: Picture, **more: str) -> str:
    """One line of a JSONL file of graphs: caption, graph and `more`."""
    return json.dumps({**more, "caption": picture.caption, **picture.graph.to_json()}) + "\n"


def other_pictures(rng: np.random.Generator, questions: Sequence[Question]) -> tuple[list[int], int]:
    """Permute the pictures of one test, so that pictures do not help to choose captions.

    A picture goes to a question with which it shares no shape and, for questions about one object, no colour: pairs of
    questions exchange their pictures until this holds. A split of few pairs may leave some that share a word.

    Returns:
        For each question the index of its new picture, and the number of pictures that share a word.
    """
    shown = [_words_of(question.true) for question in questions]
    words = [_words_of(question.true) | _words_of(question.false) for question in questions]
    order = shuffled(rng, range(len(questions)))
    for _ in range(MAX_ROUNDS):
        wrong = [i for i, j in enumerate(order) if words[i] & shown[j]]
        for i in wrong:
            k = choose(rng, range(len(order)))
            if not words[i] & shown[order[k]] and (words[k] & shown[order[k]] or not words[k] & shown[order[i]]):
                order[i], order[k] = order[k], order[i]
        if not wrong:
            break
    return order, sum(bool(words[i] & shown[j]) for i, j in enumerate(order))


def _words_of(picture: Picture) -> set[str]:
    return set(picture.things[0]) if len(picture.things) == 1 else {thing.shape for thing in picture.things}


def write_split(folder: Path, split: Split, num_images: int, num_questions: int, image_size: int) -> Path:
    """Write all files of a split, unless the folder holds them already; returns the folder.

    Raises:
        ValueError: too few training pictures or questions, or the folder holds another split.
    """
    if num_images < MIN_TRAINING_IMAGES:
        raise ValueError(
            f"num_images={num_images}; give at least {MIN_TRAINING_IMAGES}, so that every shape is seen alone in "
            "every colour on every background"
        )
    sizes = {"num_images": num_images, "num_questions": num_questions, "image_size": image_size}
    expected = {"format": FORMAT, **sizes, **split.to_json()}
    record = folder / "split.json"
    if record.is_file():
        saved = json.loads(record.read_text(encoding="utf-8"))
        if {name: saved.get(name) for name in expected} != expected:
            raise ValueError(f"{folder} holds another split, or a split of another version; choose another folder")
        return folder
    _write_training(folder / "train", split, num_images, image_size)
    num_overlaps = _write_tests(folder, split, num_questions, image_size)
    record.write_text(json.dumps({**expected, "num_shuffled_that_share_a_word": num_overlaps}, indent=1) + "\n")
    tests = ", ".join(split.tests)
    logger.info("%s: %d training pictures, %d questions in each of %s", folder, num_images, num_questions, tests)
    return folder


def _write_training(folder: Path, split: Split, num_images: int, image_size: int) -> None:
    (folder / "images").mkdir(parents=True, exist_ok=True)
    with (folder / "pairs.jsonl").open("w", encoding="utf-8") as file:
        for number, (picture, background) in enumerate(training_pictures(split, num_images)):
            name = f"images/{number:06d}.png"
            draw_picture(split, "training", number, picture, image_size, background).save(folder / name, **PNG)
            negative = picture.reversed.caption if len(picture.things) == 2 else ""
            file.write(graph_line(picture, image=name, negative_caption=negative))


def _write_tests(folder: Path, split: Split, num_questions: int, image_size: int) -> dict[str, int]:
    """Write questions, pictures and graphs; returns per test the number of shuffled pictures that share a word."""
    tests, shuffled_tests = folder / "tests", folder / "shuffled"
    (tests / "images").mkdir(parents=True, exist_ok=True)
    shuffled_tests.mkdir(exist_ok=True)
    captions: dict[str, Picture] = {}
    num_overlaps = {}
    for test in split.tests:
        questions = [split.question(test, number) for number in range(num_questions)]
        for number, question in enumerate(questions):
            image = draw_picture(split, test, number, question.true, image_size)
            image.save(tests / "images" / _name(test, number), **PNG)
            captions |= {picture.caption: picture for picture in question}
        _write_questions(tests / f"{test}.json", test, questions, range(len(questions)))
        order, num_overlaps[test] = other_pictures(stream(split.seed, split.kind, test, "shuffled"), questions)
        _write_questions(shuffled_tests / f"{test}.json", test, questions, order)
    (tests / "graphs.jsonl").write_text("".join(map(graph_line, captions.values())), encoding="utf-8")
    return num_overlaps


def _name(test: str, number: int) -> str:
    return f"{test}_{number:06d}.png"


def _write_questions(path: Path, test: str, questions: Sequence[Question], pictures: Iterable[int]) -> None:
    """Write questions in SugarCrepe's format; question i has picture `pictures[i]`."""
    entries = {
        str(i): {
            "filename": _name(test, picture),
            "caption": question.true.caption,
            "negative_caption": question.false.caption,
        }
        for i, (question, picture) in enumerate(zip(questions, pictures, strict=True))
    }
    path.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")

"""Annotations of every benchmark with wrong types: always a ValueError of one line; images outside of the folder."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clip_fakes import evaluate, paint, small_checkpoint
from compositional_files import ATTRIBUTES, CONTROLLED_A, RELATIONS, controlled_entries, relation_entries, write_json

pytest.importorskip("open_clip")

from dino_sparo.image_text.evaluation.caption_sets import open_caption_set
from dino_sparo.image_text.evaluation.compositional.discover import ImageRules, open_benchmark
from dino_sparo.image_text.evaluation.compositional.sets import BENCHMARKS

WRONG = (None, True, 3, -1, 1.5, float("nan"), 10**30, "", "a", "abcde", "x" * 300, "\ud800", "a\0b", "\n", [], ["a"])
WRONG = (*WRONG, ["a", 3], [[], []], {}, {"a": 1}, {"POS": 1}, "../a.png", "/", 10**400)
TRIES = 80

CREPE = {"0": {"filename": "a.png", "caption": "a", "negative_caption": "b"}}
WINOGROUND = {"id": 1, "image_0": "a.png", "image_1": "b.png", "caption_0": "a", "caption_1": "b", "collapsed_tag": "x"}
RNG = np.random.default_rng(0)
BENCHMARK_FILES: dict[str, Any] = {
    "sugarcrepe": CREPE,
    "winoground": [WINOGROUND],
    "aro-relation": relation_entries(RNG, RELATIONS, 2),
    "aro-attribution": relation_entries(RNG, ATTRIBUTES, 2),
    "coco-order": [{"image": "a.png", "caption_options": list("abcde")}],
    "vl-checklist": [["VG_100K/a.png", {"POS": ["a", "b"], "NEG": ["c"]}]],
    "whatsup-a": controlled_entries(CONTROLLED_A)[:2],
    "coco-spatial": [[1, "a", "b"]],
    "gqa-spatial": [["n1", "a", "b"]],
    "scene-pairs": CREPE,
    "sugarcrepe++": [{"filename": "a.png", "caption": "a", "caption2": "b", "negative_caption": "c"}],
    "colorswap": [{"caption_1": "a", "caption_2": "b", "image_1": "a.png", "image_2": "b.png"}],
    "cola": [["https://x/a.png", "a", "https://x/b.png", "b"]],
    "valse": {"0": {"image_file": "a.png", "caption": "a", "foil": "b", "mturk": {"caption": 3}}},
    "spec": [{"query": "a.png", "keys": ["a", "b"], "label": 1}],
}
KARPATHY = {"images": [{"split": "test", "filepath": "x", "filename": "a.png", "sentences": [{"raw": "a dog"}]}]}
COCO = {"images": [{"id": 1, "file_name": "a.png"}], "annotations": [{"image_id": 1, "caption": "a dog"}]}
CAPTION_FILES = {"karpathy": KARPATHY, "coco": COCO, "salesforce": [{"image": "a.png", "caption": ["a", "b"]}]}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value, itself first."""
    yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in pairs:
        yield from places(each, (*path, key))


def mutations(content: Any) -> Iterator[Any]:
    """Copies of a value with one place replaced, or removed."""
    rng = random.Random(0)
    options = [(place, wrong) for place in places(content) for wrong in (*WRONG, "remove")]
    for place, wrong in rng.sample(options, min(TRIES, len(options))):
        if not place:
            yield wrong
            continue
        changed = copy.deepcopy(content)
        target = changed
        for key in place[:-1]:
            target = target[key]
        if wrong == "remove":
            del target[place[-1]]
        else:
            target[place[-1]] = wrong
        yield changed


def assert_one_line_or_none(read: Callable[[], Any], file: Path, content: Any) -> int:
    """1 if the content was refused."""
    try:
        read()
    except ValueError as error:
        message = str(error)
        assert "\n" not in message, (content, message)
        assert file.name in message or str(file.parent) in message, (content, message)
        return 1
    except Exception as error:
        raise AssertionError(f"{content!r} ended in {error!r}") from error
    return 0


@pytest.mark.parametrize("name", BENCHMARK_FILES)
def test_wrong_types_in_a_benchmarks_annotations_are_a_value_error_of_one_line(name, tmp_path):
    """The bug: 307 of 1,500 mutations ended in AttributeError, OverflowError, OSError and others."""
    benchmark = BENCHMARKS[name]
    file = tmp_path / benchmark.files[0]
    file.parent.mkdir(parents=True, exist_ok=True)
    for image in ("a.png", "b.png", "red.png"):
        paint(tmp_path / "images" / image, "red")
    refused = 0
    for content in mutations(BENCHMARK_FILES[name]):
        text = json.dumps(content)
        if name == "winoground" and isinstance(content, list):
            text = "\n".join(map(json.dumps, content))
        file.write_text(text)
        rules = ImageRules(tmp_path, tmp_path / "images", max_missing=1.0)
        refused += assert_one_line_or_none(lambda: open_benchmark(benchmark, tmp_path, rules), file, content)  # noqa: B023
    assert refused > TRIES / 4


@pytest.mark.parametrize("name", CAPTION_FILES)
def test_wrong_types_in_captions_of_images_are_a_value_error_of_one_line(name, tmp_path):
    file = tmp_path / "captions.json"
    paint(tmp_path / "a.png", "red")
    paint(tmp_path / "x" / "a.png", "red")
    for content in mutations(CAPTION_FILES[name]):
        file.write_text(json.dumps(content))
        assert_one_line_or_none(lambda: open_caption_set(str(tmp_path), str(file)), file, content)


def test_damaged_bytes_in_tables_and_lines_are_a_value_error_of_one_line(tmp_path):
    """PUG's labels.csv, Winoground's lines, Flickr's lines: bytes replaced, removed or repeated."""
    header = "filename,world_name,character_name,character2_name,character_texture,character2_texture,character1_pos"
    rules = ImageRules(tmp_path, tmp_path, max_missing=1.0)
    files: dict[str, tuple[str, Callable[[Path], Any]]] = {
        "labels.csv": (
            f"{header}\na.png,Desert,Cat,Dog,Default,Default,left\nb.png,Desert,Cat,Dog,Blue,Red,bottom\n",
            lambda file: open_benchmark(BENCHMARKS["pug-spar"], tmp_path, rules),
        ),
        "examples.jsonl": (
            json.dumps(WINOGROUND) + "\n",
            lambda file: open_benchmark(BENCHMARKS["winoground"], tmp_path, rules),
        ),
        "captions.txt": ("a.png#0\ta dog\na.png#1\ta cat\n", lambda file: open_caption_set(str(tmp_path), str(file))),
    }
    paint(tmp_path / "a.png", "red")
    rng = random.Random(0)
    for name, (text, read) in files.items():
        file, content = tmp_path / name, text.encode()
        for _ in range(60):
            at, length = rng.randrange(len(content)), rng.choice((0, 1, 5, 40))
            damage = rng.choice((b"", b"\xff", b"\0", b'"', b",", b"\n", b"{", b"x" * 300, content[: at + 7]))
            file.write_bytes(content[:at] + damage + content[at + length :])
            assert_one_line_or_none(lambda: read(file), file, file.read_bytes())  # noqa: B023


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "sugarcrepe",
            {"7": {"filename": "a", "caption": "b"}},
            r"swap_obj.json, entry '7': .*'negative_caption' is missing",
        ),
        ("sugarcrepe", {"7": {**CREPE["0"], "caption": 3}}, r"entry '7': expected filename, caption .*; 3 is not text"),
        ("sugarcrepe", [{**CREPE["0"], "filename": ["a"]}], r"entry 0: .*\['a'\] is not text"),
        ("sugarcrepe", 3, "expected a list of filename, caption and negative_caption; found int"),
        ("sugarcrepe", '{"0": {}, "1": {}, "1": {}}', "the key '1' twice in an object"),
        ("winoground", {**WINOGROUND, "image_1": None}, "line 1: expected an object with image_0.*None is not text"),
        ("aro-relation", "{", "is not valid JSON"),
        ("aro-attribution", [{**relation_entries(RNG, ATTRIBUTES, 1)[0], "attributes": "ab"}], "'ab' is not a list"),
        ("aro-relation", [{**relation_entries(RNG, RELATIONS, 1)[0], "bbox_x": 10**400}], "int too large"),
        ("coco-order", [{"image": "a", "caption_options": "abcde"}], "entry 0: .*'abcde' is not a list of 5"),
        ("vl-checklist", [["a.jpg", {"POS": "brown knob", "NEG": ["b"]}]], "'brown knob' is not a list"),
        ("vl-checklist", [["a.jpg", {"POS": [], "NEG": ["a"]}]], "entry 0: expected"),
        ("coco-spatial", ["abc"], "entry 0: .*'abc' is not a list of 3"),
        ("whatsup-a", [{"image_path": "mug.jpeg", "caption_options": list("abcd")}], "names no preposition"),
    ],
)
def test_the_message_names_file_entry_and_what_is_valid(name, content, message, tmp_path):
    file = tmp_path / ("swap_obj.json" if name == "sugarcrepe" else BENCHMARKS[name].files[0])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=message):
        list(BENCHMARKS[name].read(tmp_path))


# --- images outside of the folder


@pytest.fixture
def crepe(tmp_path: Path) -> Path:
    """A red image beside --data_root, which annotations name by an absolute path and by ../"""
    paint(tmp_path / "secret" / "red.png", "red")
    root = tmp_path / "data"
    paint(root / "images" / "green.png", "green")
    names = {"0": "green.png", "1": str(tmp_path / "secret" / "red.png"), "2": "../../secret/red.png"}
    entries = {key: {"filename": name, "caption": "red", "negative_caption": "blue"} for key, name in names.items()}
    write_json(root / "swap_obj.json", entries)
    return root


def test_images_outside_of_data_root_are_refused_unless_they_are_allowed(crepe, tmp_path):
    weights = small_checkpoint(tmp_path / "checkpoint.pth")
    options = ("--pretrained_weights", weights, "--data_root", crepe)
    with pytest.raises(ValueError, match=r"SugarCrepe in .*red.png' lies outside of .*Give --allow_outside"):
        evaluate("compositional", *options)
    (result,) = evaluate("compositional", *options, "--allow_outside")
    assert result["benchmarks"]["SugarCrepe"]["num_questions"] == 3


def test_captions_of_images_outside_of_the_folder_are_refused_unless_they_are_allowed(crepe, tmp_path):
    captions = write_json(tmp_path / "captions.json", [{"image": "../secret/red.png", "caption": "red"}])
    with pytest.raises(ValueError, match="lies outside of"):
        open_caption_set(str(crepe), str(captions))
    assert len(open_caption_set(str(crepe), str(captions), allow_outside=True).images) == 1


def test_names_that_stay_below_data_root_or_only_look_foreign_are_read(crepe, tmp_path):
    """An author's absolute path whose file is not here is looked up by its last part, as before; links are followed."""
    (crepe / "images" / "link").symlink_to(tmp_path / "secret")
    names = ("/authors/disk/green.png", "../images/green.png", "link/red.png", "../../data/images/green.png")
    entries = {str(n): {"filename": name, "caption": "a", "negative_caption": "b"} for n, name in enumerate(names)}
    write_json(crepe / "swap_obj.json", entries)
    found = open_benchmark(BENCHMARKS["sugarcrepe"], crepe, ImageRules(crepe, crepe / "images"))
    assert len(found.questions) == 4

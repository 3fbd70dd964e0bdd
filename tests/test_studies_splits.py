"""The controlled splits of OC-CLIP: what is trained on and asked, in words, in pictures and in files."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from dino_sparo.oc_clip.graphs.graph import SceneGraph, normalize
from studies.oc_splits import data as split_data
from studies.oc_splits.data import other_pictures, scene_of, training_pictures, write_split
from studies.oc_splits.design import PAIRS, Picture, Question, Split, stream

KINDS = ("attribute", "spatial")
CELLS = [(kind, seen, hard) for kind in KINDS for seen, hard in ((20, 0), (50, 25), (80, 50))]
NUM_IMAGES, NUM_QUESTIONS = 1500, 100
SHIFTS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "under": (0, 1)}


def cell_id(cell: Sequence[object]) -> str:
    return "-".join(map(str, cell))


@pytest.fixture(params=CELLS, ids=cell_id, scope="module")
def split(request: pytest.FixtureRequest) -> Split:
    kind, seen, hard = request.param
    return Split(kind, seed=1, seen=seen, hard=hard)


def trained_captions(split: Split) -> set[str]:
    return {picture.caption for picture, _ in training_pictures(split, NUM_IMAGES)}


def questions(split: Split, test: str, number: int = NUM_QUESTIONS) -> list[Question]:
    return [split.question(test, i) for i in range(number)]


def shapes_of(picture: Picture) -> frozenset[str]:
    return frozenset(thing.shape for thing in picture.things)


def form_of(picture: Picture) -> object:
    """What makes two pictures of a pair the same form, whatever is named first."""
    if picture.predicate is None:
        return frozenset(picture.things)
    order = min(picture, picture.turned, key=lambda p: p.predicate in ("right of", "under"))
    return (order.predicate, *(thing.shape for thing in order.things))


# --- the design


@pytest.mark.parametrize("kind", KINDS)
def test_the_shares_are_9_22_and_36_of_45_pairs_and_partition_them(kind):
    numbers = {20: (9, {0: 0, 25: 2, 50: 4}), 50: (22, {0: 0, 25: 5, 50: 11}), 80: (36, {0: 0, 25: 9, 50: 18})}
    for seen, (num_seen, num_hard) in numbers.items():
        for share in num_hard:
            once, hard, unseen = Split(kind, seed=1, seen=seen, hard=share).pairs
            assert (len(PAIRS), len(once) + len(hard), len(hard)) == (45, num_seen, num_hard[share])
            assert sorted([*once, *hard, *unseen]) == sorted(PAIRS)


def test_each_seen_pair_is_trained_in_one_form_per_axis_and_a_hard_one_in_both(split):
    forms: dict[frozenset[str], set[object]] = {}
    for picture, _ in training_pictures(split, NUM_IMAGES):
        if len(picture.things) == 2:
            forms.setdefault(shapes_of(picture), set()).add(form_of(picture))
    per_pair = 1 if split.kind == "attribute" else 2
    once, hard, _ = split.pairs
    assert set(forms) == set(map(frozenset, (*once, *hard)))
    assert {len(forms[frozenset(pair)]) for pair in once} == {per_pair}
    assert {len(forms[frozenset(pair)]) for pair in hard} == ({2 * per_pair} if hard else set())


def test_no_test_shows_what_was_trained_except_train_and_single_objects(split):
    captions = trained_captions(split)
    forms = {form_of(form) for form in split.training_forms}
    for test in split.tests:
        for true, _ in questions(split, test):
            trained = test in ("train", "single", "shape")
            assert (form_of(true) in forms) == (test == "train")
            assert trained or true.caption not in captions
    assert all(true.caption in captions for true, _ in questions(split, "train") if split.kind == "attribute")


def test_the_captions_alone_mislead_on_reversed_pairs_where_they_help_on_trained_ones(split):
    """The text prior: a false caption of the second test describes what was trained, a true one never does."""
    forms = {form_of(form) for form in split.training_forms}
    train, reverse = (questions(split, test) for test in split.tests[:2])
    assert all(form_of(true) in forms and form_of(false) not in forms for true, false in train)
    assert all(form_of(false) in forms and form_of(true) not in forms for true, false in reverse)
    if split.kind == "attribute":
        captions = trained_captions(split)
        assert all(false.caption in captions for _, false in reverse)
    assert not {shapes_of(true) for true, _ in reverse} & set(map(frozenset, split.pairs.hard))


def test_a_scorer_that_ignores_the_image_has_half_of_the_answers_right(split):
    def accuracy(test: str) -> float:
        scores = {caption: stream(0, caption).random() for q in questions(split, test) for caption in captions(q)}
        return float(np.mean([scores[a] > scores[b] for a, b in map(captions, questions(split, test))]))

    def captions(question: Question) -> tuple[str, str]:
        return question.true.caption, question.false.caption

    first, second, *others = split.tests
    assert (accuracy(first) + accuracy(second)) / 2 == 0.5
    assert [accuracy(test) for test in others] == [0.5] * len(others)


def test_true_and_false_captions_have_the_same_words_and_differ_as_the_kind_says(split):
    for test in split.tests:
        for true, false in questions(split, test, 40):
            assert true.predicate == false.predicate
            assert (true.predicate is None) == (split.kind == "attribute")
            if test == "single":
                assert shapes_of(true) == shapes_of(false)
                assert true.things[0].colour != false.things[0].colour
                continue
            if test == "shape":
                assert true.things[0].colour == false.things[0].colour
                assert shapes_of(true) != shapes_of(false)
                continue
            words = [sorted(word for t in picture.things for word in t) for picture in (true, false)]
            assert words[0] == words[1]
            assert len(set(words[0])) == 4
            shapes = [[thing.shape for thing in picture.things] for picture in (true, false)]
            assert shapes[1] == (shapes[0] if split.kind == "attribute" else shapes[0][::-1])
            assert form_of(true) != form_of(false)


# --- pictures, captions, graphs


def test_captions_by_hand():
    split = Split("attribute", seed=0, seen=20, hard=0)
    (form,) = split.forms[split.pairs.once[0]]
    first, second = form.things
    assert form.caption == f"{_a(first)} and {_a(second)}"
    left = Picture((first, second), "left of")
    assert left.caption == f"{_a(first)} left of {_a(second)}"
    assert left.turned.caption == f"{_a(second)} right of {_a(first)}"
    assert left.reversed.caption == f"{_a(second)} left of {_a(first)}"
    assert Picture((first,)).caption == _a(first)


def _a(thing) -> str:
    return f"{'an' if thing.colour == 'orange' else 'a'} {thing.colour} {thing.shape}"


def test_captions_are_true_of_the_pictures_and_false_ones_are_not(split):
    """From the centers of the objects as they are placed."""

    def holds(picture: Picture, objects) -> bool:
        things = [(thing.colour, thing.shape) for thing in objects]
        if not set(picture.things) <= set(things):
            return False
        if picture.predicate is None:
            return True
        subject, other = (objects[things.index(tuple(thing))] for thing in picture.things)
        step = np.subtract(subject.center, other.center)
        axis = int(abs(step[1]) > abs(step[0]))
        return SHIFTS[picture.predicate][axis] == np.sign(step[axis])

    sizes = set()
    for test in split.tests:
        for number, (true, false) in enumerate(questions(split, test, 60)):
            graph = scene_of(stream(7, test, number), true, "sand")
            assert holds(true, graph.objects)
            assert not holds(false, graph.objects)
            sizes.add(true.things[0].shape == graph.objects[0].shape)
    assert sizes == {True, False}  # either may be the large one


def test_a_caption_has_one_graph_whose_phrases_need_no_normalisation(split):
    pictures = [picture for picture, _ in training_pictures(split, 200)]
    pictures += [picture for test in split.tests for question in questions(split, test, 60) for picture in question]
    graphs: dict[str, SceneGraph] = {}
    for picture in pictures:
        assert graphs.setdefault(picture.caption, picture.graph) == picture.graph
        assert normalize(picture.graph, picture.caption)[0] == picture.graph


def test_shuffled_pictures_share_no_shape_with_their_question_and_are_a_permutation():
    split = Split("attribute", seed=0, seen=50, hard=0)
    for test in split.tests:
        asked = questions(split, test)
        order, num_overlaps = other_pictures(stream(3), asked)
        assert sorted(order) == list(range(len(asked)))
        assert num_overlaps == 0
        assert not any(shapes_of(asked[i].true) & shapes_of(asked[j].true) for i, j in enumerate(order))
        if test == "single":
            named = [{picture.things[0].colour for picture in question} for question in asked]
            assert not any(asked[j].true.things[0].colour in named[i] for i, j in enumerate(order))


# --- files


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    monkeypatch.setattr(split_data, "MIN_TRAINING_IMAGES", 6)
    return 20, 12, 24


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_the_same_seed_writes_the_same_files_and_another_seed_others(tmp_path, few):
    files = [
        contents(write_split(tmp_path / name, Split("spatial", seed, 50, 25), *few))
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert files[0] == files[1]
    assert files[0].keys() == files[2].keys()
    assert all(files[0][name] != files[2][name] for name in files[0])


def test_shuffled_files_keep_the_questions_and_change_the_images(tmp_path, few):
    split = Split("attribute", 0, 50, 0)
    folder = write_split(tmp_path, split, *few)
    for test in split.tests:
        plain, control = (
            list(json.loads((folder / part / f"{test}.json").read_text()).values()) for part in ("tests", "shuffled")
        )
        names = [[entry.pop("filename") for entry in entries] for entries in (plain, control)]
        assert plain == control
        assert sorted(names[0]) == sorted(names[1])
        assert all(a != b for a, b in zip(*names, strict=True))
        assert all((folder / "tests" / "images" / name).is_file() for name in names[0])


def test_the_training_table_holds_the_graphs_of_its_captions_and_is_read_as_pairs(tmp_path, few):
    pytest.importorskip("open_clip")
    from dino_sparo.image_text.pairs.sources import open_pairs

    folder = write_split(tmp_path, Split("spatial", 0, 20, 0), *few)
    lines = [json.loads(line) for line in (folder / "train" / "pairs.jsonl").read_text().splitlines()]
    source = open_pairs(str(folder / "train" / "pairs.jsonl"))
    assert len(lines) == len(source) == few[0]
    for number, line in enumerate(lines):
        image, captions = source.read_pair(number)
        assert (image.size, captions) == ((24, 24), [line["caption"]])
        assert SceneGraph.from_json(line).entities
    false = [line["negative_caption"] for line in lines]
    assert [bool(caption) for caption in false] == [False, True] * (few[0] // 2)
    assert all(sorted(a.split()) == sorted(b["caption"].split()) for a, b in zip(false[1::2], lines[1::2], strict=True))
    assert not set(false) & {line["caption"] for line in lines}
    negatives = open_pairs(str(folder / "train" / "pairs.jsonl"), negative_key="negative_caption").negatives
    assert [negatives(number) for number in range(len(lines))] == [[caption] for caption in false]
    assert [len(line["entities"]) for line in lines] == [1, 2] * (few[0] // 2)
    known = {json.loads(line)["caption"] for line in (folder / "tests" / "graphs.jsonl").read_text().splitlines()}
    for path in (folder / "tests").glob("*.json"):
        for entry in json.loads(path.read_text()).values():
            assert {entry["caption"], entry["negative_caption"]} <= known


def test_a_folder_with_another_split_is_refused_and_the_same_one_kept(tmp_path, few):
    write_split(tmp_path, Split("attribute", 0, 50, 0), *few)
    (tmp_path / "train" / "pairs.jsonl").unlink()
    write_split(tmp_path, Split("attribute", 0, 50, 0), *few)  # not written again
    assert not (tmp_path / "train" / "pairs.jsonl").exists()
    with pytest.raises(ValueError, match="holds another split"):
        write_split(tmp_path, Split("attribute", 1, 50, 0), *few)


def test_too_few_pictures_are_refused(tmp_path):
    with pytest.raises(ValueError, match="num_images=500; give at least 960"):
        write_split(tmp_path, Split("attribute", 0, 50, 0), 500, 10, 24)

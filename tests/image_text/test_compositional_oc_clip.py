"""OC-CLIP among the compositional benchmarks: alike graphs are ties and are counted, beside a CLIP in one table."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from clip_fakes import evaluate, paint, small_checkpoint
from compositional_files import write_json
from oc_clip_fakes import small_checkpoint as oc_checkpoint

from dino_sparo.commands import UNUSED_OPTIONS
from dino_sparo.image_text.evaluation.compositional.questions import Question, answer_questions
from dino_sparo.weights.entries import IMAGE_TEXT_KEYS

pytest.importorskip("open_clip")

from dino_sparo.oc_clip.graphs.graph import Relation, SceneGraph
from dino_sparo.oc_clip.load import load_oc_clip, scorer_of
from dino_sparo.oc_clip.parsers.templates import parse_caption


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """COCO-spatial's layout: pictures, and captions of one and of two objects."""
    root = tmp_path / "data"
    for number, colour in enumerate(("red", "green", "blue")):
        paint(root / "val2017" / f"{number:012d}.jpg", colour)
    one = [[0, "a bench on the left", "a bench on the right"], [1, "a cup and a dog", "a dog and a cup"]]
    two = [[2, "a cup left of a dog", "a dog right of a cup"], [1, "a cup left of a dog", "a dog left of a cup"]]
    write_json(root / "coco_qa_one_obj.json", one)
    write_json(root / "coco_qa_two_obj.json", two)
    return root


def run(*options: Any) -> Any:
    return evaluate("compositional", *options)


def test_questions_whose_captions_have_one_graph_are_ties_and_counted_per_split(data, tmp_path):
    """As are captions without an entity that the parser finds, and truncated phrases."""
    weights = oc_checkpoint(tmp_path / "oc" / "checkpoint.pth")
    clip = small_checkpoint(tmp_path / "clip" / "checkpoint.pth")
    results = run("--pretrained_weights", weights, clip, "--data_root", data, "--graphs", "templates")
    ours, other = (result["benchmarks"]["COCO-spatial"]["splits"] for result in results)
    assert [ours[split]["num_alike"] for split in ours] == [1, 0]  # "a cup and a dog" in both orders
    assert ours["one object"]["num_ties"] == 1
    assert [ours[split]["num_one_entity"] for split in ours] == [0, 0]
    assert [other[split]["num_alike"] for split in other] == [0, 0]
    assert "num_one_entity" not in other["one object"]
    assert results[0]["graphs"]["parser"] == "templates"
    assert "graphs" not in results[1]


def test_marks_of_captions_without_a_graph_and_with_long_phrases(tmp_path):
    """The parser of this test finds nothing in one caption, and two isomorphic graphs in others."""
    pair = SceneGraph(("cup", "dog"), (Relation(0, "by", 1),))
    turned = SceneGraph(("dog", "cup"), (Relation(1, "by", 0),))
    long = SceneGraph(("cup " * 20, "dog"))
    graphs = {"a": pair, "b": turned, "nothing": SceneGraph(()), "long": long}
    scorer = scorer_of(load_oc_clip(oc_checkpoint(tmp_path / "checkpoint.pth")), graphs.__getitem__)
    paint(tmp_path / "red.png", "red")
    texts = [("a", "b"), ("nothing", "a"), ("long", "a"), ("b", "long")]
    questions = [Question("s", (str(tmp_path / "red.png"),), text) for text in texts]
    found = answer_questions(scorer, questions, 10)
    answers = [answer for answer in found if answer]
    assert [answer.marks["alike"] for answer in answers] == [True, False, False, False]
    assert [answer.text_tied for answer in answers] == [True, False, False, False]
    assert [answer.marks["one_entity"] for answer in answers] == [False, True, False, False]
    assert [answer.marks["truncated"] for answer in answers] == [False, False, True, True]
    assert scorer.encode_texts(["long", "a", "long"]).num_truncated == 2, "captions, asked before or not"


def test_a_caption_of_several_parts_is_looked_up_and_counted_once(tmp_path):
    """The bug: counts depended on --chunk_images, and missing captions of later parts ended a run that had begun."""
    scorers = []
    for colour in ("red", "green", "blue"):
        paint(tmp_path / f"{colour}.png", colour)
    questions = [Question("s", (str(tmp_path / f"{c}.png"),), ("a cup", "a dog")) for c in ("red", "green", "blue")]
    for chunk_images in (1, 100):
        scorers.append(scorer_of(load_oc_clip(oc_checkpoint(tmp_path / "checkpoint.pth")), parse_caption))
        answer_questions(scorers[-1], questions, chunk_images)
    assert scorers[0].counts == scorers[1].counts
    assert scorers[0].counts.captions == 2


def test_graphs_from_a_file_that_parse_made_of_the_written_captions(data, tmp_path):
    from dino_sparo.__main__ import run as run_command

    captions, graphs = tmp_path / "captions.txt", tmp_path / "graphs.jsonl"
    # COCO has captions with two blanks in a row.
    write_json(data / "coco_qa_two_obj.json", [[2, "a cup  left of a dog", "a dog left of a cup"]])
    run("--data_root", data, "--write_captions", captions)
    run_command("parse", ["--captions", str(captions), "--output", str(graphs)])
    weights = oc_checkpoint(tmp_path / "oc" / "checkpoint.pth")
    (by_file,) = run("--pretrained_weights", weights, "--data_root", data, "--graphs", graphs)
    (by_parser,) = run("--pretrained_weights", weights, "--data_root", data)
    assert by_file["benchmarks"] == by_parser["benchmarks"]
    assert by_file["graphs"]["counts"]["missing"] == 0
    assert json.loads(next(weights.parent.glob("compositional_*.json")).read_text()) == by_parser


def test_graphs_for_clip_models_alone_are_named_as_unused(data, tmp_path, caplog):
    weights = [small_checkpoint(tmp_path / f"{name}.pth") for name in "ab"]
    run("--pretrained_weights", *weights, "--data_root", data, "--graphs", "templates")
    assert "--graphs templates: none of the models is an OC-CLIP" in caplog.text


def test_a_checkpoint_is_read_once_to_be_evaluated(data, tmp_path, monkeypatch):
    """Regression: it was read and verified once more to find out of which objective it is, and of several again.

    A second look at its options maps the file into memory, which reads no weights. All but the first are opened before
    the first is evaluated, to see that they can be opened.
    """
    weights = [oc_checkpoint(tmp_path / "oc.pth"), small_checkpoint(tmp_path / "clip.pth")]
    read, load = [], torch.load

    def noted(path: Path, mmap: bool, **options: object) -> object:
        read.extend([] if mmap else [Path(path)])
        return load(path, mmap=mmap, **options)

    monkeypatch.setattr(torch, "load", noted)
    run("--pretrained_weights", *weights, "--data_root", data)
    assert read == [*weights[1:], *weights]


def test_the_objectives_with_models_to_evaluate_are_those_whose_checkpoints_are_known():
    assert tuple(UNUSED_OPTIONS) == IMAGE_TEXT_KEYS

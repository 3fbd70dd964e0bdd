"""OC-CLIP in the evaluations: scores are the equations', isomorphic graphs tie, result files, refusals."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("open_clip")

import clip_fakes
from clip_fakes import call, evaluate, paint
from oc_clip_fakes import PHRASES, scores_by_equation, small_checkpoint, some_graphs, write_graphs
from PIL import Image
from refusals import refused
from test_clip_winoground import write as write_winoground

from dino_sparo import load_encoder
from dino_sparo.__main__ import run as run_command
from dino_sparo.clip.load import load_for_benchmark
from dino_sparo.data.sources import open_source
from dino_sparo.image_text.evaluation.compositional.sets.sugarcrepe import GROUPS
from dino_sparo.oc_clip import load as scorer_module
from dino_sparo.oc_clip.graphs.graph import Relation, SceneGraph
from dino_sparo.oc_clip.load import GraphScorer, load_oc_clip, scorer_of
from dino_sparo.oc_clip.parsers.templates import parse_caption
from dino_sparo.runtime.launch import shutdown
from dino_sparo.weights.file import CheckpointError

SPLITS = [split for group in GROUPS.values() for split in group]
GRAPHS = {f"caption {number}": graph for number, graph in enumerate(some_graphs())}
ISOMORPHIC = {
    "a": SceneGraph(("red star", "dot", "tall box"), (Relation(0, "on", 1), Relation(1, "above", 2))),
    "b": SceneGraph(("tall box", "red star", "dot"), (Relation(2, "above", 0), Relation(1, "on", 2))),
    "other": SceneGraph(("tall box", "red star", "dot"), (Relation(0, "above", 2), Relation(1, "on", 2))),
}


def small_scorer(folder: Path, batch_size: int = 3, **binding: Any) -> GraphScorer:
    loaded = load_oc_clip(small_checkpoint(folder / "oc.pth", **binding))
    return scorer_of(loaded, {**GRAPHS, **ISOMORPHIC}.__getitem__, batch_size=batch_size)


@torch.no_grad()
def expected_scores(scorer: GraphScorer, views: Tensor, graphs: Iterable[SceneGraph]) -> Tensor:
    model = scorer.model.double()
    scores = scores_by_equation(model, *model.encode_images(views.double()), graphs, context=20)
    model.float()
    return scores


def images_of(count: int, size: int = 30) -> list[Image.Image]:
    source = open_source(f"scenes:{count}:{size}")
    return [source.read(index) for index in range(count)]


# ---- scores


def test_pairs_blocks_and_similarity_are_the_equations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer_module, "PAIR_CHUNK", 5)
    monkeypatch.setattr(scorer_module, "IMAGE_CHUNK", 2)
    scorer = small_scorer(tmp_path)
    source, captions = open_source("scenes:5:30"), list(GRAPHS)
    encoded, texts = scorer.encode_images(source).payload, scorer.encode_texts(captions).payload
    block = scorer.score_block(encoded, texts)
    assert (block.shape, block.dtype) == ((5, 12), torch.float32)
    assert block.abs().max() <= 1
    image_of, text_of = (grid.flatten() for grid in torch.meshgrid(torch.arange(5), torch.arange(12), indexing="ij"))
    pairs = scorer.score_pairs(encoded, image_of, texts, text_of)
    torch.testing.assert_close(pairs.view(5, 12), block)
    loaded = load_oc_clip(tmp_path / "oc.pth")
    torch.testing.assert_close(loaded.similarity(images_of(5), captions, GRAPHS.__getitem__), block)
    expected = expected_scores(scorer, scorer.views(images_of(5)), GRAPHS.values())
    torch.testing.assert_close(block.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("binding", [{}, {"competition": "keys", "num_default": 0}, {"relation": "mlp"}], ids=str)
def test_isomorphic_graphs_tie_to_the_bit_in_whatever_chunks_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, binding: dict[str, Any]
) -> None:
    scorer, source = small_scorer(tmp_path, **binding), open_source("scenes:4:30")
    encoded, captions = scorer.encode_images(source).payload, [*GRAPHS, "a", *list(GRAPHS)[:5], "b", "other"]
    first, second, other = captions.index("a"), captions.index("b"), captions.index("other")
    text_of = torch.arange(len(captions)).repeat(4)
    image_of = torch.arange(4).repeat_interleave(len(captions))
    for pair_chunk, image_chunk, chunk_mb in ((128, 16, 256), (7, 3, 1e-6)):
        monkeypatch.setattr(scorer_module, "PAIR_CHUNK", pair_chunk)
        monkeypatch.setattr(scorer_module, "IMAGE_CHUNK", image_chunk)
        scorer.model.binding.chunk_mb = chunk_mb
        texts = scorer.encode_texts(captions).payload
        for scores in (
            scorer.score_block(encoded, texts),
            scorer.score_pairs(encoded, image_of, texts, text_of).view(4, len(captions)),
        ):
            assert torch.equal(scores[:, first], scores[:, second])
            assert not (scores[:, first] == scores[:, other]).any()


def test_templates_are_averaged_and_a_class_is_one_entity(tmp_path: Path) -> None:
    scorer = small_scorer(tmp_path)
    encoded, templates = scorer.encode_images(open_source("scenes:4:30")).payload, ("a photo of a {}", "the {}", "{}s")
    found = scorer.score_block(encoded, scorer.encode_classes(["red star", "Dot"], templates).payload)
    phrases = [["photo of a red star", "red star", "red stars"], ["photo of a dot", "dot", "dots"]]
    for number, own in enumerate(phrases):
        expected = expected_scores(scorer, scorer.views(images_of(4)), [SceneGraph((phrase,)) for phrase in own])
        torch.testing.assert_close(found[:, number].double(), expected.mean(dim=1), rtol=0, atol=2e-6)
    bare = scorer.encode_classes(["red star", "Dot"], scorer.default_templates).payload
    graphs = list(scorer.numbers)
    assert [[graphs[n] for n in row] for row in bare.tolist()] == [[SceneGraph((x,))] for x in ("red star", "dot")]
    pairs = scorer.score_pairs(encoded, torch.tensor([3, 0]), scorer.encode_classes(["red star"], templates).payload,
                               torch.tensor([0, 0]))  # fmt: skip
    torch.testing.assert_close(pairs, found[[3, 0], 0])


def test_similarity_takes_parsers_by_name_and_as_functions(tmp_path: Path) -> None:
    loaded = load_oc_clip(small_checkpoint(tmp_path / "oc.pth"))
    found = loaded.similarity(images_of(2), ["a red star left of a blue ring", "a dot"])
    by_hand = loaded.similarity(images_of(2), ["a red star left of a blue ring", "a dot"], parse_caption)
    assert torch.equal(found, by_hand)
    assert not found.requires_grad


# ---- commands


def data_option(name: str) -> str:
    """The option of a command's data: questions lie below a root."""
    return "--data_root" if name in ("compositional", "slots mask") else "--data_path"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return small_checkpoint(tmp_path / "run" / "checkpoint.pth")


@pytest.fixture
def crepe(tmp_path: Path) -> Path:
    """Three images, two splits of SugarCrepe and two examples of Winoground; `a` and `b` are one graph."""
    questions = {
        SPLITS[0]: [("red", "caption 0", "caption 2"), ("blue", "a", "b")],
        SPLITS[3]: [("green", "caption 3", "caption 3 swapped"), ("red", "a", "other"), ("red", "caption 4", "lost")],
    }
    for split, entries in questions.items():
        content = {
            str(number): {"filename": f"{image}.png", "caption": true, "negative_caption": false}
            for number, (image, true, false) in enumerate(entries)
        }
        (tmp_path / f"{split}.json").write_text(json.dumps(content))
    for colour in ("red", "green", "blue"):
        paint(tmp_path / "images" / f"{colour}.png", colour)
    swapped = {"caption 3 swapped": SceneGraph(PHRASES[3:5], (Relation(1, "left of", 0),))}
    rows = {**GRAPHS, **ISOMORPHIC, **swapped}
    write_winoground(tmp_path, [("red", "green", "a", "b", "Object"), ("red", "blue", "a", "other", "Object")])
    write_graphs(tmp_path / "graphs.jsonl", [(caption, graph, None) for caption, graph in rows.items()])
    return tmp_path


def test_a_result_file_says_where_its_graphs_come_from_and_what_was_changed(weights: Path, crepe: Path) -> None:
    options = ("--pretrained_weights", weights, "--data_root", crepe, "--graphs", crepe / "graphs.jsonl")
    (result,) = evaluate("compositional", *options)
    path = weights.parent / f"compositional_checkpoint_{crepe.name}.json"
    assert json.loads(path.read_text()) == result
    graphs = result["graphs"]
    assert (graphs["file"], len(graphs["sha256"]), graphs["captions"]) == (str(crepe / "graphs.jsonl"), 64, 16)
    assert graphs["counts"]["captions"] > 0
    assert (graphs["counts"]["missing"], graphs["counts"]["whole_caption"]) == (1, 1)
    assert result["benchmarks"]["SugarCrepe"]["splits"][SPLITS[0]]["num_ties"] == 1  # a tie is wrong
    assert result["benchmarks"]["Winoground"]["splits"]["text"]["accuracy"] <= 50  # a tie is wrong
    assert result["model"]["trained_on_graphs"] == {"parser": "templates"}
    assert len(result["model"]["sha256"]) == 64
    evaluate("compositional", *options, "--output_dir", crepe / "again")
    assert next((crepe / "again").iterdir()).read_bytes() == path.read_bytes()
    assert evaluate("compositional", *options[:4])[0]["graphs"]["parser"] == "templates"


def test_every_evaluation_of_pairs_takes_an_oc_clip_checkpoint(weights: Path, tmp_path: Path) -> None:
    common = ("--pretrained_weights", weights)
    found = evaluate("zero-shot", *common, "--data_path", "scenes:13:32")
    assert found["prompts"]["ensemble"] == GraphScorer.ensemble
    assert found["similarity"].startswith(GraphScorer.measure)
    found = evaluate("retrieval", *common, "--data_path", "scenes:13:32")
    assert found["graphs"]["parser"] == "templates"
    evaluate("clip-probe", *common, "--data_path", "scenes:24:32")
    assert {f"{name}_checkpoint_scenes-13-32.json" for name in ("zero_shot", "retrieval")} <= {
        path.name for path in weights.parent.iterdir()
    }


@pytest.mark.parametrize("name", ["retrieval", "compositional"])
def test_missing_graphs_are_named_before_the_first_image_is_encoded(
    name: str, weights: Path, crepe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = crepe / "other.jsonl"
    graphs.write_text((crepe / "graphs.jsonl").read_text().splitlines()[0] + "\n")
    monkeypatch.setattr(GraphScorer, "encode_images", lambda self, source: pytest.fail("too early"))
    data = "scenes:13:32" if name == "retrieval" else crepe
    options = ("--pretrained_weights", weights, data_option(name), data, "--graphs", graphs, "--max_missing_graphs", 0)
    message = r"captions have no graph in .*other\.jsonl; at most 0 of them .*Parse these .*raise --max_missing_graphs"
    with pytest.raises(ValueError, match=message):
        evaluate(name, *options)
    assert not list(weights.parent.glob("*.json"))


def test_captions_without_a_graph_are_a_share_of_all_that_are_expected(weights: Path, tmp_path: Path) -> None:
    captions = [f"a dot {number}" for number in range(200)]
    write_graphs(tmp_path / "graphs.jsonl", [(caption, SceneGraph(("dot",)), None) for caption in captions[20:]])
    scorer = scorer_of(load_oc_clip(weights), str(tmp_path / "graphs.jsonl"), max_missing=0.1)
    scorer.expect_texts(captions)
    scorer.encode_texts(captions[:20])
    assert (scorer.counts.captions, scorer.counts.missing) == (200, 20)
    with pytest.raises(ValueError, match="21 of 201 captions have no graph"):
        scorer.encode_texts(["another", *captions])


def test_the_image_tower_is_an_encoder_that_averages_what_the_losses_train(weights: Path) -> None:
    """Nothing trains the class token in the last block."""
    images, tower = torch.randn(2, 3, 24, 24), load_oc_clip(weights).model.image
    torch.testing.assert_close(load_encoder(weights)(images), tower.backbone(images).mean(dim=1))


def test_features_of_images_are_means_of_patches_of_length_one(weights: Path) -> None:
    scorer, source = scorer_of(load_oc_clip(weights), GRAPHS.__getitem__), open_source("scenes:5:30")
    with torch.no_grad():
        patches = scorer.model.image.backbone(scorer.views(images_of(5)))[:, 1:]
    means = patches.mean(dim=1)
    torch.testing.assert_close(scorer.image_features(source).features, means / means.norm(dim=1, keepdim=True))


def test_classes_need_no_graphs_and_that_is_said(
    weights: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_graphs(tmp_path / "g.jsonl", [("a dot", SceneGraph(("dot",)), None)])
    evaluate(
        "zero-shot", "--pretrained_weights", weights, "--data_path", "scenes:4:32", "--graphs", tmp_path / "g.jsonl"
    )
    assert "classes are one entity each: the graphs of" in caplog.text


def test_similarity_names_what_is_no_caption(tmp_path: Path) -> None:
    loaded = load_oc_clip(small_checkpoint(tmp_path / "oc.pth"))
    assert "Linear" not in repr(loaded)
    with pytest.raises(ValueError, match="'a dot' is one caption; give a list of captions"):
        loaded.similarity(images_of(1), "a dot")
    with pytest.raises(ValueError, match="a graph without entities becomes its caption"):
        loaded.similarity(images_of(1), ["a dot", " "])


# ---- refusals: one clear line each

EVALUATIONS = ("zero-shot", "retrieval", "compositional", "clip-probe")


REFUSED = [
    # model, commands, options, what the line names
    ("oc_clip", EVALUATIONS, ("--slots", "slots.json"), "--slots with an OC-CLIP: its score is not a dot product"),
    ("oc_clip", EVALUATIONS, ("--img_size", 32), "--img_size 32: the binding was trained for images of 24 px"),
    ("clip", EVALUATIONS, ("--graphs", "templates"), "--graphs templates with a CLIP"),
    # Regression: they were parsed and had no effect.
    ("clip", ("compositional",), ("--quick_gelu", "true"), "--quick_gelu is for open_clip's weights"),
    ("oc_clip", ("compositional",), ("--text_heads", 2), "--text_heads is for open_clip's weights"),
    ("oc_clip", ("slots select", "slots mask", "pictures"), (), "another image-text model than a CLIP"),
]


@pytest.mark.parametrize(
    ("kind", "name", "words", "message"),
    [(kind, name, words, message) for kind, names, words, message in REFUSED for name in names],
)
def test_options_that_a_model_has_no_use_for_are_refused(
    weights: Path, crepe: Path, kind: str, name: str, words: tuple[object, ...], message: str
) -> None:
    path = weights if kind == "oc_clip" else clip_fakes.small_checkpoint(crepe / "clip.pth")
    data = "scenes:12:32" if name in ("slots select", "pictures") else crepe
    common = ("--pretrained_weights", path, data_option(name), data, "--device", "cpu", "--output_dir", crepe / "out")
    try:
        with refused(message):
            run_command(name, [*map(str, common), *map(str, words)])
    finally:
        shutdown()


def test_the_image_tower_is_exported_as_any_encoder_and_both_towers_not_as_a_clip(
    weights: Path, tmp_path: Path
) -> None:
    call("export", [weights, tmp_path / "out", "--format", "safetensors"])
    assert (tmp_path / "out.safetensors").is_file()
    for name in ("open_clip", "sparo_clip"):
        with refused(f"is not a CLIP of dino_sparo, as format {name!r} needs"):
            run_command("export", [str(weights), str(tmp_path / "clip"), "--format", name])


def test_laions_benchmark_refuses_an_oc_clip(weights: Path) -> None:
    with pytest.raises(CheckpointError, match="holds another image-text model than a CLIP"):
        load_for_benchmark("normalized", str(weights), device="cpu")

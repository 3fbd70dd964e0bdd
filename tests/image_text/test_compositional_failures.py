"""The clearest errors of the compositional benchmarks: which they are, what is drawn of them."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clip_fakes import colour_encoder, evaluate, paint, parser_of, small_checkpoint
from compositional_files import write_json
from figures import assert_readable, drawn_words
from PIL import Image

pytest.importorskip("open_clip")
pytest.importorskip("matplotlib")

from oc_clip_fakes import small_checkpoint as small_oc_checkpoint

from dino_sparo.clip import load_clip
from dino_sparo.clip.load import clip_scorer, leading_slots, slot_leads
from dino_sparo.data.views import ClipView
from dino_sparo.draw.figure import Band, Figure, Section, Tile, Word, map_painter, merge_words
from dino_sparo.draw.html import save_page
from dino_sparo.draw.sheet import save_sheet
from dino_sparo.image_text.evaluation.compositional.failures import (
    LAYOUT,
    TITLE,
    Failure,
    Failures,
    clearest_failures,
    differing,
    failure_section,
    write_failures,
)
from dino_sparo.image_text.evaluation.compositional.questions import Answer, Question, answer_questions, judge
from dino_sparo.image_text.evaluation.protocol import Crop, file_of
from dino_sparo.image_text.scorer import ExplainableScorer
from dino_sparo.oc_clip.load import load_oc_clip, scorer_of
from dino_sparo.runtime.faults import UserError


@pytest.mark.parametrize(("readout", "is_explained"), [("sparo", True), ("attpool", False), ("cls", False)])
def test_a_score_is_explained_by_slots_only_if_it_is_the_mean_of_their_cosines(readout, is_explained, tmp_path):
    """The bug: attpool, whose encoding is normalised as a whole, was explained too."""
    weights = small_checkpoint(tmp_path / "checkpoint.pth", readout)
    args = parser_of("zero-shot").parse_args(["--pretrained_weights", str(weights)])
    scorer = clip_scorer(args, torch.device("cpu"))
    assert isinstance(scorer, ExplainableScorer) == is_explained


def test_a_confusion_is_the_image_and_the_false_caption_that_lies_most_above_the_true_one():
    """Two images with a caption each, the second of which is confused; one image with three captions."""
    none = -torch.inf
    scores = torch.tensor([[[0.9, 0.8, none], [0.5, 0.3, none]], [[0.1, 0.2, 0.4], [none] * 3]])
    found = judge(scores, torch.tensor([[0, 1], [1, -1]]))
    assert [(answer.worst_image, answer.false_caption) for answer in found] == [(1, 0), (0, 2)]
    assert [answer.true_score for answer in found] == pytest.approx([0.3, 0.2])
    assert [answer.false_score for answer in found] == pytest.approx([0.5, 0.4])


def answered(margins: list[float], unread: int | None = None) -> list[Answer | None]:
    found: list[Answer | None] = [Answer(False, False, False, False, 0, 1, 0.25, 0.25 + margin) for margin in margins]
    if unread is not None:
        found[unread] = None
    return found


def test_the_clearest_errors_have_the_largest_margins_one_per_image_and_are_no_ties():
    """An unread question, and a part of an image, which is an image of its own."""
    part = Crop("a", (1.0, 2.0, 3.0, 4.0))
    images = ["a", "a", "b", "c", "d", "e", part]
    questions = [Question("s", (image,), (f"true {image}", "false")) for image in images]
    margins = [0.125, 0.25, 0.5, 0.0, -0.5, 0.75, 0.0625]
    found = clearest_failures(questions, answered(margins, unread=5), 3)
    assert found[:3] == (6, 5, 1)
    assert [failure.image for failure in found.clearest] == ["b", "a", part]
    assert found.clearest[0] == Failure("s", "b", "true b", "false", 0.25, 0.75)
    rows = found.to_json()["clearest"]
    places = [(row["image"], row["box"], row["cell"]) for row in rows]
    assert places == [("b", None, None), ("a", None, None), (*part, None)]
    assert str(found) == "5 of 6 wrong, 1 of these ties"
    few = clearest_failures(questions, answered(margins), 1)
    assert [failure.image for failure in few.clearest] == ["e"]
    none = clearest_failures(questions[4:5], answered(margins[4:5]), 3)
    assert (none.num_wrong, none.clearest) == (0, [])


def test_a_benchmark_whose_captions_outnumber_its_neighbours_keeps_its_confusions(tmp_path):
    """Questions of two and of five captions are scored together."""
    for colour in ("red", "green"):
        paint(tmp_path / f"{colour}.png", colour)
    texts = [("red", "green"), ("a blue thing", "red", "green", "a thing", "cyan"), ("red", "blue")]
    images = ("red", "red", "green")
    questions = [Question("s", (str(tmp_path / f"{i}.png"),), t) for i, t in zip(images, texts, strict=True)]
    found = answer_questions(colour_encoder(), questions, 10)
    answers = [answer for answer in found if answer]
    assert answers[1].false_caption == 1
    assert [answer.true_score for answer in answers] == pytest.approx([1, 0, 0], abs=1e-6)
    assert [answer.false_score for answer in answers] == pytest.approx([0, 1, 0], abs=1e-6)


def test_words_that_differ_are_marked_in_runs():
    first, second = ["a", "red", "star", "on", "a", "blue", "ring"], ["a", "blue", "star", "on", "a", "red", "ring"]
    marked = differing(first, second)
    assert [[is_marked for _, is_marked in words] for words in marked] == [
        [False, True, False, False, False, True, False]
    ] * 2
    merged = merge_words([Word(word, 0.5 * is_marked) for word, is_marked in marked[0]])
    assert [word.text for word in merged] == ["a", "red", "star on a", "blue", "ring"]
    assert differing(["a"], []) == ([("a", True)], [])


# --- what a model looked at


def test_the_leads_of_all_slots_add_up_to_the_difference_of_the_scores(tmp_path):
    loaded = load_clip(small_checkpoint(tmp_path / "checkpoint.pth", seed=5))
    images, captions = torch.randn(1, 3, 32, 32), ["a red thing", "two blue things on a hill"]
    scores = loaded.similarity(images, captions)[0]
    from dino_sparo.clip import tokenize

    with torch.no_grad():
        seen, read = loaded.model.image_output(images), loaded.model.text_output(tokenize(captions).ids)
    leads = slot_leads(torch.nn.functional.cosine_similarity(seen.slots, read.slots, dim=-1))
    assert float(leads[0].sum()) == pytest.approx(float(scores[0] - scores[1]), abs=1e-6)
    assert torch.allclose(leads[0], -leads[1])
    assert leading_slots(np.array([0.1, -0.2, 0.3, 0.0])) == [2, 0]


def test_the_part_that_the_maps_cover_is_what_clips_view_shows():
    """The same pixels cut out of the image by the box; what no whole patch sees is cut off."""
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 255, (5, 8, 3), dtype=np.uint8)).resize((106, 66), Image.Resampling.BICUBIC)
    for size, seen_size in ((32, 32), (39, 32)):
        view = ClipView(size, (0.0,) * 3, (1.0,) * 3, border=1)
        seen = view.view(image, 8)
        assert (seen.height, seen.width) == (seen_size, seen_size)
        assert seen.box == pytest.approx((21.0, 1.0, 21 + 64 * seen_size / size, 1 + 64 * seen_size / size))
        cut = np.asarray(image.resize((seen_size, seen_size), Image.Resampling.BICUBIC, box=seen.box), dtype=np.float32)
        pixels = view(image)[0].numpy().transpose(1, 2, 0)[:seen_size, :seen_size] * 255
        assert np.abs(pixels - cut).mean() < 3


def test_an_oc_clip_looks_with_the_entities_of_each_caption(tmp_path):
    loaded = load_oc_clip(small_oc_checkpoint(tmp_path / "checkpoint.pth"))
    scorer = scorer_of(loaded, "templates")
    assert isinstance(scorer, ExplainableScorer)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 70, 3), dtype=np.uint8))
    look = scorer.explain(image, ["a red star left of a blue ring", "a dot"])
    assert [[tile.title for tile in caption.tiles if tile.frame] for caption in look.captions] == [
        ["red star", "blue ring"],
        ["dot"],
    ]
    assert {caption.tiles[0].title for caption in look.captions} == {"winner of each patch"}
    assert re.fullmatch(r"red star left of blue ring: .*, turned round .*", look.captions[0].lines[0])
    assert look.captions[1].lines == []
    assert look.captions[0].tiles[1].paint(np.zeros((30, 30, 3), dtype=np.uint8)).shape == (30, 30, 3)
    assert "which entity wins each patch" in look.words


# --- pages and sheets


def figure(has_maps: bool) -> Figure:
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 255, (48, 90, 3), dtype=np.uint8)
    failures = [
        Failure("a <split>", "photos/a&b.png", "a <red> star " * 20, "a blue star " * 20, -0.1234, 0.5),
        Failure("other", Crop("long_name_" * 16 + ".png", (1.0, 2.0, 3.0, 4.0)), "x", "a_word_" * 20, 0.1, 0.2),
    ]
    paint = map_painter(rng.random((3, 5)))
    tile = Tile(picture, "a&b.png", paint, "some phrase of a length", notes=("+0.001", "word" * 9 + " 4%"))
    maps = [Band()] * 2
    if has_maps:
        maps = [Band(lines=["a line of numbers " * 9], tiles=[tile] * 7), Band(tiles=[tile])]
    sections = [failure_section(failure, Tile(picture, file_of(failure.image)), maps) for failure in failures]
    ends = ("low", "high") if has_maps else None
    return Figure(TITLE, "a <model>", sections, LAYOUT, ["What it is."], "How. More.", ends)


@pytest.mark.parametrize("has_maps", [pytest.param(True, marks=pytest.mark.slow), False])
def test_all_words_of_a_sheet_can_be_read(has_maps, tmp_path):
    with drawn_words() as figures:
        save_sheet(figure(has_maps), tmp_path / "sheet.png")
    assert_readable(figures)


@pytest.mark.parametrize("has_maps", [True, False])
def test_the_page_asks_for_nothing_and_has_controls_only_for_maps(has_maps, tmp_path):
    drawn = figure(has_maps)
    headings = [Section((), "Bench <1>: 5 of 7 wrong"), *drawn.sections, Section((), "Empty: 0 of 3 wrong")]
    save_page(replace(drawn, sections=headings), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|@import|url\(", text)
    assert text.count('class="shot"') == (16 if has_maps else 0)
    assert ('id="maps"' in text, 'class="ramp"' in text) == (has_maps, has_maps)
    assert re.search("<mark[^>]*>&lt;red&gt;</mark>", text)
    assert "true -0.123" in text
    assert "Empty: 0 of 3 wrong" in text


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    """The bug: on a full disk the page stayed truncated."""
    (tmp_path / "page.html").write_text("old")

    def half(path, text, **options):
        path.write_bytes(text.encode()[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(UserError, match="No space left"):
        save_page(figure(False), tmp_path / "page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert (tmp_path / "page.html").read_bytes() == b"old"


def test_a_scorer_without_maps_is_drawn_with_its_images_alone(tmp_path):
    paint(tmp_path / "red.png", "red")
    scorer = colour_encoder()
    assert not isinstance(scorer, ExplainableScorer)
    failure = Failure("s", Crop(str(tmp_path / "red.png"), (0.0, 0.0, 4.0, 5.0)), "blue", "red", 0.0, 1.0)
    failures = {"A: b/c.d": Failures(1, 1, 0, [failure]), "None": Failures(1, 0, 0, [])}
    paths = write_failures(scorer, "colours", failures, tmp_path / "out_failures")
    assert [path.name for path in paths] == ["out_failures.html", "out_failures_A_b_c.png"]
    assert 'class="shot"' not in paths[0].read_text()
    long = replace(failure, true_caption="a " * 50_000, false_caption="b" * 100_000)
    begin = time.monotonic()
    write_failures(scorer, "colours", {"Long": Failures(1, 1, 0, [long])}, tmp_path / "long")
    assert time.monotonic() - begin < 20  # regression: 40 s
    assert write_failures(scorer, "colours", {"None": Failures(1, 0, 0, [])}, tmp_path / "no") == [tmp_path / "no.html"]


# --- the command


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """COCO-spatial's layout."""
    root = tmp_path / "data"
    rng = np.random.default_rng(0)
    (root / "val2017").mkdir(parents=True)
    for number in range(6):
        pixels = rng.integers(0, 255, (40, 60, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / "val2017" / f"{number:012d}.jpg")
    texts = ("a star left of a ring", "a ring left of a star")
    one = [[number, *texts[:: 1 if number % 2 else -1]] for number in range(6)]
    write_json(root / "coco_qa_one_obj.json", one)
    write_json(root / "coco_qa_two_obj.json", one[:2])
    return root


def run(*options: Any) -> Any:
    return evaluate("compositional", *options)


@pytest.mark.slow
def test_pages_of_every_kind_of_model_lie_beside_the_results(data, tmp_path, capsys):
    weights = [
        small_checkpoint(tmp_path / "sparo" / "checkpoint.pth"),
        small_checkpoint(tmp_path / "cls" / "checkpoint.pth", "cls"),
        small_oc_checkpoint(tmp_path / "oc" / "checkpoint.pth"),
    ]
    results = run("--pretrained_weights", *weights, "--data_root", data, "--failures", 2, "--blind")
    printed = capsys.readouterr().out
    for path, result, has_maps in zip(weights, results, (True, False, True), strict=True):
        path = path.with_name(f"compositional_checkpoint_{data.name}.json")
        benchmark = result["benchmarks"]["COCO-spatial"]
        failures = benchmark["failures"]
        micro = benchmark["means"]["micro"]["accuracy"]
        assert failures["num_wrong"] == round(8 * (1 - micro / 100))
        assert len(failures["clearest"]) == 2
        assert failures["clearest"][0]["false_score"] > failures["clearest"][0]["true_score"]
        page, sheet = (path.with_name(f"{path.stem}_failures{end}") for end in (".html", "_COCO-spatial.png"))
        assert ('class="shot"' in page.read_text()) == has_maps
        with Image.open(sheet) as picture:
            assert picture.width > 700
        assert all(f"{written}\n" in printed for written in (page, sheet))
        assert json.loads(path.read_text()) == result

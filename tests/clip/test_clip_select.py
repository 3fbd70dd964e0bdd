"""Selecting slots: the score of each alone, the curve of the best together, and the command."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("open_clip")

from clip_fakes import COLOURS, ColourClip, colour_encoder, dot_product_scorer, evaluate, paint, small_checkpoint
from figures import assert_readable, drawn_words

from dino_sparo.clip import load_clip
from dino_sparo.clip.slots import select
from dino_sparo.clip.slots.select import draw, score_slots, table
from dino_sparo.clip.slots.subsets import ReducedClip, open_slots
from dino_sparo.data.scenes.patterns import SHAPES
from dino_sparo.data.sources import open_source
from dino_sparo.evaluation.features import disjoint_subsets
from dino_sparo.evaluation.slots.choice import SlotSelection, parse_slots
from dino_sparo.evaluation.slots.curve import describe_selection
from dino_sparo.image_text.evaluation.protocol import open_evaluation_images
from dino_sparo.image_text.evaluation.zero_shot import evaluate_zero_shot
from dino_sparo.image_text.prompts import TEMPLATES
from dino_sparo.image_text.scorer import DotProductScorer

SLOTS = 5
TEMPLATES_USED = TEMPLATES["scenes"][:3]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("select") / "checkpoint.pth")


def small_encoder(weights: Path, choice: SlotSelection | None = None) -> DotProductScorer:
    scorer = dot_product_scorer(load_clip(weights), batch_size=16)
    return scorer if choice is None else replace(scorer, model=ReducedClip(scorer.model, choice))


def run(*options: object) -> dict:
    return evaluate("slots select", *options)


# --- scores


@pytest.fixture(scope="module")
def scores(weights: Path) -> dict:
    source = open_evaluation_images("scenes:29:32")
    return score_slots(small_encoder(weights), source, source, list(SHAPES), TEMPLATES_USED, SLOTS)


def accuracy(weights: Path, slots: list[int]) -> float:
    source = open_evaluation_images("scenes:29:32")
    encoder = small_encoder(weights, SlotSelection(tuple(slots)))
    return evaluate_zero_shot(encoder, source, list(SHAPES), TEMPLATES_USED)["top1"]


def test_a_slots_score_is_the_accuracy_of_the_model_reduced_to_it_and_ranks_the_slots(weights, scores):
    alone = {row["slot"]: row["top1"] for row in scores["ranking"]}
    assert alone == pytest.approx({slot: accuracy(weights, [slot]) for slot in range(SLOTS)})
    assert len(set(alone.values())) > 1
    assert scores["ranking"] == sorted(scores["ranking"], key=lambda row: (-row["top1"], row["slot"]))


def test_the_curve_is_the_accuracy_of_the_model_reduced_to_the_best(weights, scores):
    ranking = [row["slot"] for row in scores["ranking"]]
    expected = [accuracy(weights, ranking[:number]) for number in range(1, SLOTS + 1)]
    assert [row["top1_choosing"] for row in scores["curve"]] == pytest.approx(expected)
    assert [row["num_kept"] for row in scores["curve"]] == list(range(1, SLOTS + 1))
    assert scores["images"] == {"num_images": 29, "num_held_out": 29, "num_corrupt": 0}
    assert scores["prompts"]["num_classes"] == len(SHAPES)


def test_chunks_change_nothing(weights, scores, monkeypatch):
    monkeypatch.setattr(select, "IMAGE_CHUNK", 7)
    source = open_evaluation_images("scenes:29:32")
    assert score_slots(small_encoder(weights), source, source, list(SHAPES), TEMPLATES_USED, SLOTS) == scores


def test_the_reported_accuracy_is_of_images_that_did_not_choose(weights, scores):
    chosen, held_out = disjoint_subsets(open_evaluation_images("scenes:29:32"), (29, 29))
    found = score_slots(small_encoder(weights), chosen, held_out, list(SHAPES), TEMPLATES_USED, SLOTS)
    assert found["images"] == {"num_images": 14, "num_held_out": 14, "num_corrupt": 0}
    best = SlotSelection(tuple(row["slot"] for row in found["ranking"][:2]))
    alone = evaluate_zero_shot(small_encoder(weights, best), held_out, list(SHAPES), TEMPLATES_USED)
    assert found["curve"][1]["top1_held_out"] == pytest.approx(alone["top1"])
    lines = table({**found, "slots": [0, 1]})
    assert "on the 14 held-out images" in lines
    assert "on the 14 images that chose" in lines


def result_of(alone: list[float], together: list[float], slots: list[int], num_classes: int = 3) -> dict:
    """A result with the same accuracies on both halves of the images."""
    ranking = sorted(range(len(alone)), key=lambda slot: -alone[slot])
    rows = [{"num_kept": k, "top1_choosing": top1, "top1_held_out": top1} for k, top1 in enumerate(together, 1)]
    return {
        "ranking": [{"slot": slot, "top1": alone[slot]} for slot in ranking],
        "curve": rows,
        "slots": slots,
        "images": {"num_images": 7, "num_held_out": 5, "num_corrupt": 0},
        "prompts": {"num_classes": num_classes},
    }


def test_the_best_number_is_the_smallest_at_the_top():
    found = result_of([1.0] * 4, [2.0, 9.0, 9.0, 4.0], [])
    assert describe_selection(found["ranking"], found["curve"], None, None)["slots"] == [0, 1]


@pytest.mark.parametrize("num_slots", [3, 10, 12])
def test_the_table_has_a_row_for_each_of_the_ten_best_slots(num_slots):
    ranking = list(reversed(range(num_slots)))
    alone, together = ([float(base + slot) for slot in range(num_slots)] for base in (10, 50))
    lines = table(result_of(alone, together, [0, 1])).splitlines()
    rows = [[float(word) for word in line.split()] for line in lines[1 : 1 + min(num_slots, 10)]]
    assert rows == [[place + 1, slot, alone[slot], together[place]] for place, slot in enumerate(ranking) if place < 10]
    assert lines[1 + len(rows)].startswith(
        "..." if num_slots > 10 else "kept 2 of 3" if num_slots == 3 else "kept 2 of 10"
    )
    assert len(lines) == 1 + len(rows) + (num_slots > 10) + 2


class TwoSlots(nn.Module):
    """Slot 1 is the colour, slot 0 is the same for every image, and for captions anything."""

    def __init__(self) -> None:
        super().__init__()
        self.colour = ColourClip()

    def encode_image(self, images: torch.Tensor, normalize: bool = True) -> torch.Tensor:
        colour = self.colour.encode_image(images)
        return torch.cat((F.normalize(torch.ones_like(colour), dim=1), colour), dim=1) / 2**0.5

    def encode_text(self, token_ids: torch.Tensor, normalize: bool = True) -> torch.Tensor:
        colour = self.colour.encode_text(token_ids)
        return torch.cat((colour.roll(1, dims=1), colour), dim=1) / 2**0.5


def test_the_slot_that_can_tell_is_found(tmp_path):
    for colour in ("red", "green", "blue"):
        paint(tmp_path / colour / "0.png", colour)
        paint(tmp_path / colour / "1.png", colour)
    paint(tmp_path / "red" / "2.png", "broken")
    encoder = replace(colour_encoder(4), model=TwoSlots())
    source = open_source(str(tmp_path))
    assert set(source.classes or []) <= set(COLOURS)
    found = score_slots(encoder, source, source, source.classes or [], ("a {} thing",), 2)
    assert found["ranking"] == [{"slot": 1, "top1": 100}, {"slot": 0, "top1": pytest.approx(100 / 3)}]
    assert [row["top1_choosing"] for row in found["curve"]] == [100, 100]
    assert found["images"] == {"num_images": 6, "num_held_out": 6, "num_corrupt": 1}


def test_features_that_are_not_finite_are_refused(tmp_path, monkeypatch):
    paint(tmp_path / "red" / "0.png", "red")
    model = TwoSlots()
    monkeypatch.setattr(model, "encode_image", lambda images: torch.full((len(images), 6), torch.nan))
    encoder = replace(colour_encoder(4), model=model)
    source = open_source(str(tmp_path))
    with pytest.raises(ValueError, match="not finite"):
        score_slots(encoder, source, source, ["red"], ("{}",), 2)


# --- the command


def test_the_command_writes_a_selection_that_fits_its_checkpoint(weights, tmp_path, capsys):
    options = ["--pretrained_weights", weights, "--data_path", "scenes:40:32", "--templates", "plain"]
    result = run(*options, "--output_dir", tmp_path, "--keep", 2)
    slots = next(tmp_path.glob("slots_*.json"))
    assert "kept 2 of 5 slots" in capsys.readouterr().out
    selection = parse_slots(str(slots))
    assert selection == SlotSelection(
        tuple(sorted(r["slot"] for r in result["ranking"][:2])), 5, result["model"]["sha256"]
    )
    assert open_slots(slots, load_clip(weights))[0].encoding_dim == 14
    assert [point["num_kept"] for point in result["curve"]] == [1, 2, 3, 4, 5]
    assert result["top1_selected"] == result["curve"][1]["top1_held_out"]
    assert result["top1_selected_on_choosing_images"] == result["curve"][1]["top1_choosing"]
    assert result["top1_all"] == result["curve"][4]["top1_held_out"]
    assert (result["images"]["num_images"], result["images"]["num_held_out"]) == (20, 20)
    assert json.loads(slots.read_text()) == result
    assert slots.with_suffix(".png").is_file()
    zero = [*options, "--slots", slots, "--output_dir", tmp_path]
    found = evaluate("zero-shot", *zero)
    halves = (result["top1_selected"], result["top1_selected_on_choosing_images"])
    assert found["top1"] == pytest.approx(sum(halves) / 2)  # the zero-shot evaluation sees both
    with pytest.raises(SystemExit, match="2"):
        run(*options, "--slots", slots)


def test_without_a_number_the_best_is_kept_and_lies_beside_the_checkpoint(tmp_path):
    weights = small_checkpoint(tmp_path / "run" / "checkpoint.pth", seed=3)
    options = ["--pretrained_weights", weights, "--data_path", "scenes:40:32", "--templates", "plain"]
    result = run(*options, "--num_images", 20)
    accuracies = [point["top1_choosing"] for point in result["curve"]]
    assert len(result["slots"]) == accuracies.index(max(accuracies)) + 1
    assert (result["images"]["num_images"], result["images"]["num_held_out"]) == (10, 10)
    assert (tmp_path / "run" / "slots_checkpoint_scenes-40-32.json").is_file()
    assert (tmp_path / "run" / "slots_checkpoint_scenes-40-32.png").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--keep", 6], "keep=6 of num_slots=5 slots; give a number from 1 to 5"),
        (["--output_dir", "slots.png"], "names a file; give the folder"),
    ],
)
def test_options_that_do_not_fit_are_refused(weights, options, message):
    with pytest.raises(ValueError, match=message):
        run("--pretrained_weights", weights, "--data_path", "scenes:40:32", *options)


@pytest.mark.parametrize(("num_slots", "num_classes"), [(1, 2), (64, 1000)])
def test_chance_stands_beside_the_bars_and_all_words_can_be_read(num_slots, num_classes, tmp_path):
    """It lay on the bars, whose heights it was near."""
    chance = 100 / num_classes
    alone = [chance * (2 - slot / num_slots) for slot in range(num_slots)]
    with drawn_words() as figures:
        draw(result_of(alone, alone, [0], num_classes), tmp_path / "slots.png")
    assert_readable(figures)
    boxes = {words.words: words.box for words in figures[0]}
    above = next(box for words, box in boxes.items() if words.startswith("chance"))
    numbers = [box.y1 for words, box in boxes.items() if words.replace(".", "").isdecimal()]
    assert above.y0 > max(numbers) - 10

"""Compositional benchmarks of 2022 to 2024: the official code's numbers, and layouts that are drawn from scenes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recent_sets
import torch

from dino_sparo.image_text.evaluation.compositional.benchmark import summarize
from dino_sparo.image_text.evaluation.compositional.discover import ImageRules, find_benchmarks
from dino_sparo.image_text.evaluation.compositional.questions import EncodedQuestions, Question, answers_to
from dino_sparo.image_text.evaluation.compositional.sets import BENCHMARKS
from dino_sparo.image_text.evaluation.protocol import ROOT, file_of, named_source
from studies.drawn_sets import draw_sets

OFFICIAL = json.loads((Path(__file__).parents[1] / "reference" / "recent_sets.json").read_text())
NUM = recent_sets.NUM
PAIRS = [Question("", (f"{n}.jpg", f"{n}b.jpg"), ("a", "b"), (0, 1)) for n in range(NUM)]


def official(name: str, questions: list[Question], tables: np.ndarray) -> dict[str, Any]:
    """The benchmark's summary if `tables` (questions, images, captions) are the scores."""
    rows = [list(dict.fromkeys(question.images)) for question in questions]
    image_of = torch.tensor([[own.index(image) for image in q.images] for q, own in zip(questions, rows, strict=True)])
    number = torch.arange(len(questions))[:, None]
    text_of = torch.arange(len(questions[0].captions)).expand(len(questions), -1)
    encoded = EncodedQuestions(questions, None, None, 100 * number + image_of, 100 * number + text_of)

    def score(_: None, image: torch.Tensor, __: None, text: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(tables)[image // 100, image % 100, text % 100]

    benchmark = BENCHMARKS[name]
    return summarize(benchmark, benchmark.outcomes(questions, answers_to(encoded, score)), 0)


def splits_of(summary: dict[str, Any], kind: str = "official") -> dict[str, float]:
    return {split: entry[kind] for split, entry in summary["splits"].items()}


def test_sugarcrepe_pp_asks_for_both_true_captions_as_its_own_code(tmp_path):
    recent_sets.sugarcrepe_pp(tmp_path)
    questions = list(BENCHMARKS["sugarcrepe++"].read(tmp_path / "data"))
    summary = official("sugarcrepe++", questions, recent_sets.tables(1, NUM, 1, 3))
    assert splits_of(summary) == splits_of(summary, "accuracy") == {"swap_att": OFFICIAL["sugarcrepe++"]["swap_att"]}


@pytest.mark.parametrize(("name", "seed"), [("cola", 2), ("bivlc", 4), ("vismin", 7)])
def test_scores_of_two_images_and_two_captions_are_those_of_the_own_code(name, seed):
    questions = [question._replace(split="object") for question in PAIRS] if name == "vismin" else PAIRS
    found = splits_of(official(name, questions, recent_sets.tables(seed, NUM, 2, 2)))
    for split, accuracy in found.items():
        if (score := split.removeprefix("object ")) in OFFICIAL[name]:
            assert accuracy == pytest.approx(OFFICIAL[name][score], abs=0.005)
    assert BENCHMARKS[name].headline in OFFICIAL[name]


def test_mmvp_vlms_ties_are_the_second_image_as_in_its_own_code(tmp_path):
    recent_sets.mmvp_vlm(tmp_path)
    assert BENCHMARKS["mmvp-vlm"].is_in(tmp_path)
    questions = list(BENCHMARKS["mmvp-vlm"].read(tmp_path))
    assert questions[0].images == ("type 0/1.jpg", "type 0/2.jpg")
    assert questions[0].captions == ("a photo of 0 0", "a photo of 0 1")
    macro = official("mmvp-vlm", questions, recent_sets.tables(3, len(questions), 2, 2))["means"]["macro"]
    assert macro["official"] == pytest.approx(OFFICIAL["mmvp-vlm"]["macro"])
    assert macro["accuracy"] < macro["official"]


def test_hard_positives_numbers_are_those_of_their_own_code():
    questions = [Question("replace/attributes", ("a", "a"), ("c", "p", "n", "n0"), (0, 1))] * NUM
    found = splits_of(official("hard-positives", questions, recent_sets.tables(5, NUM, 1, 4)))
    for score in ("augmented", "brittle"):
        assert found[f"replace/attributes/{score}"] == pytest.approx(OFFICIAL["hard-positives"][score])


def test_valse_asks_valid_foils_alone_and_has_the_number_of_its_own_code(tmp_path):
    recent_sets.valse(tmp_path)
    questions = list(BENCHMARKS["valse"].read(tmp_path / "data"))
    assert len(questions) == OFFICIAL["valse"]["count"]
    scores = recent_sets.tables(6, NUM, 1, 2)[[n for n in range(NUM) if n % 4 >= 2]]
    (accuracy,) = splits_of(official("valse", questions, scores)).values()
    assert accuracy == pytest.approx(OFFICIAL["valse"]["existence, rounded to 0.01"], abs=0.005)


def test_specs_first_maximum_is_the_answer_as_in_its_own_code_in_both_directions(tmp_path):
    recent_sets.spec(tmp_path)
    questions = list(BENCHMARKS["spec"].read(tmp_path))
    for seed, (subset, size) in enumerate(recent_sets.SPEC_SIZES.items()):
        scores = recent_sets.tables(8 + seed, NUM, 1, size)
        for direction, tables in (("image2text", scores), ("text2image", scores.transpose(0, 2, 1))):
            split = f"{subset}/{direction}"
            own = [question for question in questions if question.split == split]
            summary = official("spec", own, tables)
            assert splits_of(summary)[split] == pytest.approx(OFFICIAL["spec"][split])
            assert splits_of(summary, "accuracy")[split] < OFFICIAL["spec"][split]
            assert splits_of(summary, "chance")[split] == pytest.approx(100 / size)


# --- layouts

NEW = ("sugarcrepe++", "colorswap", "cola", "mmvp-vlm", "bivlc", "vismin", "hard-positives", "valse", "spec")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All nine sets of four scenes."""
    return draw_sets(tmp_path_factory.mktemp("drawn"), num=4, size=32)


def test_every_drawn_layout_is_found_as_one_set_with_its_images(drawn):
    found = {each.benchmark.name: each for each in find_benchmarks(list(BENCHMARKS), ImageRules(drawn))}
    counts = {name: len(each.questions) for name, each in found.items()}
    assert counts == {
        "sugarcrepe++": 8, "colorswap": 4, "cola": 4, "mmvp-vlm": 4, "bivlc": 4, "vismin": 4, "hard-positives": 12,
        "valse": 3, "spec": 8,
    }  # fmt: skip
    for each in found.values():
        names = list(dict.fromkeys(image for question in each.questions for image in question.images))
        source = named_source(ROOT, names, [file_of(name) for name in names])
        assert {source.read(index).size for index in range(len(names))} == {(32, 32)}


def test_images_in_tables_are_those_of_their_row(drawn):
    """Row 3's second image is the recoloured scene, which ColorSwap has as a file."""
    (bivlc, colours) = find_benchmarks(["bivlc", "colorswap"], ImageRules(drawn))[::-1]
    for first, second in zip(bivlc.questions, colours.questions, strict=True):
        assert first.captions == second.captions
        pictures = [
            np.asarray(named_source(ROOT, question.images, list(map(file_of, question.images))).read(1))
            for question in (first, second)
        ]
        assert np.array_equal(*pictures)

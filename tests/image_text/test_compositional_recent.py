"""Compositional benchmarks of 2022 to 2024, in layouts that are drawn from scenes; short tables, and resuming."""

import csv
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recent_sets
import torch
from clip_fakes import evaluate, small_checkpoint
from PIL import Image

from dino_sparo.data.sources import CorruptImageError
from dino_sparo.evaluation.features import WARNINGS
from dino_sparo.image_text.evaluation.compositional import command as command_module
from dino_sparo.image_text.evaluation.compositional import questions as questions_module
from dino_sparo.image_text.evaluation.compositional.benchmark import Outcome, summarize
from dino_sparo.image_text.evaluation.compositional.discover import ImageRules, find_benchmarks
from dino_sparo.image_text.evaluation.compositional.questions import (
    EncodedQuestions,
    Question,
    answers_to,
    encode_questions,
)
from dino_sparo.image_text.evaluation.compositional.sets import BENCHMARKS
from dino_sparo.image_text.evaluation.compositional.short import compare_pairs
from dino_sparo.image_text.evaluation.protocol import ROOT, file_of, named_source
from dino_sparo.runtime.faults import UserError
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
    return summarize(benchmark, benchmark.outcomes(questions, answers_to(encoded, score)))


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
    bivlc, colours = find_benchmarks(["bivlc", "colorswap"], ImageRules(drawn))
    for first, second in zip(bivlc.questions, colours.questions, strict=True):
        assert first.captions == second.captions
        pictures = [
            np.asarray(named_source(ROOT, question.images, list(map(file_of, question.images))).read(1))
            for question in (first, second)
        ]
        assert np.array_equal(*pictures)


def test_a_damaged_table_is_named_and_damage_to_its_images_is_counted(drawn, tmp_path):
    """The bug: a truncated .arrow file ended with a traceback of pyarrow."""
    tables = [next(drawn.rglob(name)) for name in ("data-00000*.arrow", "test-00000*.parquet")]
    for path in tables:
        copy = tmp_path / path.suffix / path.name
        copy.parent.mkdir()
        copy.write_bytes(path.read_bytes()[:3000])
        with pytest.raises(UserError, match=f"{path.name} is not a valid table: .*; download the file again"):
            find_benchmarks(["vismin", "bivlc"], ImageRules(copy.parent))
    content = bytearray(tables[1].read_bytes())
    content[4:40] = bytes(36)  # the head of the first column, the images
    copy = tmp_path / "damaged" / tables[1].name
    copy.parent.mkdir()
    copy.write_bytes(content)
    (found,) = find_benchmarks(["bivlc"], ImageRules(copy.parent))
    with pytest.raises(CorruptImageError, match="is not a valid table"):
        named_source(ROOT, found.questions[0].images, [str(copy)] * 2).read(0)


# --- short tables, significance, resuming


def outcomes_of(split: str, rights: list[bool]) -> list[Outcome]:
    return [Outcome(split, number, right, False) for number, right in enumerate(rights)]


def test_mcnemar_counts_the_questions_that_one_model_alone_answers():
    """Exact: p = 2 sum over k to 3 of C(13, k) / 2^13, for 10 wins and 3 losses; others add none."""
    first, second = [True] * 3 + [False] * 10 + [True] * 20, [False] * 3 + [True] * 10 + [True] * 20
    found = compare_pairs(BENCHMARKS["cola"], *(outcomes_of("image", each) for each in (first, second)), seed=0)
    assert found.p == pytest.approx(2 * sum(math.comb(13, k) for k in range(4)) / 2**13)
    assert found.value == pytest.approx(100 * 7 / 33)
    equal = compare_pairs(BENCHMARKS["cola"], *[outcomes_of("image", first)] * 2, seed=0)
    assert equal == (0.0, 0.0, 0.0, 1.0)


def test_without_a_mean_two_models_are_compared_over_all_questions():
    """The bug: pairs of attributes that are all rare have no macro mean, and --short ended with a ValueError."""
    rights = [True, False, False], [True, True, True]
    both = [[outcome for split in "ab" for outcome in outcomes_of(split, each)] for each in rights]
    assert compare_pairs(BENCHMARKS["aro-attribution"], *both, seed=0).value == pytest.approx(100 * 2 / 3)


def test_the_paired_bootstrap_draws_questions_of_both_models_together():
    """As a loop that draws questions; an unpaired interval would be about twice as wide."""
    rng = np.random.default_rng(0)
    first = {split: (rng.random(count) < 0.5).tolist() for split, count in (("swap_obj", 60), ("swap_att", 150))}
    second = {split: [right != (rng.random() < 0.2) for right in own] for split, own in first.items()}
    both = ([o for split, own in each.items() for o in outcomes_of(split, own)] for each in (first, second))
    found = compare_pairs(BENCHMARKS["sugarcrepe"], *both, seed=0)
    draws = []
    for _ in range(3000):
        rows = {split: rng.integers(0, len(own), len(own)) for split, own in first.items()}
        draws.append(
            np.mean([np.mean((np.array(second[s])[r]) * 1.0 - np.array(first[s])[r]) for s, r in rows.items()])
        )
    assert (found.low, found.high) == pytest.approx(100 * np.quantile(draws, (0.025, 0.975)), abs=1.2)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [small_checkpoint(folder / name / "checkpoint.pth", name, seed=3) for name in ("sparo", "cls")]


def test_short_tables_say_the_same_in_every_format_and_the_next_command_reads_the_csv(drawn, weights, tmp_path, capsys):
    options = ("--data_root", drawn, "--output_dir", tmp_path, "--short", "markdown", "latex", "csv", "plot")
    results = evaluate("compositional", "--model", *weights, *options, "--blind")
    stem = tmp_path / f"compositional_sparo_checkpoint_{drawn.name}_short"
    with stem.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["model"] for row in rows] == ["sparo", "cls"] * len(NEW)
    for row in rows:
        title = row["title"].removesuffix(" *")
        found = results[row["model"] == "cls"]["benchmarks"][title]
        headline = BENCHMARKS[found["benchmark"]].headline
        entry = (found["means"] | found["splits"])[headline]
        assert float(row["accuracy"]) == entry["accuracy"]
        assert float(row["blind"]) == entry["blind"]
        assert (row["p"] == "") == (row["model"] == "sparo")
    markdown, latex = stem.with_suffix(".md").read_text(), stem.with_suffix(".tex").read_text()
    shown = capsys.readouterr().out
    assert markdown in shown
    assert "* incomplete: the result files list what is missing" in shown
    assert len(markdown.splitlines()) == len(rows) + 2
    assert latex.count(r"\\") == len(rows) + 1
    assert "accuracy, \\%" in latex
    with Image.open(stem.with_suffix(".png")) as plot:
        assert plot.width > 1000
    assert not list(tmp_path.glob("*.jsonl"))


class Counting:
    """Counts the images that a scorer encodes, and stops after some calls as a killed process does."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.asked: list[str] = []
        self.calls, self.stop_after = 0, stop_after

    def __call__(self, scorer: Any, questions: Any, *more: Any) -> Any:
        self.calls += 1
        if self.stop_after is not None and self.calls > self.stop_after:
            raise KeyboardInterrupt
        self.asked += [repr(question) for question in questions]
        return encode_questions(scorer, questions, *more)


# Few of the sets, in parts of which each has some of the questions.
FEW = ("--benchmarks", "bivlc", "spec", "--chunk_images", 9, "--output_dir")


def test_a_killed_command_resumes_without_asking_a_question_twice(drawn, weights, tmp_path, monkeypatch, caplog):
    """Killed in the second model's third part, while it wrote a line."""
    options = ("--model", *weights, "--data_root", drawn, "--blind", *FEW)
    monkeypatch.setattr(questions_module, "encode_questions", whole := Counting())
    with caplog.at_level("INFO"):
        expected = evaluate("compositional", *options, tmp_path / "whole")
    for words in ("model 1 of 2, sparo: ", "model 2 of 2, cls: "):
        assert words in caplog.text
    assert re.search(r"part 2 of \d+: \d+ questions, ETA \d+:\d\d:\d\d\n", caplog.text)
    parts = whole.calls // 2
    monkeypatch.setattr(questions_module, "encode_questions", first := Counting(stop_after=parts + 2))
    with pytest.raises(KeyboardInterrupt):
        evaluate("compositional", *options, tmp_path / "out")
    journals = sorted((tmp_path / "out").glob("*.jsonl"))
    assert [len(path.read_text().splitlines()) for path in journals] == [3, parts + 1]
    journals[0].write_text(journals[0].read_text() + "[[1, 2], [")
    monkeypatch.setattr(questions_module, "encode_questions", second := Counting())
    assert evaluate("compositional", *options, tmp_path / "out") == expected
    assert sorted(first.asked + second.asked) == sorted(whole.asked)
    assert not list((tmp_path / "out").glob("*.jsonl"))


def test_a_damaged_line_is_asked_again_with_all_later_ones(drawn, weights, tmp_path, monkeypatch, caplog):
    """A full disk had left half a line between whole ones; the command ended with a JSONDecodeError."""
    options = ("--model", weights[0], "--data_root", drawn, *FEW, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(command_module, "report", lambda *_: sys.exit("killed"))
        with pytest.raises(SystemExit):
            evaluate("compositional", *options)
    (journal,) = tmp_path.glob("*.jsonl")
    expected = json.loads(next(tmp_path.glob("*.json")).read_text())
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join([*lines[:2], lines[2][:40], *lines[3:], ""]))
    monkeypatch.setattr(questions_module, "encode_questions", counting := Counting())
    (result,) = evaluate("compositional", *options)
    assert result == expected
    assert len(counting.asked) == sum(len(json.loads(line)[0]) for line in lines[2:])
    assert "line 3 is unreadable; its questions and later ones are asked again" in caplog.text


def test_a_last_model_that_cannot_be_opened_ends_the_command_before_the_first_is_asked(
    drawn, weights, tmp_path, monkeypatch
):
    """The bug: a broken file at the end of the list was found after all models before it were evaluated."""
    (tmp_path / "broken.pth").write_bytes(weights[0].read_bytes()[:5000])
    monkeypatch.setattr(questions_module, "encode_questions", counting := Counting())
    with pytest.raises(ValueError, match=r"broken\.pth is truncated"):
        evaluate("compositional", "--model", *weights, tmp_path / "broken.pth", "--data_root", drawn)
    assert counting.calls == 0


def test_a_full_disk_while_answers_are_written_ends_with_the_files_name_and_the_answers_stay(
    drawn, weights, tmp_path, monkeypatch
):
    """The bug: the error named no file, and its traceback said that it was a bug."""
    options = ("--model", weights[0], "--data_root", drawn, *FEW, tmp_path)
    opened = Path.open

    def open_full(path: Path, *how: Any, **more: Any) -> Any:
        is_third = path.suffix == ".jsonl" and how == ("a",) and path.read_text().count("\n") == 3
        return opened(Path("/dev/full") if is_third else path, *how, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_full)
        with pytest.raises(UserError, match=r"answers\.jsonl cannot be written \(No space left on device\); free some"):
            evaluate("compositional", *options)
    monkeypatch.setattr(questions_module, "encode_questions", Counting())
    (journal,) = tmp_path.glob("*.jsonl")
    assert journal.read_text().count("\n") == 3
    evaluate("compositional", *options)


def test_warnings_stay_with_their_model_and_outlive_a_kill(drawn, weights, tmp_path, monkeypatch):
    """The second model's result had the warnings of the first; after a kill a result lacked its own."""
    options = ("--model", *weights, "--data_root", drawn, *FEW, tmp_path)

    def warn(scorer: Any, questions: Any, *more: Any) -> Any:
        WARNINGS.append(scorer.model.config.readout)
        return encode_questions(scorer, questions, *more)

    monkeypatch.setattr(questions_module, "encode_questions", warn)
    with monkeypatch.context() as patch:
        patch.setattr(command_module, "report", lambda *_: sys.exit("killed"))
        with pytest.raises(SystemExit):
            evaluate("compositional", *options)
    results = evaluate("compositional", *options)
    assert [result["warnings"] for result in results] == [["sparo"], ["cls"]]


def test_answers_of_other_options_are_dropped(drawn, weights, tmp_path, monkeypatch, caplog):
    options = ("--model", weights[0], "--data_root", drawn, *FEW, tmp_path)
    monkeypatch.setattr(command_module, "report", lambda *_: sys.exit("killed"))
    with pytest.raises(SystemExit):
        evaluate("compositional", *options)
    monkeypatch.setattr(questions_module, "encode_questions", counting := Counting())
    with pytest.raises(SystemExit):
        evaluate("compositional", *options, "--img_size", 40)
    assert counting.calls
    assert "is of other questions, weights or options, and is overwritten" in caplog.text


# --- what is missing


def test_the_list_says_what_was_found_and_where_to_get_the_rest(drawn, capsys):
    evaluate("compositional", "--data_root", drawn, "--list")
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert tuple(lines) == tuple(BENCHMARKS)
    assert "4 questions in" in lines["bivlc"]
    assert "incomplete: " in lines["bivlc"]
    assert "it has 4 questions, not 2933" in lines["bivlc"]
    for part in (
        "not found; get it from https",
        "licence: MIT",
        "size: 2 MB",
        "replace_obj.json and 6 more; images in",
    ):
        assert part in lines["sugarcrepe"]
    evaluate("compositional", "--list")
    assert capsys.readouterr().out.count("not found; get it") == len(BENCHMARKS)


def test_a_named_set_that_is_missing_is_named_with_its_origin(drawn, caplog):
    find_benchmarks(["spec", "winoground"], ImageRules(drawn))
    assert "does not hold winoground: get it from https://huggingface.co/datasets/facebook/winoground" in caplog.text
    assert all(benchmark.licence and benchmark.size for benchmark in BENCHMARKS.values())


def test_every_set_has_a_row_in_the_documentation():
    page = (Path(__file__).parents[2] / "docs" / "compositional.md").read_text()
    rows = [line for line in page.split("## The sets")[1].split("## ")[0].splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall("`([^`]+)`", row.split("|")[1])} == {*BENCHMARKS}

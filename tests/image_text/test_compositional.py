"""Compositional benchmarks: every layout, accuracies by hand and as the official code's, asking, the table."""

import itertools
import json
import math
import shutil
from collections import Counter
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clip_fakes import call, colour_encoder, evaluate, paint, small_checkpoint
from compositional_files import (
    ATTRIBUTES,
    CONTROLLED_A,
    CONTROLLED_B,
    RELATIONS,
    controlled_entries,
    random_scores,
    relation_entries,
    write_json,
)
from PIL import Image
from published_layouts import older_sets
from scipy.stats import binomtest

from dino_sparo.data.sources import CorruptImageError
from dino_sparo.image_text.evaluation.compositional.benchmark import (
    Benchmark,
    Outcome,
    one_per_question,
    summarize,
    wilson,
    wilson_of_mean,
)
from dino_sparo.image_text.evaluation.compositional.command import evaluate as evaluate_all
from dino_sparo.image_text.evaluation.compositional.command import labels_of
from dino_sparo.image_text.evaluation.compositional.discover import ImageRules, LocalBenchmark, find_benchmarks
from dino_sparo.image_text.evaluation.compositional.questions import (
    Question,
    answer_questions,
    chunks,
    judge,
    with_shuffled_images,
)
from dino_sparo.image_text.evaluation.compositional.sets import BENCHMARKS, aro, vl_checklist, whatsup
from dino_sparo.image_text.evaluation.protocol import Crop, named_source

pytest.importorskip("open_clip")

NUMBERS = itertools.count()  # no two questions have one number
OFFICIAL = json.loads((Path(__file__).parents[1] / "reference" / "compositional.json").read_text())


def outcomes_of(questions: list[Question], scores: np.ndarray) -> list[Outcome]:
    matches = torch.zeros(len(questions), 1, dtype=torch.int64)
    return one_per_question(questions, judge(torch.from_numpy(scores.copy())[:, None], matches))


def of_split(split: str, right: int, tied: int, wrong: int) -> list[Outcome]:
    kinds = [(True, False)] * right + [(False, True)] * tied + [(False, False)] * wrong
    return [Outcome(split, next(NUMBERS), *kind) for kind in kinds]


# --- accuracies by hand


def test_ties_are_wrong_for_us_and_what_the_official_code_makes_of_them_stands_beside():
    """4 right, 3 tied, 1 wrong of 8: ours is 4 of 8, and 7, 5.5 or 4 of 8 officially."""
    for name, official in {"whatsup-a": 87.5, "pug-spar": 68.75, "aro-relation": 50.0}.items():
        result = summarize(BENCHMARKS[name], of_split("on", 4, 3, 1))
        split = result["splits"]["on"]
        assert (split["accuracy"], split["official"], split["num_ties"]) == (50.0, official, 3)
        assert result["means"]["micro"]["official"] == pytest.approx(official)


def test_wilsons_interval_is_scipys():
    for right, count in ((0, 7), (3, 11), (50, 100), (13, 13)):
        expected = binomtest(right, count).proportion_ci(method="wilson")
        assert wilson(right, count) == pytest.approx([100 * expected.low, 100 * expected.high])


def test_the_interval_of_a_mean_combines_wilsons_and_has_a_width_at_0_and_100_percent():
    """With a bootstrap, the interval of 7 of 7 and 0 of 6 right answers was 50 to 50 %."""
    found = wilson_of_mean([30, 10], [40, 100], [0.5, 0.5])
    error = 50 * math.sqrt(0.75 * 0.25 / 40 + 0.1 * 0.9 / 100)  # of the mean, by the binomial's variance
    assert found == pytest.approx((42.5 - 1.96 * error, 42.5 + 1.96 * error), abs=0.8)
    assert wilson_of_mean([3], [7], [1.0]) == pytest.approx(wilson(3, 7))
    low, high = wilson_of_mean([7, 0], [7, 6], [0.5, 0.5])
    assert low == pytest.approx(50 - (100 - wilson(7, 7)[0]) / 2)
    assert high == pytest.approx(50 + wilson(0, 6)[1] / 2)


def test_pairs_of_attributes_that_are_all_rare_have_no_macro_mean():
    few = summarize(BENCHMARKS["aro-attribution"], of_split("wet_dry", 1, 0, 1))
    assert few["means"].keys() == {"micro"}


def test_a_pair_that_lacks_a_picture_does_not_count():
    names = [f"mug_{preposition}_table.jpeg" for preposition in CONTROLLED_B[:3]]
    questions = [Question("", (name,), ("a", "b", "c", "d")) for name in names]
    assert whatsup.pairs_and_sets(questions, [1.0, 1.0, 1.0]) == {"pairs": 100.0}


def test_vl_checklists_mean_is_one_of_files_then_data_sets_then_dimensions_then_kinds():
    shares = {
        "Object/large/vg/obj": 1.0, "Object/large/vg/subj": 0.0, "Object/large/hake": 0.2, "Object/small/hake": 0.6,
        "Relation/action/vg": 0.8, "Attribute/color/vg": 0.4, "Attribute/size/vg": 0.0,
    }  # fmt: skip
    outcomes = [
        o for split, share in shares.items() for o in of_split(split, round(5 * share), 0, round(5 - 5 * share))
    ]
    means = summarize(BENCHMARKS["vl-checklist"], outcomes)["means"]
    objects = ((((1.0 + 0.0) / 2 + 0.2) / 2) + 0.6) / 2
    assert means["Object"]["accuracy"] == pytest.approx(100 * objects)
    assert means["Relation"]["accuracy"] == pytest.approx(80)
    assert means["Attribute"]["accuracy"] == pytest.approx(20)
    assert means["macro"]["accuracy"] == pytest.approx(100 * (objects + 0.8 + 0.2) / 3)


# --- the official code's numbers on the same random scores


def test_aros_numbers_are_those_of_its_own_code(tmp_path):
    assert len(aro.UNCOUNTED) == OFFICIAL["aro"]["num_uncounted"]
    rng = np.random.default_rng(0)
    for file, names, read in (
        ("visual_genome_relation", RELATIONS, BENCHMARKS["aro-relation"].read),
        ("visual_genome_attribution", ATTRIBUTES, BENCHMARKS["aro-attribution"].read),
    ):
        write_json(tmp_path / f"{file}.json", relation_entries(rng, names, 80))
        outcomes = outcomes_of(list(read(tmp_path)), random_scores(1, 80, 2))
        macro = summarize(BENCHMARKS["aro-" + file.split("_")[-1]], outcomes)["means"]["macro"]
        assert macro["official"] == macro["accuracy"] == pytest.approx(OFFICIAL["aro"][file]["macro"])
        assert macro["num_splits"] == OFFICIAL["aro"][file]["num_splits"]
    scores = random_scores(2, 60, 5)
    outcomes = outcomes_of([Question("order", ("a",), ("b",) * 5)] * 60, scores)
    micro = summarize(BENCHMARKS["coco-order"], outcomes)["means"]["micro"]
    assert micro["official"] == pytest.approx(OFFICIAL["aro"]["order"])
    assert micro["accuracy"] < micro["official"]


@pytest.mark.parametrize(("subset", "prepositions"), [("A", CONTROLLED_A), ("B", CONTROLLED_B)])
def test_whatsups_numbers_are_those_of_its_own_code(subset, prepositions, tmp_path):
    benchmark = BENCHMARKS[f"whatsup-{subset.lower()}"]
    entries = controlled_entries(prepositions)
    write_json(tmp_path / benchmark.files[0], entries)
    questions = list(benchmark.read(tmp_path))
    outcomes = outcomes_of(questions, random_scores(3, len(entries), 4))
    result = summarize(benchmark, outcomes)
    official = OFFICIAL["whatsup"][subset]
    assert result["means"]["micro"]["official"] == pytest.approx(official["micro"])
    assert {name: split["official"] for name, split in result["splits"].items()} == pytest.approx(official["splits"])
    found = benchmark.more(questions, [each.worth(benchmark.tie_credit) for each in outcomes])
    assert found == pytest.approx({name: official[name] for name in ("pairs", "sets")})
    ours = benchmark.more(questions, [each.worth(0.0) for each in outcomes])
    assert ours["pairs"] < found["pairs"]


def test_spatial_and_vl_checklist_numbers_are_those_of_their_own_code():
    question = Question("one object", ("a",), ("b", "c"))
    spatial = summarize(BENCHMARKS["coco-spatial"], outcomes_of([question] * 50, random_scores(4, 50, 2)))
    assert spatial["means"]["macro"]["official"] == pytest.approx(OFFICIAL["whatsup"]["spatial"])
    outcomes = outcomes_of([question._replace(split="Attribute/color/vg")] * 70, random_scores(5, 70, 2))
    accuracy = summarize(BENCHMARKS["vl-checklist"], outcomes)["splits"]["Attribute/color/vg"]["official"]
    recorded = OFFICIAL["vl_checklist"]["accuracy, rounded to four digits of a share"]
    assert recorded == f"acc: {round(accuracy / 100, 4)}"


# --- layouts


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sets before 2023."""
    return older_sets(tmp_path_factory.mktemp("drawn") / "data")


@pytest.fixture
def data(drawn: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(drawn, tmp_path / "data"))


def test_every_layout_is_found_and_read(data, caplog):
    found = {each.benchmark.name: each for each in find_benchmarks(list(BENCHMARKS), ImageRules(data))}
    assert tuple(found) == tuple(name for name in BENCHMARKS if name in found)
    counts = {name: len(each.questions) for name, each in found.items()}
    assert counts == {
        "sugarcrepe": 21, "winoground": 1, "aro-relation": 9, "aro-attribution": 30, "coco-order": 1, "flickr-order": 1,
        "vl-checklist": 1, "whatsup-a": 48, "whatsup-b": 48, "coco-spatial": 4, "gqa-spatial": 4, "pug-spar": 3,
        "scene-pairs": 8, "oc-splits": 1,
    }  # fmt: skip
    assert all(
        Path(image if isinstance(image, str) else image.name).is_file()
        for each in found.values() for question in each.questions for image in question.images
    )  # fmt: skip
    relation = found["aro-relation"].questions[0]
    assert isinstance(relation.images[0], Crop)
    assert relation.images[0].box == (1, 1, 5, 4)
    attribute = found["aro-attribution"].questions[0]
    assert attribute.split in {"red_old", "wet_dry", "rare_odd"}
    assert found["vl-checklist"].questions[0] == Question(
        "Attribute/color/vg", (str(data / "vl/vg/VG_100K/red.png"),), ("red thing", "blue thing")
    )
    pug = found["pug-spar"].questions
    assert Counter(question.split for question in pug) == {"left, right": 1, "Blue": 1, "bottom, top": 1}
    assert pug[0].captions[1] == "This is a photo of a Dog on the left and a Cat on the right of the picture"
    assert pug[1].captions[0] == "This is a photo of a Cat textured with Blue and a Dog textured with Red"
    assert found["whatsup-b"].questions[0].split == "in-front"
    assert "left out what needs swig: none of 1 images, such as 'swig/a_1.jpg'" in caplog.text
    assert "lacks 54 of 56 files" in caplog.text
    assert "replace_obj has 3 questions, not 1652" in caplog.text
    assert "https://github.com/RAIVNLab/sugar-crepe" in caplog.text


def test_vl_checklists_files_are_the_56_of_its_corpus():
    assert len(vl_checklist.FILES) == len(set(vl_checklist.FILES.values())) == 56
    assert vl_checklist.COUNTS.keys() <= vl_checklist.FILES.keys()
    kinds = Counter(split.split("/")[0] for split in vl_checklist.FILES)
    assert kinds == {"Attribute": 10, "Object": 42, "Relation": 4}


def test_missing_images_are_counted_up_to_a_share_and_beyond_it_the_message_says_where_to_get_them(data):
    (data / "coco" / "val2017" / "000000000002.jpg").unlink()
    with pytest.raises(
        ValueError, match=r"SugarCrepe: of the images 1 of 3 files, such as '000000000002\.jpg'.*sugar-crepe"
    ):
        find_benchmarks(["sugarcrepe"], ImageRules(data))
    (found,) = find_benchmarks(["sugarcrepe"], ImageRules(data, max_missing=0.4))
    assert found.with_missing_image == dict.fromkeys((question.split for question in found.questions), 1)
    assert len(found.questions) == 14
    (data / "wino" / "images" / "red.png").unlink()
    (data / "wino" / "images" / "green.png").unlink()
    with pytest.raises(ValueError, match=r"no benchmark below .* has its images; Winoground: .*huggingface"):
        find_benchmarks(["winoground"], ImageRules(data))


def test_a_benchmark_behind_a_link_is_found_and_links_in_a_circle_end(data, tmp_path):
    """Data sets often lie on another disk, with links to them."""
    root = tmp_path / "links"
    (root / "a").mkdir(parents=True)
    (root / "a" / "wino").symlink_to(data / "wino")
    (root / "a" / "up").symlink_to(root)
    (root / "b").symlink_to(data / "wino")
    assert [each.title for each in find_benchmarks(["winoground"], ImageRules(root))] == ["Winoground"]


def test_a_folder_without_benchmarks_names_the_files_it_looked_for(tmp_path):
    with pytest.raises(ValueError, match=r"holds no benchmark; .*oc-splits; .* --list says") as refusal:
        find_benchmarks(list(BENCHMARKS), ImageRules(tmp_path))
    assert len(str(refusal.value)) < 600  # the bug: 7,000 letters of sources and licences
    (tmp_path / "labels.csv").write_text("a,b\n")
    origin = r"holds no benchmark; .*pug-spar \(from https.*; licence: .*; size: .*; layout: labels\.csv"
    with pytest.raises(ValueError, match=origin):
        find_benchmarks(["pug-spar"], ImageRules(tmp_path))
    with pytest.raises(ValueError, match="is not a folder"):
        find_benchmarks(list(BENCHMARKS), ImageRules(tmp_path / "gone"))


def test_a_box_is_cut_out_and_one_that_shows_nothing_of_the_image_is_an_unreadable_image(tmp_path):
    image = Image.new("RGB", (8, 6), "red")
    image.paste("blue", (2, 1, 5, 4))
    image.save(tmp_path / "a.png")
    names = [Crop("a.png", (2.0, 1.0, 5.0, 4.0)), Crop("a.png", (3.0, 1.0, 3.0, 4.0)), "a.png"]
    names += [Crop("a.png", (8.0, 1.0, 9.0, 4.0)), Crop("a.png", (1.0, -4.0, 2.0, 0.0))]
    names.append(Crop("a.png", (-3.0, 4.0, 1.0, 9.0)))
    source = named_source(tmp_path, names, ["a.png"] * 6)
    assert (source.read(0).size, source.read(0).getcolors()) == ((3, 3), [(9, (0, 0, 255))])
    assert source.read(2).size == (8, 6)
    assert source.read(5).size == (4, 5)  # a box that reaches beyond the image shows black there
    phone = Image.Exif()
    phone[0x0112] = 6  # shown turned by 90 degrees, but boxes count stored pixels
    image.save(tmp_path / "a.png", exif=phone)
    assert (source.read(0).getcolors(), source.read(2).size) == ([(9, (0, 0, 255))], (6, 8))
    for index, message in ((1, "has no area"), (3, "lies outside of the image, 8 x 6"), (4, "outside")):
        with pytest.raises(CorruptImageError, match=message):
            source.read(index)


# --- asking


def test_questions_about_one_image_are_asked_together_and_no_part_has_more_images_than_allowed():
    questions = [Question("", (name,), ("x", "y")) for name in "bacabcddae"]
    parts = chunks(questions, 4)
    assert sorted(index for part in parts for index in part) == list(range(len(questions)))
    assert ["".join(questions[index].images[0] for index in part) for part in parts] == ["aaab", "bcc", "dde"]
    assert chunks([Question("", ("e", "f"), ("x", "y"), (0, 1))], 1) == [[0]]


@pytest.mark.parametrize("chunk_images", [2, 3, 100])
def test_answers_do_not_depend_on_the_parts(chunk_images, tmp_path):
    for colour in ("red", "green", "blue", "broken"):
        paint(tmp_path / f"{colour}.png", colour)
    colours = ["red", "green", "blue", "red", "broken", "green"]
    texts = [("red", "blue"), ("blue", "green"), ("a thing", "A thing ."), ("red", "red"), ("a", "b"), ("green", "x")]
    questions = [
        Question("s", (str(tmp_path / f"{colour}.png"),), text) for colour, text in zip(colours, texts, strict=True)
    ]
    found = answer_questions(colour_encoder(), questions, chunk_images)
    answered = [answer for answer in found if answer]
    assert [answer is not None for answer in found] == [True, True, True, True, False, True]
    assert [answer.text for answer in answered] == [True, False, False, False, True]
    assert [answer.text_tied for answer in answered] == [False, False, True, True, False]
    assert [answer.marks["alike"] for answer in answered] == [False, False, False, True, False]
    long = questions[0]._replace(captions=("red " * 100, "blue"))
    found = answer_questions(colour_encoder(), [long, questions[0]], 5)
    assert [answer.marks["truncated"] for answer in found if answer] == [True, False]


def test_shuffled_images_are_those_of_other_questions_of_the_split():
    questions = [Question(split, (f"{split}{number}",), ("x", "y")) for split in "ab" for number in range(7)]
    split = attrgetter("split")
    shuffled = with_shuffled_images(questions, 0, split)
    for before, after in zip(questions, shuffled, strict=True):
        assert after.images != before.images
        assert after.images[0][0] == before.split
    assert Counter(q.images for q in shuffled) == Counter(q.images for q in questions)
    assert shuffled == with_shuffled_images(questions, 0, split) != with_shuffled_images(questions, 1, split)


def test_images_of_whatsup_are_exchanged_among_all_questions_as_a_split_is_the_answer():
    """The bug: within a preposition every other image shows the same one, so looking scored 100 % without the image."""
    prepositions = ("left", "right", "on", "under")
    questions = [
        Question(word, (f"{thing}_{word}_table.jpeg",), prepositions) for word in prepositions for thing in range(50)
    ]
    shuffled = with_shuffled_images(questions, 0, BENCHMARKS["whatsup-a"].blind_group)
    same = sum(f"_{question.split}_" in question.images[0] for question in shuffled)
    assert 25 < same < 75  # of 200, by chance a quarter


def test_each_benchmark_has_its_own_marks_and_the_control_has_the_other_questions_images(tmp_path):
    others = {"red": "green", "green": "blue", "blue": "red"}
    for colour in others:
        paint(tmp_path / f"{colour}.png", colour)
    long = " and so on" * 40
    easy = [Question("s", (str(tmp_path / f"{one}.png"),), (one + long, other)) for one, other in others.items()]
    texts = [("a red cup", "a blue cup"), ("blue", "green" + long), ("a", "b")]  # right, wrong, a tie
    hard = [question._replace(captions=text) for question, text in zip(easy, texts, strict=True)]
    more = lambda _, worth: {"sum": sum(worth)}  # noqa: E731
    counted = Benchmark("b", "B", (), lambda folder: [], (), "", tie_credit=0.5, more=more)
    nothing = Counter[str]()
    local = [
        LocalBenchmark(counted, tmp_path, title, tmp_path, questions, nothing, nothing, [])
        for title, questions in (("easy", easy), ("hard", hard))
    ]
    result, *_ = evaluate_all(colour_encoder(), local, 100, seed=0, blind=True, num_failures=0)
    first, second = (result["benchmarks"][title] for title in ("easy", "hard"))
    assert (first["splits"]["s"]["accuracy"], first["splits"]["s"]["blind"]) == (100, 0)
    assert [each["splits"]["s"]["num_truncated"] for each in (first, second)] == [3, 1]
    assert (second["means"]["sum"]["accuracy"], second["means"]["sum"]["official"]) == (1, 1.5)


def test_numbers_of_images_may_have_letters(tmp_path):
    write_json(tmp_path / "vg_qa_one_obj.json", [["n161313", "a dog left", "a dog right"], [12, "a", "b"]])
    questions = list(BENCHMARKS["gqa-spatial"].read(tmp_path))
    assert [question.images for question in questions] == [("n161313.jpg",), ("12.jpg",)]


def test_sugarcrepes_questions_before_they_were_refined_are_no_second_benchmark(tmp_path):
    for name in ("data", "data_unrefined"):
        write_json(tmp_path / name / "swap_obj.json", {})
    assert BENCHMARKS["sugarcrepe"].is_in(tmp_path / "data")
    assert not BENCHMARKS["sugarcrepe"].is_in(tmp_path / "data_unrefined")


# --- the command


def run(*options: Any) -> Any:
    return evaluate("compositional", *options)


@pytest.mark.slow
def test_one_table_and_one_result_per_model(data, tmp_path, capsys):
    weights = [small_checkpoint(tmp_path / name / "checkpoint.pth", name, seed=3) for name in ("sparo", "cls")]
    options = ("--pretrained_weights", *weights, "--data_root", data, "--chunk_images", 4, "--blind")
    results = run(*options)
    for path, result in zip(weights, results, strict=True):
        assert json.loads((path.parent / f"compositional_checkpoint_{data.name}.json").read_text()) == result
    crepe = results[0]["benchmarks"]["SugarCrepe"]
    assert crepe["means"].keys() == {"macro", "replace", "swap", "add", "micro"}
    split = crepe["splits"]["swap_att"]
    assert split.keys() == {
        "accuracy", "interval_95", "official", "chance", "num_questions", "num_ties", "num_alike", "num_truncated",
        "num_without_image", "num_with_empty_caption", "blind",
    }  # fmt: skip
    assert not crepe["complete"]
    assert results[0]["benchmarks"]["scene-pairs"]["complete"]
    assert results[0]["benchmarks"]["What'sUp A"]["means"].keys() == {"macro", "micro", "pairs", "sets"}
    assert results[0]["model"] != results[1]["model"]
    printed = capsys.readouterr().out
    heads = printed.splitlines()[0]
    assert heads.index("sparo") < heads.index("cls")
    row = next(line for line in printed.splitlines() if line.strip().startswith("swap_att"))
    assert row.split()[:2] == ["swap_att", "3"]
    assert "macro, official ties" in printed
    assert "macro, shuffled images" in printed
    assert "* SugarCrepe: " in printed


def test_a_benchmark_without_a_readable_image_is_named_and_does_not_end_the_others(data, tmp_path, capsys):
    """Before, the whole run ended, after all other benchmarks had been computed."""
    for path in (data / "coco" / "val2017").iterdir():
        path.write_bytes(b"no image")
    weights = small_checkpoint(tmp_path / "checkpoint.pth")
    names = ("--pretrained_weights", weights, "--data_root", data, "--benchmarks", "coco-spatial")
    (result,) = run(*names, "gqa-spatial", "--blind")
    assert result["benchmarks"].keys() == {"GQA-spatial"}
    assert result["left_out"].keys() == {"COCO-spatial"}
    assert "* COCO-spatial: left out: none of the images in" in capsys.readouterr().out
    with pytest.raises(ValueError, match="cannot be read"):
        run(*names)


def test_a_split_of_which_nothing_is_left_is_named_and_scores_of_one_question_count_it_each(data, tmp_path):
    """Of Winoground a second example has no image; COCO-spatial has both images of its second split broken."""
    examples = data / "wino" / "examples.jsonl"
    line = json.loads(examples.read_text())
    examples.write_text(f"{json.dumps(line)}\n{json.dumps({**line, 'image_0': 'gone', 'collapsed_tag': 'Both'})}\n")
    write_json(data / "whatsup" / "coco_qa_two_obj.json", [[9, "red left", "blue left"]])
    paint(data / "coco" / "val2017" / f"{9:012d}.jpg", "broken")
    weights = small_checkpoint(tmp_path / "checkpoint.pth")
    names = ("--benchmarks", "winoground", "coco-spatial", "--max_missing", 0.5)
    (result,) = run("--pretrained_weights", weights, "--data_root", data, *names)
    wino, spatial = (result["benchmarks"][title] for title in ("Winoground", "COCO-spatial"))
    assert [split["num_without_image"] for split in wino["splits"].values()] == [1, 1, 1]
    assert wino["num_without_image"] == 1
    assert spatial["splits"].keys() == {"one object"}
    assert "nothing is left of two objects" in spatial["lacks"]


def test_captions_for_the_parser_are_written_without_a_model(data, tmp_path):
    path = tmp_path / "captions.txt"
    assert run("--data_root", data, "--write_captions", path) == []
    lines = path.read_text().splitlines()
    assert len(lines) == len(set(lines))
    assert "This is a photo of a Dog on the left and a Cat on the right of the picture" in lines
    assert {"a red thing", "red thing 4", "blue thing"} <= set(lines)


def test_mistakes_end_before_anything_is_computed(data, tmp_path):
    with pytest.raises(ValueError, match="--data_root is empty"):
        run()
    with pytest.raises(ValueError, match="--model is empty"):
        run("--data_root", data)
    with pytest.raises(ValueError, match=r"gone\.pth: there is no such file"):
        run("--data_root", data, "--pretrained_weights", small_checkpoint(tmp_path / "a.pth"), tmp_path / "gone.pth")
    with pytest.raises(ValueError, match="--benchmarks no_such is unknown; there are sugarcrepe, sugarcrepe"):
        call("compositional", ["--benchmarks", "no_such", "--data_root", data])


def test_models_are_called_by_their_folder_or_file_and_numbered_where_that_is_one_name():
    assert labels_of(["runs/clip/checkpoint.pth", "ViT-B-32.pt"]) == ["clip", "ViT-B-32"]
    assert labels_of(["a/clip/checkpoint.pth", "b/clip/checkpoint.pth"]) == ["1 clip", "2 clip"]

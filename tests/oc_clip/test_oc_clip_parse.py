"""`dino-sparo parse`: any data with captions -> a file of graphs; resumed, counted, drawn from annotations."""

import csv
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refused

from dino_sparo.__main__ import main
from dino_sparo.data.scenes.images import Scenes
from dino_sparo.image_text.pairs.sources import open_pairs
from dino_sparo.oc_clip.graphs.files import PARSERS, open_graphs
from dino_sparo.oc_clip.graphs.graph import LookupCounts, Relation, SceneGraph
from dino_sparo.oc_clip.parsers import Outcome
from dino_sparo.oc_clip.parsers.command import Report, parse_rows
from dino_sparo.oc_clip.parsers.rows import CAPTION_KEYS, Row, draw_regions, open_rows, region_graph, texts_in
from dino_sparo.oc_clip.parsers.templates import TemplateParser, parse_caption
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.lock import OutputDirError


def parse(captions: Path | str, output: Path, *options: str) -> dict[str, Any]:
    summary: dict[str, Any] = main(["parse", "--captions", str(captions), "--output", str(output), *options])
    return summary


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# What is read.


def test_a_table_with_images_becomes_a_table_of_pairs_with_graphs(tmp_path: Path) -> None:
    scenes = Scenes(5, 24)
    (tmp_path / "data").mkdir()
    with (tmp_path / "data" / "t.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["file", "caption"])
        for index in range(5):
            scenes.read(index).save(tmp_path / "data" / f"{index}.png")
            table.writerow([f"{index}.png", scenes.caption(index)])
    output = tmp_path / "graphs" / "g.jsonl"
    summary = parse(tmp_path / "data" / "t.csv", output)
    pairs, graphs = open_pairs(str(output)), open_graphs(str(output))
    assert len(pairs) == 5
    for index in range(5):
        assert pairs.read_pair(index)[1] == [scenes.caption(index)]
        expected = open_graphs("templates")(scenes.caption(index))
        assert graphs.lookup(scenes.caption(index)) == (expected, LookupCounts(captions=1))
    assert summary["counts"]["captions"] == 5
    assert summary["complete"]


def test_rows_that_are_equal_are_written_once(tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("a dog\n\n a dog\na cat on a mat\n")
    parse(tmp_path / "c.txt", tmp_path / "g.jsonl")
    assert [line["caption"] for line in lines_of(tmp_path / "g.jsonl")] == ["a dog", "a cat on a mat"]
    (tmp_path / "t.jsonl").write_text("".join(f'{{"image": "{i}.png", "caption": "a dog"}}\n' for i in (1, 2, 1)))
    parse(tmp_path / "t.jsonl", tmp_path / "h.jsonl")
    assert [line["image"] for line in lines_of(tmp_path / "h.jsonl")] == ["1.png", "2.png"]


def test_all_captions_that_scenes_may_have_are_parsed(tmp_path: Path) -> None:
    parse("scenes:13:24", tmp_path / "g.jsonl")
    graphs = open_graphs(str(tmp_path / "g.jsonl"))
    source = open_pairs("scenes:13:24")
    for index in range(13):
        for caption in source.captions_of(index):
            graph, counts = graphs.lookup(caption)
            assert graph.entities
            assert counts.missing == 0


COCO = {
    "info": {"description": "COCO", "caption": "COCO"},
    "images": [{"id": 3, "file_name": "3.jpg"}],
    "annotations": [{"image_id": 3, "caption": "a dog"}, {"image_id": 3, "caption": "a cat"}],
}


@pytest.mark.parametrize(
    "content",
    [
        {"3": {"filename": "3.jpg", "caption": "a dog", "negative_caption": "a cat"}},  # SugarCrepe
        [{"image_path": "3.jpg", "true_caption": "a dog", "false_caption": "a cat", "relation_name": "on"}],  # ARO
        [["vg/3.jpg", {"POS": ["a dog"], "NEG": ["a cat"]}]],  # VL-CheckList
        [{"image_path": "3.jpg", "caption_options": ["a dog", "a cat"]}],  # What'sUp
        [[3, "a dog", "a cat"]],  # What'sUp, COCO and Visual Genome
        {"images": [{"filename": "3.jpg", "sentences": [{"raw": "a dog", "tokens": ["a"]}, {"raw": "a cat"}]}]},
        COCO,
        ["a dog", "a cat"],
    ],
    ids=["sugarcrepe", "aro", "vl-checklist", "whatsup", "whatsup coco", "karpathy", "coco", "list"],
)
def test_true_and_false_captions_of_benchmarks_are_found(tmp_path: Path, content: Any) -> None:
    (tmp_path / "c.json").write_text(json.dumps(content))
    assert [row.caption for row in open_rows(str(tmp_path / "c.json"), tmp_path)] == ["a dog", "a cat"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("c.txt", "\N{ZERO WIDTH NO-BREAK SPACE}a dog\n a cat \n"),  # a mark at the start, which is no part of it
        ("examples.jsonl", '{"id": 0, "caption_0": "a dog", "caption_1": "a cat"}\n'),  # searched like JSON
    ],
)
def test_lines_are_captions_or_hold_some(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert list(open_rows(str(tmp_path / name), tmp_path)) == [Row("a dog"), Row("a cat")]


def test_annotations_of_coco_give_images_where_their_folder_is_given(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps(COCO))
    rows = open_rows(str(tmp_path / "c.json"), tmp_path, image_folder=str(tmp_path / "images"))
    assert list(rows) == [Row("a dog", "images/3.jpg"), Row("a cat", "images/3.jpg")]


def test_names_of_image_files_and_words_under_other_keys_are_no_captions() -> None:
    content = [{"caption": ["a.jpg", " a dog "], "tokens": ["a", "dog"], "title": "x"}, "3.PNG", "", 7, None]
    assert list(texts_in(content, CAPTION_KEYS)) == ["a dog"]


def test_json_has_captions_under_any_key_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"questions": ["a dog"]}')
    assert list(open_rows(str(tmp_path / "c.json"), tmp_path)) == []
    rows = open_rows(str(tmp_path / "c.json"), tmp_path, caption_key="questions")
    assert list(rows) == [Row("a dog")]


# Going on.


class Stopping(TemplateParser):
    """A parser whose process ends after some captions."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def parse_all(self, captions: Iterator[str]) -> Iterator[Outcome]:
        for done, caption in enumerate(captions):
            if done == self.number:
                raise KeyboardInterrupt
            yield Outcome(parse_caption(caption))


def test_a_run_that_was_ended_goes_on_to_the_same_file(tmp_path: Path) -> None:
    captions = [Row(f"a dog on mat {number}") for number in range(11)]

    def run(output: Path, parser: TemplateParser) -> dict[str, Any]:
        return parse_rows(captions, parser, output, Report(16, 16))

    whole, torn = tmp_path / "whole.jsonl", tmp_path / "torn.jsonl"
    summary = run(whole, TemplateParser())
    with pytest.raises(KeyboardInterrupt):
        run(torn, Stopping(5))
    assert not json.loads((tmp_path / "torn.jsonl.summary.json").read_text())["complete"]
    with torn.open("a") as file:
        file.write('{"caption": "half a')
    again = run(torn, TemplateParser())
    assert torn.read_bytes() == whole.read_bytes()
    assert again["counts"] == summary["counts"]
    assert again["this_run"]["parsed"] == 6


def test_a_second_run_with_the_same_output_is_refused(tmp_path: Path) -> None:
    """The bug: two runs interleaved, and the file was called complete with nearly twice the lines."""
    captions = [Row(f"a dog on mat {number}") for number in range(5)]
    output = tmp_path / "g.jsonl"

    class Interrupting(TemplateParser):
        def parse_all(self, captions: Iterator[str]) -> Iterator[Outcome]:
            with pytest.raises(OutputDirError, match=r"--output .*g\.jsonl is in use by another run"):
                parse_rows([Row("a cat")], TemplateParser(), output, Report(16, 16))
            parse_rows([Row("a cat")], TemplateParser(), tmp_path / "other.jsonl", Report(16, 16))
            yield from super().parse_all(captions)

    parse_rows(captions, Interrupting(), output, Report(16, 16))
    assert [line["caption"] for line in lines_of(output)] == [row.caption for row in captions]
    assert not list(tmp_path.glob("*.lock"))


def test_a_caption_in_several_lines_counts_once(tmp_path: Path) -> None:
    rows = [Row("a dog on a mat", "1.png"), Row("a dog on a mat", "2.png"), Row("a cat", "3.png")]
    output = tmp_path / "g.jsonl"
    first = parse_rows(rows, TemplateParser(), output, Report(16, 16))
    output.write_bytes(output.read_bytes() * 2)
    for summary in (first, parse_rows(rows, TemplateParser(), output, Report(16, 16))):
        assert summary["counts"]["captions"] == open_graphs(str(output)).record["captions"] == 2
        assert summary["counts"]["without_relation"] == 1


def test_a_full_disk_is_named_with_file_and_remedy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The bug: the message named neither."""
    (tmp_path / "c.txt").write_text("".join(f"a dog on mat {number}\n" for number in range(200)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(SystemExit, match="1"):
            parse(tmp_path / "c.txt", tmp_path / "g.jsonl")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "free some space" in caplog.messages[-1]
    assert str(tmp_path / "g.jsonl") in caplog.messages[-1]
    assert parse(tmp_path / "c.txt", tmp_path / "g.jsonl")["complete"]
    assert len(lines_of(tmp_path / "g.jsonl")) == 200


def test_graphs_of_two_parsers_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.txt").write_text("a dog\n")
    parse(tmp_path / "c.txt", tmp_path / "g.jsonl")
    other = TemplateParser()
    other.record = {"parser": "llm", "model": "m"}
    with pytest.raises(ValueError, match=r"was written by \{'parser': 'templates'\}, not by .*give another --output"):
        parse_rows([Row("a dog")], other, tmp_path / "g.jsonl", Report(16, 16))


@pytest.mark.parametrize("options", [("--caption_key", "nobody"), ("--parser", "spacy")])
def test_a_run_that_cannot_begin_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    class Broken:
        def __call__(self, caption: str) -> SceneGraph:
            raise UserError("the model cannot be loaded")

        def parse_all(self, captions: Iterator[str]) -> Iterator[SceneGraph]:
            return (self(caption) for caption in captions)

    monkeypatch.setitem(PARSERS, "spacy", Broken)
    (tmp_path / "t.csv").write_text("image,caption\n1.png,a dog\n")
    with pytest.raises(SystemExit, match="1"):
        parse(tmp_path / "t.csv", tmp_path / "g.jsonl", *options)
    assert [path.name for path in tmp_path.glob("g.jsonl*")] == []


def test_an_output_without_a_line_may_be_written_by_another_parser(tmp_path: Path) -> None:
    stopped = Stopping(0)
    stopped.record = {"parser": "llm", "model": "m"}
    with pytest.raises(KeyboardInterrupt):
        parse_rows([Row("a dog")], stopped, tmp_path / "g.jsonl", Report(16, 16))
    assert (tmp_path / "g.jsonl").read_bytes() == b""
    parse_rows([Row("a dog")], TemplateParser(), tmp_path / "g.jsonl", Report(16, 16))
    assert lines_of(tmp_path / "g.jsonl")[0]["entities"] == ["a dog"]


def test_nothing_is_added_to_a_file_of_another_program(tmp_path: Path) -> None:
    table = tmp_path / "t.jsonl"
    table.write_text('{"caption": "a dog"}')
    with refused(f"{table} exists without its {table}.summary.json"):
        parse(table, table)
    assert table.read_text() == '{"caption": "a dog"}'


def test_the_summary_counts_what_the_file_will_lose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.txt").write_text("...\na cat on a mat in a room\n")
    summary = parse(tmp_path / "c.txt", tmp_path / "g.jsonl", "--max_nodes", "2")
    assert summary == json.loads((tmp_path / "g.jsonl.summary.json").read_text())
    assert summary["counts"] == {
        **{"captions": 2, "whole_caption": 1, "nodes": 1, "dangling": 1, "loops": 0, "relations": 0},
        "without_relation": 1,
    }
    assert "2 captions, 1 as one entity, 1 entities beyond the cap" in capsys.readouterr().out
    assert len(lines_of(tmp_path / "g.jsonl")[1]["entities"]) == 3


def test_rows_that_are_left_out_are_counted_with_their_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.csv").write_text(
        "image,caption\n1.png,a dog on a mat\n2.png,\n3.png,  \n1.png,a dog on a mat\n4.png,x\n"
    )
    summary = parse(tmp_path / "t.csv", tmp_path / "g.jsonl")
    assert {name: summary["this_run"][name] for name in ("rows", "parsed", "without_caption", "repeated")} == {
        **{"rows": 5, "parsed": 2, "without_caption": 2, "repeated": 1}
    }
    printed = capsys.readouterr().out
    assert "left out of 5 rows: 2 without a caption and 1 the same as an earlier row" in printed
    assert "2 captions\n1 captions have no relation" in printed


def test_the_end_shows_the_first_captions_and_their_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.txt").write_text("a dog on a mat\na cat\na car\na bus\n")
    for _ in ("from the captions", "from the output that is there"):
        parse(tmp_path / "c.txt", tmp_path / "g.jsonl")
        printed = capsys.readouterr().out
        assert "  a dog on a mat\n    entities:  dog, mat\n    relations: on(dog, mat)\n" in printed
        assert "  a car\n    entities:  car\n    relations: none\n" in printed
        assert "bus" not in printed


def test_one_caption_can_be_looked_at_without_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    graph = main(["parse", "--caption", "a red star left of a ring"])
    printed = "    entities:  red star, ring\n    relations: left of(red star, ring)\n"
    assert capsys.readouterr().out == printed
    assert graph["entities"] == ["red star", "ring"]
    with refused("draws captions and reads none"):
        main(["parse", "--caption", "a dog", "--parser", "vg"])
    with refused("--output is missing"):
        main(["parse", "--captions", "c.txt"])


def test_lines_whose_captions_are_gone_from_the_input_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "c.txt").write_text("a dog\na cat\n")
    parse(tmp_path / "c.txt", tmp_path / "g.jsonl")
    assert "lines of" not in caplog.text
    (tmp_path / "c.txt").write_text("a dog\na car\n")
    summary = parse(tmp_path / "c.txt", tmp_path / "g.jsonl")
    assert "1 lines of" in caplog.text
    assert "For a file of this input alone give another --output" in caplog.text
    assert summary["this_run"]["lines_of_other_rows"] == 1
    assert len(lines_of(tmp_path / "g.jsonl")) == 3


def test_a_language_model_needs_a_name_and_one_place_to_run(tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("a dog\n")
    for options in ((), ("--model", "m"), ("--model", "m", "--local", "--server", "http://x")):
        with refused("give --model, and either --server URL or --local"):
            parse(tmp_path / "c.txt", tmp_path / "g.jsonl", "--parser", "llm", *options)


# Annotated graphs.

REGIONS = [
    {
        "image_id": 7,
        "regions": [
            {
                "region_id": 1,
                "phrase": "A white cat on the table.",
                "objects": [{"object_id": 11, "name": "cat"}, {"object_id": 12, "name": "table"}],
                "relationships": [{"predicate": "ON", "subject_id": 11, "object_id": 12}],
            },
            {"region_id": 2, "phrase": "the wall is red", "objects": [], "relationships": []},
        ],
    },
    {"image_id": 8, "regions": [{"region_id": 3, "phrase": "a tree", "objects": [], "relationships": []}]},
]
SCENE_GRAPHS = {
    "2407890": {
        "width": 640,
        "objects": {
            "1": {"name": "chair", "attributes": ["brown"], "relations": [{"name": "to the left of", "object": "2"}]},
            "2": {"name": "table", "attributes": [], "relations": {"5": {"name": "near", "object": "1"}}},
        },
    },
    "n13": {"objects": {str(i): {"name": f"thing {i}", "relations": []} for i in range(5)}},
    "n14": {"objects": {}},
}


def test_two_regions_of_visual_genome_make_a_caption_with_both_graphs(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps(REGIONS))
    parse(tmp_path / "r.json", tmp_path / "g.jsonl", "--parser", "vg", "--image_folder", str(tmp_path / "images"))
    (line,) = lines_of(tmp_path / "g.jsonl")
    assert line["image"] == "images/7.jpg"
    assert line["caption"] in (
        "A photo of a white cat on the table and a wall is red",
        "A photo of a wall is red and a white cat on the table",
    )
    entities = line["entities"]
    assert sorted(entities) == ["a white cat", "the table", "wall is red"]
    assert line["relationships"] == [
        {"relationship": "on", "subject": entities.index("a white cat"), "object": entities.index("the table")}
    ]


def test_a_relation_of_an_object_that_its_region_lacks_is_left_out() -> None:
    region = {
        "phrase": "cat and dog",
        "objects": [{"object_id": 1, "name": "cat"}],
        "relationships": [{"predicate": "near", "subject_id": 1, "object_id": 2}],
    }
    assert region_graph(region) == SceneGraph(("cat",))


def test_one_relation_of_gqa_or_three_objects_make_a_caption(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(json.dumps(SCENE_GRAPHS, indent=1))
    parse(tmp_path / "s.json", tmp_path / "g.jsonl", "--parser", "gqa", "--captions_per_image", "20")
    lines = lines_of(tmp_path / "g.jsonl")
    related = {line["caption"] for line in lines if line["relationships"]}
    assert related == {"A photo of chair to the left of table", "A photo of table near chair"}
    for line in lines:
        if not line["relationships"]:
            assert len(set(line["entities"])) == 3
            assert line["caption"] == f"A photo of {', '.join(line['entities'])}"
    graphs = open_graphs(str(tmp_path / "g.jsonl"))
    assert graphs("A photo of table near chair") == SceneGraph(("table", "chair"), (Relation(0, "near", 1),))


def test_draws_depend_on_the_seed_and_the_image_alone(tmp_path: Path) -> None:
    objects = {str(i): {"name": f"thing {i}", "relations": []} for i in range(50)}
    many = {f"n{number}": {"objects": objects} for number in range(5)}
    (tmp_path / "s.json").write_text(json.dumps(many))
    (tmp_path / "less.json").write_text(json.dumps({key: many[key] for key in ("n3", "n1")}))
    for name, data, seed in (("a", "s", "0"), ("b", "s", "0"), ("c", "s", "1"), ("d", "less", "0")):
        options = ("--parser", "gqa", "--seed", seed, "--image_folder", str(tmp_path))
        parse(tmp_path / f"{data}.json", tmp_path / f"{name}.jsonl", *options)
    captions = {name: {x["image"]: x["caption"] for x in lines_of(tmp_path / f"{name}.jsonl")} for name in "abcd"}
    assert captions["a"] == captions["b"] != captions["c"]
    assert captions["d"] == {image: captions["a"][image] for image in ("n3.jpg", "n1.jpg")}


def test_excluded_images_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(json.dumps(SCENE_GRAPHS))
    (tmp_path / "list.txt").write_text("images/2407890.jpg\n\n")
    options = ("--parser", "gqa", "--exclude_images", str(tmp_path / "list.txt"))
    parse(tmp_path / "s.json", tmp_path / "g.jsonl", *options)
    assert all(not line["relationships"] for line in lines_of(tmp_path / "g.jsonl"))


def test_the_same_words_annotated_in_two_ways_keep_one_graph(tmp_path: Path) -> None:
    other = json.loads(json.dumps(REGIONS[0]))
    other["image_id"], other["regions"][0]["relationships"] = 9, []
    (tmp_path / "r.json").write_text(json.dumps([REGIONS[0], other]))
    parse(tmp_path / "r.json", tmp_path / "g.jsonl", "--parser", "vg", "--captions_per_image", "20")
    assert open_graphs(str(tmp_path / "g.jsonl"))(lines_of(tmp_path / "g.jsonl")[0]["caption"]).relations


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("vg", SCENE_GRAPHS, "is not a file of vg, which is a list of images"),
        ("gqa", REGIONS, "is not a file of gqa, which is an object with one entry per image"),
        ("vg", [7], "is not a file of vg, which is a list of images with image_id; found [7]"),
        ("vg", [{"image_id": 7}], "image 0, '7', is not annotated in the format of vg (KeyError"),
        ("gqa", {"n14": {"objects": {}}}, "none of the 0 rows has a caption"),
        ("gqa", "text", "is not a file of gqa"),
    ],
)
def test_annotations_of_another_form_are_refused(tmp_path: Path, kind: str, content: Any, message: str) -> None:
    (tmp_path / "x.json").write_text(json.dumps(content))
    with refused(message):
        parse(tmp_path / "x.json", tmp_path / "g.jsonl", "--parser", kind)


def test_an_image_with_one_region_has_no_caption() -> None:
    assert draw_regions(REGIONS[1], np.random.default_rng(0)) is None

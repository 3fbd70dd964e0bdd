"""Files of graphs: read at their places, checked once, counted; every mistake named by file and line."""

import hashlib
import json
import os
import pickle
import re
from multiprocessing import get_context
from pathlib import Path

import pytest
from oc_clip_fakes import write_graphs

from dino_sparo.oc_clip.graphs.files import (
    CaptionGraphs,
    append_lines,
    graph_record,
    open_graph_file,
    open_graphs,
    read_lines,
)
from dino_sparo.oc_clip.graphs.graph import LookupCounts, Relation, SceneGraph

DOG = SceneGraph(("dog", "mat"), (Relation(0, "on", 1),))
TURNED = SceneGraph(("mat", "dog"), (Relation(1, "on", 0),))


def written(path: Path, *rows: tuple[str, SceneGraph]) -> Path:
    write_graphs(path, ((caption, graph, None) for caption, graph in rows))
    return path


def opened(path: Path, **options: float) -> CaptionGraphs:
    return open_graphs(str(path), **options)  # type: ignore[arg-type]


# Looking up.


def test_every_caption_gives_its_own_graph(tmp_path: Path) -> None:
    rows = [(f"caption {number} é", SceneGraph((f"thing {number}",))) for number in range(101)]
    graphs = opened(written(tmp_path / "g.jsonl", *rows))
    for caption, graph in reversed(rows):
        assert graphs.lookup(caption) == (graph, LookupCounts(captions=1))


def test_a_file_without_a_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / "g.jsonl").touch()
    with pytest.raises(ValueError, match=r"g\.jsonl' has no line; run dino-sparo parse again"):
        opened(tmp_path / "g.jsonl")


def test_a_missing_caption_becomes_one_entity_and_is_counted(tmp_path: Path) -> None:
    graphs = opened(written(tmp_path / "g.jsonl", ("a dog on a mat", DOG)))
    graph, counts = graphs.lookup("The red cat")
    assert graph == SceneGraph(("red cat",))
    assert counts == LookupCounts(captions=1, missing=1, whole_caption=1)


def test_what_normalising_drops_is_counted(tmp_path: Path) -> None:
    big = SceneGraph(("a", "b", "c"), (Relation(0, "on", 1), Relation(0, "on", 2), Relation(1, "on", 1)))
    graphs = opened(written(tmp_path / "g.jsonl", ("big", big), ("none", SceneGraph(()))), max_nodes=2, max_relations=0)
    (two, changes), (one, further) = graphs.lookup("big"), graphs.lookup("none")
    assert (two, one) == (SceneGraph(("a", "b")), SceneGraph(("none",)))
    total = LookupCounts.total([changes, further])
    assert total == LookupCounts(2, 0, whole_caption=1, nodes=1, dangling=1, loops=1, relations=1)
    assert str(total).startswith("2 captions, 1 as one entity, 1 entities beyond the cap")
    assert LookupCounts.total([]) == LookupCounts()


def test_the_same_caption_twice_with_the_same_graph_is_one(tmp_path: Path) -> None:
    path = written(tmp_path / "g.jsonl", ("a dog on a mat", DOG), ("another", DOG), (" a dog on a mat\n", TURNED))
    graphs = opened(path)
    assert graphs("a dog on a mat") == DOG
    assert graphs.record["captions"] == 2


def test_too_many_missing_captions_are_refused(tmp_path: Path) -> None:
    graphs = opened(written(tmp_path / "g.jsonl", ("a dog on a mat", DOG)), max_missing=0.1)
    graphs.check(LookupCounts(captions=1000, missing=100))
    with pytest.raises(ValueError, match=r"101 of 1,000 captions have no graph in .*g\.jsonl.*--max_missing_graphs"):
        graphs.check(LookupCounts(captions=1000, missing=101))
    with pytest.raises(ValueError, match="10 of 20 captions"):
        graphs.check(LookupCounts(captions=20, missing=10))


def test_what_a_result_file_says_names_file_hash_and_caps(tmp_path: Path) -> None:
    path = written(tmp_path / "g.jsonl", ("a dog on a mat", DOG))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    caps = {"max_nodes": 3, "max_relations": 5}
    assert opened(path, **caps).record == {"file": str(path), "sha256": digest, "captions": 1, **caps}
    assert open_graphs("templates", **caps).record == {"parser": "templates", **caps}


def lookup_in_child(graphs: CaptionGraphs) -> tuple[SceneGraph, LookupCounts]:
    return graphs.lookup("a dog on a mat")


def test_workers_read_the_same_file(tmp_path: Path) -> None:
    graphs = opened(written(tmp_path / "g.jsonl", ("a dog on a mat", DOG)))
    graphs("a dog on a mat")
    assert pickle.loads(pickle.dumps(graphs))("a dog on a mat") == DOG
    with get_context("fork").Pool(2) as pool:
        assert pool.map(lookup_in_child, [graphs] * 5) == [(DOG, LookupCounts(captions=1))] * 5


def test_no_object_is_kept_per_line(tmp_path: Path) -> None:
    small, large = tmp_path / "small.jsonl", tmp_path / "large.jsonl"
    for path, number in ((small, 10), (large, 1010)):
        write_graphs(path, ((f"caption {n}", DOG, None) for n in range(number)))
    sizes = [len(pickle.dumps(open_graph_file(path))) for path in (small, large)]
    assert sizes[1] - sizes[0] == pytest.approx(1000 * (8 + 8), abs=100)


def test_the_index_is_kept_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "g.jsonl", ("a dog on a mat", DOG))
    os.utime(path, ns=(10**18, 10**18))
    opened(path)
    monkeypatch.setattr("dino_sparo.oc_clip.graphs.files._index", lambda *_: pytest.fail("indexed again"))
    assert opened(path)("a dog on a mat") == DOG
    written(path, ("another", TURNED))
    with pytest.raises(pytest.fail.Exception, match="indexed again"):
        opened(path)


def test_a_file_that_changed_but_kept_its_time_and_size_is_read_anew(tmp_path: Path) -> None:
    """The bug: results named the hash of the old content."""
    path = written(tmp_path / "g.jsonl", ("a dog on a mat", DOG))
    times = (10**18, 10**18)
    os.utime(path, ns=times)
    before = opened(path).record["sha256"]
    path.write_text(path.read_text().replace("mat", "rug"))
    os.utime(path, ns=times)
    graphs = opened(path)
    assert graphs.record["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest() != before
    assert graphs.lookup("a dog on a rug")[1].missing == 0


# Mistakes.


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"caption": "a", "entities": [', "g.jsonl:2 is not valid JSON"),
        ("[]", "g.jsonl:2 is not a JSON object; give one {...} per line"),
        ('{"entities": [], "relationships": []}', "g.jsonl:2: 'caption' is None; give the caption's text"),
        ('{"caption": "  ", "entities": [], "relationships": []}', "g.jsonl:2: 'caption' is '  '"),
        ('{"caption": "a", "relationships": []}', "g.jsonl:2: a scene graph is"),
    ],
)
def test_a_line_that_is_no_graph_is_named_by_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path / "g.jsonl", ("a dog on a mat", DOG))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=re.escape(message)):
        opened(path)


def test_one_caption_with_two_graphs_is_refused_with_both_lines(tmp_path: Path) -> None:
    other = SceneGraph(("mat", "dog"), (Relation(0, "on", 1),))
    path = written(tmp_path / "g.jsonl", ("x", DOG), ("a dog on a mat", DOG), ("y", DOG), ("a dog on a mat", other))
    with pytest.raises(ValueError, match=r"g\.jsonl:4: 'a dog on a mat' has another graph than in line 2"):
        opened(path)


@pytest.mark.parametrize("name", ["no such file", "template", "g.jsonl.gz"])
def test_what_is_neither_parser_nor_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "g.jsonl.gz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"is not a file of graphs; give templates, spacy, or a \.jsonl"):
        open_graphs(str(tmp_path / name))


def test_a_file_that_changed_after_it_was_opened_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "g.jsonl", ("a dog on a mat", DOG))
    graphs = opened(path)
    path.write_text("x" * 200)
    with pytest.raises(ValueError, match="changed since it was opened"):
        graphs("a dog on a mat")


# Writing.


def test_a_torn_last_line_is_cut_off(tmp_path: Path) -> None:
    path = written(tmp_path / "g.jsonl", ("a dog on a mat", DOG))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"caption": "torn')
    with append_lines(path) as append:
        append({"caption": "next"})
    assert path.read_bytes() == whole + b'{"caption": "next"}\n'
    path.write_bytes(b"x" * 100_000)
    with append_lines(path):
        pass
    assert path.read_bytes() == b""


def test_blank_lines_count_as_lines(tmp_path: Path) -> None:
    (tmp_path / "g.jsonl").write_text('\n{"a": 1}\n\n{"b": 2}')
    assert [(number, offset) for number, offset, _ in read_lines(tmp_path / "g.jsonl")] == [(2, 1), (4, 11)]


def test_a_caption_of_broken_characters_finds_its_graph(tmp_path: Path) -> None:
    path = tmp_path / "g.jsonl"
    path.write_text(json.dumps(graph_record("half \ud800 a pair", DOG)) + "\n")
    assert opened(path)("half ? a pair") == DOG

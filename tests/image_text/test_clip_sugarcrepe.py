"""SugarCrepe: strict comparison, averages, what is missing; hard negatives of the built-in scenes; the command."""

import json
from pathlib import Path

import pytest
import torch

from dino_sparo.__main__ import run as run_command

pytest.importorskip("open_clip")

from clip_fakes import colour_encoder, evaluate, paint, small_checkpoint

from dino_sparo.clip.slots.mask import encode_pairs, summary_of
from dino_sparo.data.scenes.graphs import ATTRIBUTES, Ties
from dino_sparo.data.scenes.images import Scenes
from dino_sparo.data.sources.decode import DEFAULT_LIMITS
from dino_sparo.image_text import scorer as scorer_file
from dino_sparo.image_text.evaluation.compositional.discover import ImageRules, LocalBenchmark, open_benchmark
from dino_sparo.image_text.evaluation.compositional.questions import (
    EncodedQuestions,
    Question,
    encode_questions,
)
from dino_sparo.image_text.evaluation.compositional.sets import BENCHMARKS, scene_pairs
from dino_sparo.image_text.evaluation.compositional.sets.scene_pairs import (
    swapped_attribute,
    swapped_objects,
    write_scene_pairs,
)
from dino_sparo.image_text.evaluation.compositional.sets.sugarcrepe import COUNTS, group_means, read
from dino_sparo.image_text.scorer import DotProductScorer


def run(*options: object) -> dict:
    (result,) = evaluate("compositional", "--benchmarks", "sugarcrepe", *options)
    return {**result, **result["benchmarks"]["SugarCrepe"]}


def results_of(pairs: EncodedQuestions) -> dict[str, tuple[float, int, int]]:
    """Accuracy, number of questions and number of ties of each split."""
    splits = summary_of(pairs, DotProductScorer.score_pairs)["splits"]
    return {split: (each["accuracy"], each["num_questions"], each["num_ties"]) for split, each in splits.items()}


def write_split(folder: Path, split: str, rows: list[tuple[str, str, str]]) -> None:
    """Numbered with gaps, as some of SugarCrepe's files are."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = {
        str(3 * number): {"filename": f"{image}.png", "caption": positive, "negative_caption": negative}
        for number, (image, positive, negative) in enumerate(rows)
    }
    (folder / f"{split}.json").write_text(json.dumps(entries))


@pytest.fixture
def crepe(tmp_path: Path) -> Path:
    """Two splits: replaced colours, of which one caption is no better, and swapped words, which are always ties."""
    for colour in ("red", "green", "blue"):
        paint(tmp_path / "images" / f"{colour}.png", colour)
    replaced = [("red", "a red one", "a green one"), ("blue", "blue", "red"), ("red", "a blue one", "a red one")]
    write_split(tmp_path, "replace_att", [*replaced, ("green", "A thing.", "a thing .")])
    write_split(tmp_path, "swap_obj", [("green", "green in red", "red in green")])
    return tmp_path


def local(folder: Path, images: Path, max_missing: float = 0.01) -> LocalBenchmark:
    return open_benchmark(BENCHMARKS["sugarcrepe"], folder, ImageRules(folder, images, max_missing))


def encode(folder: Path, images: Path, max_missing: float = 0.01) -> EncodedQuestions:
    return encode_pairs(colour_encoder(), local(folder, images, max_missing), max_missing, DEFAULT_LIMITS)


# --- scores


def test_images_and_captions_are_encoded_once(crepe, monkeypatch):
    encoder = colour_encoder()
    seen = []
    encode_text = encoder.model.encode_text
    monkeypatch.setattr(encoder.model, "encode_text", lambda ids: (seen.append(len(ids)), encode_text(ids))[1])
    pairs = local(crepe, crepe / "images").questions
    encoded = encode_questions(encoder, [*pairs, *pairs])
    assert len(encoded.images) == 3
    assert len(encoded.texts) == 9
    assert sum(seen) == 9  # 8 texts, since the two about a thing have the same tokens; the last batch is filled up


def test_one_step_of_fp32_decides_and_less_is_a_tie(monkeypatch):
    """However many pairs are compared at a time; in bf16 all of these would be ties."""
    monkeypatch.setattr(scorer_file, "PAIR_CHUNK", 2)
    texts = torch.tensor([[0.5, 0.1], [0.5 + 2**-24, 0.7], [0.5 + 2**-26, 0.2]])
    questions = [Question("swap_att", ("i",), ("", ""))] * 5
    text_of, image_of = torch.tensor([[1, 0], [0, 1], [2, 0], [1, 2], [0, 2]]), torch.zeros(5, 1, dtype=torch.int64)
    pairs = EncodedQuestions(questions, torch.tensor([[1.0, 0.0]]), texts, image_of, text_of)
    assert results_of(pairs) == {"swap_att": (40.0, 5, 2)}


def test_averages_by_hand():
    """SPARO's table 4, CC15M with all slots: what it calls average is the mean over splits."""
    accuracies = {
        "replace_obj": 89.6, "replace_att": 79.8, "replace_rel": 66.6, "swap_obj": 59.3, "swap_att": 70.0,
        "add_obj": 77.9, "add_att": 67.9,
    }  # fmt: skip
    weights = group_means(COUNTS)
    found = {name: sum(weight * accuracies[s] for s, weight in each.items()) for name, each in weights.items()}
    assert found.pop("macro") == pytest.approx(73.0, abs=0.05)
    assert found == pytest.approx({"replace": 236 / 3, "swap": 129.3 / 2, "add": 145.8 / 2})


def test_features_that_are_not_finite_are_refused(crepe):
    pairs = encode(crepe, crepe / "images")
    pairs.images[1] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        results_of(pairs)


# --- what is missing


def test_a_few_missing_and_unreadable_images_are_counted_and_more_are_an_error(crepe):
    write_split(crepe, "swap_att", [("gone", "a", "b"), ("broken", "c", "d"), ("red", "red", "green")])
    paint(crepe / "images" / "broken.png", "broken")
    images = crepe / "images"
    with pytest.raises(ValueError, match=r"1 of 5 files, such as 'gone\.png', are missing in"):
        encode(crepe, images)
    with pytest.raises(ValueError, match=r"2 of 8 questions' images in .* missing or cannot be read"):
        encode(crepe, images, 0.2)
    assert results_of(encode(crepe, images, 0.4))["swap_att"] == (100.0, 1, 0)
    weights = small_checkpoint(crepe / "run" / "checkpoint.pth")
    result = run("--pretrained_weights", weights, "--data_root", crepe, "--max_missing", 0.4)
    assert (result["num_questions"], result["num_without_image"], result["complete"]) == (6, 2, False)
    assert any("cannot be read" in words for words in result["lacks"])
    assert {split: found["num_without_image"] for split, found in result["splits"].items()}["swap_att"] == 2
    for path in images.iterdir():
        path.write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"4 images in a row of the images cannot be read"):
        encode(crepe, images, 1.0)


def test_empty_captions_are_left_out_and_counted(crepe):
    write_split(crepe, "add_att", [("red", " ", "b"), ("red", "a", ""), ("red", "a", "b")])
    pairs = local(crepe, crepe / "images")
    assert (pairs.with_empty_caption.total(), pairs.with_missing_image.total()) == (2, 0)
    assert [pair.split for pair in pairs.questions].count("add_att") == 1
    assert "left out 0 questions without image, 2 with an empty caption" in pairs.missing
    assert "lacks 4 of 7 files: replace_obj.json, replace_rel.json" in pairs.missing[0]


def test_files_of_other_names_are_splits_where_none_of_sugarcrepes_is_there(crepe, tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    (crepe / "replace_att.json").rename(other / "unseen.json")
    (crepe / "swap_obj.json").rename(other / "seen.json")
    results = results_of(encode(other, crepe / "images"))
    assert results == {"seen": (0.0, 1, 1), "unseen": (50.0, 4, 1)}
    weights = small_checkpoint(crepe / "run" / "checkpoint.pth")
    result = run("--pretrained_weights", weights, "--data_root", other, "--images", crepe / "images")
    assert (result["means"].keys(), result["splits"].keys()) == ({"macro", "micro"}, {"seen", "unseen"})
    assert {name: len(record["sha256"]) for name, record in result["files"].items()} == {
        "seen.json": 64,
        "unseen.json": 64,
    }
    lines = capsys.readouterr().out.splitlines()[2:6]
    assert [line.split()[0] for line in lines] == ["seen", "unseen", "macro", "micro"]
    with pytest.raises(ValueError, match="holds no benchmark"):
        evaluate("compositional", "--pretrained_weights", weights, "--data_root", other)


def test_a_folder_without_questions_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds none of replace_obj\.json, replace_att\.json"):
        read(tmp_path)


# --- the built-in scenes


def test_negatives_have_the_same_words_and_describe_another_scene(tmp_path):
    folder = write_scene_pairs(tmp_path / "pairs", 17, 24)
    scenes = Scenes(200, 24, "val", ties=Ties(0.0, 0.0, 0.0))
    swapped = []
    for split in ("swap_obj", "swap_att"):
        entries = json.loads((folder / f"{split}.json").read_text())
        assert len(entries) == 17
        for entry in entries.values():
            graph = scenes.scene_graph(int(entry["filename"].removesuffix(".png")))
            assert entry["caption"] == graph.caption
            assert entry["negative_caption"] != graph.caption
            assert sorted(entry["negative_caption"].split()) == sorted(graph.caption.split())
            assert (folder / "images" / entry["filename"]).is_file()
            swapped.append(entry.get("swapped"))
    assert {swapped.count(attribute) for attribute in ("colour", "texture")} <= {7, 8, 9, 10}
    assert {pair.split for pair in read(folder)} == {"swap_obj", "swap_att"}


def test_swaps_by_hand():
    graph = next(graph for graph in map(Scenes(50).scene_graph, range(50)) if graph.relations)
    relation = graph.relations[0]
    subject, other = (graph.objects[i].described(ATTRIBUTES) for i in (relation.subject, relation.object))
    ending = f"{relation.predicate} {{}} on {graph.background}"
    assert swapped_objects(graph).caption == f"{other} {ending.format(subject)}"
    exchanged = swapped_attribute(graph, "colour")
    assert [thing.colour for thing in exchanged.objects] == [thing.colour for thing in reversed(graph.objects)]
    assert [thing.shape for thing in exchanged.objects] == [thing.shape for thing in graph.objects]
    assert exchanged.relations == graph.relations


def test_the_same_options_write_the_same_files(tmp_path):
    for name in ("one", "two"):
        run_command("scene-pairs", ["--output_dir", str(tmp_path / name), "--num_pairs", "3", "--img_size", "24"])
    files = [sorted(p.relative_to(tmp_path / name) for p in (tmp_path / name).rglob("*.*")) for name in ("one", "two")]
    assert files[0] == files[1]
    assert len(files[0]) == 5
    for file in files[0]:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_more_pairs_than_scenes_with_two_objects_are_refused():
    with pytest.raises(ValueError, match=r"num_pairs=11, but only \d of 3 scenes have two objects"):
        scene_pairs.scene_pairs(Scenes(3), 11)


# --- the command


def test_the_result_file_has_the_whole_protocol(crepe, capsys):
    weights = small_checkpoint(crepe / "run" / "checkpoint.pth")
    result = run("--pretrained_weights", weights, "--data_root", crepe)
    path = weights.parent / f"compositional_checkpoint_{crepe.name}.json"
    written = json.loads(path.read_text())
    assert {**written, **written["benchmarks"]["SugarCrepe"]} == result
    assert result["splits"].keys() == {"replace_att", "swap_obj"}
    assert result["splits"]["replace_att"]["num_ties"] == 1  # the same tokens
    assert result["means"].keys() == {"macro", "replace", "swap", "micro"}
    assert (result["num_questions"], result["num_without_image"]) == (5, 0)
    assert all(len(record["sha256"]) == 64 for record in result["files"].values())
    printed = capsys.readouterr().out
    assert "replace_att" in printed
    assert "* SugarCrepe: " in printed  # files that are missing

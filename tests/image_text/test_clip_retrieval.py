"""Recall@k by both definitions, with ties; layouts of captions; the command."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("open_clip")

from clip_fakes import colour_encoder, evaluate, paint, small_checkpoint
from image_files import encoded, write_tar
from PIL import Image

from dino_sparo.data.scenes.images import Scenes
from dino_sparo.image_text.evaluation import caption_sets, protocol, retrieval
from dino_sparo.image_text.evaluation.caption_sets import open_caption_set
from dino_sparo.image_text.evaluation.retrieval import Recall, evaluate_retrieval, merge_equal, recall
from dino_sparo.image_text.pairs.batches import PairSource

ALL = {"any": 100, "share": 100}


def run(*options: object) -> dict:
    return evaluate("retrieval", *options)


def counts(result: dict, *names: str) -> tuple[int, ...]:
    return tuple(result["images"][name] for name in names)


# --- recall


def recall_of(scores: torch.Tensor, matches: list[list[int]], k: list[int]) -> dict[int, Recall]:
    """Recall with these scores (queries, candidates), the same whichever of the two are the images.

    The queries come so often that k may be as large in the other direction; that changes no mean.
    """
    times = -(-scores.shape[1] // len(scores))
    queries, candidates = scores.repeat(times, 1), torch.eye(scores.shape[1])  # unit vectors: features are the scores
    pairs = torch.tensor([(query, own) for query, all_own in enumerate(matches * times) for own in sorted(all_own)])
    turned = pairs.flip(1)[pairs[:, 1].argsort(stable=True)]
    by_image = recall(colour_encoder(), queries, candidates, pairs, k)[0]
    by_text = recall(colour_encoder(), candidates, queries, turned, k)[1]
    assert by_image == by_text
    return by_image


@pytest.mark.parametrize("num_values", [3, 1000])
def test_recall_equals_a_loop_over_the_definitions(num_values, monkeypatch):
    """Few different scores give many ties; with 1000 there are next to none, and any order of equals would do."""
    monkeypatch.setattr(retrieval, "IMAGE_CHUNK", 5)
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(num_values, (13, 29), generator=generator).float() / num_values
    order = torch.randperm(29, generator=generator).tolist()
    sizes = [1, 3, 2, 1, 5, 1, 1, 2, 3, 1, 4, 1, 4]
    matches = [[order.pop() for _ in range(size)] for size in sizes]
    found = recall_of(scores, matches, [1, 4, 11])
    for k in (1, 4, 11):
        numbers = []
        for row, own in zip(scores.tolist(), matches, strict=True):
            nearest = sorted(range(29), key=lambda c: (-row[c], c in own))[:k]  # of equals the wrong one first
            numbers.append(sum(candidate in own for candidate in nearest))
        assert found[k]["any"] == pytest.approx(100 * sum(n > 0 for n in numbers) / 13)
        assert found[k]["share"] == pytest.approx(100 * sum(n / k for n in numbers) / 13)


@pytest.mark.parametrize("seed", range(5))
def test_equal_images_tie_in_whichever_block_they_are(monkeypatch, seed):
    """The first and the last of nine pairs are the same. The last would be alone in its block of four, and a product of
    one row rounds otherwise than one of four.
    """
    monkeypatch.setattr(retrieval, "IMAGE_CHUNK", 4)
    generator = torch.Generator().manual_seed(seed)
    images, noise = (torch.nn.functional.normalize(torch.randn(9, 501, generator=generator), dim=1) for _ in range(2))
    texts = torch.nn.functional.normalize(images + 0.7 * noise, dim=1)
    images[8], texts[8] = images[0], texts[0]
    found = recall(colour_encoder(), images, texts, torch.arange(9)[:, None].expand(-1, 2), [1, 2])
    for direction in found:
        assert direction[1]["any"] == pytest.approx(100 * 7 / 9)
        assert direction[2]["any"] == 100


def test_captions_that_differ_in_case_and_white_space_alone_are_one_text():
    texts, text_of = merge_equal(["A dog.", "a cat", "a  dog. ", "A CAT", "a dog"])
    assert texts == ["A dog.", "a cat", "a dog"]
    assert text_of.tolist() == [0, 1, 0, 1, 2]


def test_captions_that_many_images_share_are_one_text_and_not_ties_that_are_all_wrong(tmp_path):
    """Three images of each colour with the same caption: a model that knows colours finds everything."""
    lines = ["path,caption"]
    for colour in ("red", "green", "blue"):
        for number in range(3):
            paint(tmp_path / f"{colour}{number}.png", colour)
            lines.append(f"{colour}{number}.png,{'A ' if number else 'a  '}{colour} picture")
    lines.append("red0.png,a red picture")  # a second time
    (tmp_path / "pairs.csv").write_text("\n".join(lines))
    data = open_caption_set(str(tmp_path / "pairs.csv"))
    found = evaluate_retrieval(colour_encoder(), data, [1, 3])
    assert found["text_recall"]["@1"] == ALL
    assert found["image_recall"] == {"@1": ALL, "@3": ALL}
    assert counts(found, "num_images", "num_captions", "num_texts") == (9, 10, 3)
    assert "9 images, 10 captions, 3 different" in retrieval.table(found)


def test_a_k_above_the_number_of_candidates_is_refused():
    with pytest.raises(ValueError, match="give numbers from 1 to 7"):
        recall_of(torch.zeros(3, 7), [[0], [5], [6]], [8])


def test_recall_of_images_and_captions_by_hand(tmp_path):
    """Red, green and blue, with captions that name the right colour, but for one of green's, which says blue."""
    lines = []
    for colour, captions in {"red": ["red", "a red one"], "green": ["green", "blue"], "blue": ["so blue"]}.items():
        paint(tmp_path / f"{colour}.png", colour)
        lines += [f"{colour}.png#{number}\t{caption}" for number, caption in enumerate(captions)]
    (tmp_path / "captions.token").write_text("\n".join(lines))
    data = open_caption_set(str(tmp_path), str(tmp_path / "captions.token"))
    found = evaluate_retrieval(colour_encoder(), data, [1, 2])
    # Blue's own caption is tied with green's "blue", so it comes second.
    assert found["text_recall"] == {
        "@1": {"any": pytest.approx(200 / 3), "share": pytest.approx(200 / 3)},
        "@2": {"any": 100, "share": pytest.approx(100 * (2 / 2 + 1 / 2 + 1 / 2) / 3)},
    }
    # "blue" is nearest to blue; for green it is second, tied with red, hence third.
    assert found["image_recall"] == {"@1": {"any": 80, "share": 80}, "@2": {"any": 80, "share": 40}}
    assert counts(found, "num_images", "num_captions", "num_corrupt") == (3, 5, 0)


def test_images_that_cannot_be_read_go_with_their_captions(tmp_path, monkeypatch):
    for name, colour in {"a": "red", "b": "broken", "c": "blue"}.items():
        paint(tmp_path / f"{name}.png", colour)
    (tmp_path / "captions.txt").write_text("a.png,red\nb.png,green\nb.png,green too\nc.png,blue\n")
    data = open_caption_set(str(tmp_path), str(tmp_path / "captions.txt"))
    with pytest.raises(ValueError, match=r"1 of 3 images .* cannot be read; at most 1 % of them may be"):
        evaluate_retrieval(colour_encoder(), data, [1])
    monkeypatch.setattr(protocol, "MAX_MISSING", 0.5)
    found = evaluate_retrieval(colour_encoder(), data, [1])
    assert counts(found, "num_images", "num_captions", "num_corrupt") == (2, 2, 1)
    assert found["image_recall"]["@1"] == found["text_recall"]["@1"] == ALL


# --- layouts


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for name in ("7.jpg", "8.jpg", "9.jpg"):
        paint(tmp_path / "images" / name, "red")
    return tmp_path / "images"


KARPATHY = {
    "images": [
        {"filename": "8.jpg", "filepath": "val2014", "split": "test", "sentences": [{"raw": "A b."}, {"raw": "A c."}]},
        {"filename": "9.jpg", "filepath": "val2014", "split": "train", "sentences": [{"raw": "no"}]},
        {"filename": "7.jpg", "filepath": "val2014", "split": "test", "sentences": [{"raw": "D"}]},
    ]
}
COCO = {
    "images": [{"id": 3, "file_name": "8.jpg"}, {"id": 1, "file_name": "7.jpg"}],
    "annotations": [
        {"image_id": 3, "caption": "A b."},
        {"image_id": 1, "caption": "D"},
        {"image_id": 3, "caption": "A c."},
    ],
}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("karpathy.json", json.dumps(KARPATHY)),
        ("coco.json", json.dumps(COCO)),
        ("flickr.token", "8.jpg#0\tA b.\n8.jpg#1\tA c.\n7.jpg#0\tD\n"),
        ("kaggle8k.txt", "image,caption\n8.jpg,A b.\n8.jpg,A c.\n7.jpg,D\n"),
        ("kaggle30k.csv", "image_name| comment_number| comment\n8.jpg| 0| A b.\n8.jpg| 1| A c.\n7.jpg| 0| D\n"),
    ],
)
def test_every_layout_gives_the_same_images_and_captions(tmp_path, images, name, content):
    (tmp_path / name).write_text(content)
    data = open_caption_set(str(images), str(tmp_path / name))
    assert [Path(data.images.location(i)).name for i in range(len(data.images))] == ["8.jpg", "7.jpg"]
    assert data.captions == ["A b.", "A c.", "D"]
    assert data.image_of.tolist() == [0, 0, 1]
    assert data.split == ("test" if name == "karpathy.json" else None)
    if data.split is None:
        with pytest.raises(ValueError, match=rf"--split train, but .*{name}' has no splits; .*leave it out"):
            open_caption_set(str(images), str(tmp_path / name), "train")


def test_captions_keep_their_commas_and_empty_ones_are_counted(tmp_path, images, caplog):
    (tmp_path / "c.txt").write_text('8.jpg,one, two, three\n8.jpg, \n7.jpg,"quoted, too"\n9.jpg,\n')
    data = open_caption_set(str(images), str(tmp_path / "c.txt"))
    assert data.captions == ["one, two, three", "quoted, too"]
    assert data.left_out == {"missing images": 0, "empty captions": 2, "images without caption": 1}
    assert "left out 2 empty captions and 1 images without captions" in caplog.text


def test_flickr8ks_own_file_and_quotes_of_csv_are_read(tmp_path, images, monkeypatch):
    """Five lines of the published file name an image `2258277193_586949ec62.jpg.1` that does not exist."""
    monkeypatch.setattr(protocol, "MAX_MISSING", 0.5)
    (tmp_path / "Flickr8k.token.txt").write_text("7.jpg#0\tA dog .\n8.jpg.1#0\tgone\n9.jpg#0\tA cat .\n")
    data = open_caption_set(str(images), str(tmp_path / "Flickr8k.token.txt"))
    assert (data.captions, data.left_out["missing images"]) == (["A dog .", "A cat ."], 1)
    (tmp_path / "c.csv").write_text('image,caption\n7.jpg,"the ""pink"" one, here"\n8.jpg,"a" and "b"\n')
    assert open_caption_set(str(images), str(tmp_path / "c.csv")).captions == ['the "pink" one, here', '"a" and "b"']


def test_a_shards_text_has_a_caption_per_line(tmp_path):
    """As in CLIP benchmark's shards of COCO and Flickr; training takes such a text as one caption."""
    image = encoded(Image.new("RGB", (7, 5), "red"), "JPEG")
    path = write_tar(tmp_path / "test.tar", [("0.jpg", image), ("0.txt", b"a red one\nall red\n")])
    data = open_caption_set(str(path))
    assert (len(data.images), data.captions) == (1, ["a red one", "all red"])


def test_rows_of_a_table_that_name_one_image_are_put_together(tmp_path, images):
    (tmp_path / "pairs.csv").write_text("path,caption\nimages/8.jpg,one\nimages/7.jpg,two\nimages/8.jpg,three\n")
    data = open_caption_set(str(tmp_path / "pairs.csv"))
    assert [Path(data.images.location(i)).name for i in range(len(data.images))] == ["8.jpg", "7.jpg"]
    assert data.captions == ["one", "three", "two"]
    assert data.image_of.tolist() == [0, 0, 1]


def test_captions_of_no_image_are_counted_as_in_training(tmp_path, images):
    """Regression: training counted an annotation whose image is not listed, retrieval ended with an error."""
    own = [{"id": 3, "file_name": "7.jpg"}, {"id": 5, "file_name": "8.jpg"}]
    texts = [{"image_id": number, "caption": f" of {number} "} for number in (5, 3, 11, 5)]
    (tmp_path / "captions.json").write_text(json.dumps({"images": own, "annotations": texts}))
    data = open_caption_set(str(images), str(tmp_path / "captions.json"))
    assert data.captions == ["of 3", "of 5", "of 5"]
    assert data.left_out["captions with the id of no image"] == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.json", "{", "is not valid JSON"),
        ("c.json", '{"images": []}', r"has no split 'test'; its splits are \[\]"),
        ("c.json", '{"images": [{"filename": "7.jpg"}]}', r"its keys are \['images'\], missing is 'split'"),
        ("c.json", "[1]", r"neither COCO's"),
        ("c.txt", "7.jpg,one\nwhatever\n", "line 2 is 'whatever'; expected an image's file name"),
        ("c.txt", "", "has no captions"),
        ("c.txt", "7.jpg,one\n77.jpg,two\n", r"1 of 2 images in .*, such as '77\.jpg', are missing"),
    ],
)  # fmt: skip
def test_captions_that_are_not_understood_are_refused(tmp_path, images, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        open_caption_set(str(images), str(tmp_path / name))


def test_captions_that_cannot_be_read_are_counted():
    """More than a few of them are an error, as for images."""

    def unreadable(index):
        raise caption_sets.CorruptImageError(f"shard!{index}", "gone")

    pairs = PairSource(Scenes(5), unreadable)
    with pytest.raises(ValueError, match="5 of 5 captions of scenes"):
        caption_sets._together(pairs)


# --- the command


def test_the_result_is_written_with_what_was_counted(tmp_path, capsys):
    weights = small_checkpoint(tmp_path / "run" / "checkpoint.pth")
    for colour in ("red", "green", "blue"):
        paint(tmp_path / "images" / f"{colour}.png", colour)
    (tmp_path / "c.txt").write_text("red.png,red\nred.png," + "very " * 90 + "red\ngreen.png,green\nblue.png,blue\n")
    options = ("--pretrained_weights", weights, "--data_path", tmp_path / "images", "--captions", tmp_path / "c.txt")
    result = run(*options, "--k", 1, 3)
    assert json.loads(next((tmp_path / "run").glob("retrieval_checkpoint_*-images.json")).read_text()) == result
    assert result["image_recall"]["@3"] == {"any": 100.0, "share": pytest.approx(100 / 3)}
    assert result["text_recall"].keys() == {"@1", "@3"}
    images = result["images"]
    assert (images["num_images"], images["num_captions"], images["num_truncated_captions"]) == (3, 4, 1)
    assert (images["num_texts"], images["num_merged_captions"]) == (4, 0)
    assert images["captions_per_image"] == [0, 2, 1]  # two images with one caption, one with two
    assert len(images["captions"]["sha256"]) == len(result["model"]["sha256"]) == 64
    assert "captions by image" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--data_path is empty"):
        run("--pretrained_weights", weights)

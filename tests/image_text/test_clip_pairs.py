"""image_text/pairs/: pairs from every kind of source, drawn by number, and bad ones named and counted."""

import json
import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import encoded, write_tar
from PIL import Image
from torchvision.transforms import functional as TF
from two_ranks import TwoRanks

pytest.importorskip("open_clip")

from dino_sparo.clip.options import get_args_parser
from dino_sparo.data.crops import sample_box
from dino_sparo.data.scenes.graphs import Ties
from dino_sparo.data.scenes.images import Scenes
from dino_sparo.data.scenes.patterns import COLOURS, SHAPES
from dino_sparo.data.sources import CorruptImageError, ImageLimits, ImageSource, indexes
from dino_sparo.image_text.objective import open_data
from dino_sparo.image_text.pairs.batches import (
    PairBatch,
    PairDataset,
    PairSource,
    PairTransform,
    collate_pairs,
)
from dino_sparo.image_text.pairs.sources import open_pairs
from dino_sparo.image_text.towers import tokenize
from dino_sparo.runtime import launch
from dino_sparo.runtime.launch import Distributed


def picture(value: int, kind: str = "PNG") -> bytes:
    """An image file that no other value gives, 5 px high and 7 wide."""
    pixels = (np.arange(5 * 7 * 3).reshape(5, 7, 3) * 2 + value) % 256
    return encoded(Image.fromarray(pixels.astype(np.uint8)), kind)


def value_of(image: Image.Image) -> int:
    return image.getpixel((0, 0))[0]


def pair_members(first: int, count: int) -> list[tuple[str, bytes]]:
    """webdataset's: an image, its caption, and a JSON with another caption, per sample."""
    members = []
    for value in range(first, first + count):
        members += [
            (f"{value:03}.png", picture(value)),
            (f"{value:03}.txt", f"text {value}\n".encode()),
            (f"{value:03}.json", json.dumps({"alt": f"alt {value}", "all": [f"one {value}", "", "two"]}).encode()),
        ]
    return members


def contents(source: PairSource) -> list[tuple[int, list[str]]]:
    """Which image comes with which captions."""
    return [(value_of(source.read(i)), [c.strip() for c in source.captions_of(i)]) for i in range(len(source))]


# ---- tar shards


@pytest.mark.parametrize("pattern", ["{}/s-{{0..1}}.tar", "{}/s-0.tar::{}/s-1.tar", "{}/s-*.tar", "{}"])
def test_shards_are_pairs_of_image_and_text_however_they_are_named(tmp_path: Path, pattern: str) -> None:
    folder = tmp_path / "shards"
    write_tar(folder / "s-0.tar", pair_members(0, 3))
    write_tar(folder / "s-1.tar", pair_members(3, 2))
    source = open_pairs(pattern.format(folder, folder))
    assert contents(source) == [(value, [f"text {value}"]) for value in range(5)]
    assert source.location(4) == f"{folder}/s-1.tar!004.png"
    assert isinstance(source, ImageSource)


def test_a_key_of_the_json_gives_one_caption_or_several(tmp_path: Path) -> None:
    path = str(write_tar(tmp_path / "a.tar", pair_members(0, 2)))
    assert contents(open_pairs(path, caption_key="alt")) == [(0, ["alt 0"]), (1, ["alt 1"])]
    assert contents(open_pairs(path, caption_key="all")) == [(0, ["one 0", "two"]), (1, ["one 1", "two"])]
    with pytest.raises(ValueError, match=r"has no key 'title'; give one of its keys as --caption_key: alt, all$"):
        open_pairs(path, caption_key="title")


def test_samples_that_are_no_pairs_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    members = [*pair_members(0, 4), ("lone.png", picture(9)), ("mute.txt", b"words"), ("still.jpg", picture(8, "JPEG"))]
    path = str(write_tar(tmp_path / "a.tar", members))
    with caplog.at_level(logging.WARNING):
        source = open_pairs(path, max_left_out=0.5)
    assert len(source) == 4
    assert source.left_out.counts == {"without caption": 2, "without image": 1}
    assert f"3 of 7 samples are left out: 2 without caption (the first is {path}!lone), 1 without image" in caplog.text
    with pytest.raises(ValueError, match=r"3 of 7 samples are left out.*more than the 0 that --max_corrupt 0.0 allows"):
        open_pairs(path, max_left_out=0.0)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("1.png", "1.caption"), "name the caption of 7.jpg 7.txt$"),
        (("1.heic", "1.txt"), "convert the images to one of .jpg, "),
        (
            ("1.png", "1.json", "1.cls"),
            r"no sample has an image and a .txt; the members end in .png, .json, .cls; give "
            r"--caption_key KEY .*--caption_templates",
        ),
    ],
)
def test_shards_without_pairs_get_the_remedy_for_their_endings(
    tmp_path: Path, names: tuple[str, ...], message: str
) -> None:
    path = write_tar(tmp_path / "a.tar", [(name, b"?") for name in names])
    with pytest.raises(ValueError, match=message):
        open_pairs(str(path))


def test_the_index_is_kept_with_what_was_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tar(tmp_path / "a.tar", [*pair_members(0, 3), ("lone.png", picture(9))])
    first = open_pairs(str(path), max_left_out=1.0)
    monkeypatch.setattr(indexes, "shard_samples", lambda shard: pytest.fail("indexed again"))
    again = open_pairs(str(path), max_left_out=1.0)
    assert contents(again) == contents(first)
    assert again.left_out == first.left_out
    with pytest.raises(pytest.fail.Exception, match="indexed again"):
        open_pairs(str(path), caption_key="alt")


def test_a_sparse_member_is_an_error(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", pair_members(0, 1))
    content = path.read_bytes()
    checksum = int(content[148:154], 8) + ord("S") - content[156]
    path.write_bytes(content[:148] + b"%06o\0 S" % checksum + content[157:])
    with pytest.raises(ValueError, match=r"'000.png' is sparse; write it without --sparse"):
        open_pairs(str(path))


# ---- tables


def image_files(folder: Path, count: int) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for value in range(count):
        (folder / f"{value}.png").write_bytes(picture(value))
    return [f"{value}.png" for value in range(count)]


def test_columns_and_image_folder_can_be_named(tmp_path: Path) -> None:
    image_files(tmp_path / "pictures", 2)
    (tmp_path / "t.tsv").write_text("path\tfig\tcaption\twords\nno.png\t1.png\twrong\tright\n")
    source = open_pairs(str(tmp_path / "t.tsv"), "fig", "words", str(tmp_path / "pictures"))
    assert contents(source) == [(1, ["right"])]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,words\n", r"no column of captions \(one of caption, .*found the columns \['path', 'words'\]"),
        ("a;b;c\n", r"no column of images .* and none of captions .*columns \['a', 'b', 'c'\]; name them with"),
        ("path,caption\n0.png,a cat, red\n", "line 2 has 3 columns, the header has 2: .*in double quotes"),
        ("path,caption\n", "holds no pair"),
        (
            "path,caption\nnowhere.png,a cat\n",
            "names 'nowhere.png', but .* does not exist or is not a regular file; give the folder",
        ),
        ("path,caption\n0.png," + "x" * 200_000 + "\n", "line 2 cannot be read"),
    ],
)
def test_tables_that_cannot_be_read_are_errors(tmp_path: Path, text: str, message: str) -> None:
    image_files(tmp_path, 1)
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        open_pairs(str(tmp_path / "t.csv"))


def test_a_named_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("path,caption\n0.png,a cat\n")
    with pytest.raises(ValueError, match=r"no column of captions \(caption_key 'title'\)"):
        open_pairs(str(tmp_path / "t.csv"), caption_key="title")


def test_rows_without_path_or_caption_are_left_out(tmp_path: Path) -> None:
    image_files(tmp_path, 2)
    (tmp_path / "t.csv").write_text("path,caption\n0.png,a\n,b\n1.png, \n1.png,c\n")
    source = open_pairs(str(tmp_path / "t.csv"), max_left_out=0.5)
    assert contents(source) == [(0, ["a"]), (1, ["c"])]
    assert source.left_out.counts == {"without image": 1, "without caption": 1}
    assert str(source.left_out) == (
        f"1 without image (the first is {tmp_path / 't.csv'}, line 3), "
        f"1 without caption (the first is {tmp_path / 't.csv'}, line 4)"
    )


# ---- splits


def test_a_table_with_splits_gives_its_train_pairs(tmp_path: Path) -> None:
    image_files(tmp_path, 4)
    (tmp_path / "t.csv").write_text("path,caption,split,fold\n0.png,a,train,x\n1.png,b,val,train\n2.png,c,train,y\n")
    path = str(tmp_path / "t.csv")
    assert contents(open_pairs(path)) == [(0, ["a"]), (2, ["c"])]
    assert contents(open_pairs(path, split="val")) == [(1, ["b"])]
    assert contents(open_pairs(path, default_split="val")) == [(1, ["b"])]
    assert contents(open_pairs(path, split_column="fold")) == [(1, ["b"])]
    assert len(open_pairs(path, split="all")) == 3
    with pytest.raises(ValueError, match=r"has no split 'dev': it holds 'train' \(2 rows\), 'val' \(1 rows\)"):
        open_pairs(path, split="dev")


def test_a_folder_of_splits_gives_its_train_pairs(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    for name, first in (("train-0", 0), ("train-1", 2), ("val-0", 4)):
        write_tar(shards / f"{name}.tar", pair_members(first, 2))
    for name in ("train", "val"):
        write_tar(tmp_path / "folders" / name / "0.tar", pair_members(len(name), 2))
        image_files(tmp_path / "tables", 5)
        (tmp_path / "tables" / f"{name}.csv").write_text(f"path,caption\n{len(name)}.png,words\n" * 1)
    values = {name: [i for i, _ in contents(open_pairs(str(tmp_path / name)))] for name in ("shards", "folders")}
    assert values == {"shards": [0, 1, 2, 3], "folders": [5, 6]}
    assert contents(open_pairs(str(tmp_path / "tables"), split="val")) == [(3, ["words"])]
    assert len(open_pairs(str(shards), split="all")) == 6
    assert [i for i, _ in contents(open_pairs(str(shards), split="val"))] == [4, 5]
    with pytest.raises(ValueError, match="has no split 'val'; give the folder that holds the splits' shards"):
        open_pairs(f"{shards}/*.tar", split="val")


@pytest.mark.parametrize("path", ["https://host/{000..009}.tar", "s3://bucket/t.csv", "pipe:aws s3 cp s3://b/0.tar -"])
def test_a_remote_path_of_pairs_is_said_to_be_one(path: str) -> None:
    with pytest.raises(ValueError, match="is an address; download the files first and give their local path"):
        open_pairs(path)


def test_limits_of_images_hold_for_pairs(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", pair_members(0, 1))
    image_files(tmp_path, 1)
    (tmp_path / "t.csv").write_text("path,caption\n0.png,a\n")
    for name in ("a.tar", "t.csv"):
        source = open_pairs(str(tmp_path / name), limits=ImageLimits(max_mpix=34e-6))
        with pytest.raises(CorruptImageError, match="7 x 5 pixels"):
            source.read(0)


# ---- COCO


def coco(folder: Path, **changes: object) -> Path:
    names = image_files(folder / "images", 3)
    said = {
        "images": [{"id": 10 * i, "file_name": name} for i, name in enumerate(names)],
        "annotations": [
            {"image_id": 20, "caption": "c"},
            {"image_id": 0, "caption": "a"},
            {"image_id": 20, "caption": "d"},
            {"image_id": 99, "caption": "e"},
            {"image_id": 20, "caption": "f "},
            {"image_id": 10, "caption": " "},
        ],
        **changes,
    }
    path = folder / "captions.json"
    path.write_text(json.dumps(said))
    return path


def test_coco_captions_belong_to_their_images(tmp_path: Path) -> None:
    source = open_pairs(str(coco(tmp_path)), image_folder=str(tmp_path / "images"), max_left_out=0.5)
    assert contents(source) == [(0, ["a"]), (2, ["c", "d", "f"])]
    assert source.left_out.counts == {"with the id of no image": 1, "without caption": 1}


def test_other_annotations_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'0.png', but .* does not exist or is not a regular file; .*--image_folder"):
        open_pairs(str(coco(tmp_path)), max_left_out=1.0)
    with pytest.raises(ValueError, match=r"not COCO captions.*found the keys \['images', 'annotations'\].*'caption'"):
        open_pairs(str(coco(tmp_path, annotations=[{"image_id": 0, "bbox": []}])))
    with pytest.raises(ValueError, match="holds no pair"):
        open_pairs(str(coco(tmp_path, annotations=[])))
    (tmp_path / "captions.json").write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        open_pairs(str(tmp_path / "captions.json"))


# ---- scenes and labelled images


def test_scenes_come_with_their_captions_and_independent_attributes() -> None:
    source = open_pairs("scenes:300:32")
    scenes = Scenes(300, 32, ties=Ties(0.0, 0.0, 0.0))
    captions, graph = source.captions_of(7), scenes.scene_graph(7)
    assert captions[0] == scenes.caption(7)
    mentioned = (["colour", "texture"], ["colour"], ["texture"], [], [], [], [])
    assert captions[1:] == [graph.described(names) for names in mentioned]
    assert all(graph.objects[0].shape in caption for caption in captions)
    assert graph.objects[0].colour not in captions[-1]
    assert np.array_equal(np.asarray(source.read(7)), np.asarray(scenes.read(7)))
    # The colour of a shape is any colour; with the usual ties it is nearly always the same.
    colours = {scenes.scene_graph(i).objects[0].colour for i in range(0, 300, len(SHAPES))}
    assert len(colours) == len(COLOURS)


def test_labelled_images_get_captions_from_their_class_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("tree_frog", "cat"):
        image_files(tmp_path / name, 2)
    with caplog.at_level(logging.INFO):
        source = open_pairs(str(tmp_path))
    assert [len(source.captions_of(i)) for i in (0, 3)] == [80, 80]  # OpenCLIP's templates
    assert "a bad photo of a cat." in source.captions_of(0)
    assert "a bad photo of a tree frog." in source.captions_of(3)
    assert "captions are made from the images' own class names by 80 templates" in caplog.text
    source = open_pairs(str(tmp_path), caption_templates=["{}?", "my {} {}", "plain"])
    assert source.captions_of(2) == ["tree frog?", "my tree frog tree frog", "a photo of a tree frog."]
    assert open_pairs("scenes:26", caption_templates=["one {}"]).captions_of(1) == [f"one {SHAPES[1]}"]


def test_a_folder_of_pairs_is_evaluated_and_trained_on_with_a_limit_of_missing_captions(tmp_path: Path) -> None:
    image_files(tmp_path, 13)
    for index in range(13):
        (tmp_path / f"{index}.txt").write_text(f"caption {index}\n")
    source = open_pairs(str(tmp_path), default_split="val")
    assert [source.captions_of(index) for index in (0, 2)] == [["caption 0"], ["caption 10"]]
    for index in range(11):
        (tmp_path / f"{index}.txt").unlink()
    os.mkfifo(tmp_path / "0.txt")  # reading it would wait forever
    with pytest.raises(ValueError, match=r"11 of 13 samples are left out: 11 without a \.txt"):
        open_pairs(str(tmp_path))


def test_texts_that_belong_to_no_image_do_not_hide_class_folders(tmp_path: Path) -> None:
    for name in ("frog", "cat"):
        image_files(tmp_path / name, 2)
    (tmp_path / "classnames.txt").write_text("frog\ncat\n")
    assert open_pairs(str(tmp_path), caption_templates=["a {}"]).captions_of(0) == ["a cat"]


def test_captions_cannot_be_made_from_nothing(tmp_path: Path) -> None:
    image_files(tmp_path / "flat", 2)
    with pytest.raises(
        ValueError,
        match=r"has neither captions nor labels; give tar shards.*images with a \.txt of the same name beside each",
    ):
        open_pairs(str(tmp_path / "flat"))
    with pytest.raises(ValueError, match="templates='a photo' is neither a file nor a known list"):
        open_pairs("scenes:26", caption_templates=["a photo"])
    with pytest.raises(ValueError, match="nowhere/at/all"):
        open_pairs("nowhere/at/all")


# ---- pairs by number


class Numbered:
    """Images whose red value is their index; those in `corrupt` cannot be read."""

    name, classes, labels = "numbered", None, None

    def __init__(self, count: int, corrupt: Sequence[int] = ()) -> None:
        self.count, self.corrupt = count, corrupt

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> Image.Image:
        if index in self.corrupt:
            raise CorruptImageError(self.location(index), "made so")
        return Image.new("RGB", (20, 13), (index, 0, 0))

    def location(self, index: int) -> str:
        return f"image-{index}"


def numbered(count: int, corrupt: Sequence[int] = (), mute: Sequence[int] = (), captions: int = 1) -> PairSource:
    def words(index: int) -> list[str]:
        return [" " if index in mute else f"number {index} caption {i}" for i in range(captions)]

    return PairSource(Numbered(count, corrupt), words)


def test_a_caption_is_drawn_by_seed_epoch_and_index_alone() -> None:
    def drawn(seed: int, epoch: int) -> list[str]:
        dataset = PairDataset(numbered(40, captions=5), PairTransform(8), seed)
        return [dataset[epoch, i].caption for i in range(40)]

    assert drawn(3, 1) == drawn(3, 1)
    assert drawn(3, 1) != drawn(3, 2)
    assert drawn(3, 1) != drawn(4, 1)
    assert all(text.startswith(f"number {i} ") for i, text in enumerate(drawn(3, 1)))
    assert {text[-1] for text in drawn(3, 1)} == set("01234")


def test_a_pair_without_image_or_caption_is_replaced_by_the_next_and_named() -> None:
    dataset = PairDataset(numbered(7, corrupt=[2], mute=[3, 5]), PairTransform(8))
    items = [dataset[0, i] for i in range(7)]
    assert [item.index for item in items] == [0, 1, 4, 4, 4, 6, 6]
    assert [item.caption for item in items] == [f"number {item.index} caption 0" for item in items]
    assert [item.image[0, 0, 0].item() for item in items] == [0, 1, 4, 4, 4, 6, 6]
    assert [item.corrupt for item in items if item.corrupt] == [
        (("image-2", "made so"),),
        (("image-3", "the caption is missing or empty"),),
        (("image-5", "the caption is missing or empty"),),
    ]


def test_an_empty_or_unreadable_caption_in_a_shard_is_replaced(tmp_path: Path) -> None:
    members = [*pair_members(0, 2), ("x.png", picture(5)), ("x.txt", b" \n"), ("y.png", picture(6)), ("y.txt", b"y")]
    source = open_pairs(str(write_tar(tmp_path / "a.tar", members)))
    dataset = PairDataset(source, PairTransform(8))
    assert dataset[0, 2].caption == "y"
    assert dataset[0, 2].corrupt == ((f"{tmp_path}/a.tar!x.png", "the caption is missing or empty"),)
    members = [("x.png", picture(5)), ("x.json", b"[1]"), ("y.png", picture(6)), ("y.json", b'{"c": "y"}')]
    source = open_pairs(
        str(write_tar(tmp_path / "b.tar", [*members, ("z.png", picture(7)), ("z.json", b"{")])), caption_key="c"
    )
    reasons = [PairDataset(source, PairTransform(8))[0, i].corrupt[0][1] for i in (0, 2)]
    assert reasons[0] == "holds a list, not a JSON object"
    assert reasons[1].startswith("no JSON")
    (tmp_path / "b.tar").unlink()
    with pytest.raises(CorruptImageError, match="No such file"):
        source.captions_of(1)


def test_crops_by_torch_are_a_level_from_open_clips_in_one_pixel_of_fifty_at_most_and_exact_ones_are_equal() -> None:
    """OpenCLIP's pipeline is torchvision's resized_crop on PIL images; photographs have grain."""
    rng = np.random.default_rng(0)
    ramp = np.add.outer(np.arange(300), np.arange(400))[..., None] * np.array([0.2, 0.3, 0.1]) + 40
    image = Image.fromarray((ramp + rng.normal(0, 20, ramp.shape)).clip(0, 255).astype(np.uint8))
    differences = []
    for seed in range(5):
        box = sample_box(np.random.default_rng(seed), 300, 400, (0.9, 1.0))
        theirs = TF.pil_to_tensor(TF.resized_crop(image, *box, [224, 224], TF.InterpolationMode.BICUBIC))
        (exact,) = PairTransform(224, exact=True)(image, np.random.default_rng(seed))
        (fast,) = PairTransform(224)(image, np.random.default_rng(seed))
        assert torch.equal(exact, theirs)  # (3, 224, 224), uint8
        differences.append((fast.int() - theirs.int()).abs())
    levels = torch.stack(differences)
    assert levels.max() == 1
    assert (levels > 0).float().mean() < 0.02


def test_captions_longer_than_the_context_are_cut_and_counted() -> None:
    dataset = PairDataset(numbered(4), PairTransform(8))
    items = [dataset[0, i] for i in range(4)]
    batch = collate_pairs(items, context_length=5)
    assert isinstance(batch, PairBatch)
    assert batch.token_ids.shape == (4, 5)
    assert batch.num_truncated == 4
    whole = collate_pairs(items, context_length=11)
    assert whole.num_truncated == 0
    assert torch.equal(whole.token_ids, tokenize([item.caption for item in items], 11).ids)


def test_each_caption_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_pairs(str(write_tar(tmp_path / "a.tar", pair_members(0, 3))))
    asked: list[int] = []
    captions = source.captions
    monkeypatch.setattr(source, "captions", lambda index: asked.append(index) or captions(index))
    dataset = PairDataset(source, PairTransform(4))
    assert [dataset[0, i].caption.strip() for i in range(3)] == ["text 0", "text 1", "text 2"]
    assert asked == [0, 1, 2]


def open_numbered_pairs(data_path: str) -> int:
    """Number of the pairs in the table of this rank."""
    options = ["--data_path", data_path.format(rank=launch.rank()), "--num_workers", "0", "--batch_size", "2"]
    args = get_args_parser().parse_args(options)
    process = Distributed(launch.rank(), 2, torch.device("cpu"))
    return len(open_data(args, process, partial(collate_pairs, context_length=8))[1])


def test_ranks_with_different_pairs_are_told(tmp_path: Path, two_ranks: TwoRanks) -> None:
    for value in range(3):
        (tmp_path / f"{value}.png").write_bytes(picture(value))
    (tmp_path / "0.csv").write_text("path,caption\n0.png,a\n1.png,b\n")
    assert two_ranks(open_numbered_pairs, f"{tmp_path}/0.csv") == [1, 1]
    for others, message in (("2.png,b", "the names of the images"), ("1.png,b\n2.png,c", "the number of images")):
        (tmp_path / "1.csv").write_text(f"path,caption\n0.png,a\n{others}\n")
        errors = two_ranks.errors(open_numbered_pairs, f"{tmp_path}/{{rank}}.csv")
        assert all(f"disagree on {message}" in error for error in errors), errors

"""sources: whatever holds images is found, indexed and read as the reference would, and bad input is named."""

import io
import json
import logging
import os
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
from image_files import encoded, write_tar
from PIL import Image, ImageOps
from torchvision.datasets import ImageFolder

from dino_sparo.data.labels import require_labels
from dino_sparo.data.scenes.images import names_scenes
from dino_sparo.data.sources import (
    TORCHVISION_SETS,
    CorruptImageError,
    ImageLimits,
    ImageSource,
    decode_image,
    expand_shards,
    open_source,
    to_image,
)
from dino_sparo.image_text.evaluation.protocol import open_evaluation_images
from dino_sparo.image_text.prompts import set_name


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "the cache"
    monkeypatch.setenv("DINO_SPARO_CACHE", str(folder))
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    return folder


def picture(value: int, mode: str = "RGB") -> Image.Image:
    """A picture that no other value gives, 5 px high and 7 wide."""
    pixels = (np.arange(5 * 7 * 3).reshape(5, 7, 3) * 2 + value) % 256
    return Image.fromarray(pixels.astype(np.uint8)).convert(mode)


def write(path: Path, value: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(picture(value)))
    return path


def names(source: ImageSource, root: Path) -> list[str]:
    return [os.path.relpath(source.location(i), root) for i in range(len(source))]


def assert_shows(source: ImageSource, index: int, value: int) -> None:
    np.testing.assert_array_equal(np.asarray(source.read(index)), np.asarray(picture(value)))


# ---- folders


def test_class_folders_are_read_as_imagefolder_reads_them(root: Path) -> None:
    for value, name in enumerate(("b/2.png", "b/10.PNG", "a-b/x/1.png", "a/z.png", "a/sub/y.png", "a/sub-2/x.png")):
        write(root / name, value)
    (root / "a" / "notes.txt").write_text("no image")
    reference = ImageFolder(str(root))
    source = open_source(str(root))
    assert isinstance(source, ImageSource)
    assert [source.location(i) for i in range(len(source))] == [path for path, _ in reference.samples]
    assert source.classes == reference.classes
    assert source.labels.tolist() == reference.targets
    for i in range(len(source)):
        np.testing.assert_array_equal(np.asarray(source.read(i)), np.asarray(reference[i][0]))


def test_hidden_files_and_empty_classes_are_skipped(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for name in ("a/1.png", "a/._1.png", ".hidden/2.png", "b/3.png", "__MACOSX/4.png"):
        write(root / name)
    (root / "empty").mkdir()
    source = open_source(str(root))
    assert names(source, root) == ["a/1.png", "b/3.png"]
    assert source.classes == ["a", "b"]
    (record,) = caplog.records
    assert f"folder {root}: 2 images in 2 classes, listed in " in record.getMessage()


@pytest.mark.parametrize(
    ("files", "note"),
    [
        (["2.png", "1.png"], "images lie directly in the folder"),
        (["3.png", "a/1.png", "b/2.png"], "1 images lie directly in the folder, the first is '3.png', so subfolders"),
        (["all/x/1.png", "all/y/2.png"], "all in one subfolder, 'all'"),
        (["train/a/1.png"], "its folders are splits"),
    ],
)
def test_folders_without_classes_have_no_labels(
    root: Path, files: list[str], note: str, caplog: pytest.LogCaptureFixture
) -> None:
    for value, name in enumerate(files):
        write(root / name, value)
    with caplog.at_level(logging.INFO):
        source = open_source(str(root))
    assert source.labels is None
    assert source.classes is None
    assert names(source, root) == sorted(files)
    assert note in caplog.text


def test_an_image_beside_the_class_folders_is_named_where_labels_are_needed(root: Path) -> None:
    for name in ("a/1.png", "b/2.png", "Screenshot.png"):
        write(root / name)
    with pytest.raises(ValueError, match=r"the first is 'Screenshot.png', .* move or delete these images\n"):
        require_labels(open_source(str(root)))


def test_files_of_other_endings_are_counted_with_the_remedy(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    jpeg, gif = encoded(picture(1), "JPEG"), encoded(picture(2), "GIF")
    files = {"a.jfif": jpeg, "b.GIF": gif, "c.HEIC": b"?", "d.heic": b"?", "e.txt": b"?"}
    for name, content in files.items():
        (root / name).write_bytes(content)
    caplog.set_level(logging.INFO)
    assert names(open_source(str(root)), root) == ["a.jfif", "b.GIF"]
    remedy = "(convert pictures to JPEG or PNG; HEIC by pillow-heif or heif-convert)"
    assert f"(images lie directly in the folder); left out 2 .heic, 1 .txt {remedy} in" in caplog.text
    shard = write_tar(root / "s.tar", [*files.items(), ("README", b"?")])
    assert len(open_source(str(shard))) == 2
    assert f"1 shard(s) indexed; left out 2 .heic, 1 .txt, 1 without ending {remedy} in" in caplog.text
    for name in ("a.jfif", "b.GIF", "s.tar"):
        (root / name).unlink()
    with pytest.raises(ValueError, match=r"holds no images: .*left out 2 \.heic, .*HEIC by pillow-heif"):
        open_source(str(root))


def test_a_link_that_leads_nowhere_is_named_and_looked_up_again(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(root / "a" / "1.png")
    (root / "b").symlink_to(tmp_path / "disk", target_is_directory=True)
    assert len(open_source(str(root))) == 1
    assert "left out 1 entries that are not regular files (broken links, pipes, devices), the first is b" in caplog.text
    write(tmp_path / "disk" / "2.png")
    assert open_source(str(root)).classes == ["a", "b"]


def test_shards_beside_a_few_images_are_named(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(root / "preview.png")
    write_tar(root / "0.tar", labelled(range(3)))
    assert len(open_source(str(root))) == 1
    assert "holds 1 images and 1 tar shards, which are skipped" in caplog.text
    assert len(open_source(f"{root}/*.tar")) == 3


def test_names_that_are_not_utf8_are_read(root: Path) -> None:
    path = os.fsencode(root) + b"/caf\xe9.png"
    try:
        with open(path, "wb") as file:
            file.write(encoded(picture(3)))
    except OSError:
        pytest.skip("the file system takes UTF-8 only")
    assert_shows(open_source(str(root)), 0, 3)


@pytest.mark.parametrize("name", ["scenes", "scenes:9:32", "cifar10"])
def test_an_existing_folder_comes_before_a_set_of_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        write(tmp_path / name / f"{number}.png")
    assert len(open_source(name)) == len(open_evaluation_images(name)) == 3
    assert set_name(name) is None
    assert not names_scenes(name)


# ---- splits


def test_splits_are_subfolders_and_test_serves_as_val(root: Path) -> None:
    write(root / "train/a/1.png", 1)
    write(root / "train/b/1.png", 2)
    write(root / "test/a/1.png", 3)
    assert_shows(open_source(str(root), "val"), 0, 3)
    write(root / "val/a/1.png", 4)
    assert_shows(open_source(str(root), "val"), 0, 4)
    train = open_source(str(root), "train")
    assert train.classes == ["a", "b"]
    assert len(train) == 2


def test_splits_are_lists_tables_or_shards_of_that_name(root: Path) -> None:
    for value in (1, 2, 3, 4):
        write(root / f"{value}.png", value)
    (root / "train.txt").write_text("1.png\n2.png\n")
    (root / "val.csv").write_text("path\n3.png\n")
    assert len(open_source(str(root), "train")) == 2
    assert_shows(open_source(str(root), "val"), 0, 3)
    shards = root / "shards"
    shards.mkdir()
    for name, value in (("set-train-000.tar", 1), ("set-train-001.tar", 2), ("set-val-000.tar", 3)):
        write_tar(shards / name, [(f"{value}.png", encoded(picture(value)))])
    assert len(open_source(str(shards), "train")) == 2
    assert_shows(open_source(str(shards), "val"), 0, 3)


def test_a_missing_split_is_an_error_that_lists_what_is_there(root: Path) -> None:
    write(root / "train/a/1.png")
    with pytest.raises(ValueError, match=r"no split 'val': .* need val or .* or test in it.*\nit holds train\n"):
        open_source(str(root), "val")
    with pytest.raises(ValueError, match="it is a split itself: give its parent"):
        open_source(str(root / "train"), "val")
    with pytest.raises(ValueError, match=r"no split 'dev': evaluations need dev in it, a folder"):
        open_source(str(root), "dev")


def test_a_folder_without_labels_is_described_in_three_lines(root: Path) -> None:
    for number in range(3):
        write(root / f"{number}.png")
    for name in ("a.JPG", "b.txt", "c", "d.csv"):
        (root / name).write_text("")
    for name in ("x", "y"):
        (root / name).mkdir()
    with pytest.raises(ValueError, match="has no split 'train'") as caught:
        open_source(str(root), "train")
    needed, holds, remedy = str(caught.value).splitlines()
    assert "one subfolder per class" in needed
    assert holds == "it holds 0.png, 1.png, 2.png, a.JPG, b.txt, c, d.csv, x, y"
    assert remedy.startswith("without labels: train with --split all")
    (root / "empty").mkdir()
    with pytest.raises(ValueError, match="\nit holds nothing\n"):
        open_source(str(root / "empty"), "train")


# ---- cache


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o664), (0o077, 0o600)])
def test_a_group_may_share_a_cache(root: Path, cache_folder: Path, umask: int, mode: int) -> None:
    shard = write_tar(root / "0.tar", labelled(range(2)))
    before = os.umask(umask)
    try:
        open_source(str(shard))
    finally:
        os.umask(before)
    (path,) = cache_folder.iterdir()
    assert path.stat().st_mode & 0o777 == mode


def test_the_cache_lies_in_the_users_cache_folder(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DINO_SPARO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    write_tar(root / "0.tar", labelled(range(2)))
    open_source(f"{root}/0.tar")
    assert len(list((tmp_path / "xdg" / "dino_sparo").glob("*.npz"))) == 1


# ---- lists and tables


def test_a_list_names_paths_from_its_own_folder(root: Path, tmp_path: Path) -> None:
    write(root / "a b.png", 1)
    write(root / "sub/c.png", 2)
    absolute = write(tmp_path / "d.png", 3)
    (root / "list.txt").write_text(f"\ufeffa b.png\r\n\r\nsub/c.png\n{absolute}", encoding="utf-8")
    source = open_source(str(root / "list.txt"))
    assert source.labels is None
    for index, value in enumerate((1, 2, 3)):
        assert_shows(source, index, value)


@pytest.mark.parametrize(
    ("text", "labels", "classes"),
    [
        ("a b.png 2\nc.png 0\n", [2, 0], ["0", "1", "2"]),
        ("a b.png\twhite fox\nc.png\tape\n", [1, 0], ["ape", "white fox"]),
        ("a b.png 1\nc.png\n", [1, -1], ["0", "1"]),
        ("a b.png -1\nc.png 0\n", [-1, 0], ["0"]),
        ("a b.png 99999999\nc.png 7\n", [1, 0], ["7", "99999999"]),
    ],
)
def test_a_list_may_have_labels(root: Path, text: str, labels: list[int], classes: list[str]) -> None:
    write(root / "a b.png", 1)
    write(root / "c.png", 2)
    (root / "list.txt").write_text(text)
    source = open_source(str(root / "list.txt"))
    assert source.labels.tolist() == labels
    assert source.classes == classes
    assert_shows(source, 0, 1)


@pytest.mark.parametrize("late", ["label", "split"])
def test_lines_of_a_jsonl_table_have_the_keys_of_the_first(root: Path, late: str) -> None:
    """The bug: a label or split that the first line lacks was ignored, and validation images were trained on."""
    write(root / "a.png", 1)
    lines = [{"path": "a.png", "size": 3}, {"path": "a.png"}, {"path": "a.png", late: "val"}]
    (root / "table.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ValueError, match=rf"line 3 has \['{late}'\], which the first line lacks; give all lines"):
        open_source(str(root / "table.jsonl"))
    (root / "table.jsonl").write_text("\n".join(map(json.dumps, [{**lines[0], late: None}, *lines[1:]])))
    assert len(open_source(str(root / "table.jsonl"), split="val" if late == "split" else None)) in (1, 3)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_a_table_finds_its_columns_by_name(root: Path, delimiter: str) -> None:
    write(root / "a, b.png", 1)
    write(root / "c.png", 2)
    rows = [
        ["Label", "note", "FilePath"],
        ["fox", "x", '"a, b.png"'],
        ["ape", "y,z" if delimiter != "," else "y", "c.png"],
    ]
    (root / "table.csv").write_text("\n".join(delimiter.join(row) for row in rows) + "\n")
    source = open_source(str(root / "table.csv"))
    assert source.classes == ["ape", "fox"]
    assert source.labels.tolist() == [1, 0]
    assert_shows(source, 0, 1)
    assert_shows(source, 1, 2)


@pytest.mark.parametrize(
    ("name", "text", "split", "message"),
    [
        ("t.csv", "number;colour\n1;red\n", None, r"no column of paths .*found the columns \['number', 'colour'\]"),
        ("t.csv", "path,label\na.png\n", None, "line 2 has 1 columns, the header has 2"),
        ("t.csv", "path\na.png\n", "val", r"no split 'val': none of its columns \['path'\] is split or"),
        ("t.csv", "path\n", None, "names no images"),
        ("t.csv", "", None, "no column of paths"),
        ("l.txt", "\n\n", None, "names no images"),
        (
            "l.txt",
            "a.png\ngone.png\nalso.png\n",
            None,
            r"names 'gone.png', but .*images/gone.png' does not exist or is not a .*; paths",
        ),
        ("l.txt", "a.png\n", "train", "list .* has no split 'train'; put train.txt and val.txt"),
        ("l.bin", "a\0b", None, "is not a text file"),
        ("photo.jpg", "a", "train", "has no split 'train'; put train/ and val/ into a folder"),
        ("images.zip", "a", None, "is compressed, so its images cannot be read in random order"),
        ("shard.tar.gz", "a", None, r"is compressed, .*decompress it to a plain \.tar"),
    ],
)
def test_bad_files_are_errors(root: Path, name: str, text: str, split: str | None, message: str) -> None:
    write(root / "a.png")
    (root / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        open_source(str(root / name), split)


def test_a_single_image_is_a_source_of_one_image(root: Path) -> None:
    write(root / "a.png", 7)
    source = open_source(str(root / "a.png"), "all")
    assert (len(source), source.labels, source.location(0)) == (1, None, str(root / "a.png"))
    assert_shows(source, 0, 7)
    (root / "b.png").write_text("broken")
    with pytest.raises(CorruptImageError, match=r"b\.png"):
        open_source(str(root / "b.png"))


def test_names_in_a_list_need_no_ending_of_an_image_to_have_labels(root: Path) -> None:
    for value, name in enumerate(("scan1", "scan 2", "scan3.dat", "scan4")):
        write(root / name, value)
    (root / "list.txt").write_text("scan1 fox\nscan 2  ape # old\nscan3.dat\tfox\nscan4\n")
    source = open_source(str(root / "list.txt"))
    assert source.classes == ["ape", "fox"]
    assert source.labels.tolist() == [1, 0, 1, -1]
    assert_shows(source, 1, 1)


def test_files_missing_far_down_a_list_are_corrupt_images(root: Path) -> None:
    write(root / "a.png")
    (root / "list.txt").write_text("a.png\n" * 20 + "gone.png\n")
    source = open_source(str(root / "list.txt"))
    with pytest.raises(CorruptImageError, match=r"gone\.png: No such file or directory"):
        source.read(20)


# ---- tar shards


def labelled(values: range) -> list[tuple[str, bytes]]:
    return [m for v in values for m in ((f"{v:03d}.png", encoded(picture(v))), (f"{v:03d}.cls", b"%d" % (v % 3)))]


def test_shards_of_webdataset_are_read(root: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(root / "shard.tar")) as writer:
        for value in range(3):
            writer.write({"__key__": f"sample{value}", "png": picture(value), "cls": 2 - value, "txt": "a caption"})
    source = open_source(str(root / "shard.tar"))
    assert source.labels.tolist() == [2, 1, 0]
    for value in range(3):
        assert_shows(source, value, value)


@pytest.mark.parametrize(
    "pattern", ["s-{008..010}.tar", "s-*.tar", "s-008.tar::s-{009,010}.tar", "s-0{0,1}[0-9].tar", "{s}-x::", ""]
)
def test_shards_are_named_by_braces_globs_joins_or_their_folder(root: Path, pattern: str) -> None:
    for number, values in ((8, range(0, 2)), (9, range(2, 5)), (10, range(5, 6))):
        write_tar(root / f"s-{number:03d}.tar", labelled(values))
    if pattern == "{s}-x::":
        with pytest.raises(ValueError, match="does not exist"):
            open_source(str(root / pattern))
        return
    path = "::".join(str(root / part) for part in pattern.split("::"))
    source = open_source(path)
    assert len(source) == 6
    assert source.labels.tolist() == [v % 3 for v in range(6)]
    assert source.location(5) == f"{root}/s-010.tar!005.png"
    for value in range(6):
        assert_shows(source, value, value)
    assert_shows(pickle.loads(pickle.dumps(source)), 4, 4)


def test_missing_shards_are_named(root: Path) -> None:
    write_tar(root / "s-0.tar", labelled(range(1)))
    with pytest.raises(ValueError, match=r"s-1\.tar' does not exist .*; name the shards that exist, .*/\*\.tar'"):
        open_source(f"{root}/s-{{0..2}}.tar")
    with pytest.raises(ValueError, match=r"t-\*\.tar' does not exist"):
        expand_shards(f"{root}/t-*.tar")


def test_links_devices_and_hidden_files_in_a_tar_are_passed_over(root: Path) -> None:
    path = root / "shard.tar"
    with tarfile.open(path, "w") as tar:
        for name, kind in (("a.png", tarfile.SYMTYPE), ("b.png", tarfile.LNKTYPE), ("c.png", tarfile.FIFOTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        folder = tarfile.TarInfo("d.png")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        content = encoded(picture(6))
        for name in ("../../outside.PNG", "./._b.png"):  # the second is a Mac's resource fork
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    source = open_source(str(path))
    assert len(source) == 1
    assert_shows(source, 0, 6)
    assert not (root.parent.parent / "outside.PNG").exists()


@pytest.mark.parametrize("num_blocks", [0, 1, 2])
def test_a_tar_may_end_without_zeros_or_with_one_block_of_them(root: Path, num_blocks: int) -> None:
    path = write_tar(root / "s.tar", labelled(range(2)), tarfile.GNU_FORMAT)
    content = path.read_bytes().rstrip(b"\0")
    path.write_bytes(content + bytes(-len(content) % 512 + 512 * num_blocks))
    assert len(open_source(str(path))) == 2


@pytest.mark.parametrize("order", [1, -1])
def test_names_with_dots_have_the_label_of_their_whole_stem(root: Path, order: int) -> None:
    """The bug: all images whose names began alike up to the first dot had the last label."""
    images = [(f"IMG.2020.{i}.jpg", encoded(picture(i))) for i in range(4)] + [("IMG.jpg", encoded(picture(4)))]
    labels = [(name.replace("jpg", "cls"), b"%d" % (i % 3)) for i, (name, _) in enumerate(images)]
    pairs = [member for pair in zip(images, labels, strict=True) for member in pair]
    for name, members in (("near", pairs), ("apart", images + labels), ("without plain", pairs[:-2])):
        source = open_source(str(write_tar(root / f"{name}.tar", members[::order])))
        found = {source.location(i).split("!")[1]: int(source.labels[i]) for i in range(len(source))}
        assert found == {image: i % 3 for i, (image, _) in enumerate(images) if (image, _) in members}


def test_a_key_that_comes_again_has_the_label_of_its_neighbour(root: Path) -> None:
    """The bug: the last label of a key was that of all its images."""
    members = [("a.png", encoded(picture(1))), ("a.cls", b"1"), ("b.png", encoded(picture(2))), ("b.cls", b"2")]
    source = open_source(str(write_tar(root / "s.tar", [*members, ("a.png", encoded(picture(3))), ("a.cls", b"3")])))
    assert source.labels.tolist() == [1, 2, 3]
    apart = [("a.png", encoded(picture(1))), ("b.png", encoded(picture(2))), ("b.cls", b"2"), ("a.cls", b"1")]
    source = open_source(str(write_tar(root / "t.tar", apart)))
    assert source.labels.tolist() == [1, 2]


def test_tars_of_the_oldest_kind_are_checked_by_their_sum(root: Path) -> None:
    path = write_tar(root / "shard.tar", labelled(range(1))[:1], tarfile.GNU_FORMAT)
    content = bytearray(path.read_bytes())
    content[257:265] = bytes(8)
    checksum = sum(content[:148]) + 8 * 32 + sum(content[156:512])
    content[148:156] = b"%06o\0 " % checksum
    path.write_bytes(content)
    assert_shows(open_source(str(path)), 0, 0)
    content[0:1] = b"1"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"):
        open_source(str(path))


def test_other_bad_shards_are_errors(root: Path) -> None:
    write_tar(root / "texts.tar", [("a.txt", b"hello")])
    with pytest.raises(ValueError, match="no images in 1 shard"):
        open_source(str(root / "texts.tar"))
    with pytest.raises(ValueError, match="has no split 'val': shards given by name have none"):
        open_source(str(root / "texts.tar"), "val")
    with pytest.raises(ValueError, match="shards given by name have none"):
        open_source(str(root / "{texts}.tar"), "val")
    (root / "a.tar.gz").touch()
    with pytest.raises(ValueError, match="is compressed"):
        open_source(str(root / "*.gz"))
    write(root / "1.png")
    with pytest.raises(ValueError, match=r"matches .*1\.png'; several files at once must be \.tar shards"):
        open_source(str(root / "*.png"))


def test_images_of_absurd_size_are_refused_unread(root: Path) -> None:
    write_tar(root / "shard.tar", labelled(range(1)))
    write(root / "flat/1.png")
    (root / "flat/list.csv").write_text("path\n1.png\n")
    for path in ("shard.tar", "flat", "flat/list.csv"):
        source = open_source(str(root / path), limits=ImageLimits(max_mb=50e-6))
        with pytest.raises(CorruptImageError, match=r"bytes; at most 5e-05 MB are read \(--max_image_mb\)"):
            source.read(0)


def test_a_shard_that_vanishes_gives_corrupt_images(root: Path) -> None:
    path = write_tar(root / "shard.tar", labelled(range(1)))
    source = open_source(str(path))
    path.unlink()
    with pytest.raises(CorruptImageError, match=r"shard\.tar!byte 0: No such file"):
        source.read(0)


# ---- pixels


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("1", "PNG"), ("L", "JPEG"), ("LA", "PNG"), ("P", "PNG"), ("RGBA", "PNG"), ("CMYK", "JPEG"), ("RGB", "WEBP")],
)
def test_every_kind_of_image_becomes_the_references_rgb(mode: str, kind: str) -> None:
    content = encoded(picture(9, mode), kind)
    image = decode_image(content, "here")
    assert image.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(image), np.asarray(Image.open(io.BytesIO(content)).convert("RGB")))


def test_transparency_is_dropped_without_a_warning() -> None:
    palette = picture(4, "P")
    content = encoded(palette, transparency=bytes(range(0, 250, 10)))
    np.testing.assert_array_equal(np.asarray(decode_image(content, "here")), np.asarray(palette.convert("RGB")))
    clear = picture(4, "RGBA")
    clear.putalpha(0)
    np.testing.assert_array_equal(np.asarray(decode_image(encoded(clear), "here")), np.asarray(picture(4)))


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_gray_is_scaled_not_clipped(kind: str) -> None:
    values = np.linspace(0, 65535, 35).round().astype(np.uint16).reshape(5, 7)
    pixels = np.asarray(decode_image(encoded(Image.fromarray(values), kind), "here"))
    np.testing.assert_array_equal(pixels, np.repeat(np.round(values / 257)[..., None], 3, axis=2))


@pytest.mark.parametrize("mode", ["RGB", "L", "P"])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_images_are_turned_upright_once_unless_the_exif_orientation_is_ignored(kind: str, mode: str) -> None:
    if (kind, mode) == ("JPEG", "P"):
        pytest.skip("there are no such files")
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        content = encoded(picture(0, mode), kind, exif=exif)
        stored = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
        upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB"))
        for limits, expected in ((ImageLimits(), upright), (ImageLimits(exif="ignore"), stored)):
            image = decode_image(content, "here", limits)
            np.testing.assert_array_equal(np.asarray(image), expected)
            np.testing.assert_array_equal(np.asarray(to_image(image, 3)), expected)  # a scorer may see it again
        opened = Image.open(io.BytesIO(content))
        for _ in range(2):
            np.testing.assert_array_equal(np.asarray(to_image(opened, 3)), upright)


def test_images_with_damaged_exif_data_are_read_as_they_are_stored() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encoded(picture(0), "JPEG", exif=exif).replace(b"MM\0*", b"XX\0*").replace(b"II*\0", b"XX*\0")
    assert decode_image(content, "here").size == (7, 5)


LARGE_JPEG, LARGE_PNG = (encoded(picture(0).resize((350, 250)), kind) for kind in ("JPEG", "PNG"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", r"the file is empty \(0 bytes\)"),
        (b"<html>not found</html>", "is not one of BMP, GIF, JPEG, PNG, PPM, TIFF, WEBP; convert it$"),
        (LARGE_JPEG[: len(LARGE_JPEG) // 2], "image file is truncated"),
        (LARGE_PNG[: len(LARGE_PNG) // 2], "truncated|broken"),
        (encoded(Image.new("F", (3, 2), 0.5), "TIFF"), "F pixels from 0.5 to 0.5 have no known range"),
        (encoded(Image.new("I", (3, 2), 70000), "TIFF"), "I pixels from 70000 to 70000 have no known range"),
    ],
)
def test_unreadable_bytes_are_corrupt_images(content: bytes, reason: str) -> None:
    with pytest.raises(CorruptImageError, match=f"^some/where: .*{reason}") as caught:
        decode_image(content, "some/where")
    assert caught.value.location == "some/where"
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.location, copy.reason) == (caught.value.location, caught.value.reason)


# ---- named sets


def write_fashionmnist(root: Path) -> np.ndarray:
    """A few images in the files that torchvision expects; returns the training images."""
    folder = root / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    images = np.arange(3 * 28 * 28, dtype=np.uint32).reshape(3, 28, 28).astype(np.uint8)
    for name, count in (("train", 3), ("t10k", 2)):
        header = struct.pack(">iiii", 0x803, count, 28, 28)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(header + images[:count].tobytes())
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">ii", 0x801, count) + bytes([9, 0, 4][:count]))
    return images


def test_a_torchvision_set_is_opened_by_name(root: Path) -> None:
    images = write_fashionmnist(root)
    source = open_source(f"fashionmnist:{root}")
    assert source.labels.tolist() == [9, 0, 4]
    assert source.classes[9] == "Ankle boot"
    assert source.location(1) == f"fashionmnist in {root} (training)[1]"
    np.testing.assert_array_equal(np.asarray(source.read(1)), np.repeat(images[1][..., None], 3, axis=2))
    assert len(open_source(f"fashionmnist:{root}", "train")) == 3
    assert len(open_source(f"fashionmnist:{root}", "val")) == 2
    with pytest.raises(CorruptImageError, match=r"fashionmnist in .*\[5\]"):
        source.read(5)


@pytest.mark.parametrize("name", sorted(TORCHVISION_SETS))
def test_a_torchvision_set_that_is_not_there_asks_for_download(name: str, root: Path) -> None:
    with pytest.raises(ValueError, match=f"torchvision set '{name}' in .*pass --download to fetch it"):
        open_source(f"{name}:{root}", "val")


def test_a_failed_download_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no network")

    entry = TORCHVISION_SETS["cifar10"]
    monkeypatch.setitem(TORCHVISION_SETS, "cifar10", entry._replace(build=fail))
    with pytest.raises(ValueError, match=r"'cifar10' in .* could not be opened \(no network\)"):
        open_source(f"cifar10:{root}", download=True)


@pytest.mark.parametrize(("spec", "count", "size"), [("scenes:7", 7, None), ("scenes:5:32", 5, (32, 32))])
def test_scenes_are_opened_by_name(spec: str, count: int, size: tuple[int, int] | None) -> None:
    train, val = open_source(spec), open_source(spec, "val")
    assert len(train) == len(val) == count
    assert size in (None, train.read(0).size)
    assert np.any(np.asarray(train.read(1)) != np.asarray(val.read(1)))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("not/here", r"data_path='not/here' does not exist .*give a folder, a list"),
        ("", "data_path='' does not exist"),
        ("cifar11:data", "does not exist .* or NAME:DIR with NAME one of scenes, cifar10, cifar100, stl10"),
    ],
)
def test_what_does_not_exist_is_an_error(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_source(path)

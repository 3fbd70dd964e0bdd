"""files.py and decode.py: files from strangers neither hang a run, nor fill memory, nor start programs."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import encoded
from PIL import Image
from safetensors.torch import save_file

from dino_sparo.data.dataset import ImageDataset
from dino_sparo.data.loader import create_loader
from dino_sparo.data.samplers import ShardSampler
from dino_sparo.data.scenes.images import Scenes
from dino_sparo.data.sources import CorruptImageError, ImageLimits, decode, decode_image, expand_shards, open_source
from dino_sparo.data.sources.decode import IMAGE_FORMATS
from dino_sparo.data.views import EvalTransform
from dino_sparo.evaluation.features import load_features
from dino_sparo.evaluation.slots.choice import parse_slots
from dino_sparo.image_text.pairs.sources import open_pairs
from dino_sparo.image_text.prompts import open_classes, read_words
from dino_sparo.runtime.files import open_regular, parse_json
from dino_sparo.weights.checkpoint import load_checkpoint

DEADLINE_S = 20


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """What hangs is interrupted."""

    def hang(*_: object) -> None:
        raise AssertionError(f"hangs for {DEADLINE_S} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(DEADLINE_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def write(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(Image.new("RGB", (3, 2)), "PNG"))
    return path


def test_postscript_named_jpg_starts_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(subprocess, "check_call", lambda command, **_: started.append(command))
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
    with pytest.raises(CorruptImageError, match="is not one of BMP, GIF, JPEG, PNG, PPM, TIFF, WEBP"):
        decode_image(postscript, "photo.jpg")
    assert not started


def test_an_image_of_many_pixels_is_refused_by_its_header() -> None:
    content = encoded(Image.new("1", (10_000, 9_000)), "PNG")  # beyond Pillow's own limit, too
    assert len(content) < 20_000
    with pytest.raises(CorruptImageError, match=r"10,000 x 9,000 pixels; at most 64 million are read \(--max_image_mp"):
        decode_image(content, "here")
    small = encoded(Image.new("RGB", (7, 5)), "PNG")
    assert decode_image(small, "here", ImageLimits(max_mpix=35e-6)).size == (7, 5)
    with pytest.raises(CorruptImageError, match="7 x 5 pixels"):
        decode_image(small, "here", ImageLimits(max_mpix=34e-6))


def test_a_decompression_bomb_for_pillow_is_a_corrupt_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 10)
    with pytest.raises(CorruptImageError, match="decompression bomb"):
        decode_image(encoded(Image.new("RGB", (7, 5)), "PNG"), "here")


@pytest.fixture
def no_warning_yet() -> Iterator[None]:
    decode._HAS_WARNED[0] = 0
    yield
    decode._HAS_WARNED[0] = 0


def write_deep(path: Path, highest: int) -> Path:
    """A 16-bit image with values from 0 to `highest`."""
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(np.linspace(0, highest, 35).round().astype(np.uint16).reshape(5, 7)).save(path)
    return path


def test_dark_images_of_12_bits_are_named_once_with_the_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, no_warning_yet: None
) -> None:
    for name in "abc":
        write_deep(tmp_path / "images" / f"{name}.png", 4090)
    source = open_source(str(tmp_path / "images"))
    assert [np.asarray(source.read(index)).max() for index in range(3)] == [16] * 3
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "values from 0 to 4090, where 65535 is white" in warnings[0]
    assert "give --max_value 4095" in warnings[0]


def test_the_workers_of_loaders_warn_once_together(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], no_warning_yet: None
) -> None:
    """One worker after the other: those that see their first dark images at the same moment may both warn."""
    for name in "ab":
        write_deep(tmp_path / "images" / f"{name}.png", 4090)
    dataset = ImageDataset(open_source(str(tmp_path / "images")), EvalTransform(8))
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(handler)
    for _ in range(2):
        assert len(list(create_loader(dataset, ShardSampler(2, 1), num_workers=1))) == 2
    logging.getLogger().removeHandler(handler)
    assert capfd.readouterr().err.count("give --max_value 4095") == 1


@pytest.mark.parametrize("highest", [0, 20000, 65535])
def test_16_bit_images_that_are_black_or_bright_are_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, no_warning_yet: None, highest: int
) -> None:
    decode_image(write_deep(tmp_path / "a.png", highest).read_bytes(), "here")
    assert not caplog.records


def test_max_value_becomes_white_and_larger_values_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, no_warning_yet: None
) -> None:
    content = write_deep(tmp_path / "a.png", 5000).read_bytes()
    values = np.linspace(0, 5000, 35).round().reshape(5, 7)
    pixels = np.asarray(decode_image(content, "here", ImageLimits(max_value=4095)))[..., 0]
    np.testing.assert_array_equal(pixels, np.minimum(np.round(values * 255 / 4095), 255))
    assert not caplog.records


# ---- files that are none


def test_a_pipe_a_device_and_a_folder_in_a_list_are_corrupt_images_at_once(tmp_path: Path) -> None:
    write(tmp_path / "a.png")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "list.txt").write_text("a.png\n" * 8 + "pipe.png\n/dev/zero\n.\n" + "x" * 300 + ".png\n")
    source = open_source(str(tmp_path / "list.txt"))
    for index, reason in enumerate(
        ("not a regular file", "not a regular file", "not a regular file", "name too long"), 8
    ):
        with pytest.raises(CorruptImageError, match=reason):
            source.read(index)


def test_a_pipe_first_in_a_list_or_as_the_list_itself_is_an_error_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "list.txt").write_text("pipe.png\n")
    with pytest.raises(ValueError, match=r"pipe.png' does not exist or is not a regular file"):
        open_source(str(tmp_path / "list.txt"))
    os.mkfifo(tmp_path / "images.csv")
    for path in (str(tmp_path / "images.csv"), "/dev/zero"):
        with pytest.raises(ValueError, match="is neither a folder nor a regular file, but a pipe or a device"):
            open_source(path)
    with pytest.raises(OSError, match="is a folder, a pipe or a device, not a regular file"):
        open_regular(tmp_path / "images.csv")


def test_a_pipe_called_tar_is_a_shard_that_cannot_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.tar")
    with pytest.raises(
        ValueError, match=r"x\.tar' cannot be read \(is a folder, a pipe or a device, not a regular file\)"
    ):
        open_source(str(tmp_path))
    with pytest.raises(ValueError, match="is a folder, a pipe or a device, not a regular file"):
        open_pairs(str(tmp_path))


@pytest.mark.parametrize("data_path", ["pairs.tar", "coco.json"])
def test_columns_of_pairs_that_are_no_table_are_refused_not_ignored(tmp_path: Path, data_path: str) -> None:
    (tmp_path / data_path).touch()
    with pytest.raises(ValueError, match=r"is not a table, so it has no column of that name \(path 'a', split 'b'\)"):
        open_pairs(str(tmp_path / data_path), image_key="a", split_column="b")


def test_a_path_with_a_null_byte_is_a_corrupt_image(tmp_path: Path) -> None:
    write(tmp_path / "a.png")
    rows = '{"path": "a.png"}\n' * 8 + '{"path": "b\\u0000.png"}\n'
    (tmp_path / "list.jsonl").write_text(rows)
    with pytest.raises(CorruptImageError, match=r"null (byte|character)"):
        open_source(str(tmp_path / "list.jsonl")).read(8)


def test_pipes_and_links_in_a_circle_are_left_out_of_a_folder_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "images"
    write(root / "a.png")
    os.mkfifo(root / "pipe.png")
    (root / "self.png").symlink_to(root / "self.png")
    (root / "loop").symlink_to(root)
    assert len(open_source(str(root))) == 1
    assert "left out 2 entries that are not regular files" in caplog.text


def test_folders_that_link_to_one_another_are_listed_once_not_in_an_endless_walk(tmp_path: Path) -> None:
    count = 12
    for i in range(count):
        write(tmp_path / f"images/{i}/a.png")
        for j in range(count):
            (tmp_path / f"images/{i}/to{j}").symlink_to(tmp_path / f"images/{j}")
    assert len(open_source(str(tmp_path / "images"))) == count


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("x-{0..9999999999}.tar", "expands to 10,000,000,000 shards; give 1 to 1,048,576"),
        ("{0..9}" * 30 + ".tar", "shards; give 1 to"),
        ("{5..1}.tar", "expands to 0 shards"),
        ("x-{0..999999}.tar", r"x-0\.tar' does not exist"),
        ("{a,b}" * 5 + "{0..0}" * 2000, "does not exist"),
    ],
)
def test_braces_are_not_expanded_before_it_is_known_how_many_names_they_mean(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expand_shards(pattern)


# ---- JSON and names


def test_deeply_nested_json_is_an_ordinary_error_in_every_file_that_a_user_gives(tmp_path: Path) -> None:
    nested = "[" * 100_000
    for name in ("a.json", "features.json", "folder_to_objectnet_label.json", "objectnet_to_imagenet_1k.json"):
        (tmp_path / name).write_text(nested)
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    path = tmp_path / "a.json"
    for read in (
        lambda: parse_json(nested),
        lambda: parse_slots(str(path)),
        lambda: read_words(str(path)),
        lambda: load_checkpoint(tmp_path / "a.safetensors"),
        lambda: load_features(tmp_path),
        lambda: open_classes(Scenes(3, 32), f"objectnet:{tmp_path}"),
    ):
        with pytest.raises(ValueError, match="nested too deeply"):
            read()


def test_a_remote_path_is_said_to_be_one(tmp_path: Path) -> None:
    for path in ("https://host/a.csv", "s3://bucket/{0..9}.tar", "pipe:curl https://host/a.tar", "a.tar::gs://b/c.tar"):
        with pytest.raises(ValueError, match="is an address; download the files first"):
            open_source(path)


@pytest.mark.parametrize("kind", IMAGE_FORMATS)
def test_every_format_of_the_list_is_read_with_its_pixels(kind: str) -> None:
    values = np.arange(35, dtype=np.uint8).reshape(5, 7) * 7
    pixels = np.asarray(decode_image(encoded(Image.fromarray(values), kind), kind))
    lost = 20 if kind in ("JPEG", "WEBP") else 0
    np.testing.assert_allclose(pixels, np.repeat(values[..., None], 3, axis=2), rtol=0, atol=lost)

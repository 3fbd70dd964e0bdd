"""channels.py and what uses it in data/: files of any number of channels -> crops in their depth."""

import contextlib
import io
import struct
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import encoded
from PIL import Image, ImageFilter

from dino_sparo.data.augment import Distortions, distort_crop, pack_parameters
from dino_sparo.data.channels import ChannelImage, levels_of, picture_of, planes_of_array
from dino_sparo.data.crops import MultiCropAugmentation, cut_crop, cut_crop_fast, pixels_in_rows, pixels_of, sample_crop
from dino_sparo.data.samplers import image_rng
from dino_sparo.data.sources import CorruptImageError, ImageLimits, decode, decode_image, open_source
from dino_sparo.data.sources.decode import to_image
from dino_sparo.data.views import EvalTransform, rgb_pixels

HEIGHT, WIDTH = 23, 31
FIVE = ImageLimits(in_chans=5, max_value=10_000)


def stack(channels: int = 5, seed: int = 0) -> np.ndarray:
    """(C, H, W), integers from 0 to 10,000."""
    return np.random.default_rng(seed).integers(0, 10_001, (channels, HEIGHT, WIDTH)).astype(np.uint16)


def npy(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


# Files -> levels.


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)], ids=["C H W", "H W C"])
def test_arrays_have_their_channels_first_or_last(order: tuple[int, ...]) -> None:
    image = decode_image(npy(stack().transpose(order)), "a.npy", FIVE)
    assert (image.width, image.height, len(image.getbands())) == (WIDTH, HEIGHT, 5)
    np.testing.assert_allclose(pixels_of(image), stack() * (255 / 10_000), rtol=1e-6)


def test_where_both_axes_could_hold_the_channels_the_last_one_does() -> None:
    values = np.arange(75).reshape(5, 3, 5)
    assert (planes_of_array(values, 5) == values.transpose(2, 0, 1)).all()


def test_the_pages_of_a_tiff_are_channels_and_three_channels_take_the_first_page() -> None:
    pages = [Image.fromarray(plane) for plane in stack()]
    data = encoded(pages[0], "TIFF", save_all=True, append_images=pages[1:])
    np.testing.assert_allclose(pixels_of(decode_image(data, "a.tif", FIVE)), stack() * (255 / 10_000), rtol=1e-6)
    assert decode_image(data, "a.tif").mode == "RGB"


def test_the_first_tiff_of_several_pages_that_is_read_as_rgb_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    decode._HAS_WARNED[1] = 0
    pages = [Image.fromarray(plane) for plane in stack()]
    several = encoded(pages[0], "TIFF", save_all=True, append_images=pages[1:])
    for data in (encoded(pages[0], "TIFF"), several, several):
        decode_image(data, "a.tif")
    warnings = [record.getMessage() for record in caplog.records if "pages" in record.getMessage()]
    assert warnings == [
        "a TIFF has several pages, of which only the first is read, as RGB; if the pages are channels, give their "
        "number as --in_chans"
    ]


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_a_tiff_of_twenty_thousand_pages_is_read_or_refused_at_once(channels: int) -> None:
    """The bug: its pages were counted, which took 18 s."""
    tags = [(256, 4, 4), (257, 4, 4), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 4, 8), (277, 3, 1), (278, 4, 4)]
    tags.append((279, 4, 16))
    page = struct.pack("<H", len(tags)) + b"".join(
        struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags
    )
    starts = [24 + number * (len(page) + 4) for number in range(20_000)]
    chain = b"".join(page + struct.pack("<I", following) for following in (*starts[1:], 0))
    start = time.perf_counter()
    with contextlib.nullcontext() if channels == 3 else pytest.raises(CorruptImageError, match="has more pages than"):
        decode_image(b"II*\0" + struct.pack("<I", 24) + bytes(16) + chain, "a.tif", ImageLimits(in_chans=channels))
    assert time.perf_counter() - start < 1


def test_a_folder_of_arrays_alone_asks_for_in_chans(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match=r"holds no images: looked for files ending in \.jpg, .* it holds a$"):
        open_source(str(tmp_path))
    np.save(tmp_path / "a" / "stack.npy", stack())
    with pytest.raises(ValueError, match=r"to read its \.npy files, give --in_chans N, their number of channels$"):
        open_source(str(tmp_path))


def test_16_bit_grey_keeps_its_depth_with_one_channel_and_is_8_bit_rgb_with_three() -> None:
    values = np.arange(HEIGHT * WIDTH, dtype=np.uint16).reshape(HEIGHT, WIDTH)
    data = encoded(Image.fromarray(values))
    deep = pixels_of(decode_image(data, "a.png", ImageLimits(in_chans=1, max_value=4095)))
    assert len(np.unique(deep)) == HEIGHT * WIDTH
    np.testing.assert_allclose(deep[0], values * (255 / 4095), rtol=1e-6)
    flat = decode_image(data, "a.png", ImageLimits(max_value=4095))
    assert flat.mode == "RGB"
    assert len(np.unique(np.asarray(flat))) == int(values.max()) * 255 // 4095 + 1


def test_rgba_is_four_channels_or_three_without_transparency() -> None:
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (HEIGHT, WIDTH, 4), np.uint8), "RGBA")
    assert (pixels_of(to_image(image, 4)) == pixels_of(image)).all()
    assert (pixels_of(to_image(image, 3)) == pixels_of(image)[:3]).all()
    grey = image.convert("LA")
    assert (pixels_of(to_image(grey, 1)) == np.asarray(grey)[None, ..., 0]).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_an_array_for_three_channels_becomes_8_bit_rgb(channels: int) -> None:
    values = np.random.default_rng(2).integers(0, 256, (HEIGHT, WIDTH, channels), np.uint8)
    image = decode_image(npy(values), "a.npy")
    assert image.mode == "RGB"
    assert (np.asarray(image) == np.broadcast_to(values, (HEIGHT, WIDTH, 3))).all()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (npy(stack(7)), r"has 7 channels, the model takes 5; give images of 5, or a model .* --in_chans 7"),
        (npy(stack()[0]), "has 1 channel, the model takes 5"),
        (encoded(Image.new("RGB", (7, 11))), "has 3 channels, the model takes 5"),
        (
            encoded(Image.new("L", (7, 11)), "TIFF", save_all=True, append_images=[Image.new("L", (7, 11))]),
            "has 2 chan",
        ),
        (npy(stack()[None]), r"has shape \(1, 5, 23, 31\); save \(H, W\)"),
        (npy(stack() / 1000), r"has float64 pixels from 0.0\d* to .*; save floats from 0 to 1"),
        (npy(np.full((5, 7, 11), np.nan)), "save floats from 0 to 1"),
        (npy(stack().astype(np.int32) - 10_000), "has int32 pixels from -.* save integers from 0 to 65535"),
        (npy(stack())[:-3], "."),
        (npy(stack())[:9], "."),
        (npy(np.zeros((5, 7, 11), dtype=[("a", "u1")])), "save integers or floats"),
    ],
)
def test_what_cannot_be_used_is_named(data: bytes, message: str) -> None:
    with pytest.raises(CorruptImageError, match=message):
        decode_image(data, "a.npy", FIVE)


def test_a_header_that_promises_too_much_takes_no_memory() -> None:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<u2", "fortran_order": False, "shape": (5, 10**6, 10**6)})
    with pytest.raises(CorruptImageError):
        decode_image(file.getvalue(), "a.npy", FIVE)
    with pytest.raises(CorruptImageError, match=r"--max_image_mpix"):
        decode_image(npy(stack()), "a.npy", ImageLimits(in_chans=5, max_mpix=1e-4))


def test_folders_shards_and_lists_hold_arrays_and_rgb_ignores_them_in_folders(tmp_path: Path) -> None:
    folder = tmp_path / "images" / "a"
    folder.mkdir(parents=True)
    Image.new("RGB", (7, 11)).save(folder / "photo.png")
    np.save(folder / "stack.npy", stack())
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        tar.add(folder / "photo.png", "a.png")
        tar.add(folder / "stack.npy", "b.npy")
    (tmp_path / "list.txt").write_text("images/a/stack.npy 3\n")
    for path, numbers in ((tmp_path / "images", (1, 2)), (tmp_path / "shard.tar", (1, 2))):
        assert (len(open_source(str(path))), len(open_source(str(path), limits=FIVE))) == numbers
    source = open_source(str(tmp_path / "list.txt"), limits=FIVE)
    assert source.labels.tolist() == [3]
    np.testing.assert_allclose(pixels_of(source.read(0)), stack() * (255 / 10_000), rtol=1e-6)


# Levels -> crops.


def image_of(channels: int, seed: int = 3) -> ChannelImage:
    levels = np.random.default_rng(seed).integers(0, 256, (channels, 61, 53)).astype(np.float32)
    return ChannelImage.from_levels(levels)


def test_crops_and_views_are_those_of_8_bit_images_up_to_rounding() -> None:
    levels = pixels_of(image_of(3)) // 4 + 96  # Pillow clips 8-bit images between columns and rows
    deep, photo = ChannelImage.from_levels(levels), Image.fromarray(levels.astype(np.uint8).transpose(1, 2, 0))
    box = (3, 5, 41, 37)
    for own, theirs in (
        (cut_crop(deep, box, 29), cut_crop(photo, box, 29)),
        (cut_crop_fast(pixels_in_rows(deep), box, 29), cut_crop_fast(pixels_in_rows(photo), box, 29)),
        (EvalTransform(32)(deep)[0] * 50, EvalTransform(32)(photo)[0] * 50),
    ):
        assert abs(np.asarray(own, dtype=np.float32) - np.asarray(theirs, dtype=np.float32)).max() <= 1.5
        assert np.asarray(own).shape == np.asarray(theirs).shape


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_the_distortions_of_other_channels_follow_their_equations(channels: int) -> None:
    levels = pixels_of(image_of(channels))
    jitter = [("contrast", 1.3), ("brightness", 0.8)]
    parameters = pack_parameters(True, jitter, False, 1.5, True)
    expected = levels[..., ::-1]
    means = expected.mean((1, 2))[:, None, None]
    expected = np.clip(np.clip(means + 1.3 * (expected - means), 0, 255) * 0.8, 0, 255)
    blurred = [
        np.asarray(Image.fromarray(np.rint(plane).astype(np.uint8)).filter(ImageFilter.GaussianBlur(1.5)))
        for plane in expected
    ]
    bright = distort_crop(levels, pack_parameters(True, jitter, False, 1.5, False))
    assert abs(bright - np.array(blurred)).max() < 3  # Pillow rounds seven times
    assert len(np.unique(bright)) > 256  # nothing is rounded
    result = distort_crop(levels, parameters)
    assert (result == np.where(bright >= 128, 255 - bright, bright)).all()
    device = Distortions([0.5] * channels, [0.25] * channels)
    [batch] = device(torch.tensor(levels)[None], torch.tensor([parameters]))
    np.testing.assert_allclose(batch, (result / 255 - 0.5) / 0.25, atol=1e-3)


@pytest.mark.parametrize(("channels", "may_solarize"), [(1, True), (5, False)])
def test_colours_are_never_distorted(channels: int, may_solarize: bool) -> None:
    recipe = MultiCropAugmentation().recipes[1]
    drawn = [sample_crop(image_rng(0, 0, index), 50, 50, recipe) for index in range(200)]
    kept = [crop.without_colours(channels) for crop in drawn]
    assert {name for crop in kept for name, _ in crop.jitter} == {"brightness", "contrast"}
    assert not any(crop.grayscale for crop in kept)
    assert any(crop.solarize for crop in kept) == may_solarize
    assert all(
        (a.box, a.flip, a.blur_radius) == (b.box, b.flip, b.blur_radius) for a, b in zip(drawn, kept, strict=True)
    )


@pytest.mark.parametrize("channels", [1, 5])
def test_crops_finished_here_equal_those_finished_on_the_device(channels: int) -> None:
    mean, std = (0.5,) * channels, (0.25,) * channels
    sizes = {"global_crops_size": 32, "local_crops_size": 16, "local_crops_number": 1, "mean": mean, "std": std}
    here = MultiCropAugmentation(**sizes)(image_of(channels), image_rng(0, 0, 0))
    views, parameters = MultiCropAugmentation(**sizes, defer_color=True)(image_of(channels), image_rng(0, 0, 0))
    there = Distortions(mean, std).views([view[None] for view in views], parameters[:, None])
    for one, [other] in zip(here, there, strict=True):
        assert one.shape == other.shape
        assert one.shape[0] == channels
        assert (one - other).abs().max() < 0.1


# Pictures.


def test_a_picture_shows_the_chosen_channels_between_their_percentiles() -> None:
    values = np.linspace(0, 1, 101 * 7).reshape(101, 7, 1) * np.array([1, 1000, 3, 0.01])
    picture = picture_of(values, [3])
    assert picture.shape == (101, 7, 3)
    assert (picture[..., 0] == picture[..., 2]).all()
    assert (picture.min(), picture.max()) == (0, 255)
    assert (picture_of(values) == picture_of(values, [0, 1, 2])).all()
    assert (picture_of(values[..., :2]) == picture_of(values, [0])).all()
    assert picture_of(np.zeros((5, 7, 1))).max() == 0
    with pytest.raises(ValueError, match=r"--show_channels \[4\]: give one or three numbers from 0 to 3"):
        picture_of(values, [4])


def test_rgb_is_shown_as_it_is_unless_channels_are_chosen() -> None:
    photo = Image.fromarray(np.full((5, 7, 3), (10, 20, 30), np.uint8))
    assert (rgb_pixels(photo) == np.asarray(photo)).all()
    assert rgb_pixels(photo, [1]).shape == (5, 7, 3)


def test_floats_from_0_to_1_and_8_bit_share_their_levels() -> None:
    assert levels_of(np.array([0.0, 0.5, 1.0]), 7).tolist() == [0, 127.5, 255]
    assert levels_of(np.array([0, 255], np.uint8), 7).tolist() == [0, 255]
    assert levels_of(np.array([0, 7, 9], np.uint16), 7).tolist() == [0, 255, 255]

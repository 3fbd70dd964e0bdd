"""Attention maps, their pictures, and the script that writes them."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from torchvision import transforms

import visualize_attention
from dino_sparo.data.crops import normalized_tensor
from dino_sparo.data.defaults import IMAGENET_MEAN, IMAGENET_STD
from dino_sparo.data.sources import ImageLimits
from dino_sparo.draw.pixels import crops_grid, heat, mask_overlay, overlay, to_pixels
from dino_sparo.evaluation.attention import command as attention_command
from dino_sparo.evaluation.attention.maps import (
    attention_maps,
    class_token_share,
    display_order,
    effective_patches,
    group_near_duplicates,
    mass_mask,
    rank_by_peakedness,
    slots_grid,
)
from dino_sparo.evaluation.encoders import compared_encoder
from dino_sparo.models.encoder import Encoder, EncoderConfig, encoder_from_config
from dino_sparo.weights.entries import encoder_description
from dino_sparo.weights.folder import save_checkpoint

CONFIG = EncoderConfig(arch="vit_micro", patch_size=5, num_slots=7, slot_dim=11, key_dim=13, img_size=25)


def small_encoder(readout: str = "sparo", seed: int = 0) -> Encoder:
    torch.manual_seed(seed)
    return encoder_from_config(replace(CONFIG, readout=readout)).eval()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint with random weights per read-out; sparo's queries are long, so that its maps are peaked."""
    folder = tmp_path_factory.mktemp("checkpoints")
    paths = {readout: folder / f"{readout}.pth" for readout in ("sparo", "cls", "gap")}
    for readout, path in paths.items():
        encoder = small_encoder(readout)
        if readout == "sparo":
            encoder.readout.queries.data.mul_(20)
        networks = dict.fromkeys(("teacher", "student"), encoder.state_dict())
        save_checkpoint({**networks, "encoder": encoder_description(encoder.config), "epoch": 3}, path)
    return paths


def photo(path: Path, width: int = 61, height: int = 47, seed: int = 0) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).resize((width, height)).save(path)
    return path


# ---- maps


def test_sparo_maps_are_the_slots_attention_over_the_patches_row_by_row() -> None:
    encoder, images = small_encoder(), torch.randn(2, 3, 15, 33)
    with torch.no_grad():
        attention = encoder.readout_output(images).attention
    maps = attention_maps(encoder, images)
    assert maps.shape == (2, 7, 3, 6)
    for row in range(3):
        for column in range(6):
            np.testing.assert_allclose(maps[:, :, row, column], attention[:, :, 1 + row * 6 + column], rtol=1e-6)
    np.testing.assert_allclose(class_token_share(maps), attention[:, :, 0], atol=1e-6)


def test_cls_maps_are_the_class_tokens_row_of_each_head() -> None:
    encoder, images = small_encoder("cls"), torch.randn(2, 3, 15, 20)
    maps = attention_maps(encoder, images)
    with torch.no_grad():
        expected = encoder.backbone.last_self_attention(images)[:, :, 0, 1:].reshape(2, 4, 3, 4)
    np.testing.assert_allclose(maps, expected, rtol=1e-6)


def test_gap_has_one_uniform_map() -> None:
    maps = attention_maps(small_encoder("gap"), torch.randn(2, 3, 15, 20))
    np.testing.assert_allclose(maps, np.full((2, 1, 3, 4), 1 / 13), rtol=1e-6)


def test_maps_of_reduced_precision_are_fp32() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        maps = attention_maps(small_encoder(), torch.randn(2, 3, 15, 20))
    assert maps.dtype == np.float32


# ---- numbers about maps


def test_effective_patches_follow_the_entropy_and_ignore_the_sum() -> None:
    maps = np.random.default_rng(0).random((2, 7, 3, 5)).astype(np.float32)
    shares = maps[1, 4].ravel() / maps[1, 4].sum()
    expected = math.exp(-sum(p * math.log(p) for p in shares.tolist()))
    assert effective_patches(maps)[1, 4] == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(effective_patches(maps * 0.01), effective_patches(maps), rtol=1e-5)
    assert effective_patches(np.zeros((3, 5), dtype=np.float32)) == pytest.approx(15)  # it looks nowhere in particular


def bumps(centers: list[float], widths: list[float], images: int = 2) -> np.ndarray:
    """Maps (images, M, 3, 11): a bump per map along the columns, a little lower in every next image."""
    columns = np.arange(11)
    maps = [np.exp(-((columns - c) ** 2) / (2 * w**2)) for c, w in zip(centers, widths, strict=True)]
    stacked = np.repeat(np.stack(maps)[:, None], 3, axis=1)
    return np.stack([stacked * 0.9**i for i in range(images)]).astype(np.float32)


def test_near_duplicates_share_a_group_numbered_by_its_most_peaked_member() -> None:
    maps = bumps([8, 2, 2.1, 8], [2.0, 1.1, 1.0, 2.05])
    assert group_near_duplicates(maps).tolist() == [1, 0, 0, 1]


def test_maps_that_differ_on_one_image_are_no_duplicates() -> None:
    maps = bumps([2, 2, 2], [1, 1, 1])
    maps[1, 2] = maps[1, 2, :, ::-1]
    assert group_near_duplicates(maps).tolist() == [0, 0, 1]


def test_a_chain_of_small_steps_is_not_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dino_sparo.evaluation.attention.maps.NEAR_DUPLICATE", 0.9)
    maps = bumps([2, 2.5, 3, 3.5, 4], [1.0, 1.001, 1.002, 1.003, 1.004])
    groups = group_near_duplicates(maps)
    assert groups[0] == groups[1] != groups[4]


def test_peaked_maps_come_first_with_near_duplicates_behind_them_which_short_lists_leave_out() -> None:
    assert rank_by_peakedness(bumps([5, 5, 5, 5], [3.0, 0.5, 1.0, 0.5])).tolist() == [
        1,
        3,
        2,
        0,
    ]  # ties keep their order
    maps = bumps([8, 2, 5, 2.02], [1.0, 0.8, 0.9, 1.1])
    groups = group_near_duplicates(maps)
    assert display_order(maps, groups).tolist() == [1, 3, 2, 0]
    assert display_order(maps, groups, max_maps=2).tolist() == [1, 2]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.83, 1.0])
def test_masks_are_the_smallest_that_hold_the_share(share: float) -> None:
    heatmap = np.random.default_rng(3).random((3, 5)).astype(np.float32)
    heatmap[1, 2] = 0
    mask = mass_mask(heatmap, share)
    total = heatmap.astype(float).sum()
    assert heatmap[mask].astype(float).sum() >= share * total - 1e-9
    assert heatmap[mask].astype(float).sum() - heatmap[mask].min() < share * total
    assert heatmap[mask].min() >= heatmap[~mask].max()
    assert not mask[1, 2]


# ---- pixels


def test_heat_is_zero_at_an_even_share_and_one_at_the_maximum() -> None:
    heatmap = np.array([[1, 1, 1], [1, 1, 13]], dtype=np.float32)
    np.testing.assert_allclose(heat(heatmap), [[0, 0, 0], [0, 0, 1]])
    assert heat(np.full((2, 3), 0.2, dtype=np.float32)).max() == 0
    nearly_even = np.array([[1.0, 1.1, 0.9]], dtype=np.float32)
    assert heat(nearly_even).max() < 0.1


def test_overlays_glow_where_attention_is_and_dim_the_rest() -> None:
    image = np.full((24, 30, 3), 120, dtype=np.uint8)
    heatmap = np.zeros((4, 5), dtype=np.float32)
    heatmap[1, 3] = 1
    shown = overlay(image, heat(heatmap), smooth=False).astype(int)
    assert shown.shape == (24, 30, 3)
    assert (shown[6:12, 18:24, 0] > 150).all()
    assert (shown[:6] < 120).all()
    smooth = overlay(image, heat(heatmap)).astype(int)
    assert smooth[9, 21, 0] > smooth[9, 17, 0] > smooth[9, 3, 0]


def test_pixels_undo_the_normalisation() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    tensor = normalized_tensor(Image.fromarray(pixels), IMAGENET_MEAN, IMAGENET_STD)
    assert np.array_equal(to_pixels(tensor[None], IMAGENET_MEAN, IMAGENET_STD)[0], pixels)


def test_a_grid_of_crops_has_a_row_per_image_and_one_height() -> None:
    views = [torch.zeros(3, 3, 140, 140), torch.zeros(3, 3, 140, 140), torch.zeros(3, 3, 60, 60)]
    grid = crops_grid(views, IMAGENET_MEAN, IMAGENET_STD, num_images=2)
    assert grid.shape == (2 * (140 + 4) + 4, 3 * (140 + 4) + 4, 3)
    assert grid.dtype == np.uint8


def test_a_grid_of_slots_shows_the_image_and_all_maps_under_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the most peaked were shown, unnumbered, at other places after each epoch."""
    monkeypatch.setattr("dino_sparo.draw.pixels.GRID_HEIGHT", 128)
    encoder = small_encoder()
    with torch.no_grad():
        encoder.readout.queries.mul_(30)
    images = torch.randn(2, 3, 25, 25)
    maps = attention_maps(encoder, images)
    grid = slots_grid(encoder, images, IMAGENET_MEAN, IMAGENET_STD)
    step_y, step_x = 12 + 128 + 4, 128 + 4
    assert grid.shape == (2 * step_y + 4, (1 + 7) * step_x + 4, 3)
    shown = np.asarray(
        Image.fromarray(to_pixels(images[1:], IMAGENET_MEAN, IMAGENET_STD)[0]).resize(
            (128, 128), Image.Resampling.BICUBIC
        )
    )
    second_row = grid[4 + step_y :]
    assert np.array_equal(second_row[12 : 12 + 128, 4 : 4 + 128], shown)
    lines = set()
    for number in range(7):
        left = 4 + (1 + number) * step_x
        assert np.array_equal(second_row[12 : 12 + 128, left : left + 128], overlay(shown, heat(maps[1, number])))
        lines.add(second_row[:12, left : left + 128].tobytes())
    assert len(lines) == 7  # numbers, all different


def test_a_grid_of_many_slots_goes_on_in_further_rows() -> None:
    torch.manual_seed(0)
    encoder = encoder_from_config(replace(CONFIG, num_slots=35)).eval()
    grid = slots_grid(encoder, torch.randn(2, 3, 25, 25), IMAGENET_MEAN, IMAGENET_STD)
    assert grid.shape == (2 * 3 * (12 + 72 + 4) + 4, 17 * (72 + 4) + 4, 3)


# ---- the script


def run(capsys: pytest.CaptureFixture[str], *options: object) -> list[str]:
    visualize_attention.main([str(option) for option in options] + ["--device", "cpu", "--num_workers", "0"])
    return capsys.readouterr().out.split()


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without figures, which take most of the time."""
    monkeypatch.setattr(attention_command, "draw", lambda *_: [])


@pytest.mark.slow
def test_one_image_gives_a_grid_raw_maps_and_their_description(
    checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = photo(tmp_path / "cat.png")
    out = tmp_path / "out"
    written = run(
        capsys, "--pretrained_weights", checkpoints["sparo"], "--image_path", image, "--output_dir", out,
        "--threshold", 0.6, "--save_each",
    )  # fmt: skip
    maps = np.load(out / "attention.npy")
    assert maps.shape == (1, 7, 10, 12)  # 50 px, twice the 25 of training; 61 x 47 px become 64 x 50
    said = json.loads((out / "attention.json").read_text())
    assert said["images"] == [str(image)]
    assert (said["image_size"], said["grid"], said["kind"]) == ([50, 60], [10, 12], "slot")
    assert sorted(entry["rank"] for entry in said["maps"]) == list(range(7))
    patches = [entry["effective_patches"][0] for entry in sorted(said["maps"], key=lambda entry: entry["rank"])]
    assert patches == sorted(patches)
    assert said["maps"][2]["class_token_share"][0] == pytest.approx(1 - maps[0, 2].sum(), abs=1e-6)
    assert {Path(path).name for path in written} == {
        "attention.png", "attention.npy", "attention.json", "masks.png", "maps",
    }  # fmt: skip
    each = {path.name for path in (out / "maps").iterdir()}
    assert {"img.png", "attn-slot6.png", "mask_th0.6_slot0.png", "mask_th0.6.npy"} <= each
    assert np.load(out / "maps" / "mask_th0.6.npy").shape == (7, 10, 12)
    with Image.open(out / "attention.png") as grid:
        assert grid.width > 600


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("size", [[33], [21, 38]])
def test_the_maps_are_those_of_the_pixels_that_the_reference_shows(
    size: list[int], checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bug: images were resized bicubically and cropped around the center.

    visualize_attention.py of facebookresearch/dino: Resize, ToTensor, Normalize, then the sides less their remainder.
    """
    image = photo(tmp_path / "cat.png")
    reference = transforms.Compose(
        [transforms.Resize(size), transforms.ToTensor(), transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    )
    pixels = reference(Image.open(image).convert("RGB"))
    height, width = pixels.shape[1] - pixels.shape[1] % 5, pixels.shape[2] - pixels.shape[2] % 5
    expected = attention_maps(small_encoder("cls"), pixels[None, :, :height, :width])
    options = ["--pretrained_weights", checkpoints["cls"], "--image_path", image, "--output_dir", tmp_path / "out"]
    run(capsys, *options, "--image_size", *size)
    np.testing.assert_allclose(np.load(tmp_path / "out" / "attention.npy"), expected, atol=1e-6)


@pytest.mark.usefixtures("undrawn")
def test_without_an_image_a_built_in_scene_is_drawn(
    checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "--pretrained_weights", checkpoints["cls"], "--output_dir", tmp_path, "--image_size", 30)
    assert np.load(tmp_path / "attention.npy").shape == (1, 4, 6, 6)
    [name] = json.loads((tmp_path / "attention.json").read_text())["images"]
    assert name == "scenes-val[23]: a green zigzag star right of a white speckled crescent on sand"


def test_a_folder_gives_one_array_and_leaves_out_what_cannot_be_read(
    checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for index, size in enumerate([(61, 47), (30, 90)]):
        photo(tmp_path / "photos" / f"{index}.png", *size, seed=index)
    (tmp_path / "photos" / "2.png").write_bytes(b"no image")
    out = tmp_path / "out"
    written = run(
        capsys, "--pretrained_weights", checkpoints["gap"], "--image_path", tmp_path / "photos", "--output_dir", out
    )
    assert np.load(out / "attention.npy").shape == (2, 1, 10, 10)
    assert {"attention.png", "attention-0.png", "attention-1.png"} <= {Path(path).name for path in written}


def test_two_encoders_are_drawn_side_by_side_in_the_format_asked_for(
    checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--pretrained_weights", checkpoints["cls"], "--compare", checkpoints["sparo"], "--max_maps", 2]
    written = run(capsys, *options, "--output_dir", tmp_path, "--image_size", 20, 35, "--figure_format", "pdf")
    assert {str(tmp_path / f"{name}.pdf") for name in ("attention", "compare")} <= set(written)
    assert (tmp_path / "compare.pdf").read_bytes().startswith(b"%PDF")


def test_options_of_foreign_weights_are_for_both_encoders_if_both_are_foreign(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """The bug: beside itself the same file was another network, without its activation."""
    torch.save(small_encoder("cls").state_dict(), tmp_path / "raw.pth")
    words = ["--pretrained_weights", str(tmp_path / "raw.pth"), "--quick_gelu", "true"]
    args = visualize_attention.get_args_parser().parse_args(words)
    assert compared_encoder(str(tmp_path / "raw.pth"), args).encoder.config.quick_gelu
    assert not compared_encoder(str(checkpoints["cls"]), args).encoder.config.quick_gelu


def test_only_the_first_of_several_processes_draws(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    visualize_attention.main(["--pretrained_weights", str(checkpoints["cls"]), "--output_dir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--image_path", "nowhere.jpg"], "data_path='nowhere.jpg' does not exist"),
        (["--image_path", "broken.png"], "broken.png: is not one of BMP"),
        (["--image_path", "empty.png"], "empty.png: the file is empty"),
        (["--image_size", "4"], "smaller than one patch of 5 px"),
        (["--pretrained_weights", "run"], "no checkpoint at run; give the path of run/checkpoint.pth, or demo"),
    ],
)
def test_mistakes_end_with_one_line(
    options: list[str], message: str, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.png").write_bytes(b"no image")
    Path("empty.png").touch()
    Path("run").mkdir()
    Path("run/checkpoint.pth").touch()
    with refused(message):
        visualize_attention.main(["--pretrained_weights", str(checkpoints["cls"]), *options])


def test_max_value_becomes_white_in_one_image_and_in_a_folder(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 4095]], dtype=np.uint16)).save(tmp_path / "a.png")
    for path in (tmp_path / "a.png", tmp_path):
        [(_, image)] = attention_command.read_images(str(path), 1, ImageLimits(max_value=4095))
        assert np.asarray(image)[0, :, 0].tolist() == [0, 255]


def test_masks_show_kept_patches_within_an_outline_and_dim_the_rest() -> None:
    image = np.full((24, 30, 3), 120, dtype=np.uint8)
    mask = np.zeros((4, 5), dtype=bool)
    mask[1:3, 3] = True
    shown = mask_overlay(image, mask)
    assert (shown[7:17, 19:23] == 120).all()
    assert (shown[6, 18:24] == (252, 176, 78)).all()
    assert (shown[:6] < 120).all()


def test_grey_images_become_grey_pixels() -> None:
    levels = torch.linspace(-1, 1, 15).reshape(1, 1, 3, 5).expand(2, -1, -1, -1)
    pixels = to_pixels(levels, (0.5,), (0.25,))
    assert pixels.shape == (2, 3, 5, 3)
    assert (pixels == pixels[..., :1]).all()
    assert pixels[0, 1, 2, 0] in (127, 128)  # the middle of the stretch

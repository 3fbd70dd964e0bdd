"""`dino-sparo segment`: masks of every layout, windows, training, measures, and what one command leaves to the next."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from reference.record_segmentation import drawn
from refusals import refused
from small_models import save_small_encoder, words_of
from test_slot_score import BLOCK, coco_file, write_images
from torch.nn import functional as F

from dino_sparo.__main__ import run
from dino_sparo.commands import defaults_of
from dino_sparo.data.scenes.images import Scenes
from dino_sparo.data.sources import DEFAULT_LIMITS
from dino_sparo.evaluation.objects.layouts import UNKNOWN, VOC_CLASSES, ObjectMasks
from dino_sparo.evaluation.segment import head as heads
from dino_sparo.evaluation.segment.data import VOID, number_objects, open_masks, open_splits
from dino_sparo.evaluation.segment.head import class_scores, classes_of_slots, count_pairs, largest, pixel_loss
from dino_sparo.evaluation.segment.pictures import PALETTE, save_mask
from dino_sparo.evaluation.segment.tokens import TokenCache, WindowedView
from dino_sparo.weights.results import scores_beside

RECORDED = json.loads((Path(__file__).parents[1] / "reference" / "segmentation.json").read_text())["cases"]
COLOURS = {0: (20, 20, 20), 3: (250, 30, 30), 9: (30, 30, 250)}  # class number -> colour of its pixels
CPU = torch.device("cpu")


def drawn_mask(index: int) -> np.ndarray:
    """Two squares (24, 32) of classes 3 and 9 on a background of class 0, at places of their own."""
    rng, mask = np.random.default_rng(index), np.zeros((24, 32), dtype=np.uint8)
    for number, left in ((3, 0), (9, 16)):
        row, column = rng.integers(9, size=2)
        mask[row : row + 14, left + min(column, 3) : left + 13] = number
    return mask


def write_pairs(folder: Path, count: int, images: str = "images", masks: str = "masks") -> Path:
    """Images whose colours are their classes, and masks."""
    for name in (images, masks):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for index in range(count):
        mask = drawn_mask(index)
        pixels = np.zeros((*mask.shape, 3), dtype=np.uint8)
        for number, colour in COLOURS.items():
            pixels[mask == number] = colour
        Image.fromarray(pixels).save(folder / images / f"photo {index}.png")
        Image.fromarray(mask).save(folder / masks / f"photo {index}.png")
    return folder


def options(**values: object) -> argparse.Namespace:
    return argparse.Namespace(**{**defaults_of("segment"), **values})


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_encoder(tmp_path_factory.mktemp("encoder") / "checkpoint.pth")


def segment(weights: Path, **values: object) -> dict[str, Any]:
    tiny = {"pretrained_weights": weights, "device": "cpu", "steps": 3, "batch_size": 4, "img_size": 32, "pictures": 1}
    return run("segment", words_of({**tiny, **values}))


# Masks of every layout.


def write_voc(folder: Path) -> Path:
    write_pairs(folder, 4, "JPEGImages", "SegmentationClass")
    for index in range(4):
        name = f"photo {index}"
        (folder / "JPEGImages" / f"{name}.png").rename(folder / "JPEGImages" / f"p{index}.jpg")
        (folder / "SegmentationClass" / f"{name}.png").rename(folder / "SegmentationClass" / f"p{index}.png")
    lists = folder / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("p0\np2\np1\n")
    (lists / "val.txt").write_text("p3\n")
    return folder


def write_ade(folder: Path) -> Path:
    for split, count in (("training", 3), ("validation", 2)):
        write_pairs(folder, count, f"images/{split}", f"annotations/{split}")
    rows = "\n".join(f"{number}\t0.1\t1\t1\tthing {number}" for number in range(1, 151))
    (folder / "objectInfo150.txt").write_text(f"Idx\tRatio\tTrain\tVal\tName\n{rows}\n")
    return folder


def test_vocs_lists_and_classes_are_those_of_the_layout(tmp_path: Path) -> None:
    train, val = open_splits(options(data_path=str(write_voc(tmp_path))), DEFAULT_LIMITS)
    assert (len(train.indices), len(val.indices)) == (3, 1)
    assert list(train.classes.values()) == ["background", *VOC_CLASSES]
    np.testing.assert_array_equal(train.read(1)[1], drawn_mask(2))  # p2 is the second of the list
    np.testing.assert_array_equal(val.read(0)[1], drawn_mask(3))


def test_ade20ks_classes_begin_at_1_and_0_is_void(tmp_path: Path) -> None:
    train, val = open_splits(options(data_path=str(write_ade(tmp_path))), DEFAULT_LIMITS)
    assert (len(train.indices), len(val.indices), len(train.classes)) == (3, 2, 150)
    assert train.classes[150] == "thing 150"
    mask = drawn_mask(1).astype(int)
    np.testing.assert_array_equal(val.read(1)[1], np.where(mask == 0, VOID, mask - 1))


def test_a_folder_uses_images_with_masks_and_holds_out_a_share(tmp_path: Path) -> None:
    write_pairs(tmp_path, 10)
    (tmp_path / "masks" / "photo 4.png").unlink()
    for name in ("images", "masks"):
        (tmp_path / name / "._photo 1.png").write_bytes(b"of macOS")
    train, val = open_splits(options(data_path=str(tmp_path), val_share=0.3), DEFAULT_LIMITS)
    assert sorted((*train.indices, *val.indices)) == [0, 1, 2, 3, *range(5, 10)]
    assert len(val.indices) == 3
    assert train.classes == {0: "0", 3: "3", 9: "9"}
    _, labels = train.read(train.indices[0])
    np.testing.assert_array_equal(np.array([0, 3, 9])[labels], drawn_mask(train.indices[0]))
    void, _ = open_splits(options(data_path=str(tmp_path), void=3), DEFAULT_LIMITS)
    assert ((void.read(1)[1] == VOID) == (drawn_mask(1) == 3)).all()


def test_val_path_is_measured_and_names_come_from_a_file(tmp_path: Path) -> None:
    write_pairs(tmp_path / "a", 3)
    write_pairs(tmp_path / "b", 2, "pictures", "labels")
    (tmp_path / "names.txt").write_text("\ufeff" + "\r\n".join(f"name {number}" for number in range(10)))
    separate = {"val_path": str(tmp_path / "b" / "pictures"), "val_masks": str(tmp_path / "b" / "labels")}
    args = options(data_path=str(tmp_path / "a"), class_names=str(tmp_path / "names.txt"), **separate)
    train, val = open_splits(args, DEFAULT_LIMITS)
    assert (len(train.indices), len(val.indices)) == (3, 2)
    assert (val.classes[0], val.classes[9]) == ("name 0", "name 9")


def test_cocos_categories_are_counted_from_1(tmp_path: Path) -> None:
    write_images(tmp_path / "images", 2)
    source = open_masks(str(tmp_path / "images"), str(coco_file(tmp_path)), "train", 255, DEFAULT_LIMITS)
    assert source.classes == {0: "background", 1: "bear", 2: "kite"}
    np.testing.assert_array_equal(source.read(0)[1], BLOCK == 1)


def test_scenes_have_the_split_of_their_masks() -> None:
    train, val = (open_masks("scenes:5:32", None, split, 255, DEFAULT_LIMITS) for split in ("train", "val"))
    masks, classes = Scenes(5, 32, "train").object_masks(3)
    np.testing.assert_array_equal(train.read(3)[1][masks[0]], classes[0] + 1)
    assert (train.read(3)[1] != val.read(3)[1]).any()


def test_the_last_object_wins_and_unknown_classes_are_void() -> None:
    masks = np.array([[[1, 1, 0, 0]], [[0, 1, 1, 0]], [[0, 0, 0, 1]]], dtype=bool)
    numbers = number_objects(ObjectMasks(masks, np.array([4, 6, UNKNOWN]), np.zeros((1, 4), dtype=bool)))
    assert numbers.tolist() == [[5, 7, 7, VOID]]


# Windows.


def view_of(img_size: int, window: int, patch_size: int = 4, batch_size: int = 3) -> WindowedView:
    return WindowedView(img_size, window, patch_size, (0.5,) * 3, (0.25,) * 3, batch_size, CPU)


def patch_means(windows: torch.Tensor) -> torch.Tensor:
    """Features that depend on the whole window: the mean of a patch plus that of the window."""
    return F.avg_pool2d(windows, 4) + windows.mean(dim=(2, 3), keepdim=True)


def test_overlapping_windows_cover_the_image_and_are_averaged() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(256, size=(20, 28, 3), dtype=np.uint8))  # 5 x 7 patches
    pixels = (torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 - 0.5) / 0.25
    total, count = torch.zeros(3, 5, 7), torch.zeros(5, 7)
    for top in (0, 1):
        for left in (0, 2, 3):
            window = pixels[None, :, 4 * top : 4 * top + 16, 4 * left : 4 * left + 16]
            total[:, top : top + 4, left : left + 4] += patch_means(window)[0]
            count[top : top + 4, left : left + 4] += 1
    torch.testing.assert_close(view_of(20, 16).features(image, patch_means), total / count)


@pytest.mark.parametrize(("size", "grid"), [((30, 20), (5, 8)), ((20, 33), (8, 5)), ((400, 10), (5, 200))])
def test_the_short_side_is_resized_and_both_sides_are_whole_patches(
    size: tuple[int, int], grid: tuple[int, int]
) -> None:
    assert view_of(20, 16).features(Image.new("RGB", size), patch_means).shape == (3, *grid)


def test_features_that_do_not_fit_are_computed_again_with_the_same_result(tmp_path: Path) -> None:
    source, _ = open_splits(options(data_path=str(write_pairs(tmp_path, 4))), DEFAULT_LIMITS)
    calls: list[int] = []

    def encode(windows: torch.Tensor) -> torch.Tensor:
        calls.append(len(windows))
        return patch_means(windows)

    def crops(max_bytes: float) -> list[torch.Tensor]:
        cache, rng = TokenCache(source, view_of(24, 16), encode, max_bytes), np.random.default_rng(0)
        return [part for index in source.indices * 3 for part in cache.crop(index, rng)]

    kept, num_kept = crops(1e9), len(calls)
    again, num_again = crops(0.0), len(calls) - num_kept
    assert 3 * num_kept == num_again
    for first, second in zip(kept, again, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    tokens, labels = kept[:2]
    assert (tokens.shape, labels.shape) == ((3, 4, 4), (16, 16))


# Head and measures.


def test_void_pixels_have_no_loss() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 5, 3, 4), torch.randint(5, (2, 9, 12))
    labels[0, 2:5] = VOID
    upsampled = F.interpolate(logits, (9, 12), mode="bilinear", align_corners=False).log_softmax(dim=1)
    losses = [
        -upsampled[b, labels[b, y, x], y, x]
        for b in range(2)
        for y in range(9)
        for x in range(12)
        if labels[b, y, x] < 5
    ]
    torch.testing.assert_close(pixel_loss(logits, labels), torch.stack(losses).mean())
    assert pixel_loss(logits, torch.full_like(labels, VOID)) == 0


def test_maps_upsampled_some_at_a_time_give_the_same_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = torch.randn(7, 3, 5)
    expected = F.interpolate(maps[None], (11, 13), mode="bilinear")[0].argmax(dim=0).numpy()
    np.testing.assert_array_equal(largest(maps, 11, 13), expected)
    monkeypatch.setattr(heads, "MAX_VALUES", 2 * 11 * 13)
    np.testing.assert_array_equal(largest(maps, 11, 13), expected)


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: str(case["case"]))
def test_measures_equal_those_of_torchmetrics(case: dict[str, Any]) -> None:
    predicted, labels = drawn(*case["case"])
    size = case["case"][1]
    counts = sum(count_pairs(*pair, size, size) for pair in zip(predicted, labels.astype(np.uint8), strict=True))
    scores = class_scores(np.asarray(counts), [str(number) for number in range(size)])
    assert scores["miou"] == pytest.approx(100 * case["miou"], abs=1e-4)
    assert scores["pixel_accuracy"] == pytest.approx(100 * case["pixel_accuracy"], abs=1e-4)
    ious = [row["iou"] for row in scores["classes"]]
    assert [iou is not None for iou in ious] == [number < case["case"][2] for number in range(size)]
    assert [iou or 0 for iou in ious] == pytest.approx([100 * iou for iou in case["iou"]], abs=1e-4)


def test_a_slot_gets_the_class_with_which_it_overlaps_best() -> None:
    # Slot 0 lies in the background, slot 1 is most of class 1, slot 2 has few pixels of class 2 and many others.
    assert classes_of_slots(np.array([[90, 0, 1], [20, 15, 0], [30, 1, 2], [0, 0, 0]])).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_a_head_learns_classes_that_are_linear_in_the_features(kind: str, tmp_path: Path) -> None:
    source, _ = open_splits(options(data_path=str(write_pairs(tmp_path, 9))), DEFAULT_LIMITS)
    view = view_of(24, 24)
    samples = TokenCache(source, view, lambda windows: F.avg_pool2d(windows, 4), 1e9)
    head = heads.train_head(kind, 3, samples, CPU, steps=40, batch_size=4, lr=0.05, seed=0)
    counts = np.zeros((3, 3), dtype=np.int64)
    for index in source.indices:
        _, labels = source.read(index)
        with torch.no_grad():
            counts += count_pairs(largest(head(samples[index][0][None].float())[0], 24, 32), labels, 3, 3)
    assert class_scores(counts, ["a", "b", "c"])["miou"] > 80


# The command, and what the next command does with its files.


def test_masks_have_class_numbers_and_vocs_colours(tmp_path: Path) -> None:
    # PASCAL VOC's development kit: background, aeroplane, bicycle, bird, boat; void.
    known = {0: (0, 0, 0), 1: (128, 0, 0), 2: (0, 128, 0), 3: (128, 128, 0), 4: (0, 0, 128), 255: (224, 224, 192)}
    assert {number: tuple(PALETTE[number].tolist()) for number in known} == known
    save_mask(np.array([[0, 2], [1, 1]]), [1, 3, 200], tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as mask:
        assert (mask.mode, np.asarray(mask).tolist()) == ("P", [[1, 200], [3, 3]])
        assert mask.convert("RGB").getpixel((0, 1)) == (128, 128, 0)


def test_a_saved_head_predicts_the_same_masks_and_masks_train_the_next_head(weights: Path, tmp_path: Path) -> None:
    data, out = write_pairs(tmp_path / "data", 6), tmp_path / "out"
    (data / "images" / "broken.jpg").write_bytes(b"\xff\xd8")  # once ended the command before its result was written
    common = {"data_path": data, "window": 16, "images": data / "images"}
    result = segment(weights, **common, slot_masks=True, output_dir=out)
    assert [row["class"] for row in result["classes"]] == ["0", "3", "9"]
    assert set(result["slot_masks"]["class_of_slot"]) <= {"0", "3", "9"}
    assert len(result["slot_masks"]["class_of_slot"]) == 5
    [masks], [head], [record] = out.glob("*_masks"), out.glob("*.pth"), out.glob("*.json")
    [score] = scores_beside(record, result["encoder"]["sha256"]).values()
    slots = result["slot_masks"]["miou"]
    assert score == f"mIoU {result['miou']:.2f} %, mIoU of slots {slots:.2f} % on data at image size 32"
    assert {path.suffix for path in out.iterdir()} == {".json", ".pth", ".png", ""}
    assert [path.name for path in sorted(masks.iterdir())] == [f"photo {index}.png" for index in range(6)]

    again = segment(weights, head=head, img_size=32, data_path=data, images=data / "images", output_dir=tmp_path / "2")
    assert (again["miou"], again["classes"]) == (result["miou"], result["classes"])
    [others] = (tmp_path / "2").glob("*_masks")
    for path in masks.iterdir():
        np.testing.assert_array_equal(np.asarray(Image.open(path)), np.asarray(Image.open(others / path.name)))

    for path in masks.iterdir():  # the predictions of a head of three steps may be of one class
        Image.fromarray(drawn_mask(int(path.stem[-1]))).save(path)
    taught = segment(weights, data_path=data / "images", masks=masks, output_dir=tmp_path / "3")
    assert taught["class_numbers"] == [0, 3, 9]
    alone = segment(weights, head=head, images=data / "images", output_dir=tmp_path / "4")
    assert "miou" not in alone


def test_a_head_is_not_used_with_another_encoder(weights: Path, tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "data", 3)
    segment(weights, data_path=data, output_dir=tmp_path / "out")
    [head] = (tmp_path / "out").glob("*.pth")
    other = save_small_encoder(tmp_path / "other.pth", seed=1)
    with pytest.raises(SystemExit):
        segment(other, head=head, images=data / "images", output_dir=tmp_path / "2")
    record = torch.load(head)["segmentation_head"]
    with pytest.raises(ValueError, match=r"belongs to another encoder: sha256 .* in the file, None now"):
        heads.load_head(str(head), {**record["encoder"], "sha256": None})
    with pytest.raises(ValueError, match="holds no segmentation head"):
        heads.load_head(str(weights), {})


@pytest.mark.parametrize("readout", ["cls", "gap"])
def test_heads_of_cls_are_masks_too_and_averages_have_none(readout: str, tmp_path: Path) -> None:
    path = save_small_encoder(tmp_path / "checkpoint.pth", readout)
    given = {"data_path": write_pairs(tmp_path / "data", 3), "slot_masks": True, "n_last_blocks": 2}
    if readout == "cls":
        assert segment(path, **given)["slot_masks"]["miou"] is not None
    else:
        with refused("averages all tokens and has no maps"):
            segment(path, **given)


def test_new_images_are_opened_before_the_head_is_trained(weights: Path, tmp_path: Path) -> None:
    data, empty = write_pairs(tmp_path / "data", 3), tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(SystemExit):
        segment(weights, data_path=data, images=empty, output_dir=tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_options_that_name_no_data_or_no_head_end_in_one_line(weights: Path) -> None:
    for given, message in (
        ({}, "--data_path is empty"),
        ({"data_path": "scenes:4:32", "head": "none.pth"}, "--head 'none.pth' is neither a file nor one of"),
        ({"data_path": "scenes:4:32", "img_size": 8}, "a window has 16 px or more"),
    ):
        with refused(message):
            segment(weights, **given)


def replaced(source: Path, index: int, mask: np.ndarray) -> None:
    Image.fromarray(mask).save(source / "masks" / f"photo {index}.png")


@pytest.mark.parametrize(
    ("spoil", "given", "message"),
    [
        (lambda folder: replaced(folder, 1, np.ones((32, 24), np.uint8)), {}, "32 x 24|24 x 32"),
        (lambda folder: [path.unlink() for path in (folder / "masks").iterdir()], {}, "no masks: .* of the 3 images"),
        (
            lambda folder: [replaced(folder, i, drawn_mask(0) * 0) for i in range(3)],
            {},
            r"1 classes \(numbers: 0; void",
        ),
        (
            lambda folder: [replaced(folder, i, (drawn_mask(0) > 0) * np.uint8(255)) for i in range(3)],
            {},
            "such as 254",
        ),
        (lambda folder: replaced(folder, 1, drawn_mask(1).astype(np.uint16) * 99), {}, "with numbers from 0 to 255"),
        (
            lambda folder: (folder / "names").write_text("a\nb\n"),
            {"class_names": "names"},
            "has the class number [39]; .* 0 to 1",
        ),
        (lambda folder: [(folder / "masks" / f"photo {i}.png").unlink() for i in (0, 1)], {}, "give at least 2"),
        (lambda folder: None, {"val_masks": "masks"}, "without --val_path"),
    ],
)
def test_masks_that_do_not_fit_are_refused(
    spoil: Any, given: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(write_pairs(tmp_path, 3))
    monkeypatch.chdir(tmp_path)

    def read_all() -> None:
        for source in open_splits(options(data_path=str(tmp_path), **given), DEFAULT_LIMITS):
            for index in source.indices:
                source.read(index)

    with pytest.raises(ValueError, match=message):
        read_all()

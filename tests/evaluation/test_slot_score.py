"""`dino-sparo slots score`: masks of every layout, the view of them, and the command from checkpoint to plots."""

import argparse
import copy
import json
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from small_models import save_small_encoder

from dino_sparo.__main__ import run
from dino_sparo.data.defaults import IMAGENET_MEAN, IMAGENET_STD
from dino_sparo.data.scenes.graphs import INDEPENDENT, SceneDescription, SceneObject
from dino_sparo.data.scenes.images import Scenes, draw_scene, object_masks
from dino_sparo.data.scenes.patterns import SHAPES
from dino_sparo.data.sources import CorruptImageError, ImageLimits
from dino_sparo.data.sources.decode import STORED_SIZE
from dino_sparo.data.views import PatchView, View
from dino_sparo.draw.plots import panels
from dino_sparo.evaluation.encoders import EvaluatedEncoder
from dino_sparo.evaluation.objects import command, slots, survey
from dino_sparo.evaluation.objects.layouts import (
    VOC_CLASSES,
    ObjectMasks,
    ObjectSource,
    open_objects,
    segmentation_mask,
    view_objects,
)
from dino_sparo.evaluation.objects.report import draw_redundancy, percent, redundancy_words
from dino_sparo.evaluation.objects.survey import ROWS
from dino_sparo.models.encoder import Encoder, create_encoder
from dino_sparo.weights.results import scores_of

# Scenes.


def test_an_objects_mask_holds_exactly_the_pixels_that_change_with_its_colour() -> None:
    def scene(colour: str, shape: str) -> SceneDescription:
        return SceneDescription((SceneObject(shape, colour, "plain", (0.5, 0.55), 0.3, 0.2),), (), "snow")

    for shape in SHAPES:
        red, blue = (
            np.asarray(draw_scene(scene(colour, shape), np.random.default_rng(3), 48)).astype(int)
            for colour in ("red", "blue")
        )
        [mask] = object_masks(scene("red", shape), 48)
        # A pixel on the outline is painted in part: it is the object's if its center is inside.
        changed = np.abs(red - blue).max(axis=-1)
        assert (changed[mask] > 20).all(), shape
        outside = (changed > 0) & ~mask
        assert outside.sum() < 0.35 * mask.sum(), shape
        assert changed[outside].max() < changed[mask].max(), shape


def test_of_two_objects_the_later_hides_the_earlier() -> None:
    things = [SceneObject("circle", "red", "plain", (x, 0.5), 0.3, 0.0) for x in (0.4, 0.6)]
    first, second = object_masks(SceneDescription(tuple(things), (), "snow"), 60)
    assert not (first & second).any()
    [alone] = object_masks(SceneDescription((things[1],), (), "snow"), 60)
    np.testing.assert_array_equal(second, alone)
    assert first.sum() < alone.sum()


def test_scenes_give_masks_and_classes_that_belong_to_the_picture() -> None:
    source = Scenes(20, 40, split="val", ties=INDEPENDENT)
    for index in range(20):
        masks, classes = source.object_masks(index)
        graph = source.scene_graph(index)
        assert [SHAPES[number] for number in classes] == [thing.shape for thing in graph.objects]
        for mask, thing in zip(masks, graph.objects, strict=True):
            rows, columns = np.nonzero(mask)
            left, top, right, bottom = (40 * side for side in thing.box)
            edges = (left <= columns.min() + 1, columns.max() <= right, top <= rows.min() + 1, rows.max() <= bottom)
            assert all(edges)
            assert mask.sum() > 15
        again, _ = source.object_masks(index)
        np.testing.assert_array_equal(masks, again)


# Views of masks.


def view_of(width: int, height: int) -> View:
    """The central square of an image, 4 px high."""
    return PatchView([4], 2, IMAGENET_MEAN, IMAGENET_STD).view(Image.new("RGB", (width, height)))


def test_masks_are_cut_and_resized_as_images_are() -> None:
    # 12 x 8 pixels, the central square is columns 2 to 9; seen at 4 x 4, one pixel of two.
    masks = np.zeros((3, 8, 12), dtype=bool)
    masks[0, 0:4, 2:6] = True  # the upper left quarter of the square
    masks[1, :, 0:2] = True  # outside
    masks[2, 6:8, 8:10] = True
    void = np.zeros((8, 12), dtype=bool)
    void[0:2, 2:4] = True
    view = view_of(12, 8)
    seen = view_objects(ObjectMasks(masks, np.array([5, 6, 7]), void), view, "x.png", Image.new("RGB", (12, 8)))
    assert seen.classes.tolist() == [5, 7]
    expected = np.zeros((2, 4, 4), dtype=bool)
    expected[0, 0:2, 0:2] = True
    expected[0, 0, 0] = False  # void
    expected[1, 3, 3] = True
    np.testing.assert_array_equal(seen.masks, expected)
    assert seen.void.sum() == 1


def test_masks_of_another_size_or_of_the_picture_before_it_was_turned_are_refused() -> None:
    masks = ObjectMasks(np.zeros((0, 8, 12), dtype=bool), np.zeros(0, dtype=np.int64), np.zeros((8, 12), dtype=bool))
    turned = Image.new("RGB", (8, 12))
    turned.info[STORED_SIZE] = (12, 8)
    with pytest.raises(CorruptImageError, match=r"by its EXIF orientation, .* masks have 12 x 8 .*give --exif ignore"):
        view_objects(masks, view_of(8, 12), "x.png", turned)
    with pytest.raises(CorruptImageError, match=r"x.png: has 13 x 8 pixels, but its masks have 12 x 8"):
        view_objects(masks, view_of(13, 8), "x.png", Image.new("RGB", (13, 8)))


def test_masks_belong_to_the_picture_as_viewers_show_it_or_with_exif_ignored_to_stored_pixels(tmp_path: Path) -> None:
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    phone = Image.Exif()
    phone[0x0112] = 6
    Image.new("RGB", (12, 8)).save(tmp_path / "images" / "a.jpg", exif=phone)
    for size, exif in (((8, 12), "apply"), ((12, 8), "ignore")):
        Image.new("L", size, 1).save(tmp_path / "masks" / "a.png")
        source = open_objects(str(tmp_path), limits=ImageLimits(exif=exif))
        assert (image := source.images.read(0)).size == size
        assert len(view_objects(source.objects(0), view_of(*size), "a.jpg", image).masks) == 1


@pytest.mark.parametrize(("orientation", "side", "in_chans"), [(2, 12, 3), (3, 12, 1), (6, 8, 3), (6, 8, 1)])
def test_masks_of_a_turned_image_of_the_same_size_are_refused(
    orientation: int, side: int, in_chans: int, tmp_path: Path
) -> None:
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    phone = Image.Exif()
    phone[0x0112] = orientation
    for number in range(3):
        Image.new("L", (side, 8)).save(tmp_path / "images" / f"{number}.png", exif=phone)
        Image.new("L", (side, 8), 1).save(tmp_path / "masks" / f"{number}.png")
    encoder = create_encoder("vit_micro", 4, img_size=8, in_chans=in_chans)
    view = PatchView([8], 4, *[(0.5,) * in_chans] * 2)
    source = open_objects(str(tmp_path), limits=ImageLimits(in_chans=in_chans))
    with pytest.raises(ValueError, match=r"turned by its EXIF orientation, .* give --exif ignore"):
        survey.survey_objects({"model": encoder}, source, range(3), view, 0.5, 0)


# Layouts.

BLOCK = np.zeros((24, 32), dtype=np.uint8)
BLOCK[2:10, 4:20] = 1
BLOCK[12:22, 16:30] = 2


def write_images(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(count):
        pixels = (rng.random((24, 32, 3)) * 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpg")


@pytest.fixture
def voc(tmp_path: Path) -> Path:
    root = tmp_path / "VOC2012"
    write_images(root / "JPEGImages", 3)
    (root / "ImageSets" / "Segmentation").mkdir(parents=True)
    (root / "ImageSets" / "Segmentation" / "val.txt").write_text("0\n1\n2\n")
    for name, values in (("SegmentationObject", (1, 2)), ("SegmentationClass", (12, 15))):
        (root / name).mkdir()
        mask = np.where(BLOCK > 0, np.take((0, *values), BLOCK), 0).astype(np.uint8)
        mask[2, 4:20] = 255
        picture = Image.frombytes("P", (32, 24), mask.tobytes())
        picture.putpalette(bytes(range(256)) * 3)
        for number in range(3):
            picture.save(root / name / f"{number}.png")
    return root


def test_vocs_layout_gives_objects_classes_and_void(voc: Path) -> None:
    source = open_objects(str(voc))
    assert len(source.images) == 3
    objects = source.objects(1)
    assert [VOC_CLASSES[number] for number in objects.classes] == ["dog", "person"]
    np.testing.assert_array_equal(objects.masks[1], BLOCK == 2)
    assert objects.masks[0].sum() == 7 * 16
    assert objects.void.sum() == 16
    (voc / "SegmentationObject" / "2.png").unlink()
    with pytest.raises(CorruptImageError, match="there is no such mask"):
        source.objects(2)


def coco_file(folder: Path) -> Path:
    """Two images: a polygon with a crowd beside it, and run lengths in both forms."""
    square = [4.0, 2.0, 20.0, 2.0, 20.0, 10.0, 4.0, 10.0]
    lengths = [24 * 5 + 3, 6, 24 * 27 - 9]  # rows 3 to 8 of column 5
    annotations = [
        {"image_id": 7, "category_id": 3, "segmentation": [square], "iscrowd": 0},
        {"image_id": 7, "category_id": 9, "segmentation": {"size": [24, 32], "counts": lengths}, "iscrowd": 1},
        {"image_id": 8, "category_id": 9, "segmentation": {"size": [24, 32], "counts": lengths}, "iscrowd": 0},
        {"image_id": 8, "category_id": 3, "segmentation": [square], "iscrowd": 1},
    ]
    images = [{"id": 7 + i, "file_name": f"{i}.jpg", "height": 24, "width": 32} for i in range(2)]
    categories = [{"id": 9, "name": "kite"}, {"id": 3, "name": "bear"}]
    path = folder / "instances.json"
    path.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    return path


def test_cocos_annotations_give_objects_and_groups_are_void(tmp_path: Path) -> None:
    write_images(tmp_path / "images", 2)
    source = open_objects(str(tmp_path / "images"), str(coco_file(tmp_path)))
    assert source.classes == ["bear", "kite"]
    first, second = source.objects(0), source.objects(1)
    assert (first.classes.tolist(), second.classes.tolist()) == ([0], [1])
    np.testing.assert_array_equal(first.masks[0], BLOCK == 1)
    assert not first.void.any()  # the group lies within the object
    rows, columns = np.nonzero(second.masks[0])
    assert (rows.tolist(), set(columns.tolist())) == ([3, 4, 5, 6, 7, 8], {5})
    np.testing.assert_array_equal(second.void, (BLOCK == 1) & ~second.masks[0])  # the object lies within the group


def test_run_lengths_are_read_from_numbers_and_from_cocos_string() -> None:
    mask = np.random.default_rng(0).random((13, 11)) < 0.3
    mask[:, 4:7] = False
    mask[2:, 8] = True
    flat = mask.T.ravel()
    edges = np.flatnonzero(np.diff(flat.astype(int), prepend=0, append=1 - int(flat[-1])))
    lengths = np.diff(edges, prepend=0).tolist()
    np.testing.assert_array_equal(segmentation_mask({"size": [13, 11], "counts": lengths}, 13, 11), mask)
    # 5, 3 and 135 = 7 + 4 * 32 are "5", "3" and "W4"; the next number is the difference to the last but one.
    expected = np.zeros(143, dtype=bool)
    expected[5:8] = True
    strings = segmentation_mask({"size": [13, 11], "counts": "53W4"}, 13, 11)
    np.testing.assert_array_equal(strings.T.ravel(), expected)
    for counts in ([1, 5], [-5, 148], "a", "53", "53T3zz"):
        with pytest.raises((ValueError, OverflowError)):
            segmentation_mask({"size": [13, 11], "counts": counts}, 13, 11)
    with pytest.raises(ValueError, match=r"mask of \[13, 12\] pixels for an image of \[13, 11\]"):
        segmentation_mask({"size": [13, 12], "counts": lengths}, 13, 11)


def test_polygons_are_filled_and_a_hostile_one_takes_no_memory() -> None:
    np.testing.assert_array_equal(segmentation_mask([[4, 2, 20, 2, 20, 10, 4, 10]], 24, 32), BLOCK == 1)
    both = segmentation_mask([[0, 0, 2, 0, 2, 2, 0, 2], [1, 1, 3, 1, 3, 3, 1, 3]], 24, 32)
    assert both.sum() == 7
    for number in (1e30, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="a polygon reaches"):
            segmentation_mask([[0, 0, number, 0, 2, 2]], 24, 32)


def test_annotations_of_wrong_types_make_an_image_unreadable(tmp_path: Path) -> None:
    write_images(tmp_path / "images", 2)
    path = coco_file(tmp_path)
    content = json.loads(path.read_text())
    no_polygons = (None, 7, "53W4", {"size": [24, 32]}, {"size": 3, "counts": "a"})
    for wrong in ([], [[]], [[1, 2, 3, 4]], [["a"] * 6], *no_polygons):
        content["annotations"][0]["segmentation"] = wrong
        path.write_text(json.dumps(content))
        with pytest.raises(CorruptImageError, match="annotations cannot be read"):
            open_objects(str(tmp_path / "images"), str(path)).objects(0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: open_objects(str(p / "nowhere")), "nowhere' is not a folder"),
        (lambda p: open_objects(str(p / "empty")), "lacks SegmentationObject/, or images/ and masks/"),
        (lambda p: open_objects(str(p / "empty"), str(p / "nowhere")), "neither a folder nor a .json file"),
        (lambda p: open_objects("scenes", str(p / "empty")), "has masks of its own"),
        (lambda p: open_objects(str(p / "empty"), str(p / "captions.json")), "missing 'categories'"),
        (lambda p: open_objects(str(p / "empty"), str(p / "broken.json")), "is not valid JSON"),
        (lambda p: open_objects(str(p / "voc")), "has no ImageSets/Segmentation/val.txt"),
    ],
)
def test_data_that_do_not_fit_end_with_what_would(tmp_path: Path, make, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "voc" / "SegmentationObject").mkdir(parents=True)
    (tmp_path / "captions.json").write_text('{"images": [], "annotations": [{"image_id": 1, "caption": "a"}]}')
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=message):
        make(tmp_path)


# The survey.


class Boxes:
    """Images of 48 x 32 pixels that are white where their objects are; the last image has none."""

    name, classes, labels = "boxes", None, None

    def __len__(self) -> int:
        return 5

    def location(self, index: int) -> str:
        return f"boxes[{index}]"

    def read(self, index: int) -> Image.Image:
        return Image.fromarray(
            np.repeat(self.objects(index).masks.any(axis=0)[..., None], 3, axis=-1).astype(np.uint8) * 255
        )

    def objects(self, index: int) -> ObjectMasks:
        masks = np.zeros((2 if index < 4 else 0, 32, 48), dtype=bool)
        for mask, left in zip(masks, (8, 24), strict=False):
            mask[8 * index : 8 * index + 8, left : left + 8] = True
        return ObjectMasks(masks, np.arange(len(masks)), np.zeros((32, 48), dtype=bool))


BOXES = ObjectSource(Boxes(), ["left", "right"], Boxes().objects)


def bright_patches(_: object, images: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """One map per half of the image, its bright patches, and a slot that is 1 everywhere."""
    bright = torch.nn.functional.avg_pool2d((images.mean(dim=1) > 0).float(), 8).numpy()
    halves = np.stack([bright, bright], axis=1)
    halves[:, 0, :, 2:] = halves[:, 1, :, :2] = 0
    return halves, np.ones((len(images), 2, 3), dtype=np.float32)


def survey_boxes(
    monkeypatch: pytest.MonkeyPatch, look: Callable = bright_patches, untrained_slots: int = 2, **options: Any
) -> survey.Survey:
    own, untrained = (
        create_encoder("vit_micro", 8, num_slots=slots, slot_dim=3, key_dim=3, img_size=24)
        for slots in (2, untrained_slots)
    )
    monkeypatch.setattr(survey, "maps_and_slots", look)
    monkeypatch.setattr(survey, "BATCH_SIZE", 2)
    monkeypatch.setattr(slots, "MIN_OBJECTS", 1)
    view = PatchView([32], 8, IMAGENET_MEAN, IMAGENET_STD)
    encoders = {survey.MODEL: own, survey.UNTRAINED: untrained}
    return survey.survey_objects(encoders, BOXES, range(5), view, **{"share": 0.6, "seed": 0, **options})


def describe(result: survey.Survey) -> dict[str, Any]:
    jaccards = (np.concatenate(result.jaccards[row]) for row in (survey.MODEL, survey.UNTRAINED))
    return slots.describe_maps(*jaccards, result.classes, BOXES.classes, seed=0)


def test_images_and_masks_are_cut_alike_and_controls_score_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    result = survey_boxes(monkeypatch)
    measures = result.measures(seed=0)
    own = [measures["model"][measure]["mean"] for measure in ("jaccard", "fg_ari", "pointing", "mbo")]
    assert own == pytest.approx([1, 1, 1, (1 / 15 + 1) / 2])  # the first map gets the 14 patches that none looks at
    # Every image's objects lie in rows of their own, so that another image's maps find nothing.
    other = measures["other_image"]
    assert [other[m]["mean"] for m in ("jaccard", "pointing")] == [0, 0]
    assert (other["jaccard"]["num_images"], measures["model"]["jaccard"]["num_images"]) == (3, 4)
    assert 0 <= measures["moved"]["jaccard"]["mean"] < 0.7
    assert (result.indices, len(result.classes)) == ([0, 1, 2, 3, 4], 4)
    differences = result.differences(seed=0)
    assert [differences[row]["jaccard"]["mean"] for row in ("untrained", "other_image")] == [0, 1]  # own minus control
    assert result.mean_redundancy()["model"] == {"maps": 0, "values": pytest.approx(1)}
    described = describe(result)
    # Each map finds its own object, and nothing of the other one, in all four images.
    maps = [(entry["jaccard"], entry["best_for"], entry["class"], entry["lift"]) for entry in described["maps"]]
    assert maps == [(0.5, 0.5, "left", 0.5), (0.5, 0.5, "right", 0.5)]
    assert described["found_by_no_map"] == 0
    classes = [(entry["class"], entry["best_maps"], entry["lift"]) for entry in described["classes"]]
    assert classes == [("left", [0, 1], [0.5, -0.5]), ("right", [1, 0], [-0.5, 0.5])]


def test_an_object_that_no_map_touches_is_found_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def left_half(encoder: Encoder, images: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        halves, slots = bright_patches(encoder, images)
        return halves[:, :1], slots[:, :1]

    described = describe(survey_boxes(monkeypatch, look=left_half))
    assert described["found_by_no_map"] == described["maps"][0]["best_for"] == 0.5


def test_rare_classes_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    result = survey_boxes(monkeypatch)
    monkeypatch.setattr(slots, "MIN_OBJECTS", 5)  # there are four of each class
    described = describe(result)
    assert "selectivity" not in described
    assert "class" not in described["maps"][0]


def test_redundancy_is_averaged_over_images_and_not_over_batches() -> None:
    seen = survey.Survey(redundancy={("model", "maps"): [(0.5, 16), (1.0, 4)]})
    assert seen.mean_redundancy() == {"model": {"maps": pytest.approx(0.6)}}


def test_objects_beside_the_central_square_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_one_outside(index: int) -> ObjectMasks:
        masks, classes, void = Boxes().objects(index)
        outside = np.zeros((1, 32, 48), dtype=bool)
        outside[0, 5:9, :3] = True
        return ObjectMasks(np.concatenate([masks, outside]), np.append(classes, 0), void)

    monkeypatch.setattr(sys.modules[__name__], "BOXES", ObjectSource(Boxes(), ["left", "right"], with_one_outside))
    result = survey_boxes(monkeypatch)
    assert (result.out_of_view, [len(classes) for classes in result.classes]) == (5, [2, 2, 2, 2])


def test_selectivity_stands_beside_that_of_untrained_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained_or_blank(encoder: Encoder, images: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        halves, slots = bright_patches(encoder, images)
        return (np.ones_like(halves) if encoder.config.num_slots == 3 else halves), slots

    result = survey_boxes(monkeypatch, look=trained_or_blank, untrained_slots=3)
    selectivity = describe(result)["selectivity"]
    # Either map finds its class fully: its excess is 0.5 there and -0.5 on the other class.
    assert (selectivity["mean_best_lift"], selectivity["untrained"]) == pytest.approx((0.5, 0))


def test_one_map_at_a_time_finds_one_of_two_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    measures = survey_boxes(monkeypatch, maps=1).measures(seed=0)
    # One map alone gets all patches, so that its segment is the whole image of 16 patches.
    expected = {"jaccard": 0.5, "mbo": 1 / 16, "fg_ari": 0, "pointing": 0.5, "pointing_one_map": 0.5}
    assert {name: entry["mean"] for name, entry in measures["model"].items()} == pytest.approx(expected)
    assert measures["other_image"]["jaccard"]["mean"] == 0


def test_the_share_of_the_mass_changes_the_jaccard_index_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def uneven(encoder: Encoder, images: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        maps = np.random.default_rng(0).random((len(images), 2, 4, 4)).astype(np.float32)
        return maps, bright_patches(encoder, images)[1]

    little, much = (survey_boxes(monkeypatch, uneven, share=share).measures(seed=0)["model"] for share in (0.2, 0.9))
    assert {measure for measure in little if little[measure] != much[measure]} == {"jaccard"}


# The command.


def test_the_image_before_is_a_random_other_one_although_folders_are_sorted_by_class() -> None:
    order = np.array(command.choose_images(1000, 300))
    assert len(set(order.tolist())) == 300
    assert np.mean(order[1:] // 100 == order[:-1] // 100) == pytest.approx(0.1, abs=0.06)  # ten classes of 100 images
    assert command.choose_images(1000, 300) == order.tolist()
    assert sorted(command.choose_images(5, 300)) == [0, 1, 2, 3, 4]


def checkpoint(folder: Path, readout: str, seed: int = 0) -> Path:
    return save_small_encoder(folder / f"{readout}{seed}.pth", readout, seed, slot_dim=7, key_dim=3, img_size=24)


@pytest.fixture
def few_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """No class is rare."""
    monkeypatch.setattr(slots, "MIN_OBJECTS", 1)


def score(*words: object) -> dict:
    return run("slots score", [str(word) for word in ("--device", "cpu", "--num_workers", 0, "--overwrite", *words)])


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without plots, which take most of the time."""
    monkeypatch.setattr(command, "draw", lambda *_: [])


@pytest.mark.parametrize(("readout", "kind", "count"), [("sparo", "slot", 5), ("cls", "head", 4)])
def test_the_command_scores_slots_and_heads_beside_their_controls(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    undrawn: None,
    few_are_enough: None,
    readout: str,
    kind: str,
    count: int,
) -> None:
    path = checkpoint(tmp_path, readout, seed=1)  # the untrained control has seed 0
    words = ("--pretrained_weights", path, "--data_path", "scenes:60:32", "--num_images", 20)
    result = score(*words, "--output_dir", tmp_path)
    written = json.loads((next(tmp_path.glob("slot_score_*_scenes-60-32.json"))).read_text())
    assert written["measures"] == result["measures"]
    assert [score.name for score in scores_of(written)] == ["jaccard", "mbo", "fg_ari", "pointing", "pointing_one_map"]
    assert (result["kind"], result["num_maps"]) == (kind, count)
    assert result["data"]["num_images"] == 20
    assert list(result["measures"]) == list(ROWS)
    bounds = {measure: entry["mean"] for measure, entry in result["measures"]["patch_grid"].items()}
    assert [measure for measure, bound in bounds.items() if bound is None] == ["fg_ari"]
    for row, measures in result["measures"].items():
        for measure, bound in bounds.items():
            if row == "patch_grid" and bound is None:
                continue
            low, high = measures[measure]["interval_95"]
            assert low <= measures[measure]["mean"] <= high, (row, measure)
            assert bound is None or measures[measure]["mean"] <= bound, (row, measure)
    assert len(result["maps"]) == count
    assert sum(entry["best_for"] for entry in result["maps"]) == pytest.approx(1)
    assert ("values" in result["redundancy"]["model"]) == (readout == "sparo")
    assert sum(entry["num_objects"] for entry in result["classes"]) == result["data"]["num_objects"]
    out = capsys.readouterr().out
    for row in ("maps of another image", "minus maps of another image"):
        assert re.search(f"^{row} ", out, flags=re.MULTILINE)
    several = result["measures"]["model"]["fg_ari"]["num_images"]  # images with two objects
    assert 0 < several < 20
    assert re.search(rf"^images +20 +20 +{several} +20 +20$", out, flags=re.MULTILINE)
    lift = 100 * result["selectivity"]["untrained"]
    assert "selectivity (mean best lift): " in out
    assert f"; untrained {lift:.1f}; with shuffled classes" in out
    assert result["measures"]["model"] != result["measures"]["untrained"]
    assert "the encoder is untrained" not in caplog.text


def test_an_untrained_encoder_has_another_one_as_its_control_and_a_result_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, undrawn: None
) -> None:
    words = ("--pretrained_weights", checkpoint(tmp_path, "sparo"), "--data_path", "scenes:60:32", "--num_images", 8)
    result = score(*words, "--untrained", "--output_dir", tmp_path)
    assert [path.name for path in tmp_path.glob("*.json")] == ["slot_score_sparo0_scenes-60-32_untrained.json"]
    assert result["measures"]["model"] != result["measures"]["untrained"]
    assert caplog.text.count("the encoder is untrained") == 1


def test_the_side_of_the_view_and_the_share_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = mock.Mock(side_effect=ValueError("nothing is surveyed"))
    monkeypatch.setattr(command, "survey_objects", asked)
    words = ("--pretrained_weights", checkpoint(tmp_path, "cls"), "--data_path", "scenes:20:32")
    with pytest.raises(SystemExit):
        score(*words, "--img_size", 32, "--share", 0.3)
    view, share = asked.call_args.args[3:5]
    assert (view.size, share) == ([32], 0.3)


def test_the_table_shows_half_of_an_interval() -> None:
    assert percent({"mean": 0.5, "interval_95": [0.4, 0.6]}) == "50.0 ± 10.0"
    assert percent({"mean": 0.5, "interval_95": [0.4, 0.6]}, "+") == "+50.0 ± 10.0"
    assert redundancy_words({"model": {"maps": float("nan")}}) == "this encoder maps -"


@pytest.mark.slow
def test_as_many_maps_as_there_are_give_the_default_and_fewer_find_less(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], undrawn: None, few_are_enough: None
) -> None:
    words = ("--pretrained_weights", checkpoint(tmp_path, "sparo"), "--data_path", "scenes:60:32", "--num_images", 8)
    default, every, few = score(*words), score(*words, "--maps", 5), score(*words, "--maps", 2)
    assert {**every, "options": {}} == {**default, "options": {}}
    assert (default["maps_per_score"], few["maps_per_score"], few["num_maps"]) == (5, 2, 5)
    assert few["subsets_per_image"] == 5
    for row in ("model", "untrained", "moved"):
        assert few["measures"][row]["jaccard"]["mean"] < default["measures"][row]["jaccard"]["mean"]
    for part in ("redundancy", "maps", "selectivity"):
        assert few[part] == default[part]
    assert "5 slots, 2 at a time (mean over 5 random subsets of each image)" in capsys.readouterr().out


# Two encoders matched.


def small_encoder(seed: int) -> EvaluatedEncoder:
    torch.manual_seed(seed)
    encoder = create_encoder("vit_micro", 8, num_slots=5, slot_dim=7, key_dim=3, img_size=24).eval()
    return EvaluatedEncoder(encoder, IMAGENET_MEAN, IMAGENET_STD, {"seed": seed})


def with_slots_in_order(evaluated: EvaluatedEncoder, order: list[int]) -> EvaluatedEncoder:
    """The same encoder with its slots in another order."""
    other = copy.deepcopy(evaluated)
    readout = other.encoder.readout
    with torch.no_grad():
        readout.queries.copy_(readout.queries[order])
        for parameter in (readout.key_proj.weight, readout.key_proj.bias):
            parameter.copy_(parameter.unflatten(0, (5, 3))[order].flatten(0, 1))
    return other


def matched(own: np.ndarray, other: EvaluatedEncoder, source: ObjectSource, image_size: int | None = None) -> dict:
    options = argparse.Namespace(seed=0, img_size=image_size)
    seen = survey.Survey(values=[own], indices=list(range(len(own))))
    return command.match_models(seen, other, source, options, torch.device("cpu"))


def test_slots_in_another_order_are_matched_to_themselves_and_controls_are_clearly_below() -> None:
    """The bug: the untrained control was the start of a run with the default seed, which is this model."""
    source, model = open_objects("scenes:40:32"), small_encoder(0)
    own = survey.slot_values(model.encoder, source, range(32), model.patch_view(None))
    order = [3, 0, 4, 2, 1]
    result = matched(own, with_slots_in_order(model, order), source)
    assert [order[pair["partner"]] for pair in result["partners"]] == [0, 1, 2, 3, 4]
    assert result["matched"]["mean"] == pytest.approx(1)
    for name, bound in (("untrained", 0.95), ("shuffled_images", 0.5)):
        assert result[name]["mean"] < bound, name
    assert result["mean_of_all_pairs"] < 0.95


@pytest.mark.parametrize(("image_size", "side"), [(None, 64), (48, 48)])
def test_each_of_two_matched_encoders_sees_its_own_view(
    monkeypatch: pytest.MonkeyPatch, image_size: int | None, side: int
) -> None:
    own = np.random.default_rng(0).normal(size=(32, 5, 7)).astype(np.float32)
    coarse = create_encoder("vit_micro", 4, num_slots=5, slot_dim=7, key_dim=3, img_size=32).eval()
    asked = mock.Mock(return_value=own)
    monkeypatch.setattr(command, "slot_values", asked)
    matched(own, EvaluatedEncoder(coarse, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), {}), BOXES, image_size)
    views = [call.args[3] for call in asked.call_args_list]
    assert [(view.size, view.patch_size, view.mean, view.std) for view in views] == [
        ([side], 4, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    ] * 2


def test_a_matching_of_noise_is_no_better_than_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    # Chosen and reported on the same images it would be: the best of 13 partners by chance.
    own, untrained, theirs = np.random.default_rng(0).normal(size=(3, 40, 13, 1)).astype(np.float32)
    monkeypatch.setattr(command, "slot_values", mock.Mock(side_effect=[untrained, theirs]))
    result = matched(own, small_encoder(0), BOXES)
    for name in ("matched", "untrained", "shuffled_images"):
        assert result[name]["mean"] < 2 * result["mean_of_all_pairs"], name
    assert (result["matching_images"], result["num_images"]) == (20, 20)


def test_images_that_read_the_same_backwards_are_shuffled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    half = np.random.default_rng(0).normal(size=(20, 13, 1)).astype(np.float32)
    own = np.concatenate([half, half[::-1]])
    monkeypatch.setattr(command, "slot_values", mock.Mock(return_value=own))
    result = matched(own, small_encoder(0), BOXES)
    assert result["matched"]["mean"] == pytest.approx(1)
    assert result["shuffled_images"]["mean"] < 0.3


def test_a_matching_of_few_images_is_refused() -> None:
    """Whatever the slots are, those of few images look alike."""
    with pytest.raises(ValueError, match=r"--match needs at least 20 images; 19 could be read"):
        matched(np.ones((19, 5, 7), dtype=np.float32), small_encoder(0), BOXES)


@pytest.mark.parametrize("what", [("maps", "values"), ("maps",)])
def test_redundancy_is_drawn_beside_the_untrained_encoders(what: tuple[str, ...], tmp_path: Path) -> None:
    with panels(tmp_path / "plot.png", 1, 1) as axes:
        numbers = {"model": (0.625, 0.25), "untrained": (0.875, 0.75)}
        redundancy = {row: dict(zip(what, values, strict=False)) for row, values in numbers.items()}
        draw_redundancy(axes[0, 0], redundancy)
        bars = [round(bar.get_width(), 3) for bar in axes[0, 0].patches]
        labels = [label.get_text() for label in axes[0, 0].get_yticklabels()]
    assert bars == [0.625, 0.875, 0.25, 0.75][: 2 * len(what)]
    assert labels == list(what)


@pytest.mark.slow
def test_plots_are_drawn_of_measures_classes_and_pairs(tmp_path: Path, few_are_enough: None) -> None:
    path = checkpoint(tmp_path, "sparo")
    words = ("--pretrained_weights", path, "--match", path, "--data_path", "scenes:60:32", "--num_images", 20)
    score(*words, "--output_dir", tmp_path / "scores")
    for name in ("slot_score", "slot_classes", "slot_match"):
        with Image.open(next((tmp_path / "scores").glob(f"{name}_*.png"))) as picture:
            assert picture.width > 1000


def test_read_outs_without_maps_or_slots_are_refused(tmp_path: Path) -> None:
    gap, cls = checkpoint(tmp_path, "gap"), checkpoint(tmp_path, "cls")
    for words, message in (
        (("--pretrained_weights", gap), "readout='gap' averages all tokens and has none"),
        (("--pretrained_weights", cls, "--match", cls), "has no slots"),
        (("--pretrained_weights", cls, "--num_images", 1), "needs at least 2"),
        (("--pretrained_weights", cls, "--maps", 5), "maps=5, but the encoder has 4; give 1 to 4, or leave --maps out"),
    ):
        with refused(message):
            score(*words)


def test_images_without_masks_are_counted_and_those_without_objects_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, undrawn: None
) -> None:
    write_images(tmp_path / "data" / "images", 6)
    (tmp_path / "data" / "masks").mkdir()
    for number, mask in enumerate((BLOCK, BLOCK, 0 * BLOCK, BLOCK[:9], np.stack([BLOCK] * 3, axis=-1))):
        Image.fromarray(mask).save(tmp_path / "data" / "masks" / f"{number}.png")
    words = ("--pretrained_weights", checkpoint(tmp_path, "sparo"))
    words += ("--data_path", tmp_path / "data" / "images", "--masks", tmp_path / "data" / "masks")
    with caplog.at_level(logging.WARNING):
        result = score(*words)
    data = result["data"]
    assert (data["num_images"], data["without_objects"], data["unreadable"], data["num_objects"]) == (2, 1, 3, 4)
    assert "classes" not in result
    for reason in ("its masks have 32 x 9", "has colours (RGB)", "there is no such mask"):
        assert reason in caplog.text
    for number in (0, 1):
        Image.fromarray(0 * BLOCK).save(tmp_path / "data" / "masks" / f"{number}.png")
    with refused("0 images have objects in view, 3 have none and 3 cannot be read"):
        score(*words)

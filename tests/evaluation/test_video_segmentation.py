"""DAVIS: measures and label propagation equal the official code's, and the command from checkpoint to masks and J&F."""

import base64
import json
import time
import zlib
from pathlib import Path
from typing import Any

import davis_files as drawn
import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from small_models import save_small_encoder, words_of
from torch.nn import functional as F

import dino_sparo
import eval_video_segmentation
from dino_sparo.__main__ import run
from dino_sparo.evaluation.video.davis import open_davis, read_annotations
from dino_sparo.evaluation.video.measures import boundary_similarity, region_similarity, score_objects, summarize
from dino_sparo.evaluation.video.propagation import first_labels, label_map, propagate, propagate_once
from dino_sparo.evaluation.video.segmentation import patch_features, resize_frame, view_size
from dino_sparo.runtime.faults import UserError

RECORDED = json.loads((Path(__file__).parents[1] / "reference" / "davis.json").read_text())


def annotations(name: str) -> np.ndarray:
    return np.stack([drawn.annotation(name, frame) for frame in range(drawn.VIDEOS[name].num_frames)])


@pytest.mark.parametrize("name", drawn.VIDEOS)
def test_measures_equal_the_official_ones(name: str) -> None:
    masks = np.stack([drawn.predicted(name, frame) for frame in range(drawn.VIDEOS[name].num_frames)])
    for number, values in score_objects(masks, annotations(name)).items():
        summary = summarize(values)
        assert summary.pop("J&F-Mean") == pytest.approx((summary["J-Mean"] + summary["F-Mean"]) / 2)
        assert summary == pytest.approx(RECORDED["objects"].pop(f"{name}_{number}"), abs=1e-9)
    assert not [key for key in RECORDED["objects"] if key.startswith(f"{name}_")]


def test_a_number_that_the_first_annotation_leaves_out_is_no_object() -> None:
    """It once had J = F = 1, which raised the means; DAVIS counts its objects without gaps."""
    truths = np.full((4, 6, 6), 255, dtype=np.uint8)
    truths[:, :2], truths[:, 2:4] = 4, 1
    assert list(score_objects(truths % 255, truths)) == [1, 4]


def test_empty_masks_have_a_score() -> None:
    empty, full = np.zeros((20, 30), dtype=bool), np.eye(20, 30, dtype=bool)
    assert (region_similarity(empty, empty), boundary_similarity(empty, empty)) == (1, 1)
    assert (region_similarity(full, empty), boundary_similarity(full, empty)) == (0, 0)


def propagated(name: str) -> np.ndarray:
    """Masks of a drawn video by its drawn features."""
    video = drawn.VIDEOS[name]
    height, width = view_size(video.height, video.width, 480, drawn.PATCH_SIZE)
    grid = (height // drawn.PATCH_SIZE, width // drawn.PATCH_SIZE)
    frames = (
        F.normalize(torch.from_numpy(drawn.features(name, frame, *grid)), dim=-1) for frame in range(video.num_frames)
    )
    first = drawn.annotation(name, 0)
    found = propagate(frames, first_labels(first, video.num_objects + 1, grid), *drawn.SETTINGS[name])
    return np.stack([first, *(label_map(soft, drawn.PATCH_SIZE, (video.width, video.height)) for soft in found)])


@pytest.mark.parametrize("name", drawn.VIDEOS)
def test_masks_equal_the_references_on_the_same_features(name: str) -> None:
    masks = propagated(name)
    recorded = np.frombuffer(zlib.decompress(base64.b64decode(RECORDED["masks"][name])), dtype=np.uint8)
    np.testing.assert_array_equal(masks, recorded.reshape(masks.shape))
    assert len(np.unique(masks[-1])) > 1  # objects are still there


def propagate_densely(
    frame: torch.Tensor, sources: torch.Tensor, labels: torch.Tensor, near: torch.Tensor, topk: int
) -> torch.Tensor:
    """The reference's way, from its description: affinities of all pairs, masked, of which the largest stay."""
    h, w, width = frame.shape
    own, keys = frame.view(1, h * w, width), sources.flatten(1, 2)
    affinity = torch.exp(own.expand(len(keys), -1, -1) @ keys.transpose(1, 2) / 0.1) * near
    affinity = affinity.transpose(2, 1).reshape(-1, h * w)
    affinity[affinity < affinity.topk(topk, dim=0).values.amin(dim=0)] = 0
    affinity = affinity / affinity.sum(dim=0, keepdim=True)
    return (labels.flatten(0, 2).T @ affinity).T.view(h, w, -1)


def pairs_within(h: int, w: int, radius: int) -> torch.Tensor:
    places = torch.cartesian_prod(torch.arange(h), torch.arange(w))
    return ((places[:, None] - places).abs().amax(dim=-1) <= radius).float()


def drawn_frames(h: int, w: int, width: int, number: int) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(0)
    frame = F.normalize(torch.randn(h, w, width, generator=rng), dim=-1)
    sources = F.normalize(frame + 0.2 * torch.randn(number, h, w, width, generator=rng), dim=-1)
    return frame, sources, torch.rand(number, h, w, 3, generator=rng)


@pytest.mark.parametrize(("radius", "topk"), [(2, 5), (1, 11), (30, 3)])
def test_squares_give_the_labels_of_all_pairs(radius: int, topk: int) -> None:
    frame, sources, labels = drawn_frames(17, 29, 7, 2)
    near = pairs_within(17, 29, radius)
    expected = propagate_densely(frame, sources, labels, near, topk)
    torch.testing.assert_close(propagate_once(frame, sources, labels, radius, topk), expected)


@pytest.mark.slow
@pytest.mark.alone
def test_propagation_is_three_times_as_fast_as_over_all_pairs() -> None:
    """The sizes of DAVIS for a ViT-S/16: 30 x 52 patches, 8 frames; one thread, alternating, processor time."""
    frame, sources, labels = drawn_frames(30, 52, 384, 8)
    near = pairs_within(30, 52, 12)
    threads, seconds = torch.get_num_threads(), np.zeros((3, 2))
    torch.set_num_threads(1)
    try:
        for row in seconds:
            start = time.process_time()
            propagate_densely(frame, sources, labels, near, 5)
            middle = time.process_time()
            propagate_once(frame, sources, labels, 12, 5)
            row[:] = middle - start, time.process_time() - middle
    finally:
        torch.set_num_threads(threads)
    before, now = seconds.min(axis=0)
    assert before > 3 * now


def test_an_object_of_the_whole_frame_stays() -> None:
    labels = torch.stack([torch.zeros(2, 3), torch.ones(2, 3)])
    assert (label_map(labels, 4, (9, 7)) == np.ones((7, 9))).all()


@pytest.mark.parametrize(
    ("frame", "patch_size", "size"),
    [((480, 854), 16, (480, 832)), ((854, 480), 8, (832, 480)), ((480, 910), 14, (476, 896))],
)
def test_frames_get_the_references_size_in_whole_patches(
    frame: tuple[int, int], patch_size: int, size: tuple[int, int]
) -> None:
    assert view_size(*frame, 480, patch_size) == size
    with pytest.raises(UserError, match="--img_size 4 makes frames smaller than a patch"):
        view_size(*frame, 4, patch_size)


def test_frames_are_resized_as_by_opencv() -> None:
    """OpenCV's rule: pixel x of the result lies at (x + 1/2) scale - 1/2 of the frame, between two pixels."""
    row = torch.tensor([0.0, 100, 200, 40])
    resized = resize_frame(row.expand(3, 2, 4), (2, 3))[0, 0, 0]
    assert resized.tolist() == [17, 150, 67]


# The command.


@pytest.fixture(scope="module")
def davis(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drawn.write_davis(tmp_path_factory.mktemp("data") / "DAVIS", ("wide", "tall"))


def words(checkpoint: Path, data: Path, folder: Path, **more: object) -> list[str]:
    paths = {"pretrained_weights": checkpoint, "data_path": data, "output_dir": folder}
    return words_of({**paths, "img_size": 64, "device": "cpu", **more})


@pytest.mark.parametrize(("readout", "more"), [("sparo", {}), ("sparo", {"slots": "0,3"}), ("cls", {"bs": 2})])
def test_the_command_writes_masks_and_their_scores(
    readout: str, more: dict[str, object], davis: Path, tmp_path: Path
) -> None:
    checkpoint = save_small_encoder(tmp_path / "run" / "checkpoint.pth", readout)
    folder = tmp_path / "masks"
    result: dict[str, Any] = eval_video_segmentation.main(words(checkpoint, davis, folder, **more))
    assert json.loads(json.dumps(result)) == json.loads((folder / "video_segmentation.json").read_text())
    assert result["images"]["num_objects"] == 5
    # Who scores the written masks gets the result.
    objects = []
    for video in open_davis(str(davis), "val"):
        paths = sorted((folder / video.name).glob("*.png"))
        masks, palette = read_annotations(paths)
        truths, colours = read_annotations(video.annotations)
        assert [path.name for path in paths] == [path.name for path in video.annotations]
        assert palette == colours
        objects += [summarize(values) for values in score_objects(masks, truths).values()]
    assert result["J&F-Mean"] == pytest.approx(np.mean([row["J&F-Mean"] for row in objects]))
    facts: Any = run("info", [str(folder / "video_segmentation.json")])
    assert f"J&F-Mean {result['J&F-Mean']:.2f} %" in str(facts)
    assert result["encoder"].get("slots", {}).get("slots") == ([0, 3] if "slots" in more else None)


def test_masks_of_other_options_are_not_overwritten(davis: Path, tmp_path: Path) -> None:
    checkpoint = save_small_encoder(tmp_path / "checkpoint.pth")
    options = words(checkpoint, davis, tmp_path / "masks")
    first = eval_video_segmentation.main(options)
    assert eval_video_segmentation.main([*options, "--bs", "3"])["videos"] == first["videos"]
    with refused("topk 5 in the file, 7 now"):
        eval_video_segmentation.main([*options, "--topk", "7"])


def test_features_of_slots_are_those_of_each_patch_alone(tmp_path: Path) -> None:
    encoder = dino_sparo.load_encoder(save_small_encoder(tmp_path / "checkpoint.pth"))
    images = torch.randn(2, 3, 24, 40)
    features = patch_features(encoder, images, by_slots=True)
    assert features.shape == (2, 3, 5, 15)
    tokens = encoder.backbone(images)[:, 1:]
    alone = encoder.readout(tokens[1, 7][None, None]).slots.flatten()
    torch.testing.assert_close(features[1, 1, 2], F.normalize(alone, dim=0))


def test_missing_and_damaged_files_name_layout_and_source(davis: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--data_path is empty.*JPEGImages/480p.*davischallenge\.org"):
        open_davis("", "val")
    with pytest.raises(UserError, match=r"ImageSets/2017/train\.txt is missing.*davischallenge\.org"):
        open_davis(str(davis), "train")
    root = drawn.write_davis(tmp_path, ("tall",))
    [before] = open_davis(str(root), "val")
    before.frames[0].with_name("._00000.jpg").write_bytes(b"of macOS")
    assert open_davis(str(root), "val") == [before]
    mask = root / "Annotations" / "480p" / "tall" / "00003.png"
    Image.new("RGB", (5, 5)).save(mask)
    with pytest.raises(UserError, match=r"00003\.png has RGB pixels"):
        read_annotations([mask])
    mask.write_bytes(b"no image")
    with pytest.raises(UserError, match=r"00003\.png is not a readable PNG"):
        read_annotations([mask])
    drawn.write_mask(np.zeros((5, 5), dtype=np.uint8), mask)
    with pytest.raises(UserError, match=r"00003\.png holds no object"):
        read_annotations([mask])
    with pytest.raises(UserError, match=r"00003\.png has \(5, 5\) pixels"):
        read_annotations([mask.with_name("00002.png"), mask])
    mask.unlink()
    with pytest.raises(UserError, match=r"00003\.png is missing.*Annotations/480p/VIDEO"):
        open_davis(str(root), "val")
    (root / "ImageSets" / "2017" / "val.txt").write_text("../tall\n")
    with pytest.raises(UserError, match=r"names the video '../tall'"):
        open_davis(str(root), "val")

"""`dino-sparo video`: from a video or its frames to a video of maps, in every format."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_models import save_small_encoder

import dino_sparo
import video_generation
from dino_sparo.api import call
from dino_sparo.evaluation.attention.maps import attention_maps
from dino_sparo.evaluation.video import command
from dino_sparo.evaluation.video.frames import extract_frames, list_pictures, save_jpeg, write_video
from dino_sparo.runtime.faults import MissingPackageError, UserError

COLOURS = ((200, 30, 30), (30, 200, 30), (30, 30, 200))


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "TILE_HEIGHT", 48)


@pytest.fixture
def frames(tmp_path: Path) -> Path:
    """Frames 9 to 11: their names in the order of letters are not the order of time."""
    folder = tmp_path / "frames in"
    folder.mkdir()
    for number, colour in enumerate(COLOURS):
        pixels = np.full((24, 40, 3), colour, dtype=np.uint8)
        pixels[:, 8 * number : 8 * number + 8] = 255
        Image.fromarray(pixels).save(folder / f"f{number + 9}.png")
    (folder / "notes.txt").write_text("no frame")
    return folder


def colours(paths: list[Path]) -> list[tuple[int, ...]]:
    """The one of `COLOURS` that is nearest to a picture's median."""
    found = []
    for path in paths:
        with Image.open(path) as image:
            median = np.median(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)
        found.append(min(COLOURS, key=lambda colour: float(np.abs(median - colour).sum())))
    return found


@pytest.mark.parametrize("kind", ["gif", "mp4", "avi"])
def test_a_video_has_the_frames_that_were_written(kind: str, frames: Path, tmp_path: Path) -> None:
    if kind != "gif":
        pytest.importorskip("av")
    video, folder = tmp_path / f"a.{kind}", tmp_path / "read"
    write_video(list_pictures(frames), video, fps=12.5)
    save_jpeg(Image.new("RGB", (3, 3)), (folder.mkdir(), folder / "frame-0007.jpg")[1])  # of an earlier, longer video
    assert extract_frames(video, folder) == 12.5
    assert [path.name for path in list_pictures(folder)] == [f"frame-{number:04}.jpg" for number in range(3)]
    assert colours(list_pictures(folder)) == list(COLOURS)


def generate(checkpoint: Path | str, source: Path, folder: Path, **more: Any) -> Any:
    words = {"input_path": source, "output_path": folder, "video_format": "gif", "device": "cpu", **more}
    return call("video", pretrained_weights=checkpoint, **words).results


@pytest.mark.parametrize(
    ("readout", "more", "maps"),
    [
        ("sparo", {}, 5),
        ("sparo", {"slots": "4,1"}, [4, 1]),
        ("sparo", {"max_maps": 2, "threshold": 0.6}, 2),
        ("cls", {"resize": [16, 32]}, [0, 1, 2, 3]),
        ("gap", {}, [0]),
    ],
)
def test_the_video_shows_slots_or_heads(
    readout: str, more: dict[str, Any], maps: int | list[int], frames: Path, tmp_path: Path
) -> None:
    checkpoint = save_small_encoder(tmp_path / "run" / "checkpoint.pth", readout)
    folder = tmp_path / "out"
    result = generate(checkpoint, frames, folder, **more)
    assert result == json.loads((folder / "video.json").read_text())
    assert (len(set(result["maps"])) if isinstance(maps, int) else result["maps"]) == maps
    pictures = list_pictures(folder / "attention")
    assert [path.name for path in pictures] == [f"attn-f{number}.jpg" for number in (9, 10, 11)]
    with Image.open(folder / "video.gif") as video:
        assert (video.n_frames, video.info["duration"]) == (3, 30)  # gif counts hundredths of a second
        with Image.open(pictures[0]) as picture:
            assert video.size == picture.size


def test_the_second_tile_is_the_mean_of_all_maps(frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = save_small_encoder(tmp_path / "checkpoint.pth", "cls")
    seen: list[np.ndarray] = []
    paint = command.painter
    monkeypatch.setattr(command, "painter", lambda heatmap, share: (seen.append(heatmap), paint(heatmap, share))[1])
    generate(checkpoint, frames, tmp_path / "out")
    encoder = dino_sparo.load_encoder(checkpoint)
    with Image.open(frames / "f9.png") as image:
        view = (np.asarray(image) / 255 - (0.4, 0.5, 0.6)) / (0.1, 0.2, 0.3)
    maps = attention_maps(encoder, torch.from_numpy(view).permute(2, 0, 1)[None].float())[0]
    np.testing.assert_allclose(seen[0], maps.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(seen[1:5], maps, rtol=1e-5)


def test_a_video_file_leaves_its_frames_and_its_speed(frames: Path, tmp_path: Path) -> None:
    checkpoint = save_small_encoder(tmp_path / "checkpoint.pth")
    write_video(list_pictures(frames), tmp_path / "in.gif", fps=5.0)
    result = generate(checkpoint, tmp_path / "in.gif", tmp_path / "out")
    assert (result["fps"], result["num_frames"]) == (5, 3)
    assert len(list_pictures(tmp_path / "out" / "frames")) == 3
    (tmp_path / "mine" / "frames").mkdir(parents=True)
    with pytest.raises(UserError, match=r"mine/frames exists .*--overwrite"):
        generate(checkpoint, tmp_path / "in.gif", tmp_path / "mine")
    with pytest.raises(UserError, match="holds another result"):
        generate(checkpoint, tmp_path / "out" / "frames", tmp_path / "out")
    assert generate(checkpoint, tmp_path / "out" / "frames", tmp_path / "out", overwrite=True)["fps"] == 30
    with pytest.raises(UserError, match=r"video\.gif exists.*--overwrite"):
        generate("", tmp_path / "out" / "attention", tmp_path / "out", video_only=True)
    assert generate("", tmp_path / "out" / "attention", tmp_path / "again", video_only=True, fps=10) == {}
    with Image.open(tmp_path / "again" / "video.gif") as again:
        assert (again.n_frames, again.info["duration"]) == (3, 100)


def test_wrong_videos_are_named(frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"no such video"):
        generate("demo", tmp_path / "none.mp4", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty holds no images"):
        generate("demo", tmp_path / "empty", tmp_path)
    (tmp_path / "a.gif").write_bytes(b"no video")
    with pytest.raises(UserError, match=r"a\.gif is not a video that can be read"):
        generate("demo", tmp_path / "a.gif", tmp_path)
    Image.new("RGB", (5, 7)).save(frames / "f20.png")
    with pytest.raises(UserError, match=r"f20\.png has 5 x 7 pixels, f9\.png 40 x 24"):
        list_pictures(frames)
    (frames / "f20.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"f20\.png is not a readable image"):
        list_pictures(frames)
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"mp4 and avi files need the package av.*dino_sparo\[video\]"):
        call("video", input_path=frames)


def test_damaged_mp4_files_are_named(tmp_path: Path) -> None:
    pytest.importorskip("av")
    (tmp_path / "a.mp4").write_bytes(b"no video")
    with pytest.raises(UserError, match=r"a\.mp4 is not a video that can be read"):
        extract_frames(tmp_path / "a.mp4", tmp_path / "frames")


def test_the_script_takes_the_references_words(frames: Path, tmp_path: Path) -> None:
    pytest.importorskip("av")
    checkpoint, folder = save_small_encoder(tmp_path / "checkpoint.pth", "cls"), tmp_path / "out"
    words = f"--pretrained_weights {checkpoint} --output_path {folder} --resize 16 --fps 25 --device cpu"
    video_generation.main([*words.split(), "--input_path", str(frames)])
    words = f"--input_path {folder}/attention --output_path {folder} --video_only --video_format avi"
    video_generation.main(words.split())
    read = tmp_path / "read"
    assert [extract_frames(folder / f"video.{kind}", read) for kind in ("mp4", "avi")] == [25, 30]

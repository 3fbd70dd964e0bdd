"""Encoder and video -> a video of the attention of slots (sparo) or heads (cls).

    python video_generation.py --pretrained_weights output/checkpoint.pth --input_path walk.mp4 --output_path walk
    python video_generation.py --pretrained_weights output/checkpoint.pth --input_path frames --video_format gif
    python video_generation.py --input_path walk/attention --output_path walk --video_only --fps 10

Writes video.mp4 (or avi, gif) and its pictures, attention/attn-FRAME.jpg: the frame, the mean of all maps, and each map
under its number. The frames of a video file are written to the folder frames. Options as in facebookresearch/dino.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from PIL import Image

from dino_sparo.data.sources.decode import read_image
from dino_sparo.data.views import view_pixels
from dino_sparo.draw.pixels import Picture, number_picture, stack_pictures
from dino_sparo.evaluation.attention.figures import painter
from dino_sparo.evaluation.attention.maps import attention_maps, display_order, group_near_duplicates
from dino_sparo.evaluation.task import EncoderTask
from dino_sparo.evaluation.video.frames import DEFAULT_FPS, extract_frames, list_pictures, save_jpeg, write_video
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.faults import UserError, require
from dino_sparo.runtime.files import refuse_existing
from dino_sparo.runtime.launch import on_first_process
from dino_sparo.runtime.lock import create_output_dir
from dino_sparo.runtime.logs import progress
from dino_sparo.weights.released import LONGER, take_released_weights

TILE_HEIGHT, LETTERS = 240, 2  # height of a map, pixels; size of letters as a multiple of that in TensorBoard's grids
SURVEYED_FRAMES = 8  # evenly spread; their maps decide which slots or heads are shown


@on_first_process
def generate(args: argparse.Namespace) -> dict[str, Any]:
    """Make the video that the options describe; returns the content of video.json, empty with --video_only."""
    if not args.data_path or not Path(args.data_path).exists():
        raise UserError(
            f"--data_path {args.data_path or 'is empty'}: no such video; give a video or a folder of frames"
        )
    if args.video_format != "gif":
        require("av", "mp4 and avi files")
    if args.video_only:
        return _join_pictures(args)
    take_released_weights(args, LONGER, patch_size=8)
    task = EncoderTask.start_alone(args)
    file = task.open_figures("video")
    folder, source, fps = file.path.parent, Path(args.data_path), DEFAULT_FPS
    written = ("attention", "frames") if source.is_file() else ("attention",)
    refuse_existing((folder / name for name in written), args.overwrite or file.path.exists())  # the user's pictures
    if source.is_file():
        fps, source = extract_frames(source, folder / "frames"), folder / "frames"
    frames = list_pictures(source)
    task.subject.encoder.to(task.device)
    shown = choose_maps(task, frames)
    pictures = draw_frames(task, frames, shown, folder / "attention")
    video = folder / f"video.{args.video_format}"
    write_video(pictures, video, args.fps or fps)
    result = {
        "kind": task.encoder.config.kind.shows,
        "maps": list(shown.values()),
        "num_frames": len(frames),
        "fps": args.fps or fps,
    }
    return file.write(result, str(video), headline=[])


def _join_pictures(args: argparse.Namespace) -> dict[str, Any]:
    """Make a video of finished pictures."""
    create_output_dir(folder := Path(args.output_dir))
    video = folder / f"video.{args.video_format}"
    refuse_existing([video], args.overwrite)
    write_video(list_pictures(Path(args.data_path)), video, args.fps or DEFAULT_FPS)
    say(str(video))
    return {}


def see(task: EncoderTask, path: Path) -> tuple[Picture, Float[np.ndarray, "maps h w"]]:
    """The part of a frame that the encoder sees, and its maps."""
    image = read_image(str(path), str(path), limits=task.limits)
    size = task.args.img_size or [min(image.size)]
    view = task.subject.patch_view(size, square=False, resampling=Image.Resampling.BILINEAR)
    picture = view_pixels(image, view.view(image), TILE_HEIGHT)
    return picture, attention_maps(task.encoder, view(image)[0][None])[0]


def choose_maps(task: EncoderTask, frames: Sequence[Path]) -> dict[int, int]:
    """The maps to show: their places among the encoder's maps -> numbers of slots or heads.

    Those of --slots, else the most peaked maps without near-duplicates.
    """
    if task.args.slots:
        return dict(enumerate(task.weights["slots"]["slots"]))
    places = np.unique(np.linspace(0, len(frames) - 1, SURVEYED_FRAMES).astype(int))
    maps = np.stack([see(task, frames[place])[1] for place in places.tolist()])
    order = display_order(maps, group_near_duplicates(maps), task.args.max_maps).tolist()
    return {number: number for number in (sorted(order) if task.encoder.config.kind.shows == "head" else order)}


def draw_frames(task: EncoderTask, frames: Sequence[Path], shown: Mapping[int, int], folder: Path) -> list[Path]:
    """Write a picture of every frame, and remove pictures of an earlier video; returns their paths."""
    create_output_dir(folder, option="")
    for path in folder.glob("attn-*.jpg"):
        path.unlink()
    kind = task.encoder.config.kind.shows
    paths = []
    for frame in progress(frames, desc="frames"):
        picture, maps = see(task, frame)
        named = [(f"{kind} {number}", maps[place]) for place, number in shown.items()]
        if len(maps) > 1:
            named.insert(0, (f"mean of {len(maps)} {kind}s", maps.mean(axis=0)))
        tiles = [number_picture(picture, "frame", LETTERS)]
        tiles += [
            number_picture(painter(heatmap, task.args.threshold)(picture), name, LETTERS) for name, heatmap in named
        ]
        columns = math.ceil(math.sqrt(len(tiles)))
        sheet = stack_pictures([tiles[start : start + columns] for start in range(0, len(tiles), columns)])
        paths.append(folder / f"attn-{frame.stem}.jpg")
        save_jpeg(Image.fromarray(sheet), paths[-1])
    return paths

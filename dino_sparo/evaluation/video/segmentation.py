"""Encoder and DAVIS 2017 -> masks of every frame by label propagation, and J&F of each video.

    python eval_video_segmentation.py --data_path davis/DAVIS --output_dir masks
    python eval_video_segmentation.py --pretrained_weights sparo.pth --slots 0,3,7 --data_path davis/DAVIS

Writes OUTPUT_DIR/VIDEO/00000.png and so on, which the official evaluation also reads, and video_segmentation.json with
the measures. Options as in facebookresearch/dino. Patches are compared by their tokens or, with --slots, by slots.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional as F

from dino_sparo.data.augment import channel_constant, normalize_levels
from dino_sparo.data.crops import pixels_of
from dino_sparo.data.sources.decode import read_image
from dino_sparo.draw.pixels import save_picture
from dino_sparo.draw.tables import text_table
from dino_sparo.evaluation.task import EncoderTask
from dino_sparo.evaluation.video.davis import AnnotatedVideo, open_davis, read_annotations
from dino_sparo.evaluation.video.measures import MEASURES, VOID, average, score_objects, summarize
from dino_sparo.evaluation.video.propagation import first_labels, label_map, propagate
from dino_sparo.models.encoder import Encoder
from dino_sparo.runtime.faults import UserError, require
from dino_sparo.runtime.launch import on_first_process
from dino_sparo.runtime.lock import create_output_dir
from dino_sparo.runtime.logs import progress
from dino_sparo.weights.released import take_released_weights
from dino_sparo.weights.results import Score

LONG_SIDE_STEP = 64  # pixels; the reference rounds the long side of a frame down to a multiple


@on_first_process
def segment_videos(args: argparse.Namespace) -> dict[str, Any]:
    """Segment the videos of a split; returns the content of video_segmentation.json."""
    take_released_weights(args)
    task = EncoderTask.start_alone(args)
    require("scipy", "scores of masks")
    videos = open_davis(args.data_path, args.split)
    file = task.open_figures("video_segmentation")
    scores: dict[str, dict[int, dict[str, float]]] = {}
    for video in progress(videos, desc="videos"):
        truths, palette = read_annotations(video.annotations)
        masks = segment(task, video, truths[0] % VOID)
        create_output_dir(folder := file.path.parent / video.name)
        for path, mask in zip(video.annotations, masks, strict=True):
            save_picture(mask, folder / path.name, palette)
        scores[video.name] = {number: summarize(values) for number, values in score_objects(masks, truths).items()}
    objects = [summary for video_scores in scores.values() for summary in video_scores.values()]
    result: dict[str, Any] = {
        "evaluation": "video segmentation",
        **average(objects),
        "videos": {name: {**average(list(video.values())), "objects": video} for name, video in scores.items()},
        "images": {
            "data_path": args.data_path,
            "split": args.split,
            "num_videos": len(videos),
            "num_frames": sum(len(video.frames) for video in videos),
            "num_objects": len(objects),
        },
        "view": {"short_side": args.img_size, "mean": list(task.subject.mean), "std": list(task.subject.std)},
    }
    headline = [Score(name, result[name]) for name in ("J&F-Mean", "J-Mean", "F-Mean")]
    return file.write(result, table(result), headline=headline)


def segment(
    task: EncoderTask, video: AnnotatedVideo, annotation: UInt8[np.ndarray, "H W"]
) -> UInt8[np.ndarray, "T H W"]:
    """Numbers of objects in every frame of a video, whose first frame is annotated."""
    args, patch_size = task.args, task.encoder.config.patch_size
    height, width = annotation.shape
    size = view_size(height, width, args.img_size, patch_size)
    grid = (size[0] // patch_size, size[1] // patch_size)
    labels = first_labels(annotation, int(annotation.max()) + 1, grid).to(task.device)
    settings = args.n_last_frames, args.size_mask_neighborhood, args.topk
    found = propagate(video_features(task, video.frames, size), labels, *settings)
    return np.stack([annotation, *(label_map(soft, patch_size, (width, height)) for soft in found)])


def view_size(height: int, width: int, short_side: int, patch_size: int) -> tuple[int, int]:
    """Height and width at which the encoder sees a frame: the reference's, rounded down to whole patches.

    Raises:
        UserError: the sides are smaller than a patch.
    """
    short, long = min(height, width), max(height, width)
    long_side = short_side * long // short // LONG_SIDE_STEP * LONG_SIDE_STEP
    sides = [side // patch_size * patch_size for side in (short_side, long_side)]
    if not all(sides):
        raise UserError(f"--img_size {short_side} makes frames smaller than a patch of {patch_size} px; give more")
    return (sides[0], sides[1]) if height <= width else (sides[1], sides[0])


def video_features(task: EncoderTask, paths: Sequence[Path], size: tuple[int, int]) -> Iterator[Float[Tensor, "h w D"]]:
    """Features of each frame's patches, on the device."""
    step, mean, std = task.args.batch_size_per_gpu, task.subject.mean, task.subject.std
    for start in range(0, len(paths), step):
        images = [read_image(str(path), str(path), limits=task.limits) for path in paths[start : start + step]]
        views = torch.cat([resize_frame(torch.from_numpy(pixels_of(image).copy()), size) for image in images])
        frames = normalize_levels(views.numpy(), channel_constant(mean), channel_constant(std))
        yield from patch_features(task.encoder, torch.from_numpy(frames).to(task.device), bool(task.args.slots))


def resize_frame(pixels: Tensor, size: tuple[int, int]) -> Float[Tensor, "1 C height width"]:
    """A frame (C, H, W) resized as the reference's OpenCV does: bilinear, without a filter, rounded to levels."""
    return F.interpolate(pixels[None].float(), size, mode="bilinear", align_corners=False).round()


@torch.no_grad()
def patch_features(encoder: Encoder, images: Float[Tensor, "B C H W"], by_slots: bool) -> Float[Tensor, "B h w D"]:
    """Features of patches, of length one: tokens of the last block or, `by_slots`, the slots of each patch alone.

    A slot of a patch alone is the value that the patch adds to the slot, before attention weighs it.
    """
    if by_slots:
        tokens = encoder.backbone(images)[:, encoder.backbone.num_prefix_tokens :]
        slots = encoder.readout(tokens.flatten(0, 1)[:, None]).slots
        patches = slots.flatten(1).view(*tokens.shape[:2], -1)
    else:
        [patches] = encoder.get_intermediate_layers(images, 1)
    return F.normalize(patches.float().unflatten(1, encoder.backbone.grid(images)), dim=-1)


def table(result: dict[str, Any]) -> str:
    """J&F, J and F of each video, and the official measures of all objects."""
    rows = [("", "J&F", "J", "F")]
    for name, video in result["videos"].items():
        rows.append((name, *(f"{video[f'{measure}-Mean']:.1f}" for measure in ("J&F", "J", "F"))))
    totals = [(measure, f"{result[measure]:.1f} %") for measure in MEASURES]
    return f"{text_table(rows, num_words=1)}\n\n{text_table(totals, num_words=1)}"

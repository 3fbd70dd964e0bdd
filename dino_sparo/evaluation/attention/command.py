"""Images -> attention maps: one per slot (sparo) or per head (cls), as numbers, overlays and a slot atlas.

    python visualize_attention.py --pretrained_weights output/checkpoint.pth --output_dir maps
    python visualize_attention.py --pretrained_weights output/checkpoint.pth --image_path cat.jpg --image_size 480
    python visualize_attention.py --pretrained_weights sparo.pth --compare cls.pth --image_path photos
    python visualize_attention.py --pretrained_weights output/checkpoint.pth --atlas data/imagenet/val

Writes attention.png (a labelled grid), attention.npy (the raw maps) and attention.json (peakedness, near-duplicates);
options add further files. With --pca, `pca.py` draws principal components instead. Options as in facebookresearch/dino.
"""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from dino_sparo.data.scenes.images import Scenes
from dino_sparo.data.sources import CorruptImageError, ImageLimits, open_source
from dino_sparo.data.sources.folders import ALL
from dino_sparo.data.sources.image_source import spread_out
from dino_sparo.data.views import PatchView, view_pixels
from dino_sparo.draw.figure import PICTURE_HEIGHT, describe_model, file_names, run_names
from dino_sparo.draw.html import save_page
from dino_sparo.draw.pixels import save_picture
from dino_sparo.draw.sheet import require_matplotlib, save_sheet
from dino_sparo.evaluation.attention.atlas import atlas_figure, build_atlas
from dino_sparo.evaluation.attention.figures import MapSet, maps_figure, painter
from dino_sparo.evaluation.attention.maps import maps_and_slots, mass_mask
from dino_sparo.evaluation.attention.pca import draw_components, refuse_options_of_maps
from dino_sparo.evaluation.encoders import EvaluatedEncoder, compared_encoder
from dino_sparo.evaluation.features import check_features, disjoint_subsets
from dino_sparo.evaluation.task import EncoderTask
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import write_json
from dino_sparo.runtime.launch import on_first_process
from dino_sparo.runtime.lock import create_output_dir
from dino_sparo.weights.released import LONGER, take_released_weights

logger = logging.getLogger(__name__)

# The default image: a scene of two objects on a quiet background, and its size in pixels.
SCENE_INDEX, SCENE_SIZE = 23, 384
Images = list[tuple[str, Image.Image]]  # location and image


@on_first_process
def visualize(args: argparse.Namespace) -> dict[str, Any]:
    """Draw the figures that the options name; returns the content of attention.json."""
    take_released_weights(args, LONGER, patch_size=8)
    task = EncoderTask.start_alone(args)
    require_matplotlib()
    refuse_options_of_maps(args)
    subject = task.subject
    if args.pca:
        images = read_images(args.data_path, args.num_images, task.limits)
        return draw_components(task, images, reference_view(subject, args.img_size, square=len(images) > 1))
    file = task.open_figures("attention", ("threshold", "save_each", "figure_format"))
    folder = file.path.parent
    limits, channels = task.limits, args.show_channels
    images = read_images(args.data_path or args.atlas, args.num_images, limits)
    runs = run_names([args.pretrained_weights, args.compare] if args.compare else [args.pretrained_weights])
    subject.encoder.to(task.device)
    maps = map_images(subject, runs[0], images, args.img_size, channels)
    record = file.write({**maps.record(), "exif": args.exif}, headline=[])
    written = [file.path.with_suffix(".npy"), file.path]
    np.save(written[0], maps.maps)
    written += draw(maps, folder, args)
    if args.compare:
        compared = compared_encoder(args.compare, args)
        if (in_chans := compared.encoder.config.in_chans) != limits.in_chans:
            raise UserError(f"--compare takes {in_chans} channels, --pretrained_weights {limits.in_chans}")
        compared.encoder.to(task.device)
        other = map_images(compared, runs[1], images, args.img_size, channels)
        written.append(folder / f"compare.{args.figure_format}")
        save_sheet(maps_figure([maps, other], range(len(images)), args.max_maps), written[-1])
    if args.atlas:
        written += draw_atlas(task, f"{maps.run}  ·  {maps.model}", folder)
    say("\n".join(map(str, written)))
    return record


def read_images(image_path: str | None, max_images: int, limits: ImageLimits) -> Images:
    """At most `max_images` of anything that `open_source` takes; None: a built-in, held-out scene.

    Unreadable images of a source are skipped, unless all are unreadable.
    """
    if image_path is None:
        if limits.in_chans != 3:
            raise UserError(f"the built-in scene has 3 channels, the model takes {limits.in_chans}; give --data_path")
        scenes = Scenes(SCENE_INDEX + 1, image_size=SCENE_SIZE, split="val")
        return [(f"{scenes.location(SCENE_INDEX)}: {scenes.caption(SCENE_INDEX)}", scenes.read(SCENE_INDEX))]
    source = open_source(image_path, ALL, limits=limits)
    images: Images = []
    for index in spread_out(source, max_images):
        try:
            images.append((source.location(index), source.read(index)))
        except CorruptImageError as error:
            logger.warning("left out %s", error)
            last_error = error
    if not images:
        raise last_error
    return images


def map_images(
    subject: EvaluatedEncoder, run: str, images: Images, image_size: list[int] | None, channels: Sequence[int] = ()
) -> MapSet:
    """The maps of images, computed one by one, since maps of large images take much memory.

    `run` is the encoder's name in figures; `image_size` and `channels` are the options.
    """
    config = subject.encoder.config
    view = reference_view(subject, image_size, square=len(images) > 1)
    pictures = [view_pixels(image, view.view(image), PICTURE_HEIGHT, channels) for _, image in images]
    found = [maps_and_slots(subject.encoder, view(image)[0][None]) for _, image in images]
    maps, slots = (np.concatenate(parts) for parts in zip(*found, strict=True))
    check_features(torch.from_numpy(slots).flatten(1), f"slots of {run}")
    if config.kind.shows == "average":
        logger.warning("readout=%r averages all tokens: its one map is uniform on every image", config.readout)
    run = "untrained" if subject.record["untrained"] else run
    model = describe_model(subject.record, config, config.readout, has_run=False)
    return MapSet(run, model, config.kind.shows, config.patch_size, maps, [name for name, _ in images], pictures)


def reference_view(subject: EvaluatedEncoder, image_size: list[int] | None, square: bool) -> PatchView:
    """The view of the reference's script."""
    return subject.patch_view(image_size, square=square, resampling=Image.Resampling.BILINEAR)


def draw(maps: MapSet, folder: Path, args: argparse.Namespace) -> list[Path]:
    """Draw grids, masks and single maps.

    One image has one grid, attention.png. For several images, attention.png shows the same maps of all images, and
    attention-NAME.png all maps of an image.
    """
    several = len(maps.names) > 1
    grids: dict[str, tuple[list[int], float | None]] = {}
    written, folders = [], []
    if several:
        grids["attention"] = (list(range(len(maps.names))), None)
    for index, file_name in enumerate(file_names(maps.names)):
        suffix = f"-{file_name}" if several else ""
        grids[f"attention{suffix}"] = ([index], None)
        if args.threshold is not None:
            grids[f"masks{suffix}"] = ([index], args.threshold)
        if args.save_each:
            folders.append(draw_each(maps, index, folder / f"maps{suffix}", args.threshold))
    for name, (images, threshold) in grids.items():
        written.append(folder / f"{name}.{args.figure_format}")
        save_sheet(maps_figure([maps], images, args.max_maps, threshold), written[-1])
    return [*written, *folders]


def draw_each(maps: MapSet, index: int, folder: Path, threshold: float | None) -> Path:
    """Write an image's view and each of its maps, under the reference's names; returns their folder."""
    create_output_dir(folder, option="")
    picture, kind = maps.pictures[index], maps.kind
    save_picture(picture, folder / "img.png")
    for number, heatmap in enumerate(maps.maps[index]):
        save_picture(painter(heatmap)(picture), folder / f"attn-{kind}{number}.png")
        if threshold is not None:
            masked = painter(heatmap, threshold)(picture)
            save_picture(masked, folder / f"mask_th{threshold:g}_{kind}{number}.png")
    if threshold is not None:
        np.save(folder / f"mask_th{threshold:g}.npy", mass_mask(maps.maps[index], threshold))
    return folder


def draw_atlas(task: EncoderTask, model: str, folder: Path) -> list[Path]:
    """Search for the images that activate each slot most, and draw the atlas."""
    args, subject = task.args, task.subject
    source = open_source(args.atlas, ALL, limits=task.limits)
    [searched] = disjoint_subsets(source, [min(args.atlas_max_images, len(source))])
    atlas, tiles = build_atlas(
        subject.encoder,
        searched,
        reference_view(subject, args.img_size, square=True),
        images_per_slot=args.atlas_images,
        channels=args.show_channels,
        num_workers=args.num_workers,
    )
    atlas = {"model": model, "source": source.name, **atlas}
    paths = [folder / f"atlas.{ending}" for ending in (args.figure_format, "html", "json")]
    figure = atlas_figure(atlas, tiles)
    save_sheet(figure, paths[0])
    save_page(figure, paths[1])
    write_json({**task.protocol(), **atlas}, paths[2])
    return paths

"""Images -> attention maps: one per slot (sparo) or per head (cls), as numbers, overlays and a slot atlas.

    python visualize_attention.py --pretrained_weights output/checkpoint.pth --output_dir maps
    python visualize_attention.py --pretrained_weights output/checkpoint.pth --image_path cat.jpg --image_size 480
    python visualize_attention.py --pretrained_weights sparo.pth --compare cls.pth --image_path photos
    python visualize_attention.py --pretrained_weights output/checkpoint.pth --atlas data/imagenet/val

Always writes attention.png (a labelled grid), attention.npy (the raw maps) and attention.json (which map is how peaked,
and which look alike); further files as the options say. Options as in facebookresearch/dino.
"""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from dino_sparo.data.sources import CorruptImageError, ImageLimits, ImageSource, open_source
from dino_sparo.data.sources.image_source import spread_out
from dino_sparo.data.views import PatchView, view_pixels
from dino_sparo.draw.figure import PICTURE_HEIGHT
from dino_sparo.draw.html import save_page
from dino_sparo.draw.labels import describe_model, file_names, run_names
from dino_sparo.draw.sheet import require_matplotlib, save_sheet
from dino_sparo.evaluation.attention.atlas import atlas_figure, build_atlas
from dino_sparo.evaluation.attention.figures import MapSet, maps_figure, painter
from dino_sparo.evaluation.attention.images import default_image_size, open_images
from dino_sparo.evaluation.attention.maps import (
    attention_maps,
    check_share,
    class_token_share,
    effective_patches,
    mass_mask,
    rank_by_peakedness,
)
from dino_sparo.evaluation.features import disjoint_subsets
from dino_sparo.evaluation.task import EvaluationTask, Subject, compared_encoder
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.records import versions, write_json

logger = logging.getLogger(__name__)


def visualize(args: argparse.Namespace) -> None:
    """Draw what the options ask for.

    Raises:
        ValueError: options, weights or images that do not fit; the message says what would.
        ImportError: matplotlib is not installed.
    """
    task = EvaluationTask.start_on_first(args)
    if task is None:
        return
    require_matplotlib()
    if args.threshold is not None:
        check_share("threshold", args.threshold)
    for name in ("max_images", "max_maps", "atlas_images", "atlas_max_images"):
        number = getattr(args, name)
        if number is not None and number < 1:
            raise ValueError(f"{name}={number}; give a positive number")
    subject, device, folder = task.subject, task.device, task.folder
    images = read_images(open_images(args.image_path, ImageLimits(max_value=args.max_value)), args.max_images)
    runs = run_names([args.pretrained_weights, args.compare] if args.compare else [args.pretrained_weights])
    maps = map_images(subject, runs[0], images, args.image_size, device)
    written = [*write_numbers(subject, maps, folder), *draw(maps, folder, args)]
    if args.compare:
        other = map_images(compared_encoder(args.compare, args), runs[1], images, args.image_size, device)
        written.append(folder / f"compare.{args.figure_format}")
        save_sheet(maps_figure([maps, other], range(len(images)), args.max_maps), written[-1])
    if args.atlas:
        written += make_atlas(subject, runs[0], device, folder, args)
    say("\n".join(map(str, written)))


def read_images(source: ImageSource, max_images: int) -> list[tuple[str, Image.Image]]:
    """At most `max_images` of a source, with their names; unreadable ones are left out.

    Raises:
        CorruptImageError: none of them can be read.
    """
    images: list[tuple[str, Image.Image]] = []
    errors: list[CorruptImageError] = []
    for index in spread_out(source, max_images):
        try:
            images.append((source.location(index), source.read(index)))
        except CorruptImageError as error:
            errors.append(error)
            logger.warning("left out %s", error)
    if not images:
        raise errors[0]
    return images


def map_images(
    subject: Subject,
    run: str,
    images: list[tuple[str, Image.Image]],
    image_size: Sequence[int] | None,
    device: torch.device,
) -> MapSet:
    """Run an encoder over images, one by one: maps of large images take much memory.

    Args:
        subject: the encoder.
        run: what figures call it.
        images: names and RGB images.
        image_size: as the option; None: `default_image_size`.
        device: where to compute.
    """
    encoder = subject.encoder.to(device).eval()
    config = encoder.config
    transform = patch_view(subject, image_size, square=len(images) > 1)
    pictures = [view_pixels(image, transform.view(image), PICTURE_HEIGHT) for _, image in images]
    maps = [attention_maps(encoder, transform(image)[0][None].to(device)) for _, image in images]
    if config.kind.shows == "average":
        logger.warning("readout=%r averages all tokens: its one map is uniform on every image", config.readout)
    names = [name for name, _ in images]
    return MapSet(name_of(subject, run), describe(subject), config.kind.shows, np.concatenate(maps), names, pictures)


def patch_view(subject: Subject, image_size: Sequence[int] | None, square: bool) -> PatchView:
    """The pixels that the reference's script shows an encoder; `image_size` None: `default_image_size`."""
    config = subject.encoder.config
    size = image_size or [default_image_size(config)]
    bilinear = Image.Resampling.BILINEAR
    return PatchView(size, config.patch_size, subject.mean, subject.std, square, bilinear)


def name_of(subject: Subject, run: str) -> str:
    """Name of an encoder in figures: its run, or "untrained"."""
    return "untrained" if subject.record["untrained"] else run


def describe(subject: Subject) -> str:
    """How an encoder is built and how long it was trained, for figures."""
    config = subject.encoder.config
    return describe_model(subject.record, config, None, config.readout)


def write_numbers(subject: Subject, map_set: MapSet, folder: Path) -> list[Path]:
    """Write attention.npy, (images, maps, h, w), and attention.json, the numbers of each map."""
    maps, patch_size = map_set.maps, subject.encoder.config.patch_size
    patches, prefix = effective_patches(maps), class_token_share(maps)
    ranking = {int(number): rank for rank, number in enumerate(rank_by_peakedness(maps))}
    described = [
        {
            "map": number,
            "rank": ranking[number],
            "group": int(map_set.groups[number]),
            "effective_patches": patches[:, number].tolist(),
            "class_token_share": prefix[:, number].tolist(),
        }
        for number in range(maps.shape[1])
    ]
    values: dict[str, Any] = {
        "encoder": subject.record,
        "kind": map_set.kind,
        "images": map_set.names,
        "image_size": [patch_size * side for side in maps.shape[-2:]],
        "grid": list(maps.shape[-2:]),
        "maps": described,
        "versions": versions(),
    }
    np.save(folder / "attention.npy", maps)
    write_json(values, folder / "attention.json")
    return [folder / "attention.npy", folder / "attention.json"]


def draw(maps: MapSet, folder: Path, args: argparse.Namespace) -> list[Path]:
    """Draw the grids, the masks, and each map alone.

    One image gives one grid, attention.png; of several, attention.png shows the same maps for all, and each gets a
    grid of its own, attention-NAME.png.
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
        figure = maps_figure([maps], images, args.max_maps, threshold)
        written.append(folder / f"{name}.{args.figure_format}")
        save_sheet(figure, written[-1])
    return [*written, *folders]


def draw_each(maps: MapSet, index: int, folder: Path, threshold: float | None) -> Path:
    """Write one image's view and each of its maps alone, under the reference's names; returns their folder."""
    folder.mkdir(exist_ok=True)
    picture, kind = maps.pictures[index], maps.kind
    Image.fromarray(picture).save(folder / "img.png")
    for number, heatmap in enumerate(maps.maps[index]):
        Image.fromarray(painter(heatmap)(picture)).save(folder / f"attn-{kind}{number}.png")
        if threshold is not None:
            masked = painter(heatmap, threshold)(picture)
            Image.fromarray(masked).save(folder / f"mask_th{threshold:g}_{kind}{number}.png")
    if threshold is not None:
        masks = [mass_mask(heatmap, threshold) for heatmap in maps.maps[index]]
        np.save(folder / f"mask_th{threshold:g}.npy", np.stack(masks))
    return folder


def make_atlas(subject: Subject, run: str, device: torch.device, folder: Path, args: argparse.Namespace) -> list[Path]:
    """Search images for those that light up each slot, and draw the atlas."""
    encoder = subject.encoder.to(device).eval()
    view = patch_view(subject, args.image_size, square=True)
    source = open_source(args.atlas, "all", limits=ImageLimits(max_value=args.max_value))
    [searched] = disjoint_subsets(source, [min(args.atlas_max_images, len(source))])
    atlas = build_atlas(
        encoder,
        searched,
        view,
        model=f"{name_of(subject, run)}  ·  {describe(subject)}",
        name=source.name,
        images_per_slot=args.atlas_images,
        num_workers=args.num_workers,
    )
    paths = [folder / f"atlas.{ending}" for ending in (args.figure_format, "html", "json")]
    figure = atlas_figure(atlas)
    save_sheet(figure, paths[0])
    save_page(figure, paths[1])
    write_json({"encoder": subject.record, **atlas.record(), "versions": versions()}, paths[2])
    return paths

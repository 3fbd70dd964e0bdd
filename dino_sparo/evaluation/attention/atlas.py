"""Images -> the slot atlas: for each slot the images that activate it most, with its maps on them.

All images are read once to score them, and the chosen images again to draw them, so that memory does not grow with the
number of maps.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from dino_sparo.data.shares import readable_batches, share_loader
from dino_sparo.data.sources import ImageSource
from dino_sparo.data.views import PatchView, view_pixels
from dino_sparo.draw.figure import Band, Figure, Layout, Section, Tile, map_painter
from dino_sparo.draw.pixels import heat
from dino_sparo.evaluation.attention.maps import (
    attention_maps,
    class_token_share,
    effective_patches,
    group_near_duplicates,
    letters_of_groups,
    maps_and_slots,
)
from dino_sparo.models.encoder import Encoder
from dino_sparo.runtime.cli import printable
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.logs import progress

PICTURE_HEIGHT = 168  # pixels, of a picture on the page
THUMB_HEIGHT = 76  # pixels, on the sheet
SIDE = 150  # pixels, of a slot's name on the sheet
GROUPING_IMAGES = 64  # the maps of these images decide which slots are near-duplicates
BATCH_SIZE = 16
# `score_images` in words.
SCORE_WORDS = (
    "distance of the slot's value from its mean over all images, times the share of its attention to patches rather "
    "than class token and registers, times the peakedness of this attention (0 for a uniform map, 1 for one patch)"
)
Atlas = dict[str, Any]  # content of atlas.json


def patches_in_words(atlas: Atlas) -> str:
    """The meaning of "21 patches" beside a slot, with the numbers of the first slot."""
    (rows, columns), first = atlas["grid"], atlas["slots"][0]
    number, named = f"{first['patches']:.0f} patches", f"{atlas['kind']} {first['number']}"
    return (
        f"\u201c{number}\u201d: the attention of {named} has an effective number of {number}, of {rows} x {columns} = "
        f"{rows * columns} patches of an image. This number is exp(entropy), the geometric mean over all images."
    )


def score_images(
    patches: Float[np.ndarray, "images maps"],
    prefix: Float[np.ndarray, "images maps"],
    num_patches: int,
    slots: Float[np.ndarray, "images maps V"] | None = None,
) -> Float[np.ndarray, "images maps"]:
    """Score of each image for each slot: how much the image activates the slot.

        score = (1 - c) * (1 - log(e) / log(h w)) * |s - mean s| / mean |s - mean s|

    with c the attention to class token and registers, e the effective patches, s the slot's value, and means over the
    images. The first two factors are large if the slot attends to few patches, the third if its value is unusual.
    `slots` None omits the third factor, since a head of `cls` has no value. This score is ours, not the paper's.
    """
    definite = (1 - prefix) * np.clip(1 - np.log(patches) / max(math.log(num_patches), 1e-12), 0, 1)
    if slots is None:
        return definite
    departure = np.linalg.norm(slots - slots.mean(axis=0), axis=-1)
    mean = departure.mean(axis=0)
    return definite * departure / np.where(mean > 0, mean, 1)


def build_atlas(
    encoder: Encoder,
    source: ImageSource,
    view: PatchView,
    *,
    images_per_slot: int = 8,
    channels: Sequence[int] = (),
    num_workers: int = 0,
) -> tuple[Atlas, list[list[Tile]]]:
    """Look at every image of a source and choose those that light up each slot most; unreadable images are left out.

    Args:
        encoder: in eval mode, on its device; any but one that averages all tokens.
        source: the images.
        view: the part of an image that the encoder sees.
        images_per_slot: number of images to choose.
        channels: that pictures show, as in `view_pixels`.
        num_workers: processes that load images.

    Returns:
        The numbers of each slot, by peakedness, and each slot's images with its maps on them, best first.
    """
    readout, kind = encoder.config.readout, encoder.config.kind.shows
    if kind == "average":
        raise UserError(f"an atlas shows slots or heads; readout={readout!r} averages all tokens and has neither")
    indices, patches, prefix, values, sample = _survey(encoder, source, view, num_workers)
    rows, columns = sample.shape[-2:]
    scores = score_images(patches, prefix, rows * columns, values if kind == "slot" else None)
    best = np.argsort(-scores, axis=0, kind="stable")[:images_per_slot]  # (images per slot, maps)
    records: dict[tuple[int, int], dict[str, Any]] = {}
    tiles: dict[tuple[int, int], Tile] = {}
    for place in progress(np.unique(best).tolist(), desc="atlas pictures"):
        image, location = source.read(int(indices[place])), source.location(int(indices[place]))
        picture = view_pixels(image, view.view(image), PICTURE_HEIGHT, channels)
        maps = attention_maps(encoder, view(image)[0][None])[0]
        for number in np.flatnonzero((best == place).any(axis=0)).tolist():
            score, area = float(scores[place, number]), float(patches[place, number])
            records[number, place] = {"name": location, "score": score, "effective_patches": area}
            tooltip = f" · score {score:.2f} · {area:.0f} patches"
            tiles[number, place] = Tile(picture, location, map_painter(heat(maps[number])), tooltip=tooltip)
    mean_patches = np.exp(np.log(patches).mean(axis=0))
    ranking = np.argsort(mean_patches, kind="stable").tolist()
    groups = group_near_duplicates(sample)
    # Groups are numbered by their first member in the ranking over all images.
    first_ranks = np.unique(groups[ranking], return_index=True)[1]
    groups = np.argsort(np.argsort(first_ranks))[groups]
    letters = letters_of_groups(groups)
    slots = [
        {
            "number": number,
            "rank": rank,
            "group": int(groups[number]),
            "letter": letters[number],
            "patches": float(mean_patches[number]),
            "class_token_share": float(prefix[:, number].mean()),
            "images": [records[number, place] for place in best[:, number].tolist()],
        }
        for rank, number in enumerate(ranking)
    ]
    record = {"kind": kind, "num_images": len(indices), "grid": [rows, columns], "slots": slots, "score": SCORE_WORDS}
    return record, [[tiles[number, place] for place in best[:, number].tolist()] for number in ranking]


def _survey(encoder: Encoder, source: ImageSource, view: PatchView, num_workers: int) -> tuple[np.ndarray, ...]:
    """Read every image once.

    Returns:
        Indices of the readable images (images,), effective patches (images, maps), class-token shares (images, maps),
        slots (images, L, V), and the maps of at most GROUPING_IMAGES images.
    """
    loader = share_loader(source, view, torch.device("cpu"), BATCH_SIZE, num_workers)
    parts: list[tuple[np.ndarray, ...]] = []
    sample: list[np.ndarray] = []
    stride = max(1, len(source) // GROUPING_IMAGES)
    for batch, kept in readable_batches(loader, "atlas"):
        maps, slots = (values[kept.numpy()] for values in maps_and_slots(encoder, batch.views[0]))
        indices = batch.indices[kept].numpy()
        parts.append((indices, effective_patches(maps), class_token_share(maps), slots))
        sample += [image_maps for index, image_maps in zip(indices, maps, strict=True) if index % stride == 0]
    return *(np.concatenate(column) for column in zip(*parts, strict=True)), np.stack(sample[:GROUPING_IMAGES])


def atlas_figure(atlas: Atlas, tiles: Sequence[Sequence[Tile]]) -> Figure:
    """A section per slot, by peakedness, with the slot's images, best first.

    The atlas also has `model`, a line about the encoder, and `source`, the name of the images.
    """
    kind, slots = atlas["kind"], atlas["slots"]
    summary = (
        f"{kind.capitalize()}s run down the columns, from most to least peaked; the images of a {kind} run from left "
        f"to right, beginning with the image that activates it most. {patches_in_words(atlas)}"
    )
    summary += f" {kind.capitalize()}s with similar maps share a letter." * any(slot["letter"] for slot in slots)
    explanation = (
        f"Each row is one {kind} with the images that activate it most, best first. Colours: its attention; grey: no "
        f"more than an even share of its attention. The score of an image: {SCORE_WORDS}. “Class token” is the share "
        f"of a {kind}’s attention that goes to class token and registers instead of patches. {kind.capitalize()}s with "
        f"similar maps on all images share a letter. {patches_in_words(atlas)}"
    )
    about = f"{atlas['model']}  ·  {atlas['num_images']:,} images of {printable(atlas['source'])}"
    layout = Layout((THUMB_HEIGHT, 4 * THUMB_HEIGHT), len(tiles[0]), SIDE, gap=3, is_flowing=True)
    sections = [
        Section(
            [Band(tiles=images)],
            f"{kind} {slot['number']}",
            (f"{slot['patches']:.0f} patches", f"class token {100 * slot['class_token_share']:.0f}%"),
            group=(slot["group"], slot["letter"]) if slot["letter"] else None,
            keys={key: slot[key] for key in ("number", "rank", "group")},
        )
        for slot, images in zip(slots, tiles, strict=True)
    ]
    return Figure(f"What activates each {kind}", about, sections, layout, [summary], explanation)

"""Images -> the first three principal components of their patch tokens as colours, in one basis for all images.

    dino-sparo attention --pretrained_weights demo --data_path photos --pca --output_dir components

    pca.png          images, components of patch tokens and, with slots, of the patches' attention over slots
    pca.npy          (images, h, w, 3), components of the tokens; NaN outside of the foreground
    pca-slots.npy    components of the patches' attention over slots
    pca.json         protocol, and the share of the variance that each component explains

The components of x, a patch's token, or the slots' shares of the patch's attention:

    y = V (x - mean x),  V the eigenvectors of the covariance with the three largest eigenvalues, over all images

The largest entry of an eigenvector is positive, as in scikit-learn. Colours are those of DINOv3's notebook:
sigmoid(2 y / std y). The foreground follows DINOv2, figure 1: patches whose first component is positive, and only their
components are coloured. DINOv2 chooses the sign of the first component by eye. Here, its mean over the images' border
is negative, which is our choice.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from PIL import Image

from dino_sparo.data.views import PatchView, view_pixels
from dino_sparo.draw.figure import PICTURE_HEIGHT, Band, Figure, Section, Tile, describe_model, file_names, short_name
from dino_sparo.draw.pixels import Picture, enlarge, save_picture
from dino_sparo.draw.sheet import save_sheet
from dino_sparo.evaluation.attention.figures import tile_layout
from dino_sparo.evaluation.features import check_features
from dino_sparo.evaluation.task import EncoderTask
from dino_sparo.models.encoder import Encoder
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.lock import create_output_dir

COMPONENTS = 3  # red, green, blue
CONTRAST = 2.0  # of colours, as DINOv3's notebook
PER_LINE = 8  # images beside one another
TOKENS, SLOTS = "patch tokens", "attention over slots"
FILES = {TOKENS: "pca", SLOTS: "pca-slots"}  # stems of files
Patches = Bool[np.ndarray, "images h w"]  # which patches are used
Components = Float[np.ndarray, "images h w 3"]
Colours = UInt8[np.ndarray, "images h w 3"]


def draw_components(task: EncoderTask, images: Sequence[tuple[str, Image.Image]], view: PatchView) -> dict[str, Any]:
    """Write the components of some images, given with their names; returns the content of pca.json."""
    args, config = task.args, task.encoder.config
    file = task.open_figures("pca", ("save_each", "figure_format"))
    folder, names = file.path.parent, [name for name, _ in images]
    found = [patch_features(task.encoder, view(image)[0][None].to(task.device)) for _, image in images]
    features = {kind: np.concatenate([each[kind] for each in found]) for kind in found[0]}
    check_features(torch.from_numpy(features[TOKENS]).flatten(0, 2), "patch tokens")
    foreground = find_foreground(features[TOKENS]) if args.foreground else np.ones(features[TOKENS].shape[:3], bool)
    written, variances, colours = [file.path], {}, {}
    for kind, values in features.items():
        components, variances[kind] = principal_components(values, foreground)
        colours[kind] = to_colours(components, foreground)
        written.append(folder / f"{FILES[kind]}.npy")
        np.save(written[-1], np.where(foreground[..., None], components, np.nan))
    pictures = [view_pixels(image, view.view(image), PICTURE_HEIGHT, args.show_channels) for _, image in images]
    tiles = component_tiles(names, pictures, colours, foreground)
    written.append(folder / f"pca.{args.figure_format}")
    model = describe_model(task.weights, config, config.readout)
    save_sheet(components_figure(tiles, model, args.foreground), written[-1])
    if args.save_each:
        written.append(draw_each(tiles, folder / "pca"))
    record = file.write(
        {
            "images": names,
            "image_size": [config.patch_size * side for side in foreground.shape[1:]],
            "explained_variance": {FILES[kind]: shares.tolist() for kind, shares in variances.items()},
            "foreground_share": foreground.mean(axis=(1, 2)).tolist() if args.foreground else None,
            "exif": args.exif,
        },
        headline=[],
    )
    say("\n".join(map(str, written)))
    return record


def refuse_options_of_maps(args: argparse.Namespace) -> None:
    """Refuse options that have no effect with --pca, or without --pca."""
    unused = ("atlas", "compare", "threshold", "max_maps") if args.pca else ("foreground",)
    for name in unused:
        if (value := getattr(args, name)) not in (None, False):
            words = "with --pca, which draws no maps" if args.pca else "without --pca"
            raise UserError(f"--{name} {value} {words}; leave out one of the two" if args.pca else f"--{name} {words}")


@torch.inference_mode()
def patch_features(encoder: Encoder, images: Float[torch.Tensor, "B C H W"]) -> dict[str, np.ndarray]:
    """Tokens of patches (B, h, w, D), and with three slots or more the slots' shares of attention (B, h, w, L)."""
    tokens = encoder.backbone(images)
    first, grid = encoder.backbone.num_prefix_tokens, encoder.backbone.grid(images)
    features = {TOKENS: tokens[:, first:]}
    if encoder.config.kind.shows == "slot" and encoder.config.num_slots >= COMPONENTS:
        attention = encoder.readout(tokens).attention[:, :, first:].transpose(1, 2)
        features[SLOTS] = attention / attention.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return {kind: values.float().unflatten(1, grid).cpu().numpy() for kind, values in features.items()}


def principal_components(
    features: Float[np.ndarray, "images h w F"], chosen: Patches
) -> tuple[Components, Float[np.ndarray, " 3"]]:
    """Components of all patches in the basis of the chosen patches, and each component's share of the variance."""
    rows = torch.from_numpy(features[chosen]).double()
    mean = rows.mean(dim=0)
    variances, vectors = torch.linalg.eigh((rows - mean).T @ (rows - mean))  # ascending
    basis = vectors.flip(1)[:, :COMPONENTS]
    basis = basis * basis.gather(0, basis.abs().argmax(dim=0, keepdim=True)).sign()
    shares = variances.flip(0)[:COMPONENTS] / variances.sum().clamp_min(torch.finfo(torch.float64).tiny)
    components = (torch.from_numpy(features).double() - mean) @ basis
    return components.float().numpy(), shares.clamp_min(0).numpy()


def find_foreground(tokens: Float[np.ndarray, "images h w D"]) -> Patches:
    """Patches whose first component, over all images, has another sign than its mean over the border."""
    first = principal_components(tokens, np.ones(tokens.shape[:3], bool))[0][..., 0]
    is_border = np.ones(first.shape, bool)
    is_border[:, 1:-1, 1:-1] = False
    return first > 0 if first[is_border].mean() <= 0 else first < 0


def to_colours(components: Components, chosen: Patches) -> Colours:
    """Components as red, green and blue: sigmoid(2 y / std y), with std of the chosen patches."""
    deviations = np.maximum(components[chosen].std(axis=0), np.finfo(np.float32).tiny)
    return (255 / (1 + np.exp(-CONTRAST * components / deviations)) + 0.5).astype(np.uint8)


def paint_components(
    picture: Picture, colours: UInt8[np.ndarray, "h w 3"], foreground: Bool[np.ndarray, "h w"]
) -> Picture:
    """Colours of patches at the size of the picture, bicubic between patches, black outside of the foreground."""
    height, width = picture.shape[:2]
    painted = np.asarray(Image.fromarray(colours).resize((width, height), Image.Resampling.BICUBIC))
    return painted * (enlarge(foreground.astype(np.float32), height, width) > 0.5)[..., None]


def component_tiles(
    names: Sequence[str], pictures: Sequence[Picture], colours: Mapping[str, Colours], foreground: Patches
) -> dict[str, list[Tile]]:
    """The images, and for each kind of feature its colours on each image."""
    tiles = {"image": [Tile(*each, title="image") for each in zip(pictures, names, strict=True)]}
    for kind, values in colours.items():
        painters = [partial(paint_components, colours=c, foreground=f) for c, f in zip(values, foreground, strict=True)]
        tiles[kind] = [Tile(*each, title=kind) for each in zip(pictures, names, painters, strict=True)]
    return tiles


def components_figure(tiles: Mapping[str, Sequence[Tile]], model: str, has_foreground: bool) -> Figure:
    """A column per image, with the image above its colours; a single image and its colours stand side by side."""
    rows, count = list(tiles.values()), len(tiles["image"])
    if count == 1:
        rows = [list(chain.from_iterable(rows))]
    else:  # only the first image has titles
        rows = [[row[0], *(replace(tile, title="") for tile in row[1:])] for row in rows]
    blocks = range(0, len(rows[0]), PER_LINE)
    sections = [Section([Band(tiles=row[start : start + PER_LINE]) for row in rows]) for start in blocks]
    summary = "The first three principal components as red, green and blue: patches of similar colour have similar "
    summary += "features. " + "All images share one basis. " * (count > 1)
    summary += "Black: background, where the first component has the sign of the images' border." * has_foreground
    title = short_name(tiles["image"][0].name) if count == 1 else f"{count} images"
    columns = min(len(rows[0]), PER_LINE)
    layout = tile_layout(rows[0][0].picture, columns * len(rows) * len(sections), columns, columns)
    return Figure(title, model, sections, layout, [summary.strip()], ends=None)


def draw_each(tiles: Mapping[str, Sequence[Tile]], folder: Path) -> Path:
    """Write every picture of the sheet as a file; returns their folder."""
    create_output_dir(folder, option="")
    for kind, of_kind in tiles.items():
        suffix = {TOKENS: "", SLOTS: "-slots"}.get(kind, "-image")
        for tile, name in zip(of_kind, file_names([tile.name for tile in of_kind]), strict=True):
            save_picture(tile.paint(tile.picture) if tile.paint else tile.picture, folder / f"{name}{suffix}.png")
    return folder

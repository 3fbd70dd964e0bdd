"""Images -> one attention map per slot (sparo) or per head (cls), as numbers and as plain pixels.

Everything here needs numpy and Pillow alone, so training can write its pictures to TensorBoard without the plotting
extra; `draw/grids.py` and `atlas.py` add words and layout.

Shapes: maps per image (L slots with `sparo`, heads with `cls`, one with `gap`); h, w rows and columns of the patch
grid.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Num, UInt8
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from dino_sparo.models.encoder import Encoder

# A map is coloured from "as much as if attention were spread evenly" (no colour) to its maximum, but at least to this
# many times as much: a map that is nearly even looks even, instead of showing its rounding errors in full colour.
MIN_CONTRAST = 3.0
# Cosine similarity from which two maps look the same to the eye; our choice.
NEAR_DUPLICATE = 0.95

# Dark violet to pale yellow, its lightness rising evenly, so that it reads in grey and to colour-blind eyes too.
RAMP_POSITIONS = (0.0, 0.3, 0.6, 0.85, 1.0)
RAMP_COLOURS = ((70, 20, 120), (172, 32, 122), (238, 92, 66), (252, 176, 78), (255, 246, 178))
# How the image is dimmed where nothing is attended: so much that the colours stand out from it, and so little that it
# can be recognised. Masks have no colours to stand out, so the rest is darker.
DIMMED_SATURATION, DIMMED_BRIGHTNESS, MASKED_BRIGHTNESS = 0.4, 0.8, 0.6
MAX_COVER = 0.78  # of the image by the ramp, where attention is highest

GRID_GAP = 4  # pixels between the pictures of a grid
GRID_COLOUR = 255
GRID_HEIGHT = 128  # pixels, the least height of a row: crops of small images would be too small to look at
GRID_COLUMNS, SMALL_GRID_HEIGHT = 17, 72  # an image and 16 maps per row; pixels, the height where there are more
NUMBER_HEIGHT = 12  # pixels, of the line with a map's number


@torch.no_grad()
def attention_maps(encoder: Encoder, images: Float[Tensor, "B C H W"]) -> Float[np.ndarray, "B maps h w"]:
    """Where each slot or head looks.

        sparo  the slots' attention over the patch tokens                        maps = L
        cls    the class token's row of the last block's self-attention          maps = heads
        gap    uniform, 1 / N everywhere: averaging has no preferences           maps = 1

    The maps are raw: a map sums to the share of attention that its patches get, and one minus that sum is the share of
    the class token (`class_token_share`).

    Args:
        encoder: in eval mode, else stochastic depth blurs what it does.
        images: (B, C, H, W), normalised; pixels beyond the last whole patch are not seen.

    Returns:
        (B, maps, h, w) fp32, non-negative, h = H // patch size, w = W // patch size.

    Raises:
        ValueError: the images are smaller than a patch or have another number of channels.
    """
    return maps_and_slots(encoder, images)[0]


@torch.no_grad()
def maps_and_slots(
    encoder: Encoder, images: Float[Tensor, "B C H W"]
) -> tuple[Float[np.ndarray, "B maps h w"], Float[np.ndarray, "B L V"]]:
    """`attention_maps`, and the slots that were read out along them.

    Returns:
        Maps (B, maps, h, w), and slots (B, L, V); with `cls` the one slot is the class token, whatever the head.
    """
    tokens = encoder.backbone(images)
    output = encoder.readout(tokens)
    attention = output.attention
    if encoder.config.kind.shows == "head":
        attention = encoder.backbone.last_self_attention(images, num_queries=1)[:, :, 0]
    patches = attention[:, :, encoder.backbone.num_prefix_tokens :]
    size = encoder.backbone.patch_size
    maps = patches.unflatten(-1, (images.shape[-2] // size, images.shape[-1] // size))
    return maps.float().cpu().numpy(), output.slots.float().cpu().numpy()


def class_token_share(maps: Float[np.ndarray, "*B h w"]) -> Float[np.ndarray, "*B"]:
    """The attention a map leaves to the class token, in [0, 1]."""
    return np.asarray(np.clip(1 - maps.sum(axis=(-2, -1)), 0, 1))


def effective_patches(maps: Float[np.ndarray, "*B h w"]) -> Float[np.ndarray, "*B"]:
    """How many patches a map looks at: exp(entropy) of its attention over the patches.

        p = map / sum(map),  effective patches = exp(-sum p log p)

    1 for a single patch, k for k patches alike, h * w for a uniform map (and for an empty one, which prefers none).

    Args:
        maps: non-negative, of any sum.
    """
    flat = maps.reshape(*maps.shape[:-2], -1).astype(np.float64)
    total = flat.sum(axis=-1, keepdims=True)
    shares = np.where(total > 0, flat / np.where(total > 0, total, 1), 1 / flat.shape[-1])
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    return np.asarray(np.exp(-(shares * logs).sum(axis=-1)), dtype=maps.dtype)


def rank_by_peakedness(maps: Float[np.ndarray, "B maps h w"]) -> Int[np.ndarray, " maps"]:
    """Maps from the most peaked to the most spread, by the geometric mean of their effective patches over the images.

    Returns:
        (maps,) numbers of maps; ties stay in the maps' order.
    """
    return np.argsort(np.log(effective_patches(maps)).mean(axis=0), kind="stable")


def map_similarity(maps: Float[np.ndarray, "B maps h w"]) -> Float[np.ndarray, "maps maps"]:
    """Cosine similarity of every two maps, averaged over the images, in [0, 1]."""
    flat = maps.reshape(*maps.shape[:2], -1).astype(np.float64)
    norms = np.linalg.norm(flat, axis=-1, keepdims=True)
    unit = flat / np.where(norms > 0, norms, 1)
    return np.clip(np.einsum("bmn,bkn->mk", unit, unit) / len(maps), 0, 1)  # b image, m and k maps, n patch


def group_near_duplicates(
    maps: Float[np.ndarray, "B maps h w"], threshold: float = NEAR_DUPLICATE
) -> Int[np.ndarray, " maps"]:
    """Group maps that look the same on all images.

    In the order of `rank_by_peakedness`, a map joins the group whose first member it resembles most, if it resembles it
    by `threshold` or more; else it opens a group. Every member thus resembles the group's first; chains of small
    steps do not end up in one group.

    Args:
        maps: (B, maps, h, w).
        threshold: of the cosine similarity averaged over the images, in (0, 1].

    Returns:
        (maps,) the group of each map; groups are numbered from 0 in the order of their most peaked member.

    Raises:
        ValueError: the threshold is outside (0, 1].
    """
    check_share("threshold", threshold)
    similarity = map_similarity(maps)
    groups = np.full(maps.shape[1], -1)
    firsts: list[int] = []
    for index in rank_by_peakedness(maps):
        resemblance = similarity[index, firsts]
        # The tolerance keeps a map with its own copy at threshold 1, whatever the rounding.
        if firsts and resemblance.max() >= threshold - 1e-9:
            groups[index] = resemblance.argmax()
        else:
            groups[index] = len(firsts)
            firsts.append(int(index))
    return groups


def display_order(
    maps: Float[np.ndarray, "B maps h w"], groups: Int[np.ndarray, " maps"], max_maps: int | None = None
) -> Int[np.ndarray, " _"]:
    """The order in which maps are shown.

    Args:
        maps: (B, maps, h, w).
        groups: (maps,), from `group_near_duplicates`.
        max_maps: None shows all maps, by peakedness, near-duplicates directly behind the first of their group. A number
            below their number shows the first map of so many groups at most: a short list has no room for repetitions.

    Returns:
        Numbers of maps.
    """
    ranking = rank_by_peakedness(maps)
    order = ranking[np.argsort(groups[ranking], kind="stable")]
    if max_maps is None or max_maps >= len(order):
        return order
    return order[np.unique(groups[order], return_index=True)[1]][:max_maps]


def mass_mask(heatmap: Float[np.ndarray, "*B h w"], share: float) -> Bool[np.ndarray, "*B h w"]:
    """The smallest set of patches that holds a share of each map's mass, as the reference's `--threshold`.

    Args:
        heatmap: (..., h, w), non-negative, of any sum.
        share: of the mass, in (0, 1]; 1 keeps every patch that got any attention.

    Raises:
        ValueError: the share is outside (0, 1].
    """
    check_share("share", share)
    mass = heatmap.reshape(*heatmap.shape[:-2], -1).astype(np.float64)
    order = np.argsort(-mass, axis=-1, kind="stable")
    ordered = np.take_along_axis(mass, order, axis=-1)
    larger = np.cumsum(ordered, axis=-1) - ordered  # the mass of all patches before each one
    keep = np.zeros(mass.shape, dtype=bool)
    kept = (larger < share * mass.sum(axis=-1, keepdims=True)) & (ordered > 0)
    np.put_along_axis(keep, order, kept, axis=-1)
    return keep.reshape(heatmap.shape)


def heat(heatmap: Float[np.ndarray, "h w"]) -> Float[np.ndarray, "h w"]:
    """A map on the scale it is coloured by: 0 where it gets no more than its even share, 1 at its maximum.

    A map whose maximum is below `MIN_CONTRAST` times the even share stays below 1 everywhere.
    """
    mean = heatmap.mean()
    if mean <= 0:
        return np.zeros_like(heatmap)
    times_even = heatmap / mean
    return np.clip((times_even - 1) / (max(times_even.max(), MIN_CONTRAST) - 1), 0, 1).astype(heatmap.dtype)


def ramp(values: Float[np.ndarray, "*size"]) -> Float[np.ndarray, "*size 3"]:
    """Values in [0, 1] -> RGB in [0, 255]."""
    channels = zip(*RAMP_COLOURS, strict=True)
    return np.stack([np.interp(values, RAMP_POSITIONS, channel) for channel in channels], axis=-1)


def overlay(
    image: Num[np.ndarray, "H W 3"], heatmap: Float[np.ndarray, "h w"], smooth: bool = True
) -> UInt8[np.ndarray, "H W 3"]:
    """Lay a map over its image: dimmed and grey where nothing is attended, glowing where much is.

    Args:
        image: (H, W, 3), 8 bit or floats in [0, 1].
        heatmap: (h, w), raw attention over the patches of exactly this view.
        smooth: bicubic between patches; False shows each patch as it is.
    """
    return overlay_levels(image, heat(heatmap), smooth)


def overlay_levels(
    image: Num[np.ndarray, "H W 3"], levels: Float[np.ndarray, "h w"], smooth: bool = True
) -> UInt8[np.ndarray, "H W 3"]:
    """Lay a map over its image that is on the scale of colours already; see `overlay`.

    Args:
        image: (H, W, 3), 8 bit or floats in [0, 1].
        levels: (h, w), in [0, 1].
        smooth: bicubic between patches; False shows each patch as it is.
    """
    pixels = _pixels(image)
    level = enlarge(levels, image.shape[0], image.shape[1], smooth)
    # The colour takes some light and dark from the image, whose contents can so be seen through it.
    glow = ramp(level) * (0.6 + 0.4 * _lightness(pixels) / 255)
    # Rising quickly: weak attention is to be seen too.
    cover = MAX_COVER * np.sqrt(level)[..., None]
    return (_dimmed(pixels) * (1 - cover) + glow * cover + 0.5).astype(np.uint8)


def mask_overlay(image: Num[np.ndarray, "H W 3"], mask: Bool[np.ndarray, "h w"]) -> UInt8[np.ndarray, "H W 3"]:
    """Lay a mask over its image: kept patches as they are within an outline, the rest dimmed and grey.

    Args:
        image: (H, W, 3), 8 bit or floats in [0, 1].
        mask: (h, w), from `mass_mask`.
    """
    pixels = _pixels(image)
    kept = enlarge(mask.astype(np.float32), image.shape[0], image.shape[1], smooth=False) > 0.5
    shown = np.where(kept[..., None], pixels, _dimmed(pixels, MASKED_BRIGHTNESS))
    # A pixel lies on the outline if it is kept and a pixel within the line's width of it is not.
    line = max(1, image.shape[0] // 100)
    height, width = kept.shape
    padded = np.pad(kept, line, mode="edge")
    inner = kept.copy()
    for top, left in ((0, line), (2 * line, line), (line, 0), (line, 2 * line)):
        inner &= padded[top : top + height, left : left + width]
    shown[kept & ~inner] = RAMP_COLOURS[3]
    return (shown + 0.5).astype(np.uint8)


def enlarge(
    values: Float[np.ndarray, "h w"], height: int, width: int, smooth: bool = True
) -> Float[np.ndarray, "height width"]:
    """Resample values to pixels, bicubic (kept within their range) or nearest."""
    method = Image.Resampling.BICUBIC if smooth else Image.Resampling.NEAREST
    resized = np.asarray(Image.fromarray(values.astype(np.float32)).resize((width, height), method))
    return np.clip(resized, values.min(), values.max())


def to_pixels(
    images: Float[Tensor, "B C H W"], mean: Sequence[float], std: Sequence[float]
) -> UInt8[np.ndarray, "B H W 3"]:
    """Normalised images -> 8-bit RGB; one channel becomes grey, of more than three the first three are shown."""
    values = images[:, :3].detach().float().cpu().permute(0, 2, 3, 1).numpy()
    channels = values.shape[-1]
    values = values * np.asarray(std[:channels]) + np.asarray(mean[:channels])
    return np.clip(np.broadcast_to(values, (*values.shape[:-1], 3)) * 255 + 0.5, 0, 255).astype(np.uint8)


def tile(rows: Sequence[Sequence[UInt8[np.ndarray, "height _ 3"]]]) -> UInt8[np.ndarray, "H W 3"]:
    """Pictures of one height -> one picture, rows below each other, left-aligned, with gaps between."""
    lines = [
        np.concatenate([_padded(picture, (0, GRID_GAP), (0, GRID_GAP)) for picture in row], axis=1) for row in rows
    ]
    width = max(line.shape[1] for line in lines)
    padded = [_padded(line, (0, 0), (0, width - line.shape[1])) for line in lines]
    return _padded(np.concatenate(padded), (GRID_GAP, 0), (GRID_GAP, 0))


def crops_grid(
    views: Sequence[Float[Tensor, "B C _ _"]], mean: Sequence[float], std: Sequence[float], num_images: int = 4
) -> UInt8[np.ndarray, "_ _ 3"]:
    """The crops of a few images, for TensorBoard: a row per image, its global crops first, all drawn at one height.

    Args:
        views: one batch of crops per view, as a `Batch` holds them, normalised.
        mean: per channel.
        std: per channel.
        num_images: rows, at most.
    """
    height = max(GRID_HEIGHT, *(view.shape[-2] for view in views))
    columns = [to_pixels(view[:num_images], mean, std) for view in views]
    return tile([[_scaled(crop, height) for crop in row] for row in zip(*columns, strict=True)])


def slots_grid(
    encoder: Encoder, images: Float[Tensor, "B C H W"], mean: Sequence[float], std: Sequence[float]
) -> UInt8[np.ndarray, "_ _ 3"]:
    """A few images and all their maps, for TensorBoard, each under its number.

    An image and its maps fill one or more rows. Maps stand in the order of their numbers, so that each is at the same
    place after every epoch.

    Args:
        encoder: in eval mode.
        images: (B, C, H, W), normalised, on the encoder's device.
        mean: per channel.
        std: per channel.
    """
    maps = attention_maps(encoder, images)
    height, width = (side * encoder.backbone.patch_size for side in maps.shape[-2:])
    pictures = to_pixels(images[:, :, :height, :width], mean, std)
    scale = GRID_HEIGHT if maps.shape[1] < GRID_COLUMNS else SMALL_GRID_HEIGHT
    rows = []
    for picture, image_maps in zip(pictures, maps, strict=True):
        shown = _scaled(picture, scale)
        tiles = [_numbered(overlay(shown, heatmap), str(number)) for number, heatmap in enumerate(image_maps)]
        tiles.insert(0, _numbered(shown, ""))
        rows += [tiles[start : start + GRID_COLUMNS] for start in range(0, len(tiles), GRID_COLUMNS)]
    return tile(rows)


def _numbered(picture: UInt8[np.ndarray, "H W 3"], number: str) -> UInt8[np.ndarray, "_ W 3"]:
    """A picture under a line with its number."""
    line = Image.new("RGB", (picture.shape[1], NUMBER_HEIGHT), (GRID_COLOUR,) * 3)
    ImageDraw.Draw(line).text((0, 0), number, fill=(0, 0, 0), font=ImageFont.load_default())
    return np.concatenate([np.asarray(line), picture])


def _pixels(image: Num[np.ndarray, "H W 3"]) -> Float[np.ndarray, "H W 3"]:
    return image.astype(np.float32) * (1 if image.dtype == np.uint8 else 255)


def _lightness(pixels: Float[np.ndarray, "H W 3"]) -> Float[np.ndarray, "H W 1"]:
    return pixels @ np.array([[0.299], [0.587], [0.114]], dtype=np.float32)


def _dimmed(pixels: Float[np.ndarray, "H W 3"], brightness: float = DIMMED_BRIGHTNESS) -> Float[np.ndarray, "H W 3"]:
    lightness = _lightness(pixels)
    return brightness * (lightness + DIMMED_SATURATION * (pixels - lightness))


def _scaled(picture: UInt8[np.ndarray, "_ _ 3"], height: int) -> UInt8[np.ndarray, "_ _ 3"]:
    """A picture at another height, its aspect ratio kept."""
    width = max(1, round(picture.shape[1] * height / picture.shape[0]))
    return np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC))


def _padded(
    picture: UInt8[np.ndarray, "_ _ 3"], rows: tuple[int, int], columns: tuple[int, int]
) -> UInt8[np.ndarray, "_ _ 3"]:
    """A picture with so many rows above and below, and columns left and right."""
    return np.pad(picture, (rows, columns, (0, 0)), constant_values=GRID_COLOUR)


def check_share(name: str, value: float) -> None:
    """Refuse what is no share, with the option's name."""
    if not 0 < value <= 1:
        raise ValueError(f"{name}={value} is not a share; give a number in (0, 1]")

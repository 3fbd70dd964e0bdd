"""Maps and images as pixels: colours of maps, overlays, sizes, and grids for TensorBoard.

Nothing here needs matplotlib, so training writes its pictures without the extra `plots`.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from torch import Tensor
from torchvision.utils import make_grid

from dino_sparo.data.channels import picture_of
from dino_sparo.runtime.files import written_beside

Picture = UInt8[np.ndarray, "H W 3"]

# Colours of a map go from the even share of attention (no colour) to the map's maximum. The range of colours has at
# least this multiple of the even share, or a nearly even map would show its rounding errors in full colour.
MIN_CONTRAST = 3.0
# Dark violet to pale yellow with evenly rising lightness, also legible in grey and for the colour-blind.
RAMP_POSITIONS = (0.0, 0.3, 0.6, 0.85, 1.0)
RAMP_COLOURS = ((70, 20, 120), (172, 32, 122), (238, 92, 66), (252, 176, 78), (255, 246, 178))
# The image is dimmed where it gets no attention: so much that colours stand out, so little that it can be recognised.
# Masks have no colours, so the rest of their image is darker.
DIMMED_SATURATION, DIMMED_BRIGHTNESS, MASKED_BRIGHTNESS = 0.4, 0.8, 0.6
MAX_COVER = 0.78  # of the image by the ramp, where attention is highest

FRAME = 4  # pixels
GRID_GAP = 4  # pixels between the pictures of a grid
GRID_COLOUR = 255
GRID_HEIGHT = 128  # pixels, the least height of a row, so that crops of small images can be seen
GRID_COLUMNS, SMALL_GRID_HEIGHT = 17, 72  # an image and 16 maps per row; pixels, height if there are more maps
NUMBER_HEIGHT = 12  # pixels, of the line with a map's number


def save_picture(pixels: UInt8[np.ndarray, "H W *C"], path: Path, palette: list[int] | None = None) -> None:
    """Write a PNG of RGB, or of numbers with a palette's colours; an older file stays until the new one is complete."""
    picture = Image.fromarray(pixels)
    if palette is not None:
        picture.putpalette(palette)
    with written_beside(path) as file:
        picture.save(file, "PNG")


def heat(heatmap: Float[np.ndarray, "h w"]) -> Float[np.ndarray, "h w"]:
    """A map on the scale of its colours: 0 up to the even share of attention, 1 at the map's maximum.

    A map whose maximum is below `MIN_CONTRAST` times the even share stays below 1.
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


def overlay(picture: Picture, levels: Float[np.ndarray, "h w"], smooth: bool = True) -> Picture:
    """Lay a map in [0, 1] over its picture, which is dimmed where the map is low.

    Between patches the map is bicubic; with `smooth` False every patch has one colour.
    """
    level = enlarge(levels, picture.shape[0], picture.shape[1], smooth)
    # The colour takes some lightness from the image, so that the image is visible through the colour.
    glow = ramp(level) * (0.6 + 0.4 * lightness(picture) / 255)
    # The root rises quickly, so that weak attention is visible.
    cover = MAX_COVER * np.sqrt(level)[..., None]
    return (_dimmed(picture) * (1 - cover) + glow * cover + 0.5).astype(np.uint8)


def mask_overlay(picture: Picture, mask: Bool[np.ndarray, "h w"]) -> Picture:
    """Lay a mask over its picture: chosen patches have an outline, the rest is dimmed."""
    chosen = enlarge(mask.astype(np.float32), picture.shape[0], picture.shape[1], smooth=False) > 0.5
    shown = np.where(chosen[..., None], picture, _dimmed(picture, MASKED_BRIGHTNESS))
    # A pixel lies on the outline if it is chosen and a pixel within the line's width of it is not.
    line = max(1, picture.shape[0] // 100)
    inner = np.asarray(Image.fromarray(chosen).convert("L").filter(ImageFilter.MinFilter(2 * line + 1))) > 0
    shown[chosen & ~inner] = RAMP_COLOURS[3]
    return (shown + 0.5).astype(np.uint8)


def enlarge(
    values: Float[np.ndarray, "h w"], height: int, width: int, smooth: bool = True
) -> Float[np.ndarray, "height width"]:
    """Resample values to pixels, bicubic (within the values' range) or nearest."""
    method = Image.Resampling.BICUBIC if smooth else Image.Resampling.NEAREST
    pixels = np.asarray(Image.fromarray(values.astype(np.float32)).resize((width, height), method))
    return np.clip(pixels, values.min(), values.max())


def fit(picture: UInt8[np.ndarray, "_ _ 3"], height: int, width: int) -> UInt8[np.ndarray, "_ _ 3"]:
    """Resize a picture to the largest size within a height and a width; its aspect ratio stays."""
    return resize(picture, max(1, min(height, round(width * picture.shape[0] / picture.shape[1]))))


def resize(
    picture: UInt8[np.ndarray, "_ _ 3"], height: int, method: Image.Resampling = Image.Resampling.LANCZOS
) -> UInt8[np.ndarray, "_ _ 3"]:
    """Resize a picture to a height; its aspect ratio stays."""
    width = max(1, round(picture.shape[1] * height / picture.shape[0]))
    return np.asarray(Image.fromarray(picture).resize((width, height), method))


def add_frame(picture: Picture, colour: str) -> Picture:
    """Draw a frame inside the edges of a picture, `FRAME` pixels wide; a copy."""
    framed = Image.fromarray(picture)
    ImageDraw.Draw(framed).rectangle((0, 0, framed.width - 1, framed.height - 1), outline=colour, width=FRAME)
    return np.asarray(framed)


def to_pixels(
    images: Float[Tensor, "B C H W"], mean: Sequence[float], std: Sequence[float]
) -> UInt8[np.ndarray, "B H W 3"]:
    """Normalised images -> 8-bit RGB; of other than three channels the pictures of `picture_of`."""
    values = images.detach().float().cpu().permute(0, 2, 3, 1).numpy() * np.asarray(std) + np.asarray(mean)
    if values.shape[-1] != 3:
        return np.stack([picture_of(image) for image in values])
    return np.clip(values * 255 + 0.5, 0, 255).astype(np.uint8)


def crops_grid(
    views: Sequence[Float[Tensor, "B C _ _"]], mean: Sequence[float], std: Sequence[float], num_images: int = 4
) -> UInt8[np.ndarray, "_ _ 3"]:
    """The crops of a few images, for TensorBoard: a row per image, global crops first, all of one height.

    `views` has a batch of normalised crops for each view, as a `Batch` has.
    """
    height = max(GRID_HEIGHT, *(view.shape[-2] for view in views))
    columns = [to_pixels(view[:num_images], mean, std) for view in views]
    bicubic = Image.Resampling.BICUBIC
    return stack_pictures([[resize(crop, height, bicubic) for crop in row] for row in zip(*columns, strict=True)])


def maps_grid(
    pictures: UInt8[np.ndarray, "B H W 3"], maps: Float[np.ndarray, "B maps h w"]
) -> UInt8[np.ndarray, "_ _ 3"]:
    """Images and all their maps under their numbers, for TensorBoard; each image begins a row."""
    height = GRID_HEIGHT if maps.shape[1] < GRID_COLUMNS else SMALL_GRID_HEIGHT
    rows = []
    for picture, image_maps in zip(pictures, maps, strict=True):
        shown = resize(picture, height, Image.Resampling.BICUBIC)
        tiles = [
            number_picture(overlay(shown, heat(heatmap)), str(number)) for number, heatmap in enumerate(image_maps)
        ]
        tiles.insert(0, number_picture(shown, ""))
        rows += [tiles[start : start + GRID_COLUMNS] for start in range(0, len(tiles), GRID_COLUMNS)]
    return stack_pictures(rows)


def stack_pictures(rows: Sequence[Sequence[UInt8[np.ndarray, "height width 3"]]]) -> UInt8[np.ndarray, "H W 3"]:
    """Pictures of one size -> one picture of left-aligned rows, with gaps between the pictures."""
    columns = max(map(len, rows))
    blank = np.full_like(rows[0][0], GRID_COLOUR)
    pictures = np.stack([picture for row in rows for picture in (*row, *[blank] * (columns - len(row)))])
    grid = make_grid(torch.from_numpy(pictures).permute(0, 3, 1, 2), columns, GRID_GAP, pad_value=GRID_COLOUR)
    return grid.permute(1, 2, 0).numpy()


def number_picture(picture: Picture, number: str, scale: int = 1) -> UInt8[np.ndarray, "_ W 3"]:
    """A picture under a line with its number; letters are `scale` times as large as in TensorBoard's grids."""
    line = Image.new("RGB", (picture.shape[1] // scale, NUMBER_HEIGHT), (GRID_COLOUR,) * 3)
    ImageDraw.Draw(line).text((0, 0), number, fill=(0, 0, 0), font=ImageFont.load_default())
    line = line.resize((picture.shape[1], scale * NUMBER_HEIGHT))
    return np.concatenate([np.asarray(line), picture])


def lightness(picture: Picture) -> Float[np.ndarray, "H W 1"]:
    """A picture in grey, in [0, 255]."""
    return picture.astype(np.float32) @ np.array([[0.299], [0.587], [0.114]], dtype=np.float32)


def _dimmed(picture: Picture, brightness: float = DIMMED_BRIGHTNESS) -> Float[np.ndarray, "H W 3"]:
    grey = lightness(picture)
    return brightness * (grey + DIMMED_SATURATION * (picture.astype(np.float32) - grey))

"""Views of images: parts in whole patches, and the same parts as figures show them.

The views of the evaluations are tested in `test_crops.py`, the pixels of attention maps in `test_attention.py`.
"""

import numpy as np
import pytest
from PIL import Image

from dino_sparo.data.views import PatchView, view_pixels


def patch_view(size: list[int], patch_size: int = 5, square: bool = False) -> PatchView:
    return PatchView(size, patch_size, (0.0,) * 3, (1.0,) * 3, square)


def blank(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height))


def test_one_size_is_the_short_side_and_keeps_the_aspect_in_whole_patches() -> None:
    view = patch_view([15]).view(blank(64, 30))
    assert (view.height, view.width) == (15, 30)  # 32 px wide, of which 30 are whole patches
    assert view.box == pytest.approx((0, 0, 60, 30))


def test_two_sizes_are_height_and_width() -> None:
    view = patch_view([15, 24]).view(blank(60, 40))
    assert (view.height, view.width) == (15, 20)
    assert view.box == pytest.approx((0, 0, 50, 40))


def test_square_views_are_central() -> None:
    view = patch_view([20], square=True).view(blank(60, 40))
    assert (view.height, view.width) == (20, 20)
    assert view.box == pytest.approx((10, 0, 50, 40))


@pytest.mark.parametrize("size", [20, 29])
def test_the_picture_shows_what_the_encoder_sees(size: int) -> None:
    pixels = np.zeros((40, 60, 3), dtype=np.uint8)
    pixels[:, 30:] = 255
    image, transform = Image.fromarray(pixels), patch_view([size], 10, square=True)
    seen = transform(image)[0][0].numpy()
    assert seen.shape == (20, 20)
    shown = view_pixels(image, transform.view(image), 20)[..., 0] / 255
    assert np.abs(seen - shown).max() < 0.2
    assert seen[0, :8].max() < 0.01
    assert seen[0, -5:].min() > 0.99


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ([3], "is smaller than one patch of 5 px; give at least 5"),
        ([50, 2], "is smaller than one patch of 5 px"),
        ([5, 5, 5], r"has 3 numbers; give one \(the short side\) or two"),
        ([2000], "at most 8192 are supported; give a smaller size"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(size: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        patch_view(size).view(blank(60, 40))

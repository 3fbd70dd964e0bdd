"""The distortions of facebookresearch/dino on a PIL image, by Pillow and torchvision, operation by operation."""

from collections.abc import Mapping
from typing import Any

from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torchvision.transforms import functional as TF

ENHANCERS: dict[str, Any] = {
    "brightness": ImageEnhance.Brightness,
    "contrast": ImageEnhance.Contrast,
    "saturation": ImageEnhance.Color,
}


def distorted(view: Image.Image, drawn: Mapping[str, Any]) -> Image.Image:
    """The distortions that were drawn; keys as `CropParameters` names them."""
    if drawn["flip"]:
        view = view.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    for name, factor in drawn["jitter"]:
        view = TF.adjust_hue(view, factor) if name == "hue" else ENHANCERS[name](view).enhance(factor)
    if drawn["grayscale"]:
        view = Image.merge("RGB", [view.convert("L")] * 3)
    if drawn["blur_radius"]:
        view = view.filter(ImageFilter.GaussianBlur(radius=drawn["blur_radius"]))
    return ImageOps.solarize(view) if drawn["solarize"] else view

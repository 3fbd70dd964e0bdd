"""Images with a class number for each pixel, by index; class numbers become labels 0, 1, 2, ..., or VOID.

scenes, scenes:NUM:SIZE                           shapes of the built-in scenes; 0 is the background
VOC2012/{JPEGImages,SegmentationClass}            VOC's layout, with its lists of images
ADEChallengeData2016/{images,annotations}         ADE20K's layout; 0 is void
DIR/{images,masks}, or IMAGES and --masks MASKS   images and PNGs of the same stem, whose pixels are class numbers
IMAGES and --masks instances.json                 COCO's categories, counted from 1 by their ids; 0 is the background
"""

import argparse
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8
from PIL import Image

from dino_sparo.data.scenes.images import names_scenes
from dino_sparo.data.sources import FileSource, ImageLimits, ImageSource, require_channels
from dino_sparo.data.sources.tables import decoded, open_text
from dino_sparo.evaluation.objects import layouts
from dino_sparo.runtime.faults import UserError

logger = logging.getLogger(__name__)

VOID = 255  # label of pixels that do not count
BACKGROUND = "background"
ADE_CLASSES, ADE_NAMES = 150, "objectInfo150.txt"


@dataclass(frozen=True)
class MaskSource:
    """Images with the `indices` of a source, and their masks.

    Attributes:
        numbers: index -> the class numbers of the pixels (H, W).
        void: class number of pixels that do not count.
        classes: class number -> name, ascending; empty if unknown.
    """

    images: ImageSource
    numbers: Callable[[int], Int[np.ndarray, "H W"]]
    void: int
    classes: dict[int, str]
    indices: tuple[int, ...]

    def read(self, index: int) -> tuple[Image.Image, UInt8[np.ndarray, "H W"]]:
        """An image and the labels of its pixels; UserError if their sizes differ or a class number is unknown."""
        image, numbers, location = self.images.read(index), self.numbers(index), self.images.location(index)
        layouts.check_mask_size(numbers.shape, location, image)
        known = np.array(list(self.classes))
        labels = np.searchsorted(known, numbers).clip(max=len(known) - 1)
        is_void = numbers == self.void
        if (is_unknown := (known[labels] != numbers) & ~is_void).any():
            raise UserError(
                f"the mask of {location} has the class number {numbers[is_unknown][0]}; the {len(known)} classes have "
                f"the numbers {known[0]} to {known[-1]}, and {self.void} is void (--void)"
            )
        return image, np.where(is_void, VOID, labels).astype(np.uint8)


def open_splits(args: argparse.Namespace, limits: ImageLimits) -> tuple[MaskSource, MaskSource]:
    """Training and validation images: the splits of a layout, --val_path, or a random share of the images."""
    if args.val_masks and not args.val_path:
        raise UserError(f"--val_masks {args.val_masks} without --val_path; give the folder of their images, too")
    train = open_masks(args.data_path, args.masks, "train", args.void, limits)
    require_channels(train.images, limits)
    if args.val_path:
        val = open_masks(args.val_path, args.val_masks, "val", args.void, limits)
    elif not args.masks and (names_scenes(args.data_path) or _layout(Path(args.data_path))):
        val = open_masks(args.data_path, args.masks, "val", args.void, limits)
    else:
        order = np.random.default_rng(args.seed).permutation(train.indices).tolist()
        count = max(1, round(args.val_share * len(order)))
        if len(order) < 2:
            raise UserError(f"{train.images.name}: {len(order)} image with a mask; give at least 2, or --val_path")
        val = replace(train, indices=tuple(sorted(order[:count])))
        train = replace(train, indices=tuple(sorted(order[count:])))
    if args.class_names:
        with open_text(args.class_names) as file:
            named = dict(enumerate(decoded(line.strip()) for line in file))
        named.pop(args.void, None)
    else:  # each share of the same images may have other classes
        named = train.classes or _occurring(train, *(() if args.val_path else (val,)))
    if len(named) < 2 or not 0 <= min(named) <= max(named) <= VOID:
        found = ", ".join(map(str, list(named)[:5])) or "none"
        raise UserError(
            f"{train.images.name}: {len(named)} classes (numbers: {found}; void: {args.void}); a head needs at least 2 "
            f"with numbers from 0 to {VOID}. If {args.void} is a class, give another --void, such as 254"
        )
    return replace(train, classes=named), replace(val, classes=named)


def open_masks(data_path: str, masks: str | None, split: str, void: int, limits: ImageLimits) -> MaskSource:
    """Images with masks, in one of the layouts at the top of this file; `split` is "train" or "val"."""
    root = Path(data_path)
    layout = None if masks or names_scenes(data_path) else _layout(root)
    if layout == "VOC":
        stems, images = layouts.voc_images(root, limits, split)
        names = dict(enumerate((BACKGROUND, *layouts.VOC_CLASSES)))
        paths = [root / "SegmentationClass" / f"{stem}.png" for stem in stems]
        every = tuple(range(len(paths)))
        return MaskSource(images, lambda index: layouts.read_numbers(paths[index]), layouts.VOC_VOID, names, every)
    if layout == "ADE20K":
        part = {"train": "training", "val": "validation"}[split]
        return _open_folders(root / "images" / part, root / "annotations" / part, 0, limits, _ade_classes(root))
    is_masks = masks is None and (root / "masks").is_dir() and (root / "images").is_dir()
    if is_masks or (masks and root.is_dir() and Path(masks).is_dir()):
        folders = (root / "images", root / "masks") if is_masks else (root, Path(str(masks)))
        return _open_folders(*folders, void, limits, {})
    source = layouts.open_objects(data_path, masks, limits, split)
    names = dict(enumerate((BACKGROUND, *source.classes)))
    every = tuple(range(len(source.images)))
    return MaskSource(source.images, lambda index: number_objects(source.objects(index)), VOID, names, every)


def number_objects(objects: layouts.ObjectMasks) -> Int[np.ndarray, "H W"]:
    """Class numbers of the pixels: 0 without an object, else 1 + class of the last object; VOID for unknown classes."""
    numbers = np.where(objects.void, VOID, 0)
    for mask, number in zip(objects.masks, objects.classes, strict=True):
        numbers[mask] = VOID if number == layouts.UNKNOWN else number + 1
    return numbers


def _layout(root: Path) -> str | None:
    """VOC's or ADE20K's layout; None for any other folder."""
    if (root / "JPEGImages").is_dir() and (root / "SegmentationClass").is_dir():
        return "VOC"
    return "ADE20K" if (root / "annotations" / "training").is_dir() else None


def _ade_classes(root: Path) -> dict[int, str]:
    """ADE20K's class numbers 1 to 150, with the names in the last column of its table, if there is one."""
    table = root / ADE_NAMES
    rows = table.read_text(encoding="utf-8").splitlines()[1:] if table.is_file() else []
    return {int(row.split()[0]): row.split("\t")[-1].strip() for row in rows} or {
        number: str(number) for number in range(1, ADE_CLASSES + 1)
    }


def _open_folders(images: Path, masks: Path, void: int, limits: ImageLimits, classes: dict[int, str]) -> MaskSource:
    """The images of a folder for which another folder has a mask of the same stem."""
    names = layouts.image_names(images)
    paths = [masks / f"{Path(name).stem}.png" for name in names]
    labelled = tuple(index for index, path in enumerate(paths) if path.is_file())
    if not labelled:
        raise UserError(f"no masks: {masks} has no PNG with the stem of one of the {len(names)} images in {images}")
    if missing := len(names) - len(labelled):
        logger.info("%s: %d of %d images have no mask and are not used", images, missing, len(names))
    source = FileSource(f"folder {images}", images, names, limits=limits)
    return MaskSource(source, lambda index: layouts.read_numbers(paths[index]), void, classes, labelled)


def _occurring(*sources: MaskSource) -> dict[int, str]:
    """The class numbers in all masks, which are also their names."""
    numbers: set[int] = set()
    for source in sources:
        numbers.update(*(np.unique(source.numbers(index)).tolist() for index in source.indices))
    return {number: str(number) for number in sorted(numbers - {sources[0].void})}

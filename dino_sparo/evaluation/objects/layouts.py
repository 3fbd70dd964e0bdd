"""The built-in scenes, VOC's folders, images beside masks -> images with objects; `open_objects` tells them apart.

scenes, scenes:NUM:SIZE                           the held-out scenes with their true masks
VOC2012/{JPEGImages,SegmentationObject}           VOC's layout, its split `val`; 255 is void
DIR/{images,masks}, or IMAGES and --masks MASKS   images and PNGs of the same stem: 0 background, else an object each
IMAGES and --masks instances.json                 COCO's annotations
"""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int
from PIL import Image

from dino_sparo.data.scenes import Scenes, names_scenes, parse_scenes_spec
from dino_sparo.data.sources import IMAGE_EXTENSIONS, CorruptImageError, ImageSource
from dino_sparo.data.sources.decode import DEFAULT_LIMITS
from dino_sparo.evaluation.objects.masks import UNKNOWN, ObjectMasks, ObjectSource, image_files, masks_of_ids
from dino_sparo.runtime.faults import require
from dino_sparo.runtime.files import open_regular, parse_json

VOC_VOID = 255
MAX_NUMBERS = 1000  # of a mask: each object takes a mask of its own, so that a picture of depths would fill the memory
# VOC's classes 1 to 20; 0 is the background.
VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
MAX_REACH = 10  # sides of an image that a polygon may reach; hostile ones would fill the memory
MASK_MODES = ("1", "L", "P", "I", "I;16")  # of images whose pixels are numbers


def scene_objects(scenes: Scenes, index: int) -> ObjectMasks:
    """The one or two objects of a scene."""
    masks, classes = scenes.object_masks(index)
    return ObjectMasks(masks, classes, np.zeros(masks.shape[1:], dtype=bool))


@dataclass(frozen=True)
class MaskFiles:
    """Files whose pixels are the numbers of objects, one per image.

    Attributes:
        masks: their paths.
        void: a number that marks void pixels; None: there is none.
        class_masks: paths of masks whose pixels are classes, from 1; None: classes are unknown.
        num_classes: number of classes.
    """

    masks: list[Path]
    void: int | None = None
    class_masks: list[Path] | None = None
    num_classes: int = 0

    def objects(self, index: int) -> ObjectMasks:
        """The objects of an image, by their numbers."""
        ids = read_ids(self.masks[index])
        void = np.zeros(ids.shape, dtype=bool) if self.void is None else ids == self.void
        count = len(np.unique(ids))
        if count > MAX_NUMBERS:
            raise CorruptImageError(
                str(self.masks[index]), f"has {count:,} different numbers, more than {MAX_NUMBERS:,}: is it a mask?"
            )
        masks = masks_of_ids(np.where(void, 0, ids))
        if self.class_masks is None:
            return ObjectMasks(masks, np.full(len(masks), UNKNOWN), void)
        numbers = read_ids(self.class_masks[index])
        if numbers.shape != ids.shape:
            raise CorruptImageError(
                str(self.class_masks[index]), f"has shape {numbers.shape}, but the objects' mask has {ids.shape}"
            )
        return ObjectMasks(masks, np.array([self._class_of(numbers[mask]) for mask in masks], dtype=np.int64), void)

    def _class_of(self, numbers: Int[np.ndarray, " pixels"]) -> int:
        """The class that most of an object's pixels have, from 0."""
        counts = np.bincount(numbers[(numbers > 0) & (numbers <= self.num_classes)], minlength=1)
        return int(counts.argmax()) - 1 if counts.any() else UNKNOWN


def read_ids(path: Path) -> Int[np.ndarray, "H W"]:
    """The pixels of a mask as they are stored, without a palette's colours."""
    try:
        with open_regular(path) as file, Image.open(file, formats=("PNG",)) as image:
            mode, size = image.mode, image.width * image.height
            if mode in MASK_MODES and size <= DEFAULT_LIMITS.max_mpix * 1e6:
                return np.asarray(image).astype(np.int64)
    except FileNotFoundError as error:
        raise CorruptImageError(str(path), "there is no such mask") from error
    except Exception as error:  # Pillow raises anything for damaged files
        raise CorruptImageError(str(path), f"is no PNG that can be read ({error})") from error
    reason = f"has {size:,} pixels" if mode in MASK_MODES else f"has colours ({mode})"
    largest = f"{DEFAULT_LIMITS.max_mpix:g} million pixels"
    raise CorruptImageError(str(path), f"{reason}; a mask is a PNG with one number per pixel, of at most {largest}")


@dataclass(frozen=True)
class CocoMasks:
    """The objects of COCO's annotations; annotations with `iscrowd` mark groups, which are void where no object is.

    Attributes:
        files: the image files.
        entries: of the images, as in the annotations.
        annotations: of each image, by its id.
        number: of each class, by its id.
    """

    files: ImageSource
    entries: list[dict[str, Any]]
    annotations: dict[int, list[dict]]
    number: dict[int, int]

    def objects(self, index: int) -> ObjectMasks:
        """The objects of an image; groups are void."""
        image = self.entries[index]
        try:
            height, width = int(image["height"]), int(image["width"])
            if height * width > DEFAULT_LIMITS.max_mpix * 1e6:
                raise ValueError(f"{height} x {width} pixels")
            own = self.annotations.get(image["id"], [])
            masks = np.zeros((len(own), height, width), dtype=bool)
            for mask, annotation in zip(masks, own, strict=True):
                mask[:] = segmentation_mask(annotation["segmentation"], height, width)
            crowd = np.array([bool(annotation.get("iscrowd")) for annotation in own], dtype=bool)
            classes = [self.number[annotation["category_id"]] for annotation in own]
        except Exception as error:  # pycocotools raises anything for damaged annotations
            reason = f"annotations cannot be read ({type(error).__name__}: {error})"
            raise CorruptImageError(self.files.location(index), reason) from error
        things = masks[~crowd]
        void = masks[crowd].any(axis=0) & ~things.any(axis=0)
        return ObjectMasks(things, np.array(classes, dtype=np.int64)[~crowd], void)


def segmentation_mask(segmentation: Any, height: int, width: int) -> Bool[np.ndarray, "H W"]:
    """The mask of an annotation: polygons, or run lengths as numbers or as COCO's string; see cocodataset.org."""
    from pycocotools import mask as coco_masks

    if isinstance(segmentation, dict):
        if list(segmentation["size"]) != [height, width]:
            raise ValueError(f"mask of {segmentation['size']} pixels for an image of {[height, width]}")
    else:
        reach = MAX_REACH * max(height, width)  # pycocotools walks along the whole outline
        if not all(abs(float(number)) <= reach for polygon in segmentation for number in polygon):
            raise ValueError(f"a polygon reaches more than {reach} pixels in an image of {height} x {width}")
    is_string = isinstance(segmentation, dict) and isinstance(segmentation["counts"], (str, bytes))
    lengths = segmentation if is_string else coco_masks.frPyObjects(segmentation, height, width)
    lengths = coco_masks.merge(lengths if isinstance(lengths, list) else [lengths, lengths])
    mask = coco_masks.decode(lengths)
    if coco_masks.encode(mask)["counts"] != lengths["counts"]:
        raise ValueError(f"run lengths do not fill the image's {height} x {width} pixels")
    return mask > 0


def open_coco(folder: Path, path: Path) -> ObjectSource:
    """The images of a folder that COCO's annotations describe: instances_val2017.json or alike."""
    require("pycocotools", "masks of COCO's annotations")
    try:
        with open_regular(path) as file:
            content = parse_json(file.read())
    except (OSError, ValueError) as error:
        raise ValueError(f"--masks {str(path)!r} cannot be read as JSON ({error})") from error
    try:
        classes = {category["id"]: str(category["name"]) for category in content["categories"]}
        annotations: dict[int, list[dict]] = {}
        for annotation in content["annotations"]:
            annotations.setdefault(annotation["image_id"], []).append(annotation)
        entries = [{name: image[name] for name in ("id", "height", "width")} for image in content["images"]]
        files = image_files(f"COCO {folder}", folder, [image["file_name"] for image in content["images"]])
    except (KeyError, TypeError) as error:
        keys = ", ".join(content) if isinstance(content, dict) else type(content).__name__
        raise ValueError(
            f"--masks {str(path)!r} has not the form of COCO's instances (images, annotations, categories; missing "
            f"{error}); it holds {keys}"
        ) from error
    if not entries:
        raise ValueError(f"--masks {str(path)!r} lists no images")
    number = {identity: number for number, identity in enumerate(sorted(classes))}
    masks = CocoMasks(files, entries, annotations, number)
    return ObjectSource(files, [classes[identity] for identity in number], masks.objects)


def open_objects(data_path: str, masks: str | None = None) -> ObjectSource:
    """Images with objects, in one of the layouts at the top of this file."""
    if names_scenes(data_path):
        _refuse_masks(masks, data_path)
        scenes = Scenes(*parse_scenes_spec(data_path), split="val")
        return ObjectSource(scenes, list(scenes.classes or []), partial(scene_objects, scenes))
    root = Path(data_path).expanduser()
    if not data_path or not root.is_dir():
        raise ValueError(
            f"--data_path {data_path!r} is no folder (in {os.getcwd()}); give scenes, a folder in VOC's layout, or a "
            "folder of images with --masks"
        )
    if (root / "SegmentationObject").is_dir():
        _refuse_masks(masks, data_path)
        return _open_voc(root)
    if masks is None:
        if not ((root / "images").is_dir() and (root / "masks").is_dir()):
            holds = ", ".join(sorted(os.listdir(root))[:10])
            raise ValueError(
                f"--data_path {data_path!r} has neither SegmentationObject/ nor images/ and masks/; it holds "
                f"{holds or 'nothing'}. Give the masks' folder or COCO's annotations with --masks"
            )
        return _open_pairs(root / "images", root / "masks")
    path = Path(masks).expanduser()
    if path.suffix.lower() == ".json":
        return open_coco(root, path)
    if not path.is_dir():
        raise ValueError(f"--masks {masks!r} is neither a folder nor a .json file; give masks of the images' stems")
    return _open_pairs(root, path)


def _refuse_masks(masks: str | None, data_path: str) -> None:
    if masks is not None:
        raise ValueError(f"--masks {masks!r}: {data_path!r} has masks of its own; leave the option out")


def _open_voc(root: Path) -> ObjectSource:
    """The images that VOC lists in ImageSets/Segmentation/val.txt."""
    listing = root / "ImageSets" / "Segmentation" / "val.txt"
    if not listing.is_file():
        raise ValueError(f"--data_path {str(root)!r} is in VOC's layout, but has no {listing.relative_to(root)}")
    stems = listing.read_text(encoding="utf-8").split()
    if not stems:
        raise ValueError(f"{listing} lists no images; give VOC's own list")
    classes = root / "SegmentationClass"
    masks = MaskFiles(
        [root / "SegmentationObject" / f"{stem}.png" for stem in stems],
        VOC_VOID,
        [classes / f"{stem}.png" for stem in stems] if classes.is_dir() else None,
        len(VOC_CLASSES),
    )
    images = image_files(f"VOC {root}", root / "JPEGImages", [f"{stem}.jpg" for stem in stems])
    return ObjectSource(images, list(VOC_CLASSES), masks.objects)


def _open_pairs(images: Path, masks: Path) -> ObjectSource:
    """All images of a folder, each with the mask of its stem; one that is missing is an error of that image."""
    names = sorted(path.name for path in images.iterdir() if path.suffix.lower() in IMAGE_EXTENSIONS)
    if not names:
        raise ValueError(
            f"{str(images)!r} holds no images: looked for {', '.join(IMAGE_EXTENSIONS)}, not in subfolders"
        )
    files = MaskFiles([masks / f"{Path(name).stem}.png" for name in names])
    return ObjectSource(image_files(f"folder {images}", images, names), [], files.objects)

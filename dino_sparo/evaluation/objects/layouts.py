"""Images with masks of objects, by index, and masks in an encoder's view.

scenes, scenes:NUM:SIZE                           the held-out scenes with their true masks
VOC2012/{JPEGImages,SegmentationObject}           VOC's layout, its split `val`; 255 is void
DIR/{images,masks}, or IMAGES and --masks MASKS   images and PNGs of the same stem: 0 background, else an object each
IMAGES and --masks instances.json                 COCO's annotations
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int
from PIL import Image

from dino_sparo.data.scenes.images import Scenes, names_scenes, parse_scenes_spec
from dino_sparo.data.sources import DEFAULT_LIMITS, IMAGE_EXTENSIONS, CorruptImageError, ImageLimits, ImageSource
from dino_sparo.data.sources.decode import STORED_SIZE
from dino_sparo.data.sources.image_source import FileSource
from dino_sparo.data.views import View
from dino_sparo.runtime.faults import UserError, require
from dino_sparo.runtime.files import open_regular, parse_object

UNKNOWN = -1  # class of an object without a class
VOC_VOID, NO_VOID = 255, -1  # numbers of void pixels
# VOC's classes 1 to 20; 0 is the background.
VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
MAX_REACH = 10  # longest reach of a polygon, in sides of the image; hostile polygons would fill the memory
MASK_MODES = ("1", "L", "P", "I", "I;16")  # Pillow's modes of images whose pixels are numbers


class ObjectMasks(NamedTuple):
    """The objects of an image.

    Attributes:
        masks: (objects, H, W), True where the object is; masks may overlap.
        classes: (objects,), numbers of `ObjectSource.classes`, or UNKNOWN.
        void: (H, W), pixels that count neither as object nor as background.
    """

    masks: Bool[np.ndarray, "objects H W"]
    classes: Int[np.ndarray, " objects"]
    void: Bool[np.ndarray, "H W"]


@dataclass(frozen=True)
class ObjectSource:
    """Images with their objects, by index.

    Attributes:
        images: any images.
        classes: names of the objects' classes; empty where there are none.
        objects: index -> the objects of that image; raises CorruptImageError if they cannot be read.
    """

    images: ImageSource
    classes: list[str]
    objects: Callable[[int], ObjectMasks]


def view_objects(objects: ObjectMasks, view: View, location: str, image: Image.Image) -> ObjectMasks:
    """The objects with a pixel in an encoder's view, cropped like the image and resized (nearest)."""
    check_mask_size(objects.void.shape, location, image)
    void, *masks = (
        np.asarray(Image.fromarray(mask).resize((view.width, view.height), Image.Resampling.NEAREST, box=view.box)) > 0
        for mask in (objects.void, *objects.masks)
    )
    stack = np.stack([mask & ~void for mask in masks]) if masks else np.zeros((0, *void.shape), dtype=bool)
    seen = stack.any(axis=(1, 2))
    return ObjectMasks(stack[seen], objects.classes[seen], void)


def check_mask_size(mask_shape: tuple[int, ...], location: str, image: Image.Image) -> None:
    """Refuse masks that are not those of an image.

    Raises:
        CorruptImageError: the masks are of another size, or may be of the image before it was turned.
    """
    height, width = mask_shape
    if (width, height) == image.info.get(STORED_SIZE):
        raise CorruptImageError(
            location,
            f"is turned by its EXIF orientation, but its masks have {width} x {height} pixels, as the stored image "
            "has; give --exif ignore",
        )
    if (width, height) != image.size:
        raise CorruptImageError(
            location, f"has {image.width} x {image.height} pixels, but its masks have {width} x {height}"
        )


def open_objects(
    data_path: str, masks: str | None = None, limits: ImageLimits = DEFAULT_LIMITS, split: str = "val"
) -> ObjectSource:
    """Images with objects, in a layout of those above; scenes and VOC's layout have the splits "train" and "val"."""
    root = Path(data_path)
    is_voc = (root / "SegmentationObject").is_dir()
    if masks is not None and (is_voc or names_scenes(data_path)):
        raise UserError(f"--masks {masks!r}: {data_path!r} has masks of its own; leave the option out")
    if names_scenes(data_path):
        scenes = Scenes(*parse_scenes_spec(data_path), split=split)
        return ObjectSource(scenes, list(scenes.classes or []), partial(_scene_objects, scenes))
    if not data_path or not root.is_dir():
        raise UserError(f"--data_path {data_path!r} is not a folder (in {os.getcwd()}); give one with images")
    if is_voc:
        return _open_voc(root, limits, split)
    if masks is None:
        if not ((root / "images").is_dir() and (root / "masks").is_dir()):
            raise UserError(
                f"--data_path {data_path!r} lacks SegmentationObject/, or images/ and masks/; or give --masks"
            )
        return _open_pairs(root / "images", root / "masks", limits)
    path = Path(masks)
    if path.suffix.lower() == ".json":
        return _open_coco(root, path, limits)
    if not path.is_dir():
        raise UserError(f"--masks {masks!r} is neither a folder nor a .json file; give masks of the images' stems")
    return _open_pairs(root, path, limits)


def _scene_objects(scenes: Scenes, index: int) -> ObjectMasks:
    masks, classes = scenes.object_masks(index)
    return ObjectMasks(masks, classes, np.zeros(masks.shape[1:], dtype=bool))


def image_names(folder: Path) -> list[str]:
    """Names of the image files in a folder, sorted; without hidden files, such as those that macOS adds."""
    names = (path.name for path in folder.iterdir() if path.suffix.lower() in IMAGE_EXTENSIONS)
    return sorted(name for name in names if name[0] != ".")


def voc_images(root: Path, limits: ImageLimits, split: str) -> tuple[list[str], FileSource]:
    """Stems and images in a list of VOC's ImageSets/Segmentation/, such as val.txt."""
    listing = root / "ImageSets" / "Segmentation" / f"{split}.txt"
    if not listing.is_file():
        raise UserError(f"--data_path {str(root)!r} is in VOC's layout, but has no {listing.relative_to(root)}")
    stems = listing.read_text(encoding="utf-8-sig").split()
    return stems, FileSource(f"VOC {root}", root / "JPEGImages", [f"{stem}.jpg" for stem in stems], limits=limits)


def _open_voc(root: Path, limits: ImageLimits, split: str) -> ObjectSource:
    """VOC's images with the objects of SegmentationObject."""
    stems, images = voc_images(root, limits, split)
    has_classes = (root / "SegmentationClass").is_dir()

    def objects(index: int) -> ObjectMasks:
        name = f"{stems[index]}.png"
        class_path = root / "SegmentationClass" / name if has_classes else None
        return _objects_in_files(root / "SegmentationObject" / name, class_path, VOC_VOID)

    return ObjectSource(images, list(VOC_CLASSES), objects)


def _open_pairs(images: Path, masks: Path, limits: ImageLimits) -> ObjectSource:
    """All images of a folder, each with the mask of its stem; an image without a mask is unreadable."""
    names = image_names(images)
    files = FileSource(f"folder {images}", images, names, limits=limits)
    return ObjectSource(files, [], lambda index: _objects_in_files(masks / f"{Path(names[index]).stem}.png"))


def _objects_in_files(path: Path, class_path: Path | None = None, void: int = NO_VOID) -> ObjectMasks:
    """The objects of an image, by their numbers; `class_path` is a mask of VOC's classes."""
    ids = read_numbers(path)
    numbers = np.unique(ids)
    masks = ids == numbers[(numbers > 0) & (numbers != void)][:, None, None]
    if class_path is None:
        return ObjectMasks(masks, np.full(len(masks), UNKNOWN), ids == void)
    classes = read_numbers(class_path)
    if classes.shape != ids.shape:
        raise CorruptImageError(str(class_path), f"has shape {classes.shape}, but the objects' mask has {ids.shape}")
    return ObjectMasks(masks, np.array([_most_frequent(classes[mask]) for mask in masks], dtype=np.int64), ids == void)


def _most_frequent(numbers: Int[np.ndarray, " pixels"]) -> int:
    """The most frequent class of an object's pixels, from 0."""
    counts = np.bincount(numbers[(numbers > 0) & (numbers <= len(VOC_CLASSES))], minlength=1)
    return int(counts.argmax()) - 1 if counts.any() else UNKNOWN


def read_numbers(path: Path) -> Int[np.ndarray, "H W"]:
    """The numbers of a mask's pixels, without a palette's colours."""
    try:
        with open_regular(path) as file, Image.open(file, formats=("PNG",)) as image:
            if image.mode not in MASK_MODES:
                raise UserError(f"has colours ({image.mode}), but a mask has one number per pixel")
            return np.asarray(image).astype(np.int64)
    except FileNotFoundError as error:
        raise CorruptImageError(str(path), "there is no such mask") from error
    except Exception as error:  # Pillow raises anything for damaged files
        raise CorruptImageError(str(path), f"cannot be read as a PNG with a mask ({error})") from error


def _open_coco(folder: Path, path: Path, limits: ImageLimits) -> ObjectSource:
    """The images of a folder that COCO's annotations describe, such as instances_val2017.json."""
    require("pycocotools", "masks of COCO's annotations")
    with open_regular(path) as file:
        content = parse_object(file.read(), f"--masks {str(path)!r}")
    try:
        names = {category["id"]: str(category["name"]) for category in content["categories"]}
        annotations: dict[int, list[dict]] = {}
        for annotation in content["annotations"]:
            annotations.setdefault(annotation["image_id"], []).append(annotation)
        entries = [(image["id"], image["height"], image["width"]) for image in content["images"]]
        files = FileSource(f"COCO {folder}", folder, [image["file_name"] for image in content["images"]], limits=limits)
    except (KeyError, TypeError) as error:
        raise UserError(f"--masks {str(path)!r} has not the form of COCO's instances: missing {error}") from error
    class_numbers = {identity: number for number, identity in enumerate(sorted(names))}

    def objects(index: int) -> ObjectMasks:
        image_id, height, width = entries[index]
        try:
            return _coco_objects(annotations.get(image_id, []), int(height), int(width), class_numbers)
        except Exception as error:  # pycocotools raises anything for damaged annotations
            reason = f"annotations cannot be read ({type(error).__name__}: {error})"
            raise CorruptImageError(files.location(index), reason) from error

    return ObjectSource(files, [names[identity] for identity in class_numbers], objects)


def _coco_objects(annotations: list[dict], height: int, width: int, class_numbers: dict[int, int]) -> ObjectMasks:
    """The objects of an image; groups (`iscrowd`) are void outside of objects."""
    masks = np.zeros((len(annotations), height, width), dtype=bool)
    for mask, annotation in zip(masks, annotations, strict=True):
        mask[:] = segmentation_mask(annotation["segmentation"], height, width)
    crowd = np.array([bool(annotation.get("iscrowd")) for annotation in annotations], dtype=bool)
    classes = np.array([class_numbers[annotation["category_id"]] for annotation in annotations], dtype=np.int64)
    void = masks[crowd].any(axis=0) & ~masks[~crowd].any(axis=0)
    return ObjectMasks(masks[~crowd], classes[~crowd], void)


def segmentation_mask(segmentation: Any, height: int, width: int) -> Bool[np.ndarray, "H W"]:
    """The mask of an annotation: polygons, or run lengths as numbers or as a string; see cocodataset.org."""
    from pycocotools import mask as coco_masks

    if isinstance(segmentation, dict):
        if list(segmentation["size"]) != [height, width]:
            raise UserError(f"mask of {segmentation['size']} pixels for an image of {[height, width]}")
    else:
        reach = MAX_REACH * max(height, width)  # memory grows with the length of an outline
        if not all(abs(float(number)) <= reach for polygon in segmentation for number in polygon):
            raise UserError(f"a polygon reaches more than {reach} pixels in an image of {height} x {width}")
    is_string = isinstance(segmentation, dict) and isinstance(segmentation["counts"], (str, bytes))
    lengths = segmentation if is_string else coco_masks.frPyObjects(segmentation, height, width)
    lengths = coco_masks.merge(lengths if isinstance(lengths, list) else [lengths, lengths])
    mask = coco_masks.decode(lengths)
    if coco_masks.encode(mask)["counts"] != lengths["counts"]:
        raise UserError(f"run lengths do not fill the image's {height} x {width} pixels")
    return mask > 0

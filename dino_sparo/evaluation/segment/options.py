"""The options of `dino-sparo segment`; no torch here."""

from dino_sparo.evaluation.options import EVALUATION_LIMITS, RESULT, map_parser
from dino_sparo.runtime.cli import Group, Option, Parser, number_from_0, positive_int, positive_number, share_above_0

LABELLED_IMAGES: Group = {
    "data_path": Option(
        "",
        "scenes; a folder in the layout of VOC or ADE20K; a folder with images/ and masks/; or a folder of images, "
        "with --masks.",
    ),
    "masks": Option(
        None,
        "For a folder of images: a folder of PNG masks with the images' stems, whose pixels are class numbers, or "
        "COCO's annotations (.json). Images without a mask are not used.",
    ),
    "val_path": Option(
        None, "Images to measure on, as --data_path. By default the layout's validation images, else a random share."
    ),
    "val_masks": Option(None, "Masks of --val_path, as --masks."),
    "val_share": Option(0.2, "Share of a folder's images to measure on, without --val_path.", share_above_0),
    "void": Option(255, "Class number of pixels that do not count, in masks of a folder."),
    "class_names": Option(
        None, "Text file with one name per line, from class number 0 on. By default the numbers are the names."
    ),
    **EVALUATION_LIMITS,
}
HEAD: Group = {
    "head": Option(
        "linear",
        "linear; conv, which also sees the 8 patches around; or the file of a trained head, which then only predicts.",
    ),
    "n_last_blocks": Option(None, "Last blocks whose patch tokens are concatenated, by default 1.", positive_int),
    "img_size": Option(
        None,
        "Short side of the images in pixels, by default twice the training size; more finds finer parts.",
        positive_int,
    ),
    "window": Option(
        None, "Side of the sliding windows in pixels, for images larger than that; by default --img_size.", positive_int
    ),
    "steps": Option(500, "Steps of training; DINOv2 takes 40,000.", positive_int),
    "batch_size": Option(16, "Windows per step.", positive_int),
    "lr": Option(1e-3, "Learning rate of AdamW.", positive_number),
    "cache_gb": Option(
        4.0, "Memory for features of training images; features beyond it are computed again each time.", number_from_0
    ),
    "seed": Option(0, "Random seed of untrained weights, the head, crops and the validation share."),
}
USE: Group = {
    "slot_masks": Option(False, "Also measure the slots, or heads of cls, as masks without a trained head."),
    "images": Option(None, "Folder of new images, whose masks are predicted and written as PNG."),
    "pictures": Option(
        6, "Images in the pictures, the worst of the validation images and the first new ones.", positive_int
    ),
    **RESULT,
}


def segment_parser() -> Parser:
    """The options of `segment/command.py`, in data-flow order."""
    return map_parser({"images and masks": LABELLED_IMAGES, "head": HEAD, "masks, pictures and result": USE})

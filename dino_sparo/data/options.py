"""The options of images and their files; no torch here, so that `--help` is fast."""

from dino_sparo.data import defaults
from dino_sparo.runtime.cli import Group, Option, Parser, any_number, positive_int, positive_number, share
from dino_sparo.runtime.options import DEVICE

DOWNLOAD = Option(False, "Download a torchvision set that is not on disk.")
TRAINING_DATA: Group = {
    "split": Option(
        None,
        "Split to train on: the name of a subfolder, list, table or shards in --data_path, or a word in a "
        "table's column of splits. all: all images. By default train, if there is such a split, else all.",
        str,
    ),
    "download": DOWNLOAD,
    "max_corrupt": Option(
        0.01,
        "Largest share of unreadable images, or of pairs without image or caption; above it the run ends. "
        f"{defaults.MIN_CORRUPT} of them are always allowed, except with 0.",
        share,
    ),
}
SPLIT_COLUMN: Group = {
    "split_column": Option(None, "Column of the splits in a table, if its name is not recognised.", str)
}
COLUMNS: Group = {
    "path_column": Option(None, "Column of the paths in a table, if its name is not recognised.", str),
    "label_column": Option(None, "Column of the labels in a table, if its name is not recognised.", str),
    **SPLIT_COLUMN,
}
IMAGE_LIMITS: Group = {
    "max_image_mb": Option(
        defaults.MAX_IMAGE_MB, "Largest image file, in 10^6 bytes; larger files count as unreadable.", positive_number
    ),
    "max_image_mpix": Option(
        defaults.MAX_IMAGE_MPIX,
        "Largest image, in 10^6 pixels; larger images count as unreadable. Decoding takes up to 8 bytes per "
        "pixel in each process that loads images.",
        positive_number,
    ),
    "max_value": Option(
        defaults.MAX_VALUE, "Value of 16-bit grey images that becomes white; 4095 for 12-bit images.", positive_int
    ),
    "exif": Option(
        defaults.EXIF[0],
        "apply: turn an image upright by its EXIF orientation, as viewers do. ignore: take the pixels as they are "
        "stored, as DINO's reference code does.",
        choices=defaults.EXIF,
    ),
}
CHANNELS: Group = {
    "in_chans": Option(
        3,
        "Number of channels. 3: 8-bit RGB; grey images are converted. 1: grey images in their bit depth. Other "
        "numbers: .npy arrays, or TIFFs with one page per channel.",
        positive_int,
    )
}
NORMALIZATION: Group = {
    "norm_mean": Option(defaults.IMAGENET_MEAN, "Mean per channel, of pixels in [0, 1].", any_number),
    "norm_std": Option(defaults.IMAGENET_STD, "Standard deviation per channel, of pixels in [0, 1].", positive_number),
}


MEASURED_IMAGES: Group = {
    "data_path": Option("", "The images: any data that training takes."),
    "split": Option(None, "Name of the split to measure, or all; by default the split that training uses.", str),
    "download": DOWNLOAD,
    "batch_size_per_gpu": Option(64, "Images per batch.", positive_int),
}


def statistics_parser() -> Parser:
    """The options of `dino-sparo statistics`."""
    files = COLUMNS | IMAGE_LIMITS | CHANNELS
    processes = {"num_workers": DEVICE["num_workers"]}
    return Parser({"images": MEASURED_IMAGES, "files of images": files, "processes": processes})

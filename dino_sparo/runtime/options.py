"""Options that several folders share, in groups; no torch here. `cli.py` parses them."""

from dino_sparo.runtime.choices import (
    ARCHITECTURES,
    EXIF,
    IMAGENET_MEAN,
    IMAGENET_STD,
    KEY_DIM,
    MAX_IMAGE_MB,
    MAX_IMAGE_MPIX,
    MAX_VALUE,
    MIN_CORRUPT,
    NUM_SLOTS,
    SLOT_DIM,
)
from dino_sparo.runtime.cli import Group, Option, any_number, positive_int, positive_number, share, whole_number

DOWNLOAD = Option(False, "Download a torchvision set that is not on disk.")
USE_CUDA = Option(True, "Keep features on the GPU, if there is one. Give false if they do not fit.")
RESULT: Group = {
    "output_dir": Option(None, "Folder of the result; by default the folder of the weights."),
    "overwrite": Option(False, "Overwrite what other weights, data or options gave."),
}
FIGURE_FORMAT = Option("png", "File format of figures with text.", choices=("png", "pdf", "svg"))
PRETRAINED = Option(
    False,
    "Start a model timm/NAME from timm's weights, which are downloaded once. Without a network, give --init_from FILE.",
)
DEVICE_OPTION = Option("auto", "auto (cuda if there is a GPU, else cpu), cpu, cuda or cuda:N.", str)

DEVICE: Group = {
    "device": DEVICE_OPTION,
    "num_workers": Option(10, "Processes that load images, per GPU; about one per core."),
    "dist_url": Option("env://", "Address at which the processes meet; not needed under torchrun and Slurm.", str),
    "dist_timeout_min": Option(
        10.0, "Minutes that a process waits for others, or images, before the run ends.", positive_number
    ),
    "local_rank": Option(0, "Ignored. Older launchers set it; the rank comes from the environment."),
}
SLOT_SIZES: Group = {
    "sparo_slots": Option(NUM_SLOTS, "Number of slots L.", positive_int),
    "sparo_slot_dim": Option(SLOT_DIM, "Width of a slot V; the encoding has L*V numbers.", positive_int),
    "sparo_key_dim": Option(KEY_DIM, "Width of the attention's keys and queries.", positive_int),
    "sparo_group_size": Option(
        1, "Slots that share one key projection; 2 or 4 save parameters when there are many slots.", positive_int
    ),
}
CHECKPOINT: Group = {
    "pretrained_weights": Option(
        "",
        "A checkpoint, an export or released weights; timm/NAME: a model of timm with timm's weights, which are "
        "downloaded once; demo: the small encoder of this package.",
    ),
    "checkpoint_key": Option("teacher", "Network in the checkpoint: teacher (usually better) or student.", str),
    "untrained": Option(
        False,
        "Evaluate random weights, as a control. The architecture is the checkpoint's, or without a checkpoint "
        "that of options such as --arch and --patch_size.",
    ),
}
FOREIGN_WEIGHTS: Group = {
    "arch": Option(
        None,
        f"Architecture, one of {', '.join(sorted(ARCHITECTURES))}; needed only if the weights' shapes do not determine "
        "it. vit_small_heads12 has 12 attention heads, as MoCo v3's, a number that no file of weights says.",
        str,
    ),
    "patch_size": Option(
        None,
        "Side of a patch in pixels; only for --untrained without weights, because weights determine it.",
        positive_int,
    ),
    "quick_gelu": Option(
        False, "Give true for a CLIP's image tower with OpenAI's activation, unless an open_clip_config.json says so."
    ),
}
FEATURE_FILES: Group = {
    "dump_features": Option(None, "Folder to write features and labels to."),
    "load_features": Option(None, "Folder to read features and labels from; weights and images are then not needed."),
    "use_cuda": USE_CUDA,
}
IMAGE_LIMITS: Group = {
    "max_image_mb": Option(
        MAX_IMAGE_MB, "Largest image file, in 10^6 bytes; larger files count as unreadable.", positive_number
    ),
    "max_image_mpix": Option(
        MAX_IMAGE_MPIX,
        "Largest image, in 10^6 pixels; larger images count as unreadable. Decoding takes up to 8 bytes per "
        "pixel in each process that loads images.",
        positive_number,
    ),
    "max_value": Option(
        MAX_VALUE, "Value of 16-bit grey images that becomes white; 4095 for 12-bit images.", positive_int
    ),
    "exif": Option(
        EXIF[0],
        "apply: turn an image upright by its EXIF orientation, as viewers do. ignore: take the pixels as they are "
        "stored, as DINO's reference code does.",
        choices=EXIF,
    ),
}
EVALUATION_LIMITS: Group = {
    **IMAGE_LIMITS,
    "max_value": IMAGE_LIMITS["max_value"]._replace(
        default=None,
        help=f"Value of 16-bit images that becomes white. By default the value of the training, else {MAX_VALUE}.",
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
NORMALIZATION: Group = {
    "norm_mean": Option(IMAGENET_MEAN, "Mean per channel, of pixels in [0, 1].", any_number),
    "norm_std": Option(IMAGENET_STD, "Standard deviation per channel, of pixels in [0, 1].", positive_number),
}
CHANNELS: Group = {
    "in_chans": Option(
        3,
        "Number of channels. 3: 8-bit RGB; grey images are converted. 1: grey images in their bit depth. Other "
        "numbers: .npy arrays, or TIFFs with one page per channel.",
        positive_int,
    ),
}
SHOW_CHANNELS: Group = {
    "show_channels": Option(
        [],
        "Channels that pictures show, counted from 0: one as grey, or three as red, green and blue, each "
        "stretched from its 2nd to its 98th percentile. By default RGB is unchanged, and other images show "
        "their first three channels, or the first.",
        whole_number,
    ),
}
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
        f"{MIN_CORRUPT} of them are always allowed, except with 0.",
        share,
    ),
}

"""The options of `dino-sparo video-segmentation` and `dino-sparo video`; no torch here."""

from dino_sparo.evaluation.options import EVALUATION_LIMITS, IMAGE_ENCODER, OUTPUT
from dino_sparo.runtime.cli import Group, Option, Parser, positive_int, positive_number, share_above_0
from dino_sparo.runtime.options import DEVICE_OPTION
from dino_sparo.weights.options import CHECKPOINT, FOREIGN_WEIGHTS

VIDEO_FORMATS = ("mp4", "avi", "gif")

ANNOTATED_VIDEOS: Group = {
    "data_path": Option("", "Folder of DAVIS 2017, with JPEGImages, Annotations and ImageSets."),
    "split": Option("val", "Videos to segment: those in ImageSets/2017/SPLIT.txt.", str),
    **EVALUATION_LIMITS,
    "img_size": Option(
        480, "Short side of the frames in pixels; the long side becomes a multiple of 64.", positive_int
    ),
    "batch_size_per_gpu": Option(6, "Frames that are encoded at once.", positive_int, spellings=("bs",)),
}
PROPAGATION: Group = {
    "slots": Option(
        None,
        "Compare patches by these slots of each patch alone, not by their tokens. Numbers such as 0,3,7, or a file of "
        "dino-sparo slots study.",
    ),
    "n_last_frames": Option(7, "Number of earlier frames that give their labels, besides the first frame."),
    "size_mask_neighborhood": Option(
        12, "Greatest distance of compared patches, in rows and columns of patches; 0: compare all patches."
    ),
    "topk": Option(5, "Number of most similar patches whose labels a patch takes.", positive_int),
}
MASKS: Group = {
    "output_dir": Option(".", "Where the result and one folder of masks per video are written."),
    "overwrite": OUTPUT["overwrite"],
}


def segmentation_parser() -> Parser:
    """The options of `eval_video_segmentation.py`."""
    return _parser({"videos": ANNOTATED_VIDEOS, "propagation": PROPAGATION, "result": MASKS})


FRAMES: Group = {
    "data_path": Option(
        "",
        "A video, or a folder of its frames; with --video_only a folder of finished pictures.",
        spellings=("input_path",),
    ),
    **EVALUATION_LIMITS,
    "img_size": Option(
        None,
        "Size at which the encoder sees the frames, in pixels: one number for the short side, or height and width. By "
        "default the size of the frames. Give a smaller size if memory is full.",
        positive_int,
        nargs="+",
        spellings=("resize",),
    ),
}
VIDEO: Group = {
    "slots": Option(None, "Show only these slots, in this order: numbers such as 0,3,7, or a file of slots study."),
    "max_maps": Option(12, "Number of slots or heads to show, most concentrated first.", positive_int),
    "threshold": Option(
        None, "Show the fewest patches that contain this share of a map's mass, e.g. 0.6, not the map.", share_above_0
    ),
    "fps": Option(None, "Frames per second; by default those of the video, else 30.", positive_number),
    "video_format": Option(
        "mp4", "Format of the video. mp4 and avi need the package av; gif is larger.", choices=VIDEO_FORMATS
    ),
    "video_only": Option(False, "Make a video of finished pictures, such as the folder attention of an earlier call."),
    "output_dir": Option(
        "./", "Where the video and the folders frames and attention are written.", spellings=("output_path",)
    ),
    "overwrite": OUTPUT["overwrite"],
}


def video_parser() -> Parser:
    """The options of `video_generation.py`."""
    return _parser({"frames": FRAMES, "video": VIDEO})


def _parser(groups: dict[str, Group]) -> Parser:
    encoder = {"encoder": {**CHECKPOINT, "image_encoder": IMAGE_ENCODER}, "foreign weights": FOREIGN_WEIGHTS}
    return Parser({**encoder, **groups, "device": {"device": DEVICE_OPTION}})

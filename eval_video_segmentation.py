"""DAVIS 2017 -> masks of the objects in its videos by label propagation, and their J&F.

    python eval_video_segmentation.py --pretrained_weights output/checkpoint.pth --data_path DAVIS --output_dir masks

Writes one folder of PNGs per video and video_segmentation.json. Options as in facebookresearch/dino.
"""

from collections.abc import Sequence
from typing import Any

from dino_sparo.__main__ import run
from dino_sparo.evaluation.video.options import segmentation_parser as get_args_parser

__all__ = ["get_args_parser", "main"]


def main(argv: Sequence[str] | None = None) -> Any:
    """Run the command `dino-sparo video-segmentation` with these options; None: the command line's."""
    return run("video-segmentation", argv, prog="eval_video_segmentation.py")


if __name__ == "__main__":
    main()

"""A video -> a video of the attention of an encoder's heads (cls) or slots (sparo).

    python video_generation.py --pretrained_weights output/checkpoint.pth --input_path walk.mp4 --output_path walk
    python video_generation.py --input_path walk/attention --output_path walk --video_only --video_format gif

Options as in facebookresearch/dino.
"""

from collections.abc import Sequence
from typing import Any

from dino_sparo.__main__ import run
from dino_sparo.evaluation.video.options import video_parser as get_args_parser

__all__ = ["get_args_parser", "main"]


def main(argv: Sequence[str] | None = None) -> Any:
    """Run the command `dino-sparo video` with these options; None: the command line's."""
    return run("video", argv, prog="video_generation.py")


if __name__ == "__main__":
    main()

"""Images -> attention maps: one per slot (sparo) or per head (cls), as numbers, overlays and a slot atlas.

    python visualize_attention.py --pretrained_weights output/checkpoint.pth --output_dir maps
    python visualize_attention.py --pretrained_weights output/checkpoint.pth --image_path cat.jpg --image_size 480
    python visualize_attention.py --pretrained_weights sparo.pth --compare cls.pth --image_path photos
    python visualize_attention.py --pretrained_weights output/checkpoint.pth --atlas data/imagenet/val

Always writes attention.png (a labelled grid), attention.npy (the raw maps) and attention.json (which map is how peaked,
and which look alike); further files as the options say. Options as in facebookresearch/dino.
"""

from collections.abc import Sequence
from typing import Any

from dino_sparo.__main__ import run
from dino_sparo.evaluation.attention.options import attention_parser as get_args_parser

__all__ = ["get_args_parser", "main"]


def main(argv: Sequence[str] | None = None) -> Any:
    """Run the command `dino-sparo attention` with these options; None: the command line's."""
    return run("attention", argv, prog="visualize_attention.py")


if __name__ == "__main__":
    main()

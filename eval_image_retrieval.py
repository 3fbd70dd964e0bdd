"""Checkpoint -> encoder -> rankings of revisited Oxford and Paris -> mean average precision.

    python eval_image_retrieval.py --imsize 512 --multiscale true --data_path revisited --dataset rparis6k

Options as in facebookresearch/dino. Without --pretrained_weights the weights are those of DINO on Google Landmarks v2.
`dino-sparo image-retrieval` is the same command.
"""

from collections.abc import Sequence
from typing import Any

from dino_sparo.__main__ import run
from dino_sparo.evaluation.retrieval.options import image_retrieval_parser as get_args_parser

__all__ = ["get_args_parser", "main"]


def main(argv: Sequence[str] | None = None) -> Any:
    """Run the command `dino-sparo image-retrieval` with these options; None: the command line's."""
    return run("image-retrieval", argv, prog="eval_image_retrieval.py")


if __name__ == "__main__":
    main()

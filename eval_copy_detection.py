"""Checkpoint -> encoder -> rankings of Copydays' originals -> mean average precision on strong copies.

    python eval_copy_detection.py --data_path copydays --whitening_path other_images --distractors_path distractors

Options as in facebookresearch/dino. `dino-sparo copy-detection` is the same command.
"""

from collections.abc import Sequence
from typing import Any

from dino_sparo.__main__ import run
from dino_sparo.evaluation.retrieval.options import copy_detection_parser as get_args_parser

__all__ = ["get_args_parser", "main"]


def main(argv: Sequence[str] | None = None) -> Any:
    """Run the command `dino-sparo copy-detection` with these options; None: the command line's."""
    return run("copy-detection", argv, prog="eval_copy_detection.py")


if __name__ == "__main__":
    main()

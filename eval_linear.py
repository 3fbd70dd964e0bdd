"""Checkpoint -> encoder -> linear probes, one per learning rate, trained and tested.

    python eval_linear.py --pretrained_weights output/checkpoint.pth --data_path data/imagenet --lr 0.001 0.01 0.1
    python eval_linear.py --pretrained_weights output/checkpoint.pth --data_path data/imagenet --fast

The encoder stays frozen and runs once for all learning rates. Prints a table and writes linear_WEIGHTS_DATA.json, the
accuracies with all that they depend on; the .pth file of that name holds the probes, and the same command resumes from
it. Options as in facebookresearch/dino.
"""

from collections.abc import Sequence
from typing import Any

from dino_sparo.__main__ import run
from dino_sparo.evaluation.linear.options import linear_parser as get_args_parser

__all__ = ["get_args_parser", "main"]


def main(argv: Sequence[str] | None = None) -> Any:
    """Run the command `dino-sparo linear` with these options; None: the command line's."""
    return run("linear", argv, prog="eval_linear.py")


if __name__ == "__main__":
    main()

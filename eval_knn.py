"""Checkpoint -> encoder -> features -> weighted k-NN accuracy.

    python eval_knn.py --pretrained_weights output/checkpoint.pth --data_path data/imagenet
    torchrun --nproc_per_node=8 eval_knn.py --pretrained_weights output/checkpoint.pth --data_path data/imagenet

Prints a table and writes knn_WEIGHTS_DATA.json, the accuracies with all that they depend on.
`weights.encoder.encoder_of` builds the teacher's encoder as the checkpoint says and loads its weights. It reads the
reference's checkpoints and raw ViT weights, too. Options as in facebookresearch/dino.
"""

from collections.abc import Sequence
from typing import Any

from dino_sparo.__main__ import run
from dino_sparo.evaluation.options import knn_parser as get_args_parser

__all__ = ["get_args_parser", "main"]


def main(argv: Sequence[str] | None = None) -> Any:
    """Run the command `dino-sparo knn` with these options; None: the command line's."""
    return run("knn", argv, prog="eval_knn.py")


if __name__ == "__main__":
    main()

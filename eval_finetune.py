"""Checkpoint -> encoder -> fine-tuned with a linear head on labelled images, and its accuracy.

    python eval_finetune.py --pretrained_weights demo --data_path scenes:2000:48 --output_dir runs/fine \\
        --epochs 10 --lr 0.004
    torchrun --nproc_per_node=8 eval_finetune.py --pretrained_weights output/checkpoint.pth --data_path data/imagenet \\
        --output_dir output/fine

Writes checkpoints, whose encoder every other command reads, and finetune_WEIGHTS_DATA.json, the accuracies with all
that they depend on. The same command resumes the run.
"""

from collections.abc import Sequence
from typing import Any

from dino_sparo.__main__ import run
from dino_sparo.finetune.options import finetune_parser as get_args_parser

__all__ = ["get_args_parser", "main"]


def main(argv: Sequence[str] | None = None) -> Any:
    """Run the command `dino-sparo finetune` with these options; None: the command line's."""
    return run("finetune", argv, prog="eval_finetune.py")


if __name__ == "__main__":
    main()

"""The options of fine-tuning, and their checks; no torch here, so that `--help` is fast.

The defaults are those of BEiT's code for fine-tuning, with the epochs and the layer decay that iBOT uses for a ViT-S
(bytedance/ibot, commit 092f7a4: evaluation/README.md and evaluation/classification_layer_decay). BEiT's learning rate
of 0.004 for 1,024 images is 0.001 for 256. The moving average is on by default, as in DeiT.
"""

import argparse
from typing import Any

from dino_sparo.data.options import COLUMNS, TRAINING_DATA
from dino_sparo.distillation import options as distillation
from dino_sparo.evaluation.options import ENCODER, EVALUATION_LIMITS
from dino_sparo.evaluation.options import IMAGES as EVALUATED_IMAGES
from dino_sparo.runtime.cli import Group, Option, Parser, number_from_0, positive_int, share, whole_number
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.options import DEVICE
from dino_sparo.training.options import COMPUTE, LAYER_DECAY, MAX_STEPS, OPTIMIZERS, RUN, check_whole_patches
from dino_sparo.weights.options import CHECKPOINT, FOREIGN_WEIGHTS

WARMUP_EPOCHS = 20

STARTED_FROM: Group = {
    **CHECKPOINT,
    "untrained": CHECKPOINT["untrained"]._replace(
        help="Start from random weights, as a control. The architecture is the checkpoint's, or without a checkpoint "
        "that of --arch, --patch_size and --readout."
    ),
    "readout": ENCODER["readout"],
    "drop_path_rate": Option(
        0.1, "Largest rate of stochastic depth. 0.1 suits a ViT-S and a ViT-B, 0.2 a ViT-L.", share
    ),
}
IMAGES: Group = {
    "data_path": EVALUATED_IMAGES["data_path"],
    **TRAINING_DATA,
    "val_split": Option("val", "Split to validate on.", str),
    "val_freq": Option(
        1,
        "Validate the moving average every N epochs, and after the last, and keep the best checkpoint; 0: never.",
        whole_number,
    ),
    "img_size": EVALUATED_IMAGES["img_size"],
    "batch_size_per_gpu": Option(128, "Images per process and forward pass; even, for mixup and cutmix.", positive_int),
    "grad_accum_steps": distillation.IMAGES["grad_accum_steps"],
}
REGULARIZATION: Group = {
    "mixup": Option(
        0.8,
        "Mixup: the share of one image in another is drawn from Beta(a, a) with this a; 0: no mixup.",
        number_from_0,
    ),
    "cutmix": Option(
        1.0,
        "CutMix: the area of one image in another is drawn from Beta(a, a) with this a; 0: no CutMix. With mixup and "
        "CutMix each batch takes one of the two.",
        number_from_0,
    ),
    "label_smoothing": Option(0.1, "Share of the target that is spread evenly over all classes.", share),
    "random_erasing": Option(0.25, "Share of the images in which a rectangle becomes noise.", share),
}
OPTIMIZATION: Group = {
    "epochs": Option(200, "Epochs of the run, which the schedules span. 100 suit a ViT-B, 50 a ViT-L.", positive_int),
    "max_steps": MAX_STEPS,
    "optimizer": Option("adamw", "adamw suits transformers.", choices=sorted(OPTIMIZERS)),
    "lr": Option(
        0.001,
        f"Learning rate of the head after the warm-up, for a batch of {distillation.REFERENCE_BATCH}; it scales with "
        "the batch. Try several; a short run needs a higher one.",
    ),
    "warmup_epochs": Option(
        None,
        f"Epochs of linear warm-up. (default: a tenth of the run, at most {WARMUP_EPOCHS})",
        number_from_0,
    ),
    "min_lr": Option(1e-6, "Learning rate at the end."),
    "layer_decay": LAYER_DECAY._replace(
        default=0.75,
        help="Factor between the learning rates of neighbouring layers of the backbone: deeper layers learn faster. "
        "0.65 suits a ViT-B, 0.75 a ViT-L. 1: all layers have the same rate.",
    ),
    "weight_decay": Option(0.05, "Weight decay; biases and norms have none."),
    "clip_grad": Option(0.0, "Largest norm of all gradients together; 0: no limit."),
    "ema_decay": Option(
        0.9999,
        "Largest decay of the moving average of the weights; in step t it is at most 1 - t^(-2/3). 0: no average.",
        share,
    ),
}


def finetune_parser() -> Parser:
    """The options of `eval_finetune.py`, in data-flow order."""
    return Parser(
        {
            "encoder: what is fine-tuned": STARTED_FROM,
            "images": IMAGES,
            "files of images": COLUMNS | EVALUATION_LIMITS,
            "augmentation and labels": REGULARIZATION,
            "optimisation": OPTIMIZATION | COMPUTE,
            "run": RUN,
            "foreign weights": FOREIGN_WEIGHTS,
            "device and processes": DEVICE,
        }
    )


def check_options(args: argparse.Namespace) -> None:
    """Refuse options that do not fit each other; what depends on the weights is checked when they are loaded."""
    if not args.pretrained_weights and not args.untrained:
        raise UserError("--pretrained_weights is empty; give the weights to start from, such as demo, or --untrained")
    if (args.mixup or args.cutmix) and args.batch_size_per_gpu % 2:
        raise UserError(
            f"--batch_size_per_gpu {args.batch_size_per_gpu} is odd, and --mixup {args.mixup:g} --cutmix "
            f"{args.cutmix:g} mix pairs of images; give an even number, or --mixup 0 --cutmix 0"
        )
    if (args.warmup_epochs or 0) > args.epochs:
        raise UserError(
            f"--warmup_epochs {args.warmup_epochs:g} is longer than the run of {args.epochs} epochs; shorten it"
        )
    if args.img_size:
        check_whole_patches(args, "img_size")


def fill_in_defaults(args: argparse.Namespace) -> dict[str, Any]:
    """Fill in the warm-up, which must fit the run; returns the values that were filled in."""
    return distillation.fill_in_defaults(args, {"warmup_epochs": (WARMUP_EPOCHS, args.epochs / 10)})

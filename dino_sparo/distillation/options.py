"""The options that objectives with a student and a teacher share, in data-flow order, and their checks.

Names and defaults are those of facebookresearch/dino; `CHANGED` in `tests/runtime/test_cli.py` lists the defaults
that differ.
"""

import argparse
import logging
from collections.abc import Mapping
from typing import Any

from dino_sparo.data.options import CHANNELS, COLUMNS, IMAGE_LIMITS, NORMALIZATION, TRAINING_DATA
from dino_sparo.models.architectures import ARCHITECTURES, DINO_READOUTS, PATCH_SIZE, TIMM, arch_name
from dino_sparo.models.options import PRETRAINED, SLOT_SIZES
from dino_sparo.runtime.cli import Group, Option, Parser, bool_flag, number_from_0, positive_int, share, whole_number
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.options import DEVICE
from dino_sparo.training.options import (
    COMPUTE,
    LAYER_DECAY,
    MAX_STEPS,
    OPTIMIZERS,
    RUN,
    check_start,
    check_whole_patches,
)

logger = logging.getLogger(__name__)

REFERENCE_BATCH = 256  # images; learning rates are stated for it and scaled with the batch
# The reference's defaults, which do not fit every run; see `fill_in_defaults` and `check_options`.
WARMUP_EPOCHS, DROP_PATH_RATE, FROZEN_EPOCHS = 10, 0.1, 1

IMAGES: Group = {
    "data_path": Option(
        None,
        "Where the images are: a folder, a list (.txt) or table (.csv, .tsv, .jsonl) of paths, tar shards "
        "(shard-{000..099}.tar), a torchvision set (cifar10:DIR), or the built-in scenes (scenes:NUMBER:SIZE).",
    ),
    **TRAINING_DATA,
    "batch_size_per_gpu": Option(64, "Images per process and forward pass.", positive_int),
    "grad_accum_steps": Option(
        1, "Forward passes per step, whose gradients are averaged: a larger batch in the same memory.", positive_int
    ),
}
CROPS: Group = {
    "global_crops_size": Option(224, "Side of the global crops in pixels."),
    "local_crops_size": Option(96, "Side of the local crops in pixels."),
    "global_crops_scale": Option(
        (0.4, 1.0),
        "Range of a global crop's share of the image's area. Without local crops, 0.14 1 works better.",
    ),
    "local_crops_number": Option(8, "Local crops per image; 0 for none."),
    "local_crops_scale": Option((0.05, 0.4), "Range of a local crop's share of the image's area."),
    "distort_on": Option(
        "auto",
        "Where colour jitter, blur and solarisation run. cpu: in the processes that load images. device: in "
        "batches, so that these processes only decode and crop. auto: device on GPUs, else cpu.",
        choices=("auto", "cpu", "device"),
    ),
}
ENCODER: Group = {
    "arch": Option(
        "vit_small",
        f"Architecture of the backbone, one of {', '.join(sorted(ARCHITECTURES))}, or timm/NAME for a model of timm, "
        "such as timm/resnet50. vit_micro is for laptops; vit_small_heads12 has 12 attention heads. The reference's "
        "names resnet50, xcit_small_12_p16 and deit_small are understood, too.",
        arch_name,
    ),
    "patch_size": Option(
        None,
        "Side of a patch in pixels. Smaller patches are more accurate and cost more; 4 suits 32 px images. (default: "
        f"{PATCH_SIZE}; for timm/NAME the model's own)",
        positive_int,
    ),
    "readout": Option(
        "sparo",
        f"How tokens become the encoding, one of {', '.join(sorted(DINO_READOUTS))}, or another name of "
        "dino_sparo/models/readouts.py: sparo replaces the last block by slots, cls is vanilla DINO's class token, gap "
        "averages all tokens.",
        str,
    ),
    **SLOT_SIZES,
    "pre_norm": Option(False, "Use CLIP's vision transformer, as --init_from with a CLIP needs; not for timm/NAME."),
    "quick_gelu": Option(False, "Use OpenAI's activation, as --init_from with OpenAI's CLIP needs."),
    "drop_path_rate": Option(
        DROP_PATH_RATE,
        "Rate of stochastic depth in the student; 0 suits short runs. It becomes 0 if it is not given and the model of "
        "timm has no stochastic depth.",
    ),
    "pretrained": PRETRAINED,
    "init_from": Option(
        None,
        "Start from the weights in this file, with the same width and patch size. A full checkpoint of this "
        "package or of facebookresearch/dino has student, teacher, both heads and the center. A DINO or timm "
        "ViT, or the image tower of a CLIP (of this package, OpenCLIP or sparo-clip), has the encoder. For "
        "timm/NAME, give weights of that model; a ViT's patch projection is resampled to --patch_size. Parts of "
        "other sizes start at random. A resumed run uses its own weights.",
    ),
}
HEAD: Group = {
    "head_hidden_dim": Option(2048, "Width of the head's MLP; a smaller width saves time with tiny encoders."),
    "use_bn_in_head": Option(
        False,
        "Use batch norm in the head's MLP. On several GPUs, the statistics are synchronised, which slows every step.",
    ),
    "init_head": Option(
        None,
        "new: take only the teacher's encoder from --init_from, for student and teacher; the heads start at random.",
        choices=("new",),
    ),
}
# Options of objectives whose loss compares distributions over prototypes.
PROTOTYPES: Group = {
    "out_dim": Option(
        65536,
        "Number of prototypes K: many for large and varied data, a few thousand for tens of thousands of images.",
    ),
    "norm_last_layer": Option(
        True, "Keep the prototypes at unit length. False can be more accurate for a ViT-S, but is less stable."
    ),
}
PROTOTYPE_LOSS: Group = {
    "koleo_weight": Option(
        0.0,
        "Weight of the KoLeo loss, which spreads the student's encodings apart; 0: none. DINOv2 uses 0.1. Try "
        "this option if encodings collapse.",
    ),
    "warmup_teacher_temp": Option(
        0.04, "Teacher's temperature in the first epoch; lower it if the loss does not fall."
    ),
    "teacher_temp": Option(0.04, "Teacher's temperature after the warm-up; above 0.07 training is usually unstable."),
    "warmup_teacher_temp_epochs": Option(0, "Epochs of linear warm-up from --warmup_teacher_temp to --teacher_temp."),
}
TEACHER: Group = {
    "momentum_teacher": Option(
        0.996,
        "Momentum of the teacher at the start; it rises to 1. 0.9995 suits a batch of 256, a smaller value short runs.",
        share,
    ),
}
OPTIMIZATION: Group = {
    "epochs": Option(100, "Epochs of the run, which the schedules span.", positive_int),
    "max_steps": MAX_STEPS,
    "optimizer": Option("adamw", "adamw suits transformers.", choices=sorted(OPTIMIZERS)),
    "lr": Option(
        0.0005, f"Learning rate after the warm-up, for a batch of {REFERENCE_BATCH}; it scales with the batch."
    ),
    "warmup_epochs": Option(
        None,
        f"Epochs of linear warm-up of the learning rate. (default: a tenth of the run, at most {WARMUP_EPOCHS})",
        number_from_0,
    ),
    "min_lr": Option(1e-6, "Learning rate at the end."),
    "layer_decay": LAYER_DECAY,
    "freeze_backbone_epochs": Option(
        0, "Epochs at the start during which the backbones of student and teacher are frozen."
    ),
    "init_optimizer": Option(
        False, "Also load the optimizer's moments from the checkpoint of --init_from, for all weights that fit."
    ),
    "weight_decay": Option(0.04, "Weight decay in the first step."),
    "weight_decay_end": Option(0.4, "Weight decay in the last step."),
    "clip_grad": Option(3.0, "Largest norm of a parameter's gradient; 0: no limit."),
}
FREEZE_LAST_LAYER: Group = {
    "freeze_last_layer": Option(
        None,
        "Epochs at the start during which the prototypes are frozen; more if the loss does not fall. (default: "
        f"{FROZEN_EPOCHS}; 0 in a run of one epoch)",
        whole_number,
    ),
}
CUDA_GRAPH = Option(
    "auto",
    "Record forward and backward pass as one CUDA graph, so that the GPU does not wait for Python. auto: record on the "
    "GPUs of one machine, if the step allows it. on: also on several machines.",
    choices=("auto", "on", "off"),
)
USE_FP16 = Option(None, "facebookresearch/dino's option: true is --precision fp16, false is fp32.", bool_flag)
KNN_FREQ = Option(0, "Measure the teacher's 20-NN accuracy every N epochs and keep the best checkpoint; 0: never.")


def parser_of(head: Group, loss: Group, optimization: Group, defaults: Mapping[str, Any] | None = None) -> Parser:
    """The options of training, in data-flow order.

    Args:
        head: options of the head beside `HEAD`.
        loss: options of the loss.
        optimization: options beside `OPTIMIZATION`.
        defaults: shared option -> the objective's own default.
    """
    return Parser(
        {
            "images": IMAGES,
            "files of images": COLUMNS | IMAGE_LIMITS,
            "crops": CROPS,
            "channels and normalisation": CHANNELS
            | {name: option._replace(nargs="+") for name, option in NORMALIZATION.items()},
            "encoder: images -> tokens -> slots": ENCODER,
            "head": head | HEAD,
            "loss and teacher": loss | TEACHER,
            "optimisation": OPTIMIZATION | optimization | COMPUTE | {"cuda_graph": CUDA_GRAPH, "use_fp16": USE_FP16},
            "run": RUN | {"knn_freq": KNN_FREQ},
            "device and processes": DEVICE,
        },
        defaults=defaults,
    )


def check_options(args: argparse.Namespace) -> None:
    """Fill in the patch size; refuse options that do not fit each other: epochs, patches, channels, optimizer.

    Raises:
        ValueError: names the option and what would fit.
    """
    if args.arch.startswith(TIMM):
        from dino_sparo.models.backbone import default_patch_size, has_stochastic_depth  # parsing needs no torch

        args.patch_size = args.patch_size or default_patch_size(args.arch)
        if args.drop_path_rate == DROP_PATH_RATE and not has_stochastic_depth(args.arch):
            args.drop_path_rate = 0.0
            logger.warning("--drop_path_rate 0 instead of %s: %s has no stochastic depth", DROP_PATH_RATE, args.arch)
    args.patch_size = args.patch_size or PATCH_SIZE
    for name in ("init_head", "init_optimizer"):
        if (value := getattr(args, name)) and not args.init_from:
            raise UserError(f"--{name} {str(value).lower()} needs --init_from FILE; give it, or leave --{name} out")
    if args.init_optimizer and args.init_head:
        raise UserError(
            f"--init_optimizer true with --init_head {args.init_head}: moments belong to the weights of a checkpoint; "
            "leave one of the two out"
        )
    for name in ("freeze_backbone_epochs", "warmup_epochs"):
        if (value := getattr(args, name) or 0) > args.epochs:
            raise UserError(f"--{name} {value:g} is longer than the run of {args.epochs} epochs; shorten it")
    if args.arch.startswith(TIMM) and (args.pre_norm or args.quick_gelu):
        raise UserError(
            f"--pre_norm {args.pre_norm} --quick_gelu {args.quick_gelu} with --arch {args.arch}: a model of timm has "
            "its own form; leave both out"
        )
    check_normalization(args)
    check_start(args)
    check_whole_patches(args, "global_crops_size", *(["local_crops_size"] if args.local_crops_number else []))


def check_normalization(args: argparse.Namespace) -> None:
    """ValueError unless there is a mean and a deviation for each channel."""
    for name in ("norm_mean", "norm_std"):
        if len(values := getattr(args, name)) != args.in_chans:
            raise UserError(
                f"--{name} has {len(values)} numbers, but --in_chans is {args.in_chans}; measure the images: "
                f"dino-sparo statistics --data_path {args.data_path} --in_chans {args.in_chans} "
                f"--max_value {args.max_value}"
            )


def fill_in_defaults(
    args: argparse.Namespace, defaults: Mapping[str, tuple[int, int | float]] = {}
) -> dict[str, int | float]:
    """Give options whose default depends on the run's length their values: the reference's, or the highest that fits.

    The log names what differs from the reference.

    Args:
        args: parsed options; those that are None are changed in place.
        defaults: name -> the reference's default, and the highest value that fits the run; beside `warmup_epochs`,
            which is at most a tenth of the run: a short run must have time to lower its learning rate.

    Returns:
        The values that were filled in, by name.
    """
    filled_in = dict[str, int | float]()
    for name, (reference, most) in {"warmup_epochs": (WARMUP_EPOCHS, args.epochs / 10), **defaults}.items():
        if getattr(args, name) is None:
            filled_in[name] = min(reference, most)
            setattr(args, name, filled_in[name])
            if filled_in[name] != reference:
                logger.info(
                    "--%s %g: the default of %d does not fit a run of %d epochs",
                    *(name, filled_in[name], reference, args.epochs),
                )
    return filled_in

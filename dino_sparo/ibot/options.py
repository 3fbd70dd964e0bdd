"""The options of iBOT's training in data-flow order; defaults are facebookresearch/dinov2's, as far as it has them."""

import argparse
from typing import Any

from dino_sparo.distillation import options as shared
from dino_sparo.runtime.cli import (
    Group,
    Option,
    Parser,
    bool_flag,
    number_from_0,
    positive_int,
    share,
    share_above_0,
    whole_number,
)
from dino_sparo.runtime.faults import UserError

# DINOv2's rate of 0.004 for a batch of 1,024 is scaled with the root of the batch; this is the rate for 256.
LR, CONTINUED_LR = 0.002, 0.0001
TEMPERATURE_EPOCHS, TEMPERATURE_SHARE = 30, 0.3  # of the teacher's warm-up, at most this share of the run

HEAD: Group = {
    **shared.PROTOTYPES,
    "separate_heads": Option(
        None,
        "Patches have a head of their own. (default: false if an encoding is as wide as a patch token, as with "
        "--readout cls; else true)",
        bool_flag,
    ),
    "patch_out_dim": Option(None, "Number of prototypes of the patches' own head. (default: --out_dim)", positive_int),
}
LOSS: Group = {
    "image_weight": Option(1.0, "Weight of the loss of crops, DINO's."),
    "patch_weight": Option(1.0, "Weight of the loss of masked patches."),
    "centering": Option(
        "centering",
        "Keeps the teacher from one prototype. centering: a center of the logits, as in DINO. sinkhorn_knopp: all "
        "prototypes are used equally often in a batch; more stable for large models.",
        str,
        choices=("centering", "sinkhorn_knopp"),
    ),
    "mask_probability": Option(0.5, "Share of the global crops in which patches are masked.", share_above_0),
    "mask_ratio": Option(
        (0.1, 0.5), "Smallest and largest share of the patches that are masked in such a crop.", share
    ),
    **shared.PROTOTYPE_LOSS,
    "warmup_teacher_temp_epochs": Option(
        None,
        "Epochs of linear warm-up from --warmup_teacher_temp to --teacher_temp. (default: "
        f"{TEMPERATURE_EPOCHS}, at most {TEMPERATURE_SHARE} of the run)",
        whole_number,
    ),
    "gram_teacher": Option(
        None,
        "Keep the patches' similarities close to those of the encoder in this file, such as an earlier checkpoint or "
        "the released weights. For a late phase of long trainings, in which maps of patches become noisy.",
    ),
    "gram_weight": Option(2.0, "Weight of the loss of --gram_teacher."),
    "gram_scale": Option(1, "2: the teacher of --gram_teacher sees crops of twice the side.", choices=(1, 2)),
}
OPTIMIZATION: Group = {
    **shared.FREEZE_LAST_LAYER,
    "lr": Option(
        None,
        f"Learning rate after the warm-up, for a batch of {shared.REFERENCE_BATCH}; it scales with the root of the "
        f"batch. (default: {LR}; {CONTINUED_LR} with --init_from or --pretrained)",
        number_from_0,
    ),
    "freeze_backbone_epochs": Option(
        None,
        "Epochs at the start during which the backbones of student and teacher are frozen. (default: 0; with "
        "--init_from or --pretrained 1, so that new heads learn first)",
        whole_number,
    ),
}
DEFAULTS: dict[str, Any] = {
    "norm_last_layer": False,
    "koleo_weight": 0.1,
    "teacher_temp": 0.07,
    "momentum_teacher": 0.992,
    "layer_decay": 0.9,
    "global_crops_scale": (0.32, 1.0),
    "local_crops_scale": (0.05, 0.32),
}


def get_args_parser() -> Parser:
    """The options of training, in data-flow order."""
    return shared.parser_of(HEAD, LOSS, OPTIMIZATION, DEFAULTS)


def check_options(args: argparse.Namespace) -> None:
    """`distillation.options.check_options`; refuse weights, masks and heads that leave nothing to learn.

    Raises:
        UserError: names the option and what would fit.
    """
    shared.check_options(args)
    if not args.image_weight and not args.patch_weight:
        raise UserError("--image_weight 0 --patch_weight 0 leave no loss; give one of the two, usually 1")
    low, high = args.mask_ratio
    if not 0 <= low <= high or not high:
        raise UserError(f"--mask_ratio {low:g} {high:g} is not a range; give two shares, the smaller one first")
    crops, side = 2 * args.batch_size_per_gpu * args.grad_accum_steps, args.global_crops_size // args.patch_size
    if int(crops * args.mask_probability) < 1 or int(high * side**2) < 1:
        raise UserError(
            f"--mask_probability {args.mask_probability:g} --mask_ratio {low:g} {high:g} mask no patch in the {crops} "
            f"global crops of a step, of {side}x{side} patches; raise one of them, or --batch_size_per_gpu"
        )
    if args.gram_scale > 1 and not args.gram_teacher:
        raise UserError(f"--gram_scale {args.gram_scale} needs --gram_teacher FILE; give it, or leave --gram_scale out")
    if args.patch_out_dim and args.separate_heads is False and args.patch_out_dim != args.out_dim:
        raise UserError(
            f"--patch_out_dim {args.patch_out_dim} with --separate_heads false: a shared head has the {args.out_dim} "
            "prototypes of --out_dim; leave one of the two out"
        )


def fill_in_defaults(args: argparse.Namespace) -> dict[str, int | float]:
    """`distillation.options.fill_in_defaults`; a run that continues from weights begins carefully."""
    continues = bool(args.init_from or args.pretrained)
    defaults = {"lr": CONTINUED_LR if continues else LR, "freeze_backbone_epochs": int(continues and args.epochs > 1)}
    filled_in = {name: value for name, value in defaults.items() if getattr(args, name) is None}
    vars(args).update(filled_in)
    lengths = {
        "freeze_last_layer": (shared.FROZEN_EPOCHS, args.epochs - 1),
        "warmup_teacher_temp_epochs": (TEMPERATURE_EPOCHS, int(TEMPERATURE_SHARE * args.epochs)),
    }
    return filled_in | shared.fill_in_defaults(args, lengths)

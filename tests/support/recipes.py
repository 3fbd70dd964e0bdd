"""A tiny run of every objective, for tests of what the trainer does with all of them. A new objective is one entry."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

Options = Mapping[str, object]

COMMON: Options = {
    **{"data_path": "scenes:36:32", "arch": "vit_micro", "patch_size": 8, "epochs": 4, "saveckp_freq": 0},
    **{"num_workers": 0, "device": "cpu", "precision": "fp32"},
    "saveckp_minutes": 1e-6,  # whenever the ranks agree
}
SMALL: Options = {"data_path": "scenes:26:32", "epochs": 3, "saveckp_minutes": 30.0}
SPARO: Options = {"sparo_slots": 3, "sparo_slot_dim": 5, "sparo_key_dim": 7}
DISTILLATION: Options = {
    **{**COMMON, **SPARO, "global_crops_size": 32, "local_crops_size": 16, "local_crops_number": 1},
    **{"head_hidden_dim": 32, "drop_path_rate": 0.1, "batch_size_per_gpu": 1, "warmup_epochs": 1},
}
SMALL_DISTILLATION: Options = {
    **{**SMALL, "global_crops_size": 16, "local_crops_size": 8, "local_crops_number": 2},
    **{"head_hidden_dim": 37, "batch_size_per_gpu": 6},
}
CAPTIONS: Options = {
    **{**COMMON, "img_size": 32, "batch_size": 2, "warmup_steps": 18},
    **{"text_width": 24, "text_heads": 2, "text_layers": 2, "context_length": 20},
}
# Batches of any size, and images in folders without a split to validate on.
UNMIXED: Options = {"mixup": 0, "cutmix": 0, "val_freq": 0, "warmup_epochs": 1}
SMALL_CAPTIONS: Options = {**SMALL, "img_size": 16, "batch_size": 6, "warmup_steps": 2}


class Recipe(NamedTuple):
    """The runs of an objective, and what is its own in them.

    Attributes:
        options: a run of two processes, 18 steps per epoch, with a checkpoint whenever the ranks agree.
        small: what differs in the run of one process: 3 epochs of 4 steps, each of 6 of the 26 images or pairs.
        state: entries of a checkpoint that are the same after equal runs.
        networks: those of them whose weights follow from the batch alone, whatever parts it is computed in.
        logged: numbers in every line of log.txt.
        other_models: options that make another model, and how resuming refuses them.
        variants: options that train too.
        noun: an item of the data.
        draws_by_rank: each rank draws random numbers of its own, so that several processes do not train as one does.
    """

    options: Options
    small: Options
    state: Sequence[str]
    networks: Sequence[str]
    logged: Sequence[str]
    other_models: Sequence[tuple[Options, str]]
    variants: Sequence[Options]
    noun: str = "image"
    draws_by_rank: bool = False

    def batch(self, size: int, ranks: int = 1, parts: int = 1) -> dict[str, object]:
        """The options of a batch that is shared by processes and computed in parts."""
        accumulation = {"grad_accum_steps": parts} if parts > 1 else {}
        if "batch_size" in self.options:
            return {"batch_size": size, **accumulation}
        return {"batch_size_per_gpu": size // (ranks * parts), **accumulation}


READOUTS: Sequence[Options] = ({"readout": "cls"}, {"readout": "gap"}, {"precision": "bf16"})
OTHER_SLOTS: tuple[Options, str] = ({"sparo_slots": 4}, "num_slots 3 in the checkpoint, 4 asked for")

# Command -> its recipe.
RECIPES: dict[str, Recipe] = {
    "train": Recipe(
        {**DISTILLATION, "out_dim": 32},
        {**SMALL_DISTILLATION, "out_dim": 33},
        ("step", "epoch", "student", "teacher", "optimizer", "dino_loss"),
        ("student", "teacher", "dino_loss"),
        ("train_teacher_entropy", "train_kl", "train_wd", "feature_rank"),
        (
            OTHER_SLOTS,
            ({"optimizer": "sgd"}, "--optimizer was adamw and is now sgd"),
            ({"out_dim": 32}, "--out_dim was 33 and is now 32"),
            ({"norm_last_layer": "false"}, "--norm_last_layer was True and is now False"),
        ),
        (*READOUTS, {"optimizer": "sgd"}, {"optimizer": "lars"}, {"koleo_weight": 0.1}),
    ),
    "train-simdino": Recipe(
        {**DISTILLATION, "z_dim": 11},
        SMALL_DISTILLATION,
        ("step", "epoch", "student", "teacher", "optimizer", "simdino_loss"),
        (),  # each part has a coding rate of its own
        ("train_compression", "train_expansion", "train_wd", "feature_rank"),
        (OTHER_SLOTS, ({"z_dim": 12}, "--z_dim was 11 and is now 12")),
        (),
    ),
    "train-ibot": Recipe(
        {**DISTILLATION, "out_dim": 32, "koleo_weight": 0},
        {**SMALL_DISTILLATION, "patch_size": 4, "out_dim": 33, "freeze_last_layer": 0},
        ("step", "epoch", "student", "teacher", "optimizer", "ibot_loss"),
        ("student", "teacher", "ibot_loss"),
        ("train_image_loss", "train_patch_loss", "train_patch_teacher_entropy", "patch_information"),
        (
            OTHER_SLOTS,
            ({"out_dim": 32}, "--out_dim was 33 and is now 32"),
            ({"patch_out_dim": 9}, "--patch_out_dim was None and is now 9"),
        ),
        (
            {"readout": "cls", "centering": "sinkhorn_knopp"},
            {"readout": "gap", "separate_heads": "true", "patch_out_dim": 9, "koleo_weight": 0.1},
            {"precision": "bf16", "patch_weight": 0.5},
        ),
        draws_by_rank=True,  # the masks
    ),
    "finetune": Recipe(
        {**COMMON, "untrained": "", "readout": "cls", "img_size": 32, "batch_size_per_gpu": 1, **UNMIXED},
        {**SMALL, "img_size": 16, "batch_size_per_gpu": 6},
        ("step", "epoch", "student", "teacher", "optimizer", "finetune"),
        (),  # rectangles are erased in the order of each part
        ("train_loss",),
        (
            ({"readout": "gap"}, "readout 'cls' in the checkpoint, 'gap' asked for"),
            ({"layer_decay": 0.5}, "--layer_decay was 0.75 and is now 0.5"),
        ),
        (
            {"mixup": 0.8, "cutmix": 1, "optimizer": "sgd"},
            {"arch": "timm/resnet18", "readout": "gap", "patch_size": 32, "img_size": 32},
        ),
        draws_by_rank=True,
    ),
    "train-clip": Recipe(
        {**CAPTIONS, **SPARO, "embed_dim": 15},
        SMALL_CAPTIONS,
        ("step", "epoch", "model", "optimizer"),
        ("model",),
        ("train_batch_accuracy", "train_logit_scale", "train_truncated_captions", "loss_over_ln_batch"),
        (
            ({"sparo_slots": 4}, "image.num_slots 3 in the checkpoint, 4 asked for"),
            ({"readout": "gap"}, "readout 'sparo' in the checkpoint, 'gap' asked for"),
            ({"beta2": 0.9}, "--beta2 was 0.98 and is now 0.9"),
        ),
        READOUTS,
        "pair",
    ),
    "train-oc-clip": Recipe(
        {**CAPTIONS, "bind_dim": 12, "bind_heads": 2, "bind_layers": 1, "rel_dim": 7},
        SMALL_CAPTIONS,
        ("step", "epoch", "model", "optimizer"),
        ("model",),
        ("train_itc_loss", "train_rel_loss", "train_batch_accuracy", "train_logit_scale", "train_ent_rel_ratio"),
        (
            ({"bind_dim": 14}, "binding.dim 12 in the checkpoint, 14 asked for"),
            ({"num_default": 1}, "binding.num_default 4 in the checkpoint, 1 asked for"),
            ({"relation": "mlp"}, "binding.relation 'additive' in the checkpoint, 'mlp' asked for"),
            ({"logit_scale": "none"}, "binding.logit_scale True in the checkpoint, False asked for"),
            ({"text_layers": 1}, "text.layers 2 in the checkpoint, 1 asked for"),
            ({"img_size": 24}, "image.img_size 16 in the checkpoint, 24 asked for"),
        ),
        (),
        "pair",
    ),
}

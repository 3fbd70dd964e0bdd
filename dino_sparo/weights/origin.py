"""A checkpoint -> the origin of its weights: objective, data, recipe, progress, and the scores in the same folder.

Exports, model cards and `dino-sparo info` state it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dino_sparo.runtime.files import file_sha256, versions
from dino_sparo.weights.results import ENCODER_RESULTS, data_name, scores_beside

# Entry of a checkpoint -> its objective, and the command that trains it.
OBJECTIVES = {
    "oc_clip": ("OC-CLIP", "train-oc-clip"),
    "clip": ("CLIP", "train-clip"),
    "dino_loss": ("DINO", "train"),
    "simdino_loss": ("SimDINO", "train-simdino"),
    "ibot_loss": ("iBOT", "train-ibot"),
    "finetune": ("fine-tuning", "finetune"),
}
# Options that an export records. The others describe paths, machines and the architecture, which the export has.
RECIPE = (
    *("epochs", "max_steps", "seed", "init_clip", "freeze", "drop_path_rate", "max_value", "exif"),
    *("global_crops_scale", "local_crops_number", "local_crops_size", "local_crops_scale", "crop_scale"),
    *("out_dim", "norm_last_layer", "teacher_temp", "warmup_teacher_temp", "momentum_teacher", "freeze_last_layer"),
    *("image_weight", "patch_weight", "centering", "mask_probability", "mask_ratio", "patch_out_dim"),
    *("gram_teacher", "gram_weight", "gram_scale"),
    *("koleo_weight", "z_dim", "coeff", "eps", "expa_type"),
    *("bind_layers", "competition", "relation", "rel_loss_weight", "symmetric"),
    *("optimizer", "lr", "min_lr", "lr_image", "lr_text", "warmup_epochs", "warmup_steps"),
    *("weight_decay", "weight_decay_end", "beta1", "beta2", "clip_grad", "precision"),
)


def training_facts(origin: Mapping[str, Any]) -> dict[str, Any]:
    """Facts about the training of weights, from their `origin_of`."""
    names = {"objective": "objective", "epochs": "epoch", "steps": "step", "images per step": "global_batch"}
    names |= {"data": "data", "images": "num_images", "options": "recipe", "scores": "scores", "warning": "warning"}
    return {fact: origin.get(name) for fact, name in names.items()}


def origin_of(
    content: Mapping[str, Any], checkpoint: Path, network: str | None = None, is_encoder: bool = False
) -> dict[str, Any]:
    """Origin of the weights in a checkpoint, or in an export of it: plain values for a JSON file.

    Scores are those of `network`, teacher or student; None: of both. With `is_encoder`, scores of a whole CLIP are left
    out.
    """
    sha256 = file_sha256(checkpoint)
    args = content.get("args", {})
    data = args.get("data_path") or args.get("shards") or []
    names = [data_name(path) for path in ([data] if isinstance(data, str) else data)]
    origin = {
        "objective": next((name for key, (name, _) in OBJECTIVES.items() if key in content), None),
        "data": ", ".join(filter(None, names)) or None,
        "num_images": content.get("num_images", content.get("num_pairs")),
        **{name: content.get(name) for name in ("epoch", "step", "global_batch", "warning")},
        "recipe": {name: args[name] for name in RECIPE if args.get(name) is not None} or None,
    }
    saved = content.get("scores", {})
    if is_encoder:
        saved = {name: words for name, words in saved.items() if name.startswith(ENCODER_RESULTS)}
    return {
        **{name: content.get(name) if value is None else value for name, value in origin.items()},
        "checkpoint": checkpoint.name,
        "sha256": sha256,
        "scores": {**saved, **scores_beside(checkpoint, sha256, network, is_encoder)},
        "versions": versions(),
    }

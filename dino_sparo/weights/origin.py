"""A checkpoint -> the origin of its weights: objective, data, recipe, progress, and the scores beside it.

Exports, model cards and `dino-sparo info` state it.
"""

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dino_sparo.runtime.files import file_sha256, parse_json, versions

# Entry of a checkpoint -> its objective.
OBJECTIVES = {"oc_clip": "OC-CLIP", "clip": "CLIP", "dino_loss": "DINO", "simdino_loss": "SimDINO", "ibot_loss": "iBOT"}
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
# Files of scores: EVALUATION_WEIGHTS_DATA.json; older versions wrote EVALUATION.json.
ENCODER_RESULTS = ("knn", "linear", "slot_score")  # the others are of a whole CLIP
RESULTS = re.compile(rf"({'|'.join(ENCODER_RESULTS)}|zero_shot|retrieval|probe|compositional)(_.*)?\.json")
PARTS = ("train", "val", "test", "images", "train2017")  # folders whose name alone does not tell the data


def origin_of(content: Mapping[str, Any], checkpoint: Path, network: str | None = None) -> dict[str, Any]:
    """Origin of the weights in a checkpoint, or in an export of it: plain values for a JSON file.

    Scores are those of `network`, teacher or student; None: of both.
    """
    sha256 = file_sha256(checkpoint)
    args = content.get("args", {})
    data = args.get("data_path") or args.get("shards") or []
    names = [data_name(path) for path in ([data] if isinstance(data, str) else data)]
    origin = {
        "objective": next((name for key, name in OBJECTIVES.items() if key in content), None),
        "data": ", ".join(filter(None, names)) or None,
        "num_images": content.get("num_images", content.get("num_pairs")),
        "epoch": content.get("epoch"),
        "step": content.get("step"),
        "global_batch": content.get("global_batch"),
        "warning": content.get("warning"),
        "recipe": {name: args[name] for name in RECIPE if args.get(name) is not None} or None,
    }
    return {
        **{name: content.get(name) if value is None else value for name, value in origin.items()},
        "checkpoint": checkpoint.name,
        "sha256": sha256,
        "scores": {**content.get("scores", {}), **scores_beside(checkpoint, sha256, network)},
        "versions": versions(),
    }


def data_name(path: str) -> str:
    """The name of data without the folders above it: `cifar10`, `scenes:10000:48`, `imagenet/train`; "" for `.`."""
    prefix, _, folder = path.partition(":")
    if "/" in folder and "/" not in prefix:
        return prefix
    parts = [part for part in Path(path).parts if part not in ("/", "..")]
    return "/".join(parts[-2:] if parts[-1:] and parts[-1] in PARTS else parts[-1:])


def scores_beside(checkpoint: Path, sha256: str, network: str | None = None) -> dict[str, str]:
    """The scores of these weights in the result files beside a checkpoint, in words, by the stem of the file.

    Results of other weights, of another network of the checkpoint and of some slots are left out.
    """
    scores = {}
    for path in sorted(path for path in checkpoint.parent.glob("*.json") if RESULTS.fullmatch(path.name)):
        result: Any = {}
        with contextlib.suppress(ValueError, OSError):
            result = parse_json(path.read_bytes())
        subject = subject_of(result) if isinstance(result, dict) else {}
        is_other = network is not None and subject.get("checkpoint_key", network) != network
        if subject.get("sha256") != sha256 or is_other or subject.get("slots") or result.get("slots"):
            continue
        data, side = data_name(evaluated_data(result) or ""), result.get("view", {}).get("crop")
        if words := in_percent(scores_of(result)):
            scores[path.stem] = words + f" on {data}" * bool(data) + f" at image size {side}" * bool(side)
    return scores


def subject_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """The record of the encoder or model in a result; empty if there is none."""
    subject = result.get("encoder", result.get("model"))
    return subject if isinstance(subject, dict) else {}


def evaluated_data(result: Mapping[str, Any]) -> str | None:
    """The data of a result."""
    return result.get("images", {}).get("data_path") or result.get("data", {}).get("name")


def scores_of(result: Mapping[str, Any]) -> dict[str, float]:
    """The main scores in the content of a result file; empty if this version knows none of them."""
    if "measures" in result:  # of slots score, from 0 to 1
        return {name: 100 * value["mean"] for name, value in result["measures"]["model"].items()}
    if "text_recall" in result:
        return {f"{kind} @1": result[f"{kind}_recall"]["@1"]["any"] for kind in ("text", "image")}
    if "means" in result:
        return {name: value["accuracy"] for name, value in result["means"].items()}
    rows = result.get("results")
    if isinstance(rows, list) and any("k" in row for row in rows):
        return {f"{row['k']}-NN": row["top1"] for row in rows}
    names = ("top1", "top5", "accuracy", "mean_per_class_recall", "top1_all", "top1_selected")
    values = result.get("best", result)
    return {name: values[name] for name in names if isinstance(values.get(name), float)}


def in_percent(scores: Mapping[str, float]) -> str:
    """Scores in words: `20-NN 61.25 %, 10-NN 60.50 %`."""
    return ", ".join(f"{name} {value:.2f} %" for name, value in scores.items() if isinstance(value, float))

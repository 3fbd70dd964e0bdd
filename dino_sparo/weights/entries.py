"""The entries of a checkpoint: how its model was built, and the weights of one network.

A checkpoint is a dict of plain values and tensors, read without running any code in it:

    student, teacher       weights of DINO and SimDINO: `backbone.*`, `readout.*`, `head.*`
    dino_loss              DINO's center
    ibot_loss              iBOT's centers, of crops and of patches
    gram_teacher           iBOT: the fixed backbone of Gram anchoring, if there is one
    simdino_loss           empty: SimDINO's loss has no state
    finetune               fine-tuning: names of the classes, and the encoder that the run started from
    encoder                how their encoder was built (`EncoderConfig`), and the mean and std of its images
    model                  CLIP and OC-CLIP instead: the weights of the whole model
    clip, oc_clip          how CLIP, or OC-CLIP, was built, and the mean and std of its images
    optimizer              its state
    fp16_scaler            scale of the gradients, with fp16 only
    epoch, step            finished epochs, finished steps
    unlogged_epoch         means of the last finished epoch until it is evaluated and logged, then None
    warning                that the last evaluated epoch was collapsed, or None
    data_hashes            fingerprint of the data
    num_corrupt            unreadable images or pairs in the running epoch
    num_truncated          CLIP and OC-CLIP: truncated captions in the running epoch
    num_missing_graphs     OC-CLIP: captions without a scene graph in the running epoch
    num_whole_captions     OC-CLIP: captions whose graph is one entity, the caption itself, in the running epoch
    num_dropped_nodes      OC-CLIP: entities beyond --max_nodes in the running epoch
    num_dropped_relations  OC-CLIP: relations beyond --max_relations in the running epoch
    best_knn               DINO and SimDINO: the highest 20-NN accuracy so far
    best_top1              fine-tuning: the highest validation accuracy so far
    best_zero_shot         CLIP and OC-CLIP: the highest zero-shot accuracy so far
    ranks                  per process: random number generators, and sums of the running epoch's means
    num_images, num_pairs  size of the data: DINO and SimDINO; CLIP and OC-CLIP
    global_batch           images or pairs per step over all processes
    steps_per_epoch        number of steps per epoch
    args, versions         options; versions of the packages

Names are the reference's where it has one: its scripts read our `--readout cls` checkpoints.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from dino_sparo.data.defaults import IMAGENET_MEAN, IMAGENET_STD, MAX_VALUE, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from dino_sparo.models.architectures import HEADS, size_of
from dino_sparo.models.encoder import EncoderConfig
from dino_sparo.models.readouts import readout_kind
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import differences
from dino_sparo.weights.file import CheckpointError
from dino_sparo.weights.foreign import flat_weights, from_open_clip_names, infer_config, is_open_clip

logger = logging.getLogger(__name__)

IMAGE_TEXT_KEYS = ("clip", "oc_clip")  # entries that describe an image-text model
NETWORKS = ("teacher", "student")
PUBLISHED = "published"  # normalisation and activation from a file next to foreign weights


def encoder_description(
    config: EncoderConfig, mean: Iterable[float] = IMAGENET_MEAN, std: Iterable[float] = IMAGENET_STD
) -> dict[str, Any]:
    """A checkpoint's entry `encoder`."""
    return {**asdict(config), "mean": list(mean), "std": list(std)}


def describe_encoder(
    checkpoint: Mapping[str, Any], weights: Mapping[str, Tensor], path: str, arch: str | None, patch_size: int | None
) -> dict[str, Any]:
    """Fields of `EncoderConfig`, mean and std: from the checkpoint's entry, else inferred from the weights."""
    pair = image_text_entry(checkpoint)
    entry = encoder_entry(checkpoint) if pair is None else _image_tower(pair)
    if entry is None:
        config = replace(infer_config(weights, arch, patch_size, path), quick_gelu=bool(activation_of(checkpoint)))
        return encoder_description(config, *normalization_of(checkpoint))
    overrides = {key: value for key, value in (("arch", arch), ("patch_size", patch_size)) if value is not None}
    return {**entry, **overrides}


def encoder_entry(checkpoint: Mapping[str, Any], path: str = "the checkpoint") -> dict[str, Any] | None:
    """The checkpoint's entry `encoder`, validated; None if it has none. `path` is its file, for messages."""
    entry = checkpoint.get("encoder")
    if entry is None:
        return None
    try:
        if not isinstance(entry, dict):
            raise UserError(f"a {type(entry).__name__}, not a dict")
        EncoderConfig.from_dict(entry)
        for name in ("mean", "std"):
            values = entry.get(name, IMAGENET_MEAN)
            if not isinstance(values, (list, tuple)) or not all(isinstance(value, (int, float)) for value in values):
                raise UserError(f"{name} is {values!r}, not one number per channel")
    except ValueError as error:
        raise CheckpointError(
            f"{path} does not say under `encoder` how its encoder was built ({error}); save it again with the "
            f"version that wrote it, or give a file of weights alone"
        ) from error
    return entry


def say_heads(arch: str, path: str) -> None:
    """Log the number of attention heads that is assumed, because weights do not say it."""
    if size := size_of(arch):
        logger.info(
            "%s does not say its number of attention heads: %d are assumed; --arch %s%sN takes N",
            *(path, size.num_heads, arch.partition(HEADS)[0], HEADS),
        )


def normalization_of(checkpoint: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std of the images a checkpoint was trained on; ImageNet's if it does not say."""
    entry = image_text_entry(checkpoint) or encoder_entry(checkpoint) or {}
    is_foreign_clip = not entry and has_clips_images(checkpoint)
    mean, std = (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD) if is_foreign_clip else (IMAGENET_MEAN, IMAGENET_STD)
    entry = entry or checkpoint.get(PUBLISHED, {})
    mean, std = tuple(entry.get("mean", mean)), tuple(entry.get("std", std))
    are_numbers = all(isinstance(value, (int, float)) and math.isfinite(value) for value in (*mean, *std))
    if not are_numbers or min(std) <= 0:
        raise CheckpointError(
            f"the checkpoint says that its images have mean {mean} and std {std}, which are not finite numbers with a "
            "std above 0; save it again with the version that wrote it"
        )
    return mean, std


def max_value_of(checkpoint: Mapping[str, Any]) -> int:
    """Value of 16-bit images that was white in training; the highest if the checkpoint does not say."""
    options = checkpoint.get("args") or checkpoint.get("recipe") or {}
    return options.get("max_value", MAX_VALUE) if isinstance(options, dict) else MAX_VALUE


def has_clips_images(checkpoint: Mapping[str, Any]) -> bool:
    """Whether foreign weights are of a CLIP (OpenCLIP's, or timm's image tower), with OpenAI's normalisation."""
    weights = top_weights(checkpoint)
    return is_open_clip(weights) or "norm_pre.weight" in weights


def activation_of(checkpoint: Mapping[str, Any]) -> bool | None:
    """Whether a model was trained with `quick_gelu`; None if neither the checkpoint nor a file next to it says so."""
    entries = (image_text_entry(checkpoint), checkpoint.get("encoder"), checkpoint.get(PUBLISHED))
    entry = next((entry for entry in entries if entry is not None), None)
    return None if entry is None else bool({**entry.get("image", {}), **entry}.get("quick_gelu", False))


def network_weights(checkpoint: Mapping[str, Any], which: str, path: str) -> dict[str, Tensor]:
    """One network's weights, the head's included, under our names.

    A file of raw weights is one network; they may lie under `model` or `state_dict`. The network of a CLIP is its image
    tower without projection, whatever `which` says. CheckpointError if the checkpoint has networks, but not `which`.
    """
    clip = clip_weights(checkpoint, path)
    if clip is not None:
        return {name.removeprefix("image."): value for name, value in clip.items() if name.startswith("image.")}
    if isinstance(checkpoint.get(which), Mapping):
        return flat_weights(checkpoint[which], which)
    networks = [key for key in NETWORKS if isinstance(checkpoint.get(key), Mapping)]
    exported = checkpoint.get("checkpoint_key")  # an export has one network, and says which it was
    is_other = which == "student" and exported == "teacher"  # not the reverse: teacher is the default
    if networks or which not in NETWORKS or is_other:
        raise CheckpointError(f"{path} has no {which!r}; it has {', '.join(networks) or exported or 'raw weights'}")
    return flat_weights(top_weights(checkpoint), which)


def network_name(checkpoint: Mapping[str, Any], which: str) -> str | None:
    """Name of the network that `network_weights` returns; None for a CLIP and for raw weights."""
    return which if which in checkpoint else checkpoint.get("checkpoint_key")


def image_text_entry(checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
    """The entry under one of `IMAGE_TEXT_KEYS`, which describes an image-text model; None if there is none."""
    return next((checkpoint[key] for key in IMAGE_TEXT_KEYS if key in checkpoint), None)


def image_text_kind(checkpoint: Mapping[str, Any]) -> str | None:
    """The image-text model of a checkpoint, a key of `IMAGE_TEXT_KEYS`; "clip" also for OpenCLIP's; None: none."""
    kind = next((key for key in IMAGE_TEXT_KEYS if key in checkpoint), None)
    return "clip" if kind is None and is_open_clip(top_weights(checkpoint)) else kind


def clip_weights(checkpoint: Mapping[str, Any], path: str) -> dict[str, Tensor] | None:
    """All weights of a CLIP, of any program, under our names `image.*`, `text.*`, ...; None for other checkpoints."""
    weights = top_weights(checkpoint)
    if image_text_entry(checkpoint) is not None:
        return weights
    return from_open_clip_names(weights, path) if is_open_clip(weights) else None


def top_weights(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """A single network's weights: under `model` (our CLIP), under `state_dict` (OpenCLIP's training), or on top."""
    parts = [part for part in (checkpoint.get("model"), checkpoint.get("state_dict")) if isinstance(part, Mapping)]
    weights = parts[0] if parts else checkpoint
    return {name.removeprefix("module."): value for name, value in weights.items() if isinstance(value, Tensor)}


def _image_tower(description: Mapping[str, Any]) -> dict[str, Any]:
    """Entry `encoder` of the image tower, from the entry of an image-text model."""
    image = dict(description["image"])
    # Early checkpoints of CLIP have these entries for the whole model only.
    image |= {name: description[name] for name in ("replace_block", "quick_gelu") if name in description}
    needs_codes = readout_kind(image["readout"]).needs_codes
    image["num_codes"] = description["num_codes"] if needs_codes else 0
    image["code_dim"] = description["embed_dim"] if needs_codes else 0
    return {**image, "mean": description["mean"], "std": description["std"]}


def check_same_model(checkpoint: Mapping[str, Any], config: EncoderConfig, path: str) -> None:
    """Refuse to resume a checkpoint of another encoder; the error lists the fields that differ."""
    entry = encoder_entry(checkpoint, path)
    if entry is None:
        raise CheckpointError(
            f"{path} does not say how its encoder was built, so it cannot be resumed; choose another --output_dir"
        )
    check_same_description(asdict(EncoderConfig.from_dict(entry)), asdict(config), path)


def check_same_description(saved: Mapping[str, Any], asked: Mapping[str, Any], path: str) -> None:
    """Refuse to resume a checkpoint whose model differs from the options' model, both as plain values."""
    if differing := differences(_flat(saved), _flat(asked), "in the checkpoint", "asked for"):
        raise CheckpointError(
            f"{path} holds another model: {'; '.join(differing)}. Give the same options, or another --output_dir"
        )


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values under dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= {f"{name}.{inner}": item for inner, item in value.items()} if isinstance(value, dict) else {name: value}
    return flat

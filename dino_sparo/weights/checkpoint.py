"""Files -> weights: verified reading; encoders rebuilt from what the checkpoint says.

A checkpoint is a dict of plain values and tensors, read without running any code in it:

    student, teacher       weights of DINO and SimDINO: `backbone.*`, `readout.*`, `head.*`
    dino_loss              DINO's center
    simdino_loss           empty: SimDINO's loss has no state
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
    best_zero_shot         CLIP and OC-CLIP: the highest zero-shot accuracy so far
    ranks                  per process: random number generators, and sums of the running epoch's means
    num_images, num_pairs  size of the data: DINO and SimDINO; CLIP and OC-CLIP
    global_batch           images or pairs per step over all processes
    steps_per_epoch        number of steps per epoch
    args, versions         options; versions of the packages

`file.py` reads these files, `folder.py` writes them, `foreign.py` knows the weights of others.

Names are the reference's where it has one: its scripts read our `--readout cls` checkpoints, and `load_encoder` reads
its full checkpoints and raw ViT weights. Exports of `export.py` are read wherever a checkpoint is. Where an encoder is
needed, a CLIP (ours, OpenCLIP's or sparo-clip's) gives its image tower.
"""

import contextlib
import hashlib
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from dino_sparo.data.views import EvalTransform
from dino_sparo.models.encoder import Encoder, EncoderConfig, encoder_from_config
from dino_sparo.models.readouts import readout_kind
from dino_sparo.models.timm_backbone import TimmBackbone, plan_of, pretrained_weights
from dino_sparo.runtime.choices import (
    HEADS,
    IMAGENET_MEAN,
    IMAGENET_STD,
    MAX_VALUE,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
    TIMM,
    size_of,
)
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import differences, file_sha256, parse_object
from dino_sparo.weights.file import CheckpointError, load_strictly, read_safetensors, read_torch_file
from dino_sparo.weights.foreign import (
    flat_weights,
    from_open_clip_names,
    infer_config,
    is_open_clip,
    timm_remedy,
    timm_weights,
    without_layer_scale,
)

logger = logging.getLogger(__name__)

IMAGE_TEXT_KEYS = ("clip", "oc_clip")  # entries that describe an image-text model
NETWORKS = ("teacher", "student")
PUBLISHED = "published"  # normalisation and activation from a file beside foreign weights
EXPORTED_WEIGHTS, MODEL_TYPE = "model.safetensors", "sparo_encoder"  # of a folder for Hugging Face
# Of the Hugging Face hub; a missing file of weights, such as runs/checkpoint.pth, is not looked up there.
REPOSITORY = re.compile(r"[\w.-]+/(?!.*\.(?:pth|pt|bin|safetensors)$)[\w.-]+")
DEMO = Path(__file__).parent / "demo" / "encoder.safetensors"  # the encoder that `dino-sparo demo` trains, in fp16


def load_checkpoint(path: str | Path, verify: bool = True, mmap: bool = False) -> dict[str, Any]:
    """Read a checkpoint to the CPU, verify its checksums, run no code from it.

    .pth files and our exports have checksums. torch's files before 2020 and safetensors of other programs have none.

    Args:
        path: a .pth file, or a .safetensors file. The weights of the latter are at the top of the dict, as raw weights
            are, beside the entries of the .json file of the same name (`encoder`, `epoch`, ...). timm/NAME: timm's own
            weights of that model, with an entry `encoder`.
        verify: False if `verify_checkpoint` has just read the file.
        mmap: leave tensors in the file until they are used.

    Raises:
        CheckpointError: the file is missing, damaged, compressed or no checkpoint, or its pickle asks for code to run.
    """
    if is_timm_model(path):
        plan, weights = plan_of(str(path).removeprefix(TIMM)), timm_model_weights(path)
        return {**weights, "encoder": encoder_description(infer_config({}, str(path)), plan.mean, plan.std)}
    path = weights_file(path)
    if not path.is_file():
        inside = path / "checkpoint.pth"
        example = inside if inside.is_file() else "a .pth file"
        raise CheckpointError(
            f"no checkpoint at {path}; give the path of {example}, or demo for the encoder in this package"
        )
    if path.suffix == ".safetensors":
        return _with_published(read_safetensors(path), path)
    checkpoint = read_torch_file(path, verify, mmap)
    if not isinstance(checkpoint, dict):
        kind = type(checkpoint).__name__
        raise CheckpointError(f"{path} holds a {kind}, not a dict of weights; save a model's state_dict()")
    return _with_published(checkpoint, path)


def is_timm_model(path: str | Path) -> bool:
    """Whether a path is timm/NAME, which stands for a model of timm with timm's weights."""
    return str(path).startswith(TIMM) and bool(REPOSITORY.fullmatch(str(path))) and not Path(path).exists()


def timm_model_weights(path: str | Path) -> dict[str, Tensor]:
    """Timm's own weights of timm/NAME; ValueError if they can neither be found nor downloaded."""
    return pretrained_weights(str(path).removeprefix(TIMM), f"--pretrained_weights FILE --arch {path}")


def weights_file(path: str | Path) -> Path:
    """The file of weights: the path itself, or the weights of a folder, of a repository of the hub, or of "demo".

    Raises:
        CheckpointError: `path` looks like a repository's name, USER/NAME, but the hub does not have it.
    """
    folder = Path(os.path.expanduser(path))
    # Where there is a folder USER, its owner mistyped the name of a file.
    if not folder.exists() and REPOSITORY.fullmatch(str(path)) and not folder.parent.is_dir():
        from huggingface_hub import snapshot_download  # takes half a second

        try:
            folder = Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors"]))
        except (OSError, ValueError) as error:  # without network, without permission, or no such repository
            reason = str(error).splitlines()[0]
            raise CheckpointError(
                f"no checkpoint at {path}, and no repository of that name on the Hugging Face hub: {reason}"
            ) from error
    if (folder / EXPORTED_WEIGHTS).is_file():
        return folder / EXPORTED_WEIGHTS
    return DEMO if str(path) == "demo" and not folder.is_file() else folder


def weights_sha256(path: str | Path) -> str:
    """SHA-256 of the file of weights that a path, "demo" or a repository's name stands for; of timm/NAME's weights."""
    if is_timm_model(path):
        weights = timm_model_weights(path).items()
        content = save({name: value.clone(memory_format=torch.contiguous_format) for name, value in weights})
        return hashlib.sha256(content).hexdigest()
    return file_sha256(weights_file(path))


def _with_published(checkpoint: dict[str, Any], path: Path) -> dict[str, Any]:
    """Add the normalisation and activation that foreign weights were published with, under `PUBLISHED`.

    They stand beside the weights, in `open_clip_config.json` or timm's `config.json`. Without such a file the
    activation is GELU, and mean and std are those of ImageNet, or of OpenAI for a CLIP. A `config.json` of another
    library is ignored; a damaged `open_clip_config.json` is refused.
    """
    if any(key in checkpoint for key in (*IMAGE_TEXT_KEYS, *NETWORKS, "encoder")):
        return checkpoint
    is_clip = is_open_clip(_top_weights(checkpoint))
    published = path.with_name("open_clip_config.json" if is_clip else "config.json")
    whose = "OpenAI's" if has_clips_images(checkpoint) else "ImageNet's"
    assumed = f"its images are taken as normalised like {whose}"
    if not published.is_file():
        logger.info("%s: no %s beside it; %s", path, published.name, assumed)
        return checkpoint
    try:
        config = parse_object(published.read_bytes(), str(published))
        if is_clip:
            images, activation = config.get("preprocess_cfg", {}), bool(config.get("model_cfg", {}).get("quick_gelu"))
        elif config.get("model_type") == MODEL_TYPE:
            weights = {name.removeprefix("encoder."): value for name, value in checkpoint.items()}
            return {**weights, "encoder": config["encoder"], **config.get("origin", {})}
        else:
            images, activation = config["pretrained_cfg"], "quickgelu" in config["architecture"]
        normalization = {name: tuple(map(float, images[name])) for name in ("mean", "std") if name in images}
        resize_mode = images.get("resize_mode", "shortest")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if not is_clip:
            logger.info("%s: the %s beside it is not timm's; %s", path, published.name, assumed)
            return checkpoint
        raise CheckpointError(f"{published} does not describe the weights beside it ({error})") from error
    logger.info("%s: %s, quick_gelu %s, as %s says", path, normalization, activation, published.name)
    if resize_mode != "shortest":
        logger.warning(
            "%s was trained with images resized by %r; here the shorter side is resized and the center is cut, which "
            "changes its accuracy",
            path,
            resize_mode,
        )
    return {**checkpoint, PUBLISHED: {**normalization, "quick_gelu": activation}}


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


def load_encoder(
    path: str | Path,
    which: str = "teacher",
    arch: str | None = None,
    patch_size: int | None = None,
    quick_gelu: bool = False,
) -> Encoder:
    """The encoder of a checkpoint in eval mode, on the CPU.

    Its `transform` turns one PIL image or array, or a list, into a batch (B, C, H, W), normalised as in training.

    Args:
        path: one of our checkpoints or exports; a folder or a repository, USER/NAME, of Hugging Face; "demo";
            timm/NAME; or weights of the reference, of timm or OpenCLIP.
        which: `teacher`, `student`, or another entry with weights; ignored for raw weights.
        arch: architecture of foreign weights; None: inferred.
        patch_size: patch side of foreign weights in pixels; None: inferred.
        quick_gelu: foreign weights, which do not say so, were trained with OpenAI's activation.

    Raises:
        CheckpointError: the file cannot be read, has no such entry or another activation, or its weights do not fit.
    """
    return encoder_of(load_checkpoint(path), str(path), which, arch, patch_size, quick_gelu)


def encoder_of(
    checkpoint: Mapping[str, Any],
    path: str,
    which: str,
    arch: str | None = None,
    patch_size: int | None = None,
    quick_gelu: bool = False,
    is_described: bool = False,
) -> Encoder:
    """`load_encoder` for a checkpoint that was read from `path`; with `is_described` it only tells its sizes."""
    is_foreign = encoder_entry(checkpoint, path) is None and image_text_entry(checkpoint) is None
    weights = network_weights(checkpoint, which, path)
    weights = {name: value for name, value in weights.items() if not name.startswith("head.")}
    description = describe_encoder(checkpoint, weights, path, arch, patch_size)
    if quick_gelu:
        if activation_of(checkpoint) is False:
            raise CheckpointError(
                f"--quick_gelu is for weights that do not say how they were trained, but {path} says: with GELU"
            )
        description = {**description, "quick_gelu": True}
    config = EncoderConfig.from_dict(description)
    with torch.device("meta") if is_described else contextlib.nullcontext():  # random weights of large models take long
        encoder = encoder_from_config(config)
    if not isinstance(encoder.backbone, TimmBackbone):
        weights = without_layer_scale(weights)
    elif not any(name.startswith("backbone.model.") for name in weights):
        own, fitting = encoder.state_dict(), timm_weights(encoder.backbone, weights, path)
        weights = {name: value for name, value in fitting.items() if name in own}
    network = network_name(checkpoint, which) or "encoder"
    remedy = f"; {timm_remedy(weights)}" if is_foreign else ""
    load_strictly(encoder, weights, f"{path} ({network})", remedy, assign=is_described)
    max_value = max_value_of(checkpoint)
    view = EvalTransform(encoder.config.img_size, *normalization_of(checkpoint), max_value=max_value)
    encoder.transform = view.batch
    logger.info("%s of %s: %s", network, path, encoder.summary)
    if is_foreign:
        say_heads(encoder.config.arch, path)
    return encoder.eval()


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
    weights = _top_weights(checkpoint)
    return is_open_clip(weights) or "norm_pre.weight" in weights


def activation_of(checkpoint: Mapping[str, Any]) -> bool | None:
    """Whether a model was trained with `quick_gelu`; None if neither the checkpoint nor a file beside it says so."""
    entries = (image_text_entry(checkpoint), checkpoint.get("encoder"), checkpoint.get(PUBLISHED))
    entry = next((entry for entry in entries if entry is not None), None)
    return None if entry is None else bool({**entry.get("image", {}), **entry}.get("quick_gelu", False))


def network_weights(checkpoint: Mapping[str, Any], which: str, path: str) -> dict[str, Tensor]:
    """One network's weights, the head's included, under our names.

    A file of raw weights is one network; they may lie under `model` or `state_dict`. The network of a CLIP is its image
    tower without projection, whatever `which` says.

    Raises:
        CheckpointError: the checkpoint has networks, but not `which`; or it is an unknown CLIP.
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
    return flat_weights(_top_weights(checkpoint), which)


def network_name(checkpoint: Mapping[str, Any], which: str) -> str | None:
    """Name of the network that `network_weights` returns; None for a CLIP and for raw weights."""
    return which if which in checkpoint else checkpoint.get("checkpoint_key")


def image_text_entry(checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
    """The entry under one of `IMAGE_TEXT_KEYS`, which describes an image-text model; None if there is none."""
    return next((checkpoint[key] for key in IMAGE_TEXT_KEYS if key in checkpoint), None)


def image_text_kind(checkpoint: Mapping[str, Any]) -> str | None:
    """The image-text model of a checkpoint, a key of `IMAGE_TEXT_KEYS`; "clip" also for OpenCLIP's; None: none."""
    kind = next((key for key in IMAGE_TEXT_KEYS if key in checkpoint), None)
    return "clip" if kind is None and is_open_clip(_top_weights(checkpoint)) else kind


def clip_weights(checkpoint: Mapping[str, Any], path: str) -> dict[str, Tensor] | None:
    """All weights of a CLIP under our names, `image.*`, `text.*`, ..., whoever saved them; None if it is no CLIP."""
    weights = _top_weights(checkpoint)
    if image_text_entry(checkpoint) is not None:
        return weights
    return from_open_clip_names(weights, path) if is_open_clip(weights) else None


def _top_weights(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
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

"""Path -> the content of a checkpoint: verified reading, without running any code in the file.

A path is one of our checkpoints or exports, weights of other projects, timm/NAME, a repository of the Hugging Face hub,
a name of weights that DINO's authors released, or "demo". `entries.py` describes the content, `file.py` reads these
files, `folder.py` writes them, `foreign.py` knows the weights of other projects. Exports of `export.py` are read
wherever a checkpoint is.
"""

import hashlib
import logging
import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from dino_sparo.models.architectures import TIMM
from dino_sparo.models.foreign_backbone import plan_of, pretrained_weights
from dino_sparo.runtime.files import file_sha256, parse_object
from dino_sparo.weights import entries
from dino_sparo.weights.file import CheckpointError, read_safetensors, read_torch_file
from dino_sparo.weights.foreign import infer_config, is_open_clip
from dino_sparo.weights.released import release_of, released_file

logger = logging.getLogger(__name__)

EXPORTED_WEIGHTS, MODEL_TYPE = "model.safetensors", "sparo_encoder"  # of a folder for Hugging Face
# Of the Hugging Face hub; a missing file of weights, such as runs/checkpoint.pth, is not looked up there.
REPOSITORY = re.compile(r"[\w.-]+/(?!.*\.(?:pth|pt|bin|safetensors)$)[\w.-]+")
DEMO = Path(__file__).parent / "demo" / "encoder.safetensors"  # the encoder that `dino-sparo demo` trains, in fp16


def load_checkpoint(path: str | Path, verify: bool = True, mmap: bool = False) -> dict[str, Any]:
    """Read a checkpoint to the CPU, verify its checksums, run no code from it.

    .pth files and our exports have checksums. torch's files before 2020 and safetensors of other programs have none.

    Args:
        path: a .pth file, or a .safetensors file. The weights of the latter are at the top of the dict, as raw weights
            are, with the entries of the .json file of the same name (`encoder`, `epoch`, ...). timm/NAME: timm's own
            weights of that model, with an entry `encoder`. A name in `released.RELEASES`: weights of DINO's authors.
        verify: False if `verify_checkpoint` has just read the file.
        mmap: leave tensors in the file until they are used.

    Raises:
        CheckpointError: the file is missing, damaged, compressed or no checkpoint, or its pickle asks for code to run.
    """
    if is_timm_model(path):
        plan, weights = plan_of(str(path).removeprefix(TIMM)), timm_model_weights(path)
        return {**weights, "encoder": entries.encoder_description(infer_config({}, str(path)), plan.mean, plan.std)}
    if release := release_of(path):
        weights = read_torch_file(released_file(str(path)), verify, mmap)
        if release.arch.startswith(TIMM):  # it is not recognised by its weights, but by this entry
            weights["encoder"] = entries.encoder_description(infer_config({}, release.arch))
        return weights
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
    if release_of(path):
        return released_file(str(path))
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

    They stand next to the weights, in `open_clip_config.json` or timm's `config.json`. Without such a file the
    activation is GELU, and mean and std are those of ImageNet, or of OpenAI for a CLIP. A `config.json` of another
    library is ignored; a damaged `open_clip_config.json` is refused.
    """
    if any(key in checkpoint for key in (*entries.IMAGE_TEXT_KEYS, *entries.NETWORKS, "encoder")):
        return checkpoint
    is_clip = is_open_clip(entries.top_weights(checkpoint))
    published = path.with_name("open_clip_config.json" if is_clip else "config.json")
    whose = "OpenAI's" if entries.has_clips_images(checkpoint) else "ImageNet's"
    assumed = f"its images are taken as normalised like {whose}"
    if not published.is_file():
        logger.info("%s: no %s next to it; %s", path, published.name, assumed)
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
            logger.info("%s: the %s next to it is not timm's; %s", path, published.name, assumed)
            return checkpoint
        raise CheckpointError(f"{published} does not describe the weights next to it ({error})") from error
    logger.info("%s: %s, quick_gelu %s, as %s says", path, normalization, activation, published.name)
    if resize_mode != "shortest":
        logger.warning(
            "%s was trained with images resized by %r; here the shorter side is resized and the center is cut, which "
            "changes its accuracy",
            path,
            resize_mode,
        )
    return {**checkpoint, entries.PUBLISHED: {**normalization, "quick_gelu": activation}}

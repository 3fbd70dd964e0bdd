"""Checkpoint -> files for other software: safetensors, timm, Hugging Face, ONNX; for CLIP also OpenCLIP and sparo-clip.

    dino-sparo export runs/vits16/checkpoint.pth vits16
    dino-sparo export runs/vits16/checkpoint.pth vits16 --format onnx --img_size 224
    dino-sparo export runs/vits16/checkpoint.pth vits16 --format huggingface
    dino-sparo export runs/clip/checkpoint.pth clip --format open_clip

An export holds one encoder without head and optimizer. JSON files next to its weights say how it was built, how its
images are normalised and which checkpoint it comes from. The file of weights repeats these JSON files in its
metadata, so that `file.read_safetensors` detects files that do not belong together. For a CLIP, `safetensors`,
`open_clip` and `sparo_clip` hold both towers; the other formats hold the image tower.
"""

import argparse
import json
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import timm
import torch
from torch import Tensor, nn

from dino_sparo.models.architectures import ViTSize, size_of
from dino_sparo.models.encoder import Encoder, encoder_from_config
from dino_sparo.models.foreign_backbone import ForeignBackbone
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.faults import UserError, require
from dino_sparo.runtime.logs import setup_logging
from dino_sparo.runtime.precision import use_fused_attention
from dino_sparo.weights.checkpoint import REPOSITORY, load_checkpoint, weights_file
from dino_sparo.weights.encoder import encoder_of
from dino_sparo.weights.entries import clip_weights, encoder_description, network_name, normalization_of
from dino_sparo.weights.file import DOCUMENTS_KEY, Replacing, load_strictly, write_safetensors, write_together
from dino_sparo.weights.foreign import CLIP_FORMATS, open_clip_settings, to_open_clip_names
from dino_sparo.weights.huggingface import timm_images, write_folder
from dino_sparo.weights.options import foreign_options
from dino_sparo.weights.origin import origin_of

logger = logging.getLogger(__name__)

MLP_RATIO = 4
ONNX_OPSET = 18
HUB_TIMEOUT_S = 20

# Architectures that timm builds by name; the sizes in these names are overridden by the model's arguments.
TIMM_NAMES = {arch: f"{arch}_patch16_224" for arch in ("vit_tiny", "vit_small", "vit_base")}
# With `pre_norm`; its sizes are overridden.
TIMM_CLIP_NAME = "vit_base_patch16_clip_224"


def export(
    checkpoint: str | Path,
    out: str | Path,
    which: str = "teacher",
    format: str = "safetensors",
    img_size: int | None = None,
    arch: str | None = None,
    patch_size: int | None = None,
    quick_gelu: bool = False,
    name: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the encoder of a checkpoint, or both towers of a CLIP, for other software.

    Args:
        checkpoint: one of ours, of the reference, or an export.
        out: path without suffix; a folder for `huggingface`, `open_clip` and `sparo_clip`.
        which: `teacher` or `student`.
        format: a key of `WRITERS` or of `CLIP_FORMATS`.
        img_size: image side in pixels, to which the position embedding is resampled; None: as trained.
        arch: architecture of foreign weights; None: inferred from the shapes.
        patch_size: patch side of foreign weights in pixels; None: inferred.
        quick_gelu: foreign weights were trained with OpenAI's activation.
        name: of the repository, for the model card of `huggingface`.
        overwrite: replace other files of these names.

    Returns:
        The file of weights, or the folder.

    Raises:
        UserError: unknown format, or one that cannot hold this read-out; or a file that is not to be replaced.
    """
    if format not in WRITERS | CLIP_FORMATS:
        raise UserError(f"unknown export format {format!r}; choose one of {sorted(WRITERS | CLIP_FORMATS)}")
    _check_out(str(out), format)
    checkpoint = weights_file(checkpoint)
    content, replacing = load_checkpoint(checkpoint), Replacing(overwrite, checkpoint)
    if format in CLIP_FORMATS or (format == "safetensors" and "clip" in content):
        if img_size is not None:
            raise UserError(f"img_size={img_size}: both towers of a CLIP are written as they are, at the training size")
        if arch is not None or patch_size is not None or quick_gelu:
            raise UserError(
                f"--arch, --patch_size and --quick_gelu are for foreign weights, but {checkpoint} says how it was built"
            )
        path, network = _write_clip(content, checkpoint, str(out), format, replacing), "both towers"
    else:
        encoder = encoder_of(content, str(checkpoint), which, arch, patch_size, quick_gelu)
        encoder = encoder if img_size is None else resized(encoder, img_size)
        key = network_name(content, which)
        record = {
            "encoder": encoder_description(encoder.config, *normalization_of(content)),
            **origin_of(content, checkpoint, key, is_encoder=True),
            "checkpoint_key": key,
            **({} if name is None else {"name": name}),
        }
        path, network = WRITERS[format](encoder, str(out), record, replacing), key or "encoder"
    logger.info("%s of %s as %s: %s", network, checkpoint, format, path)
    return path


def _check_out(out: str, format: str) -> None:
    """Refuse a path without a name, and a folder of checkpoints, which the export would hide."""
    is_folder = format == "huggingface" or format in CLIP_FORMATS
    if not out or (not is_folder and os.path.basename(out) in ("", ".", "..")):
        raise UserError(f"{out!r} does not end with a name; give a path such as exports/vits16 for the export")
    if is_folder and any(Path(out).glob("*.pth")):
        raise UserError(f"{out} holds checkpoints, which an export would hide; give another folder for the export")


def resized(encoder: Encoder, img_size: int) -> Encoder:
    """The same encoder, its position embedding resampled to images of `img_size` pixels.

    Raises:
        ValueError: `img_size` is not a multiple of the patch size.
    """
    other = encoder_from_config(replace(encoder.config, img_size=img_size))
    backbone = other.backbone.adapt(encoder.backbone.state_dict())
    weights = {**encoder.state_dict(), **{f"backbone.{name}": value for name, value in backbone.items()}}
    load_strictly(other, weights, "the encoder")
    return other.eval()


def _write_safetensors(encoder: Encoder, out: str, record: dict[str, Any], replacing: Replacing) -> Path:
    """OUT.safetensors with our names, and OUT.json."""
    return write_safetensors(encoder.state_dict(), _with_suffix(out, ".safetensors"), {".json": record}, replacing)


def _write_vision_transformer(encoder: Encoder, out: str, record: dict[str, Any], replacing: Replacing) -> Path:
    """OUT.safetensors with timm's names (ours below `backbone.`), and OUT.json, whose `timm` builds the model."""
    if not encoder.is_vanilla:
        raise UserError(
            f"timm has no {encoder.config.readout!r} read-out, so only vanilla encoders (--readout cls) can be written "
            f"for timm; this encoder can be exported as huggingface, safetensors or onnx"
        )
    convert = _foreign_model if isinstance(encoder.backbone, ForeignBackbone) else _vit_model
    architecture, arguments, weights = convert(encoder)
    model = {"architecture": architecture, "model_args": arguments, "pretrained_cfg": timm_images(record["encoder"])}
    documents = {".json": {**record, "timm": model}}
    return write_safetensors(weights, _with_suffix(out, ".safetensors"), documents, replacing)


def _vit_model(encoder: Encoder) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Architecture, arguments and weights of our vision transformer, under timm's names."""
    config = encoder.config
    arguments = {
        "img_size": config.img_size,
        "patch_size": config.patch_size,
        "in_chans": config.in_chans,
        "num_classes": 0,
        "global_pool": "token",
        **({"act_layer": "quick_gelu"} if config.quick_gelu else {}),
    }
    if config.pre_norm or config.arch not in TIMM_NAMES:
        arguments |= {**cast(ViTSize, size_of(config.arch))._asdict(), "mlp_ratio": MLP_RATIO}
    name = TIMM_NAMES.get(config.arch, "timm.models.vision_transformer.VisionTransformer")
    return TIMM_CLIP_NAME if config.pre_norm else name, arguments, encoder.backbone.state_dict()


def _foreign_model(encoder: Encoder) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Architecture, arguments and weights of a model of timm that is read by its class token."""
    backbone: Any = encoder.backbone
    arguments = {**backbone.arguments, "num_classes": 0, "global_pool": "token"}
    weights = {name.removeprefix("model."): value for name, value in backbone.state_dict().items()}
    try:
        timm.create_model(backbone.name, **arguments).load_state_dict(weights)
    except (RuntimeError, TypeError) as error:
        raise UserError(
            f"timm/{backbone.name} with its class token as output has other weights than with timm's pooling; this "
            "encoder can be exported as huggingface, safetensors or onnx"
        ) from error
    return backbone.name, arguments, weights


class _OnnxOutputs(nn.Module):
    """An encoder with the outputs of the ONNX file: encoding, and attention if each slot has its attention."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.names = ["encoding", "attention"] if encoder.config.kind.shows == "slot" else ["encoding"]

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Images -> encoding (B, L*V) and attention (B, L, N)."""
        output = self.encoder.readout_output(images)
        return (output.slots.flatten(1), output.attention)[: len(self.names)]


def _write_onnx(encoder: Encoder, out: str, record: dict[str, Any], replacing: Replacing) -> Path:
    """OUT.onnx for any batch of images of the stored size, and OUT.onnx.json (OUT.json belongs to OUT.safetensors)."""
    for package in ("onnx", "onnxscript"):
        require(package, "ONNX exports")
    config, path = encoder.config, _with_suffix(out, ".onnx")
    model = _OnnxOutputs(encoder).eval()
    use_fused_attention(encoder.backbone, False)  # plain products: operators that every runtime has
    program: Any = torch.onnx.export(
        model,
        (torch.zeros(2, config.in_chans, config.img_size, config.img_size),),  # a batch of one would become a constant
        input_names=["images"],
        output_names=model.names,
        opset_version=ONNX_OPSET,
        dynamo=True,
        dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
        verbose=False,
    )
    # An integer where torch fixed a size.
    shape = [size if isinstance(size, int) else "batch" for size in program.model.graph.inputs[0].shape]
    if shape[0] != "batch":
        raise UserError(
            f"torch {torch.__version__} cannot write {config.readout!r} for any number of images, only for {shape[0]}; "
            "this encoder can be exported as safetensors"
        )
    documents = {f"{path.name}.json": {**record, "onnx": {"inputs": {"images": shape}, "outputs": model.names}}}

    def write(temporary: Path) -> None:
        program.model.metadata_props[DOCUMENTS_KEY] = json.dumps(documents)
        program.save(str(temporary), external_data=False)

    return write_together(path, documents, write, replacing)


WRITERS: dict[str, Callable[[Encoder, str, dict[str, Any], Replacing], Path]] = {
    "safetensors": _write_safetensors,
    "timm": _write_vision_transformer,
    "huggingface": write_folder,
    "onnx": _write_onnx,
}


def _write_clip(content: dict[str, Any], checkpoint: Path, out: str, format: str, replacing: Replacing) -> Path:
    """Both towers of a CLIP.

    safetensors  OUT.safetensors with our names, and OUT.json, for `clip.load_clip`
    open_clip    a folder for `open_clip.create_model_and_transforms("local-dir:OUT")`
    sparo_clip   the same folder with sparo-clip's names; "model_cfg" are the arguments of its `CLIP`
    """
    entry = content.get("clip")
    if entry is None:
        raise UserError(
            f"{checkpoint} is not a CLIP of dino_sparo, as format {format!r} needs; choose one of {sorted(WRITERS)}"
        )
    weights = clip_weights(content, str(checkpoint)) or {}
    record = {"clip": entry, **origin_of(content, checkpoint)}
    if format == "safetensors":
        return write_safetensors(weights, _with_suffix(out, ".safetensors"), {".json": record}, replacing)
    if entry["readout"] not in CLIP_FORMATS[format]:
        raise UserError(
            f"{format} has no {entry['readout']!r} read-out, only {', '.join(CLIP_FORMATS[format])}; this CLIP can be "
            f"exported as safetensors"
        )
    images = {"mean": entry["mean"], "std": entry["std"], "interpolation": "bicubic", "resize_mode": "shortest"}
    documents = {
        "open_clip_config.json": {"model_cfg": open_clip_settings(entry), "preprocess_cfg": images},
        "dino_sparo.json": record,
    }
    renamed = to_open_clip_names(weights, entry["readout"])
    return write_safetensors(renamed, Path(out) / "open_clip_model.safetensors", documents, replacing).parent


def _with_suffix(out: str, suffix: str) -> Path:
    """OUT with a suffix, unless OUT has it already; other dots in OUT are part of the name."""
    return Path(out.removesuffix(suffix) + suffix)


def export_checkpoint(args: argparse.Namespace) -> None:
    """`dino-sparo export`."""
    setup_logging()
    for name in ("onnx_ir", "onnxscript"):  # they log every node that they simplify
        logging.getLogger(name).setLevel(logging.WARNING)
    sizes = {"img_size": args.img_size, **foreign_options(args)}
    export(args.checkpoint, args.out, args.checkpoint_key, args.format, **sizes, overwrite=args.overwrite)


def push_checkpoint(args: argparse.Namespace) -> str:
    """`dino-sparo push`: export for Hugging Face and upload the folder; returns the address of the commit.

    The hub's token is read from HF_TOKEN or from `hf auth login`.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import get_session

    setup_logging()
    if not REPOSITORY.fullmatch(args.repository):
        raise UserError(f"{args.repository} is not the name of a repository; give USER/NAME, such as me/vits16")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # which logs every request
    http_error: Any = HfHubHTTPError.__bases__[0]  # of the hub's HTTP library, which depends on the hub's version
    api = HfApi()
    with tempfile.TemporaryDirectory() as folder:
        name = args.repository.rpartition("/")[2]
        exported = export(
            args.checkpoint, Path(folder) / name, args.checkpoint_key, "huggingface", name=args.repository
        )
        try:
            get_session().head(api.endpoint, timeout=HUB_TIMEOUT_S)  # the calls below wait for an answer without end
            api.create_repo(args.repository, private=args.private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=args.repository, folder_path=exported, commit_message="Upload the encoder"
            )
        except (OSError, ValueError, http_error) as error:  # no network, no permission, or no such name
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise UserError(
                f"could not upload to {args.repository}: {reason}; is there a network, and does `hf auth whoami` "
                "name you?"
            ) from error
    say(str(commit))
    return str(commit)

"""Checkpoint -> files for others: safetensors, timm, Hugging Face, ONNX; of CLIP also OpenCLIP's and sparo-clip's.

    dino-sparo export runs/vits16/checkpoint.pth vits16
    dino-sparo export runs/vits16/checkpoint.pth vits16 --format onnx --img_size 224
    dino-sparo export runs/clip/checkpoint.pth clip --format open_clip

An export is one network's encoder, without head and optimizer, beside a JSON file of how it was built, what its images
are normalised with, and where it comes from. Of a CLIP `safetensors` holds both towers, for any read-out, `open_clip`
and `sparo_clip` what these have; the other formats hold its image tower.
"""

import argparse
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from dino_sparo.data.views import EvalTransform
from dino_sparo.models.backbone import LAYER_NORM_EPS
from dino_sparo.models.encoder import Encoder, encoder_from_config
from dino_sparo.runtime.choices import ARCHITECTURES
from dino_sparo.runtime.extras import require
from dino_sparo.runtime.logs import setup_logging
from dino_sparo.runtime.records import file_sha256, versions, write_json
from dino_sparo.weights.checkpoint import (
    CheckpointError,
    clip_weights,
    encoder_description,
    encoder_of,
    load_checkpoint,
    load_strictly,
    network_name,
    normalization_of,
)
from dino_sparo.weights.file import CHECKSUM_KEY, weights_checksum
from dino_sparo.weights.foreign_names import CLIP_FORMATS, open_clip_settings, to_open_clip_names

logger = logging.getLogger(__name__)

MLP_RATIO = 4
ONNX_OPSET = 18
BICUBIC = 3  # as Pillow numbers it

# Architectures that timm builds by name; the sizes in these names are overridden by the model's arguments.
TIMM_NAMES = {
    "vit_tiny": "vit_tiny_patch16_224",
    "vit_small": "vit_small_patch16_224",
    "vit_base": "vit_base_patch16_224",
}
# With `pre_norm`; its sizes are overridden.
TIMM_CLIP_NAME = "vit_base_patch16_clip_224"

# Our names of a block's weights -> transformers'; the joint projection of queries, keys and values is cut in three.
HUGGINGFACE_BLOCK = {
    "norm1": "layernorm_before",
    "attn.proj": "attention.output.dense",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
HUGGINGFACE_EMBEDDINGS = {
    "cls_token": "embeddings.cls_token",
    "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj.weight": "embeddings.patch_embeddings.projection.weight",
    "patch_embed.proj.bias": "embeddings.patch_embeddings.projection.bias",
    "norm.weight": "layernorm.weight",
    "norm.bias": "layernorm.bias",
}


def export(
    checkpoint: str | Path,
    out: str | Path,
    which: str = "teacher",
    format: str = "safetensors",
    img_size: int | None = None,
    arch: str | None = None,
    patch_size: int | None = None,
    quick_gelu: bool = False,
) -> Path:
    """Write the encoder of a checkpoint, or both towers of a CLIP, for others to use.

    Args:
        checkpoint: ours, the reference's, or an export.
        out: path without suffix; for `huggingface` a folder.
        which: `teacher` or `student`.
        format: a key of `WRITERS`, or of `CLIP_FORMATS`.
        img_size: side of the images in pixels; the position embedding is resampled to it. By default the size the
            encoder was trained at.
        arch: override for foreign weights.
        patch_size: override for foreign weights, pixels.
        quick_gelu: of OpenCLIP's weights, which do not say whether they were trained with OpenAI's activation.

    Returns:
        The path of the weights, or of the folder.

    Raises:
        ValueError: an unknown format, or one that cannot hold this read-out.
        MissingPackageError: the package of this format is not installed.
        CheckpointError: the checkpoint cannot be used.
    """
    if format not in WRITERS | CLIP_FORMATS:
        raise ValueError(f"unknown export format {format!r}; choose one of {sorted(WRITERS | CLIP_FORMATS)}")
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    content = load_checkpoint(checkpoint)
    if format in CLIP_FORMATS or (format == "safetensors" and "clip" in content):
        if img_size is not None:
            raise ValueError(f"img_size={img_size}: both towers of a CLIP are written as they are, at its own size")
        if arch is not None or patch_size is not None or quick_gelu:
            raise ValueError(
                f"--arch, --patch_size and --quick_gelu are for foreign weights, but {checkpoint} says how it was built"
            )
        written = _write_clip(content, Path(checkpoint), str(out), format)
        logger.info("both towers of %s as %s: %s", checkpoint, format, written)
        return written
    encoder = encoder_of(content, str(checkpoint), which, arch, patch_size, quick_gelu)
    if img_size is not None:
        encoder = resized(encoder, img_size)
    record = {
        "encoder": encoder_description(encoder.config, *normalization_of(content)),
        **_origin(content, Path(checkpoint)),
        "checkpoint_key": network_name(content, which),
    }
    written = WRITERS[format](encoder, str(out), record)
    logger.info("%s of %s as %s: %s", record["checkpoint_key"] or "encoder", checkpoint, format, written)
    return written


def resized(encoder: Encoder, img_size: int) -> Encoder:
    """The same encoder with its positions resampled once and for all to images of `img_size` pixels.

    Raises:
        ValueError: `img_size` is not a multiple of the patch size.
    """
    other = encoder_from_config(replace(encoder.config, img_size=img_size))
    positions = encoder.backbone.position_embedding(img_size, img_size).detach()
    load_strictly(other, {**encoder.state_dict(), "backbone.pos_embed": positions}, "the encoder")
    return other.eval()


def _origin(content: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Where an export comes from."""
    return {
        "epoch": content.get("epoch"),
        "step": content.get("step"),
        "checkpoint": checkpoint.name,
        "sha256": file_sha256(checkpoint),
        "versions": versions(),
    }


def _write_safetensors(encoder: Encoder, out: str, record: dict[str, Any]) -> Path:
    """OUT.safetensors with our names, and OUT.json."""
    return _write_weights(encoder.state_dict(), _with_suffix(out, ".safetensors"), record)


def _write_timm(encoder: Encoder, out: str, record: dict[str, Any]) -> Path:
    """OUT.safetensors with timm's names, and OUT.json, whose entry `timm` says how to build the model.

    The names are ours below `backbone.`; the model's LayerNorm eps and pooled class token are timm's defaults.
    """
    _require_vanilla(encoder, "timm")
    config, size = encoder.config, ARCHITECTURES[encoder.config.arch]
    arguments = {
        "img_size": config.img_size,
        "patch_size": config.patch_size,
        "in_chans": config.in_chans,
        "num_classes": 0,
        "global_pool": "token",
        **({"act_layer": "quick_gelu"} if config.quick_gelu else {}),
    }
    if config.pre_norm or config.arch not in TIMM_NAMES:
        arguments |= {**size._asdict(), "mlp_ratio": MLP_RATIO}
    name = TIMM_NAMES.get(config.arch, "timm.models.vision_transformer.VisionTransformer")
    timm_model = {
        "architecture": TIMM_CLIP_NAME if config.pre_norm else name,
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": [config.in_chans, config.img_size, config.img_size],
            "mean": record["encoder"]["mean"],
            "std": record["encoder"]["std"],
            "interpolation": "bicubic",
        },
    }
    path = _with_suffix(out, ".safetensors")
    return _write_weights(encoder.backbone.state_dict(), path, {**record, "timm": timm_model})


def _write_huggingface(encoder: Encoder, out: str, record: dict[str, Any]) -> Path:
    """A folder for `transformers.AutoModel.from_pretrained(OUT)`.

    `last_hidden_state` are our tokens, for images of the stored size; its first token is the encoding, and so is
    `pooler_output`: transformers builds a pooler by default and would draw its weights at random, hence it is written
    as the identity. Versions of transformers that do not read `pooler_act` return the encoding's tanh there.
    """
    _require_vanilla(encoder, "huggingface")
    if encoder.config.pre_norm:
        raise ValueError(
            "transformers' ViTModel has no LayerNorm before its blocks, which pre_norm asks for; this encoder can be "
            "exported as timm, safetensors or onnx"
        )
    folder, size, config = Path(out), ARCHITECTURES[encoder.config.arch], encoder.config
    folder.mkdir(parents=True, exist_ok=True)
    model = {
        "architectures": ["ViTModel"],
        "model_type": "vit",
        "hidden_size": size.embed_dim,
        "num_hidden_layers": size.depth,
        "num_attention_heads": size.num_heads,
        "intermediate_size": MLP_RATIO * size.embed_dim,
        "hidden_act": "quick_gelu" if config.quick_gelu else "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": LAYER_NORM_EPS,
        "image_size": config.img_size,
        "patch_size": config.patch_size,
        "num_channels": config.in_chans,
        "qkv_bias": True,
        "pooler_act": "linear",
    }
    view = EvalTransform(config.img_size)
    images = {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": view.resize_size},
        "resample": BICUBIC,
        "do_center_crop": True,
        "crop_size": {"height": config.img_size, "width": config.img_size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": record["encoder"]["mean"],
        "image_std": record["encoder"]["std"],
    }
    for name, values in (("config", model), ("preprocessor_config", images), ("dino_sparo", record)):
        write_json(values, folder / f"{name}.json")
    width = size.embed_dim
    pooler = {"pooler.dense.weight": torch.eye(width), "pooler.dense.bias": torch.zeros(width)}
    _save({**huggingface_weights(encoder.backbone.state_dict()), **pooler}, folder / "model.safetensors")
    return folder


def huggingface_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A backbone's weights under the names that `transformers.ViTModel` reads."""
    renamed = {}
    for name, value in weights.items():
        if not name.startswith("blocks."):
            renamed[HUGGINGFACE_EMBEDDINGS[name]] = value
            continue
        _, block, rest = name.split(".", 2)
        part, kind = rest.rsplit(".", 1)
        layer = f"encoder.layer.{block}"
        if part == "attn.qkv":
            for projection, piece in zip(("query", "key", "value"), value.chunk(3), strict=True):
                renamed[f"{layer}.attention.attention.{projection}.{kind}"] = piece
        else:
            renamed[f"{layer}.{HUGGINGFACE_BLOCK[part]}.{kind}"] = value
    return renamed


class _FixedSize(nn.Module):
    """An encoder for images of the stored size alone, with what ONNX names as outputs.

    The backbone without its checks and its resampling: they look at the number of images and would fix it.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.backbone, self.readout = encoder.backbone, encoder.readout
        self.names = ["encoding", "attention"] if encoder.config.kind.shows == "slot" else ["encoding"]

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Images -> encoding (B, L*V), and where slots have attention of their own (B, L, N)."""
        patches = self.backbone.patch_embed(images)
        cls_tokens = self.backbone.cls_token.expand(patches.shape[0], -1, -1)
        tokens = self.backbone.norm_pre(torch.cat((cls_tokens, patches), dim=1) + self.backbone.pos_embed)
        for block in self.backbone.blocks:
            tokens = block(tokens)
        output = self.readout(self.backbone.norm(tokens))
        return (output.slots.flatten(1), output.attention)[: len(self.names)]


def _write_onnx(encoder: Encoder, out: str, record: dict[str, Any]) -> Path:
    """OUT.onnx for any number of images of the stored size, and OUT.onnx.json."""
    for package in ("onnx", "onnxscript"):
        require(package, "ONNX exports")
    config, path = encoder.config, _with_suffix(out, ".onnx")
    model = _FixedSize(encoder).eval()
    encoder.backbone.use_fused_attention(False)  # plain products: operators that every runtime has
    # An example of two: a batch of one would be taken for a constant.
    images = torch.zeros(2, config.in_chans, config.img_size, config.img_size)
    program: Any = torch.onnx.export(
        model,
        (images,),
        str(path),
        input_names=["images"],
        output_names=model.names,
        opset_version=ONNX_OPSET,
        dynamo=True,
        dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
        external_data=False,
        verbose=False,
    )
    # What torch made of it: an integer where a size is fixed.
    shape = [size if isinstance(size, int) else "batch" for size in program.model.graph.inputs[0].shape]
    if shape[0] != "batch":
        path.unlink()
        raise ValueError(
            f"torch {torch.__version__} cannot write {config.readout!r} for any number of images, only for {shape[0]}; "
            "this encoder can be exported as safetensors"
        )
    # Not OUT.json: that belongs to OUT.safetensors, whose image size may be another.
    write_json({**record, "onnx": {"inputs": {"images": shape}, "outputs": model.names}}, Path(f"{path}.json"))
    return path


WRITERS: dict[str, Callable[[Encoder, str, dict[str, Any]], Path]] = {
    "safetensors": _write_safetensors,
    "timm": _write_timm,
    "huggingface": _write_huggingface,
    "onnx": _write_onnx,
}


def _write_clip(content: dict[str, Any], checkpoint: Path, out: str, format: str) -> Path:
    """Both towers of a CLIP.

    safetensors  OUT.safetensors with our names, and OUT.json; `clip.load_clip` reads them
    open_clip    a folder for `open_clip.create_model_and_transforms("local-dir:OUT")`
    sparo_clip   likewise, with sparo-clip's names; "model_cfg" are the arguments of its `CLIP`
    """
    entry = content.get("clip")
    if entry is None:
        raise ValueError(
            f"{checkpoint} is no CLIP of ours, which format {format!r} is for; choose one of {sorted(WRITERS)}"
        )
    weights = clip_weights(content, str(checkpoint)) or {}
    if format == "safetensors":
        record = {"clip": entry, **_origin(content, checkpoint)}
        return _write_weights(weights, _with_suffix(out, ".safetensors"), record)
    if entry["readout"] not in CLIP_FORMATS[format]:
        raise ValueError(
            f"{format} has no {entry['readout']!r} read-out, only {', '.join(CLIP_FORMATS[format])}; this CLIP can be "
            f"exported as safetensors"
        )
    folder, settings = Path(out), open_clip_settings(entry)
    folder.mkdir(parents=True, exist_ok=True)
    images = {"mean": entry["mean"], "std": entry["std"], "interpolation": "bicubic", "resize_mode": "shortest"}
    write_json({"model_cfg": settings, "preprocess_cfg": images}, folder / "open_clip_config.json")
    write_json({"clip": entry, **_origin(content, checkpoint)}, folder / "dino_sparo.json")
    _save(to_open_clip_names(weights, entry["readout"]), folder / "open_clip_model.safetensors")
    return folder


def _require_vanilla(encoder: Encoder, format: str) -> None:
    if not encoder.is_vanilla:
        raise ValueError(
            f"{format} has no {encoder.config.readout!r} read-out, so only vanilla encoders (--readout cls) can be "
            f"written for it; this one can be exported as safetensors or onnx"
        )


def _write_weights(weights: dict[str, Tensor], path: Path, record: dict[str, Any]) -> Path:
    """Weights, and the record beside them."""
    _save(weights, path)
    write_json(record, path.with_suffix(".json"))
    return path


def _save(weights: dict[str, Tensor], path: Path) -> None:
    # Renamed when it is whole: the weights may come from the very file that is written.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    # Clones: what two towers share cannot be written as one.
    weights = {name: value.clone(memory_format=torch.contiguous_format) for name, value in weights.items()}
    # transformers refuses files without the first remark; reading compares the second.
    metadata = {"format": "pt", CHECKSUM_KEY: weights_checksum(weights)}
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file(weights, temporary, metadata)
        temporary.chmod(mode)  # the umask's: safetensors lets nobody else read the file
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"could not write {path} ({error}); free some space or choose another folder") from error


def _with_suffix(out: str, suffix: str) -> Path:
    """OUT with a suffix, which OUT may have already; other dots in it are part of the name."""
    return Path(out.removesuffix(suffix) + suffix)


def export_checkpoint(args: argparse.Namespace) -> None:
    """Export what the options say; see `export` for what is raised."""
    setup_logging()
    for name in ("onnx_ir", "onnxscript"):  # they report every node that they simplify
        logging.getLogger(name).setLevel(logging.WARNING)
    export(
        args.checkpoint,
        args.out,
        args.checkpoint_key,
        args.format,
        args.img_size,
        args.arch,
        args.patch_size,
        args.quick_gelu,
    )

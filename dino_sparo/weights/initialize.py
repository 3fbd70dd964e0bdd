"""Weights of a trained vision transformer -> initial weights of an encoder, for the parts that both have.

`image_text/towers.py` initializes both towers of an image-text model.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timm.models import adapt_input_conv
from torch import Tensor

from dino_sparo.models.architectures import HEADS, TIMM, size_of
from dino_sparo.models.backbone import Backbone
from dino_sparo.models.encoder import Encoder
from dino_sparo.models.foreign_backbone import ForeignBackbone, pretrained_weights
from dino_sparo.weights.checkpoint import load_checkpoint
from dino_sparo.weights.entries import activation_of, encoder_entry, image_text_entry, network_weights, say_heads
from dino_sparo.weights.file import CheckpointError, misfits, require_channels
from dino_sparo.weights.foreign import block_of, num_blocks, patch_sizes, timm_remedy, timm_weights, without_layer_scale


@dataclass(frozen=True)
class InitReport:
    """Names of weights that `initialize_encoder` took from a file, dropped from it, and left new, with random values.

    The grids are the sides in patches of the file's and of the encoder's positions. `projection` says how the patch
    projection was adapted; it is empty if it was not.
    """

    path: str
    taken: tuple[str, ...]
    dropped: tuple[str, ...]
    new: tuple[str, ...]
    grids: tuple[int, int]
    projection: str = ""

    def __str__(self) -> str:
        before, after = self.grids
        resampled = f"; position embedding resampled from {before}x{before} to {after}x{after} patches"
        return (
            f"weights of {self.path}: taken {_parts(self.taken)}; dropped {_parts(self.dropped)}; new "
            f"{_parts(self.new)}{resampled if before != after else ''}{self.projection}"
        )


def _parts(names: Iterable[str]) -> str:
    """Parts that weights belong to: `pos_embed, blocks 0-10, head.*`."""
    blocks = sorted({block_of(name) for name in names} - {-1})
    text = f"blocks {blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else f"block {blocks[0]}" if blocks else ""
    paths = [name.removeprefix("backbone.").removeprefix("model.").split(".") for name in names]
    parts = [text if first == "blocks" else f"{first}.*" if rest else first for first, *rest in paths]
    return ", ".join(dict.fromkeys(parts)) or "nothing"


def initialize_encoder(encoder: Encoder, path: str | Path, which: str = "teacher") -> InitReport:
    """Initialize an encoder, in place, from the weights of another one.

    Common blocks are taken, and a read-out of the same sizes. A ViT's last block is dropped where `sparo` replaces it.
    Positions of another grid are resampled as the backbone does for images of another size.

    Args:
        encoder: the encoder.
        path: one of our checkpoints, a DINO or timm ViT state dict, or a CLIP (ours, OpenCLIP's, sparo-clip's), whose
            image tower is taken; for timm/NAME weights of that model, under timm's names or in a checkpoint of ours.
        which: `teacher` or `student`.

    Raises:
        CheckpointError: the file cannot be read, or holds no ViT of the same width, patch size and kind.
    """
    return initialize_encoder_of(encoder, load_checkpoint(path), str(path), which)


def initialize_encoder_of(
    encoder: Encoder, checkpoint: Mapping[str, Any], path: str, which: str = "teacher", with_head: bool = True
) -> InitReport:
    """`initialize_encoder` for a checkpoint that was read from `path`; `with_head`: report a head as dropped."""
    if not isinstance(encoder.backbone, ForeignBackbone):  # whose name says its activation and its heads
        check_same_blocks(checkpoint, encoder.config.quick_gelu, encoder.config.arch, path)
    weights = network_weights(checkpoint, which, path)
    weights = {name: value for name, value in weights.items() if with_head or not name.startswith("head.")}
    return initialize_from(encoder, weights, path)


def initialize_pretrained(encoder: Encoder) -> InitReport:
    """Initialize the backbone of a timm model, in place, from timm's own weights; ValueError if there are none."""
    arch = encoder.config.arch
    weights = pretrained_weights(arch.removeprefix(TIMM), "--init_from FILE")
    return initialize_from(encoder, {f"backbone.{name}": value for name, value in weights.items()}, arch)


def initialize_from(encoder: Encoder, weights: dict[str, Tensor], path: str) -> InitReport:
    """`initialize_encoder` for weights under our names, which were read from `path`."""
    encoder_state, grids, before = encoder.state_dict(), (0, 0), weights
    if isinstance(encoder.backbone, ForeignBackbone):
        readout = {name: value for name, value in weights.items() if name.startswith("readout.")}
        weights, norm = {**timm_weights(encoder.backbone, weights, path), **readout}, "backbone.model.norm."
    else:
        weights, norm = without_layer_scale(weights), "backbone.norm."
    if f"{norm}weight" not in encoder_state:  # the read-out has the last LayerNorm, or there is none
        weights = {name.replace(norm, "readout.norm."): value for name, value in weights.items()}
    if isinstance(encoder.backbone, Backbone):
        weights = _with_channels(weights, encoder.config.in_chans, path)
        _check_same_make(weights, encoder_state, path)
        grids = patch_sizes(weights)[-1], encoder.config.img_size // encoder.config.patch_size
        positions = encoder.backbone.adapt({"pos_embed": weights["backbone.pos_embed"]})["pos_embed"]
        weights = {**weights, "backbone.pos_embed": positions}
    taken = [name for name in encoder_state if name in weights and weights[name].shape == encoder_state[name].shape]
    # A read-out is taken whole or not at all: its queries were trained with its keys.
    readout_names = {name for name in (*encoder_state, *weights) if name.startswith("readout.")}
    if not readout_names <= set(taken):
        taken = [name for name in taken if name not in readout_names]
    encoder.load_state_dict({**encoder_state, **{name: weights[name] for name in taken}})
    return InitReport(
        path,
        tuple(taken),
        dropped=tuple(name for name in weights if name not in taken),
        new=tuple(name for name in encoder_state if name not in taken),
        grids=grids,
        projection=_adapted_projection(before, weights),
    )


def _adapted_projection(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> str:
    """How the first convolution (D, C, P, P) differs from the file's, for the log; empty if it does not."""
    for name, value in after.items():
        old = before.get(name, before.get(name.replace("backbone.model.", "backbone.")))
        if name.endswith(".weight") and old is not None and value.ndim == old.ndim == 4 and value.shape != old.shape:
            channels, sides = (f"{old.shape[axis]} to {value.shape[axis]}" for axis in (1, 3))
            changes = [f"adapted from {channels} channels"] if old.shape[1] != value.shape[1] else []
            changes += [f"resampled from {sides} px"] if old.shape[3] != value.shape[3] else []
            return f"; patch projection {' and '.join(changes)}"
    return ""


def _with_channels(weights: dict[str, Tensor], in_chans: int, path: str) -> dict[str, Tensor]:
    """The weights with the patch projection adapted to another number of channels, as timm does.

    For one channel the weights of red, green and blue are added. For more they are repeated and scaled by 3 / channels.
    CheckpointError if the weights are of neither 3 nor `in_chans` channels.
    """
    channels = patch_sizes(weights, path)[1]
    require_channels(channels, in_chans, path)
    name = "backbone.patch_embed.proj.weight"
    return weights if channels == in_chans else {**weights, name: adapt_input_conv(in_chans, weights[name])}


def check_same_blocks(checkpoint: Mapping[str, Any], quick_gelu: bool, arch: str, path: str) -> None:
    """Refuse weights that were trained with another activation or number of heads, where the file says which."""
    if activation_of(checkpoint) == (not quick_gelu):
        raise CheckpointError(
            f"{path} was trained with quick_gelu={not quick_gelu}, the model has quick_gelu={quick_gelu}; build "
            f"the model with --quick_gelu {str(not quick_gelu).lower()}"
        )
    pair = image_text_entry(checkpoint)
    entry = encoder_entry(checkpoint, path) if pair is None else pair.get("image", {})
    if entry is None:
        say_heads(arch, path)
    elif HEADS in (saved := entry.get("arch", arch)) + arch and size_of(saved) != size_of(arch):
        raise CheckpointError(f"{path} was trained with --arch {saved}, not {arch}; give --arch {saved}")


def _check_same_make(weights: Mapping[str, Tensor], encoder_state: Mapping[str, Tensor], path: str) -> None:
    """Refuse weights of another kind of ViT; number of blocks and grid may differ."""
    sizes, encoder_sizes = patch_sizes(weights), patch_sizes(encoder_state)
    if sizes[:3] != encoder_sizes[:3]:
        raise CheckpointError(
            f"{path} has width, channels and patch size {sizes[:3]}, the encoder {encoder_sizes[:3]}; choose other "
            "weights, or build the encoder for these weights (--arch, --patch_size)"
        )
    positions = tuple(weights["backbone.pos_embed"].shape)
    if positions != (1, sizes[-1] ** 2 + 1, sizes[0]):
        raise CheckpointError(
            f"{path} has positions {positions}; an encoder can only start from a square grid and one class token; "
            f"{timm_remedy(weights)}"
        )
    depth = min(num_blocks(weights), num_blocks(encoder_state))

    def common_part(network: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names = (name for name in network if name.startswith("backbone.") and block_of(name) < depth)
        return {name: network[name] for name in names if name != "backbone.pos_embed"}

    if problems := misfits(common_part(encoder_state), common_part(weights)):
        of_weights, of_encoder = ("backbone.norm_pre.weight" in names for names in (weights, encoder_state))
        pre_norm = f"build the encoder with --pre_norm {str(of_weights).lower()}"
        hint = pre_norm if of_weights != of_encoder else timm_remedy(weights)
        raise CheckpointError(f"{path} holds a ViT of another kind: {problems}; {hint}")

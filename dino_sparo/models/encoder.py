"""Images -> encodings (B, L*V): a backbone, a read-out, and the concatenation of its slots."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float
from timm.models import is_model
from torch import Tensor, nn

from dino_sparo.models.architectures import ARCHITECTURES, KEY_DIM, NUM_SLOTS, SLOT_DIM, TIMM, size_of
from dino_sparo.models.backbone import AnyBackbone, Backbone, default_patch_size
from dino_sparo.models.foreign_backbone import ForeignBackbone
from dino_sparo.models.readout import ReadoutOutput
from dino_sparo.models.readouts import ReadoutKind, ReadoutSizes, readout_kind
from dino_sparo.runtime.faults import UserError


@dataclass(frozen=True)
class EncoderConfig:
    """Architecture of an encoder. Every checkpoint holds this configuration, so other commands do not ask for it.

    Attributes:
        arch: a key of `ARCHITECTURES`, or `timm/NAME`.
        patch_size: P, or the stride of a timm model's map, in pixels.
        readout: a key of `READOUTS`.
        num_slots: L, for read-outs with slots.
        slot_dim: V, for read-outs with slots.
        key_dim: A, for read-outs with slots.
        group_size: G, for `sparo`.
        img_size: side in pixels of the images whose grid the position embedding stores.
        in_chans: number of image channels.
        pre_norm: CLIP's vision transformer instead of DINO's; see `Backbone`.
        replace_block: the read-out replaces the last block; None: as the read-out declares.
        quick_gelu: OpenAI's activation; see `Backbone`.
        num_codes: number of codes, for `fdt`.
        code_dim: M, for `fdt`.
    """

    arch: str = "vit_small"
    patch_size: int = 16
    readout: str = "sparo"
    num_slots: int = NUM_SLOTS
    slot_dim: int = SLOT_DIM
    key_dim: int = KEY_DIM
    group_size: int = 1
    img_size: int = 224
    in_chans: int = 3
    pre_norm: bool = False
    replace_block: bool | None = None
    quick_gelu: bool = False
    num_codes: int = 0
    code_dim: int = 0

    @property
    def kind(self) -> ReadoutKind:
        """Properties of the read-out."""
        return readout_kind(self.readout)

    @property
    def replaces_block(self) -> bool:
        """Whether the read-out replaces the last block."""
        return self.kind.replaces_block if self.replace_block is None else self.replace_block

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "EncoderConfig":
        """The configuration in a checkpoint's entry; ValueError if a field is unknown or of another type."""
        known: dict[str, Any] = {field.name: field.type for field in fields(cls)}
        for name in known.keys() & values.keys():
            if not isinstance(values[name], known[name]):
                kind = getattr(known[name], "__name__", str(known[name]))
                raise UserError(f"the encoder was saved with {name} {values[name]!r}, which is not of type {kind}")
        refuse_unknown("encoder", cls, values.keys() - {"mean", "std"})
        return cls(**{name: value for name, value in values.items() if name in known})


def refuse_unknown(what: str, config: type, names: Iterable[str]) -> None:
    """Refuse names of saved fields that the dataclass `config` lacks; `what` is the noun for the message."""
    if unknown := sorted(set(names) - {field.name for field in fields(config)}):
        raise UserError(f"the {what} was saved with {', '.join(unknown)}, which this version does not know; update")


class Encoder(nn.Module):
    """Backbone and read-out: images -> encoding (B, L*V).

    Attributes:
        transform: PIL image or array, or a list of them -> (B, C, img_size, img_size), normalised as in training; set
            for encoders that come from a checkpoint.
        is_vanilla: the encoding is the class token, so the read-out adds nothing to the backbone.
    """

    transform: Callable[[Any], Tensor]

    def __init__(self, backbone: AnyBackbone, readout: nn.Module, config: EncoderConfig) -> None:
        super().__init__()
        self.backbone = backbone
        self.readout = readout
        self.config = config
        self.is_vanilla = config.kind.reads_class_token_only

    @property
    def replaces_block(self) -> bool:
        """Whether the read-out replaces the backbone's last block; stages of a timm model all stay."""
        return self.config.replaces_block and self.backbone.has_blocks

    @property
    def encoding_dim(self) -> int:
        """Width of the encoding."""
        return getattr(self.readout, "encoding_dim", self.backbone.embed_dim)

    @property
    def summary(self) -> str:
        """Architecture and read-out with their sizes, for the log."""
        config, sizes = self.config, self.readout.extra_repr()
        channels = {1: " of 1 channel", 3: ""}.get(config.in_chans, f" of {config.in_chans} channels")
        name = f"{config.arch}/{config.patch_size} at {config.img_size} px{channels}, {config.readout}"
        return f"{name} ({sizes})" if sizes else name

    def forward(
        self, images: Float[Tensor, "B C H W"] | Sequence[Float[Tensor, "_ C _ _"]]
    ) -> Float[Tensor, "B encoding_dim"]:
        """Encode a batch (B, C, H, W), or a list of batches whose image sizes may differ.

        Returns:
            (B, L*V); for a list the encodings of its batches, concatenated in order.
        """
        return encode_crops(self.backbone, self.readout, images, self.is_vanilla)

    def readout_output(self, images: Float[Tensor, "B C H W"]) -> ReadoutOutput:
        """Slots (B, L, V) and their attention (B, L, N)."""
        return self.readout(self.backbone(images))

    def get_intermediate_layers(
        self,
        images: Float[Tensor, "B C H W"],
        n: int | Sequence[int] = 1,
        norm: bool = True,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
    ) -> tuple[Tensor | tuple[Tensor, Tensor], ...]:
        """Patch tokens after some blocks of the backbone, as DINOv2's and timm's vision transformers return them.

        Args:
            images: (B, C, H, W), normalised.
            n: number of last blocks, or indices of blocks.
            norm: apply the backbone's final LayerNorm.
            reshape: maps (B, D, H/P, W/P) instead of patch tokens (B, N, D); maps of earlier stages are larger.
            return_prefix_tokens: pairs of patch tokens and prefix tokens (class token, registers).

        Returns:
            One tensor, or pair, per block, in the order of the blocks.
        """
        layers = self.backbone.intermediate_tokens(images, n, norm)
        number = self.backbone.num_prefix_tokens
        patches = [tokens[:, number:] for tokens in layers]
        if reshape:
            rows, columns = self.backbone.grid(images)
            finer = [math.isqrt(tokens.shape[1] // (rows * columns)) for tokens in patches]  # 1, but for earlier stages
            patches = [
                tokens.transpose(1, 2).unflatten(2, (rows * factor, -1)).contiguous()
                for tokens, factor in zip(patches, finer, strict=True)
            ]
        if return_prefix_tokens:
            return tuple((tokens, layer[:, :number]) for tokens, layer in zip(patches, layers, strict=True))
        return tuple(patches)

    def probe_features(
        self, images: Float[Tensor, "B C H W"], n_last_blocks: int = 4, avgpool_patchtokens: bool = False
    ) -> Float[Tensor, "B F"]:
        """Input (B, F) of a linear probe: `probe_layers` concatenated.

        Args:
            images: (B, C, H, W).
            n_last_blocks: number of layers, read-out included.
            avgpool_patchtokens: append the mean of the last block's normalised patch tokens.
        """
        layers, last_tokens = self.probe_layers(images, n_last_blocks)
        if avgpool_patchtokens:
            layers.append(last_tokens[:, self.backbone.num_prefix_tokens :].mean(dim=1))
        return torch.cat(layers, dim=-1)

    def probe_layers(self, images: Float[Tensor, "B C H W"], n: int) -> tuple[list[Tensor], Float[Tensor, "B N D"]]:
        """Features of a linear probe, earliest first, and the last block's normalised tokens.

        The features are the class tokens of the last `n` layers after the final LayerNorm, or means of the patch tokens
        where there is no class token. The read-out counts as the last layer: for all read-outs but `cls` its feature is
        the unnormalised encoding (SPARO, appendix 0.C.2).

        Returns:
            n features, n - 1 class tokens (B, D) and the encoding (B, L*V); then the last block's tokens (B, N, D).
        """
        if self.is_vanilla:
            tokens = self.backbone.intermediate_tokens(images, n)
            return [block_tokens[:, 0] for block_tokens in tokens], tokens[-1]
        is_pooled = not self.replaces_block
        most = self.backbone.depth + (not is_pooled)
        if not 1 <= n <= most:
            raise UserError(f"n={n} layers requested of an encoder with {most}, read-out included")
        # With sparo the read-out replaces the last block, so n - 1 blocks precede it. A read-out that replaces no block
        # pools the last block, so the class token of that block is left out.
        tokens = self.backbone.intermediate_tokens(images, max(n - 1 + is_pooled, 1))
        class_tokens = [self._summary(block_tokens) for block_tokens in (tokens[:-1] if is_pooled else tokens)]
        encoding = self.readout(tokens[-1]).slots.flatten(1)
        return [*class_tokens[len(class_tokens) - (n - 1) :], encoding], tokens[-1]

    def _summary(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B D"]:
        """The class token, or the mean of the patch tokens where there is none."""
        backbone = self.backbone
        return tokens[:, 0] if backbone.has_class_token else tokens[:, backbone.num_prefix_tokens :].mean(dim=1)


def encode_crops(
    backbone: AnyBackbone, readout: nn.Module, crops: Tensor | Sequence[Tensor], class_token_only: bool = False
) -> Float[Tensor, "B encoding_dim"]:
    """Encode one batch or several; neighbours of equal image size run together.

    Args:
        backbone: images -> tokens.
        readout: tokens -> slots.
        crops: (B, C, H, W), or a non-empty list of such batches.
        class_token_only: the encoding is the class token, so the last block computes no other token.

    Returns:
        Encodings (total number of images, L*V), in the order of the list.
    """
    groups = group_by_size(crops)
    if class_token_only:
        return torch.cat([backbone.class_tokens(images) for images in groups])
    return torch.cat([readout(backbone(images)).slots.flatten(1) for images in groups])


def group_by_size(crops: Tensor | Sequence[Tensor]) -> list[Float[Tensor, "_ C _ _"]]:
    """A batch, or several, as one batch for all neighbours of equal image size."""
    if isinstance(crops, Tensor):
        return [crops]
    return [torch.cat(list(group)) for _, group in groupby(crops, key=lambda crop: crop.shape[-2:])]


def create_encoder(
    arch: str = "vit_small",
    patch_size: int | None = None,
    readout: str = "sparo",
    *,
    drop_path_rate: float = 0.0,
    **settings: Any,
) -> Encoder:
    """Build an encoder with random weights.

    With `sparo` the read-out replaces the architecture's last block (SPARO, section 3.4), which leaves 11 blocks of a
    ViT-S. `cls` (vanilla DINO) and `gap` keep all blocks.

    Args:
        arch: a key of `ARCHITECTURES`, or `timm/NAME`.
        patch_size: P, pixels; None: 16, or the timm model's own.
        readout: a key of `READOUTS`.
        drop_path_rate: stochastic depth rate.
        settings: other fields of `EncoderConfig`: num_slots, slot_dim, key_dim, img_size, in_chans, ...
    """
    patch_size = default_patch_size(arch) if patch_size is None else patch_size
    return encoder_from_config(EncoderConfig(arch, patch_size, readout, **settings), drop_path_rate)


def encoder_from_config(
    config: EncoderConfig, drop_path_rate: float = 0.0, codebook: nn.Parameter | None = None
) -> Encoder:
    """Build an encoder with random weights; `codebook` (codes, M) is that of a text encoder which shares it."""
    kind = config.kind
    if kind.reads_captions_only:
        raise UserError(f"readout {config.readout!r} reads captions only: an image has no end token; choose another")
    if kind.needs_codes and not config.num_codes:
        raise UserError(f"readout {config.readout!r} needs codes, which only CLIP has (train-clip); choose another")
    if codebook is None and kind.needs_codes:
        codebook = nn.Parameter(torch.randn(config.num_codes, config.code_dim))
    backbone = create_backbone(config, drop_path_rate)
    if kind.reads_class_token_only and not backbone.has_class_token:
        raise UserError(f"readout {config.readout!r}: {config.arch} has no class token; choose another, such as gap")
    return Encoder(backbone, kind.build(readout_sizes(backbone, config, codebook)), config)


def readout_sizes(backbone: AnyBackbone, config: EncoderConfig, codebook: nn.Parameter | None = None) -> ReadoutSizes:
    """The sizes of the read-out of a configuration on a backbone; `codebook` as in `encoder_from_config`."""
    return ReadoutSizes(
        backbone.embed_dim,
        config.num_slots,
        config.slot_dim,
        config.key_dim,
        config.group_size,
        codebook,
        backbone.num_prefix_tokens,
        norm_eps=backbone.norm_eps,
    )


def create_backbone(config: EncoderConfig, drop_path_rate: float = 0.0) -> AnyBackbone:
    """Build the backbone of an encoder with random weights: a model of timm, or our vision transformer."""
    kind, removed = config.kind, int(config.replaces_block)
    shared: dict[str, Any] = {
        "patch_size": config.patch_size,
        "img_size": config.img_size,
        "in_chans": config.in_chans,
        "drop_path_rate": drop_path_rate,
        "final_norm": not kind.takes_raw_tokens,
    }
    if config.arch.startswith(TIMM):  # whose name says its form: neither pre_norm nor quick_gelu applies
        name = config.arch.removeprefix(TIMM)
        return ForeignBackbone(name, remove_blocks=removed, class_token=kind.reads_class_token_only, **shared)
    size = size_of(config.arch)
    if size is None:
        hint = f"; did you mean timm/{config.arch}?" if is_model(config.arch.partition(".")[0]) else ""
        raise UserError(f"unknown arch {config.arch!r}; choose one of {sorted(ARCHITECTURES)}, or timm/NAME{hint}")
    depth = size.depth - removed
    return Backbone(size, depth=depth, pre_norm=config.pre_norm, quick_gelu=config.quick_gelu, **shared)

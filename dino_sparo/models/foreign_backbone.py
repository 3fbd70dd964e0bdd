"""Images -> tokens by the models of timm, as `--arch timm/NAME`.

A vision transformer gives its tokens: prefix tokens (class token, registers), then the patches row by row. A network of
stages (ResNet, ConvNeXt) gives its last feature map, whose positions are the tokens, row by row.
"""

import difflib
import inspect
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import timm
import torch
from jaxtyping import Bool, Float
from timm.models import adapt_input_conv, get_arch_pretrained_cfgs, group_parameters
from torch import Tensor, nn

from dino_sparo.runtime.faults import UserError

DEFAULT_EPS = 1e-6  # eps of the last LayerNorm for models without one
NUM_NEAREST = 3  # models that the message of an unknown name lists by their words, after the most similar names
LAST_NORMS = ("model.norm.", "model.fc_norm.", "model.head.norm.")
# Arguments by which a model reads images of any size, where its constructor has them.
ANY_SIZE = {"dynamic_img_size": True, "strict_img_size": False}
POSITIONS = "rotary_positions_{}x{}"  # the buffer of a grid


class ForeignBackbone(nn.Module):
    """A timm model without its classifier: images (B, C, H, W) -> tokens (B, N, D).

        tokens = backbone(images)                                    # equal to `model.forward_features(images)`
        prefix, patches = tokens[:, :number], tokens[:, number:]     # number = backbone.num_prefix_tokens
        maps = patches.transpose(1, 2).unflatten(2, backbone.grid(images))       # (B, D, rows, columns)

    The last norm is timm's: a model that normalises after pooling (`fc_norm`) gives tokens that are not normalised.
    Weights have timm's names below `model.`. Where `has_blocks`, the blocks are `model.blocks`, and
    `last_self_attention` gives the attention of the last one. `cls`, whose encoding is the class token, is refused
    where there is none: `gap` averages the tokens instead.

    Attributes:
        model: the model of timm.
        arguments: of `timm.create_model`.
        embed_dim: D.
        num_prefix_tokens: tokens before the first patch; 0 for maps.
        has_class_token: the first token is a class token.
        has_blocks: equal blocks, of which a read-out can replace the last; False for stages, which all stay.
        has_layers: a class token, or a mean, of equal width after every block.
        depth: number of blocks or stages whose tokens `intermediate_tokens` gives.
        norm_eps: eps of the last LayerNorm.

    Args:
        name: the model's name in timm.
        patch_size: P, side of a patch, or stride of the map, in pixels; stages have one stride alone.
        img_size: side in pixels of the images whose grid the position embedding stores.
        remove_blocks: number of blocks to leave out at the end.
        in_chans: number of image channels.
        drop_path_rate: stochastic depth rate of the last block of the architecture.
        final_norm: end with the model's norm; False for a read-out that takes raw tokens.
        class_token: keep what gives a class token after the blocks (class attention of XCiT and CaiT); only the last
            layer then has tokens to read.
    """

    _compute_positions: Any = None

    def __init__(
        self,
        name: str,
        patch_size: int,
        img_size: int = 224,
        remove_blocks: int = 0,
        in_chans: int = 3,
        drop_path_rate: float = 0.0,
        final_norm: bool = True,
        class_token: bool = False,
    ) -> None:
        super().__init__()
        plan = plan_of(name)
        settings = plan.settings(name, patch_size, img_size, drop_path_rate)
        self.name, self.patch_size, self.img_size, self.in_chans = name, patch_size, img_size, in_chans
        self.embed_dim, self.num_prefix_tokens = plan.embed_dim, plan.num_prefix_tokens
        self.has_class_token, self.has_blocks = plan.has_class_token, plan.has_blocks
        self._channels_last = plan.channels_last
        self._mask: tuple[Tensor | None, Tensor | None] = (None, None)
        self._attends_late = class_token and plan.has_late_class_token
        if self._attends_late:
            self.num_prefix_tokens, self.has_class_token = 1, True
        self._reads_any_size = plan.reads_any_size or bool(ANY_SIZE.keys() & settings)
        self.has_layers = self.has_blocks and not self._attends_late
        self.arguments = {"in_chans": in_chans, **settings}
        self.model = cast(Any, timm.create_model(name, num_classes=0, **self.arguments))
        rope: Any = getattr(self.model, "rope", None)
        # Trained positions, and positions that may be random in training, are computed in every forward pass.
        if not getattr(rope, "aug_active", True) and not list(rope.parameters()):
            self._compute_positions, rope.get_embed = rope.get_embed, self._rotary_positions
        self.depth = len(self.model.blocks) - remove_blocks if self.has_blocks else len(self.model.feature_info)
        if self.depth < 1:
            raise UserError(f"timm/{name} has one block, which the read-out would replace; choose another readout")
        self.norm_eps = getattr(getattr(self.model, "norm", None), "eps", DEFAULT_EPS)
        # Also leaves out what a classifier alone needs: pooling, the norm after it, class attention.
        self.model.prune_intermediate_layers(
            [self.depth - 1], prune_norm=not final_norm, prune_head=not self._attends_late
        )

    @property
    def stems(self) -> list[str]:
        """Timm's names of the weights that read the channels of an image, such as the patch projection's."""
        stems = self.model.pretrained_cfg.get("first_conv") or ()
        return [f"{stem}.weight" for stem in ([stems] if isinstance(stems, str) else stems)]

    def forward(
        self,
        images: Float[Tensor, "B C H W"],
        masked: Bool[Tensor, "B hw"] | None = None,
        mask_token: Float[Tensor, "1 D"] | None = None,
    ) -> Float[Tensor, "B N D"]:
        """Normalised images (B, C, H, W), at least one patch large -> tokens (B, N, D); masks as in `Backbone`."""
        self._mask = masked, mask_token
        features = self.model.forward_features(self._whole_patches(images))
        self._mask = None, None
        if features.ndim == 3:
            return features
        return features.flatten(1, 2) if self._channels_last else features.flatten(2).transpose(1, 2)

    def require_patches(self) -> None:
        """Refuse a model without a patch embedding, whose tokens cannot be masked before its blocks.

        The model calls the patch embedding itself; from now on the mask token enters behind it.

        Raises:
            UserError: the model has stages, or blocks without a patch embedding.
        """
        embedding = getattr(self.model, "patch_embed", None)
        if not self.has_blocks or not isinstance(embedding, nn.Module):
            kind = "blocks without a patch embedding" if self.has_blocks else "stages, which mix neighbouring patches"
            raise UserError(
                f"timm/{self.name} has {kind}, so patches cannot be masked; choose a vision transformer, such as "
                "timm/vit_small_patch16_dinov3, or an objective without masks (dino-sparo train)"
            )
        embedding.register_forward_hook(lambda module, inputs, patches: replace_masked(patches, *self._mask))

    def grid(self, images: Float[Tensor, "B C H W"]) -> tuple[int, int]:
        """Rows and columns of the images' patches; pixels beyond the last whole patch are left out."""
        return images.shape[-2] // self.patch_size, images.shape[-1] // self.patch_size

    def class_tokens(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B D"]:
        """`forward(images)[:, 0]`."""
        return self(images)[:, 0]

    def intermediate_tokens(
        self, images: Float[Tensor, "B C H W"], n: int | Sequence[int] = 1, norm: bool = True
    ) -> list[Float[Tensor, "B _ _"]]:
        """Tokens after some blocks or stages, in their order; N and D differ between stages.

        Args:
            images: (B, C, H, W), normalised.
            n: number of last blocks or stages, or their indices; negative indices count from the last.
            norm: apply the last norm, as timm does: to all blocks, but only to the last stage.
        """
        indices = layer_indices(n, self.depth)
        if self._attends_late:
            if indices != [self.depth - 1]:
                raise UserError(f"timm/{self.name} has a class token only after its last layer; give --n_last_blocks 1")
            return [self(images)]
        options: dict[str, Any] = {"indices": indices, "norm": norm, "intermediates_only": True, "stop_early": True}
        images = self._whole_patches(images)
        options |= {"output_fmt": "NLC"} if self.has_blocks else {}
        options |= {"return_prefix_tokens": True} if self.num_prefix_tokens else {}
        try:
            layers = self.model.forward_intermediates(images, **options)
        except (TypeError, AssertionError) as error:  # some models lack an option, or refuse its value
            raise UserError(f"timm/{self.name} gives no tokens of its inner layers ({error})") from error
        if not self.has_blocks:
            return [maps.flatten(2).transpose(1, 2) for maps in layers]
        if not self.num_prefix_tokens:
            return layers
        return [torch.cat((prefix, patches), dim=1) for patches, prefix in layers]

    def layers(self) -> dict[str, int]:
        """Layer of each weight: 0 for the embeddings, i for block i, counted over all stages; no last norm."""
        if self.has_blocks:  # timm puts registers, and CLIP's first norm, behind the blocks
            names = [name for name, _ in self.named_parameters() if not name.startswith(LAST_NORMS)]
            return {name: int(name.split(".")[2]) + 1 if name.startswith("model.blocks.") else 0 for name in names}
        layers = group_parameters(self.model, self.model.group_matcher(coarse=False), reverse=True)
        named = {f"model.{name}": layer for name, layer in layers.items()}
        return {name: layer for name, layer in named.items() if not name.startswith(LAST_NORMS)}

    def last_self_attention(
        self, images: Float[Tensor, "B C H W"], num_queries: int | None = None
    ) -> Float[Tensor, "B heads queries N"]:
        """Self-attention of the last block; see `Backbone.last_self_attention`.

        Raises:
            ValueError: the model has no blocks, or their attention is not a matrix of N x N tokens.
        """
        attention: Any = getattr(self.model.blocks[-1], "attn", None) if self.has_blocks else None
        maps: list[Tensor] = []
        if not hasattr(attention, "attn_drop"):
            raise UserError(f"timm/{self.name} computes no self-attention in its last block; draw another read-out")
        # The dropout of attention sees the matrix, unless attention is fused.
        hook = attention.attn_drop.register_forward_pre_hook(lambda module, inputs: maps.append(inputs[0]))
        is_fused, attention.fused_attn = getattr(attention, "fused_attn", False), False
        try:
            self(images)
        finally:
            hook.remove()
            attention.fused_attn = is_fused
        return maps[0][:, :, :num_queries]

    def adapt(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights of this architecture under this module's names or timm's, fitted by timm to grid, patch and channels.

        Args:
            weights: of this module or of the model of timm, optionally with a classifier, which stays in the result.
        """
        plain = {name.removeprefix("model."): value for name, value in weights.items()}
        convert = getattr(sys.modules[type(self.model).__module__], "checkpoint_filter_fn", None)
        adapted = convert(plain, self.model) if convert else plain
        for name in self.stems:
            if name in adapted and adapted[name].shape[1] == 3 != self.in_chans:
                adapted[name] = adapt_input_conv(self.in_chans, adapted[name])
        return {f"model.{name}": value for name, value in adapted.items()}

    def prepare(self, side: int) -> None:
        """Refuse images of `side` pixels that the model cannot read; compute rotary positions for the others.

        timm resamples other positions in every forward pass.
        """
        self._check_size(side, side)
        if self._compute_positions is not None:
            shape = (side // self.patch_size,) * 2
            self.register_buffer(POSITIONS.format(*shape), self._compute_positions(shape), persistent=False)

    def _rotary_positions(self, shape: tuple[int, int] | None = None, **options: Any) -> Tensor:
        """Rotary positions of a grid. timm computes them on the host, which a recorded step cannot do."""
        stored = None if shape is None or options else getattr(self, POSITIONS.format(*shape), None)
        return self._compute_positions(shape, **options) if stored is None else stored

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute activations of the blocks again for the backward pass."""
        self.model.set_grad_checkpointing(enable)

    def _whole_patches(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """The images without pixels beyond the last whole patch; ValueError if the model cannot read the images."""
        check_images(images, self.in_chans, self.patch_size)
        self._check_size(*images.shape[2:])
        rows, columns = self.grid(images)
        return images[..., : rows * self.patch_size, : columns * self.patch_size]

    def _check_size(self, height: int, width: int) -> None:
        if not self._reads_any_size and not height == width == self.img_size:
            raise UserError(
                f"timm/{self.name} reads only images of {self.img_size}x{self.img_size} px, not of {height}x{width} "
                "px; give one size (--local_crops_number 0), or a model that resamples its positions"
            )


@dataclass(frozen=True)
class ForeignPlan:
    """Properties of a timm model in its default sizes.

    Attributes:
        embed_dim: D.
        stride: side of a patch, or stride of the last map, in pixels.
        img_size: height in pixels of the images that the published weights were trained with, cut to whole patches.
        num_prefix_tokens, has_class_token, has_blocks: as in `ForeignBackbone`.
        channels_last: maps are (B, rows, columns, D).
        reads_any_size: without `ANY_SIZE`, as XCiT does, whose positions are computed.
        has_late_class_token: layers after the blocks compute a class token, which other read-outs leave out.
        mean, std: of the images that the published weights were trained with, per channel.
        parameters: arguments of the model's constructor.
    """

    embed_dim: int
    stride: int
    img_size: int
    num_prefix_tokens: int
    has_class_token: bool
    has_blocks: bool
    channels_last: bool
    reads_any_size: bool
    has_late_class_token: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    parameters: frozenset[str]

    def settings(self, name: str, patch_size: int, img_size: int, drop_path_rate: float) -> dict[str, Any]:
        """Arguments of `timm.create_model` that the model accepts.

        Raises:
            ValueError: the model has stages of another stride, or no stochastic depth.
        """
        if patch_size != self.stride and not (self.has_blocks and "patch_size" in self.parameters):
            raise UserError(
                f"--patch_size {patch_size} with timm/{name}, whose tokens are {self.stride} px apart; leave it out"
            )
        check_whole_patches(img_size, patch_size)
        if drop_path_rate and "drop_path_rate" not in self.parameters:
            raise UserError(f"--drop_path_rate {drop_path_rate}: timm/{name} has no stochastic depth; give 0")
        sizes: dict[str, Any] = {"img_size": img_size, **ANY_SIZE} if "img_size" in self.parameters else {}
        sizes |= {"patch_size": patch_size} if patch_size != self.stride else {}
        sizes |= {"drop_path_rate": drop_path_rate} if drop_path_rate else {}
        return {argument: value for argument, value in sizes.items() if argument in self.parameters}


def pretrained_weights(name: str, options: str) -> dict[str, Tensor]:
    """Timm's weights of a model under timm's names, from its cache or from the network.

    Args:
        name: the model's name in timm.
        options: that take a file of such weights, for the message.

    Raises:
        ValueError: there are none, or they can neither be found nor downloaded.
    """
    plan_of(name)
    logging.getLogger("huggingface_hub").handlers.clear()  # which print what the log has, too
    try:
        return timm.create_model(name, pretrained=True, num_classes=0).state_dict()
    except Exception as error:  # the hub's client raises errors of other libraries, too
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"no weights of timm/{name} ({reason}); with HF_HUB_OFFLINE=1 the cache is read without waiting for the "
            f"network; without a cache, download the weights where there is network and give {options}"
        ) from error


@lru_cache
def plan_of(name: str) -> ForeignPlan:
    """Properties of a timm model, which is built without memory.

    Raises:
        ValueError: no such model, or it gives neither tokens nor a map of the image.
    """
    architecture = name.partition(".")[0]  # without the tag of its weights
    if not timm.is_model(architecture):
        near = ", ".join(f"timm/{known}" for known in _nearest_models(architecture)) or "none"
        raise UserError(f"unknown arch 'timm/{name}'; the nearest are {near}, and timm.list_models() has all")
    tagged = [f"timm/{known}" for known in get_arch_pretrained_cfgs(architecture)]
    if name != architecture and f"timm/{name}" not in tagged:
        raise UserError(f"timm has no weights 'timm/{name}'; choose one of {', '.join(tagged)}")
    with torch.device("meta"):
        model: Any = timm.create_model(name, num_classes=0).eval()
        had_class_token = getattr(model, "cls_token", None) is not None
        model.prune_intermediate_layers()
        channels, height, width = model.pretrained_cfg["input_size"]
        features = model.forward_features(torch.empty(1, channels, height, width))
        reads_any_size = _reads(model, torch.empty(1, channels, height, 2 * width))
    strides = {info["reduction"] for info in model.feature_info}
    stride, has_class_token = max(strides), getattr(model, "cls_token", None) is not None
    rows, columns = height // stride, width // stride
    shape = tuple(features.shape) if isinstance(features, Tensor) else ()
    channels_last = getattr(model, "output_fmt", "NCHW") == "NHWC"
    prefix = getattr(model, "num_prefix_tokens", int(has_class_token)) if len(shape) == 3 else 0
    # Maps of images that are not a multiple of the stride, such as EfficientNet's of 240 px, may be padded.
    grids = (
        [(prefix + rows * columns,)]
        if len(shape) == 3
        else [(rows, columns), (-(-height // stride), -(-width // stride))]
    )
    if (shape[2:] if len(shape) == 4 and not channels_last else shape[1:-1]) not in grids:
        raise UserError(
            f"timm/{name} gives {shape or type(features).__name__} for an image of {height}x{width} px, neither tokens "
            "nor a map; choose a vision transformer or a network of stages, such as timm/resnet50"
        )
    constructors = [inspect.signature(kind).parameters for kind in type(model).__mro__[:-1]]
    return ForeignPlan(
        embed_dim=shape[1] if len(shape) == 4 and not channels_last else shape[-1],
        stride=stride,
        img_size=rows * stride,
        num_prefix_tokens=prefix,
        has_class_token=has_class_token and prefix > 0,
        has_blocks=len(shape) == 3 and len(strides) == 1 and hasattr(model, "blocks"),
        channels_last=channels_last,
        reads_any_size=reads_any_size,
        has_late_class_token=had_class_token and not has_class_token,
        mean=model.pretrained_cfg["mean"],
        std=model.pretrained_cfg["std"],
        parameters=frozenset(parameter for constructor in constructors for parameter in constructor),
    )


def _reads(model: Any, images: Float[Tensor, "B C H W"]) -> bool:
    """Whether a model gives features of images of this size."""
    try:
        model.forward_features(images)
    except (AssertionError, RuntimeError):  # of the patch embedding, or where positions are added
        return False
    return True


def _nearest_models(name: str) -> list[str]:
    """Timm's models with a similar name, and models whose names contain most words of the name."""
    known, words = timm.list_models(), name.split("_")
    counts = {model: sum(word in model for word in words if not word.isdecimal()) for model in known}
    sharing = sorted(filter(counts.get, known), key=lambda model: (-counts[model], len(model)))
    return list(dict.fromkeys([*difflib.get_close_matches(name, known, cutoff=0.4), *sharing[:NUM_NEAREST]]))


def check_whole_patches(img_size: int, patch_size: int) -> None:
    """Refuse a side of images, in pixels, that is not cut into whole patches."""
    if img_size < patch_size or img_size % patch_size:
        nearest = max(img_size // patch_size, 1) * patch_size
        multiple = f"is not a multiple of patch_size={patch_size} px; the nearest multiple is {nearest}"
        raise UserError(f"img_size={img_size} px {multiple}")


def replace_masked(
    patches: Float[Tensor, "B *grid D"], masked: Bool[Tensor, "B hw"] | None, mask_token: Float[Tensor, "1 D"] | None
) -> Float[Tensor, "B *grid D"]:
    """Projected patches, with the mask token where they are masked."""
    if masked is None or mask_token is None:
        return patches
    return torch.where(masked.view(patches.shape[:-1])[..., None], mask_token.to(patches.dtype), patches)


def check_images(images: Float[Tensor, "B C H W"], in_chans: int, patch_size: int) -> None:
    """Refuse images of another number of channels, or smaller than a patch."""
    channels, height, width = images.shape[1:]
    if channels != in_chans:
        raise UserError(
            f"images have {channels} channels; the backbone was built with in_chans={in_chans}; give images of "
            f"{in_chans} channels, or build it with in_chans={channels}"
        )
    if min(height, width) < patch_size:
        raise UserError(f"images of {height}x{width} px are smaller than one patch of {patch_size} px")


def layer_indices(n: int | Sequence[int], depth: int) -> list[int]:
    """Indices, from 0, of the last `n` of `depth` layers, or of the layers that `n` lists, in any order."""
    indices = range(-n, 0) if isinstance(n, int) else n
    if not indices or not all(-depth <= index < depth for index in indices):
        raise UserError(f"n={n} intermediate layers requested of a backbone with {depth} blocks")
    return sorted({index % depth for index in indices})

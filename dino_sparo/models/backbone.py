"""Images -> tokens: the vision transformer of DINO, built of timm's blocks.

`tokens = backbone(images)` turns images (B, C, H, W) of any size into tokens (B, N, D): the class token, then the
patches row by row. Weights have the names of facebookresearch/dino's `vision_transformer.py`, so its files load
unchanged. All other backbones are models of timm (`foreign_backbone.py`); docs/extending.md adds one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from timm.layers import PatchEmbed, QuickGELU, trunc_normal_
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dino_sparo.models.architectures import PATCH_SIZE, TIMM, ViTSize
from dino_sparo.models.foreign_backbone import (
    ForeignBackbone,
    check_images,
    check_whole_patches,
    layer_indices,
    plan_of,
    replace_masked,
)
from dino_sparo.runtime.faults import UserError

# The reference adds this to the wanted grid size before it divides, so that rounding cannot lose a row
# (facebookresearch/dino, discussion #8). It shifts the sampled positions a little, hence it must be the same here.
GRID_OFFSET = 0.1

# Eps of every LayerNorm: DINO's, and CLIP's (with `pre_norm`).
LAYER_NORM_EPS, PRE_NORM_EPS = 1e-6, 1e-5


class Backbone(nn.Module):
    """A pre-norm vision transformer with a class token and learned position embeddings.

        x_0 = [cls; patches W_E] + pos
        x_i = x'_i + MLP(LN(x'_i)),  x'_i = x_{i-1} + MHSA(LN(x_{i-1}))
        tokens = LN(x_depth)

    LayerNorm eps 1e-6, qkv with bias, MLP ratio 4, GELU. Linear layers, class token and position embedding start from a
    truncated normal (std 0.02). Stochastic depth grows linearly from 0 to `drop_path_rate` over the blocks of the whole
    architecture. Source: DINO, `vision_transformer.py`; ViT, section 3.1.

    `pre_norm` gives CLIP's vision transformer: x_0 = LN(that sum), no bias in the patch projection, eps 1e-5, timm's
    names of weights. It is initialized as in OpenCLIP: class token and positions normal with std D^-1/2, query, key and
    value together Xavier-uniform, biases of attention zero, all else as in torch. Source: CLIP, section 2.4; OpenCLIP,
    `transformer.py`.

    Args:
        size: width, depth and heads.
        patch_size: P, side of a patch in pixels.
        img_size: side in pixels of the square image whose grid the position embedding stores.
        in_chans: number of image channels.
        drop_path_rate: stochastic depth rate of the last block of the architecture.
        depth: number of blocks; None: `size.depth`. A read-out may replace the last block.
        pre_norm: normalise the tokens before the first block.
        quick_gelu: x sigmoid(1.702 x), OpenAI's activation, instead of GELU.
        final_norm: end with a LayerNorm; False for a read-out that takes raw tokens.
    """

    num_prefix_tokens = 1
    has_class_token = has_blocks = has_layers = True

    def __init__(
        self,
        size: ViTSize,
        patch_size: int = 16,
        img_size: int = 224,
        in_chans: int = 3,
        drop_path_rate: float = 0.0,
        depth: int | None = None,
        pre_norm: bool = False,
        quick_gelu: bool = False,
        final_norm: bool = True,
    ) -> None:
        super().__init__()
        _check_sizes(patch_size, img_size, in_chans, drop_path_rate)
        self.embed_dim, self.num_heads = size.embed_dim, size.num_heads
        self.depth = size.depth if depth is None else depth
        self.patch_size, self.img_size, self.in_chans = patch_size, img_size, in_chans
        self.norm_eps = PRE_NORM_EPS if pre_norm else LAYER_NORM_EPS
        grid_size = img_size // patch_size
        self.grad_checkpointing, self.is_random = False, drop_path_rate > 0
        self._resampling: dict[tuple[int, torch.device], Tensor] = {}
        # It names the weights; `_project_patches` computes.
        self.patch_embed = PatchEmbed(None, patch_size, in_chans, self.embed_dim, bias=not pre_norm)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, self.embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, grid_size**2 + 1, self.embed_dim))
        norm_layer: Any = partial(nn.LayerNorm, eps=self.norm_eps)
        self.norm_pre = norm_layer(self.embed_dim) if pre_norm else nn.Identity()
        act_layer: Any = QuickGELU if quick_gelu else nn.GELU
        # The rates are those of the whole architecture: removing the last block changes no other block's rate.
        drop_path_rates = np.linspace(0, drop_path_rate, size.depth).tolist()
        self.blocks = nn.ModuleList(
            Block(
                self.embed_dim,
                self.num_heads,
                mlp_ratio=4.0,
                qkv_bias=True,
                drop_path=rate,
                act_layer=act_layer,
                norm_layer=norm_layer,
            )
            for rate in drop_path_rates[: self.depth]
        )
        self.norm = norm_layer(self.embed_dim) if final_norm else nn.Identity()
        if pre_norm:
            self._init_as_open_clip()
        elif not self.pos_embed.is_meta:  # meta tensors have no numbers, and drawing for them is slow
            trunc_normal_(self.pos_embed, std=0.02)
            trunc_normal_(self.cls_token, std=0.02)
            self.blocks.apply(init_linear)

    def _init_as_open_clip(self) -> None:
        """Initialize as OpenCLIP's vision transformer."""
        nn.init.normal_(self.pos_embed, std=self.embed_dim**-0.5)
        nn.init.normal_(self.cls_token, std=self.embed_dim**-0.5)
        block: Any
        for block in self.blocks:
            nn.init.xavier_uniform_(block.attn.qkv.weight)
            nn.init.zeros_(block.attn.qkv.bias)
            nn.init.zeros_(block.attn.proj.bias)

    def forward(
        self,
        images: Float[Tensor, "B C H W"],
        masked: Bool[Tensor, "B hw"] | None = None,
        mask_token: Float[Tensor, "1 D"] | None = None,
    ) -> Float[Tensor, "B N D"]:
        """Normalised images (B, C, H, W), at least one patch large -> tokens (B, N, D) after the final LayerNorm.

        Args:
            images: (B, C, H, W).
            masked: where `mask_token` replaces the projection of a patch; None: nowhere.
            mask_token: (1, D).
        """
        return self.norm(self._run_blocks(self.embed(images, masked, mask_token), self.depth))

    def require_patches(self) -> None:
        """Does nothing: patches can be masked."""

    def embed(
        self, images: Float[Tensor, "B C H W"], masked: Tensor | None = None, mask_token: Tensor | None = None
    ) -> Float[Tensor, "B N D"]:
        """Images -> tokens before the first block: patches and class token plus positions, normalised if `pre_norm`."""
        check_images(images, self.in_chans, self.patch_size)
        height, width = images.shape[2:]
        patches = replace_masked(self._project_patches(images), masked, mask_token)
        cls_tokens = self.cls_token.expand(images.shape[0], -1, -1)  # len() would fix the batch of an ONNX file
        return self.norm_pre(torch.cat((cls_tokens, patches), dim=1) + self.position_embedding(height, width))

    def _project_patches(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B hw D"]:
        """The convolution of the patches as a matrix product, which is faster; weights are the convolution's.

        Like the reference, it leaves out pixels beyond the last whole patch.
        """
        side, projection = self.patch_size, self.patch_embed.proj
        rows, columns = self.grid(images)
        patches = images[:, :, : rows * side, : columns * side].unflatten(3, (columns, side)).unflatten(2, (rows, side))
        pixels = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # (B, rows * columns, C * side * side)
        return F.linear(pixels, projection.weight.flatten(1), projection.bias)

    def grid(self, images: Float[Tensor, "B C H W"]) -> tuple[int, int]:
        """Rows and columns of the images' patches; pixels beyond the last whole patch are left out."""
        return images.shape[-2] // self.patch_size, images.shape[-1] // self.patch_size

    def prepare(self, side: int) -> None:
        """Resample positions for images of `side` pixels before a compiler makes them a constant."""
        self.position_embedding(side, side)

    def position_embedding(self, height: int, width: int) -> Float[Tensor, "1 N D"]:
        """Position embedding of images of `height` x `width` pixels.

        A square image with the stored grid takes the stored embedding. For others the grid is resampled bicubically,
        without antialiasing, by the scale (wanted patches + 0.1) / stored patches per axis. (Like the reference, this
        resamples an oblong image that has the stored number of patches.)

            pos[r, c] = sum_ij R[r, i] C[c, j] grid[i, j]

        with one fixed matrix per axis, so that the backward pass is a matrix product and deterministic on every device.
        """
        grid_size = math.isqrt(self.pos_embed.shape[1] - 1)
        rows, columns = height // self.patch_size, width // self.patch_size
        if rows * columns == grid_size**2 and height == width:
            return self.pos_embed
        row_weights, column_weights = self._resampling_matrix(rows), self._resampling_matrix(columns)
        # In double, which neither autocast nor TF32 touches: rounding here would shift every token.
        grid = self.pos_embed[0, 1:].to(row_weights.dtype)
        by_rows = (row_weights @ grid.view(grid_size, -1)).view(rows, grid_size, -1)
        resampled = (column_weights @ by_rows).flatten(0, 1)[None].to(self.pos_embed.dtype)
        return torch.cat((self.pos_embed[:, :1], resampled), dim=1)

    def adapt(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights under this module's names, with positions of another grid resampled to this one."""
        positions, side = weights["pos_embed"].float(), self.img_size
        grid_size = math.isqrt(positions.shape[1] - 1)
        # A backbone without blocks, of the weights' grid: it resamples its positions.
        size = ViTSize(self.embed_dim, 0, self.num_heads)
        other = Backbone(size, self.patch_size, grid_size * self.patch_size, self.in_chans)
        other.pos_embed = nn.Parameter(positions)
        return {**weights, "pos_embed": other.position_embedding(side, side).detach()}

    def _resampling_matrix(self, length: int) -> Float[Tensor, "length grid_size"]:
        """Weights of the stored positions in each of `length` positions along an axis."""
        device, grid_size = self.pos_embed.device, math.isqrt(self.pos_embed.shape[1] - 1)
        matrix = self._resampling.get((length, device))
        if matrix is None or matrix.shape[1] != grid_size:
            # Training may follow on an evaluation, and its graph cannot hold tensors made in inference mode.
            with torch.inference_mode(False):
                matrix = _bicubic_matrix(grid_size, length)
                matrix = (matrix.float() if device.type == "mps" else matrix).to(device)  # which has no double
            # A compiled graph must not change what it was compiled with; there the matrix is a constant.
            if not torch.compiler.is_compiling():
                self._resampling[length, device] = matrix
        return matrix

    def class_tokens(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B D"]:
        """`forward(images)[:, 0]`, (B, D), with less work: the last block computes no other token.

        Stochastic depth draws the same random numbers as in `forward`.
        """
        return self.last_class_tokens(self._run_blocks(self.embed(images), self.depth - 1))

    def last_class_tokens(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B D"]:
        """Normalised class tokens (B, D) of the last block, from the tokens before it."""
        return self.norm(self.call(_class_token_after, self.blocks[-1], tokens))[:, 0]

    def intermediate_tokens(
        self, images: Float[Tensor, "B C H W"], n: int | Sequence[int] = 1, norm: bool = True
    ) -> list[Float[Tensor, "B N D"]]:
        """Tokens (B, N, D) after some blocks, in the order of the blocks.

        Args:
            images: (B, C, H, W), normalised.
            n: number of last blocks, or indices of blocks; negative indices count from the last block.
            norm: apply the final LayerNorm.
        """
        wanted = layer_indices(n, self.depth)
        tokens, outputs = self.embed(images), []
        for index, block in enumerate(self.blocks[: max(wanted) + 1]):
            tokens = self.call(block, tokens)
            if index in wanted:
                outputs.append(self.norm(tokens) if norm else tokens)
        return outputs

    def last_self_attention(
        self, images: Float[Tensor, "B C H W"], num_queries: int | None = None
    ) -> Float[Tensor, "B heads queries N"]:
        """Self-attention of the last block, softmax(Q K^T / sqrt(D / heads)); sums to one over the last axis.

        It is computed beside the block, which keeps its fused attention.

        Args:
            images: (B, C, H, W), normalised.
            num_queries: number of leading tokens whose attention is returned (1: the class token); None: all N.
        """
        block: Any = self.blocks[-1]
        tokens = block.norm1(self._run_blocks(self.embed(images), self.depth - 1))
        qkv = block.attn.qkv(tokens).unflatten(-1, (3, self.num_heads, -1))  # (B, N, 3, heads, D/heads)
        queries, keys, _ = qkv.permute(2, 0, 3, 1, 4)
        queries = queries[:, :, :num_queries]
        return (queries @ keys.transpose(-2, -1) * queries.shape[-1] ** -0.5).softmax(dim=-1)

    def layers(self) -> dict[str, int]:
        """Layer of each weight: 0 for the embeddings, i for block i, counted from 1; the last LayerNorm is left out."""
        names = [name for name, _ in self.named_parameters() if not name.startswith("norm.")]
        return {name: int(name.split(".")[1]) + 1 if name.startswith("blocks.") else 0 for name in names}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep only the blocks' inputs for the backward pass and recompute the rest with equal random numbers."""
        self.grad_checkpointing = enable

    def _run_blocks(self, tokens: Tensor, count: int) -> Tensor:
        for block in self.blocks[:count]:
            tokens = self.call(block, tokens)
        return tokens

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """A block's function of these arguments; with checkpointing the backward pass computes it again."""
        if self.grad_checkpointing and torch.is_grad_enabled():
            # Random states are read from the device, which a recording cannot do.
            return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=self.is_random)
        return function(*arguments)


AnyBackbone = Backbone | ForeignBackbone


def _class_token_after(block: Any, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B 1 D"]:
    """Class token after `block`; other tokens serve as keys and values only."""
    attn, width = block.attn, tokens.shape[-1]
    class_token, normed = tokens[:, :1], block.norm1(tokens)
    (query_weight, weight), (query_bias, bias) = (
        parameter.split((width, 2 * width)) for parameter in (attn.qkv.weight, attn.qkv.bias)
    )
    queries = F.linear(normed[:, :1], query_weight, query_bias)
    attended = attention(attn, queries, *F.linear(normed, weight, bias).chunk(2, dim=-1))
    class_token = class_token + block.drop_path1(attn.proj(attended))
    return class_token + block.drop_path2(block.mlp(block.norm2(class_token)))


def attention(
    attn: Any, queries: Float[Tensor, "B M D"], keys: Float[Tensor, "B N D"], values: Float[Tensor, "B N D"]
) -> Float[Tensor, "B M D"]:
    """Multi-head attention between the projections of a timm `Attention`: softmax(Q K^T / sqrt(D / heads)) V."""
    queries, keys, values = (
        tokens.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2) for tokens in (queries, keys, values)
    )  # (B, heads, tokens, D/heads) each
    if attn.fused_attn:
        attended = F.scaled_dot_product_attention(queries, keys, values)
    else:
        scores = (queries * queries.shape[-1] ** -0.5) @ keys.transpose(-2, -1)
        attended = scores.softmax(dim=-1) @ values
    return attended.transpose(1, 2).flatten(2)


def _bicubic_matrix(length: int, wanted: int) -> Float[Tensor, "wanted length"]:
    """Matrix by which torch resamples `length` numbers to `wanted`, in double: its result for each unit vector."""
    # On the CPU in any context: on the meta device, where options are checked, torch interpolates in slow Python.
    units = torch.eye(length, dtype=torch.float64, device="cpu")[None, :, :, None]  # a batch of one, a channel for each
    scale = (wanted + GRID_OFFSET) / length
    return F.interpolate(units, scale_factor=(scale, 1.0), mode="bicubic")[0, :, :, 0].t()


def default_patch_size(arch: str, ours: int = PATCH_SIZE) -> int:
    """Default side of a patch, or stride, of an architecture, in pixels; `ours` is the default of our ViTs."""
    return plan_of(arch.removeprefix(TIMM)).stride if arch.startswith(TIMM) else ours


def has_stochastic_depth(arch: str) -> bool:
    """Whether an architecture takes a drop path rate above 0."""
    return not arch.startswith(TIMM) or "drop_path_rate" in plan_of(arch.removeprefix(TIMM)).parameters


def _check_sizes(patch_size: int, img_size: int, in_chans: int, drop_path_rate: float) -> None:
    if patch_size < 1:
        raise UserError(f"patch_size={patch_size} px; give a positive number, usually 4 to 32")
    check_whole_patches(img_size, patch_size)
    if in_chans < 1:
        raise UserError(f"in_chans={in_chans}; an image has at least one channel")
    if not 0 <= drop_path_rate < 1:
        raise UserError(f"drop_path_rate={drop_path_rate} is not a rate; give one in [0, 1)")


def init_linear(module: nn.Module) -> None:
    """Initialize a linear layer, in place, as DINO does: truncated normal weights (std 0.02), biases zero."""
    if isinstance(module, nn.Linear) and not module.weight.is_meta:
        trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)

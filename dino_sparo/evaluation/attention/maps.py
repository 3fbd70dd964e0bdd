"""Images -> one attention map per slot (sparo) or per head (cls), and numbers about maps.

Shapes: `maps` is the number of maps per image, L with `sparo`; h, w are rows and columns of the patch grid.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from dino_sparo.draw.pixels import maps_grid, to_pixels
from dino_sparo.models.encoder import Encoder
from dino_sparo.runtime.faults import UserError

NEAR_DUPLICATE = 0.95  # least cosine similarity of two maps that look the same; our choice
Maps = Float[np.ndarray, "B maps h w"]


def attention_maps(encoder: Encoder, images: Float[Tensor, "B C H W"]) -> Maps:
    """The maps of `maps_and_slots`."""
    return maps_and_slots(encoder, images)[0]


@torch.no_grad()
def maps_and_slots(encoder: Encoder, images: Float[Tensor, "B C H W"]) -> tuple[Maps, Float[np.ndarray, "B L V"]]:
    """Attention maps of slots or heads, and the slots; with `cls` the class token is the only slot.

        sparo  the slots' attention over the patch tokens                        maps = L
        cls    the class token's row of the last block's self-attention          maps = heads
        gap    uniform, 1 / N                                                    maps = 1

    The maps are raw: the sum of a map is the share of attention to patches. The rest goes to class token and registers
    (`class_token_share`).

    Args:
        encoder: in eval mode.
        images: (B, C, H, W), normalised, on any device; pixels beyond the last whole patch are not seen.

    Returns:
        Maps (B, maps, h, w) fp32, non-negative, h = H // patch size, w = W // patch size; slots (B, L, V).
    """
    images = images.to(next(encoder.backbone.parameters()).device)
    tokens = encoder.backbone(images)
    output = encoder.readout(tokens)
    attention = output.attention
    if encoder.config.kind.shows == "head":
        attention = encoder.backbone.last_self_attention(images, num_queries=1)[:, :, 0]
    patches = attention[:, :, encoder.backbone.num_prefix_tokens :]
    maps = patches.unflatten(-1, encoder.backbone.grid(images))
    if not (maps.isfinite().all() and output.slots.isfinite().all()):
        raise UserError("attention maps or slots are not finite; the encoder is broken")
    return maps.float().cpu().numpy(), output.slots.float().cpu().numpy()


def class_token_share(maps: Float[np.ndarray, "*B h w"]) -> Float[np.ndarray, "*B"]:
    """Share of attention to class token and registers, in [0, 1]; 0 without such tokens."""
    return np.asarray(np.clip(1 - maps.sum(axis=(-2, -1)), 0, 1))


def effective_patches(maps: Float[np.ndarray, "*B h w"]) -> Float[np.ndarray, "*B"]:
    """Effective number of patches of a map: exp(entropy) of its attention over the patches.

        p = map / sum(map),  effective patches = exp(-sum p log p)

    1 for a single patch, k for k equal patches, h * w for a uniform or an empty map. Maps are non-negative and may have
    any sum.
    """
    flat = maps.reshape(*maps.shape[:-2], -1).astype(np.float64)
    total = flat.sum(axis=-1, keepdims=True)
    shares = np.where(total > 0, flat / np.where(total > 0, total, 1), 1 / flat.shape[-1])
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    return np.asarray(np.exp(-(shares * logs).sum(axis=-1)), dtype=maps.dtype)


def rank_by_peakedness(maps: Maps) -> Int[np.ndarray, " maps"]:
    """Numbers of maps by peakedness, the geometric mean of their effective patches over the images; smallest first."""
    return np.argsort(np.log(effective_patches(maps)).mean(axis=0), kind="stable")


def map_similarity(maps: Maps) -> Float[np.ndarray, "maps maps"]:
    """Cosine similarity of every two maps, averaged over the images, in [0, 1]."""
    flat = maps.reshape(*maps.shape[:2], -1).astype(np.float64)
    norms = np.linalg.norm(flat, axis=-1, keepdims=True)
    unit = flat / np.where(norms > 0, norms, 1)
    return np.clip(np.einsum("bmn,bkn->mk", unit, unit) / len(maps), 0, 1)  # b image, m and k maps, n patch


def group_near_duplicates(maps: Maps) -> Int[np.ndarray, " maps"]:
    """Group maps that look the same on all images.

    Maps are taken in the order of `rank_by_peakedness`. A map joins the group whose first member is most similar to it,
    if their cosine similarity, averaged over the images, is at least `NEAR_DUPLICATE`; otherwise the map opens a new
    group. So no group grows by a chain of small differences.

    Returns:
        (maps,) the group of each map; groups are numbered from 0 in the order of their most peaked member.
    """
    similarity = map_similarity(maps)
    groups = np.full(maps.shape[1], -1)
    firsts: list[int] = []
    for index in rank_by_peakedness(maps):
        resemblance = similarity[index, firsts]
        if firsts and resemblance.max() >= NEAR_DUPLICATE:
            groups[index] = resemblance.argmax()
        else:
            groups[index] = len(firsts)
            firsts.append(int(index))
    return groups


def display_order(maps: Maps, groups: Int[np.ndarray, " maps"], max_maps: int | None = None) -> Int[np.ndarray, " _"]:
    """Numbers of maps in the order of a figure: by peakedness, near-duplicates behind the first map of their group.

    If there are more than `max_maps` maps, only the first maps of at most `max_maps` groups.
    """
    ranking = rank_by_peakedness(maps)
    order = ranking[np.argsort(groups[ranking], kind="stable")]
    if max_maps is None or max_maps >= len(order):
        return order
    return order[np.unique(groups[order], return_index=True)[1]][:max_maps]


def mass_mask(heatmap: Float[np.ndarray, "*B h w"], share: float) -> Bool[np.ndarray, "*B h w"]:
    """The smallest set of patches with a share in (0, 1] of each map's mass, as the reference's `--threshold`.

    Maps are non-negative and may have any sum. A share of 1 takes every patch with attention.
    """
    mass = heatmap.reshape(*heatmap.shape[:-2], -1).astype(np.float64)
    order = np.argsort(-mass, axis=-1, kind="stable")
    ordered = np.take_along_axis(mass, order, axis=-1)
    larger = np.cumsum(ordered, axis=-1) - ordered  # mass of all patches before each patch
    mask = np.zeros(mass.shape, dtype=bool)
    is_inside = (larger < share * mass.sum(axis=-1, keepdims=True)) & (ordered > 0)
    np.put_along_axis(mask, order, is_inside, axis=-1)
    return mask.reshape(heatmap.shape)


def slots_grid(
    encoder: Encoder, images: Float[Tensor, "B C H W"], mean: Sequence[float], std: Sequence[float]
) -> UInt8[np.ndarray, "_ _ 3"]:
    """A few images and all their maps, for TensorBoard, in the order of the maps' numbers."""
    maps = attention_maps(encoder, images)
    height, width = (side * encoder.backbone.patch_size for side in maps.shape[-2:])
    return maps_grid(to_pixels(images[:, :, :height, :width], mean, std), maps)


def letters_of_groups(groups: Int[np.ndarray, " maps"]) -> list[str]:
    """A letter (A, B, ..., Z, A1, B1, ...) for each member of a group of two or more; empty for other maps."""
    shared = np.flatnonzero(np.bincount(groups) > 1).tolist()
    letters = {group: f"{chr(ord('A') + i % 26)}{i // 26 or ''}" for i, group in enumerate(shared)}
    return [letters.get(group, "") for group in groups.tolist()]

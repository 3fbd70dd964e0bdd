"""Name of a read-out -> how it is built and what other code needs to know about it.

A new read-out is one class and one entry of `READOUTS`, here or in a file outside of this package; docs/extending.md
has an example. No other file tests the name of a read-out, but `weights/foreign.py`, which knows sparo-clip's names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from dino_sparo.models.architectures import CROSS_ATTENTION, KEY_DIM, NUM_SLOTS, SLOT_DIM, CrossAttentionKind
from dino_sparo.models.pooling import AttentionReadout, CodebookReadout, CrossAttentionReadout, EfficientProbing
from dino_sparo.models.readout import (
    AveragePoolReadout,
    AverageThenNormReadout,
    ClassTokenReadout,
    EndTokenReadout,
    Sparo,
)
from dino_sparo.runtime.faults import UserError


@dataclass(frozen=True)
class ReadoutSizes:
    """Sizes that a read-out can be built from.

    Attributes:
        embed_dim: D, width of the tokens.
        num_slots: L.
        slot_dim: V.
        key_dim: A.
        group_size: G, slots that share a key.
        codebook: (codes, M), for read-outs with codes.
        num_prefix_tokens: tokens before the first patch; 0 for captions.
        context_length: longest caption in tokens; None for images.
        norm_eps: eps of the backbone's LayerNorms.
    """

    embed_dim: int
    num_slots: int = NUM_SLOTS
    slot_dim: int = SLOT_DIM
    key_dim: int = KEY_DIM
    group_size: int = 1
    codebook: nn.Parameter | None = None
    num_prefix_tokens: int = 0
    context_length: int | None = None
    norm_eps: float = 1e-5


@dataclass(frozen=True)
class ReadoutKind:
    """Builder and properties of a read-out.

    The module takes tokens (B, N, D) and a mask (B, N) and returns a `ReadoutOutput`. Its attribute `encoding_dim` is
    L*V; without this attribute the encoding is as wide as the tokens.

    Attributes:
        build: makes the module.
        replaces_block: it replaces the last block, unless the options say otherwise.
        takes_raw_tokens: its tokens have not passed the last LayerNorm.
        needs_codes: it takes a codebook.
        has_slots: it gives L slots of width V; otherwise one slot.
        normalized_per_slot: CLIP normalises each slot, not the encoding as a whole.
        reads_captions_only: it needs a caption's end token.
        reads_class_token_only: the encoding is the class token, so the last block computes no other token.
        shows: content of one of its maps: "slot"; "head" of the last block, where the read-out has no attention of its
            own; or "average", the same map for every image.
    """

    build: Callable[[ReadoutSizes], nn.Module]
    replaces_block: bool = False
    takes_raw_tokens: bool = False
    needs_codes: bool = False
    has_slots: bool = False
    normalized_per_slot: bool = False
    reads_captions_only: bool = False
    reads_class_token_only: bool = False
    shows: str = "slot"


def _sparo(sizes: ReadoutSizes) -> nn.Module:
    return Sparo(sizes.embed_dim, sizes.num_slots, sizes.slot_dim, sizes.key_dim, sizes.group_size)


def _cross_attention(kind: CrossAttentionKind, sizes: ReadoutSizes) -> nn.Module:
    if sizes.group_size != 1:
        raise UserError(
            f"group_size={sizes.group_size} with this readout: only 'sparo' shares keys between slots; leave it at 1"
        )
    return CrossAttentionReadout(sizes.embed_dim, sizes.num_slots, sizes.slot_dim, sizes.key_dim, kind)


def _attention(sizes: ReadoutSizes) -> nn.Module:
    if sizes.num_slots * sizes.slot_dim != sizes.embed_dim:
        raise UserError(
            f"readout 'attention' with num_slots={sizes.num_slots}, slot_dim={sizes.slot_dim}: the heads together "
            f"are as wide as a token, {sizes.embed_dim}; give sizes whose product it is"
        )
    return AttentionReadout(sizes.embed_dim, sizes.num_slots)


def _codes(sizes: ReadoutSizes, competes_with_padding: bool) -> nn.Module:
    if sizes.codebook is None:
        raise UserError("readout 'fdt' needs a codebook; give the parameter (codes, M) that both towers share")
    context_length = sizes.context_length if competes_with_padding else None
    return CodebookReadout(sizes.embed_dim, sizes.codebook, sizes.num_prefix_tokens, context_length)


READOUTS: dict[str, ReadoutKind] = {
    "sparo": ReadoutKind(_sparo, replaces_block=True, has_slots=True, normalized_per_slot=True),
    "cls": ReadoutKind(lambda sizes: ClassTokenReadout(), reads_class_token_only=True, shows="head"),
    "gap": ReadoutKind(lambda sizes: AveragePoolReadout(), shows="average"),
    "gap_then_norm": ReadoutKind(
        lambda sizes: AverageThenNormReadout(sizes.embed_dim, sizes.norm_eps), takes_raw_tokens=True, shows="average"
    ),
    "fdt": ReadoutKind(partial(_codes, competes_with_padding=False), needs_codes=True),
    "fdt_raw": ReadoutKind(partial(_codes, competes_with_padding=True), takes_raw_tokens=True, needs_codes=True),
    # Attentional pooling is normalised as a whole, as CoCa's is. Its relatives in table 6 are variants of SPARO and are
    # normalised as SPARO is, which the paper does not say.
    **{
        name: ReadoutKind(partial(_cross_attention, kind), has_slots=True, normalized_per_slot=name != "attpool")
        for name, kind in CROSS_ATTENTION.items()
    },
    "ep": ReadoutKind(
        lambda sizes: EfficientProbing(sizes.embed_dim, sizes.num_slots, sizes.slot_dim),
        has_slots=True,
        normalized_per_slot=True,
    ),
    "attention": ReadoutKind(_attention, has_slots=True, normalized_per_slot=True),
    "eos": ReadoutKind(lambda sizes: EndTokenReadout(), reads_captions_only=True),
}
BUILT_IN_READOUTS = frozenset(READOUTS)  # without read-outs that a user's file registers


def readout_kind(name: str) -> ReadoutKind:
    """Properties of a read-out; ValueError if the name is unknown."""
    if name not in READOUTS:
        raise UserError(
            f"unknown readout {name!r}; choose one of {sorted(READOUTS)}. If a file of yours registers it, run the "
            f"command through that file: python YOUR_FILE.py COMMAND ..."
        )
    return READOUTS[name]

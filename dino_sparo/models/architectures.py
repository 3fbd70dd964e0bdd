"""Names and sizes of backbones and read-outs, as plain values.

No torch here: command lines are parsed, and `--help` is answered, before torch is imported. `readouts.READOUTS` maps
the names of read-outs to what builds them; a test compares the names.
"""

import re
from typing import NamedTuple


class ViTSize(NamedTuple):
    """Width, number of blocks and number of heads of a vision transformer."""

    embed_dim: int
    depth: int
    num_heads: int


ARCHITECTURES: dict[str, ViTSize] = {
    # For laptops and tests; not an architecture of the literature.
    "vit_micro": ViTSize(embed_dim=128, depth=4, num_heads=4),
    "vit_tiny": ViTSize(embed_dim=192, depth=12, num_heads=3),
    "vit_small": ViTSize(embed_dim=384, depth=12, num_heads=6),
    "vit_base": ViTSize(embed_dim=768, depth=12, num_heads=12),
    "vit_large": ViTSize(embed_dim=1024, depth=24, num_heads=16),
    "vit_huge": ViTSize(embed_dim=1280, depth=32, num_heads=16),
}


HEADS = "_heads"  # before another number of attention heads: vit_small_heads12


def size_of(arch: str) -> ViTSize | None:
    """Sizes of a vision transformer of ours, with the heads that its name says; None for any other name."""
    name, _, heads = arch.partition(HEADS)
    size = ARCHITECTURES.get(name)
    if size is None or name == arch:
        return size
    is_divisor = heads.isdecimal() and int(heads) > 0 and size.embed_dim % int(heads) == 0
    return size._replace(num_heads=int(heads)) if is_divisor else None


TIMM = "timm/"  # prefix of architectures that timm builds
# Networks of torchvision that are the same in timm: computation, names of weights, name of the architecture.
TORCHVISION_NETWORKS = (
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "wide_resnet50_2", "wide_resnet101_2"),
    *("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d"),
)


def arch_name(text: str) -> str:
    """Our name of an architecture, for our name or facebookresearch/dino's: the type of `--arch`."""
    if text in TORCHVISION_NETWORKS:
        return TIMM + text
    if re.fullmatch(r"xcit_\w+_p(8|16)", text):
        return f"{TIMM}{text}_224"
    return text.replace("deit_", "vit_", 1) if text.startswith("deit_") else text


PATCH_SIZE = 16  # pixels, of our own vision transformers


class CrossAttentionKind(NamedTuple):
    """A row of table 6: its columns `Cross-attention`, `Slot-wise LayerNorm` and `Slot-wise projection`."""

    separate_heads: bool
    slotwise_norm: bool
    slotwise_projection: bool


CROSS_ATTENTION: dict[str, CrossAttentionKind] = {
    name: CrossAttentionKind(name.startswith("separate"), "slotnorm" in name, "slotproj" in name)
    for name in (
        *("attpool", "multihead_slotproj", "multihead_slotnorm", "multihead_slotnorm_slotproj"),
        *("separate", "separate_slotproj", "separate_slotnorm", "separate_slotnorm_slotproj"),
    )
}


# The read-outs that `--help` of DINO's training and its demo name; all of them stand in `readouts.READOUTS`.
DINO_READOUTS = ("cls", "gap", "sparo")
READOUTS = (*DINO_READOUTS, *CROSS_ATTENTION, "gap_then_norm", "fdt", "fdt_raw", "ep", "attention", "eos")
# The paper's L, V and D for DINO and for CLIP on Conceptual Captions (section 4); with LAION-400M it has L = 128.
NUM_SLOTS, SLOT_DIM, KEY_DIM = 64, 64, 64

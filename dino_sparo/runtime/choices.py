"""Choices of options as plain values: names of parts, sizes of architectures.

No torch here: command lines are parsed, and `--help` is answered, before torch is imported. The tables that map a name
to what it builds stay with the parts (`readouts.READOUTS`, `optim.OPTIMIZERS`, `export.WRITERS`,
`trackers.TRACKERS`); tests compare their names with those here.
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
    """Sizes of a vision transformer of ours, maybe with another number of heads; None for any other name."""
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
    """The name of an architecture, of one that facebookresearch/dino calls otherwise ours: the type of `--arch`."""
    if text in TORCHVISION_NETWORKS:
        return TIMM + text
    if re.fullmatch(r"xcit_\w+_p(8|16)", text):
        return f"{TIMM}{text}_224"
    return text.replace("deit_", "vit_", 1) if text.startswith("deit_") else text


PATCH_SIZE = 16  # pixels, of our own vision transformers


class CrossAttentionKind(NamedTuple):
    """A row of table 6: what the columns `Cross-attention`, `Slot-wise LayerNorm` and `Slot-wise projection` say."""

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
OPTIMIZERS = ("adamw", "lars", "sgd")
PRECISIONS = ("bf16", "fp16", "fp32", "tf32")
TRACKERS = ("tensorboard", "wandb", "trackio")
EXPORT_FORMATS = ("safetensors", "timm", "huggingface", "onnx", "open_clip", "sparo_clip")

# Up to this many unreadable images are always tolerated: of 100 images, a share would be one or two.
MIN_CORRUPT = 5

# Larger image files (10^6 bytes) and images (10^6 pixels) are not decoded; see `sources/decode.py`.
MAX_IMAGE_MB, MAX_IMAGE_MPIX = 256.0, 64.0
# The value of a 16-bit grayscale image that is white.
MAX_VALUE = 65535
EXIF = ("apply", "ignore")  # an image's orientation in its EXIF data

SCENE_SIZE = 64  # side of a built-in scene in pixels

# Per channel, of pixels in 0..1; ImageNet's.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
# CLIP's own.
OPENAI_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

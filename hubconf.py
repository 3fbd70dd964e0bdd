"""Encoders through torch.hub, from a clone of this repository or from GitHub.

    torch.hub.load("path/to/clone", "dino_sparo_encoder", "runs/vits16/checkpoint.pth", source="local")
    torch.hub.load("path/to/clone", "encoder", arch="vit_small", readout="sparo", source="local")    # random weights
    torch.hub.load("path/to/clone", "dino_vits16", source="local")    # the names of facebookresearch/dino

The last name, and its siblings, download the weights that DINO's authors released.
"""

from functools import partial
from typing import Any

from torch import nn

# torch.hub checks these before it calls anything here, hence the package is imported inside the functions.
dependencies = ["torch", "torchvision", "timm", "numpy", "PIL", "jaxtyping", "safetensors"]


def dino_sparo_encoder(path: str, which: str = "teacher") -> nn.Module:
    """The encoder of a checkpoint or of a safetensors export, in eval mode, on the CPU.

    Args:
        path: as `dino_sparo.load_encoder` takes it: a .pth checkpoint, ours or the reference's, an export, or "demo".
        which: `teacher` or `student`; an export holds one of them.
    """
    from dino_sparo import load_encoder

    return load_encoder(path, which)


def encoder(arch: str = "vit_small", readout: str = "sparo", **sizes: int | float) -> nn.Module:
    """An encoder with random weights, to be trained.

    Args:
        arch: a key of `dino_sparo.models.architectures.ARCHITECTURES`, for example `vit_small`.
        readout: a key of `dino_sparo.models.readouts.READOUTS`, for example `sparo`, `cls` or `gap`.
        sizes: as `dino_sparo.create_encoder` takes them: patch_size, num_slots, slot_dim, key_dim, group_size,
            img_size, drop_path_rate, in_chans.
    """
    from dino_sparo import create_encoder

    return create_encoder(arch=arch, readout=readout, **sizes)  # type: ignore[arg-type]


def _released(name: str, pretrained: bool = True, **settings: Any) -> nn.Module:
    """A model of facebookresearch/dino; see `dino_sparo.weights.hub.released_model`."""
    from dino_sparo.weights.hub import released_model

    return released_model(name, pretrained, **settings)


dino_vits16 = partial(_released, "dino_vits16")
dino_vits8 = partial(_released, "dino_vits8")
dino_vitb16 = partial(_released, "dino_vitb16")
dino_vitb8 = partial(_released, "dino_vitb8")
dino_resnet50 = partial(_released, "dino_resnet50")
dino_xcit_small_12_p16 = partial(_released, "dino_xcit_small_12_p16")
dino_xcit_small_12_p8 = partial(_released, "dino_xcit_small_12_p8")
dino_xcit_medium_24_p16 = partial(_released, "dino_xcit_medium_24_p16")
dino_xcit_medium_24_p8 = partial(_released, "dino_xcit_medium_24_p8")

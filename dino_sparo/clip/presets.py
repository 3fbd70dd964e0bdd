"""Name of a recipe -> the values of the options it stands for, with their origin.

Options that a recipe decides are None when nobody gave them; `apply_preset` fills in the recipe's values, then the
defaults. So a given option always wins, wherever it stands in the command.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A recipe.

    Attributes:
        origin: where its numbers come from.
        values: option -> value; options that are not named keep their defaults.
    """

    origin: str
    values: Mapping[str, Any]


# What holds without a preset, and where a preset says nothing. Towers, learning rate, betas, eps and weight decay are
# OpenCLIP's defaults for a ViT-B; patch, batch and warm-up are ours, for some 10^5 pairs on one machine.
DEFAULTS: dict[str, Any] = {
    "arch": "vit_base",
    "patch_size": 32,
    "img_size": 224,
    "sparo_slots": 64,
    "sparo_slot_dim": 64,
    "sparo_key_dim": 64,
    "embed_dim": 512,
    "text_width": 512,
    "text_heads": 8,
    "text_layers": 12,
    "context_length": 77,
    "epochs": 32,
    "batch_size": 256,
    "lr": 5e-4,
    "warmup_steps": 500,
    "weight_decay": 0.2,
    "beta1": 0.9,
    "beta2": 0.98,
    "eps": 1e-6,
    "precision": "auto",
}

_SPARO = (
    "SPARO, table 0.C.3 for the optimisation, tables 1 to 3 for the vision transformer (CLIP16 or CLIP32), section 4 "
    "for the slots; the rest is OpenCLIP's default, as appendix 0.C.1 says"
)
_CONCEPTUAL = {
    "patch_size": 16,
    "sparo_slots": 64,
    "batch_size": 4096,
    "warmup_steps": 3600,
    "weight_decay": 0.5,
    "precision": "bf16",
}

PRESETS: dict[str, Preset] = {
    "cc3m": Preset(_SPARO, {**_CONCEPTUAL, "epochs": 32}),
    "cc12m": Preset(_SPARO, {**_CONCEPTUAL, "epochs": 25}),
    "cc15m": Preset(_SPARO, {**_CONCEPTUAL, "epochs": 25}),
    "laion400m": Preset(
        _SPARO,
        {
            "patch_size": 32,
            "sparo_slots": 128,
            "epochs": 32,
            "batch_size": 32768,
            "warmup_steps": 2000,
            "weight_decay": 0.2,
            "precision": "bf16",
        },
    ),
}


def apply_preset(args: argparse.Namespace) -> None:
    """Give every option that is None its value: the preset's, else the default.

    Args:
        args: parsed options, changed in place; `args.preset` is a key of `PRESETS` or None.

    Raises:
        ValueError: the preset is unknown.
    """
    if args.preset is not None and args.preset not in PRESETS:
        raise ValueError(f"unknown preset {args.preset!r}; choose one of {sorted(PRESETS)}, or leave it out")
    chosen = PRESETS[args.preset].values if args.preset is not None else {}
    for name, default in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, chosen.get(name, default))


def with_default(text: str, option: str) -> str:
    """An option's help text, and its default, which a preset may change."""
    return f"{text} (default: {DEFAULTS[option]}, or the preset's)"

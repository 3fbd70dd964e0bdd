"""Name of a recipe -> the values of the options it stands for, with their origin.

Options that a recipe decides are None when nobody gave them; `apply_preset` fills in the recipe's values, then the
defaults. So a given option always wins, wherever it stands in the command.
"""

import argparse
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dino_sparo.choices import KEY_DIM, NUM_SLOTS, SLOT_DIM


@dataclass(frozen=True)
class Preset:
    """A recipe.

    Attributes:
        origin: where its numbers come from.
        values: option -> value; options that are not named keep their defaults.
    """

    origin: str
    values: Mapping[str, Any]


logger = logging.getLogger(__name__)

# What holds without a preset, and where a preset says nothing. Towers, learning rate, betas, eps and weight decay are
# OpenCLIP's defaults for a ViT-B; patch, batch and warm-up are ours, for some 10^5 pairs on one machine.
DEFAULTS: dict[str, Any] = {
    "arch": "vit_base",
    "patch_size": 32,
    "img_size": 224,
    "sparo_slots": NUM_SLOTS,
    "sparo_slot_dim": SLOT_DIM,
    "sparo_key_dim": KEY_DIM,
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
    "sparo_slots": NUM_SLOTS,
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


# Known only when the run's length is; see `fill_in_warmup`.
WARMUP = "warmup_steps"


def apply_preset(args: argparse.Namespace) -> None:
    """Give every option that is None its value: the preset's, else the default. The warm-up comes later.

    Args:
        args: parsed options, changed in place; `args.preset` is a key of `PRESETS` or None.

    Raises:
        ValueError: the preset is unknown.
    """
    if args.preset is not None and args.preset not in PRESETS:
        raise ValueError(f"unknown preset {args.preset!r}; choose one of {sorted(PRESETS)}, or leave it out")
    for name in DEFAULTS:
        if getattr(args, name) is None and name != WARMUP:
            setattr(args, name, _value(args.preset, name))


def fill_in_warmup(args: argparse.Namespace, total_steps: int) -> None:
    """Give the warm-up its value, if it is None: the preset's or the default, or a tenth of a run shorter than that.

    Args:
        args: parsed options, changed in place.
        total_steps: of the run.
    """
    if args.warmup_steps is not None:
        return
    wanted = _value(args.preset, WARMUP)
    args.warmup_steps = wanted if wanted <= total_steps else total_steps // 10
    if args.warmup_steps != wanted:
        logger.info(
            "--warmup_steps %d: the default of %d does not fit a run of %d steps",
            *(args.warmup_steps, wanted, total_steps),
        )


def _value(preset: str | None, name: str) -> Any:
    """The preset's value of an option, else the default."""
    return (PRESETS[preset].values if preset is not None else {}).get(name, DEFAULTS[name])


def with_default(text: str, option: str) -> str:
    """An option's help text, and its default, which a preset may change."""
    return f"{text} (default: {DEFAULTS[option]}, or the preset's)"

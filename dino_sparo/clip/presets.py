"""The recipes of CLIP's training, with their origin; see `image_text/recipes.py` for how options take them."""

from typing import Any

from dino_sparo.image_text.recipes import Preset, Recipes
from dino_sparo.runtime.choices import KEY_DIM, NUM_SLOTS, SLOT_DIM

# Values without a preset, and where a preset names none. Towers, learning rate, betas, eps and weight decay are
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

RECIPES = Recipes(DEFAULTS, PRESETS)

"""The recipes of OC-CLIP's training, with their origin; see `image_text/recipes.py` for how options take them."""

from typing import Any

from dino_sparo.image_text.recipes import Preset, Recipes

# CC12M's numbers (OC-CLIP, appendix A.8), but for a batch and a warm-up for some 10^5 pairs on one machine; betas and
# eps that the paper does not give are OpenCLIP's.
DEFAULTS: dict[str, Any] = {
    "arch": "vit_base",
    "patch_size": 16,
    "img_size": 224,
    "text_width": 256,
    "text_heads": 4,
    "text_layers": 6,
    "context_length": 20,
    "bind_dim": 256,
    "rel_dim": 128,
    "epochs": 20,
    "batch_size": 256,
    "lr": 5e-4,
    "lr_image": None,  # as lr
    "lr_text": None,
    "warmup_steps": 500,
    "warmup_image": None,  # as warmup_steps
    "warmup_text": None,
    "weight_decay": 0.5,
    "beta1": 0.9,
    "beta2": 0.98,
    "eps": 1e-6,
    "precision": "auto",
}

PRESETS: dict[str, Preset] = {
    "oc-coco": Preset(
        "OC-CLIP, appendix A.8 and table 11: both towers start from OpenCLIP's ViT-B/16 (--init_clip); warm-up of the "
        "new modules is not stated, so there is none",
        {
            "text_width": 512,
            "text_heads": 8,
            "text_layers": 12,
            "context_length": 77,
            "epochs": 100,
            "batch_size": 128,
            "lr": 2e-4,
            "lr_image": 1e-6,
            "lr_text": 2e-5,
            "warmup_steps": 0,
            "warmup_image": 5000,
            "warmup_text": 1000,
            "weight_decay": 0.2,
            "beta2": 0.95,
            "precision": "bf16",
        },
    ),
    "oc-cc12m": Preset(
        "OC-CLIP, appendix A.8, from scratch; the size of the images is not stated",
        {
            "batch_size": 4096,
            "warmup_steps": 1000,
            "precision": "bf16",
        },
    ),
    "oc-scenes": Preset(
        "ours, for the built-in scenes on a CPU: the recipe of image_text/choices.py",
        {
            "arch": "vit_micro",
            "patch_size": 8,
            "img_size": 48,
            "text_width": 64,
            "text_heads": 2,
            "text_layers": 3,
            "bind_dim": 64,
            "rel_dim": 32,
            "epochs": 8,
            "batch_size": 128,
            "lr": 1.5e-3,
            "warmup_steps": 200,
            "weight_decay": 0.1,
            "precision": "fp32",
        },
    ),
}

RECIPES = Recipes(DEFAULTS, PRESETS)

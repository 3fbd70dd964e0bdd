"""CLIP with SPARO: images and captions as slots of one shared space, on the encoder that DINO trains.

The second objective. The image encoder, its read-outs, the trainer, checkpoints and logs are the shared rooms of
`dino_sparo`; captions, pairs and evaluations are those of `dino_sparo.image_text`. Here is what CLIP adds:

    images, captions -> slots      config.py  model.py  convert.py  start.py
    slots -> loss, one step        loss.py  step.py
    a whole training               train.py  options.py (choices.py)  presets.py
    checkpoint -> evaluation       evaluated.py  adapter.py
    interventions on slots         slots/
    what slots look at             pictures/
    all of these, small            demo.py

Letters are those of `dino_sparo`, and m is the width of the linear bottleneck.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dino_sparo.clip.config import CLIPConfig
    from dino_sparo.clip.model import (
        CLIP,
        ClipOutput,
        LoadedClip,
        clip_description,
        create_clip,
        load_clip,
        normalize_slots,
    )
    from dino_sparo.image_text.text import TextConfig, TextEncoder, Tokens, tokenize

__all__ = [
    "CLIP",
    "CLIPConfig",
    "ClipOutput",
    "LoadedClip",
    "TextConfig",
    "TextEncoder",
    "Tokens",
    "clip_description",
    "create_clip",
    "load_clip",
    "normalize_slots",
    "tokenize",
]

# The modules import torch, which takes seconds: they are imported when one of their names is first used (PEP 562).
_MODULE_OF = {
    "CLIP": "dino_sparo.clip.model",
    "CLIPConfig": "dino_sparo.clip.config",
    "ClipOutput": "dino_sparo.clip.model",
    "LoadedClip": "dino_sparo.clip.model",
    "TextConfig": "dino_sparo.image_text.text",
    "TextEncoder": "dino_sparo.image_text.text",
    "Tokens": "dino_sparo.image_text.text",
    "clip_description": "dino_sparo.clip.model",
    "create_clip": "dino_sparo.clip.model",
    "load_clip": "dino_sparo.clip.model",
    "normalize_slots": "dino_sparo.clip.model",
    "tokenize": "dino_sparo.image_text.text",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])

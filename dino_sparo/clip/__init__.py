"""CLIP with SPARO: images and captions as slots of one shared space, on the encoder that DINO trains.

The second objective. The image encoder, its read-outs, the optimizer, checkpoints and logs are the shared stages of
`dino_sparo`; the files of this folder are what CLIP adds, in the order of the data flow:

    1  pairs -> batches            pairs.py  pair_sources.py  pair_tars.py  pair_tables.py  pair_captions.py
                                   pair_streams.py
    2  images, captions -> slots   text.py  readouts.py  config.py  model.py  convert.py
    3  slots -> loss, one step     loss.py  step.py
    4  a whole training            train.py  options.py (choices.py)  presets.py  start.py  validation.py
                                   zero_shot_probe.py
    5  checkpoint -> evaluation    protocol.py  encode.py; zero_shot.py (classes.py  prompts.py)  retrieval.py
                                   (caption_sets.py  image_files.py)  sugarcrepe.py (scene_pairs.py)  winoground.py
                                   probe.py  adapter.py  (evaluation_options.py)
    6  interventions on slots      slots.py  select.py  mask.py (mask_fit.py)  sweep.py (plots.py)
                                   pictures.py (words.py  concepts.py  sheet.py  pictures_html.py)
                                   (slot_options.py)
    7  all of these, small         demo.py

Letters are those of `dino_sparo`, and besides

    M width of the encoding (L*V for `sparo`)      W width of the text's tokens
    m width of the linear bottleneck               K codes of the discrete bottleneck
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

"""CLIP with SPARO: images and captions as slots of one shared space, on the encoder that DINO trains.

The second objective. The image encoder, its read-outs, the optimizer, checkpoints and logs are the shared stages of
`dino_sparo`; the files of this folder are what CLIP adds, in the order of the data flow:

    1  pairs -> batches            pairs.py  pair_sources.py  pair_tars.py  pair_tables.py  pair_captions.py
                                   pair_streams.py
    2  images, captions -> slots   text.py  readouts.py  config.py  model.py  convert.py
    3  slots -> loss, one epoch    loss.py  engine.py
    4  a whole training            train.py  options.py  presets.py  state.py  zero_shot_probe.py
    5  checkpoint -> evaluation    protocol.py  encode.py; zero_shot.py (classes.py  prompts.py)  retrieval.py
                                   (caption_sets.py  image_files.py)  sugarcrepe.py (scene_pairs.py)  winoground.py
                                   probe.py  adapter.py
    6  interventions on slots      slots.py  select.py  mask.py (mask_fit.py)  sweep.py (plots.py)
                                   pictures.py (words.py  concepts.py  sheet.py  pictures_html.py)
    7  all of these, small         demo.py

Letters are those of `dino_sparo`, and besides

    M width of the encoding (L*V for `sparo`)      W width of the text's tokens
    m width of the linear bottleneck               K codes of the discrete bottleneck
"""

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
from dino_sparo.clip.text import TextConfig, TextEncoder, Tokens, tokenize

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

"""CLIP with SPARO: images and captions as slots of one shared space, on the encoder that DINO trains.

The image encoder, its read-outs, the trainer, checkpoints and logs are those of all objectives; captions, pairs and
evaluations are those of `image_text/`. CLIP adds:

    images, captions -> slots      config.py  model.py
    slots -> loss                  loss.py
    a whole training               train.py  options.py
    checkpoint -> evaluation       load.py
    analysis of slots              slots/

Letters are those of `dino_sparo`, and m is the width of the linear bottleneck.
"""

from typing import TYPE_CHECKING

from dino_sparo.runtime import lazy_names

if TYPE_CHECKING:
    from dino_sparo.clip.config import CLIPConfig
    from dino_sparo.clip.model import CLIP, create_clip, load_clip, normalize_slots
    from dino_sparo.image_text.towers import tokenize

__all__ = ["CLIP", "CLIPConfig", "create_clip", "load_clip", "normalize_slots", "tokenize"]

# The modules import torch, which takes seconds.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "clip.config": ("CLIPConfig",),
        "clip.model": ("CLIP", "create_clip", "load_clip", "normalize_slots"),
        "image_text.towers": ("tokenize",),
    },
)

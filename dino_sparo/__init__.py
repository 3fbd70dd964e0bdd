"""dino_sparo: DINO and CLIP pretraining of a vision transformer that is read out as SPARO slots.

The rooms of the house, in the order of the data flow:

    images -> crops                sources/  scenes.py  data.py  crops.py  distort.py
    crops -> tokens -> slots       backbone.py  readout.py (pooling.py, readout_table.py)  encoder.py
    weights <-> files              checkpoint.py (open_clip_names.py)  export.py
    a run, for any objective       training/  runtime/
    DINO                           dino/        head.py  loss.py  teacher.py  step.py
    CLIP                           clip/        model.py  loss.py  step.py; slots/  pictures/
    OC-CLIP                        oc_clip/     graphs.py  binding.py  scoring.py  pair_scores.py  loss.py
    what an encoder is worth       evaluation/  k-NN, linear probe, attention, atlas
    images with captions           image_text/  text.py  pairs/  evaluation/
    commands                       __main__.py  submit.py

`docs/map.md` lists every file.

One letter, one meaning, in every shape. Equations keep the letters of their papers and say what they mean.

    B batch          D token width            K prototypes       H, W pixels, height first
    N tokens         L slots                  S student crops    P patch side in pixels
    A key width      V slot width             T teacher crops    C channels
    M width of an encoding, L*V for `sparo`   F width of features
    E entities       R relations, of a graph  G slots sharing a key
    U captions or their graphs, where there is not one per image
"""

import importlib
from typing import TYPE_CHECKING, Any

from dino_sparo._version import __version__

if TYPE_CHECKING:
    from dino_sparo.checkpoint import CheckpointError, load_checkpoint, load_encoder
    from dino_sparo.crops import EvalTransform, MultiCropAugmentation
    from dino_sparo.dino.head import DINOHead, DINONetwork
    from dino_sparo.dino.loss import DINOLoss
    from dino_sparo.encoder import Encoder, EncoderConfig, create_encoder
    from dino_sparo.readout import ReadoutOutput, Sparo

__all__ = [
    "CheckpointError",
    "DINOHead",
    "DINOLoss",
    "DINONetwork",
    "Encoder",
    "EncoderConfig",
    "EvalTransform",
    "MultiCropAugmentation",
    "ReadoutOutput",
    "Sparo",
    "__version__",
    "create_encoder",
    "load_checkpoint",
    "load_encoder",
]

# The modules import torch, which takes seconds: they are imported when one of their names is first used (PEP 562).
_MODULE_OF = {
    "CheckpointError": "dino_sparo.checkpoint",
    "DINOHead": "dino_sparo.dino.head",
    "DINOLoss": "dino_sparo.dino.loss",
    "DINONetwork": "dino_sparo.dino.head",
    "Encoder": "dino_sparo.encoder",
    "EncoderConfig": "dino_sparo.encoder",
    "EvalTransform": "dino_sparo.crops",
    "MultiCropAugmentation": "dino_sparo.crops",
    "ReadoutOutput": "dino_sparo.readout",
    "Sparo": "dino_sparo.readout",
    "create_encoder": "dino_sparo.encoder",
    "load_checkpoint": "dino_sparo.checkpoint",
    "load_encoder": "dino_sparo.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])

"""dino_sparo: DINO and CLIP pretraining of a vision transformer that is read out as SPARO slots.

The rooms of the house, in the order of the data flow:

    images -> crops                sources/  scenes.py  data.py  crops.py  distort.py
    crops -> tokens -> slots       backbone.py  readout.py (pooling.py, readout_table.py)  encoder.py
    weights <-> files              checkpoint*.py  open_clip_names.py  initialize.py  export.py
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

from typing import TYPE_CHECKING

from dino_sparo._version import __version__
from dino_sparo.runtime.lazy import lazy_names

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

# The modules import torch, which takes seconds.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "checkpoint": ("CheckpointError", "load_checkpoint", "load_encoder"),
        "crops": ("EvalTransform", "MultiCropAugmentation"),
        "dino.head": ("DINOHead", "DINONetwork"),
        "dino.loss": ("DINOLoss",),
        "encoder": ("Encoder", "EncoderConfig", "create_encoder"),
        "readout": ("ReadoutOutput", "Sparo"),
    },
)

"""dino_sparo: DINO and CLIP pretraining of a vision transformer that is read out as SPARO slots.

The folders, in the order of the data flow; `docs/architecture.md` has a sentence on each:

    images -> batches of crops     data/
    crops -> tokens -> slots       models/
    weights <-> files              weights/
    a run, for any objective       training/  runtime/
    objectives                     dino/  simdino/  ibot/, on distillation/; clip/  oc_clip/, on image_text/
    what an encoder is worth       evaluation/
    pictures                       draw/
    commands                       commands.py  __main__.py  submit.py; as calls from Python: api.py

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
from dino_sparo.runtime import lazy_names

# ruff: noqa: F401
if TYPE_CHECKING:
    from dino_sparo.api import (
        Result,
        attention,
        embed,
        knn,
        linear,
        train,
        train_clip,
        train_ibot,
        train_oc_clip,
        train_simdino,
    )
    from dino_sparo.data.crops import MultiCropAugmentation
    from dino_sparo.data.views import EvalTransform
    from dino_sparo.distillation.head import DINOHead
    from dino_sparo.distillation.loss import DINOLoss
    from dino_sparo.distillation.network import DINONetwork, EncoderWithHead
    from dino_sparo.evaluation.embed.store import load_embeddings
    from dino_sparo.models.encoder import Encoder, EncoderConfig, create_encoder
    from dino_sparo.models.readout import ReadoutOutput, Sparo
    from dino_sparo.weights.checkpoint import load_checkpoint
    from dino_sparo.weights.encoder import load_encoder
    from dino_sparo.weights.file import CheckpointError

# The modules import torch, which takes seconds.
_NAMES = {
    "api": (
        "Result",
        "attention",
        "embed",
        "knn",
        "linear",
        "train",
        "train_clip",
        "train_ibot",
        "train_oc_clip",
        "train_simdino",
    ),
    "evaluation.embed.store": ("load_embeddings",),
    "weights.checkpoint": ("load_checkpoint",),
    "weights.encoder": ("load_encoder",),
    "weights.file": ("CheckpointError",),
    "data.crops": ("MultiCropAugmentation",),
    "data.views": ("EvalTransform",),
    "distillation.head": ("DINOHead",),
    "distillation.loss": ("DINOLoss",),
    "distillation.network": ("DINONetwork", "EncoderWithHead"),
    "models.encoder": ("Encoder", "EncoderConfig", "create_encoder"),
    "models.readout": ("ReadoutOutput", "Sparo"),
}
__all__ = ["__version__", *(name for names in _NAMES.values() for name in names)]
__getattr__, __dir__ = lazy_names(__name__, _NAMES)

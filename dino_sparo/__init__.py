"""dino_sparo: DINO pretraining of a vision transformer that is read out as SPARO slots.

The files of this package are the stages of the data flow, in order:

    1  images -> crops             sources/  scenes.py  data.py  crops.py  distort.py
    2  crops -> tokens -> slots    backbone.py  readout.py  encoder.py
    3  encoding -> logits -> loss  head.py  loss.py
    4  one step, one epoch         optim.py  teacher.py  engine.py
    5  checkpoint -> evaluation    checkpoint.py  evaluation/  export.py
       plumbing                    distributed.py  preemption.py  logs.py  cli.py

One letter, one meaning, in every docstring and shape:

    B batch                D token width     K prototypes       H, W pixels, height first
    N tokens               L slots           S student crops    P patch side in pixels
    A key width            V slot width      T teacher crops    C channels
                           G slots sharing a key                F features of a probe
"""

from dino_sparo._version import __version__
from dino_sparo.checkpoint import CheckpointError, load_checkpoint, load_encoder
from dino_sparo.crops import EvalTransform, MultiCropAugmentation
from dino_sparo.encoder import Encoder, EncoderConfig, create_encoder
from dino_sparo.head import DINOHead, DINONetwork
from dino_sparo.loss import DINOLoss
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

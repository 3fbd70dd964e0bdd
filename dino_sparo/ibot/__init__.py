"""iBOT, the objective of DINOv2: DINO on whole crops, and the same comparison for the patches that the student misses.

options.py    the options of training, without torch
mask.py       which patches of the global crops are masked
head.py       the mask token and the heads; student and teacher
loss.py       logits -> loss of images and of patches; centring, Sinkhorn-Knopp; Gram anchoring
step.py       one step
train.py      options -> networks, loss, Gram teacher; collapse
"""

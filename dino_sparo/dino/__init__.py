"""DINO: its options, step and objective. Head, loss and KoLeo are in distillation/, because iBOT uses them too.

options.py    the options of training, without torch
step.py       one step: the paper's algorithm 1
train.py      options -> networks with their heads, loss
"""

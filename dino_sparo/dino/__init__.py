"""DINO: what it adds to student, teacher and trainer; head, loss and KoLeo, which iBOT shares, stand in distillation/.

options.py    the options of training, without torch
step.py       one step: the paper's algorithm 1
train.py      options -> networks with their heads, loss
"""

"""DINO: what it adds to the encoder and the trainer.

options.py    the options of training, without torch
step.py       one step: the paper's algorithm 1
train.py      options -> student, teacher, loss, data; what is looked at after an epoch
"""

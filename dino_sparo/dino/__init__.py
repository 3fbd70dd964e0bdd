"""DINO: what it adds to student, teacher and trainer.

options.py    the options of training, without torch
step.py       one step: the paper's algorithm 1
head.py       encoding -> logits
koleo.py      encodings -> KoLeo, a regulariser
loss.py       logits -> loss; the center; collapse
train.py      options -> networks with their heads, loss
demo.py       trained, evaluated and drawn in minutes
"""

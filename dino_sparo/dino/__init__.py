"""DINO: what it adds to the encoder and the trainer.

options.py    the options of training, without torch
step.py       one step: the paper's algorithm 1
head.py       encoding -> logits
loss.py       logits -> loss; the center; collapse
teacher.py    the moving average
train.py      options -> student, teacher, loss, data; evaluation after an epoch
demo.py       trained, evaluated and drawn in minutes
"""

"""The base of objectives with a student and a teacher: DINO, SimDINO and iBOT.

options.py     the options of their training, without torch
network.py     the type of student and teacher
head.py        encoding -> logits over prototypes, for DINO and iBOT
loss.py        logits -> DINO's loss; the center; collapse
koleo.py       encodings -> KoLeo, a regulariser
initialize.py  a file of weights -> student, teacher and loss at the start
step.py        the end of a step: gradients -> student -> teacher, its moving average
objective.py   options -> data, student, teacher, schedules, optimizer; evaluation after an epoch
"""

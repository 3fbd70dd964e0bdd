"""DINO: self-distillation without labels, the first objective.

options.py    the options of training, without torch
"""

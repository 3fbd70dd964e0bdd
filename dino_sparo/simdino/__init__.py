"""SimDINO: DINO with a coding rate in place of prototypes, center and temperatures.

options.py    the options of training, without torch
head.py       encoding -> feature of unit length
loss.py       features -> loss: compression and expansion
train.py      options -> networks with their heads, loss; one step
"""

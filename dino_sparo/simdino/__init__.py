"""SimDINO: DINO with a coding rate in place of prototypes, center and temperatures.

options.py    the options of training, without torch
loss.py       features -> loss: compression and expansion
train.py      head: encoding -> feature of unit length; options -> networks, loss; one step
"""

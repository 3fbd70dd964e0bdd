"""The base of objectives with a student and a teacher: DINO and SimDINO.

options.py     the options of their training, without torch
network.py     the type of student and teacher
initialize.py  a file of weights -> student, teacher and loss at the start
step.py        the end of a step: gradients -> student -> teacher, its moving average
objective.py   options -> data, student, teacher, schedules, optimizer; evaluation after an epoch
"""

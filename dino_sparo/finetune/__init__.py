"""Fine-tuning: an encoder and a linear head, trained together on labelled images.

options.py   the options, without torch
train.py     options -> data, network, its moving average, schedules, one step, validation
result.py    the log of a run -> its result file
"""

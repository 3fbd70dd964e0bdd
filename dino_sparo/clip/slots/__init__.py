"""Interventions on the slots of a CLIP.

subsets.py     a model with some of its slots, or with weighted ones
select.py      which slots classify well
mask.py        weights that tell true from false captions
"""
